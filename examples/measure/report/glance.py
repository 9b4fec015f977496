"""The small tables of README.md: presets, and results at a glance, from the package and the results files."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from transformers import LlamaConfig

from examples.measure.report.page import cache_name, note, shape, source, table
from examples.measure.report.tables import GIB, share
from examples.provenance import BASELINE, LLAMA_8B, RESULTS
from tq_hf import PRESETS
from tq_hf.tools.estimate import Estimator

HEAD_DIM = 128
GENERATE, QUALITY = "generate-nvidia-h200", "quality-needle-10m"
WHICH = {
    "k8v4": "when quality counts more than memory",
    "4bit_nc": "to start with; the default",
    "3.5bit_nc": "a little less memory: keys keep 4 bits",
    "k3v4_nc": "vLLM's; `3.5bit_nc` is as large and closer",
    "3bit_nc": "after measuring on your task",
    "2.5bit_nc": "after measuring on your task",
    "2bit_nc": "when nothing else fits",
}
READS = {
    BASELINE: "bf16, flash attention, no mask",
    "static, compiled": "bf16, sdpa with a mask over its whole length",
    "quantized fp8": "the history dequantized at each step",
    "4bit_nc": "packed blocks",
    "4bit_nc, compiled": "packed blocks",
    "4bit_nc, graph_decoding": "packed blocks",
}
"""What attention reads at a decode step, by the name of the cache in the results of `generate()`."""
COMPARED = ("fp8 scaled", "vLLM k8v4", "k8v4", "vLLM 4bit_nc", "4bit_nc, packed only", "4bit_nc")


def record(name: str) -> dict[str, Any]:
    """A results file; empty if there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def presets() -> str:
    """Sizes of the presets from the package, what they cost in quality from the results, and when to take which."""
    measured = {row["cache"]: row for row in record(QUALITY).get("rows", []) if not row["injection"]}
    rows = []
    for name, config in PRESETS.items():
        layout, row = config.layout(HEAD_DIM), measured.get(name)
        bits = " / ".join("FP8" if bits == 8 else f"{bits} bits" for bits in (config.key_bits, config.value_bits))
        size = f"{layout.block_bytes / layout.tokens:.0f}"
        quality = [f"{row['kl']:.1e}", share(row["recall"])] if row else ["–", "–"]
        rows.append([f"`{name}`", bits, size, f"{layout.compression_ratio:.2f}×", *quality, WHICH[name]])
    headings = ["preset", "keys / values", "bytes", "smaller", "KL, nats", "facts", "take it"]
    return table(headings, rows)


def decode() -> str:
    """Milliseconds of a decode step, of each cache by batch and context."""
    found = record(GENERATE)
    steps = {(row["cache"], row["batch"], row["context"]): row.get("ms_per_step") for row in found["rows"]}
    shapes = [key[1:] for key in steps if key[0] == BASELINE]
    lines = []
    for name, reads in READS.items():
        times = (steps.get((name, *one)) for one in shapes)
        lines.append([cache_name(name), reads, *("–" if ms is None else f"{ms:.1f}" for ms in times)])
    return (
        table(["ms a step", "attention reads", *(shape(*one) for one in shapes)], lines) + note(found) + source(found)
    )


def ways() -> str:
    """Four ways to generate with a cache, and milliseconds of a step of one sequence."""
    steps = {
        (row["cache"], row["context"]): row.get("ms_per_step") for row in record(GENERATE)["rows"] if row["batch"] == 1
    }
    lines = []
    for call, name, when in (
        ("`past_key_values=TurboQuantCache(config)`", "4bit_nc", "anywhere; grows as long as there is memory"),
        (
            "... `TurboQuantCache(config, max_cache_len=n)`",
            "4bit_nc, compiled",
            "on a GPU `generate()` compiles it, once",
        ),
        (
            "... and `custom_generate=graph_decoding`",
            "4bit_nc, graph_decoding",
            "likewise, and each step is one CUDA graph",
        ),
        (
            "... and `compile_config=tuned`",
            "4bit_nc, graph_decoding, tuned",
            "of one sequence; compiles half a minute longer",
        ),
    ):
        lines.append([call, *(f"{steps[name, context]:.1f}" for context in (2048, 32768)), when])
    return table(["`generate(...)`", "ms at 2k", "ms at 32k", "take it"], lines)


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


TABLES: dict[str, Callable[[], str]] = {
    "presets": presets,
    "decode": decode,
    "ways": ways,
    "memory": memory,
    "quality": quality,
}
"""By the name in README.md's markers."""
