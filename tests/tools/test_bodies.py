"""Bodies of requests to `tq-hf serve`: what is read, what changes nothing, and what is refused in a sentence."""

# ruff: noqa: F811 - fixtures of another file

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from test_cli import saved_model
from test_serve import chat, client, connected, folder, managers, served  # noqa: F401 - fixtures

from tq_hf.batching import TurboQuantBatchingManager
from tq_hf.tools import answers, fields

CHAT, TEXT, RESPONSE = fields.BODIES
USER = {"role": "user", "content": "What?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DEEP = "[" * 100_000


def raw(text: str) -> bytes:
    return ('{"messages": [{"role": "user", "content": "What?"}], ' + text + "}").encode()


MISTAKES: dict[str, tuple[str, Any, str]] = {
    "model": (CHAT, chat(model="another"), "another"),
    "no messages": (CHAT, {"max_tokens": 4}, "no `messages`"),
    "no message": (CHAT, chat(messages=[]), "at least 1 item"),
    "text": (CHAT, chat(messages="What?"), "`messages` is 'What?'"),
    "role": (CHAT, chat(messages=[{"content": "What?"}]), "no `messages.0.role`"),
    "null role": (CHAT, chat(messages=[{"role": None, "content": "x"}]), "`messages.0.role` is None"),
    "number role": (CHAT, chat(messages=[{"role": 5, "content": "x"}]), "`messages.0.role` is 5"),
    "number": (CHAT, chat(messages=[{"role": "user", "content": 5}]), "content` is 5"),
    "image": (CHAT, chat(messages=[{"role": "user", "content": [IMAGE]}]), "image_url"),
    "no tokens": (CHAT, chat(max_tokens=0), "`max_tokens` is 0"),
    "negative": (CHAT, chat(max_completion_tokens=-3), "`max_completion_tokens` is -3"),
    "tokens": (CHAT, chat(max_tokens="x"), "`max_tokens` is 'x'"),
    "no answers": (CHAT, chat(n=0), "`n` is 0"),
    "penalty": (CHAT, chat(frequency_penalty=2.5), "`frequency_penalty` is 2.5"),
    "presence": (TEXT, {"prompt": "x", "presence_penalty": 3}, "is 3. Input should be less than or equal to 2"),
    "cold": (TEXT, {"prompt": "x", "temperature": -1}, "is -1. Input should be greater than or equal to 0"),
    "no share": (TEXT, {"prompt": "x", "top_p": 0}, "`top_p` is 0. Input should be greater than 0"),
    "half seed": (TEXT, {"prompt": "x", "seed": 1.5}, "`seed` is 1.5. Input should be a valid integer"),
    "true seed": (TEXT, {"prompt": "x", "seed": True}, "`seed` is True. Input should be a valid integer"),
    "bias": (CHAT, chat(logit_bias={"x": 1}), "`logit_bias` has 'x'"),
    "biases": (CHAT, chat(logit_bias={str(i): 1 for i in range(5000)}), "at most 1024 items"),
    "beams": (CHAT, chat(generation_config='{"num_beams": 4}'), "`num_beams` is 4"),
    "deep": (CHAT, chat(generation_config=DEEP), "must be an object in JSON"),
    "deep body": (CHAT, raw(f'"generation_config": {DEEP}'), "recursion limit"),
    "deep call": (CHAT, chat(messages=[USER | {"tool_calls": [{"arguments": DEEP}]}]), "object in JSON"),
    "best": (TEXT, {"prompt": "What?", "best_of": 2}, "`best_of` is 2"),
    "suffix": (TEXT, {"prompt": "What?", "suffix": 5}, "`suffix` is 5"),
    "effort": (CHAT, chat(reasoning_effort="low"), "`reasoning_effort` is 'low'"),
    "tools": (CHAT, chat(tools=[{"type": "function"}]), "chat template of this model has no place"),
    "form": (CHAT, chat(response_format={"type": "json_object"}), "needs a token that ends it"),
    "tool": (CHAT, chat(tools=[{"type": "function"}], tool_choice="required"), "`tool_choice`"),
    "no prompt": (TEXT, {"max_tokens": 4}, "no `prompt`"),
    "null prompt": (TEXT, {"prompt": None}, "A prompt is None"),
    "no ids": (TEXT, {"prompt": []}, "no tokens"),
    "ids": (TEXT, {"prompt": [5, 10**6]}, "token 1000000"),
    "prompts": (TEXT, {"prompt": ["x"] * 129}, "129 answers"),
    "answers": (TEXT, {"prompt": ["x"] * 100, "n": 2}, "200 answers"),
    "logprobs": (TEXT, {"prompt": "What?", "logprobs": 50}, "`logprobs` is 50"),
    "top": (CHAT, chat(top_logprobs=2), "without `logprobs`"),
    "no input": (RESPONSE, {"stream": False}, "no `input`"),
    "picture": (RESPONSE, {"input": [{"type": "input_image", "image_url": "x"}]}, "input_image"),
    "instructions": (RESPONSE, {"input": "x", "instructions": 5}, "`instructions` is 5"),
    "format": (RESPONSE, {"input": "What?", "text": {"format": {"type": "xml"}}}, "form of the answer is {"),
    "stream": (TEXT, {"prompt": "x", "stream": "false"}, "`stream` is 'false'"),
    "warm": (CHAT, chat(temperature=True), "`temperature` is True"),
    "hot": (CHAT, raw(f'"temperature": 1{"0" * 400}'), "finite number"),
    "nan": (CHAT, raw('"temperature": NaN'), "finite number"),
    "top_p": (RESPONSE, {"input": "x", "top_p": True}, "`top_p` is True"),
    "stops": (CHAT, chat(stop={"a": 1}), "must be a text or a list"),
    "many stops": (TEXT, {"prompt": "x", "stop": ["a"] * 5}, "up to 4 texts of 256"),
    "long stop": (TEXT, {"prompt": "x", "stop": "x" * 1000}, "up to 4 texts of 256"),
    "surrogate": (TEXT, b'{"prompt": "\\ud800"}', "object in JSON"),
    "config stop": (TEXT, {"prompt": "x", "generation_config": {"stop_strings": ["x" * 999]}}, "256 char"),
    "template": (CHAT, chat(chat_template_kwargs={"chat_template": FOREVER}), "no variable"),
    "padding": (CHAT, chat(chat_template_kwargs={"padding": "max_length"}), "has padding, which is no"),
    "variables": (CHAT, chat(chat_template_kwargs=[5]), "`chat_template_kwargs` is [5]"),
    "raises": (CHAT, chat(messages=[{"role": "raises", "content": "x"}]), "refuses the messages: no such"),
    "endless": (CHAT, chat(messages=[{"role": "endless", "content": "x"}]), "does not end within"),
    "continues": (CHAT, chat(continue_final_message=True), "not compatible"),
    "reference": (RESPONSE, {"input": [{"type": "item_reference", "id": "a"}]}, "type 'item_reference'"),
    "reasoning": (RESPONSE, {"input": [{"type": "reasoning", "content": [{}]}, USER]}, "with a `text` only"),
    "first": (RESPONSE, {"input": [{"type": "zzz"}]}, "type 'zzz'"),
    "second": (RESPONSE, {"input": [USER, {"type": "zzz"}]}, "type 'zzz'; without a `role` it must be"),
    "no name": (RESPONSE, {"input": [USER, {"type": "function_call", "call_id": "1"}]}, "`name` of an item of the"),
    "mixed": (RESPONSE, {"input": [{"type": "input_text", "text": "x"}, USER]}, "type None"),
    "calls": (CHAT, chat(messages=[USER | {"tool_calls": [5]}]), "`tool_calls` has 5; it must be a list"),
    "call": (CHAT, chat(messages=[USER | {"tool_calls": [{"id": "1"}]}]), "has {'id': '1'};"),
    "field": (CHAT, chat(nonsense=1), "nonsense"),
    "marks": (TEXT, {"prompt": [1] * 300_000}, "brackets, colons and commas"),
    "path": ("nothing", {}, "Not Found"),
    "reset": ("../reset", {}, "Not Found: POST /reset"),
    "positions": (TEXT, {"prompt": "x" * 3000, "max_tokens": 4}, "longer than the 2,048 positions"),
    "streamed": (TEXT, {"prompt": "x" * 3000, "max_tokens": 4, "stream": True}, "2,048 positions"),
    "characters": (TEXT, {"prompt": "x" * 200_000}, "has more tokens than the cache"),
    "pool": (
        "completions",
        {"prompt": "x", "max_tokens": 10**6, "stream": True},
        "(`--cache-tokens`, `--memory-share`)",
    ),
    "no json": (TEXT, b"x", "The body of a request must be an object in JSON"),
    "no object": (TEXT, [5], "The body of a request must be an object in JSON"),
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
    for name in names - fields.BODIES[endpoint].model_fields.keys() - fields.WITHOUT_EFFECT:
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
    begun, system = {"role": "assistant", "content": "It is"}, {"role": "system", "content": "S"}
    bodies = {
        "neutral": (CHAT, chat(**nothing)),
        "parts": (CHAT, chat(messages=[USER | {"content": [{"type": "text", "text": "What?"}] * 2}])),
        "calls": (CHAT, chat(messages=[USER, said, {"role": "tool", "content": "4"}])),
        "variable": (CHAT, chat(chat_template_kwargs={"greeting": "Hi"})),
        "continued": (CHAT, chat(messages=[USER, begun], add_generation_prompt=False, continue_final_message=True)),
        "one": (TEXT, {"prompt": ["one"], "max_tokens": 4}),
        "ids": (TEXT, {"prompt": [[5, 6], [7]], "max_tokens": 4}),
        "input": (RESPONSE, {"input": "What?", "max_output_tokens": 4}),
        "items": (RESPONSE, {"input": items, "max_output_tokens": 4}),
        "flat": (RESPONSE, {"input": [{"type": "input_text", "text": "x"}], "max_output_tokens": 4}),
        "both": (RESPONSE, {"input": [system, USER], "instructions": "I", "max_output_tokens": 4}),
    }
    prompts: dict[str, str] = {}

    def ask(client: Any) -> None:
        for name, (path, body) in bodies.items():
            answer = post(client, path, body)
            assert answer.status_code == 200, answer.text
            prompts[name] = "".join(map(chr, read[-1]))

    read: list[list[int]] = []
    add = TurboQuantBatchingManager.add_checked

    def noted(own: Any, ids: list[int], *more: Any, **options: Any) -> Any:
        read.append(ids)
        return add(own, ids, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TurboQuantBatchingManager, "add_checked", noted)
        served(ask, odd_folder)
    assert prompts["parts"] == "<user>What?What?<assistant>"
    assert prompts["calls"] == "<user>What?<assistant>Well.[4]<tool>4<assistant>"
    assert prompts["variable"].endswith("<assistant>Hi")
    assert prompts["continued"] == "<user>What?<assistant>It is"
    assert prompts["both"] == "<system>I\n\nS<user>What?<assistant>"


def test_bodies_are_read_up_to_a_size(served: Callable[..., str], folder: Path) -> None:
    with connected(served, folder, "--max-body-size", 1000) as client:
        for size, status in ((900, 200), (1100, 413)):
            answer = client.post("/v1/completions", json={"prompt": "x" * size, "max_tokens": 1})
            assert answer.status_code == status
        assert "the server reads up to 1,000" in answer.json()["error"]["message"]


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


def test_no_body_makes_an_error_of_the_server(client: Any) -> None:
    """Bodies of wrong types, sizes and nesting. A good request is answered as before after each hundred."""
    draw = random.Random(0)
    counts: dict[int, int] = {}
    good = client.post("/v1/chat/completions", json=chat()).json()["choices"]
    for i in range(400):
        path = draw.choice(list(fields.BODIES))
        needed = {"chat/completions": {"messages": [USER]}, "completions": {"prompt": "x"}}
        body = {"max_tokens": 1} | needed.get(path, {"input": "x"}) if path != "responses" else {"input": "x"}
        if path == "responses":
            body["max_output_tokens"] = 1
        for name in draw.sample([*fields.BODIES[path].model_fields, *fields.WITHOUT_EFFECT], draw.randrange(1, 4)):
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
    assert min(counts.values()) > 20
