"""A preallocated layer that is not compressed, beside compressed ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from ..compat import outside_inference_mode
from ..stores.base import check_room
from ..tensors.blocks import KeyValue
from .base import FullAttentionLayer, check_crop, like_held

TOKEN_AXES = {"update": -2, "update_indexer": 1}
"""Methods of a cache whose tensors have an axis of tokens, and which; the batch is axis 0 of all."""
METHODS = (*TOKEN_AXES, "update_conv_state", "update_recurrent_state")


@dataclass(frozen=True)
class Call:
    """A call of a cache's method for one layer, with shapes in place of tensors.

    Args:
        method: Its name.
        likes: Shape, dtype and device of each tensor.
        options: The other arguments, but for the number of the layer.
    """

    method: str
    likes: tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...]
    options: tuple[tuple[str, Any], ...]

    def tensors(self, batch: int, tokens: int) -> list[torch.Tensor]:
        """Zeros in place of the call's tensors, for `batch` sequences of `tokens` tokens."""
        made = []
        for shape, dtype, device in self.likes:
            sizes = [batch, *shape[1:]]
            if self.method in TOKEN_AXES:
                sizes[TOKEN_AXES[self.method]] = tokens
            made.append(torch.zeros(sizes, dtype=dtype, device=device))
        return made

    def replay(self, layer: Any, batch: int, tokens: int) -> None:
        """Make the call on `layer`, one of transformers' classes."""
        tensors = self.tensors(batch, tokens)
        if self.method == "update":
            tensors = list(like_held(layer, *tensors))
        getattr(layer, self.method)(*tensors, **dict(self.options))


def record(cache: Cache) -> list[list[Call]]:
    """Note from now on what each layer of `cache` is given. Returns the lists that fill, one a layer."""
    calls: list[list[Call]] = [[] for _ in cache.layers]

    def noting(method: str, real: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(real)

        def note(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            given.pop("args", None)
            more, index = given.pop("kwargs", {}), given.pop("layer_idx")
            tensors = [given.pop(name) for name in list(given) if isinstance(given[name], torch.Tensor)]
            # What models pass on to `update` is for attention, not for the layer.
            options = {} if method == "update" else given | more
            likes = tuple((tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors)
            calls[index].append(Call(method, likes, tuple(sorted(options.items()))))
            return real(*args, **kwargs)

        return note

    for method in METHODS:
        if hasattr(cache, method):
            setattr(cache, method, noting(method, getattr(cache, method)))
    return calls


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

    One token is appended by counts on the device, so that a captured step serves a window that fills and one that
    slides. (The stock layer asks the host which it is.)

    One token can be taken back after any: of a full window the first is not read by the step that comes next. More only
    before the window has begun to slide, because what comes back into it is gone. As in the growing layer
    `activate_past_recording` (which assisted decoding calls) keeps what slides out from one `crop` to the next.
    """

    # Beside the layer's own variables, which are what a file holds of it.
    __slots__ = ("_first_gone_at",)

    is_croppable = True

    @classmethod
    @outside_inference_mode
    def like(cls, layer: StaticSlidingWindowLayer) -> PreallocatedSlidingLayer:
        """An empty layer in place of `layer`, whatever that was made with."""
        made = cls.__new__(cls)
        vars(made).update(vars(layer))
        made.cumulative_length = layer.cumulative_length.clone()
        made.record_past = False
        made._recorded = None
        made._first_gone_at = None
        return made

    record_past: bool
    _recorded: KeyValue | None
    """Keys and values from the first token of the window at the last `crop` on, while they are recorded."""
    _first_gone_at: int | None
    """Number of tokens at which the first row of the full window may not be the token that belongs there."""

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
        if key_states.shape[2] == 1:
            return self._append_row(key_states, value_states)
        states = super().update(key_states, value_states, *args, **kwargs)
        self.cumulative_length.fill_(min(self.cumulative_length_int, self.max_cache_len))
        return states

    def _append_row(self, key_states: torch.Tensor, value_states: torch.Tensor) -> KeyValue:
        """Write one token a sequence after those held; if there is no room, the oldest leaves."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        held, last = self.cumulative_length, self.max_cache_len - 1
        rows = torch.arange(self.max_cache_len, device=self.device)
        source, is_new = (rows + (held > last)).clamp_(max=last), (rows == held.clamp(max=last))[:, None]
        for states, new in ((self.keys, key_states), (self.values, value_states)):
            states.copy_(torch.where(is_new, new, states.index_select(2, source)))
        held.add_(1).clamp_(max=self.max_cache_len)
        self.cumulative_length_int += 1
        return self.keys, self.values

    def count_replayed(self, length: int) -> None:
        """See `FullAttentionLayer.count_replayed`."""
        self.cumulative_length_int = length

    @outside_inference_mode
    def resume(self, length: int) -> None:
        """Go on after `length` tokens that the tensors hold. Of a full window the first may be missing."""
        self.cumulative_length_int = self._first_gone_at = length
        self.cumulative_length.fill_(min(length, self.max_cache_len))

    def _rows(self) -> slice:
        """The rows that hold their tokens."""
        held, most = self.cumulative_length_int, self.max_cache_len
        return slice(1 if held >= most and held == self._first_gone_at else 0, min(held, most))

    def _held(self) -> KeyValue | None:
        """A copy of the tokens to come back to."""
        if not self.is_initialized:
            return None
        assert self.keys is not None and self.values is not None
        rows = self._rows()
        return self.keys[:, :, rows].clone(), self.values[:, :, rows].clone()

    def gone_after_crop(self, tokens: int) -> int:
        """Tokens that would come back into the window if the last `tokens` were removed, and are gone."""
        held, most = self.cumulative_length_int, self.max_cache_len
        length, rows = max(0, held - tokens), self._rows()
        kept = (rows.stop - rows.start if self._recorded is None else self._recorded[0].shape[2]) - (held - length)
        return max(0, (length if length < most else most - 1) - kept)

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
        self.resume(length)

    def reset(self) -> None:
        """Hold nothing; the tensors stay where they are."""
        super().reset()
        self._recorded = self._first_gone_at = None

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
