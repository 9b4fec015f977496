"""`tq-hf serve` samples by request: each has its own temperature, top_p, seed and stop strings."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

if Version(transformers.__version__) < Version("5.19"):
    pytest.skip("continuous batching is of another design", allow_module_level=True)

from test_serve import folder, served  # noqa: F401 - fixtures

from tq_hf.batching import TurboQuantBatchingManager
from tq_hf.batching.processors import GREEDY, SAMPLED, gumbel_noise, key_of
from tq_hf.batching.requests import ShortSteps
from tq_hf.tools import sampling, serve
from tq_hf.tools.fields import options_of_body


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_only_seeded_requests_have_noise() -> None:
    noise = gumbel_noise(numbers(SAMPLED, GREEDY, key_of(7, 3)), 100)
    assert not noise[:2].any() and noise[2].isfinite().all() and len(noise[2].unique()) == 100


def test_tokens_of_seeds_are_a_sample_of_the_softmax() -> None:
    probabilities, draws = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]), 20_000
    keys = numbers(*[key_of(seed, seed // 7) for seed in range(draws)])
    tokens = (probabilities.log() + gumbel_noise(keys, 5)).argmax(-1)
    counts = torch.bincount(tokens, minlength=5)
    expected = probabilities[:4] * draws
    assert counts[4] == 0
    assert ((counts[:4] - expected).square() / expected).sum() < 16.3  # chi squared, 3 degrees of freedom, p = 0.001


def test_a_seeded_token_depends_on_nothing_else_in_the_batch() -> None:
    keys = [key_of(5, position) for position in range(6)]
    assert len(set(keys)) == 6 and 0 < min(keys) and max(keys) < 2**31
    whole = gumbel_noise(numbers(*keys), 1000)
    for i, key in enumerate(keys):
        assert torch.equal(gumbel_noise(numbers(key), 1000), whole[i : i + 1])


GREEDILY, SAMPLES = dict(do_sample=False), dict(do_sample=True, temperature=0.6, top_p=0.9)


@pytest.mark.parametrize(
    ("body", "config", "expected"),
    [
        ({}, GREEDILY, (False, None, {})),
        ({}, SAMPLES, (True, 0.6, {})),
        ({"temperature": 0}, SAMPLES, (False, 1.0, {})),
        ({"temperature": 0.7}, GREEDILY, (True, None, {})),  # transformers puts it into the config
        ({"top_p": 0.5}, GREEDILY, (True, None, {})),
        ({"seed": 5}, SAMPLES, (True, 0.6, {"seed": 5})),
        ({"seed": 5, "temperature": 0.0}, SAMPLES, (False, 1.0, {"seed": 5})),
        ({"presence_penalty": 1, "frequency_penalty": None}, GREEDILY, (False, None, {"presence_penalty": 1.0})),
        ({"logit_bias": {"5": -100}}, GREEDILY, (False, None, {"logit_bias": {"5": -100}})),
        ({"logprobs": True}, GREEDILY, (False, None, {"top_logprobs": 0})),
        ({"logprobs": True, "top_logprobs": 3}, GREEDILY, (False, None, {"top_logprobs": 3})),
        ({"logprobs": 2}, GREEDILY, (False, None, {"top_logprobs": 2})),
        ({"logprobs": False}, GREEDILY, (False, None, {})),
    ],
    ids=str,
)
def test_the_options_of_a_request(body: dict[str, Any], config: dict[str, Any], expected: tuple[Any, ...]) -> None:
    given = SimpleNamespace(**(dict(temperature=None, top_p=None) | config))
    options = options_of_body(body, given)
    assert (given.do_sample, given.temperature, options) == expected


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"temperature": -1}, "`temperature` is -1; it must be between 0 and 100"),
        ({"top_p": 0}, "`top_p` is 0; it must be above 0 and at most 1"),
        ({"seed": 1.5}, "`seed` is 1.5; it must be a whole number"),
        ({"seed": True}, "`seed` is True; it must be a whole number"),
        ({"presence_penalty": 3}, "`presence_penalty` is 3; it must be between -2 and 2"),
    ],
    ids=str,
)
def test_sampling_out_of_range_is_refused(body: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("`", ".")):
        options_of_body(body, SimpleNamespace(**GREEDILY))


def read_until(stops: list[str], items: list[Any]) -> tuple[list[Any], bool]:
    """What comes out of a queue of these items, and whether the request was cancelled."""
    cancelled: list[bool] = []

    async def run() -> list[Any]:
        queue: asyncio.Queue = asyncio.Queue()
        config = SimpleNamespace(stop_strings=stops)
        out = sampling._until(queue, config, SimpleNamespace(cancel=lambda: cancelled.append(True)))
        for item in [*items, None]:
            queue.put_nowait(item)
        found = []
        while (item := await out.get()) is not None:
            found.append(item)
            if isinstance(item, sampling._StreamError):
                break
        return found

    return asyncio.run(run()), bool(cancelled)


@pytest.mark.parametrize(
    ("stops", "parts", "text", "stopped"),
    [
        (["###"], ["a#", "b##", "#c"], "a#b", True),
        (["xyz", "b"], ["xy", "xb", "z"], "xyx", True),
        (["ab", "aab"], ["a", "a", "b"], "", True),
        (["###"], ["a##"], "a##", False),
        (["end"], ["the en", "d"], "the ", True),
    ],
    ids=str,
)
def test_text_ends_before_a_stop_string(stops: list[str], parts: list[str], text: str, stopped: bool) -> None:
    found, cancelled = read_until(stops, parts)
    assert ("".join(found), cancelled) == (text, stopped)


def test_text_that_cannot_begin_a_stop_string_does_not_wait() -> None:
    found, _ = read_until(["###"], ["abc", "d#"])
    assert found[0] == "abc" and "".join(found) == "abcd#"


def test_an_error_ends_what_is_read() -> None:
    error = sampling._StreamError("no")
    found, cancelled = read_until(["###"], ["ab#", error])
    assert found == ["ab", "#", error] and not cancelled


def body(text: str = "A text to go on with. " * 4, **options: Any) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": 12} | options


def text_of(client: Any, **options: Any) -> str:
    answer = client.post("/v1/completions", json=body(**options))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.fixture
def managers(monkeypatch: pytest.MonkeyPatch) -> list[TurboQuantBatchingManager]:
    """The managers that start."""
    found: list[TurboQuantBatchingManager] = []
    start = TurboQuantBatchingManager.start
    monkeypatch.setattr(TurboQuantBatchingManager, "start", lambda own: (found.append(own), start(own))[1])
    return found


def test_requests_at_once_have_their_own_sampling(
    served: Callable[..., str],  # noqa: F811
    folder: Path,  # noqa: F811
) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "free": {"temperature": 1.5},  # the first one's would once have been everybody's
        "greedy": {"temperature": 0.0},
        "seeded": {"temperature": 1.5, "seed": 11},
        "other seed": {"temperature": 1.5, "seed": 12},
        "near greedy": {"temperature": 1e-4, "seed": 3},
        "nucleus": {"temperature": 1.5, "top_p": 1e-6},
    }

    def ask(client: Any) -> None:
        with ThreadPoolExecutor(len(kinds)) as pool:
            together = dict(zip(kinds, pool.map(lambda kind: text_of(client, **kind), kinds.values()), strict=True))
        alone = {name: text_of(client, **kind) for name, kind in kinds.items()}
        assert {name: text for name, text in together.items() if text != alone[name]}.keys() <= {"free"}
        assert alone["greedy"] == alone["near greedy"] == alone["nucleus"]
        assert len({alone["greedy"], alone["seeded"], alone["other seed"]}) == 3
        answer = client.post("/v1/completions", json=body(seed="x"))
        assert answer.status_code == 400 and "`seed` is 'x'" in answer.json()["error"]["message"]

    served(ask, folder)


def test_options_of_a_request_reach_its_answer(served: Callable[..., str], folder: Path) -> None:  # noqa: F811
    """The small model's tokens are letters, so a bias of the right size shows."""

    def ask(client: Any) -> None:
        def chat(**options: Any) -> dict[str, Any]:
            message = {"role": "user", "content": "What does it hold?"}
            asked = {"messages": [message], "max_tokens": 12, "temperature": 0.0} | options
            answer = client.post("/v1/chat/completions", json=asked)
            assert answer.status_code == 200, answer.text
            return answer.json()

        def content(**options: Any) -> str:
            return chat(**options)["choices"][0]["message"]["content"]

        plain = content()
        for options in (
            {"frequency_penalty": 2.0},
            {"presence_penalty": 2.0},
            {"generation_config": json.dumps({"repetition_penalty": 3.0, "max_new_tokens": 12})},
        ):
            assert content(**options) != plain, options
        answer = chat(logprobs=True, top_logprobs=2)
        assert answer["choices"][0]["message"]["content"] == plain
        rows = answer["choices"][0]["logprobs"]["content"]
        assert "".join(row["token"] for row in rows) == plain
        assert all(row["top_logprobs"][0]["logprob"] == row["logprob"] <= 0 for row in rows), "greedy"
        for field, value in {"presence_penalty": 2.0, "frequency_penalty": 2.0, "logit_bias": {"70": 100}}.items():
            config = {"max_new_tokens": 12, field: value}
            assert content(generation_config=json.dumps(config)) == content(**{field: value}) != plain
        config = {"max_new_tokens": 12, "do_sample": True, "seed": 4, "num_return_sequences": 2, "temperature": 1.5}
        choices = chat(generation_config=json.dumps(config), temperature=None)["choices"]
        alone = [content(seed=seed, temperature=1.5) for seed in (4, 5)]
        assert [choice["message"]["content"] for choice in choices] == alone
        for config, words in (({"temprature": 1}, "temprature"), ([1], "an object in JSON")):
            asked = body(generation_config=json.dumps(config))
            assert words in client.post("/v1/completions", json=asked).json()["error"]["message"]
        asked = {"input": "A text", "generation_config": json.dumps({"num_return_sequences": 2, "do_sample": True})}
        assert "one answer" in client.post("/v1/responses", json=asked).json()["error"]["message"]
        answer = chat(n=3, seed=4, temperature=1.5)
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2] and len(set(texts)) == 3
        assert texts[1] == content(seed=5, temperature=1.5), "the seed of each answer is the next"
        usage = answer["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        answer = client.post("/v1/completions", json=body(temperature=0.0, logprobs=3)).json()["choices"][0]
        assert "".join(answer["logprobs"]["tokens"]) == answer["text"] == text_of(client, temperature=0.0)
        assert {len(each) for each in answer["logprobs"]["top_logprobs"]} == {3}
        first = answer["logprobs"]["tokens"][0]
        (token,) = tokenizer.encode(first, add_special_tokens=False)
        assert not text_of(client, temperature=0.0, logit_bias={str(token): -100}).startswith(first)

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    served(ask, folder)


def close(values: Any, expected: Any) -> None:
    """Compare nested lists and dictionaries: numbers by tolerance (steps of another batch round differently)."""
    if isinstance(expected, dict):
        assert list(values) == list(expected)
    if isinstance(expected, dict | list):
        assert len(values) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            close(values[key], expected[key])
    else:
        assert values == (pytest.approx(expected, abs=1e-4) if isinstance(expected, float) else expected)


def test_several_answers_and_log_probabilities_are_streamed(served: Callable[..., str], folder: Path) -> None:  # noqa: F811
    """Joined, the parts are the answers that are not streamed."""

    def ask(client: Any) -> None:
        message = {"role": "user", "content": "What does it hold?"}
        for path, asked in {
            "chat/completions": {"messages": [message], "logprobs": True, "top_logprobs": 2},
            "completions": {"prompt": "A text to go on with. " * 4, "logprobs": 2},
        }.items():
            asked |= {"max_tokens": 12, "temperature": 1.5, "seed": 4, "n": 3}
            whole = client.post(f"/v1/{path}", json=asked).json()
            lines = client.post(f"/v1/{path}", json=asked | {"stream": True}).text.split("\n\n")
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
            assert len({event["id"] for event in events}) == 1
            assert [event["usage"] for event in events if "usage" in event] == [whole["usage"]]
            assert "usage" in events[-1]
            for i, choice in enumerate(whole["choices"]):
                parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == i]
                texts = [part.get("text") or part.get("delta", {}).get("content") or "" for part in parts]
                assert "".join(texts) == (choice.get("text") or choice["message"]["content"])
                assert sum(map(bool, texts)) > 3
                assert parts[-1]["finish_reason"] == choice["finish_reason"]
                logprobs = [part["logprobs"] for part in parts if part.get("logprobs")]
                for name, values in choice["logprobs"].items():
                    if name != "refusal":
                        close([each for part in logprobs for each in part[name]], values)

    served(ask, folder)


def test_an_answer_ends_before_its_stop_string(
    served: Callable[..., str],  # noqa: F811
    folder: Path,  # noqa: F811
    managers: list[TurboQuantBatchingManager],
) -> None:
    def ask(client: Any) -> None:
        whole = text_of(client, temperature=0.0, max_tokens=40)
        stop = whole[6:9]
        expected = whole[: whole.index(stop)]
        answer = client.post("/v1/completions", json=body(temperature=0.0, max_tokens=40, stop=[stop, "~~~~"])).json()
        assert answer["choices"][0]["text"] == expected and answer["choices"][0]["finish_reason"] == "stop"
        assert len(expected) <= answer["usage"]["completion_tokens"] < 40
        streamed = client.post(
            "/v1/completions", json=body(temperature=0.0, max_tokens=40, stop=stop, stream=True)
        ).text
        lines = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")]
        assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == expected
        assert json.loads(lines[-1])["usage"]["completion_tokens"] < 40
        used = answer["usage"]["completion_tokens"]
        for stream in (False, True):
            asked = body(temperature=0.0, max_tokens=used, stop=stop, stream=stream)
            answered = client.post("/v1/completions", json=asked).text
            assert '"finish_reason":"stop"' in answered.replace(" ", ""), "also with the last token"
            end = {"generation_config": json.dumps({"eos_token_id": ord(whole[5])})}
            at = whole.index(whole[5])
            for most, reason in ((at + 1, "stop"), (at, "length")):
                asked = body(temperature=0.0, max_tokens=most, stream=stream, **end)
                answered = client.post("/v1/completions", json=asked).text
                assert f'"finish_reason":"{reason}"' in answered.replace(" ", ""), "an end of sequence likewise"

    served(ask, folder)


def test_requests_of_one_id_are_answered_each(served: Callable[..., str], folder: Path) -> None:  # noqa: F811
    """At once, one after the other, and beside the further answers of another request."""

    def ask(client: Any) -> None:
        def texts(name: str, **options: Any) -> list[str]:
            answer = client.post(
                "/v1/completions", json=body(temperature=0.0, **options), headers={"x-request-id": name}
            )
            return [choice["text"] for choice in answer.json()["choices"]]

        (expected,), (short,) = texts("a"), texts("a", max_tokens=5)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: texts("a"), range(8)))
            both = [pool.submit(texts, "b", n=2), pool.submit(texts, "b-1", max_tokens=5)]
        assert found == [[expected]] * 8
        assert [each.result() for each in both] == [[expected] * 2, [short]]

    served(ask, folder)


@pytest.mark.parametrize("options", [{}, {"stop": "~~~~"}, {"stream": True, "n": 2, "logprobs": 1}], ids=str)
def test_a_client_that_goes_away_gives_its_pages_back(
    options: dict[str, Any],
    served: Callable[..., str],  # noqa: F811
    folder: Path,  # noqa: F811
    managers: list[TurboQuantBatchingManager],
) -> None:
    async def call(app: Any) -> list[Any]:
        sent, messages = [], [{"type": "http.request", "body": json.dumps(body(max_tokens=5000, **options)).encode()}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            while not (
                managers and managers[0].batch_processor and managers[0].batch_processor.scheduler.active_requests
            ):
                await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"gone")]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "headers": headers,
            "client": ("test", 1), "server": ("test", 80), "root_path": "",
        }  # fmt: skip
        await app(scope, receive, send)
        return sent

    def ask(client: Any) -> None:
        text_of(client)  # the engine starts
        sent = asyncio.run(call(client.app))
        assert sent == [] or "stream" in options, "nobody to send to"
        scheduler = managers[0].batch_processor.scheduler
        assert isinstance(scheduler, ShortSteps)
        deadline = time.monotonic() + 60
        while scheduler.active_requests and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not scheduler.active_requests
        assert text_of(client), "and the others are answered"

    served(ask, folder)


def test_what_the_client_waits_for_is_not_cancelled() -> None:
    """Servers say "disconnect" once an answer is sent, too."""
    done: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})
        await asyncio.sleep(0)
        done.append("done")

    async def run() -> None:
        answered = asyncio.Event()
        messages = [{"type": "http.request", "body": b""}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await answered.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                answered.set()

        await serve.CancelOnDisconnect(app)({"type": "http"}, receive, send)

    asyncio.run(run())
    assert done == ["done"]
