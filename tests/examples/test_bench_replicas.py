"""`bench_replicas`: what is run, answers compared, and a whole measurement over CPU processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.measure.report.tables import RENDERERS
from examples.measure.speed import bench_replicas
from examples.measure.speed.bench_replicas import Run, behind, compared, falling_lengths, runs_of
from examples.provenance import ROOT
from tests.support.batching_cases import model_of, prompts

COMMAND = [sys.executable, "-m", "examples.measure.speed.bench_replicas", "--tiny", "--layers", "1", "--requests", "4"]


def test_what_four_gpus_measure() -> None:
    assert list(runs_of(4, 1, 6)) == [
        Run(1, 1, "one", 6),
        Run(2, 1, "weak", 12),
        Run(4, 1, "weak", 24),
        Run(2, 1, "strong", 6),
        Run(4, 1, "strong", 6),
    ]
    assert list(runs_of(4, 2, 6)) == [Run(1, 2, "strong", 6), Run(2, 2, "strong", 6)]
    assert list(runs_of(4, 4, 6)) == [Run(1, 4, "strong", 6)]


@pytest.mark.parametrize("requests", [1, 4, 256])
def test_a_batch_shrinks_through_all_sizes_that_are_captured(requests: int) -> None:
    lengths = falling_lengths(requests)
    sizes = [sum(length > step for length in lengths) for step in range(max(lengths))]
    assert sizes == [size for size in sorted(set(sizes), reverse=True) for _ in range(4)]
    assert sizes[::4] == [1 << i for i in reversed(range(requests.bit_length()))]


def test_answers_that_differ_are_judged_by_the_first_token_that_does() -> None:
    model, inputs = model_of(), prompts([150, 40])
    model.set_attn_implementation("turboquant")
    ids = torch.tensor([inputs[0]])
    logits = model(ids).logits[0, -1]
    first, second = logits.topk(2).indices.tolist()
    gap = float((logits[first] - logits[second]) / logits.std())
    assert behind(model, None, inputs[0], [], [first, second]) == pytest.approx(gap, rel=1e-3)
    expected = {0: [first, 1, 2], 1: [5, 6, 7], 9: [1, 2, 3]}
    found = compared(model, None, inputs, {0: [second, 9, 9], 1: [5, 6, 7], 3: [0, 0, 0]}, expected)
    assert found["furthest_behind"] == pytest.approx(gap, rel=1e-3)
    assert (found["answers"], found["equal"], found["looked_at"], found["near_ties"]) == (2, 1, 1, int(gap < 0.05))


def test_launches_that_take_too_long_are_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[str] = []

    def launched(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        launches.append(command[-1])
        return real([sys.executable, "-c", "import time; time.sleep(600)"])

    real = subprocess.Popen
    monkeypatch.setattr(
        bench_replicas, "subprocess", SimpleNamespace(Popen=launched, TimeoutExpired=subprocess.TimeoutExpired)
    )
    output = tmp_path / "replicas.json"
    monkeypatch.setattr(sys, "argv", ["bench_replicas", "--tp", "1", "2", "--output", str(output), "--seconds", "0.1"])
    monkeypatch.setattr(bench_replicas, "ON_GPU", False)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(
        SystemExit, match=r"Not all was measured with \[1, 2\] GPUs a replica: a process has died, or time ran out."
    ):
        bench_replicas.main()
    assert launches == ["1", "2"] and json.loads(output.read_text(encoding="utf-8"))["rows"] == []


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="processes meet over gloo")
def test_replicas_and_shards_are_measured_and_answer_as_one_process(tmp_path: Path) -> None:
    output = tmp_path / "replicas.json"
    chosen = ["--gpus", "2", "--tp", "1", "2", "--lengths", "150", "300", "--new-tokens", "6", "--output", str(output)]
    path = os.pathsep.join([str(ROOT), *sys.path])
    run = subprocess.run(
        [*COMMAND, *chosen],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr[-8000:]
    record = json.loads(output.read_text(encoding="utf-8"))
    rows = record["rows"]
    assert [Run(*(row[name] for name in Run._fields)) for row in rows] == [*runs_of(2, 1, 4), *runs_of(2, 2, 4)]
    assert [sum(row["prompts_by_replica"]) for row in rows] == [4, 8, 4, 4]
    for row in rows[1:]:
        agreement = row["agreement"]
        assert agreement["answers"] == 4 and agreement["equal"] + agreement["near_ties"] == 4
    assert RENDERERS["replicas"](record).count("\n| ") == 2 + len(rows)
