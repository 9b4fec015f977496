"""Every holder of tokens, with every way a prompt comes, under every way to run a step: always the same tokens.

The ids of the tests are the table, `holder-prompt-way`. Tokens are compared with those of plain calls of the model, one
after the other, on a cache that grows; those of pages with a cache of the same recipe. What cannot be has its
sentence in `refused`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.batching_cases import Oracle, Session, greedy
from tests.support.recorded_graph import record_graphs
from tests.support.tiny_models import VOCAB, build
from tq_hf import TurboQuantCache, graph_decoding
from tq_hf.compat import as_input

HOLDERS = ("growing", "preallocated", "pages")
PROMPTS = ("whole", "chunked", "second turn", "empty", "one token")
""""empty" is a call of no tokens before the first and after the last."""
WAYS = ("generate", "graph_decoding", "torch.compile", "autocast", "inference_mode")

NEW, LATER = 6, 2
"""Tokens of an answer, and of what plain `generate()` says after it on the same cache, outside of any context."""
CHUNK, TURN = 64, 37
RESIDUAL = 32
"""So few that blocks are packed."""
BLOCK = 128
TOKENS = {"second turn": 140, "one token": 1}

Say = Callable[[torch.Tensor, int], torch.Tensor]
"""Tokens `[1, T]` with so many more after them."""

Tokens = list[int]


def refused(holder: str, prompt: str, way: str) -> str | None:
    """Why there is no such cell, as the error says."""
    if way == "graph_decoding" and holder == "growing":
        return "`graph_decoding` needs a preallocated cache, but got TurboQuantCache without `max_cache_len`"
    if way == "graph_decoding" and holder == "pages":
        return "`generate_batch` takes no custom_generate"
    if prompt == "empty" and holder == "pages":
        return "A request of no tokens"
    return None


CELLS = list(product(HOLDERS, PROMPTS, WAYS))
LONG = [(holder, prompt, "torch.compile") for holder in ("growing", "preallocated") for prompt in PROMPTS]
LONG += [("pages", *cell) for cell in product(PROMPTS, WAYS) if cell[0] != "second turn" and cell[1] != "generate"]
"""Compile for seconds what `test_compiled.py` compiles, too (a model that its user compiled), or are an engine's whose
caller it does not know: a second turn and `generate` stand for them."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = build("llama", num_hidden_layers=2, attention="turboquant")
    return model


@pytest.fixture(scope="module", autouse=True)
def compiler():
    """All cells share what is compiled, whose guards tell them apart: a cell for itself would compile for ten seconds.
    None falls back to code that is not compiled."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def ids(tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(seed))


def by_calls(forward: Any, cache: TurboQuantCache, chunk: int = 10**6) -> Say:
    """The model itself, whose call of several tokens are `chunk` at most."""

    def say(given: torch.Tensor, new: int) -> torch.Tensor:
        for part in given[:, cache.get_seq_length() :].split(chunk, dim=1):
            logits = forward(part, **as_input(cache)).logits
        for left in reversed(range(new)):
            given = torch.cat([given, logits[:, -1:].argmax(-1)], dim=1)
            if left:
                logits = forward(given[:, -1:], **as_input(cache)).logits
        return given

    return say


def by_generate(model: PreTrainedModel, cache: TurboQuantCache, **options: Any) -> Say:
    def say(given: torch.Tensor, new: int) -> torch.Tensor:
        return model.generate(given, **as_input(cache), max_new_tokens=new, do_sample=False, **options)

    return say


def nothing(cache: TurboQuantCache) -> None:
    """An update of no tokens, as of a model whose call has none. (Llama's own code takes one token at least.)"""
    for layer in range(len(cache.layers)):
        cache.update(torch.zeros(1, 2, 0, 32), torch.zeros(1, 2, 0, 32), layer)


def conversation(prompt: str, say: Say, nothing: Callable[[], Any]) -> torch.Tensor:
    """What is said to prompts of that kind; `nothing` comes before and after it where no tokens come."""
    if prompt == "empty":
        nothing()
    said = say(ids(TOKENS.get(prompt, 180)), NEW)
    if prompt == "second turn":
        said = say(torch.cat([said, ids(TURN, seed=2)], dim=1), NEW)
    if prompt == "empty":
        nothing()
    return said


def context(way: str) -> AbstractContextManager[Any]:
    if way == "autocast":
        return torch.autocast("cpu", dtype=torch.bfloat16)
    return torch.inference_mode() if way == "inference_mode" else nullcontext()


def cache_of(model: PreTrainedModel, room: int | None = None) -> TurboQuantCache:
    return TurboQuantCache(model.config, residual_length=RESIDUAL, max_cache_len=room)


def expected(model: PreTrainedModel, prompt: str, way: str) -> Tokens:
    """By plain calls of the model, all of them in autocast if one is."""
    cache = cache_of(model)
    with context(way) if way == "autocast" else nullcontext():
        say = by_calls(model, cache, CHUNK if prompt == "chunked" else 10**6)
        said = conversation(prompt, say, lambda: None)
    return say(said, LATER)[0].tolist()


def found(model: PreTrainedModel, holder: str, prompt: str, way: str) -> Tokens:
    cache = cache_of(model, room=256 if holder == "preallocated" else None)
    forward = torch.compile(model, backend="eager") if way == "torch.compile" else model
    options: dict[str, Any] = {"custom_generate": graph_decoding} if way == "graph_decoding" else {}
    with context(way):
        if way == "torch.compile":
            say = by_calls(forward, cache, CHUNK if prompt == "chunked" else 10**6)
        else:
            say = by_generate(model, cache, **options, **({"prefill_chunk_size": CHUNK} if prompt == "chunked" else {}))
        said = conversation(prompt, say, lambda: nothing(cache))
    return by_generate(model, cache, **options)(said, LATER)[0].tolist()


def expected_of_pages(model: PreTrainedModel, prompt: str) -> Tokens:
    """A second turn is a request of its own, which finds the whole blocks of the first and reads them packed."""
    oracle = Oracle(model, residual_length=RESIDUAL)
    said = conversation(prompt, by_calls(model, oracle.cache(), CHUNK if prompt == "chunked" else 10**6), lambda: None)
    if prompt == "second turn":
        turn, cache = said[:, :-NEW], oracle.cache(residual_length=0)
        model(turn[:, : oracle.config.sink_tokens + BLOCK], **as_input(cache))
        said = by_calls(model, cache)(turn, NEW)
    return said[0].tolist()


def found_in_pages(model: PreTrainedModel, prompt: str, way: str) -> Tokens:
    """The engine's thread knows nothing of a caller's autocast: it computes as the model is."""
    options = {"custom_generate": graph_decoding} if way == "graph_decoding" else {}
    held = torch.compile(model, backend="eager") if way == "torch.compile" else model
    changes = {"max_batch_tokens": CHUNK} if prompt == "chunked" else {}
    with Session(held, overrides=dict(balance=False, residual_length=RESIDUAL), **changes) as session:

        def say(given: torch.Tensor, new: int) -> torch.Tensor:
            (answer,) = session.run(given.tolist(), greedy(new), **options)
            return torch.cat([given, torch.tensor([answer])], dim=1)

        with context(way):
            return conversation(prompt, say, lambda: say(ids(0), NEW))[0].tolist()


@pytest.mark.parametrize(
    "holder, prompt, way",
    [pytest.param(*cell, id="-".join(cell), marks=[pytest.mark.slow] if cell in LONG else []) for cell in CELLS],
)
def test_tokens_are_those_of_plain_calls(model, monkeypatch, holder, prompt, way) -> None:
    if way == "graph_decoding":
        record_graphs(monkeypatch)
    if (sentence := refused(holder, prompt, way)) is not None:
        with pytest.raises((ValueError, AssertionError), match=sentence):  # `answers` asserts that there is no error
            found_in_pages(model, prompt, way) if holder == "pages" else found(model, holder, prompt, way)
    elif holder == "pages":
        assert found_in_pages(model, prompt, way) == expected_of_pages(model, prompt)
    else:
        assert found(model, holder, prompt, way) == expected(model, prompt, way)
