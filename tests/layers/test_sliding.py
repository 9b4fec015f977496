"""Sliding-window layers hold their window and no more, and otherwise do what transformers' own do."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCAB, build
from transformers import DynamicCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicSlidingWindowLayer

from tq_hf import TurboQuantCache
from tq_hf.layers.sliding import SlidingLayer

WINDOW = 16


def states(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, tokens, 8), torch.randn(2, 3, tokens, 4)


@pytest.mark.parametrize("lengths", [(40, 1, 1), (15, 1, 1), (16, 1), (3, 5, 30, 2), (1, 40), (17, 17)])
def test_it_returns_and_keeps_what_the_stock_layer_does_in_less_memory(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ours, stock = SlidingLayer(WINDOW), DynamicSlidingWindowLayer(WINDOW)
    for tokens in lengths:
        keys, values = states(tokens)
        for mine, theirs in zip(ours.update(keys, values), stock.update(keys, values), strict=True):
            assert torch.equal(mine, theirs)
        for mine, theirs in ((ours.keys, stock.keys), (ours.values, stock.values)):
            assert torch.equal(mine, theirs)
            rows = mine.untyped_storage().nbytes() // (mine[:, :, :1].numel() * mine.element_size())
            assert rows <= WINDOW
        assert ours.get_mask_sizes(1) == stock.get_mask_sizes(1)


def test_past_that_is_recorded_can_be_taken_back() -> None:
    torch.manual_seed(0)
    ours, stock = SlidingLayer(WINDOW), DynamicSlidingWindowLayer(WINDOW)
    for layer in (ours, stock):
        torch.manual_seed(1)
        layer.activate_past_recording()
        layer.update(*states(40))
        layer.update(*states(6))
        layer.crop(-4)
    assert torch.equal(ours.keys, stock.keys) and ours.get_seq_length() == stock.get_seq_length() == 42


def test_a_prompt_is_freed_at_once() -> None:
    model = build("gemma3")
    ids = torch.randint(3, VOCAB, (1, 700))
    held = []
    for cache in (TurboQuantCache(model.config), DynamicCache(config=model.config)):
        with torch.no_grad():
            model(ids, past_key_values=cache)
        layer = cache.layers[0]
        assert layer.is_sliding
        held.append(layer.keys.untyped_storage().nbytes())
    assert held[0] * 700 == held[1] * (model.config.sliding_window - 1)


def test_what_transformers_makes_by_itself_stays_its_own() -> None:
    assert SlidingLayer not in DYNAMIC_LAYER_TYPE_MAPPING.values()
    model = build("gemma3")
    assert type(DynamicCache(config=model.config).layers[0]) is DynamicSlidingWindowLayer
