"""transformers' `QuantizedCache` (HQQ, quanto) beside presets on real weights: memory, time of a step, KL, in one run.

    python -m examples.measure.quality.quantized --json examples/results/quantized-cpu.json

Each cache reads the same beginning of a document, and then its next tokens one by one. A step of each cache follows in
turn, so that whatever else the machine does falls on all of them. KL is that of the next token from `DynamicCache`'s,
which computes in the same dtype. Times are of the thread, for one thread. Needs `pip install ".[peers,real]"`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, QuantizedCache
from transformers.cache_utils import Cache
from transformers.utils import logging

from examples import real_model
from examples.measure.quality import peers
from examples.provenance import BASELINE, provenance
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input

PRESETS = ("k8v4", "4bit_nc", "3bit_nc", "2bit_nc")
Maker = Callable[[], Cache]


def caches(config: Any) -> dict[str, Maker]:
    """Constructors of caches by name."""
    found: dict[str, Maker] = {BASELINE: partial(DynamicCache, config=config)}
    for backend, axes in (("hqq", {"axis_key": 1, "axis_value": 1}), ("quanto", {})):
        for bits in (4, 2):
            found[f"{backend} int{bits}"] = partial(QuantizedCache, backend, config, nbits=bits, **axes)
    return found | {preset: partial(TurboQuantCache, config, preset) for preset in PRESETS}


def storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of all tensors in a value, also inside of tensors of several parts (quanto's)."""
    if hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from storages(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value.untyped_storage()
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from storages(part)
    elif isinstance(value, dict):
        yield from storages(list(value.values()))


def bytes_held(cache: Cache) -> int:
    """Bytes of all storages that a cache holds."""
    if isinstance(cache, TurboQuantCache):
        return cache.memory_footprint().total
    found = {one.data_ptr(): one.nbytes() for layer in cache.layers for one in storages(vars(layer))}
    return sum(found.values())


class Run:
    """A model, and what its caches took and lost."""

    def __init__(self, model: Any, makers: dict[str, Maker]) -> None:
        self.model, self.makers = model, makers
        self.times: dict[str, list[float]] = {name: [] for name in makers}
        self.losses: dict[str, list[float]] = {name: [] for name in makers}
        self.agreed: dict[str, list[float]] = {name: [] for name in makers}
        self.held: dict[str, int] = {}

    def logits(self, name: str, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Log-probabilities `[V]` after `ids` `[1, S]`."""
        self.model.set_attn_implementation("turboquant" if name in PRESETS else "sdpa")
        start = time.thread_time()
        logits = self.model(ids, **as_input(cache), logits_to_keep=1).logits[0, -1]
        if ids.shape[1] == 1:
            self.times[name].append(1e3 * (time.thread_time() - start))
        return logits.float().log_softmax(-1)

    @torch.no_grad()
    def read(self, ids: torch.Tensor, prompt: int) -> None:
        """Read a document `[1, T]`: the first `prompt` tokens at once, the others one by one."""
        made = {name: make() for name, make in self.makers.items()}
        losses: dict[str, list[float]] = {name: [] for name in made}
        for name, cache in made.items():
            self.logits(name, ids[:, :prompt], cache)
        for position in range(prompt, ids.shape[1]):
            exact = torch.empty(0)
            for name, cache in made.items():
                found = self.logits(name, ids[:, position : position + 1], cache)
                exact = found if name == BASELINE else exact
                losses[name].append((exact.exp() * (exact - found)).sum().clamp_min(0).item())
                self.agreed[name].append(float(exact.argmax() == found.argmax()))
        for name, cache in made.items():
            self.held[name] = bytes_held(cache)
            self.losses[name].append(statistics.mean(losses[name]))

    def rows(self) -> list[dict[str, Any]]:
        """Results by cache; the error of KL is that of the mean over documents."""
        return [
            {
                "cache": name,
                "bytes_held": self.held[name],
                "ms_per_step": statistics.median(self.times[name]),
                "kl": statistics.mean(losses),
                "kl_standard_error": statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else None,
                "top1": statistics.mean(self.agreed[name]),
            }
            for name, losses in self.losses.items()
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a name of `real_model.py`, or a folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens read at once")
    parser.add_argument("--steps", type=int, default=48, help="tokens read one by one")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    folder = real_model.model_folder(options.model)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=options.dtype).eval()
    text = real_model.text_file().read_text(encoding="utf-8")
    tokenizer, tokens = AutoTokenizer.from_pretrained(folder), options.prompt + options.steps
    run = Run(model, caches(model.config))
    for number in range(1, options.documents + 1):  # passages at equal distances
        start = number * len(text) // (options.documents + 1)
        passage = text[start : start + 10 * tokens]  # a token of prose has four characters
        run.read(tokenizer(passage, return_tensors="pt")["input_ids"][:, :tokens], options.prompt)
        print(f"{number} of {options.documents} documents", flush=True)
    record = provenance(torch.device("cpu"), options.model)
    record["versions"] |= peers.versions()
    record |= {"dtype": options.dtype, "documents": options.documents, "prompt": options.prompt, "steps": options.steps}
    record["rows"] = run.rows()
    for row in record["rows"]:
        print(row)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
