"""Launch attention of sequences with many new tokens over their pages: `prefix_attention` with a block table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from ..common.device import target
from ..common.launcher import Kernel, specialised
from ..common.softmax import LOG2E
from ..types import Geometry, Pages, Tokens
from .attention import prefix_attention
from .launch import block_of, merge, prefix_config, prefix_constants, prefix_splits, prefix_takes

ATTEND = Kernel(prefix_attention)


def takes_prompts(dim: int, device: torch.device) -> bool:
    """Whether the kernel runs for heads of this size on this device; that of inline matrix products knows no tables."""
    return prefix_takes(dim, dim, device) and not target(device).fragments


def attend_many(
    tokens: Tokens,
    pages: Pages,
    geometry: Geometry,
    rotations: tuple[torch.Tensor, torch.Tensor],
    *,
    scaling: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    allocate: Callable[[int], torch.Tensor],
    out: torch.Tensor,
) -> None:
    """Causal attention of sequences with more than one new token. Nothing is stored.

    Args:
        rotations: sqrt(D) R of keys and of values as `[D, D]` fp16 with D the padded dimension.
        allocate: Gives scratch: float32, of at least so many elements, 16-byte aligned.
        out: `[T, Hq, D]` contiguous, zeros; rows of sequences with one token are then undefined.
    """
    query, key, value = tokens
    (total, query_heads, dim), kv_heads, count = query.shape, key.shape[1], geometry.cu_seqlens_q.shape[0] - 1
    groups, width, on = query_heads // kv_heads, geometry.block_table.shape[1], target(query.device)
    config = prefix_config(dim, dim, pages.key_bits, pages.value_bits, on)
    rows = groups * total
    # Each sequence's last tile may be a part of one.
    row_tiles = -(-rows // config.block_rows) + min(count, total // 2)
    resident = on.multiprocessors * config.programs_per_multiprocessor
    splits = prefix_splits(row_tiles * kv_heads, width, resident)
    sums = splits * kv_heads * rows
    outputs = sums * dim if splits > 1 else 0
    operands = splits * kv_heads * row_tiles * config.block_rows * block_of(dim) // 2
    sizes = [operands, outputs, sums]
    operand_rows, partial, lse = allocate(sum(sizes))[: sum(sizes)].split(sizes)
    if splits > 1:
        lse.fill_(-torch.inf)  # rows of sequences with one new token are written by nobody here
    aux = query if s_aux is None else s_aux
    flags = (True, 0, softcap is not None, s_aux is not None, splits > 1)
    place = (pages.page_rows, pages.block_words, triton.next_power_of_2(count), pages.sinks)
    constants = prefix_constants(dim, dim, pages.key_bits, pages.value_bits, *flags, config, on, place)
    options: dict[str, Any] = {"num_warps": config.warps}
    if config.registers is not None:
        options["maxnreg"] = config.registers
    (query_s, query_h), (new_t, new_h), (new_vt, new_vh), (out_s, out_h) = (x.stride()[:2] for x in (*tokens, out))
    strides = specialised((query_s, query_h, new_t, new_h, new_vt, new_vh, out_s, out_h))
    dtypes = (query.dtype, pages.rows.dtype, key.dtype, aux.dtype, out.dtype)
    ATTEND(
        (row_tiles, kv_heads, splits),
        (
            *(query, pages.key_words, pages.value_words, pages.scales, pages.means, *rotations),
            *(pages.key_channel_scales, pages.value_channel_scales, *[pages.rows] * 4, key, value, query, aux),
            *(out, partial, lse, operand_rows.view(torch.float16), *geometry),
        ),
        (
            *(0, query_h, query_s),
            *(pages.page_blocks, 1),
            *[0] * 8,
            *(0, new_h, new_t),
            *(0, new_vh, new_vt),
            *(0, out_s, out_h),
            rows,
            groups,
            kv_heads,
            *[0] * 7,
            *(0, 0, 0),
            scaling * LOG2E.value,
            (softcap or 1.0) * LOG2E.value,
            row_tiles,
            count,
            width,
        ),
        constants,
        (constants, config, strides, dtypes, query.device.index),
        **options,
    )
    if splits > 1:
        merge(
            partial, lse, aux, out[None], rows, groups, kv_heads, kv_heads * rows, splits,
            has_aux=s_aux is not None, tokens=geometry.cu_seqlens_q[count:],
        )  # fmt: skip
