"""New tokens' rows go to their sequences' rings: of a sequence with one token while its query is prepared, of others in
a kernel of its own, after everybody has read the rows that they replace."""

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..common.schedule import lengths, ring_rows
from ..format import TOKENS
from .rotate import ROTATE_COLUMNS, Queries, rotate_rows

TAIL_ROWS = tl.constexpr(32)
"""Rows that a program of `append_tails` writes."""


@triton.jit
def _copy_rows(
    key, value, token, at, valid, kv_head, key_t, key_h, value_t, value_h, DIM: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Keys and values of tokens `token` [n] int64 to the rows that `at` [n] points to."""
    d = tl.arange(0, TILE)[None, :]
    inside = valid[:, None] & (d < DIM)
    k = tl.load(key + (token * key_t + kv_head * key_h)[:, None] + d, mask=inside)
    v = tl.load(value + (token * value_t + kv_head * value_h)[:, None] + d, mask=inside)
    tl.store(at[:, None] + d, k, mask=inside)
    tl.store(at[:, None] + (ROWS * DIM + d), v, mask=inside)


@triton.jit(
    do_not_specialize=(
        "count kv_heads head_rows query_t query_h key_t key_h value_t value_h width page_blocks plain_at scale_at"
    ).split()
)
def rotate_and_append_single(
    query,  # [T, Hq, DIM], strides in units of 8 elements, as of key and value
    key,  # [T, Hkv, DIM]
    value,  # [T, Hkv, DIM]
    rows,  # [pages, Hkv, 2, ROWS, DIM] in the dtype of key and value
    block_table,  # [B, W] int32
    cu_seqlens_q,  # [B + 1] int32
    cu_seqlens_k,  # [B + 1] int32
    rotation,  # as for rotate_query
    channel_scales,  # [Hkv, DIM] fp16
    scratch,
    count,  # B
    kv_heads,
    head_rows,  # G * B
    query_t, query_h, key_t, key_h, value_t, value_h,
    width,  # W
    page_blocks, plain_at, scale_at, DIM: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr, DKP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`rotate_query` for sequences with one new token: row g B + b of a head is query g of sequence b. Their rows go to
    the rings, unless they complete a block. Grid: (Hkv, G B / BLOCK_R, DKP / 32)."""
    if PDL:
        cuda.gdc_launch_dependents()
    if tl.program_id(2) == 0:
        kv_head = tl.program_id(0)
        for sequence in tl.range(tl.program_id(1), count, tl.num_programs(1)):
            first, new, past = lengths(cu_seqlens_q, cu_seqlens_k, sequence, count)
            stays = (new == 1) & (past % TOKENS < TOKENS - 1)
            one = tl.zeros([1], tl.int32)
            pages = block_table + width.to(tl.int64) * sequence
            at = ring_rows(rows, pages, one + past % TOKENS, stays, kv_head, page_blocks, DIM, ROWS, BLOCK_WORDS)
            _copy_rows(
                key, value, (one + first).to(tl.int64), at, (one == 0) & stays, kv_head,
                key_t * 8, key_h * 8, value_t * 8, value_h * 8, DIM, TILE, ROWS,
            )  # fmt: skip
    row_tile, tile = tl.program_id(1), tl.program_id(2)
    new = Queries(
        query, rotation, channel_scales, cu_seqlens_q, head_rows, count, kv_heads, 0, query_h * 8, query_t * 8
    )
    rotate_rows(new, scratch, row_tile, tile, plain_at, scale_at, DIM, DKP, BLOCK_D, BLOCK_R, ROTATE_COLUMNS)


@triton.jit(do_not_specialize="count key_t key_h value_t value_h width page_blocks".split())
def append_tails(
    key,  # as for rotate_and_append_single
    value, rows, block_table, cu_seqlens_q, cu_seqlens_k, count, key_t, key_h, value_t, value_h, width,
    page_blocks, DIM: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Write the rows after the last complete block of sequences with more than one new token to their rings.

    Grid: (B, Hkv, 128 / TAIL_ROWS).
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    first, new, past = lengths(cu_seqlens_q, cu_seqlens_k, sequence, count)
    if new <= 1:
        return
    row = tl.program_id(2) * TAIL_ROWS + tl.arange(0, TAIL_ROWS)
    fresh = (past + new) // TOKENS * TOKENS + row - past  # [32], which of the new tokens
    valid = (fresh >= 0) & (fresh < new)
    at = ring_rows(
        rows, block_table + sequence.to(tl.int64) * width, row, valid, kv_head, page_blocks, DIM, ROWS, BLOCK_WORDS
    )
    _copy_rows(
        key, value, (first + fresh).to(tl.int64), at, valid, kv_head,
        key_t * 8, key_h * 8, value_t * 8, value_h * 8, DIM, TILE, ROWS,
    )  # fmt: skip
