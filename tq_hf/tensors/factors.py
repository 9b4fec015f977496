"""The factors of a layer's channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Factors(NamedTuple):
    """What keys and values are divided by before they are encoded (see `tq_hf.codec.balance`).

    Args:
        keys: s, `[B, Hkv, Dk]` fp16; queries are multiplied by it.
        values: t, `[B, Hkv, Dv]` fp16; outputs are multiplied by it.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def ones(cls, keys: torch.Tensor, values: torch.Tensor) -> Factors:
        """Factors that change nothing, for states `[B, Hkv, *, D]` like these."""
        key, value = (x.new_ones(*x.shape[:2], x.shape[3], dtype=torch.float16) for x in (keys, values))
        return cls(key, value)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Factors:
        """Factors of the results of `function` on both tensors."""
        return Factors(function(self.keys), function(self.values))
