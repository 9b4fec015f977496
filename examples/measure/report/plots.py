"""Draw the pictures of both READMEs and the notebooks from the package and from the files in `examples/results`.

    python -m examples.measure.report.plots            # draw what is out of date
    python -m examples.measure.report.plots --check    # exit with an error if a picture is out of date

A picture whose results file does not exist is left out, with a message. Each SVG carries a digest of the numbers it was
drawn from and of the code that draws it, so that a stale one is noticed without drawing it again (fonts and versions of
matplotlib change the bytes of a picture, not what it says). It is light, and dark where the reader's system is: a style
sheet in the file exchanges `DARK` for the colours that the drawing uses.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from examples.measure.report.drawing import (
    COLOURS,
    DARK,
    GREY,
    HEIGHT,
    INK,
    STYLE,
    WIDTH,
    in_plain_numbers,
    in_thousands,
    label_ends,
    label_points,
)
from examples.measure.report.glance import REAL_MODEL
from examples.measure.report.page import shape
from examples.provenance import BASELINE, LLAMA_8B, RESULTS
from tq_hf import PRESETS
from tq_hf.tools.estimate import Estimator

GIB = 2**30


def results(kind: str) -> list[dict[str, Any]]:
    """What the files `KIND-*.json` hold."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(f"{kind}-*.json"))]


def memory_numbers() -> dict[str, Any]:
    """Bytes by context of each cache of one sequence: not measured but exact, from the model's shape."""
    estimator = Estimator(LlamaConfig(**LLAMA_8B, dtype="bfloat16"))
    contexts = [2**power for power in range(11, 18)]
    curves = {
        name: [estimator.footprint(preset, context).total for context in contexts]
        for name, preset in ((BASELINE, None), ("k8v4", "k8v4"), ("4bit_nc", "4bit_nc"), ("2bit_nc", "2bit_nc"))
    }
    return {"contexts": contexts, "curves": curves, "weights": estimator.weight_bytes}


def draw_memory(axes: Any, numbers: dict[str, Any]) -> None:
    """Memory by context, and where a card of 24 GiB ends."""
    contexts, ends = numbers["contexts"], []
    axes.set_xlim(contexts[0], contexts[-1])
    in_thousands(axes, contexts)
    axes.set_ylim(0, 17)
    for name, sizes in numbers["curves"].items():
        line, label = ("-", name) if name in COLOURS else ("--", f"{name},\nbf16")
        colour = COLOURS.get(name, INK)
        axes.plot(contexts, [size / GIB for size in sizes], line, color=colour, marker="o", markersize=4)
        ends.append((contexts[-1], sizes[-1] / GIB, label, colour))
    left = 24 - numbers["weights"] / GIB
    axes.axhline(left, color=GREY, linewidth=1)
    text = {"xytext": (6, 4), "textcoords": "offset points", "fontsize": 9, "color": GREY}
    axes.annotate("what a card of 24 GiB leaves beside the weights", (contexts[0], left), **text)
    axes.set_ylabel("KV cache, GiB")
    axes.set_title("Memory of one sequence, shape of Llama 3.1 8B", fontsize=10)
    label_ends(axes, ends)


ASIDE = ("one pad token", "host work", "room for", "static, compiled, tuned")
"""In names of rows that the picture leaves to the tables."""


def decode_numbers() -> list[dict[str, Any]]:
    """Milliseconds of a decode step by context, of one sequence."""
    panels = []
    for record in results("generate"):
        curves: dict[str, list[tuple[int, float]]] = {}
        for row in record["rows"]:
            if row["batch"] == 1 and "ms_per_step" in row and not any(word in row["cache"] for word in ASIDE):
                curves.setdefault(row["cache"], []).append((row["context"], row["ms_per_step"]))
        curves = {name: points for name, points in curves.items() if len(points) > 2}  # two make no curve
        if curves:
            panels.append({"gpu": record["device"], "model": record["model"], "curves": curves})
    return panels


def draw_decode(axes: Any, numbers: dict[str, Any]) -> None:
    """Time of a step of `generate()` by context; dashed where a cache is not compiled."""
    contexts = sorted({context for points in numbers["curves"].values() for context, _ in points})
    axes.set_xlim(contexts[0], contexts[-1])
    in_thousands(axes, contexts)
    axes.set_yscale("log")
    axes.set_ylim(4, 100)
    in_plain_numbers(axes.yaxis, (5, 10, 20, 50, 100))
    greys, ends = iter((INK, GREY, GREY, GREY)), []
    for name, points in numbers["curves"].items():
        preset, _, rest = name.partition(", ")
        colour = COLOURS[preset] if preset in COLOURS else next(greys)
        places, times = zip(*sorted(points), strict=True)
        axes.plot(places, times, "-" if rest else "--", color=colour, marker="o", markersize=4)
        ends.append((places[-1], times[-1], name, colour))
    axes.set_ylabel("decode step, ms")
    axes.set_title(f"Time of one sequence, {numbers['gpu']}, dashed: not compiled", fontsize=10)
    label_ends(axes, ends)


def overview_numbers() -> list[dict[str, Any]]:
    """Memory and time side by side."""
    return [{"panel": "memory"} | memory_numbers(), *({"panel": "decode"} | numbers for numbers in decode_numbers())]


def draw_overview(axes: Any, numbers: dict[str, Any]) -> None:
    """A panel of the picture at the top of README.md."""
    (draw_memory if numbers["panel"] == "memory" else draw_decode)(axes, numbers)


def kernel_numbers() -> list[dict[str, Any]]:
    """How many times faster than sdpa in bf16 decode attention is, by batch and context, of the first head shape."""
    panels = []
    for record in results("kernels"):
        heads = record["cells"][0]["heads"]
        cells = [cell for cell in record["cells"] if cell["heads"] == heads and cell["speedup"]]
        shapes = sorted({(c["batch"], c["length"]) for c in cells}, key=lambda s: (s[0] * s[1], s))
        speedups = {(c["preset"], c["batch"], c["length"]): c["speedup"] for c in cells}
        presets = dict.fromkeys(cell["preset"] for cell in cells)
        bars = {preset: [speedups.get((preset, *one), 0.0) for one in shapes] for preset in presets}
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
    axes.axhline(1, color=INK, linestyle="--", linewidth=1)
    labels = [shape(*one).replace("× ", "×\n") for one in numbers["shapes"]]
    axes.set_xticks(range(len(labels)), labels)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("batch × context")
    axes.set_ylabel("times as fast as sdpa in bf16")
    query_heads, kv_heads, dim = numbers["heads"]
    axes.set_title(f"Decode attention, heads ({query_heads}, {kv_heads}, {dim}), {numbers['gpu']}", fontsize=10)
    axes.set_ylim(top=1.1 * axes.get_ylim()[1])
    axes.legend(loc="upper left", ncols=len(presets))


def quality_numbers() -> list[dict[str, Any]]:
    """KL by bytes of presets and what they are compared with, on real weights and the longest documents."""
    found = [record for record in results("real") if {*PRESETS} <= {row["cache"] for row in record["rows"]}]
    panels = []
    for record in sorted(found, key=lambda record: record["document_tokens"])[-1:]:
        rows = {row["cache"]: (row["bytes_all_in"], row["kl"]) for row in record["rows"] if not row["injection"]}
        noise = rows.pop("bf16 model", None)
        series = {
            "presets": {name: rows[name] for name in PRESETS},
            "presets, no residual": {n: rows[key] for n in PRESETS if (key := f"{n}, no residual") in rows},
            "vLLM's recipe": {name: place for name, place in rows.items() if name.startswith("vLLM ")},
        }
        others = {
            name: place
            for name, place in rows.items()
            if place[1] > 0 and name not in PRESETS and not re.match("vLLM |.*,", name)
        }
        tokens = record["document_tokens"]
        panels.append({"document_tokens": tokens, "series": series, "others": others, "noise": noise and noise[1]})
    return panels


STYLES = {"presets": ("#d95f02", "o-"), "presets, no residual": ("#b58900", "o:"), "vLLM's recipe": (INK, "s")}


def draw_quality(axes: Any, numbers: dict[str, Any]) -> None:
    """KL by bytes; lower and further left is better."""
    points, lines = [], []
    for name, places in numbers["series"].items():
        if places:
            colour, style = STYLES[name]
            sizes, divergences = zip(*places.values(), strict=True)
            axes.plot(sizes, divergences, style, color=colour, markersize=4, label=name)
            lines += [] if style == "s" else [list(places.values())]
            points += [(place, point, colour) for point, place in places.items() if style != "o:"]
    for name, place in numbers["others"].items():
        axes.plot(*place, "x", color=GREY, markersize=5)
        points.append((place, name, GREY))
    axes.set_xscale("log")
    axes.set_yscale("log")
    in_plain_numbers(axes.xaxis, (40, 50, 60, 70, 80, 100, 130))
    in_plain_numbers(axes.yaxis, (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05))
    axes.margins(x=0.1, y=0.1)
    if numbers["noise"]:
        ends = [edge(place[0] for place, _, _ in points) for edge in (min, max)]
        lines.append([(end, numbers["noise"]) for end in ends])
        axes.axhline(numbers["noise"], color=GREY, linestyle="--", linewidth=1, label="the model itself in bf16")
    axes.set_xlabel("bytes per token and KV head, everything counted")
    axes.set_ylabel("KL from the full cache, nats")
    about = f"{REAL_MODEL}, heads of 64 channels"
    axes.set_title(f"Quality by bytes: {about}, {numbers['document_tokens']:,} tokens", fontsize=10)
    axes.legend(loc="upper right")  # the best place is searched for, with a warning if that takes a second
    axes.figure.draw_without_rendering()  # places are known in pixels only once the layout is
    label_points(axes, points, lines)


def serve_numbers() -> list[dict[str, Any]]:
    """What engines made of the newest trace: tokens a second, and requests in flight, in the mean and at most, and a
    note where a cell failed or was ended early."""
    panels = []
    traces = [each for each in results("serve") if any(row["kind"] == "trace" for row in each["rows"])]
    for record in sorted(traces, key=lambda record: record["date"])[-1:]:
        rows = [row for row in record["rows"] if row["kind"] == "trace"]
        if not rows:
            continue
        about = {"device": record["device"], "requests": record["trace"]["requests"]}
        arrivals = list(dict.fromkeys(row["arrivals"] for row in rows))
        for measure, most in (("tokens_per_second", None), ("in_flight_mean", "in_flight_most")):
            bars: dict[str, dict[str, Any]] = {}
            for row in rows:
                note = row.get("error")
                if left := row.get("unfinished"):
                    total = record["trace"]["requests"]
                    note = f"{total - left} of {total} finished in {row['seconds']:.0f} s"
                bars.setdefault(row["engine"], {})[row["arrivals"]] = (row.get(measure), row.get(most), note)
            panels.append(about | {"measure": measure, "arrivals": arrivals, "bars": bars})
    return panels


STOCK = "transformers' pages, sdpa with a, mask over all, requests"
"""What is drawn for "stock, sdpa", a line after each comma."""


def draw_serve(axes: Any, numbers: dict[str, Any]) -> None:
    """Bars by engine, paler for requests that come little by little; palest up to the most in flight."""
    engines, arrivals = list(numbers["bars"]), numbers["arrivals"]
    speed, height = numbers["measure"] == "tokens_per_second", 0.8 / len(arrivals)
    greys = iter((INK, GREY, GREY, GREY))
    for place, (engine, found) in enumerate(numbers["bars"].items()):
        preset = engine.partition(",")[0]
        colour = COLOURS[preset] if preset in COLOURS else next(greys)
        for index, arrival in enumerate(arrivals):
            value, most, note = found.get(arrival, (None, None, "not measured"))
            y = place + (index - (len(arrivals) - 1) / 2) * height
            text = note
            if most is not None:
                axes.barh(y, most, 0.9 * height, color=colour, alpha=0.25)
            if value is not None:
                axes.barh(y, value, 0.9 * height, color=colour, alpha=1 if index == 0 else 0.55)
                text = f"{value:,.0f}" if speed else f"{value:.0f} in the mean, at most {most}"
                text += f": {note}" if note else ""
            text += f", {arrival}" if len(arrivals) > 1 else ""
            end = max(value or 0, most or 0)
            axes.annotate(text, (end, y), (6, 0), textcoords="offset points", va="center", fontsize=9)
    names = [engine.replace("stock, sdpa", STOCK).replace(", ", "\n") for engine in engines]
    axes.set_yticks(range(len(engines)), names)
    axes.set_ylim(len(engines) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.6 * axes.get_xlim()[1])
    axes.set_xlabel("tokens a second" if speed else "requests in flight")
    axes.set_title(f"A trace of {numbers['requests']:,} requests, {numbers['device']}", fontsize=10)


PICTURES: dict[str, tuple[Callable[[], list[dict[str, Any]]], Callable[[Any, dict[str, Any]], None]]] = {
    "overview": (overview_numbers, draw_overview),
    "kernels": (kernel_numbers, draw_kernels),
    "quality": (quality_numbers, draw_quality),
    "serve": (serve_numbers, draw_serve),
}
"""Name to what gives the numbers of a picture's panels (none without results), and what draws a panel."""


def digest(panels: list[dict[str, Any]]) -> str:
    """What a picture of these numbers, drawn by this file and `drawing.py`, is marked with."""
    here = Path(__file__)
    data = json.dumps(panels, sort_keys=True).encode() + here.read_bytes() + here.with_name("drawing.py").read_bytes()
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
        figure, places = plt.subplots(1, len(panels), squeeze=False, figsize=(WIDTH, HEIGHT))
        for axes, numbers in zip(places[0], panels, strict=True):
            draw(axes, numbers)
    return figure


def dark_style() -> str:
    """A style sheet that exchanges the colours of text, lines and card where the reader's system is dark."""
    pairs = ((part, *colours) for colours in DARK.items() for part in ("fill", "stroke"))
    rules = (f'[style*="{part}: {light}"]{{{part}:{dark} !important}}' for part, light, dark in pairs)
    return f"@media (prefers-color-scheme: dark){{{''.join(rules)}}}"


def save(path: Path, name: str, panels: list[dict[str, Any]]) -> None:
    """Draw one picture to a file."""
    import matplotlib.pyplot as plt

    figure, drawn = figure_of(name, panels), io.StringIO()
    with plt.rc_context(STYLE):
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Description": digest(panels)})
    plt.close(figure)
    path.write_text(drawn.getvalue().replace("</style>", f"{dark_style()}</style>", 1), encoding="utf-8")


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
        sys.exit(f"Out of date: {', '.join(names)}. Run `python -m examples.measure.report.plots`.")


if __name__ == "__main__":
    main()
