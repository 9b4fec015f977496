"""One compressed layer of a cache: transformers' layer contract around a `LayerStore`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..compat import attention_implementation
from ..config import TurboQuantConfig
from ..inference_mode import outside_inference_mode
from ..ops import dispatch
from ..stores.base import LayerStore
from ..stores.checks import check_room, check_states
from ..stores.growing import GrowingStore
from ..stores.preallocated import PreallocatedStore
from ..stores.ticket import Receipt, Ticket, attach, step_placeholders
from .base import FullAttentionLayer, check_crop


class TurboQuantLayer(FullAttentionLayer):
    """A full-attention layer whose keys and values are held compressed.

    What `update` returns depends on who will read it. The attention function "turboquant" reads the packed store, by a
    ticket on the keys (see `tq_hf.stores.ticket`). Any other attention reads dequantised states; so does a model whose
    keys never reach the attention function as they left `update` (MLA latents, models without an attention interface).
    The layer finds out by itself: `update` returns real states with a ticket attached, and only after the attention
    function of a model has taken one, and while that model still uses it, placeholders.

    Args:
        config: What to compress to.
        max_cache_len: Tokens to preallocate for and never exceed, or `None`.
        read_by_others: Whether other layers of the model read these keys too. They may be on another device, where
            tickets do not get: they are given real states always.
    """

    is_sliding = False
    supports_early_init = True

    def __init__(
        self,
        config: TurboQuantConfig,
        max_cache_len: int | None = None,
        read_by_others: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self.max_cache_len = max_cache_len
        self.read_by_others = read_by_others
        # An attribute of the layer, not of the class: transformers compiles decoding if all layers have it.
        self.is_compileable = max_cache_len is not None
        self.store: LayerStore | None = None
        self._receipt = Receipt()

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
        if self.max_cache_len is None:
            self.store = GrowingStore.allocate(self.config, key_states, value_states)
        else:
            self.store = PreallocatedStore.allocate(self.config, key_states, value_states, self.max_cache_len)
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
        view = self.store.append(key_states, value_states)
        receipt, compiling = self._receipt, torch.compiler.is_compiling()
        reads_store = receipt.reader is not None and attention_implementation(receipt.reader()) == "turboquant"
        if not compiling:  # compiled steps go on as the prefill before them did
            self._receipt = Receipt()
        if view.is_first:
            # An alias of the keys: with the ticket on the very tensor its view holds, they would keep each other alive.
            states = (key_states.view_as(key_states), value_states)
        elif reads_store and not self.read_by_others:
            states = step_placeholders(view.tensors.row, view.length, self._nan)
        else:
            states = self.store.dense(view)
            if compiling:  # compiled code cannot put attributes on what operators return
                return states
        return attach(states, Ticket(view, self._receipt))

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
        self.store.crop(-tokens_to_remove)

    def forget_host_count(self) -> None:
        """See `FullAttentionLayer.forget_host_count`."""
        if isinstance(self.store, PreallocatedStore):
            self.store.num_held = None

    def reset(self) -> None:
        """Forget everything. Memory is released and the next update may have any batch size; a preallocated cache keeps
        its memory and batch size instead, so that compiled graphs stay valid."""
        if self.store is not None:
            self.store = self.store.reset()
        self.is_initialized = self.store is not None
        self._receipt = Receipt()

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.store is not None:
            self.store = self.store.map(function)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take sequence `beam_idx[i]` to place i, in place if preallocated."""
        if self.store is not None:
            self.store = self.store.reorder(beam_idx)

    def offload(self) -> None:
        """Move the store to the CPU."""
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move an offloaded store back to its device."""
        self._map(lambda tensor: tensor.to(self.device, non_blocking=True))
