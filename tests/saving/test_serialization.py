"""Saving and loading: the same bits come back, in a cache of either kind, and a cache of another model is refused with
a sentence."""

import copy
import gc
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload
from packaging.version import Version
from safetensors.torch import load_file

from examples.measure.quality.family_configs import tiny_model
from tests.support.helpers import assert_unchanged, every_pair, snapshot
from tests.support.saving_cases import assert_continue_alike, filled, model_named, reloaded, run, split
from tests.support.tiny_models import CONFIGS, build, dense_attention, token_ids
from tq_hf import TurboQuantCache, TurboQuantConfig, TurboQuantLayer, graph_decoding
from tq_hf.compat import as_input
from tq_hf.saving import fingerprint
from tq_hf.saving.cache_file import load_cache, save_cache


@pytest.mark.parametrize(
    ("name", "attention", "max_cache_len"), every_pair(tuple(CONFIGS), ("turboquant", "dense"), (None, 512))
)
def test_a_loaded_cache_continues_with_identical_logits(tmp_path, name, attention, max_cache_len):
    attention = dense_attention(name) if attention == "dense" else attention
    model, cache = filled(name, attention=attention, max_cache_len=max_cache_len)
    loaded = reloaded(tmp_path, model, cache)
    assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in cache.layers]
    assert int(loaded.get_seq_length()) == 300 and loaded.config == cache.config
    for ours, theirs in zip(loaded.layers, cache.layers, strict=True):
        if isinstance(ours, TurboQuantLayer):
            assert (ours.reads_packed, ours.is_untouched) == (theirs.reads_packed, theirs.is_untouched)
    # Less where transformers keeps a part of a larger tensor.
    assert loaded.memory_footprint().total <= cache.memory_footprint().total
    assert loaded.memory_footprint().packed == cache.memory_footprint().packed > 0
    assert_continue_alike(model, cache, loaded, (1, 1, 9, 1) if max_cache_len is None else (1, 1, 1))


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "2.5bit_nc"},
        {"preset": "k8v4", "residual_length": 0, "sink_tokens": 0},
        {"residual_length": 10**6, "balance": False},
        {"skip_layers": (0,)},
        {"skip_layers": (0,), "max_cache_len": 512},
        {"max_cache_len": 512, "skip_layers": range(2)},
        {"seed": 2**40},
    ],
    ids=lambda options: ",".join(options),
)
@pytest.mark.parametrize("length", [2, 140, 389])
def test_every_configuration_and_length_comes_back(tmp_path, options, length):
    model, cache = filled("llama", length=length, **options)
    loaded = reloaded(tmp_path, model, cache)
    assert loaded.config == cache.config and loaded.get_max_length() == cache.get_max_length()
    assert_continue_alike(model, cache, loaded)


@pytest.mark.parametrize("crop", [0, 15])
def test_blocks_whose_rows_are_still_dense_come_back_as_they_were(tmp_path, crop):
    model = model_named("llama", attention="turboquant")
    cache = TurboQuantCache(model.config, model=model, residual_length=0)
    run(model, cache, token_ids(2, 120))
    run(model, cache, token_ids(2, 20))
    assert cache.layers[0].store.counts.pending == 1
    assert cache.layers[0].store.blocks.scales.count_nonzero()
    loaded = reloaded(tmp_path, model, cache)
    assert loaded.layers[0].store.counts == cache.layers[0].store.counts
    for one in (cache, loaded):
        one.crop(-crop)  # 15 is into the block: its exact rows must be there
    assert_continue_alike(model, cache, loaded)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_sequence_of_operations_after_loading_gives_what_it_gives_without(tmp_path, name):
    model, cache = filled(name)
    loaded = reloaded(tmp_path, model, cache)
    for one in (cache, loaded):
        one.batch_repeat_interleave(2)
        one.reorder_cache(torch.tensor([3, 0, 0, 1]))
        one.batch_select_indices(torch.tensor([0, 3]))
    assert_continue_alike(model, cache, loaded, (1, 160, 1))


def test_a_cropped_and_a_reset_cache_come_back(tmp_path):
    model, cache = filled("llama", length=500)
    cache.crop(-210)
    assert_continue_alike(model, cache, reloaded(tmp_path, model, cache))
    cache.reset()
    with pytest.raises(ValueError, match="no tokens"):
        cache.save(tmp_path / "c.safetensors")
    run(model, cache, token_ids(2, 200))
    assert_continue_alike(model, cache, reloaded(tmp_path, model, cache))


@pytest.mark.parametrize("loaded_for", [None, 400], ids=["to growing", "to preallocated"])
@pytest.mark.parametrize("max_cache_len", [None, 400], ids=["growing", "preallocated"])
def test_sliding_layers_that_record_their_past_come_back(tmp_path, max_cache_len, loaded_for):
    model, cache = filled("gemma3", length=80, max_cache_len=max_cache_len)
    cache.activate_past_recording()
    run(model, cache, token_ids(2, 40))
    loaded = reloaded(tmp_path, model, cache, max_cache_len=loaded_for)
    assert all(layer.record_past for layer in loaded.layers if layer.is_sliding)
    for one in (cache, loaded):
        one.crop(-7)
    if loaded_for == max_cache_len:
        assert_continue_alike(model, cache, loaded, (1,))
    else:
        torch.testing.assert_close(*(run(model, one, token_ids(2, 1)) for one in (loaded, cache)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("max_cache_len", [None, 400], ids=["growing", "preallocated"])
def test_sliding_layers_come_back_after_assisted_decoding(tmp_path, max_cache_len):
    model, cache = filled("gemma3", length=80, batch=1, max_cache_len=max_cache_len)
    ids = token_ids(1, 120)
    out = model.generate(ids, **as_input(cache), max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=3)
    assert any(layer.record_past for layer in cache.layers if layer.is_sliding)
    loaded = reloaded(tmp_path, model, cache)
    outs = [
        model.generate(out, **as_input(one), max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=3)
        for one in (cache, loaded)
    ]
    assert torch.equal(*outs)
    # In transformers 5.17 masks of single calls do not fit the windows of any cache that has been used so.
    for length in (1, 9, 1) if Version(transformers.__version__) >= Version("5.21") else ():
        assert torch.equal(*(run(model, one, token_ids(1, length, seed=2)) for one in (cache, loaded)))


@pytest.mark.parametrize("max_cache_len", [None, 400], ids=["growing", "preallocated"])
def test_convolutions_come_back_after_assisted_decoding(tmp_path, max_cache_len):
    """Attention is sdpa's, which has no mask of one token where a cache with empty rows is said not to be compileable:
    layers are not while they record their past, which grows from call to call."""
    model, options = tiny_model("lfm2_moe"), dict(max_new_tokens=8, do_sample=False, eos_token_id=None)
    cache = TurboQuantCache(model.config, model=model, max_cache_len=max_cache_len, residual_length=10**4)
    ids = token_ids(1, 6).repeat(1, 5)
    out = model.generate(ids, **as_input(cache), **options, prompt_lookup_num_tokens=3)
    assert torch.equal(out, model.generate(ids, **options))
    run(model, cache, token_ids(1, 3))
    loaded = reloaded(tmp_path, model, cache)
    for length in (1, 1):
        assert torch.equal(*(run(model, one, token_ids(1, length, seed=2)) for one in (cache, loaded)))
    if max_cache_len is not None:
        # With transformers 5.17 it is the mask that cannot be continued.
        with pytest.raises(ValueError, match=r"(linear layers that record their past|an attention mask).* Leave out"):
            model.generate(out, **as_input(cache), **options, custom_generate=graph_decoding)


def test_a_preallocated_window_that_is_full_goes_on_sliding(tmp_path):
    model, cache = filled("gemma3", length=150, max_cache_len=400)
    cache.save(tmp_path / "c.safetensors")
    loaded = TurboQuantCache.load(tmp_path / "c.safetensors", model)
    with pytest.raises(ValueError, match="left its window"):  # a file may lack the first row, which is never read
        loaded.crop(-1)
    assert_continue_alike(model, cache, loaded)
    loaded.crop(-1)
    assert loaded.get_seq_length() == cache.get_seq_length() - 1


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_a_cache_loaded_in_inference_mode_serves_outside_of_it(tmp_path, name):
    model, cache = filled(name)
    with torch.inference_mode():
        loaded = reloaded(tmp_path, model, cache)
    assert_continue_alike(model, cache, loaded)


def test_saving_changes_nothing(tmp_path):
    model, cache = filled("llama")
    before = [snapshot(layer.store) for layer in cache.layers]
    cache.save(tmp_path / "c.safetensors")
    for layer, held in zip(cache.layers, before, strict=True):
        assert_unchanged(layer.store, held)


def test_a_file_holds_what_is_used_and_no_reserve(tmp_path):
    model, cache = filled("llama", length=300, max_cache_len=4096)
    cache.save(tmp_path / "c.safetensors")
    layout = cache.config.layout(32)
    per_layer = 2 * 2 * (1 * layout.block_bytes + (300 - 128) * 2 * 32 * 4)
    size = (tmp_path / "c.safetensors").stat().st_size
    assert 2 * per_layer <= size <= 2 * per_layer + 16384
    assert all(tensor.numel() for tensor in load_file(tmp_path / "c.safetensors").values())


def test_notes_come_back(tmp_path):
    model, cache = filled("llama")
    save_cache(cache, tmp_path / "c.safetensors", model, notes={"prompt": "größer\0"})
    assert load_cache(TurboQuantCache, tmp_path / "c.safetensors", model)[1] == {"prompt": "größer\0"}


# Whose cache it is.


def test_the_model_is_the_one_given_or_the_one_the_cache_was_made_with(tmp_path):
    model = build("llama")
    cache = TurboQuantCache(model.config, model=model)
    run(model, cache, token_ids(1, 5))
    cache.save(tmp_path / "known.safetensors")
    cache.save(tmp_path / "given.safetensors", model)
    metadata = [split((tmp_path / f"{name}.safetensors").read_bytes())[0] for name in ("known", "given")]
    assert metadata[0] == metadata[1]
    unknown = TurboQuantCache(model.config)
    run(model, unknown, token_ids(1, 5))
    with pytest.raises(ValueError, match=r"Got None in place of the model.*`cache.save\(path, model\)`"):
        unknown.save(tmp_path / "c.safetensors")
    unknown.save(tmp_path / "c.safetensors", model)
    del model  # held weakly
    gc.collect()
    with pytest.raises(ValueError, match="Got None in place of the model"):
        cache.save(tmp_path / "c.safetensors")


@pytest.mark.parametrize("wrong", [None, "x", model_named("llama").config, torch.nn.Linear(1, 1)])
def test_anything_but_a_model_is_refused(tmp_path, wrong):
    model, cache = filled("llama", length=20)
    cache.save(tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=r"The model is needed.*`TurboQuantCache.load\(path, model\)`"):
        TurboQuantCache.load(tmp_path / "c.safetensors", wrong)
    if wrong is not None:
        with pytest.raises(ValueError, match=r"The model is needed.*`cache.save\(path, model\)`"):
            cache.save(tmp_path / "c.safetensors", wrong)


def test_a_fingerprint_depends_on_weights_and_not_on_attention():
    model = build("llama")
    prints = []
    for attention in ("turboquant", "sdpa", "eager"):
        model.set_attn_implementation(attention)
        prints.append(fingerprint.identify(model))
    assert prints[0] == prints[1] == prints[2] == fingerprint.identify(build("llama"))
    for parameter in ("layers.1.self_attn.k_proj", "layers.0.mlp.up_proj", "embed_tokens"):
        changed = build("llama")
        changed.model.get_submodule(parameter).weight.data.mul_(1.001)
        assert fingerprint.identify(changed)["weights"] != prints[0]["weights"], parameter
    changed = build("llama")
    changed.lm_head.weight.data.zero_()  # makes no keys and values
    assert fingerprint.identify(changed) == prints[0]


def test_a_model_whose_weights_are_kept_elsewhere_is_the_same_model(tmp_path):
    model, cache = filled("llama")
    cache.save(tmp_path / "c.safetensors")
    offloaded = cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert fingerprint.identify(offloaded) == fingerprint.identify(model)
    loaded = TurboQuantCache.load(tmp_path / "c.safetensors", offloaded)
    assert torch.equal(run(offloaded, loaded, token_ids(2, 1)), run(model, cache, token_ids(2, 1)))


ROPE = {"rope_type": "default", "rope_theta": 2e4}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda model: build("llama", seed=2), "another model of the same shape"),
        (lambda model: build("qwen3"), "another model: its `model_type`"),
        (lambda model: build("llama", num_hidden_layers=3), "its `num_hidden_layers` is 2, and this model's is 3"),
        (lambda model: build("llama", rope_parameters=ROPE), "another model: its `rope_parameters`"),
        (lambda model: build("llama").bfloat16(), r"made by a model in torch.float32.*dtype=torch.float32"),
    ],
    ids=["weights", "family", "layers", "rope", "dtype"],
)
def test_a_cache_of_another_model_is_refused(tmp_path, make, says):
    model, cache = filled("llama")
    cache.save(tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=says):
        TurboQuantCache.load(tmp_path / "c.safetensors", make(model))


def test_another_preset_is_refused(tmp_path):
    model, cache = filled("llama", preset="3bit_nc")
    cache.save(tmp_path / "c.safetensors")
    TurboQuantCache.load(tmp_path / "c.safetensors", model, preset="3bit_nc")
    TurboQuantCache.load(tmp_path / "c.safetensors", model, preset=TurboQuantConfig.from_preset("3bit_nc"))
    with pytest.raises(ValueError, match="saved with preset='3bit_nc', key_bits=3, value_bits=3"):
        TurboQuantCache.load(tmp_path / "c.safetensors", model, preset="4bit_nc")


def test_a_partly_filled_cache_is_not_saved(tmp_path):
    model = model_named("llama")
    cache = TurboQuantCache(model.config)
    cache.update(torch.randn(1, 2, 5, 32), torch.randn(1, 2, 5, 32), 0)
    with pytest.raises(ValueError, match="Layer 1 holds no tokens"):
        cache.save(tmp_path / "c.safetensors", model)


def test_layers_that_a_model_fills_itself_come_back(tmp_path):
    """The keys of MiniMax M3's indexer do not pass through the cache."""
    pytest.importorskip("transformers.models.minimax_m3_vl")
    model = tiny_model("minimax_m3_vl_text")
    cache = TurboQuantCache(model.config, model=model)
    run(model, cache, token_ids(2, 200))
    loaded = reloaded(tmp_path, model, cache)
    assert any(torch.is_tensor(getattr(layer, "idx_keys", None)) for layer in loaded.layers)
    assert_continue_alike(model, cache, loaded)


def test_layers_that_are_filled_in_an_unknown_way_are_refused_in_a_sentence(tmp_path):
    pytest.importorskip("transformers.models.deepseek_v4")
    model = tiny_model("deepseek_v4")
    cache = TurboQuantCache(model.config, model=model)
    run(model, cache, token_ids(1, 200))
    cache.save(tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match="Layer 0 is a DeepseekV4HCACache of transformers, which the model fills in"):
        TurboQuantCache.load(tmp_path / "c.safetensors", model)


def logits(model: Any, cache: Any, calls: list[int]) -> list[torch.Tensor]:
    return [run(model, cache, token_ids(2, count, seed)) for seed, count in enumerate(calls)]


@pytest.mark.parametrize(("name", "saved", "length"), every_pair(tuple(CONFIGS), (None, 400), (50, 95, 96, 97, 300)))
def test_a_cache_goes_on_the_same_in_the_other_kind(tmp_path, name, saved, length):
    """Windows of 96 tokens: not yet full, about to be, full, and long past."""
    model, cache = filled(name, length, max_cache_len=saved)
    room = 400 if saved is None else None
    loaded = reloaded(tmp_path, model, cache, max_cache_len=room)
    like = TurboQuantCache(model.config, max_cache_len=room)
    assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in like.layers]
    assert int(loaded.get_seq_length()) == length and loaded.preallocated_for == room
    for ours, theirs in zip(logits(model, loaded, [1, 1, 5, 1]), logits(model, cache, [1, 1, 5, 1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("saved", [None, 400], ids=["growing", "preallocated"])
def test_a_converted_cache_holds_the_same_bits_and_comes_back(tmp_path, saved):
    model, cache = filled("llama", 300, max_cache_len=saved, skip_layers=(0,))
    there = reloaded(tmp_path, model, cache, max_cache_len=500 if saved is None else None)
    back = reloaded(tmp_path, model, there, max_cache_len=saved)
    for layer, original in zip(back.layers, cache.layers, strict=True):
        assert torch.equal(layer.keys, original.keys) and torch.equal(layer.values, original.values)
    assert all(map(torch.equal, logits(model, back, [1, 1]), logits(model, cache, [1, 1])))


def test_room_can_be_changed_and_must_suffice(tmp_path):
    model, cache = filled("llama", 300, max_cache_len=320)
    larger = reloaded(tmp_path, model, cache, max_cache_len=1000)
    assert larger.get_max_length() == 1000
    assert all(map(torch.equal, logits(model, larger, [1, 1]), logits(model, cache, [1, 1])))
    with pytest.raises(ValueError, match="holds 300 tokens, and `max_cache_len` is 299. Pass 300"):
        TurboQuantCache.load(tmp_path / "c.safetensors", model, max_cache_len=299)
    for wrong in ("many", 0, 1.5, True):
        with pytest.raises(ValueError, match="`max_cache_len` is .*a number of tokens"):
            TurboQuantCache.load(tmp_path / "c.safetensors", model, max_cache_len=wrong)
