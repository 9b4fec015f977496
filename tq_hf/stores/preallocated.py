"""A preallocated layer whose counts live on the device, for compiled decoding.

Its tensors are allocated once and written in place. Three small tensors hold the counts, which change from step to
step, so that a captured graph serves every length:

    state        [4] int32     numbers of tokens between calls, as `Counts`
    step_counts  [6, 4] int32  numbers for the last decode step: sinks, blocks, residual rows, slot of the first
                               residual row; the blocks that became due in it; and 0, by which the append's programs
                               find the last of them. Only column 0 is used: entries lie 16 bytes apart, which is
                               Triton's alignment.
    length       [] int64      tokens held, as `get_seq_length` returns it

Decode steps (one new token) never read them on the host. All other operations do, through `as_growing`. A decode step's
token is appended by the attention that reads it, in the launch that rotates its queries, or before any other operation
on the store.

The counts after a prompt are known on the host, and written in the launch that stores its dense rows.

The host counts the tokens too, to refuse one too many. A compiled step cannot count: it forgets the number, and the
next eager step reads `length` once. The compiled step itself asserts on the device that there is room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tq_kernels.types import PendingToken

from ..compat import mark_static_addresses, outside_inference_mode
from ..config import TurboQuantConfig
from ..ops import dispatch, reference
from ..tensors.layer import NOTHING, Counts, DeviceCounts, LayerTensors, View, check_room
from ..tensors.residual import Residual
from ..tensors.sinks import Padding
from . import graph_ops
from .base import LayerStore, check_fits
from .growing import GrowingStore


class PreallocatedStore(LayerStore):
    """`LayerTensors` and their counts on the device.

    Args:
        tensors: Room for `max_cache_len` tokens.
        counts: `state`, `step_counts` and `length`; see the module.
        max_cache_len: Maximum number of tokens.
        scales_are_fixed: See `LayerStore`.
    """

    def __init__(
        self, tensors: LayerTensors, counts: DeviceCounts, max_cache_len: int, scales_are_fixed: bool = False
    ) -> None:
        super().__init__(tensors, scales_are_fixed)
        self._appending: GrowingStore | None = None
        """Store of the last call, if its encoding is deferred."""
        self._pending = PendingToken()
        self.counts = counts
        self.max_cache_len = max_cache_len
        self.num_held: int | None = None
        """Number of tokens held; `None` after a compiled step, which does not count on the host."""

    def __reduce__(self) -> tuple[Any, ...]:
        self.encode_deferred()
        return PreallocatedStore, (self.tensors, self.counts, self.max_cache_len, self.scales_are_fixed)

    @classmethod
    @outside_inference_mode
    def allocate(
        cls,
        config: TurboQuantConfig,
        keys: torch.Tensor,
        values: torch.Tensor,
        max_cache_len: int,
        prompt: bool = False,
    ) -> PreallocatedStore:
        """Room for `max_cache_len` tokens like those of keys `[B, Hkv, *, Dk]` and values `[B, Hkv, *, Dv]`. If they
        are a `prompt` that is appended next, counts, too, are not filled (see `GrowingStore.allocate`)."""
        tensors = GrowingStore.allocate(config, keys, values, max_cache_len, prompt).tensors
        # A model on the meta device has its counts on the CPU, where they are numbers.
        device = torch.device("cpu") if keys.is_meta else keys.device
        make = torch.empty if prompt else torch.zeros
        counts = DeviceCounts(
            state=make(4, dtype=torch.int32, device=device),
            step_counts=make(6, 4, dtype=torch.int32, device=device),
            length=make((), dtype=torch.int64, device=device),
        )
        dispatch.prepare(config, tensors.layout, keys.dtype, keys.device)
        mark_static_addresses((*tensors.arguments(), *counts))
        store = cls(tensors, counts, max_cache_len)
        store.num_held = 0
        return store

    @property
    def state(self) -> torch.Tensor:
        """Numbers of sinks, blocks, residual rows and pending blocks, `[4]` int32 on the device."""
        self.encode_deferred()
        return self.counts.state

    @property
    def length(self) -> int | torch.Tensor:
        """Number of tokens held, `[]` int64 on the device; an `int` for a model on the meta device."""
        self.encode_deferred()
        if self.tensors.row.device.type == "meta":
            return int(self.counts.length)
        return graph_ops.tokens_held(self.counts)

    def append(
        self, keys: torch.Tensor, values: torch.Tensor, defer: bool = False, padding: Padding | None = None
    ) -> View:
        if self._pending.states is not None or self._appending is not None:
            self.encode_deferred()
        row = self.tensors.row
        if (
            keys.shape == row.keys
            and values.shape == row.values
            and keys.dtype == values.dtype == row.dtype
            and keys.device == values.device == row.device
        ):
            return self._append_token(keys, values)
        check_fits(keys, values, row)
        return self.append_checked(keys, values, defer, padding)

    def _append_token(self, keys: torch.Tensor, values: torch.Tensor) -> View:
        """A decode step. Attention appends the token, without lengths on the host, so that the step compiles."""
        if torch.compiler.is_compiling():
            self.num_held = None
        else:
            tokens = int(self.length) if self.num_held is None else self.num_held
            check_room(1, tokens, self.max_cache_len)
            self.num_held = tokens + 1
        self._pending.states = keys, values
        return self._step_view()

    def _step_view(self) -> View:
        past = None if self.num_held is None else self.num_held - 1
        return View(self.tensors, self.counts, self.max_cache_len, past, self._pending)

    @outside_inference_mode
    def append_checked(
        self, keys: torch.Tensor, values: torch.Tensor, defer: bool = False, padding: Padding | None = None
    ) -> View:
        """A prompt or several tokens, with counts on the host: by the methods of a `GrowingStore`."""
        store = self.as_growing()
        if store.residual.count:
            # Copy the ring: the returned view reads the old rows after they are written back.
            store.residual = store.residual.copied(store.residual.capacity)
            store.tensors = store.tensors.with_ring(store.residual.ring)
        held = store.counts
        try:
            view = store.append_checked(keys, values, defer, padding)
        except BaseException:
            self._undo(store, held)
            raise
        self._appending = store
        if not store.is_deferred:
            self.encode_deferred()
        return view

    def _undo(self, store: GrowingStore, held: tuple[int, int, int, int]) -> None:
        """Counts on the device that a call of `store` may have written before it failed are again what was held."""
        reference.write_counts(self.counts, held)
        store.device_counts = self.counts

    @property
    def lacks_sinks(self) -> bool:
        held = self.num_held
        return self.tensors.order is not None or (held is not None and held < self.config.sink_tokens)

    @property
    def is_deferred(self) -> bool:
        return self._appending is not None

    def encode_deferred(self, queries: torch.Tensor | None = None, attended: torch.Tensor | None = None) -> None:
        """Also appends the token of a decode step that no attention has appended."""
        if self._pending.states is not None:
            graph_ops.append_pending_token(self._step_view())
        if (store := self._appending) is not None:
            held = store.num_sinks, store.num_blocks, store.residual.count, store.num_pending
            try:
                store.encode_deferred(queries, attended)
                if store.residual.count > self.tensors.ring[0].shape[2]:
                    store.drop_encoded_rows()
                self._take(store)
            except BaseException:
                self._undo(store, held)
                raise
            self._appending = None

    def as_growing(self) -> GrowingStore:
        """A store over the same tensors, with counts on the host. Waits for the device, unless nothing is held."""
        self.encode_deferred()
        counts = NOTHING if self.num_held == 0 else Counts(*self.state.tolist())
        store = GrowingStore(self.tensors, counts, self.max_cache_len, self.scales_are_fixed)
        store.device_counts = self.counts
        return store

    @outside_inference_mode
    def _take(self, store: GrowingStore) -> None:
        """Hold what `store` holds, whose blocks and sinks are this store's."""
        if store.tensors.ring is not self.tensors.ring:
            residual = Residual(self.tensors.ring, store.residual.first)
            for _, part in store.residual.parts():
                residual.append(*part)
        self.tensors = self.tensors.with_order(store.tensors.order)
        if store.device_counts is not None:
            reference.write_counts(self.counts, store.counts)
        self.num_held = store.length

    def view(self) -> View:
        """Waits for the device."""
        return self.as_growing().view()

    @outside_inference_mode
    def crop(self, tokens: int) -> None:
        store = self.as_growing()
        store.crop(tokens)
        self._take(store)

    @outside_inference_mode
    def assign(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        check_fits(keys, values, self.tensors.row)
        check_room(keys.shape[2], 0, self.max_cache_len)
        store = self.as_growing()
        store.assign(keys, values)
        if store.tensors is self.tensors:  # rows were cut off
            self._take(store)
        else:
            self.restore(*store.export())

    @outside_inference_mode
    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PreallocatedStore:
        """The counts stay where they are."""
        self.encode_deferred()
        return PreallocatedStore(self.tensors.map(function), self.counts, self.max_cache_len, self.scales_are_fixed)

    def reorder(self, beam_idx: torch.Tensor) -> None:
        self.encode_deferred()
        super().reorder(beam_idx)

    def reset(self) -> PreallocatedStore:
        """The tensors stay where they are."""
        self._appending = self._pending.states = None
        if not self.scales_are_fixed:
            for factor in self.blocks.channel_scales:
                factor.fill_(1)
        reference.write_counts(self.counts, NOTHING)
        self.tensors = self.tensors.with_order(None)
        self.num_held = 0
        return self

    def by_kind(self) -> dict[str, list[torch.Tensor]]:
        self.encode_deferred()
        kinds = self.tensors.by_kind()
        return {**kinds, "metadata": [*kinds["metadata"], *self.counts]}

    def export(self) -> tuple[Counts, dict[str, torch.Tensor]]:
        return self.as_growing().export()

    @outside_inference_mode
    def restore(self, counts: Counts, held: dict[str, torch.Tensor]) -> None:
        store = self.as_growing()
        store.restore(counts, held)
        self._take(store)
