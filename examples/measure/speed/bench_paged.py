"""Print what a layer's decode step takes in continuous batching: over sliding windows, in the kernel and in torch, and
over packed pages with and without sinks. Times are those of replayed CUDA graphs, on an idle GPU.

    python -m examples.measure.speed.bench_paged
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tq_kernels.types import AttentionOptions, Sequences
from triton.testing import do_bench

from examples.measure.speed.benchmark import captured, read_gigabytes_per_second
from tq_hf.batching.geometry import TableShape
from tq_hf.config import TurboQuantConfig
from tq_hf.ops import backend
from tq_hf.ops.dispatch import paged_step, windowed_step
from tq_hf.ops.sliding_pages import plan_step
from tq_hf.tensors.pages import LayerPages, LayerWindows

WINDOWS = {
    "gpt-oss-20b": (64, 8, 64, 128),
    "gemma-3-27b": (32, 16, 128, 1024),
    "gemma-3-4b": (8, 4, 256, 1024),
    "gemma-2-9b": (16, 8, 256, 4096),
}
"""Query heads, KV heads, channels, window."""
COUNTS = (1, 8, 32, 64)
ROWS = 37
BF16, DEVICE = torch.bfloat16, torch.device("cuda")


def sequences_of(length: int, pages: int, count: int, packed: int | None = None) -> Sequences:
    """`count` requests with one new token each and as many pages, all of whose pages are different."""
    tokens = torch.arange(count + 1, dtype=torch.int32, device=DEVICE)
    block_table = torch.randperm(count * pages, dtype=torch.int32, device=DEVICE).view(count, pages)
    blocks = None if packed is None else torch.full((count,), packed, dtype=torch.int32, device=DEVICE)
    return Sequences(tokens, tokens * (length + 1), block_table, blocks, 1)


def tokens_of(count: int, query_heads: int, heads: int, dim: int) -> list[torch.Tensor]:
    return [torch.randn(count, n, dim, dtype=BF16, device=DEVICE) for n in (query_heads, heads, heads)]


def microseconds(step: Callable[[], Any]) -> float:
    """Median time of a step in a graph, with a cold cache."""
    return 1e3 * do_bench(captured(step), warmup=20, rep=100, return_mode="median")


def over_windows(name: str, count: int, rate: float) -> str:
    """One line: microseconds of the kernel and of torch, and what reading the windows takes at `rate` GB/s."""
    query_heads, heads, dim, window = WINDOWS[name]
    pages = -(-window // ROWS)
    rows = torch.randn(count * pages, 2, ROWS, heads, dim, dtype=BF16, device=DEVICE)
    windows = LayerWindows(rows, window, trash=0)
    sequences, tokens = sequences_of(2 * window, pages, count), tokens_of(count, query_heads, heads, dim)
    plan = plan_step(sequences, count, windows)
    options = dict(softcap=50.0 if name.startswith("gemma-2") else None, s_aux=None)
    if name.startswith("gpt-oss"):
        options["s_aux"] = torch.randn(query_heads, dtype=BF16, device=DEVICE)
    step = partial(windowed_step, *tokens, windows, plan, AttentionOptions(dim**-0.5, **options))
    times, outputs = [], []
    for chosen in ("", "torch"):
        backend.chosen = chosen
        outputs.append(step())
        times.append(microseconds(step))
    backend.chosen = ""
    error = ((outputs[0] - outputs[1]).norm() / outputs[1].norm()).item()
    least = count * window * heads * dim * 4 / rate / 1e3
    return (
        f"{name:12} {count:3} requests: kernel {times[0]:7.1f} us, torch {times[1]:7.1f} us, "
        f"reading {least:6.1f} us, difference {error:.1e}"
    )


def over_pages(count: int, length: int) -> str:
    """One line: microseconds of a step over packed pages of an 8B Llama, all packed but an open block and as by
    default."""
    query_heads, heads, dim = 32, 8, 128
    times = []
    for options in (dict(residual_length=0, sink_tokens=0), {}):
        config = TurboQuantConfig.from_preset("4bit_nc", **options)
        layout, shape = config.layout(dim), TableShape.of(config, config.layout(dim), BF16)
        width = shape.width(length + 1)
        # Any bytes but NaN: the same small words and scales everywhere.
        pool = torch.full((count * width, 1, heads, layout.block_bytes), 17, dtype=torch.uint8, device=DEVICE)
        pages = LayerPages.of_pool(pool, 0, config, layout, BF16)
        sequences = sequences_of(length, width, count, config.num_blocks(length))
        step = partial(paged_step, *tokens_of(count, query_heads, heads, dim), pages, sequences)
        times.append(microseconds(partial(step, AttentionOptions(dim**-0.5))))
    return f"{count:3} x {length:6,} packed: {times[0]:7.1f} us without sinks and residual, {times[1]:7.1f} us with"


def main() -> None:
    rate = read_gigabytes_per_second(DEVICE)
    print(f"{torch.cuda.get_device_name()}, reads {rate:,.0f} GB/s")
    for name in WINDOWS:
        for count in COUNTS:
            print(over_windows(name, count, rate))
    for count, length in ((32, 2048), (64, 16384)):
        print(over_pages(count, length + 77))


if __name__ == "__main__":
    main()
