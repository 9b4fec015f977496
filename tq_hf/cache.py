"""`TurboQuantCache`: a transformers cache whose full-attention layers are held compressed."""

from __future__ import annotations

import os
import weakref
from copy import copy, deepcopy
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer
from transformers.utils import logging

from .auto import AutoChoice
from .config import TurboQuantConfig
from .inference_mode import outside_inference_mode
from .layers.base import check_crop
from .layers.compressed import TurboQuantLayer
from .layers.sliding import SlidingLayer
from .layers.uncompressed import PreallocatedLayer
from .memory import MemoryFootprint, measure
from .saving.cache_file import load_cache, save_cache
from .stores.checks import check_states

logger = logging.get_logger(__name__)


class TurboQuantCache(Cache):
    """A key/value cache in about a quarter of the memory, for any decoder of transformers.

    Every full-attention layer is compressed. Layers of another kind (sliding windows, linear attention, shared keys)
    and those in `skip_layers` get the class `DynamicCache` or `StaticCache` would give them, but that sliding-window
    layers do not hold on to the prompt, and preallocated full-attention layers go with compressed ones.

    ```python
    cache = TurboQuantCache(model.config)
    model.generate(**inputs, past_key_values=cache)
    ```

    Args:
        model_config: The model's config (`model.config`); of a multimodal model, its text decoder is used.
        preset: Name of a preset (see `tq_hf.PRESETS`), or a `TurboQuantConfig`. "auto" chooses between "4bit_nc" and
            "k8v4", at last when it sees the first keys, and logs what and why (see `tq_hf.auto`).
        model: The model, for "auto" to look at its weights too (of a sharded one, on all processes at once).
        max_cache_len: Tokens to preallocate for. The cache then never grows, and refuses to exceed it.
        offloading: Keep layers on the CPU while they are not in use (as in `DynamicCache`).
        **overrides: Options of `TurboQuantConfig` that replace the preset's.

    Raises:
        ValueError: The preset or an option does not exist or is outside its range, the config has no attention heads,
            or `model` is not a model.
    """

    def __init__(
        self,
        model_config: PreTrainedConfig,
        preset: str | TurboQuantConfig = "4bit_nc",
        *,
        model: torch.nn.Module | None = None,
        max_cache_len: int | None = None,
        offloading: bool = False,
        **overrides: Any,
    ) -> None:
        if not isinstance(model_config, PreTrainedConfig):
            came = type(model_config).__name__
            raise ValueError(f"`model_config` must be a transformers config (pass `model.config`), not {came}.")
        if model is not None and not isinstance(model, torch.nn.Module):
            raise ValueError(f"`model` must be the model itself, or left out, not {type(model).__name__}.")
        if max_cache_len is not None and max_cache_len < 1:
            raise ValueError(f"`max_cache_len` is {max_cache_len}; it must be a number of tokens, 1 or more, or None.")
        self._choice: AutoChoice | None = None
        if isinstance(preset, TurboQuantConfig):
            if overrides:
                raise ValueError(
                    f"Got a TurboQuantConfig and also {', '.join(sorted(overrides))}. Put the options into the config "
                    "(`dataclasses.replace`), or pass a preset's name."
                )
            self.config = preset
        else:
            self.config = TurboQuantConfig.from_preset("4bit_nc" if preset == "auto" else preset, **overrides)
        decoder_config = model_config.get_text_config(decoder=True)
        if not getattr(decoder_config, "num_attention_heads", None):
            raise ValueError(
                f"{type(decoder_config).__name__} has no attention heads (`num_attention_heads`), so there are no keys "
                "and values to compress. Let the model make its own cache: leave out `past_key_values`."
            )
        if preset == "auto":
            self._choice = AutoChoice(decoder_config, model, self.config)
            self.config = self._choice.config
        # The layers transformers would make, of which the full-attention ones are replaced.
        if max_cache_len is None:
            layers = DynamicCache(config=model_config).layers
        else:
            layers = StaticCache(model_config, max_cache_len).layers
        # By it `save` finds the model; an encoder-decoder's decoder config is made on the fly.
        watched = model_config if getattr(model_config, "is_encoder_decoder", False) else decoder_config
        self._model_config = weakref.ref(watched)
        shared = _read_by_others(decoder_config)
        skipped = _skipped(self.config.skip_layers, len(layers))
        for index, layer in enumerate(layers):
            if type(layer) in (DynamicLayer, StaticLayer) and index not in skipped:
                layers[index] = TurboQuantLayer(self.config, max_cache_len, index in shared)
            elif type(layer) is StaticLayer:
                layers[index] = PreallocatedLayer(layer.max_cache_len)
            elif type(layer) is DynamicSlidingWindowLayer:
                layers[index] = SlidingLayer(layer.sliding_window)
        if not any(isinstance(layer, TurboQuantLayer) for layer in layers):
            logger.warning(
                f"No layer of this {type(decoder_config).__name__} is compressed: none is full attention and outside "
                "`skip_layers`."
            )
        super().__init__(layers=layers, offloading=offloading, offload_only_non_sliding=False)

    @outside_inference_mode
    def __deepcopy__(self, memo: dict[int, Any]) -> TurboQuantCache:
        copied = copy(self)
        memo[id(self)] = copied
        vars(copied).update((name, deepcopy(value, memo)) for name, value in vars(self).items())
        return copied

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]` of a layer; return what attention is given.

        Raises:
            ValueError: The states do not fit the cache. It is unchanged then.
        """
        if self._choice is not None:
            self._choose(self._choice, key_states, value_states, layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens.

        Raises:
            ValueError: A layer cannot be cropped, or `tokens_to_remove` is positive. Nothing is changed then.
        """
        # Here too: layers of older transformers take a positive number for the length to keep.
        check_crop(tokens_to_remove)
        self._require("crop")
        super().crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times.

        Raises:
            ValueError: A layer cannot do that. Nothing is changed then.
        """
        self._require("batch_repeat_interleave")
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices`, in that order.

        Raises:
            ValueError: A layer cannot do that. Nothing is changed then.
        """
        self._require("batch_select_indices")
        super().batch_select_indices(indices)

    def _require(self, operation: str) -> None:
        """Raise a `ValueError` unless every layer has this method: transformers' preallocated ones lack some."""
        for index, layer in enumerate(self.layers):
            if not hasattr(layer, operation):
                raise ValueError(
                    f"`{operation}` needs every layer to take part, but layer {index} is transformers' "
                    f"{type(layer).__name__}, which has no such method. Make the cache without `max_cache_len`."
                )

    def _choose(self, choice: AutoChoice, keys: torch.Tensor, values: torch.Tensor, index: int) -> None:
        """Let "auto" see what a layer caches. What it chooses holds for all layers; it is done once it saw them all."""
        compressed = {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, TurboQuantLayer)}
        if index not in compressed:
            return
        check_states(keys, values)
        if index not in choice.layers_seen:
            choice.see(index, keys, free=all(layer.store is None for layer in compressed.values()))
            for layer in compressed.values():
                layer.config = self.config = choice.config
        if choice.layers_seen == compressed.keys():
            self._choice = None

    def memory_footprint(self) -> MemoryFootprint:
        """Bytes this cache holds now, by kind and device, and what a 16-bit cache of the same tokens would hold."""
        return measure(self.layers)

    def save(self, path: str | os.PathLike[str], model: Any = None) -> None:
        """Write this cache to a safetensors file, so that a prompt processed once can be reused after a restart.

        The old file stays until the new one is complete. Token ids are not kept: `generate()` wants them again.

        Args:
            path: The file, by convention `*.safetensors`.
            model: The model that filled this cache. By default it is looked for among the models of this process, by
                the config the cache was made from.

        Raises:
            ValueError: The cache is empty, its model cannot be found, or `path` is not a place for a file.
            FileNotFoundError: The folder does not exist.
        """
        save_cache(self, path, model)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: Any, preset: str | TurboQuantConfig | None = None
    ) -> TurboQuantCache:
        """A cache from a file that `save` wrote: the same bits, each layer on the device where `model` runs it.

        Args:
            path: The file. It may come from anywhere: nothing in it is executed or believed unchecked.
            model: The model the cache was made with, in the same dtype. It is run on a few tokens, to learn what it
                caches.
            preset: What the cache must have been compressed with, or `None` to take what the file says.

        Raises:
            ValueError: The file is damaged, is not one of a cache, or belongs to another model or `preset`.
            FileNotFoundError: There is no such file.
        """
        return load_cache(cls, path, model, preset)[0]


def _skipped(skip_layers: tuple[int, ...], num_layers: int) -> set[int]:
    """`skip_layers` as non-negative indices."""
    for index in skip_layers:
        if not -num_layers <= index < num_layers:
            raise ValueError(
                f"`skip_layers` names layer {index}, but the model has {num_layers} layers; "
                f"use {-num_layers} to {num_layers - 1}."
            )
    return {index % num_layers for index in skip_layers}


def _read_by_others(config: PreTrainedConfig) -> set[int]:
    """Layers whose keys and values later layers read (Gemma 3n, Gemma 4): before the last `num_kv_shared_layers`, the
    last of each type."""
    sharing = getattr(config, "num_kv_shared_layers", None) or 0
    layer_types = getattr(config, "layer_types", None) or []
    return set({kind: index for index, kind in enumerate(layer_types[:-sharing])}.values()) if sharing else set()
