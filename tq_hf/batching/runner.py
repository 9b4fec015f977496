"""transformers' model runner on packed pages, with options by request: a step of the model, then its processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.utils import CudaGraphBuffer, stream_context
from transformers.utils import logging

from ..balance import POSITIONS
from ..compat import capture_failure, ending_failed_capture
from .attention import PAGES
from .processors import BatchOptions, Features, PreparedStep

logger = logging.get_logger(__name__)


class TurboQuantModelRunner(ModelRunner):
    """transformers' model runner. Kernels are launched one by one if a decode step cannot be captured in a graph."""

    graphs_are_requested = False
    """Whether the user asked for graphs. If so, a step that cannot be captured fails."""
    logit_processor: BatchOptions
    features = Features()
    """Processors that the running step needs after the model."""
    steps: dict[int, PreparedStep]
    """Steps that are not over, by the id of their input buffers."""

    def take_over(self, graphs_are_requested: bool) -> None:
        """Complete a runner of transformers' that was turned into one of this class."""
        self.graphs_are_requested, self.steps = graphs_are_requested, {}
        # transformers has compiled its own step, which chooses by one set of options for all.
        self.do_sample = False
        if (config := self.cb_config.decode_compile_config) is not None:
            step: Any = self._forward_process_and_sample
            self._compiled_decode = torch.compile(step, **config.to_dict())

    _positions: int | None = None
    """Number of positions of the model during a warm-up; `None` outside of a warm-up or without a limit."""

    def run_one_warmup(self, model: Any, *args: Any, **kwargs: Any) -> float:
        """Run a warm-up and wait until it ends.

        transformers overwrites the inputs of a warm-up that may still run. Our kernels would then read pages outside of
        the pool.
        """
        found = (getattr(model.config.get_text_config(), name, None) for name in POSITIONS)
        self._positions = min((number for number in found if isinstance(number, int)), default=None)
        try:
            seconds = super().run_one_warmup(model, *args, **kwargs)
        finally:
            self._positions = None
        if (stream := self.inputs_and_outputs.compute_stream) is not None:
            stream.synchronize()
        return seconds

    def compute_batch(self, model: torch.nn.Module, batch_data: dict[str, Any]) -> None:
        """Compute a step, and copy log-probabilities that requests ask for to the host.

        The request of a warm-up has the maximum number of tokens of a batch. If a learned embedding has fewer
        positions, positions are clamped: an index outside of the embedding leaves a GPU unusable.
        """
        batch_data[PAGES] = self.cache
        host, device = self._buffers()
        with stream_context(self.inputs_and_outputs.compute_stream):
            if self._positions is not None:
                batch_data["position_ids"].clamp_(max=self._positions - 1)
            self.features = self.logit_processor.begin()
        graphs = vars(device).setdefault("graphs_by_features", {})  # freed together with the buffers that they read
        device.graphs = graphs.setdefault(self.features, device.graphs if not graphs else CudaGraphBuffer())
        super().compute_batch(model, batch_data)
        with stream_context(self.inputs_and_outputs.compute_stream):
            self.steps[id(host)] = self.logit_processor.end()

    def _buffers(self) -> tuple[ContinuousBatchingIOs, ContinuousBatchingIOs]:
        """Buffers of the step on the host and on the device: one pair, or the same ones."""
        io = self.inputs_and_outputs
        if isinstance(io, ContinuousBatchingIOs):
            return io, io
        pair = io.io_pairs[io.current_pair]
        return pair.host_io, pair.device_io

    def _get_forward_fn(self, use_block_table: bool) -> tuple[Callable, bool]:
        """Return the function of a step. Processors are never compiled: other options would compile the model again."""
        forward, captured = super()._get_forward_fn(use_block_table)
        features = self.features
        if not any(features):
            return forward, captured

        def with_processors(model: Any, batch_data: dict[str, Any], *outputs: torch.Tensor) -> None:
            logits = forward(model, batch_data, *outputs)
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
        logits = model(**batch_data).logits
        if "logits_to_keep" not in batch_data:
            logits = logits[:, batch_data["logits_indices"], :]
        self._sample(logits.float(), output_ids)
        return logits[0]

    def _capture_graph(self, forward_fn: Callable, compute_stream: torch.cuda.Stream, *args: Any) -> None:
        """Compute a step, then capture it."""
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
            failed = f"A decode step of {type(model).__name__} cannot be captured as a CUDA graph"
            reason = capture_failure(error)
            if self.graphs_are_requested:
                raise RuntimeError(f"{failed} ({reason}). Leave out `use_cuda_graph`.") from error
            logger.warning_once(f"{failed} ({reason}). Kernels of each step are launched one by one, which is slower.")
            self.use_cuda_graph_decode = False
