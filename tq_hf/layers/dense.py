"""Layers that are not compressed: full attention and sliding windows, growing or preallocated.

Each extends transformers' own layer, to work beside compressed layers. A file has the rows of the newest tokens in
their order; growing and preallocated layers write the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from tq_kernels.types import KeyValue
from transformers.cache_utils import DynamicLayer, StaticLayer

from ..compat import is_capturing, outside_inference_mode
from ..tensors.layer import check_room
from .base import BatchedLayer, FullAttentionLayer, Probe, State, Substitute, check_crop, rows_like


class _FullState(Substitute):
    """The state of a full-attention layer: all rows."""

    state_fields: ClassVar[dict[str, type]] = {}

    def state(self: Any) -> State:
        tokens = int(self.get_seq_length())
        return {}, {"keys": self.keys[:, :, :tokens], "values": self.values[:, :, :tokens]}

    def check_state(self, description: dict[str, Any], probe: Probe) -> dict[str, torch.Tensor]:
        return rows_like(probe.states, probe.tokens)

    def load_state(self: Any, description: dict[str, Any], tensors: dict[str, torch.Tensor], probe: Probe) -> None:
        self.update(*(tensors[name].to(probe.states[0].device) for name in ("keys", "values")))


class GrowingLayer(_FullState, DynamicLayer):
    """A growing full-attention layer."""


def with_num_held(states: KeyValue, tokens: int) -> KeyValue:
    """Mark keys and values with their number of tokens, for attention "turboquant"; rows after these are empty."""
    states[0].num_held = tokens  # type: ignore[attr-defined]
    return states


def check_rows(layer: Any) -> None:
    """Raise a `ValueError` if keys with another number of rows were assigned to a preallocated layer (kvpress)."""
    if layer.is_initialized and (rows := layer.keys.shape[2]) != layer.max_cache_len:
        raise ValueError(
            f"A preallocated {'sliding-window' if layer.is_sliding else 'full-attention'} layer that is not compressed "
            f"has room for {layer.max_cache_len} tokens, and was assigned keys of {rows}. Prune only compressed "
            "layers, or a cache without `max_cache_len`."
        )


class _PreallocatedRows(StaticLayer):
    """Keys and values in `max_cache_len` rows that keep their addresses, with a count on the device."""

    @outside_inference_mode
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.cumulative_length = self.cumulative_length.clone()  # an inference tensor cannot be changed in place later
        super().lazy_initialization(key_states, value_states)
        if key_states.is_meta:  # see `LayerStore.allocate`
            self.cumulative_length = torch.tensor(0, device="cpu")


class PreallocatedLayer(_FullState, FullAttentionLayer, _PreallocatedRows):
    """A preallocated full-attention layer that returns as many rows as a compressed one (`FullAttentionLayer`)."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> KeyValue:
        """Store new states. Raise `ValueError`, and change nothing, if they exceed `max_cache_len`. (In a compiled step
        torch's own index check fails.)"""
        tokens = key_states.shape[-2]
        is_step = self.takes_step(tokens)
        if is_step and (torch.compiler.is_dynamo_compiling() or (self.num_tokens is None and is_capturing())):
            self.num_tokens = None
            return super().update(key_states, value_states, *args, **kwargs)
        check_rows(self)
        past = self.count_tokens()
        check_room(tokens, past, self.max_cache_len)
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.num_tokens = past + tokens
        if is_step or self.returns_empty_rows:
            return with_num_held((keys, values), past + tokens)
        return keys[:, :, : past + tokens], values[:, :, : past + tokens]

    def get_seq_length(self) -> int | torch.Tensor:  # type: ignore[override]
        """Number of tokens, `[]` int64 on the device; an `int` before the first update and on the meta device."""
        length = super().get_seq_length()
        return int(length) if self.is_initialized and self.device.type == "meta" else length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens. Raise `ValueError` for a positive number."""
        tokens_to_remove = check_crop(tokens_to_remove)
        if self.is_initialized:
            self.cumulative_length.add_(tokens_to_remove).clamp_(min=0)
            self.num_tokens = int(self.cumulative_length)

    def reset(self) -> None:
        """Remove all tokens. The tensors keep their addresses, for captured graphs."""
        super().reset()
        self.num_tokens = 0


def _pair(function: Callable[..., torch.Tensor], *states: KeyValue) -> KeyValue:
    """`function` of the keys, and of the values."""
    keys, values = (function(*parts) for parts in zip(*states, strict=True))
    return keys, values


def _newest(states: KeyValue, count: int) -> KeyValue:
    """Views of the last `count` rows, or of all."""
    return _pair(lambda x: x[:, :, max(0, x.shape[2] - count) :], states)


class SlidingLayer(BatchedLayer, _PreallocatedRows):
    """A sliding window: a ring of the newest tokens, without blocks.

    A preallocated layer has its ring from the start. The token at position p is in row `p % max_cache_len`. A single
    token is appended by the count on the device, so that one captured step serves a filling and a sliding window.
    Attention gets the tokens in their order, and empty rows up to the window.

    A growing layer makes its ring anew in every call: at most one token fewer than the window, in their order. They are
    copies: the keys and values of a long call are freed once attention has read them.

    `crop` removes tokens while the window of the next query stays complete: one of a full preallocated ring, because
    that query does not attend to the oldest. `activate_past_recording` (called by assisted decoding) keeps the tokens
    that leave the window until the next `crop`. A replayed step records nothing.

    Drafts of `graph_decoding` are taken back by the count on the device. Meanwhile the ring is open: it has more rows
    than the window, and attention gets them as they lie, with masks of the caller.

    Args:
        sliding_window: Number of tokens that a query may attend to, its own included.
        preallocated: Whether the ring has its size from the start.
    """

    is_sliding = True
    room: int | None = None
    """Number of tokens that preallocated layers of full attention have room for, `None` without these layers. A call
    that exceeds it is refused here, before a window changes."""
    num_tokens: int = 0
    is_open = False
    """Whether the ring is open: it counts on the device only."""
    _first = 0
    """Position of the oldest token that may be held."""
    _recorded: KeyValue | None = None
    """Tokens of a preallocated layer in their order: all since the first one in the window at the last `crop`. Without
    `record_past`, those of a ring that an exception closed, until the next update."""

    def __init__(self, sliding_window: int, preallocated: bool = False) -> None:
        super().__init__(sliding_window if preallocated else 0)
        self.sliding_window, self.is_compileable = sliding_window, preallocated
        self.kept = sliding_window if preallocated else max(sliding_window - 1, 1)
        """Most tokens that are held without recording."""

    @classmethod
    def like(cls, layer: Any) -> SlidingLayer:
        """Make a layer in the place of one of transformers."""
        return cls(layer.get_max_length(), layer.is_compileable)

    @property
    def _rows(self: Any) -> KeyValue:
        return self.keys, self.values

    def _places(self, first: int | torch.Tensor, count: int) -> torch.Tensor:
        """Rows of `count` tokens from position `first` on, `[count]` int64."""
        return (first + torch.arange(count, device=self._rows[0].device)) % self.max_cache_len

    def _read(self, first: int | torch.Tensor, count: int) -> KeyValue:
        """Copies of `count` tokens from position `first` on."""
        places = self._places(first, count)
        return _pair(lambda rows: rows.index_select(2, places), self._rows)

    def _write(self, first: int | torch.Tensor, states: KeyValue) -> KeyValue:
        """Write tokens from position `first` on. Returns all rows."""
        places = self._places(first, states[0].shape[2])
        return _pair(lambda rows, new: rows.index_copy_(2, places, new), self._rows, states)

    def _past(self) -> KeyValue:
        """The tokens held, in their order."""
        if self._recorded is not None or not self.is_compileable:
            return self._recorded or self._rows
        held = min(self.num_tokens - self._first, self.kept)
        return self._read(self.num_tokens - held, held)

    def _hold(self, states: KeyValue, length: int) -> None:
        """Hold the newest of `states` `[B, Hkv, n, D]`, the last of `length` tokens; all of them while recording."""
        self.num_tokens, self._first, newest = length, length - states[0].shape[2], _newest(states, self.kept)
        if self.is_compileable:
            self._recorded = states if self.record_past else None
            self._write(length - newest[0].shape[2], newest)
            self.cumulative_length.fill_(length)
        elif self.record_past:
            self.keys, self.values = states
        else:  # a view of one row more, as after a single token, is smaller than a copy beside it
            self.keys, self.values = newest if states[0].shape[2] <= self.kept + 1 else _pair(torch.clone, newest)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> KeyValue:
        """Store new states; return all rows that their queries need. A preallocated layer returns empty rows, too, and
        an open ring all its rows. Raise `ValueError`, and change nothing, if the tokens exceed `room`."""
        new, tokens, window = (key_states, value_states), key_states.shape[2], self.sliding_window
        if self.is_open:
            return self._append(new)
        if self.is_compileable:
            check_rows(self)
        if self.room is not None and not torch.compiler.is_dynamo_compiling():
            check_room(tokens, self.num_tokens, self.room)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.is_compileable and tokens == 1:
            self._recorded = _pair(lambda *parts: torch.cat(parts, 2), self._past(), new) if self.record_past else None
            self._append(new)
            self.num_tokens += 1
            states = self._read((self.cumulative_length - window).clamp(min=0), window)
            is_compiled = torch.compiler.is_dynamo_compiling()
            return states if is_compiled else with_num_held(states, min(self.num_tokens, window))
        past, length = self._past(), self.num_tokens + tokens
        if not self.record_past:
            past = _newest(past, window - 1)
        # The tokens of a long prompt are not copied for a preallocated layer.
        is_first = self.is_compileable and not self.record_past and not past[0].shape[2]
        states = new if is_first else _pair(lambda *parts: torch.cat(parts, 2), past, new)
        self._hold(states, length)
        if self.is_compileable and length <= window:
            return with_num_held(_pair(lambda x: x[:, :, :window], self._rows), length)
        return _newest(states, window - 1 + tokens)

    def _append(self, new: KeyValue) -> KeyValue:
        """Append tokens by the count on the device. Returns all rows."""
        rows = self._write(self.cumulative_length, new)
        self.cumulative_length.add_(new[0].shape[2])
        return rows

    def takes_step(self, tokens: int) -> bool:
        """Whether a compiled graph may include an update of this number of tokens."""
        return tokens == 1 or self.is_open

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask for `query_length` new tokens covers."""
        past = min(self.num_tokens, self.sliding_window - 1)
        least = self.sliding_window if self.is_compileable else 0
        return max(past + query_length, least), self.num_tokens - past

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_max_length(self) -> int:
        return self.sliding_window

    @outside_inference_mode
    def open_ring(self, tokens: int) -> None:
        """Let up to `tokens` newest tokens be removed on the device. The rows stay for later calls."""
        if self.max_cache_len < self.sliding_window + tokens:
            past, self.max_cache_len = _newest(self._past(), self.sliding_window), self.sliding_window + tokens
            self.lazy_initialization(*past)
            self._write(self.num_tokens - past[0].shape[2], past)
        self.is_open, self._recorded = True, None

    @outside_inference_mode
    def close_ring(self, stays: int | None = None) -> None:
        """Read the number of tokens from the device. If there are more than `stays`, an exception ended their step: no
        rejected token took a row then, and all rows are kept until the next `crop` or update."""
        if self.is_open:
            self.num_tokens, self._first, self.is_open = int(self.cumulative_length), 0, False
            held = min(self.num_tokens, self.max_cache_len)
            is_ahead = stays is not None and self.num_tokens > stays
            self._recorded = self._read(self.num_tokens - held, held) if is_ahead else None

    def count_replayed(self, length: int | None) -> None:
        if length is not None:  # an open ring counts on the device
            self.num_tokens, self._recorded = length, None  # a replay records nothing

    state_fields: ClassVar[dict[str, type]] = {"rows": int, "record_past": bool}

    def state(self) -> State:
        """The tokens that the next query attends to, and all recorded ones."""
        states, is_recorded = self._past(), self.record_past and self._recorded is not None
        if self.is_compileable and self.num_tokens > self.sliding_window and not is_recorded:
            states = _newest(states, max(self.sliding_window - 1, 1))
        keys, values = states
        return {"rows": keys.shape[2], "record_past": self.record_past}, {"keys": keys, "values": values}

    def check_state(self, description: dict[str, Any], probe: Probe) -> dict[str, torch.Tensor]:
        tokens, rows, window = probe.tokens, description["rows"], self.sliding_window
        # The next query does not attend to the first row of a full window, so this row may be missing.
        most = tokens if description["record_past"] else min(tokens, window)
        if not min(tokens, max(window - 1, 1)) <= rows <= most:
            raise ValueError(f"has {rows} rows of a window of {window} after {tokens} tokens: damaged.")
        return rows_like(probe.states, rows)

    def load_state(self, description: dict[str, Any], tensors: dict[str, torch.Tensor], probe: Probe) -> None:
        keys, values = (tensors[name].to(probe.states[0].device) for name in ("keys", "values"))
        self.record_past = description["record_past"]
        self.lazy_initialization(keys, values)
        self._hold((keys, values), probe.tokens)

    def gone_after_crop(self, tokens: int) -> int:
        """Number of tokens that are not held, and that the window would need after a crop of the last `tokens`."""
        held = self._past()[0].shape[2] if self.is_initialized else 0
        length = max(0, self.num_tokens - tokens)
        return max(0, self.num_tokens - held - max(0, length - self.sliding_window + 1))

    @outside_inference_mode
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, and recorded ones outside the window. Raise `ValueError` for a
        positive number, or if the window would need tokens that are not held."""
        tokens = -check_crop(tokens_to_remove)
        if gone := self.gone_after_crop(tokens):
            raise ValueError(
                f"`crop` cannot remove {tokens} tokens from a sliding window of {self.sliding_window}: it would need "
                f"{gone} older tokens, which were not kept. Call `activate_past_recording()` on the cache before "
                "tokens that may be removed."
            )
        if self.is_initialized:
            past, tokens = self._past(), min(tokens, self.num_tokens)
            end = past[0].shape[2] - tokens
            past = _pair(lambda x: x[:, :, max(0, end - self.kept) : end].clone(), past)
            self._hold(past, self.num_tokens - tokens)

    def reset(self) -> None:
        """Remove all tokens. A growing layer frees its memory. The tensors of a preallocated one keep their addresses,
        for captured graphs."""
        if self.is_compileable:
            super().reset()
        else:
            self.keys, self.values, self.is_initialized = None, None, False
        self.num_tokens, self._first, self._recorded = 0, 0, None

    @outside_inference_mode
    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super()._map(function)
        if self._recorded is not None:
            self._recorded = _pair(function, self._recorded)
