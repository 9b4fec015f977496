"""Levels a stored code stands for, and the boundaries between them.

2, 3 and 4 bits are the Lloyd-Max quantizer of N(0, 1), the limit of a channel of a randomly rotated unit vector times
sqrt(D) (TurboQuant, arXiv 2504.19874, section 3.1), on a grid of 1/64. 8 bits is FP8 e4m3. Levels are exact in fp16, so
that every backend multiplies the same numbers.
"""

from __future__ import annotations

import torch
from tq_kernels.format import FP8_LEVEL_SCALE, FP8_MAX, POSITIVE_CENTROIDS

from ..compat import cached_table

__all__ = ["FP8_LEVEL_SCALE", "FP8_MAX", "POSITIVE_CENTROIDS", "boundaries", "levels"]


@cached_table
def _levels(bits: int) -> torch.Tensor:
    if bits == 8:
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        return codes.float() * FP8_LEVEL_SCALE
    positive = torch.tensor(POSITIVE_CENTROIDS[bits])
    return torch.cat([-positive.flip(0), positive])


@cached_table
def levels(bits: int, device: torch.device) -> torch.Tensor:
    """What each code stands for, in units of its vector's scale.

    Returns:
        `[2**bits]` float32, every entry exact in fp16; ascending for 2, 3 and 4 bits, indexed by the e4m3 byte for 8.
    """
    return _levels(bits).to(device)


@cached_table
def boundaries(bits: int, device: torch.device) -> torch.Tensor:
    """Midpoints between neighbouring centroids, `[2**bits - 1]` float32, ascending."""
    centroids = _levels(bits)
    return ((centroids[1:] + centroids[:-1]) / 2).to(device)


CEILINGS = 310
"""More than 128 times the largest boundary (307 / 128 at 4 bits)."""


@cached_table
def codes_of_ceilings(bits: int, device: torch.device) -> torch.Tensor:
    """The code of each u, by the whole number ceil(128 u) from -CEILINGS to CEILINGS: `[2 * CEILINGS + 1]` int32.

    All boundaries are multiples of 1/128, so u is above one exactly if that ceiling is. The code is that of
    `torch.bucketize(u, boundaries)`, which takes ten times as long on a CPU.
    """
    ceilings = torch.arange(-CEILINGS, CEILINGS + 1) / 128
    return torch.bucketize(ceilings, boundaries(bits, ceilings.device), out_int32=True).to(device)
