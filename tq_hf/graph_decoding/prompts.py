"""Readers of first prompts of `graph_decoding` on a GPU: CUDA graphs of short ones, and compiled layers.

Layers get no cache there. Their attention calls `tq_hf.attention.prompt`, which fills the cache, or keeps the states
that a graph finds.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from inspect import signature
from itertools import chain
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import CompileConfig, GenerationConfig, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from ..attention import NAME, PROMPT, NotCompiled, prompt
from ..compat import (
    CACHE_NAME,
    as_input,
    attention_implementation,
    autocast_dtype,
    capture_failure,
    forward_hooks,
    outside_inference_mode,
    prefill,
)
from ..config import holds_latents
from ..layers.compressed import TurboQuantLayer
from ..layers.handle import resolve
from ..prepared import CALLS, MOST_TOKENS, CompiledLayers, joined
from ..saving.fingerprint import adapters
from .loop import WARM_UP, capture, without_graphs

logger = logging.get_logger(__name__)

MANY_TOKENS = 4_000_000
"""Tokens of prompts after which layers are compiled unasked: compiling would have taken less time than it would have
saved."""
LEAST_TOKENS = 64
"""Tokens of a sequence in the smallest graph."""
KNOWN = {CACHE_NAME, "attention_mask", "logits_to_keep", "position_ids", "use_cache"}
"""Inputs of models whose prompts graphs read."""
Size = tuple[int, int, int]
"""Sequences and tokens of a graph, and rows of positions, 0 where the model makes its own."""


class PromptReader:
    """First prompts of a model, whose layers may be compiled by `config`."""

    tokens = 0
    """Number of tokens of all prompts."""

    def __init__(self, model: Any, config: CompileConfig | None) -> None:
        self.layers, self.lock = CompiledLayers(model, config), Lock()
        """Turns of threads: layers are replaced meanwhile, and a graph's states are read."""
        self.ways = {"captured": (self._captured, logger.info), "compiled": (self._compiled, logger.warning_once)}
        """Ways to read a prompt, without those that failed, and how to say that one did."""
        self.calls, self.graphs = Counter[Size](), dict[Size, CapturedPrompt]()
        self.states: list[list[torch.Tensor]] = []
        """Queries, keys and values of each layer, `[MOST_TOKENS * H * D]`, of the graph that ran last."""
        generic = type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
        self.is_generic = generic and "logits_to_keep" in signature(model.forward).parameters
        _, *self.modules = model.modules()  # not the model, which would never be freed
        self.weights = [
            (each, name)
            for each in self.modules
            for name, _ in chain(each.named_parameters(recurse=False), each.named_buffers(recurse=False))
        ]
        self.needs: tuple[Any, ...] = ()

    @classmethod
    def of(cls, model: Any, config: GenerationConfig, tokens: int) -> PromptReader:
        """The reader of a model, made once for its modules. Counts `tokens` more. Layers are compiled from the first
        call on that says how, or after `MANY_TOKENS`."""
        held, how = readers.get(model), None
        tokens += 0 if held is None else held.tokens
        if config.compile_config is not None or tokens > MANY_TOKENS:
            how = CompileConfig(**without_graphs(config.compile_config).to_dict() | {"dynamic": True})
        _, *modules = model.modules()
        if held is None or held.modules != modules or (how is not None and repr(held.layers.config) != repr(how)):
            held = readers[model] = cls(model, how)
        held.tokens = tokens
        return held

    def read(self, model: Any, ids: torch.Tensor, config: GenerationConfig, inputs: dict[str, Any]) -> tuple[Any, Any]:
        """`tq_hf.compat.prefill`: of a first prompt without padding, and a cache of compressed layers, by a graph or
        compiled layers."""
        call = model, ids, config, inputs
        if self.ways and self._takes(*call):
            with self.lock:
                for what, (way, say) in [*self.ways.items()]:
                    try:
                        if (found := way(*call)) is not None:
                            return found
                    except NotCompiled as error:
                        say(f"Prompts of {type(model).__name__} are not {what}: {error}")
                        del self.ways[what]
                        self._forget()
                        inputs[CACHE_NAME].reset()
        return prefill(*call)

    def _takes(self, model: Any, ids: torch.Tensor, config: GenerationConfig, inputs: Any) -> bool:
        """Whether layers read this prompt without their cache."""
        cache, mask, tokens = inputs[CACHE_NAME], inputs.get("attention_mask"), ids.shape[1]
        latents = holds_latents(model.config.get_text_config(decoder=True))
        return (
            not latents
            and all(type(layer) is TurboQuantLayer for layer in cache.layers)
            and len(self.layers.layers) == len(cache.layers)
            and attention_implementation(model.config) == NAME
            and tokens > 1
            and not (model.training or torch.is_grad_enabled() or int(cache.get_seq_length()))
            and config.prefill_chunk_size is None
            and inputs.get("inputs_embeds") is None
            and autocast_dtype(ids) is None
            and not forward_hooks(self.layers.modules)
            and (mask is None or (mask.dim() == 2 and mask.shape[1] == tokens and bool(mask.all())))
        )

    def _compiled(self, model: Any, ids: torch.Tensor, config: Any, inputs: Any) -> tuple[Any, Any] | None:
        """Read a prompt by compiled layers."""
        if self.layers.config is None:
            return None
        cache = inputs[CACHE_NAME]
        reading = prompt.reading(lambda each, _, *states: cache.update(*states, each.layer_idx), self.layers.modules)
        with self.layers.called(partial(_call, cache)), reading:
            found = prefill(model, ids, config, dict(inputs))
        stores = [getattr(layer, "store", None) for layer in cache.layers]
        if any(store is None or store.num_tokens != ids.shape[1] for store in stores):
            raise NotCompiled("some layers stored no tokens.")
        return found

    def _captured(self, model: Any, ids: torch.Tensor, config: Any, inputs: Any) -> tuple[Any, Any] | None:
        """Read a short prompt by a graph, from the `CALLS`th of its size with the same weights on."""
        (batch, tokens), positions = ids.shape, inputs.get("position_ids")
        size = batch, max(LEAST_TOKENS, 1 << (tokens - 1).bit_length()), 0 if positions is None else len(positions)
        others = {name for name, value in inputs.items() if value is not None} - KNOWN
        fits = batch * size[1] <= MOST_TOKENS and (positions is None or positions.shape[1:] == ids.shape[1:])
        if others or not fits or not self.is_generic:
            return None
        if (needs := self._needs(model)) != self.needs:
            self.needs = needs
            self._forget()
        self.calls[size] += 1
        if self.calls[size] < CALLS:
            return None
        if (graph := self.graphs.get(size)) is None:
            graph = self.graphs[size] = CapturedPrompt(model, self.layers, self.states, size, ids)
            self.needs = self._needs(model)  # joining projections moves weights
        return prefill(model, ids, config, inputs, partial(graph.read, inputs[CACHE_NAME], ids, positions))

    def _forget(self) -> None:
        """Free all graphs, and what they hold."""
        for kept in (self.calls, self.graphs, self.states):
            kept.clear()

    def _needs(self, model: Any) -> tuple[Any, ...]:
        """Collect what graphs depend on."""
        tensors = [getattr(each, name).data_ptr() for each, name in self.weights]
        return str(adapters(model)), forward_hooks([model, *self.modules]), tensors


class CapturedPrompt:
    """A first prompt as a CUDA graph. Prompts that are shorter end with any tokens, which no other token attends to."""

    @outside_inference_mode
    def __init__(
        self, model: Any, layers: CompiledLayers, states: list[list[torch.Tensor]], size: Size, like: torch.Tensor
    ) -> None:
        batch, tokens, rows = size
        self.held, self.found = states, list[tuple[int, Any, list[torch.Tensor]]]()
        # A mask of no columns: models make none of their own, and layers get none.
        mask, last = like.new_empty(batch, 1, 0, 0, dtype=torch.bool), like.new_zeros(1)
        self.inputs = {"input_ids": like.new_zeros(batch, tokens), "attention_mask": mask, "logits_to_keep": last}
        if rows:
            self.inputs["position_ids"] = like.new_zeros(rows, tokens)
        reading = prompt.reading(self.keep, layers.modules)
        with joined(model), layers.called(partial(_call, None)), reading:
            try:
                for _ in range(WARM_UP):
                    self._run(model)
                self.graph = capture(partial(self._run, model), like.device)
            except (RuntimeError, ValueError) as error:
                raise NotCompiled(capture_failure(model, error, "A prompt")) from error
        if len(self.found) != len(layers.layers):
            raise NotCompiled("some layers attend in another way.")
        self.done = torch.cuda.Event()

    def _run(self, model: Any) -> None:
        self.found.clear()
        self.logits = model(**self.inputs, use_cache=False, return_dict=True).logits

    def keep(self, module: Any, *states: torch.Tensor) -> Any:
        """Keep queries, keys and values `[B, H, S, D]` of the next layer beyond this run. Returns keys and values."""
        place = len(self.found)
        if place == len(self.held):
            self.held.append([x.new_empty(MOST_TOKENS * x.shape[1] * x.shape[3]) for x in states])
        pairs = zip(self.held[place], states, strict=True)
        self.found.append((module.layer_idx, module, [held[: x.numel()].view(x.shape).copy_(x) for held, x in pairs]))
        return states[1:]

    def read(self, cache: Any, ids: torch.Tensor, positions: Any) -> CausalLMOutputWithPast:
        """Fill the cache with a prompt, and return the logits of its last tokens."""
        count = ids.shape[1]
        self.done.wait()
        for name, values in (("input_ids", ids), ("position_ids", positions)):
            if name in self.inputs:
                self.inputs[name][:, :count].copy_(values)
        self.inputs["logits_to_keep"].fill_(count - 1)
        self.graph.replay()
        for index, module, states in self.found:
            query, key, value = (x[:, :, :count] for x in states)
            key, value = cache.update(key, value, index)
            resolve(key, value, module, query)
        logits = self.logits.clone()
        self.done.record()
        return CausalLMOutputWithPast(logits=logits, **as_input(cache))  # type: ignore[arg-type]


readers: WeakKeyDictionary[Any, PromptReader] = WeakKeyDictionary()
"""Readers by model."""


def _call(held: Any, forward: Any, layer: Any, /, *arguments: Any, **options: Any) -> Any:
    """Call a layer without its cache; one without this cache, or with a mask, as it is. (Models that pass more than
    states by position pass a mask.)"""
    mask = options.get("attention_mask")
    if mask is not None and not mask.shape[-1]:
        options["attention_mask"] = mask = None
    if arguments[1:] or options.get(CACHE_NAME) is not held or mask is not None:
        return type(layer).forward(layer, *arguments, **options)
    return forward(layer, *arguments, **options | {CACHE_NAME: None, PROMPT: True})
