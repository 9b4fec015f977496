"""Quantize a block's rotated rows and pack their codes: the half of the encoder that knows levels and bits. (`trellis`
chooses the codes of 2 and 3 bits.)

clamp((x - b) * 2**30, 0, 1) is [x > b], exactly, and one instruction of the FMA pipe (FADD.SAT), where a compare and a
select are two of the half-rate ALU pipe. The levels carry their index in mantissa bits that no fp16 number uses, so one
sum of these steps gives both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import format as block_format
from ..format import CODE
from . import trellis
from .trellis import HIGH_BYTES, LOW_BYTES, LOW_HALVES, inverse_root, picked, product_unit

STEP = tl.constexpr(2.0**30)
"""Scale of the staircase's arguments: neighbouring fp32 numbers then differ by more than 1."""
INDEX_UNIT = tl.constexpr(2.0**-21)
"""Unit of an index within a level: the last mantissa bit of an fp32 in [4, 8). fp16 levels leave eight bits free."""
HALF_MAX = tl.constexpr(65504.0)
FP8_MAX = tl.constexpr(block_format.FP8_MAX)
FP8_LEVEL_SCALE = tl.constexpr(block_format.FP8_LEVEL_SCALE)


@triton.constexpr_function
def part_width(tile):
    """Number of channels encoded at a time, of `tile` padded ones: registers hold two tiles of 256."""
    return min(tile, 256)


@triton.jit
def part_channels(part, DIM: tl.constexpr, TILE: tl.constexpr):
    """Channels of part `part`, `[part_width(TILE)]` in the order of quarters, and a flag for each that exists."""
    QUARTER: tl.constexpr = part_width(TILE) // 4
    n = tl.arange(0, part_width(TILE))
    column = part * QUARTER + n % QUARTER
    return n // QUARTER * (DIM // 4) + column, column < DIM // 4


@triton.jit
def to_half(x):
    """Convert to float16 with saturation: large numbers stay finite, NaN stays NaN."""
    return tl.clamp(x, -HALF_MAX, HALF_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)


@triton.jit
def float_to_e4m3(x):
    """fp32 to e4m3 bytes (as int32), to nearest even; |x| <= 448."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal: drop 20 mantissa bits and rebias the exponent by 7 - 127. Below 2**-6: adding 2**14 leaves multiples of
    # 2**-9 in the mantissa.
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - (120 << 23)) >> 20
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude >= 0x3C800000, normal, subnormal) | ((bits >> 24) & 0x80)


@triton.jit
def _fp8_scale(largest, DIM: tl.constexpr):
    """fp16 scales of rows with largest element `largest`, times sqrt(DIM)."""
    return to_half(largest * (DIM**-0.5 / (FP8_MAX * FP8_LEVEL_SCALE)))


@triton.jit
def _quantize_fp8(z, largest, DIM: tl.constexpr):
    """Codes `[32, part_width(TILE)]` int32 and scales `[32]` fp16 of the rows `z / sqrt(DIM)`. `largest` are the
    largest magnitudes over all channels, or None if `z` has all."""
    scale = _fp8_scale(tl.max(tl.abs(z), axis=1) if largest is None else largest, DIM)
    unit = scale.to(tl.float32) * FP8_LEVEL_SCALE  # [32]
    inverse = tl.where(unit > 0.0, DIM**-0.5 / tl.where(unit > 0.0, unit, 1.0), 0.0)
    # The scale's rounding to fp16 can push the largest channel past 448.
    x = tl.clamp(z * inverse[:, None], -FP8_MAX, FP8_MAX)
    return float_to_e4m3(x), scale


@triton.constexpr_function
def _magnitudes(bits):
    return tuple(n / 64 for n in CODE[bits].levels)


@triton.jit
def _quantize(z, square, part, BITS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr):
    """Find the indices and signs of the nearest levels, for part `part` of a plane.

    Args:
        z: `[32, part_width(TILE)]` float32.
        square: `[32]` sums of squares of all channels.

    Returns:
        index: uint32 with the index of the magnitude in the low three bits.
        sign: uint32 with the sign in the top bit.
        inner: `[32]` sums of level times channel.
    """
    # Shift every biased level into [4, 8), where fp32 has one exponent.
    BIAS: tl.constexpr = 4.0
    LEVELS: tl.constexpr = _magnitudes(BITS)
    inverse = inverse_root(square * (1 / DIM)) * STEP  # [32]
    # The subtrahend makes zeros negative, as the boundaries do in the reference, and vanishes in any other sum.
    x = tl.fma(z, tl.broadcast_to(inverse[:, None], z.shape), tl.full(z.shape, -1e-30, tl.float32))
    z = tl.abs(z)
    a = tl.abs(x)
    biased = tl.full(z.shape, LEVELS[0] + BIAS, tl.float32)
    for i in tl.static_range(7):
        step = tl.clamp(a - (LEVELS[i] + LEVELS[i + 1]) / 2 * STEP, 0.0, 1.0)
        biased += step * (LEVELS[i + 1] - LEVELS[i] + INDEX_UNIT)
    level = biased - BIAS
    if DIM != TILE:
        _, inside = part_channels(part, DIM, TILE)
        level = tl.where(inside[None, :], level, 0.0)
    inner = tl.sum(z * level, axis=1)
    return biased.to(tl.uint32, bitcast=True), x.to(tl.uint32, bitcast=True), inner


@triton.jit
def _planes(tile):
    """Split a tile `[64, *]` into two planes `[32, *]`: its rows r and r + 8 (of 16) are one row of both."""
    if len(tile.shape) == 1:
        low, high = tl.split(tl.permute(tl.reshape(tile, [4, 2, 8]), [0, 2, 1]))
        return tl.reshape(low, [32]), tl.reshape(high, [32])
    else:
        low, high = tl.split(tl.permute(tl.reshape(tile, [4, 2, 8, tile.shape[1]]), [0, 2, 3, 1]))
        return tl.reshape(low, [32, tile.shape[1]]), tl.reshape(high, [32, tile.shape[1]])


@triton.jit
def _joined(planes):
    """Join the tensors of planes 0 to 3 into one, `[..., 2, 2]`: odd or even plane, then first or last two."""
    return tl.join(tl.join(planes[0], planes[1]), tl.join(planes[2], planes[3]))


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _row_sums(planes):
    """Sums over T and C of four planes `[R, T, C]`, in one exchange between threads."""
    return tl.reduce(tl.reduce(planes, 2, _add4), 1, _add4)


@triton.jit
def _merge_neighbours(words, SHIFT: tl.constexpr, IS_VALUE: tl.constexpr, DIM: tl.constexpr):
    """Words of e = 0 and, shifted, e = 1: `[32, D]` to `[32, D / 2]` for keys, to `[16, D]` for values."""
    if IS_VALUE:
        shift = (tl.arange(0, 2) * SHIFT)[None, :, None]
        return tl.sum(tl.reshape(words, [16, 2, DIM]) << shift, axis=1)
    else:
        even, odd = tl.split(tl.reshape(words, [32, DIM // 2, 2]))
        return even | odd << SHIFT


@triton.jit
def _store_words(pointer, words, row_stride, tile_stride, column_stride, columns, part, PARTS: tl.constexpr):
    """Store words `[R, T, C]` of part `part`; the first `columns` of C, counted over all parts, exist."""
    row = tl.arange(0, words.shape[0])[:, None, None]
    tile = tl.arange(0, words.shape[1])[None, :, None]
    column = part * words.shape[2] + tl.arange(0, words.shape[2])[None, None, :]
    offsets = row * row_stride + tile * tile_stride + column * column_stride
    words = words.to(tl.int32, bitcast=True)
    if columns == words.shape[2] * PARTS:
        tl.store(pointer + offsets, words)
    else:
        tl.store(pointer + offsets, words, mask=column < columns)


@triton.jit
def row_sizes(y, BITS: tl.constexpr):
    """Per-row scale statistic of two planes, `[32]` each: sum of squares, or largest magnitude for FP8. `y` as in
    `store_codes`."""
    if CODE[BITS].is_fp8:
        even, odd = _planes(y)
        even, odd = tl.max(tl.abs(even), axis=1), tl.max(tl.abs(odd), axis=1)
    else:
        even, odd = _planes(tl.sum(y * y, axis=1))
    return even, odd


@triton.jit
def _sizes_of(y, sizes, HALF: tl.constexpr, BITS: tl.constexpr):
    """`row_sizes` of half HALF: from those of both halves, or computed if they are None."""
    if sizes is None:
        even, odd = row_sizes(y, BITS)
    else:
        even, odd = sizes[2 * HALF], sizes[2 * HALF + 1]
    return even, odd


@triton.jit
def _scales_of(inner, size, IS_VALUE: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr):
    """fp16 scales of rows, from their sums of level times channel and from `row_sizes`."""
    if CODE[BITS].is_fp8:
        return _fp8_scale(size, DIM)
    else:
        if CODE[BITS].is_trellis:
            inner = inner * tl.sqrt(size * (1 / DIM)) * product_unit(BITS, IS_VALUE)
        # NaN compares unequal to 0: a row that is not finite has no scale.
        return to_half(tl.where(inner == 0.0, 0.0, size / tl.where(inner == 0.0, 1.0, inner)) * DIM**-0.5)


@triton.jit
def _result(inner, size, sizes, IS_VALUE: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr):
    """Result of `store_codes` for rows: scales if it has all of their channels, which take half of the bytes."""
    return _scales_of(inner, size, IS_VALUE, BITS, DIM) if sizes is None else inner


@triton.jit
def store_scales(inner, sizes, scales, IS_VALUE: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr):
    """Store a block's scales.

    Args:
        inner: Results of `store_codes`, summed over parts.
        sizes: Argument `sizes` of `store_codes`.
        scales: Pointer to the block's first scale of this kind, fp16 with stride 2.
    """
    scale = inner if sizes is None else _scales_of(inner, _joined(sizes), IS_VALUE, BITS, DIM)  # [32, 2, 2]
    plane = 32 * tl.arange(0, 2)
    token = tl.arange(0, 32)[:, None, None] + plane[None, :, None] + 2 * plane[None, None, :]
    tl.store(scales + token * 2, scale)


@triton.jit
def store_codes(
    y0,  # [64, part_width(TILE)] sqrt(D) times part `part` of the rotated (and centred) rows of planes 0 and 1
    y1,  # the same of planes 2 and 3
    sizes,  # `row_sizes` of four planes and all channels, or None if `y0` and `y1` have all channels
    words,  # block's first word
    part, IS_VALUE: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Quantize and pack a part of a block and store its words.

    Returns:
        `[32, 2, 2]` by token: sums of level times channel (undefined for FP8), or scales if `sizes` is None.
    """
    WIDTH: tl.constexpr = part_width(TILE)
    PARTS: tl.constexpr = TILE // WIDTH
    QUARTER: tl.constexpr = WIDTH // 4
    # Words [R, T, C]: R rows (keys: tokens; values: pairs of tokens), T channel quarters, C channels of one (keys:
    # pairs of them).
    if IS_VALUE:
        ROWS: tl.constexpr = 16
        COLUMNS: tl.constexpr = QUARTER
        columns: tl.constexpr = DIM // 4
        row_stride: tl.constexpr = 1
        column_stride: tl.constexpr = 16
    else:
        ROWS: tl.constexpr = 32
        COLUMNS: tl.constexpr = QUARTER // 2
        columns: tl.constexpr = DIM // 8
        row_stride: tl.constexpr = DIM // 2 // CODE[BITS].quarters
        column_stride: tl.constexpr = 1
    results = ()
    if CODE[BITS].is_fp8:
        for half in tl.static_range(2):
            even, odd = _planes(y0 if half == 0 else y1)
            even, even_scale = _quantize_fp8(even, None if sizes is None else sizes[2 * half], DIM)
            odd, scale = _quantize_fp8(odd, None if sizes is None else sizes[2 * half + 1], DIM)
            results += (even_scale, scale)
            word = _merge_neighbours((even << 8 | odd).to(tl.uint32, bitcast=True), 16, IS_VALUE, WIDTH)
            # Move both signs of a half word to its top, two codes at a time.
            word = (word & 0x807F807F) | ((word >> 1) & 0x3F803F80) | ((word & 0x00800080) << 7)
            word = tl.reshape(word, [ROWS, 4, COLUMNS])
            _store_words(
                words + 16 * half * DIM, word, row_stride, columns * column_stride, column_stride, columns, part, PARTS
            )
        return _joined(results)
    elif not CODE[BITS].is_trellis:
        for half in tl.static_range(2):
            y = y0 if half == 0 else y1
            even_size, odd_size = _sizes_of(y, sizes, half, BITS)
            even, odd = _planes(y)
            even_index, even_x, even_inner = _quantize(even, even_size, part, BITS, DIM, TILE)
            results += (_result(even_inner, even_size, sizes, IS_VALUE, BITS, DIM),)
            index, x, inner = _quantize(odd, odd_size, part, BITS, DIM, TILE)
            results += (_result(inner, odd_size, sizes, IS_VALUE, BITS, DIM),)
            # Move whole bytes, because one permute takes those of two codes; their bits are picked below.
            half_word = picked(even_index, index, LOW_BYTES, ASM)
            half_signs = picked(even_x, x, HIGH_BYTES, ASM)
            if half == 0:
                word = half_word
                signs = half_signs & 0x00800080
            else:
                word = picked(word, half_word, LOW_HALVES, ASM) & 0x07070707
                signs |= (half_signs >> 4) & 0x00080008
        result = _joined(results)
        word = _merge_neighbours(word, 4, IS_VALUE, WIDTH)
        signs = _merge_neighbours(signs, 8, IS_VALUE, WIDTH)
        word = tl.reshape(word | signs, [ROWS, 4, COLUMNS])
        _store_words(words, word, row_stride, columns * column_stride, column_stride, columns, part, PARTS)
        return result
    else:
        pairs = ()
        for half in tl.static_range(2):
            y = y0 if half == 0 else y1
            even_size, odd_size = _sizes_of(y, sizes, half, BITS)
            even, odd = _planes(y)
            even = trellis.rounded(even, even_size, BITS, DIM, ASM)
            odd = trellis.rounded(odd, odd_size, BITS, DIM, ASM)
            pairs += (picked(even, odd, LOW_BYTES, ASM),)
            results += (even_size, odd_size)
        a, b, c, d = trellis.neighbours(picked(pairs[0], pairs[1], LOW_HALVES, ASM), IS_VALUE)  # 4 x [ROWS, 2, COLUMNS]
        if CODE[BITS].magnitudes:
            word = trellis.codes3(a, b, c, d, ASM)
        else:
            word = trellis.codes2(a, b, c, d, ASM)
        _store_words(words, word, row_stride, 4 * DIM, column_stride, columns, part, PARTS)
        if CODE[BITS].has_sign_words:
            lower = trellis.signs_of(a) | trellis.signs_of(c) << 8
            upper = trellis.signs_of(b) | trellis.signs_of(d) << 8
            signs = tl.sum((lower | upper >> 2) >> (4 * tl.arange(0, 2))[None, :, None], axis=1)
            signs = tl.expand_dims(signs, 1)
            _store_words(words + 8 * DIM, signs, row_stride, 0, column_stride, columns, part, PARTS)
        levels = trellis.sizes(word, BITS, ASM)
        product = trellis.products(a, b, c, d, levels, IS_VALUE, BITS, ASM)
        inner = _joined(_row_sums(product[:4]))
        if IS_VALUE:
            inner = tl.join(inner, _joined(_row_sums(product[4:])))
            inner = tl.reshape(tl.permute(inner, [0, 3, 1, 2]), [32, 2, 2])
        return _result(inner.to(tl.float32), _joined(results), sizes, IS_VALUE, BITS, DIM)
