"""Measure a decode step of one layer over pages beside the same step over a preallocated cache's tensors.

Both append a token to each sequence, encode a block where one is complete (none is here), attend and merge, as one CUDA
graph. L2 is flushed before each replay, and counts on the device are set back: the number of dense tokens stays. Times
are medians, in microseconds.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Callable
from typing import Any

import torch
from tq_kernels.types import AttentionOptions, PackedBlocks, Sequences, Tokens

from examples.provenance import provenance
from tq_hf import TurboQuantConfig
from tq_hf.ops.triton import blocks, pages
from tq_hf.tensors.layer import DeviceCounts, LayerTensors
from tq_hf.tensors.pages import LayerPages, ring_pages

SHAPES = [(1, 2048), (1, 32768), (1, 131072), (8, 32768), (64, 16384)]
HEADS = [(32, 8, 128), (32, 4, 128), (16, 8, 256)]
PRESETS = ["k8v4", "4bit_nc", "2bit_nc"]
DENSE = [2, 130, 250]
"""Dense tokens besides the sinks, the new one included."""
RING, DTYPE = 256, torch.bfloat16


def replayed(call: Callable[[], Any], reset: Callable[[], Any], repeat: int) -> float:
    """Median time of a captured call in microseconds."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    lines, times = torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), []
    for _ in range(repeat + 3):
        reset()
        lines.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in times[3:])


def over_tensors(config: TurboQuantConfig, states: list[torch.Tensor], count: int, repeat: int) -> dict[int, float]:
    """Times by number of dense tokens, over `count` blocks of each sequence; `states` are `[B, heads, 1, D]`."""
    from examples.measure.speed.benchmark import random_blocks

    query, *new = states
    (batch, heads, _, dim), device = new[0].shape, query.device
    layout = config.layout(dim)
    packed = random_blocks(layout, batch, heads, count + 2, device)
    rows = torch.randn(batch, heads, RING + config.sink_tokens, 2 * dim, device=device, dtype=DTYPE)
    out = query.transpose(1, 2).contiguous()
    counts = torch.zeros(5, 4, dtype=torch.int32, device=device)
    length = torch.zeros((), dtype=torch.int64, device=device)
    launch = blocks.decode_launch(LayerTensors(config, packed, rows), DeviceCounts(counts, length), 1 << 20)
    options, scratch, times = AttentionOptions(dim**-0.5), torch.empty(1 << 24, device=device), {}

    def step() -> torch.Tensor:
        return launch(query, launch.held, None, options, lambda size: scratch, out, (new[0], new[1]))

    for dense in DENSE:
        state = torch.tensor([config.sink_tokens, count, dense - 1, 0], dtype=torch.int32, device=device)
        counts[:4, 0] = state
        times[dense] = replayed(step, functools.partial(counts[:4, 0].copy_, state), repeat)
    return times


def over_pages(config: TurboQuantConfig, states: list[torch.Tensor], count: int, repeat: int) -> dict[int, float]:
    """As `over_tensors`, over shuffled pages."""
    from examples.measure.speed.benchmark import randomized

    new = Tokens(*(x.squeeze(2) for x in states))
    (batch, heads, dim), device = new.key.shape, new.key.device
    layout = config.layout(dim)
    dense_pages = ring_pages(config, layout, DTYPE) + 1
    each = dense_pages + 1 + count + 1
    pool = torch.empty(batch * each, 1, heads, layout.block_bytes, dtype=torch.uint8, device=device)
    layer = LayerPages.of(pool[:, 0], config, layout, DTYPE)
    randomized(PackedBlocks(layout, layer.tensors.blocks[:, :, None], layer.channel_scales))
    table = torch.randperm(batch * each, device=device).int().view(batch, each)
    own = table[:, :dense_pages].flatten().long()
    layer.tensors.rows[own] = torch.randn(len(own), *layer.tensors.rows.shape[1:], device=device, dtype=DTYPE)
    starts = torch.arange(batch + 1, device=device, dtype=torch.int32)
    packed = torch.full((batch,), count, dtype=torch.int32, device=device)
    times = {}
    for dense in DENSE:
        lengths = starts * (config.sink_tokens + 128 * count + dense)
        step = (new, layer, Sequences(starts, lengths, table, packed, 1), AttentionOptions(dim**-0.5))
        times[dense] = replayed(functools.partial(pages.paged_step, *step), lambda: None, repeat)
    return times


def run(only: str | None, save: Callable[[dict[str, Any]], None], repeat: int) -> dict[str, Any]:
    """Measure all cells; saves after each, so that a run that is cut short keeps what it measured."""
    device, cells = torch.device("cuda", 0), []
    record: dict[str, Any] = provenance(device, "attention alone") | {"cells": cells}
    for heads in HEADS:
        for preset in PRESETS:
            for batch, length in SHAPES:
                if only is not None and not re.search(only, f"{heads} {preset} {batch}x{length}"):
                    continue
                config = TurboQuantConfig.from_preset(preset)
                count = config.num_blocks(length)
                shapes = [(batch, 1, n, heads[2]) for n in (heads[0], heads[1], heads[1])]
                states = [torch.randn(*shape, device=device, dtype=DTYPE).transpose(1, 2) for shape in shapes]
                tensors, paged = (of(config, states, count, repeat) for of in (over_tensors, over_pages))
                cell = {"heads": heads, "preset": preset, "batch": batch, "length": length}
                cells.append(cell | {"tensors_us": tensors, "pages_us": paged})
                ratios = ", ".join(f"{paged[dense] / tensors[dense]:.3f}" for dense in DENSE)
                print(f"{heads} {preset} {batch} x {length}: tensors {tensors[DENSE[1]]:.1f} us, ratios {ratios}")
                save(record)
    return record
