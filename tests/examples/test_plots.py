"""The committed pictures show what the package and the results files say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from test_tables import SERVE as SERVED

from examples.measure.report import drawing, make_tables, plots

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
    monkeypatch.setattr(plots, "results", {"serve": [SERVED | {"device": "a GPU"}]}.get)
    speeds, flight = panels = plots.serve_numbers()
    assert speeds["bars"]["4bit_nc"] == {"all at once": (3855.4, None, None)}
    assert flight["bars"]["4bit_nc"] == {"all at once": (40.6, 64, None)}
    assert flight["bars"]["stock, sdpa"] == {"all at once": (None, None, "out of memory")}
    plots.save(tmp_path / "serve.svg", "serve", panels)
    text = (tmp_path / "serve.svg").read_text(encoding="utf-8")
    for words in ("3,855", "41, at most 64", "out of memory", "64 requests, a GPU"):
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
