"""Taking tokens back from layers that hold different numbers of them, on purpose or because a call was interrupted."""

import pytest
import torch
from transformers import DynamicCache, cache_utils

from tests.support.helpers import assert_same, llama_config, states
from tests.support.tiny_models import VOCAB, build
from tq_hf import TurboQuantCache
from tq_hf.compat import CACHE_NAME, as_input

UNEVEN = (600, 400, 200)
BOTH = "LinearAttentionAndStaticFullAttentionLayer"
kinds = pytest.mark.parametrize(
    "options", [{}, {"max_cache_len": 900}, {"skip_layers": (0, 1)}], ids=["growing", "preallocated", "dense"]
)


def lengths(cache) -> list[int]:
    return [int(layer.get_seq_length()) for layer in cache.layers]


def uneven(kind, tokens=UNEVEN, **options):
    cache = kind(config=llama_config(3)) if kind is DynamicCache else kind(llama_config(3), **options)
    for layer, count in enumerate(tokens):
        cache.update(*states(layer, 2, tokens=count), layer)
    return cache


def pruned(**options):
    """600 tokens of all layers, pruned by assignment after the call."""
    cache = uneven(TurboQuantCache, (600,) * 3, **options)
    for layer, count in zip(cache.layers, UNEVEN, strict=True):
        layer.keys, layer.values = layer.keys[:, :, -count:], layer.values[:, :, -count:]
    return cache


@kinds
@pytest.mark.parametrize(
    "make", [lambda **options: uneven(TurboQuantCache, **options), pruned], ids=["built", "pruned"]
)
@pytest.mark.parametrize("more", [(), (1,), (20, 1)], ids=str)
def test_a_crop_takes_as_many_tokens_from_each_layer(make, options, more):
    cache, expected = make(**options), uneven(DynamicCache)
    for each in (cache, expected):
        for tokens in more:
            for layer in range(3):
                each.update(*states(9, 2, tokens=tokens), layer)
    for tokens in (0, -1, -30, -1000):
        cache.crop(tokens)
        expected.crop(tokens)
        assert lengths(cache) == lengths(expected)


@kinds
@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("crop", [0, -1, -20, -50])
def test_a_call_that_an_exception_ended_is_taken_back_from_uneven_layers(options, tokens, crop):
    """And no more than it, if no more is asked for; a second crop takes from each layer again."""
    cache, undisturbed = (uneven(TurboQuantCache, **options) for _ in range(2))
    for layer in range(2):
        cache.update(*states(9, 2, tokens=tokens), layer)
    cache.crop(crop)
    undisturbed.crop(min(0, crop + tokens))
    for _ in range(2):
        for ours, theirs in zip(cache.layers, undisturbed.layers, strict=True):
            assert int(ours.get_seq_length()) == int(theirs.get_seq_length())
            assert_same(*((layer.keys, layer.values) for layer in (ours, theirs)))
        cache.crop(-3)
        undisturbed.crop(-3)


@pytest.mark.parametrize("count", [(200, 400, 600), (400, 200, 600)])
@pytest.mark.parametrize("after", [1, 2])
def test_layers_that_grow_are_taken_back_by_the_call_that_was_interrupted(count, after):
    cache = uneven(TurboQuantCache, count)
    for layer in range(after):
        cache.update(*states(9, 2, tokens=20), layer)
    cache.crop(-20)
    assert lengths(cache) == list(count)


@kinds
def test_a_complete_call_that_updates_another_layer_last_is_not_taken_for_interrupted(options):
    """Loop models (Dory) update the first layers again, after the last one."""
    cache = uneven(TurboQuantCache, (300,) * 3, **options)
    for layer in (0, 2, 1):
        cache.update(*states(9, 2, tokens=20), layer)
    cache.crop(-2)
    assert lengths(cache) == [318] * 3


@pytest.mark.parametrize("copy", [False, True])
def test_layers_that_were_evened_out_are_not_taken_for_interrupted_again(copy):
    cache = uneven(TurboQuantCache, (300, 300, 300))
    cache.update(*states(9, 2, tokens=20), 0)
    if copy:
        cache = cache.__deepcopy__({})
    cache.crop(0)
    cache.crop(-1)
    assert lengths(cache) == [299] * 3


def test_a_compiled_step_that_an_exception_ended_is_taken_back():
    """Nothing notes its updates: it leaves the first layers one token ahead, with counts on the device."""
    cache = uneven(TurboQuantCache, (300, 300, 300), max_cache_len=400)
    cache.layers[0].update(*states(9, 2, tokens=1))
    assert lengths(cache) == [301, 300, 300]
    cache.crop(0)
    assert lengths(cache) == [300, 300, 300]


@pytest.mark.parametrize("limit", [None, 600])
def test_prompt_lookup_on_pruned_layers_answers_as_steps_do(limit):
    """Layers are pruned in the call of the prompt, by the same tokens whatever candidates come with it (PyramidKV)."""
    model = build("llama")
    model.set_attn_implementation("turboquant")
    ids = torch.randint(3, VOCAB, (1, 40), generator=torch.Generator().manual_seed(0)).repeat(1, 10)
    kept, steps, answers = (350, 200), [], []

    def prune(module, args, kwargs, output):
        layer = kwargs[CACHE_NAME].layers[module.layer_idx]
        if output[0].shape[1] >= 400:
            layer.keys, layer.values = (
                torch.cat([x[:, :, : kept[module.layer_idx]], x[:, :, 350:]], 2) for x in (layer.keys, layer.values)
            )
        elif module.layer_idx == 0:
            steps.append(output[0].shape[1])

    hooks = [block.self_attn.register_forward_hook(prune, with_kwargs=True) for block in model.model.layers]
    for options in ({}, {"prompt_lookup_num_tokens": 3}):
        cache = TurboQuantCache(model.config, "k8v4", max_cache_len=limit)
        generate = dict(max_new_tokens=12, do_sample=False, **as_input(cache), disable_compile=True)
        answers.append(model.generate(ids, **generate, **options))
        assert lengths(cache) == [count + 61 for count in kept]
    for hook in hooks:
        hook.remove()
    assert torch.equal(*answers) and max(steps) > 1


@torch.no_grad()
@pytest.mark.parametrize("skip_layers", [(0,), (-1,)])
@pytest.mark.parametrize("empty", ["reset", "crop"])
def test_the_first_call_after_an_emptied_cache_is_none_of_drafts(empty, skip_layers):
    """Layers agree on the rows of a call of 2 to 16 tokens: those of a prompt, not of a step with drafts."""
    model = build("llama")
    model.set_attn_implementation("turboquant")
    ids = torch.randint(3, VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
    cache = TurboQuantCache(model.config, max_cache_len=200, skip_layers=skip_layers)
    cache.activate_past_recording()
    model(ids, **as_input(cache))
    cache.reset() if empty == "reset" else cache.crop(-40)
    found = model(ids[:, :5], **as_input(cache)).logits
    torch.testing.assert_close(found, model(ids[:, :5], use_cache=False).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not hasattr(cache_utils, BOTH), reason="transformers lacks it")
def test_layers_whose_keys_transformers_keeps_are_refused():
    """Convolutions beside keys, preallocated (Inkling): transformers' `crop` shortens the convolution states only."""
    cache = TurboQuantCache(llama_config(2), max_cache_len=64)
    cache.layers[1] = getattr(cache_utils, BOTH)(64)
    cache.activate_past_recording()
    for index in range(2):
        cache.update(*states(1, 2, tokens=9), index)
    with pytest.raises(ValueError, match=f"layer 1, a {BOTH}: .* none of its keys"):
        cache.crop(-2)
    assert lengths(cache) == [9, 9]


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 400}, {"skip_layers": (0, 1)}], ids=str)
def test_layers_that_the_model_does_not_have_are_not_taken_for_interrupted(options):
    """A model that was cut off, or whose last layers have no attention: `crop` does what `DynamicCache` does."""
    model = build("llama", num_hidden_layers=4)
    model.set_attn_implementation("turboquant")
    model.model.layers = model.model.layers[:2]
    ids = torch.randint(3, VOCAB, (1, 40), generator=torch.Generator().manual_seed(0)).repeat(1, 5)
    cache, answers = TurboQuantCache(model.config, "k8v4", **options), []
    model(ids, **as_input(cache))
    for tokens in (-20, 0, -3):
        cache.crop(tokens)
        model(ids[:, :1], **as_input(cache))
    assert lengths(cache) == [180, 180, 0, 0]
    for candidates in (None, 4):
        cache = TurboQuantCache(model.config, "k8v4", **options)
        generate = dict(max_new_tokens=12, do_sample=False, **as_input(cache), disable_compile=True)
        answers.append(model.generate(ids, **generate, prompt_lookup_num_tokens=candidates))
    assert torch.equal(*answers)


@kinds
def test_a_first_call_that_an_exception_ended_is_taken_back_or_named(options):
    cache = TurboQuantCache(llama_config(3), **options)
    for crop, held in ((0, [0, 0, 0]), (-20, [280, 280, 0])):
        for layer in range(2):
            cache.update(*states(layer, 2, tokens=300), layer)
        cache.crop(crop)
        assert lengths(cache) == held
    for layer in range(2):
        cache.update(*states(layer, 2, tokens=20), layer)
    with pytest.raises(ValueError, match="Layer 2 held no tokens .* Make a new cache, and pass the whole"):
        cache.update(*states(2, 2, tokens=20), 2)
    if "skip_layers" not in options:  # transformers 5.17 keeps the rows of its layers
        cache.reset()
        for layer in range(3):
            cache.update(*states(layer, 2, tokens=20), layer)
        assert lengths(cache) == [20, 20, 20]
