"""Run tasks of lm-evaluation-harness with compressed caches, next to a plain one.

    pip install -e ".[lm-eval]"    # in a clone
    python -m examples.lm_eval_turboquant --model Qwen/Qwen3-4B
    python -m examples.lm_eval_turboquant --model Qwen/Qwen3-4B --tasks gsm8k --limit 200 --caches plain 4bit_nc k8v4
    python -m examples.lm_eval_turboquant --model Qwen/Qwen3-4B --tasks niah_multikey_2 ruler_vt --lengths 2048 8192
    python -m examples.lm_eval_turboquant --model examples/needle --include-path examples/tasks \
        --tasks needle_recall needle_text --chunk 256
    accelerate launch --multi_gpu --num_processes 8 -m examples.lm_eval_turboquant --model Qwen/Qwen3-4B

Without `--tasks` it measures what a model is judged by: perplexity of Wikipedia articles of up to 8k tokens, GSM8K,
three tasks of RULER at 8k tokens, and a needle at 32k: hours on a GPU. `--lengths` gives RULER's prompts other lengths.
Tasks are checked before any of them runs. `--output` is written after each task, and a run that was stopped goes on
from it. A table is printed at the end.

A prompt attends to itself exactly. With `--chunk` it is read in pieces that attend to the compressed pieces before
them; a task that scores a given text reads no cache otherwise, and is refused. Processes of `accelerate launch` have a
model each and share the questions of each task.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import lm_eval
import torch
from accelerate import PartialState
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoConfig, DynamicCache
from transformers.cache_utils import Cache

from examples.provenance import provenance
from tq_hf import PRESETS, TurboQuantCache
from tq_hf.compat import as_input
from tq_hf.config import number_of_positions

PLAIN = "plain"
CACHES = (PLAIN, *PRESETS)
BOOTSTRAPS = 1000
RULER_NEEDS = ("nltk", "scipy", "wonderwords")
"""Packages for the prompts of RULER: lm-eval's extra `ruler`."""


class Task(NamedTuple):
    """A task of the harness.

    Args:
        name: Its name there.
        limit: Questions to ask at most, or `None` for all.
        chunk: Tokens of a prompt to read at a time, or `None` for all at once.
        tokens: Tokens of a text to score, or of a prompt to make, if the task can be told.
    """

    name: str
    limit: int | None = None
    chunk: int | None = None
    tokens: int | None = None

    @property
    def is_ruler(self) -> bool:
        """Whether the task is one of RULER, with prompts of any length."""
        return self.name.startswith(("niah_", "ruler_"))

    @property
    def title(self) -> str:
        """Name of the task in results."""
        return self.name if self.tokens is None else f"{self.name}, {self.tokens}"


EVIDENCE = (
    Task("wikitext", chunk=512, tokens=8192),
    Task("gsm8k", limit=400),
    Task("niah_multikey_1", limit=100, chunk=2048, tokens=8192),
    Task("niah_multivalue", limit=100, chunk=2048, tokens=8192),
    Task("ruler_vt", limit=100, chunk=2048, tokens=8192),
    Task("niah_single_2", limit=100, chunk=2048, tokens=32768),
)


class CachedLM(HFLM):
    """The harness's transformers model, with a compressed cache for each batch.

    Args:
        cache: One of `CACHES`.
        **options: Those of `HFLM`.
    """

    def __init__(self, cache: str, **options: Any) -> None:
        super().__init__(**options)
        self.cache = cache
        self.chunk: int | None = None
        if hasattr(self, "accelerator"):  # the harness shares questions among processes on GPUs only
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        self.model.set_attn_implementation("sdpa" if cache == PLAIN else "turboquant")

    def _empty_cache(self) -> Cache:
        if self.cache == PLAIN:
            return DynamicCache(config=self.model.config)
        return TurboQuantCache(self.model.config, self.cache, model=self.model)

    def _model_generate(self, context: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if self.chunk:
            options["prefill_chunk_size"] = self.chunk
        return super()._model_generate(context, *args, **as_input(self._empty_cache()), **options)

    @torch.no_grad()
    def _model_call(self, inps: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Logits `[B, T, V]` of texts `[B, T]`, computed in chunks with one cache."""
        if self.chunk is None:
            raise ValueError(
                "A task scores given text, which one pass computes without reading a cache: every preset would get "
                "the score of the plain cache. Pass `--chunk`, or choose a task that generates (`output_type: "
                "generate_until`), e.g. gsm8k."
            )
        cache = self._empty_cache()
        return torch.cat([self.model(ids, **as_input(cache)).logits for ids in inps.split(self.chunk, 1)], 1)


def error_of(samples: list[dict[str, Any]], metric: str, value: float) -> float | None:
    """Standard error of a metric without one in the harness: by variance for a share of right answers, by bootstrap for
    a perplexity, else `None`."""
    scores = [sample[metric] for sample in samples if metric in sample]
    if scores and all(isinstance(score, tuple | list) and len(score) == 2 for score in scores):
        draw, drawn = random.Random(0), []
        for _ in range(BOOTSTRAPS):
            picked = draw.choices(scores, k=len(scores))
            drawn.append(math.exp(-sum(x for x, _ in picked) / sum(n for _, n in picked)))
        mean = sum(drawn) / BOOTSTRAPS
        return math.sqrt(sum((x - mean) ** 2 for x in drawn) / (BOOTSTRAPS - 1))
    return math.sqrt(value * (1 - value) / len(samples)) if 0 <= value <= 1 and samples else None


class OneTask(TaskManager):
    """Task manager that makes the documents of its only task once, for all caches."""

    _loaded: Any = None

    def load(self, *args: Any, **kwargs: Any) -> Any:
        """Load the task in the first call."""
        self._loaded = self._loaded or super().load(*args, **kwargs)
        return self._loaded


@functools.cache
def manager_of(task: Task, include_path: str | None, name: str) -> OneTask:
    """The manager of a task of the model `name`, whose tokenizer counts the tokens of RULER's prompts."""
    length = {} if task.tokens is None else {"max_seq_lengths": [task.tokens]}
    return OneTask(include_path=include_path, metadata={"tokenizer": name, **length})


def measure(model: CachedLM, task: Task, include_path: str | None, name: str) -> dict[str, dict[str, float | None]]:
    """Value and standard error of each metric of a task. Empty in all but the first of several processes."""
    manager = manager_of(task, include_path, name)
    model.chunk, model._max_length = task.chunk, task.tokens if task.name == "wikitext" else None  # texts are cut to it
    results = lm_eval.simple_evaluate(
        model, tasks=[task.name], task_manager=manager, limit=task.limit, bootstrap_iters=BOOTSTRAPS
    )
    metrics: dict[str, dict[str, float | None]] = {}
    if results is None:
        return metrics
    # In the order of one process.
    samples = sorted(results["samples"][task.name], key=lambda sample: sample["doc_id"])
    for key, value in results["results"][task.name].items():
        metric, _, how = key.partition(",")
        # RULER's metrics are lengths; those that were not asked for are -1.
        if not isinstance(value, float | int) or not how or metric.endswith("_stderr") or value == -1:
            continue
        error = results["results"][task.name].get(f"{metric}_stderr,{how}")
        if not isinstance(error, float):
            error = error_of(samples, metric, value)
        metrics[metric if how == "none" else key] = {"value": float(value), "error": error}
    return metrics


def table(record: dict[str, Any]) -> str:
    """Markdown table with a row for each metric and a column for each cache."""
    caches = list(record["metrics"])
    lines = [f"| {record['model']} | {' | '.join(caches)} |", "| --- |" + " ---: |" * len(caches)]
    rows = {(task, metric) for found in record["metrics"].values() for task in found for metric in found[task]}
    for task, metric in sorted(rows):
        cells = []
        for cache in caches:
            found = record["metrics"][cache].get(task, {}).get(metric)
            error = "" if found is None or found["error"] is None else f" ± {found['error']:.4f}"
            cells.append("" if found is None else f"{found['value']:.4f}{error}")
        lines.append(f"| {task}: {metric} | {' | '.join(cells)} |")
    return "\n".join(lines)


def with_lengths(tasks: list[Task], lengths: list[int]) -> list[Task]:
    """Tasks to run. RULER's tasks run once for each length.

    Raises:
        ValueError: None of them is RULER's.
    """
    if lengths and not any(task.is_ruler for task in tasks):
        names = ", ".join(task.name for task in tasks)
        raise ValueError(f"`--lengths` is for tasks of RULER (niah_..., ruler_...), and none of these is one: {names}.")
    chosen = [[task._replace(tokens=n) for n in lengths] if lengths and task.is_ruler else [task] for task in tasks]
    return list(dict.fromkeys(task for same in chosen for task in same))


def check(tasks: list[Task], include_path: str | None, positions: int | None) -> None:
    """Check that every task can run, before the first one starts.

    Raises:
        ValueError: A task is not known or is a group of tasks; packages that make its prompts are missing; its texts
            are longer than the positions of the model.
    """
    known = TaskManager(include_path=include_path).all_subtasks
    if unknown := [task.name for task in tasks if task.name not in known]:
        raise ValueError(
            f"{', '.join(unknown)}: no task of lm-eval {lm_eval.__version__}. Name tasks, not groups (`lm-eval ls "
            "tasks` lists both), or a folder with tasks of your own as `--include-path`."
        )
    missing = [package for package in RULER_NEEDS if find_spec(package) is None]
    if missing and any(task.is_ruler for task in tasks):
        raise ValueError(f"Tasks of RULER need {', '.join(missing)}: `pip install 'lm-eval[ruler]'`.")
    if long := [task.title for task in tasks if positions is not None and (task.tokens or 0) > positions]:
        raise ValueError(
            f"The model has {positions:,} positions, fewer than the tokens of {'; '.join(long)}. Give RULER's tasks "
            "other `--lengths`, or name other `--tasks`."
        )


def resumed(path: Path | None, record: dict[str, Any]) -> dict[str, Any]:
    """Add measurements of a stopped run with the same settings to `record`.

    Raises:
        ValueError: The file is of another model or of other tasks.
    """
    if path is None or not path.exists():
        return record
    before = json.loads(path.read_text(encoding="utf-8"))
    for name in ("model", "tasks", "lm_eval", "versions", "device", "dtype"):
        if before.get(name) != record[name]:
            raise ValueError(
                f"{path} has {name} {before.get(name)!r}, and this run {record[name]!r}. Give another `--output`."
            )
    return record | {"metrics": before["metrics"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="name or folder of a model")
    parser.add_argument("--tasks", nargs="+", help="other tasks, e.g. gsm8k")
    parser.add_argument("--include-path", help="a folder with tasks of your own")
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=[PLAIN, "k8v4", "4bit_nc", "3bit_nc", "2bit_nc"])
    parser.add_argument("--limit", type=int, help="maximum number of questions of each task")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--chunk", type=int, help="number of tokens in a chunk of a text")
    parser.add_argument("--lengths", type=int, nargs="+", default=[], help="tokens of RULER's prompts, e.g. 2048 8192")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="write metrics here, as JSON, and go on from what is there")
    arguments = parser.parse_args()

    tasks = [Task(name, arguments.limit, arguments.chunk) for name in arguments.tasks or ()]
    tasks = tasks or [task._replace(limit=arguments.limit or task.limit) for task in EVIDENCE]
    config = AutoConfig.from_pretrained(arguments.model).get_text_config()
    try:
        tasks = with_lengths(tasks, arguments.lengths)
        check(tasks, arguments.include_path, number_of_positions(config, alone=True))
    except ValueError as error:
        parser.error(str(error))
    record = resumed(
        arguments.output,
        provenance(torch.device(arguments.device), arguments.model)
        | {"lm_eval": lm_eval.__version__, "dtype": arguments.dtype, "tasks": [list(task) for task in tasks]}
        | {"metrics": {}},
    )
    for number, cache in enumerate(arguments.caches, 1):
        found = record["metrics"].setdefault(cache, {})
        if not (missing := [task for task in tasks if task.title not in found]):
            continue
        options = {"dtype": arguments.dtype, "device": arguments.device, "batch_size": arguments.batch}
        model = CachedLM(cache, pretrained=arguments.model, **options)
        for task in missing:
            found[task.title] = measure(model, task, arguments.include_path, arguments.model)
            if model.rank > 0:
                continue
            print(f"{cache} ({number} of {len(arguments.caches)}), {task.title}: {found[task.title]}", flush=True)
            if arguments.output:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        del model
    if PartialState().is_main_process:
        print(table(record))


if __name__ == "__main__":
    main()
