"""What the compiler makes of every kernel for every card we name: registers, stack, shared memory, and of the decode
kernel the instructions of an element by pipe.

    python -m examples.measure.compile.compile_matrix  # all, half an hour on one core
    python -m examples.measure.compile.compile_matrix 75 90  # these targets; the others stay as they are

Writes examples/results/compile_matrix.json. Needs no GPU; Triton's own cache makes a second run shorter.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

import triton

from examples.measure.compile import sass
from examples.measure.compile.builds import BUILDERS, launched
from examples.provenance import RESULTS
from tq_hf import PRESETS

TARGETS: tuple[int | str, ...] = (75, 80, 86, 89, 90, 100, "gfx942")
DIMS = (64, 128, 256)
PREFIX = "4bit_nc"
"""The preset whose kernel of many queries is compiled: it takes as long as all others together."""
PATH = RESULTS / "compile_matrix.json"

SPILLS = ("LDL", "STL", "scratch_")
"""Opcodes that read or write a thread's stack."""

Row = dict[str, Any]
Rows = dict[tuple[str, int, str], Row]


def name_of(arch: int | str) -> str:
    """A target as it is written: sm_75."""
    return f"sm_{arch}" if isinstance(arch, int) else arch


def used(kernel: str, arch: int | str, preset: str, dim: int) -> dict[str, Any]:
    """Resources of a kernel; for the decode kernel, also by element."""
    bits = PRESETS[preset].key_bits, PRESETS[preset].value_bits
    compiled = BUILDERS[kernel](arch, bits, dim=dim)
    found = {**sass.resources(compiled)._asdict(), "instructions": len(sass.code(compiled))}
    if kernel == "decode":
        on = sass.plan(arch, *bits, dim=dim)
        found["per_element"] = sass.per_element(compiled, on, dim, sass.target_of(arch).fragments)
        loop = sass.inner_loop(compiled)
        found["spilled_in_loop"] = sum(count for opcode, count in loop.items() if opcode.startswith(SPILLS))
    return found


def load() -> dict[str, Any]:
    """The results file; empty if there is none."""
    return json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}


def save(rows: Rows) -> None:
    """Write the results file, a line for each row."""
    head = {"command": "python -m examples.measure.compile.compile_matrix", "triton": triton.__version__}
    ordered = [rows[key] for key in everything(TARGETS) if key in rows]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in ordered)
    PATH.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def everything(targets: Iterable[int | str]) -> list[tuple[str, int, str]]:
    """Keys of the rows of these targets, in order. (For AMD, heads of 256 channels take minutes each.)"""
    dims = {arch: DIMS if isinstance(arch, int) else DIMS[:2] for arch in targets}
    return [(name_of(arch), dim, preset) for arch in dims for dim in dims[arch] for preset in PRESETS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=[str(target) for target in TARGETS])
    options = parser.parse_args()
    chosen = {name_of(target): target for target in TARGETS if str(target) in options.targets}
    rows: Rows = {(row["target"], row["dim"], row["preset"]): row for row in load().get("rows", [])}
    for kernel in BUILDERS:
        for key in everything(chosen.values()):
            target, dim, preset = key
            row = rows.setdefault(key, {"target": target, "dim": dim, "preset": preset})
            if launched(kernel, chosen[target], dim) and (kernel != "prefix" or preset == PREFIX):
                row[kernel] = used(kernel, chosen[target], preset, dim)
                save(rows)
        print(kernel, flush=True)


if __name__ == "__main__":
    main()
