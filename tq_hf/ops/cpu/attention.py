"""Attention in torch, tile by tile: the path of devices without kernels, and of calls that no kernel takes.

Softmax is computed online (running maximum and sum, in float32), so no dense copy of the history is made. Tiles are
dense states or packed blocks (`tq_hf.ops.cpu.packed`), with the same masks, caps and biases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from tq_kernels.types import AttentionOptions, KeyValue, Mask, PackedBlocks

from ...codec.reference import with_loud
from ...codec.rotation import rotate_back
from ...config import TurboQuantConfig
from ...tensors.layer import View
from ..backend import MAX_FLASH_DIM
from ..workspace import current_workspace
from .packed import FEW_QUERIES, PackedTile, Take, of_heads, rotated

TILE_TOKENS = 2048
"""Number of dense tokens read at a time."""
TILE_NUMBERS = 1 << 20
"""Number of elements of packed keys read at a time: 4 MiB of float32, and as much for values."""
TILE_SCORES = 1 << 22
"""Number of scores held at a time: 16 MiB of float32."""


@dataclass
class DenseTile:
    """Dense keys `[B, Hkv, T, Dk]` and values `[B, Hkv, T, Dv]`; scaled queries `[N, G, S, Dk]` float32."""

    position: int
    query: torch.Tensor
    states: KeyValue

    @property
    def tokens(self) -> int:
        """T."""
        return self.states[0].shape[2]

    def scores(self, part: slice) -> torch.Tensor:
        """Logits `[N, G * s, T]` float32 of the queries of s tokens."""
        return self.query[:, :, part].flatten(1, 2) @ self.states[0].flatten(0, 1).float().transpose(1, 2)

    def weighted(self, weights: torch.Tensor) -> torch.Tensor:
        """Sums of the values under weights `[N, R, T]`, `[N, R, Dv]` float32."""
        values = self.states[1].flatten(0, 1)
        products = _products(values) if weights.shape[1] > FEW_QUERIES else torch.float32
        return (weights.to(products) @ values.to(products)).float()


Tile = DenseTile | PackedTile
"""Keys and values of consecutive tokens of N = B * Hkv heads, and the queries that read them."""


class OnlineSoftmax:
    """Running softmax-weighted sum of values for queries `[N, R, *]`."""

    def __init__(self) -> None:
        self.maximum: torch.Tensor | None = None
        self.total: torch.Tensor
        self.output: torch.Tensor

    def add(self, scores: torch.Tensor, tiles: Iterable[Tile]) -> None:
        """Take in logits `[N, R, T]` (overwritten) and the tiles they are for, in order.

        Logits after the last tile take weight and give no value.
        """
        # The shift of scores has no gradient. It stays finite for rows that have attended to nothing: exp(-inf - shift)
        # is 0 then, not NaN.
        maximum = scores.detach().amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
        if self.maximum is not None:
            maximum = torch.maximum(maximum, self.maximum)
        weights = scores.sub_(maximum).exp_()
        total, output, start = weights.sum(-1, keepdim=True), None, 0
        for tile in tiles:
            part = tile.weighted(weights[..., start : start + tile.tokens])
            output = part if output is None else output + part
            start += tile.tokens
        if self.maximum is not None:
            decay = torch.exp(self.maximum - maximum)
            total = total + self.total * decay
            output = self.output * decay if output is None else output + self.output * decay
        assert output is not None
        self.maximum, self.total, self.output = maximum, total, output

    def result(self) -> torch.Tensor:
        """Weighted means `[N, R, Dv]`; 0 for rows that attend to nothing."""
        return self.output / self.total.clamp(min=torch.finfo(torch.float32).tiny)


def supports_sdpa(options: AttentionOptions) -> bool:
    """Whether torch's sdpa computes attention with these options."""
    return options.only_scales() and options.position_bias is None


def _dense_tiles(
    first: int, states: KeyValue, query: torch.Tensor, tile: type[DenseTile] = DenseTile
) -> Iterator[DenseTile]:
    """Dense states whose first token is at position `first`, in tiles."""
    keys, values = states
    for start in range(0, keys.shape[2], TILE_TOKENS):
        part = slice(start, start + TILE_TOKENS)
        yield tile(first + start, query, (keys[:, :, part], values[:, :, part]))


def _blocks_of_tile(blocks: PackedBlocks) -> int:
    batch, heads = blocks.data.shape[:2]
    return max(1, TILE_NUMBERS // (max(1, batch * heads) * blocks.layout.tokens * blocks.layout.key_dim_padded))


def _products(states: torch.Tensor) -> torch.dtype:
    """Dtype of the products of many queries' weights with values, for a model with these states."""
    fast = states.device.type != "cpu" or torch.backends.cpu.get_cpu_capability() == "AVX512"
    return torch.bfloat16 if states.dtype == torch.bfloat16 and fast else torch.float32


def _scratch(device: torch.device, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return current_workspace(device).take(name, shape, dtype)


def _fresh(device: torch.device, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _view_tiles(view: View, query: torch.Tensor, latents: bool = False) -> Iterator[Tile]:
    """Iterate over all tokens of a view in tiles, oldest first. Tiles of packed blocks share scratch: use scores and
    values of one at a time."""
    dense, packed = (DenseLatents, PackedLatents) if latents else (DenseTile, PackedTile)
    parts, (sinks, count, *_) = view.dense_parts(), view.host_counts
    if sinks:
        yield from _dense_tiles(*parts.pop(0), query, dense)
    if count:
        blocks, config = view.tensors.blocks, view.tensors.config
        needs_gradient = torch.is_grad_enabled() and query.requires_grad  # which keeps what it was computed from
        take: Take = partial(_fresh if needs_gradient else _scratch, query.device)
        widths, scales = [blocks.layout.key_dim, query.shape[-1] - blocks.layout.key_dim], blocks.channel_scales
        if latents:
            halves = zip(query.split(widths, -1), scales, strict=True)
            turned = torch.cat([rotated(part, factors, config.seed) for part, factors in halves], -1)
        else:
            turned = rotated(query, scales.keys, config.seed, blocks.layout.loud)
        step = _blocks_of_tile(blocks)
        products = torch.float32 if latents else _products(view.tensors.rows)  # rotary keys make scores, not sums
        for start in range(0, count, step):
            some = blocks.slice(start, min(start + step, count))
            position = sinks + start * blocks.layout.tokens
            yield packed(position, turned, config, some, blocks.layout.value_dim, take, products)
    if len(parts) > 1 and sum(states[0].shape[2] for _, states in parts) <= TILE_TOKENS:
        keys, values = zip(*(states for _, states in parts), strict=True)
        parts = [(parts[0][0], (torch.cat(keys, 2), torch.cat(values, 2)))]
    for first, states in parts:
        yield from _dense_tiles(first, states, query, dense)


def _groups(tiles: Iterable[Tile], most: int) -> Iterator[list[Tile]]:
    """Group neighbouring tiles whose scores are held together: of up to `most` tokens, or one tile."""
    group: list[Tile] = []
    tokens = 0
    for tile in tiles:
        tokens += tile.tokens
        if group and tokens > most:
            yield group
            group, tokens = [], tile.tokens
        group.append(tile)
    if group:
        yield group


def dequantize(config: TurboQuantConfig, blocks: PackedBlocks, keys: torch.Tensor, values: torch.Tensor) -> None:
    """`tq_hf.codec.reference.dequantize` by tables, tile by tile: the same bits."""
    take: Take = partial(_scratch, keys.device)
    step, tokens = _blocks_of_tile(blocks), blocks.layout.tokens
    for start in range(0, blocks.capacity, step):
        some = blocks.slice(start, min(start + step, blocks.capacity))
        tile = PackedTile(0, keys[:0], config, some, values.shape[-1], take)
        both = tile.key_rows, tile.value_rows
        for out, rows, scales in zip((keys, values), both, some.channel_scales, strict=True):
            part = out[:, :, start * tokens : start * tokens + tile.tokens]
            states = rotate_back(rows, config.seed).view(*some.data.shape[:3], tokens, -1)
            states = with_loud(states, some) if out is keys else states
            part.copy_((states.flatten(0, 1).flatten(1, 2)[..., : out.shape[-1]] / of_heads(scales)).view(part.shape))


# Its loops and shapes follow the length: traced, every few steps would compile anew.
@torch.compiler.disable
def attend(
    query: torch.Tensor, view: View, mask: Mask, options: AttentionOptions, latents: bool = False
) -> torch.Tensor:
    """Attention of the newest S tokens `[B, Hq, S, Dk]` over all tokens of `view`; arguments as for `attend_dense`.

    `latents`: the definition of the kernels of latents. Keys of the view are latents, values rotary keys, of one head.
    Queries `[B, Hq, S, R + Dr]` are those times the up-projection of keys, then their rotary parts. Returns means of
    latents `[B, S, Hq, R]`.
    """
    heads, tiles = view.tensors.row.keys[1], partial(_view_tiles, view, latents=latents)
    return _over_tiles(query, tiles, heads, view.length, mask, options, tiles_at_once=not latents)


@dataclass
class DenseLatents(DenseTile):
    """Dense latents `[B, 1, T, R]` and rotary keys `[B, 1, T, Dr]`; scaled queries `[B, Hq, S, R + Dr]` float32."""

    def scores(self, part: slice) -> torch.Tensor:
        return self.query[:, :, part].flatten(1, 2) @ torch.cat(self.states, -1)[:, 0].float().mT

    def weighted(self, weights: torch.Tensor) -> torch.Tensor:
        return weights @ self.states[0][:, 0].float()


@dataclass
class PackedLatents(PackedTile):
    """Packed blocks of latents and rotary keys; queries `[B, Hq, S, R + Dr]` float32, both parts rotated, scaled."""

    def scores(self, part: slice) -> torch.Tensor:
        query = self.query[:, :, part].flatten(1, 2)
        size = self.blocks.layout.key_dim_padded
        return query[..., :size] @ self.key_rows.mT + query[..., size:] @ self.value_rows.mT

    def weighted(self, weights: torch.Tensor) -> torch.Tensor:
        total = rotate_back(weights @ self.key_rows, self.config.seed)[..., : self.blocks.layout.key_dim]
        return total / self.blocks.channel_scales.keys.abs().float()


def attend_dense(query: torch.Tensor, states: KeyValue, mask: Mask, options: AttentionOptions) -> torch.Tensor:
    """Attention of the newest S of T tokens over dense states.

    Args:
        query: `[B, Hq, S, Dk]`; row i is the query of position T - S + i.
        states: Keys `[B, Hkv, T, Dk]` and values `[B, Hkv, T, Dv]`.
        mask: `[B or 1, 1 or Hq, S, >= T]` bool (True attends) or float (added to the logits). With `None`,
            `options.causal` decides.
        options: Any.

    Returns:
        `[B, S, Hq, Dv]` in the query's dtype. Rows that may attend to nothing are 0.
    """
    (_, heads, length, _), tiles = states[0].shape, partial(_dense_tiles, 0, states)
    return _over_tiles(query, tiles, heads, length, mask, options)


def _over_tiles(
    query: torch.Tensor,
    tiles: Callable[[torch.Tensor], Iterator[Tile]],
    kv_heads: int,
    length: int,
    mask: Mask,
    options: AttentionOptions,
    tiles_at_once: bool = True,
) -> torch.Tensor:
    scaling, causal, softcap, s_aux, position_bias = options
    batch, query_heads, queries, dim = query.shape
    groups = query_heads // kv_heads
    grouped = (query.float() * scaling).reshape(batch * kv_heads, groups, queries, dim)
    states: list[OnlineSoftmax] = []
    few, step = groups * queries <= FEW_QUERIES and tiles_at_once, queries
    for group in _groups(tiles(grouped), TILE_SCORES // max(1, batch * query_heads * queries) if few else 0):
        start, stop = group[0].position, group[-1].position + group[-1].tokens
        if not states:
            if not few:
                widest = min(length, max(TILE_TOKENS, stop - start))
                step = max(1, min(queries, TILE_SCORES // (batch * query_heads * widest)))
            states = [OnlineSoftmax() for _ in range(0, queries, step)]
        for first, state in zip(range(0, queries, step), states, strict=True):
            part = slice(first, first + step)
            newest = length - queries + min(first + step, queries) - 1
            if mask is None and causal and start > newest:
                continue  # wholly in these queries' future
            logits = [tile.scores(part) for tile in group]
            scores = torch.cat(logits, -1) if len(logits) > 1 else logits[0]
            if softcap is not None:
                scores = scores.div_(softcap).tanh() * softcap
            shaped = scores.view(batch, kv_heads, groups, -1, stop - start)
            if position_bias is not None:
                shaped.add_(_per_group(position_bias[:, :, part, start:stop], kv_heads))
            if mask is not None:
                area = _per_group(mask[:, :, part, start:stop], kv_heads)
                if mask.dtype == torch.bool:
                    shaped.masked_fill_(~area, -torch.inf)
                else:
                    shaped.add_(area)
            elif causal and stop > length - queries + first + 1:
                position = torch.arange(start, stop, device=query.device)
                row = torch.arange(length - queries + first, newest + 1, device=query.device)
                shaped.masked_fill_(position > row[:, None], -torch.inf)
            state.add(scores, group)
    if s_aux is not None:
        # A copy: `add` overwrites it, and `s_aux` is a parameter of the model.
        sinks = s_aux.float().view(1, kv_heads, groups, 1).repeat(batch, 1, 1, queries)
        for first, state in zip(range(0, queries, step), states, strict=True):
            state.add(sinks[..., first : first + step].reshape(batch * kv_heads, -1, 1), ())
    output = torch.cat([state.result().view(batch, query_heads, -1, state.output.shape[-1]) for state in states], 2)
    return output.transpose(1, 2).to(query.dtype)


def _per_group(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Reshape `[B, 1 or Hq, S, T]` to broadcast with `[B, Hkv, G, S, T]`."""
    return x[:, :, None] if x.shape[1] == 1 else x.unflatten(1, (kv_heads, -1))


def dense_sdpa(query: torch.Tensor, states: KeyValue, mask: Mask, options: AttentionOptions) -> torch.Tensor:
    """Attention of the newest S tokens over dense states by sdpa.

    Args:
        query: `[B, Hq, S, Dk]`.
        states: Keys `[B, Hkv, T, Dk]` and values `[B, Hkv, T, Dv]`.
        mask: `[B or 1, 1 or Hq, S or 1, >= T]`, bool or additive, or `None` (see `options.causal`).
        options: Options of `supports_sdpa`.

    Returns:
        `[B, S, Hq, Dv]`. Rows that may attend to nothing are 0.
    """
    (keys, values), queries, length = states, query.shape[2], states[0].shape[2]
    if mask is not None:
        mask = mask[..., :length]
        mask = mask if mask.dtype == torch.bool else mask.to(query.dtype)
    elif options.causal and queries > 1 and not query.is_cuda:
        mask = torch.ones(queries, length, dtype=torch.bool, device=query.device).tril(length - queries)
    elif options.causal and queries > 1:
        mask = causal_lower_right(queries, length)  # flash needs no tensor for it
    kv_heads, grouped = keys.shape[1], query.shape[1] != keys.shape[1]
    if not grouped or max(keys.shape[3], values.shape[3]) <= MAX_FLASH_DIM:
        out = scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=options.scaling, enable_gqa=grouped
        )
        return out.transpose(1, 2)
    # One KV head at a time, expanded to its queries: the fused kernel for wider heads takes no groups, and without it
    # all scores would be held.
    groups, parts = query.shape[1] // kv_heads, []
    for head in range(kv_heads):
        own = slice(head * groups, (head + 1) * groups)
        seen, shown = (x[:, head : head + 1].expand(-1, groups, -1, -1) for x in (keys, values))
        by_head = mask is not None and mask.dim() == 4 and mask.shape[1] > 1
        of_head = mask[:, own] if mask is not None and by_head else mask
        parts.append(scaled_dot_product_attention(query[:, own], seen, shown, attn_mask=of_head, scale=options.scaling))
    return torch.cat(parts, 1).transpose(1, 2)
