"""Sampling by request, for `tq-hf serve`: temperature, top_p, seed and stop are each request's own.

transformers' server hands its engine the sampling of the first request, for all. Here every request carries its own,
in the tensors that the engine's processors of logits have by request, so that captured graphs stay as they are.
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
"""How a request's token is chosen: by the engine, or the likeliest. Other numbers are keys of a seeded request's."""
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
"""Of a hash of 32 bits (Chris Wellons, "Prospecting for hash functions", `lowbias32`)."""


def mixed(x: torch.Tensor) -> torch.Tensor:
    """`lowbias32` of int64 numbers of 32 bits."""
    for shift, multiplier in zip((16, 15), MULTIPLIERS, strict=True):
        x = (x ^ (x >> shift)) * multiplier & 0xFFFFFFFF
    return x ^ (x >> 16)


def key_of(seed: int, position: int) -> int:
    """The key of a seeded request's token at a position: 1 to 2**31 - 1."""
    return int(mixed(mixed(torch.tensor(seed & 0xFFFFFFFF)) ^ position)) % 0x7FFFFFFF + 1


class Choice(ContinuousBatchingLogitsProcessor):
    """Leaves one token to choose from, if a request is greedy or has a seed.

    A seeded request's token is the one of the greatest logit plus Gumbel noise, which is a hash of seed, position and
    token: it depends on nothing else in the batch. That is a sample of the softmax (Gumbel, 1954).
    """

    supported_kwargs = {"choice": str}  # noqa: RUF012 - as the class above it has it
    ignored_kwargs = ()

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Without a word the engine samples."""
        int32_tensor.fill_(SAMPLED)

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """The numbers of a step's requests, `[N]` int32: `choice` is "sampled", "greedy" or a seed in digits."""
        numbers = []
        for state in (request.state for request in requests_with_new_token):
            choice = state.logit_processor_kwargs.get("choice", "sampled")
            if choice in ("sampled", "greedy"):
                numbers.append(SAMPLED if choice == "sampled" else GREEDY)
            else:
                numbers.append(key_of(int(choice), state.position_offset))
        return torch.tensor(numbers, dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Scores `[N, vocabulary]`, where one token is chosen -inf but for it."""
        keys = tensor_arg[: len(scores), None].long()
        tokens = torch.arange(scores.shape[1], device=scores.device)
        # Of 1 - u, which has all its bits where the noise is great.
        uniform = mixed(mixed(tokens) ^ keys).float().add(0.5).mul(2.0**-32).clamp(max=1 - 2.0**-24)
        noise = torch.where(keys > 0, -torch.log(-torch.log1p(-uniform)), 0.0)
        best = (scores + noise).argmax(-1, keepdim=True)
        others = tokens != best
        return scores.masked_fill(others & (keys != SAMPLED), -torch.inf)


def sampling_of(body: dict[str, Any], config: Any) -> dict[str, Any]:
    """What a request's token is chosen by.

    Args:
        body: The request, as OpenAI's API has it. A temperature of 0 is greedy; one above it, top_p or a seed samples,
            even if the model's own generation config does not.
        config: The generation config that the server has made of it.

    Raises:
        ValueError: A number is not one, or outside its range.
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
    """A manager whose requests have this sampling."""

    def __init__(self, manager: Any, sampling: dict[str, Any]) -> None:
        self._manager, self._sampling = manager, sampling

    def add_request(self, *args: Any, **options: Any) -> Any:
        return self._manager.add_request(*args, **options, **self._sampling)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class RequestManager(CBGenerateManager):
    """transformers' link between its server and the engine, with the sampling of each request.

    A request's generation config has its `sampling_of` as `sampling`.
    """

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Start the engine, if it is not: compile its steps and capture their graphs, then wait for requests."""
        if self._cb is not None:
            return
        shared = deepcopy(model.generation_config)
        # Anything but 1, so that the engine has processors of both; every request brings its own numbers.
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

    def _of(self, gen_config: Any, inputs: Any) -> CBGenerateManager:
        """transformers' methods on an engine that is given this request's sampling; a `ValueError` if the request is
        longer than the pool or its prompt than the model's positions, with which its answer ends."""
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
        """transformers' method; the text ends before a stop string."""
        queue, streamer = self._of(gen_config, inputs).generate_streaming(
            model, processor, inputs, gen_config, request_id, response_parser
        )
        if gen_config.stop_strings:
            queue = _until(queue, gen_config.stop_strings, streamer)
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """transformers' method; with stop strings the answer ends before one. A request that nobody waits for any more
        gives its pages back."""
        assert self._cb is not None
        cancel = partial(self._cb.cancel_request, request_id)
        try:
            if not gen_config.stop_strings:
                return await self._of(gen_config, inputs).generate_non_streaming(
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
    """A queue of the same items, text only up to the first stop string; then the request is cancelled."""
    stops = [stops] if isinstance(stops, str) else list(stops)
    out: asyncio.Queue = asyncio.Queue()
    cancel = streamer.cancel

    async def pump() -> None:
        held = ""
        while True:
            item = await queue.get()
            if type(item) is not str:
                # What is not text of the answer (an end, an error, a tool call) goes on as it is.
                for rest in ([held] if held else []) + [item]:
                    out.put_nowait(rest)
                held = ""
                if item is None or isinstance(item, _StreamError):
                    return
                continue
            held += item
            found = [at for stop in stops if (at := held.find(stop)) >= 0]
            if found:
                out.put_nowait(held[: min(found)])
                out.put_nowait(None)
                return cancel()
            # What may be the beginning of a stop string waits.
            keep = max(n for stop in stops for n in range(len(stop)) if held.endswith(stop[:n]))
            if len(held) > keep:
                out.put_nowait(held[: len(held) - keep])
                held = held[len(held) - keep :]

    task = asyncio.get_running_loop().create_task(pump())

    def cancel_both() -> None:
        task.cancel()
        cancel()

    streamer.cancel = cancel_both
    return out
