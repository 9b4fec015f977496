"""Decode attention of few streams in one launch, or in two: every program rotates its own queries.

Stream s is attended to by `SPLITS` programs at most. Its packed blocks and, after them, its dense jobs are shared out in
contiguous equal parts; a program without a part ends at once. A program leaves one partial result of its blocks and one
of its dense jobs. The last one to do so (a counter of the stream, which it puts back to 0) merges them and rotates the
packed part back, or the next kernel does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..common.schedule import (
    DENSE_TOKENS,
    LINE,
    START,
    claim,
    counted,
    dense_jobs,
    first_jobs,
    holder,
    share_start,
)
from ..common.softmax import LOG2E, finite, log2_sum
from ..format import TOKENS
from .reduce import Channels, Partials, ReduceShape, merge_stream
from .share import Blocks, Rows, Scratch, attend_share
from .tiles import (
    DenseTokens,
    Mask,
    Shape,
    allowed_tile,
    dense_logits,
    dense_rows_of,
    dense_states,
    dense_sums,
    per_lane,
    prefetch,
    prefetch_rows,
)


class Own(NamedTuple):
    """Queries that a program rotates itself.

    Args:
        raw: [BDK, BR] float32 queries, 0 of rows that do not exist.
        rotation: Pointer to sqrt(DKP) R.
        channel_scales: Pointer to the head's channel scales of keys.
    """

    raw: Any
    rotation: Any
    channel_scales: Any


@triton.jit
def normalised(q):
    """q [BD, BR] float32 -> fp16 rows divided by a power of two at least as large as their largest element; [BR]."""
    exponent = (tl.max(tl.abs(q), 0).to(tl.int32, bitcast=True) >> 23) + 1  # [BR]
    exponent = tl.minimum(tl.maximum(exponent, 64), 190)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (q * inverse[None, :]).to(tl.float16), scale


@triton.jit
def rotated_queries(own, C: tl.constexpr):
    """KEY_CHUNKS chunks of rotated queries [BKC, BR], the whole [BM, BR], and the
    rows' scales [BR]."""
    d = tl.arange(0, C.BLOCK_DK)
    factor = tl.load(own.channel_scales + d, mask=d < C.DK, other=1.0).to(tl.float32)
    plain, scale = normalised(own.raw / factor[:, None])
    kc = tl.arange(0, C.BLOCK_KC)
    WIDTH: tl.constexpr = C.DKP // C.KEY_CHUNKS
    q = ()
    for chunk in tl.static_range(C.KEY_CHUNKS):
        at = own.rotation + (chunk * WIDTH + kc)[:, None] * C.DKP + d[None, :]
        matrix = tl.load(at, mask=(kc < WIDTH)[:, None] & (d < C.DKP)[None, :], other=0.0)
        q += ((tl.dot(matrix, plain) * (C.DKP**-0.5)).to(tl.float16),)
    whole = q[0]
    if C.KEY_CHUNKS == 4 and C.BLOCK_MEAN == 4 * C.BLOCK_KC and WIDTH == C.BLOCK_KC:
        quarters = tl.join(tl.join(q[0], q[1]), tl.join(q[2], q[3]))  # [BKC, BR, 2, 2]
        whole = tl.reshape(tl.permute(quarters, (3, 2, 0, 1)), [C.BLOCK_MEAN, C.BLOCK_R])
    elif C.KEY_CHUNKS > 1 or C.BLOCK_MEAN != C.BLOCK_KC:
        km = tl.arange(0, C.BLOCK_MEAN)
        at = own.rotation + km[:, None] * C.DKP + d[None, :]
        matrix = tl.load(at, mask=(km < C.DKP)[:, None] & (d < C.DKP)[None, :], other=0.0)
        whole = (tl.dot(matrix, plain) * (C.DKP**-0.5)).to(tl.float16)
    return q, whole, scale


@triton.jit
def merge_tile(
    scratch_lse, scratch_partial, packed, dense, s_aux, head_q, row_mask, tile_rows, rotation, channel_scales, out, at,
    DV: tl.constexpr, DVP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr, HAS_AUX: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """All rows of a stream at once: [ROWS, DV] to `out`."""
    DM: tl.constexpr = DV if DV > DVP else DVP
    row = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    stored = row < tile_rows
    maximum = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_AUX:
        maximum = tl.load(s_aux + head_q, mask=row_mask, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    rotated = tl.zeros([ROWS, BLOCK_D], tl.float32)
    plain = tl.zeros([ROWS, BLOCK_D], tl.float32)
    both = (packed, dense)
    acc = (rotated, plain)
    for kind in tl.static_range(2):
        first, last = both[kind]
        own, other = acc[kind], acc[1 - kind]
        for start in tl.range(first, last, BLOCK_S, num_stages=1):
            i = start + tl.arange(0, BLOCK_S)
            inside = (i < last)[:, None] & stored[None, :]
            logs = tl.load(scratch_lse + i[:, None] * tile_rows + row[None, :], mask=inside, other=-float("inf"))
            place = (i[:, None] * tile_rows + row[None, :])[:, :, None] * DM + d[None, None, :]
            part = tl.load(
                scratch_partial + place, mask=inside[:, :, None] & (d < DM)[None, None, :], other=0.0, cache_modifier=".cg"
            )
            largest = tl.maximum(maximum, tl.max(logs, 0))  # [ROWS]
            shift = finite(largest)
            decay = tl.exp2(maximum - shift)
            weight = tl.exp2(logs - shift[None, :])  # [BS, ROWS]
            total = total * decay + tl.sum(weight, 0)
            own = own * decay[:, None] + tl.sum(part * weight[:, :, None], 0)
            other = other * decay[:, None]
            maximum = largest
        acc = (own, other) if kind == 0 else (other, own)
    rotated, plain = acc
    peak = tl.max(tl.abs(rotated), 1)
    peak = tl.where(peak > 0, peak, 1.0)
    operand = tl.trans((rotated / peak[:, None]).to(tl.float16))  # [BD, ROWS]
    REPEAT: tl.constexpr = DOT // ROWS
    if REPEAT > 1:
        operand = tl.reshape(tl.broadcast_to(operand[:, None, :], [BLOCK_D, REPEAT, ROWS]), [BLOCK_D, DOT])
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    for tile in tl.static_range(BLOCK_D // BLOCK_C):
        c = tile * BLOCK_C + tl.arange(0, BLOCK_C)
        matrix = tl.load(
            rotation + d[None, :] * DVP + c[:, None], mask=(d < DVP)[None, :] & (c < DVP)[:, None], other=0.0
        )  # [BC out, BD in]
        factor = tl.load(channel_scales + c, mask=c < DV, other=1.0).to(tl.float32)
        back = tl.dot(matrix, operand)  # [BC, DOT]
        if REPEAT > 1:
            back = tl.reshape(back, [BLOCK_C, REPEAT, ROWS])
            back = tl.sum(tl.where((tl.arange(0, REPEAT) == 0)[None, :, None], back, 0.0), 1)  # [BC, ROWS]
        result = tl.trans(back) * (peak * (DVP**-0.5))[:, None] / factor[None, :]
        if BLOCK_C == BLOCK_D:
            dense_part = plain
        else:
            dense_part = tl.sum(
                tl.where((tl.arange(0, BLOCK_D // BLOCK_C) == tile)[None, :, None],
                         tl.reshape(plain, [ROWS, BLOCK_D // BLOCK_C, BLOCK_C]), 0.0), 1)
        result = (result + dense_part) * inverse[:, None]
        tl.store(out + at[:, None] + c[None, :], result.to(out.dtype.element_ty), mask=row_mask[:, None] & (c < DV)[None, :])


@triton.jit(
    do_not_specialize=(
        "rows queries kv_heads query_b query_h query_s blocks_b blocks_h sink_b sink_h residual_b residual_h "
        "residual_capacity mask_b mask_s mask_t scaling_log2 cap_log2 row_tiles streams splits tile_rows lse_at "
        "partial_at out_b out_s out_h"
    ).split()
)
def decode_short(
    scratch,
    counters,  # [streams] int32, 0 between launches
    query,  # [B, Hq, S, DK]
    key_rotation,  # [DKP, DKP] fp16
    key_channel_scales,
    key_words, value_words, scales, key_means, num_blocks, sink_keys, sink_values, residual_keys, residual_values,
    num_residual, num_sinks, mask,
    value_rotation, value_channel_scales, s_aux, out,
    rows, queries, kv_heads, query_b, query_h, query_s, blocks_b, blocks_h, sink_b, sink_h, residual_b, residual_h,
    residual_capacity, mask_b, mask_s, mask_t, scaling_log2, cap_log2, row_tiles, streams, splits, tile_rows,
    lse_at, partial_at, out_b, out_s, out_h,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, BOUNDS: tl.constexpr,
    KEY_CHUNKS: tl.constexpr, VALUE_CHUNKS: tl.constexpr, BLOCK_KC: tl.constexpr, BLOCK_VC: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DM: tl.constexpr, BLOCK_MEAN: tl.constexpr, BLOCK_R: tl.constexpr,
    SMALL: tl.constexpr, ASM: tl.constexpr, MERGE: tl.constexpr, MERGE_ROWS: tl.constexpr,
    MERGE_SLOTS: tl.constexpr, MERGE_COLUMNS: tl.constexpr, DOT: tl.constexpr, HAS_AUX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (streams * splits,), of which consecutive programs are of different streams."""
    stream = tl.program_id(0) % streams
    part = tl.program_id(0) // streams
    DM: tl.constexpr = DV if DV > DVP else DVP
    C: tl.constexpr = Shape(
        DK, DV, DKP, DVP, DM, KEY_BITS, VALUE_BITS, CAUSAL, MASK, BOUNDS, KEY_CHUNKS, VALUE_CHUNKS,
        BLOCK_KC, BLOCK_VC, BLOCK_DK, BLOCK_DM, BLOCK_MEAN, BLOCK_R, SMALL, ASM, 0,
    )  # fmt: skip
    blocks = tl.load(num_blocks)
    residual_count = tl.load(num_residual)
    sink_count = tl.load(num_sinks)
    head = stream // row_tiles
    batch, kv_head = head // kv_heads, head % kv_heads
    local = tl.arange(0, BLOCK_R)
    r = (stream % row_tiles) * BLOCK_R + local
    inside = r < rows
    store_rows = local < tile_rows
    d = tl.arange(0, BLOCK_DK)
    head_q = kv_head * (rows // queries) + r // queries
    query_at = batch.to(tl.int64) * query_b + head_q.to(tl.int64) * query_h + (r % queries) * query_s
    raw = tl.load(query + query_at[None, :] + d[:, None], mask=(d < DK)[:, None] & inside[None, :], other=0.0).to(
        tl.float32
    )  # [BDK, BR]
    if PDL:
        cuda.gdc_launch_dependents()
    if ASM:
        prefetch(key_rotation.to(tl.pointer_type(tl.int32), bitcast=True), DKP * DKP // 64, True)
        if MERGE:
            prefetch(value_rotation.to(tl.pointer_type(tl.int32), bitcast=True), DVP * DVP // 64, True)

    jobs = dense_jobs(sink_count + residual_count)
    items = blocks + jobs
    start, end = share_start(part, splits, items), share_start(part + 1, splits, items)
    if (start < end) | (part == 0):
        block = batch.to(tl.int64) * blocks_b + kv_head.to(tl.int64) * blocks_h
        sink_at = batch.to(tl.int64) * sink_b + kv_head * sink_h
        residual_at = batch.to(tl.int64) * residual_b + kv_head.to(tl.int64) * residual_h
        residual_start = (blocks * TOKENS) % tl.maximum(residual_capacity, 1)
        dense = DenseTokens(
            sink_keys + sink_at * DK, sink_values + sink_at * DV, residual_keys + residual_at * DK,
            residual_values + residual_at * DV, sink_count, residual_count, residual_start, residual_capacity,
        )  # fmt: skip
        if ASM:
            starts = start < tl.minimum(end, blocks)
            own_block = block + start
            prefetch(scales + own_block * TOKENS, TOKENS // 32, starts)
            prefetch(key_words + own_block * (4 * DKP * KEY_BITS), DKP * KEY_BITS // 8, starts)
            prefetch(value_words + own_block * (4 * DVP * VALUE_BITS), DVP * VALUE_BITS // 8, starts)
            if end > tl.maximum(start, blocks):
                k_row, v_row, _, _ = dense_rows_of((tl.maximum(start, blocks) - blocks) * DENSE_TOKENS, dense, C)
                prefetch_rows(k_row, DK)
                prefetch_rows(v_row, DV)
        packed_last = tl.where(blocks > 0, holder(blocks - 1, splits, items) + 1, 0)
        dense_first = holder(blocks, splits, items)
        dense_last = tl.where(jobs > 0, holder(items - 1, splits, items) + 1, dense_first)
        own_mask = Mask(mask + batch.to(tl.int64) * mask_b if MASK else mask, mask_s, mask_t)

        if start < blocks:
            own = Own(raw, key_rotation, key_channel_scales + head * DK)
            attend_share(
                Scratch(scratch, 0, lse_at, partial_at, tile_rows),
                Blocks(key_words, value_words, scales, key_means, None, batch, kv_head, blocks_b, blocks_h),
                own_mask, start, per_lane(tl.minimum(end, blocks), ASM),
                Rows(head * rows, r, inside, local, store_rows, queries), stream * splits + part, sink_count,
                scaling_log2, cap_log2, C, rotated_queries(own, C),
            )  # fmt: skip
        if end > blocks:
            q, scale = normalised(raw)
            factor = scale * scaling_log2
            acc = tl.zeros([BLOCK_DM, BLOCK_R], tl.float32)
            total = tl.zeros([BLOCK_R], tl.float32)
            maximum = tl.full([BLOCK_R], -float("inf"), tl.float32)
            for job in tl.range(tl.maximum(start, blocks) - blocks, end - blocks, num_stages=1):
                k_row, v_row, t, exists = dense_rows_of(job * DENSE_TOKENS, dense, C)
                k, v = dense_states(k_row, v_row, exists, C)
                x = dense_logits(k, q, factor, cap_log2, BOUNDS)
                allowed = exists[:, None] & inside[None, :]
                if CAUSAL:
                    allowed = allowed & ((t - sink_count)[:, None] <= (residual_count - queries + r % queries)[None, :])
                if MASK:
                    position = tl.where(t < sink_count, t, t + blocks * TOKENS)
                    allowed = allowed & allowed_tile(own_mask.start, position, (r % queries) * mask_s, mask_t, allowed)
                x = tl.where(allowed, x, -float("inf"))
                sums, weights, largest = dense_sums(x, v)
                new = tl.maximum(maximum, largest)
                shift = finite(new)
                before, after = tl.exp2(maximum - shift), tl.exp2(largest - shift)
                acc = acc * before[None, :] + sums * after[None, :]
                total = total * before + weights * after
                maximum = new
            slot = streams * splits + stream * splits + part
            tl.store(scratch + LINE * lse_at + slot * tile_rows + local, log2_sum(maximum, total), mask=store_rows)
            dm, inverse = tl.arange(0, BLOCK_DM), 1.0 / tl.where(total > 0, total, 1.0)
            at = slot.to(tl.int64) * (tile_rows * DM) + local[None, :] * DM + dm[:, None]
            tl.store(
                scratch + LINE * partial_at + at, acc * inverse[None, :], mask=store_rows[None, :] & (dm < DV)[:, None]
            )
        if MERGE:
            tl.debug_barrier()
            expected = tl.maximum(tl.minimum(items, splits), 1)
            if tl.atomic_add(counters + stream, 1, sem="acq_rel") == expected - 1:
                tl.store(counters + stream, 0)
                tl.debug_barrier()
                row = tl.arange(0, MERGE_ROWS)
                own_r = (stream % row_tiles) * BLOCK_R + row
                row_mask = (row < tile_rows) & (own_r < rows)
                own_head = kv_head * (rows // queries) + own_r // queries
                out_at = batch.to(tl.int64) * out_b + (own_r % queries).to(tl.int64) * out_s + own_head * out_h
                first = stream * splits
                merge_tile(
                    scratch + LINE * lse_at, scratch + LINE * partial_at,
                    (first, first + packed_last),
                    (streams * splits + first + dense_first, streams * splits + first + dense_last),
                    s_aux, own_head, row_mask, tile_rows, value_rotation, value_channel_scales + head * DV, out,
                    out_at, DV, DVP, BLOCK_DM, MERGE_COLUMNS, MERGE_ROWS, MERGE_SLOTS, HAS_AUX, DOT,
                )  # fmt: skip


@triton.jit(
    do_not_specialize=(
        "rows queries kv_heads row_tiles streams splits tile_rows lse_at partial_at out_b out_s out_h"
    ).split()
)
def reduce_short(
    scratch, num_blocks, num_residual, num_sinks, rotation, channel_scales, s_aux, out,
    rows, queries, kv_heads, row_tiles, streams, splits, tile_rows, lse_at, partial_at, out_b, out_s, out_h,
    DV: tl.constexpr, DVP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, TILE_R: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_DENSE: tl.constexpr, BLOCK_R: tl.constexpr, DOT_R: tl.constexpr,
    HAS_AUX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`reduce_splits` behind `decode_short`."""
    stream = tl.program_id(0)
    local = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    head = stream // row_tiles
    r = (stream % row_tiles) * TILE_R + local
    row_mask = (local < tile_rows) & (r < rows)
    d = tl.arange(0, BLOCK_D)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    matrix = tl.load(
        rotation + d[None, :] * DVP + c[:, None], mask=(d < DVP)[None, :] & (c < DVP)[:, None], other=0.0
    )  # [BC out, BD in]
    factor = tl.load(channel_scales + head * DV + c, mask=c < DV, other=1.0).to(tl.float32)  # [BC]
    blocks = tl.load(num_blocks)
    jobs = dense_jobs(tl.load(num_sinks) + tl.load(num_residual))
    items = blocks + jobs
    first = stream * splits
    last = first + tl.where(blocks > 0, holder(blocks - 1, splits, items) + 1, 0)
    dense_first = streams * splits + first + holder(blocks, splits, items)
    dense_last = tl.where(jobs > 0, streams * splits + first + holder(items - 1, splits, items) + 1, dense_first)
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


@triton.jit
def claim_reset(claims, without_share, final):
    """`claim`; the last claim of a launch puts the counter back to 0."""
    claimed = tl.atomic_add(claims, 1, sem="relaxed")
    if claimed == final:
        tl.store(claims, 0)
    return without_share + claimed


@triton.jit
def raw_queries(query, batch, kv_head, r, rows, queries, query_b, query_h, query_s, C: tl.constexpr):
    """Rows `r` [BR] of a head, [BDK, BR] float32."""
    d = tl.arange(0, C.BLOCK_DK)
    head_q = kv_head * (rows // queries) + r // queries
    at = batch.to(tl.int64) * query_b + head_q.to(tl.int64) * query_h + (r % queries) * query_s
    return tl.load(query + at[None, :] + d[:, None], mask=(d < C.DK)[:, None] & (r < rows)[None, :], other=0.0).to(
        tl.float32
    )


@triton.jit
def dense_job_own(
    low, packed_count, q, factor, dense, mask, mask_offset, queries, r, rows, cap_log2, C: tl.constexpr
):
    k_row, v_row, t, inside = dense_rows_of(low, dense, C)
    k, v = dense_states(k_row, v_row, inside, C)
    x = dense_logits(k, q, factor, cap_log2, C.BOUNDS)
    allowed = inside[:, None] & (r < rows)[None, :]
    if C.CAUSAL:
        allowed = allowed & ((t - dense.sink_count)[:, None] <= (dense.residual_count - queries + r % queries)[None, :])
    if C.MASK:
        position = tl.where(t < dense.sink_count, t, t + packed_count)
        allowed = allowed & allowed_tile(mask.start, position, mask_offset, mask.stride_t, allowed)
    x = tl.where(allowed, x, -float("inf"))
    return dense_sums(x, v)


@triton.jit(
    do_not_specialize=(
        "rows queries kv_heads query_b query_h query_s blocks_b blocks_h sink_b sink_h residual_b residual_h residual_capacity mask_b mask_s "
        "mask_t scaling_log2 cap_log2 row_tiles streams tile_rows lse_at partial_at "
        "dense_splits"
    ).split()
)
def decode_split_own(
    scratch,
    counters,  # [1] int32, 0 between launches
    query, key_rotation, key_channel_scales,
    key_words,  # [B, Hkv, N, 128 * DKP * KEY_BITS / 32] int32
    value_words,  # [B, Hkv, N, 128 * DVP * VALUE_BITS / 32] int32
    scales,  # [B, Hkv, N, 128] int32
    key_means,  # [B, Hkv, N, DKP] fp16
    num_blocks,  # [] int32
    sink_keys,  # [B, Hkv, sinks, DK] in the model's dtype, of which the first num_sinks count
    sink_values,  # [B, Hkv, sinks, DV]
    residual_keys,  # [B, Hkv, residual_capacity, DK], row j in slot (128 * num_blocks + j) % residual_capacity
    residual_values,  # [B, Hkv, residual_capacity, DV]
    num_residual,  # [] int32
    num_sinks,  # [] int32
    mask,  # [B, 1, S or 1, T] uint8, 0 or 1
    rows,
    queries,
    kv_heads, query_b, query_h, query_s,
    blocks_b,  # strides of the packed tensors in blocks
    blocks_h,
    sink_b,  # strides of sinks and residual in tokens
    sink_h, residual_b, residual_h, residual_capacity, mask_b, mask_s, mask_t,
    scaling_log2,  # scaling * log2(e)
    cap_log2,  # softcap * log2(e)
    row_tiles,
    streams,  # P * row_tiles
    tile_rows,  # min(rows, BLOCK_R)
    lse_at, partial_at,
    dense_splits,  # slots of a stream for dense jobs: as many as its sinks and residual have room for
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr,  # 0: none, 1: one row for all queries, 2: a row for each
    BOUNDS: tl.constexpr, KEY_CHUNKS: tl.constexpr, VALUE_CHUNKS: tl.constexpr, BLOCK_KC: tl.constexpr,
    BLOCK_VC: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DM: tl.constexpr, BLOCK_MEAN: tl.constexpr,
    BLOCK_R: tl.constexpr, SMALL: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,  # the kernel in front: 0: has ended, 1: may still run, 2: may still run and writes the counts
):  # fmt: skip
    """Every worker's share: `partial` and `lse`. Grid: (workers,)."""
    worker = tl.program_id(0)
    workers = tl.num_programs(0)
    DM: tl.constexpr = DV if DV > DVP else DVP
    C: tl.constexpr = Shape(
        DK, DV, DKP, DVP, DM, KEY_BITS, VALUE_BITS, CAUSAL, MASK, BOUNDS, KEY_CHUNKS, VALUE_CHUNKS,
        BLOCK_KC, BLOCK_VC, BLOCK_DK, BLOCK_DM, BLOCK_MEAN, BLOCK_R, SMALL, ASM, 0,
    )  # fmt: skip
    if PDL:
        # After that wait: the merge reads the counts before its own.
        cuda.gdc_launch_dependents()
    # Before the wait: nothing that the kernel in front writes, which is queries and perhaps a row of the residual.
    blocks = tl.load(num_blocks)
    residual_count = tl.load(num_residual)
    sink_count = tl.load(num_sinks)
    claims = counters
    if ASM:
        prefetch(key_rotation.to(tl.pointer_type(tl.int32), bitcast=True), DKP * DKP // 64, True)
    local = tl.arange(0, BLOCK_R)
    store_rows = local < tile_rows

    total = counted(blocks) * streams
    start = share_start(worker, workers, total)
    end = share_start(worker + 1, workers, total)
    per_stream = tl.maximum(counted(blocks), 1)
    jobs = dense_jobs(sink_count + residual_count)
    first_job, without_share = first_jobs(worker, workers, total)
    residual_start = (blocks * TOKENS) % tl.maximum(residual_capacity, 1)
    # Where the share's streams are is counted on from here: divisions behind the wait would make a short call longer.
    first_stream, last_stream = start // per_stream, (end + per_stream - 1) // per_stream
    tile, head = first_stream % row_tiles, first_stream // row_tiles
    batch, kv_head = head // kv_heads, head % kv_heads
    if ASM:
        # What comes first is on its way while queries are made.
        own_block = batch.to(tl.int64) * blocks_b + kv_head.to(tl.int64) * blocks_h
        own_block += tl.maximum(start % per_stream - START, 0)
        prefetch(scales + own_block * TOKENS, TOKENS // 32, start < end)
        prefetch(key_words + own_block * (4 * DKP * KEY_BITS), DKP * KEY_BITS // 8, start < end)
        prefetch(value_words + own_block * (4 * DVP * VALUE_BITS), DVP * VALUE_BITS // 8, start < end)
        if (first_job >= 0) & (first_job < jobs * streams):
            job_head = first_job // jobs // row_tiles
            own_sinks = (job_head // kv_heads).to(tl.int64) * sink_b + job_head % kv_heads * sink_h
            own_residual = (job_head // kv_heads).to(tl.int64) * residual_b + job_head % kv_heads * residual_h
            first_low = first_job % jobs * DENSE_TOKENS
            first_dense = DenseTokens(
                sink_keys + own_sinks * DK, sink_values + own_sinks * DV, residual_keys + own_residual * DK,
                residual_values + own_residual * DV, sink_count, residual_count, residual_start, residual_capacity,
            )  # fmt: skip
            k_row, v_row, _, _ = dense_rows_of(first_low, first_dense, C)
            prefetch_rows(k_row, DK)
            prefetch_rows(v_row, DV)

    for stream in tl.range(first_stream, last_stream, num_stages=1):
        first = tl.maximum(start - stream * per_stream - START, 0)
        last = per_lane(tl.minimum(end - stream * per_stream - START, blocks), ASM)
        r = tile * BLOCK_R + local
        raw = raw_queries(query, batch, kv_head, r, rows, queries, query_b, query_h, query_s, C)
        stream_blocks = Blocks(key_words, value_words, scales, key_means, None, batch, kv_head, blocks_b, blocks_h)
        stream_mask = Mask(mask + batch.to(tl.int64) * mask_b if MASK else mask, mask_s, mask_t)
        stream_rows = Rows((batch * kv_heads + kv_head) * rows, r, r < rows, local, store_rows, queries)
        attend_share(
            Scratch(scratch, 0, lse_at, partial_at, tile_rows), stream_blocks, stream_mask, first, last,
            stream_rows, worker + stream, sink_count, scaling_log2, cap_log2, C,
            rotated_queries(Own(raw, key_rotation, key_channel_scales + (batch * kv_heads + kv_head) * DK), C),
        )  # fmt: skip
        tile, kv_head = tl.where(tile + 1 == row_tiles, 0, tile + 1), kv_head + (tile + 1 == row_tiles).to(tl.int32)
        batch, kv_head = batch + (kv_head == kv_heads).to(tl.int32), tl.where(kv_head == kv_heads, 0, kv_head)

    final = jobs * streams - without_share + workers - 1
    job = first_job
    if job < 0:
        job = claim_reset(claims, without_share, final)
    while job < jobs * streams:
        stream = job // jobs
        part = job % jobs
        head = stream // row_tiles
        batch, kv_head = head // kv_heads, head % kv_heads
        r = (stream % row_tiles) * BLOCK_R + local
        sink_at = batch.to(tl.int64) * sink_b + kv_head * sink_h
        residual_at = batch.to(tl.int64) * residual_b + kv_head.to(tl.int64) * residual_h
        low, packed_count = part * DENSE_TOKENS, blocks * TOKENS
        q, scale = normalised(raw_queries(query, batch, kv_head, r, rows, queries, query_b, query_h, query_s, C))
        dense = DenseTokens(
            sink_keys + sink_at * DK, sink_values + sink_at * DV, residual_keys + residual_at * DK,
            residual_values + residual_at * DV, sink_count, residual_count, residual_start, residual_capacity,
        )  # fmt: skip
        job_mask = Mask(mask + batch.to(tl.int64) * mask_b if MASK else mask, mask_s, mask_t)
        out, dense_total, dense_maximum = dense_job_own(
            low, packed_count, q, scale * scaling_log2, dense, job_mask, (r % queries) * mask_s, queries, r, rows,
            cap_log2, C,
        )  # fmt: skip
        slot = workers + streams + stream * dense_splits + part
        tl.store(
            scratch + LINE * lse_at + slot * tile_rows + local, log2_sum(dense_maximum, dense_total), mask=store_rows
        )
        d, inverse = tl.arange(0, BLOCK_DM), 1.0 / tl.where(dense_total > 0, dense_total, 1.0)
        at = slot.to(tl.int64) * (tile_rows * DM) + local[None, :] * DM + d[:, None]
        tl.store(scratch + LINE * partial_at + at, out * inverse[None, :], mask=store_rows[None, :] & (d < DV)[:, None])
        job = claim_reset(claims, without_share, final)
