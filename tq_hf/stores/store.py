"""The keys and values of one layer: dense sinks, packed blocks, dense residual.

    [ sinks: first S0 tokens ][ packed blocks of 128 tokens ][ residual: the rest, dense ]

The number of tokens T decides the number of packed blocks, `TurboQuantConfig.num_blocks(T)`, however the tokens were
appended. Padded rows have their first real tokens as sinks (see `tq_hf.tensors.sinks`). `append` encodes the blocks
that become due, but returns a view with their tokens still dense: the tokens of a call are read exactly in that call. A
block that a short call encoded is *pending*: its dense rows stay in the residual until the next call begins, so that a
`crop` in between (assisted decoding) finds them.

Two things are left for later. `settle` does them, and all operations but reads and decode steps begin with it:

- The newest tokens may be pending: the attention that reads them writes them, mostly as its queries are rotated.
- A balanced configuration takes its channel scales from the last long call before the first block is encoded. They
  depend on the queries of that call: if `append` is told to defer, attention shows them (`encode_deferred`).

A store grows, with counts on the host, or is preallocated: its tensors stay where they are. Decode steps of a
preallocated store, of one token or the few of assisted decoding, count on the device (`DeviceCounts`) and never read
there, so that a captured graph replays them for every length. All other operations read these counts, which waits for
the device, work as those of a growing store, and end with `_keep_in_place`. The host counts the tokens of eager steps
too, to refuse one too many. A compiled step cannot count: it asserts on the device that there is room, and the next
eager step reads `length` once.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from tq_kernels.format import BLOCK_TOKENS
from tq_kernels.types import ChannelScales, DenseRows, KeyValue, PackedBlocks

from ..compat import is_capturing, mark_static_addresses, outside_inference_mode
from ..config import TurboQuantConfig
from ..ops import dispatch
from ..tensors.layer import NOTHING, Counts, DeviceCounts, LayerTensors, View, check_room, counts_after
from ..tensors.residual import CutBlocks, PendingToken, ring_capacity, write_tokens
from ..tensors.sinks import Padding, SinkOrder
from . import graph_ops
from .sizes import GROWTH, SHORT_CALL, check_fits, new_tensors, residual_capacity


class LayerStore:
    """The tensors of a compressed layer, and how many tokens they hold.

    Args:
        tensors: The tensors, which the store writes to.
        max_cache_len: Maximum number of tokens of a preallocated store; `None` to grow geometrically, without bound.
        device_counts: Counts of a preallocated store.
    """

    def __init__(
        self, tensors: LayerTensors, max_cache_len: int | None = None, device_counts: DeviceCounts | None = None
    ) -> None:
        self.tensors = tensors
        self.counts = NOTHING
        """Counts on the host, without a deferred call; in a preallocated store good until its next step."""
        self.scales_are_fixed = False
        """Whether the channel scales were set, so that no prompt changes them."""
        self.max_cache_len = max_cache_len
        self.device_counts = device_counts
        self.step_tokens = 1
        """Most tokens of a decode step of a preallocated store."""
        self.num_tokens: int | None = 0
        """Number of tokens of a preallocated store; `None` after a compiled step, which does not count on the host."""
        self.config = tensors.config
        self.layout = tensors.layout
        self.pending = PendingToken()
        """The newest token or, of a preallocated store, those of the last step, if they are not written yet."""
        self._deferred: tuple[KeyValue, SinkOrder | None, torch.Tensor | None] | None = None
        """Keys and values of a deferred call, in the order of the store; the order after it; and True for its real
        tokens, `[B, S]` bool, `None` if unknown."""
        self._fixed = None if device_counts is None else tensors
        """Tensors of a preallocated store between calls."""
        self._cuts = CutBlocks()
        self._rows_of_due = BLOCK_TOKENS + self.config.residual_length
        """Least number of residual rows with which a block is due."""

    def __getstate__(self) -> dict[str, Any]:
        self.settle(wait=False)
        return vars(self)

    @classmethod
    @outside_inference_mode
    def allocate(
        cls,
        config: TurboQuantConfig,
        keys: torch.Tensor,
        values: torch.Tensor,
        max_cache_len: int | None = None,
        prompt: bool = False,
    ) -> LayerStore:
        """Make an empty store for keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]`, with room for them. A `prompt`
        is appended next, and writes the channel scales and the counts on the device, which are not filled here then.
        Raise `ValueError` if the tensors do not fit each other."""
        tensors = new_tensors(config, keys, values, max_cache_len, prompt)
        if max_cache_len is None:
            return cls(tensors)
        # A model on the meta device has its counts on the CPU, where they are numbers.
        counts = DeviceCounts.allocate(torch.device("cpu") if keys.is_meta else keys.device, filled=not prompt)
        dispatch.prepare(config, tensors.layout, keys.dtype, keys.device)
        mark_static_addresses((*tensors.arguments(), *counts))
        return cls(tensors, max_cache_len, counts)

    @property
    def blocks(self) -> PackedBlocks:
        """Tensors of packed blocks, with room for more."""
        return self.tensors.blocks

    @property
    def length(self) -> int | torch.Tensor:
        """Number of tokens held, a deferred call and a pending token included; for a preallocated store `[]` int64 on
        the device, or an `int` on the meta device."""
        on_device, is_meta = self.device_counts, self.tensors.row.device.type == "meta"
        if on_device is None or self._deferred is not None:
            tokens = self.counts.tokens + (0 if self._deferred is None else self._deferred[0][0].shape[2])
            return tokens if on_device is None or is_meta else on_device.length.new_full((), tokens)
        length = graph_ops.tokens_held(on_device, self.pending)
        return int(length) if is_meta else length

    @property
    def lacks_sinks(self) -> bool:
        """Whether the padding of the next tokens matters: a row may have fewer exact sinks than `sink_tokens`."""
        held = self.counts.tokens if self.device_counts is None else self.num_tokens
        return self.tensors.order is not None or (held is not None and held < self.config.sink_tokens)

    @property
    def is_deferred(self) -> bool:
        """Whether the tokens of the last call are not encoded yet, for the sake of its queries."""
        return self._deferred is not None

    def settle(self, wait: bool = True) -> Counts:
        """Finish postponed work: encode a deferred call, write the pending token and, if told to `wait` for the device,
        read counts of a preallocated store there, unless it is empty."""
        if self._deferred is not None:
            self.encode_deferred()
        if self.pending.states is not None:
            if self.device_counts is None:
                self.tensors.write_token(self.pending, self.counts)
            else:
                graph_ops.append_pending_token(self._step_view(None))
        if wait and self.device_counts is not None and self.num_tokens != 0:
            self.counts = self.device_counts.read()
        return self.counts

    def encode_deferred(self, queries: torch.Tensor | None = None, attended: torch.Tensor | None = None) -> None:
        """Encode what the last call appended, if it was deferred. `queries` are of that call, `[B, Hq, S, Dk]`, if
        known, and `attended` is true for its tokens that are not padding, `[B or 1, S]` bool; `None` for all."""
        if self._deferred is not None:
            states, order, real = self._deferred
            before = self.tensors, self.counts, self._deferred
            try:
                self._append_long(states, order, attended if real is None else real, queries)
            except BaseException:
                self._undo(before)
                raise

    def set_scales(self, channel_scales: ChannelScales) -> None:
        """Use these channel scales, `[B or 1, Hkv, D]`. The store must be empty. Raise `ValueError` for scales of heads
        of another number or size."""
        self.blocks.channel_scales.check(channel_scales)
        for own, scales in zip(self.blocks.channel_scales, channel_scales, strict=True):
            own.copy_(scales)
        self.scales_are_fixed = True

    def append(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        defer: bool = False,
        padding: Padding | None = None,
        is_step: bool = False,
    ) -> View:
        """Store new tokens and return what their queries attend to. A kernel that reads the view may write a token.

        Args:
            keys: `[B, Hkv, S, Dk]` in the dtype and on the device of this store.
            values: `[B, Hkv, S, Dv]`.
            defer: Leave a prompt whose queries decide the channel scales to `encode_deferred`.
            padding: Padding of a call of several tokens, if known.
            is_step: Whether they are several tokens of a decode step of a preallocated store, which has room for them
                (`take_steps_of`).

        Raises:
            ValueError: The tensors do not fit the store, or the store is full. Nothing is changed then.
        """
        row = self.tensors.row
        if (
            keys.shape == row.keys
            and values.shape == row.values
            and keys.dtype == values.dtype == row.dtype
            and keys.device == values.device == row.device
        ):
            if self.device_counts is not None:
                return self._append_on_device(keys, values)
            sinks, _, rows, encoded = self.counts
            if (
                sinks == self.config.sink_tokens
                and 0 < rows - encoded * BLOCK_TOKENS < min(self.tensors.ring_rows, self._rows_of_due - 1)
                and self._deferred is None
                and not torch.is_grad_enabled()
            ):  # never in a graph: see `TurboQuantCache.update`
                return self._append_token(keys, values)
        else:
            check_fits(keys, values, row)
            if is_step:
                return self._append_on_device(keys, values)
        held = self.settle().without_encoded_rows()
        if self.max_cache_len is None:
            self.counts = held  # also if the call fails: it may have written to these rows
        else:
            check_room(keys.shape[2], held.tokens, self.max_cache_len)
        before = self.tensors, self.counts, self._deferred
        try:
            return self._append_several((keys, values), held, defer, padding)
        except BaseException:
            self._undo(before)
            raise

    @outside_inference_mode
    def take_steps_of(self, tokens: int) -> None:
        """Let decode steps of a preallocated store have up to `tokens` tokens: make room for them in the residual, so
        that a block that becomes due keeps its dense rows until the next call."""
        if self._fixed is None or self.step_tokens >= tokens:
            return
        _, blocks, rows, _ = self.settle()
        self.step_tokens = tokens
        capacity = residual_capacity(self.config.residual_length, rows, self.max_cache_len, tokens)
        if capacity > self._fixed.ring_rows:
            self._fixed = self._fixed.with_ring(capacity, blocks * BLOCK_TOKENS, rows)
            mark_static_addresses([self._fixed.rows])
            self.tensors = self._fixed.with_order(self.tensors.order)

    def _append_several(self, states: KeyValue, held: Counts, defer: bool, padding: Padding | None) -> View:
        """Several tokens after those of `held`, or a first one. A first prompt or a long call reads the model's own
        tensors; its blocks are encoded from them, or from copies in another order."""
        self.counts, past, tokens = held, held.tokens, states[0].shape[2]
        if self.max_cache_len is not None and held.residual:
            # The returned view reads the old rows after the new ones are in place.
            first = held.blocks * BLOCK_TOKENS
            self.tensors = self.tensors.with_ring(self.tensors.ring_rows, first, held.residual)
        stored, order, real = states, self.tensors.order, None
        if padding is not None:
            stored, order, real = self.tensors.exchanged(states, held, padding)
        if tokens <= SHORT_CALL and (tokens <= 1 or past):
            return self._append_tokens(stored, order, past)
        view = View(self.tensors, held if past else None, past + tokens, new=states)
        if defer and self.config.balance and not self.scales_are_fixed and not held.blocks:
            self._deferred, self.num_tokens = (stored, order, real), view.length
        else:
            self._append_long(stored, order, real)
        return view

    def _undo(self, before: tuple[Any, Any, Any]) -> None:
        """Hold what was held before a call that failed, except for rows and blocks beyond the counts."""
        self.tensors, self.counts, self._deferred = before
        if self.device_counts is not None:
            self.device_counts.write(self.counts)

    def _append_on_device(self, keys: torch.Tensor, values: torch.Tensor) -> View:
        """A decode step of a preallocated store, which compiles: attention appends the tokens, and counts there."""
        if self.pending.states is not None or self._deferred is not None:
            self.settle(wait=False)
        past = None
        if torch.compiler.is_dynamo_compiling() or (self.num_tokens is None and is_capturing()):
            self.num_tokens = None
        else:
            past = int(self.length) if self.num_tokens is None else self.num_tokens
            assert self.max_cache_len is not None
            check_room(keys.shape[2], past, self.max_cache_len)
            self.num_tokens = past + keys.shape[2]
        self.pending.states = keys, values
        return self._step_view(past)

    def _step_view(self, past: int | None) -> View:
        assert self.max_cache_len is not None
        return View(self.tensors, self.device_counts, self.max_cache_len, self.pending, past_length=past)

    def _append_token(self, keys: torch.Tensor, values: torch.Tensor) -> View:
        """Nearly every decode step of a growing store: attention writes one token to the residual, which has room."""
        tensors = self.tensors
        if self.pending.states is not None:
            tensors.write_token(self.pending, self.counts)
        sinks, blocks, rows, encoded = self.counts
        if encoded:  # their rows are dropped
            blocks, rows = blocks + encoded, rows - encoded * BLOCK_TOKENS
        self.counts, self.pending = counts, pending = Counts(sinks, blocks, rows + 1), PendingToken((keys, values))
        return View(tensors, counts, sinks + blocks * BLOCK_TOKENS + rows + 1, pending)

    @outside_inference_mode
    def _append_tokens(self, states: KeyValue, order: SinkOrder | None, past: int) -> View:
        """Copy a few tokens after `past` others to sinks and residual, and encode the blocks that become due. They are
        pending: their rows stay until the next call."""
        held, tokens, config = self.counts, states[0].shape[2], self.config
        counts = counts_after(held, tokens, config.sink_tokens, config.residual_length)
        self.tensors = self.tensors.with_order(order)
        if counts.residual > self.tensors.ring_rows:
            capacity = residual_capacity(config.residual_length, counts.residual, self.max_cache_len)
            self.tensors = self.tensors.with_ring(capacity, held.blocks * BLOCK_TOKENS, held.residual)
        self._make_room(held.blocks, held.blocks + counts.pending)
        dispatch.append_rows(self.tensors, held, counts, states)
        self.counts, tensors = counts, self.tensors
        self._keep_in_place()
        return View(tensors, counts if past else None, past + tokens, new=None if past else states)

    @outside_inference_mode
    def _append_long(
        self,
        prompt: KeyValue,
        order: SinkOrder | None,
        attended: torch.Tensor | None = None,
        queries: torch.Tensor | None = None,
    ) -> None:
        """Append the tokens of a long call, and encode the blocks that become due without copying them.

                      residual before          new tokens
            [ sinks ][ rows held | ....... ][ lead | whole blocks | kept ]
            [ dense ][ block ][ block begun  .... ][ block ][ ... ][ dense ]

        The block that the old residual began is completed by `lead` new tokens in a copy of the residual, and encoded
        from there. Whole blocks of new tokens are encoded from the model's tensors. Other tokens are kept in a new
        residual. The old ring is not written, because the view of this call reads it, unless it is empty and has room.
        """
        (sinks, blocks, held, _), tensors, tokens = self.counts, self.tensors, prompt[0].shape[2]
        first, config = blocks * BLOCK_TOKENS, self.config
        after = counts_after(self.counts, tokens, config.sink_tokens, config.residual_length)
        sunk, counts = (sinks, after.sinks - sinks), after.without_encoded_rows()
        lead = min(tokens - sunk[1], -held % BLOCK_TOKENS)
        begun = min(after.pending, (held + lead) // BLOCK_TOKENS)
        start, kept = sunk[1] + lead, held + lead - begun * BLOCK_TOKENS
        end = start + (after.pending - begun) * BLOCK_TOKENS
        capacity = residual_capacity(config.residual_length, counts.residual, self.max_cache_len)
        if held:
            complete = tensors.with_ring(ring_capacity(held + lead), first, held)
            states = prompt[0][:, :, :start], prompt[1][:, :, :start]
            write_tokens(complete.rows, complete.ring_rows, states, sunk, first + held)
            tensors = complete.with_ring(capacity, first + begun * BLOCK_TOKENS, kept)
        elif capacity > tensors.ring_rows:
            tensors = tensors.with_ring(capacity, 0, 0)
        slot = (counts.blocks * BLOCK_TOKENS + kept) % tensors.ring_rows
        self.tensors = tensors.with_order(order)
        scales = None if self.scales_are_fixed or blocks else tensors.blocks.channel_scales
        dense = DenseRows(tensors.rows, tensors.ring_rows, *sunk, end, slot, counts[:3], self.device_counts)
        dispatch.store_prompt(prompt, dense, scales, self.config.balance, queries, attended)
        if begun:
            for skipped, part in complete.ring_parts(first, begun * BLOCK_TOKENS):
                self._encode(part, blocks + skipped // BLOCK_TOKENS)
        if end > start:
            self._encode(prompt, blocks + begun, (start, end))
        self.counts, self._deferred = counts, None
        self._keep_in_place(is_counted=True)

    def _encode(self, states: KeyValue, start: int, tokens: tuple[int, int] | None = None) -> None:
        """Encode the whole blocks of `states`, or of tokens `tokens[0]` to `tokens[1]`, into blocks `start` and on."""
        first, stop = tokens or (0, states[0].shape[2])
        if blocks := (stop - first) // BLOCK_TOKENS:
            self._make_room(start, start + blocks)
            dispatch.encode(self.config, states, self.tensors.blocks, start, tokens)

    def _make_room(self, held: int, needed: int) -> None:
        """Make room for `needed` blocks, and keep the first `held`."""
        if needed > self.tensors.blocks.capacity:
            # Fit a prompt exactly; make room to spare once the cache is growing.
            capacity = needed if held == 0 else max(needed, int(held * GROWTH) + 1)
            self.tensors = replace(self.tensors, blocks=self.blocks.resized(capacity, held))

    def _keep_in_place(self, is_counted: bool = False) -> None:
        """Move rows of a preallocated store to the ring that graphs know, and write its counts to the device, unless
        `is_counted`: a kernel has written them."""
        if self.device_counts is None or self._fixed is None:
            return
        if self.tensors.rows is not self._fixed.rows:
            if self.counts.residual > self._fixed.ring_rows:
                self.counts = self.counts.without_encoded_rows()
            self._fixed.copy_rows(self.tensors, self.counts.blocks * BLOCK_TOKENS, self.counts.residual)
            self.tensors = self._fixed.with_order(self.tensors.order)
        if not is_counted:
            self.device_counts.write(self.counts)
        self.num_tokens = self.counts.tokens

    def view(self) -> View:
        """All tokens held, as a query that adds none would read them; good until the next change."""
        counts = self.settle().without_encoded_rows()
        return View(self.tensors, counts, counts.tokens)

    @outside_inference_mode
    def crop(self, tokens: int) -> None:
        """Remove the last `tokens` tokens, at most all. Exact within the residual; a packed block that is cut moves its
        surviving tokens to the residual, dequantized."""
        sinks, blocks, _, encoded = counts = self.settle()
        length = max(0, counts.tokens - tokens)
        self._cuts.crop(length - sinks)
        if self.tensors.order is not None:
            self.tensors = self.tensors.with_order(self.tensors.order.cropped(length))
        if (rows := length - sinks - blocks * BLOCK_TOKENS) >= 0:
            # Rows of pending blocks are still here: keep packed what a cache of this length would have packed.
            self.counts = Counts(sinks, blocks, rows, min(encoded, max(0, self.config.num_blocks(length) - blocks)))
        else:
            blocks, rows = divmod(max(0, length - sinks), BLOCK_TOKENS)
            if rows:
                slot = blocks * BLOCK_TOKENS % self.tensors.ring_rows
                keys, values = self.tensors.states(slice(slot, slot + BLOCK_TOKENS))
                dispatch.dequantize(self.config, self.blocks.slice(blocks, blocks + 1), keys, values)
                self._cuts.cut(blocks, rows, (keys, values))
            self.counts = Counts(min(sinks, length), blocks, rows)
        self._keep_in_place()

    @outside_inference_mode
    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> LayerStore:
        """A store of the results of `function` on every tensor but counts (batch selection, device moves)."""
        store = copy(self)  # which settles this one
        store.tensors, store.pending, store._cuts = self.tensors.map(function), PendingToken(), self._cuts.map(function)
        store._fixed = None if self._fixed is None else store.tensors
        return store

    def reorder(self, beam_idx: torch.Tensor) -> None:
        """Put sequence `beam_idx[i]` in place i, for as many as are held. The tensors keep their addresses."""
        assert beam_idx.shape == (self.tensors.batch_size,)
        self.settle(wait=False)
        dispatch.reorder(self.tensors, beam_idx)
        self._cuts = self._cuts.map(lambda x: x.index_select(0, beam_idx.to(x.device)))
        if (order := self.tensors.order) is not None:
            self.tensors = self.tensors.with_order(order.map(lambda x: x.index_select(0, beam_idx.to(x.device))))

    def reset(self) -> LayerStore | None:
        """Hold nothing. Returns the store to go on with: itself if it is preallocated, otherwise none."""
        if self._fixed is None:
            return None
        self._deferred = self.pending.states = None
        self._cuts.clear()
        if not self.scales_are_fixed:
            self.blocks.channel_scales.reset()
        self.tensors, self.counts = self._fixed.with_order(None), NOTHING
        self._keep_in_place()
        return self

    def by_kind(self) -> dict[str, list[torch.Tensor]]:
        """Every tensor held, by the kind `memory_footprint` reports."""
        self.settle(wait=False)
        kinds = self.tensors.by_kind()
        kinds["metadata"] += list(self.device_counts or ())
        kinds["residual"] += [tensor for cut in self._cuts.values() for tensor in cut]
        return kinds

    def export(self) -> tuple[Counts, dict[str, torch.Tensor]]:
        """The counts, and what they count of each tensor, by name: the block tensors' names, `sink_keys`,
        `sink_values`, `residual_keys` and `residual_values`, residual rows in the order of the tokens, and if balanced
        `key_channel_scales` and `value_channel_scales`, if rows are padded `sink_index`."""
        counts, tensors = self.settle(), self.tensors
        held = tensors.blocks.slice(0, counts.blocks + counts.pending).tensors()
        if self.config.balance:
            held["key_channel_scales"], held["value_channel_scales"] = tensors.blocks.channel_scales
        parts = [part for _, part in tensors.ring_parts(counts.blocks * BLOCK_TOKENS, counts.residual)]
        residual = zip(tensors.sinks(0), *parts, strict=True)
        held |= zip(("sink_keys", "sink_values"), tensors.sinks(counts.sinks), strict=True)
        held |= zip(("residual_keys", "residual_values"), (torch.cat(each, 2) for each in residual), strict=True)
        if tensors.order is not None:
            held["sink_index"] = tensors.order.index
        return counts, held

    @outside_inference_mode
    def restore(self, counts: Counts, held: dict[str, torch.Tensor]) -> None:
        """Hold what `export` returned, from any device, and nothing else."""
        device, packed = self.tensors.row.device, counts.blocks + counts.pending
        self._make_room(0, packed)
        for name, tensor in self.blocks.tensors().items():
            tensor[:, :, :packed] = held[name].to(device)
        if self.config.balance:
            self.blocks.channel_scales.keys.copy_(held["key_channel_scales"])
            self.blocks.channel_scales.values.copy_(held["value_channel_scales"])
        ring = residual_capacity(self.config.residual_length, counts.residual, self.max_cache_len)
        tensors = self.tensors.with_ring(ring, 0, 0)
        keys, values = (torch.cat([held[f"sink_{x}"], held[f"residual_{x}"]], 2).to(device) for x in ("keys", "values"))
        first = counts.blocks * BLOCK_TOKENS
        write_tokens(tensors.rows, tensors.ring_rows, (keys, values), (0, counts.sinks), first)
        index = held.get("sink_index")
        order = None if index is None else SinkOrder(index.to(device), int(index.amax()) + 1)
        self.tensors, self.counts = tensors.with_order(order), counts
        self._keep_in_place()
