"""Merge the partial results of `tq_kernels.decode.split` and rotate the packed part's output back.

weight[i, r] = exp2(lse[i, r] - max)
out[r, :] = (sum_dense weight partial + R^T sum_packed weight partial / factors) / (sum weight + exp(s_aux))
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..common.softmax import LOG2E, finite
from .rotate import LINE
from .schedule import counted, dense_jobs, holder


@triton.jit
def _slots_of_row(
    lse,
    partial,
    first,
    start,
    last,
    stride,
    row,
    column,
    DIM: tl.constexpr,
    DM: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Logarithms [BS] and channels `column` [BC] of the partial results, [BS, BC], of one row: those of slots `first +
    start` on, before `last`."""
    i = start + tl.arange(0, BLOCK_S)
    inside = i < last - first
    logs = tl.load(lse + (first + i) * stride + row, mask=inside, other=-float("inf"))
    part = tl.load(
        partial + (first * stride + row).to(tl.int64) * DM + i[:, None] * (stride * DM) + column[None, :],
        mask=inside[:, None] & (column < DIM)[None, :],
        other=0.0,
    )
    return logs, part


@triton.jit
def _merge_rows(
    lse, partial, first, last, stride, row, valid, out, total, maximum, column, DIM: tl.constexpr, DM: tl.constexpr
):
    """Add the partial results of slots `first` to `last` of rows `row` [BR], one slot at a time: weighted sum out
    [BR, BC], sum of weights total [BR] and maximum so far [BR]."""
    partial += (first * stride).to(tl.int64) * DM
    for i in tl.range(0, last - first, loop_unroll_factor=4):
        logs = tl.load(lse + (first + i) * stride + row, mask=valid, other=-float("inf"))  # [BR]
        part = tl.load(
            partial + (i * stride + row)[:, None] * DM + column[None, :],
            mask=valid[:, None] & (column < DIM)[None, :],
            other=0.0,
        )  # [BR, BC]
        new_maximum = tl.maximum(maximum, logs)
        shift = finite(new_maximum)
        decay = tl.exp2(maximum - shift)
        weight = tl.exp2(logs - shift)
        out = out * decay[:, None] + part * weight[:, None]
        total = total * decay + weight
        maximum = new_maximum
    return out, total, maximum


@triton.jit
def merge_stream(
    scratch,
    matrix,
    factor,
    s_aux,
    first,
    last,
    dense_first,
    dense_last,
    head_q,
    local,
    row_mask,
    d,
    c,
    tile_rows,
    lse_at,
    partial_at,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DENSE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOT_R: tl.constexpr,
    HAS_AUX: tl.constexpr,
):
    """Channels `c` [BC] of the output of rows `local` [BR] of a stream, [BR, BC], from slots `first` to `last` and
    `dense_first` to `dense_last`.

    Args:
        matrix: Rows `c` and columns `d` of sqrt(DVP) R^T, [BC, BD].
        factor: The factors of channels `c`.
    """
    DM: tl.constexpr = DV if DV > DVP else DVP
    lse = scratch + LINE * lse_at
    partial = scratch + LINE * partial_at
    maximum = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    if HAS_AUX:
        maximum = tl.load(s_aux + head_q, mask=row_mask, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    if BLOCK_R == 1:
        row = tl.program_id(1)
        out_d = tl.zeros([BLOCK_D], tl.float32)
        out_c = tl.zeros([BLOCK_C], tl.float32)
        largest = tl.max(maximum, 0)
        weights = tl.sum(total, 0)
        # Once, but for the longest rows. The time of this kernel is that of its longest chain: all loads are issued at
        # once, and one maximum serves them all.
        times = tl.maximum(tl.cdiv(last - first, BLOCK_S), tl.cdiv(dense_last - dense_first, BLOCK_DENSE))
        for i in tl.range(0, times):
            logs, part = _slots_of_row(lse, partial, first, i * BLOCK_S, last, tile_rows, row, d, DVP, DM, BLOCK_S)
            dense_logs, dense_part = _slots_of_row(
                lse, partial, dense_first, i * BLOCK_DENSE, dense_last, tile_rows, row, c, DV, DM, BLOCK_DENSE
            )
            new_largest = tl.maximum(largest, tl.maximum(tl.max(logs, 0), tl.max(dense_logs, 0)))
            shift = finite(new_largest)
            decay = tl.exp2(largest - shift)
            weight, dense_weight = tl.exp2(logs - shift), tl.exp2(dense_logs - shift)
            weights = weights * decay + (tl.sum(weight, 0) + tl.sum(dense_weight, 0))
            out_d = out_d * decay + tl.sum(part * weight[:, None], 0)
            out_c = out_c * decay + tl.sum(dense_part * dense_weight[:, None], 0)
            largest = new_largest
        rotated, plain = out_d[None, :], out_c[None, :]  # [1, BD], [1, BC]
        total = weights + tl.zeros([1], tl.float32)
        decay = tl.full([1], 1.0, tl.float32)
    else:
        rotated = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        plain = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        valid = local < tile_rows
        rotated, total, maximum = _merge_rows(
            lse, partial, first, last, tile_rows, local, valid, rotated, total, maximum, d, DVP, DM
        )
        before = maximum
        plain, total, maximum = _merge_rows(
            lse, partial, dense_first, dense_last, tile_rows, local, valid, plain, total, maximum, c, DV, DM
        )
        decay = tl.exp2(before - finite(maximum))  # [BR]
    # Normalised rows: fp16 then holds any output to 11 bits.
    peak = tl.max(tl.abs(rotated), 1)
    peak = tl.where(peak > 0, peak, 1.0)
    operand = tl.trans((rotated / peak[:, None]).to(tl.float16))  # [BD in, BR]
    if DOT_R == 1:  # no product for matrix units
        back = tl.sum(matrix.to(tl.float32) * tl.trans(operand).to(tl.float32), 1, keep_dims=True)  # [BC out, 1]
    else:
        if BLOCK_R != DOT_R:
            operand = tl.broadcast_to(operand, [BLOCK_D, DOT_R])
        back = tl.dot(matrix, operand)  # [BC out, DOT_R]
        if BLOCK_R != DOT_R:
            back = tl.sum(tl.where(tl.arange(0, DOT_R)[None, :] == 0, back, 0.0), 1, keep_dims=True)  # [BC out, 1]
    packed = tl.trans(back) * (peak * decay * (DVP**-0.5))[:, None] / factor[None, :]
    inverse = 1.0 / tl.where(total > 0, total, 1.0)  # [BR]
    return (plain + packed) * inverse[:, None]  # [BR, BC]


@triton.jit(
    do_not_specialize=(
        "rows queries kv_heads row_tiles streams tile_rows workers lse_at partial_at dense_splits out_b out_s out_h"
    ).split()
)
def reduce_splits(
    scratch,
    num_blocks,  # [] int32
    num_window,  # [] int32
    num_sinks,  # [] int32
    rotation,  # [DVP, DVP] fp16, sqrt(DVP) R
    factors,  # [B * Hkv, DV] fp16
    s_aux,  # [Hq], any float dtype
    out,  # [B, S, Hq, DV], last dimension contiguous
    rows,
    queries,
    kv_heads,
    row_tiles,
    streams,
    tile_rows,
    workers,
    lse_at,
    partial_at,
    dense_splits,  # as in `decode_split`
    out_b,
    out_s,
    out_h,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILE_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DENSE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOT_R: tl.constexpr,
    HAS_AUX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (streams, tile_rows / BLOCK_R, DV / BLOCK_C).

    TILE_R is `decode_split`'s BLOCK_R; DOT_R = 8 pads the matrix product's rows, BLOCK_R is 1 or DOT_R; DOT_R = 1: no
    matrix units.
    """
    stream = tl.program_id(0)
    local = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    head = stream // row_tiles
    r = (stream % row_tiles) * TILE_R + local
    row_mask = (local < tile_rows) & (r < rows)
    d = tl.arange(0, BLOCK_D)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    # Before the wait: the matrix and the counts do not depend on the kernel in front.
    matrix = tl.load(
        rotation + d[None, :] * DVP + c[:, None], mask=(d < DVP)[None, :] & (c < DVP)[:, None], other=0.0
    )  # [BC out, BD in]
    factor = tl.load(factors + head * DV + c, mask=c < DV, other=1.0).to(tl.float32)  # [BC]
    blocks = tl.load(num_blocks)
    dense_tokens = tl.load(num_sinks) + tl.load(num_window)
    per_stream = counted(blocks)
    first = holder(stream * per_stream, workers, per_stream * streams) + stream
    last = holder((stream + 1) * per_stream - 1, workers, per_stream * streams) + stream + 1
    last = tl.where(blocks > 0, last, first)
    dense_first = workers + streams + stream * dense_splits
    dense_last = dense_first + dense_jobs(dense_tokens)
    head_q = (head % kv_heads) * (rows // queries) + r // queries  # [BR]
    at = (head // kv_heads).to(tl.int64) * out_b + (r % queries).to(tl.int64) * out_s + head_q * out_h  # [BR]
    if PDL:
        cuda.gdc_wait()

    result = merge_stream(
        scratch,
        matrix,
        factor,
        s_aux,
        first,
        last,
        dense_first,
        dense_last,
        head_q,
        local,
        row_mask,
        d,
        c,
        tile_rows,
        lse_at,
        partial_at,
        DV,
        DVP,
        BLOCK_D,
        BLOCK_C,
        BLOCK_S,
        BLOCK_DENSE,
        BLOCK_R,
        DOT_R,
        HAS_AUX,
    )
    tl.store(
        out + at[:, None] + c[None, :], result.to(out.dtype.element_ty), mask=row_mask[:, None] & (c < DV)[None, :]
    )
