"""A server of one model with OpenAI's API, on packed pages.

The way of a request: `Guard` checks its key, and cancels what a client that goes away has asked for. `Routes.answer`
reads the body up to a size. A thread checks its fields (`fields.py`), renders and tokenizes the prompt, and asks the
engine what it accepts (`answers.py`). The engine generates in its own thread; its tokens become text, parts of text
become `Completion` or `Response` objects, or events of a stream. What goes wrong is said in OpenAI's form of errors.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from ipaddress import ip_address
from typing import Any
from uuid import uuid4

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import ContinuousBatchingConfig
from transformers.cli.serving.utils import ReasoningText, ToolCall
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from ..batching import TurboQuantBatching
from ..config import TurboQuantConfig
from .answers import LONG, Answer, Engine, Exchange, Part, Refused, in_flags
from .fields import BODIES, Body, ChatBody

GRACE = 5
"""Number of seconds until open connections are closed after the server stops."""
OPEN = ("/health", "/metrics")
"""Paths that need no key."""


def error_of(reason: str, status: int) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": reason, "type": kind, "param": None, "code": "invalid_api_key" if status == 401 else None}}


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


class Completion:
    """Objects and events of `/v1/chat/completions` and `/v1/completions`."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, self.body = exchange, exchange.body
        self.chats = isinstance(self.body, ChatBody)
        kind, name = ("chat.completion", "chatcmpl") if self.chats else ("text_completion", "cmpl")
        self.kind = f"{kind}.chunk" if self.chats and self.body.stream else kind
        self.head = {
            "id": f"{name}-{uuid4().hex}",
            "object": self.kind,
            "created": int(time.time()),
            "model": exchange.engine.name,
        }

    def _usage(self) -> dict[str, Any]:
        prompt, answers = self.exchange.usage()
        return {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}

    def _deltas(self, answer: Answer, part: Part) -> list[Any]:
        """Parts of a message, or a text."""
        if not self.chats:
            return ["".join(part.items)] if part.items else []
        deltas: list[dict[str, Any]] = []
        for item in part.items:
            name = "reasoning_content" if isinstance(item, ReasoningText) else "content"
            if isinstance(item, ToolCall):
                call = {"id": f"call_{uuid4().hex}", "type": "function", "function": vars(item)}
                deltas.append({"tool_calls": [{"index": answer.called, **call}]})
                answer.called += 1
            elif deltas and name in deltas[-1]:
                deltas[-1][name] += item
            else:
                deltas.append({name: str(item)})
        return deltas

    async def whole(self) -> dict[str, Any]:
        """The answers as one object."""
        choices: dict[int, dict[str, Any]] = {}
        async with aclosing(self.exchange.parts()) as parts:
            async for answer, part in parts:
                own: dict[str, Any]
                if self.chats:
                    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
                    for delta in self._deltas(answer, part):
                        for name, value in delta.items():
                            message[name] = message[name] + value if name in message else value
                    own = {"message": message}
                else:
                    own = {"text": "".join(part.items)}
                choices[answer.index] = {
                    "index": answer.index, **own, "logprobs": part.logprobs, "finish_reason": answer.finish
                }  # fmt: skip
        return self.head | {"choices": [choices[i] for i in sorted(choices)], "usage": self._usage()}

    async def events(self) -> AsyncIterator[str]:
        """The answers as events, side by side."""
        counts = bool((self.body.stream_options or {}).get("include_usage"))  # type: ignore[attr-defined]

        def event(choices: list[Any], usage: Any = None) -> str:
            return _event(self.head | {"choices": choices} | ({"usage": usage} if counts else {}))

        def choice(answer: Answer, delta: Any, logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
            own = {"delta": delta} if self.chats else {"text": delta}
            return {"index": answer.index, **own, "logprobs": logprobs, "finish_reason": finish}

        try:
            for answer in self.exchange.answers if self.chats else ():
                yield event([choice(answer, {"role": "assistant", "content": ""})])
            async with aclosing(self.exchange.parts()) as parts:
                async for answer, part in parts:
                    logprobs = part.logprobs
                    for delta in self._deltas(answer, part):
                        yield event([choice(answer, delta, logprobs)])
                        logprobs = None
                    if answer.finish:
                        yield event([choice(answer, {} if self.chats else "", logprobs, answer.finish)])
            if counts:
                yield event([], self._usage())
        except Refused as error:
            yield _event(error_of(str(error), error.status))
        yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    name = f"event: {content['type']}\n" if "type" in content else ""
    return f"{name}data: {json.dumps(content)}\n\n"


class Response_:
    """The object and the events of `/v1/responses`."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, self.body = exchange, exchange.body
        body: Any = self.body
        self.output: list[dict[str, Any]] = []
        """Items of the output. The last one may be open."""
        self.open = ""
        """Type of the open item."""
        self.number = 0
        self.head = {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": (body.model_extra or {}).get("metadata") or {},
            "model": exchange.engine.name,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
        }

    def _event(self, kind: str, **content: Any) -> dict[str, Any]:
        self.number += 1
        return {"type": kind, "sequence_number": self.number - 1, **content}

    def _object(self, status: str, **more: Any) -> dict[str, Any]:
        return self.head | {"status": status, "output": self.output, "usage": None} | more

    def _place(self, **more: Any) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, **more}

    def _item(self, step: str) -> dict[str, Any]:
        return self._event(f"response.output_item.{step}", output_index=len(self.output) - 1, item=dict(self.output[-1]))

    def _begin(self, kind: str, **content: Any) -> list[dict[str, Any]]:
        """Add an item to the output."""
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        self.output.append({"id": f"{prefix}_{uuid4().hex}", "type": kind, "status": "in_progress", **content})
        self.open = kind
        events = [self._item("added")]
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self.output[-1]["content"] = [part]
            events.append(self._event("response.content_part.added", **self._place(content_index=0, part=dict(part))))
        return events

    def _end(self, status: str = "completed") -> list[dict[str, Any]]:
        """Close the open item."""
        kind, self.open, events = self.open, "", []
        if not kind:
            return []
        item = self.output[-1] | {"status": status}
        self.output[-1] = item
        if kind == "function_call":
            names = {name: item[name] for name in ("name", "arguments")}
            events.append(self._event("response.function_call_arguments.done", **self._place(**names)))
        else:
            name = "output_text" if kind == "message" else "reasoning_text"
            text = {"content_index": 0, "text": item["content"][0]["text"]}
            own = {"logprobs": []} if kind == "message" else {}
            events.append(self._event(f"response.{name}.done", **self._place(**text, **own)))
            if kind == "message":
                part = self._place(content_index=0, part=item["content"][0])
                events.append(self._event("response.content_part.done", **part))
        return [*events, self._item("done")]

    def _add(self, item: Any) -> list[dict[str, Any]]:
        """Add a part of the answer."""
        if isinstance(item, ToolCall):
            call = {"call_id": f"call_{uuid4().hex}", "name": item.name, "arguments": item.arguments}
            return [*self._end(), *self._begin("function_call", **call), *self._end()]
        kind = "reasoning" if isinstance(item, ReasoningText) else "message"
        events = []
        if self.open != kind:
            own = {"role": "assistant", "content": []} if kind == "message" else {"summary": []}
            events = [*self._end(), *self._begin(kind, **own)]
            if kind == "reasoning":
                self.output[-1]["content"] = [{"type": "reasoning_text", "text": ""}]
        self.output[-1]["content"][0]["text"] += item
        name = "output_text" if kind == "message" else "reasoning_text"
        own = {"logprobs": []} if kind == "message" else {}
        delta = self._place(content_index=0, delta=str(item), **own)
        return [*events, self._event(f"response.{name}.delta", **delta)]

    async def steps(self) -> AsyncIterator[dict[str, Any]]:
        """The events. The last one has the whole object."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._object("in_progress", output=[]))
        async with aclosing(self.exchange.parts()) as parts:
            async for answer, part in parts:
                for item in part.items:
                    for event in self._add(item):
                        yield event
        status = "incomplete" if answer.finish == "length" else "completed"
        if not self.output:
            for event in self._add(""):
                yield event
        for event in self._end(status):
            yield event
        prompt, new = self.exchange.usage()
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + new,
        }
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        whole = self._object(status, usage=usage, incomplete_details=details)
        yield self._event(f"response.{status}", response=whole)

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        async with aclosing(self.steps()) as steps:
            async for event in steps:
                last = event
        return last["response"]

    async def events(self) -> AsyncIterator[str]:
        """The answer as events."""
        try:
            async with aclosing(self.steps()) as steps:
                async for event in steps:
                    yield _event(event)
        except Refused as error:
            failed = {"code": "server_error", "message": str(error)}
            yield _event(self._event("response.failed", response=self._object("failed", error=failed)))


class EventStream(StreamingResponse):
    """A stream whose generator is closed as soon as nobody reads it."""

    async def stream_response(self, send: Any) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)


class Routes:
    """Routes of a server.

    Args:
        engine: The engine.
        most_bytes: Maximum size of a body.
    """

    def __init__(self, engine: Engine, most_bytes: int) -> None:
        self.engine, self.most_bytes = engine, most_bytes

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
            exception_handlers={Refused: self.refuse, HTTPException: self.refuse, Exception: self.refuse},
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
            raise Refused(f"The body has {size:,} bytes, and the server reads up to {self.most_bytes:,}. Shorten it.", 413)
        return bytes(data)

    async def answer(self, request: Request, kind: type[Body]) -> Response:
        """Answer a request for completions or a response."""
        data = await self.read(request)
        if failure := self.engine.failure:
            raise Refused(failure, 503)
        question = await self.engine.in_thread(len(data) > LONG, self.engine.read, kind, data)
        exchange = Exchange(self.engine, question, bool(question.body.stream))
        form = Response_(exchange) if kind is BODIES["responses"] else Completion(exchange)
        if question.body.stream:
            return EventStream(form.events(), media_type="text/event-stream")
        content = await form.whole()
        big = exchange.usage()[1] > 1024
        return Response(await self.engine.in_thread(big, _encoded, content), media_type="application/json")

    def _model(self) -> dict[str, Any]:
        return {"id": self.engine.name, "object": "model", "created": self.created, "owned_by": "tq-hf"}

    created = int(time.time())

    async def models(self, request: Request) -> Response:
        """List the served model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Describe the served model."""
        if (name := request.path_params["name"]) != self.engine.name:
            raise Refused(f"There is no model {name!r:.100}; this server serves {self.engine.name!r}.", 404)
        return JSONResponse(self._model())

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
        await self.engine.close("The server is stopping. Try again later.")
        stop = asyncio.to_thread(self.engine.manager.stop, block=True, timeout=GRACE, hard_stop=True)
        await asyncio.gather(super().shutdown(sockets), stop)


def sockets_of(host: str, port: int) -> list[socket.socket]:
    """Bind the addresses of a host.

    Raises:
        ValueError: The port is in use, or the host has no address here.
    """
    try:
        found = []
        for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
            own = socket.socket(family, socket.SOCK_STREAM)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                own.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            own.bind(address)
            found.append(own)
    except OSError as error:
        raise ValueError(f"Cannot listen at {host}:{port}: {error.strerror or error}. Choose another `--port`.") from None
    return found


def serve(
    name: str,
    load: Callable[[], tuple[Any, Any]],
    config: TurboQuantConfig,
    *,
    say: Callable[[str], None],
    host: str,
    port: int,
    cache_tokens: int | None,
    options: dict[str, Any],
    access: dict[str, Any],
) -> None:
    """Serve a model until the server is told to stop."""
