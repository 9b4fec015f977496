"""How results of many requests at once are shown, and of requests whose pages wait on the CPU."""

from __future__ import annotations

from typing import Any

from examples.measure.report.page import cache_name, note, shape, source, table, tokens

MIB = 2**20
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
    """Result of an engine on a trace."""
    begin = [cache_name(row["engine"]), row["arrivals"]]
    if "error" in row:
        return [*begin, row["error"], *["–"] * 5]
    speed = f"**{row['tokens_per_second']:,.0f}**"
    if row.get("unfinished"):
        speed += f" ({row['unfinished']} unfinished)"
    flight = f"{row['in_flight_most']} / {row['in_flight_mean']:.0f}" if "in_flight_most" in row else "–"
    times = [milliseconds(row, "first_token_s", 1, ".2f") + " s", milliseconds(row, "per_token_s", 1e3, ".1f") + " ms"]
    memory = f"{row['cache_bytes'] / GIB:.2f} GiB" if "cache_bytes" in row else "–"
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
    starts = {cache_name(row["engine"]): row["start_s"] for row in rows if "start_s" in row}
    if starts:
        text += "\nSeconds from the start of the process to the first request: "
        text += ", ".join(f"{engine} {seconds:.0f}" for engine, seconds in starts.items()) + ".\n"
    return text + note(record) + source(record)


def offload(record: dict[str, Any]) -> str:
    """Wait of a preempted request for its next token, copies of its pages, and their bytes relative to bf16."""
    waits, held = record["next_token"], record["request"]
    fastest = min(row["ms"] for row in waits.values())
    rows = [
        [
            way,
            f"**{row['ms']:.1f}** ms ({row['ms'] / fastest:.1f}×)",
            f"{min(row['all_ms']):.1f} to {max(row['all_ms']):.1f} ms, {len(row['all_ms'])}",
            f"{row['step_ms']:.2f} ms",
        ]
        for way, row in waits.items()
    ]
    preset = cache_name(record["preset"])
    headings = [f"{record['tokens']:,} tokens, {preset}", "to the next token", "all, measured", "a step after it"]
    text = f"{record['model']}:\n\n" + table(headings, rows) + "\n"
    copies = [
        [f"{preset}, {label}", f"{one['bytes'] / MIB:,.0f} MiB", f"{one['ms']:.2f} ms", f"{one['gb_s']:.1f} GB/s"]
        for label, one in (("to the CPU", record["copies"]["out"]), ("back", record["copies"]["back"]))
    ]
    if "bf16_copy_ms" in held:
        ms, size = held["bf16_copy_ms"], held["bf16_bytes"]
        bf16 = ["as many bytes as bf16 pages have, in one copy", f"{size / MIB:,.0f} MiB", f"{ms:.2f} ms"]
        copies.append([*bf16, f"{size / ms / 1e6:.1f} GB/s"])
    text += table(["copy of a request's pages", "bytes", "time", "speed"], copies)
    text += f"\n{record['pages_equal']} of {record['pages_checked']} pages came back byte for byte. "
    text += f"A request of {record['tokens']:,} tokens holds {held['pages']} pages, {held['bytes'] / MIB:,.0f} MiB; "
    text += f"in bf16 {held['bf16_bytes'] / MIB:,.0f} MiB, {held['bf16_bytes'] / held['bytes']:.2f} times as many.\n"
    return text + note(record) + source(record)


def prefixes(record: dict[str, Any]) -> str:
    """First tokens of prompts whose prefix is kept, and steps of others while prefixes come back."""
    texts = []
    for row in record["rows"]:
        times = {
            "read": row["read_ms"],
            "in the pool": row["in_pool_ms"],
            "in host memory": [row["from_memory_ms"]],
            "in files": row["from_files_ms"],
        }
        best, cells = min(times["read"]), []
        for name, found in times.items():
            cells.append([name, ", ".join(f"{ms:.0f}" for ms in found) + " ms", f"**{min(found) / best:.3f}×**"])
        texts.append(table([f"prompts of {tokens(row['context'])} tokens", "first token", "of reading"], cells))
        steps, names = [], ("mean_ms", "p50_ms", "p99_ms", "longest_ms")
        for name, label in (
            ("without", "such prompts come, from the pool"),
            ("with", "from files, and others are stored"),
        ):
            steps.append([label, *(f"{row[name][each]:.1f} ms" for each in names)])
        texts.append(table([f"a step of {row['batch']} requests while", "mean", "median", "p99", "longest"], steps))
        same = "are" if row["equal"] and row["equal_in_pool"] else "are not all"
        texts.append(
            f"Answers {same} those of prefixes in the pool; files have {row['bytes_over_bf16']:.3f} of bf16.\n"
        )
    return "\n".join(texts) + f"\n{record['model']}. {note(record)}{source(record)}"


def prompts(record: dict[str, Any]) -> str:
    """Milliseconds of prompts in batches by kind of kernel, and seconds of calls with one short prompt."""
    kinds = list(record["rows"][0].get("kernels_ms", {}))
    rows = [
        [tokens(row["tokens"]), f"**{row['ms']:,.1f}** ms", f"{row['tokens_per_second']:,.0f}"]
        + [f"{row['kernels_ms'][kind]:,.2f}" for kind in kinds]
        for row in record["rows"]
    ]
    text = table(["prompts of", "each", "tokens/s", *(f"{kind}, ms" for kind in kinds)], rows)
    calls = [
        f"{record[f'{name}_call_s']:.3f} s with {which}"
        for name, which in (("kept", "a kept manager"), ("fresh", "a new one"))
    ]
    text += f"\nA call of `generate_batch` with one prompt of 16 tokens and one new token: {', '.join(calls)}. "
    text += f"The first warm-up at compile level {record['level']} took {record['warm_up_s']:.0f} s.\n\n"
    names, cells = ("DynamicCache", "growing", "graph_decoding"), []
    for row in record.get("first_tokens", []):
        times = [row[f"{name}_ms"] for name in names]
        cells.append(
            [tokens(row["tokens"]), f"{times[0]:.1f} ms", *(f"{x:.1f} ms, **{x / times[0]:.2f}×**" for x in times[1:])]
        )
    if cells:
        text += table(["first token of `generate()`", "`DynamicCache`", "growing", "`graph_decoding`"], cells)
    return text + f"\n{record['model']}. {note(record)}{source(record)}"


def grammars(record: dict[str, Any]) -> str:
    """Steps with and without answers in a form."""
    rows = []
    for row in record["rows"]:
        times = [f"{row[f'ms_{name}']:.2f} ms" for name in ("without", "with")]
        host = [f"{row['host_ms'][name]:.2f} ms" for name in ("write_masks", "choose")]
        rows.append(["sampled" if row["sampled"] else "greedy", *times, f"**{row['over']:.3f}×**", *host])
    header = [f"{record['requests']} requests", "step without", "step with", "", "masks, host", "launches, host"]
    return table(header, rows) + f"\n{record['model']}. {note(record)}{source(record)}"


def forms(record: dict[str, Any]) -> str:
    """Answers that validate by the schema that is their form."""
    rows = [
        [f"{record['model']}, `{record['preset']}`"]
        + [f"{row[name]}/{row['answers']}" for name in ("ended", "valid")]
        + [f"{row['mean_tokens']:.0f}"]
        for row in record["rows"]
    ]
    return table(["model", "ended", "valid", "mean tokens"], rows) + note(record) + source(record)
