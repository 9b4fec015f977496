"""Decoding, a second turn and the prefill on a CPU: transformers' caches against the presets, in one run.

    python -m examples.measure.speed.bench_cpu                          the shipped model at 4k, an 8-layer Llama at 32k
    python -m examples.measure.speed.bench_cpu --only "4k (Dyn|4bit)"   cells whose name matches
    python -m examples.measure.speed.bench_cpu --model DIR --dtype float32 --json FILE   another model at 4k, only that

At 4k every cache holds the same 4,000 tokens of the shipped model's text. A round measures one decode step of each
cache, the next round the next step, so that whatever else the machine does falls on all of them; medians are over
rounds. At 32k the caches are filled with random states: a prefill would dwarf the rest. quanto and HQQ
(`pip install optimum-quanto hqq`) are left out where they are not installed.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, QuantizedCache, StaticCache
from transformers.cache_utils import Cache
from transformers.utils import logging

from examples.provenance import LLAMA_8B, RESULTS, SHIPPED_MODEL, provenance
from tq_hf import PRESETS, TurboQuantCache
from tq_hf.compat import as_input
from tq_hf.layers.handle import resolve

SHORT, LONG, TURN, ROOM = 4000, 32768, 500, 256
OTHERS = {"quanto": "optimum.quanto", "hqq": "hqq"}
"""Backends of `QuantizedCache` and what they import."""

Makers = dict[str, tuple[str, Callable[[], Cache]]]


def installed(module: str) -> bool:
    """Whether a module can be imported, its packages too."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def caches(config: Any, tokens: int, presets: list[str]) -> Makers:
    """Name to attention implementation and cache constructor."""
    chosen: Makers = {
        "DynamicCache": ("sdpa", lambda: DynamicCache(config=config)),
        "StaticCache": ("sdpa", lambda: StaticCache(config, max_cache_len=tokens + ROOM + TURN)),
    }
    for backend, module in OTHERS.items():
        if installed(module):
            axes = dict(axis_key=1, axis_value=1) if backend == "hqq" else {}
            chosen[f"{backend} int4"] = (
                "sdpa",
                lambda backend=backend, axes=axes: QuantizedCache(backend, config, nbits=4, **axes),
            )
        else:
            print(f"{module} is not installed: QuantizedCache({backend!r}) is left out.")
    for preset in presets:
        chosen[preset] = ("turboquant", lambda preset=preset: TurboQuantCache(config, preset))
        if preset == "4bit_nc":
            room = dict(max_cache_len=tokens + ROOM + TURN)
            chosen["4bit_nc, preallocated"] = ("turboquant", lambda room=room: TurboQuantCache(config, **room))
    return chosen


class Bench:
    """One model and its caches, filled with the same tokens.

    Args:
        model: In evaluation mode.
        makers: What `caches` gives.
    """

    def __init__(self, model: Any, makers: Makers) -> None:
        self.model = model
        self.makers = makers
        self.held: dict[str, Cache] = {}

    def forward(self, name: str, ids: torch.Tensor, cache: Cache) -> float:
        """Milliseconds of one call of the model with `ids` `[1, S]`."""
        self.model.set_attn_implementation(self.makers[name][0])
        start = time.perf_counter()
        self.model(ids, **as_input(cache), logits_to_keep=1)
        return 1e3 * (time.perf_counter() - start)

    def prefill(self, ids: torch.Tensor, repeats: int) -> dict[str, list[float]]:
        """Fill every cache with `ids` `[1, T]`, `repeats` times in turn, and keep the last."""
        times: dict[str, list[float]] = {name: [] for name in self.makers}
        for _ in range(repeats):
            for name, (_, make) in self.makers.items():
                self.held[name] = make()
                times[name].append(self.forward(name, ids, self.held[name]))
        return times

    def fill(self, tokens: int) -> None:
        """Random states for `tokens` tokens in every cache."""
        config = self.model.config
        shape = (1, config.num_key_value_heads, tokens, config.head_dim)
        for name, (attention, make) in self.makers.items():
            self.model.set_attn_implementation(attention)
            cache = self.held[name] = make()
            for layer in range(config.num_hidden_layers):
                torch.manual_seed(layer)
                keys, values = (torch.randn(shape, dtype=self.model.dtype) for _ in range(2))
                # As a prefill's attention would: a compressed layer learns that its packed states are what is read.
                resolve(*cache.update(keys, values, layer), self.model)
            gc.collect()

    def steps(self, ids: torch.Tensor, rounds: int) -> dict[str, list[float]]:
        """Decode steps of every cache in turn; the first two rounds warm up."""
        times: dict[str, list[float]] = {name: [] for name in self.held}
        for number in range(rounds + 2):
            for name, cache in self.held.items():
                elapsed = self.forward(name, ids[:, :1], cache)
                if number >= 2:
                    times[name].append(elapsed)
        return times

    def turns(self, ids: torch.Tensor, rounds: int) -> dict[str, list[float]]:
        """`ids` `[1, S]` on top of what every cache holds, which then forgets them; caches that cannot are left out."""
        times: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, cache in self.held.items():
                if isinstance(cache, (StaticCache, QuantizedCache)):
                    continue
                times.setdefault(name, []).append(self.forward(name, ids, cache))
                cache.crop(-ids.shape[1])
        return times


def rows(cell: str, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row a cache: median milliseconds, and how many times as fast as DynamicCache that is."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    result = []
    for name, median in medians.items():
        row = {"cell": cell, "cache": name, "ms": round(median, 3), "least_ms": round(min(times[name]), 3)}
        row["speed"] = round(medians["DynamicCache"] / median, 3)
        result.append(row)
        print(f"{cell:18} {name:22} {median:10.2f} ms   {row['speed']:6.2f} of DynamicCache's speed", flush=True)
    return result


def short(
    name: str, dtype: str, presets: list[str], rounds: int, wanted: Callable[[str], bool]
) -> list[dict[str, Any]]:
    """The cells of a model at 4k."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
    text = (Path(SHIPPED_MODEL) / "filler.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(name)(text[: 8 * SHORT], return_tensors="pt")["input_ids"]
    makers = {name: made for name, made in caches(model.config, SHORT, presets).items() if wanted(f"4k {name}")}
    bench = Bench(model, makers)
    prefill = bench.prefill(ids[:, :SHORT], max(3, rounds // 10))
    result = rows("prefill of 4k", prefill)
    result += rows("decode at 4k", bench.steps(ids[:, SHORT:], rounds))
    return result + rows("500 more on 4k", bench.turns(ids[:, SHORT : SHORT + TURN], max(3, rounds // 10)))


def long(rounds: int, wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Decoding at 32k: 8 layers of (32, 8, 128) heads, random weights, bf16."""
    config = LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": 8, "vocab_size": 1024})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    makers = {name: made for name, made in caches(config, LONG, ["4bit_nc"]).items() if wanted(f"32k {name}")}
    bench = Bench(model, makers)
    bench.fill(LONG)
    return rows("decode at 32k", bench.steps(torch.tensor([[5]]), rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=40, help="decode steps measured with each cache")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS), metavar="PRESET")
    parser.add_argument("--model", default=str(SHIPPED_MODEL), help="a folder or a model of the hub")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--only", default=".", metavar="REGEX", help='such as "4k DynamicCache", "32k 4bit_nc"')
    parser.add_argument("--json", type=Path, default=RESULTS / "cpu.json", metavar="FILE", help="where results go")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)

    def wanted(name: str) -> bool:
        return "DynamicCache" in name or re.search(arguments.only, name) is not None

    if (arguments.model, arguments.dtype) != (
        str(SHIPPED_MODEL),
        "bfloat16",
    ) and arguments.json == RESULTS / "cpu.json":
        parser.error("`cpu.json` is of the shipped model in bfloat16: give another file as `--json`.")
    record = provenance(torch.device("cpu"), arguments.model)
    with torch.inference_mode():
        record["rows"] = short(arguments.model, arguments.dtype, arguments.presets, arguments.rounds, wanted)
        if arguments.model == str(SHIPPED_MODEL):
            record["rows"] += long(max(3, arguments.rounds // 4), wanted)
    arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
