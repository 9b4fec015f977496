"""`tq-hf serve`: answers in a form, and calls that a request forces."""

# ruff: noqa: F811 - fixtures of another file

import json
from pathlib import Path
from typing import Any

import pytest
from test_cli import saved_model
from test_serve import chat, client, events_of, managers, served  # noqa: F401 - fixtures

pytest.importorskip("xgrammar", reason="answers in a form need tq-hf[grammar]")

POINT = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/Digit"}},
    "required": ["x"],
    "$defs": {"Digit": {"type": "integer", "minimum": 0, "maximum": 9}},
}
TOOLS = [
    {"type": "function", "function": {"name": "move", "parameters": POINT, "strict": True}},
    {"type": "function", "function": {"name": "wait"}},
]
END: dict[str, Any] = {"generation_config": {"eos_token_id": 0}, "temperature": 2.0, "seed": 3}
FORM = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
MOVE = {"type": "function", "function": {"name": "move"}}
NOT = {"type": "json_schema", "schema": {"not": {}}}
MOVES = {"tools": TOOLS, "tool_choice": MOVE}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "form": ("chat/completions", {"response_format": {"type": "xml"}}, "form of the answer is {'type': 'xml'}"),
    "no end": ("chat/completions", {"generation_config": None, "response_format": FORM}, "needs a token that ends it"),
    "keyword": ("chat/completions", {"response_format": NOT}, "`not` of the JSON schema"),
    "function": ("chat/completions", {"tools": TOOLS, "tool_choice": {"function": {"name": "x"}}}, "no function"),
    "choice": ("chat/completions", {"tools": TOOLS, "tool_choice": {"function": 5}}, "no function of `tools`"),
    "tools": ("chat/completions", {"tools": [{"function": 5}], "tool_choice": "required"}, "no function of"),
    "none": ("chat/completions", {"tool_choice": "required"}, "no function of `tools`"),
    "strict": ("chat/completions", {"tools": TOOLS}, "`strict` of the tool 'move' is True, and only calls"),
    "word": ("chat/completions", {"tools": TOOLS, "tool_choice": "any"}, "`tool_choice"),
    "both": ("chat/completions", MOVES | {"response_format": FORM}, "without a forced call"),
    "two": ("chat/completions", MOVES | {"structured_outputs": {"regex": "a"}}, "without a forced call"),
    "regex": ("completions", {"structured_outputs": {"regex": "(a"}}, "not closed"),
    "text": ("responses", {"text": {"verbosity": "low"}}, "`text.verbosity"),
    "deep": ("responses", {"text": {"format": {"type": "json_schema"}}}, "form of the answer"),
    "no token": ("completions", {"structured_outputs": {"regex": "é{3}"}}, "no token of the model begins"),
}
"""Endpoint, fields beside a prompt, and words of the answer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template has a place for tools."""
    made = saved_model("llama", tmp_path_factory.mktemp("forms"))
    (made / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if tools %}<tools>{% endif %}<assistant>"
    )
    return made


def test_answers_have_the_form_that_requests_ask_for(client: Any) -> None:
    def choices(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        answer = client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    for whole in choices("chat/completions", chat(**END | {"max_tokens": 300}, n=4, response_format=FORM)):
        assert json.loads(whole["message"]["content"]).keys() == {"x"} and whole["finish_reason"] == "stop"
    (cut,) = choices("chat/completions", chat(**END | {"max_tokens": 2}, response_format=FORM))
    assert cut["message"]["content"].startswith("{") and cut["finish_reason"] == "length"
    body = {"prompt": ["a", "b"], "max_tokens": 30, **END, "structured_outputs": {"choice": ["yes", "no"]}}
    assert {each["text"] for each in choices("completions", body)} <= {"yes", "no"}
    events = events_of(client.post("/v1/completions", json=body | {"stream": True, "stop": ["e", "o"]}).text)
    assert {each["choices"][0]["text"] for each in events} <= {"y", "n", ""}
    form = {"type": "json_schema", "name": "point", "schema": POINT}
    response = client.post("/v1/responses", json={"input": "x", **END, "text": {"format": form}}).json()
    assert json.loads(response["output"][0]["content"][0]["text"]).keys() == {"x"}
    assert response["text"] == {"format": form}
    assert choices("chat/completions", chat(response_format={"type": "text"}))


def test_a_forced_call_has_arguments_by_its_schema(client: Any) -> None:
    body = chat(**END | {"max_tokens": 300}, tools=TOOLS)
    for choice, names in ((MOVE, {"move"}), ("required", {"move", "wait"})):
        for stream in (False, True):
            asked = body | {"tool_choice": choice, "stream": stream, "n": 4}
            answer = client.post("/v1/chat/completions", json=asked)
            found = events_of(answer.text) if stream else [answer.json()]
            parts = [each for event in found for each in event["choices"]]
            calls = [call for each in parts for call in each.get("delta", each.get("message")).get("tool_calls", [])]
            assert len(calls) == 4 and {call["function"]["name"] for call in calls} <= names
            for call in calls:
                arguments = json.loads(call["function"]["arguments"])
                assert arguments == {} if call["function"]["name"] == "wait" else 0 <= arguments["x"] <= 9
            assert {each["finish_reason"] for each in parts} <= {"tool_calls", None}
    cut = client.post("/v1/chat/completions", json=body | {"tool_choice": MOVE, "max_tokens": 12}).json()
    assert cut["choices"][0]["finish_reason"] == "length" and "tool_calls" not in cut["choices"][0]["message"]
    assert cut["choices"][0]["message"]["content"] == '{"name": "mo'
    flat = [{"type": "function", "name": "move", "parameters": POINT}]
    chosen = {"type": "function", "name": "move"}
    asked = {"input": "x", **END, "tools": flat, "tool_choice": chosen, "max_output_tokens": 300}
    (item,) = client.post("/v1/responses", json=asked).json()["output"]
    assert item["type"] == "function_call" and json.loads(item["arguments"]).keys() == {"x"}


def test_forms_that_cannot_be_applied_are_refused(client: Any) -> None:
    prompts = {"chat/completions": chat(), "completions": {"prompt": "x"}, "responses": {"input": "x"}}
    for name, (path, options, words) in REFUSED.items():
        answer = client.post(f"/v1/{path}", json=prompts[path] | END | options)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], (name, answer.text)
