"""`examples/lm_eval_turboquant.py` on a task of its own, where lm-evaluation-harness is installed (it is an extra)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import needle_data as needle
import pytest
from report import ROOT, SHIPPED_MODEL

pytest.importorskip("lm_eval", reason="lm-eval is an extra")
pytestmark = pytest.mark.slow

TASK = """
task: needle
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8}}
metric_list: [{{metric: {metric}}}]
"""


def run(folder: Path, kind: str, metric: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The example on documents of one pass key each."""
    pairs = (needle.passkey_prompt(600, depth, seed=7) for depth in (0.1, 0.5, 0.8))
    lines = [json.dumps({"prompt": prompt, "answer": answer + needle.TERMINATOR}) for prompt, answer in pairs]
    (folder / "data.json").write_text("\n".join(lines), encoding="utf-8")
    (folder / "needle.yaml").write_text(TASK.format(data=folder / "data.json", kind=kind, metric=metric))
    script = ROOT / "examples" / "lm_eval_turboquant.py"
    command = [sys.executable, str(script), "--model", str(SHIPPED_MODEL), "--tasks", "needle", "--device", "cpu"]
    command += ["--include-path", str(folder), "--dtype", "float32", *options]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_pass_keys_are_scored_with_each_cache(tmp_path: Path) -> None:
    output = tmp_path / "metrics.json"
    caches = ["plain", "4bit_nc", "auto"]
    done = run(
        tmp_path, "generate_until", "exact_match", "--caches", *caches, "--chunk", "128", "--output", str(output)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    metrics = json.loads(output.read_text(encoding="utf-8"))["metrics"]
    assert {cache: found["needle"]["exact_match,none"] for cache, found in metrics.items()} == dict.fromkeys(caches, 1)


def test_a_task_that_never_reads_the_cache_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "loglikelihood", "acc", "--caches", "4bit_nc")
    assert done.returncode != 0 and "generate_until" in done.stderr
