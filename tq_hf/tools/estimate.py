"""Estimates of the memory of a cache, and of the context that fits, from a model's config alone.

Sizes are not computed by formulas. The model runs on a few tokens on torch's `meta` device, without memory, and the
calls of its layers to the cache are recorded. A cache of the real classes then gets the same calls with the requested
batch and length, also on the `meta` device, and its tensors are counted. Hybrid models, sliding windows, MLA latents
and linear attention are therefore exact. An estimate equals `cache.memory_footprint()` after a prefill of that length.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from tq_kernels.types import KeyValue
from transformers import DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import Cache

from ..cache import TurboQuantCache
from ..compat import storage_id
from ..config import TurboQuantConfig
from ..layers.compressed import TurboQuantLayer
from ..memory import MemoryFootprint, bytes_in_16_bits, tensors_by_kind
from ..saving.recorded import Call
from ..stores.store import LayerStore
from . import weights
from .traced import trace
from .weights import method_of, quantization_of

MOST = 2**40
"""Largest number of tokens or sequences to try. A cache that fits at this number does not grow."""


class _Sizes(LayerStore):
    """A store that allocates blocks without encoding."""

    def _encode(self, states: KeyValue, start: int, tokens: tuple[int, int] | None = None) -> None:
        first, stop = tokens or (0, states[0].shape[2])
        self._make_room(start, start + (stop - first) // self.layout.tokens)


class Estimator:
    """Sizes of the caches of one model.

    Args:
        model_config: Config of the model. For a multimodal model the cache of the decoder is estimated, without images.
            For an encoder-decoder the self-attention cache of the decoder is estimated.
        dtype: Dtype of the loaded model, by default that of the config, or bfloat16 if the config has none.
        weight_bytes: Number of bytes of the weights, by default counted.

    Raises:
        ValueError: The config is not that of a decoder, the model has no cache, or the model does not run without
            memory.
    """

    def __init__(
        self, model_config: PreTrainedConfig, dtype: torch.dtype | None = None, weight_bytes: int | None = None
    ) -> None:
        text_config = model_config.get_text_config(decoder=True)
        self.dtype = dtype or _dtype_of(text_config) or _dtype_of(model_config) or torch.bfloat16
        run = trace(model_config, self.dtype)
        self.config, self.calls = run.config, run.calls
        options = quantization_of(model_config)
        self.quantization = method_of(options)
        """Quantization method of the checkpoint's weights, or `None`."""
        counted, note = weights.weight_bytes(run.model, options)
        self.weight_bytes = counted if weight_bytes is None else weight_bytes
        """Number of bytes of the weights of the whole model: quantized as its config says, otherwise in `dtype`."""
        self.notes = [note] if note and weight_bytes is None else []
        """Sentences for the user about parts that are not counted, or not exactly."""
        if not run.whole:
            self.notes.append(
                "Only the weights of the decoder are counted: the rest of the model needs a package that is not "
                "installed."
            )
        if run.cross_bytes:
            self.notes.append(
                f"The model also caches {run.cross_bytes:,} bytes for each token of the encoder's input. They are not "
                "compressed and not counted here."
            )
        elif not all(self.calls):
            empty = sum(not calls for calls in self.calls)
            self.notes.append(f"{empty} of {len(self.calls)} layers cache nothing without images, and are not counted.")
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None)

    def footprint(
        self,
        preset: str | TurboQuantConfig | None,
        context: int,
        batch: int = 1,
        *,
        decoding: bool = False,
        max_cache_len: int | None = None,
    ) -> MemoryFootprint:
        """Estimate the bytes of a cache after a prefill. They equal `memory_footprint()` of a real cache, without
        `by_device`.

        Args:
            preset: A preset or configuration, or `None` for transformers' `DynamicCache`.
            context: Number of tokens of the prefill.
            batch: Number of sequences.
            decoding: Whether to append one new token. Sliding-window layers of a `DynamicCache` hold the whole prompt
                before the first new token, and only their window after it.
            max_cache_len: Number of tokens to preallocate. If `preset` is `None`, a `StaticCache` is estimated.

        Raises:
            ValueError: The preset does not exist, `context` or `batch` is less than 1, or `max_cache_len` is less than
                the number of tokens.
        """
        for name, value in (("context", context), ("batch", batch)):
            if value < 1:
                raise ValueError(f"`{name}` is {value}; it must be 1 or more.")
        if max_cache_len is not None and max_cache_len < context + decoding:
            raise ValueError(
                f"`max_cache_len` is {max_cache_len}; it must be {context + decoding} or more for this context."
            )
        cache: Cache
        if preset is not None:
            cache = TurboQuantCache(self.config, preset, max_cache_len=max_cache_len)
        elif max_cache_len is not None:
            cache = StaticCache(self.config, max_cache_len)
        else:
            cache = DynamicCache(config=self.config)
        total = MemoryFootprint()
        # Measure one layer of each kind: layers of the same class, settings and calls have the same size.
        kinds: dict[Any, list[Any]] = {}
        for layer, calls in zip(cache.layers, self.calls, strict=True):
            plain = (int, str, TurboQuantConfig)
            settings = tuple((k, v) for k, v in vars(layer).items() if isinstance(v, plain))
            kinds.setdefault((type(layer), tuple(calls), settings), []).append(layer)
        for (_, calls, _), alike in kinds.items():
            for tokens in (context, 1) if decoding else (context,):
                for call in calls:
                    _replay(call, alike[0], batch, tokens)
            sizes = _measure(alike[0], context + decoding)
            for name in _SIZES:
                setattr(total, name, getattr(total, name) + len(alike) * getattr(sizes, name))
        return total

    def max_context(
        self, preset: str | TurboQuantConfig | None, memory: int, batch: int = 1, *, preallocated: bool = False
    ) -> int | None:
        """Find the longest prefill with a cache of at most `memory` bytes. With `preallocated`, find the largest
        `max_cache_len`.

        Returns:
            Number of tokens: 0 if no prefill fits, `None` if all fit. The limit of the model (`max_positions`) is not
            applied.
        """
        return _largest(
            lambda n: self.footprint(preset, n, batch, max_cache_len=n if preallocated else None).total <= memory
        )

    def max_batch(
        self, preset: str | TurboQuantConfig | None, memory: int, context: int, *, max_cache_len: int | None = None
    ) -> int | None:
        """Find the largest number of sequences of `context` tokens with a cache of at most `memory` bytes. Returns 0 if
        one sequence does not fit."""
        return _largest(lambda n: self.footprint(preset, context, n, max_cache_len=max_cache_len).total <= memory)


@dataclass(frozen=True)
class Estimate:
    """Sizes of a cache with one preset, or of transformers' own cache."""

    preset: str | None
    """Name of the preset; `None` for transformers' `DynamicCache` (or `StaticCache` if preallocated)."""
    footprint: MemoryFootprint
    """Footprint after the prefill."""
    decoding: MemoryFootprint
    """Footprint after the first new token."""
    max_context: int | None = None
    """Result of `Estimator.max_context`; `None` also without `memory`."""
    max_batch: int | None = None
    """Result of `Estimator.max_batch`; `None` also without `memory`."""


def estimate(
    estimator: Estimator,
    presets: Iterable[str | TurboQuantConfig | None],
    context: int,
    batch: int = 1,
    memory: int | None = None,
    max_cache_len: int | None = None,
) -> Iterator[Estimate]:
    """Yield an `Estimate` of each preset.

    Args:
        estimator: Sizes of the caches of a model.
        presets: Presets or configurations; `None` for transformers' own cache.
        context, batch: Number of tokens of the prefill, and number of sequences.
        memory: Number of bytes for the cache. If given, an estimate also has `max_context` and `max_batch`.
        max_cache_len: Number of tokens to preallocate.
    """
    for preset in presets:
        footprint = estimator.footprint(preset, context, batch, max_cache_len=max_cache_len)
        decoding = estimator.footprint(preset, context, batch, decoding=True, max_cache_len=max_cache_len)
        longest, most = None, None
        if memory is not None:
            longest = estimator.max_context(preset, memory, batch, preallocated=max_cache_len is not None)
            most = estimator.max_batch(preset, memory, context, max_cache_len=max_cache_len)
        yield Estimate(_label(preset), footprint, decoding, longest, most)


def _label(preset: str | TurboQuantConfig | None) -> str | None:
    """Name of a preset, with presets by layer as "4bit_nc,0=k8v4,-1=dense"."""
    if not isinstance(preset, TurboQuantConfig):
        return preset
    layers = [*dict(preset.layers).items(), *((index, "dense") for index in preset.skip_layers)]
    return ",".join([preset.preset or "", *(f"{index}={name}" for index, name in layers)])


def parse_memory(text: str) -> int:
    """Parse an amount of memory: "24GB" (10**9 bytes), "24GiB" (2**30 bytes), or "24" (GiB).

    Raises:
        ValueError: `text` is not an amount of memory.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B)?\s*", text, flags=re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not an amount of memory; write for example 24GB, 24GiB or 24 (GiB).")
    number, unit, binary = float(match[1]), match[2] or "G", match[3] or match[2] is None
    return math.floor(number * (1024 if binary else 1000) ** (" KMGT".index(unit.upper())))


_SIZES = [field.name for field in fields(MemoryFootprint) if field.name != "by_device"]


def _measure(layer: Any, tokens: int) -> MemoryFootprint:
    """Measure one layer on the meta device. `tq_hf.memory.measure` cannot: meta storages have no addresses."""
    footprint = MemoryFootprint(bf16_equivalent=bytes_in_16_bits(layer, tokens))
    for kind, tensors in tensors_by_kind(layer).items():
        storages = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        setattr(footprint, kind, sum(storages.values()))
    return footprint


def _dtype_of(config: PreTrainedConfig) -> torch.dtype | None:
    dtype = getattr(config, "dtype", None)
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _replay(call: Call, layer: Any, batch: int, tokens: int) -> None:
    """Repeat a recorded call on `layer`, for `batch` sequences of `tokens` tokens, without encoding."""
    if not isinstance(layer, TurboQuantLayer):
        call.replay(layer, batch, tokens)
        return
    keys, values = call.tensors(batch, tokens)
    if layer.store is None:
        layer.lazy_initialization(keys, values)
    if layer.max_cache_len is not None:
        return  # a preallocated layer allocates everything at once
    if not isinstance(layer.store, _Sizes):
        layer.store = _Sizes.allocate(layer.config, keys, values)
        layer.store.scales_are_fixed = True  # meta tensors have no values to estimate scales from
    layer.store.append(keys, values)
    layer.store.settle()  # in place of attention


def _largest(fits: Callable[[int], bool]) -> int | None:
    """Find the largest number that fits, if all smaller ones fit. Returns 0 if 1 does not fit, `None` above `MOST`."""
    most = 1
    while fits(most):
        most *= 2
        if most > MOST:
            return None
    return bisect_left(range(most // 2 + 1, most), True, key=lambda n: not fits(n)) + most // 2
