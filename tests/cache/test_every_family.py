"""Every model type of transformers on a compressed cache: none differs silently from transformers' own cache."""

from __future__ import annotations

import pytest
from families import NOT_TESTABLE, difference, examine
from family_configs import model_types

SAMPLE = (
    "afmoe",  # calls .view on what attention returns
    "bloom",  # attention of its own, with a mask of the size of all room
    "deepseek_v32",  # chooses the tokens to attend to
    "deepseek_v3",  # latents
    "diffllama",  # gives attention other values than it cached
    "doge",  # computes with its values
    "gemma3_text",
    "llama",
    "minimax_m3_vl",  # another kind of preallocated layer beside compressed ones
    "mvp",  # attention of its own
    "paligemma",  # modules that attend both ways
    "t5",  # position bias
)
"""What `make test` runs: a family for each way of going wrong."""

NOT_RIGHT: dict[str, str] = {}
"""Verdicts that are known not to be "right". "alike" is: transformers' own preallocated cache fails in the same way."""


def check(model_type: str) -> None:
    finding = examine(model_type)
    problems = {mode: outcome for mode, outcome in finding.outcomes.items() if outcome.kind != "right"}
    assert finding.verdict == NOT_RIGHT.get(model_type, "right"), problems


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_family_of_the_sample(model_type):
    check(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(model_types().keys() - NOT_TESTABLE.keys() - set(SAMPLE)))
def test_a_family(model_type):
    check(model_type)


def test_what_is_listed_exists():
    known = model_types().keys()
    assert NOT_TESTABLE.keys() <= known
    assert NOT_RIGHT.keys() <= known - NOT_TESTABLE.keys()


def test_a_difference_is_noticed():
    """A NaN where there should be none counts as much as a wrong number."""
    import torch

    right = [torch.tensor([1.0, -2.0])]
    assert difference([torch.tensor([1.0, -2.002])], right) == pytest.approx(1e-3, rel=1e-3)
    assert difference([torch.tensor([1.0, torch.nan])], right) == float("inf")
