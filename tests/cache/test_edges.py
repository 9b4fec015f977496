"""Calls at the edges: of no tokens, by a model on the meta device, and by a model that was moved since."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from tests.support.helpers import assert_same, every_pair, llama_config, states
from tests.support.tiny_models import VOCAB, build
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input

SLIDING = Gemma3TextConfig(
    num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"],
    sliding_window=16,
    num_key_value_heads=2,
    num_attention_heads=4,
    head_dim=16,
    hidden_size=64,
    intermediate_size=64,
    vocab_size=VOCAB,
)


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
    every_pair((llama_config(vocab_size=VOCAB), SLIDING), ("turboquant", "sdpa"), (None, 600), ((), (0,), (1,))),
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


def tokens(count: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, count), generator=torch.Generator().manual_seed(0))


def used(name: str, attention: str, **options):
    """A float32 model, and a cache that it has used."""
    model = build(name, attention=attention)
    cache = TurboQuantCache(model.config, **options)
    model.generate(tokens(150), **as_input(cache), max_new_tokens=3, do_sample=False)
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
        lambda: model(tokens(1), **as_input(cache)),
        lambda: model(tokens(5), **as_input(cache)),
        lambda: model.generate(tokens(155), **as_input(cache), max_new_tokens=3),
    ):
        with pytest.raises(ValueError, match="dtype torch.float32, but was given keys with dtype torch.bfloat16"):
            call()
    assert all(torch.equal(now, then) for now, then in zip(held(cache), before, strict=True))
    cache.reset()
    if limit is None:
        model.generate(tokens(150), **as_input(cache), max_new_tokens=3)
        assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16}
    else:
        with pytest.raises(ValueError, match="a preallocated cache still has its batch size, dtype and device"):
            model.generate(tokens(150), **as_input(cache), max_new_tokens=3)
        fresh = TurboQuantCache(model.float().config, max_cache_len=limit, skip_layers=skipped)
        for serving in (cache, fresh):
            model.generate(tokens(150), **as_input(serving), max_new_tokens=3, do_sample=False)
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
            model(tokens(count).to("meta"), **as_input(cache))
    assert all(torch.equal(now, then) for now, then in zip(held(cache), before, strict=True))
