"""The factors of a layer's channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Factors(NamedTuple):
    """What keys and values are multiplied by before they are encoded (see `tq_hf.codec.balance`).

    They have no more bits than a bfloat16, so that the encoder's matrix products with them are exact.

    Args:
        keys: 1 / s, `[B, Hkv, Dk]` fp16; queries are divided by it.
        values: 1 / t, `[B, Hkv, Dv]` fp16; outputs are divided by it.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def ones(cls, batch: int, heads: int, key_dim: int, value_dim: int, device: torch.device) -> Factors:
        """Factors that change nothing."""
        keys, values = (
            torch.ones(batch, heads, dim, dtype=torch.float16, device=device) for dim in (key_dim, value_dim)
        )
        return cls(keys, values)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Factors:
        """Factors of the results of `function` on both tensors."""
        return Factors(function(self.keys), function(self.values))
