"""Pieces of a results page."""

from __future__ import annotations

from typing import Any

from tq_hf import PRESETS


def table(headings: list[str], rows: list[list[str]], rest: str = "---:") -> str:
    """A Markdown table; the first column is left-aligned, the others right (`rest`)."""
    lines = [headings, ["---", *(rest for _ in headings[1:])], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def tokens(context: int) -> str:
    """A number of tokens, e.g. 32k."""
    return f"{context // 1024}k" if context % 1024 == 0 else f"{context:,}"


def shape(batch: int, context: int) -> str:
    """Sequences and tokens, e.g. 8 × 32k."""
    return f"{batch} × {tokens(context)}"


def details(summary: str, content: str) -> str:
    """Markdown that is folded away."""
    return f"\n<details><summary>{summary}</summary>\n\n{content}\n</details>\n"


def cache_name(name: str) -> str:
    """The name of a cache with a preset's name in it as code."""
    preset, comma, rest = name.partition(",")
    return f"`{preset}`{comma}{rest}" if preset in PRESETS else name


def source(record: dict[str, Any]) -> str:
    """Where a table's numbers come from."""
    versions = record["versions"]
    made_by = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "triton", "transformers", "vllm") if name in versions
    )
    place = ", ".join(filter(None, (record["device"], record.get("dtype"))))
    return f"\n`{record['command']}` on {place}, {made_by}, {record['date']}.\n"


def note(record: dict[str, Any]) -> str:
    """Note on how to read a table, or nothing."""
    return f"\n{record['note']}\n" if "note" in record else ""
