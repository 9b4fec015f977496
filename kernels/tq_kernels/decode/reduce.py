"""Merge the partial results of `tq_kernels.decode.split` and rotate the packed part's output back.

weight[i, r] = exp2(lse[i, r] - max)
out[r, :] = (sum_dense weight partial + R^T sum_packed weight partial / f) / (sum weight + exp(s_aux))
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..common.schedule import (
    LINE,
    counted,
    dense_jobs,
    dense_jobs_of,
    dense_slots,
    holder,
    lengths,
    packed_of,
    stream_items,
)
from ..common.softmax import LOG2E, SoftmaxState, finite, merge, rescaled


class Partials(NamedTuple):
    """The partial results of a row of streams.

    Args:
        lse, partial: Pointers to logarithms and to normalised results of slot 0.
        tile_rows: Rows of a slot.
    """

    lse: Any
    partial: Any
    tile_rows: Any


class Channels(NamedTuple):
    """What a program rotates back.

    Args:
        d: [BD] channels of the packed part.
        c: [BC] channels of the output.
        matrix: [BC, BD] rows `c` and columns `d` of sqrt(DVP) R^T.
        factor: [BC] the channel scales `c`.
    """

    d: Any
    c: Any
    matrix: Any
    factor: Any


class ReduceShape(NamedTuple):
    """The constants of a reduce kernel, passed on as one argument C; see `reduce_splits`."""

    DV: Any
    DVP: Any
    BLOCK_D: Any
    BLOCK_C: Any
    BLOCK_S: Any
    BLOCK_DENSE: Any
    BLOCK_R: Any
    DOT_R: Any
    HAS_AUX: Any


@triton.jit
def _slots_of_row(slots, first, start, last, row, column, DIM: tl.constexpr, DM: tl.constexpr, BLOCK_S: tl.constexpr):
    """Logarithms [BS] and channels `column` [BC] of the partial results, [BS, BC], of one row: those of slots `first +
    start` on, before `last`."""
    i = start + tl.arange(0, BLOCK_S)
    inside = i < last - first
    logs = tl.load(slots.lse + (first + i) * slots.tile_rows + row, mask=inside, other=-float("inf"))
    at = slots.partial + (first * slots.tile_rows + row).to(tl.int64) * DM
    part = tl.load(
        at + i[:, None] * (slots.tile_rows * DM) + column[None, :],
        mask=inside[:, None] & (column < DIM)[None, :],
        other=0.0,
    )
    return logs, part


@triton.jit
def _merge_rows(slots, first, last, row, valid, out, total, maximum, column, DIM: tl.constexpr, DM: tl.constexpr):
    """Merge the partial results of slots `first` to `last` of rows `row` [BR] into the state of a softmax, one slot at
    a time. Its parts are apart and in this order, on which machine code depends."""
    partial = slots.partial + (first * slots.tile_rows).to(tl.int64) * DM
    for i in tl.range(0, last - first, loop_unroll_factor=4):
        logs = tl.load(slots.lse + (first + i) * slots.tile_rows + row, mask=valid, other=-float("inf"))  # [BR]
        part = tl.load(
            partial + (i * slots.tile_rows + row)[:, None] * DM + column[None, :],
            mask=valid[:, None] & (column < DIM)[None, :],
            other=0.0,
        )  # [BR, BC]
        maximum, total, out = merge(SoftmaxState(maximum, total, out), logs, part)
    return out, total, maximum


@triton.jit
def merge_stream(slots, packed, dense, s_aux, head_q, local, row_mask, channels, C: tl.constexpr):
    """Channels `c` [BC] of the output of rows `local` [BR] of a stream, [BR, BC].

    Args:
        slots: The `Partials`.
        packed, dense: First and last slot of the packed part and of the dense one.
        head_q: [BR] query heads, of which `s_aux` are the sinks' logits.
        channels: The `Channels`.
        C: A `ReduceShape`.
    """
    DM: tl.constexpr = C.DV if C.DV > C.DVP else C.DVP
    maximum = tl.full([C.BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([C.BLOCK_R], tl.float32)
    if C.HAS_AUX:
        maximum = tl.load(s_aux + head_q, mask=row_mask, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    if C.BLOCK_R == 1:
        row = tl.program_id(1)
        out_d = tl.zeros([C.BLOCK_D], tl.float32)
        out_c = tl.zeros([C.BLOCK_C], tl.float32)
        largest = tl.max(maximum, 0)
        weights = tl.sum(total, 0)
        # Once, but for the longest rows. The time of this kernel is that of its longest chain: all loads are issued at
        # once, and one maximum serves them all.
        times = tl.maximum(tl.cdiv(packed[1] - packed[0], C.BLOCK_S), tl.cdiv(dense[1] - dense[0], C.BLOCK_DENSE))
        for i in tl.range(0, times):
            logs, part = _slots_of_row(
                slots, packed[0], i * C.BLOCK_S, packed[1], row, channels.d, C.DVP, DM, C.BLOCK_S
            )
            dense_logs, dense_part = _slots_of_row(
                slots, dense[0], i * C.BLOCK_DENSE, dense[1], row, channels.c, C.DV, DM, C.BLOCK_DENSE
            )
            largest, shift, decay = rescaled(largest, tl.maximum(tl.max(logs, 0), tl.max(dense_logs, 0)), None, True)
            weight, dense_weight = tl.exp2(logs - shift), tl.exp2(dense_logs - shift)
            weights = weights * decay + (tl.sum(weight, 0) + tl.sum(dense_weight, 0))
            out_d = out_d * decay + tl.sum(part * weight[:, None], 0)
            out_c = out_c * decay + tl.sum(dense_part * dense_weight[:, None], 0)
        rotated, plain = out_d[None, :], out_c[None, :]  # [1, BD], [1, BC]
        total = weights + tl.zeros([1], tl.float32)
        decay = tl.full([1], 1.0, tl.float32)
    else:
        rotated = tl.zeros([C.BLOCK_R, C.BLOCK_D], tl.float32)
        plain = tl.zeros([C.BLOCK_R, C.BLOCK_C], tl.float32)
        valid = local < slots.tile_rows
        rotated, total, before = _merge_rows(
            slots, packed[0], packed[1], local, valid, rotated, total, maximum, channels.d, C.DVP, DM
        )
        plain, total, maximum = _merge_rows(
            slots, dense[0], dense[1], local, valid, plain, total, before, channels.c, C.DV, DM
        )
        decay = tl.exp2(before - finite(maximum))  # [BR]
    # Normalised rows: fp16 then holds any output to 11 bits.
    peak = tl.max(tl.abs(rotated), 1)
    peak = tl.where(peak > 0, peak, 1.0)
    operand = tl.trans((rotated / peak[:, None]).to(tl.float16))  # [BD in, BR]
    if C.DOT_R == 1:  # no product for matrix units
        back = tl.sum(channels.matrix.to(tl.float32) * tl.trans(operand).to(tl.float32), 1, keep_dims=True)  # [BC, 1]
    else:
        if C.BLOCK_R != C.DOT_R:
            operand = tl.broadcast_to(operand, [C.BLOCK_D, C.DOT_R])
        back = tl.dot(channels.matrix, operand)  # [BC out, DOT_R]
        if C.BLOCK_R != C.DOT_R:
            back = tl.sum(tl.where(tl.arange(0, C.DOT_R)[None, :] == 0, back, 0.0), 1, keep_dims=True)  # [BC out, 1]
    back = tl.trans(back) * (peak * decay * (C.DVP**-0.5))[:, None] / channels.factor[None, :]
    inverse = 1.0 / tl.where(total > 0, total, 1.0)  # [BR]
    return (plain + back) * inverse[:, None]  # [BR, BC]


@triton.jit(
    do_not_specialize=(
        "rows queries kv_heads row_tiles streams tile_rows workers lse_at partial_at dense_splits out_b out_s out_h"
    ).split()
)
def reduce_splits(
    scratch,
    num_blocks,  # [] int32
    num_residual,  # [] int32
    num_sinks,  # [] int32
    rotation,  # [DVP, DVP] fp16, sqrt(DVP) R
    channel_scales,  # [B * Hkv, DV] fp16
    s_aux,  # [Hq], any float dtype
    out,  # [B, S, Hq, DV], last dimension contiguous
    rows, queries, kv_heads, row_tiles, streams, tile_rows, workers, lse_at, partial_at,
    dense_splits,  # as in `decode_split`
    out_b, out_s, out_h, DV: tl.constexpr, DVP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    TILE_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DENSE: tl.constexpr, BLOCK_R: tl.constexpr,
    DOT_R: tl.constexpr, HAS_AUX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
    factor = tl.load(channel_scales + head * DV + c, mask=c < DV, other=1.0).to(tl.float32)  # [BC]
    blocks = tl.load(num_blocks)
    dense_tokens = tl.load(num_sinks) + tl.load(num_residual)
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

    shape: tl.constexpr = ReduceShape(DV, DVP, BLOCK_D, BLOCK_C, BLOCK_S, BLOCK_DENSE, BLOCK_R, DOT_R, HAS_AUX)
    slots = Partials(scratch + LINE * lse_at, scratch + LINE * partial_at, tile_rows)
    result = merge_stream(
        slots, (first, last), (dense_first, dense_last), s_aux, head_q, local, row_mask,
        Channels(d, c, matrix, factor), shape,
    )  # fmt: skip
    tl.store(
        out + at[:, None] + c[None, :], result.to(out.dtype.element_ty), mask=row_mask[:, None] & (c < DV)[None, :]
    )


@triton.jit(do_not_specialize="tokens count kv_heads groups row_tiles tile_rows workers lse_at partial_at".split())
def reduce_splits_paged(
    scratch,
    rotation,  # [DVP, DVP] fp16, sqrt(DVP) R
    channel_scales,  # [Hkv, DV] fp16
    s_aux,  # [Hq], any float dtype
    cu_seqlens_q,  # [B + 1] int32
    cu_seqlens_k,  # [B + 1] int32
    packed_blocks,  # [B] int32
    out,  # [T, Hq, DV], contiguous
    tokens,  # T
    count,  # B
    kv_heads,
    groups,  # G
    row_tiles, tile_rows, workers, lse_at, partial_at,
    FILL: tl.constexpr,  # no sequence has more than one token: write 0 for tokens of nobody
    SINKS: tl.constexpr, RING: tl.constexpr, BLOCK_B: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, TILE_R: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_DENSE: tl.constexpr, BLOCK_R: tl.constexpr, DOT_R: tl.constexpr, HAS_AUX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (streams, tile_rows / BLOCK_R, DV / BLOCK_C); BLOCK_R and DOT_R as for `reduce_splits`."""
    stream = tl.program_id(0)
    heads = kv_heads * row_tiles
    sequence = stream // heads
    kv_head = stream % heads // row_tiles
    local = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    g = stream % row_tiles * TILE_R + local  # [BR]
    row_mask = (local < tile_rows) & (g < groups)
    d = tl.arange(0, BLOCK_D)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    # Before the wait: the matrix and the lengths do not depend on the kernel in front.
    matrix = tl.load(
        rotation + d[None, :] * DVP + c[:, None], mask=(d < DVP)[None, :] & (c < DVP)[:, None], other=0.0
    )  # [BC out, BD in]
    factor = tl.load(channel_scales + kv_head * DV + c, mask=c < DV, other=1.0).to(tl.float32)  # [BC]
    b = tl.arange(0, BLOCK_B)
    _, new, past = lengths(cu_seqlens_q, cu_seqlens_k, b, count)
    items = stream_items(new, past, packed_of(packed_blocks, b, count)) * heads
    total = tl.sum(items, 0)
    at = tl.sum(tl.where(b < sequence, items, 0), 0)
    token, new, past = lengths(cu_seqlens_q, cu_seqlens_k, sequence, count)
    held = packed_of(packed_blocks, sequence, count)
    at += stream % heads * stream_items(new, past, held)
    blocks = tl.where(new == 1, held, 0)
    first = holder(at, workers, total) + stream
    last = tl.where(blocks > 0, holder(at + blocks - 1, workers, total) + stream + 1, first)
    dense_first = workers + heads * count + stream * dense_slots(SINKS, RING)
    dense_last = dense_first + tl.where(new == 1, dense_jobs_of(past, held), 0)
    if FILL:
        # Of all sequences before this one, as many as have no token are ahead of it in taking those of nobody.
        token = tl.where(new == 1, token, tl.load(cu_seqlens_q + count) + sequence - token)
        writes = token < tokens
    else:
        writes = new == 1
    if PDL:
        cuda.gdc_wait()

    head_q = kv_head * groups + g  # [BR]
    shape: tl.constexpr = ReduceShape(DV, DVP, BLOCK_D, BLOCK_C, BLOCK_S, BLOCK_DENSE, BLOCK_R, DOT_R, HAS_AUX)
    slots = Partials(scratch + LINE * lse_at, scratch + LINE * partial_at, tile_rows)
    result = merge_stream(
        slots, (first, last), (dense_first, dense_last), s_aux, head_q, local, row_mask,
        Channels(d, c, matrix, factor), shape,
    )  # fmt: skip
    to = (token.to(tl.int64) * (kv_heads * groups) + head_q) * DV  # [BR]
    tl.store(
        out + to[:, None] + c[None, :],
        result.to(out.dtype.element_ty),
        mask=(row_mask & writes)[:, None] & (c < DV)[None, :],
    )
