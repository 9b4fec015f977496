"""Processors of logits with options by request, over the whole batch and on the device.

transformers' engine keeps one set of processors for all steps, chosen when it starts, and its processors know no
earlier tokens. Here a step runs the processors that one of its requests needs, after the model and in the same captured
graph; a step of greedy requests without options runs none. Requests with logits that depend on earlier tokens own a
slot of `History`, which the host fills at their first step and each later step updates on the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from transformers import LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

from ..ops.dispatch import truncate
from .options import MOST_BIASES, MOST_LOGPROBS, MOST_PREFIX, Features, RequestOptions

OPTIONS = "options"
"""Key of the options of a request in its `logit_processor_kwargs`."""
SAMPLED, GREEDY = 0, -1
"""Ways to choose the token of a request: sampled with the generator of torch, or the likeliest token. Positive numbers
are the keys of seeded requests."""
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
"""Constants of a 32-bit hash (Chris Wellons, "Prospecting for hash functions", `lowbias32`)."""
MOST_COUNTED = 2**14 - 2
"""Number up to which the occurrences of a token in an answer are counted."""
MASK_THREADS = min(7, max(1, (os.cpu_count() or 2) - 1))
"""Threads that write masks beside that of the engine. A mask takes 0.01 to 0.4 ms, by vocabulary and grammar."""


def mixed(x: Any) -> Any:
    """Hash a 32-bit number or a tensor of them (stored as int64) by `lowbias32`."""
    for shift, multiplier in zip((16, 15), MULTIPLIERS, strict=True):
        x = (x ^ (x >> shift)) * multiplier & 0xFFFFFFFF
    return x ^ (x >> 16)


def key_of(seed: int, position: int) -> int:
    """Key of the token at a position of a seeded request: 1 to 2**31 - 1."""
    return mixed(mixed(seed & 0xFFFFFFFF) ^ position) % 0x7FFFFFFF + 1


def split_answer_id(answer_id: str) -> tuple[str, int]:
    """Id of the request that an answer is to, and the number of the answer: `x` and i + 1 of `x__child#i`, else 0."""
    request_id, _, number = answer_id.rpartition("__child#")
    return (request_id, int(number) + 1) if request_id and number.isdecimal() else (answer_id, 0)


def answer_ids(request_id: str, number: int) -> list[str]:
    """Ids of the answers to a request: its own, and those of its forks."""
    return [request_id, *(f"{request_id}__child#{i}" for i in range(number - 1))]


def gumbel_noise(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Gumbel noise of keys `[N]` int32 and tokens, `[N, vocabulary]` float32; 0 where the key is not positive.

    The token with the largest sum of logit and noise is a sample of the softmax (Gumbel, 1954), and independent of the
    rest of the batch.
    """
    tokens, keys = torch.arange(vocabulary, device=keys.device), keys[:, None].long()
    # Take the logarithm of 1 - u: floats near 0 have more precision, and the noise is largest there.
    uniform = mixed(mixed(tokens) ^ keys).float().add(0.5).mul(2.0**-32).clamp(max=1 - 2.0**-24)
    return torch.where(keys > 0, -torch.log(-torch.log1p(-uniform)), 0.0)


@cache
def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function, dynamic=True)


class Rows(NamedTuple):
    """Options of a batch, each `[N]`: int32, from `temperature` on float32."""

    slots: torch.Tensor
    grown: torch.Tensor
    """1 if the step's input token is not in the slot yet."""
    generated: torch.Tensor
    """Number of tokens generated before the step."""
    keys: torch.Tensor
    """`SAMPLED`, `GREEDY` or the key of a seed."""
    top_k: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


def penalize(scores: torch.Tensor, counts: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Apply penalties of repetition, presence and frequency to `scores` `[N, vocabulary]` float32, by `History.counts`
    of the same shape."""
    penalty, generated = rows.repetition[:, None], counts >> 1
    scores = torch.where(counts > 0, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    return scores - generated * rows.frequency[:, None] - (generated > 0) * rows.presence[:, None]


def masked(scores: torch.Tensor, masks: torch.Tensor, biased: bool = True) -> torch.Tensor:
    """Scores `[N, vocabulary]` of the tokens whose bit is set in `masks`, `[N, 1 + vocabulary // 32]` int32. Tokens
    that biases ban are allowed if no others are."""
    bits = masks.view(torch.uint8)[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=masks.device) & 1
    allowed = bits.flatten(1)[:, : scores.shape[1]].bool()
    scores = torch.where(allowed, scores, -torch.inf)
    if not biased:
        return scores
    return torch.where(allowed & (scores.amax(1, keepdim=True) == -torch.inf), 0.0, scores)


class History:
    """Tokens and biases of requests, a slot each, and one more slot for requests without. A slot has 2 bytes per token
    of the vocabulary, and 44 KiB."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(slots + 1, *shape, dtype=dtype, device=device)

        self.counts = zeros(vocabulary, dtype=torch.int16)
        """Twice the number of occurrences in the answer, plus 1 for tokens of the prompt."""
        self.recent = zeros(MOST_PREFIX, dtype=torch.int32)
        """Last tokens, the newest last; -2 before the first."""
        self.prefixes = zeros(MOST_BIASES, MOST_PREFIX, dtype=torch.int32)
        """Tokens before a biased one; -1 matches any."""
        self.biased = zeros(MOST_BIASES, dtype=torch.int64)
        self.values = zeros(MOST_BIASES, dtype=torch.float32)
        self.until = zeros(MOST_BIASES, dtype=torch.int32)

    def load(self, slot: int, tokens: list[int], prompt: int, options: RequestOptions) -> None:
        """Fill a slot with the tokens of a request. The first `prompt` of them are its prompt."""
        device = self.counts.device

        def moved(values: Any, dtype: torch.dtype) -> torch.Tensor:
            host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
            return host.to(device, non_blocking=True)

        self.counts[slot].zero_()
        if options.has_penalties:
            self.counts[slot].index_fill_(0, moved(tokens[:prompt], torch.int64), 1)
            answer, numbers = torch.tensor(tokens[prompt:], dtype=torch.int64).unique(return_counts=True)
            if len(answer):
                numbers = 2 * numbers.clamp(max=MOST_COUNTED)
                self.counts[slot].index_add_(
                    0, moved(answer.tolist(), torch.int64), moved(numbers.tolist(), torch.int16)
                )
        last = tokens[-MOST_PREFIX:]
        self.recent[slot].copy_(moved([-2] * (MOST_PREFIX - len(last)) + last, torch.int32))
        self.until[slot].zero_()
        if count := len(options.biases):
            prefixes = [[-1] * (MOST_PREFIX + 1 - len(b.tokens)) + list(b.tokens[:-1]) for b in options.biases]
            self.prefixes[slot, :count].copy_(moved(prefixes, torch.int32))
            self.biased[slot, :count].copy_(moved([b.tokens[-1] for b in options.biases], torch.int64))
            self.values[slot, :count].copy_(moved([b.value for b in options.biases], torch.float32))
            self.until[slot, :count].copy_(moved([b.until for b in options.biases], torch.int32))

    def process(self, scores: torch.Tensor, tokens: torch.Tensor, rows: Rows, compiled: bool = False) -> torch.Tensor:
        """Take up the newest token `[N]` of each request, then apply biases and penalties to `scores`
        `[N, vocabulary]` float32, which are overwritten. `compiled`: whether penalties are one compiled kernel."""
        slots, tokens = rows.slots.long(), tokens.long()
        before, recent = self.counts[slots, tokens], self.recent[slots]
        grows = rows.grown.bool()
        self.counts[slots, tokens] = torch.where(grows & (before < 2 * MOST_COUNTED), before + 2, before)
        shifted = torch.cat((recent[:, 1:], tokens[:, None].int()), 1)
        recent = torch.where(grows[:, None], shifted, recent)
        self.recent[slots] = recent
        prefixes = self.prefixes[slots]  # [N, MOST_BIASES, MOST_PREFIX]
        applies = ((prefixes == recent[:, None]) | (prefixes == -1)).all(-1) & (
            rows.generated[:, None] < self.until[slots]
        )
        scores.scatter_add_(1, self.biased[slots], torch.where(applies, self.values[slots], 0.0))
        return (_compiled(penalize) if compiled else penalize)(scores, self.counts[slots], rows)


def _alone(state: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Result of a function; `None` if it fails, and with it this request alone."""
    try:
        return function(*arguments)
    except torch.AcceleratorError:
        raise  # the device is broken
    except Exception as error:
        state.fail(error)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at a position of an answer: of the chosen token, and by token of the most likely ones."""

    logprob: float
    top: dict[int, float]


@dataclass
class PreparedStep:
    """Requests of a step that get a token, and what of their options the device needs."""

    requests: list[RequestState]
    options: list[RequestOptions]
    features: Features
    packed: torch.Tensor
    """Rows of the step on the host."""
    loads: list[tuple[RequestState, tuple[int, list[int], int, RequestOptions]]] = field(default_factory=list)
    """Requests whose slot is filled, and arguments of `History.load`."""
    details: torch.Tensor | None = None
    """Log-probabilities on the host, once the step is over."""


class BatchOptions(ContinuousBatchingLogitsProcessorList):
    """Processors of an engine, in the place of transformers' list. A step has up to `requests` requests; those without
    options of their own, of a warm-up, have the `default`. `compiled`: whether processors that go over all logits
    number by number are compiled, as the model's step is."""

    def __init__(
        self, default: RequestOptions, requests: int, vocabulary: int, device: torch.device, compiled: bool = False
    ) -> None:
        super().__init__(LogitsProcessorList())
        self.compiled = compiled
        self.default, self.size, self.vocabulary, self.device = default, requests, vocabulary, device
        self.history: History | None = None
        self.step: PreparedStep | None = None
        """The step whose inputs were prepared last."""
        self.slots: dict[int, tuple[RequestState, int, int]] = {}
        """By the id of a request's state: the state, its slot, and the number of its tokens that the slot knows. The
        request that was not in a step for longest comes first."""
        neutral = torch.tensor([requests, 0, 0, GREEDY, 0], dtype=torch.int32)
        floats = torch.tensor(RequestOptions().numbers).view(torch.int32)
        self._neutral = torch.cat((neutral, floats))[:, None].repeat(1, requests)
        self.packed = self._neutral.to(device, copy=True)
        """Rows of the running step, `[len(Rows._fields), requests]`: one address, for graphs."""
        self.logits = torch.empty(0)
        """Logits `[requests, vocabulary]` float32 of steps with grammars; empty before the first."""
        self.threads = ThreadPoolExecutor(MASK_THREADS, "masks")
        self.details = torch.zeros(requests, 1 + 2 * MOST_LOGPROBS, dtype=torch.int32, device=device)
        """Log-probabilities of the running step: of the chosen token, then the most likely tokens, then theirs."""

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Accept the options of a request, which `add_request` has checked."""

    def prepare_tensor_args(
        self, requests_in_batch: list[FutureRequestState], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        """Write down the options of the step that begins; `arg_storage` has no rows."""
        states = [request.state for request in requests_in_batch if request.has_new_token]
        options = [state.logit_processor_kwargs.get(OPTIONS, self.default) for state in states]
        features = Features.of(options)
        self.step = PreparedStep(states, options, features, self._neutral)
        if any(features):
            self._write(self.step)
        return arg_storage

    def _write(self, step: PreparedStep) -> None:
        """Write the rows of a step, and give slots to its requests."""
        keep = {id(state) for state in step.requests}
        whole, others = [], []
        for state, options in zip(step.requests, step.options, strict=True):
            prompt = state._true_initial_tokens or len(state.initial_tokens)
            position, slot, grown = state.position_offset, self.size, 0
            if options.has_history:
                slot, known = self._slot_of(state, keep)
                if known == position - 1:
                    grown = 1
                else:
                    tokens = (state.initial_tokens + state.generated_tokens)[:position]
                    assert len(tokens) == position
                    step.loads.append((state, (slot, tokens, prompt, options)))
                self.slots[id(state)] = state, slot, position
            key = GREEDY if not options.do_sample else SAMPLED
            if options.do_sample and options.seed is not None:
                key = key_of(options.seed + split_answer_id(state.request_id)[1], position)
            whole.append((slot, grown, position - prompt, key, options.top_k))
            others.append(options.numbers)
        step.packed = self._neutral.clone()
        step.packed[:5, : len(whole)] = torch.tensor(whole, dtype=torch.int32).T
        step.packed[5:, : len(whole)] = torch.tensor(others).view(torch.int32).T
        if self.device.type == "cuda":
            step.packed = step.packed.pin_memory()

    def _slot_of(self, state: RequestState, keep: set[int]) -> tuple[int, int]:
        """Slot of a request, and the number of tokens that the slot knows. The request is moved to the end of `slots`.

        A request that is in no step loses its slot if there is no other: the host knows all of its tokens then.
        """
        if (found := self.slots.pop(id(state), None)) is not None:
            return found[1:]
        if len(self.slots) < self.size:
            return min(set(range(self.size)) - {slot for _, slot, _ in self.slots.values()}), -1
        return self.slots.pop(next(each for each in self.slots if each not in keep))[1], -1

    def begin(self) -> Features:
        """Copy the options of the prepared step to the device, on the current stream, without waiting."""
        assert self.step is not None
        if any(self.step.features):
            self.packed.copy_(self.step.packed, non_blocking=True)
        if self.step.features.history and self.history is None:
            self.history = History(self.size, self.vocabulary, self.device)
        if self.step.features.grammar and not len(self.logits):
            self.logits = torch.empty(self.size, self.vocabulary, device=self.device)
            host = torch.empty(self.size, 1 + self.vocabulary // 32, dtype=torch.int32)
            self.masks, self._masks = host.to(self.device), host.pin_memory() if self.device.type == "cuda" else host
        for state, load in self.step.loads:
            assert self.history is not None
            _alone(state, self.history.load, *load)
        return self.step.features

    def write_masks(self, newest: dict[int, int]) -> None:
        """Write the masks of the running step, by several threads, and copy them to the device, on the current stream,
        without waiting. `newest` has the token that the step before has chosen, by the id of a request's state."""
        assert self.step is not None
        masks, rows = self._masks[: len(self.step.requests)].fill_(-1), list[tuple[int, Any]]()
        for row, (state, options) in enumerate(zip(self.step.requests, self.step.options, strict=True)):
            if options.grammar is not None and _alone(state, cast(Any, state).read_answer, newest.get(id(state))):
                rows.append((row, state))
        left = iter(rows)

        def write() -> None:
            for row, state in left:
                _alone(state, state.matching.write, masks, row)

        others = [self.threads.submit(write) for _ in range(min(MASK_THREADS, len(rows) // 2))]
        write()
        for other in others:
            other.result()
        some = masks.any(1).tolist()
        for row, state in rows:
            if not some[row]:
                state.fail(ValueError("The grammar goes on with a text that no token of the model begins. Change it."))
        self.masks[: len(masks)].copy_(masks, non_blocking=True)

    def choose(self, logits: torch.Tensor, tokens: torch.Tensor, features: Features, output: torch.Tensor) -> None:
        """Choose the next tokens, in place of those that the step has chosen greedily.

        Args:
            logits, tokens: `[N, vocabulary]`, and the newest token of each request, `[N]`.
            features: Processors to run.
            output: Chosen tokens, `[1, ...]` int32; a second row for their log-probabilities (float32 bits).
        """
        number = len(logits)
        packed = self.packed[:, :number]
        rows = Rows(*packed[:5], *packed[5:].view(torch.float32))
        scores = logits.to(torch.float32, copy=features.history)
        if features.history:
            assert self.history is not None
            scores = self.history.process(scores, tokens, rows, self.compiled)
        if features.grammar:
            scores = masked(scores, self.masks[:number], features.history)
        if features.sampled:
            scores = scores / rows.temperature[:, None]
        if features.truncated:
            scores = truncate(scores, rows.top_k, rows.top_p, rows.min_p)
        noise = _compiled(gumbel_noise) if self.compiled else gumbel_noise
        noisy = scores + noise(rows.keys, scores.shape[1]) if features.details else scores
        if features.sampled:
            # The token of `torch.multinomial`, which stops the whole device at a row that is not a number.
            drawn = noisy - torch.empty_like(noisy).exponential_(1).log_()
            noisy = torch.where((rows.keys == SAMPLED)[:, None], drawn, noisy)
        chosen = noisy.argmax(-1)
        output[0, :number] = chosen
        if len(output) > 1:
            logprobs = scores.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
            output[1, :number] = logprobs.view(torch.int32)
        if features.details:
            logprobs = logits.float().log_softmax(-1)
            top = logprobs.topk(min(MOST_LOGPROBS, logprobs.shape[1]))
            picked = torch.cat((logprobs.gather(1, chosen[:, None]), top.values), 1).view(torch.int32)
            count = top.indices.shape[1]
            self.details[:number, : 1 + count] = picked
            self.details[:number, 1 + MOST_LOGPROBS : 1 + MOST_LOGPROBS + count] = top.indices.int()

    def end(self) -> PreparedStep:
        """Copy log-probabilities of the running step to the host, on the current stream, without waiting."""
        assert self.step is not None
        step, self.step = self.step, None
        if any(each.top_logprobs is not None for each in step.options):
            rows = self.details[: len(step.requests)]
            step.details = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
            step.details.copy_(rows, non_blocking=True)
        return step

    def details_of(self, step: PreparedStep) -> list[tuple[Any, TokenLogprobs]]:
        """Log-probabilities by request of a step that is over."""
        assert step.details is not None
        floats, found = step.details.view(torch.float32), []
        for i, (state, options) in enumerate(zip(step.requests, step.options, strict=True)):
            if options.top_logprobs is not None:
                count = min(options.top_logprobs, self.vocabulary)
                tokens = step.details[i, 1 + MOST_LOGPROBS :][:count].tolist()
                top = dict(zip(tokens, floats[i, 1 : 1 + count].tolist(), strict=True))
                found.append((state, TokenLogprobs(floats[i, 0].item(), top)))
        return found
