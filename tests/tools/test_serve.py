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
from tq_hf import Balance, TurboQuantConfig
from tq_hf.batching import TurboQuantBatchingManager
from tq_hf.tools import serve
from tq_hf.tools.fields import ENDPOINTS

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


def test_processes_of_torchrun_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them would listen at one port, each with the whole model."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun started 2 processes" in fails("serve", folder)


def test_a_preset_that_does_not_exist_is_said_before_anything_is_loaded(folder: Path) -> None:
    assert "Unknown preset 'x'" in fails("serve", folder, "--preset", "x")
    assert "Unknown preset 'auto'. Valid presets: k8v4, " in fails("serve", folder, "--preset", "auto")
    assert "int4" in run("serve", folder, "--dtype", "int4", status=2)


def test_what_stays_dense_can_be_chosen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[TurboQuantConfig] = []
    monkeypatch.setattr(serve, "TurboQuantServer", lambda model, config, *args, **options: chosen.append(config))
    run("serve", folder)
    run("serve", folder, "--preset", "k8v4", "--sink-tokens", 0, "--residual-length", 300)
    assert chosen == [
        TurboQuantConfig.from_preset("4bit_nc"),
        TurboQuantConfig.from_preset("k8v4", sink_tokens=0, residual_length=300),
    ]


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
        found["health"] = client.get("/health")
        with monkeypatch.context() as patch:
            patch.setattr(TurboQuantBatchingManager, "to_be_done", "Steps are not compiled yet.")
            found["warming"] = client.get("/health")
        (manager,) = managers
        found["pages"] = len(manager.batch_processor.cache.allocator.ledger.hash_to_block)
        found["tokens"] = manager.batch_processor.cache.num_blocks * 128

    output = served(ask, folder)
    assert f"{folder} on 4bit_nc pages: http://localhost:8000/v1" in output and "template" not in output

    model = build("llama")
    oracle = Oracle(model, balance=Balance.of(model))
    tokens = [ord(letter) for letter in f"<user>{PROMPT}<assistant>"]
    complete = (len(tokens) - 4) // 128
    expected = text(oracle.generate(tokens, 24))
    # What begins as an earlier request did reads those blocks packed.
    shared = text(oracle.after_prefix(tokens, 24, 4 + 128 * complete))
    assert expected != shared
    usage = found["plain"]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(tokens), 24)
    assert found["plain"]["choices"][0]["message"]["content"] == expected
    assert found["completed"]["choices"][0]["text"] == shared
    lines = [line.removeprefix("data: ") for line in found["streamed"].splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
    assert "".join(deltas) == shared and sum(map(bool, deltas)) > 3
    assert (found["health"].status_code, found["health"].json()) == (200, {"status": "ok"})
    detail = "Requests are answered. Steps are not compiled yet."
    assert (found["warming"].status_code, found["warming"].json()) == (200, {"status": "warming", "detail": detail})
    assert found["pages"] == complete + 1  # of three requests with one prompt; and that of the sinks
    assert found["tokens"] == 8192


def test_a_model_without_a_template_says_what_to_ask(served: Callable[..., str]) -> None:
    assert "ask /v1/completions" in served(lambda client: None)


def test_a_model_that_pages_cannot_hold_is_refused_before_the_server_starts(
    served: Callable[..., str], tmp_path: Path
) -> None:
    def ask(client: Any) -> None:
        raise AssertionError("the server was started")

    output = served(ask, saved_model("mistral", tmp_path, sliding_window=64), status=1)
    assert "Error: " in output and "sliding windows only" in output and "Traceback" not in output


def chat(**options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "What?"}], "max_tokens": 4, "temperature": 0.0} | options


def test_what_cannot_be_answered_is_refused_in_a_sentence(served: Callable[..., str], folder: Path) -> None:
    found: dict[str, Any] = {}

    def ask(client: Any) -> None:
        for name, body in {
            "pool": chat(max_tokens=10**6),
            "prompt": chat(messages=[{"role": "user", "content": "x" * 9000}]),
            "number": chat(max_tokens="x"),
        }.items():
            found[name] = client.post("/v1/chat/completions", json=body)
        found["after"] = client.post("/v1/chat/completions", json=chat())

    served(ask, folder)
    assert [found[name].status_code for name in ("pool", "prompt", "number", "after")] == [400, 400, 400, 200]
    for name in ("pool", "prompt"):
        assert "8,192" in found[name].json()["error"]["message"] or "tokens" in found[name].json()["error"]["message"]
    assert found["number"].json()["error"]["message"]


def test_a_server_that_is_told_to_stop_does_not_wait_for_answers(
    served: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[bool] = []
    stop = TurboQuantBatchingManager.stop

    def noted(manager: TurboQuantBatchingManager, *args: Any, **options: Any) -> None:
        stopped.append(options.get("hard_stop", False))
        stop(manager, *args, **options)

    monkeypatch.setattr(TurboQuantBatchingManager, "stop", noted)

    def ask(client: Any) -> None:
        assert client.post("/v1/chat/completions", json=chat()).status_code == 200
        (answering,) = managers
        answering.add_request([5] * 20, "endless", max_new_tokens=8000)

    managers: list[TurboQuantBatchingManager] = []
    start = TurboQuantBatchingManager.start
    monkeypatch.setattr(
        TurboQuantBatchingManager, "start", lambda manager: (managers.append(manager), start(manager))[1]
    )
    served(ask, folder)
    assert stopped[0] and not managers[0].is_running()


def test_the_served_model_is_listed_without_a_folder_of_the_hub(
    served: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    found: list[Any] = []
    served(lambda client: found.append(client.get("/v1/models")), folder)
    assert found[0].status_code == 200
    assert [(model["id"], model["object"]) for model in found[0].json()["data"]] == [(str(folder), "model")]


USER = {"role": "user", "content": "What?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
MISTAKES: dict[str, tuple[str, dict[str, Any], str]] = {
    "model": ("chat/completions", chat(model="another"), "another"),
    "no messages": ("chat/completions", {"max_tokens": 4}, "no `messages`"),
    "no message": ("chat/completions", chat(messages=[]), "list of messages"),
    "text": ("chat/completions", chat(messages="What?"), "list of messages"),
    "role": ("chat/completions", chat(messages=[{"content": "What?"}]), "no `role`"),
    "number": ("chat/completions", chat(messages=[{"role": "user", "content": 5}]), "type int"),
    "image": ("chat/completions", chat(messages=[{"role": "user", "content": [IMAGE]}]), "image_url"),
    "no tokens": ("chat/completions", chat(max_tokens=0), "`max_tokens` is 0"),
    "negative": ("chat/completions", chat(max_completion_tokens=-3), "`max_completion_tokens` is -3"),
    "no answers": ("chat/completions", chat(n=0), "`n` is 0; it must be a whole number, 1 to 128"),
    "penalty": ("chat/completions", chat(frequency_penalty=2.5), "`frequency_penalty` is 2.5"),
    "bias": ("chat/completions", chat(logit_bias={"x": 1}), "`logit_bias` has 'x'"),
    "large bias": ("chat/completions", chat(logit_bias={"1": 1e9}), "`logit_bias` is 1000000000.0"),
    "beams": ("chat/completions", chat(generation_config='{"num_beams": 4}'), "`num_beams` is 4"),
    "best": ("completions", {"prompt": "What?", "best_of": 2}, "`best_of` is 2"),
    "effort": ("chat/completions", chat(reasoning_effort="low"), "`reasoning_effort` is 'low'"),
    "tools": ("chat/completions", chat(tools=[{"type": "function"}]), "chat template of this model has no place"),
    "form": ("chat/completions", chat(response_format={"type": "json_object"}), "`response_format` asks for"),
    "tool": ("chat/completions", chat(tools=[{"type": "function"}], tool_choice="required"), "`tool_choice`"),
    "list": ("completions", {"prompt": ["What?"]}, "prompt must be a string"),
    "no prompt": ("completions", {"max_tokens": 4}, "no `prompt`"),
    "empty": ("completions", {"prompt": "", "max_tokens": 0}, "`max_tokens` is 0"),
    "logprobs": ("completions", {"prompt": "What?", "logprobs": 50}, "`top_logprobs` is 50"),
    "no input": ("responses", {"stream": False}, "no `input`"),
    "picture": ("responses", {"input": [{"type": "input_image", "image_url": "x"}], "stream": False}, "input_image"),
    "format": ("responses", {"input": "What?", "text": {"format": {"type": "json_object"}}}, "`text` asks for"),
    "samples": ("completions", {"prompt": "x", "generation_config": '{"do_sample": "no"}'}, "`do_sample` is 'no'"),
    "none": ("completions", {"prompt": "x", "generation_config": '{"num_return_sequences": 0}'}, "sequences` is 0"),
    "biases": ("completions", {"prompt": "x", "generation_config": '{"logit_bias": [5]}'}, "`logit_bias` is [5]"),
    "stream": ("completions", {"prompt": "x", "stream": "false"}, "`stream` is 'false'; it must be true or false"),
    "warm": ("chat/completions", chat(temperature=True), "`temperature` is True; it must be a number"),
    "top": ("responses", {"input": "x", "top_p": True}, "`top_p` is True; it must be a number"),
    "stops": ("chat/completions", chat(stop={"a": 1}), "`stop` is {'a': 1}; it must be a text or a list of texts"),
    "stop": ("completions", {"prompt": "x", "stop": 5}, "`stop` is 5; it must be a text or a list of texts"),
    "output": ("responses", {"input": [{"type": "function_call_output", "call_id": "1", "output": "4"}]}, "_output"),
    "reference": ("responses", {"input": [{"type": "item_reference", "id": "a"}]}, "type 'item_reference'"),
    "reasoning": ("responses", {"input": [{"type": "reasoning", "summary": []}, USER]}, "type 'reasoning'"),
    "first": ("responses", {"input": [{"type": "zzz"}]}, "type 'zzz'"),
    "second": ("responses", {"input": [USER, {"type": "zzz"}]}, "type 'zzz'; without a `role` it must be"),
    "no name": ("responses", {"input": [USER, {"type": "function_call", "call_id": "1"}]}, "`name` of an item of the"),
    "mixed": ("responses", {"input": [{"type": "input_text", "text": "x"}, USER]}, "type None"),
    "calls": ("chat/completions", chat(messages=[USER | {"tool_calls": [5]}]), "`tool_calls` has 5; it must be a list"),
    "call": ("chat/completions", chat(messages=[USER | {"tool_calls": [{"id": "1"}]}]), "has {'id': '1'};"),
    "field": ("chat/completions", chat(nonsense=1), "nonsense"),
    "path": ("nothing", {}, "Not Found"),
    "reset": ("../reset", {}, "keeps its model until it is stopped"),
    "load": ("../load_model", {"model": "another"}, "`model` is 'another'; this server serves"),
    "decision": ("systemone", {"state": "x", "questions": {}}, "no typed decisions"),
    "speech": ("audio/transcriptions", {}, "reads text only"),
    "positions": ("completions", {"prompt": "x" * 3000, "max_tokens": 4}, "longer than the 2,048 positions"),
    "streamed": ("completions", {"prompt": "x" * 3000, "max_tokens": 4, "stream": True}, "2,048 positions"),
    "pool": ("completions", {"prompt": "x", "max_tokens": 10**6, "stream": True}, "longer than the cache"),
}
"""Requests by what is wrong with them: path, body, and words of the answer."""


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_field_of_openais_requests_is_applied_neutral_or_refused(endpoint: str) -> None:
    pytest.importorskip("openai")
    from transformers.cli.serving import chat_completion, completion, response

    schema: Any = {
        "chat/completions": chat_completion.TransformersCompletionCreateParamsStreaming,
        "completions": completion.TransformersTextCompletionCreateParams,
        "responses": response.TransformersResponseCreateParamsStreaming,
    }[endpoint]
    fields = ENDPOINTS[endpoint]
    assert schema.__required_keys__ | schema.__optional_keys__ <= fields.keys()
    needed = {serve.NEEDED[endpoint]: "x" if endpoint == "completions" else [{"role": "user", "content": "x"}]}
    for name, rule in fields.items():
        if rule.kind == "refused":
            with pytest.raises(ValueError, match=rf"`{name}` (is|asks for) .*Leave it out"):
                serve.check_body(needed | {name: "another"}, endpoint)
            for neutral in (None, *rule.neutral):
                serve.check_body(needed | {name: neutral}, endpoint)


def test_mistakes_are_answered_in_the_form_of_openais_errors(served: Callable[..., str], folder: Path) -> None:
    found: dict[str, Any] = {}
    neutral = dict(n=1, frequency_penalty=0, presence_penalty=0.0, logit_bias={}, response_format={"type": "text"})

    def ask(client: Any) -> None:
        for name, (path, body, _) in MISTAKES.items():
            found[name] = client.post(f"/v1/{path}", json=body)
        found["no json"] = client.post("/v1/completions", content="x")
        found["no object"] = client.post("/v1/completions", json=[5])
        found["metrics"] = client.get("/metrics")
        found["load served"] = client.post("/load_model", json={"model": str(folder)})
        found["after"] = client.post("/v1/chat/completions", json=chat(**neutral))
        text = [{"role": "user", "content": [{"type": "text", "text": "What?"}]}]
        found["parts"] = client.post("/v1/chat/completions", json=chat(messages=text))
        items = [USER, {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]
        items += [{"type": "reasoning", "summary": []}, {"type": "function_call_output", "call_id": "1", "output": "4"}]
        for name, asked in {"input": "What?", "items": items, "flat": [{"type": "input_text", "text": "x"}]}.items():
            given = {"input": asked, "stream": False, "max_output_tokens": 4}
            found[name] = client.post("/v1/responses", json=given)

    served(ask, folder)
    for name, (_, _, words) in MISTAKES.items():
        assert 400 <= found[name].status_code < 500, name
        error = found[name].json()["error"]
        assert words in error["message"] and error["type"] == "invalid_request_error", name
    for name in ("no json", "no object"):
        said = found[name].json()["error"]["message"]
        assert found[name].status_code == 400 and said.startswith("The body of a request must be an object in JSON")
    assert '"status": "ready"' in found["load served"].text
    assert 'tq_hf_requests_total{status="finished"}' in found["metrics"].text
    for name in ("metrics", "after", "parts", "input", "items", "flat"):
        assert found[name].status_code == 200, found[name].text


def test_openais_client_shows_the_sentence(served: Callable[..., str], folder: Path) -> None:
    openai, said = pytest.importorskip("openai"), []

    def ask(client: Any) -> None:
        user = openai.OpenAI(api_key="x", base_url="http://testserver/v1", http_client=client, max_retries=0)
        for model, options in (("another", {}), (str(folder), {"max_tokens": 0})):
            with pytest.raises(openai.BadRequestError) as raised:
                user.completions.create(model=model, prompt="What?", **options)
            said.append(raised.value.body["message"])
        assert [model.id for model in user.models.list()] == [str(folder)]

    served(ask, folder)
    assert "another" in said[0] and "`max_tokens` is 0; it must be a whole number, 1 or more" in said[1]


def test_an_answer_ends_with_the_models_positions_and_says_so(served: Callable[..., str], folder: Path) -> None:
    found: list[Any] = []

    def ask(client: Any) -> None:
        body = {"prompt": "x" * 2040, "max_tokens": 100, "temperature": 0.0}
        found.append(client.post("/v1/completions", json=body).json())

    served(ask, folder)
    assert found[0]["usage"] == {"prompt_tokens": 2040, "completion_tokens": 9, "total_tokens": 2049}
    assert found[0]["choices"][0]["finish_reason"] == "length"


def test_a_step_that_fails_is_an_error_of_the_server(
    served: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_once(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        raise RuntimeError("a bit fell over")

    found: list[Any] = []

    def ask(client: Any) -> None:
        monkeypatch.setattr("tq_hf.batching.cache.paged_step", fails_once)
        with TestClient(client.app, raise_server_exceptions=False) as quiet:
            found.append(quiet.post("/v1/chat/completions", json=chat()))

    from fastapi.testclient import TestClient

    served(ask, folder)
    assert found[0].status_code == 500
    assert "a bit fell over" in found[0].json()["error"]["message"]
    assert found[0].json()["error"]["type"] == "server_error"
