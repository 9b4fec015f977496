"""Bad input is refused with a message that says what came, what is allowed and what to do; the cache is unchanged."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache, FalconH1Config, LlamaConfig, MambaConfig
from transformers.cache_utils import DynamicLayer

import tq_hf.cache
from tests.support.helpers import assert_unchanged, gemma_config, llama_config, snapshot, states
from tests.support.tiny_models import build
from tq_hf import PRESETS, TurboQuantCache, TurboQuantConfig
from tq_hf.compat import as_input

LAYERS = 2


def new_cache(*calls: int, batch: int = 2, **options) -> TurboQuantCache:
    """A cache that was given tokens in these calls, by default 300 in one. Some are packed."""
    cache = TurboQuantCache(llama_config(LAYERS), residual_length=0, sink_tokens=0, **options)
    for tokens in filter(None, calls or (300,)):
        for layer in range(LAYERS):
            cache.update(*states(layer, batch, tokens=tokens), layer)
    return cache


class unchanged:
    """Asserts that the cache is the same after the block as before it."""

    def __init__(self, cache: TurboQuantCache) -> None:
        self.cache = cache

    def __enter__(self) -> None:
        self.before = [snapshot(layer.store) for layer in self.cache.layers]
        self.state = [(layer.is_initialized, layer.get_seq_length(), layer.batch_size) for layer in self.cache.layers]

    def __exit__(self, *error) -> None:
        for layer, before in zip(self.cache.layers, self.before, strict=True):
            assert_unchanged(layer.store, before)
        state = [(layer.is_initialized, layer.get_seq_length(), layer.batch_size) for layer in self.cache.layers]
        assert state == self.state


# Making a cache


REFUSED: dict[str, tuple[list[Any], str]] = {
    "preset": (["8bit", "turboquant", "turboquant_5bit", "", None, 4], f"{{!r}}.*{'.*'.join(PRESETS)}"),
    "model_config": (
        [None, {}, "llama", torch.nn.Linear(1, 1), LlamaConfig],
        r"must be a transformers config \(pass `model.config`\), not",
    ),
    "model": (["Qwen/Qwen3-4B", llama_config()], r"must be the model itself, or left out, not (str|LlamaConfig)"),
    "offloading": (["no", 1, None], "is {!r}; it must be True or False"),
    "max_cache_len": ([0, -1, "100", 100.5, True], "is {!r}; .*1 or more"),
    "skip_layers": ([(2,), (-3,), (0, 5)], "names layer {last}, but the model has 2 layers; use -2 to 1"),
    "balance": (["both", 1, 0.5, object()], "is .*True or False, a `Balance`, or a cache"),
}
"""Values that an argument cannot have, and what its error says."""


@pytest.mark.parametrize("name, value", [(name, value) for name, (values, _) in REFUSED.items() for value in values])
def test_arguments_that_a_cache_cannot_be_made_of_are_refused(name, value):
    says = REFUSED[name][1].format(value, last=value[-1] if isinstance(value, tuple) else None)
    with pytest.raises(ValueError, match=says) as error:
        TurboQuantCache(**{"model_config": llama_config(2), name: value})
    assert name == "preset" or f"`{name}`" in str(error.value)


def test_a_config_object_is_refused_beside_options_and_without_attention_heads():
    with pytest.raises(ValueError, match="TurboQuantConfig and also key_bits, seed.*dataclasses.replace"):
        TurboQuantCache(llama_config(), TurboQuantConfig(), seed=1, key_bits=3)
    assert TurboQuantCache(llama_config(), TurboQuantConfig(seed=1)).config.seed == 1
    with pytest.raises(ValueError, match="MambaConfig has no attention heads.*pass none"):
        TurboQuantCache(MambaConfig())


@pytest.mark.parametrize("name", ["4BIT_NC", "turboquant_4bit_nc", "TurboQuant_4bit_NC"])
def test_presets_go_by_vllms_names_and_in_any_case(name):
    assert TurboQuantCache(llama_config(), name).config == PRESETS["4bit_nc"]


def test_a_preset_of_other_bits_has_no_name():
    assert TurboQuantConfig.from_preset("4bit_nc", key_bits=8).preset is None
    assert TurboQuantConfig.from_preset("4bit_nc", key_bits=4, residual_length=0).preset == "4bit_nc"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_offloading_needs_a_gpu():
    with pytest.raises(ValueError, match="there is no GPU. Leave it out"):
        TurboQuantCache(llama_config(), offloading=True)


# Reusing and filling a cache


MISFITS = {
    "batch size 2.* batch size 3": dict(batch=3),
    "batch size 2.* batch size 1": dict(batch=1),
    "number of KV heads 2.* KV heads 4": dict(batch=2, heads=4),
    "key head_dim 16.* head_dim 32": dict(batch=2, dim=32, value_dim=16),
    "value head_dim 16.* head_dim 8": dict(batch=2, value_dim=8),
    "torch.float32.* torch.bfloat16": dict(batch=2, dtype=torch.bfloat16),
}


SETTLED, PENDING = (300,), (250, 50)
"""Calls after which all complete blocks are packed, and after which one has its rows in the residual, too."""


@pytest.mark.parametrize("message", MISFITS)
@pytest.mark.parametrize("tokens", [1, 200])
@pytest.mark.parametrize("limit", [None, 1000])
@pytest.mark.parametrize("calls", [SETTLED, PENDING], ids=["settled", "pending"])
def test_a_cache_reused_for_another_batch_or_model_is_refused(message, tokens, limit, calls):
    cache = new_cache(*calls, max_cache_len=limit)
    with unchanged(cache), pytest.raises(ValueError, match=f"This cache holds.*{message}.*cache.reset"):
        cache.update(*states(5, tokens=tokens, **MISFITS[message]), 0)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("limit", [None, 64])
@pytest.mark.parametrize(("name", "options"), [("gemma3", {}), ("llama", dict(skip_layers=(0,)))])
def test_another_batch_is_refused_by_a_first_layer_that_is_not_compressed(name, options, limit, batch, tokens):
    model = build(name, attention="turboquant")
    cache = TurboQuantCache(model.config, max_cache_len=limit, residual_length=10**4, **options)
    ids, more = torch.arange(60).view(2, 30), torch.arange(6).view(2, 3)
    model(ids, **as_input(cache))
    with pytest.raises(ValueError, match=f"batch size 2.* batch size {batch}"):
        model(torch.ones(batch, tokens, dtype=torch.long), **as_input(cache))
    found = model(more, **as_input(cache)).logits
    expected = model(torch.cat([ids, more], dim=1), use_cache=False).logits[:, -3:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("limit", [None, 300])
def test_a_call_with_dropout_is_taken_back_as_its_error_says(limit):
    model, held = build("llama", attention_dropout=0.1), 200
    model.set_attn_implementation("turboquant")
    ids = torch.randint(3, 100, (1, 210), generator=torch.Generator().manual_seed(0))
    caches = [TurboQuantCache(model.config, max_cache_len=limit) for _ in range(2)]
    for cache in caches:
        model(ids[:, :held], **as_input(cache))
    with pytest.raises(ValueError, match=r"dropout.*`cache.crop\(0\)`"):
        model.train()(ids[:, held:], **as_input(caches[1]))
    caches[1].crop(0)
    expected, found = (model.eval()(ids[:, held:], **as_input(cache)).logits for cache in caches)
    torch.testing.assert_close(found, expected)


def test_a_cache_may_be_initialized_early():
    model = build("gemma3", attention="turboquant")
    cache, config, ids = TurboQuantCache(model.config), model.config, torch.arange(3, 9)[None]
    cache.early_initialization(1, config.num_key_value_heads, config.head_dim, torch.float32, torch.device("cpu"))
    expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(model(ids, **as_input(cache)).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("limit", [None, 1000])
@pytest.mark.parametrize("calls", [SETTLED, PENDING], ids=["settled", "pending"])
def test_states_of_another_device_than_the_caches_are_refused(tokens, limit, calls):
    cache = new_cache(*calls, max_cache_len=limit)
    keys, values = states(5, 2, tokens=tokens)
    with unchanged(cache), pytest.raises(ValueError, match="on device cpu|device cpu.* device meta"):
        cache.update(keys.to("meta"), values.to("meta"), 0)


@pytest.mark.parametrize("held", [(0,), SETTLED, PENDING], ids=["empty", "settled", "pending"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    "broken, message",
    [
        (lambda k, v: (k[..., :0], v[..., :0]), "head_dim of 0"),
        (lambda k, v: (k[:, :0], v[:, :0]), "no heads"),
        (lambda k, v: (k, v[:, :, 1:]), "agree in batch, heads and tokens"),
        (lambda k, v: (k, v[:1]), "agree in batch, heads and tokens"),
        (lambda k, v: (k, v.half()), "one floating-point dtype"),
        (lambda k, v: (k.long(), v.long()), "one floating-point dtype"),
        (lambda k, v: (k[0], v[0]), r"shape \[batch, KV heads, tokens, head_dim\]"),
        (lambda k, v: (k, v.to("meta")), "Keys are on cpu and values on meta.* move both"),
    ],
    ids=["head_dim", "heads", "tokens", "batch", "dtype", "integers", "3d", "devices"],
)
@pytest.mark.parametrize("limit", [None, 1000])
def test_states_that_are_no_keys_and_values_are_refused(broken, message, held, tokens, limit):
    cache = new_cache(*held, max_cache_len=limit)
    with unchanged(cache), pytest.raises(ValueError, match=message):
        cache.update(*broken(*states(5, 2, tokens=tokens)), 0)


def test_the_shape_is_looked_at_before_the_room_for_it():
    cache = new_cache(0, max_cache_len=10)
    with unchanged(cache), pytest.raises(ValueError, match=r"shape \[batch, KV heads, tokens, head_dim\]"):
        cache.update(torch.zeros(16), torch.zeros(16), 0)


def test_kinds_of_layers_that_transformers_does_not_preallocate_are_refused():
    config = LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["full_attention", "heavily_compressed_attention"]  # DeepSeek V4's
    with pytest.raises(ValueError, match="preallocated layer for 'heavily_compressed_attention'.*`max_cache_len`"):
        TurboQuantCache(config, max_cache_len=256)


@pytest.mark.parametrize("held, more", [(0, 301), (300, 1), (300, 2), (300, 300), (290, 11), (100, 300)])
def test_exceeding_max_cache_len_is_refused(held, more):
    cache = new_cache(held, max_cache_len=300)
    says = f"{more} tokens to the {held}.*`max_cache_len` of 300" if held else "prompt has 301 tokens and .*300.*larger"
    with unchanged(cache), pytest.raises(ValueError, match=says):
        cache.update(*states(5, 2, tokens=more), 0)
    cache.update(*states(5, 2, tokens=300 - held), 0)
    assert cache.get_seq_length() == 300


@pytest.mark.parametrize("tokens", [1, 300, "4", None, 1.5])
def test_a_crop_of_no_negative_number_is_refused(tokens):
    for cache in (new_cache(), new_cache(0)):
        with unchanged(cache), pytest.raises(ValueError, match=f"called with {tokens!r}.*negative number"):
            cache.crop(tokens)


@pytest.mark.parametrize("indices", [[0], torch.tensor(0), torch.tensor([[0]])], ids=str)
def test_sequences_to_keep_are_a_tensor(indices):
    cache = new_cache()
    with unchanged(cache), pytest.raises(ValueError, match=r"`indices` is .*0.*; it must be a tensor `\[n\]`"):
        cache.batch_select_indices(indices)


def test_a_model_of_more_layers_is_refused():
    cache = new_cache()
    with unchanged(cache), pytest.raises(ValueError, match="model of 2 layers, and this model has a layer 2; make"):
        cache.update(*states(0, 2), 2)


@pytest.mark.parametrize("recording", [False, True], ids=["forgets", "records"])
def test_a_crop_that_a_later_layer_refuses_changes_nothing(recording):
    """A window that has let go of older tokens cannot go back, nor further back than it recorded."""
    cache = TurboQuantCache(gemma_config(["full_attention", "sliding_attention"]))
    for tokens in (40, 3):
        for layer in range(2):
            cache.update(*states(layer, tokens=tokens), layer)
        if recording:
            cache.activate_past_recording()
    before = snapshot(cache.layers[0].store), cache.layers[1].keys
    with pytest.raises(
        ValueError, match="cannot remove 5 tokens from layer 1, a SlidingLayer.*activate_past_recording"
    ):
        cache.crop(-5)
    assert_unchanged(cache.layers[0].store, before[0])
    assert cache.layers[1].keys is before[1] and [layer.get_seq_length() for layer in cache.layers] == [43, 43]
    if recording:
        cache.crop(-3)
        assert [layer.get_seq_length() for layer in cache.layers] == [40, 40]
    before = cache.get_seq_length()
    cache.crop(0)
    assert [layer.get_seq_length() for layer in cache.layers] == [before, before]


def test_what_a_cache_is_shows():
    assert repr(TurboQuantCache(llama_config())) == "TurboQuantCache(4bit_nc, 2 layers, 0 tokens, empty)"
    cache = new_cache(max_cache_len=1000)
    assert repr(cache).startswith("TurboQuantCache(4bit_nc, 2 layers, 300 of 1,000 tokens, 0.") and "MiB, " in str(
        cache
    )
    assert repr(cache).endswith(" in 16 bits)") and "%" not in repr(cache)  # larger than 16 bits, preallocated
    assert repr(TurboQuantCache(llama_config(), key_bits=3)).startswith("TurboQuantCache(key_bits=3, value_bits=4, 2")


@pytest.mark.parametrize(
    "write", [pickle.dumps, lambda cache: torch.save(cache, io.BytesIO())], ids=["pickle", "torch"]
)
def test_a_filled_cache_is_saved_and_not_pickled(write):
    cache = new_cache()
    with (
        unchanged(cache),
        pytest.raises(pickle.PicklingError, match=r"Write it to a file with `cache.save\(path, model"),
    ):
        write(cache)


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 500}, {"residual_length": 0}])
def test_an_empty_cache_pickles(options):
    config = llama_config(dim=64)
    cache = TurboQuantCache(config, **options)
    there = pickle.loads(pickle.dumps(cache))
    assert there.config == cache.config and there.get_max_length() == cache.get_max_length()
    for layer in range(2):
        for one in (cache, there):
            one.update(*states(layer, dim=64, tokens=200), layer)
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(cache.layers, there.layers, strict=True))
    cache.reset()
    assert pickle.loads(pickle.dumps(cache)).get_max_length() == cache.get_max_length()
    del config
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(there)


def test_a_copy_is_not_touched_by_its_original():
    cache = new_cache()
    twin = copy.deepcopy(cache)
    with unchanged(twin):
        cache.update(*states(5, 2, tokens=200), 0)
        cache.crop(-150)
        cache.reorder_cache(torch.tensor([1, 1]))


def test_a_kind_of_full_attention_that_is_not_compressed_is_named(monkeypatch):
    class NovelLayer(DynamicLayer):
        pass

    made = DynamicCache(config=llama_config())
    made.layers[1] = NovelLayer()
    monkeypatch.setattr(tq_hf.cache, "DynamicCache", lambda **options: made)
    warnings = []
    monkeypatch.setattr(tq_hf.cache.logger, "warning_once", warnings.append)
    cache = TurboQuantCache(llama_config())
    assert type(cache.layers[1]) is NovelLayer and "class NovelLayer are not compressed" in warnings[0]


def test_a_model_of_which_nothing_is_compressed_is_told_so(monkeypatch):
    """Falcon-H1 and Zamba hold attention and a linear state in one layer."""
    warnings = []
    monkeypatch.setattr(tq_hf.cache.logger, "warning_once", warnings.append)
    monkeypatch.setattr(tq_hf.cache.logger, "warning", warnings.append)
    TurboQuantCache(FalconH1Config(num_hidden_layers=2))
    kind = "the class LinearAttentionAndFullAttentionLayer"
    assert f"Layers of {kind} are not compressed, although they cache all tokens" in warnings[0]
    assert f"No layer of this FalconH1Config is compressed. Its layers have {kind}; only full" in warnings[-1]


def test_a_dense_layer_keeps_all_that_transformers_gave_it(monkeypatch):
    made = DynamicCache(config=llama_config())
    made.layers[1].novelty = 7
    monkeypatch.setattr(tq_hf.cache, "DynamicCache", lambda **options: made)
    cache = TurboQuantCache(llama_config(), skip_layers=(1,))
    assert cache.layers[1].novelty == 7 and type(cache.layers[1]).__name__ == "GrowingLayer"
