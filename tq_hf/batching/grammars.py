"""Grammars of answers, by xgrammar: a JSON schema, choices, a regular expression or EBNF becomes masks of tokens.

`grammar_of` reads what a request asks for. `Grammars` compiles it, in a thread and within limits. A `Matching` follows
an answer on the host and writes which tokens may come next. `BatchOptions` applies these masks on the device.
"""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field
from typing import Any

import torch

LARGEST, DEEPEST, COMPILE_SECONDS = 65_536, 64, 10.0
"""Characters of a grammar, levels of a schema, and seconds to compile. 2,000 optional properties would take 20 s."""
MASK_SECONDS = 0.1
"""CPU time of a mask. Most take 0.05 ms; those of `root ::= root root | "a"` take longer with each token."""
KEPT_BYTES = 2**28
"""Bytes of compiled grammars that are kept. The least recently used one goes first."""
WHITESPACE = 20
"""Most characters of whitespace between two parts of JSON. Without a limit, some answers never end."""
BY_NAME = frozenset("properties patternProperties $defs definitions".split())
"""Keywords of a schema that hold schemas by name."""
IGNORED = frozenset(
    "not if then else dependentRequired dependentSchemas dependencies uniqueItems contains minContains maxContains "
    "unevaluatedItems unevaluatedProperties propertyNames $dynamicRef $recursiveRef".split()
)
"""Keywords that xgrammar ignores, or applies in part."""
ALONE = frozenset(("$ref", "anyOf", "oneOf", "allOf"))
LENGTHS = frozenset(("minLength", "maxLength"))
TYPED = LENGTHS | set("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf pattern format".split())
"""Keywords that xgrammar ignores without a `type`, or beside one of `ALONE`."""


@dataclass(frozen=True)
class Grammar:
    """Form of an answer: `kind` is a method of xgrammar's compiler, and `text` is its argument. Objects have only the
    properties that a JSON schema names if `strict`."""

    kind: str
    text: str
    strict: bool = True
    compiled: Any = field(default=None, compare=False, repr=False)


def checked_schema(schema: Any) -> Any:
    """Copy a JSON schema (an object, or its text), with limits of lengths as patterns: xgrammar lets control characters
    into limited texts. Raise `ValueError` if the schema is too deep or has a keyword that xgrammar would ignore."""
    try:
        schema = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"The JSON schema cannot be read: {error!s:.200}.") from None
    left = [(schema, 1)]
    while left:
        each, depth = left.pop()
        if depth > DEEPEST:
            raise ValueError(f"The JSON schema has more than {DEEPEST} levels. Use `$ref`, or leave levels out.")
        if isinstance(each, list):
            left += [(one, depth + 1) for one in each]
        if not isinstance(each, dict):
            continue
        names, kind, parts, required = each.keys(), each.get("type"), each.get("allOf"), each.get("required")
        known = each["properties"] if isinstance(each.get("properties"), dict) else {}
        absent = set(map(str, required)) - known.keys() if isinstance(required, list) else ()
        faults: list[tuple[Any, str]] = [
            (names & IGNORED, "is not applied"),
            (names & ALONE and names & (TYPED | {"properties", "required", "items"}), f"stands beside {names & ALONE}"),
            (kind is None and not {"enum", "const"} & names and names & TYPED, "has no `type` beside it"),
            ({"pattern", "format"} & names and names & LENGTHS, "stands beside a pattern or format"),
            (kind != "integer" and {"multipleOf"} & names, "is applied to integers only"),
            (isinstance(parts, list) and len(parts) > 1 and {"allOf"}, "has several parts"),
            (not str(each.get("$ref", "#")).startswith("#") and {"$ref"}, "does not begin with `#`"),
            (absent and {"required"}, "names what `properties` lack"),
        ]
        for wrong, why in faults:
            if wrong:
                raise ValueError(f"`{min(wrong)}` of the JSON schema {why}, and cannot be applied. Leave it out.")
        if names & LENGTHS:
            each["pattern"] = f"^[\\s\\S]{{{each.pop('minLength', 0)},{each.pop('maxLength', '')}}}$"
        for name, value in each.items():
            if name in BY_NAME and isinstance(value, dict):
                left += [(one, depth + 1) for one in value.values()]
            elif name not in ("enum", "const", "default", "examples"):
                left.append((value, depth + 1))
    return schema


def calls_grammar(functions: list[dict[str, Any]]) -> dict[str, Any]:
    """`structured_outputs` of a call of one of `functions`, with arguments by its JSON schema."""
    calls = []
    for each in functions:
        schema = checked_schema(each.get("parameters") or {"type": "object", "properties": {}})
        begin = f'{{"name": {json.dumps(each["name"])}, "arguments": '
        calls.append(
            {"type": "tag", "begin": begin, "end": "}", "content": {"type": "json_schema", "json_schema": schema}}
        )
    return {"structural_tag": {"type": "structural_tag", "format": {"type": "or", "elements": calls}}}


def grammar_of(response_format: Any, structured_outputs: Any) -> Grammar | None:
    """Grammar of a request; `None` if it asks for text.

    Args:
        response_format: As in OpenAI's API: `{"type": "json_schema", "json_schema": {"schema": ..., "strict": ...}}`,
            also without the inner level, `{"type": "json_object"}`, or `{"type": "text"}`.
        structured_outputs: As in vLLM, one of `json`, `json_object`, `choice`, `regex`, `grammar` (EBNF), or
            `structural_tag` (xgrammar's).

    Raises:
        ValueError: The form does not exist, is too large, or cannot be applied.
    """
    form: Any = {"type": "text"} if response_format is None else response_format
    kind = form.get("type") if isinstance(form, dict) else None
    inner = form.get("json_schema", form) if kind == "json_schema" else {}
    inner = inner if isinstance(inner, dict) else {}
    forms: Any = {"json_object": {"json_object": True}, "json_schema": {"json": inner.get("schema")}, "text": {}}
    asked = forms.get(str(kind))
    if asked is None:
        raise ValueError(f"`response_format` is {form!r:.80}; its `type` must be text, json_object or json_schema.")
    if structured_outputs is not None:
        if asked or not isinstance(structured_outputs, dict) or len(structured_outputs) != 1:
            raise ValueError(
                f"`structured_outputs` is {structured_outputs!r:.80}; it must have one field, and no `response_format` "
                "or forced call beside it."
            )
        asked = structured_outputs
    if not asked:
        return None
    ((name, value),) = asked.items()
    if name == "json" and isinstance(value, dict | str):
        grammar = Grammar("json_schema", json.dumps(checked_schema(value)), inner.get("strict") is not False)
    elif name == "json_object" and value is True:
        grammar = Grammar("json_schema", '{"type": "object"}', strict=False)
    elif name == "choice" and isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        grammar = Grammar("grammar", "root ::= " + " | ".join(json.dumps(one, ensure_ascii=False) for one in value))
    elif isinstance(value, str if name in ("regex", "grammar") else dict if name == "structural_tag" else ()):
        grammar = Grammar(name, value if isinstance(value, str) else json.dumps(value))
    else:
        raise ValueError(
            f"The form of an answer has `{name!s:.60}`: {value!r:.80}; it must be `json` with a schema, `json_object` "
            "with true, `choice` with a list of texts, or `regex` or `grammar` with a text."
        )
    if len(grammar.text) > LARGEST:
        raise ValueError(f"The grammar has {len(grammar.text):,} characters; at most {LARGEST:,} are read.")
    return grammar


class Grammars:
    """Compiler of the grammars of an engine. Raises `ValueError` if xgrammar is not installed, or does not know the
    tokenizer (or processor) of a model of `vocabulary` tokens."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        try:
            import xgrammar
        except ImportError:
            raise ValueError("Answers in a form need xgrammar: `pip install tq-hf[grammar]`.") from None
        # Masks may allow a token that ends other answers: here it is one that does not exist.
        tokenizer, own = getattr(tokenizer, "tokenizer", tokenizer), dict[str, Any](vocab_size=vocabulary + 1)
        own["stop_token_ids"] = [vocabulary]
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, **own)
        special = frozenset(tokenizer.all_special_ids)  # a token without text is never allowed, but for ends
        texts = [b"" if token in special else bytes(text) for token, text in enumerate(info.decoded_vocab)]
        info = xgrammar.TokenizerInfo(texts, add_prefix_space=info.add_prefix_space, **own)
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_limit_bytes=KEPT_BYTES)
        self.threads = ThreadPoolExecutor(2, "grammars")

    def compile(self, grammar: Grammar) -> Any:
        """Compile a grammar, or return it from those that are kept. Raise `ValueError` if that fails or takes long."""
        more: Any = {"strict_mode": grammar.strict, "max_whitespace_cnt": WHITESPACE}
        compile = getattr(self.compiler, f"compile_{grammar.kind}")
        done = self.threads.submit(compile, grammar.text, **(more if grammar.kind == "json_schema" else {}))
        try:
            return done.result(COMPILE_SECONDS)
        except Late:
            done.cancel()
            raise ValueError(f"The grammar is not compiled within {COMPILE_SECONDS:g} s. Make it smaller.") from None
        except Exception as error:
            why = re.sub(r"^\[.*?\] \S+: |Check failed: \(.*?\) is false: ", "", str(error).strip())
            raise ValueError(f"xgrammar refuses the form of the answer: {why[:200]}") from error


class Matching:
    """Place of an answer in its grammar, on the host. Forks of a request begin anew. `ends` are the tokens that end the
    answer, which are allowed only where the grammar accepts."""

    def __init__(self, compiled: Any, ends: tuple[int, ...]) -> None:
        import xgrammar

        self.matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(ends))
        self.tokens: list[int] = []

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def write(self, tokens: list[int], masks: torch.Tensor, row: int) -> None:
        """Write the mask of the token after `tokens` to a row of `masks`, `[N, 1 + vocabulary // 32]` int32.

        Raises:
            ValueError: A token does not fit the grammar, no token can follow, or the mask takes too long.
        """
        began = time.thread_time()
        assert tokens[: len(self.tokens)] == self.tokens
        new = tokens[len(self.tokens) :]
        if not all(map(self.matcher.accept_token, new)):
            raise ValueError("A token of the answer does not fit its grammar.")
        self.tokens = tokens[:]
        if self.matcher.is_terminated():
            return  # an asynchronous step for an answer that has ended
        self.matcher.fill_next_token_bitmask(masks, row)
        if not masks[row].any():
            raise ValueError("The grammar goes on with a text that no token of the model begins.")
        if time.thread_time() - began > MASK_SECONDS * (1 + len(new)):
            raise ValueError(f"The grammar is ambiguous: a mask of tokens takes more than {MASK_SECONDS:g} s.")
