"""From what the engine passes to attention to the geometry of a step, on the device.

The engine moves lists of numbers for us: `read_index`, the cached tokens of all requests one after the other, and
`write_index`, a place for each new token; or, if every request has one new token, a table of blocks. Here the first
carries page numbers, of which a request of n tokens has

    min(ring_pages, ceil(n / rows_per_page)) ring pages, then n // 128 blocks, the sink page before the first of them

(never more than n, for which the engine makes room), and the second the page of each new token. The engine leaves out
`read_index` in a step where no request has a history; the pages are found in `write_index` then.

Sliding-window layers have lists and tables of their own, of the ceil(min(n, window) / rows_per_page) pages of a window.
"""

from __future__ import annotations

from typing import Any

import torch

from ..tensors.blocks import BLOCK
from ..tensors.pages import LayerWindows, Sequences


def listed_pages(length: int, ring_pages: int, sink_pages: int = 0) -> tuple[int, int]:
    """Ring pages, and pages after them, that are listed for a request of `length` tokens."""
    rows, blocks = BLOCK // ring_pages, length // BLOCK
    return min(ring_pages, -(-length // rows)), blocks + sink_pages * min(1, blocks)


def sequences_of(kwargs: dict[str, Any], ring_pages: int, sink_pages: int = 0) -> Sequences:
    """The geometry of a step. No value is read from the device, so that graphs can replay it.

    Args:
        kwargs: What continuous batching passes to attention functions.
        ring_pages: Pages of a ring.
        sink_pages: Pages between a ring and block 0, 0 or 1.
    """
    cu_seqlens_q, cu_seqlens_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]["full_attention"]
    if kwargs["block_table"] is not None:
        return Sequences(cu_seqlens_q, cu_seqlens_k, kwargs["block_table"][0], 1)
    width = ring_pages + sink_pages + kwargs["max_length_k"]["full_attention"] // BLOCK
    read, write = kwargs["read_index"][0], kwargs["write_index"][0]
    if read.numel() == 0:
        table = _of_new_tokens(cu_seqlens_q, write, ring_pages, sink_pages, width)
    else:
        table = _listed(cu_seqlens_k, read, ring_pages, sink_pages, width)
    return Sequences(cu_seqlens_q, cu_seqlens_k, table, kwargs["max_length_q"])


def windows_of(kwargs: dict[str, Any], index: int, windows: LayerWindows) -> Sequences:
    """The geometry of a step in sliding-window layers: tables are of pages of windows.

    Args:
        kwargs: What continuous batching passes to attention functions.
        index: The place of these layers among the kinds of layers.
        windows: Any of the layers.
    """
    cu_seqlens_q, cu_seqlens_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]["full_attention"]
    if kwargs["block_table"] is not None:
        return Sequences(cu_seqlens_q, cu_seqlens_k, kwargs["block_table"][index][:, : windows.pages], 1)
    read, write, rows = kwargs["read_index"][index], kwargs["write_index"][index], windows.rows_per_page
    column = torch.arange(windows.pages, device=write.device)
    if read.numel() == 0:
        token = column * rows
        table = _picked(write, cu_seqlens_q[:-1, None] + token, token < cu_seqlens_q.diff()[:, None])
    else:
        count = (cu_seqlens_k.diff()[:, None].clamp(max=windows.window) + rows - 1) // rows
        table = _picked(read, count.cumsum(0) - count + column, column < count)
    return Sequences(cu_seqlens_q, cu_seqlens_k, table, kwargs["max_length_q"])


def _lengths(cumulative: torch.Tensor, ring_pages: int, sink_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ring pages, and pages after them, listed for each request, `[B, 1]`."""
    length, rows = cumulative.diff()[:, None], BLOCK // ring_pages
    blocks = length // BLOCK
    return ((length + rows - 1) // rows).clamp(max=ring_pages), blocks + sink_pages * blocks.clamp(max=1)


def _picked(numbers: torch.Tensor, place: torch.Tensor, listed: torch.Tensor) -> torch.Tensor:
    """`numbers[place]` where `listed`, else -1."""
    return torch.where(listed, numbers[place.clamp(0, len(numbers) - 1)], -1).int()


def _listed(
    cu_seqlens_k: torch.Tensor, read: torch.Tensor, ring_pages: int, sink_pages: int, width: int
) -> torch.Tensor:
    """The table `[B, width]` of requests whose pages are listed one after the other."""
    ring, after = _lengths(cu_seqlens_k, ring_pages, sink_pages)
    column = torch.arange(width, device=read.device)
    of_ring, index = column < ring_pages, column - ring_pages
    place = (ring + after).cumsum(0) - (ring + after) + torch.where(of_ring, column, ring + index)
    return _picked(read, place, torch.where(of_ring, column < ring, index < after))


def _of_new_tokens(
    cu_seqlens_q: torch.Tensor, write: torch.Tensor, ring_pages: int, sink_pages: int, width: int
) -> torch.Tensor:
    """The table `[B, width]` of requests without a history, from the page of every token. Of their rings there is as
    much as is written now."""
    _, after = _lengths(cu_seqlens_q, ring_pages, sink_pages)
    column, length = torch.arange(width, device=write.device), cu_seqlens_q.diff()[:, None]
    of_ring, index = column < ring_pages, column - ring_pages
    # The first tokens are listed in the sink page, if there is one; the last of a block are always in the block.
    of_block = ((index - sink_pages + 1) * BLOCK - 1).clamp(min=0)
    token = torch.where(of_ring, length // BLOCK * BLOCK + column * (BLOCK // ring_pages), of_block)
    return _picked(write, cu_seqlens_q[:-1, None] + token, torch.where(of_ring, token < length, index < after))
