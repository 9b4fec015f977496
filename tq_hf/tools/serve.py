"""transformers' OpenAI-compatible server on packed pages, for `tq-hf serve`.

The server is transformers' own: routes, templates, streaming, the loading of the model. Only the manager that generates
is ours: the server asks the model for one when the first request comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.cli.serve import Serve
from transformers.cli.serving.utils import Modality
from transformers.utils.import_utils import is_serve_available

from ..batching import TurboQuantBatchingManager, continuous_batching
from ..batching.checks import STOCK_PAGE_SIZE

GRACE = 5
"""Seconds that open connections have once the server is told to stop."""


class OneAnswerAnId:
    """ASGI middleware that refuses a request whose header `x-request-id` is that of one being answered.

    transformers' server finds answers by this id.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self.open: set[bytes] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request_id = dict(scope.get("headers", ())).get(b"x-request-id")
        if request_id is None:
            await self.app(scope, receive, send)
        elif request_id in self.open:
            sentence = "A request of this `x-request-id` is being answered. Take another id, or leave the header out."
            await refusal(sentence, 409)(scope, receive, send)
        else:
            self.open.add(request_id)
            try:
                await self.app(scope, receive, send)
            finally:
                self.open.discard(request_id)


def refusal(sentence: str, status: int = 400) -> Any:
    """What a client is told, in the form of OpenAI's errors."""
    from fastapi.responses import JSONResponse

    return JSONResponse({"error": {"message": sentence, "type": "invalid_request_error"}}, status_code=status)


class TurboQuantServer(Serve):
    """A server of one model, all requests to which share one pool of packed pages.

    Making one loads the model and serves until the server is told to stop.

    Args:
        model: A folder or a model of the hub.
        preset: What to compress to.
        started: Called with the model's tokenizer when all is ready, before the first request is taken.
        cache_tokens: Tokens the pool has room for; by default as many as fit in memory.
        **options: Those of transformers' `Serve`.

    Raises:
        ValueError: What the server is made of is not installed, or packed pages cannot hold the model.
        OSError: The model cannot be loaded.
    """

    def __init__(
        self,
        model: str,
        preset: str,
        started: Callable[[Any], None],
        *,
        cache_tokens: int | None = None,
        **options: Any,
    ) -> None:
        if not is_serve_available():
            raise ValueError(
                "transformers' server needs FastAPI, Uvicorn and openai, and not all of them are installed: "
                '`pip install "tq-hf[serving]"`.'
            )
        self.preset, self.started = preset, started
        # The server counts in pages of transformers' size; the manager makes as many of its own of them.
        blocks = None if cache_tokens is None else -(-cache_tokens // STOCK_PAGE_SIZE)
        # Whatever transformers would run in a thread (`non_blocking`), it hands to `start_server`.
        super().__init__(model, continuous_batching=True, non_blocking=True, cb_num_blocks=blocks, **options)

    def start_server(self) -> None:
        """Serve while the model's way to a manager leads to ours."""
        manager = self._model_manager
        try:
            (loaded,) = manager.loaded_models.values()
            model = loaded.model
            if manager.get_model_modality(model, processor=loaded.processor) is not Modality.LLM:
                raise ValueError(
                    f"{type(model).__name__} reads more than text, and for such models transformers' server batches "
                    "nothing. Use `generate()` with a `TurboQuantCache`."
                )
            with continuous_batching(model, self.preset) as batching:
                _ = batching.balance  # found by a run of the model, for which no request should wait
                self._refuse_in_sentences()
                self.server.config.timeout_graceful_shutdown = GRACE
                self.started(loaded.processor)
                try:
                    self.server.run()
                finally:
                    if (answering := self._manager()) is not None:
                        # transformers would go on until what is outstanding is answered.
                        answering.stop(block=True, hard_stop=True)
                    self._generation_state.shutdown()
        finally:
            manager.shutdown()

    def _manager(self) -> TurboQuantBatchingManager | None:
        """What generates, from the first request on."""
        answering: Any = self._generation_state._cb_manager
        return None if answering is None else answering._cb

    def _refuse_in_sentences(self) -> None:
        """Let a client have the sentence where it asked for what there is not, as a 400; it would be a bare 500."""
        app: Any = self.server.config.app
        app.add_middleware(OneAnswerAnId)

        @app.exception_handler(ValueError)
        @app.exception_handler(TypeError)
        async def of_the_request(request: Any, error: Exception) -> Any:
            return refusal(str(error))

        @app.exception_handler(RuntimeError)
        async def of_the_pool(request: Any, error: RuntimeError) -> Any:
            manager = self._manager()
            sentence = None if manager is None else manager.output_router.refused.pop(request.state.request_id, None)
            if sentence is None:
                raise error
            return refusal(sentence)
