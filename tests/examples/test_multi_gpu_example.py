"""`examples/multi_gpu.py` finds a pass key on a CPU, in one process and with heads split over two."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "multi_gpu.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def output(*launcher: str) -> str:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(SCRIPT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("launcher", [(), pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["layers", "heads"])
def test_the_pass_key_is_found_and_each_process_holds_its_share(launcher: tuple[str, ...]) -> None:
    text = output(*launcher)
    assert text.count("314159>>") == 1
    held = [float(size) for size in re.findall(r"process \d: ([\d.]+) MiB on cpu", text)]
    assert len(held) == (2 if launcher else 1)
    assert held[0] == pytest.approx(1.69 / len(held), abs=0.02)
