"""Encode the blocks that a step's new tokens complete: `tq_kernels.codec.encode` from rings and new rows to pages.

Where nothing became complete, which in decoding is nearly always so, programs end after they have read the lengths.
"""

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


@triton.jit
def _encode_all(
    states,
    rows,
    table,
    cu_q,
    cu_k,
    words,
    scales,
    means,
    rotation,
    factors,
    amounts,
    total,
    count,
    stride_t,
    stride_h,
    width,
    page_blocks,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    IS_VALUE: tl.constexpr,
    MATRIX: tl.constexpr,
    K_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Every `programs`-th of all keys' or values' blocks."""
    C: tl.constexpr = EncodeShape(
        HEAD_DIM, DIM, TILE, BITS, LEVELS, IS_VALUE, MATRIX, K_STEP, PRECISION, ASM, BLOCK_WORDS
    )  # fmt: skip
    kv_head = tl.program_id(1)
    factors += kv_head * HEAD_DIM
    token = block_rows()  # [64]
    k = tl.arange(0, K_STEP)[None, :]
    high, low = resident_rotation(rotation, factors, K_STEP, MATRIX, HEAD_DIM, DIM, TILE)
    for task in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=1):
        sequence, before = located(amounts, task)
        first, _, past = lengths(cu_q, cu_k, sequence, count)
        block = past // TOKENS + task - before
        pages = table + sequence.to(tl.int64) * width
        page = tl.load(pages + TOKENS // ROWS + (1 if SINKS else 0) + block).to(tl.int64)
        position = block * TOKENS
        if SINKS:
            if block == 0:
                _store_sinks(
                    states, rows, pages, first, past, kv_head, page_blocks, stride_t, stride_h,
                    HEAD_DIM, TILE, SINKS, ROWS, BLOCK_WORDS, IS_VALUE,
                )  # fmt: skip
        early = _rows_of(
            states, rows, pages, token, position, first, past, kv_head, page_blocks, stride_t, stride_h,
            HEAD_DIM, ROWS, BLOCK_WORDS, IS_VALUE,
        )  # fmt: skip
        late = _rows_of(
            states, rows, pages, token + HALF_TOKENS, position, first, past, kv_head, page_blocks, stride_t, stride_h,
            HEAD_DIM, ROWS, BLOCK_WORDS, IS_VALUE,
        )  # fmt: skip
        out = Output(words, scales, means)
        encode_block(early, late, k, k, out, page * page_blocks + kv_head, rotation, factors, high, low, C)


@triton.jit(do_not_specialize="count key_t key_h value_t value_h width page_blocks".split())
def encode_completed(
    key,  # [T, Hkv, HEAD_DIM], strides in units of 8 elements
    value,  # [T, Hkv, HEAD_DIM]
    rows,  # [pages, Hkv, 2, ROWS, HEAD_DIM] in their dtype
    table,  # [B, W] int32
    cu_q,  # [B + 1] int32
    cu_k,  # [B + 1] int32
    key_words,  # [pages, Hkv, 128 * DIM * KEY_BITS / 32] int32
    value_words,  # [pages, Hkv, 128 * DIM * VALUE_BITS / 32] int32
    scales,  # [pages, Hkv, 128, 2] float16
    means,  # [pages, Hkv, DIM] float16
    key_rotation,  # [DIM, DIM] float32
    value_rotation,  # [DIM, DIM] float32
    key_factors,  # [Hkv, HEAD_DIM] float16
    value_factors,  # [Hkv, HEAD_DIM] float16
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
    _, new, past = lengths(cu_q, cu_k, tl.arange(0, BLOCK_B), count)
    amounts = completed(new, past)  # [BB]
    total = tl.sum(amounts, 0)
    if tl.program_id(0) >= total:
        return
    if tl.program_id(2) == 0:
        _encode_all(
            key, rows, table, cu_q, cu_k, key_words, scales, means if HAS_MEAN else None, key_rotation, key_factors,
            amounts, total, count, key_t * 8, key_h * 8, width, page_blocks, HEAD_DIM, DIM, TILE, KEY_BITS, KEY_LEVELS,
            False, MATRIX, K_STEP, PRECISION, SINKS, ROWS, BLOCK_WORDS, ASM,
        )  # fmt: skip
    else:
        _encode_all(
            value, rows, table, cu_q, cu_k, value_words, scales, None, value_rotation, value_factors,
            amounts, total, count, value_t * 8, value_h * 8, width, page_blocks, HEAD_DIM, DIM, TILE, VALUE_BITS,
            VALUE_LEVELS, True, MATRIX, K_STEP, PRECISION, SINKS, ROWS, BLOCK_WORDS, ASM,
        )  # fmt: skip
