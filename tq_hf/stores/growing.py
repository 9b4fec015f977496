"""The keys and values of one layer: dense sinks, packed blocks, dense window.

    [ sinks: first S0 tokens ][ packed blocks of 128 tokens ][ window: the rest, dense ]

What is packed is a function of the tokens alone: of T tokens, `TurboQuantConfig.num_blocks(T)` blocks, however they
were appended. A call to `append` encodes the blocks that become due, but the view it returns still shows their tokens
dense: the tokens of a call are read exactly in that call, and a decode step never sees half a block change under it.
The dense rows of a block encoded by a short call are dropped at the start of the next one, so that a `crop` in
between (assisted decoding) finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import NamedTuple

import torch

from ..config import GROWTH, TurboQuantConfig
from ..inference_mode import outside_inference_mode
from ..layout import BlockLayout
from ..ops import dispatch
from ..tensors.blocks import PackedBlocks
from ..tensors.view import Buffers, StoreView
from ..tensors.window import DenseWindow, KeyValue, ring_capacity

SHORT_CALL = 128
"""Calls of up to this many tokens go through the window; longer ones are encoded from the model's own tensors."""


class Counts(NamedTuple):
    """What a store holds: sink tokens, packed blocks, window rows, and packed blocks whose rows are still there."""

    sinks: int
    blocks: int
    window: int
    pending: int


class LayerStore:
    """The compressed keys and values of one layer.

    Args:
        config: What to compress to.
        keys: `[B, Hkv, *, Dk]`, a tensor like those that will be appended (its tokens are not stored).
        values: `[B, Hkv, *, Dv]`, likewise.
        max_length: Tokens to preallocate for and never exceed, or `None` to grow without bound.

    Raises:
        ValueError: The tensors do not fit each other.
    """

    @outside_inference_mode
    def __init__(
        self, config: TurboQuantConfig, keys: torch.Tensor, values: torch.Tensor, max_length: int | None = None
    ) -> None:
        check_states(keys, values)
        self.config = config
        self.max_length = max_length
        self.layout: BlockLayout = config.layout(keys.shape[-1], values.shape[-1])
        self.device = keys.device
        self.dtype = keys.dtype
        self.num_blocks = 0
        self.num_sinks = 0
        self.num_pending = 0
        batch, heads = keys.shape[:2]
        blocks = 0 if max_length is None else config.num_blocks(max_length)
        self.blocks = PackedBlocks.allocate(self.layout, batch, heads, blocks, keys.device)
        sinks = (x.new_zeros(batch, heads, config.sink_tokens, x.shape[3]) for x in (keys, values))
        self.sinks: KeyValue = (next(sinks), next(sinks))
        self.window = DenseWindow(keys, values, self._window_capacity(0))
        # Kept between decode steps only: it must not keep alive what was replaced.
        self._buffers: Buffers | None = None

    @classmethod
    def resumed(
        cls,
        config: TurboQuantConfig,
        blocks: PackedBlocks,
        sinks: KeyValue,
        window: KeyValue,
        counts: Counts,
        max_length: int | None = None,
    ) -> LayerStore:
        """A store over existing tensors, which it writes to. `window` are ring buffers (see `tq_hf.tensors.window`)."""
        store = cls.__new__(cls)
        store.config, store.max_length, store.layout = config, max_length, blocks.layout
        store.device, store.dtype = window[0].device, window[0].dtype
        store.num_sinks, store.num_blocks, store.num_pending = counts.sinks, counts.blocks, counts.pending
        store.blocks, store.sinks = blocks, sinks
        store.window = DenseWindow.resumed(window, counts.blocks * blocks.layout.tokens, counts.window)
        store._buffers = None
        return store

    @property
    def counts(self) -> Counts:
        """What is held, for `resumed`."""
        return Counts(self.num_sinks, self.num_blocks, self.window.count, self.num_pending)

    def _window_capacity(self, rows: int) -> int:
        """Room for a window that holds `rows` now: what decoding will need, grown geometrically where that is a lot."""
        most = self.config.residual_length + self.layout.tokens
        if self.max_length is not None:
            return ring_capacity(max(rows, min(most, self.max_length)))
        return ring_capacity(max(rows, min(most, int(rows * GROWTH) + self.layout.tokens)))

    @property
    def batch_size(self) -> int:
        """Sequences held."""
        return self.blocks.scalars.shape[0]

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.num_sinks + self.num_blocks * self.layout.tokens + self.window.count

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise a `ValueError` if these tensors cannot be appended."""
        check_fits(keys, values, self.sinks)
        if self.max_length is not None:
            check_room(keys.shape[2], self.length, self.max_length)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> StoreView:
        """Store new tokens and return what their queries attend to.

        A single token may be copied by that attention only, so these tensors must not change before.

        Args:
            keys: `[B, Hkv, S, Dk]` in the dtype and on the device of this store.
            values: `[B, Hkv, S, Dv]`.

        Raises:
            ValueError: The tensors do not fit the store, or the store is full. Nothing is changed then.
        """
        if torch.compiler.is_compiling():  # nothing to save, and it cannot trace how it is saved
            return self._append(keys, values)
        buffers = self._whole_buffers()
        if self._is_next_row(buffers, keys, values):
            self._buffers = buffers
            if self.num_pending:
                self.settle()
            past = self.length
            self.window.append_late((keys, values))
            return self._appended(past)
        return self._append(keys, values)

    def _is_next_row(self, buffers: Buffers, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether this is one token that only has to be written to the window, as in nearly every decode step."""
        window = self.window
        key_shape, value_shape = buffers.row_shapes
        return (
            keys.shape == key_shape
            and values.shape == value_shape
            and keys.dtype == values.dtype == self.dtype
            and keys.device == values.device == self.device
            and self.num_sinks == self.config.sink_tokens
            and 0 < window.count - self.num_pending * self.layout.tokens < window.capacity
            and self.max_length is None
            and not torch.is_grad_enabled()
        )

    @outside_inference_mode
    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> StoreView:
        self.check(keys, values)
        self._buffers = None
        self.settle()
        past, new_tokens = self.length, keys.shape[2]
        to_sinks = min(new_tokens, self.config.sink_tokens - self.num_sinks) if past == self.num_sinks else 0
        sinks_before = self.num_sinks
        for buffer, states in zip(self.sinks, (keys, values), strict=True):
            buffer[:, :, sinks_before : sinks_before + to_sinks] = states[:, :, :to_sinks]
        self.num_sinks += to_sinks
        rest = (keys[:, :, to_sinks:], values[:, :, to_sinks:])
        if new_tokens <= SHORT_CALL and past > 0:
            return self._append_short(past, rest)
        return self._append_long(past, sinks_before, rest, (keys, values))

    def _append_short(self, past: int, rest: KeyValue) -> StoreView:
        rows = self.window.count + rest[0].shape[2]
        if rows > self.window.capacity:
            self.window = self.window.copied(self._window_capacity(rows))
        self.window.append(*rest)
        return self._appended(past)

    def _appended(self, past: int) -> StoreView:
        """Encode what became due by rows that the window holds now."""
        view = self._view(past, self.num_sinks)
        pending = max(0, self.config.num_blocks(self.length) - self.num_blocks)
        if pending:
            for skipped, part in self.window.parts(0, pending * self.layout.tokens):
                self._encode(part, self.num_blocks + skipped // self.layout.tokens)
        self.num_pending = pending
        return view

    def _append_long(self, past: int, sinks_before: int, rest: KeyValue, new: KeyValue) -> StoreView:
        view = self._view(past, sinks_before, new)
        rows, held, tokens = rest[0].shape[2], self.window.count, self.layout.tokens
        due = max(0, self.config.num_blocks(past + new[0].shape[2]) - self.num_blocks)
        # A new window, not the old one changed: the view still reads the old. It also completes the block that the old
        # window began; whole blocks of new tokens are encoded where they are.
        lead = min(rows, -held % tokens)
        whole = max(0, due - (held + lead) // tokens)
        window = self.window.copied(ring_capacity(held + lead))
        window.append(*(x[:, :, :lead] for x in rest))
        for skipped, part in window.parts(0, (due - whole) * tokens):
            self._encode(part, self.num_blocks + skipped // tokens)
        keys, values = (x[:, :, lead : lead + whole * tokens] for x in rest)
        self._encode((keys, values), self.num_blocks + due - whole)
        kept = held + rows - due * tokens
        self.window = window.copied(self._window_capacity(kept), (due - whole) * tokens)
        self.window.first += whole * tokens
        self.window.append(*(x[:, :, lead + whole * tokens :] for x in rest))
        self.num_blocks += due
        return view

    @outside_inference_mode
    def _encode(self, states: KeyValue, start: int) -> None:
        """Encode the whole blocks of `states` into blocks `start` and on."""
        blocks = states[0].shape[2] // self.layout.tokens
        if start + blocks > self.blocks.capacity:
            # An exact fit for a prompt; room to spare once the cache is growing.
            capacity = start + blocks if start == 0 else max(start + blocks, int(start * GROWTH) + 1)
            self.blocks = self.blocks.resized(capacity, start)
            self._buffers = None
        if blocks:
            dispatch.encode(self.config, *states, self.blocks, start)

    def settle(self) -> None:
        """Drop the dense rows of the blocks the last call encoded: only packed from now on."""
        self.window.drop(self.num_pending * self.layout.tokens)
        self.num_blocks += self.num_pending
        self.num_pending = 0

    def _view(self, past: int, num_sinks: int, new: KeyValue | None = None) -> StoreView:
        window = self.window
        buffers = self._whole_buffers()
        if num_sinks != self.config.sink_tokens:
            sinks = (self.sinks[0][:, :, :num_sinks], self.sinks[1][:, :, :num_sinks])
            buffers = Buffers(self.config, self.blocks, sinks, window.ring)
        return StoreView(buffers, self.num_blocks, window.first, window.count, past, window.late, new)

    def _whole_buffers(self) -> Buffers:
        """The tensors held, with all sinks: the same object from one decode step to the next."""
        held, ring = self._buffers, self.window.ring
        if (
            held is None
            or held.blocks is not self.blocks
            or held.sinks[0] is not self.sinks[0]
            or held.ring[0] is not ring[0]
        ):
            return Buffers(self.config, self.blocks, self.sinks, ring)
        return held

    def view(self) -> StoreView:
        """All tokens held, as a query that adds none would read them. Reading changes nothing: the rows of pending
        blocks stay for a crop."""
        settled = copy(self)
        settled.window = self.window.snapshot()
        settled.settle()
        return settled._view(self.length, self.num_sinks)

    @outside_inference_mode
    def crop(self, tokens: int) -> None:
        """Remove the last `tokens` tokens. Exact within the window; a packed block that is cut moves its surviving
        tokens to the window, dequantised."""
        length = max(0, self.length - tokens)
        block = self.layout.tokens
        if (kept := length - self.num_sinks - self.num_blocks * block) >= 0:
            self.window.count = kept
            # Rows of pending blocks are still here: keep packed what a cache of this length would have packed.
            self.num_pending = min(self.num_pending, max(0, self.config.num_blocks(length) - self.num_blocks))
            return
        self.num_pending = 0
        self.num_blocks, rows = divmod(max(0, length - self.num_sinks), block)
        self.num_sinks = min(self.num_sinks, length)
        self.window.first, self.window.count = self.num_blocks * block, rows
        if rows:
            cut = self.blocks.slice(self.num_blocks, self.num_blocks + 1)
            slots = slice(self.window.first % self.window.capacity, self.window.first % self.window.capacity + block)
            dispatch.dequantise(self.config, cut, self.window.keys[:, :, slots], self.window.values[:, :, slots])

    @outside_inference_mode
    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> LayerStore:
        """A store of the results of `function` on every tensor (batch selection, device moves)."""
        sinks = (function(self.sinks[0]), function(self.sinks[1]))
        window = (function(self.window.keys), function(self.window.values))
        return LayerStore.resumed(self.config, self.blocks.map(function), sinks, window, self.counts, self.max_length)

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Every tensor held, by the kind `memory_footprint` reports."""
        return stored_tensors(self.blocks, self.sinks, (self.window.keys, self.window.values))


def stored_tensors(blocks: PackedBlocks, sinks: KeyValue, window: KeyValue) -> dict[str, list[torch.Tensor]]:
    """The tensors of a layer by the kind `memory_footprint` reports."""
    means = [] if blocks.key_means is None else [blocks.key_means]
    return {
        "packed": [blocks.key_words, blocks.value_words],
        "metadata": [blocks.scalars, *means],
        "window": list(window),
        "sinks": list(sinks),
    }


def check_fits(keys: torch.Tensor, values: torch.Tensor, held: KeyValue) -> None:
    """Raise a `ValueError` unless these states go with those a store holds in all but the number of tokens."""
    check_states(keys, values)
    expected = {
        "batch size": (held[0].shape[0], keys.shape[0]),
        "number of KV heads": (held[0].shape[1], keys.shape[1]),
        "key head_dim": (held[0].shape[3], keys.shape[3]),
        "value head_dim": (held[1].shape[3], values.shape[3]),
        "dtype": (held[0].dtype, keys.dtype),
        "device": (held[0].device, keys.device),
    }
    for what, (has, came) in expected.items():
        if has != came:
            raise ValueError(
                f"This cache holds states with {what} {has}, but was given keys with {what} {came}. Use a new "
                "TurboQuantCache for another batch or model, or call `cache.reset()` first."
            )


def check_room(tokens: int, held: int, room: int) -> None:
    """Raise a `ValueError` unless so many more tokens fit a preallocated cache."""
    if held + tokens > room:
        raise ValueError(
            f"Appending {tokens} tokens to the {held} in this cache exceeds its `max_cache_len` of {room}. Make the "
            "cache with a larger `max_cache_len`."
        )


def check_states(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise a `ValueError` unless these are keys and values of the same tokens.

    Args:
        keys: `[B, Hkv, S, Dk]`.
        values: `[B, Hkv, S, Dv]`.
    """
    shapes = f"Keys {tuple(keys.shape)} and values {tuple(values.shape)}"
    if keys.dim() != 4 or values.dim() != 4:
        raise ValueError(f"{shapes} must both have the shape [batch, KV heads, tokens, head_dim].")
    if keys.shape[:3] != values.shape[:3]:
        raise ValueError(f"{shapes} must agree in batch, heads and tokens.")
    if keys.device != values.device:
        raise ValueError(f"Keys are on {keys.device} and values on {values.device}; move both to one device.")
    if keys.dtype != values.dtype or not keys.dtype.is_floating_point:
        raise ValueError(f"Keys are {keys.dtype} and values {values.dtype}; both must have one floating-point dtype.")
    if 0 in (keys.shape[1], keys.shape[3], values.shape[3]):
        raise ValueError(f"{shapes} have no heads or a head_dim of 0; there is nothing to cache.")
