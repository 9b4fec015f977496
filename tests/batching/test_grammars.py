"""Answers in a form: JSON schemas, choices, regular expressions and grammars mask the tokens of a batch's requests."""

from __future__ import annotations

import json
import re
import sys
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from tests.support.batching_cases import (
    Oracle,
    Session,
    Tokens,
    ask,
    greedy,
    model_of,
    options,
    outputs_of,
    prompts,
    serve,
)
from tests.support.tiny_models import VOCAB, letters
from tq_hf import TurboQuantBatching
from tq_hf.batching import grammars
from tq_hf.batching.grammars import Grammars, grammar_of
from tq_hf.batching.options import Features, RequestOptions
from tq_hf.batching.processors import BatchOptions, PreparedStep, answer_ids, masked

pytest.importorskip("xgrammar", reason="answers in a form need tq-hf[grammar]")
EOS, NEW = 2, 60


characters = partial(letters, eos_token=chr(EOS))
"""A tokenizer with a special token for the end."""


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "more": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Point"}]},
    },
    "required": ["name", "age", "tags", "more"],
    "additionalProperties": False,
    "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}},
}
FORMS: dict[str, dict[str, Any]] = {
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}
    },
    "flat": {"response_format": {"type": "json_schema", "name": "p", "schema": PERSON}},
    "object": {"response_format": {"type": "json_object"}},
    "choice": {"structured_outputs": {"choice": ["yes", "no", 'say "\\\n"', "noise"]}},
    "regex": {"structured_outputs": {"regex": r"[a-f]{3,9}-\d+(\.\d{2})?"}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= item ("," item){2,4}\nitem ::= [0-9] | "(" item ")"'}},
    "json": {
        "structured_outputs": {"json": json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 3})}
    },
}


def matches(form: str, text: str) -> bool:
    """Whether a whole answer has its form, as others than xgrammar read it."""
    if form in ("schema", "flat", "json"):
        jsonschema = pytest.importorskip("jsonschema")
        schema = PERSON if form != "json" else json.loads(FORMS["json"]["structured_outputs"]["json"])
        jsonschema.validate(json.loads(text), schema)
        return True
    if form == "object":
        return isinstance(json.loads(text), dict)
    if form == "choice":
        return text in FORMS["choice"]["structured_outputs"]["choice"]
    pattern = FORMS["regex"]["structured_outputs"]["regex"] if form == "regex" else r"\(*\d\)*(,\(*\d\)*){2,4}"
    return re.fullmatch(pattern, text) is not None


class ByGrammar(LogitsProcessor):
    """Masks by a matcher that reads the whole answer at each token."""

    def __init__(self, prompt: int, compiled: Any) -> None:
        self.prompt, self.compiled = prompt, compiled

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        xgrammar = sys.modules["xgrammar"]
        masks = xgrammar.allocate_token_bitmask(1, VOCAB + 1)
        matcher = xgrammar.GrammarMatcher(self.compiled, override_stop_tokens=[EOS])
        assert all(matcher.accept_token(token) for token in input_ids[0, self.prompt :].tolist())
        matcher.fill_next_token_bitmask(masks)
        return masked(scores, masks)


@pytest.fixture(scope="module")
def batching() -> TurboQuantBatching:
    return TurboQuantBatching(model_of(), balance=False, tokenizer=characters())


def alone(model: Any, prompt: Tokens, form: dict[str, Any]) -> Tokens:
    """Tokens of `generate()` on a cache of the same recipe, by a matcher of its own."""
    grammar = grammar_of(form.get("response_format"), form.get("structured_outputs"))
    assert grammar is not None
    compiled = Grammars(characters(), VOCAB).compiled(RequestOptions(grammar=grammar)).grammar.compiled
    config = greedy(NEW)
    config.eos_token_id, config.pad_token_id = EOS, 0
    return Oracle(model).generate(prompt, NEW, config, ByGrammar(len(prompt), compiled))


def text_of(tokens: Tokens) -> str:
    return "".join(map(chr, tokens[: tokens.index(EOS)] if EOS in tokens else tokens))


ENDS: dict[str, Any] = {"eos_token_id": EOS}
INPUTS = prompts([100, 90, 80, 95, 70, 99, 85, 60, 77], seed=4)
IN_FORM = [(prompt, form | ENDS) for prompt, form in zip(INPUTS, FORMS.values(), strict=False)]
PLAIN: list[tuple[Tokens, dict[str, Any]]] = [(INPUTS[-2], {}), (INPUTS[-1], {"do_sample": True, "seed": 5})]


@pytest.fixture(scope="module")
def expected(batching: TurboQuantBatching) -> list[Tokens]:
    """Answers of `IN_FORM` by `generate()`, then those of `PLAIN` by batches without grammars."""
    return [alone(batching.model, *each) for each in IN_FORM] + ask(batching, PLAIN, NEW)


@pytest.mark.parametrize("way", ["plain", "chunks", "few", "padded", "asynchronous"])
def test_requests_have_the_answers_of_generate_with_and_without_a_form(
    way: str, batching: TurboQuantBatching, expected: list[Tokens], request: pytest.FixtureRequest
) -> None:
    changes: dict[str, Any] = {"chunks": {"max_batch_tokens": 64}, "few": {"max_requests_per_batch": 3}}.get(way, {})
    changes |= request.getfixturevalue(way) or {} if way in ("padded", "asynchronous") else {}
    found = ask(batching, IN_FORM + PLAIN, NEW, **changes)
    assert found == expected
    for form, tokens in zip(FORMS, found, strict=False):
        assert tokens[-1] != EOS or matches(form, text_of(tokens)), form
    assert sum(tokens[-1] == EOS for tokens in found) > 3


@pytest.mark.parametrize("number", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_answers_of_a_schema_parse_and_validate(number: int, batching: TurboQuantBatching) -> None:
    """A random model samples from all that is allowed, with little whitespace, so that answers are short."""
    fields = FORMS["schema"] | ENDS | {"do_sample": True, "temperature": 3.0, "max_new_tokens": 400}
    fields["logit_bias"] = dict.fromkeys(map(ord, " \n\r\t"), -9)
    found = ask(batching, [(prompt, fields) for prompt in prompts([20] * number, seed=6)], NEW)
    texts = [text_of(tokens) for tokens in found]
    assert all(tokens[-1] == EOS for tokens in found) and all(matches("schema", text) for text in texts)
    assert len(set(texts)) > 0.75 * number and len({json.loads(text)["more"] is None for text in texts}) == 2


def test_several_answers_have_places_of_their_own(batching: TurboQuantBatching, ways: dict[str, Any]) -> None:
    """Stop strings and log-probabilities are those of requests without a form."""
    fields = FORMS["regex"] | ENDS | {"do_sample": True, "seed": 3, "num_return_sequences": 4, "top_logprobs": 2}
    with serve(batching, NEW, **ways) as manager:
        name = manager.add_request(INPUTS[0], temperature=3.0, streaming=True, **fields)
        stopped = manager.add_request(INPUTS[1], stop_strings=["-"], **(FORMS["regex"] | ENDS))
        found: dict[str, Any] = {}
        while sum(each.is_finished() for each in found.values()) < 5:
            output = manager.get_result(timeout=30)
            found[output.request_id] = output
    assert text_of(found.pop(stopped).generated_tokens).endswith("-")
    assert sorted(found) == sorted(answer_ids(name, 4))
    texts = {text_of(each.generated_tokens) for each in found.values()}
    assert len(texts) == 4 and all(matches("regex", text) for text in texts)
    rows = [row for each in found.values() for row in each.top_logprobs]
    assert any(row.logprob < min(row.top.values()) for row in rows), "of the model, before masks"


@pytest.mark.parametrize("way", ["reset", "offloaded", "offloaded ahead"])
def test_preempted_requests_go_on_in_their_form(way: str, request: pytest.FixtureRequest) -> None:
    changes: dict[str, Any] = dict(num_blocks=88, max_batch_tokens=700, safety_margin=0.0, allow_block_sharing=False)
    if way != "reset":
        request.getfixturevalue("offloaded")
        changes |= dict(cpu_offload_space=0.01) | (request.getfixturevalue("asynchronous") if "ahead" in way else {})
    form = {"structured_outputs": {"regex": r"([a-m]{3}[0-9]){12}"}} | ENDS
    with Session(model_of(), **changes) as session:
        session.batching.tokenizer = characters()
        session.run(INPUTS[:1], greedy(1))
        manager, waited = session.manager, session.recorded_waiting()
        manager.start()
        names = [manager.add_request(prompt[:100], max_new_tokens=60, **form) for prompt in prompts([100] * 6, seed=3)]
        found = outputs_of(manager, len(names))
        manager.stop(keep_for_next_session=True)
    assert len(waited) > len(names), "some were preempted"
    for each in found.values():
        assert re.fullmatch(r"([a-m]{3}[0-9]){12}", text_of(each.generated_tokens)), each


def test_the_end_is_allowed_where_the_grammar_accepts_only(batching: TurboQuantBatching) -> None:
    """Bans and minimum lengths give way to the form: the only token that it allows is chosen."""
    form = {"structured_outputs": {"regex": "ab{2,4}"}} | ENDS
    banned = form | {"suppress_tokens": [ord("a")], "logit_bias": {ord("b"): -100}}
    long, short, cut = form | {"min_new_tokens": 50}, banned | {"logit_bias": {EOS: 100}}, form | {"max_new_tokens": 2}
    found = ask(batching, [(INPUTS[0], fields) for fields in (banned, long, short, cut)], NEW)
    assert found[0][0] == ord("a") and found[0][-1] == EOS
    assert text_of(found[1]) == "abbbb" and found[1][-1] == EOS
    assert text_of(found[2]) == "abb" and found[3] == [ord("a"), ord("b")]


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "strin"}, 'refuses the form of the answer: Unsupported type "strin"'),
    ({"not": {"type": "null"}}, "`not` of the JSON schema is not applied"),
    ({"type": "array", "uniqueItems": True}, "`uniqueItems` of the JSON schema"),
    ({"properties": {"a": {"minimum": 5}}}, "`minimum` of the JSON schema has no `type`"),
    ({"anyOf": [{"$ref": "#/$defs/a"}], "minimum": 5}, "`minimum` of the JSON schema stands beside"),
    ({"type": "string", "pattern": "a*", "maxLength": 3}, "`maxLength` of the JSON schema stands beside a pattern"),
    ({"type": "number", "multipleOf": 0.5}, "`multipleOf` of the JSON schema is not applied"),
    ({"$ref": "http://x/y"}, "`.ref` of the JSON schema does not begin with `#`"),
    (
        {"type": "object", "properties": {}, "required": ["b"]},
        "`required` of the JSON schema names what `properties` lack",
    ),
    ({"$ref": "#"}, "Circular .ref chain"),
    (deep(100), "more than 64 levels"),
    ({"enum": ["x" * 40] * 2000}, "characters; at most 65,536 are read"),
    ("{", "The JSON schema cannot be read"),
    (5, "The form of the answer is"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    *(({"response_format": {"type": "json_schema", "schema": schema}}, words) for schema, words in SCHEMAS),
    ({"response_format": {"type": "xml"}}, "The form of the answer is {'type': 'xml'}. It must be"),
    ({"response_format": {"type": ["text"]}}, "The form of the answer is"),
    ({"response_format": "json"}, "The form of the answer is 'json'"),
    ({"response_format": {"type": "json_schema", "json_schema": 5}}, "The form of the answer is"),
    ({"structured_outputs": {"regex": "(a"}}, "parenthesis is not closed"),
    ({"structured_outputs": {"regex": r"(a)\1"}}, "Backreference is not supported"),
    ({"structured_outputs": {"regex": "(" * 5000 + ")" * 5000}}, "refuses the form of the answer"),
    ({"structured_outputs": {"grammar": "a"}}, "root rule"),
    ({"structured_outputs": {"choice": []}}, "The form of the answer is"),
    ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "with one of json"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "without that"),
    ({"structured_outputs": {"regex": "a"}, "eos_token_id": -1}, "needs a token that ends it"),
]


@pytest.mark.parametrize("fields, words", WRONG, ids=str)
def test_forms_that_cannot_be_applied_are_refused(
    fields: dict[str, Any], words: str, batching: TurboQuantBatching
) -> None:
    manager = batching.init_continuous_batching(greedy(NEW), options())
    manager.restore_attention()
    with pytest.raises(ValueError, match=words):
        manager.add_request([5], **(ENDS | fields))


def test_what_a_form_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMS["object"] | ENDS
    for tokenizer, words in ((None, "need a tokenizer"), (characters(), r"pip install tq-hf\[grammar\]")):
        monkeypatch.setitem(sys.modules, "xgrammar", None)
        manager = TurboQuantBatching(model_of(), tokenizer=tokenizer).init_continuous_batching(greedy(NEW), options())
        manager.restore_attention()
        with pytest.raises(ValueError, match=words):
            manager.add_request([5], **form)


def test_a_grammar_that_compiles_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, ends = Grammars(characters(), VOCAB), threading.Event()
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.01)
    compiler.compiler = SimpleNamespace(compile_regex=lambda text: ends.wait())
    for words in ["not compiled within 0.01 s"] * 2 + ["Other requests have large grammars"]:
        with pytest.raises(ValueError, match=words):
            compiler.compiled(RequestOptions(grammar=grammars.Grammar("regex", "a")))
    ends.set()


@pytest.mark.parametrize("fault", ["slow", "unwritable"])
def test_a_request_that_cannot_go_on_fails_alone(
    fault: str, batching: TurboQuantBatching, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"structured_outputs": {"grammar": 'root ::= root root | "a"'}}
    if fault == "slow":
        monkeypatch.setattr(grammars, "MASK_SECONDS", -1.0)
    else:
        form = {"structured_outputs": {"regex": "aa\u00e9"}}  # no token of this model
    with serve(batching, 5) as manager:
        names = [manager.add_request(INPUTS[0], **(form | ENDS)), manager.add_request(INPUTS[1])]
        found = {each.request_id: each for each in (manager.get_result(timeout=30) for _ in names)}
    assert {"slow": "ambiguous", "unwritable": "no token"}[fault] in found[names[0]].error
    assert found[names[1]].error is None and len(found[names[1]].generated_tokens) == 5


def test_masks_are_written_side_by_side() -> None:
    """Each of four answers waits for another one's mask."""
    meeting, failed = threading.Barrier(2, timeout=30), list[Exception]()
    matching = SimpleNamespace(write=lambda masks, row: meeting.wait())
    state: Any = SimpleNamespace(read_answer=lambda newest: True, fail=failed.append, matching=matching)
    processor = BatchOptions(RequestOptions(), 4, VOCAB, torch.device("cpu"))
    asked, features = RequestOptions(grammar=grammars.Grammar("regex", "a")), Features(grammar=True)
    processor.step = PreparedStep([state] * 4, [asked] * 4, features, processor._neutral)
    processor.begin()
    processor.write_masks({})
    assert failed == []
