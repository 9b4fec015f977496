"""Removal of the newest tokens: from all layers of a cache, or from none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tq_kernels.format import BLOCK_TOKENS
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin, StaticLayer

from ..compat import foreach
from .base import check_crop
from .compressed import compressed


def held_lengths(layers: Sequence[Any]) -> dict[int, int]:
    """Number of tokens by layer index, without layers of linear attention, which do not count tokens. The numbers may
    differ: eviction keeps more tokens in some layers (PyramidKV), and see `tokens_ahead`."""
    return {i: int(layer.get_seq_length()) for i, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)}


def tokens_ahead(
    layers: Sequence[Any], lengths: dict[int, int], last: tuple[int, int] | None, is_asked: bool = False
) -> dict[int, int]:
    """Number of tokens of a call that an exception ended, by index of the first layers, which have them.

    Args:
        layers: The layers.
        lengths: Their `held_lengths`.
        last: Index of the layer updated last, and its number of new tokens; `None` after a crop. A call without an
            exception updates the last layer that holds tokens last, or in a loop over layers (Dory) leaves no layer
            behind.
        is_asked: Whether the caller asks to take back what an exception left. Only then is a first call, behind which
            all layers are empty, taken for interrupted: the model may have no attention in these layers.
    """
    end, tokens = last or (len(layers), 0)
    behind = [length for i, length in lengths.items() if i > end]
    is_first = is_asked and all(length == tokens for i, length in lengths.items() if i <= end)
    if (any(behind) or (behind and is_first)) and len(set(lengths.values())) > 1:
        return {i: tokens for i in lengths if i <= end}
    # An interrupted compiled step does not record `last`: look for first layers with one token more.
    least = min(lengths.values(), default=0)
    first = [i for i, length in lengths.items() if length == least + 1]
    rest = [i for i, length in lengths.items() if length == least]
    is_prefix = least > 0 and len(first) + len(rest) == len(lengths) and max(first, default=0) < min(rest, default=0)
    return dict.fromkeys(first, 1) if is_prefix and all(layer.is_compileable for layer in layers) else {}


def check_complete(layers: Sequence[Any], last: tuple[int, int] | None) -> None:
    """Raise a `ValueError` if an exception ended a call after layers of linear attention had read its tokens: the layer
    updated last (see `tokens_ahead`) is not the last layer."""
    linear = [i for i, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin)]
    end = max((*linear, *held_lengths(layers)), default=0)
    if last and linear and linear[0] <= last[0] < end:
        raise ValueError(
            "An exception (Ctrl-C, no memory left) ended a forward pass after layers of linear attention had read its "
            "tokens, which they cannot forget. Make a new cache, and pass the whole prompt again."
        )


def crop(layers: Sequence[Any], tokens_to_remove: int, last: tuple[int, int] | None = None) -> int | None:
    """`TurboQuantCache.crop`. Returns the index from which on no layer held tokens; `None` if none holds any now."""
    tokens = -check_crop(tokens_to_remove)
    lengths = held_lengths(layers)
    records = any(getattr(layer, "record_past", False) for layer in layers)  # assisted decoding crops 0 tokens, too
    ahead = tokens_ahead(layers, lengths, last, is_asked=tokens == 0 and not records)
    left = max(ahead.values(), default=0)
    # Layers that are not ahead do not have the newest `left` tokens.
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
        # Also called for 0 tokens: a layer that records its past frees the record here.
        if number or getattr(layer, "record_past", False):
            layer.crop(-number)
    filled = [i for i, length in lengths.items() if length]
    return filled[-1] + 1 if any(lengths[i] > removed[i] for i in filled) else None


def _obstacle(layer: Any, tokens: int, length: int, even: bool) -> str | None:
    """Reason why a layer cannot remove its last `tokens` tokens and keep `length`; `None` if it can. `even`: whether no
    layer is ahead of the others."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        if any(layer.is_recurrent_states_initialized.values()):
            return "a recurrent state cannot forget tokens"
        if isinstance(layer, StaticLayer):
            return "transformers would remove its convolution states, but none of its keys"
        if not even:
            return "after an exception the number of tokens in a layer of linear attention is unknown"
        for states, size in zip(layer.conv_states.values(), layer.conv_kernel_size.values(), strict=True):
            if (
                states is not None
                and size is not None
                and (not layer.record_past or states.shape[-1] - tokens < min(size, length))
            ):
                return "the layer did not record its past"
    if hasattr(layer, "gone_after_crop"):
        return "tokens that left its window were not kept" if layer.gone_after_crop(tokens) else None
    window = getattr(layer, "sliding_window", None)
    # The window is complete after the crop only if tokens that left it were recorded.
    if window is not None and layer.keys is not None and layer.keys.shape[-2] - tokens < min(length, window - 1):
        return "tokens that left its window were not kept"
    return None


def take_back(layers: Sequence[Any], tokens: torch.Tensor) -> None:
    """Remove the newest `tokens` (`[]` or `[1]` integer on the device) of filled preallocated layers, with open rings,
    by their counts on the device, which the host does not wait for. Exact for tokens of the last step."""
    tokens, packed = tokens.reshape(()), compressed(layers)
    stores: list[Any] = [layer.store for layer in packed.values()]
    counts = [store.device_counts.held for store in stores]
    sinks, _, rows, pending = ([held[i, :1] for held in counts] for i in range(4))
    lengths = [store.device_counts.length for store in stores]
    lengths += [layer.cumulative_length for index, layer in enumerate(layers) if index not in packed]
    for layer in layers:
        layer.count_replayed(None)
    foreach.add_(lengths, tokens, alpha=-1)
    if not counts:
        return
    foreach.add_(rows, tokens.int(), alpha=-1)
    # Tokens that are not in the residual are sinks.
    foreach.add_(sinks, foreach.clamp_max(rows, 0))
    foreach.clamp_min_(rows, 0)
    # A block that became due is kept if the rows that are left still make it due.
    due = foreach.sub(rows, [store.config.residual_length + BLOCK_TOKENS - 1 for store in stores])
    foreach.clamp_min_(due, 0)
    foreach.minimum_(pending, due)
