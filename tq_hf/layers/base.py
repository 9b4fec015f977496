"""What full-attention layers of this package do alike, compressed or not."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin

from ..config import TurboQuantConfig
from ..stores.base import check_same, widened
from ..tensors.blocks import KeyValue


class FileSizes(NamedTuple):
    """What a file says of a whole cache.

    Args:
        config: What it was compressed with.
        batch: Sequences.
        tokens: Tokens of each.
        saved_room: `max_cache_len` of the cache that was saved, or `None`.
        room: That of the cache that is made.
    """

    config: TurboQuantConfig
    batch: int
    tokens: int
    saved_room: int | None
    room: int | None


class TensorSize(NamedTuple):
    """What a tensor of a file must be: of a dtype, and in no dimension less than `least` or more than `most`."""

    dtype: torch.dtype
    least: list[int]
    most: list[int]

    def fits(self, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        """Whether a tensor is that."""
        within = all(a <= n <= b for a, n, b in zip(self.least, shape, self.most, strict=False))
        return dtype == self.dtype and len(shape) == len(self.least) and within


class FullAttentionLayer(CacheLayerMixin):
    """Operations on all tensors of a layer, and what a mask covers.

    transformers makes one mask for all full-attention layers, of the size that the first of them asks for: they must
    agree on it. These show a call of several tokens what is held, and room that is empty to a single token only.
    """

    is_croppable = True
    shows_room = False
    """Whether every call is shown all there is room for, as transformers' preallocated layers do: beside layers of
    theirs that cannot do otherwise, and to models that make masks of their own of that size (Bloom)."""

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put the results of `function` in place of all tensors."""
        raise NotImplementedError

    def count_replayed(self, length: int) -> None:
        """Whoever replays a captured step says how many tokens are held after it: the host could not count them."""
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys a mask for `query_length` new tokens covers."""
        room = self.get_max_length()
        if room != -1 and (query_length == 1 or self.shows_room):
            return room, 0
        return int(self.get_seq_length()) + query_length, 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take sequence `beam_idx[i]` to place i."""
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices`, in that order."""
        self._map(lambda tensor: tensor[indices.to(tensor.device)])


def like_held(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> KeyValue:
    """Keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]` as a layer that is not compressed takes them: see
    `widened`.

    Raises:
        ValueError: The layer holds states of another dtype or on another device.
    """
    keys, values = widened(keys, values, layer.dtype if layer.is_initialized else keys.dtype)
    if layer.is_initialized:
        check_same("dtype", layer.dtype, keys.dtype)
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
