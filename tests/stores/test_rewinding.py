"""A cache that is rewound many times, or whose rows move: what is packed is not quantized again and again. What a
decode step of several tokens takes back was never there."""

from __future__ import annotations

import copy
from itertools import count, product

import pytest
import torch

import tq_hf.layers.advice
from tests.support.helpers import assert_same, every_pair, llama_config, quick_of, relative_error, rows, states
from tests.support.recorded_graph import RecordedGraph
from tq_hf import TurboQuantCache, TurboQuantConfig
from tq_hf.layers import dense as dense_module
from tq_hf.layers.compressed import TurboQuantLayer
from tq_hf.layers.dense import PreallocatedLayer
from tq_hf.layers.rollback import take_back
from tq_hf.stores import store as store_module

SEEDS = count()
CODES = ("2bit_nc", "4bit_nc", "k8v4")
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


@pytest.mark.parametrize(("preset", "room", "at_once"), every_pair(CODES, (None, 1024), (True, False)))
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


@pytest.mark.parametrize(("preset", "room", "kept"), every_pair(CODES, (None, 1024), (0, 4, 132)))
def test_blocks_that_move_keep_their_codes(preset, room, kept, monkeypatch):
    """A window that slides by 128 rows at a time, and keeps some first rows."""
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


DIM, LENGTH, ROOM = 32, 300, 340


def exported(layer: TurboQuantLayer) -> tuple[list[int], list[torch.Tensor]]:
    """Counts and tensors of a layer, once blocks that are encoded have no dense rows."""
    counts, tensors = layer.store.export()
    counts, dropped = counts.without_encoded_rows(), counts.pending * 128
    return list(counts), [x[:, :, dropped:] if name.startswith("residual") else x for name, x in tensors.items()]


@pytest.mark.parametrize(
    ("back", "residual", "kept"),
    quick_of(
        product(("take_back", "crop"), (0, 5, 128), (1, 5, "mixed")),
        *[("take_back", 0, "mixed"), ("take_back", 5, 1), ("take_back", 0, 5)],
        *[("crop", 128, 5), ("crop", 128, "mixed")],
    ),
)
def test_tokens_that_are_taken_back_were_never_there(residual: int, kept: int | str, back: str) -> None:
    """Bit for bit, with a step of 5 tokens at every position of a block, and 0 to 4 of them taken back."""
    config = TurboQuantConfig(residual_length=residual)
    tokens, drafts = states(0, 1, 2, ROOM, DIM), states(1, 1, 2, ROOM, DIM)
    layers = [TurboQuantLayer(config, ROOM) for _ in range(2)]
    for layer in layers:
        layer.activate_past_recording()
        layer.update(*rows(tokens, 0, 2))  # fewer than there are sinks
    plain, assisted = layers
    length = 2
    while length < LENGTH:
        keep = kept if isinstance(kept, int) else 1 + length % 5
        new = [
            torch.cat([own[:, :, length : length + keep], draft[:, :, keep:5]], 2)
            for own, draft in zip(tokens, drafts, strict=True)
        ]
        assisted.update(*new)
        if back == "crop":
            assisted.crop(keep - 5)
        else:
            take_back([assisted], torch.tensor([5 - keep]))
        for token in range(length, length + keep):
            plain.update(*rows(tokens, token, token + 1))
        length += keep
        assert int(assisted.get_seq_length()) == length
        (counts, tensors), (expected, others) = exported(assisted), exported(plain)
        assert counts == expected, length
        assert all(torch.equal(x, y) for x, y in zip(tensors, others, strict=True)), length


def test_a_layer_that_is_not_compressed_takes_tokens_back() -> None:
    layer, tokens = PreallocatedLayer(64), states(0, 1, 2, 64, DIM)
    layer.activate_past_recording()
    layer.update(*rows(tokens, 0, 20))
    keys, _ = layer.update(*rows(tokens, 20, 25))
    assert keys.shape[2] == 64 and layer.get_mask_sizes(5) == (64, 0)
    take_back([layer], torch.tensor([3]))
    assert int(layer.get_seq_length()) == 22
    layer.update(*rows(tokens, 22, 30))
    assert torch.equal(layer.keys[:, :, :30], tokens[0][:, :, :30])


@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_a_step_returns_as_many_rows_as_its_mask_has_columns(tokens: int) -> None:
    config = TurboQuantConfig(residual_length=5)
    for layer in (TurboQuantLayer(config, ROOM), PreallocatedLayer(ROOM)):
        pair = states(0, 1, 2, 60, DIM)
        layer.activate_past_recording()
        assert layer.get_mask_sizes(20) == (20, 0)
        layer.update(*rows(pair, 0, 20))
        columns, _ = layer.get_mask_sizes(tokens)
        keys, values = layer.update(*rows(pair, 20, 20 + tokens))
        assert keys.shape[2] == values.shape[2] == columns == ROOM
        columns, _ = layer.get_mask_sizes(17)
        keys, _ = layer.update(*rows(pair, 40, 57))
        assert keys.shape[2] == columns == 37 + tokens


def test_a_step_that_does_not_fit_changes_nothing() -> None:
    layer, pair = TurboQuantLayer(TurboQuantConfig(), 24), states(0, 1, 2, 30, DIM)
    layer.activate_past_recording()
    layer.update(*rows(pair, 0, 20))
    with pytest.raises(ValueError, match="Appending 5 tokens to the 20"):
        layer.update(*rows(pair, 20, 25))
    assert int(layer.get_seq_length()) == 20
    layer.update(*rows(pair, 20, 24))
    assert int(layer.get_seq_length()) == 24


def test_a_captured_step_that_is_not_compiled_reads_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler may give up, after too many shapes: the host does not know the count then, and may not read it."""
    pair = states(0, 1, 2, 60, DIM)
    for layer in (TurboQuantLayer(TurboQuantConfig(), ROOM), PreallocatedLayer(ROOM)):
        layer.activate_past_recording()
        layer.update(*rows(pair, 0, 18))
        layer.update(*rows(pair, 18, 20))
        take_back([layer], torch.tensor(2))  # after which the host does not know the count
        for room in (store_module, dense_module):
            monkeypatch.setattr(room, "is_capturing", lambda: True)
        with RecordedGraph():  # which refuses reads
            if isinstance(layer, TurboQuantLayer):
                layer.store.append(*rows(pair, 18, 23))
            else:
                layer.update(*rows(pair, 18, 23))
        monkeypatch.undo()
        assert int(layer.get_seq_length()) == 23
