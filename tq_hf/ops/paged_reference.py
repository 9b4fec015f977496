"""`tq_hf.ops.paged.paged_step` in torch, one request after the other: what kernels must agree with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..tensors.attention import AttentionOptions, supports_sdpa
from ..tensors.blocks import PackedBlocks
from ..tensors.layer_tensors import LayerTensors
from ..tensors.pages import BLOCK, LayerPages, Sequences
from ..tensors.view import StoreView
from ..tensors.window import KeyValue
from . import dispatch


class Request(NamedTuple):
    """A request's part of a step.

    Args:
        tokens: Its new tokens among all.
        past: Tokens cached before.
        ring: Its ring pages, `[ring_pages]` int64.
        sinks: Its sink page, `[0]` or `[1]` int64.
        blocks: Its blocks, `[at least those complete after the step]` int64.
    """

    tokens: slice
    past: int
    ring: torch.Tensor
    sinks: torch.Tensor
    blocks: torch.Tensor


def requests(sequences: Sequences, ring_pages: int, sink_pages: int) -> Iterator[Request]:
    """The requests of a step that have new tokens."""
    starts, ends, table = sequences.cu_q.tolist(), sequences.cu_k.tolist(), sequences.table.long()
    before = ring_pages + sink_pages
    for i, row in enumerate(table):
        new = starts[i + 1] - starts[i]
        if new:
            past = ends[i + 1] - ends[i] - new
            # The ring of a short request may lack pages, for rows that nobody reads or writes: any page will do.
            ring = row[:ring_pages].clamp(min=0)
            yield Request(slice(starts[i], starts[i + 1]), past, ring, row[ring_pages:before], row[before:])


@torch.compiler.disable
def paged_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: LayerPages,
    sequences: Sequences,
    options: AttentionOptions,
) -> torch.Tensor:
    """See `tq_hf.ops.paged.paged_step`."""
    out = torch.zeros_like(query)
    for request in requests(sequences, pages.ring_pages, pages.sink_pages):
        queries, keys, values = (x[request.tokens].transpose(0, 1)[None] for x in (query, key, value))
        out[request.tokens] = attend(queries, pages, request, (keys, values), options)[0]
        store(pages, request, (keys, values))
    return out


def attend(
    query: torch.Tensor, pages: LayerPages, request: Request, new: KeyValue, options: AttentionOptions
) -> torch.Tensor:
    """Attention of a request's queries `[1, Hq, n, D]` before its `new` keys and values `[1, Hkv, n, D]` are stored,
    `[1, n, Hq, D]`."""
    if request.past or not supports_sdpa(options):
        view = view_of(pages, request, new)
        return dispatch.attend(query, view, without_packed_sinks(view, query.shape[2]), options)
    # A whole prompt, as generate() reads it.
    return scaled_dot_product_attention(query, *new, is_causal=True, scale=options.scaling, enable_gqa=True).transpose(
        1, 2
    )


def view_of(pages: LayerPages, request: Request, new: KeyValue) -> StoreView:
    """What a request's queries attend to, in a copy: sinks, blocks complete before this step, ring rows, and `new` keys
    and values `[1, Hkv, n, D]`."""
    num_blocks, held = divmod(request.past, BLOCK)
    sinks = (new[0][:, :, :0], new[1][:, :, :0])
    if pages.sink_pages and num_blocks:
        sinks = pages.sinks(request.sinks)
    tensors = LayerTensors(pages.config, pages.packed(request.blocks[:num_blocks]), sinks, pages.ring(request.ring))
    return StoreView(tensors, num_blocks, held, request.past, None, new)


def without_packed_sinks(view: StoreView, queries: int) -> torch.Tensor | None:
    """A causal mask `[1, 1, queries, view.length]` without what block 0 says of sinks; `None` if there are none."""
    sinks = view.sinks[0].shape[2]
    if not sinks:
        return None
    mask = torch.ones(queries, view.length, dtype=torch.bool, device=view.sinks[0].device)
    mask = mask.tril(view.length - queries)
    mask[:, sinks : 2 * sinks] = False
    return mask[None, None]


def store(pages: LayerPages, request: Request, new: KeyValue) -> None:
    """Encode the blocks that `new` keys and values `[1, Hkv, n, D]` complete, and put rows after them into the ring."""
    first_block, held = divmod(request.past, BLOCK)
    keys, values = new
    if held:
        old = pages.ring(request.ring)
        keys, values = (torch.cat([rows[:, :, :held], states], 2) for rows, states in zip(old, new, strict=True))
    whole = keys.shape[2] // BLOCK
    if whole:
        done = whole * BLOCK
        blocks = PackedBlocks.allocate(pages.layout, 1, pages.kv_heads, whole, keys.device)
        blocks = replace(blocks, factors=pages.factors)
        dispatch.encode(pages.config, keys[:, :, :done], values[:, :, :done], blocks, 0)
        pages.write_packed(request.blocks[first_block : first_block + whole], blocks)
        if pages.sink_pages and not first_block:
            pages.write_sinks(request.sinks, (keys, values))
    start = max(whole * BLOCK, held)
    if start < keys.shape[2]:
        pages.write_ring(request.ring, start % BLOCK, (keys[:, :, start:], values[:, :, start:]))
