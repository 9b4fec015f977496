"""Layers that are not compressed: full attention and sliding windows, growing or preallocated.

Each extends transformers' own layer, to work beside compressed layers. A file has the rows of the newest tokens in
their order; growing and preallocated layers write the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from tq_kernels.types import KeyValue
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from ..compat import is_capturing, mark_static_addresses, outside_inference_mode
from ..stores.sizes import STEP_TOKENS
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
    held = max(layer.max_cache_len, getattr(layer, "ring_rows", 0))
    if layer.is_initialized and (rows := layer.keys.shape[2]) != held:
        raise ValueError(
            f"A preallocated {'sliding-window' if layer.is_sliding else 'full-attention'} layer that is not compressed "
            f"has room for {layer.max_cache_len} tokens, and was assigned keys of {rows}. Prune only compressed "
            "layers, or a cache without `max_cache_len`."
        )


class PreallocatedLayer(_FullState, FullAttentionLayer, StaticLayer):
    """A preallocated full-attention layer that returns as many rows as a compressed one (`FullAttentionLayer`)."""

    num_tokens: int | None = None
    """Number of tokens, counted in eager calls; `None` after a compiled step, which the host cannot count."""

    @outside_inference_mode
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.cumulative_length = self.cumulative_length.clone()  # an inference tensor cannot be changed in place later
        super().lazy_initialization(key_states, value_states)
        if key_states.is_meta:  # see `LayerStore.allocate`
            self.cumulative_length = torch.tensor(0, device="cpu")

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

    def count_tokens(self) -> int:
        return int(self.get_seq_length()) if self.num_tokens is None else self.num_tokens

    def takes_step(self, tokens: int) -> bool:
        several = self.record_past and 1 < tokens <= STEP_TOKENS
        held = several and (torch.compiler.is_dynamo_compiling() or (self.is_initialized and self.num_tokens != 0))
        return tokens == 1 or held

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

    def count_replayed(self, length: int | None) -> None:
        """Set the number of tokens after a CUDA-graph replay, which the host cannot observe."""
        self.num_tokens = length

    def reset(self) -> None:
        """Remove all tokens. The tensors keep their addresses, for captured graphs."""
        super().reset()
        self.num_tokens = 0


def _pair(function: Callable[..., torch.Tensor], *states: KeyValue) -> KeyValue:
    """`function` of the keys, and of the values."""
    keys, values = (function(*parts) for parts in zip(*states, strict=True))
    return keys, values


class _WindowState(Substitute):
    """The state of a sliding window: the rows that the next query attends to, and all recorded rows."""

    state_fields: ClassVar[dict[str, type]] = {"rows": int, "record_past": bool}

    @property
    def _rows(self: Any) -> KeyValue:
        return self.keys, self.values

    def state(self: Any) -> State:
        keys, values = self._rows_to_save()
        return {"rows": keys.shape[2], "record_past": self.record_past}, {"keys": keys, "values": values}

    def check_state(self: Any, description: dict[str, Any], probe: Probe) -> dict[str, torch.Tensor]:
        tokens, rows, window = probe.tokens, description["rows"], self.get_max_length()
        # The next query does not attend to the first row of a full window, so this row may be missing.
        most = tokens if description["record_past"] else min(tokens, window)
        if not min(tokens, max(window - 1, 1)) <= rows <= most:
            raise ValueError(f"has {rows} rows of a window of {window} after {tokens} tokens: damaged.")
        return rows_like(probe.states, rows)


class SlidingLayer(_WindowState, DynamicSlidingWindowLayer):
    """A growing sliding window that keeps only the window of a prompt.

    `DynamicSlidingWindowLayer` keeps a view of the window until the next call, and with the view the memory of all keys
    and values of the call. At long contexts these take more memory than all full-attention layers together. This layer
    copies the window, and the rest is freed once attention has read it.
    """

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> KeyValue:
        states = super().update(key_states, value_states, *args, **kwargs)
        # After a single token at most one row is outside the window. A rollback needs all recorded rows.
        if key_states.shape[-2] > 1 and states[0].shape[-2] >= self.sliding_window and not self.record_past:
            self.keys, self.values = _pair(lambda x: x.clone(memory_format=torch.contiguous_format), self._rows)
        return states

    def _rows_to_save(self) -> KeyValue:
        least = max(self.sliding_window - 1, 1)
        return self._rows if self.record_past else _pair(lambda x: x[:, :, -least:], self._rows)

    def load_state(self, description: dict[str, Any], tensors: dict[str, torch.Tensor], probe: Probe) -> None:
        self.record_past = description["record_past"]
        keys, values = (tensors[name].to(probe.states[0].device) for name in ("keys", "values"))
        self.update(keys, values)
        self.cumulative_length = probe.tokens


class PreallocatedSlidingLayer(_WindowState, BatchedLayer, StaticSlidingWindowLayer):
    """A preallocated sliding window that supports crop, select and repeat like a growing one.

    A single token is appended by a count on the device. One captured step therefore serves a filling and a sliding
    window. (transformers' layer decides between the two on the host.)

    `crop` can always remove one token: the next step does not read the first row of a full window. More tokens can be
    removed only before the window slides, because older rows are overwritten. As in the growing layer,
    `activate_past_recording` (called by assisted decoding) keeps the rows that leave the window until the next `crop`.
    A replayed step records nothing: after it one token can be removed.

    Assisted decoding in `graph_decoding` takes tokens back on the device. Meanwhile the layer is a ring of more rows
    than the window has (`open_ring`): the token at position p is in row p modulo the number of rows, and a smaller
    count removes tokens. The caller makes masks for the rows of the ring.
    """

    is_croppable = True

    room: int | None = None
    """Number of tokens that the cache's layers of full attention have room for, `None` without these layers. A call
    that exceeds it is refused here, before a window changes."""
    record_past = False
    _recorded: KeyValue | None = None
    """Recorded keys and values: all tokens since the first one in the window at the last `crop`. Without `record_past`,
    those of a ring that an exception closed, until the next update."""
    _first_missing_at: int | None = None
    """Number of tokens at which the first row of the full window may be missing."""
    is_ring = False
    """Whether rows are in the order of a ring. Otherwise the first `max_cache_len` rows are the window."""
    ring_rows = 0
    """Number of rows after a ring was opened: they stay for the next one."""

    @outside_inference_mode
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.cumulative_length = self.cumulative_length.clone()  # an inference tensor cannot be changed in place later
        super().lazy_initialization(key_states, value_states)

    def activate_past_recording(self) -> None:
        """Keep rows that leave the window until the next `crop`."""
        self.record_past = True

    def takes_step(self, tokens: int) -> bool:
        """Whether a compiled graph may include an update of this number of tokens."""
        return tokens == 1 or self.is_ring

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> KeyValue:
        """Store new states; return all rows that their queries need, and empty rows. A ring returns all its rows. Raise
        `ValueError`, and change nothing, if the tokens exceed `room`."""
        if self.is_ring:
            return self._append_to_ring(key_states, value_states)
        check_rows(self)
        if self.room is not None and not torch.compiler.is_dynamo_compiling():
            check_room(key_states.shape[2], self.cumulative_length_int, self.room)
        past, self._recorded = self._past() if self.record_past else None, None
        if self.record_past:
            new = (key_states, value_states)
            self._recorded = new if past is None else _pair(lambda *parts: torch.cat(parts, dim=2), past, new)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[2] == 1:
            return self._append_row(key_states, value_states)
        return self._append_rows(key_states, value_states)

    def _window(self) -> KeyValue:
        return _pair(lambda x: x[:, :, : self.max_cache_len], self._rows) if self.ring_rows else self._rows

    def _append_rows(self, key_states: torch.Tensor, value_states: torch.Tensor) -> KeyValue:
        """Append several tokens a sequence, as transformers' layer does."""
        window, most, past = self._window(), self.max_cache_len, self.cumulative_length_int
        new, length = (key_states, value_states), past + key_states.shape[2]
        self.cumulative_length_int = length
        self.cumulative_length.fill_(min(length, most))
        if length <= most:
            for states, part in zip(window, new, strict=True):
                states[:, :, past:length] = part
            return with_num_held(window, length)
        if past:
            held = slice(int(past >= most), min(past, most))  # the first row of a full window is not read
            new = _pair(lambda states, part: torch.cat([states[:, :, held], part], dim=2), window, new)
        for states, part in zip(window, new, strict=True):
            states.copy_(part[:, :, -most:])
        return new

    def _append_row(self, key_states: torch.Tensor, value_states: torch.Tensor) -> KeyValue:
        """Append one token a sequence; in a full window it replaces the oldest token."""
        window, length, last = self._window(), self.cumulative_length, self.max_cache_len - 1
        rows = torch.arange(self.max_cache_len, device=self.device)
        source, is_new = (rows + (length > last)).clamp_(max=last), (rows == length.clamp(max=last))[:, None]
        for states, new in zip(window, (key_states, value_states), strict=True):
            states.copy_(torch.where(is_new, new, states.index_select(2, source)))
        length.add_(1).clamp_(max=self.max_cache_len)
        self.cumulative_length_int += 1
        if torch.compiler.is_dynamo_compiling():
            return window
        return with_num_held(window, min(self.cumulative_length_int, self.max_cache_len))

    @outside_inference_mode
    def open_ring(self, tokens: int) -> None:
        """Make the layer a ring: up to `tokens` newest tokens may be removed on the device. The rows stay for later
        calls."""
        past, length, rows = self._past(), self.cumulative_length_int, self.max_cache_len + tokens
        assert past is not None
        held = _pair(lambda part: part[:, :, -rows:].clone(), past)
        if self.ring_rows < rows:
            made = _pair(lambda x: x.new_zeros(*x.shape[:2], rows, x.shape[3]), self._rows)
            (self.keys, self.values), self.ring_rows = made, rows
            mark_static_addresses(made)
        places = self._places(length, held[0].shape[2])
        _pair(lambda states, part: states.index_copy_(2, places, part), self._rows, held)
        self.cumulative_length.fill_(length)
        self.is_ring, self._recorded = True, None

    def _places(self, length: int, tokens: int) -> torch.Tensor:
        """Rows of the newest `tokens` of `length` tokens in a ring, `[tokens]` int64."""
        return torch.arange(length - tokens, length, device=self.keys.device) % self.ring_rows  # type: ignore[union-attr]

    def _append_to_ring(self, key_states: torch.Tensor, value_states: torch.Tensor) -> KeyValue:
        tokens = key_states.shape[2]
        places = (self.cumulative_length + torch.arange(tokens, device=self.device)) % self.ring_rows
        self.cumulative_length.add_(tokens)
        return _pair(lambda states, new: states.index_copy_(2, places, new), self._rows, (key_states, value_states))

    @outside_inference_mode
    def close_ring(self, record: bool) -> None:
        """Order the rows as a window. The number of tokens is read from the device. `record`: whether to keep rows
        beyond the window until the next `crop` or update."""
        if not self.is_ring:
            return
        length = int(self.cumulative_length)
        places = self._places(length, min(length, self.ring_rows))
        held = _pair(lambda x: x.index_select(2, places), self._rows)
        rows = min(length, self.max_cache_len)
        _pair(lambda states, part: states[:, :, :rows].copy_(part[:, :, -rows:]), self._window(), held)
        self.cumulative_length_int, self.is_ring = length, False
        self.cumulative_length.fill_(min(length, self.max_cache_len))
        self._recorded = held if record else None

    def count_replayed(self, length: int | None) -> None:
        if length is not None:  # a ring counts on the device
            self.cumulative_length_int, self._recorded = length, None  # a replay records nothing

    @outside_inference_mode
    def resume(self, length: int) -> None:
        """Set the number of tokens to `length`. The first row of a full window may be missing."""
        self.cumulative_length_int = self._first_missing_at = length
        self.cumulative_length.fill_(min(length, self.max_cache_len))

    def _past(self) -> KeyValue | None:
        """The newest tokens in their order: recorded ones, or views of the valid rows of the window."""
        if self._recorded is not None or not self.is_initialized:
            return self._recorded
        length, most = self.cumulative_length_int, self.max_cache_len
        rows = slice(1 if length >= most and length == self._first_missing_at else 0, min(length, most))
        return _pair(lambda x: x[:, :, rows], self._rows)

    def _rows_to_save(self) -> KeyValue:
        past, most = self._past(), self.max_cache_len
        assert past is not None
        if self.record_past and self._recorded is not None:
            return past
        # The first row of a window that has slid is not read, and a growing window does not have it.
        rows = most if self.cumulative_length_int <= most else max(most - 1, 1)
        return _pair(lambda x: x[:, :, -rows:], past)

    def load_state(self, description: dict[str, Any], tensors: dict[str, torch.Tensor], probe: Probe) -> None:
        keys, values = (tensors[name].to(probe.states[0].device) for name in ("keys", "values"))
        missing = max(0, min(probe.tokens, self.max_cache_len) - keys.shape[2])
        self.update(*(torch.nn.functional.pad(part, (0, 0, missing, 0)) for part in (keys, values)))
        self.resume(probe.tokens)
        self._first_missing_at = probe.tokens if missing else None
        self.record_past = description["record_past"]
        self._recorded = (keys, values) if self.record_past else None

    def gone_after_crop(self, tokens: int) -> int:
        """Number of overwritten tokens that the window would need again after a crop of the last `tokens`."""
        past, most = self._past(), self.max_cache_len
        length = max(0, self.cumulative_length_int - tokens)
        left = (0 if past is None else past[0].shape[2]) - (self.cumulative_length_int - length)
        return max(0, (length if length < most else most - 1) - left)

    @outside_inference_mode
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, and recorded ones outside the window. Raise `ValueError` for a
        positive number, or if the window would need tokens that were overwritten."""
        tokens_to_remove = check_crop(tokens_to_remove)
        past = self._past()
        if past is None:
            return
        if gone := self.gone_after_crop(-tokens_to_remove):
            raise ValueError(
                f"`crop` cannot remove {-tokens_to_remove} tokens from a sliding window of {self.max_cache_len}: it "
                f"would need {gone} older tokens, which were not kept. Call `activate_past_recording()` on the cache "
                "before tokens that may be removed."
            )
        length = max(0, self.cumulative_length_int + tokens_to_remove)
        end = past[0].shape[2] - (self.cumulative_length_int - length)
        window = min(length, self.max_cache_len)
        rows = min(end, window)
        past = _pair(lambda x: x[:, :, end - rows : end].clone(), past)
        _pair(lambda states, part: states[:, :, window - rows : window].copy_(part), self._rows, past)
        self._recorded = past if self.record_past else None
        self.resume(length)

    def reset(self) -> None:
        """Remove all tokens. The tensors keep their addresses, for captured graphs."""
        super().reset()
        self._recorded = self._first_missing_at = None

    @outside_inference_mode
    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super()._map(function)
        if self._recorded is not None:
            self._recorded = _pair(function, self._recorded)
