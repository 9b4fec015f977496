"""Levels a stored code stands for, and the boundaries between them.

2, 3 and 4 bits are the Lloyd-Max quantiser of N(0, 1), the limit of a channel of a randomly rotated unit vector times
sqrt(D) (TurboQuant, arXiv 2504.19874, section 3.1). 8 bits is FP8 e4m3. Levels are exact in fp16, so that every
backend multiplies the same numbers.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .kept import keeps_tensors

POSITIVE_CENTROIDS = {
    2: (0.452780, 1.510418),
    3: (0.245094, 0.756005, 1.343909, 2.151946),
    4: (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
}
"""Positive halves of the Lloyd-Max codebooks of N(0, 1), a fixed point of the Lloyd iteration to 1e-6
(tests/test_codebook.py runs it)."""

GAUSSIAN_MSE = {2: 0.117482, 3: 0.0345478, 4: 0.009501}
"""Mean squared error of each codebook on N(0, 1)."""

FP8_MAX = 448.0
FP8_LEVEL_SCALE = 2.0**-8
"""An e4m3 byte moved into fp16's fields reads 2**-8 times its value (exponent bias 7 against 15); levels keep that
factor, scales undo it."""


@lru_cache
@keeps_tensors
def _levels(bits: int) -> torch.Tensor:
    if bits == 8:
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        return codes.float() * FP8_LEVEL_SCALE
    positive = torch.tensor(POSITIVE_CENTROIDS[bits]).half().float()
    return torch.cat([-positive.flip(0), positive])


@lru_cache
@keeps_tensors
def levels(bits: int, device: torch.device) -> torch.Tensor:
    """What each code stands for, in units of its vector's scale.

    Returns:
        `[2**bits]` float32, every entry exact in fp16; ascending for 2, 3 and 4 bits, indexed by the e4m3 byte for 8.
    """
    return _levels(bits).to(device)


@lru_cache
@keeps_tensors
def boundaries(bits: int, device: torch.device) -> torch.Tensor:
    """Midpoints between neighbouring centroids, `[2**bits - 1]` float32, ascending."""
    centroids = _levels(bits)
    return ((centroids[1:] + centroids[:-1]) / 2).to(device)
