"""Multi-head latent attention in the sizes of DeepSeek-V3 and GLM-4.7-Flash.

Such a model caches one latent a token for all its heads, and a rotary key beside it: the cache holds the latent of 512
channels as its keys and the rotary key of 64 as its values, each packed with its own size. Queries of "turboquant"
absorb the up-projection; for other attention functions keys and values of the heads are made from dequantized latents.
"""

import copy
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, DeepseekV3Config, DynamicCache, Glm4MoeLiteConfig, PreTrainedModel

from tests.support.helpers import (
    BLOCK,
    CountedBytes,
    all_packed,
    compile_config,
    dequantized,
    encoded,
    quick_of,
    relative_error,
    slow,
    states,
    storages_reachable_from,
)
from tests.support.tiny_models import token_ids
from tq_hf import PRESETS, TurboQuantCache, graph_decoding
from tq_hf.attention import turboquant_attention
from tq_hf.compat import as_input
from tq_hf.layers.expansion import ExpandedStates, Expansion, leave, take
from tq_hf.layers.handle import Handle
from tq_hf.ops import dispatch

LATENT, ROTARY = 512, 64
VOCAB = 128
LAYERS = 2
FEW = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, q_lora_rank=64, pad_token_id=None
)
"""What makes a model small and is no concern of what it caches."""
CONFIGS = {
    "deepseek_v3": lambda: DeepseekV3Config(
        **FEW, first_k_dense_replace=LAYERS, num_attention_heads=16, num_key_value_heads=16
    ),
    "glm4_moe_lite": lambda: Glm4MoeLiteConfig(**FEW, mlp_layer_types=["dense"] * LAYERS),
}


def build(name: str, attention: str = "sdpa") -> PreTrainedModel:
    """A small model around latents of full size, whose logits depend on what it attends to."""
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    model.set_attn_implementation(attention)
    return model


def ids(tokens: int) -> torch.Tensor:
    return token_ids(1, tokens, seed=tokens)


@pytest.mark.parametrize(("name", "room"), zip(CONFIGS, (None, 1024), strict=True))
def test_what_is_held_is_the_latent(name, room):
    model = build(name)
    cache, plain = TurboQuantCache(model.config, max_cache_len=room), DynamicCache(config=model.config)
    for held in (cache, plain):
        model(ids(4 + 5 * BLOCK + 128), **as_input(held))
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        assert layer.keys.shape == other.keys.shape == (1, 1, 772, LATENT)
        assert layer.values.shape == other.values.shape == (1, 1, 772, ROTARY)
    footprint, layout = cache.memory_footprint(), cache.config.of_latents().layout(LATENT, ROTARY)
    assert layout.slot_bytes == LATENT // 2 + ROTARY + 4
    blocks = 5 if room is None else (room - 4 - 128) // BLOCK
    assert footprint.packed == LAYERS * blocks * layout.block_bytes
    assert footprint.bf16_equivalent == LAYERS * 772 * (LATENT + ROTARY) * 2
    assert footprint.total == sum(storages_reachable_from(cache).values())


CODEBOOK_ERROR = {2: 0.37, 3: 0.19, 4: 0.1, 8: 0.027}
"""Of Gaussian channels, a few percent more than `tests/codec/test_reference.py` expects."""
ATTENTION_ERROR = dict(zip(PRESETS, (0.065, 0.19, 0.21, 0.33, 0.35, 0.4, 0.78), strict=True))
"""A tenth more than was found."""


@pytest.mark.parametrize("name", PRESETS)
def test_the_error_of_a_latent_is_that_of_its_codebook(name):
    """Also of attention as it can be absorbed into latents, in float64: the logits of a head are its query of 576
    channels times latent and rotary key, its output a mean of latents."""
    config = all_packed(key_bits=PRESETS[name].key_bits, value_bits=PRESETS[name].value_bits)
    exact = [part.double() for part in states(0, heads=1, tokens=4 * BLOCK, dim=LATENT, value_dim=ROTARY)]
    held = [part.double() for part in dequantized(config, encoded(config, *(part.float() for part in exact)))]
    for part, true, bits in zip(held, exact, (config.key_bits, config.value_bits), strict=True):
        assert relative_error(part, true) < CODEBOOK_ERROR[bits]
    query = torch.randn(1, 16, 3, LATENT + ROTARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def attend(latent: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        logits = query @ torch.cat([latent, rotary], -1).transpose(-1, -2) * (128 + ROTARY) ** -0.5
        return logits.softmax(-1) @ latent

    assert relative_error(attend(*held), attend(*exact)) < ATTENTION_ERROR[name]


@pytest.mark.parametrize("name", ["deepseek_v3", slow("glm4_moe_lite")])
@pytest.mark.parametrize("attention", ["turboquant", slow("sdpa")])
def test_logits_of_a_compressed_latent_stay_near_those_in_float64(name, attention):
    model = build(name, attention=attention)
    prompt, step = ids(420), ids(421)[:, :1]

    def logits(cache) -> torch.Tensor:
        model(prompt, **as_input(cache))
        return model(step, **as_input(cache)).logits

    found = {preset: logits(TurboQuantCache(model.config, preset)) for preset in ("k8v4", "4bit_nc", "2bit_nc")}
    dense = logits(TurboQuantCache(model.config, residual_length=10**6))
    model.double()
    exact = logits(DynamicCache(config=model.config))
    assert relative_error(dense, exact) < 1e-5
    errors = {preset: relative_error(each, exact) for preset, each in found.items()}
    assert errors["k8v4"] < errors["4bit_nc"] < errors["2bit_nc"] < 0.5


@pytest.fixture
def absorbed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of queries of all calls of `attend_absorbed` from now on."""
    calls, attend = [], dispatch.attend_absorbed

    def noting(query: torch.Tensor, *arguments: object) -> torch.Tensor:
        calls.append(query.shape[2])
        return attend(query, *arguments)

    monkeypatch.setattr(dispatch, "attend_absorbed", noting)
    return calls


Read = Callable[[PreTrainedModel, TurboQuantCache], torch.Tensor]


def logits_of(model: PreTrainedModel, attention: str, read: Read, room: int | None = None) -> torch.Tensor:
    """Logits of `read` under an attention function, with a cache of 4 bits."""
    model.set_attn_implementation(attention)
    with torch.no_grad():
        return read(model, TurboQuantCache(model.config, "4bit_nc", max_cache_len=room))


def continued(model: PreTrainedModel, cache: TurboQuantCache, *sizes: int, batch: int = 1, **options) -> torch.Tensor:
    """Logits of calls with these numbers of tokens."""
    parts = [model(ids(900 + i)[:, :n].expand(batch, -1), **as_input(cache), **options) for i, n in enumerate(sizes)]
    return torch.cat([part.logits for part in parts], 1)


def read_chunks(model: PreTrainedModel, cache: TurboQuantCache) -> torch.Tensor:
    """A prompt in chunks, steps of one and several tokens, and a long call."""
    return continued(model, cache, 400, 150, 1, 1, 5, 1, 16, 40, 1)


def read_steps(model: PreTrainedModel, cache: TurboQuantCache) -> torch.Tensor:
    """Steps from the first token on."""
    return continued(model, cache, 1, 1, 1, 1)


def read_edited(model: PreTrainedModel, cache: TurboQuantCache) -> torch.Tensor:
    """Steps between changes of what the cache holds."""
    logits = [continued(model, cache, 420, 3, batch=2)]
    cache.crop(-2)
    logits.append(continued(model, cache, 1, batch=2))
    cache.reorder_cache(torch.tensor([1, 0]))
    logits.append(continued(model, cache, 1, 2, batch=2))
    return torch.cat(logits, 1)


def padded_prompt(padding: int) -> dict[str, torch.Tensor]:
    """Two sequences, the first of them padded on the left."""
    prompt = torch.cat([ids(420), ids(421)[:, 1:]])
    mask = torch.ones_like(prompt)
    mask[0, :padding] = 0
    return {"input_ids": prompt, "attention_mask": mask}


def read_padded(model: PreTrainedModel, cache: TurboQuantCache) -> torch.Tensor:
    """Logits of steps after a padded prompt."""
    (prompt, mask), logits = padded_prompt(37).values(), []
    for step in (prompt, prompt[:, :1], prompt[:, 5:6], prompt[:, 7:10]):
        if logits:
            mask = torch.cat([mask, torch.ones_like(step)], 1)
        logits.append(model(step, attention_mask=mask, **as_input(cache)).logits)
    return torch.cat(logits[1:], 1)


READS = (read_chunks, read_steps, read_edited, read_padded)


@pytest.mark.parametrize(
    ("name", "room", "read"),
    quick_of(
        product(CONFIGS, (None, 1024), READS),
        *[("deepseek_v3", 1024, read_chunks), ("deepseek_v3", None, read_edited), ("deepseek_v3", 1024, read_padded)],
        ("deepseek_v3", 1024, read_steps),
    ),
)
def test_absorbed_queries_give_what_expanded_latents_give(name, room, read, absorbed):
    model = build(name)
    expected = logits_of(model, "sdpa", read, room)
    assert not absorbed
    found = logits_of(model, "turboquant", read, room)
    assert len(absorbed) >= 3 * LAYERS
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_attention_is_switched_between_steps(absorbed):
    model = build("deepseek_v3")

    def read(model: PreTrainedModel, cache: TurboQuantCache) -> torch.Tensor:
        first = model.config._attn_implementation
        logits = [continued(model, cache, 420, 1)]
        for attention in ("sdpa", first, "eager", first):
            model.set_attn_implementation(attention)
            logits.append(continued(model, cache, 1))
        return torch.cat(logits, 1)

    expected = logits_of(model, "sdpa", read)
    torch.testing.assert_close(logits_of(model, "turboquant", read), expected, atol=1e-4, rtol=0)
    assert len(absorbed) == 3 * LAYERS


@pytest.mark.slow
@pytest.mark.parametrize("graph", [False, True], ids=["generate", "graph_decoding"])
def test_the_same_tokens_are_generated(graph, absorbed):
    model = build("glm4_moe_lite")
    options = padded_prompt(9) | dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    if graph:
        options["custom_generate"] = graph_decoding

    def generated(attention: str) -> torch.Tensor:
        model.set_attn_implementation(attention)
        cache = TurboQuantCache(model.config, max_cache_len=600 if graph else None)
        return model.generate(**as_input(cache), **options)

    expected = generated("sdpa")
    assert torch.equal(generated("turboquant"), expected)
    assert len(absorbed) == 5 * LAYERS


def test_assisted_decoding_gives_the_same_tokens(absorbed):
    model = build("deepseek_v3")
    prompt = ids(300).repeat(1, 2)
    model.set_attn_implementation("turboquant")
    options = dict(max_new_tokens=12, do_sample=False)
    expected = model.generate(prompt, **as_input(TurboQuantCache(model.config)), **options)
    absorbed.clear()
    found = model.generate(prompt, **as_input(TurboQuantCache(model.config)), prompt_lookup_num_tokens=4, **options)
    assert torch.equal(found, expected)
    assert max(absorbed) > 1


@pytest.mark.parametrize("change", ["bias", "values", "both of a pair", "later"])
def test_expansions_that_the_weight_does_not_explain_are_computed(change, absorbed, monkeypatch):
    model = build("deepseek_v3")
    layers = [layer.self_attn for layer in model.model.layers]
    whole = type(layers[0]).expand_kv
    later = []
    for layer in layers:
        if change == "bias":
            layer.kv_b_proj.bias = torch.nn.Parameter(torch.full((layer.kv_b_proj.out_features,), 0.1))

    def expand(self, kv_nope, k_rot):
        keys, values = whole(self, kv_nope, k_rot)
        if change == "values":
            return keys, values.transpose(2, 3).transpose(2, 3).expand(-1, -1, -1, -1) + 1
        if change == "both of a pair":
            return keys.transpose(1, 3).transpose(1, 3), values[:, [0] * values.shape[1]]
        if change == "later" and later:
            return keys, values[:, [0] * values.shape[1]]
        return keys, values

    monkeypatch.setattr(type(layers[0]), "expand_kv", expand)

    def read(model: PreTrainedModel, cache: TurboQuantCache) -> torch.Tensor:
        logits = [continued(model, cache, 420)]
        later.append(1)
        logits.append(continued(model, cache, 1, 2))
        later.clear()
        return torch.cat(logits, 1)

    expected = logits_of(model, "sdpa", read)
    torch.testing.assert_close(logits_of(model, "turboquant", read), expected, atol=1e-4, rtol=0)
    assert not absorbed


def test_a_step_does_not_expand_the_history():
    model = build("deepseek_v3")

    def bytes_of_a_step(attention: str) -> int:
        model.set_attn_implementation(attention)
        cache = TurboQuantCache(model.config)
        with torch.no_grad():
            continued(model, cache, 900, 1)
            with CountedBytes() as counted:
                continued(model, cache, 1)
        return counted.written

    expanded = LAYERS * 900 * 16 * (128 + 64 + 128) * 4
    assert bytes_of_a_step("turboquant") < bytes_of_a_step("sdpa") - expanded


def test_a_cache_from_a_file_is_read_packed(tmp_path, absorbed):
    model = build("deepseek_v3", attention="turboquant")
    cache = TurboQuantCache(model.config)
    with torch.no_grad():
        continued(model, cache, 420, 1)
        cache.save(tmp_path / "cache", model)
        expected = continued(model, cache, 1)
        loaded = TurboQuantCache.load(tmp_path / "cache", model)
        absorbed.clear()
        assert torch.equal(continued(model, loaded, 1), expected)
    assert len(absorbed) == LAYERS


def test_what_was_recorded_is_freed_without_the_garbage_collector():
    model = build("deepseek_v3", attention="turboquant")
    cache = TurboQuantCache(model.config)
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            continued(model, cache, 420, 1, 40)
        assert not [x for x in gc.get_objects() if type(x) in (Expansion, Handle, ExpandedStates)]
    finally:
        gc.enable()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_read_packed(name, absorbed):
    model = build("deepseek_v3")

    def read(attention: str) -> torch.Tensor:
        model.set_attn_implementation(attention)
        with torch.no_grad():
            return continued(model, TurboQuantCache(model.config, name), 420, 1)

    torch.testing.assert_close(read("turboquant"), read("sdpa"), atol=1e-4, rtol=0)
    assert absorbed == [1] * LAYERS


@pytest.mark.parametrize("graph", [slow(False), True], ids=["generate", "graph_decoding"])
def test_a_compiled_step_absorbs_in_one_graph(graph, absorbed, monkeypatch):
    torch._dynamo.reset()
    counters.clear()
    model = build("deepseek_v3", attention="turboquant")
    options = padded_prompt(9) | dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    expected = model.generate(**as_input(TurboQuantCache(model.config)), **options)
    absorbed.clear()
    if graph:
        options["custom_generate"] = graph_decoding
    monkeypatch.delattr(dispatch, "dense_tokens")  # which no step runs
    cache = TurboQuantCache(model.config, max_cache_len=600)
    found = model.generate(**as_input(cache), **options, compile_config=compile_config("aot_eager"))
    assert torch.equal(found, expected)
    assert len(absorbed) == 7 * LAYERS
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    torch._dynamo.reset()


def test_a_compiled_step_with_an_additive_mask_expands(absorbed):
    torch._dynamo.reset()
    model = build("deepseek_v3", attention="turboquant")
    mask = torch.zeros(1, 1, 1, 600)
    mask[..., 421:] = -torch.inf
    mask[..., 3] = -0.5

    def steps(step: Callable[..., Any]) -> torch.Tensor:
        cache = TurboQuantCache(model.config, max_cache_len=600)
        with torch.no_grad():
            continued(model, cache, 420)
            return step(ids(3)[:, :1], **as_input(cache), attention_mask=mask).logits

    expected = steps(model)
    absorbed.clear()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(steps(compiled), expected, atol=1e-4, rtol=0)
    assert not absorbed
    torch._dynamo.reset()


@pytest.mark.parametrize("number", [1, 2])
def test_threads_with_a_broken_graph_keep_their_latents(number):
    """Between `update` and attention a graph breaks, and each thread waits until the other is there, too."""
    torch._dynamo.reset()
    model = build("deepseek_v3", attention="turboquant")
    module, meeting = model.model.layers[0].self_attn, threading.Barrier(number)
    caches = [TurboQuantCache(model.config, max_cache_len=600) for _ in range(number)]

    @torch.compiler.disable
    def meet() -> None:
        meeting.wait(timeout=60)

    @torch.no_grad()
    def step(cache: TurboQuantCache) -> torch.Tensor:
        keys, values = cache.update(*new, 0)
        meet()
        keys, values = module.expand_kv(keys, values)
        mask = (torch.arange(600) < cache.get_seq_length())[None, None, None]
        return turboquant_attention(module, query, keys, values, mask, scaling=module.scaling)[0]

    new, query = states(1, 1, 1, 1, LATENT, ROTARY), states(2, 1, 16, 1, module.qk_head_dim)[0]
    for cache, tokens in zip(caches, (420, 430), strict=False):
        continued(model, cache, tokens, 1)
    with ThreadPoolExecutor(number) as threads:
        expected = list(threads.map(step, map(copy.deepcopy, caches)))
        found = list(threads.map(torch.compile(step, backend="eager"), caches))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    torch._dynamo.reset()


def test_what_a_broken_graph_left_is_not_taken_after_a_reset():
    """Ids of graphs come again."""
    for step in (lambda x: leave("latents") or x, lambda x: x + (take() is None)):
        torch._dynamo.reset()
        found = torch.compile(step, backend="eager", fullgraph=True)(torch.zeros(1))
    assert found == 1
