"""What a cache will take, from the config alone: equal to what a real one holds, byte for byte."""

from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MptConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3NextConfig,
    StaticCache,
)

from tests.support.helpers import slow
from tests.support.tiny_models import CONFIGS, VOCAB, build
from tq_hf import PRESETS, TurboQuantCache, TurboQuantConfig
from tq_hf.compat import as_input
from tq_hf.memory import measure
from tq_hf.ops import dispatch
from tq_hf.tools.estimate import Estimator, estimate, parse_memory

OF_EVERY_KIND = ("llama", "gemma3", "qwen3_next")
"""Models with full attention alone, with sliding windows, and with linear attention."""

model_named = lru_cache(build)


@lru_cache
def estimator_of(name: str) -> Estimator:
    return Estimator(CONFIGS[name](), torch.float32)


def held(name: str, preset: Any, context: int, batch: int, steps: int = 0) -> dict[str, int]:
    """What a real cache of a real model holds after a prefill and `steps` tokens."""
    model = model_named(name)
    cache = DynamicCache(config=model.config) if preset is None else TurboQuantCache(model.config, preset)
    with torch.no_grad():
        for length in (context, *[1] * steps):
            model(torch.randint(3, VOCAB, (batch, length)), **as_input(cache))
    return measure(cache.layers).sizes


@pytest.mark.parametrize(
    ("name", "context"),
    [
        pytest.param(name, context, marks=() if name in OF_EVERY_KIND or context == 517 else pytest.mark.slow)
        for name in CONFIGS
        for context in (1, 3, 4, 97, 260, 517)
    ],
)
def test_an_estimate_is_what_a_cache_holds_after_a_prefill(name, context):
    estimator = estimator_of(name)
    for preset in ("4bit_nc", "2.5bit_nc", None):
        expected = held(name, preset, context, batch=2)
        assert estimator.footprint(preset, context, 2).sizes == expected
        assert expected["uncompressed" if preset is None else "residual"] > 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "qwen3_next", "deepseek_v3"])
@pytest.mark.parametrize(
    "config",
    [
        *PRESETS.values(),
        TurboQuantConfig(residual_length=0, sink_tokens=0),
        TurboQuantConfig(residual_length=1000),
        TurboQuantConfig(skip_layers=(1, -1)),
        TurboQuantConfig(layers={-1: "k8v4"}),
    ],
    ids=lambda config: config.preset or "by hand",
)
def test_an_estimate_is_exact_for_every_configuration(name, config):
    assert estimator_of(name).footprint(config, 700, 1).sizes == held(name, config, 700, 1)


@pytest.mark.parametrize("context", [96, 259, 387, 2307])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_an_estimate_of_decoding_is_what_a_cache_holds_after_a_step(name, context):
    actual = estimator_of(name).footprint("4bit_nc", context, 1, decoding=True).sizes
    assert actual == held(name, "4bit_nc", context, 1, steps=1)


@pytest.mark.parametrize(("context", "most"), [(90, 91), (260, 1000)])
@pytest.mark.parametrize("name", CONFIGS)
def test_an_estimate_of_a_preallocated_cache_is_what_it_holds(name, context, most):
    model, estimator = model_named(name), estimator_of(name)
    for preset in ("4bit_nc", "2.5bit_nc", None):
        cache = (
            StaticCache(model.config, most)
            if preset is None
            else TurboQuantCache(model.config, preset, max_cache_len=most)
        )
        for decoding in (False, True):
            with torch.no_grad():
                model(torch.randint(3, VOCAB, (2, 1 if decoding else context)), **as_input(cache))
            actual = estimator.footprint(preset, context, 2, decoding=decoding, max_cache_len=most).sizes
            assert actual == measure(cache.layers).sizes


FULL_SIZE = {
    "llama": LlamaConfig(num_key_value_heads=8, head_dim=128, dtype="bfloat16"),
    "gemma3": Gemma3TextConfig(dtype="bfloat16"),
    "gpt_oss": GptOssConfig(dtype="bfloat16"),
    "qwen3_next": Qwen3NextConfig(dtype="bfloat16"),
    "deepseek_v3": DeepseekV3Config(dtype="bfloat16"),
    # GLM-4-9B, GLM-4.6 and GLM-4.7-Flash.
    "glm4": Glm4Config(dtype="bfloat16"),
    "glm4_moe": Glm4MoeConfig(num_hidden_layers=92, head_dim=128, dtype="bfloat16"),
    "glm4_moe_lite": Glm4MoeLiteConfig(dtype="bfloat16"),
}
of_full_size = pytest.mark.parametrize("name", [slow(x) if x in ("glm4", "glm4_moe") else x for x in FULL_SIZE])


def documented(config: PreTrainedConfig, context: int) -> dict[str, int]:
    """KV bytes of one sequence in a 4bit_nc cache, counted from papers and documentation."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    mla = hasattr(config, "kv_lora_rank")
    heads = 1 if mla else config.num_key_value_heads
    dims = (config.kv_lora_rank, config.qk_rope_head_dim) if mla else (config.head_dim, config.head_dim)
    blocks = (context - 4 - 128) // 128
    full, sliding = kinds.count("full_attention"), kinds.count("sliding_attention")
    # 4 bits a channel, but 8 for rotary keys; two scales of 2 bytes a token, and a mean of 2 bytes a channel of keys.
    # Loud channels have a byte a token, and a mean and a unit of 2 bytes each.
    loud = 0 if mla else {64: 4, 128: 4, 256: 8}[config.head_dim]
    packed = full * heads * blocks * (128 * ((sum(dims) + mla * dims[1]) // 2 + 4 + loud) + 2 * dims[0] + 4 * loud)
    linear = 0
    if "linear_attention" in kinds:
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        conv = 2 * (2 * keys + values) * config.linear_conv_kernel_dim
        recurrent = 4 * config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        linear = kinds.count("linear_attention") * (conv + recurrent)
    # A sliding layer also holds 8 bytes for the window's size.
    window = min(context, config.sliding_window - 1) if sliding else 0
    return {"packed": packed, "uncompressed": linear + sliding * (2 * heads * sum(dims) * window + 8)}


@of_full_size
def test_shapes_of_full_size_are_those_of_the_papers(name):
    config = FULL_SIZE[name]
    footprint = Estimator(config).footprint("4bit_nc", 32768)
    for kind, size in documented(config, 32768).items():
        assert getattr(footprint, kind) == size, kind
    assert 0.2 < footprint.packed / footprint.bf16_equivalent or footprint.uncompressed


SMALL = dict(hidden_size=64, intermediate_size=64, vocab_size=VOCAB, num_hidden_layers=2, pad_token_id=None)
"""What makes a model small and is no concern of its cache."""
FEW_EXPERTS = {
    "gpt_oss": dict(num_local_experts=2, num_experts_per_tok=1),
    "qwen3_next": dict(
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8
    ),
    "deepseek_v3": dict(n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1, moe_intermediate_size=8),
    "glm4_moe": dict(n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=8),
    "glm4_moe_lite": dict(
        n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, mlp_layer_types=["dense", "sparse"]
    ),
}


@of_full_size
def test_layers_of_full_size_are_estimated_exactly(name):
    """Two layers of each model's real attention shape, of every kind it has, with small weights around them."""
    options = FULL_SIZE[name].to_dict() | SMALL | FEW_EXPERTS.get(name, {})
    if kinds := options.pop("layer_types", None):
        options["layer_types"] = [next(kind for kind in kinds if kind != "full_attention"), "full_attention"]
    config = type(FULL_SIZE[name])(**options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    cache = TurboQuantCache(model.config)
    with torch.no_grad():
        model(torch.zeros(1, 300, dtype=torch.long), **as_input(cache))
    estimator = Estimator(config)
    expected = cache.memory_footprint()
    assert expected.packed > 0
    assert estimator.footprint("4bit_nc", 300).sizes == expected.sizes
    assert estimator.weight_bytes == sum(parameter.nbytes for parameter in model.parameters())


def test_nothing_is_allocated_and_a_search_is_quick(monkeypatch):
    estimator = Estimator(FULL_SIZE["llama"])
    monkeypatch.setattr("tq_hf.codec.balance.Statistics", None)  # of a prompt without values there are none to take
    calls = []
    footprint = Estimator.footprint
    monkeypatch.setattr(Estimator, "footprint", lambda self, *a, **k: calls.append(a) or footprint(self, *a, **k))
    memory = 2**45
    most = estimator.max_context("4bit_nc", memory)
    assert most is not None and most > 10**8 and len(calls) < 100
    assert footprint(estimator, "4bit_nc", most).total <= memory < footprint(estimator, "4bit_nc", most + 1).total


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "deepseek_v3"])
@pytest.mark.parametrize("preset", [None, "4bit_nc"])
def test_what_fits_is_the_most_that_fits(name, preset):
    estimator = estimator_of(name)
    for memory in (10**6, 10**7, 123_456_789):
        context, batch = estimator.max_context(preset, memory), estimator.max_batch(preset, memory, 300)
        assert estimator.footprint(preset, context + 1).total > memory
        assert context == 0 or estimator.footprint(preset, context).total <= memory
        assert estimator.footprint(preset, 300, batch + 1).total > memory
        assert batch == 0 or estimator.footprint(preset, 300, batch).total <= memory
    assert estimator.max_context(preset, 100) == estimator.max_batch(preset, 100, 300) == 0


def test_compression_makes_room():
    estimator = Estimator(FULL_SIZE["llama"])
    rows = {row.preset: row for row in estimate(estimator, [None, "4bit_nc"], 32768, 1, memory=8 * 2**30)}
    assert 3.5 < rows["4bit_nc"].max_context / rows[None].max_context < 4
    assert rows["4bit_nc"].max_batch > 3 * rows[None].max_batch
    assert rows[None].footprint.total == rows[None].footprint.bf16_equivalent == 2 * 32 * 8 * 2 * 128 * 32768


def test_a_multimodal_config_is_estimated_by_its_decoder():
    text = FULL_SIZE["gemma3"]
    config = Gemma3Config(text_config=text.to_dict())
    assert Estimator(config).footprint("4bit_nc", 5000).sizes == Estimator(text).footprint("4bit_nc", 5000).sizes


def test_rope_that_looks_at_the_prompt_is_no_obstacle_nor_another_name_of_positions():
    half = [1.0] * 48
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": half, "long_factor": half}
    rope["original_max_position_embeddings"] = 4096
    config = Phi3Config(max_position_embeddings=131072, rope_parameters=rope)
    estimator = Estimator(config)
    assert estimator.footprint("4bit_nc", 10000).packed > 0 and estimator.max_positions == 131072
    assert Estimator(MptConfig(d_model=64, n_heads=4, n_layers=1, max_seq_len=512)).max_positions == 512
    assert config.rope_parameters["rope_type"] == "longrope"


def test_what_cannot_be_estimated_is_refused():
    with pytest.raises(ValueError, match="Unknown preset"):
        estimator_of("llama").footprint("5bit", 10)
    with pytest.raises(ValueError, match="`max_cache_len` is 10; it must be 11 or more"):
        estimator_of("llama").footprint("4bit_nc", 10, decoding=True, max_cache_len=10)
    for context, batch in ((0, 1), (1, -1)):
        with pytest.raises(ValueError, match="must be 1 or more"):
            estimator_of("llama").footprint("4bit_nc", context, batch)


@pytest.mark.parametrize(
    ("text", "size"),
    [("24", 24 * 2**30), ("24GiB", 24 * 2**30), ("24GB", 24 * 10**9), ("1.5 gb", 1_500_000_000), ("512MiB", 2**29)],
)
def test_amounts_of_memory_are_read(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "24 apples", "1e9", "24 GB of it", "0x10"])
def test_other_amounts_are_refused(text):
    with pytest.raises(ValueError, match="not an amount of memory"):
        parse_memory(text)


def test_nothing_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes need no codes; to encode tensors without memory takes half a second for each prompt."""

    def encodes(*_: Any) -> None:
        raise AssertionError("something was encoded")

    monkeypatch.setattr(dispatch.codec_reference, "encode", encodes)
    estimator = Estimator(LlamaConfig(num_hidden_layers=2, vocab_size=64), torch.bfloat16)
    for room in (None, 4096):
        assert estimator.footprint("4bit_nc", 3000, max_cache_len=room).total > 0
