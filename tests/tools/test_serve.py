"""`tq-hf serve`: OpenAI's API on packed pages, asked as a client asks it."""

from __future__ import annotations

import http.client
import json
import random
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import transformers
from packaging.version import Version
from test_cli import fails, run, saved_model

from tests.support.tiny_models import build

if Version(transformers.__version__) < Version("5.19"):
    pytest.skip("continuous batching is of another design", allow_module_level=True)

serve: Any = pytest.importorskip("tq_hf.tools.serve", reason="the server's parts are an extra")

from starlette.testclient import TestClient  # noqa: E402

from tests.support.batching_cases import Oracle  # noqa: E402
from tq_hf import Balance, TurboQuantConfig  # noqa: E402
from tq_hf.batching import TurboQuantBatchingManager  # noqa: E402
from tq_hf.tools import answers, fields  # noqa: E402

SPECIAL = "?\0"
"""Tokens that are left out of an answer's text."""
PROMPT = "The cache of a model holds what it read. " * 8


def text(tokens: list[int]) -> str:
    return "".join(chr(token) for token in tokens if chr(token) not in SPECIAL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("llama", tmp_path_factory.mktemp("served"))


def test_what_is_not_installed_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tq_hf.tools.serve")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert 'pip install "tq-hf[serving]"' in fails("serve", folder)


def test_a_port_in_use_is_said_before_anything_is_loaded(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"Cannot listen at 127.0.0.1:{port}" in fails("serve", "nowhere", "--host", "127.0.0.1", "--port", port)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--memory-share", 0), "`--memory-share` is 0"),
        (("--cache-tokens", 10**11), "`--cache-tokens`"),
        (("--cache-tokens", 100), "`--cache-tokens`"),
        (("--api-key", " "), "`--api-key` is empty"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_answered_in_the_names_of_flags(
    served: Callable[..., str], folder: Path, options: tuple[Any, ...], words: str
) -> None:
    output = served(lambda client: None, folder, *options, status=1)
    assert words in output and "num_blocks" not in output and "Traceback" not in output


@pytest.mark.parametrize("host, key, warned", [("0.0.0.0", None, True), ("0.0.0.0", "k", False), ("::1", None, False)])
def test_a_server_that_others_reach_without_a_key_is_warned_about(host: str, key: str | None, warned: bool) -> None:
    sockets, warning = serve.check_access(host, 0, key)
    for each in sockets:
        each.close()
    assert (warning is not None and "Set `--api-key`" in warning) == warned


def test_processes_of_torchrun_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them would listen at one port, each with the whole model."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun started 2 processes" in fails("serve", folder)


def test_a_preset_that_does_not_exist_is_said_before_anything_is_loaded(folder: Path) -> None:
    assert "Unknown preset 'x'" in fails("serve", folder, "--preset", "x")
    assert "Unknown preset 'auto'. Valid presets: k8v4, " in fails("serve", folder, "--preset", "auto")
    assert "`--dtype` is 'int4'" in fails("serve", folder, "--dtype", "int4")


def test_what_stays_dense_can_be_chosen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[TurboQuantConfig] = []
    monkeypatch.setattr(serve, "check_access", lambda *given: ([], None))
    monkeypatch.setattr(serve, "serve", lambda name, model, tokenizer, config, *more, **options: chosen.append(config))
    run("serve", folder)
    run("serve", folder, "--preset", "k8v4", "--sink-tokens", 0, "--residual-length", 300)
    assert chosen == [
        TurboQuantConfig.from_preset("4bit_nc"),
        TurboQuantConfig.from_preset("k8v4", sink_tokens=0, residual_length=300),
    ]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What `tq-hf serve` prints if, instead of listening at its port, the server does what a function asks of it."""

    def command(ask: Callable[[Any], None], *arguments: object, status: int = 0) -> str:
        def ask_instead(server: Any, **options: Any) -> None:
            with TestClient(server.config.app, raise_server_exceptions=False) as connected:
                ask(connected)

        monkeypatch.setattr("uvicorn.Server.run", ask_instead)
        monkeypatch.setattr(serve, "sockets_of", lambda host, port: [])
        given = [] if "--cache-tokens" in arguments else ["--cache-tokens", 8192]
        return run("serve", *arguments, "--device", "cpu", *given, status=status)

    return command


@pytest.fixture
def managers(monkeypatch: pytest.MonkeyPatch) -> list[TurboQuantBatchingManager]:
    """The managers that start."""
    found: list[TurboQuantBatchingManager] = []
    start = TurboQuantBatchingManager.start
    monkeypatch.setattr(TurboQuantBatchingManager, "start", lambda own: (found.append(own), start(own))[1])
    return found


def events_of(text: str) -> list[dict[str, Any]]:
    """Contents of the events of a stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_chats_are_answered_from_packed_pages(
    served: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch, managers: list[TurboQuantBatchingManager]
) -> None:
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
    assert "Room for requests at once, each with its answer: " in output and "of 1,024 tokens or" in output

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
    deltas = [event["choices"][0]["delta"].get("content") or "" for event in events_of(found["streamed"])]
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


class Running:
    """A server that listens, in a thread, with its address."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
        self.servers: list[Any] = []
        begin = serve.HttpServer.run
        monkeypatch.setattr(
            serve.HttpServer, "run", lambda own, **options: (self.servers.append(own), begin(own, **options))
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        given = ("--host", "127.0.0.1", "--port", self.port, "--cache-tokens", 8192, "--device", "cpu")
        self.pool = ThreadPoolExecutor()
        self.output = self.pool.submit(run, "serve", folder, *given, *arguments)
        while not (self.servers and self.servers[0].started):
            assert not self.output.done(), self.output.result()
            time.sleep(0.01)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """Status and text of an answer."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("POST", f"/v1/{path}", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def stop(self) -> str:
        self.servers[0].should_exit = True
        return self.output.result(60)


def test_a_server_that_is_told_to_stop_answers_what_is_open_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, managers: list[TurboQuantBatchingManager]
) -> None:
    server = Running(folder, monkeypatch)
    body = {"prompt": "x", "max_tokens": 2000, "temperature": 0.0}
    waiting = [server.pool.submit(server.post, "completions", body | {"stream": stream}) for stream in (False, True)]
    while len(managers[0].batch_processor.scheduler.active_requests) < 2:  # type: ignore[union-attr]
        time.sleep(0.01)
    server.stop()
    (status, whole), (_, streamed) = (each.result(60) for each in waiting)
    error = json.loads(whole)
    assert status == 503 and error["error"]["type"] == "server_error"
    assert "The server is stopping" in error["error"]["message"]
    assert events_of(streamed)[-1] == error and streamed.endswith("data: [DONE]\n\n")
    assert not managers[0].is_running()


def test_an_engine_that_has_ended_says_so(
    served: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch, managers: list[TurboQuantBatchingManager]
) -> None:
    """An exception that is no `Exception` ends the thread."""

    def ends(*given: Any, **options: Any) -> Any:
        raise SystemExit("gone")

    def ask(client: Any) -> None:
        monkeypatch.setattr("tq_hf.batching.cache.paged_step", ends)
        failed, refused = (client.post("/v1/chat/completions", json=chat()) for _ in range(2))
        assert failed.status_code in (500, 503) and "gone" in failed.json()["error"]["message"]
        assert refused.status_code == 503 and "engine has stopped" in refused.json()["error"]["message"]
        health = client.get("/health")
        assert health.status_code == 503 and "Restart the server" in health.json()["detail"]

    served(ask, folder)


def test_the_key_is_asked_for(served: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_HF_API_KEY", "secret")

    def ask(client: Any) -> None:
        for headers in ({}, {"authorization": "Bearer secre"}, {"authorization": "Basic secret"}):
            answer = client.get("/v1/models", headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        assert client.get("/health").status_code == client.head("/health").status_code == 200

    served(ask, folder)


def test_web_pages_of_other_origins_send_no_credentials(served: Callable[..., str], folder: Path) -> None:
    def ask(client: Any) -> None:
        headers = {"origin": "http://x", "access-control-request-method": "POST"}
        answer = client.options("/v1/completions", headers=headers)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers

    served(ask, folder, "--cors", "--api-key", "secret")


USER = {"role": "user", "content": "What?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DEEP = "[" * 100_000


def raw(text: str) -> bytes:
    return ('{"messages": [{"role": "user", "content": "What?"}], ' + text + "}").encode()


MISTAKES: dict[str, tuple[str, Any, str]] = {
    "model": ("chat/completions", chat(model="another"), "another"),
    "no messages": ("chat/completions", {"max_tokens": 4}, "no `messages`"),
    "no message": ("chat/completions", chat(messages=[]), "at least 1 item"),
    "text": ("chat/completions", chat(messages="What?"), "`messages` is 'What?'"),
    "role": ("chat/completions", chat(messages=[{"content": "What?"}]), "no `messages.0.role`"),
    "null role": ("chat/completions", chat(messages=[{"role": None, "content": "x"}]), "`messages.0.role` is None"),
    "number role": ("chat/completions", chat(messages=[{"role": 5, "content": "x"}]), "`messages.0.role` is 5"),
    "number": ("chat/completions", chat(messages=[{"role": "user", "content": 5}]), "content` is 5"),
    "image": ("chat/completions", chat(messages=[{"role": "user", "content": [IMAGE]}]), "image_url"),
    "no tokens": ("chat/completions", chat(max_tokens=0), "`max_tokens` is 0"),
    "negative": ("chat/completions", chat(max_completion_tokens=-3), "`max_completion_tokens` is -3"),
    "tokens": ("chat/completions", chat(max_tokens="x"), "`max_tokens` is 'x'"),
    "no answers": ("chat/completions", chat(n=0), "`n` is 0"),
    "penalty": ("chat/completions", chat(frequency_penalty=2.5), "`frequency_penalty` is 2.5"),
    "bias": ("chat/completions", chat(logit_bias={"x": 1}), "`logit_bias` has 'x'"),
    "long bias": ("chat/completions", chat(logit_bias={"9" * 5000: 1}), "its names must be token ids"),
    "biases": ("chat/completions", chat(logit_bias={str(i): 1 for i in range(5000)}), "5,000 tokens; at most 1,024"),
    "large bias": ("chat/completions", chat(logit_bias={"1": 1e9}), "`logit_bias` is 1000000000.0"),
    "beams": ("chat/completions", chat(generation_config='{"num_beams": 4}'), "`num_beams` is 4"),
    "deep": ("chat/completions", chat(generation_config=DEEP), "must be an object in JSON"),
    "deep body": ("chat/completions", raw(f'"generation_config": {DEEP}'), "recursion limit"),
    "deep call": ("chat/completions", chat(messages=[USER | {"tool_calls": [{"arguments": DEEP}]}]), "object in JSON"),
    "best": ("completions", {"prompt": "What?", "best_of": 2}, "`best_of` is 2"),
    "suffix": ("completions", {"prompt": "What?", "suffix": 5}, "`suffix` is 5"),
    "effort": ("chat/completions", chat(reasoning_effort="low"), "`reasoning_effort` is 'low'"),
    "tools": ("chat/completions", chat(tools=[{"type": "function"}]), "chat template of this model has no place"),
    "form": ("chat/completions", chat(response_format={"type": "json_object"}), "`response_format` is"),
    "tool": ("chat/completions", chat(tools=[{"type": "function"}], tool_choice="required"), "`tool_choice`"),
    "no prompt": ("completions", {"max_tokens": 4}, "no `prompt`"),
    "null prompt": ("completions", {"prompt": None}, "`prompt` has None"),
    "mixed prompt": ("completions", {"prompt": ["a", 5]}, "`prompt` has 5"),
    "no ids": ("completions", {"prompt": []}, "no tokens"),
    "ids": ("completions", {"prompt": [5, 10**6]}, "token 1000000"),
    "prompts": ("completions", {"prompt": ["x"] * 129}, "129 prompts"),
    "answers": ("completions", {"prompt": ["x"] * 100, "n": 2}, "200 answers"),
    "logprobs": ("completions", {"prompt": "What?", "logprobs": 50}, "`logprobs` is 50"),
    "top": ("chat/completions", chat(top_logprobs=2), "without `logprobs`"),
    "no input": ("responses", {"stream": False}, "no `input`"),
    "picture": ("responses", {"input": [{"type": "input_image", "image_url": "x"}]}, "input_image"),
    "instructions": ("responses", {"input": "x", "instructions": 5}, "`instructions` is 5"),
    "format": ("responses", {"input": "What?", "text": {"format": {"type": "json_object"}}}, "`text` is"),
    "samples": ("completions", {"prompt": "x", "generation_config": '{"do_sample": "no"}'}, "`do_sample` is 'no'"),
    "none": ("completions", {"prompt": "x", "generation_config": '{"num_return_sequences": 0}'}, "sequences` is 0"),
    "bias list": ("completions", {"prompt": "x", "generation_config": {"logit_bias": [5]}}, "`logit_bias` is [5]"),
    "stream": ("completions", {"prompt": "x", "stream": "false"}, "`stream` is 'false'"),
    "warm": ("chat/completions", chat(temperature=True), "`temperature` is True"),
    "hot": ("chat/completions", raw(f'"temperature": 1{"0" * 400}'), "finite number"),
    "nan": ("chat/completions", raw('"temperature": NaN'), "finite number"),
    "top_p": ("responses", {"input": "x", "top_p": True}, "`top_p` is True"),
    "stops": ("chat/completions", chat(stop={"a": 1}), "`stop` is {'a': 1}"),
    "stop": ("completions", {"prompt": "x", "stop": 5}, "`stop` is 5"),
    "many stops": ("completions", {"prompt": "x", "stop": ["a"] * 5}, "at most 4 items"),
    "long stop": ("completions", {"prompt": "x", "stop": "x" * 1000}, "at most 256 characters"),
    "config stop": ("completions", {"prompt": "x", "generation_config": {"stop_strings": ["x" * 999]}}, "256 char"),
    "surrogate": ("completions", b'{"prompt": "\\ud800"}', "object in JSON"),
    "template": ("chat/completions", chat(chat_template_kwargs={"chat_template": FOREVER}), "no variable"),
    "padding": ("chat/completions", chat(chat_template_kwargs={"padding": "max_length"}), "has padding, which is no"),
    "variables": ("chat/completions", chat(chat_template_kwargs=[5]), "`chat_template_kwargs` is [5]"),
    "raises": (
        "chat/completions",
        chat(messages=[{"role": "raises", "content": "x"}]),
        "refuses the messages: no such",
    ),
    "endless": ("chat/completions", chat(messages=[{"role": "endless", "content": "x"}]), "does not end within"),
    "continues": ("chat/completions", chat(continue_final_message=True), "`add_generation_prompt` to false"),
    "reference": ("responses", {"input": [{"type": "item_reference", "id": "a"}]}, "type 'item_reference'"),
    "reasoning": ("responses", {"input": [{"type": "reasoning", "content": [{}]}, USER]}, "with a `text` only"),
    "first": ("responses", {"input": [{"type": "zzz"}]}, "type 'zzz'"),
    "second": ("responses", {"input": [USER, {"type": "zzz"}]}, "type 'zzz'; without a `role` it must be"),
    "no name": ("responses", {"input": [USER, {"type": "function_call", "call_id": "1"}]}, "`name` of an item of the"),
    "mixed": ("responses", {"input": [{"type": "input_text", "text": "x"}, USER]}, "type None"),
    "calls": ("chat/completions", chat(messages=[USER | {"tool_calls": [5]}]), "`tool_calls` has 5; it must be a list"),
    "call": ("chat/completions", chat(messages=[USER | {"tool_calls": [{"id": "1"}]}]), "has {'id': '1'};"),
    "field": ("chat/completions", chat(nonsense=1), "nonsense"),
    "marks": ("completions", {"prompt": [1] * 300_000}, "brackets, colons and commas"),
    "path": ("nothing", {}, "Not Found"),
    "reset": ("../reset", {}, "Not Found: POST /reset"),
    "positions": ("completions", {"prompt": "x" * 3000, "max_tokens": 4}, "longer than the 2,048 positions"),
    "streamed": ("completions", {"prompt": "x" * 3000, "max_tokens": 4, "stream": True}, "2,048 positions"),
    "characters": ("completions", {"prompt": "x" * 200_000}, "has more tokens than the cache"),
    "pool": (
        "completions",
        {"prompt": "x", "max_tokens": 10**6, "stream": True},
        "(`--cache-tokens`, `--memory-share`)",
    ),
    "no json": ("completions", b"x", "The body of a request must be an object in JSON"),
    "no object": ("completions", [5], "The body of a request must be an object in JSON"),
}
"""Requests by what is wrong with them: path, body, and words of the answer."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'raises' %}{{ raise_exception('no such role') }}{% endif %}"
    "{% if m.role == 'endless' %}" + FOREVER + "{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.arguments.x }}]{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ greeting }}{% endif %}"
)


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template raises, does not end, and reads a variable and calls of tools."""
    made = saved_model("llama", tmp_path_factory.mktemp("odd"))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.mark.parametrize("endpoint", fields.BODIES)
def test_every_field_of_openais_requests_is_applied_neutral_or_refused(endpoint: str) -> None:
    pytest.importorskip("openai")
    from openai.types import completion_create_params as completion
    from openai.types.chat import completion_create_params as chats
    from openai.types.responses import response_create_params as response

    module: Any = {"chat/completions": chats, "completions": completion, "responses": response}[endpoint]
    names = set(get_type_hints(next(v for k, v in vars(module).items() if k.endswith("ParamsStreaming"))))
    needed = {"chat/completions": {"messages": [USER]}, "completions": {"prompt": "x"}, "responses": {"input": "x"}}
    assert {"temperature", "stream", "stream_options", *needed[endpoint]} <= names
    known = fields.rules()[endpoint]
    for name in names - known.keys():
        body = needed[endpoint] | {name: "another"}
        with pytest.raises(ValueError, match=rf"`{name}` is 'another', and this server does not apply it here"):
            fields.read_body(fields.BODIES[endpoint], json.dumps(body).encode())
        for neutral in (None, *fields.UNCHANGED.get(name, ())):
            fields.read_body(fields.BODIES[endpoint], json.dumps(body | {name: neutral}).encode())


def post(client: Any, path: str, body: Any) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})


def test_mistakes_are_answered_in_the_form_of_openais_errors(
    served: Callable[..., str], odd_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "TEMPLATE_LINES", 10_000)

    def ask(client: Any) -> None:
        for name, (path, body, words) in MISTAKES.items():
            answer = post(client, path, body)
            assert answer.status_code == (404 if "Not Found" in words else 400), (name, answer.text)
            error = answer.json()["error"]
            assert words in error["message"] and error["type"] == "invalid_request_error", (name, error)
            assert len(error["message"]) < 600, name
        assert client.post("/v1/completions", content=b"{}").status_code == 400, "of another content type"
        assert client.get("/v1/models/another").status_code == 404
        assert 'tq_hf_requests_total{status="finished"}' in client.get("/metrics").text
        assert '"status": "ready"' in client.post("/load_model", json={"model": "x"}).text

    served(ask, odd_folder)


def test_what_changes_nothing_is_accepted(served: Callable[..., str], odd_folder: Path) -> None:
    nothing = dict(n=1, frequency_penalty=0, presence_penalty=0.0, logit_bias={}, response_format={"type": "text"})
    nothing |= dict(stop=[], tool_choice="none", parallel_tool_calls=False, user="x", seed=None, function_call=None)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 4}'}}
    said = {"role": "assistant", "content": "Well.", "tool_calls": [call], "refusal": None, "audio": None}
    items = [USER, {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]
    items += [{"type": "reasoning", "summary": []}, {"type": "function_call_output", "call_id": "1", "output": "4"}]
    bodies = {
        "neutral": ("chat/completions", chat(**nothing)),
        "parts": ("chat/completions", chat(messages=[USER | {"content": [{"type": "text", "text": "What?"}] * 2}])),
        "calls": ("chat/completions", chat(messages=[USER, said, {"role": "tool", "content": "4"}])),
        "variable": ("chat/completions", chat(chat_template_kwargs={"greeting": "Hi"})),
        "continued": (
            "chat/completions",
            chat(
                messages=[USER, {"role": "assistant", "content": "It is"}],
                add_generation_prompt=False,
                continue_final_message=True,
            ),
        ),
        "one": ("completions", {"prompt": ["one"], "max_tokens": 4}),
        "ids": ("completions", {"prompt": [[5, 6], [7]], "max_tokens": 4}),
        "input": ("responses", {"input": "What?", "max_output_tokens": 4}),
        "items": ("responses", {"input": items, "max_output_tokens": 4}),
        "flat": ("responses", {"input": [{"type": "input_text", "text": "x"}], "max_output_tokens": 4}),
        "both": (
            "responses",
            {"input": [{"role": "system", "content": "S"}, USER], "instructions": "I", "max_output_tokens": 4},
        ),
    }
    prompts: dict[str, str] = {}

    def ask(client: Any) -> None:
        for name, (path, body) in bodies.items():
            answer = post(client, path, body)
            assert answer.status_code == 200, answer.text
            prompts[name] = "".join(map(chr, read[-1]))

    read: list[list[int]] = []
    add = TurboQuantBatchingManager.add_request

    def noted(own: Any, ids: list[int], *more: Any, **options: Any) -> Any:
        read.append(ids)
        return add(own, ids, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TurboQuantBatchingManager, "add_request", noted)
        served(ask, odd_folder)
    assert prompts["parts"] == "<user>What?What?<assistant>"
    assert prompts["calls"] == "<user>What?<assistant>Well.[4]<tool>4<assistant>"
    assert prompts["variable"].endswith("<assistant>Hi")
    assert prompts["continued"] == "<user>What?<assistant>It is"
    assert prompts["both"] == "<system>I\n\nS<user>What?<assistant>"


def test_bodies_are_read_up_to_a_size(served: Callable[..., str], folder: Path) -> None:
    def ask(client: Any) -> None:
        for size, status in ((900, 200), (1100, 413)):
            answer = client.post("/v1/completions", json={"prompt": "x" * size, "max_tokens": 1})
            assert answer.status_code == status
        assert "the server reads up to 1,000" in answer.json()["error"]["message"]

    served(ask, folder, "--max-body-size", 1000)


def test_openais_client_needs_nothing_else(served: Callable[..., str], folder: Path) -> None:
    openai = pytest.importorskip("openai")

    def ask(client: Any) -> None:
        user = openai.OpenAI(api_key="x", base_url="http://testserver/v1", http_client=client, max_retries=0)
        (listed,) = user.models.list()
        assert user.models.retrieve(listed.id).id == listed.id == str(folder)
        for model, options in (("another", {}), (listed.id, {"max_tokens": 0})):
            with pytest.raises(openai.BadRequestError) as raised:
                user.completions.create(model=model, prompt="What?", **options)
        assert "`max_tokens` is 0" in raised.value.body["message"]
        asked = dict(model=listed.id, messages=[USER], max_tokens=6, temperature=0.0)
        whole = user.chat.completions.create(**asked)
        chunks = list(user.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        said = [chunk.choices[0] for chunk in chunks[:-1]]
        assert "".join(choice.delta.content or "" for choice in said) == whole.choices[0].message.content
        assert [choice.finish_reason for choice in said] == [None] * (len(said) - 1) + ["length"]
        assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage) and said[0].delta.role == "assistant"
        assert len({(chunk.id, chunk.created, chunk.object) for chunk in chunks}) == 1
        assert all(chunk.usage is None for chunk in chunks[:-1])
        several = user.completions.create(model=listed.id, prompt=["One.", "Two."], n=2, max_tokens=3, temperature=0)
        texts = [choice.text for choice in several.choices]
        assert texts[0] == texts[1] and texts[2] == texts[3] and several.usage.prompt_tokens == 8
        response = user.responses.create(model=listed.id, input="What?", max_output_tokens=6, temperature=0)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output_text == whole.choices[0].message.content
        with user.responses.stream(model=listed.id, input="What?", max_output_tokens=6, temperature=0) as events:
            steps = list(events)
        kinds = [event.type.removeprefix("response.") for event in steps]
        assert steps[-1].response.output_text == response.output_text
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert set(kinds[4:-4]) == {"output_text.delta"}
        assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]

    served(ask, folder)


def test_an_error_in_a_stream_has_openais_form(
    served: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_with_quotes(*given: Any, **options: Any) -> Any:
        raise RuntimeError('a "bit"\nfell over')

    def ask(client: Any) -> None:
        monkeypatch.setattr("tq_hf.batching.cache.paged_step", fails_with_quotes)
        whole = client.post("/v1/chat/completions", json=chat())
        assert whole.status_code == 500 and whole.json()["error"]["type"] == "server_error"
        streamed = client.post("/v1/chat/completions", json=chat(stream=True)).text
        assert events_of(streamed)[-1] == whole.json() and streamed.endswith("data: [DONE]\n\n")
        assert 'a "bit"' in whole.json()["error"]["message"]
        failed = events_of(client.post("/v1/responses", json={"input": "x", "stream": True}).text)[-1]
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")

    served(ask, folder)


@pytest.mark.parametrize("asked", [{"max_tokens": 4}, {"max_tokens": 100, "logprobs": 2}], ids=str)
def test_no_request_is_read_or_written_on_the_event_loop(
    served: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    """Templates, tokenizers, long answers and their JSON may take seconds. Health is asked within each of them."""

    def within(place: Any, name: str) -> None:
        call = getattr(place, name)

        def asks_first(*given: Any) -> Any:
            health.append(client_.get("/health").status_code)
            return call(*given)

        monkeypatch.setattr(place, name, asks_first)

    def ask(client: Any) -> None:
        nonlocal client_
        client_ = client
        within(answers.Engine, "read")
        within(serve, "_encoded")
        if "logprobs" in asked:
            within(answers.Answer, "read")
        answer = client.post("/v1/completions", json={"prompt": "x", "temperature": 0.0} | asked)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == asked["max_tokens"]

    client_: Any = None
    health: list[int] = []
    served(ask, folder)
    assert health == [200] * (2 + ("logprobs" in asked))


def test_an_answer_ends_with_the_models_positions_and_says_so(served: Callable[..., str], folder: Path) -> None:
    found: list[Any] = []

    def ask(client: Any) -> None:
        for body in ({"max_tokens": 100}, {}):  # by default as many as there is room for
            body |= {"prompt": "x" * 2040, "temperature": 0.0}
            found.append(client.post("/v1/completions", json=body).json())

    served(ask, folder)
    for answer in found:
        assert answer["usage"] == {"prompt_tokens": 2040, "completion_tokens": 9, "total_tokens": 2049}
        assert answer["choices"][0]["finish_reason"] == "length"


def hostile(draw: random.Random, deep: int = 0) -> Any:
    """A value that no client means."""
    numbers = [0, -1, 1, 2**31, 2**63, 10**30, 0.5, -1.5, 1e308, True, False, None]
    texts = ["", "x", "\0", "\ud800", "🙂" * 9, "{{ 1 / 0 }}", "x" * 5000, "[" * 500, "user", "auto", "text"]
    kind = draw.randrange(6 if deep < 4 else 3)
    if kind < 3:
        return draw.choice(numbers if kind < 2 else texts)
    if kind == 3:
        return [hostile(draw, deep + 1) for _ in range(draw.randrange(4))]
    names = ["role", "content", "type", "text", "5", "include_usage", "function", "arguments", "x", ""]
    return {draw.choice(names): hostile(draw, deep + 1) for _ in range(draw.randrange(4))}


def test_no_body_makes_an_error_of_the_server(served: Callable[..., str], folder: Path) -> None:
    """Bodies of wrong types, sizes and nesting. A good request is answered as before after each hundred."""
    draw = random.Random(0)
    counts: dict[int, int] = {}

    def ask(client: Any) -> None:
        good = client.post("/v1/chat/completions", json=chat()).json()["choices"]
        for i in range(400):
            path = draw.choice(list(fields.BODIES))
            needed = {"chat/completions": {"messages": [USER]}, "completions": {"prompt": "x"}}
            body = {"max_tokens": 1} | needed.get(path, {"input": "x"}) if path != "responses" else {"input": "x"}
            if path == "responses":
                body["max_output_tokens"] = 1
            for name in draw.sample(list(fields.rules()[path]), draw.randrange(1, 4)):
                body[name] = hostile(draw)
            if draw.random() < 0.1:
                body[draw.choice(["", "x", "documents"])] = hostile(draw)
            content = json.dumps(body).encode()
            content = content[: draw.randrange(len(content))] if draw.random() < 0.1 else content
            answer = post(client, path, content)
            assert answer.status_code in (200, 400), (body, answer.text)
            counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
            if i % 100 == 99:
                assert client.post("/v1/chat/completions", json=chat()).json()["choices"] == good

    served(ask, folder)
    assert min(counts.values()) > 20
