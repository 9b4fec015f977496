"""Launch attention of many queries over compressed history: a heuristic table, no autotuner.

Lengths are arguments that are not specialised and the table reads shapes only: nothing is compiled while a sequence
grows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton

from ..common.device import AMPERE, Target, target
from ..common.launcher import Kernel, on_its_device, specialised, states_of
from ..common.schedule import Mask
from ..format import BLOCK_TOKENS, padded_dim
from ..layout import BlockLayout
from ..types import AttentionOptions, KeyValue, PackedBlocks, Pages, Sequences
from .attention import Packed, PrefixNumbers, PrefixShape, PrefixTables, prefix_attention
from .tiles import join_attention, merge_splits

ATTEND, MERGE, JOIN = Kernel(prefix_attention), Kernel(merge_splits), Kernel(join_attention)


@dataclass(frozen=True)
class PrefixConfig:
    """Tile sizes and launch parameters of `prefix_attention`.

    Args:
        block_rows: Query rows of a program.
        step: Tokens between two updates of the maximum, 64 or 128.
        warps: Warps of a program.
        programs_per_multiprocessor: Number of programs a multiprocessor holds.
    """

    block_rows: int
    step: int
    warps: int
    programs_per_multiprocessor: int


def block_of(dim: int) -> int:
    """Number of channels that a tile has for heads of `dim`."""
    return max(32, triton.next_power_of_2(padded_dim(dim)))


@lru_cache
def prefix_config(key_dim: int, value_dim: int, on: Target) -> PrefixConfig:
    """Look up the heuristic table."""
    largest = max(block_of(key_dim), block_of(value_dim))
    if on.asm < AMPERE.value:
        # Products without asynchronous copies hold their operands in registers and shared memory: small tiles.
        return PrefixConfig(32, 64, 4, 2)
    if largest > 128:
        return PrefixConfig(64, 64, 8 if on.dependent_launch else 4, 1)
    # With 128 rows the products of loud channels do not fit in Blackwell's tensor memory.
    return PrefixConfig(128 if on.capability[0] == 9 else 64, 128, 8, 1)


def prefix_takes(key_dim: int, value_dim: int, device: torch.device) -> bool:
    """Whether the kernel runs for heads of this size on this device: not on Turing, and rotations of large heads need
    Hopper's products, which take operands from shared memory. (For sm_80 it takes 13 KB of stack a thread.)"""
    on = target(device)
    widest = 0 if on.fragments else 256 if on.dependent_launch else 128
    return max(block_of(key_dim), block_of(value_dim)) <= widest


@lru_cache(maxsize=4096)
def prefix_splits(tiles: int, units: int, resident: int) -> int:
    """Number of programs that share the tokens of a row tile, chosen to fill waves of resident programs.

    Args:
        tiles: Number of tiles of rows, over all heads and sequences.
        units: Number of packed blocks and dense tiles of 128 tokens that a row tile reads.
        resident: Number of programs the device holds at a time.
    """
    most = max(1, min(units, 2 * resident // max(tiles, 1)))
    # A wave lasts 1 / splits of a tile; another split costs about two units (rotations, partial results).
    return min(range(1, most + 1), key=lambda n: (-(-tiles * n // resident)) * (units / n + 2 * (n > 1)))


def mask_layout(mask: torch.Tensor | None) -> tuple[int, Mask]:
    """Layout of a mask `[B or 1, 1, S or 1, >= T]` for kernels of many queries: the kind, 0 no mask, 1 for all queries
    alike, 2 row by row; and the argument, with strides of 0 where the mask does not change."""
    if mask is None:
        return 0, Mask()
    kind, seen = 1 if mask.shape[2] == 1 or mask.stride(2) == 0 else 2, mask.view(torch.uint8)
    return kind, Mask(seen, mask.stride(0) * (mask.shape[0] > 1), mask.stride(2) * (kind == 2), mask.stride(3))


def prefix_constants(
    layout: BlockLayout,
    causal: bool,
    mask: int,
    bounds: Any,
    has_aux: bool,
    split: bool,
    config: PrefixConfig,
    on: Target,
    pages: tuple[int, ...] = (),
    aligned: bool = True,
) -> tuple[PrefixShape]:
    """Constants of the attention kernel on this target; `pages` are those that only a block table needs."""
    dims = (layout.key_dim, layout.value_dim, layout.key_dim_padded, layout.value_dim_padded)
    flags = (*layout.bits, causal, mask, bounds, has_aux, split)
    tiles = (config.block_rows, config.step, on.asm, layout.block_words, layout.loud, aligned)
    return (PrefixShape(*dims, block_of(layout.key_dim), block_of(layout.value_dim), *flags, *tiles, *pages),)


def _is_aligned(states: torch.Tensor) -> bool:
    """Whether rows of states `[B, H, T, D]` are multiples of 16 bytes."""
    return all(number % 8 == 0 for number in (states.data_ptr() // 2, states.shape[3], *states.stride()[:3]))


@on_its_device
def attend_prefix(
    query: torch.Tensor,
    held: tuple[PackedBlocks, torch.Tensor, int] | Pages,
    counts: tuple[int, int, int] | Sequences,
    new: KeyValue | None,
    rotations: KeyValue,
    mask: torch.Tensor | None,
    options: AttentionOptions,
    *,
    out: torch.Tensor,
    allocate: Callable[[int], torch.Tensor],
    new_lse: torch.Tensor | None = None,
    config: PrefixConfig | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Attention of many queries over sinks, packed blocks, residual and new tokens. Nothing is stored.

    Args:
        query: `[B, Hq, S, Dk]` fp16, bf16 or fp32, last dimension contiguous; row i is the query of the i-th of the
            last S tokens. Over pages `[T, Hq, D]`, of all new tokens.
        held: Packed blocks, dense rows `[B, Hkv, ring + sinks, Dk + Dv]`, contiguous, and the number of sinks among
            them. The residual begins at row 128 * blocks modulo `ring`. Or pages.
        counts: Numbers of sinks, blocks and residual rows to attend to. Or the sequences over pages: attention is
            computed for those with several new tokens, and is causal.
        new: Keys `[B, Hkv, n, Dk]` and values `[B, Hkv, n, Dv]` after the residual, last dimension contiguous, or
            `None`. Over pages `[T, Hkv, D]`, of all new tokens.
        rotations: sqrt(D) R of keys and of values as `[D, D]` fp16 with D the padded dimension.
        mask: `[B, 1, S or 1, >= T]` bool, True attends, T counting sinks, blocks' tokens, residual and new rows in this
            order. `None` over pages.
        out: `[B, S, Hq, Dv]`, any float dtype, last dimension contiguous. Over pages `[T, Hq, D]` contiguous, zeros;
            rows of sequences with one new token are then undefined.
        allocate: Function that returns float32 scratch of a number of elements or more, 16-byte aligned.
        new_lse: Over pages, log-sum-exp `[Hq, T]` float32 of the logits of new tokens: `out` has the attention to them,
            to which that to cached tokens is added.
        config, splits: Replace the choices of the table.

    Returns:
        `out`. Rows that attend to nothing are 0.
    """
    result, on, written, aligned = out, target(query.device), None, True
    tables = None
    if isinstance(counts, Sequences):
        assert isinstance(held, Pages) and new is not None
        # One row of a batch has the new tokens of all sequences.
        query, fresh = query.transpose(0, 1)[None], (new[0].transpose(0, 1)[None], new[1].transpose(0, 1)[None])
        out, (count, units), block_strides = out[None], counts.block_table.shape, (held.page_blocks, 1)
        layout, blocks, dense, *scales = held[:5]
        place = (*held.place, triton.next_power_of_2(max(count, counts.least_padding)), new_lse is not None)
        tables, numbers, width = PrefixTables(*counts[:4]), (0,) * 6, units
        written = counts.cu_seqlens_q[count:]
    else:
        assert not isinstance(held, Pages)
        (packed, dense, max_sinks), (sinks, num_blocks, residual) = held, counts
        fresh = (dense[:, :, :0], dense[:, :, :0]) if new is None else new
        layout, blocks, scales, block_strides = packed.layout, packed.data, packed.channel_scales, packed.block_strides
        units = num_blocks + -(-(sinks + residual + fresh[0].shape[2]) // BLOCK_TOKENS)
        numbers = (num_blocks, sinks, residual, dense.shape[2] - max_sinks, max_sinks, fresh[0].shape[2])
        count, width, place, aligned = 0, 0, (), all(map(_is_aligned, (dense, *fresh)))
    (batch, query_heads, queries, _), kv_heads = query.shape, fresh[0].shape[1]
    config = config or prefix_config(layout.key_dim, layout.value_dim, on)
    groups, heads = query_heads // kv_heads, batch * kv_heads
    rows, dims = groups * queries, (layout.key_dim, layout.value_dim)
    row_tiles = _most_tiles(queries, count, groups, config.block_rows)
    if isinstance(counts, Sequences) and counts.lengths is not None:
        row_tiles = sum(-(-groups * n // config.block_rows) for n in counts.lengths if n > 1)
        if not row_tiles:
            return result
    splits, sizes = _sizes(rows, row_tiles, heads, units, dims, config, on, splits)
    operand_rows, partial, lse = allocate(sum(sizes))[: sum(sizes)].split(sizes)
    if splits > 1 and written is not None:
        lse.fill_(-torch.inf)  # rows of sequences with one new token are not written here
    mask_kind, masked = mask_layout(mask)
    flags = (options.causal and mask is None, mask_kind, *options.flags, splits > 1)
    constants = prefix_constants(layout, *flags, config, on, place, aligned)
    aux = options.s_aux
    dtypes = (query.dtype, dense.dtype, fresh[0].dtype, aux is not None and aux.dtype, out.dtype)
    n = PrefixNumbers(
        *block_strides, rows, groups, kv_heads, *numbers, queries, *options.log2_factors, row_tiles, count, width,
        0 if new_lse is None else new_lse.stride(0),
    )  # fmt: skip
    ATTEND(
        (row_tiles, heads, splits),
        (states_of(query), Packed(blocks, *rotations, *scales), dense, *map(states_of, fresh), masked, aux,
         states_of(out.transpose(1, 2)), partial, lse, operand_rows.view(torch.float16), tables, new_lse, n),
        (),
        constants,
        (constants, config, dtypes, query.device.index),
        num_warps=config.warps,
    )  # fmt: skip
    if splits > 1:
        merge(partial, lse, aux, out, rows, groups, kv_heads, heads * rows, splits, written)
    return result


def merge(
    partial: torch.Tensor,
    lse: torch.Tensor,
    aux: torch.Tensor | None,
    out: torch.Tensor,
    rows: int,
    groups: int,
    kv_heads: int,
    count: int,
    splits: int,
    tokens: torch.Tensor | None = None,
) -> None:
    """Launch `merge_splits`; arguments are the kernel's."""
    value_dim = out.shape[3]
    block_dv = max(16, triton.next_power_of_2(value_dim))
    block_rows = max(1, 2048 // block_dv)
    constants = (value_dim, block_dv, block_rows, aux is not None)
    MERGE(
        (-(-count // block_rows), 1, 1),
        (partial, lse, aux, out, tokens),
        (rows, groups, kv_heads, count, splits, out.stride()[:3]),
        constants,
        (constants, aux is not None and aux.dtype, out.dtype, out.device.index),
        num_warps=4,
    )


@on_its_device
def join(mean: torch.Tensor, lse: torch.Tensor, found: torch.Tensor, found_lse: torch.Tensor) -> None:
    """Launch `join_attention`; arguments are the kernel's."""
    count, heads, dim = mean.shape
    strides = (*mean.stride()[:2], *found.stride()[:2])
    block = triton.next_power_of_2(dim)
    constants = (dim, block, max(1, 4096 // block))
    JOIN(
        (-(-count // constants[2]), heads, 1),
        (mean, lse, found, found_lse),
        (*strides, count, lse.stride(0), found_lse.stride(0)),
        constants,
        (constants, specialised(strides), mean.dtype, found.dtype, mean.device.index),
        num_warps=4,
    )


def _most_tiles(total: int, count: int, groups: int, block_rows: int) -> int:
    """Most row tiles of `total` new tokens of `count` sequences with several: the last of each may be partial."""
    return -(-groups * total // block_rows) + min(count, total // 2)


def _sizes(
    rows: int,
    row_tiles: int,
    heads: int,
    units: int,
    dims: tuple[int, int],
    config: PrefixConfig,
    on: Target,
    splits: int | None = None,
) -> tuple[int, list[int]]:
    """Number of programs a row tile, and of float32 for operands, outputs and sums."""
    if splits is None:
        resident = on.multiprocessors * config.programs_per_multiprocessor
        # Over pages, partial results have rows for single tokens, too.
        most = max(1, 2 * resident * config.block_rows // (heads * rows))
        splits = min(most, prefix_splits(row_tiles * heads, units, resident))
    sums = splits * heads * rows
    operands = splits * heads * row_tiles * config.block_rows * block_of(dims[0]) // 2
    return splits, [operands, sums * dims[1] if splits > 1 else 0, sums]


def many_scratch_bytes(total: int, count: int, heads: tuple[int, int], dim: int, on: Target) -> int:
    """Most scratch bytes of `attend_prefix` over pages, for up to `total` new tokens in up to `count` sequences of any
    lengths; `heads` are query and KV heads."""
    config = prefix_config(dim, dim, on)
    shared = 2 * on.multiprocessors * config.programs_per_multiprocessor
    tiles = _most_tiles(total, count, heads[0] // heads[1], config.block_rows)
    # Tiles are split only into `shared` parts or fewer.
    rows = max(heads[1] * tiles, shared) * config.block_rows
    return 4 * (rows * block_of(dim) // 2 + rows + shared * config.block_rows * dim)
