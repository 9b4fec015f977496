"""The geometry of a step, made on the device from the engine's lists."""

from __future__ import annotations

import pytest
import torch
from tq_kernels.format import BLOCK_TOKENS
from tq_kernels.types import Sequences
from transformers import LlamaConfig

from tests.support.helpers import cumulative
from tq_hf import TurboQuantConfig
from tq_hf.batching.allocators import TableShape, TurboQuantAllocator, listed, sequences_of

RINGS = {"4bit_nc": 16, "2bit_nc": 32}
"""Pages of a ring of 256 float32 rows at head_dim 64."""


def allocator(preset: str, tables: dict[str, list[int]], sinks: int = 4) -> TurboQuantAllocator:
    config = LlamaConfig(head_dim=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    tq_config = TurboQuantConfig.from_preset(preset, sink_tokens=sinks)
    place = dict(index=0, layer_indices=[0, 1], num_key_value_heads=2, config=config, cache_dtype=torch.float32)
    place |= dict(page_size=BLOCK_TOKENS, allow_block_sharing=True)
    made = TurboQuantAllocator(tq_config, {}, tq_config.layout(64), **place)
    made.block_table = tables
    return made


def step(
    preset: str, past: list[int], new: list[int], padding: int, sinks: int
) -> tuple[Sequences, TurboQuantAllocator]:
    """The sequences of a step of such requests, and the allocator of their tables; the second began with a block."""
    lengths = [p + n for p, n in zip(past, new, strict=True)]
    numbers = iter(torch.randperm(500, generator=torch.Generator().manual_seed(1)).tolist())
    made = allocator(preset, {}, sinks)
    assert made.shape.ring_pages == RINGS[preset]
    made.block_table = {str(i): [next(numbers) for _ in range(made.pages_of(n))] for i, n in enumerate(lengths)}
    if len(past) > 1 and past[1] >= sinks + BLOCK_TOKENS:
        made.prefix_blocks["1"] = 1
    read: list[int] = []
    write: list[int] = []
    for i, (p, n) in enumerate(zip(past, new, strict=True)):
        read += made.get_read_indices(str(i), p, n) if any(past) else []
        write += made.get_write_indices(str(i), p, n)
    nobody = [0] * padding
    assert len(read) <= sum(lengths) and len(write) == sum(new)
    kwargs = dict(
        cu_seq_lens_q=cumulative(new + nobody),
        cu_seq_lens_k={"full_attention": cumulative(lengths + nobody)},
        max_length_q=max(new) + padding,
        max_length_k={"full_attention": max(lengths)},
        read_index=[torch.tensor(read + nobody if any(past) else [], dtype=torch.int64)],
        write_index=[torch.tensor(write + nobody, dtype=torch.int64)],
        block_table=None,
    )
    sequences = sequences_of(kwargs, made.shape)
    assert sequences.max_q == max(new) + padding
    assert sequences.block_table.dtype == torch.int32
    return sequences, made


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("preset", RINGS)
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    ("past", "new"),
    [
        ([0, 140, 255, 0, 127], [1, 1, 1, 400, 1]),
        ([7, 400, 384, 1000], [1, 1, 1, 1]),
        ([300, 1], [500, 2]),
        ([0, 0, 0, 0], [1, 128, 127, 300]),
        ([0], [17]),
    ],
    ids=str,
)
def test_the_table_of_a_step_is_made_of_listed_pages(
    preset: str, padding: int, past: list[int], new: list[int], sinks: int
) -> None:
    sequences, own = step(preset, past, new, padding, sinks)
    made, shape = sequences.block_table, own.shape
    assert made.shape[0] == len(past) + padding
    for i, (p, n) in enumerate(zip(past, new, strict=True)):
        row, table, ring = made[i].tolist(), own.block_table[str(i)], shape.ring_pages
        count = shape.shared_blocks
        assert row[ring:count] == table[ring:count]
        assert row[count] == (own.prefix_blocks.get(str(i), 0) if p + n >= BLOCK_TOKENS else -1)
        assert row[count + 1 : len(table) + 1] == table[count:]
        assert set(row[len(table) + 1 :]) <= {-1}
        # Of the ring: every page that holds a row before this step, or gets one.
        needed = {t % (ring * shape.page_rows) // shape.page_rows for t in range(max(0, p + n - sinks))}
        assert all(row[page] == table[page] for page in needed)
        assert all(row[page] in (-1, table[page]) for page in range(ring))
        assert sequences.packed is not None
        assert sequences.packed[i] == max(own.prefix_blocks.get(str(i), 0), (p - sinks - 128) // BLOCK_TOKENS, 0)
    assert (made[len(past) :, : shape.ring_pages] == -1).all()


@pytest.mark.parametrize("sinks", [0, 1, 4, 8, None])
@pytest.mark.parametrize(("pages", "rows"), [(4, 32), (8, 32), (32, 8), (16, 16), (2, 128), (41, 8)])
def test_a_request_lists_no_more_numbers_than_it_has_tokens(pages: int, rows: int, sinks: int | None) -> None:
    """The engine makes room for as many as there are tokens; those of tensors and of numbers are alike. Without sinks
    (`None`) a window: a ring without blocks."""
    shape = TableShape(sinks or 0, pages * rows - BLOCK_TOKENS, pages, rows, has_blocks=sinks is not None)
    numbers = [listed(n, shape) for n in range(2000)]
    assert all(sum(each) <= n for n, each in enumerate(numbers))
    assert torch.stack(listed(torch.arange(2000), shape), 1).tolist() == [list(each) for each in numbers]


def test_block_tables_are_taken_as_they_are() -> None:
    block_table = torch.arange(12, dtype=torch.int32).view(1, 3, 4)
    cu_seqlens_q, cu_seqlens_k = cumulative([1, 1, 0]), cumulative([300, 4, 0])
    kwargs = dict(
        block_table=block_table,
        cu_seq_lens_q=cu_seqlens_q,
        cu_seq_lens_k={"full_attention": cu_seqlens_k},
        max_length_q=8,
    )
    sequences = sequences_of(kwargs, TableShape(0, 0, 2, 64))
    assert sequences.block_table.data_ptr() == block_table.data_ptr() and sequences.max_q == 1
    assert sequences.cu_seqlens_q is cu_seqlens_q and sequences.cu_seqlens_k is cu_seqlens_k


def test_a_row_of_the_block_table_ends_with_what_the_step_reads() -> None:
    made = allocator("4bit_nc", {"a": list(range(20, 40))})
    made.prefix_blocks["a"] = 1
    row = torch.full((24,), -1, dtype=torch.int32)
    made.fill_block_table("a", 258, 1, row)
    assert row.tolist() == [*range(20, 37), 1, 37, *[-1] * 5]
