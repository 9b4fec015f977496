"""The engine's loop around packed pages: what it refuses, and how it goes on after a step that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler, Scheduler


def scheduler_class(name: str) -> Callable[..., Scheduler]:
    """transformers' scheduler of that name, which refuses requests longer than the cache when they come."""
    kind: Any = SCHEDULER_MAPPING.get(name, FIFOScheduler)

    class CheckedScheduler(kind):
        def add_waiting_request(self, state: RequestState) -> None:
            self.cache.check_room(state)
            super().add_waiting_request(state)

    return CheckedScheduler


class TurboQuantBatchProcessor(ContinuousBatchProcessor):
    """transformers' processor, whose requests can fail without it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wait_for_the_device()

    def reset(self) -> None:
        """Begin a session as if there had been none."""
        super().reset()
        self._wait_for_the_device()

    def _wait_for_the_device(self) -> None:
        """Wait for what is queued: the engine's streams do not.

        Inputs are reset on the current stream, and those of a step are copied to them on another: where that came
        first, a step was computed with zeros for its inputs. Pool and channel scales are on the current stream, too.
        """
        if self.cache.cache_tensor.is_cuda:
            torch.cuda.synchronize(self.cache.cache_tensor.device)

    def warmup(self, model: torch.nn.Module) -> None:
        """Capture graphs, one after the other.

        transformers copies the inputs of a warm-up to where the one before may still be reading its own. That is
        harmless to attention that takes any page for its, and leads ours out of the pool.
        """
        runner: Any = self.model_runner
        stream = self.inputs_and_outputs.compute_stream
        warm_up = runner.run_one_warmup

        def waited_for(*args: Any, **kwargs: Any) -> float:
            seconds = warm_up(*args, **kwargs)
            if stream is not None:
                stream.synchronize()
            return seconds

        runner.run_one_warmup = waited_for
        try:
            super().warmup(model)
        finally:
            del runner.run_one_warmup

    @property
    def _inputs(self) -> ContinuousBatchingIOs:
        """What the next step is written to."""
        io = self.inputs_and_outputs
        return io if isinstance(io, ContinuousBatchingIOs) else io.io_pairs[io.current_pair].host_io

    # A request of which only the last token is left is in a step without tokens before it is forked. transformers does
    # not reckon with that: it forgets as many indices of the step before as there are tokens and reads as many as there
    # are requests, and models cannot compute nothing.

    def prepare_next_batch(self) -> bool:
        """Choose the requests of the next step and write its inputs."""
        self._inputs.logits_indices.zero_()
        return super().prepare_next_batch()

    def _generation_step(self, model: torch.nn.Module) -> None:
        if self._inputs.num_q_tokens:
            super()._generation_step(model)
        else:
            self.inputs_and_outputs.retrieve_device_outputs()

    def _handle_request_error(self, error: Exception, state: RequestState) -> None:
        if isinstance(error, ValueError):
            router: Any = self.output_router
            router.refused[state.request_id] = str(error)
        super()._handle_request_error(error, state)
        # Somebody waits for its forks, too, which are not made yet.
        for i in range(state.num_children):
            child = RequestState(f"{state.request_id}__child#{i}", initial_tokens=state.initial_tokens)
            self.output_router.fail_and_deliver(child, error)

    def fail_step(self, error: Exception, in_step: bool) -> None:
        """Fail the requests of a step that raised `error` and forget the step.

        Args:
            error: What they are told.
            in_step: Whether the model was computing. If not, or if another step is under way, all active requests fail.
        """
        scheduler, io = self.scheduler, self.inputs_and_outputs
        failed: dict[str, RequestState] = dict(scheduler.active_requests)
        if in_step and isinstance(io, ContinuousBatchingIOs):
            computed = {future.state.request_id for future in io.requests_in_batch}
            failed = {name: state for name, state in failed.items() if name in computed}
        for name, state in failed.items():
            self._handle_request_error(error, state)
            self.offloading_manager.free_request_cpu_cache(state)
            scheduler.finish_request(name)
        scheduler._requests_to_fork = [s for s in scheduler._requests_to_fork if s.request_id not in failed]
        scheduler.block_new_requests = False
        io.reset()
        self._wait_for_the_device()
