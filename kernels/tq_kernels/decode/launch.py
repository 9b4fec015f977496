"""Launch decode attention as three kernels: rotate (and append the newest tokens), split, reduce.

`DecodeLaunch` is for tensors that stay from step to step. It computes once all that does not change; a step only fills
in addresses and what belongs to its query. The tensors are those of a batch, found by strides, or pages of many
sequences, found by a block table. Launches depend on shapes alone and kernels read lengths on the device: a captured
graph can be replayed while sequences grow, begin and end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from ..codec.encode import PageShape
from ..codec.launch import EncodeConfig, encode_shape
from ..common.device import current_device, current_raw_stream, matrix_type, target
from ..common.launcher import Kernel, Launch, on_its_device
from ..common.schedule import DecodeNumbers, DecodeTensors
from ..layout import BlockLayout
from ..turing.split import decode_split_fragments
from ..types import AttentionOptions, HeldCounts, KeyValue, PackedBlocks, Pages, Sequences
from .append import AppendNumbers, PageWork, append_and_rotate, append_to_pages
from .plan import padded_sequences, plan_decode
from .reduce import OutStrides, reduce_splits
from .split import decode_split

APPEND_AND_ROTATE, APPEND_TO_PAGES = Kernel(append_and_rotate), Kernel(append_to_pages)
SPLIT, SPLIT_FRAGMENTS, REDUCE = Kernel(decode_split), Kernel(decode_split_fragments), Kernel(reduce_splits)
NO_TABLES, NO_MASK, NO_PLACE, NO_TOKEN, NO_COUNTS = (None,) * 3, (None,) * 4, (0, 0, 0), (None, None), (None,) * 6
"""Tables, mask, places of rows in pages, keys and values, and what is written beside rows, where there are none."""
APPEND_OPTIONS = {"sanitize_overflow": False}
"""`debug` of the kernel that appends would turn this on."""
MOST_STEPS = 4096
"""Number of steps that are kept for one geometry: batches over pages have any number of tokens and requests."""


@lru_cache
@torch.inference_mode(False)
def _integers(size: int, device: torch.device) -> torch.Tensor:
    """Table of 0 ... `size` on the device, 16 bytes apart, which is Triton's alignment."""
    # Copy from the host, which waits for the end: another stream might read a table filled on the device too early.
    return torch.arange(size, dtype=torch.int32, device="cpu").repeat_interleave(4).to(device)


@lru_cache(maxsize=65536)
@torch.inference_mode(False)
def held_counts(blocks: int, rows: int, sinks: int, device: torch.device) -> HeldCounts:
    """Counts on the device, as entries of a table: the host waits once for a table, not for every length."""
    numbers = (blocks, rows, sinks)
    return HeldCounts(*(_integers(max(4096, 1 << number.bit_length()), device)[4 * number] for number in numbers))


class Preallocated(NamedTuple):
    """Counts and limits of a preallocated batch.

    Args:
        counts: `DeviceCounts` of `tq_hf/tensors/`: `held` `[5, 4]` int32 and `length` `[]` int64.
        residual_length: Number of tokens that stay dense.
        max_cache_len: Capacity in tokens. A full batch is not written to, and on a GPU the launch fails.
    """

    counts: tuple[torch.Tensor, torch.Tensor]
    residual_length: int
    max_cache_len: int


class Step(NamedTuple):
    """Launches shared by all steps with queries of one shape that write a token of the same strides, or none.

    Args:
        size: Number of float32 elements of scratch.
        launches: Launches of the kernel that rotates queries and may write a token before, of the split, and of the
            merge. The first lacks the token's slot, the split the mask's strides.
    """

    size: int
    launches: tuple[Launch, Launch, Launch]


@lru_cache(maxsize=256)
def steps_of(geometry: tuple[Any, ...]) -> dict[tuple[Any, ...], Step]:
    """Steps of every `DecodeLaunch` on tensors of this geometry. A step holds no addresses: layers share it, and so
    does an offloaded layer that comes back in other memory."""
    return {}


class DecodeLaunch:
    """Launch of decode attention over fixed tensors, any number of times.

    Args:
        held: Packed blocks of a batch, its dense rows, and the number of sinks among them, or pages. Rows are
            `[B, Hkv, ring + sinks, Dk + Dv]`, contiguous: the residual, a ring, then sinks.
        rotations: sqrt(D) R of keys and of values as `[D, D]` fp16 with D the padded dimension (powers of two are then
            exactly +-1).
        encoder: For pages and a preallocated batch, R of keys and of values as in `tq_kernels.codec.launch.encode`: the
            launch that writes tokens encodes the blocks that become due, with the same bits.
        preallocated: Counts of a preallocated batch, whose steps append by them.
    """

    def __init__(
        self,
        held: tuple[PackedBlocks, torch.Tensor, int] | Pages,
        rotations: KeyValue,
        encoder: KeyValue | None = None,
        preallocated: Preallocated | None = None,
    ) -> None:
        self.pages = held if isinstance(held, Pages) else None
        self.counts: tuple[torch.Tensor, torch.Tensor] | None = None
        sizes: tuple[Any, ...]
        if isinstance(held, Pages):
            blocks, rows, scales = held.blocks, held.rows, (held.key_channel_scales, held.value_channel_scales)
            assert encoder is not None
            self.written = (blocks, *encoder, held.value_channel_scales)
            self.layout, sizes = held.layout, (held.place, held.page_blocks)
        else:
            packed, rows, self.sinks = held
            blocks, self.layout = packed.data, packed.layout
            scales, self.block_strides = packed.channel_scales, packed.block_strides
            self.capacity, self.ring = blocks.shape[2], rows.shape[2] - self.sinks
            self.written, self.limits = NO_COUNTS, (None, None)
            if preallocated is not None and encoder is not None:
                self.counts, *self.limits = preallocated
                sinks_held, blocks_held, rows_held = self.counts[0][:3, 0].unbind()
                self.held = HeldCounts(blocks_held, rows_held, sinks_held)
                """Counts a step attends to, its own tokens appended."""
                self.written = (*self.counts, blocks, *encoder, scales.values)
            sizes = (self.sinks, self.ring, *self.limits, self.capacity, self.block_strides)
        self.kv_heads, self.value_dim = rows.shape[1], self.layout.value_dim
        self.dtype, self.device = rows.dtype, blocks.device
        self.on_gpu = self.device.type == "cuda"
        # Tensors of blocks, dense rows, queries and outputs.
        self.tensors: tuple[Any, ...] = ((blocks,), (rows,), *zip(rotations, scales, strict=True))
        # Addresses cannot go stale: the tensors above are held, and nothing gives a tensor other memory.
        written = () if self.written is NO_COUNTS else self.written
        *parts, written_at = (tuple([x.data_ptr() for x in part]) for part in (*self.tensors, written))
        self.addresses, self.written_at = tuple(parts), written_at or NO_COUNTS
        self.aligned = all(address % 16 == 0 for part in (*parts, written_at) for address in part)
        self._steps = steps_of((self.device, self.dtype, self.kv_heads, self.layout, sizes))

    def __call__(
        self,
        query: torch.Tensor,
        held: HeldCounts | Sequences,
        mask: torch.Tensor | None,
        options: AttentionOptions,
        allocate: Callable[[int], torch.Tensor],
        out: torch.Tensor | None = None,
        states: KeyValue | None = None,
        slot: int = 0,
        fill: bool = False,
    ) -> torch.Tensor:
        """Attention of S queries, in three launches.

        Args:
            query: `[B, Hq, S, Dk]` fp16, bf16 or fp32; over pages `[T, Hq, D]`, of all new tokens.
            held: Counts of blocks, residual rows and sinks to attend to; or the sequences over pages. Attention is
                computed for sequences with one new token.
            mask: `[B, 1, S or 1, T]` bool, True attends, T counting sinks, blocks' tokens and residual rows in this
                order. `None` over pages.
            options: If causal, the packed part and the sinks must be older than all queries.
            allocate: Function that returns float32 scratch of a number of elements or more, 16-byte aligned.
            out: `[B, S, Hq, Dv]`, any float dtype, last dimension contiguous; by default a new tensor like `query`.
                Over pages `[T, Hq, D]` contiguous; rows of other sequences stay as they are.
            states: Keys `[B, Hkv, 1, Dk]` and values `[B, Hkv, 1, Dv]` of a token to write to the residual first, in
                its dtype; S tokens to append to a preallocated batch. Over pages `[T, Hkv, D]` of all new tokens; their
                strides and the query's are multiples of 8, their addresses of 16.
            slot: Row of the residual for that token, if the batch is not preallocated.
            fill: Over pages, whether to write 0 for padding tokens; requires T >= B and at most one new token a
                sequence.

        Returns:
            `out`. Rows that attend to nothing are 0.
        """
        index = self.device.index
        if self.on_gpu and index != current_device():
            # Kernels are launched on the current device; layers of a model spread over several GPUs are not on it.
            with torch.cuda.device(self.device):
                return self(query, held, mask, options, allocate, out, states, slot, fill)
        if mask is None:
            mask_rows, masked = 0, NO_MASK
        else:
            mask_rows = min(mask.shape[2], 2)
            strides = (mask.stride(0), 0 if mask_rows == 1 else mask.stride(2), mask.stride(3))
            masked = (mask.data_ptr(), *strides)
        if isinstance(held, Sequences):
            counts, tables = (held.packed, None, None), (held.block_table, held.cu_seqlens_q, held.cu_seqlens_k)
            packed_at, *tables_at = [tensor.data_ptr() for tensor in (held.packed, *tables)]
            counts_at, shown = (packed_at, None, None), (*held.block_table.shape, held.least_padding, fill)
            bits = packed_at | tables_at[0] | tables_at[1] | tables_at[2]
        else:
            counts, counts_at, shown = held.tensors, held.addresses, None
            tables = tables_at = NO_TABLES
            bits = counts_at[0] | counts_at[1] | counts_at[2]
        shape, (scaling, causal, softcap, s_aux, _) = query.shape, options
        key = (
            shape, query.stride(), query.dtype, mask_rows, scaling, causal, softcap,
            None if s_aux is None else s_aux.dtype,
            None if out is None else (out.stride(), out.dtype),
            None if states is None else (states[0].stride(), states[1].stride(), states[0].shape[2]),
            shown,
        )  # fmt: skip
        step = self._steps.get(key)
        if step is None and shown is None:
            rows = (query, *(states or ()))
            if not all(part.stride()[-1] == 1 or part.is_contiguous() for part in rows):
                # Kernels read contiguous rows, as models make them.
                query, *row = (part.contiguous() for part in rows)
                return self(query, held, mask, options, allocate, out, (row[0], row[1]) if row else None, slot)
        if out is None:
            out = query.new_empty(shape[0], shape[2], shape[1], self.value_dim)
        if step is None:
            if len(self._steps) >= MOST_STEPS:
                self._steps.clear()
            step = self._steps[key] = self._step(query, out, mask_rows, options, states, shown)
        scratch = allocate(step.size)
        query_at, scratch_at, out_at = query.data_ptr(), scratch.data_ptr(), out.data_ptr()
        aux_at = scratch_at if s_aux is None else s_aux.data_ptr()
        bits |= query_at | scratch_at | out_at | (masked[0] or 0) | aux_at
        new_at, slots = NO_TOKEN, ()
        if states is not None:
            new_at = keys_at, values_at = states[0].data_ptr(), states[1].data_ptr()
            bits |= keys_at | values_at
            slots = (slot,) if self.written[0] is None else ()
        first, split, merge = step.launches
        aligned = bits & 15 == 0 and self.aligned
        if aligned and merge.ready is not None:
            # Common case, nothing left to look up: all is compiled for tensors aligned like these.
            row_at = (*self.addresses[1], *new_at, *(() if shown is None else tables_at), *self.written_at)
            self._launch(
                first.ready, split.ready, merge.ready, current_raw_stream(index), self.addresses, row_at, slots,
                query_at, scratch_at, out_at, counts_at, tables_at, masked, aux_at,
            )  # fmt: skip
            return out
        row = (*self.tensors[1], *(states or NO_TOKEN), *(() if shown is None else tables), *self.written)
        self._launch(
            *[launch.on_tensors(aligned) for launch in step.launches], 0, self.tensors, row, slots,
            query, scratch, out, counts, tables,
            NO_MASK if mask is None else (mask.view(torch.uint8), *masked[1:]),
            scratch if s_aux is None else s_aux,
        )  # fmt: skip
        return out

    def _launch(
        self,
        first: Any,
        split: Any,
        merge: Any,
        stream: int,
        parts: tuple[tuple[Any, ...], ...],
        row: tuple[Any, ...],
        slots: tuple[int | None, ...],
        query: Any,
        scratch: Any,
        out: Any,
        counts: tuple[Any, ...],
        tables: tuple[Any, ...] | list[Any],
        mask: tuple[Any, ...],
        s_aux: Any,
    ) -> None:
        """Launch the three kernels with tensors or their addresses.

        `first`, `split` and `merge` are as `Launch.ready`; `parts` are `tensors`; `row` are dense rows, new tokens and
        what is written with them; `counts` are those of `HeldCounts`, or the packed blocks of `Sequences`, and `tables`
        a block table and numbers of tokens.
        """
        (call_first, grid, fixed, numbers), (call_split, split_grid, fixed_split, of_split) = first, split
        (call_merge, merge_grid, fixed_merge, of_merge), (blocks, dense, of_queries, of_outputs) = merge, parts
        (num_blocks, num_residual, num_sinks), (table, cu_seqlens_q, cu_seqlens_k) = counts, tables
        call_first(*grid, stream, *fixed, *row, query, *of_queries, scratch, *slots, *numbers)
        call_split(
            *split_grid, stream, *fixed_split, scratch, *blocks, num_blocks, *dense, num_residual, num_sinks, *mask,
            *(NO_TOKEN if table is None else row[1:3]), *tables, *of_split,
        )  # fmt: skip
        call_merge(
            *merge_grid, stream, *fixed_merge, scratch, num_blocks, num_residual, num_sinks, *of_outputs, s_aux, out,
            cu_seqlens_q, cu_seqlens_k, *of_merge,
        )  # fmt: skip

    def _step(
        self,
        query: torch.Tensor,
        out: torch.Tensor,
        mask_rows: int,
        options: AttentionOptions,
        states: KeyValue | None,
        shown: tuple[int, int, int, bool] | None,
    ) -> Step:
        """Make the launches; `shown` are the shape of a block table, `least_padding` and `fill`."""
        pages, on, kv_heads = self.pages, target(self.device), self.kv_heads
        if pages is None or shown is None:
            (batch, query_heads, queries, _), least = query.shape, 1
            room = (self.capacity, self.sinks + self.ring)
        else:
            query_heads, queries, (batch, width, least, fill) = query.shape[1], 1, shown
            room = (max(width - pages.first_block_column, 0), pages.ring_rows + pages.sinks)
        plan = plan_decode(
            *(batch, query_heads, kv_heads, queries, self.layout, *room),
            *(options.causal, mask_rows, *options.flags, on, least, pages and pages.place),
        )
        at, rows = plan.scratch, query_heads // kv_heads * queries
        split, reduced, out_strides = SPLIT_FRAGMENTS if on.fragments else SPLIT, plan.reduce, out.stride()[:3]
        scaling_log2, cap_log2 = options.log2_factors
        n = DecodeNumbers(
            rows, queries, None, kv_heads, kv_heads * plan.row_tiles, *[None] * 9, scaling_log2, cap_log2,
            plan.row_tiles, plan.streams, plan.tile_rows, plan.workers, plan.dense_splits,
            at.plain, at.scale, at.lse, at.partial,
        )  # fmt: skip
        # Kernel, grid, numbers, constants and options of the first launch; numbers of the others.
        first: tuple[Any, ...]
        if pages is not None and shown is not None and states is not None:
            key_t, key_h, value_t, value_h, *of_query = (x // 8 for part in (*states, query) for x in part.stride()[:2])
            n = n._replace(
                queries=query.shape[0], count=batch, blocks_b=pages.page_blocks, key_t=key_t, key_h=key_h,
                value_t=value_t, value_h=value_h, width=width,
            )  # fmt: skip
            reduced, out_strides = reduced._replace(FILL=fill), (0, *out.stride()[:2])
            first = self._append_to_pages(pages, n, of_query, least)
        else:
            n = self._of_batch(n)
            first = self._append_and_rotate(batch, states, n, query.stride()[:3])
        index, dense = self.device.index, self.dtype
        dependent = {"launch_pdl": True} if on.dependent_launch else {}
        limit = {"maxnreg": plan.config.registers} if plan.config.registers else {}
        kernel, grid, numbers, constants, first_options = first
        split_options = {"num_warps": plan.config.warps, "num_stages": plan.config.stages, **limit}
        aux = None if options.s_aux is None else options.s_aux.dtype
        # The dtypes of pointers decide a variant too.
        return Step(
            at.size,
            (
                Launch(
                    kernel, index, grid, numbers, constants, (constants, query.dtype, dense, index), first_options
                ),
                Launch(
                    split, index, (plan.workers, 1, 1), (n,), (plan.split,),
                    (plan.split, plan.config, dense, index), split_options, len(DecodeTensors._fields),
                ),
                Launch(
                    REDUCE, index, plan.reduce_grid, (n, OutStrides(*out_strides)), (reduced,),
                    (reduced, out.dtype, aux, index), {"num_warps": plan.reduce_warps} | dependent,
                ),
            ),
        )  # fmt: skip

    @on_its_device
    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the rows of S tokens to the sinks or the ring of a preallocated batch, encode the block that becomes
        due, and write the counts. For readers other than a decode step, which appends as its queries are rotated.

        Args:
            keys: `[B, Hkv, S, Dk]` in the residual's dtype, last dimension contiguous, S at most 128.
            values: `[B, Hkv, S, Dv]`.
        """
        n = self._of_batch(DecodeNumbers(*[None] * len(DecodeNumbers._fields))._replace(rows=0, kv_heads=self.kv_heads))
        first = self._append_and_rotate(len(keys), (keys, values), n, (None,) * 3)
        kernel, grid, numbers, constants, options = first
        tensors = (*self.tensors[1], keys, values, *self.written, None, None, self.tensors[2][1], None)
        kernel(grid, tensors, numbers, constants, (constants, keys.dtype, self.device.index), **options)

    def _shapes(self) -> tuple[EncodeConfig, tuple[Any, Any]]:
        """Launch parameters of programs that append states and encode them, and constants for keys and values."""
        of = (self.dtype, target(self.device), matrix_type(self.dtype, self.device))
        (config, of_keys), (other, of_values) = (encode_shape(self.layout, is_value, *of) for is_value in (False, True))
        return max(config, other, key=lambda each: each.warps), (of_keys, of_values)

    def _of_batch(self, n: DecodeNumbers) -> DecodeNumbers:
        """Numbers of a step with those of the batch's tensors."""
        blocks_b, blocks_h = self.block_strides
        return n._replace(blocks_b=blocks_b, blocks_h=blocks_h, ring=self.ring, sinks=self.sinks)

    def _append_and_rotate(
        self, batch: int, states: KeyValue | None, n: DecodeNumbers, of_query: tuple[int | None, ...]
    ) -> tuple[Any, ...]:
        """Make the launch that appends `states` and rotates queries: kernel, grid, numbers, constants and options."""
        (config, shapes), counted = self._shapes(), self.written[0] is not None
        strides: list[int | None] = [None] * 6
        programs, tokens = 0, 1
        if states is not None:
            strides, tokens, programs = [x for part in states for x in part.stride()[:3]], states[0].shape[2], 2
        warps = config.warps if counted and programs else 1
        constants = (*shapes, triton.next_power_of_2(tokens), warps)
        new = AppendNumbers(*strides, tokens, *of_query, *self.limits)
        numbers = (new, n) if programs and not counted else (None, new, n)  # without a slot
        grid = (batch * self.kv_heads, programs + -(-n.rows // warps), 1)
        return APPEND_AND_ROTATE, grid, numbers, constants, {"num_warps": warps, **APPEND_OPTIONS}

    def _append_to_pages(self, pages: Pages, n: DecodeNumbers, of_query: list[int], least: int) -> tuple[Any, ...]:
        """`_append_and_rotate` for pages.

        Blocks are encoded there in steps of single tokens (`least` is 1), whose number of sequences is small: a program
        that may encode takes many registers, and few run side by side.
        """
        on, kv_heads, batch, encodes = target(self.device), self.kv_heads, n.count, least == 1
        config, shapes = self._shapes()
        warps, block_h = (config.warps, triton.next_power_of_2(kv_heads)) if encodes else (1, 1)
        copies, rotations = batch * -(-kv_heads // block_h), -(-batch * kv_heads * n.rows // warps)
        workers = min(batch, max(1, on.multiprocessors // (2 * kv_heads))) if encodes else 0
        place = PageShape(*pages.place, padded_sequences(batch, least))
        constants = (*shapes, place, block_h, warps, encodes)
        numbers = (PageWork(*of_query, copies, rotations, workers), n)
        options = {"num_warps": warps}
        if encodes and config.registers is not None:
            options["maxnreg"] = config.registers
        return APPEND_TO_PAGES, (copies + rotations + 2 * kv_heads * workers, 1, 1), numbers, constants, options


def paged_scratch_bytes(
    count: int, query_heads: int, kv_heads: int, layout: BlockLayout, rows: int, device: torch.device
) -> int:
    """Scratch bytes of a step over pages for `count` sequences of any length, with `rows` rows of ring and sinks."""
    shape = (count, query_heads, kv_heads, 1, layout, 1 << 20, rows)
    return 4 * plan_decode(*shape, False, 0, False, False, target(device)).scratch.size
