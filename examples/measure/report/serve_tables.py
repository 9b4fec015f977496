"""How results of many requests at once are shown."""

from __future__ import annotations

from typing import Any

from examples.measure.report.page import cache_name, note, shape, source, table

GIB = 2**30


def decode_step(row: dict[str, Any] | None) -> str:
    """A step of many requests, how fast their prompts were read and memory, or why there is none."""
    if row is None or "error" in row:
        return row["error"] if row else "–"
    parts = [f"**{row['ms_per_step']:.1f}** ms"]
    if "prompt_tokens_per_second" in row:
        parts.append(f"prompts {row['prompt_tokens_per_second']:,.0f}/s")
    if "peak_bytes_beyond_weights" in row:
        parts.append(f"{row['peak_bytes_beyond_weights'] / GIB:.1f} GiB")
    return ", ".join(parts)


def milliseconds(row: dict[str, Any], key: str, factor: float, form: str) -> str:
    """The two quantiles of a time."""
    quantiles = (row[f"{key}_{quantile}"] for quantile in ("p50", "p99"))
    return " / ".join("–" if value is None else format(factor * value, form) for value in quantiles)


def trace_row(row: dict[str, Any]) -> list[str]:
    """What an engine made of a trace."""
    begin = [cache_name(row["engine"]), row["arrivals"]]
    if "error" in row:
        return [*begin, row["error"], *["–"] * 5]
    speed = f"**{row['tokens_per_second']:,.0f}**"
    if row.get("unfinished"):
        speed += f" ({row['unfinished']} unfinished)"
    flight = f"{row['in_flight_most']} / {row['in_flight_mean']:.0f}" if "in_flight_most" in row else "–"
    times = [milliseconds(row, "first_token_s", 1, ".2f") + " s", milliseconds(row, "per_token_s", 1e3, ".1f") + " ms"]
    memory = f"{row['cache_bytes'] / GIB:.2f} GiB"
    if "peak_bytes_beyond_weights" in row:
        memory += f" of {row['peak_bytes_beyond_weights'] / GIB:.2f}"
    room = f"{row['cache_tokens']:,}"
    if "flash_room_tokens" in row:
        room += f" ({row['cache_tokens'] / row['flash_room_tokens']:.2f}×)"
    return [*begin, speed, *times, flight, room, memory]


def serve(record: dict[str, Any]) -> str:
    """Steps of requests of one length, then the traces."""
    rows = record["rows"]
    cells = {(row["engine"], row["batch"], row["context"]): row for row in rows if row["kind"] == "decode"}
    text = f"{record['model']}:\n\n"
    if cells:
        shapes = list(dict.fromkeys(key[1:] for key in cells))
        lines = [
            [cache_name(engine), *(decode_step(cells.get((engine, *one))) for one in shapes)]
            for engine in dict.fromkeys(key[0] for key in cells)
        ]
        floors = {key[1:]: row["bf16_floor_ms"] for key, row in cells.items() if "bf16_floor_ms" in row}
        if floors:
            lines.append(["what bf16 pages must read", *(f"{floors[one]:.1f} ms" for one in shapes)])
        text += table(["a decode step of", *(shape(*one) for one in shapes)], lines) + "\n"
    traces = [trace_row(row) for row in rows if row["kind"] == "trace"]
    if traces:
        asked = record["trace"]
        lengths = (f"{low:,} to {high:,}" for low, high in (asked["prompts"], asked["answers"]))
        text += f"{asked['requests']} requests, prompts of {' tokens, answers of '.join(lengths)}:\n\n"
        headings = ["engine", "arrivals", "tokens/s", "first token, p50 / p99", "per token, p50 / p99"]
        text += table([*headings, "in flight, most / mean", "room for tokens (stock flash 1×)", "pages"], traces)
    return text + note(record) + source(record)
