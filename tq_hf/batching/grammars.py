"""Grammars of answers, by xgrammar: `grammar_of` reads what a request asks for, and `Grammars` compiles it. On the host
a `Matching` follows an answer and writes masks of the tokens that may come next, which `BatchOptions` applies."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import BoundedSemaphore
from typing import Any

import torch

LARGEST, DEEPEST, COMPILE_SECONDS, MASK_SECONDS, KEPT_BYTES, WHITESPACE = 65_536, 64, 10.0, 0.1, 2**28, 20
"""Characters of a grammar, levels of a schema, seconds to compile (2,000 optional properties take 20), CPU time of a
mask (most take 0.05 ms), bytes of compiled grammars that are kept, and most characters of whitespace between two parts
of JSON: without a limit, some answers never end."""
BY_NAME = frozenset("properties patternProperties $defs definitions".split())
IGNORED = frozenset(
    "not if then else dependentRequired dependentSchemas dependencies uniqueItems contains minContains maxContains "
    "unevaluatedItems unevaluatedProperties propertyNames multipleOf allOf $dynamicRef $recursiveRef".split()
)
"""Keywords of a JSON schema that xgrammar ignores, or applies in part."""
ALONE, LENGTHS = {"$ref", "anyOf", "oneOf"}, {"minLength", "maxLength"}
TYPED = LENGTHS | set("minimum maximum exclusiveMinimum exclusiveMaximum pattern format".split())
"""Keywords that xgrammar ignores without a `type`, or beside one of `ALONE`."""


@dataclass(frozen=True)
class Grammar:
    """Form of an answer: `kind` names a method of xgrammar's compiler, and `text` is its argument."""

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
        names, known, required = each.keys(), each.get("properties", {}), each.get("required", [])
        lacks = isinstance(known, dict) and isinstance(required, list) and {*map(str, required)} - known.keys()
        faults: list[tuple[Any, str]] = [
            (names & IGNORED, "is not applied"),
            (names & ALONE and names & (TYPED | {"properties", "items"}), "stands beside `$ref`, `anyOf` or `oneOf`"),
            (not {"type", "enum", "const"} & names and names & TYPED, "has no `type` beside it"),
            ({"pattern", "format"} & names and names & LENGTHS, "stands beside a pattern or format"),
            (not str(each.get("$ref", "#")).startswith("#") and {"$ref"}, "does not begin with `#`"),
            (lacks and {"required"}, "names what `properties` lack"),
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
    """`structured_outputs` for a call to one of `functions`, with arguments by its JSON schema."""
    calls = []
    for each in functions:
        schema = each.get("parameters") or {"type": "object", "properties": {}}
        content = {"type": "json_schema", "json_schema": schema}
        begin = f'{{"name": {json.dumps(each["name"])}, "arguments": '
        calls.append({"type": "tag", "begin": begin, "content": content, "end": "}"})
    return {"structural_tag": {"type": "structural_tag", "format": {"type": "or", "elements": calls}}}


def grammar_of(response_format: Any, structured_outputs: Any) -> Grammar | None:
    """Grammar of a request, `None` for text. Raise `ValueError` unless `response_format` is as in OpenAI's API, or
    `structured_outputs` is as in vLLM's, and can be applied."""
    form: Any = {"type": "text"} if response_format is None else response_format
    kind: Any = form.get("type") if isinstance(form, dict) else None
    if kind == "text" and structured_outputs is None:
        return None
    inner = nested if kind == "json_schema" and isinstance(nested := form.get(kind), dict) else form  # of responses
    asked: Any = {"json": inner.get("schema")} if kind == "json_schema" else {"json_object": kind == "json_object"}
    if structured_outputs is not None:
        asked = structured_outputs if kind == "text" and isinstance(structured_outputs, dict) else {}
    name, value = next(iter(asked.items())) if len(asked) == 1 else (None, None)
    if name == "json" and isinstance(value, dict | str):
        grammar = Grammar("json_schema", json.dumps(checked_schema(value)), inner.get("strict") is not False)
    elif name == "json_object" and value is True:
        grammar = Grammar("json_schema", '{"type": "object"}', strict=False)
    elif name == "choice" and isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        grammar = Grammar("grammar", "root ::= " + " | ".join(json.dumps(each, ensure_ascii=False) for each in value))
    elif name == "structural_tag":
        grammar = Grammar(name, json.dumps(checked_schema(value)))
    elif name in ("regex", "grammar") and isinstance(value, str):
        grammar = Grammar(name, value)
    else:
        raise ValueError(
            f"The form of the answer is {structured_outputs or form!r:.99}. It must be a `response_format` of `type` "
            "text, json_object or json_schema (with a `schema`); or, without that and without a forced call, "
            "`structured_outputs` with one of json, json_object, choice, regex, grammar."
        )
    if len(grammar.text) > LARGEST:
        raise ValueError(f"The grammar has {len(grammar.text):,} characters; at most {LARGEST:,} are read.")
    return grammar


class Grammars:
    """Compiler of the grammars of an engine, for a tokenizer or processor (or `None`), the number of tokens of the
    model, and the number of processes that share it."""

    def __init__(self, tokenizer: Any, vocabulary: int, processes: int = 1) -> None:
        self.tokenizer, self.vocabulary = getattr(tokenizer, "tokenizer", tokenizer), vocabulary
        self.processes, self.threads, self._turns = processes, ThreadPoolExecutor(2, "grammars"), BoundedSemaphore(2)

    @cached_property
    def compiler(self) -> Any:
        if self.tokenizer is None:
            raise ValueError(
                "Answers in a form need a tokenizer. Say `TurboQuantBatching(model, tokenizer=tokenizer)`."
            )
        try:
            import xgrammar
        except ImportError:
            raise ValueError("Answers in a form need xgrammar: `pip install tq-hf[grammar]`.") from None
        # Masks may allow a token that ends other answers: here it is one that does not exist.
        own: Any = dict(vocab_size=self.vocabulary + 1, stop_token_ids=[self.vocabulary])
        info = xgrammar.TokenizerInfo.from_huggingface(self.tokenizer, **own)
        special = frozenset(self.tokenizer.all_special_ids)  # a token without text is never allowed, but for ends
        texts = [b"" if token in special else bytes(text) for token, text in enumerate(info.decoded_vocab)]
        info = xgrammar.TokenizerInfo(texts, add_prefix_space=info.add_prefix_space, **own)
        return xgrammar.GrammarCompiler(info, max_threads=2, cache_limit_bytes=KEPT_BYTES)

    def compiled(self, options: Any) -> Any:
        """Copy options of a request, with the grammar compiled now or before. Raise `ValueError` if that takes long."""
        grammar, compiler = options.grammar, self.compiler
        if self.processes > 1:  # they would have to agree about masks that take too long
            raise ValueError("Answers in a form are generated by one process, and several share this model.")
        if not self._turns.acquire(timeout=COMPILE_SECONDS / 10):
            raise ValueError("Other requests have large grammars compiled. Try again later.")
        more: Any = {"strict_mode": grammar.strict, "max_whitespace_cnt": WHITESPACE}
        more, compile = more if grammar.kind == "json_schema" else {}, getattr(compiler, f"compile_{grammar.kind}")
        done = self.threads.submit(compile, grammar.text, **more)
        done.add_done_callback(lambda _: self._turns.release())
        if not wait([done], COMPILE_SECONDS).done:
            raise ValueError(f"The grammar is not compiled within {COMPILE_SECONDS:g} s. Make it smaller.")
        if error := done.exception():
            why = re.sub(r"^\[.*?\] \S+: |Check failed: \(.*?\) is false: ", "", str(error).strip())
            raise ValueError(f"xgrammar refuses the form of the answer: {why[:200]}") from error
        return replace(options, grammar=replace(grammar, compiled=done.result()))


class Matching:
    """Place of an answer in its grammar. `ends` are allowed only where the grammar accepts. Forks begin anew."""

    def __init__(self, compiled: Any, ends: tuple[int, ...]) -> None:
        import xgrammar

        self.matcher, self.number = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(ends)), 0
        """The matcher, and the number of tokens that it has read."""

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def read(self, new: list[int]) -> bool:
        """Read the next tokens. Returns whether another one can follow. Raise `ValueError` if one does not fit."""
        began, self.seconds = time.thread_time(), MASK_SECONDS * (1 + len(new))
        if not all(map(self.matcher.accept_token, new)):
            raise ValueError("A token of the answer does not fit its grammar.")
        self.number += len(new)
        self.seconds -= time.thread_time() - began
        return not self.matcher.is_terminated()

    def write(self, masks: torch.Tensor, row: int) -> None:
        """Write the mask of the next token to a row of `masks`, `[N, 1 + vocabulary // 32]` int32: threads may write
        rows of others meanwhile. Raise `ValueError` if that takes too long."""
        began = time.thread_time()
        self.matcher.fill_next_token_bitmask(masks, row)
        if time.thread_time() - began > self.seconds:
            raise ValueError(f"The grammar is ambiguous: a mask of tokens takes more than {MASK_SECONDS:g} s.")
