"""Logits as decode attention treats them, and attention over one job of dense tokens."""

import triton
import triton.language as tl

from .schedule import DENSE_TOKENS


@triton.jit
def soft_capped(logit, cap_log2):
    """cap tanh(logit / cap), all in base-2 units."""
    # tanh(x) = 1 - 2 / (1 + e^2x); e^2x overflowing to inf gives 1.
    doubled = tl.exp2(logit * (2.0 * 1.4426950408889634) / cap_log2)
    return cap_log2 * (1.0 - 2.0 / (1.0 + doubled))


@triton.jit
def allowed_tile(mask, t, r_offset, stride_t, valid):
    """Mask tile [32, BR] of tokens `t` [32]."""
    return tl.load(mask + (t.to(tl.int64) * stride_t)[:, None] + r_offset[None, :], mask=valid, other=0) != 0


@triton.jit
def finite(x):
    """x with -inf replaced by 0: a row that has attended to nothing shifts its logits by 0."""
    return tl.where(x == -float("inf"), 0.0, x)


@triton.jit
def log2_sum(shift, total):
    """log2 of total * 2**shift; -inf for an empty sum."""
    return tl.where(total > 0, shift + tl.log2(tl.where(total > 0, total, 1.0)), -float("inf"))


@triton.jit
def dense_places(low, sink_count, window_start, window_capacity):
    """Tokens `low` to `low + 32`, counting sinks, then window, and their rows of the window's ring, [32] each."""
    t = low + tl.arange(0, DENSE_TOKENS)
    row = window_start + t - sink_count
    return t, tl.where(row >= window_capacity, row - window_capacity, row)


@triton.jit
def load_job(
    job,
    jobs,
    streams,
    row_tiles,
    kv_heads,
    sink_count,
    window_count,
    window_start,
    window_capacity,
    sink_keys,
    sink_values,
    window_keys,
    window_values,
    sink_b,
    sink_h,
    window_b,
    window_h,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DM: tl.constexpr,
):
    """Keys [32, BDK] and values [BDM, 32] of a dense job, 0 beyond the last job."""
    per_stream = tl.maximum(jobs, 1)
    head = job // per_stream // row_tiles
    t, row = dense_places(job % per_stream * DENSE_TOKENS, sink_count, window_start, window_capacity)
    batch = (head // kv_heads).to(tl.int64)
    kv_head = (head % kv_heads).to(tl.int64)
    sink_at = batch * sink_b + kv_head * sink_h + t  # [32]
    window_at = batch * window_b + kv_head * window_h + row
    sink = t < sink_count
    inside = (t < sink_count + window_count) & (job < jobs * streams)
    dk = tl.arange(0, BLOCK_DK)
    dv = tl.arange(0, BLOCK_DM)
    k_row = tl.where(sink, sink_keys + sink_at * DK, window_keys + window_at * DK)  # [32] pointers
    v_row = tl.where(sink, sink_values + sink_at * DV, window_values + window_at * DV)
    k = tl.load(k_row[:, None] + dk[None, :], mask=inside[:, None] & (dk < DK)[None, :], other=0.0)
    v = tl.load(v_row[None, :] + dv[:, None], mask=inside[None, :] & (dv < DV)[:, None], other=0.0)
    return k, v


@triton.jit
def dense_job(
    low,
    k,
    v,
    sink_count,
    window_count,
    window_start,
    window_capacity,
    packed_count,
    q,
    factor,
    cap_log2,
    mask,
    mask_t,
    mask_offset,
    queries,
    r,
    rows,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Attention over the dense tokens `low` to `low + 32` that `load_job` loaded: (sum [BDM, BR], total [BR], maximum
    [BR])."""
    t, _ = dense_places(low, sink_count, window_start, window_capacity)
    x = tl.dot(k.to(tl.float16), q) * factor[None, :]  # [32, BR]
    if SOFTCAP:
        x = soft_capped(x, cap_log2)
    allowed = (t < sink_count + window_count)[:, None] & (r < rows)[None, :]
    if CAUSAL:
        allowed = allowed & ((t - sink_count)[:, None] <= (window_count - queries + r % queries)[None, :])
    if MASK:
        position = tl.where(t < sink_count, t, t + packed_count)
        allowed = allowed & allowed_tile(mask, position, mask_offset, mask_t, allowed)
    x = tl.where(allowed, x, -float("inf"))
    maximum = tl.max(x, 0)
    p = tl.exp2(x - finite(maximum)[None, :])
    return tl.dot(v.to(tl.float16), p.to(tl.float16)), tl.sum(p, 0), maximum
