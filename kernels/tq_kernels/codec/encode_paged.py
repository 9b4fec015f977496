"""Encode the blocks that a step's new tokens complete: `tq_kernels.codec.encode` from rings and new rows to pages.

Where nothing became complete, which in decoding is nearly always so, programs end after they have read the lengths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.sequences import completed, lengths, located, ring_rows
from ..format import MOST_SINKS, TOKENS
from .encode import HALF_TOKENS, EncodeShape, Output, block_rows, encode_block, resident_rotation

_MOST_SINKS = tl.constexpr(MOST_SINKS)


@triton.jit
def _rows_of(
    states,
    rows,
    pages,
    token,
    position,
    first,
    past,
    kv_head,
    page_blocks,
    stride_t,
    stride_h,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    IS_VALUE: tl.constexpr,
):
    """Pointers [n, 1] to rows `token` [n] of the block at `position`: ring rows before `past`, then new ones."""
    t = position + token
    in_ring = ring_rows(rows, pages, token, t < past, kv_head, page_blocks, DIM, ROWS, BLOCK_WORDS)
    fresh = (first + tl.maximum(t - past, 0)).to(tl.int64)
    at = tl.where(t < past, in_ring + IS_VALUE * ROWS * DIM, states + fresh * stride_t + kv_head * stride_h)
    return at[:, None]


@triton.jit
def _store_sinks(
    states,
    rows,
    pages,
    first,
    past,
    kv_head,
    page_blocks,
    stride_t,
    stride_h,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    IS_VALUE: tl.constexpr,
):
    """Copy the first rows of block 0 to the sink page."""
    token = tl.arange(0, _MOST_SINKS)
    d = tl.arange(0, TILE)[None, :]
    inside = (token < SINKS)[:, None] & (d < DIM)
    source = _rows_of(
        states, rows, pages, token, 0, first, past, kv_head, page_blocks, stride_t, stride_h,
        DIM, ROWS, BLOCK_WORDS, IS_VALUE,
    )  # fmt: skip
    to = ring_rows(rows, pages, TOKENS + token, token < SINKS, kv_head, page_blocks, DIM, ROWS, BLOCK_WORDS)
    tl.store((to + IS_VALUE * ROWS * DIM)[:, None] + d, tl.load(source + d, mask=inside), mask=inside)


class NewStates(NamedTuple):
    """New keys or values, their strides of tokens and heads, and what rotates them."""

    states: Any
    stride_t: Any
    stride_h: Any
    rotation: Any
    channel_scales: Any


class Pool(NamedTuple):
    """Where rows and blocks of sequences are: arguments of `encode_completed`."""

    rows: Any
    table: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    count: Any
    width: Any
    page_blocks: Any


@triton.jit
def _encode_all(new, pool, out, amounts, total, SINKS: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr):
    """Every `programs`-th of all keys' or values' blocks: `amounts` [BB] of each sequence, `total` in all."""
    kv_head = tl.program_id(1)
    channel_scales = new.channel_scales + kv_head * C.HEAD_DIM
    token = block_rows()  # [64]
    k = tl.arange(0, C.K_STEP)[None, :]
    high, low = resident_rotation(new.rotation, channel_scales, C.K_STEP, C.MATRIX, C.HEAD_DIM, C.DIM, C.TILE)
    for task in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=1):
        sequence, before = located(amounts, task)
        first, _, past = lengths(pool.cu_seqlens_q, pool.cu_seqlens_k, sequence, pool.count)
        block = past // TOKENS + task - before
        pages = pool.table + sequence.to(tl.int64) * pool.width
        page = tl.load(pages + TOKENS // ROWS + (1 if SINKS else 0) + block).to(tl.int64)
        position = block * TOKENS
        if SINKS:
            if block == 0:
                _store_sinks(
                    new.states, pool.rows, pages, first, past, kv_head, pool.page_blocks, new.stride_t, new.stride_h,
                    C.HEAD_DIM, C.TILE, SINKS, ROWS, C.BLOCK_WORDS, C.IS_VALUE,
                )  # fmt: skip
        early = _rows_of(
            new.states, pool.rows, pages, token, position, first, past, kv_head, pool.page_blocks, new.stride_t,
            new.stride_h, C.HEAD_DIM, ROWS, C.BLOCK_WORDS, C.IS_VALUE,
        )  # fmt: skip
        late = _rows_of(
            new.states, pool.rows, pages, token + HALF_TOKENS, position, first, past, kv_head, pool.page_blocks,
            new.stride_t, new.stride_h, C.HEAD_DIM, ROWS, C.BLOCK_WORDS, C.IS_VALUE,
        )  # fmt: skip
        encode_block(
            early, late, k, k, out, page * pool.page_blocks + kv_head, new.rotation, channel_scales, high, low, C
        )


@triton.jit(do_not_specialize="count key_t key_h value_t value_h width page_blocks".split())
def encode_completed(
    key,  # [T, Hkv, HEAD_DIM], strides in units of 8 elements
    value,  # [T, Hkv, HEAD_DIM]
    rows,  # [pages, Hkv, 2, ROWS, HEAD_DIM] in their dtype
    table,  # [B, W] int32
    cu_seqlens_q,  # [B + 1] int32
    cu_seqlens_k,  # [B + 1] int32
    key_words,  # [pages, Hkv, 128 * DIM * KEY_BITS / 32] int32
    value_words,  # [pages, Hkv, 128 * DIM * VALUE_BITS / 32] int32
    scales,  # [pages, Hkv, 128, 2] float16
    means,  # [pages, Hkv, DIM] float16
    key_rotation,  # [DIM, DIM] float32
    value_rotation,  # [DIM, DIM] float32
    key_channel_scales,  # [Hkv, HEAD_DIM] float16
    value_channel_scales,  # [Hkv, HEAD_DIM] float16
    count,  # B
    key_t,
    key_h,
    value_t,
    value_h,
    width,  # W
    page_blocks,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    KEY_LEVELS: tl.constexpr,
    VALUE_LEVELS: tl.constexpr,
    MATRIX: tl.constexpr,
    K_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ASM: tl.constexpr,
):
    """Grid: (programs, Hkv, 2), keys and values."""
    _, new, past = lengths(cu_seqlens_q, cu_seqlens_k, tl.arange(0, BLOCK_B), count)
    amounts = completed(new, past)  # [BB]
    total = tl.sum(amounts, 0)
    if tl.program_id(0) >= total:
        return
    pool = Pool(rows, table, cu_seqlens_q, cu_seqlens_k, count, width, page_blocks)
    KEYS: tl.constexpr = EncodeShape(
        HEAD_DIM, DIM, TILE, KEY_BITS, KEY_LEVELS, False, MATRIX, K_STEP, PRECISION, ASM, BLOCK_WORDS
    )  # fmt: skip
    VALUES: tl.constexpr = EncodeShape(
        HEAD_DIM, DIM, TILE, VALUE_BITS, VALUE_LEVELS, True, MATRIX, K_STEP, PRECISION, ASM, BLOCK_WORDS
    )  # fmt: skip
    if tl.program_id(2) == 0:
        new_keys = NewStates(key, key_t * 8, key_h * 8, key_rotation, key_channel_scales)
        _encode_all(
            new_keys, pool, Output(key_words, scales, means if HAS_MEAN else None), amounts, total, SINKS, ROWS, KEYS
        )
    else:
        new_values = NewStates(value, value_t * 8, value_h * 8, value_rotation, value_channel_scales)
        _encode_all(new_values, pool, Output(value_words, scales, None), amounts, total, SINKS, ROWS, VALUES)
