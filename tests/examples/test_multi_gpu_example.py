"""`examples/multi_gpu.py` finds a pass key on a CPU, in one process and with heads split over two."""

import re
import runpy
import sys

import pytest

from tests.support.ranks import ROOT, run_ranks

SCRIPT = str(ROOT / "examples" / "multi_gpu.py")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["layers", "heads"])
def test_the_pass_key_is_found_and_each_process_holds_its_share(
    ranks: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if ranks == 1:
        monkeypatch.setattr(sys, "argv", [SCRIPT])
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        runpy.run_path(SCRIPT, run_name="__main__")
        text = capsys.readouterr().out
    else:
        text = "".join(run_ranks(SCRIPT, ranks=ranks))
    assert text.count("314159>>") == 1
    held = [float(size) for size in re.findall(r"process \d: ([\d.]+) MiB on cpu", text)]
    assert held == [pytest.approx(1.69 / ranks, abs=0.02)] * ranks
