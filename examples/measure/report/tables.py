"""How each kind of results file is shown in `examples/results/README.md`: every cell of it, good or bad."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from examples.measure.report.card_tables import cards, compile_matrix
from examples.measure.report.multi_gpu_tables import multi_gpu, replicas
from examples.measure.report.page import cache_name, details, note, shape, source, table
from examples.measure.report.serve_tables import forms, grammars, offload, prefixes, prompts, serve
from tq_hf import PRESETS

MIB = 2**20
GIB = 2**30


def passkey(record: dict[str, Any]) -> str:
    """Recall and memory of each cache."""
    rows = [
        [
            cache_name(row["cache"]),
            f"{row['bytes_held'] / MIB:.2f} MiB",
            f"{row['times_smaller']:.2f}×",
            f"{row['passkeys_right']}/{row['passkeys_asked']}",
            f"{row['facts_right']}/{row['facts_asked']}",
        ]
        for row in record["rows"]
    ]
    held = f"KV held, {record['document_tokens']:,} tokens"
    return table(["cache", held, "smaller by", "pass keys", "facts"], rows) + note(record) + source(record)


def kernel_cells(cells: list[dict[str, Any]]) -> str:
    """Decode attention of one head shape: a row for each batch and context, a column for each preset."""
    presets = list(dict.fromkeys(cell["preset"] for cell in cells))
    shapes = dict.fromkeys((cell["batch"], cell["length"]) for cell in cells)
    rows = []
    for batch, length in shapes:
        of_shape = {cell["preset"]: cell for cell in cells if (cell["batch"], cell["length"]) == (batch, length)}
        times = {f"{us:.1f} µs ({backend})": us for backend, us in next(iter(of_shape.values()))["sdpa_us"].items()}
        row = [shape(batch, length), min(times, key=times.__getitem__, default="–")]
        for preset in presets:
            cell = of_shape.get(preset)
            time = cell and min(cell["eager_us"], cell["graph_us"])
            faster = f"**{cell['speedup']:.2f}×** " if cell and cell["speedup"] else ""
            row.append(f"{faster}{time:.1f} µs, {cell['of_read']:.0%}" if cell else "–")
        rows.append(row)
    return table(["batch × context", "sdpa, bf16", *(f"`{preset}`" for preset in presets)], rows)


def kernels(record: dict[str, Any]) -> str:
    """Decode attention against sdpa: all cells, those of the first head shape in sight."""
    by_heads: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for cell in record["cells"]:
        by_heads.setdefault(tuple(cell["heads"]), []).append(cell)
    texts = {}
    for heads, cells in by_heads.items():
        errors = [f"`{e['preset']}` {e['relative_rms']:.1e}" for e in record["errors"] if tuple(e["heads"]) == heads]
        texts[heads] = kernel_cells(cells) + f"\nError against float64: {', '.join(errors)} (relative RMS, float16).\n"
    (first, text), *others = texts.items()
    named = "{} query heads on {} KV heads of {} channels".format
    text = f"{named(*first)}:\n\n{text}"
    if others:
        text += details("Other head shapes", "\n".join(f"{named(*heads)}:\n\n{text}" for heads, text in others))
    notes = [f"The GPU reads {record['read_gb_s']:,.0f} GB/s."]
    if "encode_us" in record:
        times = ", ".join(f"`{preset}` {time:.0f} µs" for preset, time in record["encode_us"].items())
        notes.append(f"Encoding keys and values of 32k tokens of 8 heads: {times}.")
    if "step" in record:
        step = record["step"]
        took = f"{step['launches']:g} launches and {step['cpu_us']:.0f} µs of the CPU"
        notes.append(f"Append and attention of a layer in an eager step of {step['layers']} layers: {took}.")
    if "preallocated_step" in record:
        step = record["preallocated_step"]
        notes.append(f"Of a preallocated cache: {step['launches']:g} launches and {step['cpu_us']:.0f} µs.")
    if "note" in record:
        notes.append(record["note"])
    return f"{text}\n{' '.join(notes)} Measured by {source(record).lstrip()}"


def generated(row: dict[str, Any] | None) -> str:
    """Time of a step and memory, or why there is none."""
    if row is None:
        return "–"
    if "error" in row:
        return row["error"]
    return f"**{row['ms_per_step']:.1f}** ms, {row['peak_bytes_beyond_weights'] / GIB:.1f} GiB"


def generate(record: dict[str, Any]) -> str:
    """A step of `generate()` and memory beyond weights: a row for each cache, a column for each batch and context."""
    rows = {(row["cache"], row["batch"], row["context"]): row for row in record["rows"]}
    shapes = list(dict.fromkeys(key[1:] for key in rows))
    lines = []
    for cache in dict.fromkeys(key[0] for key in rows):
        lines.append([cache_name(cache), *(generated(rows.get((cache, *one))) for one in shapes)])
    steps = table(["cache", *(shape(*one) for one in shapes)], lines)
    return f"{record['model']}:\n\n{steps}{note(record)}{source(record)}"


def models(record: dict[str, Any]) -> str:
    """Prefill and a decode step of other models' shapes: a row for each model and cache."""
    lines = []
    for row in record["rows"]:
        prefill = f"{row['prefill_ms']:.1f} ms" if "prefill_ms" in row else row.get("error", "–")
        decode = generated(row) if "ms_per_step" in row else row.get("error", "–")
        lines.append([row["model"], str(row["layers"]), cache_name(row["cache"]), prefill, decode])
    headings = ["model", "layers", "cache", "prefill of 8k", "step at 8 × 32k, bytes beyond weights"]
    return f"Layers of random weights:\n\n{table(headings, lines)}{note(record)}{source(record)}"


def assisted(record: dict[str, Any]) -> str:
    """Steps with drafts, over steps without: a row for each context and source of drafts."""
    rows = [
        [
            shape(1, row["context"]),
            row["kind"],
            f"{row['ms_per_step']:.2f} ms",
            f"{row['step_over_plain']:.2f}×",
            f"{row['tokens_per_step']:.2f}",
            f"**{row['tokens_per_second_over_plain']:.2f}×**",
        ]
        for row in record["rows"]
    ]
    drafts = record["rows"][0]["drafts"]
    headings = [
        "batch × context",
        f"{drafts} drafts by",
        "a step",
        "over plain",
        "tokens a step",
        "tokens a second over plain",
    ]
    return table(headings, rows) + note(record) + source(record)


def drafts(record: dict[str, Any]) -> str:
    """Tokens with drafts that are those of plain decoding, and how nearly the others tie."""
    rows = [
        [
            row["dtype"],
            f"`{row['way']}`",
            row["kind"],
            f"{row['tokens_per_call']:.2f}",
            f"{row['equal']:,}",
            f"{len(row['gaps'])} of {row['passages']}",
            f"{max(row['gaps']):.3f}" if row["gaps"] else "–",
        ]
        for row in record["rows"]
    ]
    headings = [
        "dtype",
        "loop",
        "4 drafts by",
        "tokens a call",
        "equal tokens",
        "answers that part",
        "largest gap there",
    ]
    return table(headings, rows) + note(record) + source(record)


def share(value: float | None) -> str:
    """A share in percent, or a dash if nothing was asked."""
    return "–" if value is None else f"{value:.1%}"


def quality_rows(rows: list[dict[str, Any]]) -> str:
    """A row for each cache: bytes, and differences from the uncompressed float32 cache."""
    headings = ["cache", "bytes, all in", "packed", "KL, nats (95%)", "KL, p99", "ΔPPL", "top-1", "pass keys", "facts"]
    lines = []
    for row in rows:
        low, high = row["kl_95"]
        sizes = [f"{row[key]:.0f}" for key in ("bytes_all_in", "bytes_packed")]
        kl = [f"{row['kl']:.2g} ({low:.2g} to {high:.2g})", f"{row['kl_p99']:.2g}", f"{row['delta_ppl']:+.2%}"]
        if math.isnan(row["kl"]):
            kl = ["NaN"] * 3
        recalls = [share(row[key]) for key in ("top1", "passkey_recall", "recall")]
        lines.append([cache_name(row["cache"]), *sizes, *kl, *recalls])
    return table(headings, lines)


def real_rows(rows: list[dict[str, Any]]) -> str:
    """A row for each cache of a real model: KL with its standard error over documents, and whether it drifts."""
    headings = ["cache", "bytes", "KL, nats", "KL, p99", "top-1", "1 − TVD", "perplexity", "facts", "KL by position"]
    lines = []
    for row in rows:
        error = "" if row["kl_standard_error"] is None else f" ± {row['kl_standard_error']:.1g}"
        figures = [f"{row['kl']:.2g}{error}", f"{row['kl_p99']:.2g}", share(row["top1"]), share(row["overlap"])]
        drift = " · ".join(f"{part:.1g}" for part in row["kl_by_position"])
        size = f"{row['bytes_all_in']:.0f}"
        lines.append(
            [cache_name(row["cache"]), size, *figures, f"{row['perplexity']:.3f}", share(row["recall"]), drift]
        )
    return table(headings, lines)


def real(record: dict[str, Any]) -> str:
    """Quality of each cache on real weights and real text."""
    sinks_only = [row for row in record["rows"] if row["cache"].endswith(", no residual")]
    text = real_rows([row for row in record["rows"] if row not in sinks_only])
    if sinks_only:
        text += "\nPacked with exact sinks only:\n\n" + real_rows(sinks_only)
    if record.get("comparisons"):
        text += details("Against vLLM's recipe, a pair at a time", against_vllm(record["comparisons"]))
    if record.get("skipped"):
        text += "\nNot measured: " + "; ".join(f"{name} ({why})" for name, why in record["skipped"].items()) + ".\n"
    hashes = f"weights {(record['weights_sha256'] or '–')[:12]}, text {record['text']} {record['text_sha256'][:12]}"
    seeds = f"seeds 0 to {record['documents'] - 1}, {record['facts']} facts each"
    return f"{documents(record)}, {seeds} (SHA-256: {hashes}):\n\n{text}{note(record)}{source(record)}"


def by_injection(rows: list[dict[str, Any]]) -> str:
    """KL and recall of facts of each cache by the length of the vector added to its keys."""
    strengths = sorted({row["injection"] for row in rows})
    found = {(row["cache"], row["injection"]): row for row in rows}
    stressed = dict.fromkeys(row["cache"] for row in rows if row["injection"])
    lines = []
    for name in stressed:
        cells = [found.get((name, strength)) for strength in strengths]
        lines.append([cache_name(name), *(f"{c['kl']:.2g}, {share(c['recall'])}" if c else "–" for c in cells)])
    return table(["KL, facts recalled", *(f"{strength:g} × ‖k‖" for strength in strengths)], lines)


def by_stress(rows: list[dict[str, Any]]) -> str:
    """KL and recall of facts of each cache under the stresses of `stress.py`."""
    stresses = list(dict.fromkeys(row.get("stress", "none") for row in rows))
    found = {(row["cache"], row.get("stress", "none")): row for row in rows}
    lines = []
    for name in dict.fromkeys(row["cache"] for row in rows if "stress" in row):
        cells = [found.get((name, stress)) for stress in stresses]
        lines.append([cache_name(name), *(f"{c['kl']:.2g}, {share(c['recall'])}" if c else "–" for c in cells)])
    return table(["KL, facts recalled", *stresses], lines)


def balance(record: dict[str, Any]) -> str:
    """KL over that of the model as it is and unbalanced, mean of all rotations, and recall of facts: a row for each
    preset, balanced or not, a column for each stress."""
    cells: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in record["rows"]:
        name, _, seed = row["cache"].rpartition(", seed ")
        if seed.isdigit():
            cells.setdefault(name, {}).setdefault(row.get("stress", "none"), []).append(row)
    stresses = list(dict.fromkeys(stress for found in cells.values() for stress in found))
    rotations = max((len(rows) for found in cells.values() for rows in found.values()), default=0)

    def mean(rows: list[dict[str, Any]], key: str) -> float:
        return sum(row[key] for row in rows) / len(rows)

    lines = []
    for name, found in cells.items():
        plain = mean(cells[f"{name.partition(',')[0]}, not balanced"]["none"], "kl")
        line = [cache_name(name)]
        for stress in stresses:
            rows = found.get(stress)
            kl = mean(rows, "kl") if rows else math.nan
            line.append(f"**{kl / plain:.2f}×** {kl:.2g}, {share(mean(rows, 'recall'))}" if rows else "–")
        lines.append(line)
    text = f"{documents(record)}; nothing kept dense, mean of {rotations} rotations:\n\n"
    text += table(["KL over unstressed and unbalanced, KL, facts", *stresses], lines)
    return text + note(record) + source(record)


def against_vllm(pairs: list[dict[str, Any]]) -> str:
    """KL of ours over that of vLLM's recipe."""
    lines = []
    for pair in pairs:
        low, high = pair["kl_ratio_95"]
        sizes = [" / ".join(f"{size:.0f}" for size in pair[key]) for key in ("bytes_all_in", "bytes_packed")]
        lines.append(
            [
                f"{cache_name(pair['ours'])} / {pair['theirs']}",
                f"{pair['kl_ratio']:.2f} ({low:.2f} to {high:.2f})",
                *sizes,
            ]
        )
    return table(["ours / theirs", "KL over KL (95%)", "bytes, all in", "bytes, packed"], lines)


def quality(record: dict[str, Any]) -> str:
    """Quality of each cache, with stress and comparisons folded away."""
    rows = record["rows"]
    main = [row for row in rows if not row["injection"]]
    folded = [row for row in main if "," in row["cache"] and row["cache"].partition(",")[0] in PRESETS]
    text = quality_rows([row for row in main if row not in folded])
    if folded:
        text += details("With less kept dense", quality_rows(folded))
    if any(row["injection"] for row in rows):
        text += details("With a vector added to all keys, as a key bias does", by_injection(rows))
    if record.get("comparisons"):
        text += details("Against vLLM's recipe, a pair at a time", against_vllm(record["comparisons"]))
    if record.get("skipped"):
        text += "\nNot measured: " + "; ".join(f"{name} ({why})" for name, why in record["skipped"].items()) + ".\n"
    return f"{documents(record)}:\n\n{text}{note(record)}{source(record)}"


def documents(record: dict[str, Any]) -> str:
    """Model and documents of an evaluation."""
    model = f"{record['model']}, {record['parameters'] / 1e6:.1f}M parameters"
    tokens = f"{record['document_tokens']:,} tokens, read {record['chunk']} at a time"
    return f"{model}; {record['documents']} documents of {tokens}"


def ablation(record: dict[str, Any]) -> str:
    """Parts of the recipe switched one at a time, folded away."""
    rows = record["rows"]
    text = quality_rows([row for row in rows if not row["injection"] and "stress" not in row])
    if any(row["injection"] for row in rows):
        text += "\nWith a vector added to all keys, as a key bias does:\n\n" + by_injection(rows)
    if any("stress" in row for row in rows):
        text += "\nWith padding before each document, or channels rescaled:\n\n" + by_stress(rows)
    return details(documents(record), text + note(record) + source(record)).lstrip()


def prefix(record: dict[str, Any]) -> str:
    """Attention of many new tokens over packed history."""
    lines = []
    for cell in record["cells"]:
        speed = [f"{cell['ms']:.2f} ms", f"**{cell['speed_of_flash']:.2f}×**", f"{cell['tflops']:.0f}"]
        work = f"{cell['new']:,} on {cell['history']:,}, `{cell['preset']}`, {cell['way']}"
        lines.append([work, *speed, f"{cell['extra_mib']:.0f} MiB", f"{cell['relative_rms']:.1e}"])
    headings = ["new on history", "time", "as fast as flash, bf16", "TFLOPS", "memory", "error against float64"]
    text = f"{record['model']}:\n\n" + table(headings, lines)
    ways = list(dict.fromkeys(way for line in record["sweep"] for way in line["ms"]))
    lines = [
        [
            f"{line['new']:,} on {line['history']:,}",
            *(f"{line['ms'][way]:.3f}" if way in line["ms"] else "–" for way in ways),
        ]
        for line in record["sweep"]
    ]
    if lines:
        text += details("Each way at other sizes, `4bit_nc`, in ms", table(["new on history", *ways], lines))
    return text + note(record) + source(record)


def pages(record: dict[str, Any]) -> str:
    """Decode steps over pages beside those over a preallocated cache's tensors."""
    lines = []
    for cell in record["cells"]:
        heads, times = "/".join(map(str, cell["heads"])), cell["tensors_us"]
        named = [heads, shape(cell["batch"], cell["length"]), f"`{cell['preset']}`"]
        lines.append(
            [*named, *(f"**{cell['pages_us'][dense] / time:.2f}×** {time:.1f} µs" for dense, time in times.items())]
        )
    dense = [f"{number} dense tokens" for number in record["cells"][0]["tensors_us"]]
    return table(["heads", "sequences", "preset", *dense], lines) + note(record) + source(record)


def prefill(record: dict[str, Any]) -> str:
    """Time to the first token, and a long prompt in chunks."""
    first = [
        [
            f"{row['prompt']:,}",
            f"{1e3 * row['DynamicCache']:,.1f} ms",
            f"{1e3 * row['4bit_nc']:,.1f} ms",
            f"{row['ratio']:.2f}×",
        ]
        for row in record["first_token"]
    ]
    text = table(["prompt, all layers", "DynamicCache", "`4bit_nc`", "times as long"], first) + "\n"
    lines = [
        [
            f"{point['tokens']:,}",
            f"{point['seconds']:.1f} s",
            f"{point['cache_bytes'] / MIB:,.0f} MiB",
            f"{point['peak_bytes_beyond'] / MIB:,.0f} MiB",
        ]
        for point in record["million"]
    ]
    headings = ["tokens read, one layer", "after", "cache", "peak beyond cache and weights"]
    return text + table(headings, lines) + note(record) + source(record)


def cpu(record: dict[str, Any]) -> str:
    """Prefill, decoding and a second turn on a CPU: milliseconds, and speed against DynamicCache's."""
    rows = record["rows"]
    found = {(row["cache"], row["cell"]): row for row in rows}
    cells = dict.fromkeys(row["cell"] for row in rows)
    lines = []
    for cache in dict.fromkeys(row["cache"] for row in rows):
        measured = [found.get((cache, cell)) for cell in cells]
        lines.append([cache_name(cache), *(f"{r['ms']:.4g} ({r['speed']:.2f}×)" if r else "–" for r in measured)])
    return table(["ms (speed)", *cells], lines) + note(record) + source(record)


def quantized(record: dict[str, Any]) -> str:
    """Bytes, time of a step and loss of `QuantizedCache` and of presets."""
    base = record["rows"][0]
    lines = []
    for row in record["rows"]:
        held = f"{row['bytes_held'] / 2**20:.2f} MiB ({base['bytes_held'] / row['bytes_held']:.2f}×)"
        step = f"{row['ms_per_step']:.1f} ({row['ms_per_step'] / base['ms_per_step']:.2f}×)"
        error = row["kl_standard_error"]
        kl = f"{row['kl']:.2g}" + (f" ± {error:.1g}" if error else "")
        lines.append([cache_name(row["cache"]), held, step, kl, share(row["top1"])])
    headings = ["cache", "held (smaller)", "ms a step", "KL, nats", "top-1"]
    return table(headings, lines) + note(record) + source(record)


def trellis(record: dict[str, Any]) -> str:
    """Squared error, time and instructions of codes; or KL of presets with them over that with scalar codes."""
    if "comparisons" not in record:
        rows = [
            [
                row["code"],
                str(row["states"]),
                f"{row['squared_error']:.5f}",
                f"{row['over_scalar']:.3f}×",
                f"{row['ns_a_channel']:.0f} ns",
                str(row["instructions"] or "–"),
            ]
            for row in record["rows"]
        ]
        headings = ["bits: code", "states", "squared error", "over scalar", "to encode a channel", "instructions"]
        return table(headings, rows) + note(record) + source(record)
    pairs = record["comparisons"]
    found = {(pair["preset"], pair["kind"], pair["code"], pair["stress"]): pair for pair in pairs}
    codes = list(dict.fromkeys(pair["code"] for pair in pairs))
    rows = []
    for preset, kind, stress in dict.fromkeys((pair["preset"], pair["kind"], pair["stress"]) for pair in pairs):
        row = [f"`{preset}`, {kind}" + ("" if stress == "x0" else f", {stress}")]
        for code in codes:
            pair = found.get((preset, kind, code, stress))
            interval = (
                " ({:.2f} to {:.2f})".format(*pair["over_scalar_95"]) if pair and "over_scalar_95" in pair else ""
            )
            row.append(f"**{pair['over_scalar']:.2f}×**{interval} {pair['kl']:.2g}" if pair else "–")
        rows.append(row)
    text = table(["KL over scalar codes (95%), KL", *codes], rows)
    if record.get("skipped"):
        text += f"\nNot measured, for lack of time: {len(record['skipped'])} cells.\n"
    return f"{documents(record)}:\n\n{text}{note(record)}{source(record)}"


def ruler(record: dict[str, Any]) -> str:
    """Scores of RULER's tasks by cache, and their means over the tasks and lengths that every cache has."""
    caches = record["metrics"]
    cells = {cache: {title: next(iter(found[title].values())) for title in found} for cache, found in caches.items()}
    shared = [title for title in cells["plain"] if all(title in found for found in cells.values())]
    means = [sum(found[title]["value"] for title in shared) / len(shared) for found in cells.values()]
    rows = [
        [title, *(f"{found[title]['value']:.2f}" if title in found else "–" for found in cells.values())]
        for title in dict.fromkeys(title for found in cells.values() for title in found)
    ]
    rows.append([f"mean of {len(shared)}", *(f"**{mean:.3f}**" for mean in means)])
    return table(["task, tokens", *(cache if cache == "plain" else f"`{cache}`" for cache in cells)], rows) + (
        f"\n{record['model']}, lm-eval {record['lm_eval']}.\n{note(record)}{source(record)}"
    )


def start(record: dict[str, Any]) -> str:
    """Seconds until an engine answers, and how long requests wait meanwhile."""
    columns = {
        "balance_s": "channel scales",
        "pool_s": "pool and first kernels",
        "first_token_s": "first token",
        "first_answer_s": "first answer",
        "next_token_s": "first token of four more",
        "worst_first_token_s": "worst first token, later",
        "longest_pause_s": "longest pause of an answer",
    }
    rows = []
    for row in record["rows"]:
        seconds = ("–" if row[name] is None else f"{row[name]:.1f} s" for name in columns)
        over = f"more than {row['seconds']:.0f} s" if row["left"] else f"{row['seconds']:.0f} s"
        rows.append([row["caches"], *seconds, over, str(row["rounds"])])
    header = ["compiled kernels", *columns.values(), "nothing left to compile or capture", "rounds of four"]
    return table(header, rows) + f"\n{record['model']}. {note(record)}{source(record)}"


def latents(record: dict[str, Any]) -> str:
    """Attention over packed and over bf16 latents, and a step of a model with latents."""
    rows = [
        [
            shape(row["batch"], row["context"]),
            str(row["heads"]),
            f"{row['bf16_us']:.1f} µs",
            f"{row['packed_us']:.1f} µs",
            f"**{row['ratio']:.2f}×**",
            f"{row['packed_gb'] / row['packed_us'] * 1e6:,.0f} GB/s",
        ]
        for row in record["rows"]
    ]
    header = ["batch × context", "heads", "bf16 latents", "packed latents, `4bit_nc`", "faster by", "packed bytes read"]
    steps = {(row["cache"], row["batch"], row["context"]): row["ms_per_step"] for row in record["steps"]}
    shapes = list(dict.fromkeys(key[1:] for key in steps))
    lines = []
    for kind in dict.fromkeys(key[0] for key in steps):
        times = (steps.get((kind, *one)) for one in shapes)
        lines.append([kind, *("–" if ms is None else f"{ms:.2f} ms" for ms in times)])
    text = table(header, rows) + f"\nThe GPU reads {record['read_gb_s']:,.0f} GB/s.\n"
    if lines:
        layers = record["steps"][0]["layers"]
        text += f"\nA step of a model of DeepSeek-V2-Lite's shape, {layers} layers with dense MLPs, random weights:\n\n"
        text += table(["attention, cache", *(shape(*one) for one in shapes)], lines)
    return f"{text}{note(record)}{source(record)}"


def rotary(record: dict[str, Any]) -> str:
    """KL by the bits of latents and rotary keys, or of keys and values."""
    rows = []
    for row in record["rows"]:
        kl, (low, high) = row["kl"], row["kl_95"]
        cells = [
            f"{row['key_bits']} / {row['value_bits']}",
            f"{row['ratio']:.2f}×",
            f"{kl:.2g} ({low:.2g} to {high:.2g})",
        ]
        rows.append([row["model"], *cells, f"{row['top1']:.1%}", f"{row['recall']:.1%}"])
    header = ["model", "bits", "compression", "KL, nats (95%)", "top-1", "facts"]
    return table(header, rows) + f"\n{record['model']}. {note(record)}{source(record)}"


def soak(record: dict[str, Any]) -> str:
    """Counts of a soak, memory that is left allocated, and answers that are right."""
    columns = {
        "requests": "requests",
        "tokens": "tokens",
        "aborted": "aborted",
        "refused": "refused",
        "sleeps": "sleeps",
    }
    (row,) = record["rows"]
    right = f"{row['equal']:,} of {row['compared']:,}"
    header = [*columns, "memory grown", "pages left", "answers of another", "short answers equal"]
    cells = [f"{row[name]:,}" for name in columns]
    cells += [f"{row['mib_grown']:.3f} MiB", str(row["pages_after_bursts"]), str(row["of another"]), right]
    return table(header, [cells]) + f"\n{record['model']}, {row['seconds']:.0f} s. {note(record)}{source(record)}"


RENDERERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "ablation": ablation,
    "assisted": assisted,
    "balance": balance,
    "bursts": serve,
    "cards": cards,
    "compile_matrix": compile_matrix,
    "cpu": cpu,
    "drafts": drafts,
    "forms": forms,
    "generate": generate,
    "grammars": grammars,
    "latents": latents,
    "models": models,
    "kernels": kernels,
    "multi-gpu": multi_gpu,
    "offload": offload,
    "pages": pages,
    "passkey": passkey,
    "prefill": prefill,
    "prefix": prefix,
    "prefixes": prefixes,
    "prompts": prompts,
    "quality": quality,
    "quantized": quantized,
    "real": real,
    "replicas": replicas,
    "rotary": rotary,
    "ruler": ruler,
    "serve": serve,
    "soak": soak,
    "start": start,
    "trellis": trellis,
    "vllm": serve,
}
"""By the part of a results file's name that comes before the device or the model."""
