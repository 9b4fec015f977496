"""Launch attention over packed latents: three kernels, which read lengths on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton

from ..common.device import AMPERE, Target, interpreted, target
from ..common.launcher import Kernel, on_its_device
from ..decode.launch import NO_PLACE
from ..decode.reduce import ReduceShape
from ..format import code_of
from ..layout import BlockLayout
from ..prefix.launch import mask_layout, prefix_splits
from ..types import AttentionOptions, HeldCounts, KeyValue, PackedBlocks, Pages, Sequences
from .attention import LatentNumbers, LatentShape, latents_split, merge_latents, rotate_latent_queries

ROTATE, SPLIT, MERGE = Kernel(rotate_latent_queries), Kernel(latents_split), Kernel(merge_latents)


@dataclass(frozen=True)
class LatentConfig:
    """Tile sizes and launch parameters of `latents_split`.

    Args:
        block_rows: Query rows of a program.
        tile: Tokens between two updates of the maximum.
        chunks: Parts of a latent, whose products follow one another.
        warps: Warps of a program.
        stages: 1, and the number of tiles whose words are copied ahead.
        programs_per_multiprocessor: Number of programs a multiprocessor holds.
    """

    block_rows: int
    tile: int
    chunks: int
    warps: int
    stages: int
    programs_per_multiprocessor: int = 1


def takes_latents(layout: BlockLayout, device: torch.device) -> bool:
    """Whether the kernels take latents (keys) and rotary keys (values) of these sizes on this device: powers of two,
    rotary keys of 4 or 8 bits, on NVIDIA from Ampere on."""
    (latent, rotary), on = (layout.key_dim, layout.value_dim), target(device)
    powers = latent & (latent - 1) == 0 and rotary & (rotary - 1) == 0
    fits = powers and 64 <= latent <= 512 and 16 <= rotary <= 128 and code_of(layout.value_bits).quarters == 1
    return fits and (on.asm >= AMPERE.value or interpreted())


@lru_cache
def latent_config(rows: int, on: Target) -> LatentConfig:
    """Look up the heuristic table for `rows` = Hq * S query rows."""
    if on.shared_bytes < 120 * 1024:
        return LatentConfig(16 if rows <= 16 else 32, 32, 4, 8, 1)
    if rows <= 16:
        return LatentConfig(16, 64, 8, 4, 2, 2) if on.shared_bytes > 200 * 1024 else LatentConfig(16, 64, 4, 8, 2)
    # Hopper's products have 64 rows, and are faster for 32 rows, too (H200: 8 x 32k in 135 instead of 150 us).
    return LatentConfig(64, 64, 4, 8, 3) if on.capability[0] == 9 else LatentConfig(32, 64, 4, 8, 2)


def fitted(config: LatentConfig, layout: BlockLayout) -> LatentConfig:
    """`config` with chunks and warps for channels this few: a thread unpacks two neighbours, the halves of a word."""
    chunks = max(code_of(layout.key_bits).quarters, min(config.chunks, layout.key_dim // 64))
    pairs = config.tile // 4 * min(layout.key_dim // chunks, layout.value_dim) // 2
    return replace(config, chunks=chunks, warps=min(config.warps, pairs // 32))


def latent_constants(
    layout: BlockLayout, causal: bool, mask: int, config: LatentConfig, on: Target, place: tuple[int, ...] = NO_PLACE
) -> tuple[LatentShape]:
    """Constants of `latents_split` on this target; `place` is that of `Pages`."""
    tiles = (config.block_rows, config.tile, config.chunks, config.stages, on.asm)
    sizes = (layout.block_words, *place)
    return (LatentShape(layout.key_dim, layout.value_dim, *layout.bits, causal, mask, *tiles, *sizes),)


def latent_scratch_bytes(
    batch: int, query_heads: int, queries: int, layout: BlockLayout, dense: int, device: torch.device
) -> int:
    """Most bytes of scratch of a step for at most `batch` sequences with at most `queries` new tokens, any number of
    blocks, and at most `dense` dense tokens."""
    on, rows = target(device), query_heads * queries
    config, count = fitted(latent_config(rows, on), layout), batch * rows
    # `prefix_splits` chooses splits for two waves at most.
    programs = 2 * on.multiprocessors * config.programs_per_multiprocessor
    partials = max(count, programs * config.block_rows) + -(-dense // config.tile) * count
    return 4 * (count * (layout.key_dim + layout.value_dim + 1) + partials * (layout.key_dim + 1))


@on_its_device
def attend_latents(
    latent: torch.Tensor,
    rotary: torch.Tensor,
    held: tuple[PackedBlocks, torch.Tensor, int] | tuple[Pages, KeyValue],
    counts: HeldCounts | Sequences,
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
        latent: `[Hq, B * S, R]`, any float dtype, last dimension contiguous: queries times the up-projection of keys;
            over pages `[Hq, T, R]`, of all new tokens.
        rotary: `[B, Hq, S, Dr]`, likewise: rotary parts of the queries; over pages `[1, Hq, T, Dr]`.
        held: Packed blocks of one KV head; dense rows `[B, 1, ring + sinks, R + Dr]`, contiguous; and the number of
            sinks. Or pages, and the new latents `[T, 1, R]` and rotary keys `[T, 1, Dr]` in the dtype of the rows,
            strides multiples of 8, addresses of 16.
        counts: Counts of blocks, residual rows and sinks to attend to. The last S rows are the queries' own. Or the
            sequences over pages, whose new tokens are not stored yet, S = `max_q`.
        rotations: sqrt(D) R of latents and of rotary keys as `[D, D]` fp16.
        mask: `[B, 1, S or 1, T]` bool, True attends, T counting sinks, blocks' tokens and residual rows in this order.
            `None` over pages.
        options: Options that only scale. If causal, the packed part and the sinks must be older than all queries.
        allocate: Function that returns float32 scratch of a number of elements or more, 16-byte aligned.
        config, splits: Replace the choices of the table.

    Returns:
        Means of latents in the shape and dtype of `latent`. Rows that attend to nothing are 0, padding tokens too.
    """
    key_dim, value_dim, on, index = latent.shape[2], rotary.shape[3], target(latent.device), latent.device.index
    query_heads = rotary.shape[1]
    tables: tuple[torch.Tensor | None, ...]
    kind, masked = mask_layout(mask)
    if isinstance(counts, Sequences):
        pages, new = held
        assert isinstance(pages, Pages)
        batch, queries, table = counts.cu_seqlens_q.shape[0] - 1, counts.max_q, counts.block_table
        layout, factors = pages.layout, (pages.key_channel_scales, pages.value_channel_scales)
        room = (table.shape[1] - pages.first_block_column, pages.ring_rows + pages.sinks + queries - 1)
        packed, place, dense = pages.blocks, pages.place, pages.rows
        tables, of_counts = (*new, table, *counts[:2]), (counts.packed, None, None)
        numbers = (pages.page_blocks, None, None, new[0].stride(0) // 8, new[1].stride(0) // 8, table.shape[1])
        out = torch.zeros_like(latent, memory_format=torch.contiguous_format)
    else:
        blocks, dense, sinks = held
        assert isinstance(blocks, PackedBlocks) and isinstance(sinks, int)
        (batch, _, queries, _), layout, factors = rotary.shape, blocks.layout, blocks.channel_scales
        room = (blocks.capacity, dense.shape[2])
        packed, place = blocks.data, NO_PLACE
        tables, of_counts = (None,) * 5, counts.tensors
        numbers = (blocks.block_strides[0], dense.shape[2] - sinks, sinks, None, None, None)
        out = torch.empty_like(latent, memory_format=torch.contiguous_format)
    rows = query_heads * queries
    config = fitted(config or latent_config(rows, on), layout)
    count, row_tiles = batch * rows, -(-rows // config.block_rows)
    if splits is None:
        # A program has two blocks at least: more partial results take longer to merge than another block takes.
        resident = on.multiprocessors * config.programs_per_multiprocessor
        splits = prefix_splits(row_tiles * batch, max(1, room[0] // 2), resident)
    slots = splits + -(-room[1] // config.tile)
    operands = count * (key_dim + value_dim) // 2
    sizes = [operands, operands, slots * count * key_dim, slots * count, count]
    rotated, plain, partial, lse, scale = allocate(sum(sizes))[: sum(sizes)].split(sizes)
    rotated, plain = rotated.view(torch.float16), plain.view(torch.float16)
    dims = (key_dim, value_dim)
    ROTATE(
        (rows, batch, 1),
        (latent, rotary, *rotations, *factors, tables[3], rotated, plain, scale),
        (rows, queries, latent.stride()[:2], rotary.stride()[:3]),
        dims,
        (dims, latent.dtype, rotary.dtype, tables[3] is None, index),
        num_warps=1,
    )
    causal = options.causal and mask is None and queries > 1
    constants = latent_constants(layout, causal, kind, config, on, place)
    SPLIT(
        (row_tiles, batch, splits),
        (*(rotated, plain, scale, packed, of_counts[0], dense, *of_counts[1:]), *(masked, *tables, lse, partial)),
        (LatentNumbers(rows, count, queries, *numbers, options.log2_factors[0]),),
        constants,
        (constants, config, dense.dtype, index),
        num_warps=config.warps,
        num_stages=config.stages,
    )
    block_s = min(triton.next_power_of_2(splits), 16384 // key_dim)
    shape = ReduceShape(key_dim, key_dim, key_dim, block_s, 8, TILE_R=config.tile)
    of_pages = (None,) * 3 if tables[3] is None else (of_counts[0], *tables[3:])
    MERGE(
        (rows, batch, 1),
        (lse, partial, *of_counts[1:], *of_pages, rotations[0], factors[0], out),
        (rows, queries, count, splits, out.stride()[:2]),
        (shape,),
        (shape, out.dtype, tables[3] is None, index),
        num_warps=8,
    )
    return out
