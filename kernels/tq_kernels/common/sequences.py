"""Who a token belongs to and where its sequence's rows lie, found on the device: a launch is right for any lengths.

A sequence's pages are `table[b]`: the pages of its ring, the page of its first SINKS tokens if there are sinks, and the
pages of its blocks. Sinks are read as soon as block 0 is complete, in place of what that says of them. A page is
`page_blocks` blocks of BLOCK_WORDS int32 words from the next, one block for every layer and KV head. A page of rows
holds ROWS rows of keys, then as many of values.
"""

import triton
import triton.language as tl

from ..format import TOKENS


@triton.jit
def lengths(cu_seqlens_q, cu_seqlens_k, sequence, count):
    """First new token, new tokens, and tokens cached before, of sequences: int32. From `count` on they have none."""
    exists = sequence < count
    first = tl.load(cu_seqlens_q + sequence, mask=exists, other=0)
    new = tl.load(cu_seqlens_q + sequence + 1, mask=exists, other=0) - first
    before = tl.load(cu_seqlens_k + sequence, mask=exists, other=0)
    return first, new, tl.load(cu_seqlens_k + sequence + 1, mask=exists, other=0) - before - new


@triton.jit
def located(amounts, index):
    """Of `amounts` [n] items that follow one another, whose item `index` is, and how many come before his."""
    ends = tl.cumsum(amounts, 0)
    return tl.sum((ends <= index).to(tl.int32), 0), tl.max(tl.where(ends <= index, ends, 0), 0)


@triton.jit
def ring_rows(
    rows,
    pages,
    row,
    valid,
    kv_head,
    page_blocks,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """Pointers to keys of rows `row` [n] of a ring; their values are ROWS * DIM elements further.

    Args:
        rows: Pointer to the layer's first page, of the model's dtype.
        pages: Pointer to the sequence's pages.
        valid: [n], rows that exist; pages of others are not read.
    """
    SIZE: tl.constexpr = BLOCK_WORDS * 32 // rows.dtype.element_ty.primitive_bitwidth
    page = tl.load(pages + row // ROWS, mask=valid, other=0).to(tl.int64)
    return rows + (page * page_blocks + kv_head) * SIZE + row % ROWS * DIM


@triton.jit
def sinks_of(past, SINKS: tl.constexpr):
    """Rows that are read of a sequence's sink page."""
    return tl.where(past >= TOKENS, SINKS, 0)


@triton.jit
def without_sinks(x, block, token, SINKS: tl.constexpr):
    """Logits `x` of tokens `token` of a block, without the sinks in block 0."""
    return tl.where((block == 0) & (token < SINKS), -float("inf"), x)


@triton.jit
def dense_rows(
    rows,
    pages,
    key,
    value,
    t,
    sinks,
    held,
    length,
    first,
    kv_head,
    page_blocks,
    key_t,
    key_h,
    value_t,
    value_h,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """Pointers [n] to keys and to values of a sequence's dense tokens `t` [n]: `sinks` rows of its sink page, `held`
    rows of its ring, then the new tokens from `first` on in `key` and `value`. Those from `length` on do not exist."""
    # The sink page comes after the ring's, as if its rows went on.
    row = tl.where(t < sinks, TOKENS + t, t - sinks)
    old = t < sinks + held
    in_page = ring_rows(rows, pages, row, old, kv_head, page_blocks, DIM, ROWS, BLOCK_WORDS)
    token = (first + tl.minimum(t, length - 1) - sinks - held).to(tl.int64)
    k_row = tl.where(old, in_page, key + token * key_t + kv_head * key_h)
    v_row = tl.where(old, in_page + ROWS * DIM, value + token * value_t + kv_head * value_h)
    return k_row, v_row


@triton.jit
def completed(new, past):
    """Blocks that new tokens complete."""
    return (past + new) // TOKENS - past // TOKENS
