"""README.md, its sister pages and the notebooks say what the package and the committed results say. The notebooks open
on Colab, with the versions that are tested. (`make test` also runs them.)"""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from examples.measure.report import make_tables, run_notebooks
from tests.support.tiny_models import CONFIGS
from tests.test_rooms import ROOMS

ROOT = make_tables.ROOT
TEXT = make_tables.README.read_text(encoding="utf-8")
RESULTS = (make_tables.RESULTS / "README.md").read_text(encoding="utf-8")
SOURCES = [p for folder in ("tq_hf", "kernels", "examples", "tests") for p in (ROOT / folder).rglob("*.py")]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "examples").rglob("README.md"))]


@pytest.mark.parametrize("page", make_tables.PAGES, ids=lambda page: page.parent.name)
def test_tables_are_those_of_the_results_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert make_tables.updated(text) == text, "run `make tables`"


def test_every_results_file_has_its_table() -> None:
    shown = [path for _, name, _ in make_tables.SECTION.findall(RESULTS) for path in make_tables.files_of(name)]
    families = sorted(make_tables.RESULTS.glob("families*.json"))  # have a page of their own
    assert families and (make_tables.RESULTS / "families.md").exists() and not {*families} & {*shown}
    assert sorted([*shown, *families]) == sorted(make_tables.RESULTS.glob("*.json")), "each in one table"


def test_the_front_page_is_short() -> None:
    assert len(TEXT.splitlines()) <= 180


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_into_the_repository_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", text) + re.findall(r'src="(?!https?:)([^"]+)"', text)
    for link in links:
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], link


def test_pages_show_pictures() -> None:
    assert re.search(r'src="examples/results/\w+\.svg"', TEXT) and re.search(r'src="\w+\.svg"', RESULTS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_scripts_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    scripts = re.findall(r"(?<!/)examples/[\w/]+\.py", text)
    scripts += [f"{module.replace('.', '/')}.py" for module in re.findall(r"-m (examples[.\w]+\w)", text)]
    assert [script for script in scripts if not (ROOT / script).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    """By a path's end: a page may leave out the folders that it is about."""
    named = re.findall(r"`([\w/.]+\.py)`", page.read_text(encoding="utf-8"))
    files = [f"/{path.relative_to(ROOT).as_posix()}" for path in SOURCES]
    assert [name for name in named if not any(file.endswith(f"/{name.removeprefix('../')}") for file in files)] == []


def test_contributing_names_every_room() -> None:
    """In the order in which imports go."""
    rooms = [name for floor in ROOMS["tq_hf"] for name in sorted(floor)]
    (table,) = re.findall(r"\| room \|.*?\n\n", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line.split("|")[1] for line in table.strip().splitlines()[2:]]
    named = [sorted(re.findall(r"(\w+)(?:/|\.py)`", line)) for line in lines]
    assert [name for line in named for name in line] == rooms


def test_python_examples_parse() -> None:
    for page in PAGES:
        for example in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
            ast.parse(example)
    assert "```python" in TEXT


def test_the_older_name_of_a_cache_stands_only_where_its_versions_do() -> None:
    """transformers 5.24 warns about `past_key_values=`; older ones take no other name."""
    texts = [*PAGES, *(ROOT / "examples").glob("*.ipynb"), *(p for p in SOURCES if "tests" not in p.parts)]
    lines = [line for path in texts for line in path.read_text(encoding="utf-8").splitlines()]
    named = [line for line in lines if "past_key_values=" in line]
    assert len(named) >= 3 and [line for line in named if "before transformers 5.24" not in line] == []


def test_every_architecture_that_is_tested_is_listed() -> None:
    (rows,) = re.findall(r"\| architecture \|.*?\n\n", TEXT, flags=re.DOTALL)
    names = [name for line in rows.strip().splitlines()[2:] for name in line.split("|")[1].split(",")]
    assert sorted(re.sub(r"\W", "", name).lower() for name in names) == sorted(n.replace("_", "") for n in CONFIGS)


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
