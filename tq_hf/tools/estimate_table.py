"""Estimates of a cache's memory, printed as a table or as JSON."""

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
    """Options and results of `tq-hf estimate`."""

    name: str
    estimator: Estimator
    context: int
    batch: int
    max_cache_len: int | None
    memory: int | None
    """Number of bytes of the GPU, or `None` without `--gpu-memory`."""
    free: int | None
    """Number of bytes of the GPU for the cache. 0 if the weights alone do not fit, `None` without `--gpu-memory`."""
    rows: list[Estimate]


def _by_kind(footprint: MemoryFootprint) -> dict[str, int]:
    sizes = asdict(footprint)
    del sizes["by_device"]
    return sizes | {"total": footprint.total}


def as_json(report: Report) -> dict[str, Any]:
    """Convert a report to JSON. Sizes are in bytes."""
    presets: list[dict[str, Any]] = [
        {"preset": row.preset, "after_prefill": _by_kind(row.footprint), "decoding": _by_kind(row.decoding)}
        | ({} if report.free is None else {"max_context": row.max_context, "max_batch": row.max_batch})
        for row in report.rows
    ]
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
        "cache_memory_bytes": report.free,
        "notes": report.estimator.notes,
        "presets": presets,
    }


def print_table(report: Report) -> None:
    """Print a table with one row per preset, and remarks below."""
    console = Console()
    most = max(row.footprint.total for row in report.rows)
    unit, size_of = ("GiB", 2**30) if most >= 10 * 2**30 else ("MiB", 2**20)
    sequences = "one sequence" if report.batch == 1 else f"{report.batch} sequences"
    room = "" if report.max_cache_len is None else f", preallocated for {report.max_cache_len:,}"
    title = f"KV cache of {report.name}, {sequences} of {report.context:,} tokens{room}, in {unit}"
    console.print(title, highlight=False, soft_wrap=True)
    # Only sliding-window layers of a DynamicCache shrink: they hold the whole prompt until the first new token.
    shrinks = any(row.footprint.total > 1.01 * row.decoding.total for row in report.rows)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("preset", no_wrap=True)
    # Show either bytes by kind or the context and batch that fit: both are too wide for a terminal.
    fits = report.free is not None
    headings = [] if fits else ["packed", "dense", "other\nlayers"]
    headings += ["after\nprefill", "decoding"] if shrinks else ["total"]
    headings += ["share\nof bf16"] + (["max\ncontext", "max\nbatch"] if fits else [])
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.rows:
        last = row.decoding if shrinks else row.footprint
        sizes = [] if fits else [last.packed + last.metadata, last.residual + last.sinks, last.uncompressed]
        sizes += [row.footprint.total, last.total] if shrinks else [last.total]
        cells = [f"{size / size_of:,.1f}" for size in sizes] + [f"{last.ratio:.1%}"]
        if fits:
            cells += ["any" if most is None else f"{most:,}" for most in (row.max_context, row.max_batch)]
        table.add_row(row.preset or ("DynamicCache" if report.max_cache_len is None else "StaticCache"), *cells)
    console.print(table)
    for sentence in _remarks(report, shrinks):
        console.print(sentence, highlight=False)


def _remarks(report: Report, shrinks: bool) -> list[str]:
    """Return the sentences below the table."""
    estimator, remarks = report.estimator, []
    if shrinks:
        remarks.append(
            "The sliding-window layers of a DynamicCache hold the whole prompt until the first new token, and only "
            "their window after it. The context and batch that fit are those after the prefill."
        )
    if report.free is not None and report.memory is not None:
        weights = f"{estimator.weight_bytes / 2**30:,.1f} GiB of weights"
        if estimator.quantization is not None and not estimator.notes:
            weights += f" (quantized: {estimator.quantization})"
        if report.free:
            remarks.append(
                f"Of {report.memory / 2**30:,.1f} GiB, {report.free / 2**30:,.1f} GiB are left for the cache beside "
                f"{weights} and the reserve."
            )
        else:
            remarks.append(
                f"The weights alone do not fit: {weights}, and {report.memory / 2**30:,.1f} GiB less the reserve. If "
                "the weights are smaller, pass `--weights 13GB`."
            )
    remarks += estimator.notes
    if estimator.max_positions is not None:
        beyond = ", fewer than `--context`" if report.context > estimator.max_positions else ""
        remarks.append(f"The model is made for up to {estimator.max_positions:,} tokens{beyond}.")
    return remarks
