"""A preallocated layer that is not compressed, beside compressed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from ..compat import outside_inference_mode
from ..stores.base import check_room
from .base import FullAttentionLayer, check_crop


class PreallocatedLayer(FullAttentionLayer, StaticLayer):
    """transformers' own layer, except that it agrees with a `TurboQuantLayer` on what a call of several tokens sees.

    `StaticLayer` shows all there is room for at every call. Beside a compressed layer it must show what that shows (see
    `FullAttentionLayer`): the tokens held, and all there is room for only to a single token.
    """

    # Beside the layer's own variables, which are what a file holds of it.
    __slots__ = ("num_held",)

    @outside_inference_mode
    def __init__(self, max_cache_len: int) -> None:
        super().__init__(max_cache_len)
        self.num_held: int | None = None
        """Tokens held, if the host knows: it counts in eager calls, and a compiled one forgets."""

    @outside_inference_mode
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make room for keys `[B, Hkv, *, Dk]` and values `[B, Hkv, *, Dv]` like these."""
        super().lazy_initialization(key_states, value_states)
        if key_states.is_meta:  # see `PreallocatedStore.allocate`
            self.cumulative_length = torch.tensor(0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]`; return all that are held, or if S is 1 all
        there is room for (always, if that is shown).

        Raises:
            ValueError: The tokens exceed `max_cache_len`. The layer is unchanged then. (In a compiled step torch's own
                check of the index fails.)
        """
        tokens = key_states.shape[-2]
        if tokens == 1 and torch.compiler.is_compiling():
            self.num_held = None
            return super().update(key_states, value_states, *args, **kwargs)
        held = int(self.get_seq_length()) if self.num_held is None else self.num_held
        check_room(tokens, held, self.max_cache_len)
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.num_held = held + tokens
        if tokens == 1 or self.shows_room:
            return keys, values
        return keys[:, :, : held + tokens], values[:, :, : held + tokens]

    def get_seq_length(self) -> int | torch.Tensor:  # type: ignore[override]
        """Tokens held, `[]` int64 on the device; 0 before the first update, and of a model on the meta device a
        number."""
        length = super().get_seq_length()
        return int(length) if self.is_initialized and self.device.type == "meta" else length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens.

        Raises:
            ValueError: `tokens_to_remove` is positive.
        """
        tokens_to_remove = check_crop(tokens_to_remove)
        if self.is_initialized:
            self.cumulative_length.add_(tokens_to_remove).clamp_(min=0)
            self.num_held = None

    def count_replayed(self, length: int) -> None:
        """See `FullAttentionLayer.count_replayed`."""
        self.num_held = length

    def reset(self) -> None:
        """Hold nothing; the tensors stay where they are."""
        super().reset()
        self.num_held = None

    @outside_inference_mode
    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            self.keys, self.values = function(self.keys), function(self.values)
            self.batch_size = self.keys.shape[0]
