"""`decode_split_paged` for GPUs whose matrix units Triton does not use (Turing): `tq_kernels.turing.split`,
block by block from a table."""

import triton
import triton.language as tl

from ..common.schedule import DENSE_TOKENS, LINE, ROTATED, dense_slots, share, stream_items
from ..common.sequences import dense_rows, lengths
from ..common.unpack import PROBABILITY_BITS, small_unit
from ..format import TOKENS
from .fragments import LANES, initial, ones, quarters_of, value_tiles, zero_quads
from .split import Slots, logit_factors, operands, store_partial
from .tiles import Half, PackedShape, attend_dense, attend_packed, load_dense


@triton.jit(
    do_not_specialize=(
        "count kv_heads groups key_t key_h value_t value_h width page_blocks scaling_log2 cap_log2 row_tiles tile_rows "
        "plain_at scale_at lse_at partial_at"
    ).split()
)
def decode_split_paged_fragments(
    scratch,  # arguments as for decode_split_paged
    key_words,
    value_words,
    scales,
    key_means,
    rows,
    key,
    value,
    block_table,
    cu_seqlens_q,
    cu_seqlens_k,
    count,
    kv_heads,
    groups,
    key_t,
    key_h,
    value_t,
    value_h,
    width,
    page_blocks,
    scaling_log2,
    cap_log2,
    row_tiles,
    tile_rows,
    plain_at,
    scale_at,
    lse_at,
    partial_at,
    DIM: tl.constexpr,
    DIMP: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    TILES: tl.constexpr,
):
    """Every worker's share: `partial` and `lse`. Grid: (workers,), of one warp each; TILES tiles of 8 query rows."""
    worker = tl.program_id(0)
    workers = tl.num_programs(0)
    DM: tl.constexpr = DIM if DIM > DIMP else DIMP
    RING_PAGES: tl.constexpr = TOKENS // ROWS
    KEY_QUARTERS: tl.constexpr = quarters_of(KEY_BITS)
    VALUE_QUARTERS: tl.constexpr = quarters_of(VALUE_BITS)
    KEY_WIDTH: tl.constexpr = DIMP // KEY_QUARTERS
    lane = tl.arange(0, LANES)
    g = lane // 4
    t = lane % 4
    scratch_fp16 = scratch.to(tl.pointer_type(tl.float16), bitcast=True)
    scale = scratch + LINE * scale_at
    lse = scratch + LINE * lse_at
    partial = scratch + LINE * partial_at
    heads = kv_heads * row_tiles
    start, end, stream, at = share(worker, workers, cu_seqlens_q, cu_seqlens_k, count, heads, 0, BLOCK_B)
    while at < end:
        sequence = stream // heads
        kv_head = stream % heads // row_tiles
        first_row = stream % row_tiles * (8 * TILES)
        row0 = kv_head * (groups * count) + sequence  # query r of the head is row `row0 + count * r`
        token, new, past = lengths(cu_seqlens_q, cu_seqlens_k, sequence, count)
        pages = block_table + sequence.to(tl.int64) * width
        blocks = tl.where(new == 1, past // TOKENS, 0)
        held = past % TOKENS
        first = tl.maximum(start - at, 0)
        last = tl.minimum(end - at, stream_items(new, past, 0))

        for job in tl.range(tl.maximum(first - blocks, 0), last - blocks):
            gain = logit_factors(scale, row0, count, first_row, groups, t, scaling_log2, TILES)
            plain = scratch_fp16 + (2 * LINE) * plain_at
            q = ()
            for tile in tl.static_range(TILES):
                r = first_row + 8 * tile + g
                pairs = ()
                for chunk in tl.static_range((DIM + 15) // 16):
                    pairs += load_dense(plain + (row0 + r * count) * DIM, r < groups, t, chunk, DIM, DIM % 4 == 0)
                q += (pairs,)
            key_rows, value_rows, inside, allowed = (), (), (), ()
            for group in tl.static_range(2):
                for half in tl.static_range(2):
                    j = job * DENSE_TOKENS + 16 * group + 8 * half + g
                    k_row, v_row = dense_rows(
                        rows, pages, key, value, j, 0, held, held + 1, token, kv_head, page_blocks,
                        key_t * 8, key_h * 8, value_t * 8, value_h * 8, DIM, ROWS, BLOCK_WORDS,
                    )  # fmt: skip
                    key_rows += (k_row,)
                    value_rows += (v_row,)
                    inside += (j <= held,)
                for tile in tl.static_range(TILES):
                    for i in tl.static_range(4):
                        r = first_row + 8 * tile + 2 * t + i % 2
                        allowed += (inside[2 * group + i // 2] & (r < groups),)
            sums, maximum = initial(TILES)
            acc, sums, maximum = attend_dense(
                zero_quads(((DIM + 15) // 16) * TILES), sums, maximum, q, gain, cap_log2,
                key_rows, value_rows, inside, allowed, t, DIM, DIM, SOFTCAP, TILES,
            )  # fmt: skip
            if SOFTCAP:
                gain = ones(TILES)
            slot = workers + heads * count + stream * dense_slots(0) + job
            slots = Slots(lse, partial, tile_rows, g, t)
            store_partial(slots, slot, acc, sums, maximum, gain, 0.0, 1.0, DIM, DM, 1, TILES, True)

        if first < blocks:
            factor = logit_factors(scale, row0, count, first_row, groups, t, scaling_log2 / small_unit(KEY_BITS), TILES)
            packed_gain = ones(TILES) if SOFTCAP else factor
            rotated = operands(
                scratch_fp16 + ROTATED, row0, count, first_row, groups, g, t, DIMP, KEY_WIDTH, KEY_QUARTERS, TILES
            )
            packed_sums, packed_maximum = initial(TILES)
            packed = zero_quads(value_tiles(DIMP, VALUE_BITS) * TILES)
            for step in tl.range(2 * first, 2 * tl.minimum(last, blocks)):
                half = step % 2
                page = tl.load(pages + RING_PAGES + step // 2).to(tl.int64)
                block = page * page_blocks + kv_head
                packed, packed_sums, packed_maximum = attend_packed(
                    packed, packed_sums, packed_maximum, rotated, factor, cap_log2,
                    Half(
                        key_words + block * BLOCK_WORDS + half * (8 * KEY_WIDTH),
                        value_words + block * BLOCK_WORDS + half * 8,
                        scales + block * BLOCK_WORDS + half * 16,
                        key_means + block * (2 * BLOCK_WORDS) if HAS_MEAN else key_means,
                    ),
                    (), g, t, PackedShape(DIMP, DIMP, KEY_BITS, VALUE_BITS, HAS_MEAN, False, SOFTCAP, TILES),
                )  # fmt: skip
            store_partial(
                Slots(lse, partial, tile_rows, g, t), worker + stream, packed, packed_sums, packed_maximum, packed_gain,
                PROBABILITY_BITS, small_unit(VALUE_BITS), DIMP, DM, VALUE_QUARTERS, TILES, False,
            )  # fmt: skip
        at += stream_items(new, past, 0)
        stream += 1
