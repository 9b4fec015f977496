"""One compressed layer of a cache: transformers' layer contract around a `LayerStore`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..compat import attention_implementation
from ..config import TurboQuantConfig
from ..inference_mode import outside_inference_mode
from ..ops import dispatch
from ..stores.base import LayerStore
from ..stores.checks import check_room, check_states
from ..stores.growing import GrowingStore
from ..stores.preallocated import PreallocatedStore
from ..stores.ticket import Receipt, Ticket, attach, step_placeholders
from ..stores.watched import Watch
from ..tensors.blocks import Factors, KeyValue
from ..tensors.layer import StepView, StoreView, is_first
from . import advice
from .base import FullAttentionLayer, check_crop

_FIRST, _SEVERAL, _ONE = "a prompt", "several tokens", "one token"
"""Kinds of call: a model may treat each in its own way."""


class TurboQuantLayer(FullAttentionLayer):
    """A full-attention layer whose keys and values are held compressed.

    What `update` returns depends on who will read it. The attention function "turboquant" reads the packed store, by a
    ticket on the keys (see `tq_hf.stores.ticket`). Any other attention reads dequantised states; so does a model whose
    keys never reach the attention function as they left `update` (MLA latents, models without an attention interface).
    The layer finds out by itself: `update` returns real states with a ticket attached, and only after the attention
    function of a model has taken one, and while that model still uses it, stand-ins. Those become real states if the
    model computes with them (see `tq_hf.stores.watched`); only where it was seen to leave them alone in a call of the
    same kind (a prompt, several tokens after it, one token) they are placeholders.

    Args:
        config: What to compress to.
        max_cache_len: Tokens to preallocate for and never exceed, or `None`.
        model_config: The config of the model, held weakly. While it names another attention than "turboquant" the
            states of a prompt are not watched: other attention functions may be compiled.
    """

    is_sliding = False
    supports_early_init = True

    def __init__(
        self,
        config: TurboQuantConfig,
        max_cache_len: int | None = None,
        model_config: PreTrainedConfig | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self.max_cache_len = max_cache_len
        # An attribute of the layer, not of the class: transformers compiles decoding if all layers have it.
        self.is_compileable = max_cache_len is not None
        self.store: LayerStore | None = None
        self.factors: Factors | None = None
        """Factors of channels to use, if they were handed on."""
        self.awaits_queries = True
        """Whether a prompt is encoded only when attention has shown its queries, or something else is asked of it."""
        self._receipt = Receipt()
        self._model_config = None if model_config is None else weakref.ref(model_config)
        self._call = _FIRST
        self._left_alone: set[str] = set()
        """Kinds of call in which the model did nothing with the states but hand them to attention."""

    @property
    def keys(self) -> torch.Tensor | None:
        """All cached keys, dequantised: `[B, Hkv, T, Dk]`. A new tensor; writing to it changes nothing."""
        return None if self.store is None else dispatch.dense(self.store.view())[0]

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        """Ignored: the base class assigns `None` where there is nothing to assign."""

    @property
    def values(self) -> torch.Tensor | None:
        """All cached values, dequantised: `[B, Hkv, T, Dv]`. A new tensor; writing to it changes nothing."""
        return None if self.store is None else dispatch.dense(self.store.view())[1]

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        """Ignored, as for `keys`."""

    @outside_inference_mode
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the store for states like these, `[B, Hkv, S, D]` (S may be 0)."""
        check_states(key_states, value_states)
        store: LayerStore
        if self.max_cache_len is None:
            store = GrowingStore.allocate(self.config, key_states, value_states)
        else:
            store = PreallocatedStore.allocate(self.config, key_states, value_states, self.max_cache_len)
        if self.factors is not None:
            store.hand_on(self.factors)
        self.store = store
        if not torch.compiler.is_compiling():
            model_config = None if self._model_config is None else self._model_config()
            advice.of_states(key_states, store.layout, getattr(model_config, "model_type", None))
        self.dtype, self.device = key_states.dtype, key_states.device
        self._nan = key_states.new_full((1, 1, 1, 1), torch.nan)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]`; return what attention should be given.

        Raises:
            ValueError: The states do not fit the cache, or exceed `max_cache_len`. The cache is unchanged then.
        """
        if self.store is None:
            check_states(key_states, value_states)
            if self.max_cache_len is not None:
                check_room(key_states.shape[2], 0, self.max_cache_len)
            self.lazy_initialization(key_states, value_states)
        assert self.store is not None
        view = self.store.append(
            key_states, value_states, wait=self.awaits_queries and not torch.compiler.is_compiling()
        )
        call = _FIRST if is_first(view) else _ONE if key_states.shape[2] == 1 else _SEVERAL
        last = self._receipt
        reader = None if last.reader is None else last.reader()
        reads_store = reader is not None and attention_implementation(reader) == "turboquant"
        if torch.compiler.is_compiling():  # compiled steps go on as the prefill before them did
            known = last.left_alone or self._call in self._left_alone or call in self._left_alone
            # Compiled code can neither watch states nor put attributes on what operators return.
            if not (reads_store and known) and call != _FIRST:
                return self._dense(view)
        else:
            if last.read:
                self._left_alone.clear()
            elif last.left_alone and reads_store:
                self._left_alone.add(self._call)
            known = call in self._left_alone
            self._receipt, self._call = Receipt(), call
        prompt = (key_states, value_states) if is_first(view) else None
        return self._offered(view, prompt, reads_store, known)

    def _offered(self, view: StoreView | StepView, prompt: KeyValue | None, reads_store: bool, known: bool) -> KeyValue:
        """States for `view` with a ticket on them; `prompt` are those of a first call. If attention is expected to read
        the store they are stand-ins, watched ones unless the model is `known` to leave them alone."""
        assert self.store is not None
        dense: Callable[[], KeyValue]
        if prompt is not None:
            dense = partial(self._shown, prompt)
            # An alias: with the ticket on the very tensor its view holds, they would keep each other alive.
            keys, values = dense()
            states = (keys.view_as(keys), values)
            watches = self._may_read_store() and not torch.compiler.is_compiling()
        else:
            dense = partial(self._dense, view)
            if not reads_store and self._call == _ONE and self._nan.is_cuda and not torch.compiler.is_compiling():
                advice.of_dequantised_steps(self.store.layout, self._may_read_store())
            states = step_placeholders(view.tensors.row, self._length(view), self._nan) if reads_store else dense()
            watches = reads_store and not known
        if watches:
            self._receipt.watched = True
            states = Watch(dense, self._receipt.note_read).over(states)
        waiting = self.store if self.store.waits else None
        return attach(states, Ticket(view, self._receipt, states[1], dense, waiting))

    def _length(self, view: StoreView | StepView) -> int:
        """Tokens that states for `view` must have."""
        return max(view.length, self.get_max_length()) if self.shows_room else view.length

    def _dense(self, view: StoreView | StepView) -> KeyValue:
        """The states `view` stands for, dequantised."""
        assert self.store is not None
        return self._shown(self.store.dense(view))

    def _shown(self, states: KeyValue) -> KeyValue:
        """`states`, with zeros for empty room if that is shown."""
        room = self.get_max_length() - states[0].shape[2]
        if not self.shows_room or room <= 0:
            return states
        keys, values = (torch.nn.functional.pad(x, (0, 0, 0, room)) for x in states)
        return keys, values

    def _may_read_store(self) -> bool:
        if self._model_config is None:
            return True
        return attention_implementation(self._model_config()) in ("turboquant", None)

    @property
    def reads_store(self) -> bool:
        """Whether the attention function of a model took the last ticket: the next step reads the packed store."""
        return self._receipt.signed

    def read_like(self, other: TurboQuantLayer) -> None:
        """Let the next step read this layer as it would read `other`."""
        self._receipt = other._receipt

    def by_kind(self) -> dict[str, list[torch.Tensor]]:
        """Every tensor held, by the kind `memory_footprint` reports; `{}` before the first update."""
        if self.store is None:
            return {}
        kinds = self.store.by_kind()
        return kinds | {"metadata": [*kinds["metadata"], self._nan]}

    def get_seq_length(self) -> int | torch.Tensor:  # type: ignore[override]
        """Tokens held; of a preallocated cache a tensor on its device, as for transformers' static layers."""
        return 0 if self.store is None else self.store.length

    def get_max_length(self) -> int:
        """`max_cache_len`, or -1 for none."""
        return -1 if self.max_cache_len is None else self.max_cache_len

    @property
    def batch_size(self) -> int:
        """Sequences held, or -1 before the first update."""
        return -1 if self.store is None else self.store.batch_size

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens.

        Raises:
            ValueError: `tokens_to_remove` is positive.
        """
        tokens_to_remove = check_crop(tokens_to_remove)
        if tokens_to_remove == 0 or self.store is None:
            return
        self.store.crop(-tokens_to_remove)

    def count_replayed(self, length: int) -> None:
        """See `FullAttentionLayer.count_replayed`."""
        assert isinstance(self.store, PreallocatedStore)
        self.store.num_held = length

    def reset(self) -> None:
        """Forget everything. Memory is released and the next update may have any batch size; a preallocated cache keeps
        its memory and batch size instead, so that compiled graphs stay valid."""
        if self.store is not None:
            self.store = self.store.reset()
        self.is_initialized = self.store is not None
        self._receipt = Receipt()
        self._left_alone.clear()

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.store is not None:
            self.store = self.store.map(function)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take sequence `beam_idx[i]` to place i: in place, unless that makes more or fewer."""
        if self.batch_size != beam_idx.shape[0]:
            self.batch_select_indices(beam_idx)
        elif self.store is not None:
            self.store.reorder(beam_idx)

    def offload(self) -> None:
        """Move the store to the CPU, unless it waits for the queries of a prompt."""
        if self.store is not None and self.store.waits:
            return
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move an offloaded store back to its device."""
        self._map(lambda tensor: tensor.to(self.device, non_blocking=True))
