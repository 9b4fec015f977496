"""What the command prints: tables of 80 columns, progress, errors; and how little it imports for its help."""

import io
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.test_packaging import run
from tq_hf import PRESETS
from tq_hf.memory import MemoryFootprint
from tq_hf.tools import compare, display, estimate, sweep
from tq_hf.tools.sweep import Sweep

LARGE = MemoryFootprint(9 * 10**12, 10**11, 11 * 10**9, 9 * 10**12, 10**13)


def compared(console: Console) -> list[str]:
    answers = [compare.Answer("DynamicCache", [1, 2, 3], 10**12, 1234.5, 12345.6)]
    answers += [compare.Answer(name, [1, 4, 3], 10**11, 987.6, 23456.7, 1.2345e-5, 0.98765) for name in PRESETS]
    compare.print_numbers(answers, console)
    return ["DynamicCache", *PRESETS, "953,674.3", "1234.50 s", "23456.7", "1.2e-05", "98.8%", "token 2"]


def swept(console: Console) -> list[str]:
    kl = {layer: dict.fromkeys(PRESETS, 1.23e-4) for layer in range(126)}
    result = Sweep(10**6, dict.fromkeys(PRESETS, 1.23e-4), dict.fromkeys(PRESETS, 10**11), kl, kl)
    sweep.print_sweep(result, console)
    return [*PRESETS, "125", "all", "1.2e-04", "95,367.4"]


def estimated(console: Console, free: int | None) -> list[str]:
    class Model:
        notes, max_positions, weight_bytes, quantization = ["A note."], 10**6, 10**11, "gptq"

    layers = "2.5bit_nc," + ",".join(f"{layer}=k8v4" for layer in range(9))
    rows = [estimate.Estimate(name, LARGE, LARGE, 10**10, 10**9) for name in (None, *PRESETS, layers)]
    model: Any = Model()
    estimate.print_table(estimate.Report("a/model", model, 10**6, 10**3, None, free, free, rows), console)
    return ["DynamicCache", *PRESETS, "0=k8v4", "181.1%", *(["10,000,000,000"] if free else ["8,475.0"])]


@pytest.mark.parametrize(
    "show",
    [compared, swept, lambda console: estimated(console, None), lambda console: estimated(console, 10**12)],
    ids=["compare", "sweep", "estimate", "estimate --gpu-memory"],
)
def test_no_cell_of_a_table_is_cut_at_80_columns(show: Any) -> None:
    console = Console(width=80, file=io.StringIO())
    cells = show(console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    table = [line for line in printed.splitlines() if not line.rstrip().endswith(".")]
    assert "…" not in printed and max(len(line.rstrip()) for line in table[1:]) <= 80
    assert [cell for cell in cells if cell not in printed] == []


def test_what_takes_long_is_said_where_there_is_no_terminal(capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "PATIENCE", 0)
    with display.working("Loading it"):
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()
    assert capfd.readouterr() == ("", "Loading it ...\n")
    monkeypatch.setattr(display, "PATIENCE", 1e6)
    with display.working("Loading it"):
        pass
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "error, says",
    [
        (FileNotFoundError(2, "No such file or directory", "nope.txt"), "nope.txt: No such file or directory."),
        (OSError("There is no file x; `/save x` writes one."), "There is no file x; `/save x` writes one."),
    ],
)
def test_an_error_of_a_file_names_the_file_first(error: Exception, says: str) -> None:
    console = Console(width=80, file=io.StringIO())
    display.print_error(error, console)
    assert console.file.getvalue() == f"Error: {says}\n"  # type: ignore[attr-defined]


AS_COMMAND = """
import sys, typer, rich.console
sys.argv = ["/somewhere/bin/tq-hf", *{arguments}]
before = set(sys.modules)
from tq_hf.tools.cli import app
try:
    app()
except SystemExit as end:
    assert not end.code
added = set(sys.modules) - before
print()
heavy = {{"torch", "transformers", "triton", "numpy", "tq_kernels"}}
print(sorted({{name.partition(".")[0] for name in added}} & heavy))
print(len({{name for name in added if name.startswith("tq_")}}), "of ours")
"""


@pytest.mark.parametrize("arguments", [["--help"], ["estimate", "--help"], ["serve", "--help"], ["--version"]], ids=str)
def test_help_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    paths = f"import sys; sys.path[:0] = [{str(root)!r}, {str(root / 'kernels')!r}]\n"
    *_, heavy, ours = run(sys.executable, paths + AS_COMMAND.format(arguments=arguments), tmp_path).splitlines()
    assert heavy == "[]" and int(ours.split()[0]) <= 4
