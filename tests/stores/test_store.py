"""One layer's store, growing or preallocated: what it holds depends on the tokens alone, what it shows is exact where
it promises to be."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.helpers import (
    BLOCK,
    all_packed,
    assert_same,
    assert_unchanged,
    concatenated,
    dequantized,
    encoded,
    filled,
    packed_tensors,
    residual_tensors,
    rows,
    snapshot,
    states,
)
from tests.support.store_cases import SIZES, rooms, shown
from tq_hf import TurboQuantConfig
from tq_hf.ops import dispatch
from tq_hf.stores import sizes
from tq_hf.stores.assigned import assign
from tq_hf.stores.store import LayerStore


class Expected:
    """What a store must hold, from its documentation: all tokens, and how many blocks of them are packed. The ring of a
    preallocated store has `ring_rows` rows for ever."""

    def __init__(self, config: TurboQuantConfig, like, ring_rows: int | None) -> None:
        self.config, self.ring_rows = config, ring_rows
        self.tokens = rows(like, 0, 0)
        self.settled = self.pending = 0

    @property
    def length(self) -> int:
        return self.tokens[0].shape[2]

    @property
    def sinks(self) -> int:
        return min(self.config.sink_tokens, self.length)

    def due(self, length: int) -> int:
        body = length - self.config.sink_tokens - self.config.residual_length
        return max(0, max(0, body) // BLOCK - self.settled)

    def packed(self, blocks: int):
        return encoded(self.config, *rows(self.tokens, self.sinks, self.sinks + blocks * BLOCK))

    def read(self, blocks: int):
        """All tokens, those of the first packed blocks as they come out of them."""
        end = self.sinks + blocks * BLOCK
        packed = dequantized(self.config, self.packed(blocks), like=self.tokens)
        return concatenated(rows(self.tokens, 0, self.sinks), packed, rows(self.tokens, end))

    def append(self, new):
        """Take in new tokens; returns what their queries must see."""
        self.settled, self.pending = self.settled + self.pending, 0
        short = 0 < self.length and new[0].shape[2] <= sizes.SHORT_CALL
        self.tokens = concatenated(self.tokens, new)
        seen = self.read(self.settled)
        due = self.due(self.length)
        fits = self.ring_rows is None or self.length - self.sinks - self.settled * BLOCK <= self.ring_rows
        if short and fits:
            self.pending = due
        else:
            self.settled += due
        return seen

    def crop(self, tokens: int) -> None:
        length, sinks = max(0, self.length - tokens), self.sinks
        if length >= sinks + self.settled * BLOCK:
            self.pending = min(self.pending, self.due(length))
        else:
            kept = max(0, length - sinks) // BLOCK
            cut = sinks + kept * BLOCK  # blocks before it keep their bits, rows after it come out of theirs
            self.tokens = concatenated(rows(self.tokens, 0, cut), rows(self.read(self.settled), cut))
            self.settled, self.pending = kept, 0
        self.tokens = rows(self.tokens, 0, length)


def check(store: LayerStore, expected: Expected) -> None:
    """The store holds what is expected, bit for bit."""
    sinks, settled, pending = expected.sinks, expected.settled, expected.pending
    assert store.length == expected.length
    counts = store.settle()
    assert (counts.tokens, counts.sinks) == (expected.length, sinks) and store.length == expected.length
    assert counts.blocks + counts.pending == settled + pending
    assert_same(store.tensors.sinks(sinks), rows(expected.tokens, 0, sinks))
    assert_same(residual_tensors(store), rows(expected.tokens, sinks + (settled + pending) * BLOCK))
    for name, tensor in expected.packed(settled + pending).tensors().items():
        assert torch.equal(packed_tensors(store)[name], tensor), name


APPEND = st.tuples(st.just("append"), SIZES)
STEP = st.tuples(st.just("append"), st.just(1))
CALLS = st.one_of(
    *[APPEND] * 2,
    *[STEP] * 6,
    st.tuples(st.just("crop"), st.one_of(st.integers(0, 12), SIZES)),
    st.tuples(st.sampled_from(["select", "reorder"]), st.lists(st.integers(0, 5), min_size=1, max_size=3)),
    st.tuples(st.just("read"), st.none()),
    st.tuples(st.just("assign"), st.integers(0, 12)),
    st.tuples(st.just("save"), st.none()),
)


@settings(max_examples=80)
@given(
    bits=st.sampled_from([(4, 4), (8, 3), (2, 2), (3, 2)]),
    residual=st.sampled_from([0, 1, 100, 128, 200]),
    sinks=st.sampled_from([0, 1, 4, 130]),
    prompt=SIZES,
    calls=st.lists(CALLS, min_size=3, max_size=12),
)
def check_any_sequence_of_calls(room, bits, residual, sinks, prompt, calls):
    config = TurboQuantConfig(key_bits=bits[0], value_bits=bits[1], residual_length=residual, sink_tokens=sinks)
    shape = dict(heads=1, dim=8, value_dim=12)
    store = LayerStore.allocate(config, *states(0, 2, **shape), room)
    expected = Expected(config, states(0, 2, **shape), room and store.tensors.ring_rows)
    for seed, (call, argument) in enumerate([("append", prompt), *calls]):
        batch = store.tensors.batch_size
        if call == "append":
            new = states(seed, batch, tokens=argument, **shape)
            with torch.set_grad_enabled(seed % 4 == 3):  # which takes other paths
                view = store.append(*new)
            seen = expected.append(new)
            if argument > 1 or seed % 3:  # else the token is pending when the next call comes
                assert_same(shown(view), seen)
        elif call == "crop":
            store.crop(argument)
            expected.crop(argument)
        elif call == "assign":  # rows cut off at the end
            keys, values = rows(dispatch.dense(store.view()), 0, max(0, expected.length - argument))
            assign(store, keys, values)
            expected.crop(argument)
        elif call in ("select", "reorder"):
            if call == "reorder":
                argument = (argument * batch)[:batch]
            indices = torch.tensor(argument) % batch
            if call == "reorder":
                store.reorder(indices)
            else:
                store = store.map(lambda tensor, indices=indices: tensor[indices])
            expected.tokens = (expected.tokens[0][indices], expected.tokens[1][indices])
        elif call == "save":
            saved, store = store.export(), LayerStore.allocate(config, *rows(expected.tokens, 0, 0), room)
            store.restore(*saved)
        else:
            assert_same(dispatch.dense(store.view()), expected.read(expected.settled + expected.pending))
        if seed % 2:  # else the next call finds what this one left for later
            check(store, expected)
    check(store, expected)


@pytest.mark.parametrize(("room", "step"), [(None, "_append_token"), (6000, "_append_on_device")])
def test_any_sequence_of_calls_holds_and_shows_what_it_should(room, step):
    original = getattr(LayerStore, step)
    with mock.patch.object(LayerStore, step, autospec=True, side_effect=original) as token:
        check_any_sequence_of_calls(room)
    assert token.call_count > 40, "the path of decoding is hardly taken"


@rooms
def test_reading_changes_neither_the_store_nor_a_view_in_use(room):
    """`.keys` may be read between `update` and attention, and before an assisted decoder crops."""
    pair = states(5, tokens=300, dim=8)
    store = filled(all_packed(), rows(pair, 0, 250), max_cache_len=room)
    view = store.append(*rows(pair, 250, 256))
    assert store.counts.pending == 1
    seen, before = [part.clone() for part in shown(view)], snapshot(store)
    for part in dispatch.dense(store.view()):
        part.fill_(7)
    assert_unchanged(store, before)
    assert_same(shown(view), tuple(seen))


@rooms
@pytest.mark.parametrize("calls", [[300], [290, 10], [1, 299]], ids=str)
def test_the_models_own_tensors_are_not_aliased(calls, room):
    pair = states(7, tokens=300, dim=8)
    store = filled(all_packed(sink_tokens=2), pair, calls, room)
    before = snapshot(store)
    pair[0].fill_(7), pair[1].fill_(7)
    assert_unchanged(store, before)


# Failures


@rooms
def test_a_call_that_fails_after_a_deferred_prompt_leaves_the_prompt(room, monkeypatch):
    """Which is encoded by then: the residual is another one."""
    config, prompt = all_packed(), states(1, tokens=300)
    expected, store = filled(config, prompt), LayerStore.allocate(config, *prompt, room)
    store.append(*prompt, defer=True)
    assert store.is_deferred and store.length == 300
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(store, "_append_tokens", mock.Mock(side_effect=RuntimeError("no memory")))
        store.append(*states(2, tokens=5))
    assert store.length == 300 and store.settle() == expected.counts
    assert_same(dispatch.dense(store.view()), dispatch.dense(expected.view()))


@rooms
@pytest.mark.parametrize("failing", ["store_prompt", "encode"])
@pytest.mark.parametrize(
    "calls, deferred",
    [([300], False), ([300], True), ([100, 300], False), ([100, 300], True), ([259, 1, 200], False)],
    ids=["first", "first, deferred", "later", "later, deferred", "after a pending block"],
)
def test_a_long_call_that_fails_leaves_what_was_held(failing, calls, deferred, room, monkeypatch):
    """And holds the call when it is repeated."""
    config, pair = TurboQuantConfig(residual_length=0), states(0, tokens=sum(calls))
    start = sum(calls[:-1])
    store, alone = LayerStore.allocate(config, *pair, room), filled(config, pair, calls)
    if start:
        store = filled(config, rows(pair, 0, start), calls[:-1], room)
    last = rows(pair, start, sum(calls))
    if deferred:
        store.append(*last, defer=True)
    held, before = None if deferred else store.settle(), (store.is_deferred, store.length, store.tensors)

    def fails(*arguments: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as context, pytest.raises(RuntimeError, match="no memory"):
        context.setattr(dispatch, failing, fails)
        store.encode_deferred() if deferred else store.append(*last)
    assert before == (store.is_deferred, store.length, store.tensors)
    if held is not None:
        now = store.settle()
        assert now == (held if room else held.without_encoded_rows())
    store.encode_deferred() if deferred else store.append(*last)
    assert store.settle() == alone.counts
    assert_same(dispatch.dense(store.view()), dispatch.dense(alone.view()))
