"""Balanced channels in a cache: what a model's scaling of its channels changes, where the channel scales go with their
layer, and what `Balance.of` runs a model on, which is as before afterwards."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from tq_kernels.types import ChannelScales
from transformers import DynamicCache

from examples.measure.quality.stress import rescaled
from tests.support.helpers import relative_error
from tests.support.tiny_models import build, multimodal, token_ids
from tq_hf import Balance, TurboQuantCache, TurboQuantConfig
from tq_hf.compat import as_input
from tq_hf.layers.compressed import TurboQuantLayer

PACKED = dict(residual_length=0, sink_tokens=0)
FAMILIES = ["llama", "qwen2", "qwen3"]


def made(name: str, pairs: int = 2, factor: float = 20.0, values: int = 3) -> Any:
    """A random model; its channels are rescaled without changing what it computes, if there is a factor. Llama's heads
    are large enough for loud channels."""
    model = build(name, **({"head_dim": 64} if name == "llama" else {}))
    model = rescaled(model, pairs, factor, values) if factor != 1 else model
    model.set_attn_implementation("turboquant")
    return model


def filled(model: Any, ids: torch.Tensor, **options: Any) -> TurboQuantCache:
    """A cache that a model has filled in one call."""
    cache = TurboQuantCache(model.config, **options)
    model(ids, **as_input(cache))
    return cache


def channel_scales(cache: TurboQuantCache) -> list[ChannelScales]:
    found = [layer.store.blocks.channel_scales for layer in cache.layers if isinstance(layer, TurboQuantLayer)]
    assert all(scales.has_marks() for scales in found)
    return found


def assert_has_channel_scales(cache: TurboQuantCache, expected: list[Any]) -> None:
    for pair, other in zip(channel_scales(cache), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, other, strict=True))


@torch.no_grad()
def error(model: Any, options: dict[str, Any], prompt: int = 400) -> float:
    """Of the logits of 8 tokens after a prompt, relative to a plain cache."""
    logits = []
    for cache in (DynamicCache(config=model.config), TurboQuantCache(model.config, **(PACKED | options))):
        model(token_ids(1, prompt), **as_input(cache))
        logits.append(model(token_ids(1, 8, seed=1), **as_input(cache)).logits)
    return ((logits[1] - logits[0]).norm() / logits[0].norm()).item()


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 450}, {"preset": "3bit_nc"}], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_cache_costs_does_not_depend_on_how_a_model_scales_its_channels(name, options):
    plain, loud = made(name, factor=1), made(name)
    unbalanced, balanced = (error(loud, options | {"balance": balance}) for balance in (False, True))
    assert balanced < 1.35 * error(plain, options | {"balance": False}) < unbalanced


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_batch_equals_its_rows_and_padding_is_left_out(name):
    model = made(name)
    ids = token_ids(2, 300)
    together = filled(model, ids)
    for row in range(2):
        alone = filled(model, ids[row : row + 1])
        for pair, one in zip(channel_scales(together), channel_scales(alone), strict=True):
            assert all(torch.equal(a[row : row + 1], b) for a, b in zip(pair, one, strict=True))
    padded = TurboQuantCache(model.config)
    mask = torch.ones(2, 300, dtype=torch.long)
    mask[:, :100] = 0
    model(ids, attention_mask=mask, **as_input(padded))
    other = TurboQuantCache(model.config)
    model(torch.where(mask.bool(), ids, 7), attention_mask=mask, **as_input(other))
    assert_has_channel_scales(padded, channel_scales(other))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_without_queries_values_are_balanced_and_at_most_one_layers_prompt_waits(attention):
    model = made("llama")
    model.set_attn_implementation(attention)
    cache = filled(model, token_ids(1, 300))
    assert not any(layer.store.is_deferred for layer in cache.layers)
    for keys, values in channel_scales(cache):
        assert (keys.abs() == 1).all() and (values != 1).any()


@torch.no_grad()
def test_a_prompt_waits_for_its_queries_and_for_nothing_else():
    model = made("llama")
    cache = TurboQuantCache(model.config)
    keys = torch.randn(1, 2, 300, 64)
    cache.update(keys, keys, 0)
    first = cache.layers[0].store
    assert first.is_deferred and cache.get_seq_length() == 300
    cache.update(keys, keys, 1)
    assert not first.is_deferred and first.counts.blocks == 1


@pytest.mark.parametrize("length", [None, 500])
@torch.no_grad()
def test_channel_scales_go_where_their_sequence_goes_and_a_copy_has_its_own(length):
    model = made("qwen2")
    cache = filled(model, token_ids(3, 300), max_cache_len=length)
    before = [pair.map(torch.clone) for pair in channel_scales(cache)]
    assert any(not torch.equal(keys[0], keys[1]) for keys, _ in before)

    def follow(order: list[int]) -> None:
        assert_has_channel_scales(cache, [pair.map(lambda scales: scales[order]) for pair in before])

    follow([0, 1, 2])
    copied = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    follow([2, 0, 0])
    model(token_ids(3, 20, seed=5), **as_input(cache))
    cache.reset()
    cache = copied
    follow([0, 1, 2])
    if length is None:
        cache.batch_repeat_interleave(2)
        follow([0, 0, 1, 1, 2, 2])
        cache.batch_select_indices(torch.tensor([5, 1]))
        follow([2, 0])


@pytest.mark.parametrize("length", [None, 500])
@pytest.mark.parametrize(
    ("forget", "first"), [("reset", "turboquant"), ("crop", "turboquant"), ("reset", "sdpa")], ids=str
)
@torch.no_grad()
def test_a_forgotten_prompt_leaves_no_channel_scales(length, forget, first):
    """Nor that it showed no queries, as sdpa's shows none."""
    model = made("llama")
    cache, fresh = (TurboQuantCache(model.config, max_cache_len=length) for _ in range(2))
    model.set_attn_implementation(first)
    model(token_ids(1, 300), **as_input(cache))
    if first == "sdpa":
        model(token_ids(1, 1), **as_input(cache))
        assert all((keys.abs() == 1).all() for keys, _ in channel_scales(cache))
    cache.reset() if forget == "reset" else cache.crop(-300)
    model.set_attn_implementation("turboquant")
    for used in (cache, fresh):
        model(token_ids(1, 280, seed=3), **as_input(used))
    assert all((keys.abs() != 1).any() for keys, _ in channel_scales(fresh))
    assert_has_channel_scales(cache, channel_scales(fresh))


@pytest.mark.parametrize("length", [None, 500])
@torch.no_grad()
def test_tokens_that_come_one_by_one_have_the_first_channels_as_loud_ones(length):
    model = made("llama")
    cache = filled(model, token_ids(1, 300), max_cache_len=length)
    for _ in range(2):
        cache.reset()
        for part in token_ids(1, 3).split(1, dim=1):
            model(part, **as_input(cache))
        for keys, values in channel_scales(cache):
            assert torch.equal(keys, torch.where(torch.arange(64) < 4, -1, 1).expand_as(keys)) and (values == 1).all()


@torch.no_grad()
def test_channel_scales_are_handed_on_to_prompts_too_short_for_statistics():
    model = made("llama")
    long = filled(model, token_ids(2, 300))
    for balance in (long, Balance.of(model)):
        cache = TurboQuantCache(model.config, balance=balance, **PACKED)
        for part in token_ids(3, 260, seed=5).split(20, dim=1):
            model(part, **as_input(cache))
        for keys, values in channel_scales(cache):
            assert keys.shape[0] == 3 and (keys.abs() < 0.3).any() and (values < 0.3).any()
            assert torch.equal(keys[0], keys[2])
        cache.reset()
        model(token_ids(1, 300, seed=6), **as_input(cache))
        assert all(
            torch.equal(layer.store.blocks.channel_scales.keys, layer.channel_scales.keys)
            for layer in cache.layers
            if isinstance(layer, TurboQuantLayer)
        )


def assert_equal_probes(one: Balance, other: Balance) -> None:
    assert one.layers.keys() == other.layers.keys() == {0, 1}
    assert all(torch.equal(a, b) for i in (0, 1) for a, b in zip(one.layers[i], other.layers[i], strict=True))


def test_a_probe_gives_the_same_each_time_and_leaves_the_model_as_it_was():
    model = made("qwen3")
    model.set_attn_implementation("sdpa")
    first, second = Balance.of(model), Balance.of(model)
    assert model.config._attn_implementation == "sdpa"
    assert_equal_probes(first, second)
    assert any((keys.abs() != 1).any() for keys, _ in first.layers.values())


def test_a_probe_restores_about_what_the_prompts_own_statistics_do():
    plain, loud = made("qwen2", factor=1), made("qwen2")
    assert error(loud, {"balance": Balance.of(loud)}) < 1.35 * error(plain, {"balance": False})


def test_channel_scales_of_another_model_or_of_nothing_are_refused():
    model = made("llama")
    with pytest.raises(ValueError, match="holds no tokens"):
        TurboQuantCache(model.config, balance=TurboQuantCache(model.config))
    balance = Balance.of(model)
    with pytest.raises(ValueError, match="no channel scales of layer 1"):
        TurboQuantCache(model.config, balance=Balance({0: balance.layers[0]}))
    with pytest.raises(ValueError, match="leave out either"):
        TurboQuantCache(model.config, TurboQuantConfig(balance=False), balance=balance)
    other = made("qwen2")
    cache = TurboQuantCache(other.config, balance=balance)
    with pytest.raises(ValueError, match=r"of \[2, 64\] heads and channels.*\[2, 16\]"):
        other(token_ids(1, 10), **as_input(cache))


LENGTHS = pytest.mark.parametrize("length", [None, 700], ids=["growing", "preallocated"])


def is_balanced(cache: TurboQuantCache) -> bool:
    return all((keys.abs() < 0.3).any() and (values < 0.3).any() for keys, values in channel_scales(cache))


@LENGTHS
def test_a_later_prompt_decides_where_the_first_was_too_short(length):
    model = made("llama")
    cache = filled(model, token_ids(1, 20), max_cache_len=length)
    model(token_ids(1, 128, seed=1), **as_input(cache))  # short calls go through the window, and decide nothing
    assert all((part.abs() == 1).all() for pair in channel_scales(cache) for part in pair)
    model(token_ids(1, 200, seed=2), **as_input(cache))
    assert is_balanced(cache) and cache.layers[0].store.export()[0].blocks == 1
    before = [pair.map(torch.clone) for pair in channel_scales(cache)]
    model(token_ids(1, 200, seed=3), **as_input(cache))
    assert_has_channel_scales(cache, before)


@LENGTHS
def test_a_chat_of_short_turns_is_balanced_by_a_probe_only(length):
    model = made("llama")
    for balance in (None, Balance.of(model)):
        cache = TurboQuantCache(model.config, max_cache_len=length, balance=balance)
        for turn in range(7):
            model(token_ids(1, 20 if turn == 0 else 60, seed=turn), **as_input(cache))
        assert is_balanced(cache) == (balance is not None)
        assert cache.layers[0].store.export()[0].blocks == 1


@LENGTHS
def test_a_crop_that_leaves_tokens_leaves_their_channel_scales(length):
    model = made("qwen2")
    cache, uncropped = (TurboQuantCache(model.config, max_cache_len=length) for _ in range(2))
    for used in (cache, uncropped):
        model(token_ids(1, 400), **as_input(used))
    cache.crop(-250)  # into the packed block
    assert_has_channel_scales(cache, channel_scales(uncropped))
    model(token_ids(1, 300, seed=4), **as_input(cache))
    assert cache.get_seq_length() == 450
    if length is None:
        assert cache.layers[0].store.counts.blocks > 0
    assert is_balanced(cache)


def test_every_tensor_of_a_layer_moves_its_channel_scales_among_them():
    model = made("llama")
    cache = filled(model, token_ids(1, 300))
    for layer in cache.layers:
        layer._map(lambda tensor: tensor.to("meta"))
    assert all(part.is_meta for pair in channel_scales(cache) for part in pair)


@LENGTHS
def test_a_layer_that_waits_for_queries_is_not_moved_and_is_balanced_by_them(length):
    model = made("llama")
    cache, stayed = (TurboQuantCache(model.config, max_cache_len=length) for _ in range(2))
    queries, keys, values = (torch.randn(1, heads, 300, 64) for heads in (4, 2, 2))
    loud = torch.where(torch.arange(64) % 8 == 0, 30.0, 1.0)
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
        assert torch.equal(a, b) and (a.abs() < 0.3).any()


@pytest.mark.parametrize("saved, loaded", [(None, None), (None, 500), (500, None), (500, 500)])
@pytest.mark.parametrize("given", [False, True], ids=["found", "handed on"])
def test_a_file_brings_its_channel_scales_into_either_kind_of_cache(given, saved, loaded, tmp_path):
    """Those of a prompt, which another prompt has not, or those handed on, which stay."""
    model = made("llama")
    balance = Balance.of(model) if given else None
    cache = filled(model, token_ids(2, 20 if given else 300), max_cache_len=saved, balance=balance)
    cache.save(tmp_path / "c.safetensors", model)
    again = TurboQuantCache.load(tmp_path / "c.safetensors", model, max_cache_len=loaded)
    more = token_ids(2, 400 if given else 1, seed=5)
    assert torch.equal(*(model(more, **as_input(used)).logits for used in (again, cache)))
    assert is_balanced(again)
    assert_has_channel_scales(again, channel_scales(cache))
    again.reset()
    fresh = TurboQuantCache(model.config, max_cache_len=loaded, balance=balance)
    for used in (again, fresh):
        model(token_ids(2, 280, seed=3), **as_input(used))
    assert_has_channel_scales(again, channel_scales(fresh))


@LENGTHS
def test_channel_scales_that_are_handed_on_go_with_an_empty_cache_to_another_process(length):
    model = made("llama")
    cache = TurboQuantCache(model.config, max_cache_len=length, balance=Balance.of(model))
    again = pickle.loads(pickle.dumps(cache))
    for used in (cache, again):
        for part in (token_ids(1, 20), token_ids(1, 200, seed=3)):
            model(part, **as_input(used))
    assert is_balanced(again)
    assert_has_channel_scales(again, channel_scales(cache))


CHANGES: dict[str, Callable[[TurboQuantCache], Any]] = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "crop": lambda cache: cache.crop(-250),  # into a packed block
    "file": lambda cache: None,
    "prune": lambda cache: prune(cache.layers[0]),
}
KEPT = {
    "reorder": ([1, 0], ...),
    "crop": (..., slice(250), slice(None)),
    "prune": (..., [*range(4), *range(132, 500)], slice(None)),
}


def prune(layer: TurboQuantLayer) -> None:
    """Remove the first packed block."""
    layer.keys, layer.values = layer.keys[KEPT["prune"]], layer.values[KEPT["prune"]]


@LENGTHS
@pytest.mark.parametrize("what", CHANGES)
def test_loud_channels_are_read_back_wherever_their_block_goes(what, length, tmp_path):
    model = made("llama")
    exact = DynamicCache(config=model.config)
    model(token_ids(2, 500), **as_input(exact))
    cache = filled(model, token_ids(2, 500), max_cache_len=length)
    before, scales = cache.layers[0].keys.clone(), channel_scales(cache)[0].keys
    loud = (scales < 0)[:, :, None].expand_as(before)
    assert before[loud].unique().numel() > 1000
    assert relative_error(before[loud], exact.layers[0].keys[loud]) < 0.03
    assert relative_error(before[~loud], exact.layers[0].keys[~loud]) > 0.05
    CHANGES[what](cache)
    if what == "file":
        cache.save(tmp_path / "c.safetensors", model)
        cache = TurboQuantCache.load(tmp_path / "c.safetensors", model)
    assert torch.equal(cache.layers[0].keys, before[KEPT.get(what, ...)])


@pytest.mark.parametrize("options", [{"preset": "k8v4"}, {"preset": "2bit_nc"}, {"loud": False}], ids=str)
def test_channel_scales_of_one_preset_serve_every_other(options):
    model, ids = made("llama"), token_ids(1, 300)
    exact = DynamicCache(config=model.config)
    model(ids, **as_input(exact))
    own, given = (filled(model, ids, balance=balance, **options) for balance in (None, filled(model, ids)))
    assert_has_channel_scales(given, channel_scales(own))
    for one, other in zip(own.layers, given.layers, strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
    assert relative_error(given.layers[0].keys, exact.layers[0].keys) < {"k8v4": 0.03}.get(options.get("preset"), 0.3)


def test_scales_averaged_over_sequences_mark_the_channels_marked_most_often():
    cache = filled(made("llama"), token_ids(5, 300))
    for index, own in enumerate(channel_scales(cache)):
        mean = Balance.from_cache(cache.layers).layers[index]
        assert mean.has_marks() and (mean.values > 0).all()
        counts = (own.keys < 0).sum(0, keepdim=True)
        assert counts[mean.keys < 0].view(2, 4).amin(1).ge(counts[mean.keys > 0].view(2, 60).amax(1)).all()
        for part, each in zip(mean, own, strict=True):
            torch.testing.assert_close(part.abs().log2(), each.abs().log2().mean(0, keepdim=True), rtol=0, atol=0.01)


@pytest.mark.parametrize("change", [torch.abs, torch.negative], ids=["none", "all but four"])
def test_scales_with_another_number_of_loud_channels_are_refused(change, tmp_path):
    model = made("llama")
    cache = filled(model, token_ids(1, 300))
    keys, values = channel_scales(cache)[1]
    with pytest.raises(ValueError, match="of layer 1 must be negative for 4 channels of each head.*Balance.of"):
        Balance({0: channel_scales(cache)[0], 1: ChannelScales(change(keys), values)})
    keys.copy_(change(keys))
    cache.save(tmp_path / "c.safetensors", model)
    with pytest.raises(ValueError, match="Layer 1 has `key_channel_scales` with another number of loud channels"):
        TurboQuantCache.load(tmp_path / "c.safetensors", model)
    values.neg_()
    cache.save(tmp_path / "c.safetensors", model)
    with pytest.raises(ValueError, match="Layer 1 has `value_channel_scales` that are not between"):
        TurboQuantCache.load(tmp_path / "c.safetensors", model)


OWN = ["sdpa", "turboquant", "eager"]


def test_parts_of_a_model_have_their_own_attention_after_a_run_and_after_one_that_fails():
    model, attention = multimodal()
    assert attention() == OWN
    Balance.of(model)
    assert attention() == OWN

    def fail(*args: object) -> None:
        assert attention() == ["turboquant"] * 3
        raise torch.OutOfMemoryError

    model.get_decoder().layers[1].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        Balance.of(model)
    assert attention() == OWN


@pytest.mark.parametrize("positions, tokens", [(256, 256), (36, 36), (2048, 512)])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_probe_has_no_more_tokens_than_the_model_has_positions(name, positions, tokens):
    model = build(name, max_position_embeddings=positions)
    lengths = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
    assert Balance.of(model).layers.keys() == {0, 1}
    assert lengths == [tokens]


def test_a_model_of_too_few_positions_for_statistics_is_refused():
    with pytest.raises(ValueError, match=r"positions for 35 tokens \(GPT2Config\).* 36 or more.*`balance=False`"):
        Balance.of(build("gpt2", max_position_embeddings=35))


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_model_whose_weights_are_offloaded_is_probed(where, tmp_path):
    model = build("llama")
    expected = Balance.of(model)
    if where == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert model.device.type == "meta"
    assert_equal_probes(Balance.of(model), expected)


def test_kernels_of_a_probe_are_compiled_together_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a run that launches none: what it leaves in the cache is not read."""
    model, events = build("llama"), []
    expected = Balance.of(model)
    model.register_forward_pre_hook(lambda *_: events.append("run"))

    def compiling(states: torch.Tensor, code: Callable[[], list[Any]]) -> Callable[[], None]:
        assert (states.dtype, states.device) == (model.dtype, model.device)
        for layer in code():
            layer.store.blocks.channel_scales.map(lambda scales: scales.fill_(float("nan")))
        return lambda: events.append("compiled")

    monkeypatch.setattr("tq_hf.balance.compile_kernels", compiling)
    assert_equal_probes(Balance.of(model), expected)
    assert events == ["run", "compiled", "run"]
