"""`preset="auto"`: what it chooses from a config, from weights and from keys, and that it says so once."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from examples.provenance import RESULTS
from tests.support.helpers import BLOCK, dequantized, encoded, llama_config, relative_error, states
from tests.support.tiny_models import CONFIGS, build
from tq_hf import PRESETS, TurboQuantCache, TurboQuantConfig, auto
from tq_hf.codec.ablation import Ablation
from tq_hf.codec.rotation import rotate_back
from tq_hf.compat import as_input

DIM = 64
WIDE = dict(heads=2, dim=DIM)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What "auto" logs."""
    lines: list[str] = []
    monkeypatch.setattr(auto.logger, "warning", lines.append)
    yield lines


def fill(cache: TurboQuantCache, keys: torch.Tensor) -> None:
    """Give every layer the same keys, as a first prefill."""
    for index in range(len(cache.layers)):
        cache.update(keys, states(1, tokens=keys.shape[2], dim=keys.shape[3])[1], index)


def auto_cache(**options) -> TurboQuantCache:
    return TurboQuantCache(llama_config(**WIDE), "auto", **options)


CHOSEN = {
    "heads of 64": (llama_config(dim=64), "4bit_nc"),
    "heads of 128": (llama_config(dim=128), "4bit_nc"),
    "heads of 256": (llama_config(dim=256), "4bit_nc"),
    "small heads": (llama_config(dim=32), "k8v4"),
    "one KV head": (llama_config(heads=1, dim=128), "k8v4"),
    "latent keys": (CONFIGS["deepseek_v3"](), "k8v4"),
    "no head_dim in the config": (CONFIGS["gpt2"](), "k8v4"),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_a_config_decides_until_keys_are_seen(case, log):
    config, preset = CHOSEN[case]
    assert TurboQuantCache(config, "auto").config == PRESETS[preset]
    assert log == []


@pytest.mark.parametrize("dim", [*range(2, 40, 2), 64, 66, 80, 100, 128, 256])
def test_what_is_chosen_takes_fewer_bytes_than_fp8(dim):
    config = TurboQuantCache(llama_config(dim=dim), "auto").config
    if config.preset is not None:
        assert auto.packed_bytes(config, dim, dim) < auto.fp8_bytes(dim, dim)
    else:
        assert auto.packed_bytes(PRESETS["k8v4"], dim, dim) >= auto.fp8_bytes(dim, dim)


@pytest.mark.parametrize("record", sorted(RESULTS.glob("quality-*.json")), ids=lambda path: path.stem)
def test_no_choice_measured_worse_than_fp8_at_more_bytes(record):
    rows = json.loads(record.read_text(encoding="utf-8"))["rows"]
    fp8 = [row for row in rows if row["cache"].startswith("fp8")]
    chosen = [row for row in rows if row["cache"] in {preset for _, preset in CHOSEN.values()}]
    assert fp8 and chosen
    for row in chosen:
        for other in fp8:
            if row["injection"] == other["injection"]:
                assert row["kl"] <= other["kl"] or row["bytes_all_in"] <= other["bytes_all_in"]


def test_a_model_that_is_none_is_refused():
    with pytest.raises(ValueError, match="`model` must be the model itself.*not str"):
        auto_cache(model="Qwen/Qwen3-4B")


def test_heads_too_small_to_pack_stay_dense(log):
    cache = TurboQuantCache(llama_config(dim=4), "auto")
    (line,) = log
    assert "compresses nothing" in line and "4 channels" in line
    keys, values = states(0, tokens=400, dim=4)
    assert torch.equal(cache.update(keys, values, 0)[0], keys)
    assert torch.equal(cache.update(keys, values, 0)[0], torch.cat([keys, keys], dim=2))


def test_gaussian_keys_get_4_bits_and_one_line_says_why(log):
    cache = auto_cache()
    fill(cache, states(0, tokens=400, dim=DIM)[0])
    assert cache.config == PRESETS["4bit_nc"]
    (line,) = log
    assert "chose 4bit_nc" in line and "64 channels" in line and "off by 9." in line
    fill(cache, states(2, tokens=400, dim=DIM)[0])
    assert len(log) == 1


def spike() -> torch.Tensor:
    """Keys of which a Hadamard transform without signs puts nearly everything into one channel."""
    keys = states(0, tokens=400, dim=DIM)[0]
    row = rotate_back(torch.eye(DIM)[5], None)
    return 0.1 * keys + row * 10 * torch.randn(1, 2, 400, 1, generator=torch.Generator().manual_seed(3))


def offset(strength: float) -> torch.Tensor:
    """Gaussian keys and a common vector so many times as long."""
    keys = states(0, tokens=400, dim=DIM)[0]
    common = torch.randn(DIM, generator=torch.Generator().manual_seed(4))
    return keys + strength * DIM**0.5 * common / common.norm()


@pytest.mark.parametrize(
    "keys, options, preset",
    [
        (spike(), {}, "4bit_nc"),
        (spike(), {"random_signs": False}, "k8v4"),
        (offset(5), {}, "4bit_nc"),
        (offset(30), {}, "k8v4"),
        (offset(5), {"key_mean": False}, "k8v4"),
        (0 * offset(1), {}, "4bit_nc"),
    ],
    ids=["spike", "spike without signs", "offset", "great offset", "offset without means", "zeros"],
)
def test_keys_decide_with_the_options_they_are_stored_with(keys, options, preset, log):
    cache = auto_cache()
    cache._choice = auto.AutoChoice(llama_config(**WIDE), None, Ablation.from_preset("4bit_nc", **options))
    cache.config = cache._choice.config
    for layer in cache.layers:
        layer.config = cache.config
    fill(cache, keys)
    assert cache.config == Ablation.from_preset(preset, **options)
    assert {layer.store.config for layer in cache.layers} == {cache.config}
    (line,) = log
    assert f"chose {preset}" in line


def test_the_error_of_keys_is_that_of_their_blocks():
    config = TurboQuantConfig(sink_tokens=0)
    keys, values = states(5, tokens=BLOCK, dim=DIM)
    keys[:, 1] = offset(3)[:, 1, :BLOCK]
    found = auto.key_errors(config, keys)
    restored, _ = dequantized(config, encoded(config, keys, values))
    centred = keys - keys.mean(2, keepdim=True)
    errors = [relative_error(restored[:, i] - keys[:, i] + centred[:, i], centred[:, i]) ** 2 for i in range(2)]
    assert found.four_bits == pytest.approx(max(errors), rel=1e-3)
    assert found.offset == pytest.approx(3, rel=0.05)
    assert found.eight_bits < 0.1 * found.four_bits


def test_a_later_layer_that_would_decide_otherwise_is_named(log):
    cache = auto_cache()
    cache.update(*states(0, tokens=400, dim=DIM), 0)
    cache.update(offset(30), states(0, tokens=400, dim=DIM)[1], 1)
    assert cache.config.preset == "4bit_nc"
    assert len(log) == 2 and "layer 1" in log[1] and "k8v4" in log[1]


def test_a_short_first_prefill_is_not_judged_by_its_keys(log):
    cache = auto_cache()
    fill(cache, offset(30)[:, :, : auto.LEAST_TOKENS - 1])
    assert cache.config.preset == "4bit_nc" and "off by" not in log[0]


def test_what_is_allocated_already_is_not_changed(log):
    cache = auto_cache(max_cache_len=512)
    cache.early_initialization(1, 2, DIM, torch.float32, torch.device("cpu"))
    fill(cache, offset(30))
    assert cache.config.preset == "4bit_nc"
    assert "chose 4bit_nc" in log[-1] and "layer 0" in log[0]


def test_states_that_are_refused_leave_the_choice_open(log):
    cache = auto_cache()
    keys, values = states(0, tokens=400, dim=DIM)
    with pytest.raises(ValueError):
        cache.update(keys[0], values, 0)
    assert log == []
    fill(cache, offset(30))
    assert cache.config.preset == "k8v4"


def wide_qwen2(bias: float) -> torch.nn.Module:
    """A random Qwen2 with heads of 64 channels and key biases so many times as long as the keys."""
    model = build("qwen2", hidden_size=256)
    for name, module in model.named_modules():
        if name.endswith("k_proj"):
            module.bias.data.fill_(bias * module.weight.norm() / len(module.bias) ** 0.5)
    return model


@pytest.mark.parametrize("bias, preset", [(0.0, "4bit_nc"), (0.5, "4bit_nc"), (3.0, "k8v4")])
def test_a_great_key_bias_in_the_weights_gets_8_bit_keys(bias, preset):
    model = wide_qwen2(bias)
    assert auto.key_bias(model) == pytest.approx(bias)
    assert TurboQuantCache(model.config, "auto", model=model).config.preset == preset
    assert TurboQuantCache(model.config, "auto").config.preset == "4bit_nc"


@pytest.mark.parametrize("weight", [None, "packed", "fp8", "meta"])
def test_the_bias_beside_weights_that_cannot_be_read_says_nothing(weight):
    """GPTQ and AWQ have no `weight`, bitsandbytes packs it, FP8 has its scale elsewhere, accelerate may offload it."""
    model = wide_qwen2(3.0)
    for name, module in model.named_modules():
        if name.endswith("k_proj"):
            plain = module.weight.data
            del module.weight
            if weight is not None:
                packed = torch.ones(plain.numel() // 2, 1, dtype=torch.uint8)
                held = {"packed": packed, "fp8": plain.to(torch.float8_e4m3fn), "meta": plain.to("meta")}[weight]
                module.register_buffer("weight", held)
    assert auto.key_bias(model) == 0
    assert TurboQuantCache(model.config, "auto", model=model).config.preset == "4bit_nc"


def test_generation_is_that_of_the_preset_chosen(log):
    model = build("llama", head_dim=64)
    model.set_attn_implementation("turboquant")
    ids = torch.randint(2, 128, (2, 300), generator=torch.Generator().manual_seed(6))
    caches = TurboQuantCache(model.config, "auto"), TurboQuantCache(model.config, "4bit_nc")
    auto_tokens, tokens = (
        model.generate(ids, attention_mask=torch.ones_like(ids), **as_input(cache), max_new_tokens=8, do_sample=False)
        for cache in caches
    )
    assert torch.equal(auto_tokens, tokens)
    assert caches[0].memory_footprint() == caches[1].memory_footprint()
    assert len(log) == 1


def test_a_cache_that_chose_is_saved_under_the_preset(tmp_path, log):
    model = build("llama", head_dim=64)
    cache = TurboQuantCache(model.config, "auto")
    with torch.no_grad():
        model(torch.randint(2, 128, (1, 300)), **as_input(cache))
    cache.save(tmp_path / "x.safetensors", model)
    assert TurboQuantCache.load(tmp_path / "x.safetensors", model).config == PRESETS["4bit_nc"]
