"""Decode attention over packed blocks: rotate the queries, then every program attends to its share of the keys.

For queries q of one KV head (rows r = g S + s of its G query heads and S queries), R the rotation, block b, mean m_b:

    logit[t, r]   = scaling (key_scale[t] (key_level[t] . R q[r]) + m_b . R q[r])
    rotated[r, :] = sum_t softmax(logit)[t, r] value_scale[t] value_level[t, :]    (`reduce` rotates back)

The tokens are M and the query rows N of every matrix product: a GQA group of 4 then costs one 8-wide product instead of
one padded to 16. Which program reads what is decided in `tq_kernels.decode.schedule`. Dense sinks and window are read
in jobs of 32 tokens, with queries that are not rotated. Logits are in base 2.

Scratch of a call is one float32 tensor (offsets in `tq_kernels.decode.plan.ScratchLayout`). With P = B * Hkv, ROWS =
G * S and TILE rows in a tile of rows:

    query_rotated [P, ROWS, DKP] fp16 · query_plain [P, ROWS, DK] fp16 · query_scale [P, ROWS]
    lse [SLOTS, TILE] · partial [SLOTS, TILE, DM], DM = max(DV, DVP); SLOTS = workers + streams + streams * dense_splits
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..common.softmax import finite, log2_sum, soft_capped
from ..format import TOKENS
from .dense import allowed_tile, dense_job
from .rotate import LINE
from .schedule import DENSE_TOKENS, balance, dense_jobs, share_start
from .tiles import (
    ROWS32,
    add_chunks,
    halves_of,
    key_scores,
    level_unit,
    load_bias,
    load_scalars,
    mean_scores,
    prefetch,
    value_levels,
)

PROBABILITY_BITS = tl.constexpr(4.0)
"""Probabilities are kept as 2**4 times their value, which centres fp16's range on what value scales look like."""


@triton.jit(
    do_not_specialize=(
        "rows queries kv_heads blocks_b blocks_h sink_b sink_h window_b window_h window_capacity mask_b mask_s "
        "mask_t scaling_log2 cap_log2 row_tiles streams tile_rows plain_at scale_at lse_at partial_at "
        "dense_splits"
    ).split()
)
def decode_split(
    scratch,
    key_words,  # [B, Hkv, N, 128 * DKP * KEY_BITS / 32] int32
    value_words,  # [B, Hkv, N, 128 * DVP * VALUE_BITS / 32] int32
    scalars,  # [B, Hkv, N, 128] int32
    key_means,  # [B, Hkv, N, DKP] fp16
    num_blocks,  # [] int32
    sink_keys,  # [B, Hkv, sinks, DK] in the model's dtype, of which the first num_sinks count
    sink_values,  # [B, Hkv, sinks, DV]
    window_keys,  # [B, Hkv, window_capacity, DK], row j in slot (128 * num_blocks + j) % window_capacity
    window_values,  # [B, Hkv, window_capacity, DV]
    num_window,  # [] int32
    num_sinks,  # [] int32
    mask,  # [B, 1, S or 1, T] uint8, 0 or 1
    rows,
    queries,
    kv_heads,
    blocks_b,  # strides of the packed tensors in blocks
    blocks_h,
    sink_b,  # strides of sinks and window in tokens
    sink_h,
    window_b,
    window_h,
    window_capacity,
    mask_b,
    mask_s,
    mask_t,
    scaling_log2,  # scaling * log2(e)
    cap_log2,  # softcap * log2(e)
    row_tiles,
    streams,  # P * row_tiles
    tile_rows,  # min(rows, BLOCK_R)
    plain_at,
    scale_at,
    lse_at,
    partial_at,
    dense_splits,  # slots of a stream for dense jobs: as many as its sinks and window have room for
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,  # 0: none, 1: one row for all queries, 2: a row for each
    SOFTCAP: tl.constexpr,
    KEY_CHUNKS: tl.constexpr,
    VALUE_CHUNKS: tl.constexpr,
    BLOCK_KC: tl.constexpr,
    BLOCK_VC: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DM: tl.constexpr,
    BLOCK_MEAN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SMALL: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every worker's share: `partial` and `lse`. Grid: (workers,)."""
    worker = tl.program_id(0)
    workers = tl.num_programs(0)
    DM: tl.constexpr = DV if DV > DVP else DVP
    if PDL:
        cuda.gdc_launch_dependents()
    # Before the wait: nothing that the kernel in front writes, which is queries and perhaps a row of the window.
    blocks = tl.load(num_blocks)
    window_count = tl.load(num_window)
    sink_count = tl.load(num_sinks)
    halves = scratch.to(tl.pointer_type(tl.float16), bitcast=True)
    local = tl.arange(0, BLOCK_R)
    store_rows = local < tile_rows

    work, extra, cost = balance(blocks, streams, workers, sink_count + window_count)
    start = share_start(worker, workers, work, extra, cost)
    end = share_start(worker + 1, workers, work, extra, cost)
    per_stream = tl.maximum(blocks, 1)
    if ASM:
        # The share's first block is on its way while queries and dense tokens are read.
        first_head = start // per_stream // row_tiles
        first_block = (
            (first_head // kv_heads).to(tl.int64) * blocks_b
            + (first_head % kv_heads).to(tl.int64) * blocks_h
            + start % per_stream
        )
        prefetch(key_words + first_block * (4 * DKP * KEY_BITS), DKP * KEY_BITS // 8, start < end)
        prefetch(value_words + first_block * (4 * DVP * VALUE_BITS), DVP * VALUE_BITS // 8, start < end)
    if PDL:
        cuda.gdc_wait()

    jobs = dense_jobs(sink_count + window_count)
    window_start = (blocks * TOKENS) % tl.maximum(window_capacity, 1)
    # Unpipelined: its buffers would cost the packed part occupancy.
    for job in tl.range(worker, jobs * streams, workers, num_stages=1):
        stream = job // jobs
        part = job % jobs
        head = stream // row_tiles
        batch = head // kv_heads
        kv_head = head % kv_heads
        r = (stream % row_tiles) * BLOCK_R + local
        row_mask = r < rows
        factor = tl.load(scratch + LINE * scale_at + head * rows + r, mask=row_mask, other=1.0) * scaling_log2  # [BR]
        dk = tl.arange(0, BLOCK_DK)
        plain = halves + (2 * LINE) * plain_at + (head * rows + r)[None, :] * DK + dk[:, None]
        q = tl.load(plain, mask=(dk < DK)[:, None] & row_mask[None, :], other=0.0)  # [BDK, BR]
        sink_at = batch.to(tl.int64) * sink_b + kv_head * sink_h
        window_at = batch.to(tl.int64) * window_b + kv_head.to(tl.int64) * window_h
        out, dense_total, dense_maximum = dense_job(
            part * DENSE_TOKENS,
            sink_count,
            window_count,
            window_start,
            window_capacity,
            blocks * TOKENS,
            q,
            factor,
            cap_log2,
            sink_keys + sink_at * DK,
            sink_values + sink_at * DV,
            window_keys + window_at * DK,
            window_values + window_at * DV,
            mask + batch.to(tl.int64) * mask_b if MASK else mask,
            mask_t,
            (r % queries) * mask_s,
            queries,
            r,
            rows,
            DK,
            DV,
            BLOCK_DK,
            BLOCK_DM,
            CAUSAL,
            MASK,
            SOFTCAP,
        )
        slot = workers + streams + stream * dense_splits + part
        tl.store(
            scratch + LINE * lse_at + slot * tile_rows + local, log2_sum(dense_maximum, dense_total), mask=store_rows
        )
        d, inverse = tl.arange(0, BLOCK_DM), 1.0 / tl.where(dense_total > 0, dense_total, 1.0)
        at = slot.to(tl.int64) * (tile_rows * DM) + local[None, :] * DM + d[:, None]
        tl.store(scratch + LINE * partial_at + at, out * inverse[None, :], mask=store_rows[None, :] & (d < DV)[:, None])

    for stream in tl.range(start // per_stream, (end + per_stream - 1) // per_stream, num_stages=1):
        first = tl.maximum(start - stream * per_stream, 0)
        last = tl.minimum(end - stream * per_stream, per_stream)
        if ASM:
            # Adds zero. The compiler must take it for different per lane: with a uniform bound it recomputes the
            # predicate of every prefetching copy from a uniform register, 200 cycles a block.
            last = tl.inline_asm_elementwise(
                "{ .reg .b32 z; mov.u32 z, %lanemask_lt; shr.u32 z, z, 31; add.s32 $0, $1, z; }",
                "=r,r",
                [last],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        head = stream // row_tiles
        batch = head // kv_heads
        kv_head = head % kv_heads
        r = (stream % row_tiles) * BLOCK_R + local
        row_mask = r < rows
        factor = tl.load(scratch + LINE * scale_at + head * rows + r, mask=row_mask, other=1.0) * scaling_log2  # [BR]
        factor /= level_unit(KEY_BITS, SMALL)

        n = tl.arange(0, 32)
        kc = tl.arange(0, BLOCK_KC)
        vc = tl.arange(0, BLOCK_VC)
        KEY_WIDTH: tl.constexpr = DKP // KEY_CHUNKS
        VALUE_HEIGHT: tl.constexpr = DVP // VALUE_CHUNKS
        rotated = halves + (head * rows + r)[None, :] * DKP + kc[:, None]
        q_mask = (kc < KEY_WIDTH)[:, None] & row_mask[None, :]
        q0 = tl.load(rotated, mask=q_mask, other=0.0)  # [BKC, BR]
        q1 = q0
        q2 = q0
        q3 = q0
        if KEY_CHUNKS > 1:
            q1 = tl.load(rotated + KEY_WIDTH, mask=q_mask, other=0.0)
        if KEY_CHUNKS > 2:
            q2 = tl.load(rotated + 2 * KEY_WIDTH, mask=q_mask, other=0.0)
            q3 = tl.load(rotated + 3 * KEY_WIDTH, mask=q_mask, other=0.0)
        km = tl.arange(0, BLOCK_MEAN)
        q_mean = q0
        if HAS_MEAN and (KEY_CHUNKS > 1 or BLOCK_MEAN != BLOCK_KC):
            whole = halves + (head * rows + r)[None, :] * DKP + km[:, None]
            q_mean = tl.load(whole, mask=(km < DKP)[:, None] & row_mask[None, :], other=0.0)  # [BM, BR]
        a0 = tl.zeros([BLOCK_VC, BLOCK_R], tl.float32)
        if VALUE_CHUNKS > 1:
            a1 = tl.zeros([BLOCK_VC, BLOCK_R], tl.float32)
            a2 = tl.zeros([BLOCK_VC, BLOCK_R], tl.float32)
            a3 = tl.zeros([BLOCK_VC, BLOCK_R], tl.float32)
        sums = tl.zeros([ROWS32, BLOCK_R], tl.float32)
        maximum = tl.full([BLOCK_R], -float("inf"), tl.float32)

        block0 = batch.to(tl.int64) * blocks_b + kv_head.to(tl.int64) * blocks_h
        KEY_SIZE: tl.constexpr = 4 * DKP * KEY_BITS
        VALUE_SIZE: tl.constexpr = 4 * DVP * VALUE_BITS
        scalar_at = scalars + block0 * TOKENS + n
        # Scalars are read a block ahead into registers: as asynchronous copies they would cost four branches a block.
        w0, w1, w2, w3 = load_scalars(scalar_at + first * TOKENS, first < last)
        if MASK == 1:
            mask_at = mask + batch.to(tl.int64) * mask_b + (sink_count + n).to(tl.int64) * mask_t
            m0, m1, m2, m3 = load_bias(mask_at, first, mask_t)
        for block in tl.range(first, last):
            at = block0 + block
            key_at = key_words + at * KEY_SIZE
            value_at = value_words + at * VALUE_SIZE
            x0, x1, x2, x3 = key_scores(
                key_at, q0, q1, q2, q3, n[:, None], kc[None, :], DKP, KEY_BITS, KEY_CHUNKS, BLOCK_R, SMALL, ASM
            )
            ks0, vs0 = halves_of(w0)
            ks1, vs1 = halves_of(w1)
            ks2, vs2 = halves_of(w2)
            ks3, vs3 = halves_of(w3)
            w0, w1, w2, w3 = load_scalars(scalar_at + (block + 1) * TOKENS, block + 1 < last)
            x0 = x0 * ks0[:, None]
            x1 = x1 * ks1[:, None]
            x2 = x2 * ks2[:, None]
            x3 = x3 * ks3[:, None]
            if HAS_MEAN:
                shared = mean_scores(key_means + at * DKP, q_mean, km, DKP) * level_unit(KEY_BITS, SMALL)  # [32, BR]
                x0 += shared
                x1 += shared
                x2 += shared
                x3 += shared
            if SOFTCAP:
                x0 = soft_capped(x0 * factor[None, :], cap_log2)
                x1 = soft_capped(x1 * factor[None, :], cap_log2)
                x2 = soft_capped(x2 * factor[None, :], cap_log2)
                x3 = soft_capped(x3 * factor[None, :], cap_log2)
            if MASK == 1:
                x0 += m0[:, None]
                x1 += m1[:, None]
                x2 += m2[:, None]
                x3 += m3[:, None]
                m0, m1, m2, m3 = load_bias(mask_at, tl.minimum(block + 1, last - 1), mask_t)
            elif MASK == 2:
                t = sink_count + block * TOKENS + n
                valid = row_mask[None, :]
                mask_row = mask + batch.to(tl.int64) * mask_b
                mask_offset = (r % queries) * mask_s  # [BR]
                x0 = tl.where(allowed_tile(mask_row, t, mask_offset, mask_t, valid), x0, -float("inf"))
                x1 = tl.where(allowed_tile(mask_row, t + 32, mask_offset, mask_t, valid), x1, -float("inf"))
                x2 = tl.where(allowed_tile(mask_row, t + 64, mask_offset, mask_t, valid), x2, -float("inf"))
                x3 = tl.where(allowed_tile(mask_row, t + 96, mask_offset, mask_t, valid), x3, -float("inf"))
            # The maximum is kept in the units of these products; the factor to base-2 logits enters the
            # exponent's FMA.
            gain = tl.full([BLOCK_R], 1.0, tl.float32) if SOFTCAP else factor
            new_maximum = tl.maximum(maximum, tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), 0))  # [BR]
            shift = finite(new_maximum) if MASK else new_maximum
            alpha = tl.exp2((maximum - shift) * gain)
            offset = shift * gain - PROBABILITY_BITS
            p0 = tl.exp2(x0 * gain[None, :] - offset[None, :])  # [32, BR]
            p1 = tl.exp2(x1 * gain[None, :] - offset[None, :])
            p2 = tl.exp2(x2 * gain[None, :] - offset[None, :])
            p3 = tl.exp2(x3 * gain[None, :] - offset[None, :])
            maximum = new_maximum
            sums = sums * alpha[None, :] + ((p0 + p1) + (p2 + p3))
            a0 = a0 * alpha[None, :]
            if VALUE_CHUNKS > 1:
                a1 = a1 * alpha[None, :]
                a2 = a2 * alpha[None, :]
                a3 = a3 * alpha[None, :]
            if VALUE_CHUNKS == 1:
                # Two planes at a time: the exchange of probabilities between warps takes half the shared memory.
                v0, v1, v2, v3 = value_levels(value_at, vc[:, None], n[None, :], DVP, VALUE_BITS, SMALL, ASM)
                p0 = (p0 * vs0[:, None]).to(tl.float16)
                p1 = (p1 * vs1[:, None]).to(tl.float16)
                a0 = tl.dot(v0, p0, a0)
                a0 = tl.dot(v1, p1, a0)
                p2 = (p2 * vs2[:, None]).to(tl.float16)
                p3 = (p3 * vs3[:, None]).to(tl.float16)
                a0 = tl.dot(v2, p2, a0)
                a0 = tl.dot(v3, p3, a0)
            else:
                p0 = (p0 * vs0[:, None]).to(tl.float16)
                p1 = (p1 * vs1[:, None]).to(tl.float16)
                p2 = (p2 * vs2[:, None]).to(tl.float16)
                p3 = (p3 * vs3[:, None]).to(tl.float16)
                a0, a1, a2, a3 = add_chunks(
                    a0, a1, a2, a3, value_at, vc[:, None], n[None, :], p0, p1, p2, p3, DVP, VALUE_BITS, SMALL, ASM
                )

        total = tl.sum(sums, 0)  # [BR]
        gain = tl.full([BLOCK_R], 1.0, tl.float32) if SOFTCAP else factor
        slot = worker + stream
        tl.store(
            scratch + LINE * lse_at + slot * tile_rows + local,
            log2_sum(maximum * gain - PROBABILITY_BITS, total),
            mask=store_rows,
        )
        inverse = 1.0 / (tl.where(total > 0, total, 1.0) * level_unit(VALUE_BITS, SMALL))
        out = scratch + LINE * partial_at + slot.to(tl.int64) * (tile_rows * DM) + local[None, :] * DM + vc[:, None]
        out_mask = store_rows[None, :] & (vc < VALUE_HEIGHT)[:, None]
        tl.store(out, a0 * inverse[None, :], mask=out_mask)
        if VALUE_CHUNKS > 1:
            tl.store(out + VALUE_HEIGHT, a1 * inverse[None, :], mask=out_mask)
            tl.store(out + 2 * VALUE_HEIGHT, a2 * inverse[None, :], mask=out_mask)
            tl.store(out + 3 * VALUE_HEIGHT, a3 * inverse[None, :], mask=out_mask)
