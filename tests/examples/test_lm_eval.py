"""`examples/lm_eval_turboquant.py` on the task of the shipped model, where lm-evaluation-harness is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.provenance import ROOT, SHIPPED_MODEL

pytest.importorskip("lm_eval", reason="lm-eval is an extra")
pytestmark = pytest.mark.slow

TASKS = ROOT / "examples" / "tasks"


def run(home: Path, tasks: Path, task: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The example on three questions of a task in the folder `tasks`."""
    script = ROOT / "examples" / "lm_eval_turboquant.py"
    command = [sys.executable, str(script), "--model", str(SHIPPED_MODEL), "--include-path", str(tasks)]
    command += ["--tasks", task, "--limit", "3", "--device", "cpu", "--dtype", "float32", *options]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(home)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_facts_are_recalled_with_each_cache(tmp_path: Path) -> None:
    output = tmp_path / "metrics.json"
    caches = ["plain", "4bit_nc", "auto"]
    done = run(tmp_path, TASKS, "needle_recall", "--caches", *caches, "--chunk", "128", "--output", str(output))
    assert done.returncode == 0, done.stderr[-2000:]
    metrics = json.loads(output.read_text(encoding="utf-8"))["metrics"]
    found = {cache: scores["needle_recall"]["exact_match,none"] for cache, scores in metrics.items()}
    assert found == dict.fromkeys(caches, 1)


def test_a_task_that_never_reads_the_cache_is_refused(tmp_path: Path) -> None:
    task = f"include: {TASKS / 'needle_recall.yaml'}\ntask: needle_likelihood\noutput_type: loglikelihood\n"
    (tmp_path / "needle_likelihood.yaml").write_text(task + "metric_list: [{metric: acc}]\n", encoding="utf-8")
    done = run(tmp_path, tmp_path, "needle_likelihood", "--caches", "4bit_nc")
    assert done.returncode != 0 and "generate_until" in done.stderr
