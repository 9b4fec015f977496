"""How pictures look: colours, axes, and names that stand beside what they name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from examples.measure.report.page import tokens

COLOURS = {
    "k8v4": "#1b9e77",
    "4bit_nc": "#d95f02",
    "3.5bit_nc": "#e6ab02",
    "k3v4_nc": "#a6761d",
    "3bit_nc": "#7570b3",
    "2.5bit_nc": "#66a61e",
    "2bit_nc": "#e7298a",
}
"""Of presets, the same in every picture; everything else is `INK` or grey."""
INK, GREY, CARD = "#1f2328", "#6e7781", "#ffffff"
DARK = {INK: "#e6edf3", GREY: "#9198a1", CARD: "#0d1117"}
STYLE: Any = {
    "axes.edgecolor": GREY,
    "axes.facecolor": CARD,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "figure.facecolor": CARD,
    "font.size": 10,
    "grid.alpha": 0.3,
    "grid.color": GREY,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "savefig.facecolor": CARD,
    "svg.fonttype": "none",
    "svg.hashsalt": "tq_hf",
    "text.color": INK,
    "xtick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.color": GREY,
    "ytick.labelcolor": INK,
}
WIDTH, HEIGHT = 11.5, 4.3
"""Of a picture in inches of 72 pixels: as wide as README.md is shown, so that its letters keep their size."""


def in_thousands(axes: Any, ticks: Iterable[int]) -> None:
    """Label the x axis in thousands of tokens."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [tokens(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("context, tokens")


def in_plain_numbers(axis: Any, ticks: Iterable[float]) -> None:
    """Label a logarithmic axis with numbers that one reads."""
    axis.set_ticks(list(ticks), [f"{tick:g}" for tick in ticks])
    axis.set_minor_locator(axis.get_major_locator().__class__([]))


def label_ends(axes: Any, ends: list[tuple[float, float, str, str]]) -> None:
    """Names of curves `(x, y, name, colour)` right of where they end, none over another."""
    labels = []
    for x, y, name, colour in sorted(ends, key=lambda end: end[1]):
        offset = {"xytext": (7, 0), "textcoords": "offset pixels", "va": "center"}
        labels.append(axes.annotate(name, (x, y), color=colour, fontsize=9, annotation_clip=False, **offset))
    axes.figure.draw_without_rendering()  # places are known in pixels only once the layout is
    boxes = [label.get_window_extent() for label in labels]
    middles = spread([(box.y0 + box.y1) / 2 for box in boxes], [box.height + 3 for box in boxes])
    for label, box, middle in zip(labels, boxes, middles, strict=True):
        label.set_position((7, middle - (box.y0 + box.y1) / 2))


def spread(middles: list[float], heights: list[float]) -> list[float]:
    """Middles, in rising order, moved as little as boxes of these heights need to stand one above the other."""
    groups: list[list[int]] = []
    places = list(middles)
    for index in range(len(middles)):
        groups.append([index])
        while True:
            # Boxes that touch stand together, about the mean of where they belong.
            group = groups[-1]
            room = sum(heights[i] for i in group)
            low = sum(middles[i] for i in group) / len(group) - room / 2
            for i in group:
                places[i] = low + heights[i] / 2
                low += heights[i]
            before = groups[-2][-1] if len(groups) > 1 else None
            if before is None or places[before] + heights[before] / 2 <= places[group[0]] - heights[group[0]] / 2:
                break
            groups[-2:] = [groups[-2] + group]
    return places


AROUND = ((-9, -13, -1), (9, 13, 0), (10, 0, 0), (-10, 0, -1), (0, -16, -0.5), (0, 16, -0.5), (9, -13, 0), (-9, 13, -1))
"""Where a label may stand: to the right and up in pixels, and the share of its width that lies left of that."""
ALIGNED = {0: "left", -0.5: "center", -1: "right"}


def label_points(axes: Any, points: list[tuple[tuple[float, float], str, str]], lines: list[Any]) -> None:
    """Names of points `(place, name, colour)`, each where it covers the least of other names, points and lines."""
    drawn = [axes.transData.transform(place) for place, _, _ in points for _ in range(10)]
    for line in lines:
        corners = axes.transData.transform(line)
        for start, end in zip(corners, corners[1:], strict=False):
            drawn += [start + (end - start) * step / 40 for step in range(41)]
    taken: list[tuple[float, float, float, float]] = []
    for place, name, colour in points:
        x, y = axes.transData.transform(place)
        width, height = 7.2 * len(name), 15.0
        found: list[tuple[int, int, tuple[float, float, float, float], tuple[int, int], str]] = []
        for right, up, share in AROUND:
            left, low = x + right + share * width, y + up - height / 2
            box = (left, low, left + width, low + height)
            covered = sum(box[0] - 2 < a < box[2] + 2 and box[1] < b < box[3] for a, b in drawn)
            over = sum(o[0] < box[2] and box[0] < o[2] and o[1] < box[3] and box[1] < o[3] for o in taken)
            found.append((20 * over + covered, len(found), box, (right, up), ALIGNED[share]))
        _, _, box, offset, side = min(found)
        taken.append(box)
        text = {"xytext": offset, "textcoords": "offset pixels", "ha": side, "va": "center", "fontsize": 9}
        axes.annotate(name, place, color=colour, **text)
