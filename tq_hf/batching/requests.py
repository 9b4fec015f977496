"""Requests outside of a step: order of the queue, ids of answers, names in the log, what wakes the loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import (
    FutureRequestState,
    GenerationOutput,
    RequestState,
    RequestStatus,
)
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler, Scheduler
from transformers.utils import logging

from ..layers.base import Substitute
from .grammars import Matching
from .metrics import Metrics
from .options import LONGEST_STOP, RequestOptions
from .processors import OPTIONS, TokenLogprobs, answer_ids, split_answer_id

logger = logging.get_logger(__name__)

PATIENCE = 1e-3
"""Seconds per prompt token: how long later and shorter prompts may overtake a prompt under "shortest_first"."""
STEP_TOKENS = 2048
"""Number of prompt tokens per step under "shortest_first" while answers are generated. Each answer gets a token per
step. A prompt of 8,192 tokens takes 0.27 s on an H100 (8B shape), and one of 2,048 tokens 0.06 s."""
CPU_STEP_TOKENS = 256
"""Number of prompt tokens per step on a CPU, which reads some 100 to 200 tokens of a small model per second."""
LISTED = 8
"""Maximum number of requests that a line of the log names."""

SHORT_STEPS = "short_steps"


class StepAbandoned(Exception):
    """All requests of the running step are cancelled, or the engine stops at once."""


class WakeUp(threading.Event):
    """Event that wakes the loop for a request, a cancellation, a pause or a stop. transformers' own loop polls ten
    times a second. `work_ahead` does a piece of work, and returns whether there may be more."""

    idle = False
    """Whether the loop has no requests."""

    def __init__(self, work_ahead: Callable[[], bool]) -> None:
        super().__init__()
        self.work_ahead = work_ahead

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set. If idle, work ahead piece by piece, then wait without a timeout."""
        while self.idle and not self.is_set() and self.work_ahead():
            pass
        return super().wait(None if self.idle else timeout)


def text_of(error: BaseException | str) -> str:
    """Text of an error, or the name of its type where it has none."""
    return text if (text := str(error)).strip() else type(error).__name__


def one_line(error: BaseException | str) -> str:
    """Text of an error on one line."""
    return " ".join(text_of(error).split())


def named(names: Collection[str]) -> str:
    """Names of requests, shortened for a line of the log."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"request{'s' * (len(names) != 1)} {', '.join(list(names)[:LISTED])}{more}"


class PromptsInTurn(FIFOScheduler):
    """transformers' FIFO scheduler, which schedules requests that are answered, then prompts in an order of its own."""

    def take_turns(self, answered: int, prompts: list[RequestState], token_budget: int) -> Any:
        """Prompts in their order, and the number of their tokens in a step beside `answered` requests."""
        raise NotImplementedError

    def _process_candidates(self, candidates: list[RequestState], token_budget: int, *others: Any) -> Any:
        answered = [state for state in candidates if state.status == RequestStatus.DECODING]
        prompts = [state for state in candidates if state.status != RequestStatus.DECODING]
        prompts, most = self.take_turns(len(answered), prompts, token_budget)
        return super()._process_candidates(answered + prompts, min(token_budget, len(answered) + most), *others)

    def all_fit(self, prompts: list[RequestState]) -> bool:
        """Whether there is room for the rest of all prompts that are partly read. They hold pages, and others that took
        the last ones would stop them."""
        begun = (state for state in prompts if state.status == RequestStatus.PREFILLING)
        fits: Any = self.cache.can_store_request_tokens
        return all(fits(state, len(state.remaining_prefill_tokens), dry_run=True) for state in begun)


class ShortestFirst(PromptsInTurn):
    """Scheduler by which shorter prompts go first, and steps stay short. Prompts are ordered by time of arrival plus
    `PATIENCE` seconds per token that is not read yet. Requests that arrive after that time do not overtake, so no
    request waits forever. A prompt that is partly read is overtaken as well, while the pool has room for its rest. A
    step reads at most `STEP_TOKENS` tokens of prompts while answers are generated."""

    @staticmethod
    def _in_turn(prompts: list[RequestState]) -> list[RequestState]:
        """Prompts in their order. Offloaded requests keep their positions."""
        fresh = [state for state in prompts if not state.is_cpu_offloaded]
        fresh.sort(key=lambda state: state.created_time + PATIENCE * len(state.remaining_prefill_tokens))
        following = iter(fresh)
        return [state if state.is_cpu_offloaded else next(following) for state in prompts]

    def _get_waiting_candidates(self) -> list[RequestState]:
        return self._in_turn(super()._get_waiting_candidates())

    def take_turns(self, answered: int, prompts: list[RequestState], token_budget: int) -> Any:
        prompts = self._in_turn(prompts) if self.all_fit(prompts) else prompts
        return prompts, STEP_TOKENS if answered else token_budget


class ShortSteps(PromptsInTurn):
    """Scheduler by which prompts share `CPU_STEP_TOKENS` tokens of a step. Beside others, the prompt that came first
    gets half of that, so that no prompt waits forever. The other half is for prompts with the fewest tokens left."""

    _first: tuple[RequestState | None, int] = (None, 0)
    """The prompt that came first, and the number of its tokens that a step may read."""

    def take_turns(self, answered: int, prompts: list[RequestState], token_budget: int) -> Any:
        if prompts and self.all_fit(prompts):
            first, *later = sorted(prompts, key=lambda state: state.created_time)
            self._first = first, CPU_STEP_TOKENS // 2 if answered or later else CPU_STEP_TOKENS
            prompts = [first, *sorted(later, key=lambda state: len(state.remaining_prefill_tokens))]
        return prompts, CPU_STEP_TOKENS

    def _schedule_request(self, state: RequestState, tokens: list[int], token_budget: int, *others: Any) -> None:
        first, most = self._first
        super()._schedule_request(state, tokens, min(token_budget, most) if state is first else token_budget, *others)


class Detokenizer:
    """Text of tokens, to find stop strings, by a tokenizer of transformers or a processor with a `tokenizer`. Requests
    hold it, and forks of a request do not copy it."""

    def __init__(self, tokenizer: Any) -> None:
        self.decode: Callable[[list[int]], str] = getattr(tokenizer, "tokenizer", tokenizer).decode

    def __deepcopy__(self, memo: Any) -> Detokenizer:
        return self

    def completes(self, tokens: list[int], strings: tuple[str, ...]) -> bool:
        """Whether the last of `tokens` completes one of `strings`, as in `generate()`."""
        tokens = tokens[-1 - max(len(each.encode()) for each in strings) :]  # a token has a byte or more
        # A token may be a part of a character, which decodes to U+FFFD.
        before, text = len(self.decode(tokens[:-1]).rstrip("\ufffd")), self.decode(tokens)
        return any(text.find(each, max(0, before - len(each) + 1)) >= 0 for each in strings)


class TurboQuantRequest(Substitute, RequestState):
    """transformers' state of a request, with the stop strings and log-probabilities that its options ask for."""

    detokenizer: Detokenizer | None = None
    first_token_time: float | None = None
    matching: Matching | None = None
    cached_tokens = 0
    """Number of tokens of the prompt that were found in pages."""
    refused = False
    """Whether the request failed by its own options."""
    top_logprobs: list[TokenLogprobs]

    @classmethod
    def of(cls, state: RequestState, detokenizer: Detokenizer | None) -> TurboQuantRequest:
        """A state of transformers' as one of this class, with the number of answers that its options ask for."""
        if isinstance(state, cls):
            return state
        made: TurboQuantRequest = cls.like(state)
        made.detokenizer, made.top_logprobs = detokenizer, []
        if made.options is not None and not state._true_initial_tokens:  # forks and preempted requests have some
            made.num_children = made.options.num_return_sequences - 1
        return made

    @property
    def options(self) -> RequestOptions | None:
        return self.logit_processor_kwargs.get(OPTIONS)

    def update_and_check_completion(self, token_id: int, logprob: float | None) -> bool:
        """Add a token. An answer also ends with a stop string, and with an error of its own check."""
        self.first_token_time = self.first_token_time or time.perf_counter()
        if self.error is None:
            if super().update_and_check_completion(token_id, logprob):
                return True
            try:
                if self.status != RequestStatus.DECODING or not self._stops():
                    return False
            except Exception as error:
                self.fail(error)
        self.status = RequestStatus.FINISHED
        return True

    def _stops(self) -> bool:
        """Whether the newest token completes a stop string."""
        if not (self.options and self.options.stop_strings):
            return False
        assert self.detokenizer is not None
        last = self.initial_tokens[-LONGEST_STOP - 1 :] + self.generated_tokens[-LONGEST_STOP - 1 :]
        return self.detokenizer.completes(last, self.options.stop_strings)

    @property
    def is_answered(self) -> bool:
        """Whether the last token that the answer may have is computed, or will be by the step that runs."""
        new_tokens = self.position_offset - len(self.initial_tokens) + 1
        return self.status == RequestStatus.DECODING and new_tokens >= self._new_tokens_limit

    def read_answer(self, newest: int | None) -> bool:
        """Let `matching` read the answer; `newest` is its last token if the host has not read it yet. Returns whether
        another token can follow: asynchronous batches have a step for an answer that has ended."""
        options: Any = self.options
        prompt = self._true_initial_tokens or len(self.initial_tokens)
        answer: list[Any] = self.initial_tokens[prompt:] + self.generated_tokens
        answer += [newest] * (self.position_offset - prompt - len(answer))
        if self.matching is None:
            self.matching = Matching(options.grammar.compiled, options.eos_token_ids)
        return self.matching.read(answer[self.matching.number :])

    def fail(self, error: Exception) -> None:
        """End this request alone, with what is generated, after the step that runs."""
        self.error, self.refused = text_of(error), isinstance(error, ValueError)
        logger.error(f"Request {self.request_id} fails: {one_line(error)}")

    def to_generation_output(self) -> GenerationOutput:
        """Create an output. `top_logprobs` is `None` unless asked for; `refused`: whether its own options failed it."""
        output: Any = super().to_generation_output()
        asked = self.options is not None and self.options.top_logprobs is not None
        output.first_token_time, output.cached_tokens = self.first_token_time, self.cached_tokens
        output.refused = self.refused
        if self.error is not None:
            output.status = RequestStatus.FAILED
        output.top_logprobs = self.top_logprobs[: len(output.generated_tokens)] if asked else None
        return output

    def create_equivalent_initial_request(self) -> RequestState:
        """Create the request that continues after this one was preempted."""
        state = self.of(super().create_equivalent_initial_request(), self.detokenizer)
        state.top_logprobs, state.first_token_time = self.top_logprobs[:], self.first_token_time
        state.cached_tokens = self.cached_tokens
        return state


SCHEDULERS: dict[str, Any] = {"shortest_first": ShortestFirst, SHORT_STEPS: ShortSteps} | SCHEDULER_MAPPING
"""Schedulers by name."""


def scheduler_class(name: str) -> Callable[..., Scheduler]:
    """Return a subclass of one of `SCHEDULERS` that makes each state a `TurboQuantRequest`, refuses requests that do
    not fit into the cache or the model's positions, and ends answers at the last position. Later requests pass a
    waiting one without room in one step only. Then it is the next to begin, and waits no longer for shorter ones."""
    base: Any = SCHEDULERS[name]

    class CheckedScheduler(base):
        detokenizer: Detokenizer | None = None
        forget: Callable[[str, int], None]
        """Function of the id of a request that was cancelled, and its number of answers."""
        number_cancelled = 0
        passed: str | None = None
        """Id of a waiting request that a later one has passed."""

        def _get_waiting_candidates(self) -> list[RequestState]:
            passed, prefixes = self.waiting_requests.get(self.passed), self.cache.prefixes
            found = super()._get_waiting_candidates() if passed is None else [passed]
            return found if prefixes is None else [x for x in found if not prefixes.is_loading(x.request_id)]

        def _infer_request_tokens(self, state: Any, *others: Any) -> list[int]:
            before, is_new = state.position_offset, state.status == RequestStatus.PENDING
            tokens = super()._infer_request_tokens(state, *others)
            if is_new and state.first_token_time is None and not state.is_cpu_offloaded:
                state.cached_tokens = state.position_offset - before
            return tokens

        def clear_cancelled_requests(self) -> list[RequestState]:
            asked = set(self._requests_to_cancel)
            cancelled = super().clear_cancelled_requests()
            self.number_cancelled += len(cancelled)
            for state in cancelled:
                self.forget(state.request_id, 1 + state.num_children)
                state.status, state.num_children = RequestStatus.FINISHED, 0  # a step that runs has no output for it
            if cancelled:  # their pages are free, as after an answer
                self.block_new_requests = False
                self._requests_to_fork[:] = [state for state in self._requests_to_fork if state.num_children]
            states = self.active_requests | self.waiting_requests
            for name in asked:  # a further answer is cancelled once it is forked
                request, number = split_answer_id(name)
                if number and request in states and states[request].num_children:
                    self.set_request_cancellation(name)
            return cancelled

        def schedule_batch(self, *budgets: int) -> Any:
            order = [] if self.block_new_requests else [each.request_id for each in self._get_waiting_candidates()]
            batch = super().schedule_batch(*budgets)
            waits = [name in self.waiting_requests for name in order]
            if self.passed not in self.waiting_requests:
                ahead = next((i for i, still in enumerate(waits) if still), len(order))
                self.passed = order[ahead] if not all(waits[ahead:]) else None
            return batch

        def _process_candidates(self, candidates: list[Any], *others: Any) -> Any:
            """Leave out answers that the running step of an asynchronous batch completes. If no other request has room,
            the next step has no tokens: the loop reads the results of a step once the next one is launched."""
            left = [state for state in candidates if not state.is_answered]
            found = super()._process_candidates(left, *others)
            if found[0] or len(left) == len(candidates):
                return found
            self.starved_requests.clear()  # the answers free their pages
            state = next(state for state in candidates if state.is_answered)
            state.tokens_to_process = []
            return [FutureRequestState(state, False, {}, 0)], False, False, 0, 0

        def add_waiting_request(self, state: RequestState) -> None:
            state = TurboQuantRequest.of(state, self.detokenizer)
            if (limit := self.cache.check_room(state)) is not None:
                state._new_tokens_limit = limit
            if state.max_new_tokens is not None:  # forks copy it; a request without a limit may outgrow the pool
                state.max_new_tokens = limit
            super().add_waiting_request(state)
            if self.cache.prefixes is not None and not state.is_cpu_offloaded:
                self.cache.prefixes.begin(state.request_id, state.remaining_prefill_tokens)

    return CheckedScheduler


class AnswerRouter(OutputRouter):
    """transformers' output router with unique ids: two requests of one id would share pages and an answer."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[str, int] = {}
        """Number of answers of each request that are not given yet."""
        self._ids = threading.Lock()
        """Held while ids are claimed or freed, and while an answer is delivered whose id is freed then."""
        self.metrics = Metrics()

    def is_open(self, request_id: str) -> bool:
        """Whether a request has answers that are not given yet."""
        with self._ids:
            return split_answer_id(request_id)[0] in self._open

    def claim(self, request_id: str, answers: int) -> str:
        """Return `request_id`, with a number appended if a request of that id has answers that are not given yet, or if
        the id is like that of a further answer."""
        with self._ids:
            unique, number = request_id, 1
            while unique in self._open or split_answer_id(unique)[1]:
                number += 1
                unique = f"{request_id}#{number}"
            self._open[unique] = answers
        return unique

    def forget(self, request_id: str, answers: int) -> None:
        """Count answers that will not be given: of a request that was cancelled or dropped."""
        with self._ids:
            self._count(request_id, answers)
        with self._lock:
            self.result_handlers.pop(request_id, None)

    def _count(self, request_id: str, answers: int) -> None:
        asked, _ = split_answer_id(request_id)
        left = self._open.pop(asked, 0) - answers
        if left > 0:
            self._open[asked] = left

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        by_loop: dict[Any, list[GenerationOutput]] = {}  # transformers would call all handlers in the loop of the last
        with self._ids:
            for output in outputs:
                _, loop = self.result_handlers.get(output.request_id, (None, None))
                by_loop.setdefault(loop, []).append(output)
            for group in by_loop.values():
                with suppress(RuntimeError):  # the loop is closed, as that of a server that shuts down
                    super().deliver_batch(group)
            for output in outputs:
                if output.status in (RequestStatus.FINISHED, RequestStatus.FAILED):
                    self._count(output.request_id, 1)
                    self.metrics.observe(output)

    def fail_and_deliver(self, state: RequestState, error: Exception) -> None:
        """Fail a request, and its further answers that do not exist yet: callers wait for them, too."""
        failed = [made := TurboQuantRequest.of(state, None)]
        for name in answer_ids(state.request_id, 1 + made.num_children)[1:]:
            child = RequestState(name, state.initial_tokens, logit_processor_kwargs=state.logit_processor_kwargs)
            failed.append(TurboQuantRequest.of(child, None))
        for each in failed:
            each.status, each.error = RequestStatus.FAILED, text_of(error)
        self.deliver_batch([each.to_generation_output() for each in failed])
