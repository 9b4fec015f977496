"""Predicted cost of kernels on other cards: counted from compiled code, and scaled by measurements.

    python -m examples.measure.compile.cards              # calibrate, write examples/results/cards.json; no GPU needed

A decode call takes as long as the slowest of what it does at once: reading bytes, and instructions on each pipe of the
multiprocessors; then come launches and the merging of partial results. The rates are the cards' data sheets, the shares
of them that kernels reach and the fixed costs are fitted to the calls measured on one card (`CALIBRATION`), and every
prediction for that card stands beside its measurement. Instructions are those of `compile_matrix.py`; on AMD they are
of the spelling without PTX, which has never run there. Reading fp16 is what a kernel without compression must do.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from examples.provenance import RESULTS
from tq_hf import PRESETS

MATRIX = RESULTS / "compile_matrix.json"
CALIBRATION = "kernels-nvidia-h200"
TOKENS = 128
WARP_CLOCKS = {"ALU": 0.5, "FMA": 0.25, "heavy": 0.5, "memory": 1.0, "special": 2.0, "other": 0.25}
"""Clocks of a multiprocessor that a warp's instruction takes on its pipe, four quarters of it working side by side: ALU
and IMAD run 16 lanes in a quarter, FMA 32 (16 on sm_75 and sm_80), loads and stores 32 in all, special functions 16."""
AMD_CLOCKS = {"ALU": 1.0, "memory": 2.0, "other": 0.25}
"""The same of a wave of 64: a quarter has 16 lanes, and 128 bytes a clock come from shared memory."""
ISSUE_CLOCKS = 0.25
"""A quarter issues one warp instruction a clock."""


@dataclass(frozen=True)
class Card:
    """A card's data sheet.

    Args:
        target: What kernels are compiled for, as `compile_matrix.py` names it.
        multiprocessors: Of the whole card.
        gigahertz: Boost clock.
        gigabytes_a_second: Of its memory.
        gigabytes: Of memory.
        product_clocks: Clocks of a multiprocessor that a product of fp16 into fp32 takes: m16n8k16, m16n8k8 on sm_75,
            16x16x16 on AMD.
    """

    target: str
    multiprocessors: int
    gigahertz: float
    gigabytes_a_second: float
    gigabytes: int
    product_clocks: float


CARDS = {
    "T4": Card("sm_75", 40, 1.59, 320, 16, 2.0),
    "A100": Card("sm_80", 108, 1.41, 2039, 80, 2.0),
    "A10": Card("sm_86", 72, 1.695, 600, 24, 4.0),
    "L4": Card("sm_89", 58, 2.04, 300, 24, 4.0),
    "RTX 4090": Card("sm_89", 128, 2.52, 1008, 24, 8.0),
    "H100": Card("sm_90", 132, 1.755, 3350, 80, 1.0),
    "H200": Card("sm_90", 132, 1.755, 4800, 141, 1.0),
    "MI300X": Card("gfx942", 304, 2.1, 5300, 192, 4.0),
}


@dataclass(frozen=True)
class Fit:
    """Constants that data sheets do not have.

    Args:
        memory_share: Share of the memory's rate that is reached.
        pipe_share: Share of the rate of the busiest pipe that is reached.
        fixed_us: Launches of three kernels, the merge, and what a share costs at its beginning and end.
        slot_us: Of each 1000 partial rows written and merged.
        overlap: Exponent p of (read**p + computed**p)**(1 / p), between their sum (1) and the larger (many).
    """

    memory_share: float
    pipe_share: float
    fixed_us: float
    slot_us: float
    overlap: float


def packed_bytes(batch: int, length: int, heads: tuple[int, int, int], preset: str) -> float:
    """Bytes of a layer's packed blocks, sinks and window apart."""
    _, kv_heads, dim = heads
    layout = replace(PRESETS[preset], loud=False).layout(dim)  # as measured and counted, before loud channels
    return batch * kv_heads * length / TOKENS * layout.block_bytes


def dense_bytes(batch: int, length: int, heads: tuple[int, int, int]) -> float:
    """Bytes of the same keys and values in fp16."""
    return batch * length * heads[1] * heads[2] * 4.0


def pipe_us(card: Card, counts: dict[str, float], elements: float) -> float:
    """Microseconds of the busiest pipe, or of issuing, for this number of key and value elements."""
    amd = not card.target.startswith("sm_")
    clocks = AMD_CLOCKS if amd else WARP_CLOCKS | ({"FMA": 0.5} if card.target in ("sm_75", "sm_80") else {})
    clocks = clocks | {"tensor": card.product_clocks}
    busiest = max(max(counts[pipe] * clocks[pipe] for pipe in clocks), counts["total"] * ISSUE_CLOCKS)
    return elements / (64 if amd else 32) * busiest / (card.multiprocessors * card.gigahertz * 1e3)


def predicted_us(
    card: Card, fit: Fit, counts: dict[str, float], batch: int, length: int, heads: tuple[int, int, int], preset: str
) -> float:
    """Microseconds of a decode call of one layer.

    Args:
        counts: Instructions per element and thread by pipe (`sass.per_element`), for this card's target, preset and
            head_dim.
        heads: Query heads, KV heads, head_dim.
    """
    read = packed_bytes(batch, length, heads, preset) / (card.gigabytes_a_second * 1e3 * fit.memory_share)
    computed = pipe_us(card, counts, dense_bytes(batch, length, heads) / 2) / fit.pipe_share
    # Reading and computing hide each other in part only.
    both = (read**fit.overlap + computed**fit.overlap) ** (1 / fit.overlap)
    rows = min(heads[0] // heads[1], 8) * (4 * card.multiprocessors + batch * heads[1]) / 1000
    return both + fit.fixed_us + fit.slot_us * rows


def dense_us(card: Card, fit: Fit, batch: int, length: int, heads: tuple[int, int, int]) -> float:
    """Microseconds of reading the same in fp16 at the same share of the memory's rate, and one launch."""
    return dense_bytes(batch, length, heads) / (card.gigabytes_a_second * 1e3 * fit.memory_share) + fit.fixed_us / 3


Cell = dict[str, Any]


def measured_cells(results: dict[str, Any]) -> list[Cell]:
    """The decode calls of a results file of `benchmark.py kernels`."""
    return [cell | {"heads": tuple(cell["heads"])} for cell in results["cells"] if cell["preset"] in PRESETS]


def error(cell: Cell, card: Card, fit: Fit, counts: dict[str, dict[str, float]]) -> float:
    """Predicted over measured, less one."""
    found = predicted_us(
        card, fit, counts[f"{cell['preset']}/{cell['heads'][2]}"], cell["batch"], cell["length"], cell["heads"],
        cell["preset"],
    )  # fmt: skip
    return found / cell["graph_us"] - 1


def calibrate(cells: Iterable[Cell], card: Card, counts: dict[str, dict[str, float]]) -> Fit:
    """The fit of least mean squared relative error, by descent along one number after another."""
    cells = list(cells)

    def loss(fit: Fit) -> float:
        return statistics.fmean(error(cell, card, fit, counts) ** 2 for cell in cells)

    fit, step = Fit(0.8, 0.7, 15.0, 1.0, 3.0), 0.2
    while step > 1e-3:
        better = fit
        for name in ("memory_share", "pipe_share", "fixed_us", "slot_us", "overlap"):
            for factor in (1 + step, 1 / (1 + step)):
                tried = replace(fit, **{name: getattr(fit, name) * factor})
                if tried.memory_share <= 1 and tried.pipe_share <= 1 <= tried.overlap and loss(tried) < loss(better):
                    better = tried
        step = step if better != fit else step / 2
        fit = better
    return fit


def load() -> dict[str, Any]:
    """The results file; empty if there is none."""
    path = RESULTS / "cards.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def card_of(name: str) -> str | None:
    """The card of `CARDS` that a device name of `torch.cuda` means."""
    words = name.replace("-", " ").split()
    return next((card for card in CARDS if card.split()[-1] in words), None)


def prediction(device_name: str) -> str:
    """For a notebook: decode attention against reading fp16 on the card it runs on, a line for each preset."""
    card = card_of(device_name)
    cells = [cell for cell in load().get("predictions", []) if cell["card"] == card]
    if not cells:
        return f"{device_name}: not one of the cards whose speed is predicted ({', '.join(CARDS)})."
    lines = [f"{card}: attention of a decode step against reading fp16, predicted for {cells[0]['heads']} heads"]
    for preset in dict.fromkeys(cell["preset"] for cell in cells):
        speeds = [
            f"{cell['batch']} x {cell['length'] // 1024}k: {cell['speedup']:.1f}"
            for cell in cells
            if cell["preset"] == preset
        ]
        lines.append(f"  {preset.ljust(8)} " + "   ".join(speeds))
    if not CARDS[str(card)].target.startswith("sm_"):
        lines.append("  (from the count of instructions of kernels that have never run on such a card)")
    return "\n".join(lines)


PREDICTED_FOR = ((1, 8192), (1, 32768), (8, 8192))
PRESETS_SHOWN = ("k8v4", "4bit_nc", "3bit_nc", "2bit_nc")
HEADS = (32, 8, 128)


def counted() -> dict[str, dict[str, dict[str, float]]]:
    """Instructions per element of the decode kernel by pipe, by target and "preset/head_dim"."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in json.loads(MATRIX.read_text(encoding="utf-8"))["rows"]:
        found.setdefault(row["target"], {})[f"{row['preset']}/{row['dim']}"] = row["decode"]["per_element"]
    return found


def predictions(fit: Fit, counts: dict[str, dict[str, dict[str, float]]]) -> list[Cell]:
    """Decode calls on every card, against reading fp16."""
    cells = []
    for name, card in CARDS.items():
        for preset in PRESETS_SHOWN:
            found = counts[card.target][f"{preset}/{HEADS[2]}"]
            for batch, length in PREDICTED_FOR:
                us = predicted_us(card, fit, found, batch, length, HEADS, preset)
                dense = dense_us(card, fit, batch, length, HEADS)
                cells.append(
                    dict(
                        card=name,
                        preset=preset,
                        batch=batch,
                        length=length,
                        heads=HEADS,
                        us=us,
                        fp16_us=dense,
                        speedup=dense / us,
                    )  # fmt: skip
                )
    return cells


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    counts = counted()
    results = json.loads((RESULTS / f"{CALIBRATION}.json").read_text(encoding="utf-8"))
    cells, card = measured_cells(results), CARDS["H200"]
    fit = calibrate(cells, card, counts["sm_90"])
    errors = [
        {k: cell[k] for k in ("batch", "length", "heads", "preset", "graph_us")}
        | {"error": error(cell, card, fit, counts["sm_90"])}
        for cell in cells
    ]
    sizes = sorted(abs(e["error"]) for e in errors)
    record = {
        "command": "python -m examples.measure.compile.cards",
        "calibrated_on": CALIBRATION,
        "fit": vars(fit),
        "error": {"median": statistics.median(sizes), "worst": sizes[-1], "within_10%": sum(e <= 0.1 for e in sizes)},
        "errors": errors,
        "predictions": predictions(fit, counts),
    }
    (RESULTS / "cards.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(record["fit"], record["error"])


if __name__ == "__main__":
    main()
