"""How pictures look: colours, axes, and names that stand beside what they name."""

from __future__ import annotations

import itertools
import math
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
    "figure.dpi": 72,  # as in an SVG: labels are placed in pixels
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


AROUND = ((-1, -1), (1, 1), (1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (-1, 1))
"""Sides of a point where its label may stand: right and up."""
ALIGNED = {1: "left", 0: "center", -1: "right"}
GAPS = (4, 8, 13)
"""Pixels between a point and its label, the first that serves."""


def label_points(axes: Any, points: list[tuple[tuple[float, float], str, str]], lines: list[Any]) -> None:
    """Names of points `(place, name, colour)`, each nearer to its own point than to others (corners of `lines` among
    them) and where it covers the least of other names, points and lines."""
    marks = [tuple(axes.transData.transform(place)) for place, _, _ in points]
    drawn = [mark for mark in marks for _ in range(10)]
    for line in lines:
        corners = axes.transData.transform(line)
        marks += [tuple(corner) for corner in corners]
        for start, end in zip(corners, corners[1:], strict=False):
            drawn += [start + (end - start) * step / 40 for step in range(41)]
    taken: list[tuple[float, float, float, float]] = []
    for place, name, colour in points:
        label = axes.annotate(name, place, (0, 0), textcoords="offset pixels", va="center", color=colour, fontsize=9)
        x, y = own = tuple(axes.transData.transform(place))
        extent = label.get_window_extent()
        width, height = extent.width, extent.height
        found: list[tuple[int, int, tuple[float, float, float, float], tuple[float, float], int]] = []
        for gap, (right, up) in itertools.product(GAPS, AROUND):
            left, low = x + right * gap + (right - 1) / 2 * width, y + up * gap + (up - 1) / 2 * height
            box = (left, low, left + width, low + height)
            covered = sum(box[0] - 2 < a < box[2] + 2 and box[1] < b < box[3] for a, b in drawn)
            over = sum(o[0] < box[2] + 2 and box[0] < o[2] + 2 and o[1] < box[3] and box[1] < o[3] for o in taken)
            rivals = sum(gap_between(mark, box) < 1.3 * gap_between(own, box) for mark in set(marks))
            found.append(
                (
                    1000 * over + 30 * rivals + 3 * covered,
                    len(found),
                    box,
                    (right * gap, up * (gap + height / 2)),
                    right,
                )
            )
        _, _, box, offset, right = min(found)
        taken.append(box)
        label.set_position(offset)
        label.set_horizontalalignment(ALIGNED[right])


def gap_between(point: tuple[float, float], box: tuple[float, float, float, float]) -> float:
    """Pixels between a point `(x, y)` and a box `(x0, y0, x1, y1)`."""
    return math.hypot(*(max(low - at, 0.0, at - high) for at, low, high in zip(point, box[:2], box[2:], strict=True)))
