"""Docstrings and comments of kernels are sentences that need no translation: imperative or noun first."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.test_packaging import KERNELS

FIRST = re.compile(r"(?:^|[.!?]\s+|\n\s*\n\s*)(?:Of|What|Whose|Whoever|Those who|So many|Such)\b")
"""Words that no sentence begins with."""
ANYWHERE = re.compile(r"\b(?:nobody|whoever|so many|of which|his)\b", re.IGNORECASE)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes, functions and constants, and comments, with their lines."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.removeprefix("#").strip()


def test_sentences_begin_with_an_imperative_or_a_noun() -> None:
    found = [(path, line, text) for path in KERNELS.rglob("*.py") for line, text in texts(path)]
    assert len(found) > 1000
    wrong = [f"{path.name}:{line}: {text[:90]}" for path, line, text in found if FIRST.search(text)]
    wrong += [f"{path.name}:{line}: {text[:90]}" for path, line, text in found if ANYWHERE.search(text)]
    assert wrong == []
