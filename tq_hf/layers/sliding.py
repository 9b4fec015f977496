"""A sliding-window layer that lets go of the prompt."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer


class SlidingLayer(DynamicSlidingWindowLayer):
    """transformers' own layer, except that it keeps no more than its window of a prompt.

    `DynamicSlidingWindowLayer` keeps a view of the window, and with it the memory of all keys and values of the call,
    until the next call: at long contexts more than all full-attention layers together. Here the window is copied, and
    the rest is freed once attention has read it.
    """

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
