"""Plan the launches of decode attention for given shapes: a heuristic table, no autotuner.

A plan depends on shapes and the device alone and is made once per combination. Lengths live in device tensors and no
integer argument is specialised: nothing is compiled while a sequence grows.

`README.md` beside this file has the measurements behind three launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import triton

from ..common.device import Target
from ..common.schedule import DENSE_TOKENS, START, row_size
from ..format import BLOCK_TOKENS, code_of
from ..layout import BlockLayout
from .reduce import ReduceShape
from .tiles import DecodeShape

FEW_SEQUENCES = 32
"""Number of sequences over pages that kernels of steps are compiled for, at least. Their lengths fit a warp."""
REDUCE_DENSE = 16
"""Dense slots of a row that `reduce_splits` loads at a time. Constant: kernels must not change as a residual grows."""


@dataclass(frozen=True)
class SplitConfig:
    """Tile sizes and launch parameters of `decode_split`."""

    key_chunks: int
    value_chunks: int
    block_rows: int
    warps: int
    stages: int
    programs_per_multiprocessor: int
    registers: int | None = None


def _chunks(dim: int, bits: int, least: int, most: int) -> int:
    """Number of parts of the channels, computed one after the other: a multiple of four (quarters) at 2 and 3 bits.

    A part's tile is a power of two, of `least` to `most` channels where possible, with the fewest empty channels (96
    channels: 3 tiles of 32). Fewer channels at a time need fewer registers.
    """
    whole = dim // code_of(bits).quarters
    tiles = {n: max(least, triton.next_power_of_2(whole // n)) for n in range(1, 9) if whole % (2 * n) == 0}
    fitting = [n for n, tile in tiles.items() if tile <= most] or [max(tiles)]
    return dim // whole * min(fitting, key=lambda n: n * tiles[n])


def _split_config(layout: BlockLayout, rows: int, on: Target) -> SplitConfig:
    """Look up the heuristic table."""
    key_dim, value_dim, (key_bits, value_bits), loud = (
        layout.key_dim_padded, layout.value_dim_padded, layout.bits, layout.loud,
    )  # fmt: skip
    block_rows = 8 if rows <= 8 and on.small_levels else 16
    wide, of_keys, of_values = max(key_dim, value_dim), code_of(key_bits), code_of(value_bits)
    if wide > 256:
        # Buffers leave room for three programs. Two pairs of their four warps compute the same logits, half as many
        # instructions more, but each scheduler has three warps instead of one: 336 us, not 423 (4 bits, 8 x 32k, H100).
        warps = 4
        most_keys, most_values = 32 if of_keys.quarters > 1 else 2048 // block_rows, 64
    else:
        warps = 2
        most_keys, most_values = (
            64 if dim > 128 or code.quarters > 1 else 128 for dim, code in ((key_dim, of_keys), (value_dim, of_values))
        )
    # Warps share a product by 16 rows. Rows of values are channels: a part has as many at least.
    key_chunks = _chunks(key_dim, key_bits, 16, most_keys)
    value_chunks = _chunks(value_dim, value_bits, 16 * warps, most_values)
    # Two buffers of a block, but one where they were measured to cost more in programs than they hide (8 x 32k at
    # D = 256: 185 us instead of 296 with 4 bits, 181 instead of 201 with 3; FP8 keys are read at 87% of the rate so).
    # With more than 256 channels two would leave room for one program.
    buffers = 1 if wide > 256 or wide > 128 and of_keys.magnitudes else 2
    # Shared memory of a program: its buffers, its queries, the exchange of probabilities between warps,
    # and what CUDA takes.
    key_tile, value_tile = (
        chunks * triton.next_power_of_2(dim // chunks)
        for dim, chunks in ((key_dim, key_chunks), (value_dim, value_chunks))
    )
    mean_tile = _mean_tile(key_dim, key_chunks, warps)
    block_bytes = BLOCK_TOKENS * (key_tile * key_bits + value_tile * value_bits) // 8 + 2 * max(key_tile, mean_tile)
    block_bytes += BLOCK_TOKENS * loud + 16 * loud  # and the means and units of each of its columns
    query_bytes = (
        2 * block_rows * (key_tile + (mean_tile if key_chunks > 1 and mean_tile * key_chunks > key_dim else 0))
    )
    query_bytes += 32 * loud * block_rows
    probability_bytes = 64 * block_rows * (4 if value_chunks > 1 else 2)
    dense_bytes = 2 * DENSE_TOKENS.value * sum(map(triton.next_power_of_2, (key_dim, value_dim)))
    dense_bytes += 2 * block_rows * triton.next_power_of_2(key_dim)
    program_bytes = max(buffers * block_bytes + query_bytes + probability_bytes, dense_bytes) + 1024
    # 4 and 8 bits: two warps a scheduler keep it busy, and with all registers the loop is shortest; 2 and 3 bits gain
    # from more, but not with 256 channels. With 64, where 8 programs spill registers in the loop over blocks, 6 take
    # 62.7 us instead of 68.9 at 4 bits and 77.7 instead of 79.2 at 3 (8 x 32k, H200). An even number, because a
    # program's two warps occupy half of a multiprocessor's four schedulers: with an odd one, one half would finish
    # late.
    if warps == 4:
        most = 3  # four would have 128 registers a thread
    elif buffers == 1 or (of_keys.quarters == of_values.quarters == 1 and max(key_tile, value_tile) > 64):
        most = 4
    else:
        most = 6 if max(key_tile, value_tile) <= 64 else 8
    # Slower, when this took 98 us (4 bits, 128 channels, 8 x 32k): 6 programs (109), 8 with one buffer (143), 2 of four
    # warps (153), 8 of one warp (132), channels in quarters (102), three buffers (103), fragments (118), levels by a
    # cubic in fp16 (106 for values alone). Levels that cost nothing to look up would take 92.
    programs = max(1, min(on.shared_bytes // program_bytes, most) // (4 // warps) * (4 // warps))
    if program_bytes > on.shared_bytes:
        buffers = 0
    registers = 65536 // (32 * warps * programs) // 8 * 8
    return SplitConfig(
        key_chunks=key_chunks,
        value_chunks=value_chunks,
        block_rows=block_rows,
        warps=warps,
        stages=buffers + 1,
        programs_per_multiprocessor=programs,
        registers=registers if registers < 255 else None,
    )


def _fragments_config(key_dim: int, value_dim: int, rows: int) -> SplitConfig:
    """Look up the table of `decode_split_fragments`: programs are warps, as many as registers allow."""
    wide = max(key_dim, value_dim) > 128
    tiles = 2 if rows > 8 and not wide else 1
    programs = 8 if wide or tiles == 2 else (12 if max(key_dim, value_dim) > 64 else 16)
    # Set a limit even at the hardware's maximum: without one ptxas stops at 168 and spills.
    registers = min(65536 // (32 * programs) // 8 * 8, 255)
    return SplitConfig(1, 1, 8 * tiles, 1, 1, programs, registers)


def _mean_tile(key_dim: int, key_chunks: int, warps: int) -> int:
    """Number of elements of a key mean loaded at a time: all, or those of a part of the channels. Asynchronous copies
    move at least 4 bytes a thread."""
    part, least = key_dim // key_chunks, 64 * warps
    if key_chunks > 1 and part >= least and part == triton.next_power_of_2(part):
        return part
    return max(16, triton.next_power_of_2(key_dim), least)


@dataclass(frozen=True)
class ScratchLayout:
    """Offsets into a call's scratch tensor, in lines of 32 float32, and its size in float32."""

    plain: int
    scale: int
    lse: int
    partial: int
    size: int

    @classmethod
    def of(cls, heads: int, rows: int, slots: int, tile_rows: int, layout: BlockLayout) -> ScratchLayout:
        """Layout for `heads` = B * Hkv, `rows` = G * S and partial results in `slots` of `tile_rows` rows."""
        value_dim, row = layout.value_dim, row_size(layout.key_dim_padded, layout.loud)
        at, offsets = 1, []  # a line for the count of claimed jobs
        for size in (
            heads * rows * row // 2,
            -(-heads * rows * layout.key_dim // 2),
            heads * rows,
            slots * tile_rows,
            slots * tile_rows * max(value_dim, layout.value_dim_padded),
        ):
            offsets.append(at)
            at += -(-size // 32)
        return cls(*offsets[1:], size=32 * at)


@dataclass(frozen=True)
class Plan:
    """Launches of decode attention for given shapes: see `DecodeLaunch`."""

    config: SplitConfig
    workers: int
    row_tiles: int
    streams: int
    tile_rows: int
    dense_splits: int
    scratch: ScratchLayout
    reduce_grid: tuple[int, int, int]
    reduce_warps: int
    split: DecodeShape
    reduce: ReduceShape


def padded_sequences(batch: int, least: int) -> int:
    """Number of sequences of pages that kernels are compiled for: one for up to `FEW_SEQUENCES`, then powers of two."""
    return triton.next_power_of_2(max(batch, least, FEW_SEQUENCES))


@lru_cache(maxsize=4096)
def plan_decode(
    batch: int,
    query_heads: int,
    kv_heads: int,
    queries: int,
    layout: BlockLayout,
    capacity: int,
    dense_capacity: int,
    causal: bool,
    mask_rows: int,
    bounds: Any,
    has_aux: bool,
    on: Target,
    least: int = 1,
    place: tuple[int, ...] | None = None,
) -> Plan:
    """Plan; `least` is the number of sequences that the merge is compiled for at least, `place` that of `Pages`."""
    heads, rows = batch * kv_heads, query_heads // kv_heads * queries
    key_dim, value_dim, dkp, dvp = layout.key_dim, layout.value_dim, layout.key_dim_padded, layout.value_dim_padded
    if on.fragments:
        config = _fragments_config(dkp, dvp, rows)
    else:
        config = _split_config(layout, rows, on)
    dense_splits = -(-dense_capacity // DENSE_TOKENS.value)
    row_tiles = -(-rows // config.block_rows)
    streams, tile_rows = heads * row_tiles, min(rows, config.block_rows)
    # One wave of resident programs, or fewer if there are fewer blocks (as `counted`) and dense jobs.
    # Sinks and residual beside the blocks, not after them: 1 x 512 14.0 us instead of 16.2, 1 x 2k 15.3 instead of 17.8
    # (4 bits, H200).
    resident = on.multiprocessors * config.programs_per_multiprocessor
    workers = min(resident, streams * (capacity + START.value + dense_splits))
    block_dk, block_dv = (max(16, triton.next_power_of_2(dim)) for dim in (dkp, max(dvp, value_dim)))
    # Slots loaded at a time: all that a long stream will have, if they fit registers (not by capacity: kernels must
    # not change as it grows).
    reduced = max(batch, least) * kv_heads * row_tiles
    reduce_slots = min(triton.next_power_of_2(resident // reduced + 2), 16384 // triton.next_power_of_2(dvp))
    pages = (*place, padded_sequences(batch, least)) if place else (0,) * 4
    key_chunks, value_chunks = config.key_chunks, config.value_chunks
    return Plan(
        config=config,
        workers=workers,
        row_tiles=row_tiles,
        streams=streams,
        tile_rows=tile_rows,
        dense_splits=dense_splits,
        scratch=ScratchLayout.of(heads, rows, workers + streams * (1 + dense_splits), tile_rows, layout),
        reduce_grid=(streams, tile_rows, 1),
        reduce_warps=2 if reduce_slots * block_dv <= 4096 else (8 if block_dv > 128 else 4),
        split=DecodeShape(
            *(key_dim, value_dim, dkp, dvp, max(value_dim, dvp), *layout.bits),
            *(causal and queries > 1 and not mask_rows, mask_rows, bounds, key_chunks, value_chunks),
            max(16, triton.next_power_of_2(dkp // key_chunks)),
            max(16, triton.next_power_of_2(dvp // value_chunks)),
            *(block_dk, block_dv, _mean_tile(dkp, key_chunks, config.warps), config.block_rows),
            *(on.small_levels, on.asm, on.dependent_launch, layout.block_words, layout.loud, *pages),
        ),
        reduce=ReduceShape(
            *(value_dim, dvp, block_dv, reduce_slots, REDUCE_DENSE, has_aux),
            *(config.block_rows, on.dependent_launch, pages[-1]),
        ),
    )
