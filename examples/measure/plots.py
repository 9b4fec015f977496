"""Draw the pictures of README.md and the notebooks from the package and from the files in `examples/results`.

    python examples/measure/plots.py            # draw what is out of date
    python examples/measure/plots.py --check    # exit with an error if a picture is out of date

A picture whose results file does not exist is left out, with a message. Each SVG carries a digest of the numbers it was
drawn from and of this file, so that a stale one is noticed without drawing it again (fonts and matplotlib's versions
change the bytes of a picture, not what it says).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from report import BASELINE, LLAMA_8B, RESULTS
from transformers import LlamaConfig

from tq_hf import PRESETS
from tq_hf.tools.estimate import Estimator

GIB = 2**30
COLOURS = {
    "k8v4": "#1b9e77",
    "4bit_nc": "#d95f02",
    "3.5bit_nc": "#e6ab02",
    "k3v4_nc": "#a6761d",
    "3bit_nc": "#7570b3",
    "2.5bit_nc": "#66a61e",
    "2bit_nc": "#e7298a",
}
"""Of presets, the same in every picture; everything else is black or grey."""
STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "figure.figsize": (6, 4),
    "grid.alpha": 0.3,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "tq_hf",
}


def results(kind: str) -> list[dict[str, Any]]:
    """What the files `KIND-*.json` hold."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(f"{kind}-*.json"))]


def in_thousands(axes: Any, ticks: Iterable[int]) -> None:
    """Label the x axis in thousands of tokens."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick // 1024}k" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("context, tokens")


def memory_numbers() -> list[dict[str, Any]]:
    """Bytes by context of each cache of one sequence: not measured but exact, from the model's shape."""
    estimator = Estimator(LlamaConfig(**LLAMA_8B, dtype="bfloat16"))
    contexts = [2**power for power in range(11, 18)]
    curves = {
        name: [estimator.footprint(preset, context).total for context in contexts]
        for name, preset in ((BASELINE, None), ("k8v4", "k8v4"), ("4bit_nc", "4bit_nc"), ("2bit_nc", "2bit_nc"))
    }
    return [{"contexts": contexts, "curves": curves, "weights": estimator.weight_bytes}]


def draw_memory(axes: Any, numbers: dict[str, Any]) -> None:
    """Memory by context, and where a card of 24 GiB ends."""
    for name, sizes in numbers["curves"].items():
        style = {"color": COLOURS[name]} if name in COLOURS else {"color": "black", "linestyle": "--"}
        label = name if name in COLOURS else f"{name}, bf16"
        axes.plot(numbers["contexts"], [size / GIB for size in sizes], marker="o", markersize=4, label=label, **style)
    left = 24 - numbers["weights"] / GIB
    axes.axhline(left, color="grey", linewidth=1)
    axes.annotate(
        "what 24 GiB leave beside the weights",
        (numbers["contexts"][0], left),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=8,
    )
    in_thousands(axes, numbers["contexts"])
    axes.set_ylabel("KV cache, GiB")
    axes.set_title("Memory by context: shape of Llama 3.1 8B, one sequence", fontsize=10)
    axes.legend()


def decode_numbers() -> list[dict[str, Any]]:
    """Milliseconds of a decode step by context, of one sequence."""
    panels = []
    for record in results("generate"):
        curves: dict[str, list[tuple[int, float]]] = {}
        for row in record["rows"]:
            if row["batch"] == 1 and "ms_per_step" in row:
                curves.setdefault(row["cache"], []).append((row["context"], row["ms_per_step"]))
        curves = {name: points for name, points in curves.items() if len(points) > 1}
        if curves:
            panels.append({"gpu": record["device"], "model": record["model"], "curves": curves})
    return panels


def draw_decode(axes: Any, numbers: dict[str, Any]) -> None:
    """Time of a step of `generate()` by context; dashed where a cache is not compiled."""
    greys = iter(("black", "dimgrey", "darkgrey", "silver"))
    for name, points in numbers["curves"].items():
        preset, _, rest = name.partition(", ")
        colour = COLOURS[preset] if preset in COLOURS else next(greys)
        contexts, times = zip(*sorted(points), strict=True)
        line = "-" if rest else "--"
        axes.plot(contexts, times, color=colour, linestyle=line, marker="o", markersize=4, label=name)
    in_thousands(axes, sorted({context for points in numbers["curves"].values() for context, _ in points}))
    axes.set_yscale("log")
    axes.set_ylabel("decode step, ms")
    axes.set_title(f"Decode time by context: {numbers['model']}, {numbers['gpu']}", fontsize=10)
    lowest, highest = axes.get_ylim()
    axes.set_ylim(lowest, highest * (highest / lowest) ** 0.4)
    axes.legend(loc="upper left", ncols=2)


def kernel_numbers() -> list[dict[str, Any]]:
    """How many times faster than sdpa in bf16 decode attention is, by batch and context, of the first head shape."""
    panels = []
    for record in results("kernels"):
        heads = record["cells"][0]["heads"]
        cells = [cell for cell in record["cells"] if cell["heads"] == heads]
        shapes = sorted({(c["batch"], c["length"]) for c in cells}, key=lambda s: (s[0] * s[1], s))
        speedups = {(c["preset"], c["batch"], c["length"]): c["speedup"] for c in cells}
        presets = dict.fromkeys(cell["preset"] for cell in cells)
        bars = {preset: [speedups.get((preset, *shape), 0.0) for shape in shapes] for preset in presets}
        panels.append({"gpu": record["device"], "heads": heads, "shapes": shapes, "bars": bars})
    return panels


def draw_kernels(axes: Any, numbers: dict[str, Any]) -> None:
    """Bars of speed-up; 1 is bf16."""
    presets = list(numbers["bars"])
    width = 0.8 / len(presets)
    for index, preset in enumerate(presets):
        offset = (index - (len(presets) - 1) / 2) * width
        places = [place + offset for place in range(len(numbers["shapes"]))]
        axes.bar(places, numbers["bars"][preset], width, color=COLOURS[preset], label=preset)
    axes.axhline(1, color="black", linestyle="--", linewidth=1)
    labels = [f"{batch} × {length // 1024}k" for batch, length in numbers["shapes"]]
    axes.set_xticks(range(len(labels)), labels)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("batch × context")
    axes.set_ylabel("times as fast as sdpa in bf16")
    query_heads, kv_heads, dim = numbers["heads"]
    axes.set_title(f"Decode attention, heads ({query_heads}, {kv_heads}, {dim}), {numbers['gpu']}", fontsize=10)
    axes.set_ylim(top=1.1 * axes.get_ylim()[1])
    axes.legend(loc="upper left", ncols=len(presets))


def quality_numbers() -> list[dict[str, Any]]:
    """KL by bytes of presets and what they are compared with, for each model."""
    panels = []
    for record in results("quality"):
        rows = {row["cache"]: (row["bytes_all_in"], row["kl"]) for row in record["rows"] if not row["injection"]}
        noise = rows.pop("bf16 model", None)
        series = {
            "presets": [rows[name] for name in PRESETS if name in rows],
            "presets, nothing kept dense": [
                rows[f"{name}, packed only"] for name in PRESETS if f"{name}, packed only" in rows
            ],
            "vLLM's recipe": [place for name, place in rows.items() if name.startswith("vLLM ")],
        }
        others = {
            name: place
            for name, place in rows.items()
            if place[1] > 0 and name != "bf16" and name not in PRESETS and not re.match("vLLM |.*,", name)
        }
        names = [name for name in PRESETS if name in rows]
        model = {"model": record["model"], "tokens": record["document_tokens"]}
        panels.append(model | {"names": names, "series": series, "others": others, "noise": noise and noise[1]})
    return panels


def draw_quality(axes: Any, numbers: dict[str, Any]) -> None:
    """KL by bytes; lower and further left is better."""
    styles = {"presets": ("#d95f02", "o-"), "presets, nothing kept dense": ("#e6ab02", "o:")}
    for name, places in numbers["series"].items():
        if places:
            colour, style = styles.get(name, ("black", "s"))
            sizes, divergences = zip(*places, strict=True)
            axes.plot(sizes, divergences, style, color=colour, markersize=4, label=name)
    # To the lower left, where nothing else is.
    below = {"xytext": (-4, -8), "textcoords": "offset points", "ha": "right", "fontsize": 7}
    for name, place in zip(numbers["names"], numbers["series"]["presets"], strict=True):
        axes.annotate(name, place, color="#d95f02", **below)
    for name, place in numbers["others"].items():
        axes.plot(*place, "x", color="grey", markersize=4)
        axes.annotate(name, place, xytext=(4, -3), textcoords="offset points", fontsize=7, color="dimgrey")
    if numbers["noise"]:
        axes.axhline(numbers["noise"], color="grey", linestyle="--", linewidth=1, label="the model itself in bf16")
    axes.set_yscale("log")
    axes.margins(x=0.18)
    axes.set_xlabel("bytes per token and KV head, all in")
    axes.set_ylabel("KL from the full cache, nats")
    axes.set_title(f"Quality by bytes: {numbers['model']}, {numbers['tokens']:,} tokens", fontsize=10)
    axes.legend()


PICTURES: dict[str, tuple[Callable[[], list[dict[str, Any]]], Callable[[Any, dict[str, Any]], None]]] = {
    "memory": (memory_numbers, draw_memory),
    "decode": (decode_numbers, draw_decode),
    "kernels": (kernel_numbers, draw_kernels),
    "quality": (quality_numbers, draw_quality),
}
"""Name to what gives the numbers of a picture's panels (none without results), and what draws a panel."""


def digest(panels: list[dict[str, Any]]) -> str:
    """What a picture of these numbers, drawn by this file, is marked with."""
    data = json.dumps(panels, sort_keys=True).encode() + Path(__file__).read_bytes()
    return "sha256:" + hashlib.sha256(data).hexdigest()


def is_current(path: Path, panels: list[dict[str, Any]]) -> bool:
    """Whether the picture at `path` shows `panels`."""
    return path.exists() and digest(panels) in path.read_text(encoding="utf-8")


def figure_of(name: str, panels: list[dict[str, Any]] | None = None) -> Any:
    """The picture called `name` as a matplotlib figure, of its own numbers or others; `None` if there are none."""
    import matplotlib.pyplot as plt

    make_panels, draw = PICTURES[name]
    panels = make_panels() if panels is None else panels
    if not panels:
        return None
    with plt.rc_context(STYLE):
        figure, places = plt.subplots(1, len(panels), squeeze=False, figsize=(6 * len(panels), 4))
        for axes, numbers in zip(places[0], panels, strict=True):
            draw(axes, numbers)
    return figure


def save(path: Path, name: str, panels: list[dict[str, Any]]) -> None:
    """Draw one picture to a file."""
    import matplotlib.pyplot as plt

    figure = figure_of(name, panels)
    with plt.rc_context(STYLE):
        figure.savefig(path, metadata={"Date": None, "Description": digest(panels)})
    plt.close(figure)


def stale(folder: Path = RESULTS) -> list[str]:
    """Names of the pictures that are missing or out of date."""
    found = {name: make_panels() for name, (make_panels, _) in PICTURES.items()}
    return [name for name, panels in found.items() if panels and not is_current(folder / f"{name}.svg", panels)]


def draw() -> None:
    """Draw every picture that is out of date."""
    for name, (make_panels, _) in PICTURES.items():
        panels, path = make_panels(), RESULTS / f"{name}.svg"
        if not panels:
            print(f"{name}: no results yet")
        elif is_current(path, panels):
            print(f"{name}: up to date")
        else:
            save(path, name, panels)
            print(f"{name}: drawn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="draw nothing; fail if a picture is out of date")
    if not parser.parse_args().check:
        draw()
    elif names := stale():
        sys.exit(f"Out of date: {', '.join(names)}. Run `python examples/measure/plots.py`.")


if __name__ == "__main__":
    main()
