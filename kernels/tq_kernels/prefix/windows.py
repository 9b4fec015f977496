"""Decode attention over the sliding windows of many requests; a block table finds the pages of their dense rows.

A program holds a request's query rows of one KV head and walks over its share of the window, FlashAttention-style.
A window is read in the order of its rows and may begin at any of them: a softmax has no order. The new token takes the
place of the one that slides out; all programs read its row from `key` and `value` and one stores it, so that none waits
for another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ..common.device import matrix_type, target
from ..common.launcher import Kernel, kernel
from ..common.softmax import bounded, empty_state, update
from ..types import AttentionOptions
from .dense import SPLIT_TOKENS, dense_config
from .launch import merge, prefix_splits
from .tiles import store_rows


@kernel("count:cap_log2")
def window_attention(
    query,  # [N, Hq, DIM], strides in units of 8 elements, like key and value
    key, value,  # [N, Hkv, DIM]
    rows,  # [pages, 2, ROWS, Hkv, DIM] in the dtype of key and value
    block_table,  # [N, W] int32
    past,  # [N] int32, tokens before the new one; -1: padding
    s_aux,  # [Hq], any float dtype
    out,  # [N, Hq, DIM], contiguous; with splits unused
    partial,  # [splits, Hkv, N, G, DIM] float32, normalised; unused without splits
    lse,  # [splits, Hkv, N, G] float32, base 2; likewise
    count, kv_heads, groups,  # N, Hkv, G
    query_t, query_h, key_t, key_h, value_t, value_h,
    width,  # W
    page_size,  # in units of 8 elements
    window, row_tiles,
    scaling_log2, cap_log2,  # scaling and softcap, times log2(e)
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BOUNDS: tl.constexpr, HAS_AUX: tl.constexpr,
    SPLIT: tl.constexpr, MATRIX: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (N, Hkv * tiles of query rows, splits)."""
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // row_tiles
    g = tl.program_id(1) % row_tiles * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(2)
    head_q = kv_head * groups + g  # [BR]
    valid = g < groups
    d = tl.arange(0, BLOCK_D)
    before = tl.load(past + request)
    held = tl.minimum(before + 1, window)
    newest = tl.maximum(before, 0) % window
    pages = block_table + request * width
    row_size = kv_heads * DIM
    rows += kv_head * DIM
    new_key = key + request * (key_t * 8) + kv_head * (key_h * 8)
    new_value = value + request * (value_t * 8) + kv_head * (value_h * 8)

    if (tl.program_id(1) % row_tiles == 0) & (split == 0) & (before >= 0):
        page = tl.load(pages + newest // ROWS).to(tl.int64)
        to = rows + page * (page_size * 8) + newest % ROWS * row_size + d
        tl.store(to, tl.load(new_key + d, mask=d < DIM), mask=d < DIM)
        tl.store(to + ROWS * row_size, tl.load(new_value + d, mask=d < DIM), mask=d < DIM)

    query_at = query + request * (query_t * 8) + head_q * (query_h * 8)  # [BR]
    q = tl.load(query_at[:, None] + d[None, :], mask=valid[:, None] & (d < DIM)[None, :], other=0.0).to(MATRIX)
    tiles = (held + BLOCK_T - 1) // BLOCK_T
    low = tiles * split // tl.num_programs(2) * BLOCK_T
    high = tl.minimum(tiles * (split + 1) // tl.num_programs(2) * BLOCK_T, held)
    state = empty_state(BLOCK_R, BLOCK_D)
    for start in tl.range(low, high, BLOCK_T, num_stages=STAGES):
        row = start + tl.arange(0, BLOCK_T)
        inside = row < high
        page = tl.load(pages + row // ROWS, mask=inside, other=0).to(tl.int64)
        at = rows + page * (page_size * 8) + row % ROWS * row_size  # [BT]
        fresh = row == newest
        k_row = tl.where(fresh, new_key, at)
        v_row = tl.where(fresh, new_value, at + ROWS * row_size)
        read = inside[:, None] & (d < DIM)[None, :]
        k = tl.load(k_row[:, None] + d[None, :], mask=read, other=0.0).to(MATRIX)
        v = tl.load(v_row[:, None] + d[None, :], mask=read, other=0.0).to(MATRIX)
        x = tl.dot(q, tl.trans(k)) * scaling_log2  # [BR, BT]
        x = bounded(x, cap_log2, BOUNDS)
        x = tl.where(inside[None, :], x, -float("inf"))
        # The maximum is finite, because every tile has a token.
        state = update(state, x, v, None, False)

    row = ((split * kv_heads + kv_head).to(tl.int64) * count + request) * groups + g  # [BR]
    at = out + (request * (kv_heads * groups) + head_q) * DIM
    store_rows(state, s_aux, head_q, at, lse, partial, row, valid, DIM, HAS_AUX, SPLIT)


ATTEND = Kernel(window_attention)
MAX_DIM = 256
STAGES = 3
"""Tiles in flight: one ahead in loading rows, two in looking up their pages."""


def takes_windows(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether the kernel takes these dtypes (16 bits) and heads (rows of whole 16 bytes) on this device (matrix units
    that `tl.dot` uses)."""
    dim = key.shape[-1]
    takes = query.dtype == key.dtype and key.dtype.itemsize == 2 and dim <= MAX_DIM and dim % 8 == 0
    return takes and not target(query.device).fragments


def attend_windows(
    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    window: int,
    block_table: torch.Tensor,
    past: torch.Tensor,
    options: AttentionOptions,
    *,
    allocate: Callable[[int], torch.Tensor],
    splits: int | None = None,
) -> torch.Tensor:
    """Compute attention of N requests' new tokens, one each, over their windows and themselves, and store the tokens.

    Launches depend on shapes alone; kernels read lengths on the device.

    Args:
        tokens: Queries `[N, Hq, D]`, keys `[N, Hkv, D]` and values `[N, Hkv, D]`, the last dimension contiguous and
            other strides multiples of 8.
        rows: `[pages, 2, rows of a page, Hkv, D]`, keys and values of the layer, written in place; only pages may be
            apart, by a multiple of 8 elements.
        window: Tokens of a window.
        block_table: `[N, W]` int32, contiguous, W at least the number of pages of a window.
        past: `[N]` int32, number of tokens before the new one; -1 for padding.
        allocate: Function that returns float32 scratch of a number of elements or more, 16-byte aligned.
        splits: Number of programs that share a window; replaces the choice of the table.

    Returns:
        `[N, Hq, D]` in the query's dtype; padding tokens are 0.
    """
    query, key, value = tokens
    (count, query_heads, dim), kv_heads, device = query.shape, key.shape[1], query.device
    groups, block_d, on = query_heads // kv_heads, max(16, triton.next_power_of_2(dim)), target(device)
    config = dense_config(block_d, 1, 0, on)
    row_tiles = -(-groups // config.block_rows)
    if splits is None:
        splits = prefix_splits(count * kv_heads * row_tiles, -(-window // SPLIT_TOKENS), 2 * on.multiprocessors)
    out = query.new_empty(query.shape)
    if count == 0:
        return out
    sums = splits * count * query_heads if splits > 1 else 0
    partial, lse = allocate(max(1, sums * (dim + 1)))[: sums * (dim + 1)].split([sums * dim, sums])
    aux = query if options.s_aux is None else options.s_aux
    strides = tuple(stride // 8 for x in tokens for stride in x.stride()[:2])
    place = (block_table.shape[1], rows.stride(0) // 8, window)
    flags = (*options.flags, splits > 1)
    tiles = (config.block_rows, config.block_tokens, STAGES)
    constants = (dim, block_d, rows.shape[2], *flags, matrix_type(query.dtype, query.device), *tiles)
    ATTEND(
        (count, kv_heads * row_tiles, splits),
        (query, key, value, rows, block_table, past, aux, out, partial, lse),
        (count, kv_heads, groups, *strides, *place, row_tiles, *options.log2_factors),
        constants,
        (constants, query.dtype, aux.dtype, device.index),
        num_warps=config.warps,
    )
    if splits > 1:
        each, has_aux = count * groups, options.s_aux is not None
        merge(partial, lse, aux, out[None], each, groups, kv_heads, kv_heads * each, splits, has_aux=has_aux)
    return out
