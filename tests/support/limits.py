"""Limits on what a compiler makes of a kernel."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
import triton

SET_WITH = (3, 7)
"""The Triton that limits on stack and instructions were set with (3.7.1); with others a kernel must compile and fit
shared memory. On sm_90, encoding 128 channels takes 2 to 5 % more instructions with 3.5, 2 % fewer to 2 % more with
3.6, 3 to 8 % more with 3.9, whose sums take more additions. Decoding up to 256 channels keeps to its limits with 3.5,
3.6 and 3.9; with 3.8 (torch 2.14) levels go through shared memory once more: 1,524 instructions in the loop at 4 bits,
not 1,162, and 63 KB of it a program, not 38. Attention of many queries spills 112 bytes with 3.9 (224 on sm_80) and
stores tiles two bytes at a time; decoding over windows spills 208 with 3.8 and 3.9."""

HOLD = tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) == SET_WITH


ALIKE = (86, 89, "gfx1100")
"""Cards that cost more of CI's time than they tell: 86 and 89 have 80's code in less shared memory, on gfx1100 kernels
spill. `make test-slow` compiles for them."""


def cards(every: Iterable[int | str], *others: Any) -> list[Any]:
    """Cards to compile for, with values of other parameters; those of `ALIKE` in slow tests."""
    names = {x: "-".join(map(str, (x, *others))) for x in every}
    return [
        pytest.param(x, *others, id=name, marks=[pytest.mark.slow] if x in ALIKE else []) for x, name in names.items()
    ]


def within(found: float, limit: float) -> bool:
    """Whether `found` keeps to `limit`, if limits hold for this Triton."""
    return found <= limit or not HOLD
