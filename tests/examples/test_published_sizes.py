"""What `families.md` says of published sizes is what the functions that choose answer."""

from __future__ import annotations

import json

import pytest
import transformers

from examples.measure.quality import published_sizes
from examples.provenance import RESULTS

SAID = published_sizes.read()


@pytest.mark.parametrize("model_type", ["llama", "gemma4_text", "gemma3_text", "deepseek_v3", "gpt_oss", "mistral"])
def test_a_family_is_served_as_the_page_says(model_type: str) -> None:
    if transformers.__version__ != json.loads(published_sizes.FILE.read_text())["transformers"]:
        pytest.skip("of another transformers")
    assert published_sizes.sizes_of(model_type) == SAID[model_type]


def test_the_page_has_the_section_of_the_last_run() -> None:
    page = (RESULTS / "families.md").read_text(encoding="utf-8")
    lines = published_sizes.section(SAID)[4:]
    assert SAID["gemma4_text"].torch == ["512"] and any(line.startswith("| gemma4_text | 512 |") for line in lines)
    assert page.endswith("\n".join(lines[1:]) + "\n")
