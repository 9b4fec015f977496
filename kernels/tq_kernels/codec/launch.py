"""Launch the kernels that encode and dequantize blocks: a heuristic table for each, no autotuner."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton

from ..common.device import Target, matrix_type, target
from ..common.launcher import Kernel, Launch, Strides, launch_all
from ..format import BLOCK_TOKENS, code_of
from ..layout import BlockLayout
from ..types import KeyValue, PackedBlocks, Pages, Sequences, Tokens
from .dequantize import dequantize_blocks
from .encode import EncodeShape, NewStates, PagePlaces, PageShape, encode_blocks, encode_blocks_of_pages

ENCODE, ENCODE_PAGES, DEQUANTIZE = map(Kernel, (encode_blocks, encode_blocks_of_pages, dequantize_blocks))


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
    layout: BlockLayout, is_value: bool, dtype: torch.dtype, on: Target, matrix: Any
) -> tuple[EncodeConfig, EncodeShape]:
    """Launch parameters and constants for the keys or values of blocks."""
    dim, padded = ((layout.key_dim, layout.key_dim_padded), (layout.value_dim, layout.value_dim_padded))[is_value]
    bits, words_at = layout.bits[is_value], is_value * layout.key_words
    tile = max(16, triton.next_power_of_2(padded))
    config = encode_config(tile, padded, layout.bits, dtype.itemsize, on.capability)
    of_block = (dim, padded, tile, bits, is_value, matrix, config.k_step, on.asm)
    loud = 0 if is_value else layout.loud
    return config, EncodeShape(*of_block, layout.block_words, words_at, layout.scales_at, loud)


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
    of_states = list(zip((keys, values), (packed.data,) * 2, rotations, packed.channel_scales, strict=True))
    first, stop = tokens or (0, keys.shape[2])
    kind = (keys.dtype, (keys.device, values.device, packed.data.device), packed.block_strides, packed.layout)
    launches, steps = _encode_launches(
        ENCODE, keys.shape[:2], keys.stride(), values.stride(), (stop - first, start), kind
    )
    if not launches:
        return
    addresses = [
        (states.data_ptr() + first * step, *[tensor.data_ptr() for tensor in others])
        for (states, *others), step in zip(of_states, steps, strict=True)
    ]
    launch_all(launches, addresses, lambda: [(states[:, :, first:stop], *others) for states, *others in of_states])


@lru_cache(maxsize=1024)
def _encode_launches(
    kernel: Kernel,
    shape: torch.Size,
    key_strides: tuple[int, ...],
    value_strides: tuple[int, ...],
    place: tuple[int, int],
    kind: tuple[Any, ...],
) -> tuple[tuple[Launch, ...], tuple[int, ...]]:
    """Launches of `encode` for keys and values like these, and bytes from a token to the next; no launches without a
    block. `shape` is (B, Hkv), `place` (number of tokens, first block)."""
    (batch, heads), (length, start) = shape, place
    blocks, rest = divmod(length, BLOCK_TOKENS)
    if rest:
        raise ValueError(f"`keys` have {length} tokens; only whole blocks of {BLOCK_TOKENS} can be encoded.")
    if key_strides[-1] != 1 or value_strides[-1] != 1:
        raise ValueError(
            f"The last dimension of keys and values must be contiguous; strides are {key_strides} and {value_strides}."
        )
    if batch * heads * blocks == 0:
        return (), ()
    dtype, (device, *_), block_strides, layout = kind
    on, matrix = target(device), matrix_type(dtype, device)
    launches = []
    for is_value, strides in ((False, key_strides[:3]), (True, value_strides[:3])):
        config, shape = encode_shape(layout, is_value, dtype, on, matrix)
        options: dict[str, Any] = {} if config.registers is None else {"maxnreg": config.registers}
        if on.dependent_launch and is_value:
            options["launch_pdl"] = True
        constants = (shape, on.dependent_launch, config.stages)
        programs = config.programs_per_multiprocessor * on.multiprocessors // (batch * heads)
        launch = Launch(
            kernel,
            device.index,
            (min(blocks, max(1, programs)), batch * heads, 1),
            (heads, blocks, start, *block_strides, Strides(*strides)),
            constants,
            (constants, config, dtype, device.index),
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
    (total, kv_heads, _), count = key.shape, sequences.cu_seqlens_q.shape[0] - 1
    on, device, matrix = target(key.device), key.device, matrix_type(key.dtype, key.device)
    config, of_keys = encode_shape(pages.layout, False, key.dtype, on, matrix)
    _, of_values = encode_shape(pages.layout, True, key.dtype, on, matrix)
    of_values = of_values._replace(K_STEP=min(config.k_step, of_values.TILE))
    most = total // BLOCK_TOKENS + min(count, total)
    programs = max(1, config.programs_per_multiprocessor * on.multiprocessors // (2 * kv_heads))
    block_b = triton.next_power_of_2(max(count, sequences.least_padding))
    constants = (of_keys, of_values, PageShape(*pages.place, block_b))
    key_t, key_h, value_t, value_h = tokens.row_strides
    tables = (sequences.block_table, sequences.cu_seqlens_q, sequences.cu_seqlens_k)
    places = PagePlaces(pages.rows, *tables, pages.page_blocks, count, sequences.block_table.shape[1])
    ENCODE_PAGES(
        (min(most, programs), kv_heads, 2),
        (NewStates(key, key_h, key_t, rotations[0], pages.key_channel_scales),
         NewStates(value, value_h, value_t, rotations[1], pages.value_channel_scales), places, pages.blocks),
        (),
        constants,
        (constants, key.dtype, rotations[0].dtype, device.index),
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


def dequantize_config(dim: int, bits: int, loud: int, capability: tuple[int, int]) -> DequantizeConfig:
    """Look up the heuristic table; `capability` is that of an NVIDIA GPU, or (0, 0)."""
    quarters = code_of(bits).quarters
    if capability[0] == 9 and dim <= 256:
        warps = 4 if quarters == 1 and not loud and dim & (dim - 1) == 0 and dim <= 128 else 8
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
    batch, heads = packed.data.shape[:2]
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
    on, layout = target(keys.device), packed.layout
    for is_value, states, rotation, own_scales in zip(
        (False, True), (keys, values), rotations, packed.channel_scales, strict=True
    ):
        dim, bits = rotation.shape[0], layout.bits[is_value]
        loud = layout.loud * (not is_value)
        config = dequantize_config(dim, bits, loud, on.capability)
        tile = max(16 * config.chunks, triton.next_power_of_2(dim))
        columns = min(config.columns, tile)
        tiles = triton.cdiv(dim, columns)
        programs = 2 * on.multiprocessors // (batch * heads * tiles)  # two of a multiprocessor
        constants = (states.shape[-1], dim, tile, bits, is_value, config.chunks, columns, config.resident, on.asm)
        constants = (*constants, layout.block_words, is_value * layout.key_words, layout.scales_at, loud)
        DEQUANTIZE(
            (min(blocks, max(1, programs)), batch * heads, tiles),
            (packed.data, rotation, own_scales, states),
            (heads, blocks, start, *packed.block_strides, Strides(*states.stride()[:3])),
            constants,
            (constants, config, states.dtype, rotation.dtype, states.device.index),
            num_warps=config.warps,
        )
