"""Checks that refuse options and models that packed pages do not support."""

from __future__ import annotations

import os
import threading
from copy import copy
from inspect import signature
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from tq_kernels.format import BLOCK_TOKENS, MOST_SINKS
from tq_kernels.layout import BlockLayout
from tq_kernels.types import Tokens
from transformers import CompileConfig, ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION, SLIDING_ATTENTION
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils import logging

from ..compat import CACHE_NAME, attention_of_parts, restore_attention
from ..config import TurboQuantConfig, config_of, holds_latents, number_of_positions
from ..layers.expansion import agrees
from ..ops.dispatch import supports_paged_decode, supports_paged_latents, supports_paged_prompts, widest_paged_head
from .allocators import LayerSpec, StateName, StateStep, layer_kinds, linear_layers, page_owners, paged_layers
from .cache import TurboQuantPagedCache
from .layers import NAME, LinearLayers, running
from .options import INSTEAD, LIMITS, MOST, number, shown
from .requests import SCHEDULERS, SHORT_STEPS, one_line

logger = logging.get_logger(__name__)

GRAPH_MIXING = "NCCL_GRAPH_MIXING_SUPPORT"
TOKENS = 8
"""Number of tokens of a probe."""
probing = threading.Lock()
"""Held while `torch.compile` is off, which is of the process: the last of two probes would leave it off."""


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


class StepProbe(TurboQuantPagedCache):
    """Pages that hold nothing: a step of a model over them shows what each layer stores. Raises `ValueError` if the
    model does not run over pages."""

    def __init__(self, model: Any) -> None:
        self.linear, decoder = LinearLayers(model), model.config.get_text_config()
        self.holds_latents, self._latents = holds_latents(decoder), None
        self.specs: dict[int, LayerSpec] = {}
        """Layers with attention."""
        self.twice, self.unexplained = list[int](), list[int]()
        """Layers that attended again, and layers whose keys and values are not their latents times `kv_b_proj`."""
        before, ids = attention_of_parts(model), torch.arange(TOKENS, device=model.device)[None]
        try:
            model.set_attn_implementation(NAME)
            self.linear.switch()
            with probing, running.step(self), torch.no_grad(), torch.compiler.set_stance("force_eager"):
                inputs = dict(input_ids=ids % decoder.vocab_size, position_ids=ids, use_cache=False, cache=self)
                parts = model, model.get_decoder()
                run = next(part for part in parts if "input_ids" in signature(type(part).forward).parameters)
                run(**inputs | ({CACHE_NAME: self} if self.holds_latents else {}))
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):
                raise
            asked = getattr(error, "name", None) if getattr(error, "obj", None) is self else None
            why = f"asks pages for `{asked}`" if asked else f"does not run over pages ({one_line(error)[:200]})"
            refuse(model, why)
        finally:
            self.linear.restore()
            restore_attention(before)
        self.linear.measure()

    def state_step(self, layer_idx: int) -> tuple[Any, StateStep]:
        return self, StateStep(torch.empty(0), torch.empty(0), None)

    def read(self, layer: int, pages: torch.Tensor) -> dict[StateName, torch.Tensor]:
        """None: a text begins."""
        return {}

    def write(self, layer: int, pages: torch.Tensor, states: dict[StateName, torch.Tensor]) -> None:
        """Note the states `[B, ...]` of a linear layer."""
        self.linear.shapes[layer] = {name: (each.shape[1:], each.dtype) for name, each in states.items()}

    def layer_step(self, layer_idx: int, states: Tokens, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Note the heads of a layer. Returns zeros in the shape of its attention."""
        (query, key, value), (_, weight, expanded) = states, args
        if self.holds_latents and (weight is None or expanded is None):
            raise TypeError(f"layer {layer_idx} has no weight of `kv_b_proj`, or a quantized one")
        if weight is not None and not weight.is_meta and not agrees(weight, key, value, *expanded):
            self.unexplained.append(layer_idx)
        self.twice += [layer_idx] if layer_idx in self.specs else []
        self.specs[layer_idx] = LayerSpec(query.shape[1], key.shape[1], key.shape[3], value.shape[3], key.dtype)
        return query.new_zeros(*query.transpose(1, 2).shape[:3], (value if expanded is None else expanded[1]).shape[3])


probes: WeakKeyDictionary[Any, StepProbe] = WeakKeyDictionary()
"""Last probe of a model."""


def check_model(model: Any, config: TurboQuantConfig) -> tuple[list[int], StepProbe]:
    """Raise `ValueError` if pages cannot hold the layers of a model, or if no layer can be packed.

    Returns:
        Indices of the full-attention layers that the configuration keeps dense, and a probe of the model.
    """
    decoder = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        refuse(model, "is an encoder-decoder, and continuous batching serves decoders")
    if getattr(decoder, "num_hidden_layers", None) is None:
        refuse(model, "has no `num_hidden_layers` in its config, and pages are divided among layers")
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        advice = "Load it on one, or with tensor parallelism (`tp_plan='auto'`)."
        refuse(model, f"is spread over {', '.join(sorted(map(str, devices)))}, and pages are on one device", advice)
    kinds, linear = paged_layers(decoder), linear_layers(decoder)
    if others := sorted(kinds.keys() - {FULL_ATTENTION, SLIDING_ATTENTION}):
        held = "full attention, sliding windows and the states of linear layers"
        refuse(model, f"has layers of the kind {', '.join(others)}, and pages hold {held} only")
    unpacked = INSTEAD if linear else "Use transformers' own `model.generate_batch`, which needs the same memory."
    if FULL_ATTENTION not in kinds:
        refuse(model, "has no full attention, and nothing else is packed", unpacked)
    if SLIDING_ATTENTION in kinds and (linear or holds_latents(decoder)):
        other = "linear layers" if linear else "latent attention (MLA)"
        refuse(model, f"has sliding windows and {other}, and a pool holds one of them beside full attention")
    presets, owners = config.by_layer(len(layer_kinds(decoder))), page_owners(decoder)
    full = [i for i in kinds[FULL_ATTENTION] if owners[i] == i]
    dense = [i for i in full if presets[i] is None]
    if dense == full:
        refuse(model, "has no layer to pack but those in `skip_layers`", unpacked)
    if not any("position_ids" in signature(type(part).forward).parameters for part in (model, model.get_decoder())):
        refuse(model, "takes no positions (`position_ids`), so it reads the requests of a batch as one text")
    if model.config._attn_implementation != NAME or model not in probes:  # otherwise a manager may serve it
        probes[model] = StepProbe(model)
    _check_layers(model, probes[model], kinds, {i for i in owners if i < decoder.num_hidden_layers}, set(linear))
    return dense, probes[model]


def _check_layers(model: Any, probe: StepProbe, kinds: dict[str, list[int]], paged: set[int], linear: set[int]) -> None:
    specs, most = probe.specs, widest_paged_head(model.device)
    if probe.twice:
        refuse(model, f"attends twice in layer {probe.twice[0]}, and pages hold one set of values per layer")
    if probe.unexplained:
        why = f"expands latents (MLA) of layer {probe.unexplained[0]} not by the weight of `kv_b_proj`, as pages need"
        refuse(model, why, f"Merge adapters. {INSTEAD}")
    if missing := sorted(linear - probe.linear.shapes.keys()):
        do_not = "do not ask a cache for their states, as transformers' own do from version 5.23 on"
        refuse(model, f"has linear layers ({', '.join(map(str, missing))}) that {do_not}")
    if specs.keys() != paged:
        attends = "computes attention itself" if not specs else f"attends in {len(specs)} of {len(paged)} layers"
        refuse(model, f"{attends}, so it cannot read pages")
    for kind, members in kinds.items():
        found = sorted({specs[layer][1:4] for layer in members if layer in specs})
        if len(found) > 1:
            differ = " and ".join(f"{number} of {key} and {value} channels" for number, key, value in found)
            where = f"in different layers of {kind.replace('_', ' ')}"
            refuse(model, f"has KV heads that differ {where} ({differ}), and pages of a kind hold one size")
        _, key, value = found[0]
        if key != value and not probe.holds_latents:
            refuse(model, f"has keys of {key} and values of {value} channels, and pages hold equal ones")
        if most and kind == FULL_ATTENTION and key > most and not probe.holds_latents:
            why = f"read pages of up to {most}: every step would be computed in torch, request by request"
            refuse(model, f"has heads of {key} channels, and this device's kernels {why}")
    if others := {spec.dtype for spec in specs.values()} - {model.dtype}:
        refuse(model, f"is in {model.dtype} and caches {others.pop()}, and pages have the model's dtype")


def warn_about_graph_mixing(model: Any) -> None:
    """Warn if the process group of a tensor-parallel model was created before `NCCL_GRAPH_MIXING_SUPPORT` was set to 0.
    A `ContinuousBatchingConfig` that is created after the group sets it too late, and hides transformers' warning."""
    if model.device.type != "cuda" or os.environ.get(GRAPH_MIXING) == "0":
        return
    if (model.tp_size or 1) > 1:
        logger.warning(
            f"{GRAPH_MIXING} was not 0 when the process group of this model was created, so NCCL synchronizes captured "
            f"steps with its other uses, and steps are slower. Start with `{GRAPH_MIXING}=0 torchrun ...`, or create a "
            "`ContinuousBatchingConfig` before the model."
        )


CPU_REQUESTS, CPU_TOKENS = 16, 8192
"""Number of requests, and number of tokens per request, that the pool on a CPU has room for by default. All programs
share the memory of a CPU. A CPU computes one request after the other, so more active requests slow every answer."""


def default_requests(model: Any, config: ContinuousBatchingConfig) -> WorkloadHints | None:
    """Requests that a pool on a CPU has room for if its size is not given."""
    if model.device.type != "cpu" or (config.num_blocks, config.max_memory_percent) != (None, None):
        return None
    positions = number_of_positions(model.config.get_text_config()) or CPU_TOKENS
    return WorkloadHints(min(CPU_TOKENS, positions), 0, CPU_REQUESTS)


ENGINE_LIMITS: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(("num_blocks", "max_batch_tokens", "max_requests_per_batch"), (1, MOST)),
    **dict.fromkeys(("max_blocks_per_request", "max_queue_size"), (0, MOST)),  # 0: no block table, no limit
    **dict.fromkeys(("max_memory_percent", "safety_margin", "cpu_offload_space_safety_threshold"), (0.0, 1.0)),
    **dict.fromkeys(("cpu_offload_space", "cpu_group_timeout"), (0.0, 1e6)),
    "default_compile_level": (0, 3),
    "seed": LIMITS["seed"],
}
"""Smallest and largest value of an option of the engine that is a number, as in `LIMITS` of requests."""
ENGINE_KINDS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("allow_block_sharing", "use_async_batching", "return_logprobs"), (bool, "true or false")),
    **dict.fromkeys(("varlen_compile_config", "decode_compile_config"), (CompileConfig, "a `CompileConfig`")),
}
"""Type of an option of the engine, and what a message calls it."""


def check_engine(requested: ContinuousBatchingConfig) -> None:
    """Raise `ValueError` if an option of the engine is of another type than transformers says, or outside its range."""
    for name, limits in ENGINE_LIMITS.items():
        if (value := getattr(requested, name, None)) is not None:
            number(name, value, *limits)
    for name, (kind, text) in ENGINE_KINDS.items():
        if not isinstance(value := getattr(requested, name, None), kind | None):
            raise ValueError(f"`{name}` is {shown(value)}; it must be {text}.")
    if (scheduler := requested.scheduler_type) not in SCHEDULERS:
        names = ", ".join(sorted(SCHEDULERS.keys() - {SHORT_STEPS}))
        raise ValueError(f"`scheduler_type` is {shown(scheduler)}; it must be one of {names}.")
    graphs = requested.use_cuda_graph
    pair = graphs if isinstance(graphs, (tuple, list)) else (graphs, graphs)
    if len(pair) != 2 or not all(isinstance(each, bool | None) for each in pair):
        raise ValueError(
            f"`use_cuda_graph` is {shown(graphs)}; it must be true or false, or two of them: for steps with "
            "prompts, and for decode steps."
        )
    if requested.page_size not in (BLOCK_TOKENS, ContinuousBatchingConfig.page_size):
        raise ValueError(
            f"`page_size` is {shown(requested.page_size)}; packed pages have {BLOCK_TOKENS} tokens. Leave it out."
        )


def engine_options(
    model: Any, layout: BlockLayout, requested: ContinuousBatchingConfig, dense: list[int], processes: bool
) -> ContinuousBatchingConfig:
    """Copy options of the engine, with pages of 128 tokens. Graphs, asynchronous batching and memory that the user
    leaves open are as kernels support them. `dense` full-attention layers are not packed, and all requests have
    processors of logits by default if it `processes`. Raises `ValueError` for options that `check_engine` refuses, and
    for CUDA graphs of steps that read lengths on the host: all steps with dense full-attention layers; and steps with
    prompts, with sliding windows, linear layers, latents or heads that torch computes."""
    check_engine(requested)
    decoder, on_gpu = model.config.get_text_config(), model.device.type == "cuda"
    states = torch.empty(0, dtype=model.dtype, device=model.device)
    latents, graphs = holds_latents(decoder), requested.cuda_graph_booleans
    reads = dense or len(paged_layers(decoder)) > 1 or linear_layers(decoder) or latents
    if (graphs[0] and (reads or (on_gpu and not supports_paged_prompts(states, layout)))) or (graphs[1] and dense):
        what, instead = f"steps with prompts of this {type(model).__name__}", ", or say `(False, True)`"
        if dense:
            what, instead = f"all steps with dense layers ({dense} by `skip_layers`)", ""
        raise ValueError(
            f"`use_cuda_graph` is {requested.use_cuda_graph!r}, and {what} read lengths on the host, so they cannot be "
            f"captured in graphs. Leave it out{instead}."
        )
    options = copy(requested)  # a new config would apply deprecated options twice
    options.page_size = BLOCK_TOKENS
    if requested.num_blocks is not None:
        options.num_blocks = requested.num_blocks * requested.page_size // BLOCK_TOKENS
    if not on_gpu:
        return options
    kernels = not dense and (supports_paged_latents if latents else supports_paged_decode)(states, layout)
    if dense or (latents and not kernels):
        what = f"dense layers ({dense} by `skip_layers`)" if dense else "these latents (MLA)"
        logger.warning_once(f"No kernel reads pages of {what}: torch does, and steps are not captured in CUDA graphs.")
    if options.use_cuda_graph is None:
        # Ranks capture all graphs before a session, and those of prompts come in one.
        prompts = not reads and (model.tp_size or 1) == 1 and supports_paged_prompts(states, layout)
        options.use_cuda_graph = (prompts, kernels)
    if options.use_async_batching is None:
        options.use_async_batching = True
    if processes and options.max_memory_percent is None:
        options.max_memory_percent = 0.8  # as transformers leaves for processors
    return options
