"""`tq-hf serve`: OpenAI's API on packed pages, asked as a client asks it."""

import http.client
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest
import transformers
from packaging.version import Version
from test_cli import fails, run, saved_model
from transformers import AutoTokenizer

from tests.support.tiny_models import build

if Version(transformers.__version__) < Version("5.19"):
    pytest.skip("continuous batching is of another design", allow_module_level=True)

for part in ("pydantic", "starlette", "uvicorn"):
    pytest.importorskip(part, reason="the server's parts are an extra")

from starlette.testclient import TestClient  # noqa: E402

from tests.support.batching_cases import Oracle  # noqa: E402
from tq_hf import Balance, TurboQuantConfig  # noqa: E402
from tq_hf.batching import TurboQuantBatchingManager  # noqa: E402
from tq_hf.tools import answers, serve  # noqa: E402

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
        *((("--api-key", key), "`--api-key` must be ASCII") for key in ("", "clé", "k ")),
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
    warning = serve.check_access(host, 0, key)
    assert (warning is not None and "Set `--api-key`" in warning) == warned


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
    monkeypatch.setattr(serve, "check_access", lambda *given: None)
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
        listen = socket.create_server
        monkeypatch.setattr(socket, "create_server", lambda place, **more: listen((place[0], 0), **more))
        given = [] if "--cache-tokens" in arguments else ["--cache-tokens", 8192]
        return run("serve", *arguments, "--device", "cpu", *given, status=status)

    return command


@contextmanager
def connected(served: Callable[..., str], *arguments: object) -> Iterator[Any]:
    """A client of `tq-hf serve`, which runs in a thread meanwhile."""
    clients, done = SimpleQueue[Any](), Event()
    with ThreadPoolExecutor() as pool:
        output = pool.submit(served, lambda client: (clients.put(client), done.wait()), *arguments)
        try:
            yield clients.get(timeout=60)
        finally:
            done.set()
        output.result(60)


@pytest.fixture
def client(served: Callable[..., str], folder: Path, managers: list[Any]) -> Iterator[Any]:
    """A client of a server of `folder`."""
    with connected(served, folder) as found:
        yield found


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


THOUGHTS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template that drops what the model has thought in earlier turns."""


def test_a_server_that_starts_again_has_what_was_read_and_answered(
    served: Callable[..., str], folder: Path, tmp_path: Path
) -> None:
    """Turns of an agent: an answer is part of the next prompt, up to a thought that the template drops."""
    found: list[dict[str, Any]] = []
    banned = {str(ord(letter)): -100 for letter in SPECIAL}
    turns: list[dict[str, Any]] = [{"role": "user", "content": "What is held? " * 10}]

    def ask(client: Any) -> None:
        for path, name in (("chat/completions", "messages"), ("responses", "input")):
            asked = {name: turns, "temperature": 0.0, "logit_bias": banned, "max_tokens": 200}
            if name == "input":
                asked = {name: turns, "temperature": 0.0, "max_output_tokens": 4}
            found.append(client.post(f"/v1/{path}", json=asked).json())

    def cached(i: int) -> int:
        usage = found[i]["usage"]
        return usage["prompt_tokens_details" if i % 2 == 0 else "input_tokens_details"]["cached_tokens"]

    given = (folder, "--prefix-cache", tmp_path, "--prefix-cache-size", "1GB")
    assert "up to 0 tokens of this model and preset (0.0 of 1.0 GB)" in served(ask, *given)
    answer = found[0]["choices"][0]["message"]["content"]
    first = len(f"<user>{turns[0]['content']}<assistant>")
    assert len(answer) == 200 and (cached(0), cached(1)) == (0, 4 + 128 * ((first - 1 - 4) // 128))
    turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And?"}]
    assert "tokens of this model and preset (0.0 of 1.0 GB)" in served(ask, *given)
    assert cached(2) == 4 + 128 * ((first + 200 - 1 - 4) // 128) > cached(1)
    turns[1]["content"] = f"A thought.</think>{answer[100:]}"
    thinking = saved_model("llama", tmp_path / "thinking")
    AutoTokenizer.from_pretrained(thinking).save_pretrained(thinking, chat_template=THOUGHTS)
    (thinking / "chat_template.jinja").write_text(THOUGHTS)
    served(ask, thinking, *given[1:])
    assert cached(4) == cached(1), "the prompt, and nothing of an answer without its thought"


def test_a_model_without_a_template_says_what_to_ask(served: Callable[..., str]) -> None:
    assert "ask /v1/completions" in served(lambda client: None)


def test_a_model_that_pages_cannot_hold_is_refused_before_the_server_starts(
    served: Callable[..., str], tmp_path: Path
) -> None:
    def ask(client: Any) -> None:
        raise AssertionError("the server was started")

    output = served(ask, saved_model("mistral", tmp_path, sliding_window=64), status=1)
    assert "Error: " in output and "no full attention" in output and "Traceback" not in output


def chat(**options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "What?"}], "max_tokens": 4, "temperature": 0.0} | options


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
    client: Any, monkeypatch: pytest.MonkeyPatch, managers: list[TurboQuantBatchingManager]
) -> None:
    """An exception that is no `Exception` ends the thread."""

    def ends(*given: Any, **options: Any) -> Any:
        raise SystemExit("gone")

    monkeypatch.setattr("tq_hf.batching.allocators.paged_step", ends)
    failed, refused = (client.post("/v1/chat/completions", json=chat()) for _ in range(2))
    assert failed.status_code in (500, 503) and "gone" in failed.json()["error"]["message"]
    assert refused.status_code == 503 and "engine has stopped" in refused.json()["error"]["message"]
    health = client.get("/health")
    assert health.status_code == 503 and "Restart the server" in health.json()["detail"]


def test_the_key_is_asked_for(served: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_HF_API_KEY", "secret")

    with connected(served, folder) as client:
        for headers in ({}, {"authorization": "Bearer secre"}, {"authorization": "Basic secret"}):
            answer = client.get("/v1/models", headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        assert client.get("/health").status_code == client.head("/health").status_code == 200


def test_web_pages_of_other_origins_send_no_credentials(served: Callable[..., str], folder: Path) -> None:
    with connected(served, folder, "--cors", "--api-key", "secret") as client:
        headers = {"origin": "http://x", "access-control-request-method": "POST"}
        answer = client.options("/v1/completions", headers=headers)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


USER = {"role": "user", "content": "What?"}


def test_openais_client_needs_nothing_else(client: Any, folder: Path) -> None:
    openai = pytest.importorskip("openai")
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


def test_an_error_in_a_stream_has_openais_form(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_with_quotes(*given: Any, **options: Any) -> Any:
        raise RuntimeError('a "bit"\nfell over')

    monkeypatch.setattr("tq_hf.batching.allocators.paged_step", fails_with_quotes)
    whole = client.post("/v1/chat/completions", json=chat())
    assert whole.status_code == 500 and whole.json()["error"]["type"] == "server_error"
    streamed = client.post("/v1/chat/completions", json=chat(stream=True)).text
    assert events_of(streamed)[-1] == whole.json() and streamed.endswith("data: [DONE]\n\n")
    assert 'a "bit"' in whole.json()["error"]["message"]
    failed = events_of(client.post("/v1/responses", json={"input": "x", "stream": True}).text)[-1]
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")


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
            within(answers.Choice, "read")
        answer = client.post("/v1/completions", json={"prompt": "x", "temperature": 0.0} | asked)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == asked["max_tokens"]

    client_: Any = None
    health: list[int] = []
    served(ask, folder)
    assert health == [200] * (2 + ("logprobs" in asked))


def test_an_answer_ends_with_the_models_positions_and_says_so(client: Any) -> None:
    found: list[Any] = []
    for body in ({"max_tokens": 100}, {}):  # by default as many as there is room for
        body |= {"prompt": "x" * 2040, "temperature": 0.0}
        found.append(client.post("/v1/completions", json=body).json())
    for answer in found:
        counts = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        assert counts == {"prompt_tokens": 2040, "completion_tokens": 9, "total_tokens": 2049}
        assert answer["choices"][0]["finish_reason"] == "length"
