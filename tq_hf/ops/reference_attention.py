"""Attention over a `StoreView` in torch, tile by tile: the oracle of the kernels and the path of devices without them.

Softmax is taken online (running maximum and sum, in float32), so nothing of the size of the history is ever held
densely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..codec.reference import TILE_BLOCKS, dequantise
from ..layout import BlockLayout
from ..tensors.view import StoreView
from ..tensors.window import KeyValue
from .workspace import Scratch, current_workspace

TILE_TOKENS = TILE_BLOCKS * BlockLayout.tokens
TILE_SCORES = 1 << 24
"""Scores held at a time: 64 MiB of float32."""


class OnlineSoftmax:
    """Running softmax-weighted sum of values for queries `[B, Hkv, G, S, *]`."""

    def __init__(self, query: torch.Tensor, value_dim: int) -> None:
        shape = query.shape[:-1]
        self.maximum = query.new_full(shape, -torch.inf)
        self.total = query.new_zeros(shape)
        self.output = query.new_zeros(*shape, value_dim)

    def add(self, scores: torch.Tensor, values: torch.Tensor | None) -> None:
        """Take in `scores` `[B, Hkv, G, S, T]` and the values `[B, Hkv, 1, T, Dv]` they weigh (`None`: weight without
        value)."""
        maximum = torch.maximum(self.maximum, scores.amax(-1))
        # Rows that have attended to nothing yet keep a maximum of -inf; shift those by 0.
        shift = torch.where(maximum == -torch.inf, 0, maximum)
        decay = torch.exp(self.maximum - shift)
        weights = torch.exp(scores - shift[..., None])
        self.total = self.total * decay + weights.sum(-1)
        self.output = self.output * decay[..., None]
        if values is not None:
            self.output += weights @ values
        self.maximum = maximum

    def result(self) -> torch.Tensor:
        """Weighted means `[B, Hkv, G, S, Dv]`; 0 for rows that attend to nothing."""
        return self.output / torch.where(self.total == 0, 1, self.total)[..., None]


def _dense_tiles(first: int, states: KeyValue) -> Iterator[tuple[int, KeyValue]]:
    """Dense states whose first token is at position `first`, in tiles, each with the position of its own first
    token."""
    keys, values = states
    for start in range(0, keys.shape[2], TILE_TOKENS):
        yield first + start, (keys[:, :, start : start + TILE_TOKENS], values[:, :, start : start + TILE_TOKENS])


def _view_tiles(view: StoreView) -> Iterator[tuple[int, KeyValue]]:
    """The same for everything in a view; packed tiles are dequantised one at a time."""
    for first, states in view.dense_parts:
        yield from _dense_tiles(first, states)
    first = view.sinks[0].shape[2]
    workspace = current_workspace(view.sinks[0].device)
    for start in range(0, view.num_blocks, TILE_BLOCKS):
        blocks = view.blocks.slice(start, min(start + TILE_BLOCKS, view.num_blocks))
        tokens = blocks.capacity * blocks.layout.tokens
        shapes = zip(("keys", "values"), view.tensors.dense_shapes(tokens), strict=True)
        requests = {name: Scratch(shape, torch.float32) for name, shape in shapes}
        keys, values = workspace.acquire("reference attention", requests).values()
        dequantise(view.config, blocks, keys, values)
        yield first + start * blocks.layout.tokens, (keys, values)


def attend(query: torch.Tensor, view: StoreView, mask: torch.Tensor | None, **options: Any) -> torch.Tensor:
    """Attention of the newest S tokens `[B, Hq, S, Dk]` over everything in `view`; arguments as for `attend_dense`."""
    return _attend(query, lambda: _view_tiles(view), view.sinks[1].shape, view.length, mask, **options)


def attend_dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options: Any
) -> torch.Tensor:
    """Attention of the newest S of T tokens over dense states.

    Args:
        query: `[B, Hq, S, Dk]`; row i is the query of position T - S + i.
        key: `[B, Hkv, T, Dk]`.
        value: `[B, Hkv, T, Dv]`.
        mask: `[B or 1, 1 or Hq, S, >= T]` bool (True attends) or float (added to the logits). `None` is bottom-right
            causal, or full if not `causal`.
        scaling: Factor of the logits.
        causal: What a mask of `None` means.
        softcap: Logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        s_aux: `[Hq]` logits of learned attention sinks (gpt-oss): they take weight and give no value.
        position_bias: `[B or 1, 1 or Hq, S, >= T]`, added to the logits.

    Returns:
        `[B, S, Hq, Dv]` in the query's dtype. Rows that may attend to nothing are 0.
    """
    return _attend(query, lambda: _dense_tiles(0, (key, value)), value.shape, key.shape[2], mask, **options)


def _attend(
    query: torch.Tensor,
    tiles: Callable[[], Iterator[tuple[int, KeyValue]]],
    value_shape: torch.Size,
    length: int,
    mask: torch.Tensor | None,
    *,
    scaling: float,
    causal: bool = True,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    batch, query_heads, rows, _ = query.shape
    kv_heads, value_dim = value_shape[1], value_shape[3]
    grouped = query.float().unflatten(1, (kv_heads, query_heads // kv_heads)) * scaling
    step = max(1, TILE_SCORES // (batch * query_heads * min(length, TILE_TOKENS)))
    parts = []
    for start in range(0, rows, step):
        part = grouped[:, :, :, start : start + step]
        newest = length - rows + torch.arange(start, start + part.shape[3], device=query.device)
        state = OnlineSoftmax(part, value_dim)
        for position, (keys, values) in tiles():
            if mask is None and causal and position >= length - rows + start + part.shape[3]:
                continue  # wholly in these queries' future
            area = (..., slice(start, start + step), slice(position, position + keys.shape[2]))
            scores = part @ keys.float().transpose(-1, -2)[:, :, None]
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            if position_bias is not None:
                scores = scores + _per_group(position_bias[area], kv_heads)
            if mask is None and causal:
                allowed = torch.arange(position, position + keys.shape[2], device=query.device) <= newest[:, None]
                scores = scores.masked_fill(~allowed, -torch.inf)
            elif mask is not None and mask.dtype == torch.bool:
                scores = scores.masked_fill(~_per_group(mask[area], kv_heads), -torch.inf)
            elif mask is not None:
                scores = scores + _per_group(mask[area], kv_heads)
            state.add(scores, values.float()[:, :, None])
        if s_aux is not None:
            state.add(s_aux.float().view(1, kv_heads, -1, 1, 1).expand(*state.maximum.shape, 1), None)
        parts.append(state.result())
    output = torch.cat(parts, dim=3) if len(parts) > 1 else parts[0]
    return output.flatten(1, 2).transpose(1, 2).to(query.dtype)


def _per_group(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[B, 1 or Hq, S, T]` to a shape that broadcasts with `[B, Hkv, G, S, T]`."""
    return x[:, :, None] if x.shape[1] == 1 else x.unflatten(1, (kv_heads, -1))
