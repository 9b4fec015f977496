"""The small tables of README.md and of the results page, from the package and the results files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from transformers import LlamaConfig

from examples.measure.quality.family_check import Finding, Outcome
from examples.measure.report.page import cache_name, shape, source, table
from examples.measure.report.tables import GIB, share
from examples.provenance import BASELINE, LLAMA_8B, RESULTS
from tq_hf import PRESETS
from tq_hf.tools.estimate import Estimator

HEAD_DIM = 128
REAL_MODEL = "SmolLM2-135M-Instruct"
GENERATE, KERNELS, QUALITY = "generate-nvidia-h200", "kernels-nvidia-h200", "quality-needle-10m"
FASTEST = "4bit_nc, graph_decoding"
"""The cache of the first table, as the code above it makes it."""
WHICH = {
    "k8v4": "when quality counts more than memory",
    "4bit_nc": "to start with; the default",
    "3.5bit_nc": "a little less memory: keys keep 4 bits",
    "k3v4_nc": "vLLM's; `3.5bit_nc` is as large and closer",
    "3bit_nc": "after measuring on your task",
    "2.5bit_nc": "after measuring on your task",
    "2bit_nc": "when nothing else fits; facts get lost first",
}
READS = {
    BASELINE: "bf16, flash attention, no mask",
    "static, compiled": "bf16, sdpa with a mask over its whole length",
    "4bit_nc": "packed blocks",
    "4bit_nc, compiled": "packed blocks",
    FASTEST: "packed blocks",
}
"""What attention reads at a decode step, by the name of the cache in the results of `generate()`."""
WRONG = {"differs": "are wrong", "raises": "fail"}
"""Verdicts on model types that README.md must not leave out, should there be any."""
COMPARED = ("fp8 scaled", "vLLM k8v4", "k8v4", "vLLM 4bit_nc", "4bit_nc, packed only", "4bit_nc")


def record(name: str) -> dict[str, Any]:
    """A results file; empty if there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def real_records() -> list[dict[str, Any]]:
    """Results on real weights, of the two longest lengths, shorter first."""
    found = [record(path.stem) for path in RESULTS.glob("real-smollm2-*.json")]
    return sorted(found, key=lambda one: one["document_tokens"])[-2:]


def presets() -> str:
    """Sizes of the presets from the package, what they cost in quality from the results, and when to take which."""
    records = real_records()
    measured = [{row["cache"]: row for row in one["rows"]} for one in records]
    rows = []
    for name, config in PRESETS.items():
        layout = config.layout(HEAD_DIM)
        bits = " / ".join("FP8" if bits == 8 else f"{bits} bits" for bits in (config.key_bits, config.value_bits))
        size = f"{layout.block_bytes / layout.tokens:.0f}"
        found = [one.get(name) for one in measured]
        costs = ["–" if row is None else f"{row['kl']:.2g}" for row in found]
        agreed = share(found[0]["top1"]) if found and found[0] else "–"
        rows.append([f"`{name}`", bits, size, f"{layout.compression_ratio:.2f}×", *costs, agreed, WHICH[name]])
    lengths = [f"{one['document_tokens']:,}" for one in records]
    headings = [*(f"KL, {length} tokens" for length in lengths), f"top-1, {lengths[0]}" if lengths else "top-1"]
    documents = " and ".join(
        f"{one['documents']} documents of {one['document_tokens']:,} tokens ({one['device'].partition(',')[0]})"
        for one in records
    )
    about = f"KL (nats) and top-1 of the next token against the full cache: {REAL_MODEL} in float32, {documents}"
    return table(["preset", "keys / values", "bytes", "smaller", *headings, "take it"], rows) + f"\n{about}.\n"


def headline() -> str:
    """Memory and time of a step beside transformers' caches, and under which conditions."""
    found, large, small = record(GENERATE), (8, 32768), (1, 2048)
    cells = {(row["cache"], (row["batch"], row["context"])): row for row in found["rows"]}

    def gib(name: str) -> str:
        return f"{cells[name, large]['peak_bytes_beyond_weights'] / GIB:.1f} GiB"

    def ms(name: str, at: tuple[int, int]) -> str:
        return f"{cells[name, at]['ms_per_step']:.1f} ms"

    names = (BASELINE, "static, compiled", FASTEST)
    rows = [[f"memory beyond the weights, {shape(*large)} tokens", *map(gib, names)]]
    for at in (large, small):
        rows.append([f"time of a decode step, {shape(*at)}", *(ms(name, at) for name in names)])
    for row in rows:
        row[-1] = f"**{row[-1]}**"
    conditions = (
        f"A {found['model']}, in bf16 on one {found['device']}; tq_hf with `graph_decoding`, as in the code above, "
        f"`{BASELINE}` as `generate()` runs it, not compiled. Reading all bf16 weights, keys and values once: "
        f"{read_once(*large):.1f} ms at {shape(*large)} (batch × context)."
    )
    headings = ["8B model", f"`{BASELINE}`", "`StaticCache`, compiled", "tq_hf, `4bit_nc`"]
    return f"{table(headings, rows)}\n{conditions}\n"


def quantized() -> str:
    """Memory, time of a step and KL of `QuantizedCache` and presets, in one run."""
    found = record("quantized-cpu")
    if not found:
        return "Not measured yet.\n"
    rows = {row["cache"]: row for row in found["rows"]}
    base, lines = rows[BASELINE], []
    for name in ("hqq int4", "quanto int4", "4bit_nc", "quanto int2", "2bit_nc"):
        row = rows[name]
        cells = [f"{row['bytes_held'] / 2**20:.1f} MiB", f"{row['ms_per_step'] / base['ms_per_step']:.2f}×"]
        lines.append([cache_name(name), *cells, f"{row['kl']:.2g}", share(row["top1"])])
    about = (
        f"{REAL_MODEL} in {found['dtype']} on {found['device'].partition(',')[0]}, one thread: {found['steps']} tokens "
        f"one by one after {found['prompt']:,}, of {found['documents']} texts. `{BASELINE}` holds "
        f"{base['bytes_held'] / 2**20:.1f} MiB, and its step takes {base['ms_per_step']:.0f} ms. The memory of "
        f"presets includes their newest 128 tokens or more, which are exact. "
        f"[All rows](examples/results/README.md#beside-quantizedcache)."
    )
    return table(["cache", "held", "step / `DynamicCache`'s", "KL, nats", "top-1"], lines) + f"\n{about}\n"


def read_once(batch: int, context: int) -> float:
    """Milliseconds in which the GPU reads what a step needs in bf16: weights without the embedding, and the cache."""
    config = LlamaConfig(**LLAMA_8B, dtype="bfloat16")
    estimator = Estimator(config)
    embedding = 2 * config.vocab_size * config.hidden_size
    size = estimator.weight_bytes - embedding + estimator.footprint(None, context, batch).total
    return size / record(KERNELS)["read_gb_s"] / 1e6


def decode() -> str:
    """Milliseconds of a decode step, of each cache by batch and context."""
    found = record(GENERATE)
    steps = {(row["cache"], row["batch"], row["context"]): row.get("ms_per_step") for row in found["rows"]}
    shapes = [key[1:] for key in steps if key[0] == BASELINE]
    lines = []
    for name, reads in READS.items():
        times = (steps.get((name, *one)) for one in shapes)
        lines.append([cache_name(name), reads, *("–" if ms is None else f"{ms:.1f}" for ms in times)])
    return table(["ms a step, model and GPU as above", "attention reads", *(shape(*one) for one in shapes)], lines)


def families() -> str:
    """A sentence on how many model types of transformers are right."""
    found = record("families").values()
    outcomes = ({mode: Outcome(*one) for mode, one in value["outcomes"].items()} for value in found)
    counts = Counter(Finding("", "", "", each).verdict for each in outcomes)
    wrong = "".join(f" {counts[kind]} {what}." for kind, what in WRONG.items() if counts[kind])
    return (
        f"[{counts.total()} model types](examples/results/families.md) were tried as tiny models: "
        f"{counts['right']} are right in every mode. {counts['alike']} fail with a preallocated cache only, "
        f"where transformers' `StaticCache` fails too. {counts['refused']} are refused with a sentence, and "
        f"{counts['not loaded']} load with their default attention only.{wrong}\n"
    )


def memory() -> str:
    """GiB of a cache by context, from the model's shape."""
    estimator = Estimator(LlamaConfig(**LLAMA_8B, dtype="bfloat16"))
    contexts = [2**power for power in (11, 13, 15, 17)]
    lines = []
    for preset in (None, "k8v4", "4bit_nc", "3bit_nc", "2bit_nc"):
        sizes = (estimator.footprint(preset, context).total / GIB for context in contexts)
        lines.append([f"`{preset}`" if preset else BASELINE, *(f"{size:.2f}" for size in sizes)])
    return table(["GiB", *(shape(1, context) for context in contexts)], lines)


def quality() -> str:
    """KL and recall of presets and of what comes nearest to them, without and with a vector added to all keys."""
    rows = {(row["cache"], row["injection"]): row for row in record(QUALITY)["rows"]}
    lines = []
    for name in COMPARED:
        plain, moved = rows[name, 0.0], rows[name, 10.0]
        found = [f"{row['kl']:.1e}" for row in (plain, moved)]
        lines.append([cache_name(name), f"{plain['bytes_all_in']:.0f}", *found, share(moved["recall"])])
    headings = ["cache", "bytes, all counted", "KL, nats", "KL, biased keys", "facts, biased keys"]
    return table(headings, lines) + source(record(QUALITY))


def options() -> str:
    """Fields of a generation config, and options of a request that it lacks: applied, neutral or refused."""
    from tq_hf.batching.options import (  # needs a newer transformers than other tables
        APPLIED,
        NEUTRAL,
        REQUEST_FIELDS,
        UNCHANGED,
    )

    rows = []
    for fields in (REQUEST_FIELDS, APPLIED):
        for note, group in groupby(fields, key=fields.__getitem__):
            rows.append([quoted(group), "applied", note])
    rows.append(["all others", "refused", f"unless unset, or at the value that changes nothing ({quoted(UNCHANGED)})"])
    rows.append([quoted(sorted(NEUTRAL - {"_from_model_config", "transformers_version"})), "neutral", NO_EFFECT])
    return table(["field", "is", ""], rows, "---")


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def request_fields() -> str:
    """Fields of requests to the server, by endpoint: applied or neutral."""
    from tq_hf.tools.fields import BODIES, WITHOUT_EFFECT

    places: dict[tuple[str, str], list[str]] = {}
    for endpoint, body in BODIES.items():
        for name, field in body.model_fields.items():
            places.setdefault((name, field.description or ""), []).append(endpoint)
    rows = [
        [f"`{name}`", "applied", "all" if len(where) == len(BODIES) else ", ".join(where), note]
        for (name, note), where in places.items()
    ]
    rows.append([quoted(sorted(WITHOUT_EFFECT)), "neutral", "all, if not applied", NO_EFFECT])
    return table(["field", "is", "of", ""], rows, "---")


NO_EFFECT = "changes no answer"
TABLES: dict[str, Callable[[], str]] = {
    "headline": headline,
    "quantized": quantized,
    "presets": presets,
    "decode": decode,
    "families": families,
    "memory": memory,
    "options": options,
    "request_fields": request_fields,
    "quality": quality,
}
"""By the name in the pages' markers."""
