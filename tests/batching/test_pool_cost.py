"""A step costs what it reads and writes, whatever the size of the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from tq_kernels.format import due_blocks
from tq_kernels.types import AttentionOptions, Sequences, Tokens

from tests.support.helpers import all_packed, states
from tq_hf.ops.dispatch import paged_step, windowed_step
from tq_hf.ops.sliding_pages import plan_step
from tq_hf.tensors.pages import LayerPages, LayerWindows

HEADS, QUERY_HEADS, DIM, LAYERS, WINDOW = 2, 6, 64, 2, 96
SINKS, HELD = 4, 4 + 8 * 128 + 100
"""Sinks; tokens of a request: sinks, eight blocks and a part of another."""


def allocated_bytes(call: Callable[[], Any]) -> int:
    """Bytes that operations of a call allocate, with what they copy inside of them, which no dispatch mode sees."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    return sum(max(0, event.self_cpu_memory_usage) for event in found.events())


def layer(kind: str, pages: int) -> LayerPages | LayerWindows:
    """The last layer of a pool of that many pages, in bfloat16."""
    config = all_packed(sink_tokens=SINKS, residual_length=128)
    if kind == "windows":
        return LayerWindows(torch.zeros(pages, LAYERS, 2, 36, HEADS, DIM).bfloat16()[:, -1], WINDOW, trash=1)
    if kind == "dense":
        page = torch.zeros(pages, LAYERS, HEADS, 128 * 2 * DIM * 2, dtype=torch.uint8)[:, -1]
        return LayerPages.of(page, config, config.layout(DIM), torch.bfloat16, False)
    pool = torch.zeros(pages, LAYERS, HEADS, config.layout(DIM).block_bytes, dtype=torch.uint8)
    return LayerPages.of(pool[:, LAYERS - 1], config, config.layout(DIM), torch.bfloat16)


def step_of(held: LayerPages | LayerWindows, new: int, **softcap: float) -> Callable[[], torch.Tensor]:
    """A step of one request with `HELD` tokens and `new` ones, which reads and writes the first pages of the pool."""
    heads = (QUERY_HEADS, HEADS, HEADS)
    tokens = Tokens(*(states(i, 1, n, new, DIM)[0][0].transpose(0, 1).bfloat16() for i, n in enumerate(heads)))
    options = AttentionOptions(0.2, **softcap)
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (new, HELD + new))
    if isinstance(held, LayerWindows):
        sequences = Sequences(
            cu_q, cu_k, 2 + torch.arange(-(-held.window // held.rows_per_page), dtype=torch.int32)[None], None, new
        )
        step = plan_step(sequences, new)
        return lambda: windowed_step(tokens, held, step, options)
    columns = held.tensors.first_block_column + due_blocks(HELD + new, SINKS, 0)
    table = torch.arange(columns, dtype=torch.int32)[None]
    sequences = Sequences(cu_q, cu_k, table, torch.tensor([held.config.num_blocks(HELD)]), new)
    return lambda: paged_step(tokens, held, sequences, options)


@pytest.mark.parametrize("softcap", [{}, {"softcap": 2.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize("new", [1, 40, 300])
@pytest.mark.parametrize("kind", ["packed", "dense", "windows"])
def test_a_step_allocates_the_same_in_a_small_pool_and_in_a_large_one(kind: str, new: int, softcap: dict) -> None:
    costs = []
    for pages in (40, 10_000 if kind == "packed" else 1000):
        step = step_of(layer(kind, pages), new, **softcap)
        step()  # tables that are made once
        costs.append(allocated_bytes(step))
    assert costs[0] == costs[1] > 0
