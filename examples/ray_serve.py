"""Serve a model on packed pages, a replica on each GPU, with streamed answers: Ray Serve.

    pip install -e ".[ray]"    # in a clone
    serve run examples.ray_serve:application model=Qwen/Qwen3-4B replicas=2
    curl -N localhost:8000/generate -H "Content-Type: application/json" \
      -d '{"prompt": "A KV cache is", "new_tokens": 100}'

Requests of a replica share its pool of pages, and are answered together. A client that goes away frees its pages.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import torch
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from ray import serve
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tq_hf import TurboQuantBatching

api = FastAPI()


class Request(BaseModel):
    """Request of a client."""

    prompt: str
    new_tokens: int = 64


@serve.deployment(max_ongoing_requests=256)
@serve.ingress(api)
class Replica:
    """A model, with a loop that answers all requests in flight."""

    def __init__(self, model: str, preset: str) -> None:
        on_gpu = torch.cuda.is_available()
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto" if on_gpu else torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        batching = TurboQuantBatching(loaded.to("cuda" if on_gpu else "cpu"), preset)
        greedy = GenerationConfig(do_sample=False, eos_token_id=loaded.generation_config.eos_token_id)
        self.manager = batching.init_continuous_batching(greedy)
        self.manager.start()

    def __del__(self) -> None:
        self.manager.stop()

    @api.post("/generate")
    async def generate(self, request: Request) -> StreamingResponse:
        """Stream the answer as text."""
        return StreamingResponse(self.pieces(request), media_type="text/plain")

    async def pieces(self, request: Request) -> AsyncIterator[str]:
        """Stream the new tokens of each step."""
        name, results, sent = uuid4().hex, asyncio.Queue(), 0
        self.manager.register_result_handler(name, results.put_nowait)
        tokens = self.tokenizer(request.prompt).input_ids
        self.manager.add_request(tokens, name, max_new_tokens=request.new_tokens, streaming=True)
        try:
            while True:
                result = await results.get()
                if result.error:
                    raise RuntimeError(result.error)
                text = self.tokenizer.decode(result.generated_tokens, skip_special_tokens=True)
                # The last tokens may be a part of a character.
                if result.is_finished() or not text.endswith("\ufffd"):
                    yield text[sent:]
                    sent = len(text)
                if result.is_finished():
                    return
        finally:
            self.manager.cancel_request(name)


def application(arguments: dict[str, str]) -> serve.Application:
    """Build the application of `serve run`, with the arguments `model`, `preset` and `replicas`."""
    model = arguments.get("model", str(Path(__file__).resolve().parent / "needle"))
    resources = {"num_gpus": 1} if torch.cuda.is_available() else {"num_cpus": 1}
    replicas = Replica.options(num_replicas=int(arguments.get("replicas", 1)), ray_actor_options=resources)
    return replicas.bind(model, arguments.get("preset", "4bit_nc"))
