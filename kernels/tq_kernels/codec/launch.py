"""Launch the encoder and the decoder of blocks: a heuristic table for each, no autotuner."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton

from ..common.device import Target, matrix_type, target
from ..common.launcher import Kernel, specialised
from ..format import BLOCK_TOKENS
from ..types import KeyValue, PackedBlocks
from .dequantize import dequantize_blocks
from .encode import encode_blocks
from .quantize import LEVELS

ENCODE, DEQUANTIZE = Kernel(encode_blocks), Kernel(dequantize_blocks)


@dataclass(frozen=True)
class EncodeConfig:
    """Tile sizes and launch parameters of `encode_blocks`.

    Args:
        k_step: Channels of a matrix product; the tile's width keeps the rotation in shared memory for all blocks of a
            program.
        warps: Warps of a program.
        stages: Blocks copied ahead.
        programs_per_multiprocessor: Programs a multiprocessor is given.
        registers: Limit per thread that lets as many programs run side by side, or `None`.
    """

    k_step: int
    warps: int
    stages: int
    programs_per_multiprocessor: int
    registers: int | None = None


def encode_config(
    tile: int, dim: int, bits: tuple[int, int], itemsize: int, capability: tuple[int, int]
) -> EncodeConfig:
    """The heuristic table.

    Args:
        tile: `dim` padded to a power of two.
        dim: Channels of a stored vector.
        bits: Of keys and of values; their launches overlap, so they are best of one size.
        itemsize: Bytes of a channel of the states.
        capability: Compute capability of an NVIDIA GPU, or (0, 0).
    """
    if capability[0] < 8:
        return EncodeConfig(k_step=16, warps=8, stages=1, programs_per_multiprocessor=1)
    # Two matrices of 256 channels, or one of fp32, do not fit in shared memory.
    if capability[0] != 9 or itemsize == 4 or tile > 128 and tile != dim or tile > 256:
        return EncodeConfig(k_step=min(tile, 32), warps=4 if tile < 64 else 8, stages=1, programs_per_multiprocessor=2)
    if tile != dim or tile > 128:
        return EncodeConfig(k_step=tile, warps=4 if tile < 64 else 8, stages=1, programs_per_multiprocessor=1)
    if tile <= 64:
        return EncodeConfig(
            tile, warps=4, stages=2, programs_per_multiprocessor=4, registers=128 if max(bits) < 8 else None
        )
    if max(bits) == 8:
        return EncodeConfig(tile, warps=4, stages=2, programs_per_multiprocessor=2)
    return EncodeConfig(tile, warps=8, stages=2, programs_per_multiprocessor=2, registers=128)


@lru_cache
def _encode_launch(
    is_value: bool, head_dim: int, dim: int, own: int, bits: tuple[int, int], itemsize: int, on: Target, matrix: Any
) -> tuple[EncodeConfig, tuple[Any, ...], dict[str, Any]]:
    """Tile sizes, constants and options of a launch; `own` are its bits, `bits` those of keys and of values."""
    tile = max(16, triton.next_power_of_2(dim))
    config = encode_config(tile, dim, bits, itemsize, on.capability)
    options: dict[str, Any] = {} if config.registers is None else {"maxnreg": config.registers}
    if on.dependent_launch and is_value:
        options["launch_pdl"] = True
    constants = (
        *(head_dim, dim, tile, own, LEVELS[own], is_value, matrix),
        *(config.k_step, "tf32x3" if on.asm else "ieee", on.asm, on.dependent_launch, config.stages),
    )
    return config, constants, {"num_warps": config.warps} | options


def _keys_and_values(
    packed: PackedBlocks, keys: torch.Tensor, values: torch.Tensor, rotations: KeyValue
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What a launch for keys takes, and one for values: whether it is for values, the bits, the states, their strides
    and the tensors of blocks: words, scales, means (of keys only), rotation and channel scales."""
    layout, (key_scales, value_scales) = packed.layout, packed.channel_scales
    scales = packed.scales.view(torch.float16)
    of_keys = (packed.key_words, scales, packed.key_means, rotations[0], key_scales)
    of_values = (packed.value_words, scales, None, rotations[1], value_scales)
    return (
        (False, layout.key_bits, keys, keys.stride()[:3], of_keys),
        (True, layout.value_bits, values, values.stride()[:3], of_values),
    )


def encode(keys: torch.Tensor, values: torch.Tensor, packed: PackedBlocks, start: int, rotations: KeyValue) -> None:
    """Encode whole blocks of keys and values into blocks `start`, `start + 1`, ... of the packed tensors, in two
    launches.

    A block is encoded by one program from its 128 rows alone: its bits do not depend on how many blocks are encoded
    with it.

    Args:
        keys: `[B, Hkv, n * 128, Dk]` fp16, bf16 or fp32, last dimension contiguous, other strides as they come.
        values: `[B, Hkv, n * 128, Dv]`, like `keys`.
        packed: N >= start + n blocks to write to. Without `key_means` the mean stays in the keys.
        start: Index of the first block written.
        rotations: Of keys and of values, `[D padded, D padded]` float32, contiguous: the orthogonal R, by which a row x
            is rotated to x @ R.T; where D padded is a power of two, only the signs of R are read.

    Raises:
        ValueError: The tokens are not whole blocks, or the last dimension of the states is not contiguous.
    """
    batch, heads, length, _ = keys.shape
    blocks, rest = divmod(length, BLOCK_TOKENS)
    if rest:
        raise ValueError(f"`keys` have {length} tokens; only whole blocks of {BLOCK_TOKENS} can be encoded.")
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError(
            f"The last dimension of keys and values must be contiguous; "
            f"strides are {keys.stride()} and {values.stride()}."
        )
    if batch * heads * blocks == 0:
        return
    on, all_bits = target(keys.device), packed.layout.bits
    kind = (keys.element_size(), on, matrix_type(keys))
    block_strides = packed.block_strides
    for is_value, bits, states, strides, tensors in _keys_and_values(packed, keys, values, rotations):
        rotation = tensors[3]
        config, constants, options = _encode_launch(
            is_value, states.shape[-1], rotation.shape[0], bits, all_bits, *kind
        )
        programs = config.programs_per_multiprocessor * on.multiprocessors // (batch * heads)
        ENCODE(
            (min(blocks, max(1, programs)), batch * heads, 1),
            (states, *tensors),
            (heads, blocks, start, *block_strides, *strides),
            constants,
            (constants, config, specialised(strides), states.dtype, rotation.dtype, states.device.index),
            **options,
        )


@dataclass(frozen=True)
class DequantizeConfig:
    """Tile sizes and launch parameters of `dequantize_blocks`.

    Args:
        chunks: Parts the packed channels are cut into; four where quarters are packed apart.
        columns: Channels a program writes.
        resident: Whether the rotation stays in shared memory for all blocks of a program.
        warps: Warps of a program.
        programs_per_multiprocessor: Programs a multiprocessor is given.
    """

    chunks: int
    columns: int
    resident: bool
    warps: int
    programs_per_multiprocessor: int


def dequantize_config(dim: int, bits: int, capability: tuple[int, int]) -> DequantizeConfig:
    """The heuristic table; `capability` of an NVIDIA GPU or (0, 0)."""
    if capability[0] == 9 and dim <= 256:
        warps = 4 if bits >= 4 and dim & (dim - 1) == 0 and dim <= 128 else 8
        columns = 64 if bits < 4 and dim > 128 else 128
        return DequantizeConfig(
            4 if bits < 4 else 1, columns, resident=True, warps=warps, programs_per_multiprocessor=2
        )
    columns = 128 if capability[0] >= 8 else 64
    return DequantizeConfig(
        8 if dim > 256 and bits >= 4 else 4,
        columns,
        resident=False,
        warps=8 if dim > 32 else 4,
        programs_per_multiprocessor=2,
    )


def dequantize(
    packed: PackedBlocks, start: int, stop: int, keys: torch.Tensor, values: torch.Tensor, rotations: KeyValue
) -> None:
    """Write blocks `start` to `stop` to dense keys and values, as attention reads them.

    Args:
        packed: The blocks.
        start, stop: The blocks read.
        keys: `[B, Hkv, (stop - start) * 128, Dk]` fp16, bf16 or fp32 to write to, last dimension contiguous, other
            strides as they come.
        values: `[B, Hkv, (stop - start) * 128, Dv]`, like `keys`.
        rotations: As for `encode`.

    Raises:
        ValueError: A buffer has another number of tokens, or its last dimension is not contiguous.
    """
    batch, heads = packed.key_words.shape[:2]
    blocks = stop - start
    for name, states in (("keys", keys), ("values", values)):
        if states.shape[2] != BLOCK_TOKENS * blocks:
            raise ValueError(
                f"`{name}` has room for {states.shape[2]} tokens; "
                f"blocks {start} to {stop} hold {BLOCK_TOKENS * blocks}."
            )
        if states.stride(-1) != 1:
            raise ValueError(f"The last dimension of `{name}` must be contiguous; its strides are {states.stride()}.")
    if batch * heads * blocks == 0:
        return
    on = target(keys.device)
    block_strides = packed.block_strides
    for is_value, bits, states, strides, tensors in _keys_and_values(packed, keys, values, rotations):
        rotation = tensors[3]
        dim = rotation.shape[0]
        config = dequantize_config(dim, bits, on.capability)
        tile = max(16 * config.chunks, triton.next_power_of_2(dim))
        columns = min(config.columns, tile)
        tiles = triton.cdiv(dim, columns)
        programs = config.programs_per_multiprocessor * on.multiprocessors // (batch * heads * tiles)
        constants = (*(states.shape[-1], dim, tile, bits, is_value, config.chunks), *(columns, config.resident, on.asm))
        DEQUANTIZE(
            (min(blocks, max(1, programs)), batch * heads, tiles),
            (*tensors, states),
            (heads, blocks, start, *block_strides, *strides),
            constants,
            (constants, config, specialised(strides), states.dtype, rotation.dtype, states.device.index),
            num_warps=config.warps,
        )
