"""Write the tables of the pages anew from the package and the results files.

    python -m examples.measure.report.make_tables            # rewrite
    python -m examples.measure.report.make_tables --check    # exit with an error if a page is out of date

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`. NAME is one of `glance.py`'s tables, or a pattern of
names of results files without their ending, e.g. `kernels-*`; their beginning says how they are shown (`tables.py`).
`make tables` also draws the pictures (`plots.py`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from examples.measure.report.glance import TABLES
from examples.measure.report.tables import RENDERERS
from examples.provenance import RESULTS, ROOT

README = ROOT / "README.md"
PAGES = (README, ROOT / "examples" / "README.md", RESULTS / "README.md")
SECTION = re.compile(r"(<!-- table:(\S+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def files_of(name: str) -> list[Path]:
    """The results files that the table called `name` shows."""
    return sorted(RESULTS.glob(f"{name}.json"))


def kind_of(path: Path) -> str:
    """The part of a results file's name that says what was measured."""
    return next(kind for kind in RENDERERS if path.stem == kind or path.stem.startswith(f"{kind}-"))


def render(name: str) -> str:
    """The Markdown of the table called `name`."""
    if name in TABLES:
        return TABLES[name]()
    texts = [RENDERERS[kind_of(path)](json.loads(path.read_text(encoding="utf-8"))) for path in files_of(name)]
    return "\n".join(texts) or "Not measured yet.\n"


def updated(text: str) -> str:
    """`text` with every marked table written anew."""
    return SECTION.sub(lambda match: f"{match[1]}\n{render(match[2])}\n{match[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is out of date")
    check: bool = parser.parse_args().check
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fresh = updated(text)
        if check and fresh != text:
            sys.exit(f"{page.relative_to(ROOT)} is out of date: run `make tables`.")
        if not check:
            page.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
