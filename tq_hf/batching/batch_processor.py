"""transformers' batch processor on packed pages: steps, and requests of a step that failed."""

from __future__ import annotations

from collections.abc import Collection
from queue import SimpleQueue
from typing import Any, cast

import torch
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.utils import drain_queue
from transformers.utils import logging

from ..compat import forward_hooks
from .cache import TurboQuantPagedCache
from .layers import StateOffloading
from .prefixes import PrefixStore
from .requests import named, one_line
from .runner import TurboQuantModelRunner

logger = logging.get_logger(__name__)


class TurboQuantBatchProcessor(ContinuousBatchProcessor):
    """transformers' batch processor, able to continue after a failed step. `manager` has the model, the folder of
    prefixes, and a stream by device: cuBLAS allocates a workspace for each stream, which torch keeps."""

    cache: TurboQuantPagedCache
    model_runner: TurboQuantModelRunner
    computing = False
    """Whether a step runs."""

    def __init__(self, manager: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model_runner = TurboQuantModelRunner.like(self.model_runner)
        self.model_runner.take_over(manager.model, manager.compile_config, manager.graphs_are_requested)
        if self.cache.states is not None:
            self.offloading_manager = StateOffloading.like(self.offloading_manager)
        io, offloading = self.inputs_and_outputs, cast(Any, self.offloading_manager)
        stream = manager.streams.setdefault(manager.model.device, io.compute_stream)
        io.compute_stream = offloading._compute_stream = stream
        folder = manager.prefix_cache
        if folder is not None and forward_hooks(manager.model.modules()):
            logger.warning("The model has forward hooks, which may change keys: prefixes in files are not used.")
        elif folder is not None:
            self.cache.prefixes = PrefixStore(self.cache, stream, folder, manager.model, manager._wake_up_loop.set)
        self._wait_for_device()

    def reset(self) -> None:
        super().reset()
        self._wait_for_device()

    def work_ahead(self, model: torch.nn.Module) -> bool:
        """Capture a graph or begin to compile if there is no request. Returns whether there may be more to do."""
        if self.cache.prefixes is not None and self.cache.prefixes.pump():
            return True
        if not self.model_runner.ahead or self.has_pending_requests():
            return False
        self._wait_for_device()  # asynchronous batches end with a step for requests that have ended
        return self.model_runner.work_ahead(model)

    def _wait_for_device(self) -> None:
        """Wait for the current stream, which resets inputs and zeroes the pool. Streams of the engine do not: a step
        could start before the reset and lose its inputs."""
        if self.cache.cache_tensor.is_cuda:
            torch.cuda.synchronize(self.cache.cache_tensor.device)

    @property
    def _inputs(self) -> ContinuousBatchingIOs:
        return self.model_runner.buffers()[0]

    # A request to be forked with one token left is first scheduled in a step without tokens. transformers would keep
    # the indices of the previous step there, and call the model with no tokens.

    def prepare_next_batch(self) -> bool:
        self._inputs.logits_indices.zero_()
        if self.cache.prefixes is not None:
            self.cache.prefixes.pump(bool(self.scheduler.active_requests), self.scheduler.safety_margin)
        return super().prepare_next_batch()

    def _generation_step(self, model: torch.nn.Module) -> None:
        self.computing = True
        if self._inputs.num_q_tokens:
            super()._generation_step(model)
        else:
            self.inputs_and_outputs.retrieve_device_outputs()
        self.computing = False

    def update_batch(self) -> None:
        runner = self.model_runner
        for future in self._inputs.requests_in_batch:
            # transformers forgets the blocks of an answer that ends, and of a part whose next one is scheduled.
            if future.state.status not in (RequestStatus.FINISHED, RequestStatus.PENDING):
                self.cache.mark_complete_blocks(future.state, future.complete_blocks)
            future.complete_blocks = {}
        if (step := runner.steps.pop(id(self._inputs), None)) is not None and step.details is not None:
            if not isinstance(io := self.inputs_and_outputs, ContinuousBatchingIOs):
                io.io_pairs[io.current_pair].d2h_over.synchronize()
            for state, logprobs in runner.logit_processor.details_of(step):
                if state.status not in (RequestStatus.FINISHED, RequestStatus.PENDING):
                    state.top_logprobs.append(logprobs)
        super().update_batch()

    def _update_tp_group_state(self) -> bool:
        """Take requests and cancellations from their queues, and return whether the engine stops at once. Requests that
        came since the last step fail then, as the others; transformers drops them."""
        if (given := self.input_queue) is None:
            return super()._update_tp_group_state()
        taken, copies = drain_queue(given), SimpleQueue[RequestState]()
        for state in taken:
            copies.put(state)
        self.input_queue = cast(Any, copies)
        stops = True
        try:
            stops = super()._update_tp_group_state()
        finally:
            self.input_queue = given
            for state in taken if stops else ():
                self._handle_request_error(RuntimeError("The engine was stopped before this request was read."), state)
        return stops

    def forget_prefixes(self) -> None:
        """Share no page of a request that has begun with later requests: the weights have changed."""
        offloaded = [name for name, state in self.scheduler.waiting_requests.items() if state.is_cpu_offloaded]
        self.cache.allocator.forget_prefixes(offloaded)
        if self.cache.prefixes is not None:
            logger.warning("The model has changed: prefixes in files are neither read nor saved from now on.")
            self.cache.prefixes.yield_pages()
            self.cache.prefixes = None

    def _handle_request_error(self, error: Exception, state: RequestState) -> None:
        if isinstance(error, ValueError):
            logger.error(f"Request {state.request_id} is refused: {error}")
        super()._handle_request_error(error, state)

    def fail_step(self, error: Exception) -> None:
        """Fail the requests of a step that raised `error`, and reset its inputs. All active requests fail if the error
        came from outside of the step, or if another step is running; and if there are none, those that wait."""
        scheduler, io = cast(Any, self.scheduler), self.inputs_and_outputs
        failed: dict[str, RequestState] = dict(scheduler.active_requests)
        if self.computing and isinstance(io, ContinuousBatchingIOs):
            failed = {name: state for name, state in failed.items() if name in self.computed}
        elif not failed:  # the error came while waiting requests were scheduled, and would come again
            failed = dict(scheduler.waiting_requests)
            scheduler.waiting_requests.clear()
            scheduler.waiting_requests_order.clear()
        # Log the long traceback at debug level only: each later step may fail in the same way.
        logger.debug("Where a step of continuous batching failed:", exc_info=error)
        logger.error(f"A step of continuous batching failed, and with the step {named(failed)}: {one_line(error)}")
        for name, state in failed.items():
            self._handle_request_error(error, state)
            self.offloading_manager.free_request_cpu_cache(state)
            scheduler.finish_request(name)
        self.forget_step(failed)

    @property
    def computed(self) -> set[str]:
        """Ids of the requests of the running step. Valid only if steps are computed one after the other."""
        return {future.state.request_id for future in self._inputs.requests_in_batch}

    def forget_step(self, names: Collection[str]) -> None:
        """Reset the inputs of a step without a result, and do not fork the requests `names` of that step."""
        scheduler = self.scheduler
        scheduler._requests_to_fork = [s for s in scheduler._requests_to_fork if s.request_id not in names]
        scheduler.block_new_requests = self.computing = False
        self.inputs_and_outputs.reset()
        self._wait_for_device()
