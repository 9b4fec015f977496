"""Attention over dense keys and values, for calls that sdpa lacks: capped logits and learned sinks, with any mask.

A program holds BLOCK_R query rows of one KV head (row r = s G + g: all G heads of a few queries) and walks over the
tokens they attend to, FlashAttention-style. For a mask row by row, `mask_spans` finds each query's first and last
token: a sliding window costs its own width and not the length of the prompt. A heuristic table chooses launches.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..common.device import AMPERE, Target, constants_of, matrix_type, target
from ..common.launcher import Kernel, States, on_its_device, states_of
from ..common.schedule import Mask
from ..common.softmax import SoftmaxState, bounded, empty_state, update
from ..types import AttentionOptions
from .launch import mask_layout, merge, prefix_splits
from .tiles import PrefixMask, store_rows


@triton.jit(do_not_specialize=["tokens"])
def mask_spans(mask: Mask, spans, tokens, BLOCK: tl.constexpr):
    """Find each query's first token and the one after its last: `spans` [B, S, 2] int32. Grid: (S, B)."""
    row = mask.start + (tl.program_id(1).to(tl.int64) * mask.b + tl.program_id(0).to(tl.int64) * mask.s)
    first = tl.full([BLOCK], 2**30, tl.int32)
    end = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, tokens, BLOCK):
        t = start + tl.arange(0, BLOCK)
        seen = tl.load(row + t.to(tl.int64) * mask.t, mask=t < tokens, other=0) != 0
        first = tl.minimum(first, tl.where(seen, t, 2**30))
        end = tl.maximum(end, tl.where(seen, t + 1, 0))
    at = spans + (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(at, tl.min(first, 0))
    tl.store(at + 1, tl.max(end, 0))


DenseNumbers = namedtuple("DenseNumbers", "rows groups kv_heads queries tokens scaling_log2 cap_log2 tile_count")
"""Numbers of `dense_attention`: G * S, G, Hkv, S, T; scaling and softcap, times log2(e); tiles of rows."""


DenseShape = namedtuple(
    "DenseShape", "DK DV BLOCK_DK BLOCK_DV CAUSAL MASK BOUNDS HAS_AUX SPLIT MATRIX BLOCK_R BLOCK_T STAGES"
)
"""Constants of `dense_attention`."""


@triton.jit
def _add_tokens(
    state,
    rows,  # [BR, BDK]
    keys: States, values: States,  # of the KV head
    mask: PrefixMask,  # at the program's first query
    newest,  # [BR] last token a row sees
    low, high, n: DenseNumbers, EDGE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Attend to tokens `low` to `high`; without EDGE these are whole tiles that all rows see."""
    dk = tl.arange(0, C.BLOCK_DK)
    dv = tl.arange(0, C.BLOCK_DV)
    # Keep offsets in a tile, in 32 bits: pointers would take registers that the products need.
    of_tile = tl.arange(0, C.BLOCK_T)
    key_offsets = of_tile[:, None] * keys.strides.token + dk[None, :]
    value_offsets = of_tile[:, None] * values.strides.token + dv[None, :]
    # Machine code depends on the order in which the loop carries these.
    output, total, maximum = state.output, state.total, state.maximum
    for start in tl.range(low, high, C.BLOCK_T, num_stages=C.STAGES):
        t = start + of_tile
        key_at = keys.start + tl.cast(start, tl.int64) * keys.strides.token + key_offsets
        value_at = values.start + tl.cast(start, tl.int64) * values.strides.token + value_offsets
        if EDGE:
            k = tl.load(key_at, mask=(t < high)[:, None] & (dk < C.DK)[None, :], other=0.0)
            v = tl.load(value_at, mask=(t < high)[:, None] & (dv < C.DV)[None, :], other=0.0)
        else:
            k = tl.load(key_at) if C.BLOCK_DK == C.DK else tl.load(key_at, mask=(dk < C.DK)[None, :], other=0.0)
            v = tl.load(value_at) if C.BLOCK_DV == C.DV else tl.load(value_at, mask=(dv < C.DV)[None, :], other=0.0)
        x = tl.dot(rows, tl.trans(k.to(C.MATRIX))) * n.scaling_log2  # [BR, BT]
        x = bounded(x, n.cap_log2, C.BOUNDS)
        if EDGE:
            seen = (t < high)[None, :]
            if C.CAUSAL:
                seen = seen & (t[None, :] <= newest[:, None])
            if C.MASK > 0:
                at = mask.pointer + tl.cast(start, tl.int64) * mask.stride_t
                at += mask.rows[:, None] + of_tile[None, :] * mask.stride_t
                seen = seen & (tl.load(at, mask=seen & (newest >= 0)[:, None], other=0) != 0)
            x = tl.where(seen, x, -float("inf"))
        updated = update(SoftmaxState(maximum, total, output), x, v.to(C.MATRIX), None, True)
        output, total, maximum = updated.output, updated.total, updated.maximum
    return SoftmaxState(maximum, total, output)


@triton.jit
def dense_attention(
    query: States,  # [B, Hq, S, DK], last dimension of these contiguous
    keys: States, values: States,  # [B, Hkv, T, DK] and [B, Hkv, T, DV]
    mask: Mask,
    spans,  # [B, S, 2] int32, for a mask row by row: see `mask_spans`
    s_aux,  # [Hq], any float dtype
    out: States,  # [B, Hq, S, DV]; with splits unused
    partial,  # [splits, B * Hkv * rows, DV] float32, normalised; unused without splits
    lse,  # [splits, B * Hkv * rows] float32, base 2; likewise
    n: DenseNumbers,
    SHAPE: tl.constexpr,  # a `DenseShape`
):  # fmt: skip
    """Attend to dense states. Grid: (row tiles, B * Hkv, splits).

    CAUSAL: query s does not see the last S - 1 - s tokens. MASK 1: a mask for all queries alike, 2: row by row.
    """
    C: tl.constexpr = constants_of(SHAPE)
    head = tl.program_id(1)
    batch = (head // n.kv_heads).to(tl.int64)
    kv_head = (head % n.kv_heads).to(tl.int64)
    # Start the last rows first: they see the most tokens.
    r = (n.tile_count - 1 - tl.program_id(0)) * C.BLOCK_R + tl.arange(0, C.BLOCK_R)
    valid = r < n.rows
    s = r // n.groups
    head_q = kv_head * n.groups + r % n.groups  # [BR]
    dk = tl.arange(0, C.BLOCK_DK)
    of_query, of_keys, of_values = query.strides, keys.strides, values.strides
    query_at = query.start + batch * of_query.batch + head_q * of_query.head + s.to(tl.int64) * of_query.token  # [BR]
    inside = valid[:, None] & (dk < C.DK)[None, :]
    plain = tl.load(query_at[:, None] + dk[None, :], mask=inside, other=0.0).to(C.MATRIX)
    own_keys = States(keys.start + (batch * of_keys.batch + kv_head * of_keys.head), of_keys)
    own_values = States(values.start + (batch * of_values.batch + kv_head * of_values.head), of_values)
    newest = tl.where(valid, n.tokens - n.queries + s if C.CAUSAL else n.tokens - 1, -1)  # [BR]
    first_query = (n.tile_count - 1 - tl.program_id(0)) * C.BLOCK_R // n.groups
    allowed = PrefixMask(None, None, None)
    if C.MASK > 0:
        mask_at = mask.start + (batch * mask.b + first_query.to(tl.int64) * mask.s)
        allowed = PrefixMask(mask_at, (s - first_query) * mask.s, mask.t)
    low = 0
    high = tl.max(newest, 0) + 1
    if C.MASK == 2:
        span = spans + (batch * n.queries + s) * 2
        low = tl.minimum(tl.min(tl.load(span, mask=valid, other=2**30), 0), high) // C.BLOCK_T * C.BLOCK_T
        high = tl.minimum(high, tl.max(tl.load(span + 1, mask=valid, other=0), 0))
    if C.SPLIT:
        tiles = (tl.maximum(high - low, 0) + C.BLOCK_T - 1) // C.BLOCK_T
        share = (tiles + tl.num_programs(2) - 1) // tl.num_programs(2) * C.BLOCK_T
        low += tl.program_id(2) * share
        high = tl.minimum(high, low + share)
    # Attend to tiles that all rows see whole, then to the others.
    edge = low
    state = empty_state(C.BLOCK_R, C.BLOCK_DV)
    if C.MASK == 0:
        oldest = tl.min(tl.where(valid, newest, n.tokens), 0)
        edge = low + tl.maximum(tl.minimum(high, oldest + 1) - low, 0) // C.BLOCK_T * C.BLOCK_T
        state = _add_tokens(state, plain, own_keys, own_values, allowed, newest, low, edge, n, False, C)
    state = _add_tokens(state, plain, own_keys, own_values, allowed, newest, edge, high, n, True, C)
    row = (tl.program_id(2) * tl.num_programs(1) + head).to(tl.int64) * n.rows + r
    at = out.start + batch * out.strides.batch + s.to(tl.int64) * out.strides.token + head_q * out.strides.head  # [BR]
    store_rows(state, s_aux, head_q, at, lse, partial, row, valid, C.DV, C.HAS_AUX, C.SPLIT)


ATTEND, SPANS = Kernel(dense_attention), Kernel(mask_spans)
SPLIT_TOKENS = 128
"""Tokens of a unit of `prefix_splits`: a program of few rows reads them in half the time that another split costs."""


@dataclass(frozen=True)
class DenseConfig:
    """Tile sizes and launch parameters of `dense_attention`.

    Args:
        block_rows: Query rows of a program.
        block_tokens: Tokens of a tile.
        warps: Warps of a program.
        stages: Number of tiles copied ahead.
        value_channels: Number of channels of values in a launch.
    """

    block_rows: int
    block_tokens: int
    warps: int
    stages: int
    value_channels: int = 512


@lru_cache
def dense_config(dim: int, rows: int, mask: int, on: Target) -> DenseConfig:
    """Look up the heuristic table.

    Args:
        dim: Channels of the larger tile, a power of two.
        rows: Query rows of a KV head.
        mask: 0 for none, 1 for one of tokens, 2 for one row by row.
        on: The device.
    """
    masked = mask == 2
    large = on.asm >= AMPERE.value and on.shared_bytes > 160 * 1024
    if dim > 256:
        if on.capability[0] == 9 and rows > 64:
            # A launch for each half of the values: logits are computed twice, which makes half as many operations more,
            # but the products are Hopper's, on two and four times the rows. For 128 masks of rows have no registers and
            # those of tokens, which are copied ahead, too, no shared memory.
            return DenseConfig(64 if mask else 128, 32, 8, 2, value_channels=256)
        # More rows need more registers than there are: 64 take 400 to 900 bytes of stack a thread.
        return DenseConfig(16, 32, 8, 2) if rows <= 16 else DenseConfig(32, 32, 8, 1)
    if rows <= 16:
        return DenseConfig(16, 64 if dim <= 128 else 32, 4, 2)
    if on.asm < AMPERE.value:
        return DenseConfig(64, 32, 4, 1)
    # Copies ahead take registers, and masks leave none.
    if dim > 128:
        return DenseConfig(64, 32, 8, 1 if masked or not large else 3)
    if not large or (masked and not on.dependent_launch):
        return DenseConfig(64, 32, 4, 1 if masked else 2)
    return DenseConfig(128, 64, 8, 1 if masked else 3)


def takes_dense(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the kernel takes these dtypes (16 bits) and heads on this device (matrix units that `tl.dot` uses)."""
    same, on = query.dtype == keys.dtype == values.dtype and query.dtype.itemsize == 2, target(query.device)
    return same and max(keys.shape[3], values.shape[3]) <= on.widest_head and not on.fragments


@on_its_device
def attend_dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
    *,
    allocate: Callable[[int], torch.Tensor],
    out: torch.Tensor | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Attention of the newest S of T tokens over dense states.

    Args:
        query: `[B, Hq, S, Dk]` fp16 or bf16, last dimension contiguous, other strides as they come.
        keys: `[B, Hkv, T, Dk]`, likewise.
        values: `[B, Hkv, T, Dv]`, likewise.
        mask: `[B, 1, S or 1, >= T]` bool, True attends.
        allocate: Function that returns float32 scratch of a number of elements or more, 16-byte aligned.
        out: `[B, S, Hq, Dv]` in the query's dtype, last dimension contiguous; by default a new tensor.
        splits: Programs that share the tokens of a tile of rows, instead of what the table says.

    Returns:
        `out`. Rows that attend to nothing are 0.
    """
    device = query.device
    batch, query_heads, queries, key_dim = query.shape
    kv_heads, tokens, value_dim = values.shape[1:]
    groups, on = query_heads // kv_heads, target(device)
    rows, heads = groups * queries, batch * kv_heads
    block_dk, block_dv = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    kind, masked = mask_layout(mask)
    config = dense_config(max(block_dk, block_dv), rows, kind, on)
    if out is None:
        out = query.new_empty(batch, queries, query_heads, value_dim)
    if value_dim > config.value_channels:
        for first in range(0, value_dim, config.value_channels):
            part = slice(first, first + config.value_channels)
            attend_dense(
                query, keys, values[..., part], mask, options, allocate=allocate, out=out[..., part], splits=splits
            )
        return out
    row_tiles = -(-rows // config.block_rows)
    if splits is None:
        # Rows of a mask have shares of their own width, and are enough without splits.
        splits = (
            1
            if kind == 2 and row_tiles > 1
            else prefix_splits(row_tiles * heads, -(-tokens // SPLIT_TOKENS), 2 * on.multiprocessors)
        )
    sums = splits * heads * rows if splits > 1 else 0
    sizes = [sums * value_dim, sums, 2 * batch * queries if kind == 2 else 0]
    partial, lse, spans = allocate(max(1, sum(sizes)))[: sum(sizes)].split(sizes)
    spans = spans.view(torch.int32)
    if kind == 2:
        SPANS((queries, batch, 1), (masked, spans, tokens), (), (1024,), (device.index,), num_warps=4)
    aux = options.s_aux
    flags = (options.causal and mask is None, kind, *options.flags, splits > 1)
    tiles = (config.block_rows, config.block_tokens, config.stages)
    dims, matrix = (key_dim, value_dim, block_dk, block_dv), matrix_type(query.dtype, query.device)
    constants = (DenseShape(*dims, *flags, matrix, *tiles),)
    n = DenseNumbers(rows, groups, kv_heads, queries, tokens, *options.log2_factors, row_tiles)
    states = map(states_of, (query, keys, values))
    ATTEND(
        (row_tiles, heads, splits),
        (*states, masked, spans, aux, states_of(out.transpose(1, 2)), partial, lse, n),
        (),
        constants,
        (constants, query.dtype, aux is not None and aux.dtype, device.index),
        num_warps=config.warps,
    )
    if splits > 1:
        merge(partial, lse, aux, out, rows, groups, kv_heads, heads * rows, splits)
    return out
