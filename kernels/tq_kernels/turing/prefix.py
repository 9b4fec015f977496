"""`prefix_attention` for GPUs whose matrix units Triton does not use (Turing): `tq_kernels.turing.fragments`.

A program is a warp, with TILES tiles of 8 query rows. The rotations are products of the same kinds: R q as scores of
R's rows, and back as values of the other's rows. What bounds it on a T4 with 16 rows at D = 128 and 4 bits, in clocks
of a multiprocessor a block of 128 tokens: products 1024 (512 of 8 clocks on each of four units), instructions 750.
Words are read once for 16 rows, 17 bytes a clock; rows of one head run side by side and find them in the L2 cache.
"""

import triton
import triton.language as tl

from ..common.softmax import LOG2E, log2_sum
from ..common.unpack import small_unit
from ..format import TOKENS
from .fragments import (
    LANES,
    column_max,
    column_sum,
    initial,
    load_flag,
    of_column,
    pair_of,
    quarters_of,
    row_max,
    scaled,
    store32,
    store_element,
    transposed,
    value_tiles,
    zero_quads,
)
from .tiles import Half, PackedShape, add_dense_values, attend_dense, attend_packed, dense_scores, load_elements


@triton.jit
def row_scale(row, valid, t, DIM: tl.constexpr):
    """The power of two that row g is divided by for its elements to be below 1."""
    largest = tl.zeros([LANES], tl.float32)
    for chunk in tl.static_range((DIM + 15) // 16):
        x = load_elements(row, valid, t, chunk, DIM)
        for i in tl.static_range(4):
            largest = tl.maximum(largest, tl.abs(x[i]))
    exponent = (row_max(largest).to(tl.int32, bitcast=True) >> 23) + 1
    exponent = tl.minimum(tl.maximum(exponent, 64), 190)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def row_pairs(row, valid, t, scale, channel_scales, DIM: tl.constexpr, DIVIDE: tl.constexpr):
    """Pairs of row g's channels, less `scale`, and with DIVIDE divided by their channel scales."""
    inverse = 1.0 / scale
    pairs = ()
    for chunk in tl.static_range((DIM + 15) // 16):
        x = load_elements(row, valid, t, chunk, DIM)
        y = ()
        if DIVIDE:
            f = load_elements(channel_scales, t >= 0, t, chunk, DIM)
            for i in tl.static_range(4):
                y += (x[i] * inverse / tl.where(f[i] == 0, 1.0, f[i]),)
        else:
            for i in tl.static_range(4):
                y += (x[i] * inverse,)
        pairs += (pair_of(y[0], y[1]), pair_of(y[2], y[3]))
    return pairs


@triton.jit
def rotated(plain, rotation, g, t, DIM: tl.constexpr, QUARTERS: tl.constexpr, TILES: tl.constexpr):
    """Operands b of rotated rows, in the order of `load_rows`; `plain` are TILES tuples of DIM channels' pairs."""
    WIDTH: tl.constexpr = DIM // QUARTERS
    tiles = ()
    for _ in tl.static_range(TILES):
        tiles += ((),)
    for quarter in tl.static_range(QUARTERS):
        for chunk in tl.static_range((WIDTH + 15) // 16):
            # The order of channels that `load_rows` has: rows i < 8 of the product are step 0, the others step 1.
            channel = 16 * chunk + 4 * (g // 2) + g % 2
            low = rotation + (quarter * WIDTH + channel) * DIM
            s = dense_scores(
                low, low + 2 * DIM, channel < WIDTH, channel + 2 < WIDTH, plain, t, DIM, TILES, True
            )  # fmt: skip
            new = ()
            for tile in tl.static_range(TILES):
                quad = s[tile]
                first = transposed(pair_of(quad[0] * (DIM**-0.5), quad[1] * (DIM**-0.5)))
                second = transposed(pair_of(quad[2] * (DIM**-0.5), quad[3] * (DIM**-0.5)))
                new += (tiles[tile] + (first, second),)
            tiles = new
    return tiles


@triton.jit
def rotated_back(acc, rotation, g, t, DIM: tl.constexpr, DV: tl.constexpr, QUARTERS: tl.constexpr, TILES: tl.constexpr):
    """Quads of `add_dense_values` of R^T acc, from those of `add_packed_values`."""
    WIDTH: tl.constexpr = DIM // QUARTERS
    CHUNKS: tl.constexpr = (WIDTH + 15) // 16
    # Normalised rows: fp16 then holds any output to 11 bits.
    peaks, inverse = (), ()
    for tile in tl.static_range(TILES):
        for e in tl.static_range(2):
            peak = tl.zeros([LANES], tl.float32)
            for i in tl.static_range(QUARTERS * CHUNKS):
                for half in tl.static_range(2):
                    inside = 16 * (i % CHUNKS) + 8 * half + g < WIDTH
                    peak = tl.maximum(peak, tl.where(inside, tl.abs(acc[i * TILES + tile][2 * half + e]), 0.0))
            peak = column_max(peak)
            peak = tl.where(peak > 0, peak, 1.0)
            peaks += (peak * (DIM**-0.5),)
            inverse += (1.0 / peak,)
    out = zero_quads(((DV + 15) // 16) * TILES)
    for i in tl.static_range(QUARTERS * CHUNKS):
        for half in tl.static_range(2):
            channel = 16 * (i % CHUNKS) + 8 * half + g
            inside = channel < WIDTH
            b = ()
            for tile in tl.static_range(TILES):
                quad = acc[i * TILES + tile]
                low = tl.where(inside, quad[2 * half] * inverse[2 * tile], 0.0)
                high = tl.where(inside, quad[2 * half + 1] * inverse[2 * tile + 1], 0.0)
                b += (transposed(pair_of(low, high)),)
            row = rotation + ((i // CHUNKS) * WIDTH + channel) * DIM
            out = add_dense_values(out, row, inside, b, t, DIM if DIM < DV else DV, TILES, True)
    back = ()
    for i in tl.static_range(((DV + 15) // 16) * TILES):
        back += (scaled(out[i], peaks[2 * (i % TILES)], peaks[2 * (i % TILES) + 1]),)
    return back


@triton.jit(
    do_not_specialize=(
        "blocks_b blocks_h rows groups kv_heads blocks sink_count residual_count residual_start residual_capacity "
        "new_count queries mask_b mask_s mask_t scaling_log2 cap_log2 tile_count"
    ).split()
)
def prefix_attention_fragments(
    query,  # arguments as for prefix_attention
    key_words, value_words, scales, key_means, key_rotation, value_rotation, key_channel_scales, value_channel_scales,
    sink_keys, sink_values, residual_keys, residual_values, new_keys, new_values, mask, s_aux, out, partial, lse,
    operand_rows,  # unused
    query_b, query_h, query_s, blocks_b, blocks_h, sink_b, sink_h, sink_vb, sink_vh, residual_b, residual_h,
    residual_vb, residual_vh, new_b, new_h, new_t, new_vb, new_vh, new_vt, out_b, out_s, out_h, rows, groups, kv_heads,
    blocks, sink_count, residual_count, residual_start, residual_capacity, new_count, queries, mask_b, mask_s, mask_t,
    scaling_log2, cap_log2, tile_count,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, BOUNDS: tl.constexpr, HAS_AUX: tl.constexpr,
    SPLIT: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Grid: (row tiles, B * Hkv, splits), of one warp each."""
    C: tl.constexpr = PackedShape(DKP, DVP, KEY_BITS, VALUE_BITS, MASK > 0, BOUNDS, TILES)
    head = tl.program_id(1)
    batch = (head // kv_heads).to(tl.int64)
    kv_head = (head % kv_heads).to(tl.int64)
    # The last rows see the most tokens: start them first.
    first_row = (tile_count - 1 - tl.program_id(0)) * (8 * TILES)
    lane = tl.arange(0, LANES)
    g = lane // 4
    t = lane % 4
    dense = sink_count + residual_count + new_count
    if CAUSAL:
        dense = tl.minimum(dense, dense - queries + 1 + (tl.minimum(first_row + 8 * TILES, rows) - 1) // groups)
    units = blocks + (dense + TOKENS - 1) // TOKENS
    first = 0
    last = units
    split = 0
    if SPLIT:
        split = tl.program_id(2)
        splits = tl.num_programs(2)
        first = (units // splits) * split + (units % splits) * split // splits
        last = (units // splits) * (split + 1) + (units % splits) * (split + 1) // splits
    last_block = tl.minimum(last, blocks)

    mask += batch * mask_b
    factor = ()
    for tile in tl.static_range(TILES):
        r = first_row + 8 * tile + g
        row = batch * query_b + (kv_head * groups + r % groups) * query_h + (r // groups).to(tl.int64) * query_s
        scale = row_scale(query + row, r < rows, t, DK)
        factor += (of_column(scale, 0) * scaling_log2, of_column(scale, 1) * scaling_log2)
    sums, maximum = initial(TILES)
    acc = zero_quads(((DV + 15) // 16) * TILES)
    if first < last_block:
        KEY_QUARTERS: tl.constexpr = quarters_of(KEY_BITS)
        VALUE_QUARTERS: tl.constexpr = quarters_of(VALUE_BITS)
        divided = ()
        for tile in tl.static_range(TILES):
            r = first_row + 8 * tile + g
            row = batch * query_b + (kv_head * groups + r % groups) * query_h + (r // groups).to(tl.int64) * query_s
            scale = row_scale(query + row, r < rows, t, DK)
            divided += (row_pairs(query + row, r < rows, t, scale, key_channel_scales + head * DK, DK, True),)
        q = rotated(divided, key_rotation, g, t, DKP, KEY_QUARTERS, TILES)
        packed_factor = ()
        for i in tl.static_range(2 * TILES):
            packed_factor += (factor[i] / small_unit(KEY_BITS),)
        packed = zero_quads(value_tiles(DVP, VALUE_BITS) * TILES)
        block0 = batch * blocks_b + kv_head * blocks_h
        for step in tl.range(2 * first, 2 * last_block):
            block = step // 2
            half = step % 2
            at = block0 + block
            allowed = ()
            if MASK:
                for plane in tl.static_range(4):
                    for tile in tl.static_range(TILES):
                        for i in tl.static_range(4):
                            token = block * TOKENS + half * 16 + 32 * plane + 4 * (g // 2) + g % 2 + 2 * (i // 2)
                            r = first_row + 8 * tile + 2 * t + i % 2
                            seen = mask + (sink_count + token).to(tl.int64) * mask_t
                            if MASK == 2:
                                seen += (r // groups) * mask_s
                            allowed += (load_flag(seen, r < rows),)
            packed, sums, maximum = attend_packed(
                packed, sums, maximum, q, packed_factor, cap_log2,
                Half(
                    key_words + at * (4 * DKP * KEY_BITS) + half * (8 * (DKP // KEY_QUARTERS)),
                    value_words + at * (4 * DVP * VALUE_BITS) + half * 8,
                    scales + at * TOKENS + half * 16,
                    key_means + at * DKP,
                ),
                allowed, g, t, C,
            )  # fmt: skip
        acc = rotated_back(packed, value_rotation, g, t, DVP, DV, VALUE_QUARTERS, TILES)
        # Dense tokens are neither in the units of packed ones nor in their probabilities'.
        in_units, in_sums, in_acc = (), (), ()
        for i in tl.static_range(2 * TILES):
            in_units += (maximum[i] if BOUNDS else maximum[i] / small_unit(KEY_BITS),)
            in_sums += (sums[i] * (2.0**-4),)
        for i in tl.static_range(((DV + 15) // 16) * TILES):
            channel = 16 * (i // TILES) + 4 * (g // 2) + g % 2
            f0 = tl.load(value_channel_scales + head * DV + channel, mask=channel < DV, other=1.0).to(tl.float32)
            f1 = tl.load(value_channel_scales + head * DV + channel + 2, mask=channel + 2 < DV, other=1.0).to(
                tl.float32
            )
            quad = scaled(acc[i], 2.0**-4 / small_unit(VALUE_BITS), 2.0**-4 / small_unit(VALUE_BITS))
            in_acc += ((quad[0] / f0, quad[1] / f0, quad[2] / f1, quad[3] / f1),)
        maximum = in_units
        sums = in_sums
        acc = in_acc

    if last > blocks:
        plain = ()
        for tile in tl.static_range(TILES):
            r = first_row + 8 * tile + g
            row = batch * query_b + (kv_head * groups + r % groups) * query_h + (r // groups).to(tl.int64) * query_s
            scale = row_scale(query + row, r < rows, t, DK)
            plain += (row_pairs(query + row, r < rows, t, scale, key_channel_scales, DK, False),)
        low = tl.maximum(first - blocks, 0) * TOKENS
        high = tl.minimum((last - blocks) * TOKENS, dense)
        sink_keys += batch * sink_b + kv_head * sink_h
        sink_values += batch * sink_vb + kv_head * sink_vh
        residual_keys += batch * residual_b + kv_head * residual_h
        residual_values += batch * residual_vb + kv_head * residual_vh
        new_keys += batch * new_b + kv_head * new_h
        new_values += batch * new_vb + kv_head * new_vh
        history = sink_count + residual_count
        for start in tl.range(low, high, 32):
            key_rows, value_rows, inside, allowed = (), (), (), ()
            for group in tl.static_range(2):
                token = ()
                for half in tl.static_range(2):
                    j = start + 16 * group + 8 * half + g
                    sink = j < sink_count
                    slot = residual_start + j - sink_count  # the residual is a ring
                    slot = tl.where(slot >= residual_capacity, slot - residual_capacity, slot)
                    fresh = (j - history).to(tl.int64)
                    k_row = tl.where(sink, sink_keys + j * DK, residual_keys + slot * DK)
                    v_row = tl.where(sink, sink_values + j * DV, residual_values + slot * DV)
                    key_rows += (tl.where(j < history, k_row, new_keys + fresh * new_t),)
                    value_rows += (tl.where(j < history, v_row, new_values + fresh * new_vt),)
                    inside += (j < high,)
                    token += (j,)
                for tile in tl.static_range(TILES):
                    for i in tl.static_range(4):
                        j = token[i // 2]
                        s = (first_row + 8 * tile + 2 * t + i % 2) // groups
                        seen = inside[2 * group + i // 2]
                        if CAUSAL:
                            seen = seen & (j <= history + new_count - queries + s)
                        if MASK:
                            position = tl.where(j < sink_count, j, j + blocks * TOKENS).to(tl.int64) * mask_t
                            if MASK == 2:
                                position += s * mask_s
                            seen = load_flag(mask + position, seen & (s < queries))
                        allowed += (seen,)
            acc, sums, maximum = attend_dense(
                acc, sums, maximum, plain, factor, cap_log2, key_rows, value_rows, inside, allowed, t, DK, DV, BOUNDS,
                TILES,
            )  # fmt: skip

    for tile in tl.static_range(TILES):
        for e in tl.static_range(2):
            r = first_row + 8 * tile + 2 * t + e
            total = column_sum(sums[2 * tile + e])
            shift = maximum[2 * tile + e]
            shift = tl.where(shift == -float("inf"), 0.0, shift)
            if not BOUNDS:
                shift *= factor[2 * tile + e]
            weight = tl.where(total > 0, total, 1.0)
            head_q = kv_head * groups + r % groups
            if SPLIT:
                row = (split * tl.num_programs(1) + head).to(tl.int64) * rows + r
                store32(lse + row, log2_sum(shift, total), (g == 0) & (r < rows))
                at = partial + row * DV
            else:
                if HAS_AUX:
                    aux = tl.load(s_aux + head_q, mask=r < rows, other=0.0).to(tl.float32) * LOG2E
                    weight += tl.exp2(aux - shift)
                at = out + batch * out_b + (r // groups).to(tl.int64) * out_s + head_q * out_h
            inverse = 1.0 / weight
            for chunk in tl.static_range((DV + 15) // 16):
                for half in tl.static_range(2):
                    channel = 16 * chunk + 4 * (g // 2) + g % 2 + 2 * half
                    x = acc[chunk * TILES + tile][2 * half + e] * inverse
                    store_element(at + channel, x, (channel < DV) & (r < rows))
