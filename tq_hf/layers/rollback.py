"""Taking tokens back: from all layers of a cache, or from none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from .base import check_crop


def held_lengths(layers: Sequence[Any]) -> dict[int, int]:
    """Tokens that each layer holds, by its index; layers of linear attention do not count them and are left out.

    Layers may hold different numbers: eviction keeps more of some (PyramidKV), and an exception inside a forward pass
    (Ctrl-C, no memory left) leaves the first layers one call ahead of the others.
    """
    return {i: int(layer.get_seq_length()) for i, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)}


def tokens_ahead(layers: Sequence[Any], lengths: dict[int, int], last: tuple[int, int] | None) -> dict[int, int]:
    """Tokens by which the first layers are ahead of the others, by index: those of a call that an exception ended.

    Args:
        layers: The layers.
        lengths: What `held_lengths` says of them.
        last: Index of the layer that was updated last and the number of tokens, or `None` if all that is held is even.
            A call that ended updated the last layer last.
    """
    end, tokens = last or (len(layers), 0)
    if end < max(lengths, default=0):
        return {i: tokens for i in lengths if i <= end}
    # A compiled step notes nothing before its end.
    least = min(lengths.values(), default=0)
    first = [i for i, length in lengths.items() if length == least + 1]
    rest = [i for i, length in lengths.items() if length == least]
    is_prefix = len(first) + len(rest) == len(lengths) and max(first, default=0) < min(rest, default=0)
    return dict.fromkeys(first, 1) if is_prefix and all(layer.is_compileable for layer in layers) else {}


def crop(layers: Sequence[Any], tokens_to_remove: int, last: tuple[int, int] | None = None) -> None:
    """Remove the last `-tokens_to_remove` tokens of each layer, at most all; of a call that an exception ended at least
    those that it left (see `tokens_ahead`), and of the other layers as many less.

    Raises:
        ValueError: `tokens_to_remove` is no number or positive, or a layer cannot go back so far. Nothing is changed.
    """
    tokens = -check_crop(tokens_to_remove)
    lengths = held_lengths(layers)
    ahead = tokens_ahead(layers, lengths, last)
    left = max(ahead.values(), default=0)
    # Those that are behind never took the newest `left` tokens.
    removed = [tokens] * len(layers)
    for i, length in lengths.items():
        removed[i] = min(length, max(tokens, left) if i in ahead else max(0, tokens - left))
    first = next(iter(lengths), 0)
    for index, layer in enumerate(layers):
        counted = index if index in lengths else first
        length = lengths.get(counted, 0) - removed[counted]
        if removed[index] and (reason := _obstacle(layer, removed[index], length, not left)):
            raise ValueError(
                f"`crop` cannot remove {removed[index]} tokens from layer {index}, a {type(layer).__name__}: {reason}. "
                "Call `cache.activate_past_recording()` before tokens that may be removed, or make a new cache."
            )
    for layer, number in zip(layers, removed, strict=True):
        # Even of none: a layer that records its past lets go of it here.
        if number or getattr(layer, "record_past", False):
            layer.crop(-number)


def _obstacle(layer: Any, tokens: int, length: int, even: bool) -> str | None:
    """Why a layer cannot give back its last `tokens` tokens and keep `length`; `None` if it can."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        if any(layer.is_recurrent_states_initialized.values()):
            return "a recurrent state cannot go back"
        if not even:
            return "nobody knows how many tokens a layer of linear attention has seen"
        for states, size in zip(layer.conv_states.values(), layer.conv_kernel_size.values(), strict=True):
            if (
                states is not None
                and size is not None
                and (not layer.record_past or states.shape[-1] - tokens < min(size, length))
            ):
                return "it did not record its past"
    if hasattr(layer, "gone_after_crop"):
        return "what has left its window is gone" if layer.gone_after_crop(tokens) else None
    window = getattr(layer, "sliding_window", None)
    # Its window is whole afterwards only if what slid out of it is still there.
    if window is not None and layer.keys is not None and layer.keys.shape[-2] - tokens < min(length, window - 1):
        return "what has left its window is gone"
    return None
