"""What appends to a preallocated store's tensors: numbers worked out once, and the launch without queries."""

from __future__ import annotations

import torch
import triton

from ..codec.launch import encode_config
from ..codec.quantise import LEVELS
from ..common.compat import current_device
from ..common.device import matrix_type, target
from ..common.launcher import Kernel
from ..types import Packed
from .preallocated import append_and_encode

APPEND = Kernel(append_and_encode)


def rotate_columns(tile: int, warps: int) -> int:
    """Channels of a program that rotates queries, of heads padded to `tile`: 16 for each warp's product."""
    return max(32, min(tile, 16 * warps))


class Appender:
    """Appends one token a sequence to tensors that stay, for any number of calls.

    Args:
        packed: The blocks. They get the bits that `tq_kernels.codec.launch.encode` would give them.
        sinks: Keys `[B, Hkv, S0, Dk]` and values `[B, Hkv, S0, Dv]`, contiguous.
        window: Ring buffers `[B, Hkv, capacity, Dk]` and values, contiguous.
        key_rotation, value_rotation: As for `encode`.
        bits: Of keys and of values.
        residual_length: Tokens that stay dense.
    """

    def __init__(
        self,
        packed: Packed,
        sinks: tuple[torch.Tensor, torch.Tensor],
        window: tuple[torch.Tensor, torch.Tensor],
        key_rotation: torch.Tensor,
        value_rotation: torch.Tensor,
        *,
        bits: tuple[int, int],
        residual_length: int,
    ) -> None:
        ring = window[0]
        self.device, on = ring.device, target(ring.device)
        words, scales = (packed.key_words, packed.value_words), packed.scalars.view(torch.float16)
        means = scales if packed.key_means is None else packed.key_means
        self.tensors = (*sinks, *window, *words, scales, means, key_rotation, value_rotation, packed.value_factors)
        # Addresses cannot go stale: the tensors are held, and nothing gives a tensor other memory.
        self.addresses = tuple(tensor.data_ptr() for tensor in self.tensors)
        self.key_factors = packed.key_factors
        self.heads, self.programs = ring.shape[1], ring.shape[0] * ring.shape[1]
        self.sizes = (sinks[0].shape[2], ring.shape[2], residual_length)
        self.block_strides = packed.block_strides
        constants: list[object] = []
        warps = 0
        for states, rotation, own in zip(window, (key_rotation, value_rotation), bits, strict=True):
            dim = rotation.shape[0]
            tile = max(16, triton.next_power_of_2(dim))
            config = encode_config(tile, dim, bits, states.element_size(), on.capability)
            warps = max(warps, config.warps)
            constants += [states.shape[3], dim, tile, own, LEVELS[own], config.k_step]
        precision = "tf32x3" if on.asm else "ieee"
        self.constants = (*constants, packed.key_means is not None, matrix_type(ring), precision, on.asm)
        self.columns = rotate_columns(max(16, triton.next_power_of_2(key_rotation.shape[0])), warps)
        """Channels of a program of `append_and_rotate` that rotates."""
        # `sanitize_overflow` is what `debug` turns on.
        self.options = {"num_warps": warps, "sanitize_overflow": False}

    def numbers(
        self, key_strides: tuple[int, ...], value_strides: tuple[int, ...], max_cache_len: int
    ) -> tuple[int, ...]:
        """The numbers that both kernels begin with, for states with these strides."""
        return (*key_strides[:2], *value_strides[:2], *self.sizes, max_cache_len, *self.block_strides)

    def __call__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        counts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        max_cache_len: int,
    ) -> None:
        """Write one token's rows to the sinks or the ring, encode the block that becomes due, and write the counts.

        A decode step does so by `Decoder`, in the launch that rotates its queries; this is for other readers.

        Args:
            keys: `[B, Hkv, 1, Dk]` in the window's dtype, last dimension contiguous.
            values: `[B, Hkv, 1, Dv]`.
            counts: `state` `[4]` int32, `step_counts` `[6, 4]` int32, and `length` `[]` int64.
            max_cache_len: Tokens there is room for. A full store is not written to, and on a GPU the launch fails.
        """
        index = self.device.index
        if self.device.type == "cuda" and index != current_device():
            # Kernels are launched on the current device; layers of a model spread over several GPUs are not on it.
            with torch.cuda.device(self.device):
                return self(keys, values, counts, max_cache_len)
        APPEND(
            (self.programs, 2, 1),
            (keys, values, *counts, *self.tensors, self.key_factors),
            (*self.numbers(keys.stride(), values.stride(), max_cache_len), self.heads),
            self.constants,
            (self.constants, keys.dtype, index),
            **self.options,
        )
