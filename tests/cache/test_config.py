"""Presets, their sizes, and what a configuration refuses."""

import dataclasses
import re

import pytest

from tq_hf import PRESETS, TurboQuantConfig

VLLM_SLOT_BYTES = {
    # head_dim: bytes per token and KV head of vLLM's backend
    "k8v4": {64: 100, 128: 196, 256: 388},
    "4bit_nc": {64: 70, 128: 134, 256: 262},
    "k3v4_nc": {64: 62, 128: 118, 256: 230},
    "3bit_nc": {64: 54, 128: 102, 256: 198},
}


@pytest.mark.parametrize("name", PRESETS)
def test_names_of_presets_say_their_bits(name):
    """Of keys and values, or on average; an odd bit is the keys'."""
    config = PRESETS[name]
    if by_kind := re.match(r"k(\d)v(\d)", name):
        assert (config.key_bits, config.value_bits) == tuple(map(int, by_kind.groups()))
    else:
        assert (config.key_bits + config.value_bits) / 2 == float(name.removesuffix("bit_nc"))
        assert config.key_bits - config.value_bits in (0, 1)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_share_the_quality_recipe(name):
    config = PRESETS[name]
    assert (config.residual_length, config.sink_tokens, config.skip_layers, config.seed) == (128, 4, (), 0)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", VLLM_SLOT_BYTES)
def test_slot_is_no_larger_than_vllms(name, dim):
    assert PRESETS[name].layout(dim).slot_bytes <= VLLM_SLOT_BYTES[name][dim]


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("name", PRESETS)
def test_slot_is_codes_and_two_fp16_scales(name, dim):
    config = PRESETS[name]
    assert config.layout(dim).slot_bytes == dim * (config.key_bits + config.value_bits) // 8 + 4


@pytest.mark.parametrize("name", PRESETS)
def test_block_is_slots_and_a_key_mean(name):
    layout = PRESETS[name].layout(128)
    assert layout.block_bytes == 128 * layout.slot_bytes + 2 * 128


@pytest.mark.parametrize(
    "name, ratio", [("k8v4", 2.59), ("4bit_nc", 3.82), ("k3v4_nc", 4.34), ("3bit_nc", 5.02), ("2bit_nc", 7.31)]
)
def test_compression_ratio_counts_scales_and_means(name, ratio):
    assert PRESETS[name].layout(128).compression_ratio == pytest.approx(ratio, abs=0.006)


def test_presets_are_ordered_from_most_to_fewest_bytes():
    sizes = [config.layout(128).slot_bytes for config in PRESETS.values()]
    assert sizes == sorted(sizes, reverse=True)


def test_key_and_value_head_dims_may_differ():
    layout = TurboQuantConfig(key_bits=4, value_bits=2).layout(192, 128)
    assert layout.slot_bytes == 192 // 2 + 128 // 4 + 4
    assert layout.dense_bytes == 2 * (192 + 128)


@pytest.mark.parametrize("dim, stored", [(1, 8), (20, 24), (36, 40), (64, 64), (80, 80), (100, 104), (256, 256)])
def test_head_dims_are_stored_in_multiples_of_eight(dim, stored):
    layout = TurboQuantConfig().layout(dim)
    assert (layout.key_dim_padded, layout.value_dim_padded) == (stored, stored)
    assert layout.dense_bytes == 4 * dim  # what it is compared with is not padded


@pytest.mark.parametrize("dims", [(0, None), (64, 0), (-8, None)])
def test_head_without_channels_is_refused(dims):
    with pytest.raises(ValueError, match="head_dim.*1 or more"):
        TurboQuantConfig().layout(*dims)


def test_unknown_option_error_names_it_and_lists_the_valid_ones():
    with pytest.raises(ValueError) as error:
        TurboQuantConfig.from_preset("4bit_nc", window=64)
    assert "window" in str(error.value)
    options = {field.name for field in dataclasses.fields(TurboQuantConfig)} - {"preset"}
    assert all(option in str(error.value) for option in options)


def test_preset_cannot_be_overridden_by_itself():
    with pytest.raises(ValueError, match="Unknown option.*preset"):
        TurboQuantConfig.from_preset("4bit_nc", **{"preset": "3bit_nc"})


def test_overrides_replace_options_and_leave_the_preset_alone():
    config = TurboQuantConfig.from_preset("3bit_nc", residual_length=0, skip_layers=[0, -1])
    assert (config.residual_length, config.skip_layers, config.key_bits) == (0, (0, -1), 3)
    assert (PRESETS["3bit_nc"].residual_length, PRESETS["3bit_nc"].skip_layers) == (128, ())


@pytest.mark.parametrize("option", ["key_bits", "value_bits"])
@pytest.mark.parametrize("bits", [0, 1, 5, 6, 7, 16, -4, "4", None, True, 4.0])
def test_bits_other_than_2_3_4_8_are_refused(option, bits):
    with pytest.raises(ValueError, match=f"`{option}` is .*2, 3, 4, 8"):
        TurboQuantConfig(**{option: bits})


@pytest.mark.parametrize("option", ["residual_length", "sink_tokens"])
@pytest.mark.parametrize("tokens", [-1, 1.5, "128", None, True])
def test_token_counts_must_be_whole_and_not_negative(option, tokens):
    with pytest.raises(ValueError, match=f"`{option}` is .*0 or more"):
        TurboQuantConfig(**{option: tokens})


@pytest.mark.parametrize("layers", ["0", "all", "AUTO", [0.5], [None], [True, False], 3, None])
def test_skip_layers_must_be_indices(layers):
    with pytest.raises(ValueError, match="`skip_layers` is .*sequence of layer indices"):
        TurboQuantConfig(skip_layers=layers)


@pytest.mark.parametrize("seed", [1.5, "0", None, True])
def test_seed_must_be_whole(seed):
    with pytest.raises(ValueError, match="`seed` is"):
        TurboQuantConfig(seed=seed)


def test_config_is_frozen_and_hashable():
    config = TurboQuantConfig(skip_layers=[0, 1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.key_bits = 3
    assert config == TurboQuantConfig(skip_layers=(0, 1))
    assert hash(config) == hash(TurboQuantConfig(skip_layers=(0, 1)))


@pytest.mark.parametrize(
    "length, blocks", [(0, 0), (131, 0), (132 + 127, 0), (132 + 128, 1), (132 + 255, 1), (132 + 256, 2), (4096, 30)]
)
def test_blocks_are_packed_once_complete_and_wholly_older_than_the_residual_window(length, blocks):
    assert TurboQuantConfig(residual_length=128, sink_tokens=4).num_blocks(length) == blocks
