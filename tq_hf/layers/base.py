"""Common base of the layers: their state in a file, operations on the batch, and the mask sizes of full attention.

A layer of this package adds three methods to transformers' contract:

    state        return the layer's state for a file: a description in JSON, and tensors by name
    check_state  return meta tensors with the shapes and dtypes that a file with this description must have; raise a
                 `ValueError` (a sentence without its subject, "Layer 1") for a description that is impossible here
    load_state   fill an empty layer from a file. A preallocated layer may load the state of a growing one, and vice
                 versa
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from tq_kernels.types import KeyValue
from transformers.cache_utils import CacheLayerMixin

from ..compat import outside_inference_mode
from ..stores.sizes import STEP_TOKENS, check_fits, widened
from ..tensors.layer import RowKind

State = tuple[dict[str, Any], dict[str, torch.Tensor]]
"""State of a layer in a file: a description in JSON, and tensors by name."""


class Probe(NamedTuple):
    """Result of a run of the model on a few tokens, for one layer. A file of `tokens` tokens is checked against it.

    Args:
        layer: The same layer of another cache, after the run.
        states: Keys `[B, Hkv, 0, Dk]` and values `[B, Hkv, 0, Dv]` with the model's dtype and device, B as in the file.
            `None` for a layer of transformers.
    """

    layer: Any
    states: Any
    tokens: int


class Substitute:
    """Object that takes the place of one of transformers' own, which hard-codes its class."""

    @classmethod
    def like(cls, other: Any) -> Any:
        """Make an object with all attributes of `other`."""
        made = cls.__new__(cls)
        vars(made).update(vars(other))
        return made


class Copyable:
    """Object with rows that are written in place: a copy of it, shallow or deep, has rows of its own."""

    def __copy__(self) -> Any:
        return deepcopy(self)

    @outside_inference_mode
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update((name, deepcopy(value, memo)) for name, value in vars(self).items())
        return copied


class BatchedLayer(Copyable, CacheLayerMixin):
    """A layer that changes its batch or device by one function on all its tensors."""

    device: torch.device
    is_croppable = True
    record_past = False
    """Whether steps may have several tokens, which `crop` takes back."""
    num_tokens: int | None = 0
    """Number of tokens, counted on the host; `None` after a compiled step, which counts on the device only."""

    def count_replayed(self, length: int | None) -> None:
        """Set the number of tokens after a CUDA-graph replay, which the host cannot observe."""
        self.num_tokens = length

    def activate_past_recording(self) -> None:
        self.record_past = True

    @outside_inference_mode
    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            self.keys, self.values = function(self.keys), function(self.values)
            self.batch_size = self.keys.shape[0]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Move sequence `beam_idx[i]` to index i."""
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices`, in this order."""
        self._map(lambda tensor: tensor[indices.to(tensor.device)])

    def offload(self) -> None:
        """Move all tensors to the CPU."""
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move offloaded tensors back to their device."""
        self._map(lambda tensor: tensor.to(self.device, non_blocking=True))


class FullAttentionLayer(BatchedLayer):
    """A full-attention layer, compressed or not, with the mask size that all of them share.

    transformers makes one mask for all full-attention layers, of the size that the first one returns: all must return
    the same. A preallocated layer returns its empty rows, too, to a decode step: a call of one token or, after
    `activate_past_recording` (assisted decoding), of up to 16. Other calls get rows of tokens only.
    """

    returns_empty_rows = False
    """Whether every call gets `max_cache_len` rows, as from transformers' preallocated layers. True beside layers of
    transformers that always return them, and for models that make their own masks of this size (Bloom)."""

    def count_tokens(self) -> int:
        """Number of tokens. Waits for the device only after steps that the host could not count."""
        return int(self.get_seq_length()) if self.num_tokens is None else self.num_tokens

    def takes_step(self, tokens: int) -> bool:
        """Whether a call of this number of tokens is a decode step, if the layer is preallocated."""
        is_held = (torch.compiler.is_dynamo_compiling() and self.is_initialized) or self.num_tokens != 0
        return tokens == 1 or (self.record_past and is_held and 1 < tokens <= STEP_TOKENS)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask for `query_length` new tokens covers."""
        room = self.get_max_length()
        if room != -1 and (self.returns_empty_rows or self.takes_step(query_length)):
            return room, 0
        return int(self.get_seq_length()) + query_length, 0


def replaced(value: Any, kind: type, function: Callable[[Any], torch.Tensor]) -> Any:
    """Replace tensors of a class, nested or not, by results of `function` in an argument of an operation."""
    if isinstance(value, kind):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(replaced(item, kind, function) for item in value)
    if type(value) is dict:
        return {name: replaced(item, kind, function) for name, item in value.items()}
    return value


def rows_like(states: KeyValue, rows: int, prefix: str = "") -> dict[str, torch.Tensor]:
    """Meta tensors with the shapes of `rows` saved keys and values, for `states` `[B, Hkv, *, D]` of a layer."""
    shapes = ((*part.shape[:2], rows, part.shape[3]) for part in states)
    keys, values = (part.new_empty(shape, device="meta") for part, shape in zip(states, shapes, strict=True))
    return {f"{prefix}keys": keys, f"{prefix}values": values}


def like_held(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> KeyValue:
    """Cast keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]` to the dtype of a layer that is not compressed (see
    `widened`). Raise `ValueError` if the layer has states of another batch, shape, dtype or device."""
    if not layer.is_initialized or layer.keys.dim() != 4:  # transformers begins with empty tensors `[0]`
        return widened(keys, values, keys.dtype)
    keys, values = widened(keys, values, layer.keys.dtype)
    key_row, value_row = ((*states.shape[:2], 1, *states.shape[3:]) for states in (layer.keys, layer.values))
    check_fits(keys, values, RowKind(key_row, value_row, layer.keys.dtype, layer.device))  # keys may be offloaded
    return keys, values


def check_crop(tokens_to_remove: int | torch.Tensor) -> int:
    """Convert `tokens_to_remove` to an `int`; assisted decoding passes a tensor of one number. Raise `ValueError`
    unless it is a whole number, 0 or less (older versions of transformers passed the length to keep)."""
    try:
        if (tokens := operator.index(tokens_to_remove)) <= 0:
            return tokens
    except TypeError:
        pass
    came = f"`crop` was called with {tokens_to_remove!r}"
    raise ValueError(f"{came}. Pass the number of tokens to remove as a negative number, e.g. -1.")
