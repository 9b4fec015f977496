"""Taking tokens back: from all layers of a cache, or from none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from .base import check_crop
from .dense import PreallocatedSlidingLayer


def held_lengths(layers: Sequence[Any]) -> dict[int, int]:
    """Tokens that each layer holds, by its index; layers of linear attention do not count them and are left out.

    An exception inside a forward pass (Ctrl-C, no memory left) leaves the first layers one call ahead of the others.
    """
    return {i: int(layer.get_seq_length()) for i, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)}


def crop(layers: Sequence[Any], tokens_to_remove: int) -> None:
    """Remove the last `-tokens_to_remove` tokens, as counted by the first layer that counts them.

    All layers hold the same tokens afterwards, whatever they held before: as many as the shortest at most.

    Raises:
        ValueError: `tokens_to_remove` is no number or positive, or a layer cannot go back so far. Nothing is changed.
    """
    tokens_to_remove = check_crop(tokens_to_remove)
    lengths = held_lengths(layers)
    held = next(iter(lengths.values()), 0)
    kept = max(0, min([held + tokens_to_remove, *lengths.values()]))
    even = len(set(lengths.values())) <= 1
    removed = [lengths[i] - kept if i in lengths else -tokens_to_remove for i in range(len(layers))]
    for index, layer in enumerate(layers):
        if removed[index] and (reason := _obstacle(layer, removed[index], kept, even)):
            raise ValueError(
                f"`crop` cannot remove {removed[index]} tokens from layer {index}, a {type(layer).__name__}: {reason}. "
                "Call `cache.activate_past_recording()` before tokens that may be removed, or make a new cache."
            )
    for layer, tokens in zip(layers, removed, strict=True):
        # Even of none: a layer that records its past lets go of it here.
        if tokens or getattr(layer, "record_past", False):
            layer.crop(-tokens)


def _obstacle(layer: Any, tokens: int, kept: int, even: bool) -> str | None:
    """Why a layer cannot give back its last `tokens` tokens and keep `kept`; `None` if it can."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        if any(layer.is_recurrent_states_initialized.values()):
            return "a recurrent state cannot go back"
        if not even:
            return "nobody knows how many tokens a layer of linear attention has seen"
        for states, size in zip(layer.conv_states.values(), layer.conv_kernel_size.values(), strict=True):
            if (
                states is not None
                and size is not None
                and (not layer.record_past or states.shape[-1] - tokens < min(size, kept))
            ):
                return "it did not record its past"
    if isinstance(layer, PreallocatedSlidingLayer):
        return "what has left its window is gone" if layer.gone_after_crop(tokens) else None
    window = getattr(layer, "sliding_window", None)
    # Its window is whole afterwards only if what slid out of it is still there.
    if window is not None and layer.keys is not None and layer.keys.shape[-2] - tokens < min(kept, window - 1):
        return "what has left its window is gone"
    return None
