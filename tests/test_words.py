"""Docstrings, comments and error messages of both packages begin with an imperative or a noun, in the field's words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.test_packaging import KERNELS, ROOT

FIRST = re.compile(r"(?:^|[.!?:]\s+|\n\s*\n\s*)(?:Of|What|Whose|Whoever|Those|So many|Such|Likewise)\b")
"""Words that no sentence begins with."""
ANYWHERE = re.compile(
    r"\b(?:nobody|whoever|so many|of which|his|foretold|foretells?|obeys?|heeds?|heeded|(?<!no )such(?! as\b))\b",
    re.IGNORECASE,
)
"""Words that no sentence contains. "Such as" introduces an example, and "no such file" is common."""
CLAUSE = re.compile(r"[.,;:!?]+(?=\s|$)|[()\[\]]| -> |\n\s*\n")
"""What ends a clause. No clause has more than two "of"."""


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes, functions and constants, error messages (arguments of exceptions, of `refuse`),
    and comments, each with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
        call = node.exc if isinstance(node, ast.Raise) else node
        refuses = isinstance(node, ast.Raise) or getattr(getattr(node, "func", None), "id", None) == "refuse"
        if refuses and isinstance(call, ast.Call):
            for part in call.args:
                pieces = part.values if isinstance(part, ast.JoinedStr) else [part]
                yield part.lineno, "".join(str(p.value) if isinstance(p, ast.Constant) else "X" for p in pieces)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.removeprefix("#").strip()


def wrong(source: str) -> list[str]:
    """Lines with a sentence that begins with a word of `FIRST` or contains a word of `ANYWHERE`, and clauses with more
    than two "of"."""
    found = [(line, text) for line, text in texts(source) if FIRST.search(text) or ANYWHERE.search(text)]
    clauses = ((line, clause) for line, text in texts(source) for clause in CLAUSE.split(text))
    found += [(line, clause) for line, clause in clauses if len(re.findall(r"\bof\b", clause, re.IGNORECASE)) > 2]
    return [f"{line}: {' '.join(text.split())[:90]}" for line, text in found]


def sources(package: str) -> dict[str, str]:
    """Source by path in a package."""
    folder = {"tq_hf": ROOT / "tq_hf", "tq_kernels": KERNELS}[package]
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}


@pytest.mark.parametrize("package, least", [("tq_hf", 1000), ("tq_kernels", 950)])
def test_sentences_begin_with_an_imperative_or_a_noun(package: str, least: int) -> None:
    files = sources(package)
    assert sum(len(list(texts(source))) for source in files.values()) > least
    found = {name: wrong(source) for name, source in files.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        '"""Of keys, the channels."""',
        '"""The keys. What is held stays."""',
        '"""Args:\n        states: Likewise."""',
        "def f():\n    '''Raise unless so many tokens fit.'''",
        "x = 1  # a page of nobody",
        "N = 1\n'''Pages of requests, some of which end.'''",
        "raise ValueError(f'{x} is short. Those are refused.')",
        "y = 2  # for such keys",
        '"""Peak bytes of a layer per request of a step of one token."""',
        'def f():\n    """Returns:\n        Copies of the arguments of a step\n        of many requests."""',
        "z = 3  # (of one), the rows of the ring of a request of the batch",
    ],
)
def test_sentences_to_translate_are_found(source: str) -> None:
    assert len(wrong(source)) == 1


def test_plain_sentences_pass() -> None:
    assert wrong('"""Number of tokens, such as 128. This file is history."""\nx = 1  # read those pages\n') == []
    assert wrong('"""Bytes of a page of keys: of 1.5 of the pages, of those of all."""') == []
