"""transformers' OpenAI-compatible server on packed pages, for `tq-hf serve`.

transformers' server loads the model, routes requests, renders templates and streams answers. Its continuous batching
manager is replaced by ours before the server listens. Graphs are captured, and steps compiled, while it answers.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import CBWorkerDeadError, Modality
from transformers.utils.import_utils import is_serve_available

from ..batching import TurboQuantBatchingManager, continuous_batching
from ..batching.checks import DEFAULT_PAGE_SIZE
from ..compat import check_required_names
from ..config import TurboQuantConfig
from .fields import check_fields
from .sampling import (
    RequestManager,
    chat_logprobs,
    completion_logprobs,
    with_all_answers,
    with_all_streams,
    with_request_options,
)

GRACE = 5
"""Number of seconds until open connections are closed after the server stops."""


class CancelOnDisconnect:
    """ASGI middleware that cancels the requests of a client that disconnects, so that their pages are freed at once."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
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


def refusal(sentence: str, status: int = 400) -> Any:
    """Create an error response in OpenAI's format."""
    from fastapi.responses import JSONResponse

    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": sentence, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status_code=status)


NEEDED = {"chat/completions": "messages", "completions": "prompt", "responses": "input"}
"""Field that no request can do without, by endpoint."""
ITEMS = {
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
"""Texts that an item of `input` without a `role` needs, by type."""
REFUSED = {
    "/reset": "This server keeps its model until it is stopped. Stop it to free its memory.",
    "/v1/systemone": "This server makes no typed decisions. Use chat/completions.",
    "/v1/audio/transcriptions": "This server reads text only. Use chat/completions.",
}
"""Reasons why routes of transformers' server are refused."""


def check_body(body: dict[str, Any], endpoint: str, has_tools: bool = True) -> None:
    """Raise `ValueError` if a request lacks a field, allows no answer, or has fields that are not applied."""
    needed = NEEDED[endpoint]
    if body.get(needed) is None:
        raise ValueError(
            f"The request has no `{needed}`. Send {'text' if needed == 'prompt' else 'a list of messages'}."
        )
    check_fields(body, endpoint, has_tools)
    if needed != "prompt":
        _check_messages(body[needed], needed)


def _check_messages(messages: Any, name: str) -> None:
    """Raise `ValueError` if the messages of a chat are not a list of roles and texts."""
    if name == "input" and isinstance(messages, str):
        return
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise ValueError(f"`{name}` must be a list of messages, each with a `role` and a `content`.")
    # Items of `input` are the parts of one message, or messages with calls of tools after the first.
    are_parts = "role" not in messages[0]
    for message in messages:
        if name == "messages" and "role" not in message:
            raise ValueError("A message has no `role`. Each message needs a `role` and a `content`.")
        if "role" not in message and not are_parts:
            _check_item(message)
            continue
        _check_calls(message.get("tool_calls") or [])
        parts = [message] if are_parts else message.get("content")
        if not isinstance(parts, (str, list, type(None))):
            raise ValueError(f"The `content` of a message is of the type {type(parts).__name__}; it must be text.")
        for part in parts if isinstance(parts, list) else ():
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
                raise ValueError(
                    f"A message has a part of the type {kind!r}, and the model reads `text` only. Leave it out."
                )


def _check_item(item: dict[str, Any]) -> None:
    """Raise `ValueError` if an item of `input` without a `role` is of an unknown type, or lacks a text."""
    if (kind := str(item.get("type"))) not in ITEMS:
        raise ValueError(f"`input` has an item of the type {kind!r}; without a `role` it must be {', '.join(ITEMS)}.")
    for name in ITEMS[kind]:
        if not isinstance(item.get(name), str):
            raise ValueError(f"The `{name}` of an item of the type {kind!r} is {item.get(name)!r}; it must be text.")


def _check_calls(calls: Any) -> None:
    """Raise `ValueError` if the `tool_calls` of a message are not a list of functions with arguments."""
    for call in calls if isinstance(calls, list) else [calls]:
        function = (call.get("function") or call) if isinstance(call, dict) else call
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), (str, dict)):
            raise ValueError(
                f"`tool_calls` has {call!r}; it must be a list of objects, each with a `function` that has `arguments`."
            )


class TurboQuantServer(Serve):
    """Server of one model. All requests share one pool of packed pages. Shorter prompts go before waiting longer
    prompts (`ShortestFirst`).

    The constructor loads the model and serves until the server is stopped.

    Args:
        model: A folder or a model of the hub.
        config: Encoding of pages.
        started: Function that is called with the model's tokenizer before the first request is accepted.
        cache_tokens: Number of tokens in the pool, by default as many as fit into memory.
        compile_level: transformers' `default_compile_level`, 0 (not compiled) to 3. By default 1 on a GPU, otherwise 0.
            Requests are answered while steps are compiled (`TurboQuantBatchingManager.warmup`).
        **options: Arguments of transformers' `Serve`.

    Raises:
        ValueError: A package of the extra `serving` is missing, packed pages cannot hold the model, or several
            processes were started.
        OSError: The model cannot be loaded.
        ImportError: The installed transformers lacks a name that this server needs.
    """

    def __init__(
        self,
        model: str,
        config: TurboQuantConfig,
        started: Callable[[Any], None],
        *,
        cache_tokens: int | None,
        compile_level: int | None,
        **options: Any,
    ) -> None:
        check_required_names("tq-hf serve", "Use `TurboQuantBatching` in Python.")
        if not is_serve_available():
            raise ValueError(
                "transformers' server needs FastAPI, Uvicorn and openai, and not all of them are installed: "
                '`pip install "tq-hf[serving]"`.'
            )
        if (processes := int(os.environ.get("WORLD_SIZE", 1))) > 1:
            raise ValueError(
                f"torchrun started {processes} processes, and transformers' server is one process on one GPU. Start "
                "one server per GPU, each with its own `--port`, or use `examples/ray_serve.py` for one address. A "
                "model that needs several GPUs can answer batches: `examples/serve_many.py --tp`."
            )
        self.config, self.started, self.compile_level = config, started, compile_level
        # The option counts pages of transformers' default size. `paged_options` converts them.
        blocks = None if cache_tokens is None else -(-cache_tokens // DEFAULT_PAGE_SIZE)
        # With `non_blocking`, `Serve` calls `start_server`. Otherwise it would run the server itself.
        super().__init__(model, continuous_batching=True, non_blocking=True, cb_num_blocks=blocks, **options)

    def start_server(self) -> None:
        """Serve the model within `continuous_batching`."""
        models: Any = self._model_manager
        # List the served model. transformers before 5.24 lists the hub's folder instead, which may not exist.
        listed = {"id": models.force_model, "object": "model", "created": int(time.time()), "owned_by": "tq-hf"}
        models.get_gen_models = lambda *args: [listed]
        try:
            (loaded,) = models.loaded_models.values()
            model = loaded.model
            if models.get_model_modality(model, processor=loaded.processor) is not Modality.LLM:
                raise ValueError(
                    f"{type(model).__name__} reads more than text, and transformers' server does not batch requests of "
                    "multimodal models. Use `generate()` with a `TurboQuantCache`."
                )
            with continuous_batching(model, self.config, tokenizer=loaded.processor) as batching:
                _ = batching.balance  # measures channel scales now, so that no request waits for that
                self._refuse_in_sentences("tools" in str(getattr(loaded.processor, "chat_template", None)))
                self._answer_by_request(model)
                self.server.config.timeout_graceful_shutdown = GRACE
                self.started(loaded.processor)
                try:
                    self.server.run()
                finally:
                    if (manager := self._manager()) is not None:
                        # Stop at once, even while compiling: transformers' default answers all requests first.
                        manager.stop(block=True, timeout=GRACE, hard_stop=True)
                    self._generation_state.shutdown()
        finally:
            models.shutdown()

    def _manager(self) -> TurboQuantBatchingManager | None:
        """Return the manager that generates answers, or `None` before the engine has started."""
        wrapper: Any = self._generation_state._cb_manager
        return None if wrapper is None else wrapper._cb

    def _answer_by_request(self, model: PreTrainedModel) -> None:
        """Apply options per request, and start the engine.

        transformers starts the engine at the first request, with the options of that request for all others.
        """
        state: Any = self._generation_state
        # transformers creates its manager at the first request, if there is none.
        options = state._cb_config or ContinuousBatchingConfig()
        level = int(model.device.type == "cuda") if self.compile_level is None else self.compile_level
        options.default_compile_level = level
        options.scheduler_type = "shortest_first"
        state._cb_manager = manager = RequestManager(options)
        manager.init_cb(model, None)
        state.get_manager = lambda model_id, use_cb=False: manager
        for handler in (self._chat_handler, self._completion_handler, self._response_handler):
            build = with_request_options(handler._build_generation_config, handler is self._response_handler)
            handler._build_generation_config = build  # type: ignore[method-assign]
        chats, completions = self._chat_handler, self._completion_handler
        chats._streaming = with_all_streams(chats._streaming, chat_logprobs)  # type: ignore[method-assign]
        completions._streaming = with_all_streams(completions._streaming, completion_logprobs)  # type: ignore
        chats._non_streaming = with_all_answers(chats._non_streaming, chat_logprobs)  # type: ignore
        completions._non_streaming = with_all_answers(completions._non_streaming, completion_logprobs)  # type: ignore

    def _refuse_in_sentences(self, has_tools: bool) -> None:
        """Answer invalid requests with status 400 and the message of the error, in place of an empty 500.

        Args:
            has_tools: Whether the chat template of the model renders tools.
        """
        from fastapi.exceptions import RequestValidationError
        from starlette.exceptions import HTTPException

        app: Any = self.server.config.app
        app.add_middleware(CancelOnDisconnect)

        from starlette.responses import JSONResponse, PlainTextResponse

        @app.get("/metrics")
        def metrics() -> Any:
            manager = self._manager()
            return PlainTextResponse(
                "" if manager is None else manager.metrics(), media_type="text/plain; version=0.0.4"
            )

        replaced = ("/health", "/load_model", *REFUSED)
        routes = {route.path: route for route in app.routes if getattr(route, "path", None) in replaced}
        for route in routes.values():
            app.router.routes.remove(route)
        for path, sentence in REFUSED.items():
            app.add_api_route(path, partial(refusal, sentence, 400), methods=["POST"], response_model=None)

        @app.post("/load_model")
        async def load_served_model(body: dict[str, Any]) -> Any:
            served = self._model_manager.force_model
            if body.get("model") not in (None, served):
                return refusal(f"`model` is {body['model']!r}; this server serves {served!r} only. Leave it out.")
            return await routes["/load_model"].endpoint({"model": served})

        @app.get("/health")
        def health_and_warming() -> Any:
            answer, manager = routes["/health"].endpoint(), self._manager()
            if answer.status_code == 200 and manager is not None and (to_be_done := manager.to_be_done):
                return JSONResponse({"status": "warming", "detail": f"Requests are answered. {to_be_done}"})
            return answer

        @app.exception_handler(ValueError)
        @app.exception_handler(TypeError)
        async def of_the_request(request: Any, error: Exception) -> Any:
            return refusal(str(error))

        @app.exception_handler(RequestValidationError)  # its text names a file of the server
        async def of_the_body(request: Any, error: Exception) -> Any:
            return refusal("The body of a request must be an object in JSON, sent as `application/json`.")

        @app.exception_handler(HTTPException)
        async def of_the_server(request: Any, error: HTTPException) -> Any:
            return refusal(str(error.detail), error.status_code)

        @app.exception_handler(CBWorkerDeadError)
        async def of_the_engine(request: Any, error: Exception) -> Any:
            return refusal(str(error), 503)

        @app.exception_handler(Exception)  # the log also has these errors
        async def of_a_step(request: Any, error: Exception) -> Any:
            return refusal(str(error) or type(error).__name__, 500)

        handlers = (self._chat_handler, self._completion_handler, self._response_handler)
        for handler, endpoint in zip(handlers, NEEDED, strict=True):
            check = partial(check_body, endpoint=endpoint, has_tools=has_tools)
            handler._validate_request = _with_checks(handler._validate_request, check)  # type: ignore


def _with_checks(
    validate: Callable[[dict[str, Any]], Any], check: Callable[[dict[str, Any]], None]
) -> Callable[[dict[str, Any]], Any]:
    """Run our checks of a request before the server's own."""

    def validate_all(body: dict[str, Any]) -> Any:
        check(body)
        return validate(body)

    return validate_all
