"""How results of several GPUs are shown: a model over two, and replicas."""

from __future__ import annotations

from typing import Any

from examples.measure.report.page import cache_name, note, shape, source, table

GIB = 2**30


def named(name: str) -> str:
    """Name of a measurement, e.g. "graph_decoding, 8 × 32k"."""
    kind, _, size = name.rpartition(", ")
    batch, _, context = size.partition(" x ")
    way, _, cache = kind.rpartition(" ")
    kind = f"{way} {cache_name(cache)}" if way == "eager" else kind
    return f"{kind}, {shape(int(batch), int(context))}"


def milliseconds(found: Any) -> float | None:
    """Time of a step. With tensor parallelism, that of the slowest process."""
    every = found if isinstance(found, list) else [found or {}]
    times: list[float] = [one["ms_per_step"] for one in every if "ms_per_step" in one]
    return max(times) if len(times) == len(every) else None


def cell(found: Any) -> str:
    """Milliseconds, or why there are none."""
    time = milliseconds(found)
    if time is not None:
        return f"{time:.2f} ms"
    errors = [one["error"] for one in (found if isinstance(found, list) else [found or {}]) if "error" in one]
    return errors[0].replace("|", "/").splitlines()[0][:60] if errors else "–"


def steps(record: dict[str, Any]) -> str:
    """Every step that was timed: a row for each kind and shape."""
    one, split, spread = (record.get(place, {}) for place in ("one_gpu", "tensor_parallel", "device_map"))
    lines = []
    for name in {**one, **split, **spread}:
        found = [one.get(name), split.get(name), spread.get(name)]
        if ", " not in name or not any("ms_per_step" in str(each) or "error" in str(each) for each in found):
            continue
        before, after = milliseconds(found[0]), milliseconds(found[1])
        faster = f"**{before / after:.2f}×**" if before and after else "–"
        lines.append([named(name), cell(found[0]), cell(found[1]), faster, cell(found[2])])
    held = next(([one[name], *split[name]] for name in one if name in split and "bytes_held" in one[name]), None)
    if held:
        sizes = [each.get("bytes_held", 0) for each in held]
        places = [sizes[:1], sizes[1:], [*spread.get("bytes_by_device", {}).values()]]
        shown = [" + ".join(f"{size / GIB:.2f}" for size in each) + " GiB" if each else "–" for each in places]
        lines.append(["KV held on each GPU", *shown[:2], "–", shown[2]])
    headings = ["a decode step", "one GPU", "tensor parallel, two", "times as fast", "`device_map`, two"]
    return table(headings, lines)


def kernels(record: dict[str, Any]) -> str:
    """Microseconds of a step of one graph by what its kernels do; a process holds its share of the heads."""
    columns = {}
    for place, who in (("one_gpu", "one GPU"), ("tensor_parallel", "each of two")):
        for name, found in record.get(place, {}).items():
            first = found[0] if isinstance(found, list) else found
            if isinstance(first, dict) and "kernels" in first:
                columns[f"{named(name)}, {who}"] = first["kernels"]
    if not columns:
        return ""
    groups = list(dict.fromkeys(group for each in columns.values() for group in each["groups"]))
    lines = [[group, *(f"{each['groups'].get(group, 0):,.0f}" for each in columns.values())] for group in groups]
    for label, key in (("gaps", "gaps_us"), ("all of it", "wall_us"), ("unobserved", "us_by_events")):
        lines.append([label, *(f"{each[key]:,.0f}" for each in columns.values())])
    return "\n" + table(["µs of a step", *columns], lines)


def sentences(record: dict[str, Any]) -> list[str]:
    """Tables of comparisons, and of all-reduces alone."""
    one, split = record.get("one_gpu", {}), record.get("tensor_parallel", {})
    compared = [found["against_eager"] for found in one.values() if "against_eager" in found]
    compared += [each["against_eager"] for found in split.values() for each in found if "against_eager" in each]
    said = []
    if compared:
        tokens, equal, near = (sum(each[key] for each in compared) for key in ("tokens", "equal", "near_ties"))
        furthest = max(each["furthest_behind"] for each in compared)
        said.append(
            f"Of {tokens:,} tokens of graph_decoding {equal:,} are those of eager steps and {near:,} near ties; the "
            f"furthest is {furthest:.3f} standard deviations of the logits behind."
        )
    if "relative_rms" in (split.get("logits") or [{}])[0]:
        logits = split["logits"][0]
        said.append(
            f"Logits of tensor parallel steps differ from one GPU's by {logits['relative_rms']:.1e} (relative RMS), "
            f"KL {logits['mean_kl']:.1e}; {logits['same_top1']:.0%} of the likeliest tokens are the same."
        )
    if "greedy" in record.get("device_map", {}):
        greedy = record["device_map"]["greedy"]
        said.append(f"{greedy['equal']} of {greedy['tokens']} tokens are those of one GPU with `device_map`.")
    for found in (split.get("all_reduce") or [{}])[0].values():
        if "us" in found:
            times = ", ".join(f"{name} {time:.1f} µs" for name, time in found["us"].items())
            said.append(f"An all-reduce of {found['bytes'] / 1024:g} KiB in a graph: {times}.")
    return said


def multi_gpu(record: dict[str, Any]) -> str:
    """Steps on one GPU, over two by tensor parallelism and by `device_map`; where the time of a graph goes."""
    text = f"{record['model']}:\n\n" + steps(record) + kernels(record)
    said = " ".join(sentences(record))
    return text + (f"\n{said}\n" if said else "") + note(record) + source(record)


LOADS = {"one": "the file", "weak": "as many prompts a replica", "strong": "the file"}
"""What replicas answer, by the load of a run."""


def agreed(found: dict[str, Any] | None) -> str:
    """How many answers are those of one process, and what is known of the others."""
    if found is None:
        return "–"
    text = f"{found['equal']} of {found['answers']}"
    if found["looked_at"]:
        text += f"; of {found['looked_at']} others {found['near_ties']} are near ties"
        text += f", the furthest {found['furthest_behind']:.2f} behind"
    return text


def replicas(record: dict[str, Any]) -> str:
    """Prompts answered by replicas, by tensor parallelism and by both: a row for each run."""
    one = next((row["tokens_per_second"] for row in record["rows"] if row["load"] == "one"), None)
    lines = [
        [
            f"{row['replicas']} × {row['tp']}",
            LOADS[row["load"]],
            " + ".join(map(str, row["prompts_by_replica"])),
            f"{row['tokens_per_second']:,.0f}",
            f"**{row['tokens_per_second'] / one:.2f}×**" if one else "–",
            f"{row['first_token_s_p50']:.2f} / {row['first_token_s_p99']:.2f} s",
            f"{row['room']:,}",
            f"{row['first_answer_s']:.1f} s",
            agreed(row.get("agreement")),
        ]
        for row in record["rows"]
    ]
    headings = [
        "replicas × GPUs each",
        "answer",
        "prompts of each",
        "tokens/s",
        "times one GPU",
        "first token, p50 / p99",
    ]
    headings += ["room for tokens", "first answer after weights", "answers of one process"]
    least, most = record["lengths"]
    text = (
        f"{record['model']}. The file has {record['requests']} prompts of {least:,} to {most:,} tokens, answered by "
        f"{record['new_tokens']} each. Where an answer first differs from that of one process, the less likely token "
        "of the two is behind by a number of standard deviations of the logits:\n\n"
    )
    return text + table(headings, lines) + note(record) + source(record)
