"""`decode_split` for Turing: the same shares, scratch and results, by programs of one warp and `mma.m16n8k8` in inline
PTX (`tq_kernels.turing.fragments`).

Budget on a T4 (40 multiprocessors at 1.59 GHz, 320 GB/s): a block of 4 bits at D = 128 is 17 KB and 32768
elements, 54 ns of the whole memory, so 3.4 k clocks of a multiprocessor, which issues up to 4 warp instructions in
each: 13 instructions per element and thread at most, 6.6 of them on the half as wide ALU pipe. The products take 8
clocks of a quarter of a multiprocessor each: 512 clocks for 256.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.device import constants_of
from ..common.schedule import (
    DENSE_TOKENS,
    LINE,
    ROTATED,
    START,
    BlockParts,
    DecodeNumbers,
    DecodeTensors,
    DenseTokens,
    claim,
    counted,
    dense_of_pages,
    dense_rows,
    first_block_column,
    first_jobs,
    next_sequence,
    packed_of,
    packed_share,
    parts_of,
    row_size,
    sharing,
    step_work,
    stream_at,
)
from ..common.softmax import log2_sum
from ..common.unpack import PROBABILITY_BITS
from ..format import CODE, TOKENS
from .fragments import LANES, column_sum, initial, load32, load_flag, ones, store32, value_tiles, zero_quads
from .tiles import PackedShape, add_dense_tokens, add_half_block, load_dense, load_rows, loud_pairs


@triton.jit
def lanes():
    """The lane's row and column of a fragment, g and t."""
    return tl.arange(0, LANES) // 4, tl.arange(0, LANES) % 4


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


@triton.jit
def store_partial(
    a: DecodeTensors, n: DecodeNumbers, slot, acc, sums, maximum, gain, bias, unit, DIM: tl.constexpr,
    DM: tl.constexpr, QUARTERS: tl.constexpr, TILES: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Store a partial result in `slot`."""
    g, t = lanes()
    WIDTH: tl.constexpr = DIM // QUARTERS
    CHUNKS: tl.constexpr = (WIDTH + 15) // 16
    for tile in tl.static_range(TILES):
        for e in tl.static_range(2):
            local = 8 * tile + 2 * t + e
            total = column_sum(sums[2 * tile + e])
            store32(
                a.scratch + LINE * n.lse_at + slot * n.tile_rows + local,
                log2_sum(maximum[2 * tile + e] * gain[2 * tile + e] - bias, total),
                (g == 0) & (local < n.tile_rows),
            )
            inverse = 1.0 / (tl.where(total > 0, total, 1.0) * unit)
            at = a.scratch + LINE * n.partial_at + slot.to(tl.int64) * (n.tile_rows * DM) + local * DM
            for quarter in tl.static_range(QUARTERS):
                for chunk in tl.static_range(CHUNKS):
                    quad = acc[(quarter * CHUNKS + chunk) * TILES + tile]
                    for half in tl.static_range(2):
                        if DENSE:
                            channel = 16 * chunk + 4 * (g // 2) + g % 2 + 2 * half
                        else:
                            channel = 16 * chunk + 8 * half + g
                        store32(
                            at + quarter * WIDTH + channel,
                            quad[2 * half + e] * inverse,
                            (channel < WIDTH) & (local < n.tile_rows),
                        )


@triton.jit
def _packed_part(a: DecodeTensors, n: DecodeNumbers, blocks, batch, stream, at, start, end, C: tl.constexpr):
    """Attend to the packed blocks `start` to `end` of a worker's share, from `stream` on, which begins at `at`; without
    pages a stream has `blocks` blocks."""
    TILES: tl.constexpr = C.BLOCK_R // 8
    KEY_QUARTERS: tl.constexpr = CODE[C.KEY_BITS].quarters
    KEY_WIDTH: tl.constexpr = C.DKP // KEY_QUARTERS
    STRIDE: tl.constexpr = row_size(C.DKP, C.LOUD)
    unit: tl.constexpr = CODE[C.KEY_BITS].small_unit
    g, t = lanes()
    scale = a.scratch + LINE * n.scale_at
    while at < end:
        own = blocks if a.block_table is None else packed_of(a.num_blocks, batch, n.count)
        first, last = tl.maximum(start - at - START, 0), tl.minimum(end - at - START, own)
        head = stream // n.row_tiles
        kv_head = head % n.kv_heads
        first_row = (stream % n.row_tiles) * (8 * TILES)
        # Queries
        factor = logit_factors(scale + head * n.rows, first_row, n.rows, t, n.scaling_log2 / unit, TILES)
        gain = ones(TILES) if C.BOUNDS else factor
        rotated = a.scratch.to(tl.pointer_type(tl.float16), bitcast=True) + ROTATED + head * n.rows * STRIDE
        q = operands(rotated, first_row, n.rows, g, t, STRIDE, KEY_WIDTH, KEY_QUARTERS, TILES)
        q_loud = ()
        for tile in tl.static_range(TILES if C.LOUD > 0 else 0):
            r = first_row + 8 * tile + g
            q_loud += (loud_pairs(rotated + (r * STRIDE + C.DKP), 2 * t, r < n.rows, C.LOUD),)
        sums, maximum = initial(TILES)
        acc = zero_quads(value_tiles(C.DVP, C.VALUE_BITS) * TILES)
        # Blocks, half of one at a time
        if a.block_table is None:
            at_block = batch.to(tl.int64) * n.blocks_b + kv_head.to(tl.int64) * n.blocks_h
            head_blocks = a.packed + at_block * C.BLOCK_WORDS
            if C.MASK:
                mask_row, sink_count = a.mask + batch.to(tl.int64) * a.mask_b, tl.load(a.num_sinks)
        else:
            head_blocks = a.packed + kv_head * C.BLOCK_WORDS
            pages = a.block_table + batch.to(tl.int64) * n.width + first_block_column(C.SINKS, C.RING, C.ROWS)
        for step in tl.range(2 * first, 2 * last):
            block, half = step // 2, step % 2
            allowed = ()
            if C.MASK:
                allowed = _flags_of_half(a, n, mask_row, sink_count, block, half, first_row, g, t, TILES)
            home = block if a.block_table is None else tl.load(pages + block).to(tl.int64) * n.blocks_b
            parts = parts_of(head_blocks + home * C.BLOCK_WORDS, C.DKP * C.KEY_BITS, C.DVP * C.VALUE_BITS, C.LOUD)
            place = BlockParts(
                parts.key_words + half * (8 * KEY_WIDTH), parts.loud + half * (16 * C.LOUD),
                parts.value_words + half * 8, parts.scales + half * 16, parts.means,
            )  # fmt: skip
            acc, sums, maximum = add_half_block(
                acc, sums, maximum, q, q_loud, factor, n.cap_log2, place, allowed, g, t,
                PackedShape(C.DKP, C.DVP, C.KEY_BITS, C.VALUE_BITS, C.MASK > 0, C.BOUNDS, TILES, C.LOUD),
            )  # fmt: skip
        store_partial(
            a, n, tl.program_id(0) + stream, acc, sums, maximum, gain, PROBABILITY_BITS, CODE[C.VALUE_BITS].small_unit,
            C.DVP, C.DM, CODE[C.VALUE_BITS].quarters, TILES, False,
        )  # fmt: skip
        at += counted(own)
        stream += 1
        if a.block_table is None:
            batch = stream // n.heads
        else:
            batch, stream, at = next_sequence(a, n, batch, stream, at, end, C.BLOCK_B)


@triton.jit
def _flags_of_half(
    a: DecodeTensors, n: DecodeNumbers, mask_row, sink_count, block, half, first_row, g, t, TILES: tl.constexpr
):
    """Load the mask of half a block: flags as in `add_half_block`."""
    allowed = ()
    for plane in tl.static_range(4):
        for tile in tl.static_range(TILES):
            for i in tl.static_range(4):
                token = block * TOKENS + half * 16 + 32 * plane + 4 * (g // 2) + g % 2 + 2 * (i // 2)
                r = first_row + 8 * tile + 2 * t + i % 2
                seen = mask_row + (sink_count + token).to(tl.int64) * a.mask_t + (r % n.queries) * a.mask_s
                allowed += (load_flag(seen, r < n.rows),)
    return allowed


@triton.jit
def _dense_part(a: DecodeTensors, n: DecodeNumbers, blocks, count, ring_start, job, jobs, C: tl.constexpr):
    """Attend to the dense tokens of job `job`."""
    TILES: tl.constexpr = C.BLOCK_R // 8
    g, t = lanes()
    stream, part = job // jobs, job % jobs
    batch = stream // n.heads
    head = stream // n.row_tiles
    # Tokens
    if a.block_table is None:
        rows = a.kv_rows + head.to(tl.int64) * ((n.ring + n.sinks) * (C.DK + C.DV))
        dense = DenseTokens(rows, None, None, None, n.sinks, n.ring, ring_start, count, None, count)
    else:
        dense, _, own_jobs = dense_of_pages(a, n, batch, head % n.kv_heads, C)
        count = tl.where(own_jobs > 0, dense.count, 0)
    # Queries
    first_row = (stream % n.row_tiles) * (8 * TILES)
    scale = a.scratch + LINE * n.scale_at + head * n.rows
    gain = logit_factors(scale, first_row, n.rows, t, n.scaling_log2, TILES)
    plain = a.scratch.to(tl.pointer_type(tl.float16), bitcast=True) + (2 * LINE) * n.plain_at + head * n.rows * C.DK
    exists = part * DENSE_TOKENS < count  # over pages a sequence may have fewer jobs, and no queries
    q = ()
    for tile in tl.static_range(TILES):
        r = first_row + 8 * tile + g
        pairs = ()
        for chunk in tl.static_range((C.DK + 15) // 16):
            pairs += load_dense(plain + r * C.DK, (r < n.rows) & exists, t, chunk, C.DK, C.DK % 4 == 0)
        q += (pairs,)
    # Rows and flags of tokens
    if C.MASK:
        mask_row = a.mask + batch.to(tl.int64) * a.mask_b
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
                seen = inside[2 * group + i // 2] & (r < n.rows)
                if C.CAUSAL:
                    seen = seen & (j <= count - n.queries + r % n.queries)
                if C.MASK:
                    position = tl.where(j < n.sinks, j, j + blocks * TOKENS)
                    at_mask = mask_row + position.to(tl.int64) * a.mask_t + (r % n.queries) * a.mask_s
                    seen = load_flag(at_mask, seen)
                allowed += (seen,)
    sums, maximum = initial(TILES)
    acc, sums, maximum = add_dense_tokens(
        zero_quads(((C.DV + 15) // 16) * TILES), sums, maximum, q, gain, n.cap_log2,
        key_rows, value_rows, inside, allowed, t, C.DK, C.DV, C.BOUNDS, TILES,
    )  # fmt: skip
    if C.BOUNDS:
        gain = ones(TILES)
    slot = tl.num_programs(0) + n.streams + stream * n.dense_splits + part
    store_partial(a, n, slot, acc, sums, maximum, gain, 0.0, 1.0, C.DV, C.DM, 1, TILES, True)


@triton.jit
def decode_split_fragments(tensors, n: DecodeNumbers, SHAPE: tl.constexpr):
    """Every worker's share, as of `decode_split`: `partial` and `lse`. Grid: (workers,), of one warp each."""
    C: tl.constexpr = constants_of(SHAPE)
    a = DecodeTensors(*tensors)
    worker, workers = tl.program_id(0), tl.num_programs(0)
    blocks, _, _, total, jobs = step_work(a, n, C.BLOCK_B)
    total_jobs = jobs * n.streams
    sharers = sharing(workers, total, total_jobs)
    start, end = packed_share(worker, sharers, total)
    batch, stream, at = stream_at(a, n, blocks, start)
    _packed_part(a, n, blocks, batch, stream, at, start, end, C)

    # Dense tokens: jobs, claimed one after the other; over pages every stream counts as many as the longest has. Load
    # numbers of tokens again: the loop above has no register to spare.
    count, ring_start = None, None
    if a.block_table is None:
        count = tl.load(a.num_sinks) + tl.load(a.num_residual)
        ring_start = (blocks * TOKENS) % n.ring
    claims = a.scratch.to(tl.pointer_type(tl.int32), bitcast=True)
    job, without_share = first_jobs(worker, workers, total, sharers)
    if job < 0:
        job = claim(claims, without_share, total_jobs)
    while job < total_jobs:
        _dense_part(a, n, blocks, count, ring_start, job, jobs, C)
        job = claim(claims, without_share, total_jobs)
