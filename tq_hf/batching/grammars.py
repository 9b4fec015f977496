"""Grammars of answers, by xgrammar: a JSON schema, a regular expression, choices or EBNF becomes masks of tokens.

`grammar_of` reads what a request asks for. `Grammars` compiles it, in a thread and within limits. A `Matching` follows
an answer on the host and writes which tokens may come next. `BatchOptions` applies these masks on the device.
"""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field
from typing import Any

import torch

LARGEST, DEEPEST = 65_536, 64
"""Characters of a grammar, and levels of a schema. A schema of 2,000 optional fields takes 20 s to compile."""
COMPILE_SECONDS = 10.0
"""Seconds that a request waits for its grammar to be compiled."""
MASK_SECONDS = 0.1
"""CPU time of a mask. Most take 0.05 ms, and those of `root ::= root root | "a"` more with each token."""
KEPT_BYTES = 2**28
"""Bytes of compiled grammars that are kept. The one that was not used for longest goes first."""
WHITESPACE = 20
"""Most characters of whitespace between two parts of JSON. Without a limit, some answers never end."""
SCHEMAS = frozenset("properties patternProperties $defs definitions".split())
"""Keywords of a schema that hold schemas by name."""
REFUSED = frozenset(
    "not if then else dependentRequired dependentSchemas dependencies uniqueItems contains minContains maxContains "
    "unevaluatedItems unevaluatedProperties propertyNames $dynamicRef $recursiveRef".split()
)
"""Keywords that xgrammar ignores, or applies in part."""
CHOICES = ("$ref", "anyOf", "oneOf", "allOf")
"""Keywords that xgrammar applies alone: it ignores those of `LIMITS` beside them."""
LIMITS = frozenset(
    "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength maxLength pattern format".split()
)
"""Keywords that xgrammar ignores without a `type`."""
OF_CONTAINERS = frozenset("properties required additionalProperties patternProperties items prefixItems".split())
FORMATS = frozenset(
    "email date time date-time duration ipv4 ipv6 hostname uuid uri uri-reference uri-template json-pointer "
    "relative-json-pointer".split()
)
"""Formats of texts that xgrammar applies."""


@dataclass(frozen=True)
class Grammar:
    """Form of an answer: `kind` is a method of xgrammar's compiler, and `text` is its argument."""

    kind: str
    text: str
    strict: bool = True
    """Whether objects have no properties but those that a JSON schema names."""
    compiled: Any = field(default=None, compare=False, repr=False)


def check_schema(schema: Any) -> None:
    """Raise `ValueError` if a JSON schema is too deep, or has a keyword that xgrammar would ignore."""
    left = [(schema, 1)]
    while left:
        each, depth = left.pop()
        if depth > DEEPEST:
            raise ValueError(f"The JSON schema has more than {DEEPEST} levels. Use `$ref`, or leave levels out.")
        if isinstance(each, list):
            left += [(one, depth + 1) for one in each]
        if not isinstance(each, dict):
            continue
        names, kind = each.keys(), each.get("type")
        wrong, why = names & REFUSED, "which is not applied"
        if (alone := names & set(CHOICES)) and not wrong:
            wrong, why = names & (LIMITS | OF_CONTAINERS), f"which is not applied beside `{min(alone)}`"
        if not wrong and kind is None and not {"enum", "const"} & names:
            wrong, why = names & LIMITS, "which is not applied without `type`"
        if not wrong and {"pattern", "format"} & names:
            wrong, why = names & {"minLength", "maxLength"}, "which is not applied beside `pattern` or `format`"
        if not wrong and (each.get("format") or "date") not in FORMATS:
            wrong, why = {"format"}, f"which must be one of {', '.join(sorted(FORMATS))}"
        if not wrong and "multipleOf" in names and kind != "integer":
            wrong, why = {"multipleOf"}, "which is applied to integers only"
        if not wrong and isinstance(all_of := each.get("allOf"), list) and len(all_of) > 1:
            wrong, why = {"allOf"}, "of which one part only is applied"
        if not wrong and not str(each.get("$ref", "#")).startswith("#"):
            wrong, why = {"$ref"}, "which must begin with `#`"
        if not wrong and isinstance(required := each.get("required"), list):
            if absent := [name for name in required if name not in (each.get("properties") or {})]:
                wrong, why = {"required"}, f"and its `properties` lack {str(absent[0])!r:.60}"
        if wrong:
            raise ValueError(f"The JSON schema has `{min(wrong)}`, {why}. Change it, or leave it out.")
        for name, value in each.items():
            if name in SCHEMAS and isinstance(value, dict):
                left += [(one, depth + 1) for one in value.values()]
            elif name not in ("enum", "const", "default", "examples", *SCHEMAS):
                left.append((value, depth + 1))


def schema_grammar(schema: Any, strict: Any = None) -> Grammar:
    """Grammar of a JSON schema, an object or a text. Raise `ValueError` if it cannot be applied."""
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        check_schema(schema)
        return Grammar("json_schema", json.dumps(schema), strict is not False)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"The JSON schema cannot be read: {error!s:.200}.") from None


def calls_grammar(functions: list[dict[str, Any]], around: tuple[str, str] | None = None) -> dict[str, Any]:
    """`structured_outputs` of a call of one of `functions`, with arguments by their schemas. With `around`, the answer
    is text that may have calls between these marks."""
    marks = around or ("", "")
    tags = []
    for each in functions:
        schema = {"type": "object", "properties": {}} if each.get("parameters") is None else each["parameters"]
        check_schema(schema)
        begin = f'{marks[0]}{{"name": {json.dumps(each["name"])}, "arguments": '
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": begin, "content": content, "end": "}" + marks[1]})
    form: dict[str, Any] = {"type": "or", "elements": tags}
    if around:
        form = {"type": "triggered_tags", "triggers": [marks[0].strip()], "tags": tags}
    return {"structural_tag": {"type": "structural_tag", "format": form}}


def grammar_of(response_format: Any, structured_outputs: Any) -> Grammar | None:
    """Grammar of a request; `None` if it asks for text.

    Args:
        response_format: As in OpenAI's API: `{"type": "json_schema", "json_schema": {"schema": ..., "strict": ...}}`,
            also without the inner level, `{"type": "json_object"}`, or `{"type": "text"}`.
        structured_outputs: As in vLLM: one of `json`, `regex`, `choice`, `grammar` (EBNF), `json_object`,
            `structural_tag` (xgrammar's).

    Raises:
        ValueError: The form does not exist, is too large, or cannot be applied.
    """
    form = {"type": "text"} if response_format is None else response_format
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_schema" and isinstance(inner := form.get("json_schema", form), dict) and "schema" in inner:
        structured = {"json": inner["schema"]}
    elif kind in ("json_object", "text"):
        structured = {"json_object": True} if kind == "json_object" else {}
    else:
        raise ValueError(
            f"`response_format` is {form!r:.80}; its `type` must be text, json_object, or json_schema with a `schema`."
        )
    if structured_outputs is not None:
        if structured or not isinstance(structured_outputs, dict) or len(structured_outputs) != 1:
            raise ValueError(
                f"`structured_outputs` is {structured_outputs!r:.80}; it must be an object with one field, and without "
                "`response_format`."
            )
        structured, inner = structured_outputs, {}
    if not structured:
        return None
    ((name, value),) = structured.items()
    if name == "json" and isinstance(value, (dict, str, bool)):
        grammar = schema_grammar(value, inner.get("strict"))
    elif name == "json_object" and value is True:
        grammar = schema_grammar({"type": "object"}, False)
    elif name in ("regex", "grammar") and isinstance(value, str):
        grammar = Grammar(name, value)
    elif name == "choice" and isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        grammar = Grammar("grammar", "root ::= " + " | ".join(json.dumps(one, ensure_ascii=False) for one in value))
    elif name == "structural_tag" and isinstance(value, dict):
        grammar = Grammar(name, json.dumps(value))
    else:
        raise ValueError(
            f"`structured_outputs` has `{name!s:.60}`: {value!r:.80}; it must be `json` with a schema, `json_object` "
            "with true, `choice` with a list of texts, or `regex` or `grammar` with a text."
        )
    if len(grammar.text) > LARGEST:
        raise ValueError(f"The grammar has {len(grammar.text):,} characters; at most {LARGEST:,} are read.")
    return grammar


class Grammars:
    """Compiler of the grammars of an engine.

    Args:
        tokenizer: Tokenizer of the model, or a processor with one.
        vocabulary: Number of tokens of the model.

    Raises:
        ValueError: xgrammar is not installed, or does not know the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        try:
            import xgrammar
        except ImportError:
            raise ValueError("Grammars need xgrammar, which is not installed: `pip install tq-hf[grammar]`.") from None
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary, stop_token_ids=[0])
        except Exception as error:
            raise ValueError(f"xgrammar cannot read this tokenizer: {reason(error)}") from error
        texts = [bytes(each) for each in info.decoded_vocab]
        for token in tokenizer.all_special_ids:  # no text of an answer
            texts[token : token + 1] = [b""][: token < len(texts)]
        more: Any = dict(vocab_size=vocabulary, stop_token_ids=[0], add_prefix_space=info.add_prefix_space)
        info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, **more)
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_limit_bytes=KEPT_BYTES)
        self._turns = threading.BoundedSemaphore(2)

    def compile(self, grammar: Grammar) -> Any:
        """Compile a grammar, or return it from those that are kept. Raise `ValueError` if it is wrong or too large."""
        late = f"The grammar is not compiled within {COMPILE_SECONDS:g} s. Make it smaller."
        if not self._turns.acquire(timeout=COMPILE_SECONDS):
            raise ValueError(late)
        done: Future[Any] = Future()

        def run() -> None:
            try:
                more: dict[str, Any] = {}
                if grammar.kind == "json_schema":
                    more = {"strict_mode": grammar.strict, "max_whitespace_cnt": WHITESPACE}
                done.set_result(getattr(self.compiler, f"compile_{grammar.kind}")(grammar.text, **more))
            except BaseException as error:
                done.set_exception(error)
            finally:
                self._turns.release()

        threading.Thread(target=run, name="tq_hf grammar", daemon=True).start()
        try:
            return done.result(COMPILE_SECONDS)
        except Late:
            raise ValueError(late) from None
        except Exception as error:
            raise ValueError(f"xgrammar refuses the grammar: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Text of an error of xgrammar, without its place in the source, shortened."""
    return re.sub(r"^\[.*?\] \S+: |Check failed: \(.*?\) is false: ", "", str(error).strip())[:200]


class Matching:
    """Place of an answer in its grammar. Requests hold it, and forks of a request begin anew.

    Args:
        compiled: The grammar, as `Grammars.compile` returns it.
        ends: Tokens that end the answer: allowed where the grammar accepts, and nowhere else.
    """

    def __init__(self, compiled: Any, ends: tuple[int, ...]) -> None:
        import xgrammar

        self.matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(ends))
        self.tokens: list[int] = []

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def write(self, tokens: list[int], masks: torch.Tensor, row: int) -> None:
        """Write the mask of the token after `tokens` to a row of `masks`, `[N, ceil(vocabulary / 32)]` int32.

        Raises:
            ValueError: A token does not fit the grammar, no token can follow, or the mask takes too long.
        """
        began = time.thread_time()
        if tokens[: len(self.tokens)] != self.tokens:  # a preempted request lost its last token
            self.matcher.reset()
            self.tokens = []
        new = tokens[len(self.tokens) :]
        for token in new:
            if not self.matcher.accept_token(token):
                raise ValueError(f"The token {token} of the answer does not fit its grammar.")
        self.tokens += new
        if self.matcher.is_terminated():
            return  # an asynchronous step for an answer that has ended
        self.matcher.fill_next_token_bitmask(masks, row)
        if not masks[row].any():
            raise ValueError("The grammar goes on with a text that no token of the model begins.")
        if time.thread_time() - began > MASK_SECONDS * (1 + len(new)):
            raise ValueError(f"The grammar is ambiguous: a mask of tokens takes more than {MASK_SECONDS:g} s.")
