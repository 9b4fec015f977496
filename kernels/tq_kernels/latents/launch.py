"""Launch attention over packed latents: three kernels, which read lengths on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton

from ..common.device import AMPERE, Target, interpreted, target
from ..common.launcher import Kernel, on_its_device
from ..layout import BlockLayout
from ..prefix.launch import mask_layout, prefix_splits
from ..types import AttentionOptions, HeldCounts, KeyValue, PackedBlocks
from .attention import attend_latents_split, merge_latents, rotate_latent_queries

ROTATE, SPLIT, MERGE = Kernel(rotate_latent_queries), Kernel(attend_latents_split), Kernel(merge_latents)


@dataclass(frozen=True)
class LatentConfig:
    """Tile sizes and launch parameters of `attend_latents_split`.

    Args:
        block_rows: Query rows of a program.
        tile: Tokens between two updates of the maximum.
        chunks: Parts of a latent, whose products follow one another.
        warps: Warps of a program.
        stages: 2 to copy words of the next tile ahead, or 1.
        registers: Most registers of a thread, or `None`.
        programs_per_multiprocessor: Number of programs a multiprocessor holds.
    """

    block_rows: int
    tile: int
    chunks: int
    warps: int
    stages: int
    registers: int | None = None
    programs_per_multiprocessor: int = 1


def takes_latents(layout: BlockLayout, device: torch.device) -> bool:
    """Whether the kernels take latents (keys) and rotary keys (values) of these sizes on this device: powers of two,
    rotary keys of 4 or 8 bits, on NVIDIA from Ampere on."""
    (latent, rotary), on = (layout.key_dim, layout.value_dim), target(device)
    powers = latent & (latent - 1) == 0 and rotary & (rotary - 1) == 0
    fits = powers and 64 <= latent <= 512 and 16 <= rotary <= 128 and layout.value_bits >= 4
    return fits and (on.asm >= AMPERE.value or interpreted())


@lru_cache
def latent_config(rows: int, layout: BlockLayout, on: Target) -> LatentConfig:
    """Look up the heuristic table for `rows` = Hq * S query rows."""
    if on.shared_bytes < 120 * 1024:
        return LatentConfig(16 if rows <= 16 else 32, 32, 4, 8, 1)
    if rows <= 16:
        return LatentConfig(16, 64, 8, 4, 2, None, 2) if on.shared_bytes > 200 * 1024 else LatentConfig(16, 64, 4, 8, 2)
    # Hopper's products have 64 rows, and are faster for 32 rows, too (H200: 8 x 32k in 135 instead of 150 us).
    return LatentConfig(64, 64, 4, 8, 3) if on.capability[0] == 9 else LatentConfig(32, 64, 4, 8, 2)


def fitted(config: LatentConfig, layout: BlockLayout) -> LatentConfig:
    """`config` with chunks and warps for channels this few: a thread unpacks two neighbours, the halves of a word."""
    chunks = max(4 if layout.key_bits < 4 else 1, min(config.chunks, layout.key_dim // 64))
    pairs = config.tile // 4 * min(layout.key_dim // chunks, layout.value_dim) // 2
    return replace(config, chunks=chunks, warps=min(config.warps, pairs // 32))


def latent_constants(layout: BlockLayout, causal: bool, mask: int, config: LatentConfig, on: Target) -> tuple[Any, ...]:
    """Constants of `attend_latents_split` on this target, in order."""
    tiles = (config.block_rows, config.tile, config.chunks, config.stages, on.asm)
    return (layout.key_dim, layout.value_dim, *layout.bits, causal, mask, *tiles)


@on_its_device
def attend_latents(
    latent: torch.Tensor,
    rotary: torch.Tensor,
    held: tuple[PackedBlocks, KeyValue, KeyValue],
    counts: HeldCounts,
    rotations: KeyValue,
    mask: torch.Tensor | None,
    options: AttentionOptions,
    *,
    allocate: Callable[[int], torch.Tensor],
    config: LatentConfig | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Attention of S queries over sinks, packed blocks and residual of latents and rotary keys.

    Args:
        latent: `[Hq, B * S, R]`, any float dtype, last dimension contiguous: queries times the up-projection of keys.
        rotary: `[B, Hq, S, Dr]`, likewise: rotary parts of the queries.
        held: Packed blocks of one KV head; sinks, and the residual's ring: latents `[B, 1, *, R]` and rotary keys
            `[B, 1, *, Dr]`, dense, the last two dimensions contiguous.
        counts: Counts of blocks, residual rows and sinks to attend to. The last S rows are the queries' own.
        rotations: sqrt(D) R of latents and of rotary keys as `[D, D]` fp16.
        mask: `[B, 1, S or 1, T]` bool, True attends, T counting sinks, blocks' tokens and residual rows in this order.
        options: Options that only scale. If causal, the packed part and the sinks must be older than all queries.
        allocate: Function of a number of elements that returns float32 scratch of that size or more, 16-byte aligned.
        config, splits: Replace the choices of the table.

    Returns:
        Means of latents `[Hq, B * S, R]` in the dtype of `latent`. Rows that attend to nothing are 0.
    """
    packed, sinks, ring = held
    batch, query_heads, queries, value_dim = rotary.shape
    key_dim, rows, on = latent.shape[2], query_heads * queries, target(latent.device)
    config = fitted(config or latent_config(rows, packed.layout, on), packed.layout)
    count, row_tiles = batch * rows, -(-rows // config.block_rows)
    if splits is None:
        # A program has two blocks at least: more partial results take longer to merge than another block takes.
        resident = on.multiprocessors * config.programs_per_multiprocessor
        splits = prefix_splits(row_tiles * batch, max(1, packed.capacity // 2), resident)
    slots = splits + -(-(sinks[0].shape[2] + ring[0].shape[2]) // config.tile)
    operands = count * (key_dim + value_dim) // 2
    sizes = [operands, operands, slots * count * key_dim, slots * count, count]
    rotated, plain, partial, lse, scale = allocate(sum(sizes))[: sum(sizes)].split(sizes)
    rotated, plain = rotated.view(torch.float16), plain.view(torch.float16)
    out = torch.empty_like(latent, memory_format=torch.contiguous_format)
    index, factors = latent.device.index, packed.channel_scales
    dims = (key_dim, value_dim)
    ROTATE(
        (rows, batch, 1),
        (latent, rotary, *rotations, *factors, rotated, plain, scale),
        (rows, queries, *latent.stride()[:2], *rotary.stride()[:3]),
        dims,
        (dims, latent.dtype, rotary.dtype, index),
        num_warps=1,
    )
    kind, strides = mask_layout(mask)
    causal = options.causal and mask is None and queries > 1
    constants = latent_constants(packed.layout, causal, kind, config, on)
    limits: dict[str, Any] = {"num_warps": config.warps, "num_stages": config.stages}
    if config.registers is not None:
        limits["maxnreg"] = config.registers
    SPLIT(
        (row_tiles, batch, splits),
        (
            *(rotated, plain, scale, packed.key_words, packed.value_words, packed.scales, packed.key_means),
            *(counts.tensors[0], *sinks, *ring, counts.tensors[1], counts.tensors[2]),
            *(scale if mask is None else mask.view(torch.uint8), lse, partial),
        ),
        (
            *(rows, count, queries, packed.block_strides[0], sinks[0].stride(0) // key_dim),
            *(ring[0].stride(0) // key_dim, ring[0].shape[2], *strides, options.log2_factors[0]),
        ),
        constants,
        (constants, config, ring[0].dtype, mask is None, index),
        **limits,
    )
    block_s = min(triton.next_power_of_2(splits), 16384 // key_dim)
    constants = (key_dim, config.tile, block_s, 8)
    MERGE(
        (rows, batch, 1),
        (lse, partial, counts.tensors[1], counts.tensors[2], rotations[0], factors.keys, out),
        (rows, queries, count, splits, *out.stride()[:2]),
        constants,
        (constants, out.dtype, index),
        num_warps=8,
    )
    return out
