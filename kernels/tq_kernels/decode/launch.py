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

from ..codec.launch import encode_shape
from ..common.device import current_device, current_raw_stream, matrix_type, target
from ..common.launcher import Kernel, Launch
from ..common.schedule import DecodeNumbers, DecodeTensors
from ..layout import BlockLayout
from ..turing.split import decode_split_fragments
from ..types import AttentionOptions, HeldCounts, KeyValue, PackedBlocks, Pages, Sequences
from .append import AppendLaunch, append_and_rotate, append_to_pages, rotate_and_append
from .plan import plan_decode
from .reduce import OutStrides, reduce_splits
from .rotate import rotate_query
from .split import decode_split

ROTATE, ROTATE_AND_APPEND, APPEND_AND_ROTATE, APPEND_TO_PAGES = (
    Kernel(function) for function in (rotate_query, rotate_and_append, append_and_rotate, append_to_pages)
)
SPLIT, SPLIT_FRAGMENTS, REDUCE = Kernel(decode_split), Kernel(decode_split_fragments), Kernel(reduce_splits)
NO_TABLES, NO_MASK, NO_PLACE = (None, None, None), (None,) * 4, (0, 0, 0)
"""Tables, mask, and places of rows in pages, where there are none."""
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
        encoder: For pages, R of keys and of values as in `tq_kernels.codec.launch.encode`: the launch that writes
            single tokens encodes the blocks that they complete.
    """

    def __init__(
        self, held: tuple[PackedBlocks, torch.Tensor, int] | Pages, rotations: KeyValue, encoder: KeyValue | None = None
    ) -> None:
        self.pages = held if isinstance(held, Pages) else None
        sizes: tuple[Any, ...]
        if isinstance(held, Pages):
            blocks, rows, scales = held.blocks, held.rows, (held.key_channel_scales, held.value_channel_scales)
            assert encoder is not None
            self.written = (blocks, *encoder, held.value_channel_scales)
            self.layout, sizes = held.layout, (held.place, held.page_blocks)
        else:
            packed, rows, self.sinks = held
            self.written = ()
            blocks, self.layout = packed.data, packed.layout
            scales, self.block_strides = packed.channel_scales, packed.block_strides
            self.capacity, self.ring = blocks.shape[2], rows.shape[2] - self.sinks
            sizes = (self.sinks, self.ring, self.capacity, self.block_strides)
        self.kv_heads, self.value_dim = rows.shape[1], self.layout.value_dim
        self.dtype, self.device = rows.dtype, blocks.device
        self.on_gpu = self.device.type == "cuda"
        # Tensors of blocks, dense rows, queries and outputs.
        self.tensors: tuple[Any, ...] = ((blocks,), (rows,), *zip(rotations, scales, strict=True))
        # Addresses cannot go stale: the tensors above are held, and nothing gives a tensor other memory.
        *parts, self.written_at = (tuple([x.data_ptr() for x in part]) for part in (*self.tensors, self.written))
        self.addresses = tuple(parts)
        self.aligned = all(address % 16 == 0 for part in (*parts, self.written_at) for address in part)
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
        append: AppendLaunch | None = None,
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
                its dtype. Over pages `[T, Hkv, D]` of all new tokens; their strides and the query's are multiples of 8.
            slot: Row of the residual for that token.
            append: `AppendLaunch` that appends the token instead, or S tokens.
            fill: Over pages, whether to write 0 for padding tokens; requires T >= B and at most one new token a
                sequence.

        Returns:
            `out`. Rows that attend to nothing are 0.
        """
        index = self.device.index
        if self.on_gpu and index != current_device():
            # Kernels are launched on the current device; layers of a model spread over several GPUs are not on it.
            with torch.cuda.device(self.device):
                return self(query, held, mask, options, allocate, out, states, slot, append, fill)
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
            None if append is None else append.numbers,
            shown,
        )  # fmt: skip
        step = self._steps.get(key)
        if step is None and shown is None:
            rows = (query, *(states or ()))
            if not all(part.stride()[-1] == 1 or part.is_contiguous() for part in rows):
                # Kernels read contiguous rows, as models make them.
                query, *row = (part.contiguous() for part in rows)
                return self(query, held, mask, options, allocate, out, (row[0], row[1]) if row else None, slot, append)
        if out is None:
            out = query.new_empty(shape[0], shape[2], shape[1], self.value_dim)
        if step is None:
            if len(self._steps) >= MOST_STEPS:
                self._steps.clear()
            step = self._steps[key] = self._step(query, out, mask_rows, options, states, append, shown)
        scratch = allocate(step.size)
        query_at, scratch_at, out_at = query.data_ptr(), scratch.data_ptr(), out.data_ptr()
        aux_at = scratch_at if s_aux is None else s_aux.data_ptr()
        bits |= query_at | scratch_at | out_at | (masked[0] or 0) | aux_at
        row_at: tuple[Any, ...] = ()
        slots: tuple[int | None, ...] = ()
        if states is not None:
            keys_at, values_at = states[0].data_ptr(), states[1].data_ptr()
            bits |= keys_at | values_at
            if append is None:
                places = () if shown is None else (*tables_at, *self.written_at)
                row_at = (keys_at, values_at, *self.addresses[1], *places)
                slots = (slot,) if shown is None else ()
            else:
                row_at = (keys_at, values_at, *append.addresses)
        first, split, merge = step.launches
        aligned = bits & 15 == 0 and self.aligned
        if aligned and merge.ready is not None:
            # Common case, nothing left to look up: all is compiled for tensors aligned like these.
            self._launch(
                first.ready, split.ready, merge.ready, current_raw_stream(index), self.addresses, row_at, slots,
                query_at, scratch_at, out_at, counts_at, tables_at, masked, aux_at,
            )  # fmt: skip
            return out
        if states is None:
            row: tuple[Any, ...] = ()
        elif append is None:
            row = (*states, *self.tensors[1], *(() if shown is None else (*tables, *self.written)))
        else:
            row = (*states, *append.tensors)
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

        `first`, `split` and `merge` are as `Launch.ready`; `parts` are `tensors`; `row` are the new token and where it
        goes; `counts` are those of `HeldCounts`, or the packed blocks of `Sequences`, and `tables` a block table and
        numbers of tokens.
        """
        (call_first, grid, fixed, numbers), (call_split, split_grid, fixed_split, of_split) = first, split
        (call_merge, merge_grid, fixed_merge, of_merge), (blocks, dense, of_queries, of_outputs) = merge, parts
        (num_blocks, num_residual, num_sinks), (table, cu_seqlens_q, cu_seqlens_k) = counts, tables
        call_first(*grid, stream, *fixed, *row, query, *of_queries, scratch, *slots, *numbers)
        call_split(
            *split_grid, stream, *fixed_split, scratch, *blocks, num_blocks, *dense, num_residual, num_sinks, *mask,
            *((None, None) if table is None else row[:2]), *tables, *of_split,
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
        append: AppendLaunch | None,
        shown: tuple[int, int, int, bool] | None,
    ) -> Step:
        """Make the launches; `shown` are the shape of a block table, `least_padding` and `fill`."""
        pages, on, kv_heads, value_dim = self.pages, target(self.device), self.kv_heads, self.value_dim
        if pages is None or shown is None:
            (batch, query_heads, queries, key_dim), least = query.shape, 1
            room = (self.capacity, self.sinks + self.ring)
        else:
            (_, query_heads, key_dim), queries, (batch, width, least, fill) = query.shape, 1, shown
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
            new = tuple(stride // 8 for x in (*states, query) for stride in x.stride()[:2])
            first = self._append_to_pages(pages, (batch, query.shape[0], width), rows, new, (at.plain, at.scale), least)
            key_t, key_h, value_t, value_h, *_ = new
            n = n._replace(
                queries=query.shape[0], count=batch, blocks_b=pages.page_blocks, key_t=key_t, key_h=key_h,
                value_t=value_t, value_h=value_h, width=width,
            )  # fmt: skip
            reduced, out_strides = reduced._replace(FILL=fill), (0, *out.stride()[:2])
        else:
            heads = (rows, queries, kv_heads)
            numbers = (*heads, *query.stride()[:3], at.plain, at.scale)
            grid, constants = plan.rotate_grid, plan.rotate_constants
            if append is not None and states is not None:
                warps = append.options["num_warps"]
                new, constants = append.of_tokens(*states)
                numbers = (*new, *append.numbers, *numbers)
                first = (APPEND_AND_ROTATE, (grid[0], 2 + -(-rows // warps), 1), numbers, constants, append.options)
            elif states is not None:
                constants = (value_dim, triton.next_power_of_2(max(key_dim, value_dim)), *constants)
                strides = (*states[0].stride()[:2], *states[1].stride()[:2])
                numbers = (self.ring + self.sinks, *strides, *numbers)
                first = (ROTATE_AND_APPEND, (grid[0], 1 + grid[1], 1), numbers, constants, {"num_warps": 1})
            else:
                first = (ROTATE, grid, numbers, constants, {"num_warps": 1})
            blocks_b, blocks_h = self.block_strides
            n = n._replace(blocks_b=blocks_b, blocks_h=blocks_h, ring=self.ring, sinks=self.sinks)
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

    def _append_to_pages(
        self,
        pages: Pages,
        sizes: tuple[int, int, int],
        groups: int,
        strides: tuple[int, ...],
        queries_at: tuple[int, int],
        least: int,
    ) -> tuple[Any, ...]:
        """Make the launch that appends to pages and rotates: kernel, grid, numbers, constants and options.

        `sizes` are the numbers of sequences, tokens and columns of the table.

        Blocks are encoded there in steps of single tokens (`least` is 1), whose number of sequences is small: a program
        that may encode takes many registers, and few run side by side.
        """
        on, kv_heads, (batch, tokens, width), encodes = target(self.device), self.kv_heads, sizes, least == 1
        matrix = matrix_type(self.dtype, self.device)
        (config, of_keys), (_, of_values) = (
            encode_shape(self.layout, is_value, self.dtype, on, matrix) for is_value in (False, True)
        )
        warps, block_h = (config.warps, triton.next_power_of_2(kv_heads)) if encodes else (1, 1)
        copies, rotations = batch * -(-kv_heads // block_h), -(-batch * kv_heads * groups // warps)
        workers = min(batch, max(1, on.multiprocessors // (2 * kv_heads))) if encodes else 0
        block_b = triton.next_power_of_2(max(batch, least))
        constants = (of_keys, of_values, *pages.place, block_b, block_h, warps, encodes)
        numbers = (batch, tokens, width, pages.page_blocks, kv_heads, groups)
        numbers = (*numbers, *strides, *queries_at, copies, rotations, workers)
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
