"""Loud channels of keys: FP8 codes beside those of the others, and queries' products with them.

The loud channels of a head are those with negative channel scales. They are stored as e4m3 bytes, with a mean and a
unit for each block and channel, side by side (`tq_hf.codec.reference`). The bytes of the four tokens of a row, one of
each plane, follow one another: four channels make a whole step of a matrix product, with queries that are 0 in other
planes.
"""

import triton
import triton.language as tl

from ..common.device import AMPERE
from ..common.unpack import scaled, unpack_scales
from ..format import LARGEST_UNIT, MOST_LOUD
from .quantize import FP8_LEVEL_SCALE, FP8_MAX, float_to_e4m3

LOUD_TILE = tl.constexpr(MOST_LOUD)
_LARGEST_UNIT = tl.constexpr(LARGEST_UNIT)


@triton.jit
def coded_scales(factor, LOUD: tl.constexpr):
    """Channel scales of what codes hold: 0 for loud channels where these are apart, else the size."""
    return tl.maximum(factor, 0.0) if LOUD > 0 else tl.abs(factor)


@triton.jit
def coded_divisors(factor, LOUD: tl.constexpr):
    """Divisors, float32, of what codes hold: infinite for loud channels where these are apart, else the size."""
    factor = factor.to(tl.float32)
    return tl.where(factor < 0, float("inf"), factor) if LOUD > 0 else tl.abs(factor)


@triton.jit
def loud_channels_of(channel_scales, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Loud channels of a head, int32 [WIDTH], and the sizes of their channel scales, float32, 0 for none."""
    k = tl.arange(0, TILE)
    factor = tl.load(channel_scales + k, mask=k < HEAD_DIM, other=1.0).to(tl.float32)
    loud = (factor < 0).to(tl.int32)
    rank = tl.where(loud > 0, tl.cumsum(loud, 0) - 1, -1)  # [TILE], among loud channels
    here = rank[:, None] == tl.arange(0, WIDTH)[None, :]  # [TILE, WIDTH]
    index = tl.sum(tl.where(here, k[:, None], 0), 0)
    return index, tl.sum(tl.where(here, -factor[:, None], 0.0), 0)


@triton.jit
def finite_size(x):
    """Size of each element, 0 for those that are not finite."""
    return tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0)


@triton.jit
def loud_unit(largest):
    """Units of an fp16 level, fp16, for the largest elements of channels: twice the power of two below each."""
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.minimum(2 * power, _LARGEST_UNIT).to(tl.float16)


@triton.jit
def store_loud(z0, z1, unit, words, LOUD: tl.constexpr):
    """Store the codes of a block's loud channels.

    Args:
        z0, z1: [64, LOUD] float32 less their means, in the rows of `store_codes`.
        unit: [LOUD] fp16 from `loud_unit`.
        words: Pointer to the first word.
    """
    of_code = unit.to(tl.float32) * FP8_LEVEL_SCALE
    inverse = tl.where(of_code > 0.0, 1.0 / tl.where(of_code > 0.0, of_code, 1.0), 0.0)[None, :]
    i, group = tl.arange(0, 64)[:, None], tl.arange(0, LOUD // 4)[None, :]
    at = words + (8 * (i >> 4) + (i & 7)) * LOUD + ((i >> 3) & 1) * (LOUD // 4) + group
    byte = 8 * tl.arange(0, 4)[None, None, :]
    for half in tl.static_range(2):
        z = (z0 if half == 0 else z1) * inverse
        codes = float_to_e4m3(tl.clamp(tl.where(z == z, z, 0.0), -FP8_MAX, FP8_MAX))
        tl.store(at + half * (LOUD // 2), tl.sum(tl.reshape(codes, [64, LOUD // 4, 4]) << byte, 2))


_ASM = tl.constexpr("""{ .reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424; shr.u32 c, a, 1; shr.u32 d, b, 1;
and.b32 c, c, 0x3f803f80; and.b32 d, d, 0x3f803f80;
lop3.b32 $0, c, a, 0x80008000, 0xf8; lop3.b32 $1, d, b, 0x80008000, 0xf8; }""")
"""Four e4m3 bytes to fp16 levels."""


@triton.jit
def _levels(codes, ASM: tl.constexpr):
    """Convert e4m3 bytes (int8) to fp16, 2**-8 times their value."""
    if ASM >= AMPERE:
        return tl.inline_asm_elementwise(_ASM, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        x = codes.to(tl.uint8, bitcast=True).to(tl.uint16)
        return (((x & 0x7F) << 7) | ((x & 0x80) << 8)).to(tl.float16, bitcast=True)


@triton.jit
def _means_and_units(pairs, ASM: tl.constexpr):
    """Split int32 pairs into their fp16 means and units."""
    if ASM >= AMPERE:
        asm: tl.constexpr = "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;"
        return tl.inline_asm_elementwise(asm, "=r,=r,r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        return unpack_scales(pairs)


@triton.jit
def loud_rows(words, mean_at, LOUD: tl.constexpr, ASM: tl.constexpr):
    """Load the loud channels of a block's keys: [32, 4 * LOUD] fp16, a row's tokens of planes 0 to 3 side by side.

    Args:
        words: Pointer to their first word.
        mean_at: Pointer to their first mean.
    """
    row, column = tl.arange(0, 32)[:, None], tl.arange(0, 4 * LOUD)[None, :]
    levels = _levels(tl.load(words.to(tl.pointer_type(tl.int8), bitcast=True) + (row * (4 * LOUD) + column)), ASM)
    mean, unit = _means_and_units(tl.load(mean_at.to(tl.pointer_type(tl.int32), bitcast=True) + column % LOUD), ASM)
    return scaled(levels, unit, mean, ASM)


@triton.jit
def load_loud(words, mean_at, LOUD: tl.constexpr, ASM: tl.constexpr):
    """Load a block's loud channels: levels of its first and last 64 tokens [64, LOUD_TILE] fp16, then units and means
    [1, LOUD_TILE]. Arguments are those of `loud_rows`."""
    token, j = tl.arange(0, 64)[:, None], tl.arange(0, LOUD_TILE)[None, :]
    at = words.to(tl.pointer_type(tl.int8), bitcast=True) + (token % 32 * (4 * LOUD) + token // 32 * LOUD + j)
    first = _levels(tl.load(at, mask=j < LOUD, other=0), ASM)
    last = _levels(tl.load(at + 2 * LOUD, mask=j < LOUD, other=0), ASM)
    pairs = tl.load(mean_at.to(tl.pointer_type(tl.int32), bitcast=True) + j, mask=j < LOUD, other=0)
    mean, unit = _means_and_units(pairs, ASM)
    return first, last, unit, mean
