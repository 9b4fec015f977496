"""`tq-hf serve` samples by request: each has its own temperature, top_p, seed and stop strings."""

# ruff: noqa: F811 - fixtures of another file

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from test_serve import client, events_of, folder, managers, served  # noqa: F401 - fixtures
from transformers.cli.serving.utils import ReasoningText, ToolCall, get_response_template

from tq_hf.batching import TurboQuantBatchingManager
from tq_hf.batching.options import RequestOptions
from tq_hf.batching.processors import GREEDY, SAMPLED, gumbel_noise, key_of
from tq_hf.tools import answers, serve
from tq_hf.tools.fields import BODIES, read_body


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


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {}),
        ({"temperature": 0}, {"do_sample": False, "temperature": 1.0}),
        ({"temperature": 0.7}, {"do_sample": True, "temperature": 0.7}),
        ({"top_p": 0.5}, {"do_sample": True, "top_p": 0.5}),
        ({"seed": 0}, {"do_sample": True, "seed": 0}),
        ({"seed": 5, "temperature": 0.0}, {"do_sample": False, "temperature": 1.0, "seed": 5}),
        ({"presence_penalty": 1, "frequency_penalty": None}, {"presence_penalty": 1.0}),
        ({"logit_bias": {"5": -100}}, {"logit_bias": {"5": -100}}),
        ({"logprobs": True}, {"top_logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"top_logprobs": 3}),
        ({"logprobs": False}, {}),
        ({"stop": "a"}, {"stop_strings": "a"}),
        ({"n": 2, "max_tokens": 5, "max_completion_tokens": 6}, {"num_return_sequences": 2, "max_new_tokens": 6}),
        (
            {"generation_config": '{"top_k": 5, "seed": 4, "use_cache": true}', "seed": 6},
            {"do_sample": True, "top_k": 5, "seed": 6},
        ),
    ],
    ids=str,
)
def test_the_options_of_a_request(body: dict[str, Any], expected: dict[str, Any]) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}]} | body
    assert read_body(BODIES["chat/completions"], json.dumps(asked).encode()).options() == expected


@pytest.mark.parametrize(
    ("stops", "parts", "text", "stopped"),
    [
        (["###"], ["a#", "b##", "#c"], "a#b", True),
        (["xyz", "b"], ["xy", "xb", "z"], "xyx", True),
        (["ab", "aab"], ["a", "a", "b"], "", True),
        (["###"], ["a##"], "a##", False),
        (["end"], ["the en", "d"], "the ", True),
        ([], ["a", "b"], "ab", False),
    ],
    ids=str,
)
def test_text_ends_before_a_stop_string(stops: list[str], parts: list[str], text: str, stopped: bool) -> None:
    search = answers.Stops(tuple(stops))
    assert "".join(search.feed(part, i == len(parts) - 1) for i, part in enumerate(parts)) == text
    assert search.found == stopped


def test_only_text_that_may_begin_a_stop_string_waits() -> None:
    search = answers.Stops(("###",))
    assert [search.feed("abc", False), search.feed("d#", False), search.held] == ["abc", "d", "#"]
    for _ in range(1000):
        search.feed("#a", False)
    assert len(search.held) < 3, "the cost of a part is not that of the text"


def of_bytes(ids: list[int], **options: Any) -> str:
    return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("text", ["plain", "Ä🙂 ß🙂🙂" * 30, "🙂"], ids=["ascii", "wide", "one"])
@pytest.mark.parametrize("cut", [0, 1])
def test_characters_wait_for_their_last_token(text: str, cut: int) -> None:
    """An answer may end within a character, of which the text tells."""
    ids = list(text.encode())
    ids = ids[: len(ids) - cut]
    whole = of_bytes(ids)
    for size in (1, 3, len(ids)):
        decoder, widest = answers.Detokenized(of_bytes), 0
        found = []
        for start in range(0, len(ids), size):
            found.append(decoder.feed(ids[start : start + size], start + size >= len(ids)))
            widest = max(widest, len(decoder.window))
        assert "".join(found) == whole
        assert widest <= max(4 * answers.WINDOW + size, size)


def test_bytes_of_no_character_are_decoded_in_parts() -> None:
    decoder = answers.Detokenized(of_bytes)
    found = "".join(decoder.feed([0x80], False) for _ in range(1000))
    assert len(found) > 900 and len(decoder.window) <= 4 * answers.WINDOW


def read_as(text: str, size: int, **options: Any) -> tuple[list[Any], str]:
    """What a server of Qwen3 reads in a text of tokens of one letter each, in parts, and why the answer ends."""
    model = SimpleNamespace(config=SimpleNamespace(model_type="qwen3"))
    engine: Any = SimpleNamespace(
        template=get_response_template(SimpleNamespace(), model), special=(), decode=of_bytes,
        tokenizer=SimpleNamespace(decode=lambda ids: "<|im_start|>assistant\n"),
    )  # fmt: skip
    engine.parser = lambda *given: answers.Engine.parser(engine, *given)
    body = read_body(BODIES["responses"], json.dumps({"input": "x"} | options).encode())
    answer = answers.Choice(engine, 0, answers.PromptTokens([5], RequestOptions()), body)
    items, ids = [], list(text.encode())
    for end in range(size, len(ids) + size, size):
        output = SimpleNamespace(
            generated_tokens=ids[:end], top_logprobs=None, cached_tokens=0, is_finished=lambda e=end: e >= len(ids)
        )
        items += answer.read(output).items
    return items, answer.finish


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 4}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_reasoning_and_tool_calls_are_parts_of_an_answer(size: int) -> None:
    items, finish = read_as(f"<think>Hm.</think>Well.{CALL}{CALL}<|im_end|>", size)
    assert "".join(item for item in items if isinstance(item, ReasoningText)) == "Hm."
    assert "".join(item for item in items if type(item) is str) == "Well."
    assert [item for item in items if isinstance(item, ToolCall)] == [ToolCall("f", '{"x": 4}')] * 2
    assert finish == "tool_calls"
    items, _ = read_as(CALL * 2, size, parallel_tool_calls=False)
    assert len([item for item in items if isinstance(item, ToolCall)]) == 1


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    "text", ["<tool_call>{5</tool_call>", '<tool_call>{"x": 4}</tool_call>', "<tool_call>[]</tool_call> a"]
)
def test_a_call_that_is_no_call_stays_text(text: str, size: int) -> None:
    items, finish = read_as(text, size)
    assert {type(item) for item in items} == {str} and finish == "stop"
    assert "".join(items) == text


def test_a_forced_call_of_thousands_of_levels_stays_text() -> None:
    text = '{"name": "f", "arguments": {"x": ' + "[" * 2000 + "]" * 2000 + "}}"
    tools = [{"type": "function", "name": "f"}]
    assert read_as(text, 5000, tools=tools, tool_choice="required") == ([text], "stop")


PARTS = [["One ", ReasoningText("Hm"), ReasoningText(".")], ["two"], [ToolCall("f", '{"x": 4}'), ToolCall("g", "{}")]]


def form_of(endpoint: str, **options: Any) -> Any:
    """The form of an answer of several parts."""

    async def parts() -> Any:
        for items in PARTS:
            answer.finish = "tool_calls" if items is PARTS[-1] else ""
            yield answer, answers.Part(items, {"content": [{"token": "x"}], "refusal": None})

    asked = {"input": "x"} if endpoint == "responses" else {"messages": [{"role": "user", "content": "x"}]}
    answer = SimpleNamespace(index=0, finish="", sent_calls=0)
    exchange: Any = SimpleNamespace(
        body=read_body(BODIES[endpoint], json.dumps(asked | options).encode()), engine=SimpleNamespace(name="m"),
        answers=[answer], parts=parts, usage=lambda: (3, 5, 0),
    )  # fmt: skip
    return (serve.ResponseForm if endpoint == "responses" else serve.CompletionForm)(exchange)


def test_a_whole_chat_is_its_parts_joined() -> None:
    (choice,) = asyncio.run(form_of("chat/completions").whole())["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("One two", "Hm.")
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f", "g"]
    assert len(choice["logprobs"]["content"]) == len(PARTS) and choice["finish_reason"] == "tool_calls"


def test_events_of_a_response_are_openais_and_its_items_complete() -> None:
    """Reasoning and text have the same events."""
    openai = pytest.importorskip("openai.types.responses")
    pydantic = pytest.importorskip("pydantic")
    form = form_of("responses")

    async def read() -> list[dict[str, Any]]:
        return [json.loads(json.dumps(event)) async for event in form.steps()]

    steps = asyncio.run(read())
    for step in steps:
        pydantic.TypeAdapter(openai.ResponseStreamEvent).validate_python(step)
    kinds = [step["type"].removeprefix("response.").replace("reasoning", "output") for step in steps]
    text = "output_item.added content_part.added output_text.delta output_text.done content_part.done output_item.done"
    call = "output_item.added function_call_arguments.done output_item.done".split()
    assert kinds[2:8] == kinds[15:21] == text.split() and kinds[21:] == [*call, *call, "completed"]
    response = steps[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["message", "reasoning", "message", *["function_call"] * 2]
    assert {item["status"] for item in response["output"]} == {"completed"} and response["usage"]["total_tokens"] == 8


def body(text: str = "A text to go on with. " * 4, **options: Any) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": 12} | options


def text_of(client: Any, **options: Any) -> str:
    answer = client.post("/v1/completions", json=body(**options))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_requests_at_once_have_their_own_sampling(client: Any) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "free": {"temperature": 1.5},  # the first one's would once have been everybody's
        "greedy": {"temperature": 0.0},
        "seeded": {"temperature": 1.5, "seed": 11},
        "other seed": {"temperature": 1.5, "seed": 12},
        "near greedy": {"temperature": 1e-4, "seed": 3},
        "nucleus": {"temperature": 1.5, "top_p": 1e-6},
    }
    with ThreadPoolExecutor(len(kinds)) as pool:
        together = dict(zip(kinds, pool.map(lambda kind: text_of(client, **kind), kinds.values()), strict=True))
    alone = {name: text_of(client, **kind) for name, kind in kinds.items()}
    assert {name: text for name, text in together.items() if text != alone[name]}.keys() <= {"free"}
    assert alone["greedy"] == alone["near greedy"] == alone["nucleus"]
    assert len({alone["greedy"], alone["seeded"], alone["other seed"]}) == 3
    answer = client.post("/v1/completions", json=body(seed="x"))
    assert answer.status_code == 400 and "`seed` is 'x'" in answer.json()["error"]["message"]


def test_options_of_a_request_reach_its_answer(client: Any, folder: Path) -> None:
    """The small model's tokens are letters, so a bias of the right size shows."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

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


def test_several_answers_and_log_probabilities_are_streamed(client: Any, managers: list[Any]) -> None:
    """Joined, the parts are the answers that are not streamed. JSON has no NaN."""
    message = {"role": "user", "content": "What does it hold?"}
    for path, asked in {
        "chat/completions": {"messages": [message], "logprobs": True, "top_logprobs": 2},
        "completions": {"prompt": "A text to go on with. " * 4, "logprobs": 2},
    }.items():
        asked |= {"max_tokens": 12, "temperature": 1.5, "seed": 4, "n": 3}
        whole = client.post(f"/v1/{path}", json=asked).json()
        counted = {"stream": True, "stream_options": {"include_usage": True}}
        *events, last = events_of(client.post(f"/v1/{path}", json=asked | counted).text)
        assert len({event["id"] for event in [*events, last]}) == 1
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
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
    managers[0].model.get_output_embeddings().weight.data[50:] = torch.nan
    answer = client.post("/v1/completions", json=body(temperature=0.0, logprobs=3, max_tokens=2))
    assert "NaN" not in answer.text and answer.json()["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0] * 2


def test_an_answer_that_has_ended_is_not_counted_twice(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on with an answer whose stop string it has not found, while a thread reads the answer."""

    def read(self: Any, output: Any) -> Any:
        time.sleep(0.05)
        return real(self, output)

    real, options = answers.Choice.read, {"temperature": 0.0, "max_tokens": 30}
    whole, other = (text_of(client, prompt=prompt, **options) for prompt in "AB")
    stop = next(letter for letter in other if letter not in whole)
    monkeypatch.setattr(answers.Choice, "read", read)
    monkeypatch.setattr(answers, "INLINE", 0)
    monkeypatch.setattr("tq_hf.batching.requests.Detokenizer.completes", lambda *given: False)
    asked = {"prompt": ["B", "A"], "stream": True, "stop": stop} | options
    events = [event["choices"][0] for event in events_of(client.post("/v1/completions", json=asked).text)]
    assert "".join(event["text"] for event in events if event["index"] == 1) == whole
    assert [event["finish_reason"] for event in events if event["finish_reason"]] == ["stop", "length"]


def test_an_answer_ends_before_its_stop_string(client: Any, managers: list[TurboQuantBatchingManager]) -> None:
    whole = text_of(client, temperature=0.0, max_tokens=40)
    stop = whole[6:9]
    expected = whole[: whole.index(stop)]
    answer = client.post("/v1/completions", json=body(temperature=0.0, max_tokens=40, stop=[stop, "~~~~"])).json()
    assert answer["choices"][0]["text"] == expected and answer["choices"][0]["finish_reason"] == "stop"
    assert len(expected) <= answer["usage"]["completion_tokens"] < 40
    streamed = client.post("/v1/completions", json=body(temperature=0.0, max_tokens=40, stop=stop, stream=True)).text
    choices = [event["choices"][0] for event in events_of(streamed)]
    assert "".join(choice["text"] for choice in choices) == expected
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


@pytest.mark.parametrize("options", [{}, {"stop": "~~~~"}, {"stream": True, "n": 2, "logprobs": 1}], ids=str)
def test_a_client_that_goes_away_gives_its_pages_back(
    options: dict[str, Any], client: Any, managers: list[TurboQuantBatchingManager]
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

        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
            "headers": headers, "client": ("test", 1), "server": ("test", 80), "root_path": "",
        }  # fmt: skip
        await app(scope, receive, send)
        return sent

    text_of(client)  # the engine starts
    sent = asyncio.run(call(client.app))
    assert sent == [] or "stream" in options, "there is no client to send to"
    scheduler = managers[0].batch_processor.scheduler
    deadline = time.monotonic() + 60
    while scheduler.active_requests and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not scheduler.active_requests
    assert text_of(client), "and the others are answered"
