"""Gradients reach the first call and are right there. Those of a later call are lost, and a backward pass says so."""

from contextlib import nullcontext
from functools import lru_cache

import pytest
import torch
from transformers import DynamicCache

from tests.support.tiny_models import build, token_ids
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input

DENSE = dict(residual_length=10**4)
LOST = "gradients of keys and values after the first call are lost.*`use_cache=False`.*`DynamicCache`"
IDS = token_ids(2, 400)

attentions = pytest.mark.parametrize("attention", ["turboquant", "sdpa", "eager"])
limits = pytest.mark.parametrize("limit", [None, 400])
families = pytest.mark.parametrize("name", ["llama", "gemma3"])

_built = lru_cache(lambda name: build(name, num_hidden_layers=2))


@pytest.fixture(autouse=True)
def gradients(no_gradients):
    with torch.enable_grad():
        yield


def model_of(name: str, attention: str):
    model = _built(name).requires_grad_(True)
    model.set_attn_implementation(attention)
    model.zero_grad()
    return model


def call(model, cache, start: int, stop: int, **inputs) -> torch.Tensor:
    """The loss of tokens `start` to `stop`."""
    inputs = inputs or {"input_ids": IDS[:, start:stop]}
    return model(**inputs, **as_input(cache)).logits.logsumexp(-1).sum()


def gradients_of(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@families
@limits
@attentions
def test_the_first_call_has_its_gradients(attention, limit, name):
    model = model_of(name, attention)
    call(model, DynamicCache(config=model.config), 0, 200).backward()
    expected = gradients_of(model)
    model.zero_grad()
    call(model, TurboQuantCache(model.config, max_cache_len=limit, **DENSE), 0, 200).backward()
    actual = gradients_of(model)
    assert actual.keys() == expected.keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(actual[parameter], gradient, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("skipped", [(), (0,)], ids=["", "first layer dense"])
@families
@pytest.mark.parametrize("tokens", [1, 20])
@limits
@attentions
def test_a_later_call_says_that_gradients_are_lost(attention, limit, tokens, name, skipped):
    model = model_of(name, attention)
    cache = TurboQuantCache(model.config, max_cache_len=limit, skip_layers=skipped, **DENSE)
    with torch.no_grad():
        call(model, cache, 0, 200)
    loss = call(model, cache, 200, 200 + tokens)
    with torch.no_grad():
        other = TurboQuantCache(model.config, max_cache_len=limit, skip_layers=skipped, **DENSE)
        call(model, other, 0, 200)
        torch.testing.assert_close(loss.detach(), call(model, other, 200, 200 + tokens))
    with pytest.raises(RuntimeError, match=LOST):
        loss.backward()
    # The cache goes on.
    with torch.no_grad():
        assert call(model, cache, 200 + tokens, 205 + tokens).isfinite()


@limits
@attentions
def test_all_calls_with_gradients_end_in_the_sentence(attention, limit):
    """And not in torch's, of a tensor that was modified in place."""
    model = model_of("llama", attention)
    cache = TurboQuantCache(model.config, max_cache_len=limit, **DENSE)
    losses = [call(model, cache, *part) for part in ((0, 100), (100, 120), (120, 121), (121, 300))]
    for loss in (losses[1], losses[2], losses[3], torch.stack(losses[1:]).sum()):
        with pytest.raises(RuntimeError, match=LOST):
            loss.backward(retain_graph=True)
    losses[0].backward()
    assert "model.layers.0.self_attn.k_proj.weight" in gradients_of(model)


@pytest.mark.parametrize("how", ["backward", "grad"])
@limits
@attentions
def test_embeddings_of_a_later_call_say_so(attention, limit, how):
    """Prompts that are searched by gradients (GCG), of a model without trained parameters."""
    model = model_of("llama", attention).requires_grad_(False)
    cache = TurboQuantCache(model.config, max_cache_len=limit, **DENSE)
    call(model, cache, 0, 200)
    embeddings = model.get_input_embeddings()(IDS[:, 200:210]).requires_grad_(True)
    loss = call(model, cache, 200, 210, inputs_embeds=embeddings)
    with pytest.raises(RuntimeError, match=LOST):
        loss.backward() if how == "backward" else torch.autograd.grad(loss, embeddings)


@limits
@attentions
def test_a_soft_prompt_that_was_read_before_says_so(attention, limit):
    """Nothing of the later call requires gradients, and the loss depends on the soft prompt."""
    model = model_of("llama", attention).requires_grad_(False)
    cache = TurboQuantCache(model.config, max_cache_len=limit, **DENSE)
    prompt = model.get_input_embeddings()(IDS[:, :20]).requires_grad_(True)
    first = call(model, cache, 0, 20, inputs_embeds=prompt)
    loss = call(model, cache, 20, 40)
    with pytest.raises(RuntimeError, match=LOST):
        (first + loss).backward()
    cache.reset()
    call(model, cache, 0, 20)
    assert not call(model, cache, 20, 40).requires_grad


@limits
@attentions
def test_a_long_call_after_a_prompt_without_gradients_has_its_own(attention, limit):
    """It reads its own keys and values as the model made them (more than 128 tokens)."""
    model = model_of("llama", attention)
    found = []
    for cache in (DynamicCache(config=model.config), TurboQuantCache(model.config, max_cache_len=limit, **DENSE)):
        model.zero_grad()
        with torch.no_grad():
            call(model, cache, 0, 200)
        call(model, cache, 200, 400).backward()
        found.append(gradients_of(model))
    for parameter, gradient in found[0].items():
        torch.testing.assert_close(found[1][parameter], gradient, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("recorded", ["no_grad", "no parameter"])
@limits
@attentions
def test_where_nothing_requires_gradients_nothing_is_recorded(attention, limit, recorded):
    model = model_of("llama", attention).requires_grad_(recorded == "no_grad")
    cache = TurboQuantCache(model.config, max_cache_len=limit, **DENSE)
    with torch.no_grad() if recorded == "no_grad" else nullcontext():
        losses = [call(model, cache, *part) for part in ((0, 100), (100, 120), (120, 121), (121, 300))]
    assert not any(loss.requires_grad for loss in losses)
