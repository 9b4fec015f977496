"""The committed pictures show what the package and the results files say."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import make_tables
import plots
import pytest

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
    assert {path.stem for path in tmp_path.iterdir()} == {"memory"}
    assert "kernels: no results yet" in capsys.readouterr().out


def test_the_readme_shows_every_picture() -> None:
    text = make_tables.README.read_text(encoding="utf-8")
    assert [name for name in DRAWN if f'"examples/results/{name}.svg"' not in text] == []
