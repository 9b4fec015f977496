"""Contributions of tokens to attention in `tq_kernels.turing.fragments`: half a packed block, or 32 dense tokens."""

from collections import namedtuple

import triton
import triton.language as tl

from ..common import unpack
from ..common.schedule import BlockParts
from ..common.softmax import bounded
from ..common.unpack import PROBABILITY_BITS, unpack_scales
from ..format import CODE
from .fragments import (
    LANES,
    decayed,
    load32,
    load_element,
    load_pair,
    multiply_add,
    ones,
    pair_of,
    transposed,
    value_tiles,
    weights,
    zero_quads,
)


@triton.jit
def load_tiles(words, mask, BITS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr):
    """Load a lane's words of a row: pairs from each of the block's tiles of TILE words."""
    TILES: tl.constexpr = CODE[BITS].tiles
    tiles = ()
    for tile in tl.static_range(TILES):
        tiles += (load_pair(words + tile * TILE, mask, WIDE),)
    return tiles


@triton.jit
def _levels8(word):
    """Unpack an FP8 word of tile u into planes 2u and 2u + 1, pairs of levels."""
    return tl.inline_asm_elementwise(unpack._ASM8, "=r,=r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)


@triton.jit
def levels(tiles, STEP: tl.constexpr, QUARTER: tl.constexpr, BITS: tl.constexpr):
    """Unpack word STEP of each pair from `load_tiles` into four planes of one quarter (all channels at 4 and 8 bits):
    pairs of levels, small ones where there are any."""
    if CODE[BITS].is_fp8:
        return _levels8(tiles[0][STEP]) + _levels8(tiles[1][STEP])
    else:
        SIGNS: tl.constexpr = CODE[BITS].tiles - 1
        TILE: tl.constexpr = QUARTER // CODE[BITS].tile_quarters
        return unpack.looked_up(tiles[TILE][STEP], tiles[SIGNS][STEP], QUARTER, BITS, True, tl.int32, 1)


@triton.jit
def load_rows(rows, t, valid, WIDTH: tl.constexpr, QUARTERS: tl.constexpr):
    """Load operands b of one tile of 8 query rows (or a key mean as operand a): for every quarter, chunk of 16 channels
    and step, the pair of channels from 16 chunk + 4 t + 2 step on.

    Args:
        rows: Pointers [32] to fp16 rows, for lane (g, t) row g.
        valid: [32] whether the row exists; others read 0.
        WIDTH: Number of channels of a quarter.
    """
    pairs = ()
    for quarter in tl.static_range(QUARTERS):
        for chunk in tl.static_range((WIDTH + 15) // 16):
            for step in tl.static_range(2):
                channel = 16 * chunk + 4 * t + 2 * step
                at = (rows + (quarter * WIDTH + channel)).to(tl.pointer_type(tl.int32), bitcast=True)
                pairs += (load32(at, valid & (channel < WIDTH)),)
    return pairs


@triton.jit
def packed_scores(words, q, g, t, DIM: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr):
    """level . q of half a block's tokens: 4 * TILES quads; plane p and row tile i are quad p * TILES + i.

    Args:
        words: Pointer to the block's key words; at 4 and 8 bits those of the half's first row.
        q: TILES tuples of `load_rows`.
    """
    QUARTERS: tl.constexpr = CODE[BITS].quarters
    WIDTH: tl.constexpr = DIM // QUARTERS
    TILE: tl.constexpr = 16 * WIDTH
    ROW: tl.constexpr = WIDTH // 2
    CHUNKS: tl.constexpr = (WIDTH + 15) // 16
    at = words + (4 * (g // 2) + g % 2) * ROW + 2 * t
    s = zero_quads(4 * TILES)
    for chunk in tl.static_range(CHUNKS):
        mask = 16 * chunk + 4 * t < WIDTH
        low = load_tiles(at + 8 * chunk, mask, BITS, TILE, ROW % 2 == 0)
        high = load_tiles(at + (8 * chunk + 2 * ROW), mask, BITS, TILE, ROW % 2 == 0)
        for quarter in tl.static_range(QUARTERS):
            for step in tl.static_range(2):
                a0 = levels(low, step, quarter, BITS)
                a1 = levels(high, step, quarter, BITS)
                new = ()
                for plane in tl.static_range(4):
                    for tile in tl.static_range(TILES):
                        b = q[tile][2 * (quarter * CHUNKS + chunk) + step]
                        new += (multiply_add(s[plane * TILES + tile], a0[plane], a1[plane], b),)
                s = new
    return s


@triton.jit
def add_packed_values(acc, words, p, g, t, DIM: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr):
    """acc + level^T p of half a block: quads of 16 channels each; channel tile m and row tile i are quad m * TILES + i.

    Args:
        words: Pointer to the block's value words of the half's first row.
        p: Operands b; plane, step and row tile i are pair (2 * plane + step) * TILES + i.
    """
    QUARTERS: tl.constexpr = CODE[BITS].quarters
    HEIGHT: tl.constexpr = DIM // QUARTERS
    TILE: tl.constexpr = HEIGHT * 16
    CHUNKS: tl.constexpr = (HEIGHT + 15) // 16
    at = words + g * 16 + 2 * t
    # Go over chunks within quarters, as words hold them; quads are put in the order of channels at the end.
    found = ()
    for chunk in tl.static_range(CHUNKS):
        low = load_tiles(at + 256 * chunk, 16 * chunk + g < HEIGHT, BITS, TILE, True)
        high = load_tiles(at + (256 * chunk + 128), 16 * chunk + 8 + g < HEIGHT, BITS, TILE, True)
        for quarter in tl.static_range(QUARTERS):
            quads = ()
            for tile in tl.static_range(TILES):
                quads += (acc[(quarter * CHUNKS + chunk) * TILES + tile],)
            for step in tl.static_range(2):
                a0 = levels(low, step, quarter, BITS)
                a1 = levels(high, step, quarter, BITS)
                for plane in tl.static_range(4):
                    new = ()
                    for tile in tl.static_range(TILES):
                        new += (multiply_add(quads[tile], a0[plane], a1[plane], p[(2 * plane + step) * TILES + tile]),)
                    quads = new
            found += quads
    if QUARTERS == 1:
        return found
    else:
        ordered = ()
        for quarter in tl.static_range(QUARTERS):
            for chunk in tl.static_range(CHUNKS):
                for tile in tl.static_range(TILES):
                    ordered += (found[(chunk * QUARTERS + quarter) * TILES + tile],)
        return ordered


@triton.jit
def mean_scores(mean, q, COUNT: tl.constexpr, TILES: tl.constexpr):
    """mean . q, the same for all tokens: TILES quads. `mean` is COUNT pairs of `load_rows`."""
    s = zero_quads(TILES)
    for i in tl.static_range(COUNT):
        new = ()
        for tile in tl.static_range(TILES):
            new += (multiply_add(s[tile], mean[i], mean[i], q[tile][i]),)
        s = new
    return s


@triton.jit
def _scaled_pair(levels, unit, mean):
    """levels * unit + mean of pairs."""
    return tl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [levels, unit, mean], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _loud_pair(row, column, unit, mean):
    """Loud channels `column` and `column` + 1 of the row of bytes at pointers `row`, a pair."""
    codes = tl.load((row + column).to(tl.pointer_type(tl.uint16), bitcast=True)).to(tl.uint32)
    high = ((codes & 0xFF) << 8) | ((codes & 0xFF00) << 16)
    levels = ((high >> 1) & 0x3F803F80) | (high & 0x80008000)
    return _scaled_pair(levels.to(tl.int32, bitcast=True), unit, mean)


@triton.jit
def loud_pairs(rows, column, valid, LOUD: tl.constexpr):
    """Load a pair of loud channels for each step of a product (`codec.loud.loud_rows`)."""
    pairs = ()
    for step in tl.static_range(LOUD // 2):
        at = rows + (8 * step + column) % LOUD
        pairs += (load32(at.to(tl.pointer_type(tl.int32), bitcast=True), valid),)
    return pairs


@triton.jit
def add_loud_scores(s, words, q, means, g, t, LOUD: tl.constexpr, TILES: tl.constexpr):
    """s + the products of half a block's loud channels with `q`, TILES tuples of `loud_pairs`; quads as in
    `packed_scores`. `words` and `means` point to the half's first row and to the first mean."""
    column, means = 2 * t, means + tl.zeros([LANES], tl.int32)
    low = words.to(tl.pointer_type(tl.int8), bitcast=True) + (4 * (g // 2) + g % 2) * (4 * LOUD)
    means = means.to(tl.pointer_type(tl.int32), bitcast=True)
    for step in tl.static_range(LOUD // 2):
        channel = (8 * step + column) % LOUD
        first, second = load32(means + channel, t >= 0), load32(means + channel + 1, t >= 0)
        mean = (first & 0xFFFF) | (second << 16)
        unit = ((first >> 16) & 0xFFFF) | (second & -0x10000)
        top = _loud_pair(low, 8 * step + column, unit, mean)
        bottom = _loud_pair(low + 8 * LOUD, 8 * step + column, unit, mean)
        new = ()
        for plane in tl.static_range(4):
            for tile in tl.static_range(TILES):
                quad = s[plane * TILES + tile]
                if (8 * step) // LOUD <= plane and plane <= (8 * step + 7) // LOUD:
                    own = tl.where((8 * step + column) // LOUD == plane, q[tile][step], 0)
                    quad = multiply_add(quad, top, bottom, own)
                new += (quad,)
        s = new
    return s


@triton.jit
def load_elements(row, valid, t, CHUNK: tl.constexpr, DIM: tl.constexpr):
    """Load channels 16 CHUNK + 4 t to + 3 of dense rows, float32; `row` are [32] pointers; 0 where not `valid`."""
    channel = 16 * CHUNK + 4 * t
    return (
        load_element(row + channel, valid & (channel < DIM)),
        load_element(row + channel + 1, valid & (channel + 1 < DIM)),
        load_element(row + channel + 2, valid & (channel + 2 < DIM)),
        load_element(row + channel + 3, valid & (channel + 3 < DIM)),
    )


@triton.jit
def load_dense(row, valid, t, CHUNK: tl.constexpr, DIM: tl.constexpr, ALIGNED: tl.constexpr):
    """Load the same channels as two pairs; ALIGNED: rows are fp16 and aligned to 8 bytes."""
    if ALIGNED:
        channel = 16 * CHUNK + 4 * t
        pairs = load_pair((row + channel).to(tl.pointer_type(tl.int32), bitcast=True), valid & (channel < DIM), True)
        return pairs[0], pairs[1]
    else:
        x = load_elements(row, valid, t, CHUNK, DIM)
        return pair_of(x[0], x[1]), pair_of(x[2], x[3])


@triton.jit
def dense_scores(low, high, low_valid, high_valid, q, t, DIM: tl.constexpr, TILES: tl.constexpr):
    """k . q of 16 dense tokens, token g at `low` and g + 8 at `high` (pointers [32]): TILES quads."""
    s = zero_quads(TILES)
    for chunk in tl.static_range((DIM + 15) // 16):
        a0 = load_dense(low, low_valid, t, chunk, DIM, False)
        a1 = load_dense(high, high_valid, t, chunk, DIM, False)
        for step in tl.static_range(2):
            new = ()
            for tile in tl.static_range(TILES):
                new += (multiply_add(s[tile], a0[step], a1[step], q[tile][2 * chunk + step]),)
            s = new
    return s


@triton.jit
def add_dense_values(acc, row, valid, p, t, DIM: tl.constexpr, TILES: tl.constexpr):
    """acc + v^T p of 8 dense tokens, token g at `row` (pointers [32]).

    Row i of channel tile m is channel 16 m + 4 (i % 8 // 2) + i % 2, and 2 more for i >= 8.

    Args:
        p: Operands b, one of each row tile.
    """
    new = ()
    for chunk in tl.static_range((DIM + 15) // 16):
        v = load_dense(row, valid, t, chunk, DIM, False)
        a0 = transposed(v[0])
        a1 = transposed(v[1])
        for tile in tl.static_range(TILES):
            new += (multiply_add(acc[chunk * TILES + tile], a0, a1, p[tile]),)
    return new


PackedShape = namedtuple("PackedShape", "DKP DVP KEY_BITS VALUE_BITS MASKED BOUNDS TILES LOUD")
"""Constants of `add_half_block`."""


@triton.jit
def add_half_block(
    acc, sums, maximum, q, q_loud, factor, cap_log2, half: BlockParts, allowed, g, t, C: tl.constexpr
):  # fmt: skip
    """Attend to half a block.

    Args:
        acc, sums, maximum: Sums so far of `add_packed_values` and `decayed`, and maximum of `weights`.
        q: TILES tuples of `load_rows`, rotated.
        q_loud: TILES tuples of `loud_pairs`.
        factor: 2 * TILES factors to base-2 logits, over `Code.small_unit`.
        half: Pointers to its first rows of words, of loud channels and of scales, and to the block's means.
        allowed: If MASKED, flags; plane p, row tile i and element j of its quad are flag 4 * (p * TILES + i) + j.
        C: A `PackedShape`.
    """
    KEY_QUARTERS: tl.constexpr = CODE[C.KEY_BITS].quarters
    KEY_WIDTH: tl.constexpr = C.DKP // KEY_QUARTERS
    VALUE_TILES: tl.constexpr = value_tiles(C.DVP, C.VALUE_BITS)
    s = packed_scores(half.key_words, q, g, t, C.DKP, C.KEY_BITS, C.TILES)
    means = load_rows(half.means + tl.zeros([LANES], tl.int32), t, t >= 0, KEY_WIDTH, KEY_QUARTERS)
    shared = mean_scores(means, q, 2 * KEY_QUARTERS * ((KEY_WIDTH + 15) // 16), C.TILES)
    shared = shared + shared + shared + shared
    if C.LOUD > 0:
        shared = add_loud_scores(shared, half.loud, q_loud, half.means + C.DKP, g, t, C.LOUD, C.TILES)
    x, value_scale = (), ()
    for plane in tl.static_range(4):
        key_scale = ()
        for i in tl.static_range(2):
            at = half.scales + (32 * plane + 4 * (g // 2) + g % 2 + 2 * i)
            scales = unpack_scales(load32(at, t >= 0))
            key_scale += (scales[0].to(tl.float32),)
            value_scale += (scales[1].to(tl.float32),)
        for tile in tl.static_range(C.TILES):
            quad = ()
            for i in tl.static_range(4):
                logit = s[plane * C.TILES + tile][i] * key_scale[i // 2]
                logit += shared[plane * C.TILES + tile][i] * CODE[C.KEY_BITS].small_unit
                if C.BOUNDS:
                    logit = bounded(logit * factor[2 * tile + i % 2], cap_log2, C.BOUNDS)
                if C.MASKED:
                    logit = tl.where(allowed[4 * (plane * C.TILES + tile) + i], logit, -float("inf"))
                quad += (logit,)
            x += (quad,)
    gain = ones(C.TILES) if C.BOUNDS else factor
    p, maximum, decay = weights(x, maximum, gain, PROBABILITY_BITS, 4, C.TILES, C.MASKED)
    acc, sums = decayed(acc, sums, decay, p, VALUE_TILES, 4, C.TILES)
    b = ()
    for plane in tl.static_range(4):
        for i in tl.static_range(2):
            for tile in tl.static_range(C.TILES):
                quad = p[plane * C.TILES + tile]
                v = value_scale[2 * plane + i]
                b += (transposed(pair_of(quad[2 * i] * v, quad[2 * i + 1] * v)),)
    acc = add_packed_values(acc, half.value_words, b, g, t, C.DVP, C.VALUE_BITS, C.TILES)
    return acc, sums, maximum


@triton.jit
def add_dense_tokens(
    acc, sums, maximum, q, factor, cap_log2, key_rows, value_rows, inside, allowed, t,
    DK: tl.constexpr, DV: tl.constexpr, BOUNDS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Attend to 32 dense tokens; a lane has token g of each eight.

    Args:
        key_rows, value_rows: Four pointers [32] each to rows of the model's dtype.
        inside: Four flags [32], whether the token exists.
        allowed: Flags; group h of 16 tokens, row tile i and element j of its quad are flag 4 * (h * TILES + i) + j.
    """
    x = ()
    for group in tl.static_range(2):
        s = dense_scores(
            key_rows[2 * group], key_rows[2 * group + 1], inside[2 * group], inside[2 * group + 1],
            q, t, DK, TILES,
        )  # fmt: skip
        for tile in tl.static_range(TILES):
            quad = ()
            for i in tl.static_range(4):
                logit = s[tile][i]
                if BOUNDS:
                    logit = bounded(logit * factor[2 * tile + i % 2], cap_log2, BOUNDS)
                quad += (tl.where(allowed[4 * (group * TILES + tile) + i], logit, -float("inf")),)
            x += (quad,)
    gain = ones(TILES) if BOUNDS else factor
    p, maximum, decay = weights(x, maximum, gain, 0.0, 2, TILES, True)
    acc, sums = decayed(acc, sums, decay, p, (DV + 15) // 16, 2, TILES)
    for i in tl.static_range(4):
        b = ()
        for tile in tl.static_range(TILES):
            quad = p[i // 2 * TILES + tile]
            b += (transposed(pair_of(quad[2 * (i % 2)], quad[2 * (i % 2) + 1])),)
        acc = add_dense_values(acc, value_rows[i], inside[i], b, t, DV, TILES)
    return acc, sums, maximum
