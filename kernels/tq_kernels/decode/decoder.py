"""Launch decode attention, cheaply: three kernels, the first of which may also write the newest row to the window.

`Decoder` is for tensors that stay from step to step: what does not change is worked out once, and a step only fills in
addresses and what belongs to the query.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from ..common.launcher import Kernel, Launcher
from .append import rotate_and_append
from .plan import Plan, Target, interpreted, plan_decode, target
from .reduce import reduce_splits
from .rotate import rotate_query
from .split import decode_split
from .split_fragments import decode_split_fragments

__all__ = ["Decoder", "NewRow", "Plan", "Target", "device_int", "interpreted", "target"]

LOG2E = 1.4426950408889634

ROTATE, ROTATE_AND_APPEND = Kernel(rotate_query), Kernel(rotate_and_append)
SPLIT, SPLIT_FRAGMENTS, REDUCE = Kernel(decode_split), Kernel(decode_split_fragments), Kernel(reduce_splits)


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


class NewRow(NamedTuple):
    """One token's keys `[B, Hkv, 1, Dk]` and values `[B, Hkv, 1, Dv]` in the window's dtype, last dimension contiguous,
    that belong in row `slot` of the window and are not there yet."""

    keys: torch.Tensor
    values: torch.Tensor
    slot: int


class _Launches(NamedTuple):
    """The kernels of a step, ready to be called."""

    rotate: Launcher
    split: Launcher
    reduce: Launcher


class _Step:
    """What is the same for all steps with queries of one shape: the plan and the numbers that kernels are given (those
    of the split on either side of the mask's strides)."""

    def __init__(
        self,
        plan: Plan,
        rotate: tuple[float, ...],
        split: tuple[tuple[float, ...], tuple[float, ...]],
        reduce: tuple[float, ...],
    ) -> None:
        self.plan = plan
        self.rotate_numbers = rotate
        self.split_before_mask, self.split_after_mask = split
        self.reduce_numbers = reduce
        self.rotate_rest = (*rotate, *plan.rotate_constants)
        self.split_grid = (plan.workers, 1, 1)
        self.split_rest = (*self.split_after_mask, *plan.split_constants)
        self.reduce_rest = (*reduce, *plan.reduce_constants)
        # By whether a row is written: known from the first call with aligned tensors on.
        self.launches: dict[bool, _Launches] = {}


class Decoder:
    """Decode attention over sinks, packed blocks and window: tensors that stay, for any number of calls.

    Args:
        key_words, value_words, scalars: `[B, Hkv, N, *]` int32 packed blocks (`tq_hf/layout.py`). The last two
            dimensions are contiguous, and all packed tensors have the same strides in blocks.
        key_means: `[B, Hkv, N, Dk padded]` fp16, or `None`.
        sinks: Keys `[B, Hkv, sinks, Dk]` and values `[B, Hkv, sinks, Dv]`, dense, the last two dimensions contiguous.
        window: The same, a ring, all dimensions contiguous.
        key_rotation, value_rotation: sqrt(D) R as `[D, D]` fp16 with D the padded dimension (powers of two are then
            exactly +-1).
        key_bits, value_bits: Bits of a code.
    """

    def __init__(
        self,
        key_words: torch.Tensor,
        value_words: torch.Tensor,
        scalars: torch.Tensor,
        key_means: torch.Tensor | None,
        sinks: tuple[torch.Tensor, torch.Tensor],
        window: tuple[torch.Tensor, torch.Tensor],
        key_rotation: torch.Tensor,
        value_rotation: torch.Tensor,
        *,
        key_bits: int,
        value_bits: int,
    ) -> None:
        self.packed = (key_words, value_words, scalars, key_means)
        self.dense = (*sinks, *window)
        self.rotations = (key_rotation, value_rotation)
        self.bits = (key_bits, value_bits)
        self.device = key_words.device
        # Addresses cannot go stale: the tensors above are held, and nothing gives a tensor other memory.
        means = scalars if key_means is None else key_means  # not read if there are none
        self.packed_at = tuple(t.data_ptr() for t in (key_words, value_words, scalars, means))
        self.dense_at = tuple(t.data_ptr() for t in self.dense)
        self.window_at = self.dense_at[2:]
        self.rotations_at = tuple(t.data_ptr() for t in self.rotations)
        self.aligned = all(address % 16 == 0 for address in (*self.packed_at, *self.dense_at, *self.rotations_at))
        self.window_capacity = window[0].shape[2]
        key_dim, value_dim = window[0].shape[3], window[1].shape[3]
        self.sinks, self.value_dim = sinks[0].shape[2], value_dim
        # DV and TILE of `rotate_and_append`.
        self._row_constants = (value_dim, triton.next_power_of_2(max(key_dim, value_dim)))
        self._steps: dict[tuple[Any, ...], _Step] = {}

    def __call__(
        self,
        query: torch.Tensor,
        num_blocks: torch.Tensor,
        num_window: torch.Tensor,
        num_sinks: torch.Tensor,
        *,
        scaling: float,
        allocate: Callable[[int], torch.Tensor],
        out: torch.Tensor,
        mask: torch.Tensor | None = None,
        causal: bool = True,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        row: NewRow | None = None,
    ) -> torch.Tensor:
        """Attention of S queries, in three launches.

        Args:
            query: `[B, Hq, S, Dk]` fp16, bf16 or fp32, last dimension contiguous.
            num_blocks: int32 scalar on the device: the first so many blocks count.
            num_window: int32 scalar on the device: the rows of the window that count start at row 128 * `num_blocks`
                modulo its size.
            num_sinks: int32 scalar on the device: the rows of the sinks that count.
            scaling: Factor of the logits.
            allocate: Gives scratch: float32, of at least so many elements, 16-byte aligned.
            out: `[B, S, Hq, Dv]`, any float dtype, last dimension contiguous.
            mask: `[B, 1, S or 1, T]` bool, True attends, T counting sinks, blocks' tokens and window rows in this
                order.
            causal: With S > 1 and no mask, query s does not see the last S - 1 - s window rows (the packed part and the
                sinks are older than all queries).
            softcap: cap of cap * tanh(logit / cap).
            s_aux: `[Hq]` logits of sinks that take weight but have no value.
            row: A row to write to the window first.

        Returns:
            `out`. Rows that attend to nothing are 0.
        """
        index = self.device.index
        if self.device.type == "cuda" and index != torch._C._cuda_getDevice():
            # Kernels are launched on the current device; layers of a model spread over several GPUs are not on it.
            with torch.cuda.device(self.device):
                return self(
                    query, num_blocks, num_window, num_sinks, scaling=scaling, allocate=allocate, out=out, mask=mask,
                    causal=causal, softcap=softcap, s_aux=s_aux, row=row,
                )  # fmt: skip
        if mask is None:
            mask_rows, mask_strides = 0, (0, 0, 0)
        else:
            mask_rows = min(mask.shape[2], 2)
            mask_strides = (mask.stride(0), 0 if mask_rows == 1 else mask.stride(2), mask.stride(3))
        aux = None if s_aux is None else s_aux.dtype
        key = (
            query.shape,
            query.stride(),
            query.dtype,
            out.stride(),
            out.dtype,
            scaling,
            mask_rows,
            causal,
            softcap,
            aux,
        )
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._step(query, out, scaling, mask_rows, causal, softcap, s_aux)
        scratch = allocate(step.plan.scratch.size)
        launches = step.launches.get(row is not None)
        # The common case, with nothing left to look up: all is compiled, for tensors that are aligned like these.
        query_at, scratch_at, out_at = query.data_ptr(), scratch.data_ptr(), out.data_ptr()
        blocks_at, rows_at, sinks_at = num_blocks.data_ptr(), num_window.data_ptr(), num_sinks.data_ptr()
        mask_at = scratch_at if mask is None else mask.data_ptr()
        aux_at = scratch_at if s_aux is None else s_aux.data_ptr()
        bits = query_at | scratch_at | out_at | blocks_at | rows_at | sinks_at | mask_at | aux_at
        if row is not None:
            keys_at, values_at = row.keys.data_ptr(), row.values.data_ptr()
            bits |= keys_at | values_at
        aligned = bits & 15 == 0 and self.aligned
        if launches is None or not aligned:
            launched = self._launch(
                step, query, num_blocks, num_window, num_sinks, scratch, out, mask, mask_strides, s_aux, row
            )
            if aligned and launched is not None:
                step.launches[row is not None] = launched
            return out
        stream = torch._C._cuda_getCurrentRawStream(index)
        rotate, split, reduce = launches
        plan = step.plan
        if row is None:
            rotate.call(
                *plan.rotate_grid, stream, *rotate.fixed, query_at, self.rotations_at[0], scratch_at, *step.rotate_rest
            )
        else:
            rotate.call(
                *plan.rotate_grid,
                stream,
                *rotate.fixed,
                keys_at,
                values_at,
                *self.window_at,
                query_at,
                self.rotations_at[0],
                scratch_at,
                row.slot,
                self.window_capacity,
                *row.keys.stride()[:2],
                *row.values.stride()[:2],
                *step.rotate_numbers,
                *self._row_constants,
                *plan.rotate_constants,
            )
        split.call(
            *step.split_grid,
            stream,
            *split.fixed,
            scratch_at,
            *self.packed_at,
            blocks_at,
            *self.dense_at,
            rows_at,
            sinks_at,
            mask_at,
            *step.split_before_mask,
            *mask_strides,
            *step.split_rest,
        )
        reduce.call(
            *plan.reduce_grid,
            stream,
            *reduce.fixed,
            scratch_at,
            blocks_at,
            rows_at,
            sinks_at,
            self.rotations_at[1],
            aux_at,
            out_at,
            *step.reduce_rest,
        )
        return out

    def _step(
        self,
        query: torch.Tensor,
        out: torch.Tensor,
        scaling: float,
        mask_rows: int,
        causal: bool,
        softcap: float | None,
        s_aux: torch.Tensor | None,
    ) -> _Step:
        batch, query_heads, queries, key_dim = query.shape
        key_words, _, _, key_means = self.packed
        sinks, _, window, window_values = self.dense
        kv_heads, capacity = key_words.shape[1:3]
        plan = plan_decode(
            batch,
            query_heads,
            kv_heads,
            queries,
            key_dim,
            window_values.shape[3],
            *self.bits,
            key_means is not None,
            capacity,
            sinks.shape[2] + window.shape[2],
            causal,
            mask_rows,
            softcap is not None,
            s_aux is not None,
            target(self.device),
        )
        at = plan.scratch
        rows = query_heads // kv_heads * queries
        words = key_words.shape[3]
        blocks_b, blocks_h = key_words.stride(0) // words, key_words.stride(1) // words
        (sink_b, sink_h), (window_b, window_h) = (
            (part.stride(0) // key_dim, part.stride(1) // key_dim) for part in (sinks, window)
        )
        heads = (rows, queries, kv_heads)
        tiles = (plan.row_tiles, plan.streams, plan.tile_rows)
        before_mask = (*heads, blocks_b, blocks_h, sink_b, sink_h, window_b, window_h, self.window_capacity)
        logits = (scaling * LOG2E, (softcap or 1.0) * LOG2E)
        return _Step(
            plan,
            rotate=(*heads, *query.stride()[:3], at.plain, at.scale),
            split=(before_mask, (*logits, *tiles, at.plain, at.scale, at.lse, at.partial)),
            reduce=(*heads, *tiles, plan.workers, at.lse, at.partial, *out.stride()[:3]),
        )

    def _launch(
        self,
        step: _Step,
        query: torch.Tensor,
        num_blocks: torch.Tensor,
        num_window: torch.Tensor,
        num_sinks: torch.Tensor,
        scratch: torch.Tensor,
        out: torch.Tensor,
        mask: torch.Tensor | None,
        mask_strides: tuple[int, int, int],
        s_aux: torch.Tensor | None,
        row: NewRow | None,
    ) -> _Launches | None:
        """The same by kernels that find or compile the variant for these tensors."""
        plan, device = step.plan, self.device.index
        options = {"launch_pdl": True} if target(self.device).dependent_launch else {}
        limit = {"maxnreg": plan.config.registers} if plan.config.registers else {}
        key_rotation, value_rotation = self.rotations
        dtype = self.dense[0].dtype
        if row is None:
            rotate = ROTATE(
                plan.rotate_grid,
                (query, key_rotation, scratch),
                step.rotate_numbers,
                plan.rotate_constants,
                (plan.rotate_constants, query.dtype, device),
                num_warps=2,
            )
        else:
            constants = (*self._row_constants, *plan.rotate_constants)
            strides = (*row.keys.stride()[:2], *row.values.stride()[:2])
            rotate = ROTATE_AND_APPEND(
                plan.rotate_grid,
                (row.keys, row.values, *self.dense[2:], query, key_rotation, scratch),
                (row.slot, self.window_capacity, *strides, *step.rotate_numbers),
                constants,
                (constants, query.dtype, dtype, device),
                num_warps=2,
            )
        key_words, value_words, scalars, key_means = self.packed
        split = (SPLIT_FRAGMENTS if target(self.device).fragments else SPLIT)(
            step.split_grid,
            (
                scratch,
                key_words,
                value_words,
                scalars,
                scratch if key_means is None else key_means,
                num_blocks,
                *self.dense,
                num_window,
                num_sinks,
                scratch if mask is None else mask.view(torch.uint8),
            ),
            (*step.split_before_mask, *mask_strides, *step.split_after_mask),
            plan.split_constants,
            (plan.split_constants, plan.config, dtype, device),
            num_warps=plan.config.warps,
            num_stages=plan.config.stages,
            **limit,
            **options,
        )
        reduce = REDUCE(
            plan.reduce_grid,
            (scratch, num_blocks, num_window, num_sinks, value_rotation, scratch if s_aux is None else s_aux, out),
            step.reduce_numbers,
            plan.reduce_constants,
            (plan.reduce_constants, out.dtype, None if s_aux is None else s_aux.dtype, device),
            num_warps=plan.reduce_warps,
            **options,
        )
        return _Launches(rotate, split, reduce) if rotate and split and reduce else None
