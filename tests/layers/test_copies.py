"""Writing into the keys and values that layers answer with: all layers of a cache take it, compressed or not."""

import copy
import io

import pytest
import torch
from transformers import DynamicCache

from tests.support.helpers import (
    assert_same,
    assert_unchanged,
    every_pair,
    llama_config,
    relative_error,
    snapshot,
    states,
)
from tq_hf import TurboQuantCache

TOKENS = 700


def _out(layer):
    values = layer.values
    torch.mul(values, 3, out=values)


def _augmented_view(layer):
    layer.values[:, :, -1] += 2


def _set(layer):
    layer.keys[:, :, 5] = 7
    layer.values[0] = layer.values[1]


def _augmented(layer):
    layer.keys *= 0.5


def _views(layer):
    first, second = layer.keys.unbind(1)
    second.transpose(0, 1)[..., ::2].neg_()
    first.data[:, 10:300].zero_()


def _several(layer):
    keys, values = layer.keys, layer.values
    torch._foreach_add_([keys, values], 1.0)
    keys[:, :, 300:] = 0
    values.copy_(values.flip(1))


WRITES = {
    "setitem": _set,
    "augmented view": _augmented_view,
    "augmented": _augmented,
    "mul_": lambda layer: layer.values.mul_(-2),
    "index_copy_": lambda layer: layer.keys.index_copy_(2, torch.tensor([3, 400]), torch.ones(2, 2, 2, 16)),
    "masked_fill_": lambda layer: layer.values.masked_fill_(layer.values > 1, 0),
    "out": _out,
    "views": _views,
    "several": _several,
}
writes = pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
limits = pytest.mark.parametrize("limit", [None, 900], ids=["growing", "preallocated"])


def filled(kind=TurboQuantCache, *args, **options):
    cache = kind(llama_config(), *args, **options) if kind is TurboQuantCache else kind(config=llama_config())
    for layer in range(2):
        cache.update(*states(layer, 2, tokens=TOKENS), layer)
    return cache


@pytest.mark.parametrize(
    ("write", "options", "mode"),
    every_pair(
        WRITES.values(),
        ({"residual_length": 10**6}, {"residual_length": 10**6, "max_cache_len": 900}, {"skip_layers": (0,)}),
        (torch.no_grad, torch.inference_mode, torch.enable_grad),
    ),
)
def test_dense_rows_are_written_to_as_those_of_a_dynamic_cache(write, options, mode):
    cache, expected = filled(**options), filled(DynamicCache)
    for each in (cache, expected):
        with mode():
            write(each.layers[0])
            each.update(*states(9, 2, tokens=1), 0)
            each.layers[0].values[:, :, -2:] *= 2
            each.update(*states(8, 2, tokens=20), 0)
    ours, theirs = (each.layers[0] for each in (cache, expected))
    assert_same((ours.keys, ours.values), (theirs.keys, theirs.values))


@writes
@limits
def test_packed_rows_are_written_to_and_blocks_that_are_not_keep_their_codes(write, limit):
    cache, expected = filled(TurboQuantCache, "k8v4", max_cache_len=limit), filled(DynamicCache)
    layer, right = cache.layers[0], expected.layers[0]
    before = {name: tensor.clone() for name, tensor in layer.store.export()[1].items()}
    held = layer.keys.clone(), layer.values.clone()
    for each in (layer, right):
        write(each)
    cache.update(*states(9, 2, tokens=1), 0)
    expected.update(*states(9, 2, tokens=1), 0)
    assert relative_error(layer.keys, right.keys) < 0.03 and relative_error(layer.values, right.values) < 0.2
    now = layer.store.export()[1]
    for block in range(4):
        rows = slice(4 + block * 128, 132 + block * 128)
        for name, old, new in zip(("key_words", "value_words"), held, (layer.keys, layer.values), strict=True):
            if torch.equal(old[:, :, rows], new[:, :, rows]):
                assert torch.equal(before[name][:, :, block], now[name][:, :, block])
    assert write is not _augmented_view or torch.equal(before["value_words"], now["value_words"])


CHANGES = {
    "update": lambda cache: cache.update(*states(9, 2, tokens=1), 0),
    "crop and update": lambda cache: (cache.crop(-1), cache.update(*states(9, 2, tokens=1), 0)),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1, 0])),
    "reset": lambda cache: (cache.reset(), cache.update(*states(9, 2, tokens=TOKENS), 0)),
    "write": lambda cache: cache.layers[0].keys.neg_(),
    "assignment": lambda cache: [setattr(cache.layers[0], name, states(9, 2)[0]) for name in ("keys", "values")],
}


@limits
@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_copy_of_what_the_layer_held_before_it_changed_refuses_writes(change, limit):
    cache = filled(max_cache_len=limit)
    stale = cache.layers[0].keys
    view = stale[:, :, 3]
    change(cache)
    before = snapshot(cache.layers[0].store)
    for each in (stale, view):
        with pytest.raises(ValueError, match=r"`keys` .* written to in place.*Read `layer.keys` again.*assign"):
            each.zero_()
    assert_unchanged(cache.layers[0].store, before)


@limits
def test_what_is_made_of_a_copy_is_of_the_caller(limit):
    layer = filled(max_cache_len=limit).layers[0]
    before = snapshot(layer.store)
    saved = io.BytesIO()
    torch.save(layer.keys, saved)
    saved.seek(0)
    made = [layer.keys.clone(), layer.keys + 0, copy.deepcopy(layer.keys), torch.load(saved), layer.keys.flip(2)]
    for tensor in made:
        assert type(tensor) is torch.Tensor
        tensor.zero_()
    assert_unchanged(layer.store, before)


@limits
def test_a_write_that_does_not_fit_changes_nothing(limit):
    layer = filled(max_cache_len=limit).layers[0]
    before = snapshot(layer.store)
    with pytest.raises(ValueError, match="must both have the shape"):
        layer.keys.unsqueeze_(0)
    assert_unchanged(layer.store, before)


def test_a_compiled_function_reads_a_copy():
    layer = filled().layers[0]
    compiled = torch.compile(lambda keys: keys.square().sum(), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(layer.keys), layer.keys.square().sum())


@limits
@pytest.mark.parametrize("name", ["keys", "values"])
def test_half_of_an_assignment_of_the_tokens_held_is_one_of_that_half(name, limit):
    cache, expected = (filled(max_cache_len=limit) for _ in range(2))
    for each in (cache, expected):
        layer = each.layers[0]
        setattr(layer, name, getattr(layer, name) * 2)
    other = "values" if name == "keys" else "keys"
    setattr(layer, other, getattr(layer, other))
    for each in (cache, expected):
        each.update(*states(9, 2, tokens=20), 0)
    ours, theirs = (each.layers[0] for each in (cache, expected))
    assert_same((ours.keys, ours.values), (theirs.keys, theirs.values))
