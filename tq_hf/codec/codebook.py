"""Levels a stored code stands for, and the boundaries between them.

2, 3 and 4 bits are the Lloyd-Max quantiser of N(0, 1), the limit of a channel of a randomly rotated unit vector times
sqrt(D) (TurboQuant, arXiv 2504.19874, section 3.1), on a grid of 1/64. 8 bits is FP8 e4m3. Levels are exact in fp16, so
that every backend multiplies the same numbers.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from tq_kernels.format import FP8_LEVEL_SCALE, FP8_MAX, POSITIVE_CENTROIDS

from ..inference_mode import outside_inference_mode

__all__ = ["FP8_LEVEL_SCALE", "FP8_MAX", "GAUSSIAN_MSE", "POSITIVE_CENTROIDS", "boundaries", "levels"]

GAUSSIAN_MSE = {2: 0.117588, 3: 0.0345627, 4: 0.00950624}
"""Mean squared error of each codebook on N(0, 1)."""


@lru_cache
@outside_inference_mode
def _levels(bits: int) -> torch.Tensor:
    if bits == 8:
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        return codes.float() * FP8_LEVEL_SCALE
    positive = torch.tensor(POSITIVE_CENTROIDS[bits])
    return torch.cat([-positive.flip(0), positive])


@lru_cache
@outside_inference_mode
def levels(bits: int, device: torch.device) -> torch.Tensor:
    """What each code stands for, in units of its vector's scale.

    Returns:
        `[2**bits]` float32, every entry exact in fp16; ascending for 2, 3 and 4 bits, indexed by the e4m3 byte for 8.
    """
    return _levels(bits).to(device)


@lru_cache
@outside_inference_mode
def boundaries(bits: int, device: torch.device) -> torch.Tensor:
    """Midpoints between neighbouring centroids, `[2**bits - 1]` float32, ascending."""
    centroids = _levels(bits)
    return ((centroids[1:] + centroids[:-1]) / 2).to(device)
