"""Every model type of transformers on a compressed cache: none differs silently from transformers' own cache."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from examples.measure.quality.family_check import NOT_TESTABLE, difference, examine, worst
from examples.measure.quality.family_configs import WITH_IMAGES, model_types
from tq_hf.ops import dispatch

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
    "mllama/images",  # cross-attention in the decoder's own cache
    "t5",  # position bias
)
"""What `make test` runs: a family for each way of going wrong."""

RESULTS = Path(__file__).resolve().parents[2] / "examples" / "results" / "families.json"

ALLOWED = {"right", "refused", "not loaded", "alike"}
"""Verdicts with which no result is silently wrong where transformers' own is right (see `families.Outcome`)."""


def recorded(model_type: str) -> str:
    """The verdict on the page, "right" for a type that is new."""
    found = json.loads(RESULTS.read_text()).get(model_type)
    return "right" if found is None else worst(outcome[0] for outcome in found["outcomes"].values())


def check(model_type: str) -> None:
    finding = examine(model_type)
    problems = {mode: outcome for mode, outcome in finding.outcomes.items() if outcome.kind != "right"}
    assert finding.verdict == recorded(model_type), problems
    assert finding.verdict in ALLOWED


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_family_of_the_sample(model_type):
    check(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted((model_types() | WITH_IMAGES).keys() - NOT_TESTABLE.keys() - set(SAMPLE)))
def test_a_family(model_type):
    check(model_type)


def test_the_page_has_every_family_and_no_wrong_one():
    """A type of a newer transformers is neither on the page nor listed: the slow tests examine it."""
    page = json.loads(RESULTS.read_text())
    assert not page.keys() & NOT_TESTABLE.keys()
    assert {model_type for model_type in page if recorded(model_type) not in ALLOWED} == set()
    named, there = page.keys() | NOT_TESTABLE.keys(), (model_types() | WITH_IMAGES).keys()
    assert transformers.__version__ not in ("5.23.0", "5.24.0") or there <= named
    assert transformers.__version__ != "5.24.0" or named == there


def test_a_difference_is_noticed():
    """A NaN where there should be none counts as much as a wrong number."""
    right = [torch.tensor([1.0, -2.0])]
    assert difference([torch.tensor([1.0, -2.002])], right) == pytest.approx(1e-3, rel=1e-3)
    assert difference([torch.tensor([1.0, torch.nan])], right) == float("inf")


def test_wrong_attention_over_packed_blocks_is_noticed(monkeypatch):
    """What it is compared with does not read packed blocks itself."""
    right = dispatch.attend
    monkeypatch.setattr(dispatch, "attend", lambda *args: 2 * right(*args))
    outcomes = examine("llama").outcomes
    assert {mode for mode, outcome in outcomes.items() if outcome.kind == "differs"} == {
        "turboquant, growing, dense",
        "turboquant, growing, packed",
        "turboquant, preallocated, dense",
        "turboquant, preallocated, packed",
    }
