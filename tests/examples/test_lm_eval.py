"""`examples/lm_eval_turboquant.py` on the task of the shipped model, where lm-evaluation-harness is installed."""

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


def run(
    home: Path, tasks: Path, task: str, *options: str, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """The example on three questions of a task in the folder `tasks`."""
    command = [sys.executable, *launcher, "-m", "examples.lm_eval_turboquant"]
    command += ["--model", str(SHIPPED_MODEL), "--include-path", str(tasks)]
    command += ["--tasks", *task.split(), "--limit", "3", "--device", "cpu", "--dtype", "float32", *options]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(home)}
    environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)


def test_the_table_of_a_model_is_made_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    """All that is done for a model with weights, on the one that is shipped: scores, errors, a table."""
    output, tasks = tmp_path / "metrics.json", "needle_recall needle_text"
    presets = ["k8v4", "4bit_nc", "3bit_nc", "2bit_nc"]
    options = ["--chunk", "128", "--output", str(output)]
    done = run(tmp_path, TASKS, tasks, "--caches", "plain", "4bit_nc", *options)
    assert done.returncode == 0, done.stderr[-2000:]
    first = json.loads(output.read_text(encoding="utf-8"))["metrics"]
    done = run(tmp_path, TASKS, tasks, "--caches", "plain", *presets, *options)
    assert done.returncode == 0, done.stderr[-2000:]
    metrics = json.loads(output.read_text(encoding="utf-8"))["metrics"]
    assert list(metrics) == ["plain", "4bit_nc", "k8v4", "3bit_nc", "2bit_nc"]
    assert {cache: metrics[cache] for cache in first} == first
    assert "plain (1 of 5)" not in done.stdout and "k8v4 (2 of 5), needle_text" in done.stdout
    for scores in metrics.values():
        assert scores["needle_recall"]["exact_match"] == {"value": 1.0, "error": 0.0}
        assert 0 < scores["needle_text"]["word_perplexity"]["error"] < scores["needle_text"]["word_perplexity"]["value"]
    texts = {cache: scores["needle_text"]["byte_perplexity"]["value"] for cache, scores in metrics.items()}
    assert texts["plain"] < texts["2bit_nc"] and abs(texts["k8v4"] - texts["plain"]) < abs(
        texts["2bit_nc"] - texts["plain"]
    )
    assert done.stdout.count("| needle_text: word_perplexity |") == 1
    refused = run(tmp_path, TASKS, "needle_recall", "--caches", "plain", *options)
    assert refused.returncode != 0 and "Give another `--output`" in refused.stderr


def test_facts_are_recalled_with_each_cache(tmp_path: Path) -> None:
    output = tmp_path / "metrics.json"
    caches = ["plain", "4bit_nc"]
    done = run(tmp_path, TASKS, "needle_recall", "--caches", *caches, "--chunk", "128", "--output", str(output))
    assert done.returncode == 0, done.stderr[-2000:]
    metrics = json.loads(output.read_text(encoding="utf-8"))["metrics"]
    found = {cache: scores["needle_recall"]["exact_match"]["value"] for cache, scores in metrics.items()}
    assert found == dict.fromkeys(caches, 1)


def test_two_processes_share_the_questions_and_find_what_one_finds(tmp_path: Path) -> None:
    """`accelerate launch --cpu` starts one process however many it is asked for; accelerate knows those of torchrun."""
    found, launcher = [], ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for processes in ((), launcher):
        output = tmp_path / f"{len(found)}.json"
        options = ["--caches", "4bit_nc", "--chunk", "128", "--output", str(output)]
        done = run(tmp_path, TASKS, "needle_recall needle_text", *options, launcher=processes)
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout.count("| needle_text: word_perplexity |") == 1
        # Of three texts two are one process's, and the other's third is the second again.
        assert ("Running loglikelihood requests: 100%|██████████| 2/2" in done.stderr) == bool(processes)
        found.append(json.loads(output.read_text(encoding="utf-8"))["metrics"])
    assert found[0] == found[1]


def test_a_task_that_never_reads_the_cache_is_refused(tmp_path: Path) -> None:
    task = f"include: {TASKS / 'needle_recall.yaml'}\ntask: needle_likelihood\noutput_type: loglikelihood\n"
    (tmp_path / "needle_likelihood.yaml").write_text(task + "metric_list: [{metric: acc}]\n", encoding="utf-8")
    done = run(tmp_path, tmp_path, "needle_likelihood", "--caches", "4bit_nc")
    assert done.returncode != 0 and "generate_until" in done.stderr


def test_what_cannot_run_is_said_before_anything_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after the tasks that take hours: a name, a group, packages of RULER, texts beyond the model's positions."""
    from examples import lm_eval_turboquant as example

    suite = list(example.EVIDENCE)
    example.check(suite, None, 32768)
    example.check([example.Task("needle_recall")], str(TASKS), 8192)
    for tasks, positions, says in (
        (["needle_recall"], None, "needle_recall: no task of lm-eval"),
        (["gsm8k", "ruler"], None, "ruler: no task of lm-eval .* Name tasks, not groups"),
        (suite, 8192, "8,192 positions, fewer than the tokens of niah_single_2, 32768"),
    ):
        with pytest.raises(ValueError, match=says):
            example.check([t if isinstance(t, example.Task) else example.Task(t) for t in tasks], None, positions)
    monkeypatch.setattr(example, "find_spec", lambda name: None if name == "wonderwords" else name)
    example.check([example.Task("gsm8k")], None, None)
    with pytest.raises(ValueError, match=r"need wonderwords: `pip install 'lm-eval\[ruler\]'`"):
        example.check(suite, None, None)


def test_lengths_are_those_of_prompts_that_ruler_makes() -> None:
    from examples import lm_eval_turboquant as example

    tasks = example.with_lengths(list(example.EVIDENCE), [2048, 4096])
    assert [task for task in tasks if not task.is_ruler] == [task for task in example.EVIDENCE if not task.is_ruler]
    assert [task.title for task in tasks if task.is_ruler][:3] == [
        "niah_multikey_1, 2048",
        "niah_multikey_1, 4096",
        "niah_multivalue, 2048",
    ]
    assert example.with_lengths(list(example.EVIDENCE), []) == list(example.EVIDENCE)
    with pytest.raises(ValueError, match="for tasks of RULER .* none of these is one: gsm8k"):
        example.with_lengths([example.Task("gsm8k")], [2048])


def test_prompts_of_ruler_have_the_lengths_asked_for(tmp_path: Path) -> None:
    """A task whose text is made up of needles: nothing is downloaded for it."""
    pytest.importorskip("wonderwords")
    output = tmp_path / "metrics.json"
    options = ["--caches", "4bit_nc", "--lengths", "1024", "2048", "--output", str(output)]
    done = run(tmp_path, TASKS, "niah_multikey_2", *options)
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(output.read_text(encoding="utf-8"))["metrics"]["4bit_nc"]
    assert {title: list(scores) for title, scores in metrics.items()} == {
        "niah_multikey_2, 1024": ["1024"],
        "niah_multikey_2, 2048": ["2048"],
    }
