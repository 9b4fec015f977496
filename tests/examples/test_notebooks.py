"""The notebooks open on Colab, with the versions that are tested, and show what they printed.

`make test` also runs them.
"""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from examples.measure.report import run_notebooks

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
NAMES = ["long_context", "quality", "quickstart", "save_and_reuse", "serving"]


def cells(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_these_are_the_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in NOTEBOOKS if f"examples/{path.name}" not in readme] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_opens_with_a_badge_an_install_and_a_gpu_check(path: Path) -> None:
    title, install, gpu = (source(cell) for cell in cells(path)[:3])
    assert title.startswith("# ")
    assert f"(https://colab.research.google.com/github/tq-hf/tq_hf/blob/main/examples/{path.name})" in title
    assert "**On a T4**" in title and re.search(r"\*\*On two CPU cores\*\*.* took \d+ s and [\d.]+ GiB", title)
    assert "git" in install and "pip" in install
    assert "cuda.is_available()" in gpu and "float16" in gpu


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_installs_the_versions_that_are_tested(path: Path) -> None:
    pinned = re.findall(r'"([\w-]+==[\d.]+)"', source(cells(path)[1]))
    assert {pin.partition("==")[0] for pin in pinned} >= {"transformers", "accelerate", "safetensors"}
    tested = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    assert set(pinned) <= set(tested)


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "images").glob("*.txt")), ids=lambda path: path.stem)
def test_an_install_replaces_nothing_that_a_notebook_has_loaded(path: Path) -> None:
    """What the image has of torch and of what its kernel imports suffices, so no notebook needs a restart. (`make
    test-images` runs them on these versions.)"""
    has = dict(line.split("==") for line in path.read_text(encoding="utf-8").splitlines() if "==" in line)
    least = dict(re.findall(r'"([\w-]+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    loaded = {"torch", "triton", "matplotlib", "psutil", "rich"}
    assert loaded <= has.keys() & least.keys()
    assert [name for name in loaded if Version(has[name]) < Version(least[name])] == []
    pins = re.findall(r'"([\w-]+)==[\d.]+"', source(cells(NOTEBOOKS[0])[1]))
    assert not loaded & set(pins)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_the_outputs_of_one_run(path: Path) -> None:
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "run `make notebooks`"
    for cell in code:
        printed = any(word in source(cell) for word in ("print(", "plt.show(")) and "def " not in source(cell)
        assert cell["outputs"] or not printed or code.index(cell) == 0
        assert not any(output["output_type"] == "error" for output in cell["outputs"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_small_and_name_no_folder_of_the_machine_they_come_from(path: Path) -> None:
    assert path.stat().st_size < 200_000
    for cell in cells(path):
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr"
            text = "".join(output.get("text", [])) + "".join(output.get("data", {}).get("text/plain", []))
            assert run_notebooks.cleaned(text) == text
        assert "execution" not in cell["metadata"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_code_of_a_notebook_parses_and_fits_the_page(path: Path) -> None:
    for cell in cells(path):
        if cell["cell_type"] != "code":
            continue
        assert max(map(len, source(cell).splitlines())) <= 120
        ast.parse(source(cell))
