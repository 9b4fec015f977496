"""Pages of the documentation's site: one for each way and each part of the results, and links that lead somewhere."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

import tq_hf

ROOT = Path(__file__).resolve().parents[2]


def script() -> Any:
    spec = spec_from_file_location("make_site", ROOT / "docs" / "site.py")
    assert spec is not None and spec.loader is not None
    sys.modules["make_site"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = script()
PAGES = site.pages()


def test_each_way_each_result_and_each_public_name_has_its_place() -> None:
    ways = site.rows()
    assert len(ways) >= 10 and sum(page.startswith("ways/") for page in PAGES) == len(ways)
    for row in ways:
        assert row.call in PAGES[f"ways/{site.slug(row.title)}.md"] and row.targets
    results = site.sections(site.RESULTS)[1]
    assert [title for title in results if f"results/{site.slug(title)}.md" not in PAGES] == []
    assert [name for name in tq_hf.__all__ if f".{name}\n" not in PAGES["api.md"]] == []


def test_the_contents_of_the_results_name_every_section() -> None:
    head, results = site.sections(site.RESULTS)
    assert re.findall(r"\[([^]]+)\]\(#", head) == list(results)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_to_a_page_a_picture_or_a_file_of_the_repository(page: str) -> None:
    pictures = {f"pictures/{path.name}" for path in (ROOT / "examples" / "results").glob("*.svg")}
    for _, link, _ in site.LINK.findall(PAGES[page]):
        target = os.path.normpath(os.path.join(os.path.dirname(page), link.partition("#")[0]))
        assert not link.partition("#")[0] or target in {*PAGES, *pictures}, link
    for path in re.findall(rf"{re.escape(site.SOURCE)}([^)\"#]+)", PAGES[page]):
        assert (ROOT / path).exists(), path


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra `docs`")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    make = ["make", "--dry-run", "docs"]
    assert "--strict" in subprocess.run(make, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    subprocess.run([sys.executable, "docs/site.py", "build/pages"], cwd=ROOT, check=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", "docs/mkdocs.yml"]
    done = subprocess.run([*command, "--site-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "api" / "index.html").exists(), done.stderr
