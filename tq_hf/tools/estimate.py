"""Estimates, from a model's config alone, how much memory a cache takes and how much context fits.

No formula holds a size. The model runs on a few tokens without memory (on torch's `meta` device), and the calls of its
layers to their cache are recorded. A real cache then gets the same calls at the wanted batch and length, again without
memory, and its tensors are counted. So hybrid models, sliding windows, MLA latents and linear attention are right, and
an estimate equals `cache.memory_footprint()` after a prefill of that length.
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
from ..stores.growing import GrowingStore
from . import weights
from .traced import trace
from .weights import method_of, quantization_of

MOST = 2**40  # the end of a search: a cache that fits with more tokens or sequences does not grow


class _Sizes(GrowingStore):
    """A store that allocates blocks and encodes nothing."""

    def _encode(self, states: KeyValue, start: int, tokens: tuple[int, int] | None = None) -> None:
        first, stop = tokens or (0, states[0].shape[2])
        self._make_room(start, start + (stop - first) // self.layout.tokens)


class Estimator:
    """Sizes of the caches of one model.

    Args:
        model_config: The model's config. Of a multimodal model the decoder's cache is estimated, as it is without
            images; of an encoder-decoder the cache of what the decoder wrote.
        dtype: What the model is loaded in; by default what its config says, or bfloat16 if it says nothing.
        weight_bytes: Bytes of the weights, by default counted.

    Raises:
        ValueError: It is not a config of a decoder, the model has no cache, or it does not run without memory.
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
        """The method by which the checkpoint's weights are quantized, or `None`."""
        counted, note = weights.weight_bytes(run.model, options)
        self.weight_bytes = counted if weight_bytes is None else weight_bytes
        """Bytes of the weights of the whole model: quantized as its config says, else in `dtype`."""
        self.notes = [note] if note and weight_bytes is None else []
        """Sentences for the user about what is not counted, or not exactly."""
        if not run.whole:
            self.notes.append("The weights are those of the decoder alone: the rest needs a package that is not here.")
        if run.cross_bytes:
            self.notes.append(
                f"Beside it the model caches {run.cross_bytes:,} bytes for each token of the encoder's input; "
                "they are not compressed and not counted here."
            )
        elif not all(self.calls):
            empty = sum(not calls for calls in self.calls)
            self.notes.append(f"{empty} of {len(self.calls)} layers cache nothing in text alone, and are not counted.")
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
        """Bytes of a cache after a prefill; equal to the `memory_footprint()` of a real one, without `by_device`.

        Args:
            preset: A preset or configuration, or `None` for transformers' `DynamicCache`.
            context: Tokens of the prefill.
            batch: Sequences.
            decoding: Whether to also append one new token. The sliding-window layers of a `DynamicCache` hold the whole
                prompt until then, and their window from then on.
            max_cache_len: Tokens to preallocate for: of transformers' `StaticCache`, if `preset` is `None`.

        Raises:
            ValueError: The preset does not exist, `context` or `batch` is less than 1, or `max_cache_len` is less than
                the tokens held.
        """
        for name, value in (("context", context), ("batch", batch)):
            if value < 1:
                raise ValueError(f"`{name}` is {value}; it must be 1 or more.")
        if max_cache_len is not None and max_cache_len < context + decoding:
            raise ValueError(f"`max_cache_len` is {max_cache_len}; it must be {context + decoding} or more for that.")
        cache: Cache
        if preset is not None:
            cache = TurboQuantCache(self.config, preset, max_cache_len=max_cache_len)
        elif max_cache_len is not None:
            cache = StaticCache(self.config, max_cache_len)
        else:
            cache = DynamicCache(config=self.config)
        total = MemoryFootprint()
        # Layers of the same class, settings and calls have the same size: one of each kind is measured.
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
        """The longest prefill whose cache fits into `memory` bytes, or if `preallocated` the largest `max_cache_len`; 0
        if none fits, `None` if any does. The model's own limit (`max_positions`) does not count."""
        return _largest(
            lambda n: self.footprint(preset, n, batch, max_cache_len=n if preallocated else None).total <= memory
        )

    def max_batch(
        self, preset: str | TurboQuantConfig | None, memory: int, context: int, *, max_cache_len: int | None = None
    ) -> int | None:
        """The most sequences of `context` tokens whose cache fits into `memory` bytes, 0 if not even one."""
        return _largest(lambda n: self.footprint(preset, context, n, max_cache_len=max_cache_len).total <= memory)


@dataclass(frozen=True)
class Estimate:
    """The sizes of one preset, or of transformers' own cache."""

    preset: str | None
    """`None` for transformers' `DynamicCache` (if preallocated, its `StaticCache`)."""
    footprint: MemoryFootprint
    """After a prefill."""
    decoding: MemoryFootprint
    """Once decoding has begun."""
    max_context: int | None = None
    """As `Estimator.max_context`; `None` also without `memory`."""
    max_batch: int | None = None
    """As `Estimator.max_batch`; `None` also without `memory`."""


def estimate(
    estimator: Estimator,
    presets: Iterable[str | TurboQuantConfig | None],
    context: int,
    batch: int = 1,
    memory: int | None = None,
    max_cache_len: int | None = None,
) -> Iterator[Estimate]:
    """An `Estimate` of each preset. With `memory`, bytes for the cache, it also has what fits (see `Estimator`)."""
    for preset in presets:
        footprint = estimator.footprint(preset, context, batch, max_cache_len=max_cache_len)
        decoding = estimator.footprint(preset, context, batch, decoding=True, max_cache_len=max_cache_len)
        longest, most = None, None
        if memory is not None:
            longest = estimator.max_context(preset, memory, batch, preallocated=max_cache_len is not None)
            most = estimator.max_batch(preset, memory, context, max_cache_len=max_cache_len)
        yield Estimate(_label(preset), footprint, decoding, longest, most)


def _label(preset: str | TurboQuantConfig | None) -> str | None:
    """The name of a preset, and the layers that have others, as "4bit_nc,0=k8v4,-1=dense"."""
    if not isinstance(preset, TurboQuantConfig):
        return preset
    layers = [*dict(preset.layers).items(), *((index, "dense") for index in preset.skip_layers)]
    return ",".join([preset.preset or "", *(f"{index}={name}" for index, name in layers)])


def parse_memory(text: str) -> int:
    """Bytes of an amount of memory: "24GB" (10**9), "24GiB" (2**30), or "24", which is GiB as in the name of a GPU.

    Raises:
        ValueError: It is not an amount.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B)?\s*", text, flags=re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not an amount of memory; write for example 24GB, 24GiB or 24 (GiB).")
    number, unit, binary = float(match[1]), match[2] or "G", match[3] or match[2] is None
    return math.floor(number * (1024 if binary else 1000) ** (" KMGT".index(unit.upper())))


_SIZES = [field.name for field in fields(MemoryFootprint) if field.name != "by_device"]


def _measure(layer: Any, tokens: int) -> MemoryFootprint:
    """`tq_hf.memory.measure` for one layer without memory, whose storages have no addresses to tell them apart."""
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
        return  # it has allocated everything
    if not isinstance(layer.store, _Sizes):
        layer.store = _Sizes.allocate(layer.config, keys, values)
        layer.store.scales_are_fixed = True  # a prompt without values has no statistics
    layer.store.append(keys, values)
    layer.store.residual.write_pending_token()  # as attention does


def _largest(fits: Callable[[int], bool]) -> int | None:
    """The largest number that fits, if all smaller ones do; 0 if not even 1, `None` if it is above `MOST`."""
    most = 1
    while fits(most):
        most *= 2
        if most > MOST:
            return None
    return bisect_left(range(most // 2 + 1, most), True, key=lambda n: not fits(n)) + most // 2
