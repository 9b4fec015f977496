"""Loud channels of keys: FP8 codes beside those of the others, and queries' products with them.

The loud channels of a head are those with negative channel scales. They are stored as codes of 8 bits, with a mean and
a unit for each block and channel (`tq_hf.codec.reference`). A matrix product takes 16 channels at least: tiles of loud
channels have LOUD_TILE columns, of which the first are real.
"""

import triton
import triton.language as tl

from ..common.unpack import load_levels, scaled
from ..format import MOST_LOUD
from .quantize import FP8_LEVEL_SCALE, FP8_MAX, float_to_e4m3, merge_neighbours, planes_of, signs_first

LOUD_TILE = tl.constexpr(MOST_LOUD)
LARGEST_UNIT = tl.constexpr(2.0**15)


@triton.jit
def coded_scales(factor, LOUD: tl.constexpr):
    """Channel scales of what codes hold: 0 for loud channels where these are apart, else the size."""
    return tl.maximum(factor, 0.0) if LOUD > 0 else tl.abs(factor)


@triton.jit
def loud_rank(factor):
    """Place of each channel among the loud ones, from channel scales [D], or -1: int32 [D]."""
    loud = (factor < 0).to(tl.int32)
    return tl.where(loud > 0, tl.cumsum(loud, 0) - 1, -1)


@triton.jit
def loud_channels_of(channel_scales, HEAD_DIM: tl.constexpr, TILE: tl.constexpr):
    """Loud channels of a head, int32 [LOUD_TILE], and the sizes of their channel scales, float32, 0 for none."""
    k = tl.arange(0, TILE)
    factor = tl.load(channel_scales + k, mask=k < HEAD_DIM, other=1.0).to(tl.float32)
    here = loud_rank(factor)[:, None] == tl.arange(0, LOUD_TILE)[None, :]  # [TILE, LOUD_TILE]
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
    return tl.minimum(2 * power, LARGEST_UNIT).to(tl.float16)


@triton.jit
def store_loud(z0, z1, unit, words, LOUD: tl.constexpr):
    """Store the codes of a block's loud channels.

    Args:
        z0, z1: [64, LOUD_TILE] float32 less their means, in the rows of `store_codes`.
        unit: [LOUD_TILE] fp16 from `loud_unit`.
        words: Pointer to the first word.
    """
    of_code = unit.to(tl.float32) * FP8_LEVEL_SCALE
    inverse = tl.where(of_code > 0.0, 1.0 / tl.where(of_code > 0.0, of_code, 1.0), 0.0)[None, :]
    row, column = tl.arange(0, 32)[:, None], tl.arange(0, LOUD_TILE // 2)[None, :]
    for half in tl.static_range(2):
        z = (z0 if half == 0 else z1) * inverse
        z = tl.clamp(tl.where(z == z, z, 0.0), -FP8_MAX, FP8_MAX)
        even, odd = planes_of(float_to_e4m3(z))
        word = merge_neighbours((even << 8 | odd).to(tl.uint32, bitcast=True), 16, False, LOUD_TILE)
        word = signs_first(word).to(tl.int32, bitcast=True)
        tl.store(words + (16 * half * LOUD + row * (LOUD // 2) + column), word, mask=column < LOUD // 2)


@triton.jit
def loud_keys(words, mean_at, LOUD: tl.constexpr, ASM: tl.constexpr):
    """Load the loud channels of a block's keys: four planes [32, LOUD_TILE] fp16.

    Args:
        words: Pointer to their first word.
        mean_at: Pointer to their first mean.
    """
    j = tl.arange(0, LOUD_TILE)[None, :]
    inside = j < LOUD
    levels = load_levels(words, tl.arange(0, 32)[:, None], j, inside, 0, 1, LOUD, 8, False, False, ASM)
    mean = tl.load(mean_at + j, mask=inside, other=0.0)
    unit = tl.load(mean_at + LOUD + j, mask=inside, other=0.0)
    planes = ()
    for plane in tl.static_range(4):
        planes += (scaled(levels[plane], unit, mean, ASM),)
    return planes
