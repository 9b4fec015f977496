"""Builds the block table of a step, on the device, from the arguments that the engine passes to attention.

The engine passes lists: `read_index`, the cached tokens of all requests one after the other, and `write_index`, a place
for each new token; or a block table, if every request has one new token. Our allocators fill a request's part of both
lists with numbers of its table, as many as `listed` says (never more than the request has tokens, for which the engine
allocates). `read_index` is empty in a step where no request has a history.

Sliding-window layers have lists and tables of their own, of the ceil(min(n, window) / rows_per_page) pages of a window.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from tq_kernels.format import BLOCK_TOKENS, due_blocks
from tq_kernels.types import Sequences

from ..config import TurboQuantConfig
from ..tensors.pages import LayerWindows, ring_pages, rows_per_page

Length = TypeVar("Length", int, torch.Tensor)


class TableShape(NamedTuple):
    """What the table of a request consists of (see `tq_hf.tensors.pages`).

    Args:
        sinks, residual: Tokens at the start and at the end that are read as rows.
        ring_pages: Pages of a ring.
        page_rows: Rows of a page.
    """

    sinks: int
    residual: int
    ring_pages: int
    page_rows: int

    @classmethod
    def of(cls, config: TurboQuantConfig, head_dim: int, dtype: torch.dtype) -> TableShape:
        """That of a model with such heads."""
        layout = config.layout(head_dim)
        rings, rows = ring_pages(config, layout, dtype), rows_per_page(layout, dtype)
        return cls(config.sink_tokens, config.residual_length, rings, rows)

    @property
    def sink_pages(self) -> int:
        """Pages between a ring and the count, 0 or 1."""
        return min(1, self.sinks)

    @property
    def first_block(self) -> int:
        """Column of block 0."""
        return self.ring_pages + self.sink_pages + 1

    def width(self, length: int) -> int:
        """Columns for a request of `length` tokens."""
        return self.first_block + due_blocks(length, self.sinks, 0)

    def longest(self, width: int) -> int:
        """Tokens of the longest request that so many columns are enough for."""
        blocks = width - self.first_block
        return self.sinks + BLOCK_TOKENS * (blocks + 1) - 1 if blocks >= 0 else 0


def listed(length: Length, shape: TableShape) -> tuple[Length, Length]:
    """Numbers that are listed of the table of a request of `length` tokens: ring pages that tokens have reached; and
    what comes after the ring. Of fewer than 128 tokens that is the sink page only: they had no blocks to begin with."""
    rows = (length - shape.sinks) * (length > shape.sinks)
    reached = (rows + shape.page_rows - 1) // shape.page_rows
    ring = reached + (shape.ring_pages - reached) * (reached > shape.ring_pages)
    return ring, shape.sink_pages * (length > 0) + (length >= BLOCK_TOKENS) + rows // BLOCK_TOKENS


def sequences_of(kwargs: dict[str, Any], shape: TableShape) -> Sequences:
    """The sequences of a step in full-attention layers. No value is read from the device, so graphs can replay it.

    Args:
        kwargs: The engine's arguments of attention functions.
        shape: What tables consist of.
    """
    cu_seqlens_q, cu_seqlens_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]["full_attention"]
    if kwargs["block_table"] is not None:
        table, max_q = kwargs["block_table"][0], 1
    else:
        read, write = kwargs["read_index"][0], kwargs["write_index"][0]
        longest, max_q = kwargs["max_length_k"]["full_attention"], kwargs["max_length_q"]
        column = torch.arange(shape.width(longest), device=write.device)
        in_ring, index = column < shape.ring_pages, column - shape.ring_pages
        if read.numel():
            ring, after = listed(cu_seqlens_k.diff()[:, None], shape)  # [B, 1], as all below but columns
            start = (ring + after).cumsum(0) - (ring + after)
        else:
            ring, after = listed(cu_seqlens_q.diff()[:, None], shape)
            read, start = write, cu_seqlens_q[:-1, None]
        place = start + torch.where(in_ring, column, ring + index)
        table = _picked(read, place, torch.where(in_ring, column < ring, index < after))
    past = cu_seqlens_k.diff() - cu_seqlens_q.diff()
    packed = (past - shape.sinks - shape.residual).clamp(min=0) // BLOCK_TOKENS
    # Of a table without a count the column has no page.
    return Sequences(cu_seqlens_q, cu_seqlens_k, table, torch.maximum(packed, table[:, shape.first_block - 1]), max_q)


def windows_of(kwargs: dict[str, Any], index: int, windows: LayerWindows) -> Sequences:
    """As `sequences_of`, in the sliding-window layers: `index` is their place among the kinds of layers, `windows` are
    those of any of them."""
    cu_seqlens_q, cu_seqlens_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]["full_attention"]
    if kwargs["block_table"] is not None:
        return Sequences(cu_seqlens_q, cu_seqlens_k, kwargs["block_table"][index][:, : windows.pages], None, 1)
    read, write, rows = kwargs["read_index"][index], kwargs["write_index"][index], windows.rows_per_page
    column = torch.arange(windows.pages, device=write.device)
    if read.numel():
        count = (cu_seqlens_k.diff()[:, None].clamp(max=windows.window) + rows - 1) // rows
        table = _picked(read, count.cumsum(0) - count + column, column < count)
    else:
        token = column * rows
        table = _picked(write, cu_seqlens_q[:-1, None] + token, token < cu_seqlens_q.diff()[:, None])
    return Sequences(cu_seqlens_q, cu_seqlens_k, table, None, kwargs["max_length_q"])


def _picked(numbers: torch.Tensor, place: torch.Tensor, listed: torch.Tensor) -> torch.Tensor:
    """`numbers[place]` where `listed`, else -1."""
    return torch.where(listed, numbers[place.clamp(0, len(numbers) - 1)], -1).int()
