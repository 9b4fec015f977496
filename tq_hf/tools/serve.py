"""transformers' OpenAI-compatible server on packed pages, for `tq-hf serve`.

transformers' server routes, renders templates, streams and loads the model. It asks the model for a continuous batching
manager, and gets ours: before it listens, so that the first request does not wait for graphs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import CBWorkerDeadError, Modality
from transformers.utils.import_utils import is_serve_available

from ..batching import TurboQuantBatchingManager, continuous_batching
from ..batching.checks import STOCK_PAGE_SIZE
from ..compat import check_ground
from ..config import TurboQuantConfig
from .sampling import RequestManager, sampling_of

GRACE = 5
"""Seconds until open connections are closed once the server stops."""


class OneAnswerAnId:
    """ASGI middleware: no two requests under way have the same `x-request-id`, by which the server finds answers."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.open: set[bytes | None] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request_id = dict(scope.get("headers", ())).get(b"x-request-id")
        if request_id in self.open:
            sentence = "A request of this `x-request-id` is being answered. Take another id, or leave the header out."
            return await refusal(sentence, 409)(scope, receive, send)
        if request_id is not None:
            self.open.add(request_id)
        try:
            await self.app(scope, receive, send)
        finally:
            self.open.discard(request_id)


class CancelsWhenGone:
    """ASGI middleware: what a client that has gone away asked for is cancelled, and its pages are free at once."""

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
    """A response in the form of OpenAI's errors."""
    from fastapi.responses import JSONResponse

    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": sentence, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status_code=status)


LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
NOT_APPLIED: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "logprobs": False,
    "top_logprobs": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "functions": [],
    "previous_response_id": None,
}
"""Options of OpenAI's API that change an answer and are not applied, and their values that change nothing."""


def check_body(body: dict[str, Any], needed: str) -> None:
    """Raise a `ValueError` if a request lacks the field `needed`, has no room for an answer, or asks for what would be
    dropped."""
    if body.get(needed) is None:
        raise ValueError(
            f"The request has no `{needed}`. Give {'text' if needed == 'prompt' else 'a list of messages'}."
        )
    for name in LIMITS:
        number = body.get(name)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(
                f"`{name}` is {number!r}; it must be a whole number of 1 or more. Leave it out for a default."
            )
    for name, neutral in NOT_APPLIED.items():
        if body.get(name) not in (None, neutral):
            raise ValueError(f"`{name}` is {body[name]!r}, which this server does not apply. Leave it out.")
    text = body.get("text")
    for name, form in (
        ("response_format", body.get("response_format")),
        ("text", isinstance(text, dict) and text.get("format")),
    ):
        if form and form != {"type": "text"}:
            raise ValueError(f"`{name}` asks for {form!r}, and this server answers with free text only. Leave it out.")
    if body.get("tools") and body.get("tool_choice") not in (None, "auto"):
        raise ValueError(
            f"`tool_choice` is {body['tool_choice']!r}, and this server applies 'auto' only. Leave it out."
        )
    if needed != "prompt":
        _check_messages(body[needed], needed)


def _check_messages(messages: Any, name: str) -> None:
    """Raise a `ValueError` if messages of a chat are not a list of roles and texts."""
    if name == "input" and isinstance(messages, str):
        return
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise ValueError(f"`{name}` must be a list of messages, each with a `role` and a `content`.")
    for message in messages:
        if name == "messages" and "role" not in message:
            raise ValueError("A message has no `role`. Give each a `role` and a `content`.")
        # Items of `input` are messages, parts of one, or calls of tools, which transformers' server checks.
        is_message = "role" in message
        parts = message.get("content") if is_message else [message]
        if not isinstance(parts, (str, list, type(None))):
            raise ValueError(f"The `content` of a message is of the type {type(parts).__name__}; it must be text.")
        for part in parts if isinstance(parts, list) else ():
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if not is_message and not str(kind).startswith("input_"):
                continue
            if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
                raise ValueError(
                    f"A message has a part of the type {kind!r}, and the model reads `text` only. Leave it out."
                )


class TurboQuantServer(Serve):
    """A server of one model, whose requests share one pool of packed pages. Shorter prompts are read before longer ones
    that wait, for a while (`ShortestFirst`).

    The constructor loads the model and serves until the server is stopped.

    Args:
        model: A folder or a model of the hub.
        config: What pages are packed to.
        started: Called with the model's tokenizer before the first request is accepted.
        cache_tokens: Tokens the pool has room for; by default as many as fit in memory.
        compile_level: transformers' `default_compile_level`, from 0 for not compiled to 3; by default 1 on a GPU, else
            0.
        **options: Those of transformers' `Serve`.

    Raises:
        ValueError: A package of the extra `serving` is missing, packed pages cannot hold the model, or this is one of
            several processes.
        OSError: The model cannot be loaded.
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
        check_ground("tq-hf serve", "Use `TurboQuantBatching` in Python.")
        if not is_serve_available():
            raise ValueError(
                "transformers' server needs FastAPI, Uvicorn and openai, and not all of them are installed: "
                '`pip install "tq-hf[serving]"`.'
            )
        if (processes := int(os.environ.get("WORLD_SIZE", 1))) > 1:
            raise ValueError(
                f"torchrun started {processes} processes, and transformers' server is one, on one GPU. Start a server "
                "a GPU, each with a `--port` of its own, or take `examples/ray_serve.py` for one address. A model that "
                "needs several GPUs answers batches: `examples/serve_many.py --tp`."
            )
        self.config, self.started, self.compile_level = config, started, compile_level
        # The option counts pages of transformers' size; `paged_options` converts them.
        blocks = None if cache_tokens is None else -(-cache_tokens // STOCK_PAGE_SIZE)
        # `Serve` calls `start_server` with `non_blocking`; else it would run the server itself.
        super().__init__(model, continuous_batching=True, non_blocking=True, cb_num_blocks=blocks, **options)

    def start_server(self) -> None:
        """Serve the model within `continuous_batching`."""
        models: Any = self._model_manager
        # transformers before 5.24 lists the hub's folder, which may not exist, and not what is served.
        served = {"id": models.force_model, "object": "model", "created": int(time.time()), "owned_by": "tq-hf"}
        models.get_gen_models = lambda *args: [served]
        try:
            (loaded,) = models.loaded_models.values()
            model = loaded.model
            if models.get_model_modality(model, processor=loaded.processor) is not Modality.LLM:
                raise ValueError(
                    f"{type(model).__name__} reads more than text, and for such models transformers' server batches "
                    "nothing. Use `generate()` with a `TurboQuantCache`."
                )
            with continuous_batching(model, self.config) as batching:
                _ = batching.balance  # runs the model: no request should wait for that
                self._refuse_in_sentences()
                self._sample_by_request(model)
                self.server.config.timeout_graceful_shutdown = GRACE
                self.started(loaded.processor)
                try:
                    self.server.run()
                finally:
                    if (manager := self._manager()) is not None:
                        # transformers would first answer all outstanding requests.
                        manager.stop(block=True, hard_stop=True)
                    self._generation_state.shutdown()
        finally:
            models.shutdown()

    def _manager(self) -> TurboQuantBatchingManager | None:
        """The manager that generates, once it runs."""
        wrapper: Any = self._generation_state._cb_manager
        return None if wrapper is None else wrapper._cb

    def _sample_by_request(self, model: PreTrainedModel) -> None:
        """Have each request's own sampling, in place of the first one's for all, and start the engine: transformers
        starts it at the first request, which knows its sampling."""
        state: Any = self._generation_state
        # Where transformers makes its own at the first request.
        options = state._cb_config or ContinuousBatchingConfig()
        level = int(model.device.type == "cuda") if self.compile_level is None else self.compile_level
        options.default_compile_level = level
        options.scheduler_type = "shortest_first"
        state._cb_manager = manager = RequestManager(options)
        manager.init_cb(model, None)
        state.get_manager = lambda model_id, use_cb=False: manager
        for handler in (self._chat_handler, self._completion_handler, self._response_handler):
            handler._build_generation_config = _with_sampling(handler._build_generation_config)  # type: ignore

    def _refuse_in_sentences(self) -> None:
        """Answer a client's mistake with 400 and the error's sentence, in place of a bare 500."""
        from fastapi.exceptions import RequestValidationError
        from starlette.exceptions import HTTPException

        app: Any = self.server.config.app
        app.add_middleware(OneAnswerAnId)
        app.add_middleware(CancelsWhenGone)

        @app.exception_handler(ValueError)
        @app.exception_handler(TypeError)
        @app.exception_handler(RequestValidationError)
        async def of_the_request(request: Any, error: Exception) -> Any:
            return refusal(str(error))

        @app.exception_handler(HTTPException)
        async def of_the_server(request: Any, error: HTTPException) -> Any:
            return refusal(str(error.detail), error.status_code)

        @app.exception_handler(CBWorkerDeadError)
        async def of_the_engine(request: Any, error: Exception) -> Any:
            return refusal(str(error), 503)

        @app.exception_handler(Exception)  # which the log has, too
        async def of_a_step(request: Any, error: Exception) -> Any:
            return refusal(str(error) or type(error).__name__, 500)

        needed = {self._chat_handler: "messages", self._completion_handler: "prompt", self._response_handler: "input"}
        for handler, field in needed.items():
            handler._validate_request = _with_checks(handler._validate_request, field)  # type: ignore


def _with_checks(validate: Callable[[dict[str, Any]], Any], needed: str) -> Callable[[dict[str, Any]], Any]:
    """A server's check of a request, with ours before it."""

    def validate_all(body: dict[str, Any]) -> Any:
        check_body(body, needed)
        return validate(body)

    return validate_all


def _with_sampling(build: Callable[..., Any]) -> Callable[..., Any]:
    """A server's way from a request to a generation config, which then has the request's sampling."""

    def build_with_sampling(body: dict[str, Any], *args: Any, **options: Any) -> Any:
        # A seed would be set for all requests.
        config = build(body | {"seed": None}, *args, **options)
        config.sampling = sampling_of(body, config)
        return config

    return build_with_sampling
