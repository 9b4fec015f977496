"""What launchers of kernels are given, on both sides: types that need no Triton."""

from typing import NamedTuple

import torch


class Packed(NamedTuple):
    """Packed blocks `[B, Hkv, N, *]` (sizes in `tq_hf/layout.py`).

    The last two dimensions are contiguous, and all tensors have the same strides in blocks.

    Args:
        key_words: `[B, Hkv, N, 128 * Dk padded * key bits / 32]` int32.
        value_words: `[B, Hkv, N, 128 * Dv padded * value bits / 32]` int32.
        scalars: `[B, Hkv, N, 128]` int32: fp16 key scale in the low half, fp16 value scale in the high half.
        key_means: `[B, Hkv, N, Dk padded]` fp16, or `None`.
        key_factors: `[B, Hkv, Dk]` fp16 contiguous, no more bits than bf16: what keys were multiplied by.
        value_factors: `[B, Hkv, Dv]`, likewise.
    """

    key_words: torch.Tensor
    value_words: torch.Tensor
    scalars: torch.Tensor
    key_means: torch.Tensor | None
    key_factors: torch.Tensor
    value_factors: torch.Tensor

    @property
    def block_strides(self) -> tuple[int, int]:
        """Strides of the batch and of the heads, in blocks."""
        tokens = self.scalars.shape[3]
        return self.scalars.stride(0) // tokens, self.scalars.stride(1) // tokens


class Recipe(NamedTuple):
    """How blocks are encoded, of keys and of values each.

    Args:
        bits: 2, 3, 4 or 8.
        rotations: `[D padded, D padded]`, contiguous. For the codec the orthogonal R in float32: a row x is rotated to
            x @ R.T; where D padded is a power of two, only the signs of R are read. For attention sqrt(D) R in fp16.
    """

    bits: tuple[int, int]
    rotations: tuple[torch.Tensor, torch.Tensor]
