"""Codebooks: the level of each code, and the boundaries between the levels of 4 bits.

Levels are optimized for N(0, 1), the limit distribution of a channel of a randomly rotated unit vector times sqrt(D)
(TurboQuant, arXiv 2504.19874, section 3.1), and rounded to multiples of 1/64. At 4 bits they are the Lloyd-Max
quantizer, at 2 and 3 bits the levels of a trellis (`tq_hf.codec.trellis`). 8 bits is FP8 e4m3. Levels are exact in
fp16, so that every backend multiplies the same numbers.
"""

from __future__ import annotations

import torch
from tq_kernels.format import FP8_LEVEL_SCALE, code_of

from ..compat import cached_table


@cached_table
def levels(bits: int, device: torch.device) -> torch.Tensor:
    """Level of each code, in units of its vector's scale.

    Returns:
        Float32, every entry exact in fp16. 2 bits: `[8]`, indexed by `tq_hf.codec.trellis.windows`. 3 bits: `[16]`,
        likewise by windows. 4 bits: `[16]`, ascending. 8 bits: `[256]`, indexed by the e4m3 byte.
    """
    code = code_of(bits)
    if code.is_fp8:
        table = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float() * FP8_LEVEL_SCALE
    else:
        table = torch.tensor(code.levels, dtype=torch.float32, device="cpu") / 64
        if code.magnitudes:
            table = torch.cat([table, -table] if code.is_trellis else [-table.flip(0), table])
    return table.to(device)


@cached_table
def boundaries(bits: int, device: torch.device) -> torch.Tensor:
    """Midpoints between neighbouring levels, at 4 bits `[15]`: float32, ascending."""
    centroids = levels(bits, device)
    return (centroids[1:] + centroids[:-1]) / 2


CEILINGS = 512
"""A bound above 128 times the largest boundary (307 / 128 at 4 bits)."""


@cached_table
def codes_of_ceilings(bits: int, device: torch.device) -> torch.Tensor:
    """Table of codes of nearest levels by ceil(128 u), from -CEILINGS to CEILINGS: `[2 * CEILINGS + 1]` int32.

    All boundaries are multiples of 1/128, so u is above a boundary exactly if ceil(128 u) / 128 is. The codes are those
    of `torch.bucketize(u, boundaries)`, which takes ten times as long on a CPU.
    """
    ceilings = torch.arange(-CEILINGS, CEILINGS + 1, dtype=torch.float32, device="cpu") / 128
    return torch.bucketize(ceilings, boundaries(bits, ceilings.device), out_int32=True).to(device)
