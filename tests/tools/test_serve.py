"""`tq-hf serve`: transformers' server on packed pages, asked as a client asks it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from test_cli import fails, run, saved_model

from tests.support.tiny_models import build

if Version(transformers.__version__) < Version("5.19"):
    pytest.skip("continuous batching is of another design", allow_module_level=True)

from tests.support.batching_cases import Oracle
from tq_hf import Balance
from tq_hf.batching import TurboQuantBatchingManager
from tq_hf.tools import serve

SPECIAL = "?\0"
"""Tokens that are left out of an answer's text."""
PROMPT = "The cache of a model holds what it read. " * 8


def text(tokens: list[int]) -> str:
    return "".join(chr(token) for token in tokens if chr(token) not in SPECIAL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("llama", tmp_path_factory.mktemp("served"))


def test_what_is_not_installed_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "is_serve_available", lambda: False)
    assert 'pip install "tq-hf[serving]"' in fails("serve", folder)


def test_a_preset_that_does_not_exist_is_said_before_anything_is_loaded(folder: Path) -> None:
    assert "Unknown preset 'auto'" in fails("serve", folder, "--preset", "auto")
    assert "`--dtype` is 'int4'" in fails("serve", folder, "--dtype", "int4")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What `tq-hf serve` prints if, instead of listening at its port, the server does what a function asks of it."""
    uvicorn = pytest.importorskip("uvicorn", reason="the server's parts are an extra")
    client = pytest.importorskip("fastapi.testclient", reason="the server's parts are an extra").TestClient
    pytest.importorskip("openai", reason="the server's parts are an extra")

    def command(ask: Callable[[Any], None], *arguments: object, status: int = 0) -> str:
        def ask_instead(server: Any) -> None:
            with client(server.config.app) as connected:
                ask(connected)

        monkeypatch.setattr(uvicorn.Server, "run", ask_instead)
        return run("serve", *arguments, "--device", "cpu", "--cache-tokens", 8192, status=status)

    return command


def test_chats_are_answered_from_packed_pages(
    served: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    managers: list[TurboQuantBatchingManager] = []
    start = TurboQuantBatchingManager.start

    def noted(manager: TurboQuantBatchingManager) -> None:
        managers.append(manager)
        start(manager)

    monkeypatch.setattr(TurboQuantBatchingManager, "start", noted)
    found: dict[str, Any] = {}

    def ask(client: Any) -> None:
        chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "temperature": 0.0}
        found["plain"] = client.post("/v1/chat/completions", json=chat).json()
        found["streamed"] = client.post("/v1/chat/completions", json=chat | {"stream": True}).text
        found["completed"] = client.post(
            "/v1/completions", json={"prompt": f"<user>{PROMPT}<assistant>", "max_tokens": 24, "temperature": 0.0}
        ).json()
        found["health"] = client.get("/health").status_code
        (manager,) = managers
        found["pages"] = len(manager.batch_processor.cache.allocator.ledger.hash_to_block)
        found["tokens"] = manager.batch_processor.cache.num_blocks * 128

    output = served(ask, folder)
    assert f"{folder} on 4bit_nc pages: http://localhost:8000/v1" in output and "template" not in output

    model = build("llama")
    oracle = Oracle(model, balance=Balance.of(model))
    tokens = [ord(letter) for letter in f"<user>{PROMPT}<assistant>"]
    complete = len(tokens) // 128
    expected = text(oracle.generate(tokens, 24))
    # What begins as an earlier request did reads those blocks packed.
    shared = text(oracle.chunked(tokens, 24, [128 * complete]))
    assert expected != shared
    usage = found["plain"]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(tokens), 24)
    assert found["plain"]["choices"][0]["message"]["content"] == expected
    assert found["completed"]["choices"][0]["text"] == shared
    lines = [line.removeprefix("data: ") for line in found["streamed"].splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
    assert "".join(deltas) == shared and sum(map(bool, deltas)) > 3
    assert found["health"] == 200
    assert found["pages"] == complete  # of three requests with one prompt
    assert found["tokens"] == 8192


def test_a_model_without_a_template_says_what_to_ask(served: Callable[..., str]) -> None:
    assert "ask /v1/completions" in served(lambda client: None)


def test_a_model_that_pages_cannot_hold_is_refused_before_the_server_starts(
    served: Callable[..., str], tmp_path: Path
) -> None:
    def ask(client: Any) -> None:
        raise AssertionError("the server was started")

    output = served(ask, saved_model("qwen3_next", tmp_path), status=1)
    assert "Error: " in output and "linear_attention" in output and "Traceback" not in output
