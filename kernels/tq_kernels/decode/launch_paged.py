"""Launch a layer's step over the pages of many sequences.

Launches depend on shapes alone and kernels read lengths on the device: a captured graph can be replayed while sequences
grow, begin and end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from ..codec.encode import encode_completed
from ..codec.launch import encode_config
from ..codec.quantize import LEVELS
from ..common.device import Target, matrix_type, target
from ..common.launcher import Kernel
from ..format import BLOCK_TOKENS
from ..turing.split import decode_split_paged_fragments
from ..types import AttentionOptions, Pages, Sequences, Tokens
from .append import TAIL_ROWS, append_tails, rotate_and_append_single
from .plan import Plan, plan_decode
from .reduce import reduce_splits
from .split import decode_split_paged

ROTATE, REDUCE = Kernel(rotate_and_append_single), Kernel(reduce_splits)
SPLIT, SPLIT_FRAGMENTS = Kernel(decode_split_paged), Kernel(decode_split_paged_fragments)
ENCODE, APPEND = Kernel(encode_completed), Kernel(append_tails)


def _strides(*states: torch.Tensor) -> tuple[int, ...]:
    """Strides of tokens and heads in units of 8 elements."""
    return tuple(stride // 8 for x in states for stride in x.stride()[:2])


def _plan(
    count: int,
    query_heads: int,
    kv_heads: int,
    dim: int,
    bits: tuple[int, int],
    room: tuple[int, int],
    flags: tuple[Any, bool],
    on: Target,
) -> Plan:
    """Plan of a decode step of `count` sequences. `bits` are those of keys and of values; `room` is the most blocks and
    dense rows of a sequence."""
    return plan_decode(count, query_heads, kv_heads, 1, dim, dim, *bits, *room, False, 0, *flags, on)


def single_scratch_bytes(
    count: int, query_heads: int, kv_heads: int, dim: int, bits: tuple[int, int], rows: int, device: torch.device
) -> int:
    """Bytes of scratch of `attend_single` for `count` sequences of any length, with `rows` rows of ring and sinks."""
    room = (1 << 20, rows)
    return 4 * _plan(count, query_heads, kv_heads, dim, bits, room, (False, False), target(device)).scratch.size


def attend_single(
    tokens: Tokens,
    pages: Pages,
    sequences: Sequences,
    rotations: tuple[torch.Tensor, torch.Tensor],
    options: AttentionOptions,
    *,
    allocate: Callable[[int], torch.Tensor],
    out: torch.Tensor,
    fill: bool,
) -> None:
    """Compute attention of sequences with one new token, and write its row to the ring.

    Args:
        rotations: sqrt(D) R of keys and of values as `[D, D]` fp16 with D the padded dimension.
        allocate: Function of a number of elements that returns float32 scratch of that size or more, 16-byte aligned.
        out: `[T, Hq, D]` contiguous; rows of other sequences stay as they are.
        fill: Whether to write 0 for padding tokens; requires T >= B and at most one new token a sequence.
    """
    query, key, value = tokens
    (total, query_heads, dim), kv_heads, count = query.shape, key.shape[1], sequences.cu_seqlens_q.shape[0] - 1
    groups, width, device = query_heads // kv_heads, sequences.block_table.shape[1], query.device
    on = target(device)
    bits = (pages.key_bits, pages.value_bits)
    room = (max(width - pages.first_block_column, 0), pages.ring_rows + pages.sinks)
    plan = _plan(count, query_heads, kv_heads, dim, bits, room, options.flags, on)
    at = plan.scratch
    scratch = allocate(at.size)
    place = (pages.sinks, pages.ring_rows, pages.page_rows, pages.block_words)
    block_b = triton.next_power_of_2(count)
    dependent: dict[str, Any] = {"launch_pdl": True} if on.dependent_launch else {}
    limit = {"maxnreg": plan.config.registers} if plan.config.registers else {}

    constants: tuple[Any, ...] = (dim, triton.next_power_of_2(dim), *place, *plan.rotate_constants[1:])
    ROTATE(
        (kv_heads, count + groups * count, 1),
        (query, key, value, pages.rows, sequences.block_table, sequences.cu_seqlens_q, sequences.cu_seqlens_k,
         rotations[0], pages.key_channel_scales, scratch),
        (count, kv_heads, groups * count, *_strides(query, key, value), width, pages.page_blocks, at.plain, at.scale),
        constants,
        (constants, query.dtype, pages.rows.dtype, device.index),
        num_warps=1,
    )  # fmt: skip
    bounds, _ = options.flags
    constants = (dim, rotations[0].shape[0], *bits, bounds, *place, block_b, *plan.tile_constants)
    (SPLIT_FRAGMENTS if on.fragments else SPLIT)(
        (plan.workers, 1, 1),
        (scratch, pages.key_words, pages.value_words, pages.scales, pages.key_means, pages.rows, key, value,
         sequences.block_table, sequences.cu_seqlens_q, sequences.cu_seqlens_k, sequences.packed),
        (count, kv_heads, groups, *_strides(key, value), width, pages.page_blocks, *options.log2_factors,
         plan.row_tiles, plan.tile_rows, at.plain, at.scale, at.lse, at.partial),
        constants,
        (constants, plan.config, pages.rows.dtype, device.index),
        num_warps=plan.config.warps,
        num_stages=plan.config.stages,
        **limit,
        **dependent,
    )  # fmt: skip
    aux = scratch if options.s_aux is None else options.s_aux
    constants = (*plan.reduce_constants, block_b, fill)
    REDUCE(
        plan.reduce_grid,
        (scratch, None, None, None, rotations[1], pages.value_channel_scales, aux, out,
         sequences.cu_seqlens_q, sequences.cu_seqlens_k, sequences.packed),
        (groups, total, kv_heads, plan.row_tiles, plan.streams, plan.tile_rows, plan.workers, at.lse, at.partial,
         plan.dense_splits, 0, query_heads * dim, dim, count),
        constants,
        (constants, out.dtype, aux.dtype, device.index),
        num_warps=plan.reduce_warps,
        **dependent,
    )  # fmt: skip


def encode_new_blocks(
    tokens: Tokens, pages: Pages, sequences: Sequences, rotations: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Encode the blocks that new tokens complete, from the rings and the new tokens.

    Args:
        rotations: R of keys and of values, as in `tq_kernels.codec.launch.encode`.
    """
    _, key, value = tokens
    (total, kv_heads, dim), count = key.shape, sequences.cu_seqlens_q.shape[0] - 1
    on, device = target(key.device), key.device
    padded = rotations[0].shape[0]
    tile = max(16, triton.next_power_of_2(padded))
    config = encode_config(tile, padded, (pages.key_bits, pages.value_bits), key.element_size(), on.capability)
    most = total // BLOCK_TOKENS + min(count, total)
    programs = max(1, config.programs_per_multiprocessor * on.multiprocessors // (2 * kv_heads))
    constants = (
        dim, padded, tile, pages.key_bits, pages.value_bits,
        LEVELS[pages.key_bits],
        LEVELS[pages.value_bits],
        matrix_type(key.dtype, key.device),
        config.k_step,
        pages.sinks,
        pages.ring_rows,
        pages.page_rows,
        pages.block_words,
        triton.next_power_of_2(count),
        on.asm,
    )  # fmt: skip
    ENCODE(
        (min(most, programs), kv_heads, 2),
        (key, value, pages.rows, sequences.block_table, sequences.cu_seqlens_q, sequences.cu_seqlens_k, pages.key_words,
         pages.value_words, pages.scales.view(torch.float16), pages.key_means, *rotations, pages.key_channel_scales,
         pages.value_channel_scales),
        (count, *_strides(key, value), sequences.block_table.shape[1], pages.page_blocks),
        constants,
        (constants, key.dtype, pages.key_means.dtype, rotations[0].dtype, device.index),
        num_warps=config.warps,
    )  # fmt: skip


def append_new_rows(tokens: Tokens, pages: Pages, sequences: Sequences) -> None:
    """Write the newest rows of sequences with several new tokens to their rings, and sinks to their pages."""
    _, key, value = tokens
    count, dim = sequences.cu_seqlens_q.shape[0] - 1, key.shape[2]
    place = (pages.sinks, pages.ring_rows, pages.page_rows, pages.block_words)
    constants = (dim, triton.next_power_of_2(dim), *place)
    APPEND(
        (count, key.shape[1], -(-(pages.ring_rows + pages.sinks) // TAIL_ROWS.value)),
        (key, value, pages.rows, sequences.block_table, sequences.cu_seqlens_q, sequences.cu_seqlens_k),
        (count, *_strides(key, value), sequences.block_table.shape[1], pages.page_blocks),
        constants,
        (constants, key.dtype, key.device.index),
        num_warps=4,
    )
