"""Attention of decode over one job of dense tokens."""

import triton
import triton.language as tl

from ..common.softmax import finite, soft_capped
from .schedule import DENSE_TOKENS
from .tiles import fetch


@triton.jit
def allowed_tile(mask, t, r_offset, stride_t, valid):
    """Mask tile [32, BR] of tokens `t` [32]."""
    return tl.load(mask + (t.to(tl.int64) * stride_t)[:, None] + r_offset[None, :], mask=valid, other=0) != 0


@triton.jit
def dense_states(
    k_row,
    v_row,
    inside,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DM: tl.constexpr,
):
    """Keys [32, BDK] and values [BDM, 32] of the dense tokens whose rows `k_row` and `v_row` [32] point to; those not
    `inside` [32] read 0."""
    dk = tl.arange(0, BLOCK_DK)
    dv = tl.arange(0, BLOCK_DM)
    k = tl.load(k_row[:, None] + dk[None, :], mask=inside[:, None] & (dk < DK)[None, :], other=0.0).to(
        tl.float16
    )  # [32, BDK]
    v = tl.load(v_row[None, :] + dv[:, None], mask=inside[None, :] & (dv < DV)[:, None], other=0.0).to(
        tl.float16
    )  # [BDM, 32]
    return k, v


@triton.jit
def dense_logits(k, q, factor, cap_log2, SOFTCAP: tl.constexpr):
    """Logits [32, BR] of keys [32, BDK] and queries [BDK, BR]."""
    x = tl.dot(k, q) * factor[None, :]
    if SOFTCAP:
        x = soft_capped(x, cap_log2)
    return x


@triton.jit
def dense_sums(x, v):
    """What logits x [32, BR] and values v [BDM, 32] sum up to: (sum [BDM, BR], total [BR], maximum [BR])."""
    maximum = tl.max(x, 0)
    p = tl.exp2(x - finite(maximum)[None, :])
    return tl.dot(v, p.to(tl.float16)), tl.sum(p, 0), maximum


@triton.jit
def dense_rows_of(
    low,
    sink_count,
    window_count,
    window_start,
    window_capacity,
    sink_keys,
    sink_values,
    window_keys,
    window_values,
    DK: tl.constexpr,
    DV: tl.constexpr,
):
    """Pointers [32] to the keys and values of dense tokens `low` to `low + 32`, counting sinks, then window; the tokens
    [32], and which of them are there. The others' pointers are to the last one."""
    t = low + tl.arange(0, DENSE_TOKENS)
    count = sink_count + window_count
    near = tl.minimum(t, count - 1)
    row = window_start + near - sink_count  # the window is a ring
    row = tl.where(row >= window_capacity, row - window_capacity, row)
    k_row = tl.where(near < sink_count, sink_keys + near * DK, window_keys + row * DK)
    v_row = tl.where(near < sink_count, sink_values + near * DV, window_values + row * DV)
    return k_row, v_row, t, t < count


@triton.jit
def prefetch_rows(row, DIM: tl.constexpr):
    """Start to move rows of DIM elements, to which `row` [32] points, to the L2 cache."""
    LINE_ELEMENTS: tl.constexpr = 1024 // row.dtype.element_ty.primitive_bitwidth
    for line in tl.static_range((DIM + LINE_ELEMENTS - 1) // LINE_ELEMENTS):
        fetch(row + line * LINE_ELEMENTS)


@triton.jit
def dense_job(
    low,
    sink_count,
    window_count,
    window_start,
    window_capacity,
    packed_count,
    query,
    scale,
    scaling_log2,
    cap_log2,
    sink_keys,
    sink_values,
    window_keys,
    window_values,
    mask,
    mask_t,
    mask_offset,
    queries,
    r,
    rows,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DM: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Attention over dense tokens `low` to `low + 32`, counting sinks, then window: (sum [BDM, BR], total [BR],
    maximum [BR]). `query` and `scale` [BR] point to the rows' queries and to the factors these were divided by."""
    k_row, v_row, t, inside = dense_rows_of(
        low, sink_count, window_count, window_start, window_capacity, sink_keys, sink_values, window_keys,
        window_values, DK, DV,
    )  # fmt: skip
    # States first: the compiler lets a product wait for its queries before it loads what comes after them.
    k, v = dense_states(k_row, v_row, inside, DK, DV, BLOCK_DK, BLOCK_DM)
    d = tl.arange(0, BLOCK_DK)
    q = tl.load(query[None, :] + d[:, None], mask=(d < DK)[:, None] & (r < rows)[None, :], other=0.0)  # [BDK, BR]
    factor = tl.load(scale, mask=r < rows, other=1.0) * scaling_log2  # [BR]
    x = dense_logits(k, q, factor, cap_log2, SOFTCAP)
    allowed = inside[:, None] & (r < rows)[None, :]
    if CAUSAL:
        allowed = allowed & ((t - sink_count)[:, None] <= (window_count - queries + r % queries)[None, :])
    if MASK:
        position = tl.where(t < sink_count, t, t + packed_count)
        allowed = allowed & allowed_tile(mask, position, mask_offset, mask_t, allowed)
    x = tl.where(allowed, x, -float("inf"))
    return dense_sums(x, v)
