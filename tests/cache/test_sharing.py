"""Layers that read the keys of others (Gemma 3n, Gemma 4), on the device of those or elsewhere."""

import copy
import io
import pickle

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import KVSharingDict

from tests.support.helpers import every_pair
from tests.support.tiny_models import build, token_ids
from tq_hf import TurboQuantCache, TurboQuantLayer
from tq_hf.compat import as_input


def logits(model, cache) -> torch.Tensor:
    """Of a prompt and two steps, `[1, V]`."""
    ids = token_ids(1, 40)
    for tokens in (ids, ids[:, :1], ids[:, 1:2]):
        out = model(tokens, **as_input(cache)).logits[:, -1]
    return out


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "on another device"])
@pytest.mark.parametrize("preallocated", [None, 50])
def test_layers_that_share_keys_read_the_packed_store(preallocated, elsewhere, monkeypatch):
    """The handle of a layer's keys is good for every layer that attends to them: nobody needs the states. Readers that
    live elsewhere get them."""
    read, update, given = KVSharingDict.__getitem__, TurboQuantLayer.update, []
    if elsewhere:  # what accelerate's `.to(device)` does there: tensors without attributes
        monkeypatch.setattr(KVSharingDict, "__getitem__", lambda self, key: tuple(x.clone() for x in read(self, key)))
    model = build("gemma3n", attention="sdpa")
    expected = logits(model, DynamicCache(config=model.config))
    model.set_attn_implementation("turboquant")
    monkeypatch.setattr(TurboQuantLayer, "update", lambda *args, **more: given.append(update(*args)) or given[-1])
    cache = TurboQuantCache(model.config, residual_length=10**6, max_cache_len=preallocated)
    torch.testing.assert_close(logits(model, cache), expected, atol=1e-4, rtol=1e-4)
    assert any(states._handle.touched for states in given[-1]) == elsewhere


def _of_layers(cache):
    copied = copy.copy(cache)
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    return copied


def _of_tensors(cache):
    copied = _of_layers(cache)
    for layer in copied.layers:
        if getattr(layer, "keys", None) is not None:
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    return copied


def _in_a_list(cache):
    branch = DynamicCache()
    branch.layers = copy.copy([copy.copy(layer) for layer in cache.layers])
    return branch


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "options", "fork"),
    every_pair(
        ("llama", "gemma3", "deepseek_v3"),
        ({}, {"max_cache_len": 400}, {"skip_layers": (0,)}),
        (copy.copy, _of_layers, _in_a_list, _of_tensors),
    ),
)
def test_a_shallow_copy_has_rows_of_its_own(name, options, fork):
    """Branches of a prompt: layers of transformers' `DynamicCache` replace their tensors, these write in place."""
    model = build(name, attention="turboquant")
    tokens = token_ids(1, 312)
    caches = [TurboQuantCache(model.config, **options) for _ in range(2)]
    for cache in caches:
        model(tokens[:, :300], **as_input(cache))
    branch = fork(caches[0])
    for step in tokens[:, 306:].split(1, dim=1):  # only the branch reads them
        model(step, **as_input(branch))
    found, expected = (
        [model(step, **as_input(cache)).logits for step in tokens[:, 300:306].split(1, dim=1)] for cache in caches
    )
    assert caches[0].get_seq_length() == branch.get_seq_length() == 306
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=0, atol=0)


def test_a_layer_is_not_pickled_and_a_batch_is_not_expanded():
    model = build("llama")
    cache = TurboQuantCache(model.config)
    model(torch.arange(3, 12)[None], **as_input(cache))
    with pytest.raises(pickle.PicklingError, match=r"A layer of a TurboQuantCache.*`cache.save\(path, model\)`"):
        torch.save(cache.layers, io.BytesIO())
    layer = cache.layers[0]
    with pytest.raises(ValueError, match=r"batch size 1.* batch size 4. Repeat .* `cache.batch_repeat_interleave`"):
        layer.keys, layer.values = (x.expand(4, -1, -1, -1) for x in (layer.keys, layer.values))
    assert layer.batch_size == 1
