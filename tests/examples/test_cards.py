"""Predictions for other cards: what they say of the card they were fitted to, and how a card is recognised."""

import pytest

from examples.measure.compile.cards import CARDS, card_of, load, prediction
from examples.measure.report.tables import RENDERERS


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_a_card_is_known_by_its_name(name: str, card: str | None) -> None:
    assert card_of(name) == card
    assert ("predicted for" in prediction(name)) == (card is not None)


def test_predictions_are_within_their_bounds_where_they_were_measured() -> None:
    record = load()
    assert record["error"]["worst"] <= 0.25 and record["error"]["median"] <= 0.1
    assert {cell["card"] for cell in record["predictions"]} == {*CARDS}
    assert "T4" in RENDERERS["cards"](record)


def test_a_t4_decodes_faster_than_it_reads_fp16() -> None:
    cells = [c for c in load()["predictions"] if c["card"] == "T4" and c["preset"] == "4bit_nc" and c["length"] == 8192]
    assert cells and all(cell["speedup"] >= 1.5 for cell in cells)
