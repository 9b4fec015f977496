"""Requests outside of a step: order of the queue, ids of answers, names in the log."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler, Scheduler

from .checks import new_tokens

PATIENCE = 1e-3
"""Seconds per prompt token: how long later and shorter prompts may overtake a prompt under "shortest_first"."""
LISTED = 8
"""Maximum number of requests that a line of the log names."""


def one_line(error: BaseException | str) -> str:
    """Text of an error on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def named(names: Collection[str]) -> str:
    """Names of requests, shortened for a line of the log."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"request{'s' * (len(names) != 1)} {', '.join(list(names)[:LISTED])}{more}"


class ShortestFirst(FIFOScheduler):
    """transformers' FIFO scheduler, except that shorter prompts go first.

    Waiting requests are ordered by time of arrival plus `PATIENCE` seconds per prompt token. Requests that arrive after
    that time do not overtake, so no request waits forever. In a burst most requests get their first token much earlier
    than in the order of arrival, where half of them wait until half of all tokens are read.
    """

    def _get_waiting_candidates(self) -> list[RequestState]:
        waiting = super()._get_waiting_candidates()
        fresh = [state for state in waiting if not state.is_cpu_offloaded]
        fresh.sort(key=lambda state: state.created_time + PATIENCE * len(state.remaining_prefill_tokens))
        following = iter(fresh)  # offloaded requests keep their positions
        return [state if state.is_cpu_offloaded else next(following) for state in waiting]


def scheduler_class(name: str) -> Callable[..., Scheduler]:
    """Return a subclass of the scheduler `name` with two checks.

    New requests that exceed the cache or the model's positions are refused. Answers end at the model's last position.
    """
    base: Any = ShortestFirst if name == "shortest_first" else SCHEDULER_MAPPING.get(name, FIFOScheduler)

    class CheckedScheduler(base):
        def add_waiting_request(self, state: RequestState) -> None:
            self.cache.check_room(state)
            limit = new_tokens(len(state.initial_tokens), state.max_new_tokens, self.cache.config)
            if limit is not None:
                state._new_tokens_limit = limit
            if state.max_new_tokens is not None:  # forks copy it; a request without a limit may outgrow the pool
                state.max_new_tokens = limit
            super().add_waiting_request(state)

    return CheckedScheduler


class AnswerRouter(OutputRouter):
    """transformers' output router with unique ids: two requests of one id would share pages and an answer."""

    def __init__(self) -> None:
        super().__init__()
        self._open: set[str] = set()

    def claim(self, request_id: str) -> str:
        """Return `request_id`, with a number appended if a request of that id is not answered yet."""
        with self._lock:
            unique, number = request_id, 1
            while unique in self._open:
                number += 1
                unique = f"{request_id}#{number}"
            self._open.add(unique)
        return unique

    def release(self, request_id: str) -> None:
        """Free the id of a request that was answered or dropped."""
        with self._lock:
            self._open.discard(request_id)

    def _release_finished(self, *outputs: GenerationOutput) -> None:
        for output in outputs:
            if output.status in (RequestStatus.FINISHED, RequestStatus.FAILED):
                self.release(output.request_id)

    def _is_awaited(self, output: GenerationOutput) -> bool:
        """Whether an output can be delivered: not after its event loop has closed (a server that shuts down)."""
        handler = self.result_handlers.get(output.request_id)
        return handler is None or not handler[1].is_closed()

    def deliver(self, output: GenerationOutput) -> None:
        if self._is_awaited(output):
            super().deliver(output)
        self._release_finished(output)

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        super().deliver_batch([output for output in outputs if self._is_awaited(output)])
        self._release_finished(*outputs)
