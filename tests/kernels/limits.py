"""Limits on what a compiler makes of a kernel."""

from __future__ import annotations

import re

import triton

SET_WITH = (3, 7)
"""The Triton that limits on stack and instructions were set with (3.7.1); with others a kernel must compile and fit
shared memory. On sm_90, encoding 128 channels takes 2 to 5 % more instructions with 3.5, 2 % fewer to 2 % more with
3.6, 3 to 8 % more with 3.9, whose sums take more additions. Decoding keeps to its limits with all of them; attention of
many queries spills 112 bytes with 3.9 (224 on sm_80) and stores tiles two bytes at a time."""

HOLD = tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) == SET_WITH


def within(found: float, limit: float) -> bool:
    """Whether `found` keeps to `limit`, if limits hold for this Triton."""
    return found <= limit or not HOLD
