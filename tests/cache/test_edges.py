"""Calls at the edges: of no tokens, by a model on the meta device, and by a model that was moved since. What a cache
says of its first prompt: scales that fp16 cannot hold."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tq_hf.cache
from tests.support.helpers import assert_same, every_pair, gemma_config, llama_config, states
from tests.support.tiny_models import VOCAB, build, token_ids
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input
from tq_hf.layers import advice

SLIDING = gemma_config(["sliding_attention", "full_attention"], vocab_size=VOCAB)


@pytest.mark.parametrize("calls", [(0, 300, 1), (0, 40, 1, 5), (0, 1, 1), (0, 0, 300), (20, 0, 3, 0, 1, 300, 0, 1)])
@pytest.mark.parametrize("options", [{}, {"residual_length": 0, "sink_tokens": 0}, {"skip_layers": (0,)}])
@pytest.mark.parametrize("limit", [None, 400])
def test_a_call_of_no_tokens_changes_nothing(limit, options, calls):
    cache, plain = (TurboQuantCache(llama_config(), max_cache_len=limit, **options) for _ in range(2))
    for seed, tokens in enumerate(calls):
        for layer in range(2):
            pair = states(seed, 2, tokens=tokens)
            given = cache.update(*pair, layer)
            if tokens:
                assert_same(given, plain.update(*pair, layer))
    assert int(cache.get_seq_length()) == sum(calls)
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        assert_same((ours.keys, ours.values), (theirs.keys, theirs.values))


@pytest.mark.parametrize("limit", [None, 400])
def test_beside_sliding_layers_a_first_call_may_be_of_no_tokens(limit):
    cache = TurboQuantCache(SLIDING, max_cache_len=limit)
    for seed, tokens in enumerate((0, 40, 1)):
        for layer in range(2):
            cache.update(*states(seed, tokens=tokens), layer)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [41, 41]


@pytest.mark.parametrize(
    ("config", "attention", "limit", "skipped"),
    every_pair((llama_config(vocab_size=VOCAB), SLIDING), ("turboquant", "sdpa"), (None, 600), ((), (0,), (1,)))[::2],
)
def test_a_model_on_the_meta_device_runs(config, attention, limit, skipped):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    cache = TurboQuantCache(config, max_cache_len=limit, skip_layers=skipped)
    for tokens in (300, 1, 1, 20, 1):
        with torch.no_grad():
            out = model(torch.ones(2, tokens, dtype=torch.long, device="meta"), **as_input(cache))
        assert out.logits.shape == (2, tokens, VOCAB) and out.logits.is_meta
    assert int(cache.get_seq_length(1)) == 323 and cache.memory_footprint().total > 0
    if config is not SLIDING:
        cache.crop(-3)
        assert int(cache.get_seq_length()) == 320
    cache.reset()
    assert int(cache.get_seq_length()) == 0


def used(name: str, attention: str, **options):
    """A float32 model, and a cache that it has used."""
    model = build(name, attention=attention)
    cache = TurboQuantCache(model.config, **options)
    model.generate(token_ids(2, 150), **as_input(cache), max_new_tokens=3, do_sample=False)
    return model, cache


def held(cache: TurboQuantCache) -> list[torch.Tensor]:
    return [tensor.clone() for layer in cache.layers for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize("skipped", [(), (0,)])
@pytest.mark.parametrize("limit", [None, 300])
@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_model_of_another_dtype_is_refused_by_a_used_cache(name, attention, limit, skipped):
    """A growing cache is free for it after `reset`; a preallocated one keeps its tensors."""
    model, cache = used(name, attention, max_cache_len=limit, skip_layers=skipped)
    before = held(cache)
    model.bfloat16()
    for call in (
        lambda: model(token_ids(2, 1), **as_input(cache)),
        lambda: model(token_ids(2, 5), **as_input(cache)),
        lambda: model.generate(token_ids(2, 155), **as_input(cache), max_new_tokens=3),
    ):
        with pytest.raises(ValueError, match="dtype torch.float32, but was given keys with dtype torch.bfloat16"):
            call()
    assert all(torch.equal(now, then) for now, then in zip(held(cache), before, strict=True))
    cache.reset()
    if limit is None:
        model.generate(token_ids(2, 150), **as_input(cache), max_new_tokens=3)
        assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16}
    else:
        with pytest.raises(ValueError, match="a preallocated cache still has its batch size, dtype and device"):
            model.generate(token_ids(2, 150), **as_input(cache), max_new_tokens=3)
        fresh = TurboQuantCache(model.float().config, max_cache_len=limit, skip_layers=skipped)
        for serving in (cache, fresh):
            model.generate(token_ids(2, 150), **as_input(serving), max_new_tokens=3, do_sample=False)
        assert all(torch.equal(again, new) for again, new in zip(held(cache), held(fresh), strict=True))


@pytest.mark.parametrize("skipped", [(), (0,)])
@pytest.mark.parametrize("limit", [None, 300])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_model_on_another_device_is_refused_by_a_used_cache(name, limit, skipped):
    """Before several tokens transformers would read the length of a preallocated cache on the meta device."""
    model, cache = used(name, "turboquant", max_cache_len=limit, skip_layers=skipped)
    before = held(cache)
    model.to("meta")
    for count in (1, 5) if limit is None else (1,):
        with pytest.raises(ValueError, match="device cpu, but was given keys with device meta.*reset"):
            model(token_ids(2, count).to("meta"), **as_input(cache))
    assert all(torch.equal(now, then) for now, then in zip(held(cache), before, strict=True))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Warnings about first prompts."""
    lines: list[str] = []
    monkeypatch.setattr(advice.logger, "warning", lines.append)
    yield lines


def scaled(keys: float = 1.0, values: float = 1.0, layer: int = 1) -> Any:
    """A Llama one layer of which has keys and values so many times as large, and computes the same."""
    model = build("llama")
    attention = model.model.layers[layer].self_attn
    attention.k_proj.weight *= keys
    attention.q_proj.weight /= keys
    attention.v_proj.weight *= values
    attention.o_proj.weight /= values
    model.set_attn_implementation("turboquant")
    return model


def run(model: Any, cache: TurboQuantCache, tokens: int = 300, calls: int = 3) -> None:
    ids = token_ids(2, tokens)
    for part in (ids, *[ids[:, :1]] * (calls - 1)):
        model(part, **as_input(cache))


@pytest.mark.parametrize("length", [None, 500])
@pytest.mark.parametrize(
    "sizes, what",
    [((1e6, 1.0), "Keys"), ((1.0, 1e6), "Values"), ((1e-8, 1.0), "Keys"), ((1.0, 1e-8), "Values")],
    ids=str,
)
def test_scales_beyond_fp16_are_reported_once_unless_balance_holds_them(sizes, what, length, log):
    model = scaled(*sizes)
    run(model, TurboQuantCache(model.config, max_cache_len=length))
    assert log == []
    cache = TurboQuantCache(model.config, max_cache_len=length, balance=False)
    run(model, cache)
    (line,) = log
    assert line.startswith(f"{what} of layer 1 have an RMS of")
    assert "skip_layers=(1,)" in line and "balance=True" in line


def test_what_balance_cannot_hold_is_reported_too(log):
    model = scaled(1e12)
    run(model, TurboQuantCache(model.config))
    (line,) = log
    assert line.startswith("Keys of layer 1") and "balance=True" not in line


def test_every_layer_beyond_is_named_in_one_sentence(log):
    model = scaled(values=1e6, layer=0)
    model.model.layers[1].load_state_dict(scaled(keys=1e-8).model.layers[1].state_dict())
    run(model, TurboQuantCache(model.config, balance=False))
    (line,) = log
    assert line.startswith("Values of layer 0") and "skip_layers=(0, 1)" in line


def test_short_prompts_are_not_balanced_and_are_reported(log):
    model = scaled(values=1e6)
    run(model, TurboQuantCache(model.config), tokens=20)
    assert len(log) == 1


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_nothing_is_said_of_ordinary_states_zeros_or_nan(name, log):
    model = build(name, attention="turboquant")
    run(model, TurboQuantCache(model.config))
    run(model, TurboQuantCache(model.config, balance=False))
    for value in (0.0, float("nan")):
        cache = TurboQuantCache(model.config, balance=False)
        states = torch.full((1, 2, 300, 32 if name == "llama" else 16), value)
        for index in range(len(cache.layers)):
            cache.update(states, states, index)
        cache.get_mask_sizes(1, 0)
    assert log == []


def test_the_prompt_is_looked_at_by_the_next_call_and_never_again(monkeypatch):
    """The first call waits for no device and keeps nothing of the prompt but what the cache is for."""
    calls = []
    monkeypatch.setattr(tq_hf.cache, "warn_beyond_fp16", lambda layers: calls.append(list(layers)))
    model = scaled()
    cache = TurboQuantCache(model.config)
    for expected in (0, 1, 1):
        run(model, cache, tokens=20, calls=1)
        assert len(calls) == expected
    assert calls == [list(range(len(cache.layers)))]


def test_states_without_numbers_are_not_looked_at(log):
    cache = TurboQuantCache(build("llama").config)
    states = torch.empty(1, 2, 300, 32, device="meta")
    for index in range(len(cache.layers)):
        cache.update(states, states, index)
    cache.get_mask_sizes(1, 0)
    assert log == []
