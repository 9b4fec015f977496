"""What to launch for attention over dense keys and values: a heuristic table, no autotuner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..common.compat import current_device
from ..common.device import Target, target
from ..common.launcher import Kernel, specialised
from ..common.softmax import LOG2E
from .dense import dense_attention, mask_spans
from .launch import mask_layout, merge, prefix_splits

ATTEND, SPANS = Kernel(dense_attention), Kernel(mask_spans)
MATRIX_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
MAX_DIM = 256
SPLIT_TOKENS = 128
"""Tokens that a program of few rows takes in the time that another split costs half of (`prefix_splits`)."""


@dataclass(frozen=True)
class DenseConfig:
    """Tile sizes and launch parameters of `dense_attention`.

    Args:
        block_rows: Query rows of a program.
        block_tokens: Tokens of a tile.
        warps: Warps of a program.
        stages: Tiles on their way at a time.
    """

    block_rows: int
    block_tokens: int
    warps: int
    stages: int


@lru_cache
def dense_config(dim: int, rows: int, masked: bool, on: Target) -> DenseConfig:
    """The heuristic table.

    Args:
        dim: Channels of the larger tile, a power of two.
        rows: Query rows of a KV head.
        masked: Whether there is a mask row by row.
        on: The device.
    """
    large = on.asm and on.shared_bytes > 160 * 1024
    if rows <= 16:
        return DenseConfig(16, 64 if dim <= 128 else 32, 4, 2)
    if not on.asm:
        return DenseConfig(64, 32, 4, 1)
    # What is on its way takes registers, for which masks leave no room.
    if dim > 128:
        return DenseConfig(64, 32, 8, 1 if masked or not large else 3)
    if not large or (masked and not on.dependent_launch):
        return DenseConfig(64, 32, 4, 1 if masked else 2)
    return DenseConfig(128, 64, 8, 1 if masked else 3)


def attends_dense(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the kernel takes these dtypes and heads on this device: matrix units that `tl.dot` uses, 16 bits."""
    same = query.dtype == keys.dtype == values.dtype and query.dtype in MATRIX_TYPES
    return same and max(keys.shape[3], values.shape[3]) <= MAX_DIM and not target(query.device).fragments


def attend_dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
    allocate: Callable[[int], torch.Tensor],
    mask: torch.Tensor | None = None,
    causal: bool = True,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Attention of the newest S of T tokens over dense states.

    Args:
        query: `[B, Hq, S, Dk]` fp16 or bf16, last dimension contiguous, other strides as they come.
        keys: `[B, Hkv, T, Dk]`, likewise.
        values: `[B, Hkv, T, Dv]`, likewise.
        scaling: Factor of the logits.
        allocate: Gives scratch: float32, of at least so many elements, 16-byte aligned.
        mask: `[B, 1, S or 1, >= T]` bool, True attends.
        causal: With no mask, query i does not see the last S - 1 - i tokens.
        softcap: cap of cap * tanh(logit / cap).
        s_aux: `[Hq]` logits of sinks that take weight but have no value.
        splits: Programs that share the tokens of a tile of rows, instead of what the table says.

    Returns:
        `[B, S, Hq, Dv]`. Rows that attend to nothing are 0.
    """
    device = query.device
    if device.type == "cuda" and device.index != current_device():
        with torch.cuda.device(device):
            return attend_dense(
                query, keys, values, scaling=scaling, allocate=allocate, mask=mask, causal=causal, softcap=softcap,
                s_aux=s_aux, splits=splits,
            )  # fmt: skip
    batch, query_heads, queries, key_dim = query.shape
    kv_heads, tokens, value_dim = values.shape[1:]
    groups, on = query_heads // kv_heads, target(device)
    rows, heads = groups * queries, batch * kv_heads
    block_dk, block_dv = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    kind, mask_strides = mask_layout(mask)
    config = dense_config(max(block_dk, block_dv), rows, kind == 2, on)
    row_tiles = -(-rows // config.block_rows)
    if splits is None:
        # Rows of a mask have shares of their own width; there are enough of them.
        splits = (
            1
            if kind == 2 and row_tiles > 1
            else prefix_splits(row_tiles * heads, -(-tokens // SPLIT_TOKENS), 2 * on.multiprocessors)
        )
    out = query.new_empty(batch, queries, query_heads, value_dim)
    sums = splits * heads * rows if splits > 1 else 0
    sizes = [sums * value_dim, sums, 2 * batch * queries if kind == 2 else 0]
    partial, lse, spans = allocate(max(1, sum(sizes)))[: sum(sizes)].split(sizes)
    spans = spans.view(torch.int32)
    seen = query if mask is None else mask.view(torch.uint8)
    if kind == 2:
        SPANS(
            (queries, batch, 1),
            (seen, spans),
            (tokens, *mask_strides),
            (1024,),
            (specialised(mask_strides), device.index),
            num_warps=4,
        )
    # The interpreter cannot multiply bf16.
    matrix = tl.float32 if device.type == "cpu" else MATRIX_TYPES[query.dtype]
    aux = query if s_aux is None else s_aux
    flags = (causal and mask is None, kind, softcap is not None, s_aux is not None, splits > 1)
    tiles = (config.block_rows, config.block_tokens, config.stages)
    constants = (key_dim, value_dim, block_dk, block_dv, *flags, matrix, *tiles)
    strides = (*query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *out.stride()[:3])
    counts = (rows, groups, kv_heads, queries, tokens)
    logits = (scaling * LOG2E.value, (softcap or 1.0) * LOG2E.value)
    ATTEND(
        (row_tiles, heads, splits),
        (query, keys, values, seen, spans, aux, out, partial, lse),
        (*strides, *mask_strides, *counts, *logits, row_tiles),
        constants,
        (constants, specialised((*strides, *mask_strides)), query.dtype, seen.dtype, aux.dtype, device.index),
        num_warps=config.warps,
    )
    if splits > 1:
        merge(partial, lse, aux, out, rows, groups, kv_heads, heads * rows, splits, has_aux=s_aux is not None)
    return out
