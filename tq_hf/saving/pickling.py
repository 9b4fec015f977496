"""Pickling: an empty cache travels to another process, a filled one is to be saved."""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from ..balance import Balance
from ..layers.compressed import TurboQuantLayer

if TYPE_CHECKING:
    from ..cache import TurboQuantCache


def reduce(cache: TurboQuantCache) -> tuple[Any, ...]:
    """What `__reduce_ex__` answers: how to make an empty cache like this one.

    Raises:
        pickle.PicklingError: The cache has been filled, or the config it was made from is gone.
    """
    if any(map(_is_filled, cache.layers)):
        raise pickle.PicklingError(
            "A TurboQuantCache that has been filled cannot be pickled, only an empty one. Write it to a file with "
            "`cache.save(path, model)`, and read it with `TurboQuantCache.load(path, model)`."
        )
    model_config = cache.model_config()
    if model_config is None:
        raise pickle.PicklingError("The config this cache was made from no longer exists; make a new cache.")
    options: dict[str, Any] = {"preset": cache.config}
    if cache.undecided:
        chosen = {"preset", "key_bits", "value_bits"}
        options = {field.name: getattr(cache.config, field.name) for field in fields(cache.config)}
        options = {name: value for name, value in options.items() if name not in chosen} | {"preset": "auto"}
    given = {
        index: layer.channel_scales.map(torch.Tensor.cpu)  # whoever reads it may have no GPU
        for index, layer in enumerate(cache.layers)
        if isinstance(layer, TurboQuantLayer) and layer.channel_scales is not None
    }
    if given:
        options["balance"] = Balance(given)
    return _make, (type(cache), model_config, options | {"max_cache_len": cache.preallocated_for}, cache.offloading)


def _make(
    kind: type[TurboQuantCache], model_config: PreTrainedConfig, options: dict[str, Any], offloading: bool
) -> TurboQuantCache:
    return kind(model_config, offloading=offloading, **options)


def _is_filled(layer: Any) -> bool:
    states = [getattr(layer, f"is_{kind}_states_initialized", {}) for kind in ("conv", "recurrent")]
    return getattr(layer, "is_initialized", False) or any(any(one.values()) for one in states)
