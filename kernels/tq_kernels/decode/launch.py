"""Launch decode attention, cheaply: three kernels, the first of which may also append the newest token.

`DecodeLaunch` is for tensors that stay from step to step: what does not change is worked out once, and a step only
fills in addresses and what belongs to the query.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from ..common.device import current_device, current_raw_stream, target
from ..common.launcher import Kernel, Launcher
from ..turing.split import decode_split_fragments
from ..types import AttentionOptions, KeyValue, PackedBlocks, PendingToken
from .append import AppendLaunch, append_and_rotate, rotate_and_append
from .plan import Plan, plan_decode
from .reduce import reduce_splits
from .rotate import rotate_query
from .split import decode_split


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


class Append(NamedTuple):
    """What appends a pending token to tensors whose counts are on the device; see `AppendLaunch.__call__`."""

    counts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    max_cache_len: int
    launch: AppendLaunch


Pointers = tuple[tuple[Any, ...], tuple[float, ...]]
"""Pointers and numbers of a kernel, in order."""
First = tuple[tuple[int, int, int], tuple[Any, ...], tuple[Any, ...]]
"""The grid and constants of the kernel that rotates queries, and may write a row before; the split's constants then."""


class Step(NamedTuple):
    """What is the same for all steps with queries of one shape.

    Args:
        plan: What to launch.
        rotate, split, reduce: The numbers of these kernels; the split's before and after the mask's strides.
        row_constants: Constants that `rotate_and_append` has before those of `rotate_query`.
        capacity: Rows of the residual.
        launchers: What a call with aligned tensors has compiled, by what is written first: nothing (False), a row
            (True), or a token by a launch of these constants.
    """

    plan: Plan
    rotate: tuple[float, ...]
    split: tuple[tuple[float, ...], tuple[float, ...]]
    reduce: tuple[float, ...]
    row_constants: tuple[int, int]
    capacity: int
    launchers: dict[bool | tuple[Any, ...], tuple[First, tuple[Launcher, ...]]]

    def first(self, token: PendingToken | None, append: Append | None) -> First:
        """The first kernel of a step that writes `token`."""
        plan = self.plan
        if append is None:
            constants = (*(() if token is None else self.row_constants), *plan.rotate_constants)
            return plan.rotate_grid, constants, plan.split_constants
        heads, row_tiles, _ = plan.rotate_grid
        _, stored_dim, _, rows, overlaps = plan.rotate_constants
        columns = append.launch.columns
        programs = 2 + row_tiles * -(-stored_dim // columns)
        # The split may not read the counts before they are written.
        split = (*plan.split_constants[:-1], 2) if overlaps else plan.split_constants
        return (heads, programs, 1), (*append.launch.constants, columns, rows, overlaps), split

    def arguments(
        self,
        tensors: tuple[Any, ...],
        mask_strides: tuple[int, int, int],
        row: Pointers,
        query: Any,
        scratch: Any,
        out: Any,
        num_blocks: Any,
        num_residual: Any,
        num_sinks: Any,
        mask: Any,
        s_aux: Any,
    ) -> tuple[Pointers, Pointers, Pointers]:
        """What every kernel is given but for its constants: tensors or their addresses.

        `tensors` are a `DecodeLaunch`'s; `row` is what the first kernel takes before what rotates. What a call does not
        have stands for another tensor.
        """
        key_rotation, value_rotation, key_channel_scales, value_channel_scales = tensors[8:]
        before_mask, after_mask = self.split
        counts = (num_blocks, num_residual, num_sinks)
        return (
            ((*row[0], query, key_rotation, key_channel_scales, scratch), (*row[1], *self.rotate)),
            (
                (scratch, *tensors[:4], num_blocks, *tensors[4:8], num_residual, num_sinks, mask),
                (*before_mask, *mask_strides, *after_mask),
            ),
            ((scratch, *counts, value_rotation, value_channel_scales, s_aux, out), self.reduce),
        )


ROTATE, ROTATE_AND_APPEND, APPEND_AND_ROTATE = (
    Kernel(function) for function in (rotate_query, rotate_and_append, append_and_rotate)
)
SPLIT, SPLIT_FRAGMENTS, REDUCE = Kernel(decode_split), Kernel(decode_split_fragments), Kernel(reduce_splits)


def new_states(
    token: PendingToken | None, append: Append | None, capacity: int
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """The tensors of a call, and the numbers, that the first kernel takes before those that rotate."""
    if token is None or token.states is None:
        return (), ()
    keys, values = token.states
    if append is not None:
        return (keys, values, *append.counts), append.launch.numbers(
            keys.stride(), values.stride(), append.max_cache_len
        )
    return (keys, values), (token.slot, capacity, *keys.stride()[:2], *values.stride()[:2])


@lru_cache(maxsize=256)
def steps_of(geometry: tuple[Any, ...]) -> dict[tuple[Any, ...], Step]:
    """The steps of all decoders on tensors like these: a step knows no addresses, so layers share it, and so does the
    decoder of tensors that take the place of others (a layer that was offloaded comes back)."""
    return {}


class DecodeLaunch:
    """Decode attention over sinks, packed blocks and residual: tensors that stay, for any number of calls.

    Args:
        packed: The blocks.
        sinks: Keys `[B, Hkv, sinks, Dk]` and values `[B, Hkv, sinks, Dv]`, dense, the last two dimensions contiguous.
        residual: The same, a ring, all dimensions contiguous.
        rotations: sqrt(D) R of keys and of values as `[D, D]` fp16 with D the padded dimension (powers of two are then
            exactly +-1).
    """

    def __init__(self, packed: PackedBlocks, sinks: KeyValue, residual: KeyValue, rotations: KeyValue) -> None:
        self.packed, self.bits = packed, packed.layout.bits
        self.device = packed.key_words.device
        blocks = (packed.key_words, packed.value_words, packed.scales, packed.key_means)
        self.tensors = (*blocks, *sinks, *residual, *rotations, *packed.channel_scales)
        # Addresses cannot go stale: the tensors above are held, and nothing gives a tensor other memory.
        self.addresses = tuple(tensor.data_ptr() for tensor in self.tensors)
        self.aligned = all(address % 16 == 0 for address in self.addresses)
        self.sinks, self.value_dim = sinks[0].shape[2], residual[1].shape[3]
        dense = (
            residual[0].dtype,
            self.sinks,
            residual[0].shape[2:],
            self.value_dim,
            sinks[0].stride(),
            residual[0].stride(),
        )
        sizes = (self.bits, packed.key_words.shape[1:3], packed.block_strides)
        self._steps = steps_of((self.device, dense, sizes))

    def __call__(
        self,
        query: torch.Tensor,
        num_blocks: torch.Tensor,
        num_residual: torch.Tensor,
        num_sinks: torch.Tensor,
        mask: torch.Tensor | None,
        options: AttentionOptions,
        *,
        allocate: Callable[[int], torch.Tensor],
        out: torch.Tensor | None = None,
        token: PendingToken | None = None,
        append: Append | None = None,
    ) -> torch.Tensor:
        """Attention of S queries, in three launches.

        Args:
            query: `[B, Hq, S, Dk]` fp16, bf16 or fp32, last dimension contiguous.
            num_blocks: int32 scalar on the device: the first so many blocks count.
            num_residual: int32 scalar on the device: the rows of the residual that count start at row 128 *
                `num_blocks` modulo its size.
            num_sinks: int32 scalar on the device: the rows of the sinks that count.
            mask: `[B, 1, S or 1, T]` bool, True attends, T counting sinks, blocks' tokens and residual rows in this
                order.
            options: If causal, the packed part and the sinks are older than all queries.
            allocate: Gives scratch: float32, of at least so many elements, 16-byte aligned.
            out: `[B, S, Hq, Dv]`, any float dtype, last dimension contiguous; by default a new tensor like `query`.
            token: A token to write to the residual first, in the residual's dtype, last dimension contiguous.
            append: What appends it instead.

        Returns:
            `out`. Rows that attend to nothing are 0.
        """
        index = self.device.index
        if self.device.type == "cuda" and index != current_device():
            # Kernels are launched on the current device; layers of a model spread over several GPUs are not on it.
            with torch.cuda.device(self.device):
                return self(
                    query, num_blocks, num_residual, num_sinks, mask, options, allocate=allocate, out=out, token=token,
                    append=append,
                )  # fmt: skip
        if mask is None:
            mask_rows, mask_strides = 0, (0, 0, 0)
        else:
            mask_rows = min(mask.shape[2], 2)
            mask_strides = (mask.stride(0), 0 if mask_rows == 1 else mask.stride(2), mask.stride(3))
        s_aux = options.s_aux
        kinds = (
            query.dtype,
            None if s_aux is None else s_aux.dtype,
            None if out is None else (out.stride(), out.dtype),
        )
        if out is None:
            batch, query_heads, queries, _ = query.shape
            out = query.new_empty(batch, queries, query_heads, self.value_dim)
        key = (query.shape, query.stride(), kinds, mask_rows, options[:-2])
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._step(query, out, mask_rows, options)
        scratch = allocate(step.plan.scratch.size)
        kind = token is not None if append is None else append.launch.constants
        kept = step.launchers.get(kind)
        # The common case, with nothing left to look up: all is compiled, for tensors that are aligned like these.
        query_at, scratch_at, out_at = query.data_ptr(), scratch.data_ptr(), out.data_ptr()
        blocks_at, rows_at, sinks_at = num_blocks.data_ptr(), num_residual.data_ptr(), num_sinks.data_ptr()
        mask_at = scratch_at if mask is None else mask.data_ptr()
        aux_at = scratch_at if s_aux is None else s_aux.data_ptr()
        bits = query_at | scratch_at | out_at | blocks_at | rows_at | sinks_at | mask_at | aux_at
        new, row_numbers = new_states(token, append, step.capacity)
        new_at = tuple([tensor.data_ptr() for tensor in new])
        for address in new_at:
            bits |= address
        aligned = bits & 15 == 0 and self.aligned
        if kept is None or not aligned:
            tensors = (
                query, scratch, out, num_blocks, num_residual, num_sinks,
                scratch if mask is None else mask.view(torch.uint8),
                scratch if s_aux is None else s_aux,
            )  # fmt: skip
            written = append.launch.tensors if append else self.tensors[6:8] if token else ()
            arguments = step.arguments(self.tensors, mask_strides, ((*new, *written), row_numbers), *tensors)
            first = step.first(token, append)
            launched = self._launch(step, first, arguments, token is not None, append)
            if aligned and launched is not None:
                step.launchers[kind] = first, launched
            return out
        stream = current_raw_stream(index)
        at = self.addresses
        written_at = append.launch.addresses if append else at[6:8] if token else ()
        (first_at, first_numbers), (split_at, split_numbers), (reduce_at, reduce_numbers) = step.arguments(
            at, mask_strides, ((*new_at, *written_at), row_numbers),
            query_at, scratch_at, out_at, blocks_at, rows_at, sinks_at, mask_at, aux_at,
        )  # fmt: skip
        (grid, constants, split_constants), (launch, split, reduce) = kept
        plan = step.plan
        launch.call(*grid, stream, *launch.fixed, *first_at, *first_numbers, *constants)
        split.call(plan.workers, 1, 1, stream, *split.fixed, *split_at, *split_numbers, *split_constants)
        reduce.call(*plan.reduce_grid, stream, *reduce.fixed, *reduce_at, *reduce_numbers, *plan.reduce_constants)
        return out

    def _step(self, query: torch.Tensor, out: torch.Tensor, mask_rows: int, options: AttentionOptions) -> Step:
        batch, query_heads, queries, key_dim = query.shape
        packed = self.packed
        sinks, _, residual, residual_values = self.tensors[4:8]
        kv_heads, capacity = packed.key_words.shape[1:3]
        value_dim = residual_values.shape[3]
        plan = plan_decode(
            batch, query_heads, kv_heads, queries, key_dim, value_dim,
            *self.bits,
            capacity,
            sinks.shape[2] + residual.shape[2],
            options.causal,
            mask_rows,
            *options.flags,
            target(self.device),
        )  # fmt: skip
        at = plan.scratch
        rows = query_heads // kv_heads * queries
        (sink_b, sink_h), (residual_b, residual_h) = (
            (part.stride(0) // key_dim, part.stride(1) // key_dim) for part in (sinks, residual)
        )
        heads = (rows, queries, kv_heads)
        tiles = (plan.row_tiles, plan.streams, plan.tile_rows)
        slots = (at.lse, at.partial, plan.dense_splits)
        before_mask = (*heads, *packed.block_strides, sink_b, sink_h, residual_b, residual_h, residual.shape[2])
        return Step(
            plan,
            rotate=(*heads, *query.stride()[:3], at.plain, at.scale),
            split=(before_mask, (*options.log2_factors, *tiles, at.plain, at.scale, *slots)),
            reduce=(*heads, *tiles, plan.workers, *slots, *out.stride()[:3]),
            row_constants=(value_dim, triton.next_power_of_2(max(key_dim, value_dim))),
            capacity=residual.shape[2],
            launchers={},
        )

    def _launch(
        self,
        step: Step,
        first: First,
        arguments: tuple[Pointers, Pointers, Pointers],
        writes: bool,
        append: Append | None,
    ) -> tuple[Launcher, ...] | None:
        """The same by kernels that find or compile the variant for these tensors."""
        plan, device, on = step.plan, self.device.index, target(self.device)
        grid, constants, split_constants = first
        dependent = {"launch_pdl": True} if on.dependent_launch else {}
        limit = {"maxnreg": plan.config.registers} if plan.config.registers else {}
        # What decides a variant besides constants: the dtypes of pointers.
        rotate_arguments, split_arguments, reduce_arguments = arguments
        query, out, s_aux = rotate_arguments[0][-4], reduce_arguments[0][-1], reduce_arguments[0][-2]
        dense = self.tensors[4].dtype
        if append is not None:
            kernel, first_options = APPEND_AND_ROTATE, append.launch.options
        else:
            kernel, first_options = ROTATE_AND_APPEND if writes else ROTATE, {"num_warps": plan.rotate_warps}
        launchers = (
            kernel(grid, *rotate_arguments, constants, (constants, query.dtype, dense, device), **first_options),
            (SPLIT_FRAGMENTS if on.fragments else SPLIT)(
                (plan.workers, 1, 1),
                *split_arguments,
                split_constants,
                (split_constants, plan.config, dense, device),
                num_warps=plan.config.warps,
                num_stages=plan.config.stages,
                **limit,
                **dependent,
            ),
            REDUCE(
                plan.reduce_grid,
                *reduce_arguments,
                plan.reduce_constants,
                (plan.reduce_constants, out.dtype, s_aux.dtype, device),
                num_warps=plan.reduce_warps,
                **dependent,
            ),
        )
        return tuple(launcher for launcher in launchers if launcher) if all(launchers) else None
