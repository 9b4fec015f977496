"""transformers' model runner on packed pages, with options by request: a step of the model, then its processors."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from tq_kernels.format import BLOCK_TOKENS
from transformers import CompileConfig
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.utils import CudaGraphBuffer, stream_context
from transformers.utils import logging

from ..compat import (
    CACHE_NAME,
    capture_failure,
    ending_failed_capture,
    is_capturing,
    outside_inference_mode,
    trace_apart,
)
from ..config import number_of_positions
from ..layers.base import Substitute, replaced
from ..ops.dispatch import compile_kernels, planning
from ..prepared import CALLS, MOST_TOKENS, CompiledLayers, guarding_hooks
from .cache import TurboQuantPagedCache
from .layers import running
from .processors import BatchOptions, Features, PreparedStep

logger = logging.get_logger(__name__)

COMPILE_AFTER = 2_000
"""Number of decode steps after which they are compiled in the background even if there was always a request."""
MOST_GRAPHS = 32
"""Number of kinds of steps with prompts that are graphs: they differ in tokens, and in room for histories."""
SHORT_TURN = 1e-4
"""Seconds of a short turn. Beside four busy threads, a step of 32 layers that takes 16 ms alone took 32 s with turns of
5 ms, which is Python's default, 0.26 s with 1 ms, 0.05 s with 0.1 ms, and 0.08 s with 0.02 ms (two cores of a CPU)."""


compiling = threading.Lock()
"""Held while a thread takes short turns: the interval is of the process."""


@contextmanager
def short_turns() -> Iterator[None]:
    """Context in which Python's threads take turns of `SHORT_TURN`, for the time of compiling behind answers. A step
    lets other threads run at each of its operators, and then waits until the thread that compiles ends its turn."""
    with compiling:
        usual = sys.getswitchinterval()
        sys.setswitchinterval(min(usual, SHORT_TURN))
        try:
            yield
        finally:
            sys.setswitchinterval(usual)


def copied(arguments: Any) -> Any:
    """Copy the tensors in dicts, lists and tuples. Copies are views of one another where the originals are."""
    copies: dict[int, torch.Tensor] = {}

    def copy_of(states: torch.Tensor) -> torch.Tensor:
        if id(states) not in copies:
            view = states.shape, states.stride(), states.storage_offset()
            copies[id(states)] = states.clone() if states._base is None else copy_of(states._base).as_strided(*view)
        return copies[id(states)]

    return replaced(arguments, torch.Tensor, copy_of)


@cache
def compiling_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Stream of steps that are compiled in the background: one, as torch keeps a workspace of cuBLAS for each."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def compile_call(layers: CompiledLayers, pages: TurboQuantPagedCache, inference: bool, call: Any) -> None:
    """Compile a layer by a recorded `call` of it, with or without `inference` mode. No page is read or written. Inputs
    are copies with the sizes and views of the originals, so that the engine's own compile nothing again."""
    (layer, arguments, options), stream = call, compiling_stream(torch.device(pages.device))
    with running.step(pages, only_compiles=True), torch.cuda.stream(stream), guarding_hooks():
        with torch.inference_mode(inference), torch.no_grad():
            layers.forward[type(layer)](layer, *arguments, **options)
    if stream is not None:
        stream.synchronize()


class BackgroundCompile(threading.Thread):
    """Thread that compiles while an engine runs: calls the functions `work` one after the other, and `then` at the end.
    A function is let go of once it has run: it holds the inputs of a layer."""

    error: Exception | None = None
    done = False

    def __init__(self, work: list[Callable[[], Any]], then: Callable[[], None]) -> None:
        # A thread lets go of these arguments at its end: `then` holds the engine.
        super().__init__(name="tq_hf compiles", daemon=True, target=self._compile, args=(then,))
        self.work = work
        self.start()

    def _compile(self, then: Callable[[], None]) -> None:
        try:
            with short_turns():
                while self.work:
                    self.work.pop(0)()
        except Exception as error:
            self.error = error
        self.done = True
        then()

    def cancel(self, timeout: float | None = None) -> None:
        """Call no further function, and wait for the one that runs, up to `timeout` seconds."""
        self.work.clear()
        self.join(timeout)


class TurboQuantModelRunner(Substitute, ModelRunner):
    """transformers' model runner. Kernels are launched one by one if a decode step cannot be captured in a graph.

    A decode step has a graph per number of requests (1, 2, 4, ...) and pair of input buffers. Each is captured when a
    step first needs the graph; in a server, also while there is no request (`work_ahead`). A step with prompts and few
    tokens has a graph per number of tokens (64, 128, ...), room for history and pair.
    """

    graphs_are_requested = False
    """Whether the user asked for graphs. If so, a step that cannot be captured fails."""
    cache: TurboQuantPagedCache
    logit_processor: BatchOptions
    features = Features()
    """Processors that the running step needs after the model."""
    prompt_steps: Counter[tuple[int, ...]]
    """Number of steps with prompts and few tokens, by the key of their graph."""
    captured: set[tuple[int, ...]]
    """Keys of those that are graphs."""
    steps: dict[int, PreparedStep]
    """Steps that are not over, by the id of their input buffers."""
    missing: list[tuple[int, int | None]]
    """Warm-ups to run: number of requests (0 for a step with a prompt) and index of the pair of input buffers, which is
    `None` to compile kernels only."""
    only_compiles = False
    """Whether a warm-up compiles kernels and launches none."""
    ahead = False
    """Whether to work while there is no request."""
    layers: CompiledLayers | None = None
    """Layers that steps run compiled."""
    uncompiled: CompiledLayers
    """Layers that are compiled in the background, after calls of them were recorded."""
    calls: dict[int, list[Any]] | None = None
    """Copies of arguments of layers, by number of requests, until layers are compiled in the background."""
    decoded = 0
    """Number of decode steps since `warm_up_behind`."""
    behind: BackgroundCompile | None = None
    """Thread that compiles layers."""
    kernels: BackgroundCompile | None = None
    """Thread that waits for kernels of steps to be compiled."""
    wake_up: Callable[[], None]
    """Function that wakes the engine once steps or kernels are compiled."""

    def take_over(self, model: Any, config: CompileConfig | None, graphs_are_requested: bool) -> None:
        """Complete a runner that is `like` one of transformers, with layers compiled as a `config` says."""
        trace_apart()
        self.graphs_are_requested, self.steps = graphs_are_requested, {}
        self.do_sample, self.prompt_steps, self.captured = False, Counter[tuple[int, ...]](), set[tuple[int, ...]]()
        if config is not None:
            self.layers, self.pad_inputs = CompiledLayers(model, config), True
        self.list_warm_ups()
        self.missing = [*dict.fromkeys((requests, None) for requests, _ in self.missing), *self.missing]

    def list_warm_ups(self) -> None:
        """Set `missing` to the warm-ups of transformers' `warmup`, small steps first."""
        most, io, sizes = self.cb_config.max_requests_per_batch, self.inputs_and_outputs, [0]
        assert most is not None
        if self.cache.max_decode_fast_path_length > 0:
            sizes += [min(1 << i, most) for i in range((most - 1).bit_length() + 1)]
        pairs = range(1 if isinstance(io, ContinuousBatchingIOs) else len(io.io_pairs))
        self.missing = [(size, pair) for size in sizes for pair in pairs] if self.pad_inputs else []

    def warm_up_behind(self, wake_up: Callable[[], None]) -> None:
        """Capture graphs while there is no request. Run uncompiled steps at first, and compile in the background later.
        Call before the first step."""
        self.ahead, self.wake_up = True, wake_up
        # No graph comes of a long prompt.
        self.missing = [(requests, pair) for requests, pair in self.missing if requests or pair is None]
        self.missing += [(0, 0)] * self.cache.plans_prompts  # the last: a request would wait for it
        if self.layers is not None:
            self.uncompiled, self.layers, self.calls = self.layers, None, {}
            # A processor would wait for the thread to compile.
            self._processors_are_compiled, self.logit_processor.compiled = self.logit_processor.compiled, False

    def _begin_compiling(self) -> None:
        assert self.calls
        calls, self.calls = [*chain(*self.calls.values())], None
        if (stream := self.inputs_and_outputs.compute_stream) is not None:
            stream.synchronize()  # calls were copied there
        compiles = partial(compile_call, self.uncompiled, self.cache, torch.is_inference_mode_enabled())
        self.behind = BackgroundCompile([partial(compiles, call) for call in calls], self.wake_up)

    def _take_compiled(self) -> None:
        if self.kernels is not None and self.kernels.done:
            self.kernels = None  # a step that needs a kernel which does not compile raises the error
        if self.behind is None or not self.behind.done:
            return
        behind, self.behind = self.behind, None
        if behind.error is None:
            self.layers = self.uncompiled
            self.logit_processor.compiled = self._processors_are_compiled
            left = self.missing
            self.list_warm_ups()  # steps with prompts are not captured
            steps = [each for each in self.missing if each[0]]
            self.missing = [x for x in left if x[1] is None] + steps + [x for x in left if x == (0, 0)]
        else:
            reason = " ".join(str(behind.error).split()[:40])
            logger.warning(f"The step cannot be compiled, and stays as it is, which is slower: {reason}")

    @property
    def to_be_done(self) -> str | None:
        if self.behind is not None or self.calls:
            return "Steps are not compiled yet, and take longer."
        left = sum(bool(requests) for requests, pair in self.missing if pair is not None) if self.ahead else 0
        return f"Up to {left} graphs of steps are not captured yet." if left else None

    def work_ahead(self, model: torch.nn.Module) -> bool:
        """Run the next warm-up, or begin to compile. No step may be running. Returns whether to call again."""
        self._take_compiled()
        if self.behind is not None or self.kernels is not None:
            return False  # nothing can be captured while another thread uses the device
        if not self.missing:
            if self.calls:
                self._begin_compiling()
            return False
        if self.missing[0][1] is None:
            self.compile_kernels(model, 1, behind=True)
        else:
            self.run_warm_up(model, *self.missing.pop(0))
        return True

    def compile_kernels(self, model: torch.nn.Module, steps: int | None = None, behind: bool = False) -> None:
        """Compile the kernels of the next `steps` of `missing` that only compile, by default of all, several at a time.
        No step may be running. If `behind`, do not wait for the kernels."""
        sizes = [requests for requests, pair in self.missing if pair is None][:steps]
        del self.missing[: len(sizes)]

        def run_all() -> None:
            for requests in reversed(sizes):  # the kernel that appends and encodes takes the longest
                self.run_warm_up(model, requests, None)
                if not requests:
                    self.run_warm_up(model, 0, None, 2)  # few queries to few heads are split, which other kernels do

        self.only_compiles = True
        try:
            wait = compile_kernels(torch.empty(0, dtype=self.cache.dtype, device=self.cache.device), run_all)
        finally:
            self.only_compiles = False
        if behind:
            self.kernels = BackgroundCompile([wait], self.wake_up)
        else:
            with short_turns():
                wait()

    def forget_graphs(self) -> None:
        """Drop all graphs. They have the hooks, and addresses of weights, of their capture."""
        io = self.inputs_and_outputs
        if (stream := io.compute_stream) is not None:
            stream.synchronize()
        for device in [io] if isinstance(io, ContinuousBatchingIOs) else [pair.device_io for pair in io.io_pairs]:
            device.graphs = CudaGraphBuffer()
            vars(device).pop("graphs_by_features", None)

    def cancel(self, timeout: float | None = None) -> None:
        """Compile no further step, and wait for what is being compiled behind, up to `timeout` seconds each."""
        self.calls = None
        for thread in (self.behind, self.kernels):
            if thread is not None:
                thread.cancel(timeout)

    @torch.no_grad()
    def run_warm_up(self, model: Any, requests: int, pair: int | None, prompt: int | None = None) -> None:
        """Run a warm-up of `missing`, or of a step with `prompt` tokens. No step may be running."""
        io, cache, pair = self.inputs_and_outputs, self.cache, pair or 0
        pairs: Any = None if isinstance(io, ContinuousBatchingIOs) else io
        current = pair if pairs is None else pairs.current_pair
        if pairs is not None:
            pairs.current_pair = pair
        tokens = requests or prompt or cache.max_batch_tokens
        self._positions = number_of_positions(model.config.get_text_config())
        try:
            with ExitStack() if requests else planning():
                self.run_one_warmup(model, tokens, None if requests else max(0, cache.max_request_tokens - tokens))
        finally:
            self._positions = None
        # transformers overwrites the inputs of a warm-up that may still run: kernels would read outside of the pool.
        if (stream := io.compute_stream) is not None:
            stream.synchronize()
        # The next update of this pair must not find requests of a warm-up.
        host, _ = self.buffers()
        host.requests_in_batch = []
        self.steps.pop(id(host), None)
        cache.pool.try_to_free_sectors()
        if pairs is not None:
            pairs.current_pair = current

    _positions: int | None = None
    """Number of positions of the model during a warm-up; `None` outside of a warm-up or without a limit."""

    def compute_batch(self, model: torch.nn.Module, batch_data: dict[str, Any]) -> None:
        """Compute a step, and copy log-probabilities that requests ask for to the host. A warm-up has as many tokens as
        a batch may have. If a learned embedding has fewer positions, they are clamped: an index outside of the
        embedding leaves a GPU unusable."""
        self._take_compiled()
        self.cache.arguments = {name: x for name, x in batch_data.items() if x is not self.cache}  # else a circle
        if self.cache.holds_latents:
            batch_data[CACHE_NAME] = self.cache  # the engine's `cache` is not the model's before 5.24
        # transformers would write this to the config, and remove it after the step: another thread could not trace.
        batch_data.pop("is_causal", None)
        host, device = self.buffers()
        # Kernels of single tokens beside prompts are compiled, too.
        lengths = [(future.query_length, future.state.position_offset) for future in host.requests_in_batch]
        if self.only_compiles:  # and little history, which cuDNN would read
            lengths = [*((new, min(length, new + 100 * BLOCK_TOKENS)) for new, length in lengths), (1, 1)]
        known = tuple(new for new, _ in lengths), tuple(length - new for new, length in lengths)
        # A step that may be a graph reads them on the device, as the graph does.
        self.cache.lengths = None if host.use_cuda_graph_varlen else known
        with stream_context(self.inputs_and_outputs.compute_stream):
            if self._positions is not None:
                batch_data["position_ids"].clamp_(max=self._positions - 1)
            self.features = self.logit_processor.begin()
        graphs = vars(device).setdefault("graphs_by_features", {})  # freed together with the buffers that they read
        kind = Features(grammar=True) if self.features.grammar else self.features, self.layers is None
        device.graphs = graphs.setdefault(kind, device.graphs if not graphs else CudaGraphBuffer())
        with running.step(self.cache):
            super().compute_batch(model, batch_data)
        if self.features.grammar:
            self._choose_allowed(batch_data)
        if self.calls is not None and self.inputs_and_outputs.use_block_table and not self.only_compiles:
            self.decoded += 1
            # Steps of one request and of several compile apart, and a step would wait for the kind that is left out.
            both = len({min(size, 2) for size in self.calls}) == min(self.cb_config.max_requests_per_batch or 2, 2)
            if self.decoded >= COMPILE_AFTER and both:
                self._begin_compiling()
        with stream_context(self.inputs_and_outputs.compute_stream):
            self.steps[id(host)] = self.logit_processor.end()

    def _choose_allowed(self, batch_data: dict[str, Any]) -> None:
        """Choose tokens that grammars allow. In asynchronous batches, wait for the tokens of the step before, while the
        device computes the logits of this one."""
        io, newest, processor = self.inputs_and_outputs, dict[int, int](), self.logit_processor
        if not isinstance(io, ContinuousBatchingIOs):
            pair = io.io_pairs[1 - io.current_pair]
            pair.d2h_over.synchronize()
            host = pair.host_io
            requests, tokens, _ = host.prepare_batch_update()
            newest = dict(zip([id(future.state) for future in requests if future.has_new_token], tokens, strict=False))
        with stream_context(io.compute_stream):
            processor.write_masks(newest)
            tokens = batch_data["input_ids"][0, batch_data["logits_indices"]]
            processor.choose(processor.logits[: len(tokens)], tokens, self.features, io.get_cb_kwargs()[-1])

    def maybe_pad_inputs(self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> tuple[int, int]:
        """Pad the numbers of tokens of the next step, and of tokens that it reads. A step with prompts and few tokens
        has a power of two of them: it may be a graph."""
        if not num_q_tokens:
            return 0, 0
        tokens, read = super().maybe_pad_inputs(num_q_tokens, max_kv_read, use_decode_fast_path)
        may_be_graph = self.use_cuda_graph_varlen and not use_decode_fast_path and tokens <= MOST_TOKENS
        for io in self.buffers():
            io.use_cuda_graph_varlen = may_be_graph  # pads the greatest length, too
        if may_be_graph:
            tokens = min(1 << (tokens - 1).bit_length(), self.cache.max_batch_tokens)
            read = min(1 << (read - 1).bit_length(), self.cache.max_tokens_read)
        return tokens, read

    def _captures_prompts(self) -> bool:
        """Whether the running step with prompts is a graph."""
        _, device = self.buffers()
        if not device.use_cuda_graph_varlen:
            return False
        self.prompt_steps[key := device._get_graph_key()] += 1
        if self.prompt_steps[key] >= CALLS and len(self.captured) < MOST_GRAPHS:
            self.captured.add(key)
        return key in self.captured

    def buffers(self) -> tuple[ContinuousBatchingIOs, ContinuousBatchingIOs]:
        """Buffers of the step on the host and on the device: one pair, or the same ones."""
        io = self.inputs_and_outputs
        if isinstance(io, ContinuousBatchingIOs):
            return io, io
        pair = io.io_pairs[io.current_pair]
        return pair.host_io, pair.device_io

    def _get_forward_fn(self, use_block_table: bool) -> tuple[Callable, bool]:
        """Return the function of a step. Processors are never compiled: other options would compile the model again."""
        if self.only_compiles:
            return self._forward_process_and_sample, False
        forward, captured = super()._get_forward_fn(use_block_table)
        captured = captured and (use_block_table or self._captures_prompts())
        # With prompts, linear layers are called once for each length, and latents are expanded by their module.
        prompts = self.cache.states is None and not self.cache.holds_latents
        if self.layers is not None and (use_block_table or (prompts and self.layers.takes_prompts)):
            forward = self.layers.within(forward)
        if self.behind is not None:
            # While another thread uses the device, no graph can be captured.
            captured = captured and self.inputs_and_outputs.get_graph() is not None
        features = self.features
        if not any(features):
            return forward, captured

        def with_processors(model: Any, batch_data: dict[str, Any], *outputs: torch.Tensor) -> None:
            logits = forward(model, batch_data, *outputs)
            if features.grammar:
                self.logit_processor.logits[: len(logits)].copy_(logits)
                return
            tokens = batch_data["input_ids"][0, batch_data["logits_indices"]]
            self.logit_processor.choose(logits, tokens, features, outputs[-1])

        return with_processors, captured

    # Copied from transformers, because the original returns nothing and samples by one set of options for all.
    def _forward_process_and_sample(  # type: ignore[override]
        self,
        model: torch.nn.Module,
        batch_data: dict[str, Any],
        carry_over_ids: torch.Tensor,
        prev_output_ids: torch.Tensor,
        output_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Run the model and choose the likeliest tokens. Returns logits `[N, vocabulary]` of the last tokens."""
        self.inputs_and_outputs.carry_over_tokens(batch_data["input_ids"], carry_over_ids, prev_output_ids)
        logits = self._call(model, batch_data).logits
        if "logits_to_keep" not in batch_data:
            logits = logits[:, batch_data["logits_indices"], :]
        self._sample(logits.float() if self.return_logprobs else logits, output_ids)
        return logits[0]

    def _call(self, model: Any, batch_data: dict[str, Any]) -> Any:
        """Call the model. Record calls of layers that are compiled later, in a step of one new token per request."""
        size, calls = batch_data["input_ids"].shape[1], list[Any]()
        decodes = self.inputs_and_outputs.use_block_table and not self.only_compiles
        if self.calls is None or size in self.calls or not decodes or is_capturing():
            return model(**batch_data)
        with self.uncompiled.recording(calls):
            outputs = model(**batch_data)
        self.calls[size] = outside_inference_mode(copied)(calls)
        return outputs

    def _capture_graph(self, forward_fn: Callable, compute_stream: torch.cuda.Stream, *args: Any) -> None:
        model, computed = args[0], False

        def compute(*args: Any) -> None:
            nonlocal computed
            forward_fn(*args)
            computed = True

        try:
            with ending_failed_capture(model.device, self.graph_pool_id):
                super()._capture_graph(compute, compute_stream, *args)
        except RuntimeError as error:
            if not computed:
                raise
            decodes = self.inputs_and_outputs.use_block_table
            failed = capture_failure(model, error, "A decode step" if decodes else "A step with few tokens of prompts")
            if self.graphs_are_requested:
                raise RuntimeError(f"{failed} Leave out `use_cuda_graph`.") from error
            logger.warning_once(f"{failed} Kernels of each step are launched one by one, which is slower.")
            setattr(self, "use_cuda_graph_decode" if decodes else "use_cuda_graph_varlen", False)
