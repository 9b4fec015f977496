"""Models in float64: nothing of the cache, of attention or of files narrows what it may not."""

import pytest
import torch
from transformers import DynamicCache

from tests.support.tiny_models import VOCAB, build, dense_attention
from tq_hf import TurboQuantBatching, TurboQuantCache
from tq_hf.compat import as_input

generator = torch.Generator().manual_seed(0)
PROMPT = torch.randint(3, VOCAB, (2, 300), generator=generator)
MORE = torch.randint(3, VOCAB, (2, 7), generator=generator)


def model_of(name: str, attention: str):
    model = build(name, num_hidden_layers=2, attention=attention).double()
    return model


def logits(model, cache) -> torch.Tensor:
    """Of a prompt, several tokens and single ones, before and after tokens are taken back."""
    cache.activate_past_recording()
    model(PROMPT, **as_input(cache))
    out = [model(MORE[:, :5], **as_input(cache)).logits, model(MORE[:, 5:6], **as_input(cache)).logits]
    cache.crop(-3)
    out.append(model(MORE[:, 6:], **as_input(cache)).logits)
    return torch.cat(out, 1)


@pytest.mark.parametrize("limit", [None, 400])
@pytest.mark.parametrize("attention", ["turboquant", "dense"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_logits_are_those_over_a_dynamic_cache(name, attention, limit):
    model = model_of(name, dense_attention(name) if attention == "dense" else attention)
    plain = model_of(name, dense_attention(name))
    expected = logits(plain, DynamicCache(config=plain.config))
    actual = logits(model, TurboQuantCache(model.config, max_cache_len=limit, residual_length=10**4))
    assert actual.dtype == torch.float64
    # Attention in torch sums in float32.
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("preset", ["k8v4", "2bit_nc", "4bit_nc"])
@pytest.mark.parametrize("limit", [None, 400])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_packed_tokens_are_read_as_dequantized_ones(name, limit, preset):
    model, dense = model_of(name, "turboquant"), model_of(name, "sdpa")
    out = []
    for each in (model, dense):
        # Of two balancings one has no queries.
        cache = TurboQuantCache(each.config, preset, max_cache_len=limit, balance=False, residual_length=0)
        out.append(logits(each, cache))
    torch.testing.assert_close(out[0], out[1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("limit", [None, 400])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_cache_is_saved_and_loaded(tmp_path, name, limit):
    model = model_of(name, "turboquant")
    cache = TurboQuantCache(model.config, max_cache_len=limit)
    model(PROMPT, **as_input(cache))
    cache.save(tmp_path / "cache.safetensors", model)
    loaded = TurboQuantCache.load(tmp_path / "cache.safetensors", model)
    one, other = (model(MORE[:, :1], **as_input(each)).logits for each in (cache, loaded))
    assert torch.equal(one, other)


def test_a_batch_gives_the_tokens_of_a_float32_model():
    answers = []
    for model in (build("llama", num_hidden_layers=2), build("llama", num_hidden_layers=2).double()):
        outputs = TurboQuantBatching(model, "k8v4").generate_batch([PROMPT[0].tolist()], max_new_tokens=5)
        (output,) = outputs.values()
        assert output.error is None
        answers.append(output.generated_tokens)
    assert answers[0] == answers[1] and len(answers[0]) == 5
