"""`TurboQuantCache`: a transformers cache whose full-attention layers are held compressed."""

from __future__ import annotations

import os
import pickle
import weakref
from copy import deepcopy
from functools import partial
from types import NoneType
from typing import Any, Literal

import torch
from transformers import DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.utils import logging

from .balance import Balance
from .compat import (
    asked_by_prefill,
    has_attention_heads,
    is_capturing,
    outside_inference_mode,
    takes_attention_functions,
)
from .config import TurboQuantConfig, config_of
from .layers.advice import warn_beyond_fp16
from .layers.base import FullAttentionLayer, like_held
from .layers.compressed import TurboQuantLayer
from .layers.dense import GrowingLayer, PreallocatedLayer, PreallocatedSlidingLayer, SlidingLayer
from .layers.handle import for_graphs
from .layers.rollback import crop, held_lengths
from .memory import MemoryFootprint, measure
from .ops.dispatch import check_choice
from .saving.cache_file import load_cache, save_cache

logger = logging.get_logger(__name__)


class TurboQuantCache(DynamicCache):
    """KV cache that stores full-attention layers in 2 to 4 bits (keys also in FP8). A drop-in for `generate()`.

    ```python
    cache = TurboQuantCache(model.config)                       # grows
    cache = TurboQuantCache(model.config, max_cache_len=32768)  # fixed size; decoding compiles
    model.generate(**inputs, past_key_values=cache)
    ```

    The first `sink_tokens` tokens and the newest `residual_length` stay exact; older ones are packed in blocks of 128.
    Sliding-window (only their window is held), linear and skipped layers are not compressed. Load the model with
    `attn_implementation="turboquant"` to read packed blocks directly; other attention functions get dequantized states.
    Use one cache per batch.

    Args:
        model_config: The model's config (`model.config`). Of a multimodal model the text decoder is used.
        preset: Name of a preset (see `tq_hf.PRESETS`), also as vLLM writes it, or a `TurboQuantConfig`.
        model: The model, for `save` only. Held weakly.
        max_cache_len: Fixed capacity in tokens. Exceeding it raises a `ValueError`. `None` grows.
        offloading: Keep layers on the CPU while they are not in use, as `DynamicCache` does.
        balance: Per-channel scales: `True` (of a first prompt of 32 tokens or more), `False`, a `Balance`, or a filled
            cache of the same model. `None` does as the preset says.
        **overrides: Fields of `TurboQuantConfig` that replace the preset's, e.g. `layers={0: "k8v4", -1: None}`.

    Raises:
        ValueError: The preset or an option does not exist or is outside its range, an argument has the wrong type, or
            the config has no attention heads.
    """

    def __init__(
        self,
        model_config: PreTrainedConfig = None,  # type: ignore[assignment]
        preset: str | TurboQuantConfig = "4bit_nc",
        *,
        model: torch.nn.Module | None = None,
        max_cache_len: int | None = None,
        offloading: bool = False,
        balance: bool | Balance | TurboQuantCache | None = None,
        **overrides: Any,
    ) -> None:
        if model_config is None and "config" in overrides:
            raise ValueError(
                "A TurboQuantCache was asked for by `config=`. `generate` of T5Gemma does so in place of the cache "
                "that it got for cross-attention, and would lose its preset and options. Pass `EncoderDecoderCache("
                "TurboQuantCache(model.config), DynamicCache(config=model.config))`."
            )
        _check_arguments(model_config, model, max_cache_len, offloading)
        if isinstance(balance, TurboQuantCache):
            balance = Balance.from_cache(balance.layers)
        if not isinstance(balance, (bool, Balance, NoneType)):
            raise ValueError(
                f"`balance` is {balance!r}; it must be True or False, a `Balance`, or a cache of this model."
            )
        if isinstance(balance, bool):
            overrides["balance"] = balance
        self.config = config_of(preset, overrides)
        self.last_update: tuple[int, int] | None = None
        """Index of the layer that was updated last, and the number of tokens."""
        self.model_config = weakref.ref(model_config)
        self._model = None if model is None else weakref.ref(model)
        # Not named `max_cache_len`: PEFT takes a cache that has one for one it may replace.
        self.preallocated_for = max_cache_len
        self._deferred: TurboQuantLayer | None = None
        self._unchecked: set[int] | None = set()
        """Compressed layers that hold the first prompt; `None` once they were checked for states beyond fp16."""
        self._updated: tuple[int, int] | None = None
        """The layer updated last in a call of an encoder-decoder, and its new tokens; `None` where no call is known."""
        self._is_encoder_decoder = getattr(model_config, "is_encoder_decoder", False) or getattr(
            model_config.get_text_config(decoder=True), "add_cross_attention", False
        )
        layers = _layers(model_config, self.config, max_cache_len)
        if isinstance(balance, Balance):
            if not self.config.balance:
                raise ValueError("Channel scales are given, and the preset has `balance=False`: leave out either.")
            balance.set_scales(layers)
        # A DynamicCache by class, because only such are cropped, selected and repeated in an EncoderDecoderCache.
        Cache.__init__(self, layers=layers, offloading=offloading, offload_only_non_sliding=False)

    def __repr__(self) -> str:
        held = self.memory_footprint()
        bits = f"key_bits={self.config.key_bits}, value_bits={self.config.value_bits}"
        tokens = next(iter(held_lengths(self.layers).values()), 0)
        room = "" if self.preallocated_for is None else f" of {self.preallocated_for:,}"
        others = f"other presets in {len(self.config.layers)} of " if self.config.layers else ""
        size = f"{held.total / 2**20:.2f} MiB, {held.ratio:.1%} of 16 bits" if tokens else "empty"
        return (
            f"TurboQuantCache({self.config.preset or bits}, {others}{len(self.layers)} layers, {tokens:,}{room} "
            f"tokens, {size})"
        )

    @property
    def max_cache_len(self) -> int:
        """Not an attribute of this class: see the message."""
        raise AttributeError(
            "A TurboQuantCache has no `max_cache_len`; `get_max_length()` tells. (PEFT asks for it in prefix tuning to "
            "put a cache of its own in this one's place: call such a model without `past_key_values`.)"
        )

    def __copy__(self) -> TurboQuantCache:
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    @outside_inference_mode
    def __deepcopy__(self, memo: dict[int, Any]) -> TurboQuantCache:
        copied = self.__copy__()
        memo[id(self)] = copied
        vars(copied).update((name, deepcopy(value, memo)) for name, value in vars(self).items())
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if any(map(_is_filled, self.layers)):
            raise pickle.PicklingError(
                "A TurboQuantCache that has been filled cannot be pickled, only an empty one. Write it to a file with "
                "`cache.save(path, model)`, and read it with `TurboQuantCache.load(path, model)`."
            )
        model_config = self.model_config()
        if model_config is None:
            raise pickle.PicklingError("The config this cache was made from no longer exists; make a new cache.")
        options: dict[str, Any] = {"preset": self.config}
        scales = {
            index: layer.channel_scales.map(torch.Tensor.cpu)  # whoever reads it may have no GPU
            for index, layer in enumerate(self.layers)
            if isinstance(layer, TurboQuantLayer) and layer.channel_scales is not None
        }
        if scales:
            options["balance"] = Balance(scales)
        options |= {"max_cache_len": self.preallocated_for, "offloading": self.offloading}
        return partial(type(self), **options), (model_config,)

    @property
    def is_compileable(self) -> bool:
        """Whether `generate()` compiles its steps. Chunks of a prompt stay eager: no graph can hold them whole."""
        return all(layer.is_compileable for layer in self.layers) and not asked_by_prefill()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]` of a layer; return what attention is given.

        Keys and values have one dtype, which the layer then holds. Under `torch.autocast` they may have two, and the
        layer holds the wider one.

        Raises:
            ValueError: The states do not fit the cache. It is unchanged then.
        """
        if torch.compiler.is_compiling() and not (key_states.shape[2] == 1 and self._is_traceable(layer_idx)):
            return self._update_outside_of_graphs(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"This cache was made for a model of {len(self.layers)} layers, and this model has a layer "
                f"{layer_idx}; make it from this model's own config."
            )
        if self._updated is not None and not torch.compiler.is_compiling():
            self._check_alone(layer_idx, key_states.shape[2])
        if self._deferred is not None:
            self._encode_deferred()
        layer: Any = self.layers[layer_idx]
        compressed = isinstance(layer, TurboQuantLayer)
        if not compressed:  # else it sees to it itself
            key_states, value_states = like_held(layer, key_states, value_states)
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        tokens = key_states.shape[2]
        self.last_update = layer_idx, tokens
        if compressed and tokens > 1:
            if layer.store is not None and layer.store.is_deferred:
                self._deferred = layer
            if self._unchecked is not None:
                self._unchecked.add(layer_idx)
        return states

    def _check_alone(self, layer_idx: int, tokens: int) -> None:
        """Refuse cross-attention that updates the layer of the self-attention before it.

        Raises:
            ValueError: A call updates one layer twice in a row. The cache is what it was before the call then.
        """
        assert self._updated is not None
        (last, new), self._updated = self._updated, (layer_idx, tokens)
        if last != layer_idx:
            return
        self._updated = None
        layer: Any = self.layers[layer_idx]
        if int(layer.get_seq_length()) == new:
            self.reset()
        else:
            layer.crop(-new)
        raise ValueError(
            f"Layer {layer_idx} of this cache was given {new} tokens of the decoder, and then {tokens} of the encoder: "
            "cross-attention needs a cache of its own. Pass `past_key_values=EncoderDecoderCache(TurboQuantCache("
            "model.config), DynamicCache(config=model.config))` (or a second TurboQuantCache), from transformers."
        )

    def _is_traceable(self, layer_idx: int) -> bool:
        """Whether a graph may hold the update of a layer by one token."""
        layer: Any = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        return layer is not None and layer.is_compileable and layer.is_initialized

    @torch.compiler.disable
    def _update_outside_of_graphs(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """An update that no graph can hold: of several tokens, of a layer that grows, or the first of a layer."""
        return for_graphs(self.update(*args, **kwargs))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask for `query_length` new tokens covers."""
        # Masks are made before any layer is updated. A compiled step then never finds a deferred prompt.
        if self._is_encoder_decoder:
            self._updated = (-1, 0)
        if self._deferred is not None:
            self._encode_deferred()
        if self._unchecked and not (torch.compiler.is_compiling() or is_capturing()):
            warn_beyond_fp16({index: self.layers[index] for index in sorted(self._unchecked)})
            self._unchecked = None
        return super().get_mask_sizes(query_length, layer_idx)

    def _encode_deferred(self) -> None:
        """Encode the prompt of the layer updated last, if its queries were not shown: one layer's is held at most."""
        layer, self._deferred = self._deferred, None
        assert layer is not None
        if layer.store is not None and layer.store.is_deferred:
            layer.store.encode_deferred()
            # Nobody shows queries, so no other layer need wait for them.
            for other in self.layers:
                if isinstance(other, TurboQuantLayer):
                    other.needs_queries = False
        if self.offloading:
            layer.offload()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of each layer.

        If an exception in a forward pass (Ctrl-C, no memory left) left some layers a call ahead of the others, at least
        the tokens of that call are removed, and from the others as many less: layers are as even as before the call.

        Raises:
            ValueError: A layer cannot be cropped, or `tokens_to_remove` is no number or positive. Nothing is changed
                then.
        """
        self._require("crop")
        crop(self.layers, tokens_to_remove, self.last_update)
        self.last_update = None

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
        if not isinstance(indices, torch.Tensor):
            raise ValueError(f"`indices` is {indices!r}; it must be a tensor of the sequences to keep.")
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

    def memory_footprint(self) -> MemoryFootprint:
        """Bytes this cache holds now, by kind and device, and what a 16-bit cache of the same tokens would hold."""
        return measure(self.layers)

    def save(self, path: str | os.PathLike[str], model: Any = None) -> None:
        """Write this cache to a safetensors file, so that a prompt processed once can be reused after a restart.

        The old file stays until the new one is complete. Token ids are not kept: `generate()` wants them again.

        Args:
            path: The file, by convention `*.safetensors`.
            model: The model that filled this cache, by default the one the cache was made with
                (`TurboQuantCache(model.config, model=model)`).

        Raises:
            ValueError: The cache is empty, an exception left some layers a call ahead of others, or its model is not
                given, has gone or is an encoder-decoder; or `path` is not a place for a file.
            FileNotFoundError: The folder does not exist.
            PermissionError: No file may be written there.
        """
        save_cache(self, path, model if model is not None or self._model is None else self._model())

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: Any,
        preset: str | TurboQuantConfig | None = None,
        *,
        max_cache_len: int | None | Literal["saved"] = "saved",
    ) -> TurboQuantCache:
        """A cache from a file that `save` wrote: the same bits, each layer on the device where `model` runs it.

        Args:
            path: The file. It may come from anywhere: nothing in it is executed or believed unchecked.
            model: The model the cache was made with, in the same dtype. It is run on a few tokens, to learn what it
                caches.
            preset: What the cache must have been compressed with, or `None` to take what the file says.
            max_cache_len: Tokens to preallocate for, or `None` for a cache that grows, whichever it was when it was
                saved; "saved" makes it what it was.

        Raises:
            ValueError: The file is damaged, is not one of a cache, belongs to another model or `preset`, or holds more
                than `max_cache_len` tokens.
            FileNotFoundError: There is no such file.
        """
        if max_cache_len != "saved":
            check_max_cache_len(max_cache_len)
        return load_cache(cls, path, model, preset, max_cache_len)[0]


def check_max_cache_len(max_cache_len: Any) -> None:
    """Raise a `ValueError` unless this is a number of tokens or `None`."""
    number = isinstance(max_cache_len, int) and not isinstance(max_cache_len, bool)
    if max_cache_len is not None and not (number and max_cache_len >= 1):
        raise ValueError(f"`max_cache_len` is {max_cache_len!r}; it must be a number of tokens, 1 or more, or None.")


def _check_arguments(model_config: Any, model: Any, max_cache_len: Any, offloading: Any) -> None:
    """Raise a `ValueError` unless a cache can be made of these arguments."""
    if not isinstance(model_config, PreTrainedConfig):
        came = type(model_config).__name__
        raise ValueError(f"`model_config` must be a transformers config (pass `model.config`), not {came}.")
    if model is not None and not isinstance(model, torch.nn.Module):
        raise ValueError(f"`model` must be the model itself, or left out, not {type(model).__name__}.")
    check_choice()
    check_max_cache_len(max_cache_len)
    if not isinstance(offloading, bool):
        raise ValueError(f"`offloading` is {offloading!r}; it must be True or False.")
    if offloading and not torch.cuda.is_available():
        raise ValueError("`offloading=True` moves layers between a GPU and the CPU, and there is no GPU. Leave it out.")


def _layers(model_config: PreTrainedConfig, config: TurboQuantConfig, max_cache_len: int | None) -> list[Any]:
    """The layers of a cache: those transformers would make, full-attention ones compressed where `config` has a preset.

    Raises:
        ValueError: The model has no attention heads, transformers has no preallocated layer of a kind, or `config`
            names a layer that does not exist or is not compressed.
    """
    decoder_config = model_config.get_text_config(decoder=True)
    if not has_attention_heads(decoder_config):
        raise ValueError(
            f"{type(decoder_config).__name__} has no attention heads (`num_attention_heads`), so there are no keys "
            "and values to compress. Let the model make its own cache: leave out `past_key_values`."
        )
    if max_cache_len is None:
        layers = DynamicCache(config=model_config).layers
    else:
        try:
            layers = StaticCache(model_config, max_cache_len).layers
        except KeyError as error:
            raise ValueError(
                f"transformers has no preallocated layer for {error} layers. Leave out `max_cache_len`."
            ) from error
    # Looked at later; an encoder-decoder's decoder config is made on the fly.
    watched = model_config if getattr(model_config, "is_encoder_decoder", False) else decoder_config
    for index, (layer, own) in enumerate(zip(layers, config.by_layer(len(layers)), strict=True)):
        layers[index] = _layer_for(layer, own, max_cache_len, watched)
        if own not in (config, None) and not isinstance(layers[index], TurboQuantLayer):
            raise ValueError(
                f"`layers` gives layer {index} the preset {own.preset}, but it is a {type(layers[index]).__name__}, "
                "which is not compressed. Leave it out."
            )
    _agree_on_masks(layers, decoder_config)
    if not any(isinstance(layer, TurboQuantLayer) for layer in layers):
        logger.warning(
            f"No layer of this {type(decoder_config).__name__} is compressed. Its layers are of the class "
            f"{' and '.join(sorted({type(layer).__name__ for layer in layers}))}; compressed are those of full "
            "attention outside `skip_layers`."
        )
    return layers


def _layer_for(
    layer: Any, config: TurboQuantConfig | None, max_cache_len: int | None, model_config: PreTrainedConfig
) -> Any:
    """What takes the place of a layer of transformers, or the layer itself."""
    if type(layer) in (DynamicLayer, StaticLayer) and config is not None:
        return TurboQuantLayer(config, max_cache_len, model_config)
    if type(layer) is DynamicLayer:
        return GrowingLayer()
    if type(layer) is StaticLayer:
        return PreallocatedLayer(layer.max_cache_len)
    if type(layer) is DynamicSlidingWindowLayer:
        return SlidingLayer.like(layer)
    if type(layer) is StaticSlidingWindowLayer:
        return PreallocatedSlidingLayer.like(layer)
    if isinstance(layer, (DynamicLayer, StaticLayer)) and not layer.is_sliding and config is not None:
        logger.warning_once(
            f"Layers of the class {type(layer).__name__} are left to transformers and not compressed, although they "
            "hold all tokens: this version compresses layers that hold keys and values and nothing else."
        )
    return layer


def _agree_on_masks(layers: list[Any], config: PreTrainedConfig) -> None:
    """Let all full-attention layers show a call the same room: transformers makes one mask for them all."""
    others = [layer for layer in layers if isinstance(layer, StaticLayer) and not isinstance(layer, PreallocatedLayer)]
    if not takes_attention_functions(type(config)) or any(not layer.is_sliding for layer in others):
        for layer in layers:
            if isinstance(layer, FullAttentionLayer):
                layer.shows_room = True


def _is_filled(layer: Any) -> bool:
    states = [getattr(layer, f"is_{kind}_states_initialized", {}) for kind in ("conv", "recurrent")]
    return getattr(layer, "is_initialized", False) or any(any(one.values()) for one in states)
