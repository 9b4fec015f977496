"""Cells of a results file are shown also where a measurement failed or is missing (the others are those of the pages,
`test_readme.py`); and the committed pictures show what the package and the results files say."""

import json
import re
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from examples.measure.report import drawing, make_tables, plots, tables

FROM = {
    "command": "python examples/x.py",
    "gpu": "A GPU",
    "device": "A GPU",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "date": "2026-11-21",
    "model": "a model",
    "versions": {"torch": "2.11.0", "transformers": "5.23.0"},
}


GENERATE = {
    "rows": [
        {"batch": 1, "context": 2048, "cache": "DynamicCache", "ms_per_step": 21.5, "peak_bytes_beyond_weights": 2**30},
        {"batch": 1, "context": 1000, "cache": "4bit_nc, compiled", "ms_per_step": 6.5, "peak_bytes_beyond_weights": 0},
        {"batch": 8, "context": 32768, "cache": "DynamicCache", "error": "out of memory"},
        {"batch": 8, "context": 32768, "cache": "4bit_nc, graph_decoding, host work × 2", "ms_per_step": 8.4}
        | {"peak_bytes_beyond_weights": 2**31},
    ]
}
COMPARED = {"tokens": 24, "equal": 23, "near_ties": 1, "furthest_behind": 0.0125}
KERNELS_OF_A_STEP = {"groups": {"all-reduce": 441.4, "other": 59.6}, "gaps_us": 120.0, "wall_us": 5200.0}
OF_A_GRAPH = {"against_eager": COMPARED, "kernels": KERNELS_OF_A_STEP | {"us_by_events": 5100.0}}
ONE = {"replicas": 1, "tp": 1, "load": "strong", "prompts": 8, "tokens_per_second": 1000.0, "first_token_s_p50": 0.5}
ONE |= {"first_token_s_p99": 2.0, "prompts_by_replica": [8], "room": 4000, "first_answer_s": 7.2}
REPLICAS = {"requests": 8, "lengths": [1200, 2900], "new_tokens": 128, "rows": [ONE]}  # nothing to compare with
MULTI_GPU = {
    "one_gpu": {
        "graph_decoding, 8 x 32768": OF_A_GRAPH | {"ms_per_step": 9.0, "bytes_held": 9 * 2**30},
        "pages, 32 x 2048": {"ms_per_step": 12.0},
        "eager 4bit_nc, 8 x 32768": {"ms_per_step": 37.5},
    },
    "tensor_parallel": {
        "graph_decoding, 8 x 32768": [
            OF_A_GRAPH | {"ms_per_step": ms, "bytes_held": int(4.5 * 2**30)} for ms in (5.5, 6.0)
        ],
        "pages, 32 x 2048": [{"ms_per_step": 8.0}, {"error": "RuntimeError: one | two"}],
        "logits": [{"relative_rms": 0.0625, "mean_kl": 0.002, "same_top1": 0.75}] * 2,
        "all_reduce": [{"8": {"bytes": 65536, "us": {"nccl": 9.04, "one_shot": 5.0}}}] * 2,
    },
    "device_map": {
        "eager 4bit_nc, 8 x 32768": {"ms_per_step": 38.5},
        "greedy": {"tokens": 64, "equal": 63},
        "bytes_by_device": {"cuda:0": 5 * 2**30, "cuda:1": 4 * 2**30},
    },
}


def quality_row(cache: str, kl: float, injection: float = 0.0) -> dict[str, Any]:
    sizes = {"cache": cache, "bytes_all_in": 158.2, "bytes_packed": 134.0, "injection": injection}
    shares = {"delta_ppl": 0.0005, "top1": 0.995, "passkey_recall": 1.0, "recall": None}
    return sizes | {"kl": kl, "kl_95": [kl, kl], "kl_p99": kl} | shares


QUALITY = {
    "parameters": 10034816,
    "documents": 36,
    "document_tokens": 4096,
    "chunk": 128,
    "rows": [
        quality_row("4bit_nc", 0.00023),
        quality_row("4bit_nc, packed only", 0.00056),
        quality_row("transformers fp8", float("nan")),
        quality_row("4bit_nc", 0.00029, injection=10.0),
    ],
    "comparisons": [
        {
            "ours": "4bit_nc",
            "theirs": "vLLM 4bit_nc",
            "kl_ratio": 0.4,
            "kl_ratio_95": [0.37, 0.43],
            "bytes_all_in": [158, 134],
            "bytes_packed": [134, 134],
        }
    ],
    "skipped": {"hqq int4": "hqq is not installed"},
}
TIMES = {"first_token_s_p50": 0.512, "first_token_s_p99": 2.25, "per_token_s_p50": 0.0125, "per_token_s_p99": None}
SERVED = {
    "kind": "trace",
    "arrivals": "all at once",
    "cache_bytes": 60 * 2**30,
    "cache_tokens": 1797000,
    "flash_room_tokens": 455000,
}
SERVE = {
    "trace": {"requests": 64, "prompts": [200, 16384], "answers": [32, 1024]},
    "rows": [
        {"kind": "decode", "batch": 32, "context": 2048, "engine": "stock, sdpa", "ms_per_step": 135.0}
        | {"steps": 64, "prompt_tokens_per_second": 20123.4, "peak_bytes_beyond_weights": 100 * 2**30},
        {"kind": "decode", "batch": 64, "context": 16384, "engine": "stock, sdpa", "error": "room for 9 tokens"}
        | {"bf16_floor_ms": 35.0},
        {
            "kind": "decode",
            "batch": 32,
            "context": 2048,
            "engine": "4bit_nc, static, graph_decoding",
            "ms_per_step": 8.3,
        }
        | {"peak_bytes_beyond_weights": 2**30, "bf16_floor_ms": 5.0},
        SERVED
        | TIMES
        | {"engine": "4bit_nc", "tokens_per_second": 3855.4, "seconds": 9.0, "unfinished": 3}
        | {"in_flight_most": 64, "in_flight_mean": 40.6, "peak_bytes_beyond_weights": 70 * 2**30},
        SERVED | {"engine": "stock, sdpa", "error": "out of memory"},
    ],
}

TRELLIS = QUALITY | {
    "comparisons": [
        {"preset": "3bit_nc", "kind": "packed only", "code": "c", "stress": "x0", "kl": 0.005}
        | {"over_scalar": 0.75, "over_scalar_95": [0.7, 0.8], "over_unstressed": 1.0}
    ],
    "skipped": {"a": "no time"},
}
CODE = {"code": "2: c", "states": 4, "squared_error": 0.09, "over_scalar": 0.767, "ns_a_channel": 500.4}

EXPECTED = [
    ("trellis", TRELLIS, ["| `3bit_nc`, packed only | **0.75×** (0.70 to 0.80) 0.005 |", "1 cells"]),
    ("trellis", {"rows": [CODE | {"instructions": None}]}, ["| 2: c | 4 | 0.09000 | 0.767× | 500 ns | – |"]),
    ("generate", GENERATE, ["| DynamicCache | **21.5** ms, 1.0 GiB | – | out of memory |", "1 × 2k | 1 × 1,000 | 8 ×"]),
    ("generate", GENERATE, ["| `4bit_nc`, compiled | – | **6.5** ms, 0.0 GiB | – |"]),
    ("generate", GENERATE, ["| `4bit_nc`, graph_decoding, host work × 2 | – | – | **8.4** ms, 2.0 GiB |"]),
    (
        "multi-gpu",
        MULTI_GPU,
        ["| graph_decoding, 8 × 32k | 9.00 ms | 6.00 ms | **1.50×** | – |", "72 tokens", "69 are"],
    ),
    ("replicas", REPLICAS, ["| 1 × 1 | the file | 8 | 1,000 | – |"]),
    ("multi-gpu", MULTI_GPU, ["| pages, 32 × 2k | 12.00 ms | RuntimeError: one / two | – | – |"]),
    ("multi-gpu", MULTI_GPU, ["| eager `4bit_nc`, 8 × 32k | 37.50 ms | – | – | 38.50 ms |", "63 of 64 tokens"]),
    ("multi-gpu", MULTI_GPU, ["| 9.00 GiB | 4.50 + 4.50 GiB | – | 5.00 + 4.00 GiB |", "| all-reduce | 441 | 441 |"]),
    ("multi-gpu", MULTI_GPU, ["by 6.2e-02", "75% of", "An all-reduce of 64 KiB in a graph: nccl 9.0 µs, one_shot 5.0"]),
    ("quality", QUALITY, ["| `4bit_nc` | 158 | 134 | 0.00023 (0.00023 to 0.00023) |", "| 99.5% | 100.0% | – |"]),
    ("quality", QUALITY, ["| `4bit_nc`, packed only |", "| transformers fp8 | 158 | 134 | NaN | NaN | NaN |"]),
    (
        "quality",
        QUALITY,
        ["| `4bit_nc` | 0.00023, – | 0.00029, – |", "| 0.40 (0.37 to 0.43) |", "(hqq is not installed)"],
    ),
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
    lines = text.splitlines()
    for before, line in zip(lines, lines[1:], strict=False):
        if before.startswith("|") and line.startswith("|"):
            assert before.count("|") == line.count("|")


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
    for words in (
        "3,855: 61 of 64 finished in 9 s",
        "41 in the mean, at most 64",
        "out of memory",
        "64 requests, a GPU",
    ):
        assert words in text
    assert drawing.COLOURS["4bit_nc"] in text


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
