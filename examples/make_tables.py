"""Write the tables of README.md anew from the package and from the files in `examples/results`.

    python examples/make_tables.py            # rewrite
    python examples/make_tables.py --check    # exit with an error if README.md is out of date

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`. NAME is `presets`, or a results file without its
ending; the part before the first hyphen says how to render it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any

from report import BASELINE, RESULTS, ROOT

from tq_hf import PRESETS

README = ROOT / "README.md"
SECTION = re.compile(r"(<!-- table:(\S+) -->\n).*?(<!-- /table -->)", re.DOTALL)
HEAD_DIM = 128
MIB = 2**20


def table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right."""
    lines = [headings, ["---", *("---:" for _ in headings[1:])], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def source(record: dict[str, Any]) -> str:
    """Where a table's numbers come from."""
    versions = record["versions"]
    made_by = f"torch {versions['torch']}, transformers {versions['transformers']}"
    return f"\n`{record['command']}` on {record['device']}, {record['dtype']}, {made_by}, {record['date']}.\n"


def presets() -> str:
    """Sizes of the presets, from the package itself."""
    rows = []
    for name, config in PRESETS.items():
        layout = config.layout(HEAD_DIM)
        bits = ["FP8" if bits == 8 else f"{bits} bits" for bits in (config.key_bits, config.value_bits)]
        ratio = f"{layout.compression_ratio:.2f}"
        rows.append([f"`{name}`", *bits, str(layout.slot_bytes), f"{layout.block_bytes / layout.tokens:.0f}", ratio])
    packed = "bytes per token and KV head"
    return table(["preset", "keys", "values", packed, "with block means", "bf16 / packed"], rows)


def passkey(record: dict[str, Any]) -> str:
    """Recall and memory of each cache."""
    rows = [
        [
            row["cache"] if row["cache"] == BASELINE else f"`{row['cache']}`",
            f"{row['bytes_held'] / MIB:.2f} MiB",
            f"{row['times_smaller']:.2f}×",
            f"{row['passkeys_right']}/{row['passkeys_asked']}",
            f"{row['facts_right']}/{row['facts_asked']}",
        ]
        for row in record["rows"]
    ]
    held = f"KV held, {record['document_tokens']:,} tokens"
    return table(["cache", held, "smaller by", "pass keys", "facts"], rows) + source(record)


def quickstart(record: dict[str, Any]) -> str:
    """Answer, memory and speed of each cache."""
    baseline = record["rows"][0]["bytes_held"]
    rows = [
        [
            row["cache"] if row["cache"] == BASELINE else f"`{row['cache']}`",
            "right" if row["right"] else "wrong",
            f"{row['bytes_held'] / MIB:.2f} MiB",
            f"{baseline / row['bytes_held']:.2f}×",
            f"{row['tokens_per_second']:.1f}",
        ]
        for row in record["rows"]
    ]
    held = f"KV held, {record['prompt_tokens']:,} tokens"
    return table(["cache", "answer", held, "smaller by", "decoding, tokens/s"], rows) + source(record)


RENDERERS = {"passkey": passkey, "quickstart": quickstart}


def render(name: str) -> str:
    """The Markdown of the table called `name`."""
    if name == "presets":
        return presets()
    record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return RENDERERS[name.partition("-")[0]](record)


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
        sys.exit("README.md is out of date: run `python examples/make_tables.py`.")
    if not check:
        README.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
