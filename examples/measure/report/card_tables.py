"""How results about cards that are not here are shown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from examples.measure.report.page import cache_name, details, shape, table


def cards(record: dict[str, Any]) -> str:
    """Predicted decode attention against reading fp16, by card, and how far predictions are off where it is known."""
    cells = record["predictions"]
    shapes = dict.fromkeys((cell["preset"], cell["batch"], cell["length"]) for cell in cells)
    headings = ["card", *(f"{preset}, {shape(batch, length)}" for preset, batch, length in shapes)]
    rows = []
    for card in dict.fromkeys(cell["card"] for cell in cells):
        speeds = [f"{cell['speedup']:.1f}×" for cell in cells if cell["card"] == card]
        rows.append([card, *speeds])
    error = record["error"]
    return table(headings, rows) + (
        f"\nPredicted, not measured: `{record['command']}`, calibrated on `{record['calibrated_on']}.json`, of "
        f"whose calls the prediction is {error['median']:.0%} off in the median and {error['worst']:.0%} at most. "
        "MI300X: from the count of the kernel without PTX, which has never run there.\n"
    )


def compile_matrix(record: dict[str, Any]) -> str:
    """Instructions of the decode kernel by target, preset and head_dim, and everything else that was counted folded
    away."""
    rows = record["rows"]
    presets = list(dict.fromkeys(row["preset"] for row in rows))
    targets = list(dict.fromkeys(row["target"] for row in rows))
    cells = {(row["target"], row["dim"], row["preset"]): row for row in rows}

    def of_dim(dim: int) -> str:
        lines = [
            [target, *(f"{cells[target, dim, preset]['decode']['per_element']['total']:.2f}" for preset in presets)]
            for target in targets
            if (target, dim, presets[0]) in cells
        ]
        return table(["target", *map(cache_name, presets)], lines)

    def taken(used: dict[str, Any]) -> str:
        return f"{used['registers']}, {used['stack']}, {used['shared'] / 1024:.1f}"

    def of(row: dict[str, Any], cells: Iterable[str]) -> list[str]:
        return [row["target"], cache_name(row["preset"]), str(row["dim"]), *cells]

    kernels = list(dict.fromkeys(kernel for row in rows for kernel in row if isinstance(row[kernel], dict)))
    resources = [of(row, (taken(row[kernel]) if kernel in row else "–" for kernel in kernels)) for row in rows]
    pipes = list(rows[0]["decode"]["per_element"])
    by_pipe = [of(row, (f"{row['decode']['per_element'][pipe]:.2f}" for pipe in pipes)) for row in rows]
    first = ["target", "preset", "head_dim"]
    dims = list(dict.fromkeys(row["dim"] for row in rows))
    others = "\n".join(f"Heads of {dim} channels:\n\n{of_dim(dim)}" for dim in dims if dim != 128)
    return (
        f"Instructions of the decode kernel per key or value element and thread, heads of 128:\n\n{of_dim(128)}"
        + details("Other heads, and by pipe", f"{others}\n{table([*first, *pipes], by_pipe)}")
        + details("Registers, bytes of stack, KiB of shared memory", table([*first, *kernels], resources))
        + f"\nCounted by `{record['command']}`, Triton {record['triton']}; nothing of it was run. "
        "–: not counted yet, or never launched.\n"
    )
