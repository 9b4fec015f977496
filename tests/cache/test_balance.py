"""Balanced channels in a cache: what a model's scaling of its channels changes, and where the channel scales go."""

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from examples.measure.quality.stress import rescaled
from tests.support.tiny_models import VOCAB, build
from tq_hf import Balance, TurboQuantCache, TurboQuantConfig
from tq_hf.compat import as_input
from tq_hf.layers.compressed import TurboQuantLayer
from tq_hf.ops import dispatch

PACKED = dict(residual_length=0, sink_tokens=0)
FAMILIES = ["llama", "qwen2", "qwen3"]


def made(name: str, pairs: int = 2, factor: float = 20.0, values: int = 3) -> Any:
    """A random model; its channels are rescaled without changing what it computes, if there is a factor."""
    model = build(name)
    model = rescaled(model, pairs, factor, values) if factor != 1 else model
    model.set_attn_implementation("turboquant")
    return model


def tokens(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def channel_scales(cache: TurboQuantCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [layer.store.blocks.channel_scales for layer in cache.layers if isinstance(layer, TurboQuantLayer)]


@torch.no_grad()
def error(model: Any, options: dict[str, Any], prompt: int = 400) -> float:
    """Of the logits of 8 tokens after a prompt, relative to a plain cache."""
    logits = []
    for cache in (DynamicCache(config=model.config), TurboQuantCache(model.config, **(PACKED | options))):
        model(tokens(prompt), **as_input(cache))
        logits.append(model(tokens(8, seed=1), **as_input(cache)).logits)
    return ((logits[1] - logits[0]).norm() / logits[0].norm()).item()


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 450}, {"preset": "3bit_nc"}], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_cache_costs_does_not_depend_on_how_a_model_scales_its_channels(name, options):
    plain, loud = made(name, factor=1), made(name)
    unbalanced, balanced = (error(loud, options | {"balance": balance}) for balance in (False, True))
    assert balanced < 1.35 * error(plain, options | {"balance": False}) < unbalanced


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_batch_equals_its_rows_and_padding_is_left_out(name):
    model = made(name)
    together = TurboQuantCache(model.config)
    ids = tokens(300, batch=2)
    model(ids, **as_input(together))
    for row in range(2):
        alone = TurboQuantCache(model.config)
        model(ids[row : row + 1], **as_input(alone))
        for pair, one in zip(channel_scales(together), channel_scales(alone), strict=True):
            assert all(torch.equal(a[row : row + 1], b) for a, b in zip(pair, one, strict=True))
    padded = TurboQuantCache(model.config)
    mask = torch.ones(2, 300, dtype=torch.long)
    mask[:, :100] = 0
    model(ids, attention_mask=mask, **as_input(padded))
    other = TurboQuantCache(model.config)
    model(torch.where(mask.bool(), ids, 7), attention_mask=mask, **as_input(other))
    for pair, one in zip(channel_scales(padded), channel_scales(other), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, one, strict=True))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_without_queries_values_are_balanced_and_at_most_one_layers_prompt_waits(attention):
    model = made("llama")
    model.set_attn_implementation(attention)
    cache = TurboQuantCache(model.config)
    model(tokens(300), **as_input(cache))
    assert not any(layer.store.is_deferred for layer in cache.layers)
    for keys, values in channel_scales(cache):
        assert (keys == 1).all() and (values != 1).any()


@torch.no_grad()
def test_a_prompt_waits_for_its_queries_and_for_nothing_else():
    model = made("llama")
    cache = TurboQuantCache(model.config)
    keys = torch.randn(1, 2, 300, 32)
    cache.update(keys, keys, 0)
    first = cache.layers[0].store
    assert first.is_deferred and cache.get_seq_length() == 300
    cache.update(keys, keys, 1)
    assert not first.is_deferred and first.counts.blocks == 1


@pytest.mark.parametrize("length", [None, 500])
@torch.no_grad()
def test_channel_scales_go_where_their_sequence_goes(length):
    model = made("qwen2")
    cache = TurboQuantCache(model.config, max_cache_len=length)
    model(tokens(300, batch=3), **as_input(cache))
    before = [pair.map(torch.clone) for pair in channel_scales(cache)]
    assert any(not torch.equal(keys[0], keys[1]) for keys, _ in before)

    def follow(order: list[int]) -> None:
        for now, then in zip(channel_scales(cache), before, strict=True):
            assert all(torch.equal(a, b[order]) for a, b in zip(now, then, strict=True))

    follow([0, 1, 2])
    copied = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    follow([2, 0, 0])
    cache = copied
    if length is None:
        cache.batch_repeat_interleave(2)
        follow([0, 0, 1, 1, 2, 2])
        cache.batch_select_indices(torch.tensor([5, 1]))
        follow([2, 0])


@pytest.mark.parametrize("length", [None, 500])
@pytest.mark.parametrize("forget", [lambda cache: cache.reset(), lambda cache: cache.crop(-300)], ids=["reset", "crop"])
@torch.no_grad()
def test_a_forgotten_prompt_leaves_no_channel_scales(length, forget):
    model = made("llama")
    cache, fresh = (TurboQuantCache(model.config, max_cache_len=length) for _ in range(2))
    model(tokens(300), **as_input(cache))
    forget(cache)
    for used in (cache, fresh):
        model(tokens(280, seed=3), **as_input(used))
    for pair, expected in zip(channel_scales(cache), channel_scales(fresh), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, expected, strict=True))


@pytest.mark.parametrize("length", [None, 500])
@torch.no_grad()
def test_a_reset_cache_waits_for_queries_again(length):
    model = made("llama")
    used, fresh = (TurboQuantCache(model.config, max_cache_len=length) for _ in range(2))
    model.set_attn_implementation("sdpa")  # shows none
    for part in (tokens(300), tokens(1)):
        model(part, **as_input(used))
    assert all((keys == 1).all() for keys, _ in channel_scales(used))
    used.reset()
    model.set_attn_implementation("turboquant")
    for cache in (used, fresh):
        model(tokens(300, seed=3), **as_input(cache))
    for pair, expected in zip(channel_scales(used), channel_scales(fresh), strict=True):
        assert (expected[0] != 1).any() and all(torch.equal(a, b) for a, b in zip(pair, expected, strict=True))


@torch.no_grad()
def test_channel_scales_are_saved(tmp_path):
    model = made("qwen3")
    cache = TurboQuantCache(model.config)
    model(tokens(300), **as_input(cache))
    cache.save(tmp_path / "c.safetensors", model)
    loaded = TurboQuantCache.load(tmp_path / "c.safetensors", model)
    assert any((keys != 1).any() for keys, _ in channel_scales(cache))
    for pair, expected in zip(channel_scales(loaded), channel_scales(cache), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, expected, strict=True))
    ids = tokens(1, seed=2)
    assert torch.equal(model(ids, **as_input(loaded)).logits, model(ids, **as_input(cache)).logits)


@torch.no_grad()
def test_a_short_prompt_is_not_balanced():
    model = made("llama")
    cache = TurboQuantCache(model.config)
    model(tokens(20), **as_input(cache))
    assert all((part == 1).all() for pair in channel_scales(cache) for part in pair)


@torch.no_grad()
def test_channel_scales_are_handed_on_to_prompts_too_short_for_statistics():
    model = made("llama")
    long = TurboQuantCache(model.config)
    model(tokens(300, batch=2), **as_input(long))
    for balance in (long, Balance.of(model)):
        cache = TurboQuantCache(model.config, balance=balance, **PACKED)
        for part in tokens(260, batch=3, seed=5).split(20, dim=1):
            model(part, **as_input(cache))
        for keys, values in channel_scales(cache):
            assert keys.shape[0] == 3 and (keys < 0.3).any() and (values < 0.3).any()
            assert torch.equal(keys[0], keys[2])
        cache.reset()
        model(tokens(300, seed=6), **as_input(cache))
        assert all(
            torch.equal(layer.store.blocks.channel_scales.keys, layer.channel_scales.keys)
            for layer in cache.layers
            if isinstance(layer, TurboQuantLayer)
        )


def test_a_probe_gives_the_same_each_time_and_leaves_the_model_as_it_was():
    model = made("qwen3")
    model.set_attn_implementation("sdpa")
    first, second = Balance.of(model), Balance.of(model)
    assert model.config._attn_implementation == "sdpa"
    for index, pair in first.layers.items():
        assert all(torch.equal(a, b) for a, b in zip(pair, second.layers[index], strict=True))
    assert any((keys != 1).any() for keys, _ in first.layers.values())


def test_a_probe_restores_about_what_the_prompts_own_statistics_do():
    plain, loud = made("qwen2", factor=1), made("qwen2")
    assert error(loud, {"balance": Balance.of(loud)}) < 1.35 * error(plain, {"balance": False})


@pytest.mark.parametrize("balance", ["both", 1, 0.5, object()])
def test_balance_of_another_kind_is_refused(balance):
    with pytest.raises(ValueError, match="`balance` is .*True or False, a `Balance`, or a cache"):
        TurboQuantCache(build("llama").config, balance=balance)


def test_channel_scales_of_another_model_or_of_nothing_are_refused():
    model = made("llama")
    with pytest.raises(ValueError, match="holds no tokens"):
        TurboQuantCache(model.config, balance=TurboQuantCache(model.config))
    balance = Balance.of(model)
    with pytest.raises(ValueError, match="no channel scales of layer 1"):
        TurboQuantCache(model.config, balance=Balance({0: balance.layers[0]}))
    with pytest.raises(ValueError, match="leave out either"):
        TurboQuantCache(model.config, TurboQuantConfig(balance=False), balance=balance)
    other = made("qwen2")
    cache = TurboQuantCache(other.config, balance=balance)
    with pytest.raises(ValueError, match=r"of \[2, 32\] heads and channels.*\[2, 16\]"):
        other(tokens(10), **as_input(cache))


@pytest.mark.parametrize("length", [None, 500])
@torch.no_grad()
def test_a_prompt_that_cannot_be_encoded_goes_on_waiting(length, monkeypatch):
    model = made("llama")
    cache, expected = (TurboQuantCache(model.config, max_cache_len=length) for _ in range(2))
    keys = torch.randn(1, 2, 300, 32)
    for used in (cache, expected):
        used.update(keys, keys, 0)

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    store = cache.layers[0].store
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "encode", fail)
        with pytest.raises(torch.OutOfMemoryError):
            store.encode_deferred(keys)
    assert store.is_deferred
    for used in (cache, expected):
        used.layers[0].store.encode_deferred(keys)
    assert torch.equal(cache.layers[0].keys, expected.layers[0].keys)
