"""Sliding-window layers: one that lets go of the prompt, and a preallocated one that can be rolled back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticSlidingWindowLayer

from ..inference_mode import outside_inference_mode
from ..tensors.window import KeyValue
from .base import check_crop


class SlidingLayer(DynamicSlidingWindowLayer):
    """transformers' own layer, except that it keeps no more than its window of a prompt.

    `DynamicSlidingWindowLayer` keeps a view of the window, and with it the memory of all keys and values of the call,
    until the next call: at long contexts more than all full-attention layers together. Here the window is copied, and
    the rest is freed once attention has read it.
    """

    @classmethod
    def like(cls, layer: DynamicSlidingWindowLayer) -> SlidingLayer:
        """An empty layer in place of `layer`, whatever that was made with."""
        made = cls.__new__(cls)
        vars(made).update(vars(layer))
        return made

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]`; return all that their queries may see."""
        states = super().update(key_states, value_states, *args, **kwargs)
        # After a single token no more than one row lies outside of the window; a rollback needs all there is.
        if key_states.shape[-2] > 1 and states[0].shape[-2] >= self.sliding_window and not self.record_past:
            assert self.keys is not None and self.values is not None
            self.keys = self.keys.clone(memory_format=torch.contiguous_format)
            self.values = self.values.clone(memory_format=torch.contiguous_format)
        return states


class PreallocatedSlidingLayer(StaticSlidingWindowLayer):
    """transformers' own layer, and what its growing twin can do besides: crop, select and repeat.

    A window that has begun to slide cannot be cropped, because what comes back into it is gone. As in the growing layer
    `activate_past_recording` (which assisted decoding calls) keeps what slides out from one `crop` to the next.
    """

    is_croppable = True

    @classmethod
    def like(cls, layer: StaticSlidingWindowLayer) -> PreallocatedSlidingLayer:
        """An empty layer in place of `layer`, whatever that was made with."""
        made = cls.__new__(cls)
        vars(made).update(vars(layer))
        made.record_past = False
        made._recorded = None
        return made

    record_past: bool
    _recorded: KeyValue | None
    """Keys and values from the first token of the window at the last `crop` on, while they are recorded."""

    @outside_inference_mode
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make room for keys `[B, Hkv, *, Dk]` and values `[B, Hkv, *, Dv]` like these."""
        super().lazy_initialization(key_states, value_states)

    def activate_past_recording(self) -> None:
        """Keep what slides out of the window until the next `crop`."""
        self.record_past = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]`; return all that their queries may see, and
        empty room."""
        if self.record_past:
            held = self._held() if self._recorded is None else self._recorded
            new = (key_states, value_states)
            if held is not None:
                new = (torch.cat([held[0], key_states], dim=2), torch.cat([held[1], value_states], dim=2))
            self._recorded = new
        return super().update(key_states, value_states, *args, **kwargs)

    def _held(self) -> KeyValue | None:
        """A copy of the tokens to come back to: of a full window the first is never read again, and may be missing."""
        if not self.is_initialized:
            return None
        assert self.keys is not None and self.values is not None
        full = self.cumulative_length_int >= self.max_cache_len
        rows = slice(1, None) if full else slice(0, self.cumulative_length_int)
        return self.keys[:, :, rows].clone(), self.values[:, :, rows].clone()

    def gone_after_crop(self, tokens: int) -> int:
        """Tokens that would come back into the window if the last `tokens` were removed, and are gone."""
        held, most = self.cumulative_length_int, self.max_cache_len
        length = max(0, held - tokens)
        rows = self._recorded[0].shape[2] if self._recorded is not None else held if held < most else most - 1
        return max(0, (length if length < most else most - 1) - (rows - (held - length)))

    @outside_inference_mode
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, and let go of what was recorded and is not in the window.

        Raises:
            ValueError: `tokens_to_remove` is positive, or tokens that would come back into the window are gone.
        """
        tokens_to_remove = check_crop(tokens_to_remove)
        held = self._held() if self._recorded is None else self._recorded
        if held is None:
            return
        if gone := self.gone_after_crop(-tokens_to_remove):
            raise ValueError(
                f"`crop` would take {-tokens_to_remove} tokens off a sliding window of {self.max_cache_len}, but the "
                f"{gone} before it are gone. Call `activate_past_recording()` on the cache before the tokens that may "
                "have to be removed."
            )
        assert self.keys is not None and self.values is not None
        length = max(0, self.cumulative_length_int + tokens_to_remove)
        end = held[0].shape[2] - (self.cumulative_length_int - length)
        window = min(length, self.max_cache_len)
        rows = min(end, window)
        kept = (held[0][:, :, end - rows : end], held[1][:, :, end - rows : end])
        self.keys[:, :, window - rows : window] = kept[0]
        self.values[:, :, window - rows : window] = kept[1]
        self._recorded = kept if self.record_past else None
        self.cumulative_length_int = length
        self.cumulative_length.fill_(window)

    def reset(self) -> None:
        """Hold nothing; the tensors stay where they are."""
        super().reset()
        self._recorded = None

    @outside_inference_mode
    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            self.keys, self.values = function(self.keys), function(self.values)
            self.batch_size = self.keys.shape[0]
            if self._recorded is not None:
                self._recorded = (function(self._recorded[0]), function(self._recorded[1]))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take sequence `beam_idx[i]` to place i."""
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices`, in that order."""
        self._map(lambda tensor: tensor[indices.to(tensor.device)])
