"""Checks that refuse options and models that packed pages do not support."""

from __future__ import annotations

import os
from copy import copy
from functools import cache
from inspect import getsource, signature
from typing import Any, NamedTuple, NoReturn

import torch
from tq_kernels.format import BLOCK_TOKENS, MOST_SINKS
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION, SLIDING_ATTENTION
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils import logging

from ..balance import POSITIONS
from ..cache import TurboQuantCache
from ..compat import layer_configs, takes_attention_functions
from ..config import TurboQuantConfig, config_of, holds_latents
from ..layers.compressed import TurboQuantLayer
from ..layers.dense import GrowingLayer, SlidingLayer
from ..layers.expansion import agrees, up_projection
from ..ops.dispatch import supports_paged_decode, supports_paged_latents, supports_paged_prompts, widest_paged_head
from .allocators import LINEAR, WITHOUT_CACHE, linear_layers, packed_layout, page_owners, paged_layers
from .options import number

logger = logging.get_logger(__name__)

GRAPH_MIXING = "NCCL_GRAPH_MIXING_SUPPORT"
DEFAULT_PAGE_SIZE = ContinuousBatchingConfig.page_size
INSTEAD = "Use `generate()` with a `TurboQuantCache`."


def pages_config(preset: str | TurboQuantConfig, **overrides: Any) -> TurboQuantConfig:
    """Return the configuration of pages, with the arguments of a `TurboQuantCache`. Raise `ValueError` if the preset
    does not exist, or pages do not support an option."""
    config = config_of(preset, overrides)
    if config.sink_tokens > MOST_SINKS:
        raise ValueError(
            f"`sink_tokens` is {config.sink_tokens}: a page of sinks has up to {MOST_SINKS} tokens. Leave "
            "`sink_tokens` out for 4."
        )
    if config.layers:
        raise ValueError(
            f"`layers` is {config.layers!r}: pages of all packed layers have one preset. Leave it out, or keep "
            "layers dense (`None`, or `skip_layers`)."
        )
    return config


def refuse(model: Any, why: str, instead: str = INSTEAD) -> NoReturn:
    """Raise a `ValueError`: the name of a model, `why` pages cannot hold its layers, and a sentence `instead`."""
    raise ValueError(f"{type(model).__name__} {why}. {instead}")


def check_model(model: Any, config: TurboQuantConfig) -> list[int]:
    """Raise `ValueError` if pages cannot hold the layers of a model, or if no layer can be packed.

    Returns:
        Indices of the full-attention layers that the configuration keeps dense.
    """
    decoder = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        refuse(model, "is an encoder-decoder, and continuous batching serves decoders")
    if any(map(holds_latents, layer_configs(decoder))):
        _check_latents(model)
    found, linear = set(getattr(decoder, "layer_types", None) or []), linear_layers(decoder)
    if kinds := sorted(found - {FULL_ATTENTION, SLIDING_ATTENTION, *LINEAR, *WITHOUT_CACHE}):
        held = "full attention, sliding windows and the states of linear layers"
        refuse(model, f"has layers of the kind {', '.join(kinds)}, and pages hold {held} only")
    if linear and FULL_ATTENTION not in found:
        refuse(model, "has no full attention beside its linear layers, so nothing is packed")
    if linear and SLIDING_ATTENTION in found:
        refuse(model, "has sliding windows and linear layers, and a pool holds one of them beside full attention")
    linear_modules(model)
    if not takes_attention_functions(type(decoder)):
        refuse(model, "computes attention itself, so it cannot read pages")
    layers, owners = TurboQuantCache(model.config, config).layers, page_owners(decoder)
    presets = config.by_layer(len(layers))
    own = {i: type(layer) for i, layer in enumerate(layers) if owners.get(i) == i}
    unpacked = "Use transformers' own `model.generate_batch`, which needs the same memory."
    if own and set(own.values()) == {SlidingLayer}:
        refuse(model, "has sliding windows only, which are never packed", unpacked)
    dense = [i for i, kind in own.items() if presets[i] is None and kind is GrowingLayer]
    if own and len(dense) + sum(kind is SlidingLayer for kind in own.values()) == len(own):
        instead = INSTEAD if linear else unpacked
        raise ValueError(f"`skip_layers` leaves no layer of {type(model).__name__} to pack. {instead}")
    supported = (TurboQuantLayer, SlidingLayer)
    other = [kind.__name__ for i, kind in own.items() if i not in dense and kind not in supported]
    if other or len(layers) != decoder.num_hidden_layers:
        what = other[0] if other else f"{len(layers)} of {decoder.num_hidden_layers} cache"
        refuse(model, f"has layers of another kind ({what}), which pages cannot hold")
    if any(owners.get(i, i) != i for i in range(len(layers))) and not _passes_shared_states(model):
        what = "the keys and values of other layers from the cache"
        refuse(model, f"has layers that read {what}, which pages cannot provide")
    if not any("position_ids" in signature(type(part).forward).parameters for part in (model, model.get_decoder())):
        refuse(model, "takes no positions (`position_ids`), so it reads the requests of a batch as one text")
    _check_heads(model)
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        advice = "Load it on one, or with tensor parallelism (`tp_plan='auto'`)."
        refuse(model, f"is spread over {', '.join(sorted(map(str, devices)))}, and pages are on one device", advice)
    return dense


class LinearModule(NamedTuple):
    """A linear module of a model.

    Args:
        layer: Index of its layer.
        module: The module.
        parameter: Name of the cache among the parameters of `forward`.
    """

    layer: int
    module: Any
    parameter: str


def linear_modules(model: Any) -> list[LinearModule]:
    """List the linear modules of a model by layer. Raise `ValueError` if a linear layer has no module that reads its
    states by the methods of a cache."""
    layers, found = linear_layers(model.config.get_text_config()), {}
    for module in model.get_decoder().modules() if layers else ():
        kind: Any = type(module)
        if getattr(module, "layer_idx", None) in layers and ".get_conv_state(" in _source(kind):
            parameter = "cache" if "cache" in signature(kind.forward).parameters else "cache_params"
            found[module.layer_idx] = LinearModule(module.layer_idx, module, parameter)
    if missing := sorted(set(layers) - found.keys()):
        do_not = "do not ask a cache for their states, as transformers' own do from version 5.23 on"
        refuse(model, f"has linear layers ({', '.join(map(str, missing))}) that {do_not}")
    return [found[layer] for layer in layers]


def warn_about_graph_mixing(model: Any) -> None:
    """Warn if the process group of a tensor-parallel model was created before `NCCL_GRAPH_MIXING_SUPPORT` was set to 0.

    transformers sets the variable when a `ContinuousBatchingConfig` is created, and warns only if the variable is not
    set. A config that is created after the process group sets the variable too late and hides that warning.
    """
    if model.device.type != "cuda" or os.environ.get(GRAPH_MIXING) == "0":
        return
    if (model.tp_size or 1) > 1:
        logger.warning(
            f"{GRAPH_MIXING} was not 0 when the process group of this model was created, so NCCL synchronizes captured "
            f"steps with its other uses, and steps are slower. Start with `{GRAPH_MIXING}=0 torchrun ...`, or create a "
            "`ContinuousBatchingConfig` before the model."
        )


def _check_heads(model: Any) -> None:
    """Raise `ValueError` if heads differ in width or number between layers of one kind, or are wider than the pages
    that kernels read."""
    decoder = model.config.get_text_config()
    paged = {i for layers in paged_layers(decoder).values() for i in layers if i < decoder.num_hidden_layers}
    attention = [m for m in model.get_decoder().modules() if hasattr(m, "layer_idx") and hasattr(m, "head_dim")]
    attention = [module for module in attention if module.layer_idx not in linear_layers(decoder)]
    count, layers = decoder.num_hidden_layers, {module.layer_idx for module in attention}
    if attention and layers != paged:
        need = f"for {count} cache layers, and pages need one attention layer per cache layer"
        refuse(model, f"has {len(layers)} attention layers {need}")
    most = widest_paged_head(model.device)
    for kind, members in paged_layers(decoder).items():
        alike = [module for module in attention if module.layer_idx in members]
        widths = sorted({module.head_dim for module in alike})
        # An adapter around a projection may have no `out_features`.
        rows = {getattr(m.k_proj, "out_features", None) for m in alike if hasattr(m, "k_proj")} - {None}
        if len(widths) > 1 or len(rows) > 1:
            differ = " and ".join(map(str, widths)) + " channels" if len(widths) > 1 else "another number of KV heads"
            where = f"in different layers of {kind.replace('_', ' ')}"
            refuse(model, f"has heads of {differ} {where}, and pages of a kind hold one size")
        for module in alike:
            if (width := getattr(module, "v_head_dim", module.head_dim)) != module.head_dim:
                widths_apart = f"keys of {module.head_dim} and values of {width} channels"
                refuse(model, f"has {widths_apart}, and pages hold equal ones")
        if most and kind == FULL_ATTENTION and widths and widths[0] > most:
            why = f"read pages of up to {most}: every step would be computed in torch, request by request"
            refuse(model, f"has heads of {widths[0]} channels, and this device's kernels {why}")


def _check_latents(model: Any) -> None:
    """Raise `ValueError` if pages cannot hold the latents of a model (MLA)."""
    decoder, modules = model.config.get_text_config(), _attention_modules(model)
    attending = sorted(set(range(decoder.num_hidden_layers)) - set(linear_layers(decoder)))
    widths = {(layer.kv_lora_rank, layer.qk_rope_head_dim) for layer in layer_configs(decoder)}
    obstacles = {
        "an indexer chooses tokens": any(hasattr(module, "indexer") for module in modules),
        "its layers have latents of several widths": len(widths) > 1,
        "it has sliding windows, too": paged_layers(decoder).keys() != {FULL_ATTENTION},
        "it needs one attention layer per layer": sorted(module.layer_idx for module in modules) != attending,
    }
    for reason in (reason for reason, is_met in obstacles.items() if is_met):
        refuse(model, f"has latent attention (MLA) that pages cannot hold: {reason}")
    check_expansion(model)


def _attention_modules(model: Any) -> list[Any]:
    return [module for module in model.get_decoder().modules() if _attends(module)]


@torch.no_grad()
def check_expansion(model: Any) -> None:
    """Raise `ValueError` if the keys and values of a layer are not its latents times the weight of `kv_b_proj`, as with
    an adapter, a bias or quantized weights. A model without latents passes."""
    decoder, generator = model.config.get_text_config(), torch.Generator().manual_seed(0)
    for module in _attention_modules(model) if holds_latents(decoder) else ():
        weight, known = up_projection(module), False
        if weight is not None and hasattr(module, "expand_kv"):
            rank = decoder.kv_lora_rank
            tokens = torch.randn(1, 1, 8, rank + decoder.qk_rope_head_dim, generator=generator)
            tokens = tokens.to(weight.device, model.dtype)
            states = tokens[..., :rank], tokens[..., rank:]
            known = weight.is_meta or agrees(weight, states, module.expand_kv(*states))
        if not known:
            raise ValueError(
                f"Keys and values of layer {module.layer_idx} of {type(model).__name__} are not its latents times the "
                f"weight of `kv_b_proj`, as pages of latent attention (MLA) need. Merge adapters. {INSTEAD}"
            )


def _attends(module: Any) -> bool:
    """Whether a module calls an attention function for a layer of the cache."""
    kind: Any = type(module)
    return hasattr(module, "layer_idx") and "ALL_ATTENTION_FUNCTIONS" in _source(kind)


def _passes_shared_states(model: Any) -> bool:
    """Whether layers with shared keys and values get those of the step from the argument `shared_kv_states`."""
    attention = [type(module) for module in model.get_decoder().modules() if _attends(module)]
    return all("shared_kv_states" in signature(kind.forward).parameters for kind in attention)


@cache
def _source(kind: Any) -> str:
    """Source of `forward`, or an empty string."""
    try:
        return getsource(kind.forward)
    except (AttributeError, OSError, TypeError):
        return ""


CPU_REQUESTS, CPU_TOKENS = 16, 8192
"""Number of requests, and number of tokens per request, that the pool on a CPU has room for by default. All programs
share the memory of a CPU. A CPU computes one request after the other, so more active requests slow every answer."""
EXTENDED = ("linear", "yarn")
"""Kinds of rotary embeddings that multiply the number of positions by `factor`. Configs may name the smaller number."""
FOLLOWING = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose frequencies follow the longest text of a call, beyond the positions of the training.
The requests of a step would change each other's answers there."""


def number_of_positions(config: Any) -> int | None:
    """Number of positions that the config of a decoder allows, or `None` if the config has no limit."""
    named = [number for name in POSITIONS if isinstance(number := getattr(config, name, None), int) and number > 0]
    for rope in rotary_embeddings(config):
        kind, before = rope.get("rope_type"), rope.get("original_max_position_embeddings")
        if kind in EXTENDED and named:
            named = [max(min(named), int((before or min(named)) * (rope.get("factor") or 1)))]
        elif kind == "longrope" and before:
            named.append(before)
    return min(named, default=None)


def rotary_embeddings(config: Any) -> list[dict[str, Any]]:
    """Parameters of the rotary embeddings of a decoder: one dict, or one for each type of layer."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]


def check_positions(prompt: int, config: Any) -> None:
    """Raise `ValueError` if a prompt of `prompt` tokens is longer than the model's positions."""
    positions = number_of_positions(config)
    if positions is not None and prompt > positions:
        follows = any(rope.get("rope_type") in FOLLOWING for rope in rotary_embeddings(config))
        raise ValueError(
            f"A prompt of {prompt:,} tokens is longer than the {positions:,} positions of the model"
            + (
                f", beyond which its rotary embeddings follow the longest request of a step. Shorten it. {INSTEAD}"
                if follows
                else ". Shorten it; or raise `max_position_embeddings` of the config, if the model can read more."
            )
        )


def new_tokens(prompt: int, most: int | None, config: Any) -> int | None:
    """Maximum number of new tokens after a prompt of `prompt` tokens: `most`, or fewer if positions end before."""
    positions = number_of_positions(config)
    if positions is None:
        return most
    left = max(1, positions + 1 - prompt)  # the last token of an answer needs no position
    return left if most is None else min(most, left)


def default_requests(model: Any, config: ContinuousBatchingConfig) -> WorkloadHints | None:
    """Requests that a pool on a CPU has room for if its size is not given."""
    if model.device.type != "cpu" or (config.num_blocks, config.max_memory_percent) != (None, None):
        return None
    positions = number_of_positions(model.config.get_text_config()) or CPU_TOKENS
    return WorkloadHints(min(CPU_TOKENS, positions), 0, CPU_REQUESTS)


def choose_graphs(
    model: Any, config: TurboQuantConfig, options: ContinuousBatchingConfig, dense: list[int], processes: bool
) -> None:
    """Set what the user left open of CUDA graphs, asynchronous batching and memory, to what kernels support.
    `processes`: whether all requests have processors of logits by default. Raise `ValueError` if the options ask for
    graphs of steps with prompts, which cannot be captured."""
    if model.device.type != "cuda":
        return
    decoder = model.config.get_text_config()
    states = torch.empty(0, dtype=model.dtype, device=model.device)
    layout, latents = packed_layout(config, decoder), holds_latents(decoder)
    kernels = not dense and (supports_paged_latents if latents else supports_paged_decode)(states, layout)
    if dense:
        logger.warning_once(
            f"`skip_layers` keeps layers {dense} dense, and no kernel reads dense blocks of pages: torch computes "
            "these layers, request by request, and steps are not captured in CUDA graphs."
        )
    elif latents and not kernels:
        logger.warning_once("No kernel reads pages of these latents (MLA): torch does, and steps are not captured.")
    if options.cuda_graph_booleans[0] and not supports_paged_prompts(states, layout):
        raise ValueError(
            f"`use_cuda_graph` is {options.use_cuda_graph!r}, and steps with prompts of heads of {layout.key_dim} "
            "channels cannot be captured: torch computes their attention, and reads lengths on the host. Leave it out, "
            "or say `(False, True)`."
        )
    if options.use_cuda_graph is None:
        # Steps with prompts come in all sizes, and each size would need a graph. Without kernels, lengths are read on
        # the host, which no graph can capture.
        options.use_cuda_graph = (False, kernels)
    if options.use_async_batching is None:
        options.use_async_batching = True
    if processes and options.max_memory_percent is None:
        options.max_memory_percent = 0.8  # as transformers leaves for processors


def paged_options(model: Any, config: ContinuousBatchingConfig, dense: list[int]) -> ContinuousBatchingConfig:
    """Copy a config, with `page_size` and `num_blocks` for packed pages of 128 tokens.

    Args:
        model: The model to serve.
        config: The options of the user.
        dense: Full-attention layers that are not packed.

    Raises:
        ValueError: The config has another page size, or asks for CUDA graphs of steps that read lengths on the host.
            Models with dense full-attention layers have no other steps. Models with sliding windows, linear layers or
            latents read lengths on the host in steps with prompts.
    """
    if dense and any(config.cuda_graph_booleans):
        raise ValueError(
            f"`use_cuda_graph` is {config.use_cuda_graph!r}, and steps that read dense blocks of pages (layers {dense} "
            "by `skip_layers`) cannot be captured: torch computes them, and reads lengths on the host. Leave it out."
        )
    decoder = model.config.get_text_config()
    reads = SLIDING_ATTENTION in paged_layers(decoder) or linear_layers(decoder) or holds_latents(decoder)
    if config.cuda_graph_booleans[0] and reads:
        raise ValueError(
            f"`use_cuda_graph` is {config.use_cuda_graph!r}, and steps with prompts of a model with sliding windows, "
            "linear layers or latents (MLA) cannot be captured: lengths are read on the host. Leave it out, or say "
            "`(False, True)`."
        )
    if config.page_size not in (BLOCK_TOKENS, DEFAULT_PAGE_SIZE):
        raise ValueError(f"`page_size` is {config.page_size}; packed pages have {BLOCK_TOKENS} tokens. Leave it out.")
    for name in ("num_blocks", "max_batch_tokens", "max_requests_per_batch"):
        if (value := getattr(config, name)) is not None:
            number(name, value, 1)
    options = copy(config)  # a new config would apply deprecated options twice
    options.page_size = BLOCK_TOKENS
    if config.num_blocks is not None:
        options.num_blocks = config.num_blocks * config.page_size // BLOCK_TOKENS
    return options
