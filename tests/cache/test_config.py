"""Presets, their sizes, what a configuration refuses, and presets of single layers: one configuration, of which every
layer takes its part."""

import dataclasses
import json
import pickle
import re
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.helpers import compile_config, slow, states
from tests.support.saving_cases import assert_continue_alike, filled, model_named
from tests.support.tiny_models import build, token_ids
from tq_hf import PRESETS, TurboQuantCache, TurboQuantConfig, TurboQuantLayer, graph_decoding
from tq_hf.compat import as_input
from tq_hf.layers.dense import GrowingLayer, PreallocatedLayer
from tq_hf.tensors.layer import config_from, config_text

VLLM_SLOT_BYTES = {
    # head_dim: bytes per token and KV head of vLLM's backend
    "k8v4": {64: 100, 128: 196, 256: 388},
    "4bit_nc": {64: 70, 128: 134, 256: 262},
    "k3v4_nc": {64: 62, 128: 118, 256: 230},
    "3bit_nc": {64: 54, 128: 102, 256: 198},
}


@pytest.mark.parametrize("name", PRESETS)
def test_names_of_presets_say_their_bits_and_all_have_one_recipe(name):
    """Bits of keys and values, or on average; an odd bit is the keys'."""
    config = PRESETS[name]
    if by_kind := re.match(r"k(\d)v(\d)", name):
        assert (config.key_bits, config.value_bits) == tuple(map(int, by_kind.groups()))
    else:
        assert (config.key_bits + config.value_bits) / 2 == float(name.removesuffix("bit_nc"))
        assert config.key_bits - config.value_bits in (0, 1)
    assert (config.residual_length, config.sink_tokens, config.skip_layers, config.seed) == (128, 4, (), 0)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", VLLM_SLOT_BYTES)
def test_slot_is_no_larger_than_vllms_and_its_loud_channels(name, dim):
    layout = PRESETS[name].layout(dim)
    assert layout.slot_bytes <= VLLM_SLOT_BYTES[name][dim] + layout.loud


@pytest.mark.parametrize("dim, loud", [(16, 0), (63, 0), (64, 4), (80, 4), (128, 4), (192, 4), (256, 8), (2048, 16)])
def test_heads_of_64_channels_or_more_have_loud_ones_unless_keys_are_fp8(dim, loud):
    without = [TurboQuantConfig(loud=False), TurboQuantConfig(balance=False), TurboQuantConfig().of_latents()]
    for name, config in PRESETS.items():
        assert config.layout(dim, 24).loud == (0 if name == "k8v4" else loud)
    assert {config.layout(dim).loud for config in without} == {0}


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("name", PRESETS)
def test_a_slot_is_codes_loud_channels_and_two_fp16_scales_and_a_block_has_means_beside_its_slots(name, dim):
    config = PRESETS[name]
    layout = config.layout(dim)
    assert layout.slot_bytes == dim * (config.key_bits + config.value_bits) // 8 + 4 + layout.loud
    assert layout.block_bytes == 128 * layout.slot_bytes + 2 * (dim + 2 * layout.loud)  # units of loud ones, too


def test_presets_are_ordered_from_most_to_fewest_bytes():
    sizes = [config.layout(128).slot_bytes for config in PRESETS.values()]
    assert sizes == sorted(sizes, reverse=True)


def test_key_and_value_head_dims_may_differ():
    layout = TurboQuantConfig(key_bits=4, value_bits=2).layout(192, 128)
    assert layout.slot_bytes == 192 // 2 + 128 // 4 + 4 + 4
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


@pytest.mark.parametrize("name", ["window", "nbits", "preset"])
@pytest.mark.parametrize("make", [TurboQuantConfig.from_preset, partial(TurboQuantCache, build("llama").config)])
def test_unknown_option_error_names_it_and_lists_the_valid_ones(make, name):
    if name == "preset" and isinstance(make, partial):
        pytest.skip("an argument of its own")
    with pytest.raises(ValueError, match=f"Unknown option.*{name}") as error:
        make("4bit_nc", **{name: "3bit_nc"})
    options = {field.name for field in dataclasses.fields(TurboQuantConfig)} - {"preset"}
    assert all(option in str(error.value) for option in options)


def test_overrides_replace_options_and_leave_the_preset_alone():
    config = TurboQuantConfig.from_preset("3bit_nc", residual_length=0, skip_layers=[0, -1])
    assert (config.residual_length, config.skip_layers, config.key_bits) == (0, (0, -1), 3)
    assert (PRESETS["3bit_nc"].residual_length, PRESETS["3bit_nc"].skip_layers) == (128, ())


REFUSED: dict[str, tuple[list[Any], str]] = {
    **dict.fromkeys(("key_bits", "value_bits"), ([0, 1, 5, 6, 7, 16, -4, "4", None, True, 4.0], "2, 3, 4, 8")),
    **dict.fromkeys(("residual_length", "sink_tokens"), ([-1, 1.5, "128", None, True], "0 or more")),
    "skip_layers": (["0", "all", "AUTO", [0.5], [None], [True, False], 3, None], "sequence of layer indices"),
    "layers": (
        [None, 3, "k8v4", ["k8v4"], {0.5: "k8v4"}, {True: "k8v4"}, {"0": "k8v4"}, [(1, 2, 3)]],
        "presets by layer indices, e.g. {0: 'k8v4'",
    ),
    "seed": ([1.5, "0", None, True], ""),
}
"""Values that an option cannot have, and what its error says is allowed."""


@pytest.mark.parametrize("option, value", [(name, value) for name, (values, _) in REFUSED.items() for value in values])
def test_values_that_an_option_cannot_have_are_refused(option, value):
    with pytest.raises(ValueError, match=f"`{option}` is .*{REFUSED[option][1]}"):
        TurboQuantConfig(**{option: value})


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


MIXED: dict[int, str | None] = {0: "k8v4", 2: "2bit_nc", -1: None}
LAYERS = 4
NAMES = ["k8v4", "3bit_nc", "2bit_nc", None]
"""What these layers of a model have with `MIXED` beside "3bit_nc"."""


def mixed(**options: Any) -> TurboQuantConfig:
    return TurboQuantConfig.from_preset("3bit_nc", layers=MIXED, **options)


def test_every_layer_has_the_bits_of_its_preset_and_all_other_options():
    config = mixed(residual_length=7, seed=3, balance=False)
    expected = [
        None if name is None else (name, PRESETS[name].key_bits, PRESETS[name].value_bits, 7, 3, False)
        for name in NAMES
    ]
    options = ("preset", "key_bits", "value_bits", "residual_length", "seed", "balance")
    assert [layer and tuple(getattr(layer, name) for name in options) for layer in config.by_layer(4)] == expected
    assert config.preset == "3bit_nc"


def test_dense_is_the_same_in_layers_and_in_skip_layers():
    assert TurboQuantConfig(layers={1: None, -1: None}) == TurboQuantConfig(skip_layers=(1, -1))
    assert TurboQuantConfig(layers={1: None}, skip_layers=(1,)) == TurboQuantConfig(skip_layers=[1])
    config = mixed(skip_layers=(1,))
    assert (config.skip_layers, config.layers) == ((1, -1), ((0, "k8v4"), (2, "2bit_nc")))
    assert dataclasses.replace(config, skip_layers=()).by_layer(4)[-1].preset == "3bit_nc"


def test_a_configuration_with_presets_by_layer_is_hashable_and_goes_by_what_it_says():
    other = TurboQuantConfig.from_preset("3bit_nc", layers={-1: None, 2: "turboquant_2bit_NC", 0: "K8V4"})
    assert other == mixed() and hash(other) == hash(mixed()) and other != PRESETS["3bit_nc"]
    assert eval(repr(other)) == other and dataclasses.replace(other) == other
    assert TurboQuantConfig(**json.loads(json.dumps(dataclasses.asdict(other)))) == other
    changes: tuple[dict[str, Any], ...] = ({}, dict(key_bits=8, skip_layers=(0, -1)), dict(seed=3))
    for config in (other, *(TurboQuantConfig(**change) for change in changes)):
        text = config_text(config)
        assert config_from(text) == config and config_text(config_from(text)) == text


@pytest.mark.parametrize("preset", ["auto", "", 0, ["a"]], ids=str)
def test_a_layers_preset_must_be_one(preset):
    with pytest.raises(ValueError, match="Unknown preset"):
        TurboQuantConfig(layers={0: preset})


@pytest.mark.parametrize(
    "options, says",
    [
        ({"layers": {1: "k8v4"}, "skip_layers": (1,)}, "Layer 1 is dense and k8v4 in `layers` and `skip_layers`"),
        ({"layers": {3: "k8v4"}, "skip_layers": (-1,)}, "Layer 3 is dense and k8v4"),
        ({"layers": {3: "k8v4", -1: "2bit_nc"}}, "Layer 3 is 2bit_nc and k8v4.*Name this layer once"),
        ({"layers": {4: "k8v4"}}, "`layers` names layer 4, but the model has 4 layers; use -4 to 3"),
        ({"layers": {-5: None}}, "`skip_layers` names layer -5, but"),
    ],
)
def test_what_a_layer_cannot_be_is_a_sentence(options, says):
    with pytest.raises(ValueError, match=says):
        TurboQuantCache(model_named("llama", num_hidden_layers=LAYERS).config, **options)


def test_a_layer_named_twice_with_one_meaning_is_that():
    layers = TurboQuantConfig(layers={3: "k8v4", -1: "k8v4"}).by_layer(4)
    assert [layer.preset for layer in layers] == [None, None, None, "k8v4"]


def test_a_layer_that_is_never_compressed_takes_no_preset():
    with pytest.raises(ValueError, match="`layers` has the preset k8v4 for layer 0, a SlidingLayer, which"):
        TurboQuantCache(model_named("gemma3").config, layers={0: "k8v4"})
    assert TurboQuantCache(model_named("gemma3").config, layers={0: None}).config.skip_layers == (0,)


@pytest.mark.parametrize("room", [None, 400], ids=["growing", "preallocated"])
def test_a_layer_holds_what_a_cache_of_its_preset_alone_holds(room):
    """Bit for bit, after a prompt and steps, whatever the layers beside it have."""
    config = model_named("llama", num_hidden_layers=LAYERS).config
    cache = TurboQuantCache(config, mixed(residual_length=0), max_cache_len=room)
    assert type(cache.layers[3]) is (GrowingLayer if room is None else PreallocatedLayer)
    for index, name in enumerate(NAMES[:3]):
        alone = TurboQuantCache(config, name, residual_length=0, max_cache_len=room)
        for step, count in enumerate((200, 1, 1, 70)):
            for one in (cache, alone):
                one.update(*states(step, tokens=count), index)
        (ours, found), (theirs, held) = (one.layers[index].store.export() for one in (cache, alone))
        assert ours == theirs and ours.blocks + ours.pending == 2 and found["key_words"].count_nonzero()
        for part, expected in held.items():
            assert torch.equal(found[part], expected), (index, part)


def assembled(model: Any, room: int | None) -> TurboQuantCache:
    """What `MIXED` stands for, put together by hand of layers made for one preset each."""
    cache = TurboQuantCache(model.config, "3bit_nc", residual_length=0, max_cache_len=room)
    for index, name in enumerate(NAMES):
        layer = TurboQuantLayer(TurboQuantConfig.from_preset(name, residual_length=0), room) if name else None
        cache.layers[index] = layer or (GrowingLayer() if room is None else PreallocatedLayer(room))
    return cache


@pytest.mark.parametrize(
    "room, options",
    [
        (None, {}),
        (None, {"num_beams": 3}),
        (400, {}),
        (400, {"custom_generate": graph_decoding}),
        slow(400, {"compile_config": compile_config()}),
    ],
    ids=["growing", "beams", "preallocated", "graph_decoding", "compiled"],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_generate_gives_what_layers_of_each_preset_give(room, options, device):
    torch._dynamo.reset()
    model = build("llama", num_hidden_layers=LAYERS, attention="turboquant").to(device)
    ids = token_ids(2, 300).to(device)
    outputs = []
    for cache in (
        TurboQuantCache(model.config, mixed(residual_length=0), max_cache_len=room),
        assembled(model, room),
        TurboQuantCache(model.config, "2bit_nc", residual_length=0, max_cache_len=room),
    ):
        options = dict(max_new_tokens=8, do_sample=False) | options
        outputs.append(model.generate(ids, attention_mask=torch.ones_like(ids), **as_input(cache), **options))
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("room", [None, 512], ids=["growing", "preallocated"])
def test_a_saved_cache_comes_back_with_its_presets(tmp_path, room):
    model, cache = filled("llama", length=389, layers=LAYERS, preset=mixed(), max_cache_len=room)
    cache.save(tmp_path / "c.safetensors")
    loaded = TurboQuantCache.load(tmp_path / "c.safetensors", model, mixed())
    assert loaded.config == cache.config
    bits = [(layer.config.key_bits, layer.config.value_bits) for layer in loaded.layers[:3]]
    assert bits == [(PRESETS[name].key_bits, PRESETS[name].value_bits) for name in NAMES[:3]]
    assert loaded.memory_footprint().packed == cache.memory_footprint().packed > 0
    assert_continue_alike(model, cache, loaded, (1, 1, 9, 1) if room is None else (1, 1, 1))


def test_a_file_of_other_presets_by_layer_is_refused_by_what_it_has(tmp_path):
    model, cache = filled("llama", length=140, layers=LAYERS, preset=mixed())
    cache.save(tmp_path / "c.safetensors")
    for preset in ("3bit_nc", TurboQuantConfig.from_preset("3bit_nc", layers=MIXED | {0: "4bit_nc"})):
        with pytest.raises(
            ValueError, match=r"saved with .*layers=\(\(0, 'k8v4'\), \(2, '2bit_nc'\)\), which differs from `preset`"
        ):
            TurboQuantCache.load(tmp_path / "c.safetensors", model, preset)


def test_an_empty_cache_is_pickled_and_says_what_it_is():
    model = model_named("llama", num_hidden_layers=LAYERS)
    cache = TurboQuantCache(model.config, mixed())
    assert repr(cache) == "TurboQuantCache(3bit_nc, other presets in 2 of 4 layers, 0 tokens, empty)"
    assert pickle.loads(pickle.dumps(cache)).config == cache.config
