"""`TurboQuantCache`: a transformers cache that stores full-attention layers compressed."""

from __future__ import annotations

import os
import pickle
import weakref
from functools import partial
from typing import Any, Literal

import torch
from transformers import DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.utils import logging

from .balance import Balance
from .compat import (
    CACHE_NAME,
    asked_by,
    check_required_names,
    has_attention_heads,
    is_capturing,
    length_of_generation,
    model_about_to_switch,
    padding_mask_of_caller,
    takes_attention_functions,
)
from .config import TurboQuantConfig, config_of
from .layers.advice import warn_beyond_fp16
from .layers.base import Copyable, FullAttentionLayer, like_held
from .layers.compressed import TurboQuantLayer, compressed
from .layers.dense import GrowingLayer, PreallocatedLayer, SlidingLayer
from .layers.handle import for_graphs
from .layers.rollback import check_complete, crop, held_lengths
from .memory import MemoryFootprint, measure
from .ops.dispatch import check_choice
from .saving.cache_file import load_cache, save_cache
from .stores.sizes import STEP_TOKENS
from .tensors.layer import check_room
from .tensors.sinks import Padding

logger = logging.get_logger(__name__)


class TurboQuantCache(Copyable, DynamicCache):
    """KV cache that stores full-attention layers in 2 to 4 bits (keys also in FP8). A drop-in for `generate()`.

    ```python
    cache = TurboQuantCache(model.config)                       # grows
    cache = TurboQuantCache(model.config, max_cache_len=32768)  # fixed size; decoding compiles
    model.generate(**inputs, cache=cache)  # `past_key_values=cache` before transformers 5.24
    ```

    The first `sink_tokens` tokens, padding not counted, and the newest `residual_length` stay exact; older ones are
    packed in blocks of 128. Padding is known from masks `[B, T]`, unless the call is compiled.
    Sliding-window (only their window is held), linear and skipped layers are not compressed. Load the model with
    `attn_implementation="turboquant"` to read packed blocks directly; other attention functions get dequantized states.
    Latent attention (MLA): keys are latents with the preset's bits, values are rotary keys with 8 bits. Use one cache
    per batch.

    Args:
        model_config: The model's config (`model.config`). The text decoder of a multimodal model is used.
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
                "`TurboQuantCache(config=...)` was called. `generate` of T5Gemma makes this call to replace the cache "
                "that was passed for cross-attention, and would lose its preset and options. Pass `EncoderDecoderCache("
                "TurboQuantCache(model.config), DynamicCache(config=model.config))`."
            )
        check_required_names("TurboQuantCache", "Or use `DynamicCache`.")
        _check_arguments(model_config, model, max_cache_len, offloading)
        if isinstance(balance, TurboQuantCache):
            balance = Balance.from_cache(balance.layers)
        if isinstance(balance, bool):
            overrides["balance"] = balance
        elif balance is not None and not isinstance(balance, Balance):
            raise ValueError(f"`balance` is {balance!r}: pass True or False, a `Balance`, or a cache of this model.")
        self.config = config_of(preset, overrides)
        self.last_update: tuple[int, int] | None = None
        """Index of the layer updated last, and number of new tokens; `None` if no layer is ahead of the others."""
        self.model_config = weakref.ref(model_config)
        self._model = None if model is None else weakref.ref(model)
        # Not named `max_cache_len`: PEFT replaces a cache that has an attribute of this name.
        self.preallocated_for = max_cache_len
        self._deferred: TurboQuantLayer | None = None
        self._unchecked: set[int] | None = set()
        """Indices of layers that encoded the first prompt; `None` after the check for states beyond fp16."""
        self._padding: Padding | None = None
        """Padding of the next call of several tokens, if masks were made for it and a layer lacks sinks."""
        self._first_empty: int | None = None
        """Index of the first of the last layers without tokens if the last `crop` left tokens in others."""
        self._refuses_repeats = False
        """Whether to refuse a repeated update of one layer without a new mask; set by masks of an encoder-decoder."""
        self._is_encoder_decoder = getattr(model_config, "is_encoder_decoder", False) or getattr(
            model_config.get_text_config(decoder=True), "add_cross_attention", False
        )
        layers = _layers(model_config, self.config, max_cache_len)
        self._has_linear_layers = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
        if isinstance(balance, Balance):
            if not self.config.balance:
                raise ValueError("`balance` has channel scales, and the preset `balance=False`: leave out either.")
            balance.set_scales(layers)
        # EncoderDecoderCache crops, selects and repeats a subclass of DynamicCache only.
        Cache.__init__(self, layers=layers, offloading=offloading, offload_only_non_sliding=False)

    def __repr__(self) -> str:
        footprint = self.memory_footprint()
        bits = f"key_bits={self.config.key_bits}, value_bits={self.config.value_bits}"
        tokens = next(iter(held_lengths(self.layers).values()), 0)
        room = "" if self.preallocated_for is None else f" of {self.preallocated_for:,}"
        others = f"other presets in {len(self.config.layers)} of " if self.config.layers else ""
        size = f"{footprint.total / 2**20:.2f} MiB, {footprint.bf16_equivalent / 2**20:.2f} in 16 bits"
        return (
            f"TurboQuantCache({self.config.preset or bits}, {others}{len(self.layers)} layers, {tokens:,}{room} "
            f"tokens, {size if tokens else 'empty'})"
        )

    @property
    def max_cache_len(self) -> int:
        """Always an `AttributeError`, so that PEFT does not replace this cache."""
        raise AttributeError(
            "A TurboQuantCache has no `max_cache_len`; call `get_max_length()`. (PEFT reads `max_cache_len` in prefix "
            "tuning, to replace this cache with its own: call a model with prefix tuning without a cache.)"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        states = [
            getattr(x, f"is_{kind}_states_initialized", {}) for x in self.layers for kind in ("conv", "recurrent")
        ]
        if any(held_lengths(self.layers).values()) or any(any(each.values()) for each in states):
            raise pickle.PicklingError(
                "A TurboQuantCache that holds tokens cannot be pickled; an empty one can. Write it to a file with "
                "`cache.save(path, model)`, and read it with `TurboQuantCache.load(path, model)`."
            )
        model_config = self.model_config()
        if model_config is None:
            raise pickle.PicklingError("The model config of this cache no longer exists; make a new cache.")
        options: dict[str, Any] = {"preset": self.config}
        scales = {
            index: layer.channel_scales.map(torch.Tensor.cpu)  # the reader may have no GPU
            for index, layer in compressed(self.layers).items()
            if layer.channel_scales is not None
        }
        if scales:
            options["balance"] = Balance(scales)
        options |= {"max_cache_len": self.preallocated_for, "offloading": self.offloading}
        return partial(type(self), **options), (model_config,)

    @property
    def is_compileable(self) -> bool:
        """Whether `generate()` compiles decode steps; no graph can encode a prompt. Masks have columns for empty rows
        in all steps, also where linear layers record their past."""
        if (asks := asked_by()) == "mask":
            return self.preallocated_for is not None
        return not asks and all(layer.is_compileable for layer in self.layers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]` of a layer; return states for attention.

        Keys and values have the same dtype, and the layer keeps it. Under `torch.autocast` the two dtypes may differ;
        the layer keeps the wider one.

        Raises:
            ValueError: The states do not fit the cache. The cache is unchanged then.
        """
        # First of all: what comes before would be a graph of its own.
        if torch.compiler.is_dynamo_compiling() and not _is_traceable(self.layers[layer_idx:], key_states.shape[2]):
            return self._update_outside_of_graphs(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"This cache was made for a model of {len(self.layers)} layers, and this model has a layer "
                f"{layer_idx}; make the cache from this model's config."
            )
        layer: Any = self.layers[layer_idx]
        if self._refuses_repeats and not torch.compiler.is_dynamo_compiling():
            self._check_repeat(layer_idx, key_states.shape[2])
        if self._deferred is not None:
            self._encode_deferred()
        if self._first_empty is not None and layer_idx >= self._first_empty:
            raise ValueError(
                f"Layer {layer_idx} held no tokens when others were cropped: an exception had ended the first call. "
                "Make a new cache, and pass the whole prompt again."
            )
        is_compressed = isinstance(layer, TurboQuantLayer)
        if not is_compressed:  # TurboQuantLayer casts its own inputs
            key_states, value_states = like_held(layer, key_states, value_states)
        if self._padding is not None and is_compressed and key_states.shape[2:3] > (1,):  # not checked yet
            kwargs["padding"] = self._padding
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        tokens = key_states.shape[2]
        self.last_update = layer_idx, tokens
        if is_compressed and tokens > 1:
            if layer.store is not None and layer.store.is_deferred:
                self._deferred = layer
            if self._unchecked is not None:
                self._unchecked.add(layer_idx)
        return states

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Update a layer of linear attention; its recurrent states follow."""
        self.last_update = layer_idx, 0
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def _check_repeat(self, layer_idx: int, tokens: int) -> None:
        """Refuse cross-attention that updates the cache of self-attention: raise `ValueError` if a call updates one
        layer twice in a row. The cache returns to its state before the call."""
        if self.last_update is None or self.last_update[0] != layer_idx:
            return
        (_, new), self.last_update = self.last_update, None
        layer: Any = self.layers[layer_idx]
        if int(layer.get_seq_length()) == new:
            self.reset()
        else:
            layer.crop(-new)
        raise ValueError(
            f"Layer {layer_idx} of this cache was updated with {new} tokens of the decoder, and then with {tokens} of "
            f"the encoder: cross-attention needs a second cache. Pass `{CACHE_NAME}=EncoderDecoderCache("
            "TurboQuantCache(model.config), DynamicCache(config=model.config))` from transformers."
        )

    @torch.compiler.disable
    def _update_outside_of_graphs(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Update eagerly: several tokens, a growing layer or the first update of a layer cannot be compiled."""
        return for_graphs(self.update(*args, **kwargs))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens of a layer; for a preallocated cache a tensor on its device.

        Models that drop a cache where their rotary embedding changes (Phi-3) ask for the number. An empty cache has no
        states of the other embedding, and is kept.
        """
        length = super().get_seq_length(layer_idx)
        if not torch.compiler.is_dynamo_compiling() and (model := model_about_to_switch()) is not None:
            tokens = model.config.original_max_position_embeddings
            if not int(length):
                return tokens + 1
            if int(length) <= tokens:
                logger.warning_once(
                    f"{type(model).__name__} drops this TurboQuantCache at {tokens:,} tokens, where its rotary "
                    "embedding changes, and computes all again with a cache that is not compressed. To keep this "
                    "cache with its states, set `model.config.original_max_position_embeddings = 10**9` beforehand."
                )
        return length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of keys that a mask for `query_length` new tokens covers. A call of the model begins."""
        if self._is_encoder_decoder:
            self.last_update, self._refuses_repeats = None, True
        if self._deferred is not None:
            self._encode_deferred()
        if not torch.compiler.is_dynamo_compiling():
            if self._unchecked and not is_capturing():
                warn_beyond_fp16({index: self.layers[index] for index in sorted(self._unchecked)})
                self._unchecked = None
            self._padding = self._observe_padding() if query_length > 1 else None
            self._check_room(query_length)
        return super().get_mask_sizes(query_length, layer_idx)

    def _check_room(self, tokens: int) -> None:
        """Raise a `ValueError` if a preallocated cache has no room for the answer that `generate()` begins, or, with
        layers of linear attention, for `tokens` more: they read them before another layer could refuse them, and forget
        nothing."""
        full = next((layer for layer in self.layers if isinstance(layer, FullAttentionLayer)), None)
        if self.preallocated_for is None or full is None or is_capturing():
            return
        begins = tokens > 1 or not full.is_initialized
        if begins and (asked := length_of_generation()) is not None and asked[0] > self.preallocated_for:
            (most, new), room = asked, self.preallocated_for
            raise ValueError(
                f"This call of `generate()` may fill the cache with {most} tokens: {most + 1 - new} of its "
                f"input and `max_new_tokens={new}`, less the last. The cache has room for {room}. Make the cache with "
                f"`max_cache_len={most}`, or pass `max_new_tokens={max(0, new - most + room)}`."
            )
        if self._has_linear_layers:
            check_room(tokens, full.count_tokens(), self.preallocated_for)

    def _observe_padding(self) -> Padding | None:
        """Padding mask of the function that asks for the sizes of masks; `None` if no token is padded, or all rows
        have their sinks."""
        stores = [layer.store for layer in compressed(self.layers).values()]
        if all(store is not None and not store.lacks_sinks for store in stores):
            return None
        mask = padding_mask_of_caller()
        return None if mask is None or bool(mask.all()) else Padding(mask)

    def _encode_deferred(self) -> None:
        """Encode the deferred prompt of the layer updated last, if attention did not. At most one layer is deferred."""
        layer, self._deferred = self._deferred, None
        assert layer is not None
        if layer.store is not None and layer.store.is_deferred:
            layer.store.encode_deferred()
            # This model's attention never calls `resolve`: stop deferring in the other layers.
            for other in compressed(self.layers).values():
                other.needs_queries = False
        if self.offloading:
            layer.offload()

    def reset(self) -> None:
        """Remove all tokens, also those that an exception left in the first layers."""
        super().reset()
        self.last_update = self._first_empty = self._padding = None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of each layer.

        An exception in a forward pass (Ctrl-C, no memory left) leaves the first layers a call ahead of the others. The
        tokens of that call count as the newest: all of them are removed, and layers without them lose fewer tokens.
        Layers of linear attention cannot forget them.

        Raises:
            ValueError: A layer cannot be cropped, or `tokens_to_remove` is not a number or is positive. The cache is
                unchanged then.
        """
        self._require("crop")
        check_complete(self.layers, self.last_update)
        self._first_empty = crop(self.layers, tokens_to_remove, self.last_update)
        self.last_update = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times. Raise `ValueError`, and change nothing, if a layer cannot."""
        self._require("batch_repeat_interleave")
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices`, in this order. Raise `ValueError`, and change nothing, if a layer cannot."""
        if not isinstance(indices, torch.Tensor) or indices.dim() != 1:
            raise ValueError(f"`indices` is {indices!r}; it must be a tensor `[n]` of the sequences to keep.")
        self._require("batch_select_indices")
        super().batch_select_indices(indices)

    def _require(self, operation: str) -> None:
        """Raise a `ValueError` unless every layer has this method: some layers of transformers do not."""
        for index, layer in enumerate(self.layers):
            if not hasattr(layer, operation):
                way_out = "" if self.preallocated_for is None else " Make the cache without `max_cache_len`."
                raise ValueError(
                    f"`{operation}` needs this method in every layer, but layer {index} is transformers' "
                    f"{type(layer).__name__}, which has none.{way_out}"
                )

    def memory_footprint(self) -> MemoryFootprint:
        """Bytes of this cache now, by kind and device, and bytes of a 16-bit cache of the same tokens."""
        return measure(self.layers)

    def save(self, path: str | os.PathLike[str], model: Any = None) -> None:
        """Write this cache to a safetensors file, to reuse a prompt after a restart.

        An existing file stays until the new one is complete. Token ids are not saved: pass them to `generate()` again.

        Args:
            path: The file, by convention `*.safetensors`.
            model: The model that filled this cache. By default the `model` argument of this cache
                (`TurboQuantCache(model.config, model=model)`).

        Raises:
            ValueError: The cache is empty; an exception left some layers a call ahead of others; there is no model, or
                the model is an encoder-decoder; or `path` cannot be a file.
            FileNotFoundError: The folder does not exist.
            PermissionError: The process may not write there.
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
        """Load a cache from a file that `save` wrote: the same bits, each layer on the device that `model` runs it on.

        Args:
            path: The file. An untrusted file is safe: nothing in it is executed, and everything is checked.
            model: The model that filled the cache, in the same dtype. It runs on a few tokens, to show the shapes and
                dtypes that it caches.
            preset: Preset that the saved cache must have, or `None` for any.
            max_cache_len: Tokens to preallocate for, `None` for a cache that grows, or "saved" for the value of the
                saved cache.

        Raises:
            ValueError: The file is damaged or is not of a cache, belongs to another model or `preset`, or has more
                than `max_cache_len` tokens.
            FileNotFoundError: The file does not exist.
        """
        if max_cache_len != "saved":
            check_max_cache_len(max_cache_len)
        return load_cache(cls, path, model, preset, max_cache_len)[0]


def _is_traceable(layers: list[Any], tokens: int) -> bool:
    """Whether a compiled graph may include an update of the first of `layers`, if any, by this number of tokens."""
    layer: Any = layers[0] if layers else None
    is_step = tokens == 1 or (tokens <= STEP_TOKENS and hasattr(layer, "takes_step") and layer.takes_step(tokens))
    return layer is not None and is_step and layer.is_compileable and layer.is_initialized


def check_max_cache_len(max_cache_len: Any) -> None:
    """Raise a `ValueError` unless `max_cache_len` is a number of tokens or `None`."""
    is_number = isinstance(max_cache_len, int) and not isinstance(max_cache_len, bool)
    if max_cache_len is not None and not (is_number and max_cache_len >= 1):
        raise ValueError(f"`max_cache_len` is {max_cache_len!r}; it must be a number of tokens, 1 or more, or None.")


def _check_arguments(model_config: Any, model: Any, max_cache_len: Any, offloading: Any) -> None:
    """Check the types and ranges of arguments; raise a `ValueError` for the first that is wrong."""
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
    """Layers of a cache: transformers' own, with full-attention layers replaced by compressed ones.

    Raises:
        ValueError: The model has no attention heads, transformers has no preallocated layer of some kind, or `config`
            names a layer that does not exist or is not compressed.
    """
    decoder_config = model_config.get_text_config(decoder=True)
    if not has_attention_heads(decoder_config):
        raise ValueError(
            f"{type(decoder_config).__name__} has no attention heads (`num_attention_heads`), so there are no keys "
            "and values to compress. Let the model make its own cache: pass none."
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
    # Layers keep a weak reference, and `get_text_config` of an encoder-decoder returns a temporary config.
    lasting = model_config if getattr(model_config, "is_encoder_decoder", False) else decoder_config
    for index, (layer, layer_config) in enumerate(zip(layers, config.by_layer(len(layers)), strict=True)):
        layers[index] = _layer_for(layer, layer_config, max_cache_len, lasting)
        if layer_config not in (config, None) and not isinstance(layers[index], TurboQuantLayer):
            raise ValueError(
                f"`layers` has the preset {layer_config.preset} for layer {index}, a {type(layers[index]).__name__}, "
                "which is not compressed. Leave this layer out."
            )
    _agree_on_masks(layers, decoder_config)
    if not compressed(layers):
        logger.warning_once(
            f"No layer of this {type(decoder_config).__name__} is compressed. Its layers have the class "
            f"{' and '.join(sorted({type(layer).__name__ for layer in layers}))}; only full-attention layers outside "
            "`skip_layers` are compressed."
        )
    return layers


KINDS: dict[type, Any] = {
    DynamicLayer: GrowingLayer,
    StaticLayer: PreallocatedLayer,
    DynamicSlidingWindowLayer: SlidingLayer,
    StaticSlidingWindowLayer: SlidingLayer,
}
"""Layers in the place of those of transformers that are not compressed. Other classes stay as they are."""


def _layer_for(
    layer: Any, config: TurboQuantConfig | None, max_cache_len: int | None, model_config: PreTrainedConfig
) -> Any:
    """Replacement for a layer of transformers, or the layer itself."""
    if type(layer) in (DynamicLayer, StaticLayer) and config is not None:
        config = config.of_layer(model_config.get_text_config(decoder=True))
        return TurboQuantLayer(config, max_cache_len, model_config)
    if type(layer) in KINDS:
        return KINDS[type(layer)].like(layer)
    if isinstance(layer, (DynamicLayer, StaticLayer)) and not layer.is_sliding and config is not None:
        logger.warning_once(
            f"Layers of the class {type(layer).__name__} are not compressed, although they cache all tokens: this "
            "version compresses only layers that cache keys and values and nothing else."
        )
    return layer


def _agree_on_masks(layers: list[Any], config: PreTrainedConfig) -> None:
    """Make all full-attention layers return the same number of rows, since transformers makes one mask for all of them,
    and sliding layers refuse the calls that full-attention layers refuse."""
    full: list[Any] = [layer for layer in layers if isinstance(layer, FullAttentionLayer)]
    others = [layer for layer in layers if isinstance(layer, StaticLayer) and not isinstance(layer, PreallocatedLayer)]
    if not takes_attention_functions(type(config)) or any(not layer.is_sliding for layer in others):
        for layer in full:
            layer.returns_empty_rows = True
    room = next((layer.max_cache_len for layer in (*full, *others) if not layer.is_sliding), None)
    for layer in layers:
        if isinstance(layer, SlidingLayer):
            layer.room = room
