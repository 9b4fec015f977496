"""What `families.md` says of published sizes is what the functions that choose answer."""

import json

import pytest
import transformers

from examples.measure.quality import published_sizes
from examples.provenance import RESULTS
from tests.support.helpers import slow

pytest.importorskip("triton")
SAID = published_sizes.read()


@pytest.mark.parametrize(
    "model_type", ["gemma4_text", "deepseek_v3", *map(slow, ("gemma3_text", "gpt_oss", "mistral"))]
)
def test_a_family_is_served_as_the_page_says(model_type: str) -> None:
    if transformers.__version__ != json.loads(published_sizes.FILE.read_text())["transformers"]:
        pytest.skip("of another transformers")
    assert published_sizes.sizes_of(model_type) == SAID[model_type]


def test_the_page_has_the_section_of_the_last_run() -> None:
    page = (RESULTS / "families.md").read_text(encoding="utf-8")
    lines = published_sizes.section(SAID)[4:]
    assert SAID["gemma4_text"].torch == {"512": ["prompts in batches"]}
    assert any(line.startswith("| 512 | prompts in batches | start") and "gemma4_text" in line for line in lines)
    assert page.endswith("\n".join(lines[1:]) + "\n")


@pytest.mark.parametrize(
    ("widths", "falls"),
    [
        ((128, 128), []),
        ((256, 256), ["prompts (8.x)", "prompts in batches (8.x)"]),
        ((42, 42), ["steps in batches", "prompts in batches"]),
        ((576, 576), ["steps", "prompts", "steps in batches", "prompts in batches"]),
        ((512, 512), ["prompts in batches"]),
    ],
    ids=lambda value: str(value[0]) if value and isinstance(value[0], int) else "",
)
def test_what_falls_to_torch_is_asked_of_each_card(widths: tuple[int, int], falls: list[str]) -> None:
    assert published_sizes.in_torch(*widths, batches=True) == falls


def test_a_card_that_was_asked_about_is_forgotten() -> None:
    from tq_kernels.common.device import target

    with published_sizes.card((8, 0)) as states:
        assert target(states.device).capability == (8, 0)
    assert target.cache_info().currsize == 0
