"""A server of one model with OpenAI's API, on packed pages.

The way of a request: `Guard` checks its key, and cancels what a client that goes away has asked for. `Routes.answer`
reads the body up to a size. A thread checks its fields (`fields.py`), renders and tokenizes the prompt, and asks the
engine what it accepts (`answers.py`). The engine generates in its own thread; its tokens become text, parts of text
become objects or events (`CompletionForm`, `ResponseForm`). Errors have OpenAI's form.
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
from collections.abc import AsyncGenerator, Callable, Iterator
from ipaddress import ip_address
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

from ..batching import TurboQuantBatching
from ..batching.checks import number_of_positions
from ..config import TurboQuantConfig
from .answers import LONG, Choice, Engine, Exchange, Part, Refused, in_flags
from .fields import BODIES, Body, ChatBody

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
    """ASGI middleware that asks for the key, and cancels the requests of a client that disconnects, so that their pages
    are freed at once."""

    def __init__(self, app: Any, key: str | None = None) -> None:
        self.app, self.key = app, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if self.key is not None and scope["path"] not in OPEN:
            kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(key.encode(), self.key.encode()):
                refusal = error_of("The key is missing or wrong. Send `Authorization: Bearer KEY`.", 401)
                return await JSONResponse(refusal, 401)(scope, receive, send)
        read, answered = asyncio.Event(), False

        async def reads() -> Any:
            message = await receive()
            if not message.get("more_body"):
                read.set()
            return message

        async def sends(message: Any) -> None:
            nonlocal answered
            answered = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        async def watch() -> None:
            await read.wait()
            while (await receive())["type"] != "http.disconnect":
                pass
            if not answered:
                answer.cancel()

        answer = asyncio.ensure_future(self.app(scope, reads, sends))
        watching = asyncio.ensure_future(watch())
        try:
            await asyncio.wait([answer])
            if not answer.cancelled():
                answer.result()
        finally:
            watching.cancel()


def _event(content: dict[str, Any]) -> str:
    """Text of an event. Events of `/v1/responses` have names."""
    name = f"event: {content['type']}\n" if "type" in content else ""
    return f"{name}data: {json.dumps(content)}\n\n"


class CompletionForm:
    """The object and the events of `/v1/chat/completions` and `/v1/completions`."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, self.chats = exchange, isinstance(exchange.body, ChatBody)
        kind, name = ("chat.completion", "chatcmpl") if self.chats else ("text_completion", "cmpl")
        kind += ".chunk" * (self.chats and bool(exchange.body.stream))
        own = {"id": f"{name}-{uuid4().hex}", "object": kind}
        self.head = {**own, "created": int(time.time()), "model": exchange.engine.name}

    def _usage(self) -> dict[str, int]:
        prompt, new = self.exchange.usage()
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _deltas(self, answer: Choice, part: Part) -> list[dict[str, Any]]:
        """Parts of a message."""
        deltas = list[dict[str, Any]]()
        for item in part.items:
            if isinstance(item, ToolCall):
                call = {"id": f"call_{uuid4().hex}", "type": "function", "function": vars(item)}
                deltas.append({"tool_calls": [{"index": answer.sent_calls, **call}]})
                answer.sent_calls += 1
            else:
                deltas.append({"reasoning_content" if isinstance(item, ReasoningText) else "content": str(item)})
        return deltas

    async def whole(self) -> dict[str, Any]:
        """The answers as one object."""
        choices = {}
        async for answer, part in self.exchange.parts():
            content: dict[str, Any] = {"text": "".join(part.items)} if not self.chats else {}
            if self.chats:
                message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
                content["message"] = message
                for delta in self._deltas(answer, part):
                    for name, value in delta.items():
                        message[name] = message[name] + value if name in message else value
            ends = {"logprobs": part.logprobs, "finish_reason": answer.finish}
            choices[answer.index] = {"index": answer.index, **content, **ends}
        return self.head | {"choices": [choices[i] for i in sorted(choices)], "usage": self._usage()}

    async def events(self) -> AsyncGenerator[str, None]:
        """The answers as events, side by side."""
        counts = bool((self.exchange.body.stream_options or {}).get("include_usage"))
        head = self.head | ({"usage": None} if counts else {})

        def event(answer: Choice, content: Any, logprobs: Any = None, finish: str | None = None) -> str:
            own = {"delta" if self.chats else "text": content, "logprobs": logprobs, "finish_reason": finish}
            return _event({**head, "choices": [{"index": answer.index, **own}]})

        try:
            for answer in self.exchange.answers if self.chats else ():
                yield event(answer, {"role": "assistant", "content": ""})
            async for answer, part in self.exchange.parts():
                deltas: list[Any] = self._deltas(answer, part) if self.chats else part.items
                logprobs = part.logprobs
                for delta in deltas:
                    yield event(answer, delta, logprobs)
                    logprobs = None
                if answer.finish:
                    yield event(answer, {} if self.chats else "", logprobs, answer.finish)
            if counts:
                yield _event(self.head | {"choices": [], "usage": self._usage()})
        except Refused as error:
            yield _event(error_of(str(error), error.status))
        yield "data: [DONE]\n\n"


class ResponseForm:
    """The object and the events of `/v1/responses`."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, body = exchange, exchange.body
        self.output: list[dict[str, Any]] = []
        """Items of the output."""
        self.open: str | None = None
        """Type of the last item, if it is not complete."""
        self.number = 0
        self.head = {
            **{"id": f"resp_{uuid4().hex}", "object": "response", "created_at": int(time.time())},
            **{"model": exchange.engine.name, "error": None, "incomplete_details": None},
            **{name: getattr(body, name) for name in ("instructions", "max_output_tokens", "temperature", "top_p")},
            **{"metadata": (body.model_extra or {}).get("metadata") or {}, "store": False, "usage": None},
            **{"tools": body.tools or [], "tool_choice": body.tool_choice or "auto"},
            **{"parallel_tool_calls": body.parallel_tool_calls is not False, "previous_response_id": None},
            **{"text": {"format": {"type": "text"}}, "truncation": "disabled"},
        }

    def _event(self, kind: str, **content: Any) -> dict[str, Any]:
        self.number += 1
        return {"type": f"response.{kind}", "sequence_number": self.number - 1, **content}

    def _of_whole(self, kind: str, status: str, **content: Any) -> dict[str, Any]:
        whole = self.head | {"status": status, "output": list(self.output), **content}
        return self._event(kind, response=whole)

    def _of_item(self, kind: str, **content: Any) -> dict[str, Any]:
        return self._event(kind, output_index=len(self.output) - 1, **content)

    def _of_text(self, kind: str, **content: Any) -> dict[str, Any]:
        name = "reasoning_text" if self.open == "reasoning" else "output_text"
        own: dict[str, Any] = {"logprobs": []} if self.open == "message" and not kind.startswith("content") else {}
        kind = kind if kind.startswith("content") else f"{name}.{kind}"
        return self._of_item(kind, item_id=self.output[-1]["id"], content_index=0, **content, **own)

    def _begin(self, kind: str, **content: Any) -> Iterator[dict[str, Any]]:
        """Begin an item."""
        name = f"{ {'message': 'msg', 'reasoning': 'rs'}.get(kind, 'fc') }_{uuid4().hex}"
        self.output.append({"id": name, "type": kind, "status": "in_progress", **content})
        self.open = kind
        yield self._of_item("output_item.added", item=dict(self.output[-1]))
        if kind == "message":
            self.output[-1]["content"] = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
            yield self._of_text("content_part.added", part=dict(self.output[-1]["content"][0]))
        elif kind == "reasoning":
            self.output[-1]["content"] = [{"type": "reasoning_text", "text": ""}]

    def _end(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """End the open item."""
        if self.open is None:
            return
        item = self.output[-1]
        item["status"] = status
        if self.open == "function_call":
            own = {"item_id": item["id"], "name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("function_call_arguments.done", **own)
        else:
            yield self._of_text("done", text=item["content"][0]["text"])
        if self.open == "message":
            yield self._of_text("content_part.done", part=item["content"][0])
        yield self._of_item("output_item.done", item=item)
        self.open = None

    def _add(self, item: Any) -> Iterator[dict[str, Any]]:
        """Add a part of the answer."""
        if isinstance(item, ToolCall):
            yield from self._end()
            yield from self._begin("function_call", call_id=f"call_{uuid4().hex}", **vars(item))
            yield from self._end()
            return
        kind = "reasoning" if isinstance(item, ReasoningText) else "message"
        if self.open != kind:
            yield from self._end()
            own: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            yield from self._begin(kind, **own, content=[])
        self.output[-1]["content"][0]["text"] += item
        yield self._of_text("delta", delta=str(item))

    async def _steps(self) -> AsyncGenerator[dict[str, Any], None]:
        """Events. The last one has the whole object."""
        yield self._of_whole("created", "in_progress")
        yield self._of_whole("in_progress", "in_progress")
        async for _, part in self.exchange.parts():
            for item in part.items:
                for event in self._add(item):
                    yield event
        cut = self.exchange.answers[0].finish == "length"
        status = "incomplete" if cut else "completed"
        for event in self._end(status) if self.output else [*self._add(""), *self._end(status)]:
            yield event
        prompt, new = self.exchange.usage()
        usage: dict[str, Any] = {"input_tokens": prompt, "output_tokens": new, "total_tokens": prompt + new}
        usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        details = {"reason": "max_output_tokens"} if cut else None
        yield self._of_whole(status, status, usage=usage, incomplete_details=details)

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        async for event in self._steps():
            last = event
        return last["response"]

    async def events(self) -> AsyncGenerator[str, None]:
        """The answer as events."""
        try:
            async for event in self._steps():
                yield _event(event)
        except Refused as error:
            failed = {"code": "server_error", "message": str(error)}
            yield _event(self._of_whole("failed", "failed", error=failed))


class EventStream(StreamingResponse):
    """A stream of events. Its requests are cancelled if the client goes away."""

    def __init__(self, exchange: Exchange, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.exchange = exchange

    async def stream_response(self, send: Any) -> None:
        try:
            await super().stream_response(send)
        finally:
            self.exchange.close()


class Routes:
    """Routes of a server.

    Args:
        engine: The engine.
        most_bytes: Maximum size of a body.
    """

    def __init__(self, engine: Engine, most_bytes: int) -> None:
        self.engine, self.most_bytes = engine, most_bytes
        self.card = {"id": engine.name, "object": "model", "created": int(time.time()), "owned_by": "tq-hf"}

    def app(self, key: str | None, cors: bool) -> Starlette:
        """Create the application."""

        def post(body: type[Body]) -> Any:
            async def endpoint(request: Request) -> Any:
                return await self.answer(request, body)

            return endpoint

        middleware = [Middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])] * cors
        return Starlette(
            routes=[
                *(Route(f"/v1/{name}", post(body), methods=["POST"]) for name, body in BODIES.items()),
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
        exchange = await self.engine.in_thread(len(data) > LONG, self.engine.read, kind, data)
        form: Any = ResponseForm(exchange) if kind is BODIES["responses"] else CompletionForm(exchange)
        if exchange.body.stream:
            return EventStream(exchange, form.events())
        content = await form.whole()
        big = exchange.usage()[1] > 1024
        return Response(await self.engine.in_thread(big, _encoded, content), media_type="application/json")

    async def models(self, request: Request) -> Response:
        """List the served model."""
        return JSONResponse({"object": "list", "data": [self.card]})

    async def model(self, request: Request) -> Response:
        """Describe the served model."""
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
        """Say what the engine does, in the format of Prometheus."""
        return PlainTextResponse(self.engine.manager.metrics(), media_type="text/plain; version=0.0.4")


def _encoded(content: dict[str, Any]) -> bytes:
    """JSON of an answer, in pieces: one call for a large one would stop all threads."""
    return "".join(json.JSONEncoder().iterencode(content)).encode()


class HttpServer(uvicorn.Server):
    """uvicorn's server, which fails open requests in a sentence when it is told to stop."""

    engine: Engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.engine.close("The server is stopping. Try again later.")
        stop = asyncio.to_thread(self.engine.manager.stop, block=True, timeout=GRACE, hard_stop=True)
        await asyncio.gather(super().shutdown(sockets), stop)


def check_access(host: str, port: int, key: str | None) -> str | None:
    """Return a warning if others may use the server.

    Raises:
        ValueError: The port is in use, the key is empty, or several processes were started.
    """
    if (processes := int(os.environ.get("WORLD_SIZE", 1))) > 1:
        raise ValueError(
            f"torchrun started {processes} processes, and this server is one process on one GPU. Start one server per "
            "GPU, each with its own `--port`, or use `examples/ray_serve.py` for one address. A model that needs "
            "several GPUs can answer batches: `examples/serve_many.py --tp`."
        )
    if key is not None and not key.strip():
        raise ValueError("`--api-key` is empty. Leave it out for a server without a key.")
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
            is_open = key is None and not ip_address(taken.getsockname()[0]).is_loopback
    except OSError as error:
        raise ValueError(
            f"Cannot listen at {host}:{port}: {error.strerror or error}. Choose another `--port`."
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
    key: str | None,
    cors: bool,
    most_bytes: int,
) -> None:
    """Serve a model until the server is told to stop. Graphs are captured, and steps compiled, while it answers.

    Args:
        name, model, tokenizer: The model, its name for clients, and its tokenizer.
        config, options: Encoding of pages, and options of the engine.
        address: Host and port to listen at.
        say: Function that prints a sentence before the first request is accepted.
        key: Key that clients must send; `None` for none.
        cors: Whether web pages of other origins may send requests.
        most_bytes: Maximum size of a body.

    Raises:
        ValueError: Packed pages cannot hold the model, or the options do not fit into memory.
    """
    if type(model).__name__ in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values():
        raise ValueError(
            f"{type(model).__name__} reads more than text, and this server reads text only. Use `generate()` with a "
            "`TurboQuantCache`."
        )
    try:
        batching = TurboQuantBatching(model, config, tokenizer=tokenizer)
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
        app = Routes(engine, most_bytes).app(key, cors)
        host, port = address
        own: dict[str, Any] = {"log_level": "warning", "lifespan": "off", "ws": "none"}
        server = HttpServer(uvicorn.Config(app, host, port, timeout_graceful_shutdown=GRACE, **own))
        server.engine = engine
        check_access(host, port, key)  # another process may have taken the port meanwhile
        say(room(engine))
        gc.freeze()  # a request that makes many objects would have all modules of the model visited
        sys.setswitchinterval(1e-3)  # between threads that read long requests, the engine's and the event loop's
        server.run()
    except KeyboardInterrupt:  # uvicorn raises it again once it has stopped
        pass
    finally:
        if manager.is_running():
            manager.stop(block=True, timeout=GRACE, hard_stop=True)  # at once, even while compiling
