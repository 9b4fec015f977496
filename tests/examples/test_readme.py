"""README.md says what the package and the committed results say."""

from __future__ import annotations

import ast
import re

import make_tables
from tiny_models import CONFIGS

TEXT = make_tables.README.read_text(encoding="utf-8")


def test_tables_are_those_of_the_results_files() -> None:
    assert make_tables.updated(TEXT) == TEXT, "run `make tables`"


def test_every_results_file_has_its_table() -> None:
    shown = [path for _, name, _ in make_tables.SECTION.findall(TEXT) for path in make_tables.files_of(name)]
    assert sorted(shown) == sorted(make_tables.RESULTS.glob("*.json")), "each in one table"


def test_links_into_the_repository_exist() -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", TEXT) + re.findall(r'src="(?!https?:)([^"]+)"', TEXT)
    assert any(link.endswith(".svg") for link in links)
    assert [link for link in links if not (make_tables.ROOT / link).exists()] == []


def test_python_examples_parse() -> None:
    examples = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert examples
    for example in examples:
        ast.parse(example)


def test_every_architecture_that_is_tested_is_listed() -> None:
    (rows,) = re.findall(r"\| architecture \|.*?\n\n", TEXT, flags=re.DOTALL)
    names = [name for line in rows.strip().splitlines()[2:] for name in line.split("|")[1].split(",")]
    assert sorted(re.sub(r"\W", "", name).lower() for name in names) == sorted(n.replace("_", "") for n in CONFIGS)
