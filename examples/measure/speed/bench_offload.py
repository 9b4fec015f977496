"""Cost of keeping a preempted request's packed pages on the CPU, against reading its prompt again.

    python -m examples.measure.speed.bench_offload           # 8B shape of 16 layers, one GPU, a minute
    python -m examples.measure.speed.bench_offload --tiny    # small, on a CPU, to try the script

Two requests share a pool with room for both prompts and little more, so one is preempted until the other has ended.
Measured are the copies of its pages by transformers (events on its stream, whole `_offload_to_cpu` and
`restore_scheduled_requests`), and the time from the end of the other request to its own next token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.generation.continuous_batching import offloading_manager

from examples.provenance import LLAMA_8B, RESULTS, provenance, slug
from tq_hf import TurboQuantBatching

PRESET, PAGE = "4bit_nc", 128
Manager = offloading_manager.OffloadingManager
CUDA: dict[str, Any] = dict(num_hidden_layers=16, vocab_size=32000, max_position_embeddings=32768)
TINY: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
TINY |= dict(num_key_value_heads=2, head_dim=32, vocab_size=128, max_position_embeddings=2048)


def unpinned(*size: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    """`torch.empty` for a machine without a GPU, where no memory can be pinned."""
    return torch.empty(*size, **kwargs)


def mark(stream: Any = None) -> Any:
    """A moment on the stream; without a GPU in seconds."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream or torch.cuda.current_stream())
    return event


def median_ms(marks: list[tuple[Any, Any]]) -> float:
    if not torch.cuda.is_available():
        return statistics.median(1e3 * (end - start) for start, end in marks)
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks)


class Copies(ExitStack):
    """Within it, copies of pages are timed; with `check` the bytes of every page are compared, too."""

    def __init__(self, check: bool = False) -> None:
        super().__init__()
        self.marks: dict[str, list[tuple[Any, Any]]] = {"out": [], "back": []}
        self.sizes: dict[str, list[int]] = {"out": [], "back": []}
        self.equal = self.checked = 0
        saved: dict[str, torch.Tensor] = {}
        out, back = Manager._offload_to_cpu, Manager.restore_scheduled_requests

        def read(manager: Any, ids: list[int]) -> torch.Tensor:
            with manager._stream_ctx():
                return manager.cache.allocator._copy_view[torch.tensor(ids, device=manager.cache.device)].cpu()

        def note(way: str, manager: Any, pages: int, start: Any) -> None:
            if pages:
                self.marks[way].append((start, mark(manager._compute_stream)))
                self.sizes[way].append(pages * manager.cache.allocator.bytes_per_block)

        def offload(manager: Any, victims: list[Any], tables: dict[str, Any]) -> Any:
            if check:
                for name in (state.request_id for state in victims):
                    saved[name] = read(manager, next(iter(tables[name].values())))
            start = mark(manager._compute_stream)
            gone = out(manager, victims, tables)
            note("out", manager, sum(len(ids) for name in gone for ids in tables[name].values()), start)
            return gone

        def restore(manager: Any, requests: list[Any]) -> None:
            names = [each.state.request_id for each in requests if each.state.is_cpu_offloaded]
            pages = sum(len(ids) for name in names for ids in manager._request_id_to_cpu_blocks[name].values())
            start = mark(manager._compute_stream)
            back(manager, requests)
            note("back", manager, pages, start)
            for name in names if check else ():
                before = saved.pop(name)
                now = read(manager, manager.cache.allocator.block_table[name][: len(before)])
                self.checked += len(before)
                self.equal += int((now == before).all(1).sum())

        self.enter_context(patch.object(Manager, "_offload_to_cpu", offload))
        self.enter_context(patch.object(Manager, "restore_scheduled_requests", restore))
        if not torch.cuda.is_available():
            without = SimpleNamespace(**vars(torch) | {"empty": unpinned})
            self.enter_context(patch.object(offloading_manager, "torch", without))

    def summary(self, way: str) -> dict[str, Any]:
        ms, size = median_ms(self.marks[way]), self.sizes[way][0]
        return {"ms": ms, "bytes": size, "gb_s": size / ms / 1e6, "copies": len(self.sizes[way])}


def serve(model: PreTrainedModel, pairs: list[Any], new: int, blocks: int, space: float, most: int) -> tuple[Any, Any]:
    """For each pair of prompts ms from the first's end to the second's next token, ms a step alone, and tokens left."""
    options = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=blocks, max_batch_tokens=most, max_requests_per_batch=2, safety_margin=0.0,
        allow_block_sharing=False, cpu_offload_space=space,
    )  # fmt: skip
    generation = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
    batching, rows = TurboQuantBatching(model, PRESET, balance=False), []
    with batching.continuous_batching_context_manager(generation, continuous_batching_config=options) as manager:
        for pair in pairs:
            names = [manager.add_request(prompt, max_new_tokens=new, record_timestamps=True) for prompt in pair]
            results: dict[str, Any] = {}
            while len(results) < len(names):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError(f"The engine stopped: {manager.background_thread_status.fatal_error}")
                if result is not None:
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    results[result.request_id] = result
            first, second = (r.timestamps for r in sorted(results.values(), key=lambda r: r.timestamps[-1]))
            later = [1e3 * (moment - first[-1]) for moment in second if moment > first[-1]]
            steps = [after - before for before, after in zip(later[1:], later[2:], strict=False)]
            if steps:  # one of them was preempted
                rows.append((later[0], statistics.median(steps), len(later)))
        return rows, manager.batch_processor.cache.allocator


def run(tiny: bool) -> dict[str, Any]:
    """All of it, as a results file holds it."""
    torch.manual_seed(0)
    device = torch.device("cpu" if tiny else "cuda")
    tokens, new, space, most, count = (520, 420, 0.05, 2048, 1) if tiny else (16384, 400, 2.0, 8192, 3)
    config = LlamaConfig(**LLAMA_8B | (TINY if tiny else CUDA), dtype="float32" if tiny else "bfloat16")
    with device:
        model = LlamaForCausalLM(config).to(config.dtype).eval()
    record = provenance(device, f"random Llama, {'tiny' if tiny else '8B'} shape, {config.num_hidden_layers} layers")
    record |= {"dtype": str(config.dtype).removeprefix("torch."), "preset": PRESET, "tokens": tokens}
    lengths = tokens, tokens + 40
    pairs = [[torch.randint(3, config.vocab_size, (n,)).tolist() for n in lengths] for _ in range(count)]

    _, allocator = serve(model, pairs[:1], 4, 2 * (tokens // PAGE + 32), 0.0, most)
    held, page = allocator.pages_of(tokens), allocator.bytes_per_block
    blocks = held + allocator.pages_of(lengths[1]) + 3  # one request is preempted after some hundred tokens
    with Copies(check=True) as copies:
        serve(model, pairs[:1], new, blocks, space, most)
    record |= {"pages_checked": copies.checked, "pages_equal": copies.equal}
    with Copies() as copies:
        rows = {"pages from the CPU": serve(model, pairs, new, blocks, space, most)[0]}
    record["copies"] = {way: copies.summary(way) for way in ("out", "back")}
    rows["prompt read again"] = serve(model, pairs, new, blocks, 0.0, most)[0]
    record["next_token"] = {
        way: {
            "ms": statistics.median(wait for wait, *_ in found),
            "all_ms": [wait for wait, *_ in found],
            "step_ms": statistics.median(step for _, step, _ in found),
            "tokens_left": [left for *_, left in found],
        }
        for way, found in rows.items()
    }
    bf16 = tokens * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 2
    record["request"] = {"pages": held, "bytes": held * page, "bf16_bytes": bf16}
    if not tiny:
        host = torch.empty(bf16, dtype=torch.uint8, pin_memory=True)
        target, marks = torch.empty_like(host, device=device), []
        for _ in range(7):
            start = mark()
            target.copy_(host, non_blocking=True)
            marks.append((start, mark()))
        record["request"]["bf16_copy_ms"] = median_ms(marks)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short prompts on the CPU")
    parser.add_argument("--output", type=Path, help="the JSON file, by default in examples/results")
    arguments = parser.parse_args()
    record = run(arguments.tiny)
    output = arguments.output or RESULTS / f"offload-{slug(torch.device('cpu' if arguments.tiny else 'cuda'))}.json"
    output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
