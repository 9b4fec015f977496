"""Answers to requests of `tq-hf serve`: each has its own options, several answers and log-probabilities.

transformers' server applies the options of the first request to all requests. Here each request passes its own to the
engine (`tq_hf.batching.options`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from copy import copy, deepcopy
from typing import Any, cast
from uuid import uuid4

from transformers.cli.serving.utils import CBGenerateManager, _StreamError
from transformers.generation.continuous_batching.requests import RequestState

from ..batching.checks import new_tokens
from ..batching.options import with_defaults, with_options
from .fields import OF_BODY, fields_of_config, options_of_body


def with_request_options(build: Callable[..., Any], one_answer: bool) -> Callable[..., Any]:
    """Add the options of a request to the generation config that the server builds. `one_answer`: refuse requests for
    several answers or log-probabilities, which the endpoint has no place for."""

    def build_all(body: dict[str, Any], *args: Any, **options: Any) -> Any:
        fields, extra = fields_of_config(body)
        body = {name: value for name, value in body.items() if name != "generation_config"}
        own = {name: value for name, value in body.items() if name not in OF_BODY}
        config = build(own if fields is None else own | {"generation_config": json.dumps(fields)}, *args, **options)
        config.of_request = extra | options_of_body(body, config)
        config.answers = body.get("n") or config.num_return_sequences or 1
        config.num_return_sequences = None
        if one_answer and (config.answers > 1 or "top_logprobs" in config.of_request):
            raise ValueError(
                "`generation_config` asks for several answers or log-probabilities, and this endpoint gives one answer "
                "as text. Leave out `num_return_sequences` and `top_logprobs`, or use chat/completions."
            )
        return config

    return build_all


class _WithOptions:
    """A manager that adds the options of one request, and keeps its output.

    The request has an id of its own in the engine: clients choose theirs, and may choose the same.
    """

    def __init__(self, manager: Any, config: Any) -> None:
        self._manager, self._config, self._id = manager, config, uuid4().hex

    def add_request(self, *args: Any, request_id: str, **options: Any) -> Any:
        options |= self._config.of_request
        return self._manager.add_request(*args, request_id=self._id, **options, generation_config=self._config)

    def cancel_request(self, request_id: str) -> None:
        self._manager.cancel_request(self._id)

    def register_result_handler(self, request_id: str, callback: Callable[[Any], None]) -> None:
        def keep(output: Any) -> None:
            self._config.output = output
            if set(output.generated_tokens[-1:]) & self._config.ends:
                self._config.max_new_tokens = None  # see `generate_non_streaming`
            callback(output)

        self._manager.register_result_handler(self._id, keep)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class RequestManager(CBGenerateManager):
    """transformers' link between server and engine, with options by request.

    The generation config of a request has the other options as its attribute `of_request`.
    """

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Start the engine, unless it runs. Steps are captured and compiled while it answers."""
        if self._cb is not None:
            return
        self._cb = manager = model.init_continuous_batching(continuous_batching_config=copy(self._cb_config))
        manager.warmup(behind=True)
        manager.start()

    def _with_options(self, gen_config: Any, inputs: Any) -> CBGenerateManager:
        """Return transformers' link to an engine with the options of this request.

        `max_new_tokens` is limited to the model's positions.

        Raises:
            ValueError: The request is longer than the pool, the prompt is longer than the model's positions, or an
                option would change the answer and is not applied.
        """
        tokens, manager = list(inputs["input_ids"]), cast(Any, self._cb)
        config, extra = with_options(with_defaults(gen_config, manager.generation_config), gen_config.of_request)
        applied = manager.options_of(config, extra, len(tokens))
        cache = manager.batch_processor.cache
        cache.check_room(RequestState("", initial_tokens=tokens, max_new_tokens=applied.max_new_tokens))
        gen_config.max_new_tokens = new_tokens(len(tokens), applied.max_new_tokens, cache.config)
        gen_config.stop_strings = list(applied.stop_strings) or None
        gen_config.ends = set(applied.eos_token_ids)
        own = CBGenerateManager(self._cb_config)
        own._cb = _WithOptions(self._cb, gen_config)  # type: ignore[assignment]
        return own

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue, Any]:
        """Stream the answer to a request. The text ends before the first stop string."""
        queue, streamer = self._with_options(gen_config, inputs).generate_streaming(
            model, processor, inputs, gen_config, request_id, response_parser
        )
        if gen_config.stop_strings:
            queue = _until(queue, gen_config, streamer)
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Return the answer to a request: text, number of prompt tokens, tokens. The text ends before the first stop
        string. If the caller is cancelled, the request is cancelled and its pages are freed."""
        own = self._with_options(gen_config, inputs)
        assert own._cb is not None
        try:
            text, number, tokens = await own.generate_non_streaming(model, processor, inputs, gen_config, request_id)
        except asyncio.CancelledError:
            own._cb.cancel_request(request_id)
            raise
        ends = [at for stop in gen_config.stop_strings or () if (at := text.find(stop)) >= 0]
        if ends:  # the server compares the number of tokens with this, for `finish_reason`
            gen_config.max_new_tokens = None
        return text[: min(ends, default=len(text))], number, tokens


def _until(queue: asyncio.Queue, config: Any, streamer: Any) -> asyncio.Queue:
    """Return a queue of the same items that ends before the first stop string of a generation config. The request is
    then cancelled."""
    out: asyncio.Queue = asyncio.Queue()
    stops, cancel = config.stop_strings, streamer.cancel

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
                config.max_new_tokens = None  # see `generate_non_streaming`
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


Answer = Callable[..., Awaitable[Any]]
"""Method of a handler of transformers' server that answers a request without streaming."""


def with_all_answers(answer: Answer, format_logprobs: Callable[[Any, Any], Any]) -> Answer:
    """Answer a request as often as it asks for (`n`), with log-probabilities.

    Args:
        answer: The handler's method.
        format_logprobs: `chat_logprobs` or `completion_logprobs`.
    """

    async def answer_one(request_id: str, *given: Any, **more: Any) -> Any:
        _, processor, _, _, config, *_ = given
        content = json.loads((await answer(request_id, *given, **more)).body)
        if config.of_request.get("top_logprobs") is not None:
            content["choices"][0]["logprobs"] = format_logprobs(config.output, processor)
        return content

    async def answer_all(request_id: str, *given: Any, **more: Any) -> Any:
        from fastapi.responses import JSONResponse

        first, *others = await asyncio.gather(
            *[answer_one(name, *own, **more) for name, own in _asked(request_id, given)]
        )
        for i, other in enumerate(others):
            first["choices"].append(other["choices"][0] | {"index": i + 1})
            for name in ("completion_tokens", "total_tokens"):
                first["usage"][name] += other["usage"]["completion_tokens"]
        return JSONResponse(first)

    return answer_all


def _asked(request_id: str, given: tuple[Any, ...]) -> list[tuple[str, tuple[Any, ...]]]:
    """Id and arguments of a handler's method for each answer that a request asks for, with a seed of its own."""
    *inputs, config = given[:5]
    asked = [(request_id, given)]
    for i in range(1, config.answers):
        own = deepcopy(config)
        if "seed" in own.of_request:
            own.of_request["seed"] += i
        asked.append((f"{request_id}-{i}", (*inputs, own, *given[5:])))
    return asked


def with_all_streams(stream: Callable[..., Any], format_logprobs: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Stream the answers to a request side by side (`n`), with log-probabilities.

    Args:
        stream: Method of a handler of transformers' server that streams one answer.
        format_logprobs: `chat_logprobs` or `completion_logprobs`.
    """

    def stream_all(request_id: str, *given: Any, **more: Any) -> Any:
        from fastapi.responses import StreamingResponse

        config = given[4]
        if config.answers == 1 and config.of_request.get("top_logprobs") is None:
            return stream(request_id, *given, **more)
        asked = _asked(request_id, given)
        streams = [stream(name, *own, **more).body_iterator for name, own in asked]
        answers = [_StreamedAnswer(i, own[4], given[1], format_logprobs) for i, (_, own) in enumerate(asked)]
        return StreamingResponse(_merged(request_id, streams, answers), media_type="text/event-stream")

    return stream_all


class _StreamedAnswer:
    """One of the answers that are streamed side by side."""

    def __init__(self, index: int, config: Any, processor: Any, format_logprobs: Callable[[Any, Any], Any]) -> None:
        self.index, self.config, self.processor, self.format = index, config, processor, format_logprobs
        self.tokens = self.letters = 0
        """Number of tokens with log-probabilities that were sent, and number of letters of their text."""

    def complete(self, choice: dict[str, Any]) -> None:
        """Add the index and the log-probabilities of tokens since the last part to a part of the answer."""
        choice["index"], output = self.index, getattr(self.config, "output", None)
        has_text = choice.get("text") or choice.get("delta", {}).get("content") or choice.get("finish_reason")
        if self.config.of_request.get("top_logprobs") is None or output is None or not has_text:
            return
        newest = copy(output)
        newest.generated_tokens = output.generated_tokens[self.tokens :]
        newest.top_logprobs = output.top_logprobs[self.tokens :]
        if texts := _texts(newest, self.processor)[0]:
            choice["logprobs"] = logprobs = self.format(newest, self.processor)
            if "text_offset" in logprobs:
                logprobs["text_offset"] = [at + self.letters for at in logprobs["text_offset"]]
            self.tokens, self.letters = self.tokens + len(texts), self.letters + sum(map(len, texts))


async def _merged(request_id: str, streams: list[Any], answers: list[_StreamedAnswer]) -> AsyncIterator[str]:
    """Merge the events of several answers. The last event has the usage of all. If the caller goes away, all
    requests are cancelled."""
    events: asyncio.Queue[tuple[int, str | None]] = asyncio.Queue()

    async def pump(i: int) -> None:
        try:
            async for part in streams[i]:
                for event in filter(None, part.split("\n\n")):
                    events.put_nowait((i, event))
        finally:
            events.put_nowait((i, None))

    tasks = [asyncio.create_task(pump(i)) for i in range(len(streams))]
    open_, ended, generated = len(tasks), 0, 0
    try:
        while open_:
            i, event = await events.get()
            if event is None:
                open_ -= 1
                continue
            if event.startswith('data: {"error"'):
                yield f"{event}\n\n"
                continue
            content = json.loads(event.removeprefix("data: "))
            if choices := content.get("choices"):
                content["id"] = request_id
                answers[i].complete(choices[0])
            if usage := content.pop("usage", None):
                generated, ended = generated + usage["completion_tokens"], ended + 1
                if ended == len(tasks):
                    usage["completion_tokens"] = generated
                    content["usage"] = usage | {"total_tokens": usage["prompt_tokens"] + generated}
            yield f"data: {json.dumps(content)}\n\n"
    finally:
        for task in tasks:
            task.cancel()


def _texts(output: Any, processor: Any) -> tuple[list[str], Callable[[int], str]]:
    """Text of each token of an answer, without special tokens at its end, and a function from token to text."""
    tokenizer = getattr(processor, "tokenizer", processor)
    tokens = list(output.generated_tokens)
    while tokens and tokens[-1] in tokenizer.all_special_ids:
        tokens.pop()

    def text(token: int) -> str:
        return tokenizer.decode([token])

    return [text(token) for token in tokens], text


def chat_logprobs(output: Any, processor: Any) -> dict[str, Any]:
    """Log-probabilities of an answer, as chat completions have them."""
    texts, text_of = _texts(output, processor)

    def entry(text: str, logprob: float) -> dict[str, Any]:
        # U+FFFD stands for a part of a character, whose bytes are not known here.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    rows = zip(texts, output.top_logprobs, strict=False)
    content = [
        entry(text, each.logprob) | {"top_logprobs": [entry(text_of(token), x) for token, x in each.top.items()]}
        for text, each in rows
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(output: Any, processor: Any) -> dict[str, Any]:
    """Log-probabilities of an answer, as completions have them."""
    texts, text_of = _texts(output, processor)
    rows = output.top_logprobs[: len(texts)]
    return {
        "tokens": texts,
        "token_logprobs": [each.logprob for each in rows],
        "top_logprobs": [{text_of(token): x for token, x in each.top.items()} for each in rows],
        "text_offset": [sum(map(len, texts[:i])) for i in range(len(texts))],
    }
