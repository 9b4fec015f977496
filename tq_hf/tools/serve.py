"""A server of one model with OpenAI's API, on packed pages.

The way of a request: `Guard` checks its key. `Routes.answer` reads the body up to a size. A thread checks its fields
(`fields.py`), renders and tokenizes the prompt, and asks the engine what it accepts (`answers.py`). The engine
generates in its own thread; its tokens become text, parts of text become objects or events (`CompletionForm`,
`ResponseForm`). `Reply` sends them, and cancels what a client that goes away has asked for. Errors have OpenAI's form.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from ipaddress import ip_address
from itertools import chain
from typing import Any
from uuid import uuid4

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import ContinuousBatchingConfig
from transformers.cli.serving.utils import ReasoningText, ToolCall
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from ..batching import PrefixFolder, TurboQuantBatching
from ..config import TurboQuantConfig, number_of_positions
from .answers import LONG, Choice, Engine, Exchange, Refused, in_flags
from .fields import BODIES, Body, ChatBody, ResponseBody

GRACE = 5
"""Number of seconds until open connections are closed after the server stops."""
OPEN = ("/health", "/metrics")
"""Paths that need no key."""


def error_of(reason: str, status: int) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {
        "error": {"message": reason, "type": kind, "param": None, "code": "invalid_api_key" if status == 401 else None}
    }


class Guard:
    """ASGI middleware that asks for the key."""

    def __init__(self, app: Any, key: str | None = None) -> None:
        self.app, self.key = app, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and self.key is not None and scope["path"] not in OPEN:
            kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(key.encode(), self.key.encode()):
                refusal = error_of("The key is missing or wrong. Send `Authorization: Bearer KEY`.", 401)
                return await JSONResponse(refusal, 401)(scope, receive, send)
        await self.app(scope, receive, send)


def joined(one: Any, other: Any) -> Any:
    """Join two parts of a choice: texts and lists are appended, objects are joined by field, `None` is no value."""
    if one is None or other is None:
        return one if other is None else other
    if isinstance(one, dict):
        return one | {name: joined(one.get(name), value) for name, value in other.items()}
    return one + other if isinstance(one, str | list) else other


class CompletionForm:
    """The object and the events of `/v1/chat/completions` and `/v1/completions`."""

    end = "data: [DONE]\n\n"

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, self.chats = exchange, isinstance(exchange.body, ChatBody)
        kind, name = ("chat.completion", "chatcmpl") if self.chats else ("text_completion", "cmpl")
        kind += ".chunk" * (self.chats and bool(exchange.body.stream))
        own = {"id": f"{name}-{uuid4().hex}", "object": kind}
        self.head = {**own, "created": int(time.time()), "model": exchange.engine.name}

    def _last(self, choices: list[Any]) -> dict[str, Any]:
        prompt, new, cached = self.exchange.usage()
        usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return {**self.head, "choices": choices, "usage": usage | {"prompt_tokens_details": {"cached_tokens": cached}}}

    async def _choices(self) -> AsyncIterator[dict[str, Any]]:
        """Parts of the choices, side by side."""

        def part(answer: Choice, content: Any, logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
            own = {"delta" if self.chats else "text": content, "logprobs": logprobs, "finish_reason": finish}
            return {"index": answer.index, **own}

        for answer in self.exchange.answers if self.chats else ():
            yield part(answer, {"role": "assistant", "content": ""})
        async for answer, new in self.exchange.parts():
            logprobs = new.logprobs
            for item in new.items:
                content: Any = item
                if isinstance(item, ToolCall):
                    call = {"id": f"call_{uuid4().hex}", "type": "function", "function": vars(item)}
                    content = {"tool_calls": [{"index": answer.sent_calls, **call}]}
                    answer.sent_calls += 1
                elif self.chats:
                    content = {"reasoning_content" if isinstance(item, ReasoningText) else "content": str(item)}
                yield part(answer, content, logprobs)
                logprobs = None
            if answer.finish:
                yield part(answer, {} if self.chats else "", logprobs, answer.finish)

    async def whole(self) -> dict[str, Any]:
        """The answers as one object."""
        choices: list[dict[str, Any]] = [{} for _ in self.exchange.answers]
        async for part in self._choices():
            index = part.pop("index")
            choices[index] = {"index": index, **joined(choices[index], part)}
        for choice in choices if self.chats else ():
            choice["message"] = {**choice.pop("delta"), "refusal": None}
        return self._last(choices)

    async def steps(self) -> AsyncIterator[dict[str, Any]]:
        """The answers as events."""
        counts = bool((self.exchange.body.stream_options or {}).get("include_usage"))
        async for part in self._choices():
            yield {**self.head, **({"usage": None} if counts else {}), "choices": [part]}
        if counts:
            yield self._last([])

    def failed(self, error: Refused) -> dict[str, Any]:
        """The last event of answers that are not complete."""
        return error_of(str(error), error.status)


TEXTS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "message": ("msg", "output_text", {"role": "assistant"}, {"annotations": [], "logprobs": []}),
    "reasoning": ("rs", "reasoning_text", {"summary": []}, {}),
}
"""Items that are text: prefix of the id, type of the part with the text, further fields of the item and of the part."""


class ResponseForm:
    """The object and the events of `/v1/responses`."""

    end = ""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, body = exchange, exchange.body
        self.output: list[dict[str, Any]] = []
        """Items of the output."""
        self.open: str | None = None
        """Type of the last item, if it is text that is not complete."""
        self.number = 0
        self.head = {
            **{"id": f"resp_{uuid4().hex}", "object": "response", "created_at": int(time.time())},
            **{"model": exchange.engine.name, "error": None, "incomplete_details": None},
            **{name: getattr(body, name) for name in ("instructions", "max_output_tokens", "temperature", "top_p")},
            **{"metadata": (body.model_extra or {}).get("metadata") or {}, "store": False, "usage": None},
            **{"tools": body.tools or [], "tool_choice": body.tool_choice or "auto"},
            **{"parallel_tool_calls": body.parallel_tool_calls is not False, "previous_response_id": None},
            **{"text": body.text or {"format": {"type": "text"}}, "truncation": "disabled"},
        }

    def _event(self, kind: str, **content: Any) -> dict[str, Any]:
        self.number += 1
        return {"type": f"response.{kind}", "sequence_number": self.number - 1, **content}

    def _of_whole(self, kind: str, status: str, **content: Any) -> dict[str, Any]:
        return self._event(kind, response={**self.head, "status": status, "output": self.output, **content})

    def _of_item(self, kind: str, **content: Any) -> dict[str, Any]:
        return self._event(kind, output_index=len(self.output) - 1, **content)

    def _of_part(self, kind: str, **content: Any) -> dict[str, Any]:
        return self._of_item(kind, item_id=self.output[-1]["id"], content_index=0, **content)

    def _of_text(self, kind: str, **content: Any) -> dict[str, Any]:
        part = self.output[-1]["content"][0]
        return self._of_part(f"{part['type']}.{kind}", **content, **({"logprobs": []} if "logprobs" in part else {}))

    def _begin(self, kind: str, prefix: str, **content: Any) -> dict[str, Any]:
        self.output.append({"id": f"{prefix}_{uuid4().hex}", "type": kind, "status": "in_progress", **content})
        return self._of_item("output_item.added", item=self.output[-1])

    def _end(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """End the open text."""
        if self.open is not None:
            item, self.open = self.output[-1], None
            yield self._of_text("done", text=item["content"][0]["text"])
            yield self._of_part("content_part.done", part=item["content"][0])
            item["status"] = status
            yield self._of_item("output_item.done", item=item)

    def _add(self, new: Any) -> Iterator[dict[str, Any]]:
        """Add a part of the answer."""
        kind = "reasoning" if isinstance(new, ReasoningText) else "message"
        if self.open != kind or isinstance(new, ToolCall):
            yield from self._end()
        if isinstance(new, ToolCall):
            yield self._begin("function_call", "fc", call_id=f"call_{uuid4().hex}", **vars(new))
            yield self._of_item("function_call_arguments.done", item_id=self.output[-1]["id"], **vars(new))
            self.output[-1]["status"] = "completed"
            yield self._of_item("output_item.done", item=self.output[-1])
            return
        if self.open is None:
            self.open, (prefix, name, fields, more) = kind, TEXTS[kind]
            yield self._begin(kind, prefix, **fields, content=[])
            self.output[-1]["content"] = [{"type": name, "text": "", **more}]
            yield self._of_part("content_part.added", part=self.output[-1]["content"][0])
        self.output[-1]["content"][0]["text"] += new
        yield self._of_text("delta", delta=str(new))

    async def steps(self) -> AsyncIterator[dict[str, Any]]:
        """The answer as events. The last one has the whole object. An event is read before the next one is made."""
        yield self._of_whole("created", "in_progress")
        yield self._of_whole("in_progress", "in_progress")
        async for _, part in self.exchange.parts():
            for item in part.items:
                for event in self._add(item):
                    yield event
        cut = self.exchange.answers[0].finish == "length"
        status = "incomplete" if cut else "completed"
        for event in chain(() if self.output else self._add(""), self._end(status)):
            yield event
        prompt, new, cached = self.exchange.usage()
        usage: dict[str, Any] = {"input_tokens": prompt, "output_tokens": new, "total_tokens": prompt + new}
        usage["input_tokens_details"] = {"cached_tokens": cached, "cache_write_tokens": 0}
        usage["output_tokens_details"] = {"reasoning_tokens": 0}
        details = {"reason": "max_output_tokens"} if cut else None
        yield self._of_whole(status, status, usage=usage, incomplete_details=details)

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        async for event in self.steps():
            last = event
        return last["response"]

    def failed(self, error: Refused) -> dict[str, Any]:
        """The last event of an answer that is not complete."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        return self._of_whole("failed", "failed", error={"code": code, "message": str(error)})


class Reply(StreamingResponse):
    """The answers to a request, whole or as events. The request is cancelled if the client goes away."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.form: Any = (ResponseForm if isinstance(exchange.body, ResponseBody) else CompletionForm)(exchange)
        super().__init__(self._events(), media_type="text/event-stream")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await super().__call__(scope | {"asgi": {}}, receive, send)  # of the first version: it waits for a disconnect

    async def stream_response(self, send: Any) -> None:
        try:
            await (super().stream_response if self.exchange.body.stream else self._send_whole)(send)
        finally:
            self.exchange.close()

    async def _events(self) -> AsyncIterator[str]:
        try:
            async for event in self.form.steps():
                yield _event(event)
        except Refused as error:
            yield _event(self.form.failed(error))
        if self.form.end:
            yield self.form.end

    async def _send_whole(self, send: Any) -> None:
        try:
            content = await self.form.whole()
            big = self.exchange.usage()[1] > 1024
            data = await self.exchange.engine.in_thread(big, _encoded, content)
            whole = Response(data, media_type="application/json")
        except Refused as error:
            whole = JSONResponse(error_of(str(error), error.status), error.status)
        await whole({"type": "http"}, None, send)  # type: ignore[arg-type]


def _event(content: dict[str, Any]) -> str:
    """Text of an event. Events of `/v1/responses` have names."""
    name = f"event: {content['type']}\n" if "type" in content else ""
    return f"{name}data: {json.dumps(content)}\n\n"


def _encoded(content: dict[str, Any]) -> bytes:
    """JSON of an answer, in pieces: one call for a large one would stop all threads."""
    return "".join(json.JSONEncoder().iterencode(content)).encode()


class Routes:
    """Routes of a server, which reads bodies of up to `most_bytes` bytes."""

    def __init__(self, engine: Engine, most_bytes: int) -> None:
        self.engine, self.most_bytes = engine, most_bytes
        self.card = {"id": engine.name, "object": "model", "created": int(time.time()), "owned_by": "tq-hf"}

    def app(self, key: str | None, cors: bool) -> Starlette:
        posts = [Route(f"/v1/{x}", partial(self.answer, kind=body), methods=["POST"]) for x, body in BODIES.items()]
        middleware = [Middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])] * cors
        return Starlette(
            routes=[
                *posts,
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/load_model", self.load_model, methods=["POST"]),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
            ],
            middleware=[*middleware, Middleware(Guard, key=key)],
            exception_handlers=dict.fromkeys((Refused, HTTPException, ClientDisconnect, Exception), self.refuse),
        )

    async def refuse(self, request: Request, error: Any) -> Response:
        """Say why a request is not answered. The log has the traceback of an error of the server."""
        status = getattr(error, "status", getattr(error, "status_code", 500))
        if isinstance(error, HTTPException):
            error = f"{error.detail}: {request.method} {request.url.path:.100}"
        return JSONResponse(error_of(str(error) or type(error).__name__, status), status)

    async def read(self, request: Request) -> bytes:
        """Read a body up to the maximum size. The rest of a larger one is dropped."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused("The body of a request must be an object in JSON, sent as `application/json`.")
        data, size = bytearray(), 0
        async for chunk in request.stream():
            size += len(chunk)
            if size <= self.most_bytes:
                data += chunk
        if size > self.most_bytes:
            raise Refused(
                f"The body has {size:,} bytes, and the server reads up to {self.most_bytes:,}. Shorten it.", 413
            )
        return bytes(data)

    async def answer(self, request: Request, kind: type[Body]) -> Response:
        """Answer a request for completions or a response."""
        data = await self.read(request)
        if failure := self.engine.failure:
            raise Refused(failure, 503)
        return Reply(await self.engine.in_thread(len(data) > LONG, self.engine.read, kind, data))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.card]})

    async def model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) != self.engine.name:
            raise Refused(f"There is no model {name!r:.100}; this server serves {self.engine.name!r}.", 404)
        return JSONResponse(self.card)

    async def load_model(self, request: Request) -> Response:
        """Say that the model is loaded, as `transformers chat` asks."""
        ready = {"status": "ready", "model": self.engine.name, "cached": True}
        return Response(f"data: {json.dumps(ready)}\n\n", media_type="text/event-stream")

    async def health(self, request: Request) -> Response:
        """Say whether requests are answered."""
        if failure := self.engine.failure:
            return JSONResponse({"status": "unhealthy", "detail": failure}, 503)
        if to_be_done := self.engine.manager.to_be_done:
            return JSONResponse({"status": "warming", "detail": f"Requests are answered. {to_be_done}"})
        return JSONResponse({"status": "ok"})

    def metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.engine.manager.metrics(), media_type="text/plain; version=0.0.4")


class HttpServer(uvicorn.Server):
    """uvicorn's server, which fails open requests in a sentence when it is told to stop."""

    engine: Engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.engine.close("The server is stopping. Try again later.")
        stop = asyncio.to_thread(self.engine.manager.stop, block=True, timeout=GRACE, hard_stop=True)
        await asyncio.gather(super().shutdown(sockets), stop)


def check_access(host: str, port: int, key: str | None) -> str | None:
    """Return a warning if others may use the server. Raise `ValueError` if the port is in use, clients cannot send
    the key, or several processes were started."""
    if (processes := int(os.environ.get("WORLD_SIZE", 1))) > 1:
        raise ValueError(
            f"torchrun started {processes} processes, and this server is one process on one GPU. Start one server per "
            "GPU, each with its own `--port`, or use `examples/ray_serve.py` for one address. A model that needs "
            "several GPUs can answer batches: `examples/serve_many.py --tp`."
        )
    if key is not None and not (key.strip() == key and key.isascii() and key.isprintable() and key):
        raise ValueError("`--api-key` must be ASCII without spaces at its ends. Leave it out if there is no key.")
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
            is_open = key is None and not ip_address(taken.getsockname()[0]).is_loopback
    except OSError as error:
        raise ValueError(
            f"Cannot listen at {host}:{port}: {error.strerror or error}. Choose another `--host` or `--port`."
        ) from None
    return (
        "Warning: this server answers all who reach it. Set `--api-key`, or keep `--host localhost`." * is_open or None
    )


def room(engine: Engine) -> str:
    """Sentence about how many requests the cache has room for."""
    most, manager = engine.cache.max_request_tokens, engine.manager
    positions = number_of_positions(engine.cache.config) or most
    lengths = sorted({min(length, most, positions) for length in (1024, 8192, positions)})
    counts = [f"{manager.fitting_requests(length):,} of {length:,} tokens" for length in lengths]
    return f"Room for requests at once, each with its answer: {' or '.join(counts)}."


def serve(
    name: str,
    model: Any,
    tokenizer: Any,
    config: TurboQuantConfig,
    options: ContinuousBatchingConfig,
    *,
    address: tuple[str, int],
    say: Callable[[str], None],
    access: tuple[str | None, bool],
    most_bytes: int,
    prefixes: PrefixFolder | None,
) -> None:
    """Serve a model until the server is told to stop. Graphs are captured, and steps compiled, while it answers.

    Args:
        address: Host and port to listen at.
        say: Function that prints a sentence before the first request is accepted.
        access: Key that clients must send (`None` for none), and whether web pages of other origins may send requests.

    Raises `ValueError` if packed pages cannot hold the model, or the options do not fit into memory.
    """
    if type(model).__name__ in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values():
        raise ValueError(
            f"{type(model).__name__} reads more than text, and this server reads text only. Use `generate()` with a "
            "`TurboQuantCache`."
        )
    try:
        batching = TurboQuantBatching(model, config, tokenizer=tokenizer, prefix_cache=prefixes)
        manager = batching.init_continuous_batching(continuous_batching_config=options)
        manager.warmup(behind=True)
    except (ValueError, MemoryError, RuntimeError) as error:  # torch has no class for memory that a CPU lacks
        if isinstance(error, ValueError) or "memory" in str(error).lower() or isinstance(error, MemoryError):
            raise ValueError(
                in_flags(str(error) or "The cache does not fit into memory. Lower `--cache-tokens`.")
            ) from None
        raise
    try:
        manager.start()
        engine = Engine(name, manager, tokenizer)
        app = Routes(engine, most_bytes).app(*access)
        host, port = address
        own: dict[str, Any] = {"log_level": "warning", "lifespan": "off", "ws": "none"}
        server = HttpServer(uvicorn.Config(app, host, port, timeout_graceful_shutdown=GRACE, **own))
        server.engine = engine
        warning = check_access(host, port, access[0])  # another process may have taken the port meanwhile
        say(f"{name} on {config.preset} pages: http://{host}:{port}/v1")
        say(room(engine))
        if engine.cache.prefixes is not None:
            say(engine.cache.prefixes.found())
        if not tokenizer.chat_template:
            say("This model has no chat template: ask /v1/completions to continue a text.")
        if warning:
            say(f"[yellow]{warning}[/]")
        gc.freeze()  # a request that makes many objects would have all modules of the model visited
        sys.setswitchinterval(1e-3)  # between threads that read long requests, the engine's and the event loop's
        server.run()
    except KeyboardInterrupt:  # uvicorn raises it again once it has stopped
        pass
    finally:
        if manager.is_running():
            manager.stop(block=True, timeout=GRACE, hard_stop=True)  # at once, even while compiling
