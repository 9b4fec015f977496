"""Make the pages of the documentation's site from what the repository has; `make docs` builds the site from them.

    python docs/site.py FOLDER

README.md is the first page. Each row of its table "Which way do I take?" has a page, with the sections and notebooks
that the row names; each section of the results has one, and the API comes from docstrings. `mkdocs.yml` beside this
file says how pages look. Nothing that is made here is committed.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "https://github.com/tq-hf/tq_hf/blob/main/"
README, EXAMPLES, RESULTS = "README.md", "examples/README.md", "examples/results/README.md"
LINK = re.compile(r'(\]\(|src=")((?!https?:|data:)[^)"\s]*)([)"])')


class Row(NamedTuple):
    """A row of "Which way do I take?"."""

    title: str
    call: str
    targets: list[str]
    """Paths in the repository, some with "#" and an anchor."""


def slug(title: str) -> str:
    """Anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def sections(path: str) -> tuple[str, dict[str, str]]:
    """The head of a page, and its sections of the second level by title."""
    head, *parts = re.split(r"^## ", read(path), flags=re.MULTILINE)
    return head, {title: body for title, _, body in (part.partition("\n") for part in parts)}


def rows() -> list[Row]:
    """The rows of README's table."""
    table = sections(README)[1]["Which way do I take?"]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")][2:]
    return [Row(title, call, re.findall(r"\]\(([^)]+)\)", more)) for title, call, more in cells]


def notebook(path: str) -> str:
    """The cells of a notebook: text, code and what it printed."""
    parts = []
    for cell in json.loads(read(path))["cells"]:
        text = "".join(cell["source"])
        parts.append(re.sub(r"^(#+ )", r"#\1", text, flags=re.M) if cell["cell_type"] == "markdown" else fenced(text))
        printed = "".join("".join(output.get("text", [])) for output in cell.get("outputs", []))
        parts += [fenced(printed, "text")] if printed else []
    return "\n\n".join(parts)


def fenced(text: str, language: str = "python") -> str:
    return f"````{language}\n{text.rstrip()}\n````"


def parts_of_pages() -> Iterator[tuple[str, str, str, str]]:
    """Yield what pages consist of: the page, the file that a part is from, the part's anchor there, and the part."""
    yield "index.md", README, "", read(README)
    yield from (("index.md", README, slug(title), "") for title in sections(README)[1])
    head, guides = sections(EXAMPLES)
    by_anchor, shown = {slug(title): title for title in guides}, set()
    for row in rows():
        page = f"ways/{slug(row.title)}.md"
        yield page, README, "", f"# {row.title[0].upper()}{row.title[1:]}\n\nCall: {row.call}.\n"
        for target in row.targets:
            path, _, anchor = target.partition("#")
            if path == EXAMPLES:
                shown.add(anchor)
                yield page, path, anchor, f"## {by_anchor[anchor]}\n{guides[by_anchor[anchor]]}"
            elif path.endswith(".ipynb"):
                yield page, path, "", notebook(path)
            else:
                yield page, README, "", f"More: [{anchor.replace('-', ' ')}]({target}).\n"
    yield "examples.md", EXAMPLES, "", head
    for anchor, title in by_anchor.items():
        if anchor not in shown:
            yield "examples.md", EXAMPLES, anchor, f"## {title}\n{guides[title]}"
    head, results = sections(RESULTS)
    yield "results/index.md", RESULTS, "", head
    for title, body in results.items():
        page = f"results/{slug(title)}.md"
        yield page, RESULTS, slug(title), f"# {title}\n{body}"
        yield from ((page, RESULTS, slug(part), "") for part in re.findall(r"^###+ (.+)$", body, flags=re.MULTILINE))
    yield "families.md", "examples/results/families.md", "", read("examples/results/families.md")
    yield "changelog.md", "CHANGELOG.md", "", read("CHANGELOG.md")
    yield "contributing.md", "CONTRIBUTING.md", "", read("CONTRIBUTING.md")
    yield "api.md", "tq_hf/__init__.py", "", api()


def api() -> str:
    """A directive for each public name."""
    tree = ast.parse(read("tq_hf/__init__.py"))
    places = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }["_PLACES"]
    return "# API\n\n" + "\n".join(
        f"::: {module}.{name}\n" for module, names in ast.literal_eval(places).items() for name in names.split()
    )


def pages() -> dict[str, str]:
    """The text of each page, with links to pages of the site, pictures, or files of the repository."""
    parts = list(parts_of_pages())
    homes: dict[tuple[str, str], str] = {}
    for page, path, anchor, _ in parts:
        homes.setdefault((path, anchor), page)
    found: dict[str, str] = {}
    for page, path, _, text in parts:

        def link(match: re.Match[str], page: str = page, path: str = path) -> str:
            target, _, anchor = match[2].partition("#")
            target = os.path.normpath(os.path.join(os.path.dirname(path), target)) if target else path
            home = homes.get((target, anchor))
            if target.endswith(".svg"):
                home = f"pictures/{os.path.basename(target)}"
            if home is None:
                return f"{match[1]}{SOURCE}{target}{'#' if anchor else ''}{anchor}{match[3]}"
            there = os.path.relpath(home, os.path.dirname(page) or ".")
            is_title = home.startswith("results/") and slug(anchor) == home[8:-3]
            return f"{match[1]}{there}{'#' + anchor if anchor and not is_title else ''}{match[3]}"

        found[page] = found.get(page, "") + LINK.sub(link, text) + ("\n" if text else "")
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    for page, text in pages().items():
        path = folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    shutil.copytree(ROOT / "examples" / "results", folder / "pictures", ignore=shutil.ignore_patterns("*.json", "*.md"))


if __name__ == "__main__":
    main()
