"""Answers in a form: JSON schemas, choices, regular expressions and grammars mask the tokens of a batch's requests."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from test_options import collected
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast

from tests.support.batching_cases import Oracle, Tokens, greedy, model_of, options, prompts
from tests.support.tiny_models import VOCAB
from tq_hf import TurboQuantBatching
from tq_hf.batching.grammars import Grammars, grammar_of
from tq_hf.batching.processors import masked
from tq_hf.compat import as_input

EOS, NEW = 2, 60


def characters() -> PreTrainedTokenizerFast:
    """A token a character; the end is a special token."""
    backend = Tokenizer(models.WordLevel({chr(code): code for code in range(VOCAB)}, unk_token="?"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", eos_token=chr(EOS))


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
        xgrammar = pytest.importorskip("xgrammar")
        masks = xgrammar.allocate_token_bitmask(1, VOCAB + 1)
        matcher = xgrammar.GrammarMatcher(self.compiled, override_stop_tokens=[EOS])
        assert all(matcher.accept_token(token) for token in input_ids[0, self.prompt :].tolist())
        matcher.fill_next_token_bitmask(masks)
        return masked(scores, masks)


@pytest.fixture(scope="module")
def batching() -> TurboQuantBatching:
    pytest.importorskip("xgrammar", reason="grammars need tq-hf[grammar]")
    return TurboQuantBatching(model_of(), balance=False, tokenizer=characters())


@pytest.fixture(scope="module")
def compiler() -> Grammars:
    pytest.importorskip("xgrammar", reason="grammars need tq-hf[grammar]")
    return Grammars(characters(), VOCAB)


def alone(model: Any, prompt: Tokens, form: dict[str, Any], compiler: Grammars, oracle: Oracle | None = None) -> Tokens:
    """Tokens of `generate()` on a cache of the same recipe, by a matcher of its own."""
    masks = []
    if form:
        grammar = grammar_of(form.get("response_format"), form.get("structured_outputs"))
        assert grammar is not None
        masks = [ByGrammar(len(prompt), compiler.compile(grammar))]
    before, ids = model.config._attn_implementation, torch.tensor([prompt])
    model.set_attn_implementation("turboquant")
    config = greedy(NEW)
    config.eos_token_id = EOS if form else None
    cache = as_input((oracle or Oracle(model)).cache())
    more = dict(generation_config=config, logits_processor=LogitsProcessorList(masks), pad_token_id=0)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **cache, **more)
    model.set_attn_implementation(before)
    return out[0, len(prompt) :].tolist()


def ask(batching: TurboQuantBatching, asked: list[tuple[Tokens, dict[str, Any]]], **changes: Any) -> list[Any]:
    """Outputs of one batch of requests, each with its own options."""
    config = greedy(NEW)
    with batching.continuous_batching_context_manager(config, continuous_batching_config=options(**changes)) as manager:
        names = [manager.add_request(prompt, **fields) for prompt, fields in asked]
        found = collected(manager, names)
    return [found[name] for name in names]


def text_of(tokens: Tokens) -> str:
    return "".join(map(chr, tokens[: tokens.index(EOS)] if EOS in tokens else tokens))


MIXED = [({}, {})[0], *FORMS.values(), {}, {"do_sample": True, "seed": 5}]


@pytest.mark.parametrize("way", ["plain", "chunks", "few", "padded", "asynchronous"])
def test_requests_have_the_answers_of_generate_with_and_without_a_form(
    way: str, batching: TurboQuantBatching, compiler: Grammars, request: pytest.FixtureRequest
) -> None:
    changes: dict[str, Any] = {"chunks": {"max_batch_tokens": 64}, "few": {"max_requests_per_batch": 3}}.get(way, {})
    changes |= request.getfixturevalue(way) or {} if way in ("padded", "asynchronous") else {}
    inputs = prompts([100, 90, 80, 95, 70, 99, 85, 60, 77, 88], seed=4)
    asked = [
        (prompt, form | ({"eos_token_id": EOS} if form else {})) for prompt, form in zip(inputs, MIXED, strict=True)
    ]
    asked[-1] = inputs[-1], MIXED[-1]
    found = [each.generated_tokens for each in ask(batching, asked, **changes)]
    plain = [(prompt, fields) for prompt, fields in asked if "eos_token_id" not in fields]
    without = iter(ask(batching, plain, **changes))
    for (prompt, fields), tokens in zip(asked, found, strict=True):
        if "eos_token_id" in fields:
            form = {name: value for name, value in fields.items() if name != "eos_token_id"}
            assert tokens == alone(batching.model, prompt, form, compiler), form
        else:
            assert tokens == next(without).generated_tokens, "the same tokens as without the others"
    for form, tokens in zip(FORMS, found[1:], strict=False):
        assert tokens[-1] != EOS or matches(form, text_of(tokens)), form


def test_200_answers_of_a_schema_parse_and_validate(batching: TurboQuantBatching) -> None:
    """A random model samples from all that is allowed."""
    fields = FORMS["schema"] | {"eos_token_id": EOS, "do_sample": True, "temperature": 3.0, "max_new_tokens": 400}
    outputs = ask(batching, [(prompt, fields) for prompt in prompts([20] * 200, seed=6)])
    texts = [text_of(each.generated_tokens) for each in outputs]
    assert all(each.generated_tokens[-1] == EOS for each in outputs)
    assert all(matches("schema", text) for text in texts)
    assert len(set(texts)) > 150 and len({json.loads(text)["more"] is None for text in texts}) == 2
