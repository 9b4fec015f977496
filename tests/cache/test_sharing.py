"""Layers that read the keys of others (Gemma 3n, Gemma 4), on the device of those or elsewhere."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import KVSharingDict

from tests.support.tiny_models import VOCAB, build
from tq_hf import TurboQuantCache, TurboQuantLayer
from tq_hf.compat import as_input


def logits(model, cache) -> torch.Tensor:
    """Of a prompt and two steps, `[1, V]`."""
    ids = torch.randint(3, VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
    for tokens in (ids, ids[:, :1], ids[:, 1:2]):
        out = model(tokens, **as_input(cache)).logits[:, -1]
    return out


@pytest.mark.parametrize("preallocated", [None, 50])
def test_layers_that_share_keys_read_them_on_another_device_too(preallocated, monkeypatch):
    model = build("gemma3n")
    read = KVSharingDict.__getitem__
    # What accelerate's `.to(device)` does where the readers live elsewhere: tensors without attributes.
    monkeypatch.setattr(KVSharingDict, "__getitem__", lambda self, key: tuple(x.clone() for x in read(self, key)))
    model.set_attn_implementation("sdpa")
    expected = logits(model, DynamicCache(config=model.config))
    model.set_attn_implementation("turboquant")
    cache = TurboQuantCache(model.config, residual_length=10**6, max_cache_len=preallocated)
    torch.testing.assert_close(logits(model, cache), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("preallocated", [None, 50])
def test_layers_that_share_keys_read_the_packed_store(preallocated, monkeypatch):
    """The handle of a layer's keys is good for every layer that attends to them: nobody needs the states."""
    model = build("gemma3n")
    model.set_attn_implementation("sdpa")
    expected = logits(model, DynamicCache(config=model.config))
    model.set_attn_implementation("turboquant")
    given, update = [], TurboQuantLayer.update
    monkeypatch.setattr(TurboQuantLayer, "update", lambda *args, **more: given.append(update(*args)) or given[-1])
    cache = TurboQuantCache(model.config, residual_length=10**6, max_cache_len=preallocated)
    torch.testing.assert_close(logits(model, cache), expected, atol=1e-4, rtol=1e-4)
    assert not any(states._handle.touched for states in given[-1])
