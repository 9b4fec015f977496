"""Checks of the options and models that packed pages do not support; each refusal is a sentence."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from copy import copy
from functools import cache
from inspect import getsource, signature
from textwrap import dedent
from typing import Any

from tq_kernels.format import BLOCK_TOKENS, MOST_SINKS
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION, SLIDING_ATTENTION
from transformers.utils import logging

from ..balance import POSITIONS
from ..cache import TurboQuantCache
from ..compat import layer_configs, takes_attention_functions
from ..config import TurboQuantConfig, config_of
from ..layers.compressed import TurboQuantLayer
from ..layers.dense import GrowingLayer, SlidingLayer
from ..ops.dispatch import widest_paged_head
from .allocators import page_owners

logger = logging.get_logger(__name__)

GRAPH_MIXING = "NCCL_GRAPH_MIXING_SUPPORT"
STOCK_PAGE_SIZE = ContinuousBatchingConfig.page_size
INSTEAD = "Use `generate()` with a `TurboQuantCache`."


def pages_config(preset: str | TurboQuantConfig, **overrides: Any) -> TurboQuantConfig:
    """The configuration of pages: as of a `TurboQuantCache`.

    Raises:
        ValueError: The preset does not exist, or pages do not have an option.
    """
    config = config_of(preset, overrides)
    if config.sink_tokens > MOST_SINKS:
        raise ValueError(
            f"`sink_tokens` is {config.sink_tokens}: a page of sinks has up to {MOST_SINKS}. Leave it out for 4."
        )
    if config.layers:
        raise ValueError(
            f"`layers` is {config.layers!r}: pages of all packed layers have one preset. Leave it out, or keep "
            "layers dense (`None`, or `skip_layers`)."
        )
    return config


def check_model(model: Any, config: TurboQuantConfig) -> list[int]:
    """Raise a `ValueError` if pages cannot hold a model's layers, or if none of them can be packed. Returns the
    full-attention layers that the configuration keeps dense."""
    name, decoder = type(model).__name__, model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder, and continuous batching serves decoders. {INSTEAD}")
    if any(getattr(layer, "kv_lora_rank", None) for layer in layer_configs(decoder)):
        raise ValueError(f"{name} has latent attention (MLA), which pages cannot hold yet. {INSTEAD}")
    kinds = sorted(set(getattr(decoder, "layer_types", None) or []) - {"full_attention", "sliding_attention"})
    if kinds:
        raise ValueError(
            f"{name} has layers of the kind {', '.join(kinds)}, and pages hold full attention and sliding windows "
            f"only. {INSTEAD}"
        )
    if not takes_attention_functions(type(decoder)):
        raise ValueError(f"{name} computes attention itself, so it cannot read pages. {INSTEAD}")
    layers, owners = TurboQuantCache(model.config, config).layers, page_owners(decoder)
    presets = config.by_layer(len(layers))
    own = {i: type(layer) for i, layer in enumerate(layers) if owners.get(i) == i}
    if own and set(own.values()) == {SlidingLayer}:
        raise ValueError(
            f"{name} has sliding windows only, which are never packed: transformers' own `model.generate_batch` serves "
            "it in as much memory."
        )
    dense = [i for i, kind in own.items() if presets[i] is None and kind is GrowingLayer]
    if own and len(dense) + sum(kind is SlidingLayer for kind in own.values()) == len(own):
        raise ValueError(
            f"`skip_layers` leaves no layer to pack: `model.generate_batch` serves {name} in as much memory."
        )
    taken = (TurboQuantLayer, SlidingLayer)
    other = [kind.__name__ for i, kind in own.items() if i not in dense and kind not in taken]
    if other or len(layers) != decoder.num_hidden_layers:
        what = other[0] if other else f"{len(layers)} of {decoder.num_hidden_layers} cache"
        raise ValueError(f"{name} has layers of another kind ({what}), which pages cannot hold. {INSTEAD}")
    if len(own) < len(layers) and not _hand_states_on(model):
        raise ValueError(
            f"{name} has layers that read the keys and values of others from the cache, which pages are not. {INSTEAD}"
        )
    if not any("position_ids" in signature(type(part).forward).parameters for part in (model, model.get_decoder())):
        raise ValueError(
            f"{name} takes no positions (`position_ids`), so it reads the requests of a batch as one text. {INSTEAD}"
        )
    _check_heads(model, name)
    if place := _where_arguments_end(model):
        raise ValueError(
            f"{name} does not hand the arguments of a call on to attention ({place} drops them), so its layers would "
            f"not find their pages. {INSTEAD}"
        )
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        raise ValueError(
            f"{name} is spread over {', '.join(sorted(map(str, devices)))}, and pages are on one device. Load it on "
            "one, or with tensor parallelism (`tp_plan='auto'`)."
        )
    return dense


def ask_for_plain_graphs(model: Any) -> None:
    """Warn if a model over several GPUs has a process group that was made before NCCL was told how it is used.

    transformers sets the variable in a `ContinuousBatchingConfig`, and warns only if there has been none: by then one
    that was made too late has set it.
    """
    if model.device.type != "cuda" or os.environ.get(GRAPH_MIXING) == "0":
        return
    if (model.tp_size or 1) > 1:
        logger.warning(
            f"{GRAPH_MIXING} was not 0 when the processes of this model met, so NCCL guards against other uses at "
            f"each step that is captured, and steps are slower. Start with `{GRAPH_MIXING}=0 torchrun ...`, or make a "
            "`ContinuousBatchingConfig` before the model."
        )


def _check_heads(model: Any, name: str) -> None:
    """Raise a `ValueError` if heads differ in width or number between layers of a kind, or are wider than the kernels'
    pages."""
    attention = [m for m in model.get_decoder().modules() if hasattr(m, "layer_idx") and hasattr(m, "head_dim")]
    count, layers = model.config.get_text_config().num_hidden_layers, {module.layer_idx for module in attention}
    if attention and layers != set(range(count)):
        raise ValueError(
            f"{name} has {len(layers)} layers of attention for {count} layers of a cache, and pages hold one of each. "
            f"{INSTEAD}"
        )
    most = widest_paged_head(model.device)
    for kind, members in group_layers_by_attn_type(model.config.get_text_config()).items():
        alike = [module for module in attention if module.layer_idx in members]
        widths = sorted({module.head_dim for module in alike})
        # Adapters around a projection need not say its width.
        rows = {getattr(m.k_proj, "out_features", None) for m in alike if hasattr(m, "k_proj")} - {None}
        if len(widths) > 1 or len(rows) > 1:
            differ = " and ".join(map(str, widths)) + " channels" if len(widths) > 1 else "another number of KV heads"
            raise ValueError(
                f"{name} has heads of {differ} in different layers of {kind.replace('_', ' ')}, and pages of a kind "
                f"hold one size. {INSTEAD}"
            )
        for module in alike:
            if (width := getattr(module, "v_head_dim", module.head_dim)) != module.head_dim:
                raise ValueError(
                    f"{name} has keys of {module.head_dim} and values of {width} channels, and pages hold equal ones. "
                    f"{INSTEAD}"
                )
        if most and kind == FULL_ATTENTION and widths and widths[0] > most:
            raise ValueError(
                f"{name} has heads of {widths[0]} channels, and this device's kernels read pages of up to {most}: "
                f"every step would be computed in torch, request by request. {INSTEAD}"
            )


def _where_arguments_end(model: Any) -> str | None:
    """The class whose `forward` calls a module on the way to attention, as `self.<name>`, without the `**kwargs` that
    the engine's arguments come in (StableLM's layers), read in its source; `None` if there is none, or no source."""
    modules, decoder = dict(model.named_modules()), set(model.get_decoder().modules())
    paths = [path for path, module in modules.items() if module in decoder and _attends(module)]
    ways = {(type(modules[above]), name) for path in paths for above, name in _steps_to(path)}
    return next((kind.__name__ for kind, name in sorted(ways, key=str) if _drops_arguments(kind, name)), None)


def _steps_to(path: str) -> Iterator[tuple[str, str]]:
    """Each module above `path`, and the name of the next in it."""
    while path:
        above, _, name = path.rpartition(".")
        yield above, name
        path = above


def _attends(module: Any) -> bool:
    """Whether a module calls the attention function of a layer of the cache."""
    kind: Any = type(module)
    return hasattr(module, "layer_idx") and "ALL_ATTENTION_FUNCTIONS" in _source(kind)


def _hand_states_on(model: Any) -> bool:
    """Whether layers that share keys and values have them from an argument, in which they are a step's."""
    attention = [type(module) for module in model.get_decoder().modules() if _attends(module)]
    return all("shared_kv_states" in signature(kind.forward).parameters for kind in attention)


@cache
def _source(kind: Any) -> str:
    """The source of `forward`, empty if there is none."""
    try:
        return dedent(getsource(kind.forward))
    except (AttributeError, OSError, TypeError):
        return ""


def _drops_arguments(kind: type, name: str) -> bool:
    """Whether `forward` calls `self.<name>`, and never with a `**` argument, as far as its source can be read."""
    try:
        tree = ast.parse(_source(kind))
    except SyntaxError:  # a line of a comment or of a text in it begins at the margin
        return False
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{name}"]
    return bool(calls) and not any(keyword.arg is None for call in calls for keyword in call.keywords)


EXTENDED = ("linear", "dynamic", "yarn")
"""Kinds of rotary embeddings that read `factor` times the positions of before, which configs may still name."""


def number_of_positions(config: Any) -> int | None:
    """The number of positions that a decoder has by its config; `None` if the config does not say."""
    named = [number for name in POSITIONS if isinstance(number := getattr(config, name, None), int) and number > 0]
    if not named:
        return None
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for each in [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]:
        if each.get("rope_type") in EXTENDED:
            before = each.get("original_max_position_embeddings") or min(named)
            named = [max(min(named), int(before * (each.get("factor") or 1)))]
    return min(named)


def check_positions(prompt: int, config: Any) -> None:
    """Raise a `ValueError` if a prompt of `prompt` tokens is longer than the model's positions."""
    positions = number_of_positions(config)
    if positions is not None and prompt > positions:
        raise ValueError(
            f"A prompt of {prompt:,} tokens is longer than the {positions:,} positions of the model. Shorten it; or "
            "raise `max_position_embeddings` of the model's config, if the model can read more."
        )


def new_tokens(prompt: int, most: int | None, config: Any) -> int | None:
    """Number of tokens of an answer to a prompt of `prompt` tokens: `most`, or fewer where positions end."""
    positions = number_of_positions(config)
    if positions is None:
        return most
    left = max(1, positions + 1 - prompt)  # the last token is not read
    return left if most is None else min(most, left)


def check_generation(config: GenerationConfig) -> None:
    """Raise a `ValueError` if answers need beams."""
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"`num_beams` is {config.num_beams}: continuous batching samples or decodes greedily, without beams. "
            f"{INSTEAD}"
        )


def paged_options(model: Any, config: ContinuousBatchingConfig, dense: list[int]) -> ContinuousBatchingConfig:
    """A copy with `page_size` and `num_blocks` of packed pages, which have 128 tokens.

    Args:
        model: The model that is served.
        config: The options that were asked for.
        dense: Its full-attention layers that are not packed.

    Raises:
        ValueError: Another page size is set, or graphs of steps that read lengths on the host: all of a model with
            layers that are not packed, those with prompts of a model with sliding windows.
    """
    if dense and any(config.cuda_graph_booleans):
        raise ValueError(
            f"`use_cuda_graph` is {config.use_cuda_graph!r}, and steps that read dense blocks of pages (layers {dense} "
            "by `skip_layers`) cannot be captured: torch computes them, and reads lengths on the host. Leave it out."
        )
    if config.cuda_graph_booleans[0] and SLIDING_ATTENTION in group_layers_by_attn_type(model.config.get_text_config()):
        raise ValueError(
            f"`use_cuda_graph` is {config.use_cuda_graph!r}, and steps with prompts of a model with sliding windows "
            "cannot be captured: lengths are read on the host. Leave it out, or say `(False, True)`."
        )
    if config.page_size not in (BLOCK_TOKENS, STOCK_PAGE_SIZE):
        raise ValueError(f"`page_size` is {config.page_size}; packed pages have {BLOCK_TOKENS} tokens. Leave it out.")
    options = copy(config)  # a new one would apply deprecated options twice
    options.page_size = BLOCK_TOKENS
    if config.num_blocks is not None:
        options.num_blocks = config.num_blocks * config.page_size // BLOCK_TOKENS
    return options
