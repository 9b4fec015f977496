"""Sampling by request for `tq-hf serve`: each request has its own temperature, top_p, seed and stop strings.

transformers' server applies the sampling options of the first request to all requests. Here each request passes its own
options in the tensors of the engine's per-request processors of logits, so captured graphs remain valid.
"""

from __future__ import annotations

import asyncio
from copy import copy, deepcopy
from functools import partial
from typing import Any, cast

import torch
from transformers.cli.serving.utils import CBGenerateManager, _StreamError
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.continuous_batching.requests import RequestState

from ..batching.checks import new_tokens

SAMPLED, GREEDY = 0, -1
"""Ways to choose the token of a request: the engine samples, or the likeliest token is taken. Positive numbers are the
keys of seeded requests."""
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
"""Constants of a 32-bit hash (Chris Wellons, "Prospecting for hash functions", `lowbias32`)."""


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Hash 32-bit numbers (stored as int64) by `lowbias32`."""
    for shift, multiplier in zip((16, 15), MULTIPLIERS, strict=True):
        x = (x ^ (x >> shift)) * multiplier & 0xFFFFFFFF
    return x ^ (x >> 16)


def key_of(seed: int, position: int) -> int:
    """Key of the token at a position of a seeded request: 1 to 2**31 - 1."""
    return int(mixed(mixed(torch.tensor(seed & 0xFFFFFFFF)) ^ position)) % 0x7FFFFFFF + 1


class Choice(ContinuousBatchingLogitsProcessor):
    """Processor that leaves only one token to greedy and to seeded requests.

    A seeded request takes the token with the largest sum of logit and Gumbel noise. The noise is a hash of seed,
    position and token, independent of the rest of the batch. The result is a sample of the softmax (Gumbel, 1954).
    """

    supported_kwargs = {"choice": str}  # noqa: RUF012 - the base class has the same attribute
    ignored_kwargs = ()

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Set the default: the engine samples."""
        int32_tensor.fill_(SAMPLED)

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Return the numbers of the requests of a step, `[N]` int32. `choice` of a request is "sampled", "greedy" or a
        seed in digits."""
        numbers = []
        for state in (request.state for request in requests_with_new_token):
            choice = state.logit_processor_kwargs.get("choice", "sampled")
            if choice in ("sampled", "greedy"):
                numbers.append(SAMPLED if choice == "sampled" else GREEDY)
            else:
                numbers.append(key_of(int(choice), state.position_offset))
        return torch.tensor(numbers, dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Set the scores of all other tokens to -inf where one token is chosen.

        Args:
            scores: `[N, vocabulary]`.
            tensor_arg: Numbers of `prepare_tensor_args`, `[N]` or more.
        """
        keys = tensor_arg[: len(scores), None].long()
        tokens = torch.arange(scores.shape[1], device=scores.device)
        # Take the logarithm of 1 - u: floats near 0 have more precision, and the noise is largest there.
        uniform = mixed(mixed(tokens) ^ keys).float().add(0.5).mul(2.0**-32).clamp(max=1 - 2.0**-24)
        noise = torch.where(keys > 0, -torch.log(-torch.log1p(-uniform)), 0.0)
        best = (scores + noise).argmax(-1, keepdim=True)
        others = tokens != best
        return scores.masked_fill(others & (keys != SAMPLED), -torch.inf)


def sampling_of(body: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the sampling options of a request.

    Args:
        body: The request in OpenAI's format. A temperature of 0 is greedy. A temperature above 0, top_p or a seed turn
            sampling on, even if the model's generation config is greedy.
        config: Generation config that the server has made of the request.

    Raises:
        ValueError: An option is not a number, or is outside its range.
    """
    temperature, top_p, seed = (body.get(name) for name in ("temperature", "top_p", "seed"))
    if temperature is not None and not 0 <= float(temperature) <= 100:
        raise ValueError(f"`temperature` is {temperature}; it must be between 0 and 100.")
    if top_p is not None and not 0 < float(top_p) <= 1:
        raise ValueError(f"`top_p` is {top_p}; it must be above 0 and at most 1.")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ValueError(f"`seed` is {seed!r}; it must be a whole number.")
    asked = any(value is not None for value in (temperature, top_p, seed))
    greedy = temperature is not None and float(temperature) == 0 or not (asked or config.do_sample)
    return {
        "temperature": 1.0 if greedy else float(config.temperature or 1.0),
        "top_p": 1.0 if greedy or config.top_p is None else float(config.top_p),
        "choice": "greedy" if greedy else "sampled" if seed is None else str(seed),
    }


class _WithSampling:
    """A manager that adds sampling options to all requests."""

    def __init__(self, manager: Any, sampling: dict[str, Any]) -> None:
        self._manager, self._sampling = manager, sampling

    def add_request(self, *args: Any, **options: Any) -> Any:
        return self._manager.add_request(*args, **options, **self._sampling)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class RequestManager(CBGenerateManager):
    """transformers' link between server and engine, with sampling options per request.

    The generation config of a request has the result of `sampling_of` as its attribute `sampling`.
    """

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Start the engine, unless it runs: compile steps, capture their graphs, wait for requests."""
        if self._cb is not None:
            return
        shared = deepcopy(model.generation_config)
        # Any value but 1 makes the engine create both processors. Each request brings its own values.
        shared.do_sample, shared.temperature, shared.top_p = True, 0.5, 0.5
        config: Any = copy(self._cb_config)
        config.per_request_processors = True
        self._cb = manager = model.init_continuous_batching(generation_config=shared, continuous_batching_config=config)
        processors = manager.logit_processor
        processors.logits_processor.append(Choice())
        processors.supported_keys |= Choice.supported_kwargs
        processors.tensors_required += 1
        manager.warmup()
        manager.start()

    def _with_sampling(self, gen_config: Any, inputs: Any) -> CBGenerateManager:
        """Return transformers' link to an engine with the sampling options of this request.

        `max_new_tokens` is limited to the model's positions.

        Raises:
            ValueError: The request is longer than the pool, or the prompt is longer than the model's positions.
        """
        tokens, manager = list(inputs["input_ids"]), cast(Any, self._cb)
        cache = manager.batch_processor.cache
        cache.check_room(RequestState("", initial_tokens=tokens, max_new_tokens=gen_config.max_new_tokens))
        gen_config.max_new_tokens = new_tokens(len(tokens), gen_config.max_new_tokens, cache.config)
        own = CBGenerateManager(self._cb_config)
        own._cb = _WithSampling(self._cb, gen_config.sampling)  # type: ignore[assignment]
        return own

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue, Any]:
        """Stream the answer to a request. The text ends before the first stop string."""
        queue, streamer = self._with_sampling(gen_config, inputs).generate_streaming(
            model, processor, inputs, gen_config, request_id, response_parser
        )
        if gen_config.stop_strings:
            queue = _until(queue, gen_config.stop_strings, streamer)
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Return the answer to a request: text, number of prompt tokens, tokens. The text ends before the first stop
        string. If the caller is cancelled, the request is cancelled and its pages are freed."""
        assert self._cb is not None
        cancel = partial(self._cb.cancel_request, request_id)
        try:
            if not gen_config.stop_strings:
                return await self._with_sampling(gen_config, inputs).generate_non_streaming(
                    model, processor, inputs, gen_config, request_id
                )
            queue, streamer = self.generate_streaming(model, processor, inputs, gen_config, request_id)
            tokens: list[int] = []
            cancel, put = streamer.cancel, streamer.put

            def noted(output: Any) -> None:
                tokens[:] = output.generated_tokens
                put(output)

            streamer.put = noted
            parts: list[str] = []
            while (part := await queue.get()) is not None:
                if isinstance(part, _StreamError):
                    raise RuntimeError(part.msg)
                parts.append(part)
            return "".join(parts), len(inputs["input_ids"]), tokens
        except asyncio.CancelledError:
            cancel()
            raise


def _until(queue: asyncio.Queue, stops: str | list[str], streamer: Any) -> asyncio.Queue:
    """Return a queue of the same items that ends before the first stop string. The request is then cancelled."""
    stops = [stops] if isinstance(stops, str) else list(stops)
    out: asyncio.Queue = asyncio.Queue()
    cancel = streamer.cancel

    async def pump() -> None:
        pending = ""
        while True:
            item = await queue.get()
            if type(item) is not str:
                # Pass on items that are not text (an end, an error, a tool call) unchanged.
                for rest in ([pending] if pending else []) + [item]:
                    out.put_nowait(rest)
                pending = ""
                if item is None or isinstance(item, _StreamError):
                    return
                continue
            pending += item
            matches = [at for stop in stops if (at := pending.find(stop)) >= 0]
            if matches:
                out.put_nowait(pending[: min(matches)])
                out.put_nowait(None)
                return cancel()
            # Keep text back that may be the beginning of a stop string.
            keep = max(n for stop in stops for n in range(len(stop)) if pending.endswith(stop[:n]))
            if len(pending) > keep:
                out.put_nowait(pending[: len(pending) - keep])
                pending = pending[len(pending) - keep :]

    task = asyncio.get_running_loop().create_task(pump())

    def cancel_both() -> None:
        task.cancel()
        cancel()

    streamer.cancel = cancel_both
    return out
