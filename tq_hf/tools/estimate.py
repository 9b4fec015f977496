"""How much memory a cache will take, and what fits, from a model's config alone.

Nothing here knows the size of anything. The model is built without memory (on torch's `meta` device) and run on a few
tokens, which shows what each layer hands its cache. A real cache is then given the same at the wanted batch and length,
again without memory, and what it would hold is read off its tensors. So hybrid models, sliding windows, MLA latents and
linear attention come out as they are, and an estimate equals `cache.memory_footprint()` after a prefill of that length.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import Cache

from ..cache import TurboQuantCache
from ..compat import storage_id
from ..config import TurboQuantConfig
from ..layers.compressed import TurboQuantLayer
from ..memory import MemoryFootprint, _tensors
from ..stores.growing import GrowingStore
from ..tensors.window import KeyValue

META = torch.device("meta")
TRACED_TOKENS = 2
MOST = 2**40
"""Where a search for what fits ends: a model of which more fits has layers that do not grow."""


@dataclass(frozen=True)
class _Call:
    """A call of a cache's method for one layer, with shapes in place of tensors (the batch in dimension 0 is 1)."""

    method: str
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    options: tuple[tuple[str, Any], ...]

    def replay(self, layer: Any, batch: int, tokens: int) -> None:
        """Make the call on `layer` for `batch` sequences of `tokens` tokens."""
        axis = {"update": -2, "update_indexer": 1}.get(self.method)
        tensors = []
        for shape, dtype in self.tensors:
            sizes = [batch, *shape[1:]]
            if axis is not None:
                sizes[axis] = tokens
            tensors.append(torch.empty(sizes, dtype=dtype, device=META))
        if isinstance(layer, TurboQuantLayer):
            if layer.store is None:
                layer.lazy_initialization(tensors[0], tensors[1])
            if layer.max_cache_len is not None:
                return  # all there will ever be is there
            if not isinstance(layer.store, _Sizes):
                layer.store = _Sizes.allocate(layer.config, tensors[0], tensors[1])
            layer.store.append(tensors[0], tensors[1])
        else:
            getattr(layer, self.method)(*tensors, **dict(self.options))


class _Sizes(GrowingStore):
    """A store that makes room for blocks and encodes nothing."""

    def _encode(self, states: KeyValue, start: int) -> None:
        self._make_room(start, start + states[0].shape[2] // self.layout.tokens)


class _Recorder(DynamicCache):
    """A cache that notes what each layer is given."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.calls: list[list[_Call]] = [[] for _ in self.layers]

    def _note(self, method: str, layer_idx: int, tensors: tuple[torch.Tensor, ...], options: dict[str, Any]) -> None:
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        self.calls[layer_idx].append(_Call(method, shapes, tuple(sorted(options.items()))))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KeyValue:
        self._note("update", layer_idx, (key_states, value_states), {})
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self._note("update_conv_state", layer_idx, (conv_states,), kwargs | {"state_idx": state_idx})
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self._note("update_recurrent_state", layer_idx, (recurrent_states,), kwargs | {"state_idx": state_idx})
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        self._note("update_indexer", layer_idx, (indexer_key_states,), {})
        return super().update_indexer(indexer_key_states, layer_idx)


class Estimator:
    """Sizes of the caches of one model.

    Args:
        model_config: The model's config; of a multimodal model, its text decoder is used.
        dtype: What the model is loaded in; by default what its config says, or bfloat16 if it says nothing.

    Raises:
        ValueError: It is not a config of a decoder, or the model does not run without memory.
    """

    def __init__(self, model_config: PreTrainedConfig, dtype: torch.dtype | None = None) -> None:
        TurboQuantCache(model_config)  # says what is wrong with a config that has no keys and values
        self.config = _traceable(model_config.get_text_config(decoder=True))
        self.dtype = dtype or _dtype_of(self.config) or _dtype_of(model_config) or torch.bfloat16
        recorder = _Recorder(self.config)
        ids = torch.zeros(1, TRACED_TOKENS, dtype=torch.long, device=META)
        try:
            with META:
                model = AutoModelForCausalLM.from_config(self.config, dtype=self.dtype).eval()
            model.set_experts_implementation("batched_mm")  # the others refuse some dtypes and sizes
            with torch.no_grad():
                model(input_ids=ids, past_key_values=recorder, use_cache=True)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            raise ValueError(
                f"The cache of a {type(self.config).__name__} cannot be estimated from its config: the model does not "
                f"run without its weights ({str(error)[:200]}). Load it, and ask `cache.memory_footprint()`."
            ) from error
        self.calls = recorder.calls
        self.weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        """Bytes of the decoder's weights in `dtype`, without quantisation."""
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
        """What a cache holds after a prefill; equal to the `memory_footprint()` of a real one, without `by_device`.

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
        config = self.config
        cache: Cache
        if preset is not None:
            cache = TurboQuantCache(config, preset, max_cache_len=max_cache_len)
        else:
            cache = DynamicCache(config=config) if max_cache_len is None else StaticCache(config, max_cache_len)
        layers = cache.layers
        total = MemoryFootprint()
        # Layers that are alike hold alike: one of each kind is measured.
        kinds: dict[Any, list[Any]] = {}
        for layer, calls in zip(layers, self.calls, strict=True):
            settings = tuple((k, v) for k, v in vars(layer).items() if isinstance(v, (int, str)))
            kinds.setdefault((type(layer), tuple(calls), settings), []).append(layer)
        for (_, calls, _), alike in kinds.items():
            for call in calls:
                call.replay(alike[0], batch, context)
            for call in calls if decoding else ():
                call.replay(alike[0], batch, 1)
            held = _measure(alike[0], context + decoding)
            for name in _SIZES:
                setattr(total, name, getattr(total, name) + len(alike) * getattr(held, name))
        return total

    def max_context(
        self, preset: str | TurboQuantConfig | None, memory: int, batch: int = 1, *, preallocated: bool = False
    ) -> int | None:
        """The longest prefill whose cache fits into `memory` bytes, or if `preallocated` the largest `max_cache_len`; 0
        if none fits, `None` if any does. The model's own limit (`max_positions`) is not heeded."""
        return _largest(
            lambda n: self.footprint(preset, n, batch, max_cache_len=n if preallocated else None).total <= memory
        )

    def max_batch(
        self,
        preset: str | TurboQuantConfig | None,
        memory: int,
        context: int,
        *,
        max_cache_len: int | None = None,
    ) -> int | None:
        """The most sequences of `context` tokens whose cache fits into `memory` bytes, 0 if not even one."""
        return _largest(lambda n: self.footprint(preset, context, n, max_cache_len=max_cache_len).total <= memory)


@dataclass(frozen=True)
class Estimate:
    """One line of what `estimate` finds.

    Args:
        preset: Name of the preset, or `None` for transformers' `DynamicCache` (if preallocated, its `StaticCache`).
        footprint: Bytes after a prefill.
        decoding: Bytes once decoding has begun.
        max_context: The longest prefill that fits (if preallocated, the largest `max_cache_len`), if memory was given;
            `None` also if there is no limit.
        max_batch: The most sequences that fit, likewise.
    """

    preset: str | None
    footprint: MemoryFootprint
    decoding: MemoryFootprint
    max_context: int | None = None
    max_batch: int | None = None


def estimate(
    estimator: Estimator,
    presets: Iterable[str | None],
    context: int,
    batch: int = 1,
    memory: int | None = None,
    max_cache_len: int | None = None,
) -> Iterator[Estimate]:
    """An `Estimate` of each preset.

    Args:
        estimator: Of the model.
        presets: Names of presets; `None` is transformers' `DynamicCache` (if preallocated, its `StaticCache`).
        context: Tokens of a prefill.
        batch: Sequences.
        memory: Bytes there are for the cache, to also find the longest context at this batch, and the largest batch at
            this context.
        max_cache_len: Tokens the caches are preallocated for, more than `context`; or `None` for caches that grow.
    """
    for preset in presets:
        longest, most = None, None
        if memory is not None:
            longest = estimator.max_context(preset, memory, batch, preallocated=max_cache_len is not None)
            most = estimator.max_batch(preset, memory, context, max_cache_len=max_cache_len)
        yield Estimate(
            preset=preset,
            footprint=estimator.footprint(preset, context, batch, max_cache_len=max_cache_len),
            decoding=estimator.footprint(preset, context, batch, decoding=True, max_cache_len=max_cache_len),
            max_context=longest,
            max_batch=most,
        )


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
    footprint = MemoryFootprint()
    if isinstance(layer, TurboQuantLayer):
        if layer.store is None:
            return footprint
        kinds = layer.store.by_kind()
        kinds["metadata"].append(layer._nan)
        blocks = layer.store.blocks
        footprint.bf16_equivalent = math.prod(blocks.scalars.shape[:2]) * tokens * blocks.layout.dense_bytes
    else:
        kinds = {"uncompressed": list(_tensors(list(vars(layer).values())))}
        footprint.bf16_equivalent = sum(2 * t.numel() for t in kinds["uncompressed"] if t.is_floating_point())
    for kind, tensors in kinds.items():
        storages = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        setattr(footprint, kind, sum(storages.values()))
    return footprint


def _dtype_of(config: PreTrainedConfig) -> torch.dtype | None:
    dtype = getattr(config, "dtype", None)
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _traceable(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a config without what makes a model look at the values of its inputs; no size depends on it."""
    config = copy.deepcopy(config)
    config.pad_token_id = None
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            parameters["rope_type"] = "default"
    return config


def _largest(fits: Callable[[int], bool]) -> int | None:
    """The largest number that fits, if all smaller ones do; 0 if not even 1, `None` if there is no end."""
    most = 1
    while fits(most):
        most *= 2
        if most > MOST:
            return None
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least
