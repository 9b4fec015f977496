"""What a file must have for its tensors to be believed."""

from __future__ import annotations

from collections.abc import Callable

import torch

Fits = Callable[[tuple[int, ...]], bool]
Expected = dict[str, tuple[torch.dtype, Fits, list[int]]]
"""By name: the dtype a tensor must have, whether a shape is right, and the shape to name if it is not."""


def exactly(shape: list[int]) -> Fits:
    """This shape and no other."""
    return lambda came: list(came) == shape


def between(least: list[int], most: list[int]) -> Fits:
    """A shape that is in no dimension less than `least` or more than `most`."""
    return lambda came: len(came) == len(least) and all(a <= n <= b for a, n, b in zip(least, came, most, strict=True))
