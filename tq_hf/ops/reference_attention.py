"""Attention over a `StoreView` by its definition: the oracle of every backend."""

from __future__ import annotations

import torch

from ..codec.reference import dequantise
from ..tensors.attention import AttentionOptions
from ..tensors.view import StoreView
from ..tensors.window import KeyValue


def dense_states(view: StoreView) -> KeyValue:
    """Everything in `view` as float64 keys and values, `[B, Hkv, view.length, D]`."""
    shapes = view.tensors.dense_shapes(view.length)
    keys, values = (view.sinks[0].new_zeros(shape, dtype=torch.float64) for shape in shapes)
    for start, part in view.dense_parts:
        for out, states in zip((keys, values), part, strict=True):
            out[:, :, start : start + states.shape[2]] = states
    start, tokens = view.sinks[0].shape[2], view.num_blocks * view.blocks.layout.tokens
    packed = slice(start, start + tokens)
    dequantise(view.config, view.blocks.slice(0, view.num_blocks), keys[:, :, packed], values[:, :, packed])
    return keys, values


def attend(
    query: torch.Tensor, view: StoreView | KeyValue, mask: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    """Softmax over all that is stored, in float64; arguments as for `tq_hf.ops.tiled_attention.attend_dense`.

    Args:
        view: What is stored, or dense keys `[B, Hkv, T, Dk]` and values `[B, Hkv, T, Dv]`.

    Returns:
        `[B, S, Hq, Dv]` float64. Rows that may attend to nothing are 0.
    """
    scaling, causal, softcap, s_aux, position_bias = options
    keys, values = dense_states(view) if isinstance(view, StoreView) else (part.double() for part in view)
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
