"""Write the tables of README.md anew from the package and from the files in `examples/results`.

    python examples/measure/make_tables.py            # rewrite
    python examples/measure/make_tables.py --check    # exit with an error if README.md is out of date

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`. NAME is `presets`, `pictures`, or a pattern of names
of results files without their ending, e.g. `kernels-*`; their beginning says how they are shown (see `tables.py`).
`make tables` also draws the pictures (`plots.py`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from report import RESULTS, ROOT
from tables import RENDERERS, presets

README = ROOT / "README.md"
SECTION = re.compile(r"(<!-- table:(\S+) -->\n).*?(<!-- /table -->)", re.DOTALL)


PICTURES = {
    "memory": "KV cache in GiB by context, for DynamicCache and presets",
    "decode": "Milliseconds of a decode step by context, for transformers' caches and presets",
    "kernels": "How many times as fast as bf16 attention decode attention is, by batch and context",
    "quality": "KL from the full cache by bytes, for presets and what they are compared with",
}
"""Pictures of `plots.py` and what to say to those who cannot see them."""


def pictures() -> str:
    """The pictures that are drawn, two in a row; that of quality has a panel for each model."""
    shown = [name for name in PICTURES if (RESULTS / f"{name}.svg").exists()]
    tag = '<img src="examples/results/{}.svg" width="{}" alt="{}">'.format
    return "\n".join(tag(name, "98%" if name == "quality" else "49%", PICTURES[name]) for name in shown) + "\n"


def files_of(name: str) -> list[Path]:
    """The results files that the table called `name` shows."""
    return sorted(RESULTS.glob(f"{name}.json"))


def render(name: str) -> str:
    """The Markdown of the table called `name`."""
    if name in ("presets", "pictures"):
        return presets() if name == "presets" else pictures()
    texts = []
    for path in files_of(name):
        record = json.loads(path.read_text(encoding="utf-8"))
        texts.append(next(show for kind, show in RENDERERS.items() if path.stem.startswith(f"{kind}-"))(record))
    return "\n".join(texts) or "Not measured yet.\n"


def updated(text: str) -> str:
    """`text` with every marked table written anew."""
    return SECTION.sub(lambda match: f"{match[1]}\n{render(match[2])}\n{match[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is out of date")
    check: bool = parser.parse_args().check
    text = README.read_text(encoding="utf-8")
    fresh = updated(text)
    if check and fresh != text:
        sys.exit("README.md is out of date: run `python examples/measure/make_tables.py`.")
    if not check:
        README.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
