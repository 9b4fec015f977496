"""The keys and values of one layer, counted on the host: dense sinks, packed blocks, dense residual.

    [ sinks: first S0 tokens ][ packed blocks of 128 tokens ][ residual: the rest, dense ]

The number of tokens T decides the number of packed blocks, `TurboQuantConfig.num_blocks(T)`, however the tokens were
appended. Padded rows have their first real tokens as sinks (see `tq_hf.tensors.sinks`). `append` encodes the blocks
that become due, but returns a view with their tokens still dense: the tokens of a call are read exactly in that call. A
block that a short call encoded is *pending*: its dense rows stay in the residual until the next call begins, so that a
`crop` in between (assisted decoding) finds them.

A balanced configuration takes its channel scales from the last long call before the first block is encoded. They depend
on the queries of that call, which the store does not see: if `append` is told to defer, the call is encoded when
attention shows its queries (`encode_deferred`), or before any other operation on the store.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from tq_kernels.format import BLOCK_TOKENS
from tq_kernels.types import DenseRows, KeyValue, PackedBlocks, PendingToken

from ..compat import outside_inference_mode
from ..config import TurboQuantConfig
from ..ops import dispatch
from ..tensors.layer import NOTHING, Counts, DeviceCounts, LayerTensors, View, check_room
from ..tensors.residual import Residual, ring_capacity, write
from ..tensors.sinks import Padding, SinkOrder
from .base import Kind, LayerStore, check_fits, check_states, kind_of

GROWTH = 1.125
"""Buffers grow by an eighth: appends stay amortised O(new tokens), and at most an eighth is held in reserve."""
SHORT_CALL = 128
"""Calls of up to this many tokens go through the residual; longer ones are encoded from the model's own tensors."""


def residual_capacity(config: TurboQuantConfig, rows: int, max_cache_len: int | None) -> int:
    """Number of rows to allocate for a residual of `rows` rows, with room for decoding."""
    room = int(rows * GROWTH) + BLOCK_TOKENS if max_cache_len is None else max_cache_len
    return ring_capacity(max(rows, min(config.residual_length + BLOCK_TOKENS, room)))


@lru_cache
def _no_blocks(config: TurboQuantConfig, sizes: tuple[int, int, int, int], device: torch.device) -> PackedBlocks:
    """Tensors without elements, shared by equal layers until their first block is due."""
    batch, heads, *dims = sizes
    return PackedBlocks.allocate(config.layout(*dims), batch, heads, 0, device)


class Room(NamedTuple):
    """Shapes of a new store's tensors.

    Args:
        none: Tensors without blocks, shared by equal layers.
        words: Key words, value words, scales and key means of `none`, each with its own shape; `None` to share it.
        sinks, ring: Shapes of keys and of values.
    """

    none: PackedBlocks
    words: list[tuple[torch.Tensor, tuple[int, int, int, int] | None]]
    sinks: list[tuple[int, int, int, int]]
    ring: list[tuple[int, int, int, int]]


@lru_cache(maxsize=1024)
def _room(config: TurboQuantConfig, keys: Kind, values: Kind, max_cache_len: int | None) -> Room:
    """Compute the shapes of a new store's tensors.

    Raises:
        ValueError: They do not fit each other, or exceed `max_cache_len`.
    """
    check_states(keys, values)
    (batch, heads, tokens, key_dim), _, device = keys
    due = config.num_blocks(tokens)
    num_blocks = due if max_cache_len is None else config.num_blocks(max_cache_len)
    if max_cache_len is not None:
        check_room(tokens, 0, max_cache_len)
    rows = max(0, tokens - config.sink_tokens) - due * BLOCK_TOKENS
    none = _no_blocks(config, (batch, heads, key_dim, values[0][3]), device)
    # A preallocated layer owns even tensors without blocks: graphs hold their addresses.
    own = num_blocks > 0 or max_cache_len is not None
    tensors = [none.key_words, none.value_words, none.scales, none.key_means]
    words = [(x, (batch, heads, num_blocks, x.shape[3]) if own else None) for x in tensors]
    capacity, dims = residual_capacity(config, rows, max_cache_len), (key_dim, values[0][3])
    sinks, ring = ([(batch, heads, count, dim) for dim in dims] for count in (config.sink_tokens, capacity))
    return Room(none, words, sinks, ring)


def _to_sinks(config: TurboQuantConfig, tokens: int, sinks: int, past: int) -> int:
    """Number of sinks among `tokens` new tokens, after `past` tokens with `sinks` sinks."""
    return min(tokens, config.sink_tokens - sinks) if past == sinks else 0


class Split(NamedTuple):
    """Destinations of the tokens of a long call; see `GrowingStore._append_long`.

    Args:
        to_sinks: Number of tokens that become sinks.
        due: Number of blocks that become due.
        begun: Number of these blocks that have rows in the old residual.
        start, end: First token of the whole blocks, and first token after them.
        completed: Rows of the residual in which a block begun is completed; 0 for none.
        capacity: Rows of the residual after the call.
    """

    to_sinks: int
    due: int
    begun: int
    start: int
    end: int
    completed: int
    capacity: int


@lru_cache(maxsize=1024)
def _split(config: TurboQuantConfig, tokens: int, counts: tuple[int, int, int], max_cache_len: int | None) -> Split:
    """Split the tokens of a long call that follows `counts` of sinks, blocks and residual rows (see `_append_long`)."""
    first, blocks, held = counts
    past = first + blocks * BLOCK_TOKENS + held
    to_sinks = _to_sinks(config, tokens, first, past)
    due = max(0, config.num_blocks(past + tokens) - blocks)
    rows = tokens - to_sinks
    lead = min(rows, -held % BLOCK_TOKENS)
    whole = max(0, due - (held + lead) // BLOCK_TOKENS)
    start = to_sinks + lead
    completed = ring_capacity(held + lead) if held else 0
    capacity = residual_capacity(config, held + rows - due * BLOCK_TOKENS, max_cache_len)
    return Split(to_sinks, due, due - whole, start, start + whole * BLOCK_TOKENS, completed, capacity)


class GrowingStore(LayerStore):
    """`LayerTensors` and their counts on the host.

    Args:
        tensors: The tensors, which the store writes to.
        counts: Numbers of sinks, blocks and rows in the tensors.
        max_cache_len: Maximum number of tokens, in tensors of a preallocated store; `None` to grow geometrically,
            without bound.
        scales_are_fixed: See `LayerStore`.
    """

    def __init__(
        self,
        tensors: LayerTensors,
        counts: Counts = NOTHING,
        max_cache_len: int | None = None,
        scales_are_fixed: bool = False,
    ) -> None:
        super().__init__(tensors, scales_are_fixed)
        self.max_cache_len = max_cache_len
        self.num_sinks, self.num_blocks, rows, self.num_pending = counts
        self.residual = Residual(tensors.ring, self.num_blocks * BLOCK_TOKENS, rows)
        self._rows_of_due = BLOCK_TOKENS + self.config.residual_length
        """Least number of residual rows with which a block is due."""
        self._prompt: KeyValue | None = None
        """Keys and values of a deferred call, in the order of the store."""
        self._next: tuple[SinkOrder | None, torch.Tensor | None] = tensors.order, None
        """Order after the deferred call, and True for its real tokens, `[B, S]` bool; `None` if unknown."""
        self.device_counts: DeviceCounts | None = None
        """Counts on the device that a long call also writes, with its rows; `None` once they are written."""

    def __reduce__(self) -> tuple[Any, ...]:
        self.encode_deferred()
        self.residual.write_pending_token()
        return type(self), (self.tensors, self.counts, self.max_cache_len, self.scales_are_fixed)

    @classmethod
    @outside_inference_mode
    def allocate(
        cls,
        config: TurboQuantConfig,
        keys: torch.Tensor,
        values: torch.Tensor,
        max_cache_len: int | None = None,
        prompt: bool = False,
    ) -> GrowingStore:
        """Make an empty store for keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]`, with room for them.

        Args:
            config: Configuration of the blocks.
            keys, values: States with the shape, dtype and device of those to come.
            max_cache_len: Number of tokens to make room for, by default S.
            prompt: Whether they are a prompt that is appended next. It writes the channel scales, which are not filled
                here then.

        Raises:
            ValueError: The tensors do not fit each other, or exceed `max_cache_len`.
        """
        room = _room(config, kind_of(keys), kind_of(values), max_cache_len)
        none = room.none
        scales = none.channel_scales.map(torch.empty_like if prompt else torch.clone)
        own = [like if shape is None else like.new_empty(shape) for like, shape in room.words]
        blocks = PackedBlocks(none.layout, own[0], own[1], own[2], own[3], scales)
        sinks = keys.new_empty(room.sinks[0]), values.new_empty(room.sinks[1])
        ring = keys.new_empty(room.ring[0]), values.new_empty(room.ring[1])
        return cls(LayerTensors(config, blocks, sinks, ring), max_cache_len=max_cache_len)

    @property
    def counts(self) -> Counts:
        """Numbers of sinks, blocks, residual rows and pending blocks."""
        self.encode_deferred()
        return Counts(self.num_sinks, self.num_blocks, self.residual.count, self.num_pending)

    @property
    def length(self) -> int:
        """Tokens held."""
        deferred = 0 if self._prompt is None else self._prompt[0].shape[2]
        return self.num_sinks + self.num_blocks * BLOCK_TOKENS + self.residual.count + deferred

    def append(
        self, keys: torch.Tensor, values: torch.Tensor, defer: bool = False, padding: Padding | None = None
    ) -> View:
        row, residual = self.tensors.row, self.residual
        if (
            keys.shape == row.keys
            and values.shape == row.values
            and keys.dtype == values.dtype == row.dtype
            and keys.device == values.device == row.device
            and self.num_sinks == self.config.sink_tokens
            and 0 < residual.count - self.num_pending * BLOCK_TOKENS < residual.capacity
            and self.max_cache_len is None
            and self._prompt is None
            and not torch.is_grad_enabled()
        ):  # never in a graph: see `TurboQuantCache.update`
            return self._append_token(keys, values)
        check_fits(keys, values, row)
        return self.append_checked(keys, values, defer, padding)

    def append_checked(
        self, keys: torch.Tensor, values: torch.Tensor, defer: bool = False, padding: Padding | None = None
    ) -> View:
        if self.max_cache_len is not None:
            check_room(keys.shape[2], self.length, self.max_cache_len)
        self.encode_deferred()
        self.drop_encoded_rows()
        if keys.shape[2] > SHORT_CALL or (keys.shape[2] > 1 and self.length == 0):
            return self._append_prompt(keys, values, defer, padding)
        # A kernel that fails leaves the store unchanged, except for rows and blocks beyond the counts.
        before = vars(self) | {"residual": self.residual.snapshot()}
        try:
            return self._append_tokens(keys, values, padding)
        except BaseException:
            vars(self).update(before)
            raise

    def _append_token(self, keys: torch.Tensor, values: torch.Tensor) -> View:
        """Nearly every decode step: one token for the residual, in which there is room. Attention writes it there."""
        if self.num_pending:
            self.drop_encoded_rows()
        residual = self.residual
        if residual.pending is not None and residual.pending.states is not None:
            write(residual.pending, residual.ring)
        past = self.num_sinks + self.num_blocks * BLOCK_TOKENS + residual.count
        residual.pending = PendingToken((keys, values), (residual.first + residual.count) % residual.capacity)
        residual.count += 1
        counts = Counts(self.num_sinks, self.num_blocks, residual.count)
        view = View(self.tensors, counts, past + 1, past, residual.pending)
        if residual.count >= self._rows_of_due:
            try:
                self._encode_due()
            except BaseException:
                residual.count -= 1
                self.num_pending = 0
                raise
        return view

    @outside_inference_mode
    def _append_tokens(self, keys: torch.Tensor, values: torch.Tensor, padding: Padding | None) -> View:
        """Several tokens after others, or a first one: they are copied to the sinks and to the residual."""
        past, first = self.length, self.num_sinks
        if padding is not None:
            (keys, values), order, _ = self._exchange(padding, (keys, values))
            self.tensors = self.tensors.with_order(order)
        to_sinks = _to_sinks(self.config, keys.shape[2], first, past)
        for buffer, states in zip(self.tensors.sinks, (keys, values), strict=True):
            buffer[:, :, first : first + to_sinks] = states[:, :, :to_sinks]
        self.num_sinks += to_sinks
        rows = self.residual.count + keys.shape[2] - to_sinks
        if rows > self.residual.capacity:
            self._replace_residual(self.residual.copied(residual_capacity(self.config, rows, self.max_cache_len)))
        self.residual.append(keys[:, :, to_sinks:], values[:, :, to_sinks:])
        view = self._view(past, None if past else (keys, values))
        if rows >= self._rows_of_due:
            self._encode_due()
        return view

    def _append_prompt(self, keys: torch.Tensor, values: torch.Tensor, defer: bool, padding: Padding | None) -> View:
        """A first prompt or a long call: the view has the model's own tensors, and blocks are encoded from them, or
        from copies in another order."""
        view, states = self._view(self.length, (keys, values)), (keys, values)
        self._next = self.tensors.order, None
        if padding is not None:
            states, order, real = self._exchange(padding, states)
            self._next = order, real
        if defer and self.config.balance and not self.scales_are_fixed and not self.num_blocks:
            self._prompt = states
        else:
            self._append_long(states)
        return view

    @outside_inference_mode
    def _exchange(self, padding: Padding, states: KeyValue) -> tuple[KeyValue, SinkOrder | None, torch.Tensor | None]:
        """Let real tokens take the places of padding among the sinks, those held and those among new `states`
        `[B, Hkv, S, D]`.

        Returns:
            The states in the order of the store; that order; which of them are not padding, `[B, S]` bool, `None` if
            unknown.
        """
        held, past, sinks, first = self.tensors.order, self.length, self.config.sink_tokens, self.num_sinks
        length, (batch, *_), device = past + states[0].shape[2], self.tensors.row.keys, self.tensors.row.device
        if padding.mask.shape[0] != batch or padding.mask.shape[1] < length:
            return states, held, None
        order, real = held, padding.mask[:, :length].to(device)
        if 0 < sinks < length:
            order = padding.order(held, past, length, sinks, device)
        if order is None:
            return states, None, real[:, past:]
        if order is not held:
            # Only new tokens change places, with padding that is held or new. Held sinks stand before them here.
            new = torch.where(order.index >= past, order.index - past + first, torch.arange(sinks, device=device))
            swap, rows = SinkOrder(new, order.end - past + first), []
            for buffer, part in zip(self.tensors.sinks, states, strict=True):
                both = swap.swapped(torch.cat([buffer[:, :, :first], part], 2) if first else part, 2)
                buffer[:, :, :first] = both[:, :, :first]
                rows.append(both[:, :, first:])
            states = rows[0], rows[1]
        return states, order, order.swapped(real, 1)[:, past:]

    @property
    def lacks_sinks(self) -> bool:
        return self.tensors.order is not None or self.length < self.config.sink_tokens

    @property
    def is_deferred(self) -> bool:
        return self._prompt is not None

    def encode_deferred(self, queries: torch.Tensor | None = None, attended: torch.Tensor | None = None) -> None:
        if self._prompt is not None:
            self._append_long(self._prompt, queries, attended)

    @outside_inference_mode
    def _encode_due(self) -> None:
        """Encode the blocks of the residual that are due. Their rows stay until the next call."""
        self.num_pending = max(0, self.config.num_blocks(self.length) - self.num_blocks)
        if self.num_pending:
            for skipped, part in self.residual.parts(0, self.num_pending * BLOCK_TOKENS):
                self._encode(part, self.num_blocks + skipped // BLOCK_TOKENS)

    @outside_inference_mode
    def _append_long(
        self, prompt: KeyValue, queries: torch.Tensor | None = None, attended: torch.Tensor | None = None
    ) -> None:
        """Append the tokens of a long call, and encode the blocks that become due without copying them.

                      residual before          new tokens
            [ sinks ][ rows held | ....... ][ lead | whole blocks | kept ]
            [ dense ][ block ][ block begun  .... ][ block ][ ... ][ dense ]

        The block that the old residual began is completed by `lead` new tokens in a copy of the residual, and encoded
        from there. Whole blocks of new tokens are encoded from the model's tensors. Other tokens are kept in a new
        residual. The old ring is not written, because the view of this call reads it, unless it is empty and has room.

        The store changes at the end, at once: a kernel that fails leaves it unchanged, as in `append`.
        """
        tokens, first, blocks, held = prompt[0].shape[2], self.num_sinks, self.num_blocks, self.residual.count
        to_sinks, due, begun, start, end, rows_completed, capacity = _split(
            self.config, tokens, (first, blocks, held), self.max_cache_len
        )
        completed = Residual(self.tensors.ring, self.residual.first)  # of no rows: nothing to complete
        if held:
            completed = self.residual.copied(rows_completed)
            completed.append(*(x[:, :, to_sinks:start] for x in prompt))
        residual = completed
        if held or capacity > completed.capacity:
            residual = completed.copied(capacity, begun * BLOCK_TOKENS)
        residual.first += end - start
        slot = (residual.first + residual.count) % residual.capacity
        residual.count += tokens - end
        counts = first + to_sinks, blocks + due, residual.count
        scales = None if self.scales_are_fixed or blocks else self.blocks.channel_scales
        dense = DenseRows(self.tensors.sinks, residual.ring, first, to_sinks, end, slot, counts, self.device_counts)
        order, real = self._next
        attended = attended if real is None else real
        dispatch.store_prompt(prompt, dense, scales, self.config.balance, queries, attended)
        if begun:
            for skipped, part in completed.parts(0, begun * BLOCK_TOKENS):
                self._encode(part, blocks + skipped // BLOCK_TOKENS)
        if end > start:
            self._encode(prompt, blocks + begun, (start, end))
        ring, (sinks, blocks, _) = residual.ring, counts
        tensors = self.tensors if ring is self.tensors.ring else self.tensors.with_ring(ring)
        if order is not tensors.order:
            tensors = tensors.with_order(order)
        held_now = {"residual": residual, "tensors": tensors, "num_sinks": sinks, "num_blocks": blocks}
        vars(self).update(held_now, _prompt=None, device_counts=None)

    def _encode(self, states: KeyValue, start: int, tokens: tuple[int, int] | None = None) -> None:
        """Encode the whole blocks of `states`, or of tokens `tokens[0]` to `tokens[1]`, into blocks `start` and on."""
        first, stop = tokens or (0, states[0].shape[2])
        if blocks := (stop - first) // BLOCK_TOKENS:
            self._make_room(start, start + blocks)
            dispatch.encode(self.config, *states, self.blocks, start, tokens)

    def _make_room(self, held: int, needed: int) -> None:
        """Make room for `needed` blocks, and keep the first `held`."""
        if needed > self.blocks.capacity:
            # Fit a prompt exactly; make room to spare once the cache is growing.
            capacity = needed if held == 0 else max(needed, int(held * GROWTH) + 1)
            self.tensors = self.tensors.with_blocks(self.blocks.resized(capacity, held))

    def _replace_residual(self, residual: Residual) -> None:
        """Hold the rows of `residual`, in its ring."""
        self.residual = residual
        if residual.ring is not self.tensors.ring:
            self.tensors = self.tensors.with_ring(residual.ring)

    def drop_encoded_rows(self) -> None:
        """Drop the dense rows of pending blocks: they are only packed from now on."""
        if self.num_pending:
            self.residual.drop(self.num_pending * BLOCK_TOKENS)
            self.num_blocks += self.num_pending
            self.num_pending = 0

    def _view(self, past: int, new: KeyValue | None = None) -> View:
        """Make the view of all tokens and of `new` states; a first call reads its `new` states alone."""
        tokens = 0 if new is None else new[0].shape[2]
        if past == 0 and new is not None:
            return View(self.tensors, None, tokens, 0, None, new)
        tensors = self.tensors.with_sinks(self.num_sinks)
        return View(tensors, self.counts, self.length + tokens, past, self.residual.pending, new)

    def view(self) -> View:
        """Make the view of all tokens. The rows of pending blocks stay for a crop."""
        self.encode_deferred()
        reader = copy(self)
        reader.residual = self.residual.snapshot()
        reader.drop_encoded_rows()
        return reader._view(self.length)

    @outside_inference_mode
    def crop(self, tokens: int) -> None:
        self.encode_deferred()
        length = max(0, self.length - tokens)
        if self.tensors.order is not None:
            self.tensors = self.tensors.with_order(self.tensors.order.cropped(length))
        if (rows := length - self.num_sinks - self.num_blocks * BLOCK_TOKENS) >= 0:
            self.residual.count = rows
            # Rows of pending blocks are still here: keep packed what a cache of this length would have packed.
            self.num_pending = min(self.num_pending, max(0, self.config.num_blocks(length) - self.num_blocks))
            return
        self.residual.write_pending_token()
        self.num_pending = 0
        self.num_blocks, rows = divmod(max(0, length - self.num_sinks), BLOCK_TOKENS)
        self.num_sinks = min(self.num_sinks, length)
        self.residual = Residual(self.tensors.ring, self.num_blocks * BLOCK_TOKENS, rows)
        if rows:
            cut = self.blocks.slice(self.num_blocks, self.num_blocks + 1)
            slot = self.residual.first % self.residual.capacity
            dispatch.dequantize(
                self.config, cut, *(part[:, :, slot : slot + BLOCK_TOKENS] for part in self.tensors.ring)
            )

    @outside_inference_mode
    def assign(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        check_fits(keys, values, self.tensors.row)
        states, held, tokens = (keys, values), dispatch.dense(self.view()), keys.shape[2]
        order = self.tensors.order
        shown = held if order is None else order.swapped_states(held)
        if all(torch.equal(new, old[:, :, :tokens]) for new, old in zip(states, shown, strict=True)):
            self.crop(self.length - tokens)
            self._release_room()
            return
        order = order if tokens == self.length else None  # pruned rows are those of a new prompt
        states = states if order is None else order.swapped_states(states)
        keys, values = states
        sinks = min(tokens, self.config.sink_tokens)
        compared = min(self.num_blocks + self.num_pending, (tokens - sinks) // BLOCK_TOKENS)
        packed, per_block = slice(sinks, sinks + compared * BLOCK_TOKENS), (compared, BLOCK_TOKENS)
        same = torch.stack(  # [2, B, Hkv, compared]: whether a block of keys, of values, has the rows held in its place
            [
                (new[:, :, packed] == old[:, :, packed]).unflatten(2, per_block).flatten(3).all(3)
                for new, old in zip(states, held, strict=True)
            ]
        )
        stays, blocks = same.flatten(0, 2).all(0).tolist(), self.config.num_blocks(tokens)
        while blocks < compared and stays[blocks]:
            blocks += 1  # packed, though a prompt of this length would leave it dense: a crop cut the rows after it off
        store = GrowingStore.allocate(self.config, keys, values)
        store.set_scales(self.blocks.channel_scales)
        store._make_room(0, blocks)
        for is_same, group in groupby(range(blocks), lambda block: block < compared and stays[block]):
            run = list(group)
            start, stop = run[0], run[-1] + 1
            if not is_same:
                store._encode(states, start, (sinks + start * BLOCK_TOKENS, sinks + stop * BLOCK_TOKENS))
            store._keep_codes(self.blocks, same, start, min(stop, compared))
        dense = sinks + blocks * BLOCK_TOKENS
        for buffer, part in zip(store.tensors.sinks, states, strict=True):
            buffer[:, :, :sinks] = part[:, :, :sinks]
        store.residual = Residual(store.tensors.ring, blocks * BLOCK_TOKENS)
        store.residual.append(keys[:, :, dense:], values[:, :, dense:])
        store.num_sinks, store.num_blocks, store.tensors = sinks, blocks, store.tensors.with_order(order)
        store.scales_are_fixed, store.max_cache_len = self.scales_are_fixed, self.max_cache_len
        vars(self).update(vars(store))

    def _keep_codes(self, held: PackedBlocks, same: torch.Tensor, start: int, stop: int) -> None:
        """Take blocks `start` to `stop` of `held`: keys where `same[0]`, `[B, Hkv, n]` bool, values where `same[1]`."""
        if start < stop:
            own, old = self.blocks.slice(start, stop), held.slice(start, stop)
            keys, values = same[..., start:stop, None]
            for name, tensor in own.tensors().items():
                if name == "scales":
                    half = keys.int() * 0xFFFF - values.int() * 0x10000  # bits: keys are in the low half
                    tensor.copy_((old.scales & half) | (tensor & ~half))
                else:
                    kept = values if name == "value_words" else keys
                    tensor.copy_(torch.where(kept, old.tensors()[name], tensor))

    def _release_room(self) -> None:
        """Free room beyond what growing leaves, after tokens were removed. A preallocated layer keeps its room."""
        if self.max_cache_len is None:
            packed = self.num_blocks + self.num_pending
            if self.blocks.capacity > int(packed * GROWTH) + 1:
                self.tensors = self.tensors.with_blocks(self.blocks.resized(packed, packed))
            capacity = residual_capacity(self.config, self.residual.count, None)
            if self.residual.capacity > capacity:
                self._replace_residual(self.residual.copied(capacity))

    @outside_inference_mode
    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> GrowingStore:
        self.encode_deferred()
        self.residual.write_pending_token()
        return GrowingStore(self.tensors.map(function), self.counts, self.max_cache_len, self.scales_are_fixed)

    def reorder(self, beam_idx: torch.Tensor) -> None:
        self.encode_deferred()
        self.residual.write_pending_token()
        super().reorder(beam_idx)

    def reset(self) -> None:
        """All memory is released."""

    def by_kind(self) -> dict[str, list[torch.Tensor]]:
        """A pending token is held in the model's own tensors until it is written."""
        self.encode_deferred()
        kinds = self.tensors.by_kind()
        pending = self.residual.pending
        if pending is not None and pending.states is not None:
            kinds["residual"] += pending.states
        return kinds

    def export(self) -> tuple[Counts, dict[str, torch.Tensor]]:
        self.encode_deferred()
        held = self.blocks.slice(0, self.num_blocks + self.num_pending).tensors()
        if self.config.balance:
            held["key_channel_scales"], held["value_channel_scales"] = self.blocks.channel_scales
        for name, position in (("keys", 0), ("values", 1)):
            held[f"sink_{name}"] = self.tensors.sinks[position][:, :, : self.num_sinks]
            empty = self.tensors.sinks[position][:, :, :0]
            held[f"residual_{name}"] = torch.cat([empty, *(part[position] for _, part in self.residual.parts())], dim=2)
        if self.tensors.order is not None:
            held["sink_index"] = self.tensors.order.index
        return self.counts, held

    @outside_inference_mode
    def restore(self, counts: Counts, held: dict[str, torch.Tensor]) -> None:
        device, packed = self.tensors.row.device, counts.blocks + counts.pending
        self._make_room(0, packed)
        for name, tensor in self.blocks.tensors().items():
            tensor[:, :, :packed] = held[name].to(device)
        if self.config.balance:
            self.blocks.channel_scales.keys.copy_(held["key_channel_scales"])
            self.blocks.channel_scales.values.copy_(held["value_channel_scales"])
        for buffer, name in zip(self.tensors.sinks, ("sink_keys", "sink_values"), strict=True):
            buffer[:, :, : counts.sinks] = held[name].to(device)
        capacity = residual_capacity(self.config, counts.residual, self.max_cache_len)
        residual = Residual.allocate(self.tensors.ring, capacity, counts.blocks * BLOCK_TOKENS)
        residual.append(held["residual_keys"].to(device), held["residual_values"].to(device))
        self._replace_residual(residual)
        index = held.get("sink_index")
        order = None if index is None else SinkOrder(index.to(device), int(index.amax()) + 1)
        self.tensors = self.tensors.with_order(order)
        self.num_sinks, self.num_blocks, _, self.num_pending = counts
