"""Multi-head latent attention in the sizes of DeepSeek-V3 and GLM-4.7-Flash.

Such a model caches one latent a token for all its heads, and a rotary key beside it: the cache holds the latent of 512
channels as its keys and the rotary key of 64 as its values, each packed with its own size. The heads' keys and values
are made from both after they are dequantized.
"""

from __future__ import annotations

import pytest
import torch
from test_memory import storages_reachable_from
from transformers import AutoModelForCausalLM, DeepseekV3Config, DynamicCache, Glm4MoeLiteConfig, PreTrainedModel

from tests.support.helpers import BLOCK, all_packed, dequantized, encoded, relative_error, slow, states
from tq_hf import PRESETS, TurboQuantCache
from tq_hf.compat import as_input

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


def build(name: str) -> PreTrainedModel:
    """A small model around latents of full size, whose logits depend on what it attends to."""
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    return model


def ids(tokens: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(tokens))


@pytest.mark.parametrize("room", [None, 1024], ids=["growing", "preallocated"])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_held_is_the_latent(name, room):
    model = build(name)
    cache, plain = TurboQuantCache(model.config, max_cache_len=room), DynamicCache(config=model.config)
    for held in (cache, plain):
        model(ids(4 + 5 * BLOCK + 128), **as_input(held))
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        assert layer.keys.shape == other.keys.shape == (1, 1, 772, LATENT)
        assert layer.values.shape == other.values.shape == (1, 1, 772, ROTARY)
    footprint, layout = cache.memory_footprint(), cache.config.layout(LATENT, ROTARY)
    assert layout.slot_bytes == (LATENT + ROTARY) // 2 + 4
    blocks = 5 if room is None else (room - 4 - 128) // BLOCK
    assert footprint.packed == LAYERS * blocks * BLOCK * (LATENT + ROTARY) // 2
    assert footprint.bf16_equivalent == LAYERS * 772 * (LATENT + ROTARY) * 2
    assert footprint.total == sum(storages_reachable_from(cache).values())


CODEBOOK_ERROR = {2: 0.37, 3: 0.19, 4: 0.1, 8: 0.027}
"""Of Gaussian channels, a few percent more than `tests/codec/test_reference.py` expects."""
ATTENTION_ERROR = {
    "k8v4": 0.065,
    "4bit_nc": 0.19,
    "3.5bit_nc": 0.21,
    "k3v4_nc": 0.33,
    "3bit_nc": 0.35,
    "2.5bit_nc": 0.4,
    "2bit_nc": 0.78,
}
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


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("deepseek_v3", "turboquant"),
        ("glm4_moe_lite", "sdpa"),
        slow("deepseek_v3", "sdpa"),
        slow("glm4_moe_lite", "turboquant"),
    ],
)
def test_logits_of_a_compressed_latent_stay_near_those_in_float64(name, attention):
    model = build(name)
    model.set_attn_implementation(attention)
    prompt, step = ids(700), ids(701)[:, :1]

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
