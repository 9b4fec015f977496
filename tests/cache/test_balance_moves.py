"""Channel scales go where their layer goes: other devices, files, copies, later turns."""

import copy
import pickle

import pytest
import torch
from accelerate import dispatch_model
from test_balance import channel_scales, made, tokens

from tq_hf import Balance, TurboQuantCache
from tq_hf.compat import as_input
from tq_hf.layers.compressed import TurboQuantLayer

LENGTHS = pytest.mark.parametrize("length", [None, 700], ids=["growing", "preallocated"])


def assert_equal_channel_scales(cache: TurboQuantCache, expected: TurboQuantCache) -> None:
    for pair, other in zip(channel_scales(cache), channel_scales(expected), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, other, strict=True))


def is_balanced(cache: TurboQuantCache) -> bool:
    return all((keys < 0.3).any() and (values < 0.3).any() for keys, values in channel_scales(cache))


@LENGTHS
def test_a_later_prompt_decides_where_the_first_was_too_short(length):
    model = made("llama")
    cache = TurboQuantCache(model.config, max_cache_len=length)
    model(tokens(20), **as_input(cache))
    model(tokens(128, seed=1), **as_input(cache))  # short calls go through the window, and decide nothing
    assert all((part == 1).all() for pair in channel_scales(cache) for part in pair)
    model(tokens(200, seed=2), **as_input(cache))
    assert is_balanced(cache) and cache.layers[0].store.export()[0].blocks == 1
    before = [pair.map(torch.clone) for pair in channel_scales(cache)]
    model(tokens(200, seed=3), **as_input(cache))
    for now, then in zip(channel_scales(cache), before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(now, then, strict=True))


@LENGTHS
def test_a_chat_of_short_turns_is_balanced_by_a_probe_only(length):
    model = made("llama")
    for balance in (None, Balance.of(model)):
        cache = TurboQuantCache(model.config, max_cache_len=length, balance=balance)
        for turn in range(7):
            model(tokens(20 if turn == 0 else 60, seed=turn), **as_input(cache))
        assert is_balanced(cache) == (balance is not None)
        assert cache.layers[0].store.export()[0].blocks == 1


@LENGTHS
def test_a_crop_that_leaves_tokens_leaves_their_channel_scales(length):
    model = made("qwen2")
    cache, uncropped = (TurboQuantCache(model.config, max_cache_len=length) for _ in range(2))
    for used in (cache, uncropped):
        model(tokens(400), **as_input(used))
    cache.crop(-250)  # into the packed block
    assert_equal_channel_scales(cache, uncropped)
    model(tokens(300, seed=4), **as_input(cache))
    assert cache.get_seq_length() == 450
    if length is None:
        assert cache.layers[0].store.counts.blocks > 0
    assert is_balanced(cache)


def test_every_tensor_of_a_layer_moves_its_channel_scales_among_them():
    model = made("llama")
    cache = TurboQuantCache(model.config)
    model(tokens(300), **as_input(cache))
    for layer in cache.layers:
        layer._map(lambda tensor: tensor.to("meta"))
    assert all(part.is_meta for pair in channel_scales(cache) for part in pair)


@LENGTHS
def test_a_layer_that_waits_for_queries_is_not_moved_and_is_balanced_by_them(length):
    model = made("llama")
    cache, stayed = (TurboQuantCache(model.config, max_cache_len=length) for _ in range(2))
    queries, keys, values = (torch.randn(1, heads, 300, 32) for heads in (4, 2, 2))
    loud = torch.where(torch.arange(32) % 8 == 0, 30.0, 1.0)
    for used in (cache, stayed):
        used.update(keys * loud, values * loud, 0)
    layer = cache.layers[0]
    layer.offload()
    for used in (cache, stayed):
        used.layers[0].store.encode_deferred(queries / loud)
    assert_equal_channel_scales_of_layer(layer, stayed.layers[0])
    for moved in (layer.offload, layer.prefetch):
        moved()
        assert_equal_channel_scales_of_layer(layer, stayed.layers[0])


def assert_equal_channel_scales_of_layer(layer: TurboQuantLayer, other: TurboQuantLayer) -> None:
    for a, b in zip(layer.store.blocks.channel_scales, other.store.blocks.channel_scales, strict=True):
        assert torch.equal(a, b) and (a < 0.3).any()


@LENGTHS
def test_layers_offloaded_to_disk_have_the_channel_scales_of_the_whole_model(length, tmp_path):
    plain, offloaded = made("llama"), made("llama")
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places["model.layers.1"] = "disk"
    dispatch_model(offloaded, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    assert offloaded.model.layers[1].self_attn.k_proj.weight.is_meta
    caches = [TurboQuantCache(plain.config, max_cache_len=length) for _ in range(2)]
    logits = []
    for model, cache in zip((plain, offloaded), caches, strict=True):
        model(tokens(300), **as_input(cache))
        logits.append(model(tokens(1, seed=1), **as_input(cache)).logits)
    assert is_balanced(caches[0])
    assert_equal_channel_scales(*caches)
    assert torch.equal(*logits)
    probes = Balance.of(plain).layers, Balance.of(offloaded).layers
    assert all(torch.equal(a, b) for i in probes[0] for a, b in zip(probes[0][i], probes[1][i], strict=True))


@pytest.mark.parametrize("saved, loaded", [(None, None), (None, 500), (500, None), (500, 500)])
def test_a_file_brings_its_channel_scales_into_either_kind_of_cache(saved, loaded, tmp_path):
    model = made("llama")
    cache = TurboQuantCache(model.config, max_cache_len=saved)
    model(tokens(300, batch=2), **as_input(cache))
    cache.save(tmp_path / "c.safetensors", model)
    again = TurboQuantCache.load(tmp_path / "c.safetensors", model, max_cache_len=loaded)
    assert is_balanced(again)
    assert_equal_channel_scales(again, cache)
    # Another prompt has channel scales of its own.
    again.reset()
    fresh = TurboQuantCache(model.config, max_cache_len=loaded)
    for used in (again, fresh):
        model(tokens(280, batch=2, seed=3), **as_input(used))
    assert_equal_channel_scales(again, fresh)


@pytest.mark.parametrize("saved, loaded", [(None, None), (None, 500), (500, None), (500, 500)])
def test_channel_scales_that_are_handed_on_stay_in_a_file(saved, loaded, tmp_path):
    model = made("llama")
    cache = TurboQuantCache(model.config, max_cache_len=saved, balance=Balance.of(model))
    model(tokens(20, batch=2), **as_input(cache))
    cache.save(tmp_path / "c.safetensors", model)
    again = TurboQuantCache.load(tmp_path / "c.safetensors", model, max_cache_len=loaded)
    same = [model(tokens(400, batch=2, seed=5), **as_input(used)).logits for used in (cache, again)]
    assert is_balanced(again) and torch.equal(*same)
    assert_equal_channel_scales(again, cache)
    for used in (cache, again):
        used.reset()
        model(tokens(300, batch=2, seed=3), **as_input(used))
    assert_equal_channel_scales(again, cache)


@LENGTHS
def test_channel_scales_that_are_handed_on_go_with_an_empty_cache_to_another_process(length):
    model = made("llama")
    cache = TurboQuantCache(model.config, max_cache_len=length, balance=Balance.of(model))
    again = pickle.loads(pickle.dumps(cache))
    for used in (cache, again):
        for part in (tokens(20), tokens(200, seed=3)):
            model(part, **as_input(used))
    assert is_balanced(again)
    assert_equal_channel_scales(again, cache)


@LENGTHS
def test_a_copy_has_channel_scales_of_its_own(length):
    model = made("llama")
    cache = TurboQuantCache(model.config, max_cache_len=length)
    model(tokens(300), **as_input(cache))
    copied = copy.deepcopy(cache)
    assert_equal_channel_scales(copied, cache)
    before = [pair.map(torch.clone) for pair in channel_scales(copied)]
    cache.reset()
    model(tokens(290, seed=5), **as_input(cache))
    for now, then in zip(channel_scales(copied), before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(now, then, strict=True))


@LENGTHS
def test_beams_take_their_channel_scales_along(length):
    model = made("llama")
    model.generation_config.eos_token_id = None
    ids = tokens(300, batch=2)
    outputs = []
    for attention in ("turboquant", "sdpa"):
        # Of sdpa keys have no channel scales but those handed on.
        cache = TurboQuantCache(model.config, max_cache_len=length, balance=Balance.of(model))
        model.set_attn_implementation(attention)
        options = dict(attention_mask=torch.ones_like(ids), num_beams=3, max_new_tokens=8, do_sample=False)
        outputs.append(model.generate(ids, **as_input(cache), disable_compile=True, **options))
        assert is_balanced(cache) and channel_scales(cache)[0].keys.shape[0] == 6
    assert torch.equal(*outputs)
