"""Launch decode attention, cheaply: three kernels; the first may also append the newest token.

`DecodeLaunch` is for tensors that stay from step to step. It computes once all that does not change; a step only fills
in addresses and what belongs to its query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from ..common.device import current_device, current_raw_stream, target
from ..common.launcher import Kernel, Launcher
from ..turing.split import decode_split_fragments
from ..types import AttentionOptions, HeldCounts, KeyValue, PackedBlocks, PendingToken
from .append import AppendLaunch, append_and_rotate, rotate_and_append
from .plan import Plan, plan_decode
from .reduce import reduce_splits
from .rotate import rotate_query
from .split import decode_split


@lru_cache
@torch.inference_mode(False)
def _integers(size: int, device: torch.device) -> torch.Tensor:
    """Table of 0 ... `size` on the device, 16 bytes apart, which is Triton's alignment."""
    # Copy from the host, which waits for the end: another stream might read a table filled on the device too early.
    return torch.arange(size, dtype=torch.int32).repeat_interleave(4).to(device)


@lru_cache(maxsize=65536)
@torch.inference_mode(False)
def held_counts(blocks: int, rows: int, sinks: int, device: torch.device) -> HeldCounts:
    """Counts on the device, as entries of a table: the host waits once for a table, not for every length."""
    numbers = (blocks, rows, sinks)
    return HeldCounts(*(_integers(max(4096, 1 << number.bit_length()), device)[4 * number] for number in numbers))


class Step(NamedTuple):
    """Arguments shared by all steps with queries of one shape that write a token of the same strides, or none.

    Args:
        plan: The `Plan` of the step.
        first_grid: Grid of the kernel that rotates queries, and may write a token before.
        first_constants, split_constants: Constants that decide the variants of these kernels.
        first, split, reduce: Numbers and constants of the kernels: for the first without the token's slot, for the
            split before and after the mask's strides.
        launchers: Launchers compiled by a call with aligned tensors.
    """

    plan: Plan
    first_grid: tuple[int, int, int]
    first_constants: tuple[Any, ...]
    split_constants: tuple[Any, ...]
    first: tuple[Any, ...]
    split: tuple[tuple[Any, ...], tuple[Any, ...]]
    reduce: tuple[Any, ...]
    launchers: list[Launcher]

    def launch(
        self,
        launchers: Sequence[Launcher],
        stream: int,
        tensors: tuple[Any, ...],
        mask_strides: tuple[int, int, int],
        row: tuple[Any, ...],
        slot: tuple[int, ...],
        query: Any,
        scratch: Any,
        out: Any,
        held: tuple[Any, ...],
        mask: Any,
        s_aux: Any,
    ) -> None:
        """Launch the three kernels, with tensors or their addresses.

        `tensors` are those of a `DecodeLaunch`: of blocks, dense rows, queries and outputs. `row` and `slot` come
        first among the first kernel's tensors and numbers. `held` are the counts of `HeldCounts`. Another tensor stands
        in for an absent one.
        """
        (call_first, fixed_first), (call_split, fixed_split), (call_reduce, fixed_reduce) = launchers
        plan, first_grid, _, _, of_first, (before_mask, after_mask), of_reduce, _ = self
        blocks, dense, of_queries, of_outputs = tensors
        num_blocks, num_residual, num_sinks = held
        call_first(*first_grid, stream, *fixed_first, *row, query, *of_queries, scratch, *slot, *of_first)
        call_split(
            plan.workers, 1, 1, stream, *fixed_split, scratch, *blocks, num_blocks, *dense, num_residual, num_sinks,
            mask, *before_mask, *mask_strides, *after_mask,
        )  # fmt: skip
        call_reduce(
            *plan.reduce_grid, stream, *fixed_reduce, scratch, num_blocks, num_residual, num_sinks, *of_outputs,
            s_aux, out, None, None, None, *of_reduce,
        )  # fmt: skip


ROTATE, ROTATE_AND_APPEND, APPEND_AND_ROTATE = (
    Kernel(function) for function in (rotate_query, rotate_and_append, append_and_rotate)
)
SPLIT, SPLIT_FRAGMENTS, REDUCE = Kernel(decode_split), Kernel(decode_split_fragments), Kernel(reduce_splits)


@lru_cache(maxsize=256)
def steps_of(geometry: tuple[Any, ...]) -> dict[tuple[Any, ...], Step]:
    """Steps of every `DecodeLaunch` on tensors of this geometry. A step holds no addresses: layers share it, and so
    does an offloaded layer that comes back in other memory."""
    return {}


class DecodeLaunch:
    """Launch of decode attention over fixed sinks, packed blocks and residual, any number of times.

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
        self.on_gpu = self.device.type == "cuda"
        blocks = (packed.key_words, packed.value_words, packed.scales, packed.key_means)
        # Tensors of blocks, dense rows, queries and outputs.
        self.tensors = (blocks, (*sinks, *residual), *zip(rotations, packed.channel_scales, strict=True))
        # Addresses cannot go stale: the tensors above are held, and nothing gives a tensor other memory.
        self.addresses = tuple(tuple(tensor.data_ptr() for tensor in part) for part in self.tensors)
        self.aligned = all(address % 16 == 0 for part in self.addresses for address in part)
        self.ring, self.ring_at = residual, self.addresses[1][2:]
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
        held: HeldCounts,
        mask: torch.Tensor | None,
        options: AttentionOptions,
        allocate: Callable[[int], torch.Tensor],
        out: torch.Tensor | None = None,
        token: PendingToken | None = None,
        append: AppendLaunch | None = None,
    ) -> torch.Tensor:
        """Attention of S queries, in three launches.

        Args:
            query: `[B, Hq, S, Dk]` fp16, bf16 or fp32.
            held: Counts of blocks, residual rows and sinks to attend to.
            mask: `[B, 1, S or 1, T]` bool, True attends, T counting sinks, blocks' tokens and residual rows in this
                order.
            options: If causal, the packed part and the sinks must be older than all queries.
            allocate: Function of a number of elements that returns float32 scratch of that size or more, aligned to
                16 bytes.
            out: `[B, S, Hq, Dv]`, any float dtype, last dimension contiguous; by default a new tensor like `query`.
            token: Token to write to the residual first, in the residual's dtype.
            append: `AppendLaunch` that appends the token instead.

        Returns:
            `out`. Rows that attend to nothing are 0.
        """
        index = self.device.index
        if self.on_gpu and index != current_device():
            # Kernels are launched on the current device; layers of a model spread over several GPUs are not on it.
            with torch.cuda.device(self.device):
                return self(query, held, mask, options, allocate, out, token, append)
        if mask is None:
            mask_rows, mask_strides = 0, (0, 0, 0)
        else:
            mask_rows = min(mask.shape[2], 2)
            mask_strides = (mask.stride(0), 0 if mask_rows == 1 else mask.stride(2), mask.stride(3))
        states = None if token is None else token.states
        shape, (scaling, causal, softcap, s_aux, _) = query.shape, options
        key = (
            shape, query.stride(), query.dtype, mask_rows, scaling, causal, softcap,
            None if s_aux is None else s_aux.dtype,
            None if out is None else (out.stride(), out.dtype),
            None if states is None else (states[0].stride(), states[1].stride()),
            None if append is None else append.numbers,
        )  # fmt: skip
        step = self._steps.get(key)
        if step is None:
            rows = (query, *(states or ()))
            if not all(part.stride()[-1] == 1 or part.is_contiguous() for part in rows):
                # Kernels read contiguous rows, as models make them.
                query, *row = (part.contiguous() for part in rows)
                if token is not None:
                    token.states = row[0], row[1]
                return self(query, held, mask, options, allocate, out, token, append)
        if out is None:
            out = query.new_empty(shape[0], shape[2], shape[1], self.value_dim)
        if step is None:
            step = self._steps[key] = self._step(query, out, mask_rows, options, states, append)
        scratch = allocate(step.plan.scratch.size)
        # Common case, nothing left to look up: all is compiled for tensors aligned like these.
        query_at, scratch_at, out_at = query.data_ptr(), scratch.data_ptr(), out.data_ptr()
        blocks_at, rows_at, sinks_at = held.addresses
        mask_at = scratch_at if mask is None else mask.data_ptr()
        aux_at = scratch_at if s_aux is None else s_aux.data_ptr()
        bits = query_at | scratch_at | out_at | blocks_at | rows_at | sinks_at | mask_at | aux_at
        row_at: tuple[Any, ...] = ()
        slot: tuple[int, ...] = ()
        if states is not None:
            keys_at, values_at = states[0].data_ptr(), states[1].data_ptr()
            bits |= keys_at | values_at
            if append is None:
                row_at, slot = (keys_at, values_at, *self.ring_at), (token.slot,)
            else:
                row_at = (keys_at, values_at, *append.addresses)
        aligned = bits & 15 == 0 and self.aligned
        if aligned and step.launchers:
            step.launch(
                step.launchers, current_raw_stream(index), self.addresses, mask_strides, row_at, slot,
                query_at, scratch_at, out_at, held.addresses, mask_at, aux_at,
            )  # fmt: skip
            return out
        row = () if states is None else (*states, *(self.ring if append is None else append.tensors))
        s_aux = scratch if s_aux is None else s_aux
        launched: list[Launcher | None] = []
        step.launch(
            self._compiling(step, launched, append, states is not None, query.dtype, out.dtype, s_aux.dtype),
            0, self.tensors, mask_strides, row, slot,
            query, scratch, out, held.tensors,
            scratch if mask is None else mask.view(torch.uint8),
            s_aux,
        )  # fmt: skip
        if aligned and None not in launched:
            step.launchers[:] = launched
        return out

    def _step(
        self,
        query: torch.Tensor,
        out: torch.Tensor,
        mask_rows: int,
        options: AttentionOptions,
        states: KeyValue | None,
        append: AppendLaunch | None,
    ) -> Step:
        batch, query_heads, queries, key_dim = query.shape
        packed = self.packed
        sinks, _, residual, residual_values = self.tensors[1]
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
        after_mask = (*options.log2_factors, *tiles, at.plain, at.scale, *slots)
        rotate = (*heads, *query.stride()[:3], at.plain, at.scale)
        strides = () if states is None else (*states[0].stride()[:2], *states[1].stride()[:2])
        grid, constants, split_constants = plan.rotate_grid, plan.rotate_constants, plan.split_constants
        if append is not None:
            warps, overlaps = append.options["num_warps"], constants[-1]
            grid = (grid[0], 2 + -(-rows // warps), 1)
            constants = (*append.constants, warps, overlaps)  # a row for each warp
            first = (*strides, *append.numbers, *rotate)
            # The split must wait until the counts are written.
            split_constants = (*split_constants[:-1], 2) if overlaps else split_constants
        elif states is not None:
            grid = (grid[0], 1 + grid[1], 1)
            constants = (value_dim, triton.next_power_of_2(max(key_dim, value_dim)), *constants)
            first = (residual.shape[2], *strides, *rotate)
        else:
            first = rotate
        return Step(
            plan,
            grid,
            constants,
            split_constants,
            first=(*first, *constants),
            split=(before_mask, (*after_mask, *split_constants)),
            reduce=(
                *heads, *tiles, plan.workers, *slots, *out.stride()[:3], None,
                *plan.reduce_constants, 0, False,
            ),
            launchers=[],
        )  # fmt: skip

    def _compiling(
        self,
        step: Step,
        launched: list[Launcher | None],
        append: AppendLaunch | None,
        writes: bool,
        query_type: torch.dtype,
        out_type: torch.dtype,
        aux_type: torch.dtype,
    ) -> tuple[Launcher, ...]:
        """Launchers that find or compile the variant for their tensors, and add it to `launched`."""
        plan, device, on = step.plan, self.device.index, target(self.device)
        dependent = {"launch_pdl": True} if on.dependent_launch else {}
        limit = {"maxnreg": plan.config.registers} if plan.config.registers else {}
        warps = {"num_warps": plan.config.warps, "num_stages": plan.config.stages}
        dense = self.ring[0].dtype

        def by(kernel: Kernel, key: tuple[Any, ...], **options: Any) -> Launcher:
            def call(x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
                pointers = sum(isinstance(argument, torch.Tensor) for argument in arguments)
                rest = arguments[pointers:]
                launched.append(kernel((x, y, z), arguments[:pointers], rest, (), (*key, device), **options))

            return Launcher(call, ())

        if append is not None:
            kernel, first_options = APPEND_AND_ROTATE, append.options
        else:
            kernel, first_options = ROTATE_AND_APPEND if writes else ROTATE, {"num_warps": 1}
        # The dtypes of pointers decide a variant too.
        return (
            by(kernel, (step.first_constants, query_type, dense), **first_options),
            by(
                SPLIT_FRAGMENTS if on.fragments else SPLIT,
                (step.split_constants, plan.config, dense),
                **warps,
                **limit,
                **dependent,
            ),
            by(REDUCE, (plan.reduce_constants, out_type, aux_type), num_warps=plan.reduce_warps, **dependent),
        )
