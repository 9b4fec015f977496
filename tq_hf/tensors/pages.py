"""Pages of many requests, as one layer reads them: a pool of equal pages, and a table of pages for each request.

A page of a KV head is one packed block of 128 tokens, or some rows of a request: dense keys and values. Equal pages in
one pool need no second budget, and a request is wholly described by its table:

    [ring page 0 .. ring_pages - 1][sink page][count][block 0][block 1] ..

Tokens are divided as in a `TurboQuantCache`: sinks, then blocks of 128, the newest dense. The sink page has the first
`sink_tokens` (without sinks there is no sink page). The *ring* has the newest tokens, at least `residual_length` and an
open block; token t is in row `(t - sink_tokens) % rows of the ring`. A block is encoded once it is complete, and read
once all its tokens are older than `residual_length`: until then the ring has them, too. A request that began with
shared blocks has no rows of their tokens; it reads those blocks at once, and `count` is their number.

The pool is one uint8 tensor `[pages, layers, Hkv, layout.block_bytes]`. A head's block lies in one piece, `[key words |
value words | scales | key means]`, and starts at a multiple of 16 bytes (128 without loud channels) at head_dim 64, 128
and 256. The same bytes as rows are `[rows_per_page, Dk + Dv]` of the model's dtype: a token's key, then its value.
Latents (MLA) are keys of one head, and rotary keys are their values.

A layer that is not compressed (`skip_layers`) has the same table: its part of a block's page is the rows of all 128
tokens (a whole number of blocks in bytes), and its ring and sinks are as those of other layers. All pages are shared,
copied and offloaded in the same way.

Sliding layers keep dense rows in pages of the same pool. A request has room for its last `window` tokens. The token at
position p is in row p % window, and takes the place of the one that just slid out; row r is row `r % rows_per_page` of
page `r // rows_per_page` of the request's table. Its pages are as large as one or several pages of packed blocks
(`window_page`), so that one pool gives out both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch
from tq_kernels.format import BLOCK_TOKENS
from tq_kernels.layout import BlockLayout
from tq_kernels.types import ChannelScales, KeyValue, PackedBlocks, Pages

from ..config import TurboQuantConfig

LEAST_ROWS = 32
"""Least number of rows of a sliding layer's page, if its window has as many."""


def rows_per_page(layout: BlockLayout, dtype: torch.dtype) -> int:
    """Number of dense rows of a page: the power of two, at most 128, that fits into the bytes of a packed block."""
    fit = layout.block_bytes // ((layout.key_dim + layout.value_dim) * dtype.itemsize)
    return min(BLOCK_TOKENS, 1 << fit.bit_length() - 1)


def ring_pages(config: TurboQuantConfig, layout: BlockLayout, dtype: torch.dtype) -> int:
    """Number of pages of a ring: for `residual_length` tokens and an open block, the new token included."""
    return -(-(config.residual_length + BLOCK_TOKENS) // rows_per_page(layout, dtype))


@dataclass(frozen=True, eq=False)
class LayerPages:
    """One layer's view of the pool.

    Args:
        config: Configuration of the blocks.
        layout: Sizes of a block.
        tensors: The pages, as packed blocks and as dense rows.
        blocks: Blocks as rows, `[pages, Hkv, 128, Dk + Dv]`, if the layer is not compressed.
    """

    config: TurboQuantConfig
    layout: BlockLayout
    tensors: Pages
    blocks: torch.Tensor | None = None
    launches: dict[str, Any] = field(init=False, repr=False, default_factory=dict)
    """A backend's launches for these tensors, as of `tq_hf.tensors.layer.LayerTensors`."""

    @classmethod
    def of(
        cls,
        page: torch.Tensor,
        config: TurboQuantConfig,
        layout: BlockLayout,
        dtype: torch.dtype,
        is_packed: bool = True,
    ) -> LayerPages:
        """Make one layer's view of a pool for a model in `dtype`, with channel scales of one.

        Args:
            page: `[pages, Hkv, layout.block_bytes]` uint8; from page to page a whole number of blocks. In a layer that
                is not compressed `[pages, Hkv, 128 * (Dk + Dv) * bytes of a number]`; blocks are rows there, rings and
                sinks are as in other layers.
            config, layout: Configuration and sizes of packed blocks, also of other layers.
        """
        shape = rows_per_page(layout, dtype), layout.key_dim + layout.value_dim
        rows = page[..., : prod(shape) * dtype.itemsize].view(dtype).unflatten(-1, shape)
        ones = ChannelScales.allocate(1, page.shape[1], layout.key_dim, layout.value_dim, page.device)
        scales, ring = (ones.keys[0], ones.values[0]), ring_pages(config, layout, dtype)
        packed = page if is_packed else page.new_empty(0)
        assert not is_packed or page.stride(0) % layout.block_bytes == 0
        pages = Pages(layout, packed.view(torch.int32), rows, *scales, config.sink_tokens, ring)
        dense = None if is_packed else page.view(dtype).unflatten(-1, (BLOCK_TOKENS, shape[1]))
        return cls(config, layout, pages, dense)

    def with_channel_scales(self, channel_scales: ChannelScales) -> LayerPages:
        """This view with other channel scales, `[1, Hkv, D]` on any device. Raises `ValueError` for scales of heads of
        another number or size."""
        self.channel_scales.check(channel_scales)
        keys, values = (factor[0].to(self.tensors.rows.device) for factor in channel_scales)
        return replace(self, tensors=self.tensors._replace(key_channel_scales=keys, value_channel_scales=values))

    @property
    def channel_scales(self) -> ChannelScales:
        """Channel scales of all requests, `[1, Hkv, D]`: states are multiplied by them before encoding."""
        return ChannelScales(self.tensors.key_channel_scales[None], self.tensors.value_channel_scales[None])

    @property
    def kv_heads(self) -> int:
        """Hkv."""
        return self.tensors.rows.shape[1]

    def packed(self, pages: torch.Tensor) -> PackedBlocks:
        """A copy of the packed blocks of `pages` `[n]`, as n blocks of one sequence, a head's one behind the other."""
        heads = torch.arange(self.kv_heads, device=pages.device)[:, None]
        # `index_select` of a view whose pages are not the first dimension would copy the pool.
        return PackedBlocks(self.layout, self.tensors.blocks[pages, heads][None], self.channel_scales)

    def write_packed(self, pages: torch.Tensor, blocks: PackedBlocks) -> None:
        """Write n blocks of one sequence to `pages` `[n]`."""
        self.tensors.blocks[pages] = blocks.data[0].transpose(0, 1)

    def block_rows(self, pages: torch.Tensor) -> KeyValue:
        """Keys and values `[1, Hkv, n * 128, D]` of the blocks in `pages` `[n]` of a layer that is not compressed."""
        assert self.blocks is not None
        return self.states(_joined(self.blocks[pages]))

    def write_block_rows(self, pages: torch.Tensor, states: KeyValue) -> None:
        """Write keys and values `[1, Hkv, n * 128, D]` to the blocks in `pages` `[n]`."""
        assert self.blocks is not None
        self.blocks[pages] = torch.cat(states, -1)[0].unflatten(1, (len(pages), BLOCK_TOKENS)).transpose(0, 1)

    def rows(self, pages: torch.Tensor) -> torch.Tensor:
        """A copy of the rows of ring and sinks in `pages`, as `tq_hf.tensors.layer.LayerTensors.rows` of one sequence:
        `[1, Hkv, ring_rows + sinks, Dk + Dv]`."""
        return _joined(self.tensors.rows[pages])[:, :, : self.tensors.ring_rows + self.tensors.sinks]

    def write_rows(self, pages: torch.Tensor, row: torch.Tensor, states: KeyValue) -> None:
        """Write keys and values `[1, Hkv, n, D]` to rows `row` `[n]`, counted through all of `pages`."""
        page, row = pages[row // self.tensors.page_rows], row % self.tensors.page_rows
        self.tensors.rows[page, :, row] = torch.cat(states, -1)[0].transpose(0, 1)

    def states(self, rows: torch.Tensor) -> KeyValue:
        """Keys and values `[1, Hkv, n, D]` of rows `[1, Hkv, n, Dk + Dv]`, views."""
        keys, values = rows.split([self.layout.key_dim, self.layout.value_dim], -1)
        return keys, values


def _joined(rows: torch.Tensor) -> torch.Tensor:
    """Rows `[1, Hkv, pages * rows, Dk + Dv]` of rows `[pages, Hkv, rows, Dk + Dv]`."""
    return rows.transpose(0, 1).flatten(1, 2)[None]


def window_page(unit: int, row_bytes: int, window: int) -> tuple[int, int]:
    """Bytes and rows of a page of all sliding layers: the fewest multiples of `unit` that have room for `LEAST_ROWS`.

    Less than a row of a page is never used: a thirtieth of it at most.

    Args:
        unit: Bytes; the size of a page is a multiple.
        row_bytes: Bytes of a token's keys and values in all these layers.
        window: Number of a request's tokens that are held.
    """
    size = -(-min(window, LEAST_ROWS) * row_bytes // unit) * unit
    return size, min(window, size // row_bytes)


@dataclass(frozen=True, eq=False)
class LayerWindows:
    """One sliding layer's view of the pool.

    Args:
        rows: `[pages, 2, rows_per_page, Hkv, D]` in the model's dtype; keys at 0, values at 1. Page 0 is zero and never
            written.
        window: Number of tokens that a query may attend to, its own included.
        trash: Page that is never read.
    """

    rows: torch.Tensor
    window: int
    trash: int

    @property
    def rows_per_page(self) -> int:
        """Number of tokens of a page."""
        return self.rows.shape[2]

    def places(self, block_table: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages and rows in them, `[.., n]` int64, of tokens at `position` `[.., n]` of requests with these tables
        `[.., >= pages in use]`."""
        row = position.long() % self.window
        return block_table.long().take_along_dim(row // self.rows_per_page, -1), row % self.rows_per_page

    def read(self, page: torch.Tensor, row: torch.Tensor) -> KeyValue:
        """A copy of the keys and values `[.., n, Hkv, D]` in rows `row` of pages `page`, `[.., n]` int64 each."""
        held = self.rows[page, :, row]
        return held[..., 0, :, :], held[..., 1, :, :]

    def write(self, page: torch.Tensor, row: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values `[n, Hkv, D]` to rows `row` of pages `page`, `[n]` int64 each."""
        self.rows[page, :, row] = torch.stack([keys, values], 1)


class WindowRows(NamedTuple):
    """Rows of the windows of N requests with one new token, the same in all layers. Padding tokens hold nothing.

    Args:
        exists: Whether a token is no padding, `[N]` bool.
        new: Page and row of the new token, `[N]` int64 each.
        held: Whether a row has a token, the new one included, `[N, window]` bool.
        places: Page (0, which is zero, if nothing is held) and row, `[N, window]` int64 each.
    """

    exists: torch.Tensor
    new: tuple[torch.Tensor, torch.Tensor]
    held: torch.Tensor
    places: tuple[torch.Tensor, torch.Tensor]


@dataclass(eq=False)
class WindowStep:
    """The requests of a step, N of them with one new token.

    Args:
        tokens: Indices of these tokens in the step, `[N]` int64; `None` for all tokens.
        past: Number of tokens held before, `[N]` int32; -1 for a padding token.
        block_table: Their pages, `[N, >= pages in use]` int32, contiguous.
        prompts: Slice of the new tokens among all, number of tokens before them, and pages `[>= pages in use]`: for
            each request with several new tokens.
    """

    tokens: torch.Tensor | None
    past: torch.Tensor
    block_table: torch.Tensor
    prompts: list[tuple[slice, int, torch.Tensor]]
    _rows: WindowRows | None = field(init=False, repr=False, default=None)

    def rows(self, windows: LayerWindows) -> WindowRows:
        """Rows of the windows, which the first layer that asks computes for all."""
        if self._rows is None:
            exists, slots = self.past >= 0, torch.arange(windows.window, device=self.past.device)
            page, row = windows.places(self.block_table, self.past.clamp(min=0)[:, None])
            new = torch.where(exists, page[:, 0], windows.trash), row[:, 0]
            held = slots <= self.past[:, None]
            page, row = windows.places(self.block_table, slots.expand_as(held))
            self._rows = WindowRows(exists, new, held, (torch.where(held, page, 0), row))
        return self._rows
