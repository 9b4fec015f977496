"""What layers say of themselves, and what full-attention layers of this package do alike, compressed or not.

A layer of this package answers for itself, beside transformers' contract:

    state        what a file holds of it: a description in JSON, and tensors by name
    check_state  the tensors that a file must have by its description, on the meta device; raises a `ValueError` (a
                 sentence without its subject, "Layer 1") for a description that no cache of this model has
    load_state   puts the tensors of a file into an empty layer; the saved one may have grown where this is preallocated
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tq_kernels.types import KeyValue
from transformers.cache_utils import CacheLayerMixin

from ..compat import outside_inference_mode
from ..stores.base import check_same, widened

State = tuple[dict[str, Any], dict[str, torch.Tensor]]
"""What a file holds of a layer: a description in JSON, and tensors by name."""


class Probe(NamedTuple):
    """What a run of the model on a few tokens showed of a layer, against which a file is checked.

    Args:
        layer: This layer of another cache, after the run.
        states: Keys `[B, Hkv, 0, Dk]` and values `[B, Hkv, 0, Dv]` as the model makes them, B as in the file. `None` of
            a layer of transformers.
        tokens: Tokens that the file holds.
    """

    layer: Any
    states: Any
    tokens: int


class BatchedLayer(CacheLayerMixin):
    """Operations on all tensors of a layer."""

    @outside_inference_mode
    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put the results of `function` in place of all tensors."""
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            self.keys, self.values = function(self.keys), function(self.values)
            self.batch_size = self.keys.shape[0]

    def count_replayed(self, length: int) -> None:
        """Whoever replays a captured step says how many tokens there are after it: the host could not count them."""
        raise NotImplementedError

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take sequence `beam_idx[i]` to place i."""
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices`, in that order."""
        self._map(lambda tensor: tensor[indices.to(tensor.device)])


class FullAttentionLayer(BatchedLayer):
    """What a mask covers.

    transformers makes one mask for all full-attention layers, of the size that the first of them asks for: they must
    agree on it. These show a call of several tokens the tokens there are, and empty room to a single token only.
    """

    is_croppable = True
    shows_room = False
    """Whether every call is shown all there is room for, as transformers' preallocated layers do: beside layers of
    theirs that cannot do otherwise, and to models that make masks of their own of that size (Bloom)."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys a mask for `query_length` new tokens covers."""
        room = self.get_max_length()
        if room != -1 and (query_length == 1 or self.shows_room):
            return room, 0
        return int(self.get_seq_length()) + query_length, 0


def rows_like(states: KeyValue, rows: int, prefix: str = "") -> dict[str, torch.Tensor]:
    """Keys and values of so many tokens as a file has them, beside states `[B, Hkv, *, D]`: tensors without memory."""
    shapes = ((*part.shape[:2], rows, part.shape[3]) for part in states)
    keys, values = (part.new_empty(shape, device="meta") for part, shape in zip(states, shapes, strict=True))
    return {f"{prefix}keys": keys, f"{prefix}values": values}


def like_held(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> KeyValue:
    """Keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]` as a layer that is not compressed takes them: see
    `widened`.

    Raises:
        ValueError: The layer has states of another dtype or on another device.
    """
    keys, values = widened(keys, values, layer.keys.dtype if layer.is_initialized else keys.dtype)
    if layer.is_initialized:
        check_same("dtype", layer.keys.dtype, keys.dtype)
        check_same("device", layer.device, keys.device)
    return keys, values


def check_crop(tokens_to_remove: int | torch.Tensor) -> int:
    """`tokens_to_remove` as an `int`; assisted decoding passes a tensor of one number.

    Raises:
        ValueError: It is no whole number, or positive (in older versions of transformers the length to keep).
    """
    try:
        tokens = operator.index(tokens_to_remove)
    except TypeError:
        raise ValueError(
            f"`crop` was called with {tokens_to_remove!r}. Pass a negative number of tokens, e.g. -1."
        ) from None
    if tokens > 0:
        raise ValueError(
            f"`crop` was called with {tokens}. Pass the number of tokens to remove as a negative number, e.g. -1."
        )
    return tokens
