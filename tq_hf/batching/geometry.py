"""Block table of a step, built on the device from the arguments that the engine passes to attention.

If every request has one new token, the engine passes a block table. Otherwise it passes two lists: `read_index` has one
number per cached token of all requests in sequence, `write_index` one per new token. Our allocators fill the part of a
request in both lists with the entries of its block table that `listed` counts. There are never more of these entries
than tokens, so the lists have room for them. `read_index` is empty in a step where no request has cached tokens.

Sliding-window layers have lists and tables of their own, for rings without blocks; the states of linear layers are a
ring of one page.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from tq_kernels.format import BLOCK_TOKENS, due_blocks
from tq_kernels.layout import BlockLayout
from tq_kernels.types import Sequences

from ..config import TurboQuantConfig
from ..tensors.pages import ring_pages, rows_per_page

Length = TypeVar("Length", int, torch.Tensor)
HostLengths = tuple[tuple[int, ...], tuple[int, ...]]
"""Numbers of new tokens, and of cached ones, by request."""


class TableShape(NamedTuple):
    """Columns of a block table (see `tq_hf.tensors.pages`): `sinks` and `residual` tokens at the start and at the end
    are read as rows, and a ring has `ring_pages` pages of `page_rows` rows. Windows are rings without blocks."""

    sinks: int
    residual: int
    ring_pages: int
    page_rows: int
    has_blocks: bool = True

    @classmethod
    def of(cls, config: TurboQuantConfig, layout: BlockLayout, dtype: torch.dtype) -> TableShape:
        """Shape for blocks of `layout` and states of `dtype`."""
        rings, rows = ring_pages(config, layout, dtype), rows_per_page(layout, dtype)
        return cls(config.sink_tokens, config.residual_length, rings, rows)

    @property
    def sink_pages(self) -> int:
        """Number of sink pages, 0 or 1. They follow the ring."""
        return min(1, self.sinks)

    @property
    def shared_blocks(self) -> int:
        """Column that has no page but the number of shared blocks that a request began with. Blocks follow."""
        return self.ring_pages + self.sink_pages

    def width(self, length: int) -> int:
        """Number of columns for a request of `length` tokens."""
        return self.ring_pages + self.has_blocks * (self.sink_pages + 1 + due_blocks(length, self.sinks, 0))

    def longest(self, width: int) -> int:
        """Number of tokens of the longest request that fits into `width` columns."""
        blocks = width - self.shared_blocks - 1
        return self.sinks + BLOCK_TOKENS * (blocks + 1) - 1 if blocks >= 0 else 0


def listed(length: Length, shape: TableShape) -> tuple[Length, Length]:
    """Count the table entries of a request of `length` tokens that the engine's lists carry: ring pages with tokens,
    and entries after the ring. A request of fewer than 128 tokens has only the sink page there: it shares no blocks."""
    rows = (length - shape.sinks) * (length > shape.sinks)
    reached = (rows + shape.page_rows - 1) // shape.page_rows
    ring = reached + (shape.ring_pages - reached) * (reached > shape.ring_pages)
    after = shape.sink_pages * (length > 0) + (length >= BLOCK_TOKENS) + rows // BLOCK_TOKENS
    return ring, after * shape.has_blocks


def sequences_of(
    kwargs: dict[str, Any], shape: TableShape, index: int = 0, lengths: HostLengths | None = None
) -> Sequences:
    """Build the sequences of a step for layers of kind `index`, with tables in this shape, by the arguments that the
    engine passes to attention functions, and `lengths` and `past` on the host, if known. No value is read from the
    device, so graphs can replay this."""
    cu_seqlens_q, cu_seqlens_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]["full_attention"]
    if kwargs["block_table"] is not None:
        table, max_q = kwargs["block_table"][index], 1
    else:
        read, write = kwargs["read_index"][index], kwargs["write_index"][index]
        longest, max_q = kwargs["max_length_k"]["full_attention"], kwargs["max_length_q"]
        column = torch.arange(shape.width(longest), device=write.device)
        in_ring, entry = column < shape.ring_pages, column - shape.ring_pages
        if read.numel():
            ring, after = listed(cu_seqlens_k.diff()[:, None], shape)  # [B, 1]; column indices are [width]
            start = (ring + after).cumsum(0) - (ring + after)
        else:
            ring, after = listed(cu_seqlens_q.diff()[:, None], shape)
            read, start = write, cu_seqlens_q[:-1, None]
        place = start + torch.where(in_ring, column, ring + entry)
        has_entry = torch.where(in_ring, column < ring, entry < after)
        table = torch.where(has_entry, read[place.clamp(0, len(read) - 1)], -1).int()
    if not shape.has_blocks:
        return Sequences(cu_seqlens_q, cu_seqlens_k, table[:, : shape.ring_pages], None, max_q)
    past = cu_seqlens_k.diff() - cu_seqlens_q.diff()
    packed = (past - shape.sinks - shape.residual).clamp(min=0) // BLOCK_TOKENS
    # The number of shared blocks is -1 in a table that does not list it.
    packed = torch.maximum(packed, table[:, shape.shared_blocks])
    return Sequences(cu_seqlens_q, cu_seqlens_k, table, packed, max_q, *(lengths or ()))
