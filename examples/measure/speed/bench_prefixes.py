"""Prefixes from files: the first token of a long prompt after a restart, and the steps of others meanwhile.

    python -m examples.measure.speed.bench_prefixes [--context 32768] [--batch 32] [--output FILE]

An engine on an 8B-shaped random Llama reads long prompts, and stores their pages in a folder. A second engine on that
folder has them back: from files (in the page cache of the system, as they were just written), then from pinned memory.

Others: `batch` requests are answered while the long prompts come, whose pages are in the pool ("without"), then while
they come back from files and other pages are stored ("with"). A step is the time between two tokens of one request.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from examples.measure.speed.bench_serve import STOCK_PAGE, loaded, percentile, random_prompt
from examples.provenance import RESULTS, provenance, slug
from tq_hf import TurboQuantBatching
from tq_hf.batching.prefixes import PrefixFolder

PRESET = "4bit_nc"
START = time.perf_counter()


def say(text: str) -> None:
    print(f"{time.perf_counter() - START:6.1f} s  {text}", flush=True)


@contextmanager
def engine(model: PreTrainedModel, folder: PrefixFolder, tokens: int) -> Iterator[Any]:
    """A running manager with room for so many tokens, warmed up by a short prompt."""
    batching = TurboQuantBatching(model, PRESET, balance=False, prefix_cache=folder)
    options = ContinuousBatchingConfig(num_blocks=-(-tokens // STOCK_PAGE), scheduler_type="shortest_first")
    manager: Any = batching.init_continuous_batching(
        GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1), options
    )
    manager.warmup()
    manager.start()
    try:
        ask(manager, [1, 2, 3] * 50, 4)
        yield manager
    finally:
        manager.stop(block=True)
        manager.destroy()


def ask(manager: Any, prompt: list[int], new: int = 8) -> tuple[float, Any]:
    """Milliseconds until the first token of a prompt, and the output."""
    begin = time.perf_counter()
    manager.add_request(prompt, max_new_tokens=new, record_timestamps=True)
    result = manager.get_result(timeout=120)
    assert result is not None and result.error is None, result
    return 1e3 * (result.timestamps[0] - begin), result


def equal(some: list[tuple[float, Any]], others: list[tuple[float, Any]]) -> bool:
    """Whether the outputs of `ask` have the same tokens. Those that began with as many tokens in pages are compared."""
    pairs = [(one, other) for (_, one), (_, other) in zip(some, others, strict=True)]
    alike = [(one, other) for one, other in pairs if one.cached_tokens == other.cached_tokens]
    return len(alike) > 0 and all(one.generated_tokens == other.generated_tokens for one, other in alike)


def cached(found: list[tuple[float, Any]]) -> list[int]:
    """Tokens of prompts that were found in pages."""
    return [output.cached_tokens for _, output in found]


def idle(manager: Any) -> float:
    """Seconds until all pages are stored."""
    begin, store = time.perf_counter(), manager.batch_processor.cache.prefixes
    while store.to_store or store.flights or store.writing:
        time.sleep(0.01)
    return time.perf_counter() - begin


def evict(manager: Any) -> None:
    """Free the pages that no request reads."""
    with manager.pause():
        manager.batch_processor.cache.evict_cached_blocks()


def steps(manager: Any, others: list[list[int]], number: int, coming: list[list[int]]) -> dict[str, Any]:
    """Steps of `others`, which have so many tokens, while prompts come one after the other."""
    for prompt in others:
        manager.add_request(prompt, max_new_tokens=number, record_timestamps=True)
    names, results = set(), []
    deadline = time.perf_counter() + 1.0
    while len(results) < len(others) + len(coming):
        if len(names) < len(coming) and time.perf_counter() > deadline:
            names.add(manager.add_request(coming[len(names)], max_new_tokens=1, record_timestamps=True))
            deadline = time.perf_counter() + 0.7
        result = manager.get_result(timeout=0.02)
        if result is not None:
            assert result.error is None, result.error
            results.append(result)
    answers = [result for result in results if result.request_id not in names]
    begin, end = max(r.timestamps[0] for r in answers), min(r.timestamps[-1] for r in answers)
    stamps = [stamp for stamp in answers[-1].timestamps if begin <= stamp <= end]
    gaps = [1e3 * (b - a) for a, b in zip(stamps, stamps[1:], strict=False)]
    came = [result for result in results if result.request_id in names]
    return {
        "steps": len(gaps),
        "mean_ms": statistics.mean(gaps),
        **{f"p{round(100 * share)}_ms": percentile(gaps, share) for share in (0.5, 0.99)},
        "longest_ms": max(gaps),
        "came_while_answered": sum(begin <= result.timestamps[0] <= end for result in came),
        "cached_tokens": [result.cached_tokens for result in came],
    }


def measure(model: PreTrainedModel, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All cells. Prints them as they come."""
    chance, vocabulary = random.Random(0), model.config.get_text_config().vocab_size

    def prompts(number: int, length: int) -> list[list[int]]:
        return [random_prompt(chance, length, vocabulary) for _ in range(number)]

    long, more = prompts(3, given.context), prompts(4, given.context)
    others = prompts(given.batch, given.prompt)
    files = PrefixFolder(folder, size=50 * 10**9)
    room = int(1.4 * (7 * given.context + given.batch * (given.prompt + given.steps + 1024)))
    row: dict[str, Any] = {"context": given.context, "batch": given.batch, "prompt": given.prompt}
    with engine(model, files, room) as manager:
        read = [ask(manager, prompt)[0] for prompt in long]
        row["stored_s"] = idle(manager)
        first, again, twice = ([ask(manager, prompt) for prompt in long] for _ in range(3))
        row |= {"read_ms": read, "in_pool_ms": [ms for ms, _ in again], "equal_in_pool": equal(again, twice)}
        say(f"read {[round(x) for x in read]} ms, stored in {row['stored_s']:.1f} s")
        for found in (first, again, twice):
            say(f"in the pool {[round(ms) for ms, _ in found]} ms, cached {cached(found)}")
        say(f"equal in the pool {row['equal_in_pool']}")
        idle(manager)
        config = model.config.get_text_config()
        heads = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
        blocks = sum(2 * size > max(sizes) for size in sizes)  # others are rows of sinks
        row["bytes_over_bf16"] = sum(sizes) / (2 * heads * 128 * blocks)
        say(f"{sum(sizes) / 1e9:.2f} GB in {len(sizes)} files, {row['bytes_over_bf16']:.4f} of bf16")
    files = PrefixFolder(folder, size=50 * 10**9)
    with engine(model, files, room) as manager:
        say(manager.batch_processor.cache.prefixes.found())
        found = [ask(manager, prompt) for prompt in long]
        row["from_files_ms"] = [ms for ms, _ in found]
        row["equal"] = equal(found, again)
        row["cached_tokens"] = cached(found)
        evict(manager)
        row["from_memory_ms"] = ask(manager, long[-1])[0]
        best = min(row["from_files_ms"][1:])
        row |= {"first_token_over_reading": best / min(read[1:])}
        say(f"from files {[round(x) for x in row['from_files_ms']]} ms, from memory {row['from_memory_ms']:.0f} ms")
        say(f"over reading {row['first_token_over_reading']:.3f}; cached {row['cached_tokens']}; equal {row['equal']}")
        blocks = manager.batch_processor.cache.prefixes.blocks
        for prompt in long:
            ask(manager, prompt)
        steps(manager, others, given.steps, long)  # captures and compiles what there is to
        row["without"] = steps(manager, others, given.steps, long)
        say(f"without: {row['without']}")
        idle(manager)
        evict(manager)
        for prompt in more:
            ask(manager, prompt, 1)
        before = dict(blocks)
        row["with"] = steps(manager, others, given.steps, long)
        row["blocks"] = {name: number - before.get(name, 0) for name, number in blocks.items()}
        row["p99_over_without"] = row["with"]["p99_ms"] / row["without"]["p99_ms"]
        say(f"with: {row['with']}, blocks {row['blocks']}")
        say(f"p99 over without {row['p99_over_without']:.3f}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32, help="layers of the model")
    parser.add_argument("--context", type=int, default=32768, help="tokens of a long prompt")
    parser.add_argument("--batch", type=int, default=32, help="requests that are answered meanwhile")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of their prompts")
    parser.add_argument("--steps", type=int, default=400, help="tokens of their answers")
    parser.add_argument("--folder", type=Path, help="an empty folder for files; by default a temporary one")
    parser.add_argument("--output", type=Path, help="JSON file")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, name = loaded(None, given.layers, device)
    record = provenance(device, name)
    say(f"{name} on {record['device']}")
    with torch.no_grad(), tempfile.TemporaryDirectory() as temporary:
        record["rows"] = [measure(model, given, given.folder or Path(temporary))]
    path = given.output or RESULTS / f"prefixes-{slug(device)}.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    say(f"written to {path}")


if __name__ == "__main__":
    main()
