"""Attention by its definition, the oracle of every backend; the dense rows stored of a prompt; and the `View` of a
request's pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from tq_kernels.format import BLOCK_TOKENS
from tq_kernels.types import AttentionOptions, ChannelScales, DenseRows, KeyValue, Mask, Pages, Sequences

from ..codec.balance import channel_scales
from ..codec.reference import dequantize
from ..compat import outside_autocast
from ..tensors.layer import Counts, DeviceCounts, LayerTensors, View
from ..tensors.pages import LayerPages
from ..tensors.residual import write_tokens


def store_prompt(
    keys: torch.Tensor,
    values: torch.Tensor,
    dense: DenseRows,
    scales: ChannelScales | None,
    balanced: bool,
    queries: torch.Tensor | None,
    attended: torch.Tensor | None,
) -> None:
    """`tq_hf.ops.dispatch.store_prompt`."""
    if scales is not None:
        scales.reset()
        if balanced:
            with outside_autocast(keys):
                chosen = channel_scales(queries, keys, values, first=dense.to_sinks, valid=attended)
            for held, new in zip(scales, chosen, strict=True):
                held[:] = new
    rows, ring, *sinks, start, slot = dense[:6]
    write_tokens(rows, ring, (keys, values), (sinks[0], sinks[1]), slot, start)
    if dense.counts is not None:
        DeviceCounts(*dense.counts).write(Counts(*dense.held))


def dense_states(view: View) -> KeyValue:
    """Return all tokens of `view` as float64 keys and values, `[B, Hkv, view.length, D]`."""
    shapes = view.tensors.dense_shapes(view.length)
    keys, values = (view.tensors.rows.new_zeros(shape, dtype=torch.float64) for shape in shapes)
    write_dense(view, keys, values, dequantize)
    return keys, values


def write_dense(view: View, keys: torch.Tensor, values: torch.Tensor, dequantize: Callable[..., None]) -> None:
    """Write all tokens of `view` to keys and values `[B, Hkv, view.length, D]`."""
    for start, part in view.dense_parts():
        for out, states in zip((keys, values), part, strict=True):
            out[:, :, start : start + states.shape[2]] = states
    sinks, blocks, *_ = view.host_counts
    if blocks:
        packed = slice(sinks, sinks + blocks * BLOCK_TOKENS)
        some = view.tensors.blocks.slice(0, blocks)
        dequantize(view.tensors.config, some, keys[:, :, packed], values[:, :, packed])


def attend(query: torch.Tensor, view: View | KeyValue, mask: Mask, options: AttentionOptions) -> torch.Tensor:
    """Softmax attention over all tokens of a view, in float64; arguments as for `tq_hf.ops.cpu.attention.attend_dense`.

    Args:
        view: View of a store, or dense keys `[B, Hkv, T, Dk]` and values `[B, Hkv, T, Dv]`.

    Returns:
        `[B, S, Hq, Dv]` float64. Rows that may attend to nothing are 0.
    """
    scaling, causal, softcap, s_aux, position_bias = options
    keys, values = dense_states(view) if isinstance(view, View) else (part.double() for part in view)
    queries, length, groups = query.shape[2], keys.shape[2], query.shape[1] // keys.shape[1]
    logits = query.double() @ keys.repeat_interleave(groups, 1).transpose(-1, -2) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if position_bias is not None:
        logits = logits + position_bias[..., :length]
    if mask is None and causal:
        mask = torch.ones(queries, length, dtype=torch.bool, device=query.device).tril(length - queries)
    if mask is not None:
        mask = mask[..., :length]
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    if s_aux is not None:
        logits = torch.cat([logits, s_aux.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    weights = logits.softmax(-1).nan_to_num(0.0)[..., :length]
    return (weights @ values.repeat_interleave(groups, 1)).transpose(1, 2)


class Request(NamedTuple):
    """A request's part of a step.

    Args:
        tokens: Slice of its new tokens among all.
        past: Number of tokens cached before.
        packed: Number of blocks read packed.
        rows: Ring pages and, with sinks, the sink page, `[ring_pages or ring_pages + 1]` int64.
        blocks: Pages of its blocks, `[>= number of blocks complete after the step]` int64.
    """

    tokens: slice
    past: int
    packed: int
    rows: torch.Tensor
    blocks: torch.Tensor


def requests(sequences: Sequences, pages: Pages) -> Iterator[Request]:
    """Iterate over the requests of a step that have new tokens."""
    assert sequences.packed is not None
    starts, ends, packed = (x.tolist() for x in (sequences.cu_seqlens_q, sequences.cu_seqlens_k, sequences.packed))
    first_block = pages.first_block_column
    for i, row in enumerate(sequences.block_table.long()):
        new = starts[i + 1] - starts[i]
        if new:
            past = ends[i + 1] - ends[i] - new
            # The ring of a short request may lack pages, for rows that are never used: any page will do.
            rows = row[: first_block - 1].clamp(min=0)
            yield Request(slice(starts[i], starts[i + 1]), past, packed[i], rows, row[first_block:])


def view_of(pages: LayerPages, request: Request, new: KeyValue) -> View:
    """Copy a request's blocks and dense rows into a `View`, with `new` keys and values `[1, Hkv, n, D]`."""
    blocks, sinks = pages.packed(request.blocks[: request.packed]), min(request.past, pages.tensors.sinks)
    tensors = LayerTensors(pages.config, blocks, pages.rows(request.rows))
    counts = Counts(sinks, request.packed, request.past - sinks - request.packed * BLOCK_TOKENS)
    return View(tensors, counts, request.past + new[0].shape[2], new=new)


def rows_of(pages: LayerPages, request: Request, new: KeyValue) -> KeyValue:
    """Keys and values of a request in an uncompressed layer, `new` ones included: `[1, Hkv, past + n, D]`."""
    ring, sinks, rows = pages.tensors.ring_rows, pages.tensors.sinks, pages.rows(request.rows)
    start = request.packed * BLOCK_TOKENS
    row = torch.arange(start, max(start, request.past - sinks), device=rows.device) % ring
    sunk = pages.states(rows[:, :, ring : ring + min(request.past, sinks)])
    parts = [sunk, pages.block_rows(request.blocks[: request.packed]), pages.states(rows[:, :, row]), new]
    keys, values = (torch.cat(states, 2) for states in zip(*parts, strict=True))
    return keys, values


def truncate(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set logits of tokens that may not be sampled to -inf, by a sort. See `dispatch.truncate`."""
    vocabulary = scores.shape[1]
    ordered, _ = scores.sort(-1, descending=True)
    count = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary).long()
    ordered = ordered.masked_fill(ordered < ordered.gather(1, (count - 1)[:, None]), -torch.inf)
    probabilities = ordered.softmax(-1)
    # Add up from the least likely token on, as transformers does: small numbers first.
    at_most = probabilities.flip(-1).cumsum(-1).flip(-1)
    removed = at_most <= torch.where(top_p < 1, 1 - top_p, -1.0)[:, None]
    removed |= (probabilities < min_p[:, None] * probabilities[:, :1]) | (ordered == -torch.inf)
    removed[:, 0] = False
    least = ordered.masked_fill(removed, torch.inf).amin(-1, keepdim=True)
    return scores.masked_fill_(scores < least, -torch.inf)
