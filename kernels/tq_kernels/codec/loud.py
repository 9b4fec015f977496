"""Loud channels of keys: FP8 codes beside those of the others, and queries' products with them.

The loud channels of a head are those with negative channel scales. They are stored as codes of 8 bits, with a mean and
a unit for each block and channel (`tq_hf.codec.reference`). A matrix product takes 16 channels at least: tiles of loud
channels have LOUD_TILE columns, of which the first are real.
"""

import triton
import triton.language as tl

from ..common.unpack import load_levels
from ..format import MOST_LOUD

LOUD_TILE = tl.constexpr(MOST_LOUD)


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
def load_loud(words, mean_at, LOUD: tl.constexpr, ASM: tl.constexpr):
    """Load a block's loud channels: four planes of levels [32, LOUD_TILE] fp16, and units and means [1, LOUD_TILE].

    Args:
        words: Pointer to the first word of the loud channels.
        mean_at: Pointer to their first mean.
    """
    j = tl.arange(0, LOUD_TILE)[None, :]
    row, inside = tl.arange(0, 32)[:, None], None if LOUD == LOUD_TILE else j < LOUD
    levels = load_levels(words, row, j, inside, 0, 1, LOUD, 8, False, False, ASM)
    mean = tl.load(mean_at + j, mask=j < LOUD, other=0.0)
    return levels, tl.load(mean_at + LOUD + j, mask=j < LOUD, other=0.0), mean
