"""`decode_split` for Turing: the same shares, scratch and results, by programs of one warp and `mma.m16n8k8` in inline
PTX (`tq_kernels.turing.fragments`).

Budget on a T4 (40 multiprocessors at 1.59 GHz, 320 GB/s): a block of 4 bits at D = 128 is 17 KB and 32768
elements, 54 ns of the whole memory, so 3.4 k clocks of a multiprocessor, which issues up to 4 warp instructions in
each: 13 instructions per element and thread at most, 6.6 of them on the half as wide ALU pipe. The products take 8
clocks of a quarter of a multiprocessor each: 512 clocks for 256.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.device import constants_of
from ..common.launcher import kernel
from ..common.schedule import (
    DENSE_TOKENS,
    LINE,
    ROTATED,
    START,
    BlockParts,
    DenseTokens,
    NewTokens,
    claim,
    counted,
    dense_jobs,
    dense_rows,
    first_block_column,
    first_jobs,
    packed_of,
    packed_share,
    parts_of,
    row_size,
    sharing,
    stream_of,
    work_of,
)
from ..common.softmax import log2_sum
from ..common.unpack import PROBABILITY_BITS
from ..format import CODE, TOKENS
from .fragments import LANES, column_sum, initial, load32, load_flag, ones, store32, value_tiles, zero_quads
from .tiles import PackedShape, attend_dense, attend_packed, load_dense, load_rows, loud_pairs


@triton.jit
def operands(
    rows0, first, rows, g, t, STRIDE: tl.constexpr, WIDTH: tl.constexpr, QUARTERS: tl.constexpr, TILES: tl.constexpr
):
    """Load each row tile of a stream by `load_rows`: rows from `first` of `rows` on; `rows0` points to row 0."""
    q = ()
    for tile in tl.static_range(TILES):
        r = first + 8 * tile + g
        q += (load_rows(rows0 + r * STRIDE, t, r < rows, WIDTH, QUARTERS),)
    return q


@triton.jit
def logit_factors(scale, first, rows, t, unit, TILES: tl.constexpr):
    """Load the factors to base-2 logits of columns 2t and 2t + 1 of each row tile."""
    factors = ()
    for tile in tl.static_range(TILES):
        for e in tl.static_range(2):
            r = first + 8 * tile + 2 * t + e
            factor = load32(scale + r, r < rows).to(tl.float32, bitcast=True)
            factors += (tl.where(r < rows, factor, 1.0) * unit,)
    return factors


class Slots(NamedTuple):
    """Slots of partial results: pointers to slot 0's logarithms and results, rows of a slot, and the lane's g and t."""

    lse: Any
    partial: Any
    tile_rows: Any
    g: Any
    t: Any


@triton.jit
def store_partial(
    slots, slot, acc, sums, maximum, gain, bias, unit, DIM: tl.constexpr, DM: tl.constexpr,
    QUARTERS: tl.constexpr, TILES: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Store a partial result in `slot`."""
    WIDTH: tl.constexpr = DIM // QUARTERS
    CHUNKS: tl.constexpr = (WIDTH + 15) // 16
    for tile in tl.static_range(TILES):
        for e in tl.static_range(2):
            local = 8 * tile + 2 * slots.t + e
            total = column_sum(sums[2 * tile + e])
            store32(
                slots.lse + slot * slots.tile_rows + local,
                log2_sum(maximum[2 * tile + e] * gain[2 * tile + e] - bias, total),
                (slots.g == 0) & (local < slots.tile_rows),
            )
            inverse = 1.0 / (tl.where(total > 0, total, 1.0) * unit)
            at = slots.partial + slot.to(tl.int64) * (slots.tile_rows * DM) + local * DM
            for quarter in tl.static_range(QUARTERS):
                for chunk in tl.static_range(CHUNKS):
                    quad = acc[(quarter * CHUNKS + chunk) * TILES + tile]
                    for half in tl.static_range(2):
                        if DENSE:
                            channel = 16 * chunk + 4 * (slots.g // 2) + slots.g % 2 + 2 * half
                        else:
                            channel = 16 * chunk + 8 * half + slots.g
                        store32(
                            at + quarter * WIDTH + channel,
                            quad[2 * half + e] * inverse,
                            (channel < WIDTH) & (local < slots.tile_rows),
                        )


@kernel("mask_b:dense_splits")
def decode_split_fragments(
    scratch,  # arguments as for decode_split
    packed, num_blocks, kv_rows, num_residual, num_sinks, mask, key, value, block_table, cu_seqlens_q, cu_seqlens_k,
    mask_b, mask_s, mask_t, rows, queries, kv_heads, blocks_b, blocks_h, ring, sinks, key_t, key_h, value_t, value_h,
    width, scaling_log2, cap_log2, row_tiles, streams, tile_rows, plain_at, scale_at, lse_at, partial_at, dense_splits,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Every worker's share: `partial` and `lse`. Grid: (workers,), of one warp each."""
    C: tl.constexpr = constants_of(SHAPE)
    worker = tl.program_id(0)
    workers = tl.num_programs(0)
    TILES: tl.constexpr = C.BLOCK_R // 8
    lane = tl.arange(0, LANES)
    g = lane // 4
    t = lane % 4
    scratch_fp16 = scratch.to(tl.pointer_type(tl.float16), bitcast=True)
    scale = scratch + LINE * scale_at
    lse = scratch + LINE * lse_at
    partial = scratch + LINE * partial_at
    KEY_QUARTERS: tl.constexpr = CODE[C.KEY_BITS].quarters
    VALUE_QUARTERS: tl.constexpr = CODE[C.VALUE_BITS].quarters
    KEY_WIDTH: tl.constexpr = C.DKP // KEY_QUARTERS
    FIRST_BLOCK: tl.constexpr = 0 if block_table is None else first_block_column(C.SINKS, C.RING, C.ROWS)
    heads = kv_heads * row_tiles
    every = tl.arange(0, 1 if block_table is None else C.BLOCK_B)
    if block_table is None:
        blocks = tl.load(num_blocks)
        per_stream, jobs = tl.maximum(counted(blocks), 1), dense_jobs(tl.load(num_sinks) + tl.load(num_residual))
        total = counted(blocks) * streams
    else:
        work = work_of(cu_seqlens_q, cu_seqlens_k, num_blocks, every, queries)
        total, jobs = tl.sum(counted(work[0]), 0) * heads, tl.max(work[1], 0)
    total_jobs = jobs * streams
    sharers = sharing(workers, total, total_jobs)
    start, end = packed_share(worker, sharers, total)

    # Packed blocks: the worker's share, stream by stream.
    if block_table is None:
        stream = start // per_stream
        batch, at = stream // heads, stream * per_stream
    else:
        batch, stream, at = stream_of(counted(work[0]), heads, start)
    while at < end:
        if block_table is not None:
            blocks = packed_of(num_blocks, batch, queries)
        first = tl.maximum(start - at - START, 0)
        last = tl.minimum(end - at - START, blocks)
        head = stream // row_tiles
        kv_head = head % kv_heads
        first_row = (stream % row_tiles) * (8 * TILES)
        unit: tl.constexpr = CODE[C.KEY_BITS].small_unit
        factor = logit_factors(scale + head * rows, first_row, rows, t, scaling_log2 / unit, TILES)
        gain = ones(TILES) if C.BOUNDS else factor
        STRIDE: tl.constexpr = row_size(C.DKP, C.LOUD)
        rotated = scratch_fp16 + ROTATED + head * rows * STRIDE
        q = operands(rotated, first_row, rows, g, t, STRIDE, KEY_WIDTH, KEY_QUARTERS, TILES)
        q_loud = ()
        for tile in tl.static_range(TILES if C.LOUD > 0 else 0):
            r = first_row + 8 * tile + g
            q_loud += (loud_pairs(rotated + (r * STRIDE + C.DKP), 2 * t, r < rows, C.LOUD),)
        sums, maximum = initial(TILES)
        acc = zero_quads(value_tiles(C.DVP, C.VALUE_BITS) * TILES)
        if block_table is None:
            head_blocks = packed + (batch.to(tl.int64) * blocks_b + kv_head.to(tl.int64) * blocks_h) * C.BLOCK_WORDS
            mask_row = mask + batch.to(tl.int64) * mask_b
            sink_count = tl.load(num_sinks) if C.MASK else 0
        else:
            head_blocks = packed + kv_head * C.BLOCK_WORDS
            pages = block_table + batch.to(tl.int64) * width + FIRST_BLOCK
        for step in tl.range(2 * first, 2 * last):
            block = step // 2
            half = step % 2
            allowed = ()
            if C.MASK:
                for plane in tl.static_range(4):
                    for tile in tl.static_range(TILES):
                        for i in tl.static_range(4):
                            token = block * TOKENS + half * 16 + 32 * plane + 4 * (g // 2) + g % 2 + 2 * (i // 2)
                            r = first_row + 8 * tile + 2 * t + i % 2
                            seen = mask_row + (sink_count + token).to(tl.int64) * mask_t + (r % queries) * mask_s
                            allowed += (load_flag(seen, r < rows),)
            home = block if block_table is None else tl.load(pages + block).to(tl.int64) * blocks_b
            parts = parts_of(head_blocks + home * C.BLOCK_WORDS, C.DKP * C.KEY_BITS, C.DVP * C.VALUE_BITS, C.LOUD)
            place = BlockParts(
                parts.key_words + half * (8 * KEY_WIDTH), parts.loud + half * (16 * C.LOUD),
                parts.value_words + half * 8, parts.scales + half * 16, parts.means,
            )  # fmt: skip
            acc, sums, maximum = attend_packed(
                acc, sums, maximum, q, q_loud, factor, cap_log2, place, allowed, g, t,
                PackedShape(C.DKP, C.DVP, C.KEY_BITS, C.VALUE_BITS, C.MASK > 0, C.BOUNDS, TILES, C.LOUD),
            )  # fmt: skip
        store_partial(
            Slots(lse, partial, tile_rows, g, t), worker + stream, acc, sums, maximum, gain, PROBABILITY_BITS,
            CODE[C.VALUE_BITS].small_unit, C.DVP, C.DM, VALUE_QUARTERS, TILES, False,
        )  # fmt: skip
        at += counted(blocks)
        stream += 1
        if block_table is None:
            batch = stream // heads
        elif (stream % heads == 0) & (at < end):
            later = work_of(cu_seqlens_q, cu_seqlens_k, num_blocks, every, queries)
            batch, stream, at = stream_of(counted(later[0]), heads, at)

    # Dense tokens: jobs, claimed one after the other; over pages every stream counts as many as the longest has. Load
    # numbers of tokens again: the loop above has no register to spare.
    if block_table is None:
        count = tl.load(num_sinks) + tl.load(num_residual)
        ring_start = (blocks * TOKENS) % ring
    claims = scratch.to(tl.pointer_type(tl.int32), bitcast=True)
    job, without_share = first_jobs(worker, workers, total, sharers)
    if job < 0:
        job = claim(claims, without_share, total_jobs)
    while job < total_jobs:
        stream, part = job // jobs, job % jobs
        batch = stream // heads
        head = stream // row_tiles
        kv_head = head % kv_heads
        if block_table is None:
            own_rows = kv_rows + head.to(tl.int64) * ((ring + sinks) * (C.DK + C.DV))
            dense = DenseTokens(own_rows, None, None, None, sinks, ring, ring_start, count, None, count)
        else:
            held, own_jobs, new_token, past = work_of(cu_seqlens_q, cu_seqlens_k, num_blocks, batch, queries)
            history = tl.where(own_jobs > 0, past - held * TOKENS, 0)
            count = tl.where(own_jobs > 0, history + 1, 0)
            new_key = key + (new_token.to(tl.int64) * (key_t * 8) + kv_head * (key_h * 8))
            new_value = value + (new_token.to(tl.int64) * (value_t * 8) + kv_head * (value_h * 8))
            dense = DenseTokens(
                kv_rows, block_table + batch.to(tl.int64) * width, blocks_b, kv_head, C.SINKS, C.RING,
                (held * TOKENS) % C.RING, history, NewTokens(new_key, new_value, key_t * 8, value_t * 8), count,
            )  # fmt: skip
        first_row = (stream % row_tiles) * (8 * TILES)
        gain = logit_factors(scale + head * rows, first_row, rows, t, scaling_log2, TILES)
        plain = scratch_fp16 + (2 * LINE) * plain_at + head * rows * C.DK
        exists = part * DENSE_TOKENS < count  # over pages a sequence may have fewer jobs, and no queries
        q = ()
        for tile in tl.static_range(TILES):
            r = first_row + 8 * tile + g
            pairs = ()
            for chunk in tl.static_range((C.DK + 15) // 16):
                pairs += load_dense(plain + r * C.DK, (r < rows) & exists, t, chunk, C.DK, C.DK % 4 == 0)
            q += (pairs,)
        if C.MASK:
            mask_row = mask + batch.to(tl.int64) * mask_b
        key_rows, value_rows, inside, allowed = (), (), (), ()
        for group in tl.static_range(2):
            token = ()
            for half in tl.static_range(2):
                j = part * DENSE_TOKENS + 16 * group + 8 * half + g
                k_row, v_row = dense_rows(dense, j, C)
                key_rows += (k_row,)
                value_rows += (v_row,)
                inside += (j < count,)
                token += (j,)
            for tile in tl.static_range(TILES):
                for i in tl.static_range(4):
                    j = token[i // 2]
                    r = first_row + 8 * tile + 2 * t + i % 2
                    seen = inside[2 * group + i // 2] & (r < rows)
                    if C.CAUSAL:
                        seen = seen & (j <= count - queries + r % queries)
                    if C.MASK:
                        position = tl.where(j < sinks, j, j + blocks * TOKENS)
                        at_mask = mask_row + position.to(tl.int64) * mask_t + (r % queries) * mask_s
                        seen = load_flag(at_mask, seen)
                    allowed += (seen,)
        sums, maximum = initial(TILES)
        acc, sums, maximum = attend_dense(
            zero_quads(((C.DV + 15) // 16) * TILES), sums, maximum, q, gain, cap_log2,
            key_rows, value_rows, inside, allowed, t, C.DK, C.DV, C.BOUNDS, TILES,
        )  # fmt: skip
        if C.BOUNDS:
            gain = ones(TILES)
        slot = workers + streams + stream * dense_splits + part
        slots = Slots(lse, partial, tile_rows, g, t)
        store_partial(slots, slot, acc, sums, maximum, gain, 0.0, 1.0, C.DV, C.DM, 1, TILES, True)
        job = claim(claims, without_share, total_jobs)
