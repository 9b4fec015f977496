"""One compressed layer of a cache: transformers' layer contract around a `LayerStore`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.utils import logging

from ..compat import attention_implementation
from ..config import TurboQuantConfig
from ..inference_mode import outside_inference_mode
from ..ops import dispatch
from ..stores import graph_ops
from ..stores.growing import LayerStore, check_states
from ..stores.preallocated import StaticStore
from ..stores.ticket import Receipt, Ticket, attach, placeholders, step_placeholders
from ..tensors.view import StoreView
from ..tensors.window import KeyValue
from .base import FullAttentionLayer, check_crop

logger = logging.get_logger(__name__)


class TurboQuantLayer(FullAttentionLayer):
    """A full-attention layer whose keys and values are held compressed.

    What `update` returns depends on who will read it. With `attn_implementation="turboquant"` it is a ticket (see
    `tq_hf.stores.ticket`) with which the attention function reads the packed store. With any other attention, or on a
    model whose keys never reach the attention function as they left `update` (MLA latents, models without an attention
    interface), it is the dequantised states. The layer finds out by itself: the first `update` always returns real
    states with a ticket attached, and only if the attention function took it do later ones return placeholders.

    Args:
        config: What to compress to.
        model_config: The decoder's config, whose `_attn_implementation` is looked at on every update. Held weakly.
        max_cache_len: Tokens to preallocate for and never exceed, or `None`.
    """

    is_sliding = False
    supports_early_init = True

    def __init__(
        self,
        config: TurboQuantConfig,
        model_config: PreTrainedConfig | None = None,
        max_cache_len: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self.max_cache_len = max_cache_len
        # An attribute of the layer, not of the class: transformers compiles decoding if all layers have it.
        self.is_compileable = max_cache_len is not None
        self.store: LayerStore | StaticStore | None = None
        self._model_config = None if model_config is None else weakref.ref(model_config)
        self._receipt = Receipt()

    @property
    def keys(self) -> torch.Tensor | None:
        """All cached keys, dequantised: `[B, Hkv, T, Dk]`. A new tensor; writing to it changes nothing."""
        return None if self.store is None else dispatch.dense(self._view())[0]

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        """Ignored: the base class assigns `None` where there is nothing to assign."""

    @property
    def values(self) -> torch.Tensor | None:
        """All cached values, dequantised: `[B, Hkv, T, Dv]`. A new tensor; writing to it changes nothing."""
        return None if self.store is None else dispatch.dense(self._view())[1]

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        """Ignored, as for `keys`."""

    def _view(self) -> StoreView:
        if isinstance(self.store, StaticStore):
            with self.store.opened() as store:
                return store.view()
        assert self.store is not None
        return self.store.view()

    @outside_inference_mode
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the store for states like these, `[B, Hkv, S, D]` (S may be 0)."""
        check_states(key_states, value_states)
        if self.max_cache_len is None:
            self.store = LayerStore(self.config, key_states, value_states)
        else:
            self.store = StaticStore.allocate(self.config, key_states, value_states, self.max_cache_len)
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
            self._check_room(key_states.shape[2])
            self.lazy_initialization(key_states, value_states)
        takes_tickets = self._receipt.signed
        wants_ticket = self._wants_ticket()
        if isinstance(self.store, StaticStore):
            if key_states.shape[2] == 1:
                return self._update_one(self.store, key_states, value_states, wants_ticket, takes_tickets)
            with self.store.opened() as store:
                view = store.append(key_states, value_states)
        else:
            assert self.store is not None
            view = self.store.append(key_states, value_states)
        self._receipt = Receipt()
        if view.past_length == 0:
            # An alias of the keys: with the ticket on the very tensor its view holds, they would keep each other alive.
            states = (key_states.view_as(key_states), value_states)
        elif wants_ticket and takes_tickets:
            kind = (*view.buffers.row_shapes, self.dtype, self.device)
            states = step_placeholders(kind, view.length, self._nan)
        else:
            states = dispatch.dense(view)
        return attach(states, Ticket(view, self._receipt)) if wants_ticket else states

    def _update_one(
        self,
        store: StaticStore,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        wants_ticket: bool,
        takes_tickets: bool,
    ) -> KeyValue:
        """`update` of one token in a preallocated cache: no reading of lengths on the host, so that it compiles."""
        graph_ops.append_token(store, key_states, value_states)
        if wants_ticket and takes_tickets:
            return attach(placeholders(store.shaped, self._nan), Ticket(store, self._receipt))
        states = graph_ops.dense_tokens(store)
        # Compiled code cannot put attributes on these; whether tickets are taken was learnt in the prefill.
        offered = wants_ticket and not torch.compiler.is_compiling()
        return attach(states, Ticket(store, self._receipt)) if offered else states

    def _check_room(self, tokens: int) -> None:
        if self.max_cache_len is not None and tokens > self.max_cache_len:
            raise ValueError(
                f"The prompt has {tokens} tokens and `max_cache_len` is {self.max_cache_len}. "
                "Make the cache with a larger `max_cache_len`."
            )

    def _wants_ticket(self) -> bool:
        model_config = None if self._model_config is None else self._model_config()
        if self._model_config is not None and model_config is None:
            logger.warning_once(
                "The config this cache was made from no longer exists, so it is read dequantised. Make the cache from "
                "`model.config`."
            )
        return attention_implementation(model_config) == "turboquant"

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
        check_crop(tokens_to_remove)
        if tokens_to_remove == 0 or self.store is None:
            return
        if isinstance(self.store, StaticStore):
            with self.store.opened() as store:
                store.crop(-tokens_to_remove)
        else:
            self.store.crop(-tokens_to_remove)

    def reset(self) -> None:
        """Forget everything. Memory is released and the next update may have any batch size; a preallocated cache keeps
        its memory and batch size instead, so that compiled graphs stay valid."""
        if isinstance(self.store, StaticStore):
            self.store.reset()
            return
        self.store = None
        self._receipt = Receipt()
        self.is_initialized = False

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.store is not None:
            self.store = self.store.mapped(function)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take sequence `beam_idx[i]` to place i, in place if preallocated."""
        if isinstance(self.store, StaticStore):
            self.store.overwrite(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))
        else:
            super().reorder_cache(beam_idx)

    def offload(self) -> None:
        """Move the store to the CPU."""
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move an offloaded store back to its device."""
        self._map(lambda tensor: tensor.to(self.device, non_blocking=True))
