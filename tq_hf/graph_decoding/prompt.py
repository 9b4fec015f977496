"""First prompts whose decoder layers run compiled.

A compiled layer gets no cache. Its attention is the operator `tq_hf::attend_prompt`, which fills the cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import CompileConfig, GenerationConfig
from transformers.utils import logging

from ..attention import NAME, PROMPT, NotCompiled, prompt
from ..cache import TurboQuantCache
from ..compat import CACHE_NAME, attention_implementation, autocast_dtype, has_forward_hooks, prefill
from ..compiled import CompiledLayers
from ..config import holds_latents
from ..layers.compressed import TurboQuantLayer

logger = logging.get_logger(__name__)

known: WeakKeyDictionary[Any, tuple[str, CompiledLayers | None]] = WeakKeyDictionary()
"""Compile options and compiled layers, by model; `None` where a layer attends in a way that is not compiled."""


def read_prompt(
    model: Any,
    cache: TurboQuantCache,
    ids: torch.Tensor,
    config: GenerationConfig,
    compile_config: CompileConfig | None,
    inputs: dict[str, Any],
) -> tuple[Any, Any]:
    """`tq_hf.compat.prefill`. With a `compile_config`, compiled layers read a first prompt without padding, for caches
    of compressed layers."""
    layers = None if compile_config is None else _layers(model, compile_config)
    if layers is None or not _takes(model, cache, ids, config, inputs, layers):
        return prefill(model, ids, config, inputs)
    prompt.cache, prompt.modules = cache, layers.modules
    try:
        with layers.called(partial(_call, cache)):
            found = prefill(model, ids, config, dict(inputs))
        stores = [getattr(layer, "store", None) for layer in cache.layers]
        if all(store is not None and store.num_tokens == ids.shape[1] for store in stores):
            return found
        reason = "some layers stored no tokens."
    except NotCompiled as error:
        reason = str(error)
    finally:
        prompt.cache, prompt.modules = None, ()
    logger.warning_once(f"Prompts of {type(model).__name__} are not compiled: {reason}")
    known[model] = known[model][0], None
    cache.reset()
    return prefill(model, ids, config, inputs)


def _layers(model: Any, config: CompileConfig) -> CompiledLayers | None:
    """Compiled layers of a model, made once."""
    config = CompileConfig(**config.to_dict() | {"dynamic": True})
    if (held := known.get(model)) is None or held[0] != repr(config):
        held = known[model] = repr(config), CompiledLayers(model, config)
    return held[1]


def _takes(
    model: Any, cache: TurboQuantCache, ids: torch.Tensor, config: GenerationConfig, inputs: Any, layers: CompiledLayers
) -> bool:
    """Whether compiled layers read this prompt."""
    mask, tokens = inputs.get("attention_mask"), ids.shape[1]
    plain = all(type(layer) is TurboQuantLayer for layer in cache.layers) and not holds_latents(model.config)
    return (
        plain
        and len(layers.layers) == len(cache.layers)
        and attention_implementation(model.config) == NAME
        and tokens > 1
        and not (model.training or torch.is_grad_enabled() or int(cache.get_seq_length()))
        and config.prefill_chunk_size is None
        and inputs.get("inputs_embeds") is None
        and autocast_dtype(ids) is None
        and not any(has_forward_hooks(x) or "forward" in vars(x) for each in layers.layers for x in each.modules())
        and (mask is None or (mask.dim() == 2 and mask.shape[1] == tokens and bool(mask.all())))
    )


def _call(held: TurboQuantCache, forward: Any, layer: Any, /, *arguments: Any, **options: Any) -> Any:
    """Call a compiled layer without its cache; one without this cache, or with a mask, as it is."""
    if options.get(CACHE_NAME) is not held or options.get("attention_mask") is not None:
        return type(layer).forward(layer, *arguments, **options)
    return forward(layer, *arguments, **options | {CACHE_NAME: None, PROMPT: True})
