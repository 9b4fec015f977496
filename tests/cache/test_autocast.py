"""Models in float64, and float32 models under `torch.autocast`, which gives the cache float32 keys and 16-bit values.

They are served as a `DynamicCache` serves them: attention computes in 16 bits under autocast, and what this package
computes is not rounded. Nothing of the cache, of attention or of files narrows float64 where it may not."""

from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache, PreTrainedModel

from tests.support.helpers import (
    assert_same,
    compile_config,
    every_pair,
    llama_config,
    packed_tensors,
    relative_error,
    slow,
    states,
)
from tests.support.tiny_models import VOCAB, build, dense_attention, token_ids
from tq_hf import TurboQuantCache, graph_decoding
from tq_hf.attention import turboquant_attention
from tq_hf.compat import as_input
from tq_hf.graph_decoding.loop import latest_steps

CALLS = (60, 1, 1, 9, 1)
"""A prompt, decode steps, a second turn and a step: all dense, so that nothing is lost to quantization."""


def on(dtype: torch.dtype = torch.bfloat16, enabled: bool = True, device: str = "cpu") -> torch.autocast:
    return torch.autocast(device, dtype=dtype, enabled=enabled)


@torch.no_grad()
def logits(model: PreTrainedModel, cache, attention: str, padded: int = 0, order=None, **options):
    """The last logits of each call `[B, calls, V]`, with autocast on or off in each."""
    model.set_attn_implementation(attention)
    mask, found = torch.ones(2, sum(CALLS), dtype=torch.long, device=model.device), []
    mask[0, :padded] = 0
    for i, (tokens, enabled) in enumerate(zip(CALLS, order or [True] * len(CALLS), strict=True)):
        with on(enabled=enabled, device=model.device.type, **options):
            held, ids = mask[:, : sum(CALLS[: i + 1])], token_ids(2, tokens, seed=i).to(model.device)
            found.append(model(ids, **as_input(cache), attention_mask=held).logits[:, -1:])
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    ("name", "attention", "limit", "options", "padded"),
    every_pair(
        ("llama", "gemma2", "gemma3"), ("turboquant", "dense"), (None, 100), ({}, {"skip_layers": (0,)}), (0, 7)
    ),
)
def test_logits_are_those_over_a_dynamic_cache(name, attention, limit, options, padded):
    model, dense = build(name), dense_attention(name)
    cache = TurboQuantCache(model.config, max_cache_len=limit, **options)
    expected = logits(model, DynamicCache(config=model.config), dense, padded)
    actual = logits(model, cache, dense if attention == "dense" else attention, padded)
    assert actual.dtype == expected.dtype == torch.bfloat16
    if attention == "dense" and limit is None:
        assert torch.equal(actual, expected)
    assert relative_error(actual, expected) < 0.05
    assert {layer.keys.dtype for layer in cache.layers} == {torch.float32}


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limit", [None, 100])
@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_on_a_gpu_logits_are_those_over_a_dynamic_cache(name, attention, limit, dtype):
    model = build(name).to("cuda")
    expected = logits(model, DynamicCache(config=model.config), "sdpa", dtype=dtype)
    actual = logits(model, TurboQuantCache(model.config, max_cache_len=limit), attention, dtype=dtype)
    assert actual.dtype == expected.dtype == dtype and relative_error(actual, expected) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [(1, 0, 1, 0, 1), (0, 1, 0, 1, 1)], ids=["on first", "off first"])
@pytest.mark.parametrize("limit", [None, 100])
@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
def test_a_cache_is_used_within_and_without_autocast(attention, limit, order, dtype):
    model, order = build("llama"), tuple(map(bool, order))
    cache = TurboQuantCache(model.config, max_cache_len=limit, skip_layers=(0,))
    expected = logits(model, DynamicCache(config=model.config), "sdpa", order=order, dtype=dtype)
    assert relative_error(logits(model, cache, attention, order=order, dtype=dtype), expected) < 0.05


@pytest.mark.parametrize("limit", [None, 600])
def test_a_model_without_rotary_embedding_goes_on_within_autocast(limit):
    """Its keys, too, have 16 bits there; the cache holds float32."""
    cache = TurboQuantCache(llama_config(), max_cache_len=limit, skip_layers=(0,))
    for layer in range(2):
        cache.update(*states(1), layer)
        with on():
            cache.update(*states(2, tokens=1, dtype=torch.bfloat16), layer)
        assert cache.layers[layer].keys.dtype == torch.float32 and int(cache.layers[layer].get_seq_length()) == 129
    with on(), pytest.raises(ValueError, match="dtype torch.float32, but was given keys with dtype torch.float64"):
        cache.update(*states(2, tokens=1, dtype=torch.float64), 1)


@pytest.mark.parametrize("preset", ["k8v4", "4bit_nc", "2bit_nc"])
@pytest.mark.parametrize("limit", [None, 600])
def test_blocks_are_the_same_bits_as_without_autocast(limit, preset):
    pair, held = states(3, tokens=500, dim=64), []
    for enabled in (False, True):
        cache = TurboQuantCache(llama_config(dim=64), preset, max_cache_len=limit)
        with on(enabled=enabled):
            cache.update(*pair, 0)
            cache.update(*states(4, tokens=1, dim=64), 0)
            store = cache.layers[0].store
            held.append((packed_tensors(store), store.view()))
            held[-1] += ((cache.layers[0].keys, cache.layers[0].values),)
    assert held[0][1].host_counts.blocks == 2
    for name, tensor in held[0][0].items():
        assert torch.equal(tensor, held[1][0][name]), name
    assert_same(held[1][2], held[0][2])


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("limit", [None, 600])
def test_attention_over_packed_tokens_is_rounded_once(limit, queries, softcap):
    """To what sdpa returns within autocast; without it bit for bit the same."""
    module, found = SimpleNamespace(config=llama_config(), is_causal=True), []
    module.config._attn_implementation = "turboquant"
    query = states(5, heads=4, tokens=queries)[0]
    for enabled in (False, True):
        cache = TurboQuantCache(llama_config(), max_cache_len=limit)
        with on(enabled=enabled):
            cache.update(*states(3, tokens=500), 0)
            keys, values = states(4, tokens=queries)
            given = cache.update(keys, values.bfloat16() if enabled else values.bfloat16().float(), 0)
            found.append(turboquant_attention(module, query, *given, None, softcap=softcap)[0])
    assert found[1].dtype == torch.bfloat16 and torch.equal(found[0].bfloat16(), found[1])


@pytest.mark.parametrize("attention", ["turboquant", slow("sdpa")])
@pytest.mark.parametrize("backend", ["eager", slow("aot_eager")])
def test_compiled_steps_are_like_eager_ones(backend, attention):
    model = build("llama", attention=attention)
    torch._dynamo.reset()
    counters.clear()
    compiled, loop, found = dict(compile_config=compile_config(backend)), dict(custom_generate=graph_decoding), []
    for options in (dict(disable_compile=True), compiled, compiled | loop, loop):
        cache = TurboQuantCache(model.config, max_cache_len=200, residual_length=0)
        options |= dict(do_sample=False, max_new_tokens=12, return_dict_in_generate=True, output_logits=True)
        with on():
            steps = model.generate(token_ids(2, 125), **as_input(cache), **options).logits
        found.append(torch.stack(steps))
        assert cache.layers[1].store.settle().blocks == 1, "a block was encoded while decoding"
    assert all(relative_error(other, found[0]) < 0.05 for other in found[1:])
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_graph_decoding_keeps_a_step_for_its_autocast(device):
    """What it captured within one context is right in the next."""
    model, keys = build("llama").to(device), []
    model.set_attn_implementation("turboquant")
    cache = TurboQuantCache(model.config, max_cache_len=200)
    options = dict(do_sample=False, max_new_tokens=12, return_dict_in_generate=True, output_logits=True)
    for enabled in (True, True, False):
        cache.reset()
        with on(enabled=enabled, device=device):
            ids, plain = token_ids(2, 20).to(device), TurboQuantCache(model.config)
            steps = model.generate(ids, **as_input(cache), custom_generate=graph_decoding, **options).logits
            expected = model.generate(ids, **as_input(plain), **options).logits
        found, right = torch.stack(steps), torch.stack(expected)
        # In 16 bits the best two tokens may tie; what follows another token is another text.
        alike = (found.argmax(-1) == right.argmax(-1)).all(1).int().cumprod(0).sum().item() + 1
        assert alike > 4 and relative_error(found[:alike], right[:alike]) < 0.05
        keys.append(latest_steps[cache].key)
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("loads", [False, True], ids=["loaded without", "loaded within"])
@pytest.mark.parametrize("limit", [None, 300])
@pytest.mark.parametrize("skipped", [(), (0,)])
def test_a_cache_filled_within_autocast_is_saved_and_loaded(tmp_path, skipped, limit, loads):
    model = build("llama")
    cache = TurboQuantCache(model.config, max_cache_len=limit, skip_layers=skipped)
    with torch.no_grad(), on():
        model(token_ids(2, 200), **as_input(cache))
    with on(enabled=loads):
        cache.save(tmp_path / "cache.safetensors", model)
        there = TurboQuantCache.load(tmp_path / "cache.safetensors", model)
    for ours, theirs in zip(there.layers, cache.layers, strict=True):
        assert_same((ours.keys, ours.values), (theirs.keys, theirs.values))


def test_linear_states_are_loaded_within_the_autocast_that_filled_them(tmp_path):
    model, path = build("qwen3_next"), tmp_path / "cache.safetensors"
    with torch.no_grad(), on():
        model(token_ids(2, 200), **as_input(cache := TurboQuantCache(model.config)))
        cache.save(path, model)
        assert TurboQuantCache.load(path, model).get_seq_length() == 200
    with pytest.raises(ValueError, match="bfloat16 .* must be torch.float32 .* or of another autocast"):
        TurboQuantCache.load(path, model)


generator = torch.Generator().manual_seed(0)
PROMPT = torch.randint(3, VOCAB, (2, 300), generator=generator)
MORE = torch.randint(3, VOCAB, (2, 7), generator=generator)


def double(name: str, attention: str):
    model = build(name, num_hidden_layers=2, attention=attention).double()
    return model


def logits_after_crops(model, cache) -> torch.Tensor:
    """Of a prompt, several tokens and single ones, before and after tokens are taken back."""
    cache.activate_past_recording()
    model(PROMPT, **as_input(cache))
    out = [model(MORE[:, :5], **as_input(cache)).logits, model(MORE[:, 5:6], **as_input(cache)).logits]
    cache.crop(-3)
    out.append(model(MORE[:, 6:], **as_input(cache)).logits)
    return torch.cat(out, 1)


@pytest.mark.parametrize(
    ("name", "attention", "limit"), every_pair(("llama", "gemma2", "gemma3"), ("turboquant", "dense"), (None, 400))
)
def test_logits_in_float64_are_those_over_a_dynamic_cache(name, attention, limit):
    model = double(name, dense_attention(name) if attention == "dense" else attention)
    plain = double(name, dense_attention(name))
    expected = logits_after_crops(plain, DynamicCache(config=plain.config))
    actual = logits_after_crops(model, TurboQuantCache(model.config, max_cache_len=limit, residual_length=10**4))
    assert actual.dtype == torch.float64
    # Attention in torch sums in float32.
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "limit", "preset"), every_pair(("llama", "gemma3"), (None, 400), ("k8v4", "2bit_nc", "4bit_nc"))
)
def test_packed_tokens_are_read_as_dequantized_ones(name, limit, preset):
    model, dense = double(name, "turboquant"), double(name, "sdpa")
    out = []
    for each in (model, dense):
        # Of two balancings one has no queries.
        cache = TurboQuantCache(each.config, preset, max_cache_len=limit, balance=False, residual_length=0)
        out.append(logits_after_crops(each, cache))
    torch.testing.assert_close(out[0], out[1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("limit", [None, 400])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_cache_is_saved_and_loaded(tmp_path, name, limit):
    model = double(name, "turboquant")
    cache = TurboQuantCache(model.config, max_cache_len=limit)
    model(PROMPT, **as_input(cache))
    cache.save(tmp_path / "cache.safetensors", model)
    loaded = TurboQuantCache.load(tmp_path / "cache.safetensors", model)
    one, other = (model(MORE[:, :1], **as_input(each)).logits for each in (cache, loaded))
    assert torch.equal(one, other)


def test_a_batch_gives_the_tokens_of_a_float32_model():
    from tq_hf import TurboQuantBatching  # needs a newer transformers than the oldest

    answers = []
    for model in (build("llama", num_hidden_layers=2), build("llama", num_hidden_layers=2).double()):
        outputs = TurboQuantBatching(model, "k8v4").generate_batch([PROMPT[0].tolist()], max_new_tokens=5)
        (output,) = outputs.values()
        assert output.error is None
        answers.append(output.generated_tokens)
    assert answers[0] == answers[1] and len(answers[0]) == 5
