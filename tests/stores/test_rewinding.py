"""A cache that is rewound many times, or whose rows move: what is packed is not quantized again and again."""

from __future__ import annotations

import copy
from itertools import count

import pytest
import torch

import tq_hf.layers.advice
from tests.support.helpers import assert_same, llama_config, relative_error, states
from tq_hf import TurboQuantCache

SEEDS = count()
presets = pytest.mark.parametrize("preset", ["2bit_nc", "4bit_nc", "k8v4"])
rooms = pytest.mark.parametrize("room", [None, 1024], ids=["growing", "preallocated"])


@pytest.fixture(autouse=True)
def seeds(monkeypatch):
    monkeypatch.setitem(globals(), "SEEDS", count(100))


def append(cache, tokens: int, at_once: bool = True) -> None:
    new = states(next(SEEDS), 1, tokens=tokens)
    for part in [new] if at_once else zip(*(x.split(1, dim=2) for x in new), strict=True):
        cache.update(*part, 0)


def filled(preset: str, room: int | None, tokens: int, **options) -> TurboQuantCache:
    cache = TurboQuantCache(llama_config(1), preset, max_cache_len=room, **options)
    append(cache, tokens)
    return cache


def held(cache):
    return cache.layers[0].keys.clone(), cache.layers[0].values.clone()


@presets
@rooms
@pytest.mark.parametrize("at_once", [True, False], ids=["in one call", "by tokens"])
def test_rewinding_many_times_costs_as_much_as_once(preset, room, at_once):
    cache = filled(preset, room, 500)
    append(cache, 300)
    cache.crop(-300)
    expected = held(cache)
    for more in (290, 310) if not at_once else (290, 301, 310, 5, 140, 333):
        append(cache, more, at_once)
        cache.crop(-more)
        assert_same(held(cache), expected)


@rooms
def test_rewinding_within_a_turn_that_is_rewound_costs_nothing_more(room):
    cache = filled("4bit_nc", room, 500)
    append(cache, 300)
    cache.crop(-300)
    outer = held(cache)
    for _ in range(3):
        append(cache, 150)
        append(cache, 300)
        cache.crop(-300)
        inner = held(cache)
        append(cache, 300)
        cache.crop(-300)
        assert_same(held(cache), inner)
        cache.crop(-150)
        assert_same(held(cache), outer)


@rooms
@pytest.mark.parametrize("move", ["copy", "select", "reorder", "offload"])
def test_rows_of_a_cut_block_move_with_the_others(room, move):
    cache = filled("4bit_nc", room, 500)
    append(cache, 300)
    cache.crop(-300)
    expected = held(cache)
    append(cache, 300)
    if move == "copy":
        cache = copy.deepcopy(cache)
    elif move == "select":
        cache.batch_select_indices(torch.tensor([0]))
    elif move == "reorder":
        cache.reorder_cache(torch.tensor([0]))
    else:
        cache.layers[0].offload()
    cache.crop(-300)
    assert_same(held(cache), expected)


@rooms
def test_tokens_that_replaced_others_are_not_taken_for_them(room):
    cache = filled("k8v4", room, 500)
    append(cache, 300)
    cache.crop(-300)  # cuts a block at its row 112
    cache.crop(-100)
    append(cache, 400)
    exact = states(next(SEEDS) - 1, 1, tokens=400)
    cache.crop(-300)
    keys, values = held(cache)
    assert relative_error(keys[:, :, 400:], exact[0][:, :, :100]) < 0.05
    cache.reset()
    append(cache, 600)
    exact = states(next(SEEDS) - 1, 1, tokens=600)
    cache.crop(-101)
    assert relative_error(held(cache)[0], exact[0][:, :, :499]) < 0.05


def test_rows_of_cut_blocks_are_counted_and_few():
    cache, others = filled("4bit_nc", None, 900), filled("4bit_nc", None, 900)
    for cut in (500, 600, 700):
        append(cache, 900 - int(cache.get_seq_length()))
        cache.crop(cut - 900)
    append(cache, 200)
    more = cache.memory_footprint().residual - others.memory_footprint().residual
    assert 0 < more <= 2 * 128 * cache.layers[0].store.layout.dense_bytes * 2 * 2  # two blocks in float32, two heads


@presets
@rooms
@pytest.mark.parametrize("kept", [0, 4, 132], ids="{} first rows stay".format)
def test_blocks_that_move_keep_their_codes(preset, room, kept, monkeypatch):
    """A window that slides by 128 rows at a time."""
    warnings, cache = [], filled(preset, room, 700)
    monkeypatch.setattr(tq_hf.layers.advice.logger, "warning_once", warnings.append)
    layer, slides = cache.layers[0], 128
    for _ in range(6):
        expected = tuple(torch.cat([x[:, :, :kept], x[:, :, kept + slides :]], 2) for x in held(cache))
        layer.keys, layer.values = expected
        assert_same(held(cache), expected)
        append(cache, slides)
    assert not warnings


def test_rows_that_move_by_less_than_a_block_are_named(monkeypatch):
    warnings, cache = [], filled("4bit_nc", None, 700)
    monkeypatch.setattr(tq_hf.layers.advice.logger, "warning_once", warnings.append)
    layer = cache.layers[0]
    for _ in range(6):
        layer.keys, layer.values = (torch.cat([x[:, :, :4], x[:, :, 5:]], 2) for x in held(cache))
        append(cache, 1)
    assert ["Remove multiples of 128 rows at once" in text for text in warnings].count(True) == 1
