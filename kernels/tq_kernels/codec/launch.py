"""Launch the kernels that encode and dequantize blocks: a heuristic table for each, no autotuner."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton

from ..common.device import Target, matrix_type, target
from ..common.launcher import Kernel, Launch, launch_all, specialised
from ..format import BLOCK_TOKENS, code_of
from ..types import KeyValue, PackedBlocks, Pages, Sequences, Tokens
from .dequantize import dequantize_blocks
from .encode import EncodeShape, encode_blocks

ENCODE, DEQUANTIZE = Kernel(encode_blocks), Kernel(dequantize_blocks)
NO_PAGES = (None,) * 8
"""Tensors of `encode_blocks` that are for pages."""


@dataclass(frozen=True)
class EncodeConfig:
    """Tile sizes and launch parameters of `encode_blocks`.

    Args:
        k_step: Channels of a matrix product; the tile's width keeps the rotation in shared memory for all blocks of a
            program.
        warps: Warps of a program.
        stages: Blocks copied ahead.
        programs_per_multiprocessor: Number of programs launched for a multiprocessor.
        registers: Most registers of a thread, for that number to run side by side, or `None`.
    """

    k_step: int
    warps: int
    stages: int
    programs_per_multiprocessor: int
    registers: int | None = None


def encode_config(
    tile: int, dim: int, bits: tuple[int, int], itemsize: int, capability: tuple[int, int]
) -> EncodeConfig:
    """Look up the heuristic table.

    Args:
        tile: `dim` padded to a power of two.
        dim: Channels of a stored vector.
        bits: Bits of keys and of values. Their launches overlap, and are fastest with equal configurations.
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
    fp8 = any(code_of(each).is_fp8 for each in bits)
    if tile <= 64:
        return EncodeConfig(tile, warps=4, stages=2, programs_per_multiprocessor=4, registers=None if fp8 else 128)
    if fp8:
        return EncodeConfig(tile, warps=4, stages=2, programs_per_multiprocessor=2)
    return EncodeConfig(tile, warps=8, stages=2, programs_per_multiprocessor=2, registers=128)


def encode_shape(
    dims: tuple[int, int],
    bits: tuple[int, int],
    is_value: bool,
    dtype: torch.dtype,
    on: Target,
    matrix: Any,
    block_words: int = 0,
) -> tuple[EncodeConfig, EncodeShape]:
    """Launch parameters, and constants for keys or values of `dims` channels (as they come, as they are stored)."""
    tile = max(16, triton.next_power_of_2(dims[1]))
    config = encode_config(tile, dims[1], bits, dtype.itemsize, on.capability)
    of_block = (*dims, tile, bits[is_value], is_value, matrix, config.k_step)
    return config, EncodeShape(*of_block, on.asm, block_words)


def encode(
    keys: torch.Tensor,
    values: torch.Tensor,
    packed: PackedBlocks,
    start: int,
    rotations: KeyValue,
    tokens: tuple[int, int] | None = None,
) -> None:
    """Encode whole blocks of keys and values into blocks `start`, `start + 1`, ... of the packed tensors, in two
    launches.

    One program encodes a block from its 128 rows alone: the bits do not depend on the number of blocks encoded
    together.

    Args:
        keys: `[B, Hkv, T, Dk]` fp16, bf16 or fp32, last dimension contiguous, other strides as they come.
        values: `[B, Hkv, T, Dv]`, like `keys`.
        packed: N >= start + n blocks to write to.
        start: Index of the first block written.
        rotations: R of keys and of values, `[D padded, D padded]` float32, orthogonal and contiguous: a row x becomes
            x @ R.T. If D padded is a power of two, only the signs of R are read.
        tokens: First token to encode and the one after the last; `None` for all.

    Raises:
        ValueError: The tokens are not whole blocks, or the last dimension of the states is not contiguous.
    """
    scales, (key_scales, value_scales) = packed.scales, packed.channel_scales
    of_keys = (keys, packed.key_words, scales, packed.key_means, rotations[0], key_scales)
    of_values = (values, packed.value_words, scales, None, rotations[1], value_scales)
    first, stop = tokens or (0, keys.shape[2])
    devices = (keys.device, values.device, scales.device)
    kind = (keys.dtype, devices, scales.stride(), packed.layout.bits)
    dims = (values.shape[3], rotations[0].shape[0], rotations[1].shape[0])
    launches, steps = _encode_launches(
        ENCODE, keys.shape, dims, keys.stride(), values.stride(), (stop - first, start), kind
    )
    if not launches:
        return
    addresses = [
        (
            states.data_ptr() + first * step,
            *[None if tensor is None else tensor.data_ptr() for tensor in others],
            *NO_PAGES,
        )
        for (states, *others), step in zip((of_keys, of_values), steps, strict=True)
    ]
    launch_all(
        launches,
        addresses,
        lambda: [
            (states[:, :, first:stop], words, scales.view(torch.float16), *others, *NO_PAGES)
            for states, words, _, *others in (of_keys, of_values)
        ],
    )


@lru_cache(maxsize=1024)
def _encode_launches(
    kernel: Kernel,
    shape: torch.Size,
    dims: tuple[int, int, int],
    key_strides: tuple[int, ...],
    value_strides: tuple[int, ...],
    place: tuple[int, int],
    kind: tuple[Any, ...],
) -> tuple[tuple[Launch, ...], tuple[int, ...]]:
    """Launches of `encode` for keys and values like these, and bytes from a token to the next; no launches without a
    block. `dims` are channels of values, then stored channels of keys and values; `place` is (number of tokens, first
    block)."""
    (batch, heads, _, key_dim), (value_dim, *padded), (length, start) = shape, dims, place
    blocks, rest = divmod(length, BLOCK_TOKENS)
    if rest:
        raise ValueError(f"`keys` have {length} tokens; only whole blocks of {BLOCK_TOKENS} can be encoded.")
    if key_strides[-1] != 1 or value_strides[-1] != 1:
        raise ValueError(
            f"The last dimension of keys and values must be contiguous; strides are {key_strides} and {value_strides}."
        )
    if batch * heads * blocks == 0:
        return (), ()
    dtype, (device, *_), (blocks_b, blocks_h, block, _), all_bits = kind
    assert start + blocks < 2 or block == BLOCK_TOKENS  # blocks follow one another
    on, matrix = target(device), matrix_type(dtype, device)
    launches = []
    for is_value, head_dim, dim, strides in zip(
        (False, True), (key_dim, value_dim), padded, (key_strides[:3], value_strides[:3]), strict=True
    ):
        config, shape = encode_shape((head_dim, dim), all_bits, is_value, dtype, on, matrix)
        options: dict[str, Any] = {} if config.registers is None else {"maxnreg": config.registers}
        if on.dependent_launch and is_value:
            options["launch_pdl"] = True
        constants = (shape, None, on.dependent_launch, config.stages, *[0] * 5)
        programs = config.programs_per_multiprocessor * on.multiprocessors // (batch * heads)
        launch = Launch(
            kernel,
            device.index,
            (min(blocks, max(1, programs)), batch * heads, 1),
            (heads, blocks, start, blocks_b // BLOCK_TOKENS, blocks_h // BLOCK_TOKENS, *strides, *[None] * 5),
            constants,
            (constants, config, specialised(strides), dtype, device.index),
            {"num_warps": config.warps} | options,
        )
        launches.append(launch)
    return tuple(launches), (key_strides[2] * dtype.itemsize, value_strides[2] * dtype.itemsize)


def encode_new_blocks(tokens: Tokens, pages: Pages, sequences: Sequences, rotations: KeyValue) -> None:
    """Encode the blocks that new tokens complete, from the rings and the new tokens.

    Args:
        rotations: R of keys and of values, as in `encode`.
    """
    _, key, value = tokens
    (total, kv_heads, dim), count = key.shape, sequences.cu_seqlens_q.shape[0] - 1
    on, device = target(key.device), key.device
    bits, matrix, beside = (pages.key_bits, pages.value_bits), matrix_type(key.dtype, device), pages.beside
    dims = (dim, rotations[0].shape[0])
    config, of_keys = encode_shape(dims, bits, False, key.dtype, on, matrix, pages.block_words)
    if beside:
        dims = (beside, beside)
    _, of_values = encode_shape(dims, bits, True, key.dtype, on, matrix, pages.block_words)
    of_values = of_values._replace(K_STEP=min(config.k_step, of_values.TILE))
    most = total // BLOCK_TOKENS + min(count, total)
    programs = max(1, config.programs_per_multiprocessor * on.multiprocessors // (2 * kv_heads))
    block_b = triton.next_power_of_2(max(count, sequences.least_padding))
    constants = (of_keys, of_values, False, 1, *pages.place[:3], block_b, beside)
    numbers = (count, None, None, pages.page_blocks, *[None] * 4, *tokens.row_strides, sequences.block_table.shape[1])
    ENCODE(
        (min(most, programs), kv_heads, 2),
        (key, pages.key_words, pages.scales.view(torch.float16), pages.key_means, rotations[0],
         pages.key_channel_scales, value, pages.value_words, rotations[1], pages.value_channel_scales, pages.rows,
         sequences.block_table, sequences.cu_seqlens_q, sequences.cu_seqlens_k),
        numbers,
        constants,
        (constants, key.dtype, pages.key_means.dtype, rotations[0].dtype, device.index),
        num_warps=config.warps,
    )  # fmt: skip


@dataclass(frozen=True)
class DequantizeConfig:
    """Tile sizes and launch parameters of `dequantize_blocks`.

    Args:
        chunks: Number of parts of the packed channels; four where quarters are packed apart.
        columns: Number of channels a program writes.
        resident: Whether the rotation stays in shared memory for all blocks of a program.
        warps: Warps of a program.
    """

    chunks: int
    columns: int
    resident: bool
    warps: int


def dequantize_config(dim: int, bits: int, capability: tuple[int, int]) -> DequantizeConfig:
    """Look up the heuristic table; `capability` is that of an NVIDIA GPU, or (0, 0)."""
    quarters = code_of(bits).quarters
    if capability[0] == 9 and dim <= 256:
        warps = 4 if quarters == 1 and dim & (dim - 1) == 0 and dim <= 128 else 8
        return DequantizeConfig(quarters, 64 if quarters > 1 and dim > 128 else 128, resident=True, warps=warps)
    columns = 128 if capability[0] >= 8 else 64
    chunks = 8 if dim > 256 and quarters == 1 else 4
    return DequantizeConfig(chunks, columns, resident=False, warps=8 if dim > 32 else 4)


def dequantize(
    packed: PackedBlocks, start: int, stop: int, keys: torch.Tensor, values: torch.Tensor, rotations: KeyValue
) -> None:
    """Write blocks `start` to `stop` to dense keys and values, as attention reads them.

    Args:
        packed: The blocks.
        start, stop: First block read and the one after the last.
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
    on, layout, channel_scales = target(keys.device), packed.layout, packed.channel_scales
    scales = packed.scales.view(torch.float16)
    of_keys = (False, layout.key_bits, keys, packed.key_words, packed.key_means, rotations[0], channel_scales.keys)
    of_values = (True, layout.value_bits, values, packed.value_words, None, rotations[1], channel_scales.values)
    for is_value, bits, states, words, means, rotation, own_scales in (of_keys, of_values):
        dim, strides = rotation.shape[0], states.stride()[:3]
        config = dequantize_config(dim, bits, on.capability)
        tile = max(16 * config.chunks, triton.next_power_of_2(dim))
        columns = min(config.columns, tile)
        tiles = triton.cdiv(dim, columns)
        programs = 2 * on.multiprocessors // (batch * heads * tiles)  # two of a multiprocessor
        constants = (*(states.shape[-1], dim, tile, bits, is_value, config.chunks), *(columns, config.resident, on.asm))
        DEQUANTIZE(
            (min(blocks, max(1, programs)), batch * heads, tiles),
            (words, scales, means, rotation, own_scales, states),
            (heads, blocks, start, *packed.block_strides, *strides),
            constants,
            (constants, config, specialised(strides), states.dtype, rotation.dtype, states.device.index),
            num_warps=config.warps,
        )
