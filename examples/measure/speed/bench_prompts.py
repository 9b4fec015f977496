"""Prompts in batches: milliseconds each, where they go on the device, and the fixed part of a call; first tokens of
`generate()`.

    python -m examples.measure.speed.bench_prompts [--level 1] [--parts batches calls first] [--output FILE]

on an 8B-shaped random Llama. Milliseconds are the slope from few prompts to many, each the fastest of three: what a run
takes once does not count. Kernels are grouped by name. A call of `generate_batch` with one prompt of 16 tokens and one
new token is timed with a manager that is kept, and with a new one. A first token is a call of `generate()` with a new
cache and one new token, the median of nine; `graph_decoding` has captured short prompts by then.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import CompileConfig, ContinuousBatchingConfig, DynamicCache, GenerationConfig, PreTrainedModel

from examples.measure.speed.bench_serve import Engine, Request, loaded, random_prompt, serve, session, warm_up
from examples.provenance import RESULTS, provenance, slug
from tq_hf import TurboQuantBatching, TurboQuantCache, TurboQuantConfig, graph_decoding
from tq_hf.compat import as_input

PRESET = "4bit_nc"
PARTS = ["batches", "calls", "first"]
KINDS = {
    "products": ("nvjet", "gemm", "cutlass_80", "splitK"),
    "attention": ("prefix_attention", "flash_fwd", "cudnn", "lerp", "decode_split", "reduce_splits", "merge_splits"),
    "blocks and rows": ("encode_blocks", "append"),
    "elementwise and norms": ("triton_", "elementwise"),
}
"""Parts of the names of kernels, by kind; the first kind counts."""


def seconds(manager: Any, chance: random.Random, number: int, length: int, vocabulary: int) -> float:
    """Time of so many prompts with one new token each."""
    requests = [Request(random_prompt(chance, length, vocabulary), 1) for _ in range(number)]
    begin = time.perf_counter()
    serve(manager, requests)
    return time.perf_counter() - begin


def kernels(manager: Any, chance: random.Random, number: int, length: int, vocabulary: int) -> dict[str, float]:
    """Milliseconds a prompt that kernels of each kind take, and in which the device is busy."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        seconds(manager, chance, number, length, vocabulary)
    sums, busy, last = dict.fromkeys([*KINDS, "others"], 0.0), 0.0, 0.0
    events = [each for each in found.events() if each.device_type == DeviceType.CUDA]
    for each in sorted(events, key=lambda event: event.time_range.start):
        start, end = each.time_range.start, each.time_range.end
        kind = next((kind for kind, parts in KINDS.items() if any(part in each.name for part in parts)), "others")
        sums[kind] += (end - start) / 1e3 / number
        busy += max(0.0, end - max(start, last)) / 1e3 / number
        last = max(last, end)
    return sums | {"busy": busy}


def calls(model: PreTrainedModel, chance: random.Random, vocabulary: int) -> dict[str, float]:
    """Seconds of a call of `generate_batch`, the fastest of seven. Short prompts are graphs by then."""
    batching, found = TurboQuantBatching(model, PRESET), {}
    options = ContinuousBatchingConfig(num_blocks=200)
    config = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1)
    for name, kept in (("fresh_call_s", False), ("kept_call_s", True)):
        times = []
        for _ in range(8):
            begin = time.perf_counter()
            batching.generate_batch(
                [random_prompt(chance, 16, vocabulary)], config, continuous_batching_config=options,
                persistent_manager=kept, progress_bar=False,
            )  # fmt: skip
            times.append(time.perf_counter() - begin)
        found[name] = min(times[1:])
    batching.destroy_cached_continuous_batching_manager()
    return found


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def first_tokens(model: PreTrainedModel, lengths: list[int]) -> list[dict[str, Any]]:
    """Milliseconds to the first token of `generate()`, by length of the prompt."""
    ways: dict[str, tuple[str, Any, dict[str, Any]]] = {
        "DynamicCache": ("sdpa", lambda: DynamicCache(config=model.config), {}),
        "growing": ("turboquant", lambda: TurboQuantCache(model.config, PRESET), {}),
        "graph_decoding": (
            "turboquant",
            lambda: TurboQuantCache(model.config, PRESET, max_cache_len=2 * max(lengths)),
            {"custom_generate": graph_decoding, "compile_config": CompileConfig()},
        ),
    }
    rows = []
    for length in lengths:
        ids, row = torch.randint(0, model.config.vocab_size, (1, length), device=model.device), {"tokens": length}
        for name, (attention, make, options) in ways.items():
            model.set_attn_implementation(attention)
            times = []
            for _ in range(12):
                cache = make()
                synchronize(model.device)
                begin = time.perf_counter()
                options = {**options, **as_input(cache), "max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
                model.generate(ids, **options)
                synchronize(model.device)
                times.append(time.perf_counter() - begin)
            row[f"{name}_ms"] = 1e3 * statistics.median(times[3:])
        rows.append(row)
        print(row, flush=True)
    return rows


def batches(model: PreTrainedModel, given: argparse.Namespace) -> dict[str, Any]:
    """Prompts in batches. Prints rows as they come."""
    chance, vocabulary = random.Random(0), model.config.get_text_config().vocab_size
    engine = Engine(PRESET, config=TurboQuantConfig.from_preset(PRESET), compile_level=given.level)
    longest = max(length for length, *_ in given.sizes)
    requests = [Request(random_prompt(chance, longest, vocabulary), 4)] * 8
    record: dict[str, Any] = {"level": given.level, "rows": []}
    with session(model, engine, requests, 10 * longest) as manager:
        warm_up(manager, vocabulary)
        record["warm_up_s"] = manager.warm_up_s
        print(f"warm-up {manager.warm_up_s:.1f} s", flush=True)
        for length, few, many in given.sizes:
            seconds(manager, chance, few, length, vocabulary)
            times = [
                min(seconds(manager, chance, number, length, vocabulary) for _ in range(3)) for number in (few, many)
            ]
            slope = (times[1] - times[0]) / (many - few)
            row = {"tokens": length, "ms": 1e3 * slope, "tokens_per_second": length / slope}
            if model.device.type == "cuda":
                row |= {"kernels_ms": kernels(manager, chance, few, length, vocabulary)}
            record["rows"].append(row)
            print(row, flush=True)
    return record


@torch.no_grad()
def measure(model: PreTrainedModel, given: argparse.Namespace) -> dict[str, Any]:
    """All parts that are asked for."""
    record: dict[str, Any] = {}
    if "batches" in given.parts:
        record |= batches(model, given)
    if "calls" in given.parts:
        record |= (found := calls(model, random.Random(0), model.config.get_text_config().vocab_size))
        print(found, flush=True)
    if "first" in given.parts:
        record["first_tokens"] = first_tokens(model, given.lengths)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32, help="layers of the model")
    parser.add_argument("--level", type=int, default=1, help="compile level")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="what to measure; others stay")
    parser.add_argument("--output", type=Path, help="JSON file")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    given.sizes, given.lengths = (
        ([(2048, 16, 32), (32768, 1, 3)], [128, 512, 2048]) if on_gpu else ([(256, 1, 3)], [64])
    )
    model, name = loaded(None, given.layers, device)
    model.generation_config.eos_token_id = None
    path = given.output or RESULTS / f"prompts-{slug(device)}.json"
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() and given.parts != PARTS else {}
    record = held | provenance(device, name) | measure(model, given)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
