"""An estimate as a table or as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..memory import MemoryFootprint
from .estimate import Estimate, Estimator


@dataclass(frozen=True)
class Report:
    """What was asked and what was found.

    Args:
        name: Of the model.
        estimator: Of the model.
        context: Tokens of the prompt.
        batch: Sequences.
        max_cache_len: Tokens preallocated for, or `None`.
        memory: Bytes of the GPU, or `None` if nobody asked what fits.
        left: Bytes of it for the cache, 0 if the weights alone do not fit.
        rows: A line for each preset.
    """

    name: str
    estimator: Estimator
    context: int
    batch: int
    max_cache_len: int | None
    memory: int | None
    left: int | None
    rows: list[Estimate]


def _kinds(footprint: MemoryFootprint) -> dict[str, int]:
    sizes = asdict(footprint)
    del sizes["by_device"]
    return sizes | {"total": footprint.total}


def as_json(report: Report) -> dict[str, Any]:
    """The numbers, in bytes."""
    presets = []
    for row in report.rows:
        found: dict[str, Any] = {"preset": row.preset, "after_prefill": _kinds(row.footprint)}
        found["decoding"] = _kinds(row.decoding)
        if report.left is not None:
            found |= {"max_context": row.max_context, "max_batch": row.max_batch}
        presets.append(found)
    return {
        "model": report.name,
        "dtype": str(report.estimator.dtype).removeprefix("torch."),
        "quantization": report.estimator.quantization,
        "context": report.context,
        "batch": report.batch,
        "max_cache_len": report.max_cache_len,
        "weight_bytes": report.estimator.weight_bytes,
        "max_position_embeddings": report.estimator.max_positions,
        "gpu_memory_bytes": report.memory,
        "cache_memory_bytes": report.left,
        "notes": report.estimator.notes,
        "presets": presets,
    }


def print_table(report: Report) -> None:
    """The table, and what else there is to say."""
    console = Console()
    most = max(row.footprint.total for row in report.rows)
    unit, size_of = ("GiB", 2**30) if most >= 10 * 2**30 else ("MiB", 2**20)
    sequences = "one sequence" if report.batch == 1 else f"{report.batch} sequences"
    room = "" if report.max_cache_len is None else f", preallocated for {report.max_cache_len:,}"
    title = f"KV cache of {report.name}, {sequences} of {report.context:,} tokens{room}, in {unit}"
    console.print(title, highlight=False, soft_wrap=True)
    # Only a DynamicCache's sliding-window layers change: they hold the whole prompt until the first new token.
    shrinks = any(row.footprint.total > 1.01 * row.decoding.total for row in report.rows)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("preset", no_wrap=True)
    # What fits takes the place of what there is of which kind: both are too wide for a terminal.
    fits = report.left is not None
    headings = [] if fits else ["packed", "dense", "other\nlayers"]
    headings += ["after\nprefill", "decoding"] if shrinks else ["total"]
    headings += ["share\nof bf16"] + (["max\ncontext", "max\nbatch"] if fits else [])
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.rows:
        held = row.decoding if shrinks else row.footprint
        sizes = [] if fits else [held.packed + held.metadata, held.window + held.sinks, held.uncompressed]
        sizes += [row.footprint.total, held.total] if shrinks else [held.total]
        cells = [f"{size / size_of:,.1f}" for size in sizes] + [f"{held.ratio:.1%}"]
        if fits:
            cells += ["any" if most is None else f"{most:,}" for most in (row.max_context, row.max_batch)]
        table.add_row(row.preset or ("DynamicCache" if report.max_cache_len is None else "StaticCache"), *cells)
    console.print(table)
    for sentence in _remarks(report, shrinks):
        console.print(sentence, highlight=False)


def _remarks(report: Report, shrinks: bool) -> list[str]:
    """What there is to say below the table."""
    estimator, said = report.estimator, []
    if shrinks:
        said.append(
            "A DynamicCache's sliding-window layers hold the whole prompt until the first new token, and their window "
            "from then on. What fits is what fits after the prefill."
        )
    if report.left is not None and report.memory is not None:
        weights = f"{estimator.weight_bytes / 2**30:,.1f} GiB of weights"
        if estimator.quantization is not None and not estimator.notes:
            weights += f" (quantized: {estimator.quantization})"
        if report.left:
            said.append(
                f"Of {report.memory / 2**30:,.1f} GiB, {report.left / 2**30:,.1f} GiB are left for the cache beside "
                f"{weights} and the reserve."
            )
        else:
            said.append(
                f"The weights alone do not fit: {weights}, and {report.memory / 2**30:,.1f} GiB less the reserve. If "
                "they take less, say so with `--weights 13GB`."
            )
    said += estimator.notes
    if estimator.max_positions is not None:
        beyond = ", fewer than asked for" if report.context > estimator.max_positions else ""
        said.append(f"The model is made for up to {estimator.max_positions:,} tokens{beyond}.")
    return said
