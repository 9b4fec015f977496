"""Decoding loop with one CUDA graph per step, for `model.generate(..., custom_generate=tq_hf.graph_decoding)`.

A compiled step of `generate()` still costs the host 2 to 4 ms: guards on the model's modules, masks, processors, a read
of the stop flag. Here the whole step (compiled forward pass, processors, choice of a token, check for the end) is
captured once and replayed. The host reads one step late whether all sequences have ended, so the GPU never waits for
the host. The extra step is cropped from the cache.

`generate()` prepares prompt, masks, processors, stopping criteria and cache as for its own loop. Left-padded batches,
later turns, chunked prefill and `return_dict_in_generate` therefore work as usual. Processors that read only scores run
inside the graph. All other processors run after each replay, and so do stopping criteria other than the end-of-sequence
token and the length. Sliding windows fill and slide by counts on the device. Without a GPU, or with `disable_compile`,
the same loop runs step by step. `assisted.py` has the loop of assisted decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import CompileConfig, GenerationConfig, StoppingCriteriaList
from transformers.cache_utils import LinearAttentionLayer
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from ..cache import TurboQuantCache
from ..compat import (
    as_input,
    attention_implementation,
    autocast_dtype,
    capture_failure,
    ending_failed_capture,
    mark_static_shape,
    optimized_for_decode,
    outside_inference_mode,
    pad_token,
)
from ..layers.base import FullAttentionLayer
from ..layers.compressed import TurboQuantLayer
from ..layers.dense import SlidingLayer
from ..memory import leaves_of
from ..prepared import guarding_hooks, joined, needs_of_graphs
from ..saving.fingerprint import adapters
from ..tensors.layer import check_room
from .step import CapturedStep, LateFlags, StepInputs, layers_with_states, mask_tensors

READ_SCORES_ONLY = (
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.InfNanRemoveLogitsProcessor,
    processors.LogitNormalization,
    processors.MinPLogitsWarper,
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.TypicalLogitsWarper,
)
"""Processors that read scores only. A processor that reads tokens gets one more token at each step, so no graph can
hold it."""

WITHOUT_GRAPHS = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}
"""Replacements for modes of the compiler that capture CUDA graphs of their own."""

WARM_UP = 2
"""Number of steps before the capture. The first compiles kernels; after the second, memory no longer grows."""


def without_graphs(config: CompileConfig | None) -> CompileConfig:
    """Remove the compiler's own CUDA graphs from compile options: they would be captured inside of ours."""
    fields = (CompileConfig() if config is None else config).to_dict()
    (fields["options"] or {}).pop("triton.cudagraphs", None)
    return CompileConfig(**{**fields, "mode": WITHOUT_GRAPHS.get(fields["mode"], fields["mode"])})


def capture(run: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """Capture what `run` does on `device`, in memory of the graph's own."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    with ending_failed_capture(device, pool), torch.cuda.graph(graph, pool=pool):
        run()
    return graph


def check_layers(model: Any, cache: TurboQuantCache, drafts: bool) -> None:
    """Raise a `ValueError` if the cache has layers other than full attention, sliding windows and, without `drafts`,
    linear ones: these cannot take a token back. A graph would keep states that modules replace (RecurrentGemma)."""
    known, layers = (FullAttentionLayer, SlidingLayer), layers_with_states(cache)
    other = {
        type(layer).__name__
        for layer in layers
        if not isinstance(layer, known) and (drafts or type(layer) is not LinearAttentionLayer)
    }
    if getattr(model.config.get_text_config(decoder=True), "attention_chunk_size", None) is not None:
        other.add("layers of attention within chunks")
    if not all(layer.is_compileable for layer in layers):
        other.add("linear layers that record their past, for drafts of an earlier call")
    every_is_full = all(isinstance(layer, FullAttentionLayer) for layer in layers)
    if not every_is_full and any("recurrent_states" in vars(module) for module in model.modules()):
        other.add("recurrent states outside of it")
    if other:
        raise ValueError(
            f"`graph_decoding` takes models whose layers are full attention, sliding windows or (without drafts) "
            f"linear; the cache of this {type(model).__name__} also has {', '.join(sorted(other))}. Leave out "
            "`custom_generate`."
        )


class Loop:
    """One call of `graph_decoding`."""

    tokens = 1
    """Number of tokens that a step appends to the cache (S)."""

    def __init__(
        self,
        model: Any,
        cache: TurboQuantCache,
        prompt: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        config: GenerationConfig,
        compile_config: CompileConfig | None,
        streamer: BaseStreamer | None,
    ) -> None:
        self.model, self.cache, self.prompt = model, cache, prompt
        self.layers: list[Any] = layers_with_states(cache)
        self.cached = int(cache.get_seq_length())
        has_full = any(isinstance(layer, FullAttentionLayer) for layer in self.layers)
        self.room = cache.preallocated_for if has_full else None
        """Number of tokens that the cache has room for; no graph counts them. Sliding windows alone have no limit."""
        self.config, self.processors, self.sample = config, logits_processor, config.do_sample
        self.selects_in_graph = all(type(processor) in READ_SCORES_ONLY for processor in logits_processor)
        self.ends = [c.eos_token_id.to(prompt.device) for c in stopping_criteria if type(c) is EosTokenCriteria]
        self.other_criteria = StoppingCriteriaList(
            c for c in stopping_criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)
        )
        has_end = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self.pad = pad_token(config).to(prompt.device) if has_end else None
        self.length, self.max_length = prompt.shape[1], stopping_criteria.max_length
        assert cache.preallocated_for is not None
        self.width = max(cache.preallocated_for + 1, self.max_length or 0)
        """Number of tokens that the history has room for."""
        self.compile_config, self.captures = compile_config, compile_config is not None and prompt.is_cuda
        self.returns_dict = config.return_dict_in_generate
        self.logits: list[torch.Tensor] | None = [] if self.returns_dict and config.output_logits else None
        self.scores: list[torch.Tensor] | None = [] if self.returns_dict and config.output_scores else None
        self.streamer = streamer
        self.flags = LateFlags(prompt.device, prompt.shape[0], None if streamer is None else streamer.put)
        self.counting = [layer for layer in self.layers if not isinstance(layer, LinearAttentionLayer)]
        if len(self.counting) < len(self.layers):
            self.flags.lag = 0  # linear layers cannot take back a step after the end

    def run(self, logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Decode from the logits `[B, vocabulary]` of the prompt until all sequences have ended."""
        step = self._first_step()
        step.logits = logits
        self._choose(step, step.history[:, : self.length])
        with ExitStack() as contexts:
            while not (ended := self._ends(step)) and (self.max_length is None or self.length < self.max_length):
                if self.cached == self.room:
                    if ended := self.flags.read_now():
                        break
                    check_room(1, self.cached, self.room)
                if step.inputs is None:
                    contexts.enter_context(optimized_for_decode(self.model))
                    contexts.enter_context(joined(self.model))
                    step = self._step(inputs, step)
                self._advance(step)
        self.flags.finish(ended)
        if ended and self.flags.lag:
            self.length -= self.flags.lag
            self.cache.crop(-self.flags.lag)
        return self._result(step.history)

    def _result(self, history: torch.Tensor) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Result of `generate()`, with the tokens in `history` `[B, W]`."""
        if self.streamer is not None:
            self.streamer.end()
        tokens = history[:, : self.length].clone()
        if not self.returns_dict:
            return tokens
        steps = self.length - self.prompt.shape[1]
        fields: dict[str, Any] = {
            name: None if every is None else tuple(every[:steps])
            for name, every in (("logits", self.logits), ("scores", self.scores))
        }
        return GenerateDecoderOnlyOutput(**fields, **as_input(self.cache), sequences=tokens)  # type: ignore[arg-type]

    def _advance(self, step: CapturedStep) -> None:
        """Generate one more token per sequence."""
        if self._run_or_replay(step):
            for layer in self.counting:
                layer.count_replayed(self.cached + 1)
        self.cached += 1
        if not self.selects_in_graph:
            self._choose(step, step.history[:, : self.length])

    def _run_or_replay(self, step: Any) -> bool:
        """Run a step, captured once it is warm. Returns whether its graph was replayed."""
        if step.graph is None and self.captures and step.warm >= WARM_UP:
            try:
                step.graph = capture(partial(self._run, step), self.prompt.device)
            except RuntimeError as error:
                sentence = capture_failure(self.model, error)
                raise RuntimeError(f"{sentence} Leave out `custom_generate=graph_decoding`.") from error
            step.outputs = (step.logits, step.scores)
        if step.graph is None:
            self._run(step)
            step.warm += 1
            return False
        step.graph.replay()
        step.logits, step.scores = step.outputs
        return True

    def _keep_scores(self, step: Any) -> None:
        """Keep the logits and scores of the step that has run, if they are returned."""
        for every, tensor in ((self.logits, step.logits), (self.scores, step.scores)):
            if every is not None and tensor is not None:
                every.append(tensor.clone())

    def _run(self, step: CapturedStep) -> None:
        """Run the operations of the graph."""
        step.logits = self._forward(step)[:, -1]
        if self.selects_in_graph:
            self._choose(step, step.history)

    def _forward(self, step: CapturedStep) -> torch.Tensor:
        """Logits `[B, S, vocabulary]` after the newest token of each sequence and the drafts after it."""
        assert step.inputs is not None
        newest = step.at - 1
        tokens = step.history.index_select(1, newest + step.inputs.place)
        return self.call(self.model, tokens, step.inputs.at(newest - step.shift), self.cache)

    def call(self, model: Any, tokens: torch.Tensor, inputs: dict[str, Any], cache: TurboQuantCache) -> torch.Tensor:
        """Logits `[B, S, vocabulary]` float32 after the next tokens `[B, S]` of a model."""
        inputs = {**inputs, **as_input(cache), "input_ids": tokens}
        forward = model.__call__ if self.compile_config is None else model.get_compiled_call(self.compile_config)
        if self.compile_config is not None and self.tokens > 1:  # an assistant's calls differ in shapes
            for tensor in (tokens, inputs.get("position_ids"), *mask_tensors(inputs.get("attention_mask"))):
                if tensor is not None:
                    mark_static_shape(tensor)
        with nullcontext() if self.compile_config is None else guarding_hooks():
            logits: torch.Tensor = forward(**inputs, return_dict=True).logits
        return logits.to(copy=True, dtype=torch.float32)

    def _choose(self, step: CapturedStep, history: torch.Tensor) -> None:
        """Choose the next tokens by the step's logits and `history` `[B, T]`, and write them to its tensors."""
        step.scores = self.processors(history, step.logits)
        token = self._choice(step.scores)
        if self.pad is not None:
            token = torch.where(step.unfinished, token, self.pad)
        step.history.index_copy_(1, step.at, token[:, None])
        step.at.add_(1)
        for end in self.ends:
            step.unfinished.logical_and_(~torch.isin(token, end))

    def _choice(self, scores: torch.Tensor) -> torch.Tensor:
        """Tokens `[n]` int64 by scores `[n, vocabulary]`."""
        if self.sample:
            return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        return torch.argmax(scores, dim=-1)

    def _ends(self, step: CapturedStep) -> bool:
        """Record the step that has run. Returns whether all sequences are known to have ended."""
        self.length += 1
        self._keep_scores(step)
        if self.other_criteria:
            scores = None if self.scores is None else tuple(self.scores)
            step.unfinished.logical_and_(~self.other_criteria(step.history[:, : self.length], scores))
        return self.flags.record(step.unfinished, step.history[:, self.length - 1])

    @outside_inference_mode
    def _first_step(self, kind: Any = CapturedStep, **own: Any) -> Any:
        """Tensors of the class `kind` that hold the prompt, with fields of its `own`. (Outside of inference mode,
        tensors may be written later.)"""
        history = self.prompt.new_zeros(self.prompt.shape[0], self.width)
        history[:, : self.length] = self.prompt
        at, shift = (history.new_full((1,), number) for number in (self.length, self.length - self.cached))
        unfinished = history.new_ones(len(history), dtype=torch.bool)
        return kind(key=(), history=history, unfinished=unfinished, at=at, shift=shift, **own)

    @outside_inference_mode
    def _step(self, inputs: dict[str, Any], first: Any, key: tuple[Any, ...] = ()) -> Any:
        """Tensors set for the steps after `first`: those of the last call, with its graph, if they fit, or those of
        `first`. The graph depends on `key`, too."""
        made = StepInputs(self.model, self.cache, self.prompt, self.cached, self.tokens, inputs, self.width)
        step, key = latest_steps.pop(self.cache, None), (*self._key(made), *key)
        # Under autocast, a graph reads copies of weights that are freed when autocast ends.
        if step is None or step.key != key or (self.captures and autocast_dtype(self.prompt) is not None):
            step, first.key, first.inputs = first, key, made  # which frees the last graph
        else:
            step.inputs.copy_(made)
            for name in ("history", "at", "shift", "unfinished"):
                getattr(step, name).copy_(getattr(first, name))
        latest_steps[self.cache] = step
        return step

    def _key(self, inputs: StepInputs) -> tuple[Any, ...]:
        """Collect all values that a captured step depends on. Another key needs another graph."""
        # Processors matter only if they are part of the graph.
        processors = self.processors if self.selects_in_graph else []
        chooses = [(type(p).__name__, *((name, _exact(value)) for name, value in vars(p).items())) for p in processors]
        pad = None if self.pad is None else _exact(self.pad)
        return (
            id(self.model),
            attention_implementation(self.model.config),
            str(autocast_dtype(self.prompt)),
            str(adapters(self.model)),
            [(name, _exact(value)) for name, value in inputs.constants.items()],
            (chooses, self.sample, self.selects_in_graph, [_exact(end) for end in self.ends], pad),
            repr(self.compile_config),
            inputs.shapes,
            (self.prompt.shape[0], self.width),
            needs_of_graphs(self.model),
            tuple(tensor.data_ptr() for layer in self.layers for tensor in tensors_of(layer)),
        )


def _exact(value: Any) -> Any:
    """Convert a value to a part of a key. The `repr` of a tensor is rounded, so its elements are used."""
    return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else repr(value)


def tensors_of(layer: Any) -> list[torch.Tensor]:
    """All tensors of a layer that a step reads."""
    if isinstance(layer, TurboQuantLayer):
        store = layer.store
        return [] if store is None else [*chain(*store.tensors.by_kind().values()), *(store.device_counts or ())]
    return [value for _, _, value in leaves_of(layer).values() if isinstance(value, torch.Tensor)]


latest_steps: WeakKeyDictionary[TurboQuantCache, Any] = WeakKeyDictionary()
"""Step tensors of the last call, by cache. They do not refer to the cache, so they are freed with the cache."""
