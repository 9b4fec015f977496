"""Append one token a sequence to a window whose counts are on the host, in the launch that rotates its queries."""

import triton
import triton.language as tl

from .rotate import rotate_query


@triton.jit
def load_row(states, stride_b, stride_h, head, heads, d, DIM: tl.constexpr):
    """The new row of `head`, counting B * H heads, of `states` [B, H, 1, DIM]."""
    batch = (head // heads).to(tl.int64)
    return tl.load(states + batch * stride_b + head % heads * stride_h + d, mask=d < DIM)


@triton.jit(
    do_not_specialize=[
        "slot",
        "capacity",
        "keys_b",
        "keys_h",
        "values_b",
        "values_h",
        "rows",
        "queries",
        "kv_heads",
        "query_b",
        "query_h",
        "query_s",
        "plain_at",
        "scale_at",
    ]
)
def rotate_and_append(
    keys,  # [B, Hkv, 1, DK]
    values,  # [B, Hkv, 1, DV]
    window_keys,  # [B, Hkv, capacity, DK], contiguous
    window_values,  # [B, Hkv, capacity, DV]
    query,  # from here on as for rotate_query
    rotation,
    factors,
    scratch,
    slot,
    capacity,
    keys_b,
    keys_h,
    values_b,
    values_h,
    rows,
    queries,
    kv_heads,
    query_b,
    query_h,
    query_s,
    plain_at,
    scale_at,
    DV: tl.constexpr,
    TILE: tl.constexpr,
    DK: tl.constexpr,
    DKP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """`rotate_query`; the first program of each head also writes its new row to slot `slot` of the window's ring.

    The kernel that attends waits for this one to end before it reads the window.
    """
    if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        head = tl.program_id(0)
        d = tl.arange(0, TILE)
        k = load_row(keys, keys_b, keys_h, head, kv_heads, d, DK)
        v = load_row(values, values_b, values_h, head, kv_heads, d, DV)
        row = head.to(tl.int64) * capacity + slot
        tl.store(window_keys + row * DK + d, k, mask=d < DK)
        tl.store(window_values + row * DV + d, v, mask=d < DV)
    rotate_query(
        query,
        rotation,
        factors,
        scratch,
        rows,
        queries,
        kv_heads,
        query_b,
        query_h,
        query_s,
        plain_at,
        scale_at,
        DK,
        DKP,
        BLOCK_D,
        BLOCK_R,
        PDL,
    )
