"""Attention of decode over one job of dense tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.schedule import DENSE_TOKENS
from ..common.softmax import finite, soft_capped
from .tiles import fetch


class Mask(NamedTuple):
    """The mask of a sequence: pointer to uint8, and strides of queries and of tokens."""

    start: Any
    stride_s: Any
    stride_t: Any


class DenseTokens(NamedTuple):
    """The dense tokens of a KV head, sinks before residual. The residual is a ring, its first row in slot
    `residual_start`.

    Args:
        sink_keys, sink_values, residual_keys, residual_values: Pointers to the head's rows.
        sink_count, residual_count: Rows that count.
        residual_start, residual_capacity: Slots of the residual.
    """

    sink_keys: Any
    sink_values: Any
    residual_keys: Any
    residual_values: Any
    sink_count: Any
    residual_count: Any
    residual_start: Any
    residual_capacity: Any


@triton.jit
def allowed_tile(mask, t, r_offset, stride_t, valid):
    """Mask tile [32, BR] of tokens `t` [32]."""
    return tl.load(mask + (t.to(tl.int64) * stride_t)[:, None] + r_offset[None, :], mask=valid, other=0) != 0


@triton.jit
def dense_states(k_row, v_row, inside, C: tl.constexpr):
    """Keys [32, BDK] and values [BDM, 32] of the dense tokens whose rows `k_row` and `v_row` [32] point to; those not
    `inside` [32] read 0."""
    dk = tl.arange(0, C.BLOCK_DK)
    dv = tl.arange(0, C.BLOCK_DM)
    k = tl.load(k_row[:, None] + dk[None, :], mask=inside[:, None] & (dk < C.DK)[None, :], other=0.0).to(
        tl.float16
    )  # [32, BDK]
    v = tl.load(v_row[None, :] + dv[:, None], mask=inside[None, :] & (dv < C.DV)[:, None], other=0.0).to(
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
def dense_rows_of(low, dense, C: tl.constexpr):
    """Pointers [32] to the keys and values of dense tokens `low` to `low + 32`; the tokens [32], and which of them are
    there. The others' pointers are to the last one."""
    t = low + tl.arange(0, DENSE_TOKENS)
    count = dense.sink_count + dense.residual_count
    near = tl.minimum(t, count - 1)
    row = dense.residual_start + near - dense.sink_count  # the residual is a ring
    row = tl.where(row >= dense.residual_capacity, row - dense.residual_capacity, row)
    sink = near < dense.sink_count
    k_row = tl.where(sink, dense.sink_keys + near * C.DK, dense.residual_keys + row * C.DK)
    v_row = tl.where(sink, dense.sink_values + near * C.DV, dense.residual_values + row * C.DV)
    return k_row, v_row, t, t < count


@triton.jit
def prefetch_rows(row, DIM: tl.constexpr):
    """Start to move rows of DIM elements, to which `row` [32] points, to the L2 cache."""
    LINE_ELEMENTS: tl.constexpr = 1024 // row.dtype.element_ty.primitive_bitwidth
    for line in tl.static_range((DIM + LINE_ELEMENTS - 1) // LINE_ELEMENTS):
        fetch(row + line * LINE_ELEMENTS)


@triton.jit
def dense_job(
    low, packed_count, query, scale, dense, mask, mask_offset, queries, r, rows, scaling_log2, cap_log2, C: tl.constexpr
):
    """Attention over dense tokens `low` to `low + 32`: (sum [BDM, BR], total [BR], maximum [BR]).

    Args:
        packed_count: Tokens in packed blocks, which come between sinks and residual.
        query, scale: [BR] pointers to the rows' queries and to the channel scales these were divided by.
        dense: The `DenseTokens`.
        mask: The sequence's `Mask`, and `mask_offset` [BR] the offset of each row's query.
        queries, r, rows: S, [BR] rows of the head, and how many there are.
        C: A `Shape`.
    """
    k_row, v_row, t, inside = dense_rows_of(low, dense, C)
    # States first: the compiler lets a product wait for its queries before it loads what comes after them.
    k, v = dense_states(k_row, v_row, inside, C)
    d = tl.arange(0, C.BLOCK_DK)
    q = tl.load(query[None, :] + d[:, None], mask=(d < C.DK)[:, None] & (r < rows)[None, :], other=0.0)  # [BDK, BR]
    factor = tl.load(scale, mask=r < rows, other=1.0) * scaling_log2  # [BR]
    x = dense_logits(k, q, factor, cap_log2, C.SOFTCAP)
    allowed = inside[:, None] & (r < rows)[None, :]
    if C.CAUSAL:
        allowed = allowed & ((t - dense.sink_count)[:, None] <= (dense.residual_count - queries + r % queries)[None, :])
    if C.MASK:
        position = tl.where(t < dense.sink_count, t, t + packed_count)
        allowed = allowed & allowed_tile(mask.start, position, mask_offset, mask.stride_t, allowed)
    x = tl.where(allowed, x, -float("inf"))
    return dense_sums(x, v)
