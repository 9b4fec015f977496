"""Run generation tasks of lm-evaluation-harness with compressed caches, next to a plain one.

    pip install -e ".[lm-eval]"    # in a clone
    python examples/lm_eval_turboquant.py --model examples/needle --include-path examples/tasks --tasks needle_recall
    python examples/lm_eval_turboquant.py --model Qwen/Qwen3-4B --tasks gsm8k --limit 200
    python examples/lm_eval_turboquant.py --model Qwen/Qwen3-4B --tasks gsm8k --caches plain 4bit_nc auto --batch 16

Only tasks that generate are accepted: the score of a given continuation is computed in one pass over the text, and such
a pass never reads a cache. A prompt attends to itself exactly, too; with `--chunk` it is read in pieces that attend to
the compressed pieces before them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from provenance import provenance
from transformers import DynamicCache
from transformers.cache_utils import Cache

from tq_hf import PRESETS, TurboQuantCache

PLAIN = "plain"
CACHES = (PLAIN, *PRESETS, "auto")


class CachedLM(HFLM):
    """The harness's model of transformers, with a cache of ours for each batch it generates.

    Args:
        cache: One of `CACHES`.
        chunk: Tokens of a prompt to read at a time, or `None` for all at once.
        **options: Those of `HFLM`.
    """

    def __init__(self, cache: str, chunk: int | None, **options: Any) -> None:
        super().__init__(**options)
        self.cache, self.chunk = cache, chunk
        self.model.set_attn_implementation("sdpa" if cache == PLAIN else "turboquant")

    def _empty_cache(self) -> Cache:
        if self.cache == PLAIN:
            return DynamicCache(config=self.model.config)
        return TurboQuantCache(self.model.config, self.cache, model=self.model)

    def _model_generate(self, context: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if self.chunk:
            options["prefill_chunk_size"] = self.chunk
        return super()._model_generate(context, *args, past_key_values=self._empty_cache(), **options)

    def loglikelihood(self, *args: Any, **kwargs: Any) -> Any:
        """Refused.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "A task asks for the likelihood of given text, which one pass computes without reading a cache: every "
            "preset would get the score of the plain cache. Choose a task that generates (`output_type: "
            "generate_until`), e.g. gsm8k."
        )

    loglikelihood_rolling = loglikelihood


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="name or folder of a model")
    parser.add_argument("--tasks", nargs="+", required=True, help="tasks that generate, e.g. gsm8k")
    parser.add_argument("--include-path", help="a folder with tasks of your own")
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=[PLAIN, "k8v4", "4bit_nc", "3bit_nc"])
    parser.add_argument("--limit", type=int, help="ask at most so many questions of each task")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--chunk", type=int, help="read prompts in chunks of so many tokens")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="write the harness's metrics here, as JSON")
    arguments = parser.parse_args()

    device = torch.device(arguments.device)
    metrics = {}
    for cache in arguments.caches:
        model = CachedLM(
            cache,
            arguments.chunk,
            pretrained=arguments.model,
            dtype=arguments.dtype,
            device=arguments.device,
            batch_size=arguments.batch,
        )
        results = lm_eval.simple_evaluate(
            model,
            tasks=arguments.tasks,
            task_manager=TaskManager(include_path=arguments.include_path),
            limit=arguments.limit,
            bootstrap_iters=0,
        )
        metrics[cache] = results["results"]
        for task, found in results["results"].items():
            scores = ", ".join(f"{name} {value:.4f}" for name, value in found.items() if isinstance(value, float))
            print(f"{cache:10} {task}: {scores}", flush=True)
        if arguments.output:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            record = provenance(device, arguments.model) | {"lm_eval": lm_eval.__version__, "metrics": metrics}
            arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
