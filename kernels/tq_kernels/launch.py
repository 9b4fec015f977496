"""Launch decode attention, cheaply: three kernels, found by one dictionary look-up each.

A compiled kernel is launched without Triton's argument analysis (about 3 us against 12 with this many arguments).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from .decode import decode_split
from .plan import Plan, Target, interpreted, plan_decode, target
from .reduce import reduce_splits
from .rotate import rotate_query

__all__ = ["Kernel", "Plan", "Target", "decode_attention", "device_int", "interpreted", "target"]

LOG2E = 1.4426950408889634


class Kernel:
    """A Triton kernel and its compiled variants, found without Triton's own argument analysis."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.variants: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
        key: tuple[Any, ...],
        **options: Any,
    ) -> None:
        """Launch. `key` holds whatever decides the compiled variant besides the alignment of `tensors`."""
        key = (key, *[t.data_ptr() % 16 for t in tensors])
        compiled = self.variants.get(key)
        if compiled is None:
            compiled = self.function[grid](*tensors, *numbers, *constants, **options)
            if compiled is not None:
                self.variants[key] = compiled
            return
        device = tensors[0].device.index
        compiled.run(
            *grid,
            torch._C._cuda_getCurrentRawStream(device),
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *tensors,
            *numbers,
            *constants,
        )


ROTATE, SPLIT, REDUCE = Kernel(rotate_query), Kernel(decode_split), Kernel(reduce_splits)


@lru_cache
@torch.inference_mode(False)
def _integers(size: int, device: torch.device) -> torch.Tensor:
    """0 to `size` on the device, 16 bytes apart, as wide as Triton's alignment."""
    # Copied from the host, which waits for it: filled on the device, another stream might read it too early.
    return torch.arange(size, dtype=torch.int32).repeat_interleave(4).to(device)


@lru_cache(maxsize=65536)
@torch.inference_mode(False)
def device_int(value: int, device: torch.device) -> torch.Tensor:
    """`value` as an int32 scalar on the device, out of a table: the host waits for a table, not for every length."""
    return _integers(max(4096, 1 << value.bit_length()), device)[4 * value]


def decode_attention(
    query: torch.Tensor,
    key_words: torch.Tensor,
    value_words: torch.Tensor,
    scalars: torch.Tensor,
    key_means: torch.Tensor | None,
    num_blocks: torch.Tensor,
    sinks: tuple[torch.Tensor, torch.Tensor],
    window: tuple[torch.Tensor, torch.Tensor],
    num_window: torch.Tensor,
    num_sinks: torch.Tensor,
    key_rotation: torch.Tensor,
    value_rotation: torch.Tensor,
    *,
    key_bits: int,
    value_bits: int,
    scaling: float,
    allocate: Callable[[int], torch.Tensor],
    out: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = True,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of S queries over sinks, packed blocks and window, in three launches.

    Args:
        query: `[B, Hq, S, Dk]` fp16, bf16 or fp32, last dimension contiguous.
        key_words, value_words, scalars: `[B, Hkv, N, *]` int32 packed blocks (`tq_hf/layout.py`), of which the first
            `num_blocks` count. The last two dimensions are contiguous, and all packed tensors have the same strides
            in blocks.
        key_means: `[B, Hkv, N, Dk padded]` fp16, or `None`.
        num_blocks: int32 scalar on the device.
        sinks: Keys `[B, Hkv, sinks, Dk]` and values `[B, Hkv, sinks, Dv]`, dense, the last two dimensions contiguous.
        window: The same, a ring: the `num_window` rows that count start at row 128 * `num_blocks` modulo its size.
        num_window: int32 scalar on the device.
        num_sinks: int32 scalar on the device: the rows of `sinks` that count.
        key_rotation, value_rotation: sqrt(D) R as `[D, D]` fp16 with D the padded dimension (powers of two are then
            exactly +-1).
        scaling: Factor of the logits.
        allocate: Gives scratch: float32, of at least so many elements, 16-byte aligned.
        out: `[B, S, Hq, Dv]`, any float dtype, last dimension contiguous.
        mask: `[B, 1, S or 1, T]` bool, True attends, T counting sinks, blocks' tokens and window rows in this order.
        causal: With S > 1 and no mask, query s does not see the last S - 1 - s window rows (the packed part and the
            sinks are older than all queries).
        softcap: cap of cap * tanh(logit / cap).
        s_aux: `[Hq]` logits of sinks that take weight but have no value.

    Returns:
        `out`. Rows that attend to nothing are 0.
    """
    batch, query_heads, queries, key_dim = query.shape
    kv_heads, capacity = key_words.shape[1:3]
    value_dim = window[1].shape[3]
    sink_capacity, window_capacity = sinks[0].shape[2], window[0].shape[2]
    device = query.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        # Kernels are launched on the current device; layers of a model spread over several GPUs are not on it.
        with torch.cuda.device(device):
            return decode_attention(
                query, key_words, value_words, scalars, key_means, num_blocks, sinks, window, num_window, num_sinks,
                key_rotation, value_rotation, key_bits=key_bits, value_bits=value_bits, scaling=scaling,
                allocate=allocate, out=out, mask=mask, causal=causal, softcap=softcap, s_aux=s_aux,
            )  # fmt: skip
    on = target(device)
    key = (
        batch,
        query_heads,
        kv_heads,
        queries,
        key_dim,
        value_dim,
        key_bits,
        value_bits,
        key_means is not None,
        capacity,
        sink_capacity + window_capacity,
        causal,
        0 if mask is None else min(mask.shape[2], 2),
        softcap is not None,
        s_aux is not None,
        on,
    )
    plan = plan_decode(*key)
    at = plan.scratch
    scratch = allocate(at.size)
    rows = query_heads // kv_heads * queries
    ROTATE(
        plan.rotate_grid,
        (query, key_rotation, scratch),
        (rows, queries, kv_heads, *query.stride()[:3], at.plain, at.scale),
        plan.rotate_constants,
        (plan.rotate_constants, query.dtype, device.index),
        num_warps=2,
    )
    options = {"launch_pdl": True} if on.dependent_launch else {}
    limit = {"maxnreg": plan.config.registers} if plan.config.registers else {}
    words = key_words.shape[3]
    blocks_b, blocks_h = key_words.stride(0) // words, key_words.stride(1) // words
    (sink_b, sink_h), (window_b, window_h) = (
        (part.stride(0) // key_dim, part.stride(1) // key_dim) for part in (sinks[0], window[0])
    )
    mask_b, mask_s, mask_t = (
        (0, 0, 0) if mask is None else (mask.stride(0), 0 if mask.shape[2] == 1 else mask.stride(2), mask.stride(3))
    )
    SPLIT(
        (plan.workers, 1, 1),
        (
            scratch,
            key_words,
            value_words,
            scalars,
            scratch if key_means is None else key_means,
            num_blocks,
            *sinks,
            *window,
            num_window,
            num_sinks,
            scratch if mask is None else mask.view(torch.uint8),
        ),
        (
            rows,
            queries,
            kv_heads,
            blocks_b,
            blocks_h,
            sink_b,
            sink_h,
            window_b,
            window_h,
            window_capacity,
            mask_b,
            mask_s,
            mask_t,
            scaling * LOG2E,
            (softcap or 1.0) * LOG2E,
            plan.row_tiles,
            plan.streams,
            plan.tile_rows,
            at.plain,
            at.scale,
            at.lse,
            at.partial,
        ),
        plan.split_constants,
        (plan.split_constants, plan.config, window[0].dtype, device.index),
        num_warps=plan.config.warps,
        num_stages=plan.config.stages,
        **limit,
        **options,
    )
    REDUCE(
        plan.reduce_grid,
        (scratch, num_blocks, num_window, num_sinks, value_rotation, scratch if s_aux is None else s_aux, out),
        (
            rows,
            queries,
            kv_heads,
            plan.row_tiles,
            plan.streams,
            plan.tile_rows,
            plan.workers,
            at.lse,
            at.partial,
            *out.stride()[:3],
        ),
        plan.reduce_constants,
        (plan.reduce_constants, out.dtype, None if s_aux is None else s_aux.dtype, device.index),
        num_warps=plan.reduce_warps,
        **options,
    )
    return out
