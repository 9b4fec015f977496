"""Decode attention over the sliding windows of many requests; a block table finds the pages of their dense rows.

A program holds a request's query rows of one KV head and walks over its share of the window, FlashAttention-style.
A window is read in the order of its rows and may begin at any of them: a softmax has no order. The new token takes the
place of the one that slides out; all programs read its row from `key` and `value` and one stores it, so that none waits
for another.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ..common.device import constants_of, matrix_type, target
from ..common.launcher import Kernel
from ..common.schedule import row_choice
from ..common.softmax import bounded, empty_state, update
from ..types import AttentionOptions
from .dense import SPLIT_TOKENS, dense_config
from .launch import merge, prefix_splits
from .tiles import store_rows

WindowNumbers = namedtuple(
    "WindowNumbers",
    "count kv_heads groups query_t query_h key_t key_h value_t value_h width page_size window row_tiles scaling_log2 "
    "cap_log2",
)
"""Numbers of `window_attention`: N, Hkv, G; strides, and the size of a page, in units of 8 elements; W; tokens of a
window; tiles of query rows; scaling and softcap, times log2(e)."""
WindowShape = namedtuple("WindowShape", "DIM BLOCK_D ROWS BOUNDS HAS_AUX SPLIT MATRIX BLOCK_R BLOCK_T STAGES")
"""Constants of `window_attention`."""


@triton.jit
def window_attention(
    query,  # [N, Hq, DIM]
    key, value,  # [N, Hkv, DIM]
    rows,  # [pages, 2, ROWS, Hkv, DIM] in the dtype of key and value
    block_table,  # [N, W] int32
    past,  # [N] int32, tokens before the new one; -1: padding
    s_aux,  # [Hq], any float dtype
    out,  # [N, Hq, DIM], contiguous; with splits unused
    partial,  # [splits, Hkv, N, G, DIM] float32, normalised; unused without splits
    lse,  # [splits, Hkv, N, G] float32, base 2; likewise
    n: WindowNumbers,
    SHAPE: tl.constexpr,  # a `WindowShape`
):  # fmt: skip
    """Grid: (N, Hkv * tiles of query rows, splits)."""
    C: tl.constexpr = constants_of(SHAPE)
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // n.row_tiles
    g = tl.program_id(1) % n.row_tiles * C.BLOCK_R + tl.arange(0, C.BLOCK_R)
    split = tl.program_id(2)
    head_q = kv_head * n.groups + g  # [BR]
    valid = g < n.groups
    d = tl.arange(0, C.BLOCK_D)
    before = tl.load(past + request)
    held = tl.minimum(before + 1, n.window)
    newest = tl.maximum(before, 0) % n.window
    pages = block_table + request * n.width
    row_size = n.kv_heads * C.DIM
    rows += kv_head * C.DIM
    new_key = key + request * (n.key_t * 8) + kv_head * (n.key_h * 8)
    new_value = value + request * (n.value_t * 8) + kv_head * (n.value_h * 8)

    if (tl.program_id(1) % n.row_tiles == 0) & (split == 0) & (before >= 0):
        page = tl.load(pages + newest // C.ROWS).to(tl.int64)
        to = rows + page * (n.page_size * 8) + newest % C.ROWS * row_size + d
        tl.store(to, tl.load(new_key + d, mask=d < C.DIM), mask=d < C.DIM)
        tl.store(to + C.ROWS * row_size, tl.load(new_value + d, mask=d < C.DIM), mask=d < C.DIM)

    query_at = query + request * (n.query_t * 8) + head_q * (n.query_h * 8)  # [BR]
    q = tl.load(query_at[:, None] + d[None, :], mask=valid[:, None] & (d < C.DIM)[None, :], other=0.0).to(C.MATRIX)
    tiles = (held + C.BLOCK_T - 1) // C.BLOCK_T
    low = tiles * split // tl.num_programs(2) * C.BLOCK_T
    high = tl.minimum(tiles * (split + 1) // tl.num_programs(2) * C.BLOCK_T, held)
    state = empty_state(C.BLOCK_R, C.BLOCK_D)
    for start in tl.range(low, high, C.BLOCK_T, num_stages=C.STAGES):
        row = start + tl.arange(0, C.BLOCK_T)
        inside = row < high
        page = tl.load(pages + row // C.ROWS, mask=inside, other=0).to(tl.int64)
        at = rows + page * (n.page_size * 8) + row % C.ROWS * row_size  # [BT]
        fresh = row == newest
        k_row = row_choice(fresh, new_key, at, True)
        v_row = row_choice(fresh, new_value, at + C.ROWS * row_size, True)
        read = inside[:, None] & (d < C.DIM)[None, :]
        k = tl.load(k_row[:, None] + d[None, :], mask=read, other=0.0).to(C.MATRIX)
        v = tl.load(v_row[:, None] + d[None, :], mask=read, other=0.0).to(C.MATRIX)
        x = tl.dot(q, tl.trans(k)) * n.scaling_log2  # [BR, BT]
        x = bounded(x, n.cap_log2, C.BOUNDS)
        x = tl.where(inside[None, :], x, -float("inf"))
        # The maximum is finite, because every tile has a token.
        state = update(state, x, v, None, False)

    row = ((split * n.kv_heads + kv_head).to(tl.int64) * n.count + request) * n.groups + g  # [BR]
    at = out + (request * (n.kv_heads * n.groups) + head_q) * C.DIM
    store_rows(state, s_aux, head_q, at, lse, partial, row, valid, C.DIM, C.HAS_AUX, C.SPLIT)


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
            other strides multiples of 8, addresses of 16.
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
    aux = options.s_aux
    n = WindowNumbers(
        *(count, kv_heads, groups, *[stride // 8 for x in tokens for stride in x.stride()[:2]], block_table.shape[1]),
        *(rows.stride(0) // 8, window, row_tiles, *options.log2_factors),
    )
    tiles = (matrix_type(query.dtype, query.device), config.block_rows, config.block_tokens, STAGES)
    shape = WindowShape(dim, block_d, rows.shape[2], *options.flags, splits > 1, *tiles)
    ATTEND(
        (count, kv_heads * row_tiles, splits),
        (query, key, value, rows, block_table, past, aux, out, partial, lse),
        (n,),
        (shape,),
        (shape, query.dtype, aux is not None and aux.dtype, device.index),
        num_warps=config.warps,
    )
    if splits > 1:
        each = count * groups
        merge(partial, lse, aux, out[None], each, groups, kv_heads, kv_heads * each, splits)
    return out
