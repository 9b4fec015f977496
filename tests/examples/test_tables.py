"""Cells of a results file are shown also where a measurement failed or is missing (the others are those of the pages,
`test_readme.py`); and the committed pictures show what the package and the results files say."""

import json
import math
import re
from collections.abc import Callable
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from examples.measure.report import drawing, make_tables, plots, tables

FROM = dict(command="python examples/x.py", gpu="A GPU", device="A GPU", model="a model", date="2026-11-21")
FROM |= dict(torch="2.11.0", triton="3.6.0", versions={"torch": "2.11.0", "transformers": "5.23.0"})

TIMES = {"first_token_s_p50": 0.512, "first_token_s_p99": 2.25, "per_token_s_p50": 0.0125, "per_token_s_p99": None}
SERVED = {"kind": "trace", "arrivals": "all at once"}
SERVED |= {"cache_bytes": 60 * 2**30, "cache_tokens": 1797000, "flash_room_tokens": 455000}
SERVE = {
    "trace": {"requests": 64, "prompts": [200, 16384], "answers": [32, 1024]},
    "rows": [
        {"kind": "decode", "batch": 32, "context": 2048, "engine": "stock, sdpa", "ms_per_step": 135.0}
        | {"steps": 64, "prompt_tokens_per_second": 20123.4, "peak_bytes_beyond_weights": 100 * 2**30},
        {"kind": "decode", "batch": 64, "context": 16384, "engine": "stock, sdpa", "error": "room for 9 tokens"}
        | {"bf16_floor_ms": 35.0},
        {"kind": "decode", "batch": 32, "context": 2048, "engine": "4bit_nc, static, graph_decoding"}
        | {"ms_per_step": 8.3, "peak_bytes_beyond_weights": 2**30, "bf16_floor_ms": 5.0},
        SERVED
        | TIMES
        | {"engine": "4bit_nc", "tokens_per_second": 3855.4, "seconds": 9.0, "unfinished": 3}
        | {"in_flight_most": 64, "in_flight_mean": 40.6, "peak_bytes_beyond_weights": 70 * 2**30},
        SERVED | {"engine": "stock, sdpa", "error": "out of memory"},
    ],
}

CODE = {"code": "2: c", "states": 4, "squared_error": 0.09, "over_scalar": 0.767, "ns_a_channel": 500.4}

EXPECTED = [
    ("trellis", {"rows": [CODE | {"instructions": None}]}, ["| 2: c | 4 | 0.09000 | 0.767× | 500 ns | – |"]),
    (
        "serve",
        SERVE,
        ["| stock, sdpa | **135.0** ms, prompts 20,123/s, 100.0 GiB | room for 9 tokens |", "| 5.0 ms | 35.0 ms |"],
    ),
    ("serve", SERVE, ["| `4bit_nc`, static, graph_decoding | **8.3** ms, 1.0 GiB | – |"]),
    (
        "serve",
        SERVE,
        [
            "64 requests, prompts of 200 to 16,384 tokens, answers of 32 to 1,024:",
            "| `4bit_nc` | all at once | **3,855** (3 unfinished) | 0.51 / 2.25 s | 12.5 / – ms | 64 / 41 |",
            "| 1,797,000 (3.95×) |",
            "| 60.00 GiB of 70.00 |",
            "| stock, sdpa | all at once | out of memory | – |",
        ],
    ),
]


@pytest.mark.parametrize(
    ("kind", "record", "shown"), EXPECTED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_cells_are_shown_in_rows_as_wide_as_their_headings(kind: str, record: dict[str, Any], shown: list[str]) -> None:
    text = tables.RENDERERS[kind](FROM | record)
    assert [part for part in shown if part not in text] == []
    assert "`python examples/x.py` on A GPU" in text and "torch 2.11.0" in text and "2026-11-21" in text
    assert_rows_are_as_wide_as_their_headings(text)


def assert_rows_are_as_wide_as_their_headings(text: str) -> None:
    lines = text.splitlines()
    for before, line in zip(lines, lines[1:], strict=False):
        if before.startswith("|") and line.startswith("|"):
            assert before.count("|") == line.count("|")


BROKEN: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "error": ("generate-nvidia-h200", lambda of: of["rows"][0].update(error="out of memory"), "| out of memory |"),
    "error of a rank": (
        "multi-gpu-nvidia-h200-parallel",
        lambda of: of["tensor_parallel"].update({"pages, 32 x 2048": [{"error": "RuntimeError: one | two"}]}),
        "| RuntimeError: one / two |",
    ),
    "no number": ("quality-needle-10m", lambda of: of["rows"][3].update(kl=math.nan, kl_p99=math.nan), "| NaN |"),
    "nothing to compare with": ("replicas-nvidia-h200", lambda of: of.update(rows=of["rows"][-1:]), "| – |"),
}
"""A results file, what becomes of it, and how that is shown."""


@pytest.mark.parametrize("what", BROKEN)
def test_what_a_measurement_lacks_is_shown(what: str) -> None:
    name, change, shown = BROKEN[what]
    record = json.loads((plots.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    render = tables.RENDERERS[make_tables.kind_of(plots.RESULTS / f"{name}.json")]
    before = render(record).count(shown)
    change(record)
    text = render(record)
    assert text.count(shown) > before or what == "nothing to compare with" and shown in text
    assert_rows_are_as_wide_as_their_headings(text)


figure_of = lru_cache(plots.figure_of)
DRAWN = {name: panels for name, (make_panels, _) in plots.PICTURES.items() if (panels := make_panels())}


def changed(panels: list[dict]) -> list[dict]:
    """A copy in which one number is another."""
    copied = json.loads(json.dumps(panels))  # tuples become lists, which can be changed

    def change(value):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, (int, float)):
                value[key] = item + 1
                return True
            if isinstance(item, (dict, list)) and change(item):
                return True
        return False

    assert change(copied)
    return copied


def test_pictures_are_up_to_date() -> None:
    assert plots.stale() == [], "run `make tables`"


def test_engines_are_drawn_with_what_they_made_of_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds in one panel, requests in flight in the other; why there is none where there is none."""
    newest, older = (SERVE | {"device": "a GPU", "date": f"2026-11-{day}"} for day in (24, 22))
    monkeypatch.setattr(plots, "results", {"serve": [newest, older | {"device": "another"}]}.get)
    speeds, flight = panels = plots.serve_numbers()
    assert speeds["bars"]["4bit_nc"] == {"all at once": (3855.4, None, "61 of 64 finished in 9 s")}
    assert flight["bars"]["4bit_nc"] == {"all at once": (40.6, 64, "61 of 64 finished in 9 s")}
    assert flight["bars"]["stock, sdpa"] == {"all at once": (None, None, "out of memory")}
    plots.save(tmp_path / "serve.svg", "serve", panels)
    text = (tmp_path / "serve.svg").read_text(encoding="utf-8")
    words = ("3,855: 61 of 64 finished in 9 s", "41 in the mean, at most 64", "out of memory", "64 requests, a GPU")
    assert [each for each in (*words, drawing.COLOURS["4bit_nc"]) if each not in text] == []


def test_there_is_no_picture_that_nothing_draws() -> None:
    assert {path.stem for path in plots.RESULTS.glob("*.svg")} == set(DRAWN)


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_stale_once_a_number_changes(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.svg"
    assert not plots.is_current(path, DRAWN[name])
    plots.save(path, name, DRAWN[name])
    assert plots.is_current(path, DRAWN[name])
    assert not plots.is_current(path, changed(DRAWN[name]))


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_small_and_drawn_the_same_twice(name: str, tmp_path: Path) -> None:
    pictures = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        plots.save(folder / "x.svg", name, DRAWN[name])
        pictures.append((folder / "x.svg").read_bytes())
    assert pictures[0] == pictures[1] and len(pictures[0]) < 100_000
    assert ElementTree.fromstring(pictures[0]).tag.endswith("svg")


def test_without_results_a_picture_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["plots.py"])
    plots.main()
    assert {path.stem for path in tmp_path.iterdir()} == {"overview"}
    assert "kernels: no results yet" in capsys.readouterr().out


def test_the_pages_show_every_picture() -> None:
    shown = {p.resolve() for page in make_tables.PAGES for p in map(page.parent.joinpath, sources(page))}
    assert shown == {plots.RESULTS / f"{name}.svg" for name in DRAWN}


def sources(page: Path) -> list[str]:
    return re.findall(r'<img src="([^"]+)"', page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_dark_where_the_system_is(name: str) -> None:
    text = (plots.RESULTS / f"{name}.svg").read_text(encoding="utf-8")
    style, drawn = re.search(r"@media \(prefers-color-scheme: dark\){(.*)}</style>(.*)", text, flags=re.DOTALL).groups()
    used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawn))
    assert used <= set(drawing.DARK) | set(drawing.COLOURS.values()) | {c for c, _ in plots.STYLES.values()}
    assert drawing.CARD in used and drawing.INK in used
    assert all(f"fill: {colour}" in style and f"stroke: {colour}" in style for colour in drawing.DARK)
    assert "#000000" not in drawn


def test_contexts_are_labelled_by_their_length() -> None:
    labels = [text.get_text() for text in figure_of("overview").axes[1].get_xticklabels()]
    assert labels == ["512", "2k", "8k", "32k", "128k"]


@pytest.mark.parametrize("name", DRAWN)
def test_no_curve_leaves_its_panel(name: str) -> None:
    for axes in figure_of(name).axes:
        (low, high), (bottom, top) = sorted(axes.get_xlim()), sorted(axes.get_ylim())
        for line in axes.lines:
            assert all(bottom <= y <= top for y in line.get_ydata()), line.get_ydata()
            if line.get_transform() is axes.transData:  # not a line across the panel
                assert all(low <= x <= high for x in line.get_xdata()), line.get_xdata()


def words_of(figure: Any) -> dict[str, Any]:
    """The boxes of all that is written in a picture, in pixels."""
    figure.draw_without_rendering()
    boxes = {}
    for number, axes in enumerate(figure.axes):
        (low, high), (bottom, top) = sorted(axes.get_xlim()), sorted(axes.get_ylim())
        ticks = [label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
        ticks += [label for label in axes.get_yticklabels() if bottom <= label.get_position()[1] <= top]
        legend = axes.get_legend().get_texts() if axes.get_legend() else []
        names = [axes.title, axes.xaxis.label, axes.yaxis.label]
        for text in (*axes.texts, *ticks, *legend, *names):
            if text.get_text() and text.get_visible():
                boxes[f"{number}: {text.get_text()!r} at {text.get_position()}"] = text.get_window_extent()
    return boxes


@pytest.mark.parametrize("name", DRAWN)
def test_nothing_is_written_over_something_else_or_beyond_the_edge(name: str) -> None:
    figure = figure_of(name)
    boxes = words_of(figure)
    assert len(boxes) > 10
    over = [
        (first, second)
        for (first, a), (second, b) in combinations(boxes.items(), 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1
    ]
    assert over == []
    width, height = figure.get_size_inches() * figure.dpi
    beyond = [text for text, b in boxes.items() if min(b.x0, b.y0, width - b.x1, height - b.y1) < -1]
    assert beyond == []


@pytest.mark.parametrize("name", DRAWN)
def test_labels_of_an_axis_are_apart(name: str) -> None:
    """By more than a space between two words: without that, "1 × 32k 1 × 128k" reads as one."""
    figure = figure_of(name)
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert all(b.x0 - a.x1 > 6 for a, b in zip(boxes, boxes[1:], strict=False))


def test_a_label_is_nearer_to_its_point_than_to_any_other() -> None:
    (axes,) = figure_of("quality").axes
    axes.figure.draw_without_rendering()
    places = {tuple(point) for line in axes.lines for point in line.get_xydata() if line.get_marker() != "None"}
    pixels = {place: tuple(axes.transData.transform(place)) for place in places}
    assert len(axes.texts) > 10
    for label in axes.texts:
        extent = label.get_window_extent()
        box = (extent.x0, extent.y0, extent.x1, extent.y1)
        gaps = {place: drawing.gap_between(pixel, box) for place, pixel in pixels.items()}
        own = gaps.pop(label.xy)
        assert own < 15 and own < min(gaps.values()), label.get_text()


@pytest.mark.parametrize("name", DRAWN)
def test_labels_are_placed_in_the_pixels_of_the_file(name: str) -> None:
    """An SVG has 72 pixels an inch: offsets in pixels of another figure put labels elsewhere."""
    assert figure_of(name).dpi == 72


@pytest.mark.parametrize(
    ("middles", "expected"),
    [
        ([0.0, 30.0], [0.0, 30.0]),
        ([0.0, 4.0], [-3.0, 7.0]),
        ([0.0, 9.0, 10.0, 40.0], [-3.666667, 6.333333, 16.333333, 40.0]),
    ],
)
def test_labels_that_would_touch_move_apart_as_little_as_they_must(middles: list[float], expected: list[float]) -> None:
    assert drawing.spread(middles, [10.0] * len(middles)) == pytest.approx(expected)
