"""A cache saved as one that grows is loaded as a preallocated one, and the other way round."""

from typing import Any

import pytest
import torch

from tests.support.saving_cases import filled, reloaded, run, tokens
from tests.support.tiny_models import CONFIGS
from tq_hf import TurboQuantCache


def logits(model: Any, cache: Any, calls: list[int]) -> list[torch.Tensor]:
    return [run(model, cache, tokens(2, count, seed)) for seed, count in enumerate(calls)]


@pytest.mark.parametrize("length", [50, 95, 96, 97, 300])
@pytest.mark.parametrize("saved", [None, 400], ids=["growing", "preallocated"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_a_cache_goes_on_the_same_in_the_other_kind(tmp_path, name, saved, length):
    """Windows of 96 tokens: not yet full, about to be, full, and long past."""
    model, cache = filled(name, length, max_cache_len=saved)
    room = 400 if saved is None else None
    loaded = reloaded(tmp_path, model, cache, max_cache_len=room)
    like = TurboQuantCache(model.config, max_cache_len=room)
    assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in like.layers]
    assert int(loaded.get_seq_length()) == length and loaded.preallocated_for == room
    for ours, theirs in zip(logits(model, loaded, [1, 1, 5, 1]), logits(model, cache, [1, 1, 5, 1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("saved", [None, 400], ids=["growing", "preallocated"])
def test_a_converted_cache_holds_the_same_bits_and_comes_back(tmp_path, saved):
    model, cache = filled("llama", 300, max_cache_len=saved, skip_layers=(0,))
    there = reloaded(tmp_path, model, cache, max_cache_len=500 if saved is None else None)
    back = reloaded(tmp_path, model, there, max_cache_len=saved)
    for layer, original in zip(back.layers, cache.layers, strict=True):
        assert torch.equal(layer.keys, original.keys) and torch.equal(layer.values, original.values)
    assert all(map(torch.equal, logits(model, back, [1, 1]), logits(model, cache, [1, 1])))


def test_room_can_be_changed_and_must_suffice(tmp_path):
    model, cache = filled("llama", 300, max_cache_len=320)
    larger = reloaded(tmp_path, model, cache, max_cache_len=1000)
    assert larger.get_max_length() == 1000
    assert all(map(torch.equal, logits(model, larger, [1, 1]), logits(model, cache, [1, 1])))
    with pytest.raises(ValueError, match="holds 300 tokens, and `max_cache_len` is 299. Pass 300"):
        TurboQuantCache.load(tmp_path / "c.safetensors", model, max_cache_len=299)
    for wrong in ("many", 0, 1.5, True):
        with pytest.raises(ValueError, match="`max_cache_len` is .*a number of tokens"):
            TurboQuantCache.load(tmp_path / "c.safetensors", model, max_cache_len=wrong)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_is_converted(tmp_path, name):
    model, cache = filled(name, 120)
    loaded = reloaded(tmp_path, model, cache, max_cache_len=200)
    for ours, theirs in zip(logits(model, loaded, [1, 1]), logits(model, cache, [1, 1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)
