"""The newest token of a store waits for the attention that reads it, and is written once."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from tq_kernels.types import AttentionOptions

from tests.support.helpers import all_packed, assert_same, concatenated, filled, rows, states
from tests.support.store_cases import rooms, shown
from tq_hf.ops import dispatch
from tq_hf.stores import graph_ops
from tq_hf.stores.store import LayerStore
from tq_hf.tensors.layer import Counts, View

PAIR = states(0, tokens=30)
FIRST = torch.tensor([0])


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():  # with them a growing store copies a token at once
        yield


def store_of(tokens: int, room: int | None) -> LayerStore:
    """A store that holds the first of PAIR."""
    return filled(all_packed(), rows(PAIR, 0, tokens), max_cache_len=room)


def step(store: LayerStore, seed: int = 1) -> View:
    past = store.length
    view = store.append(*states(seed, tokens=1))
    assert view.pending is not None and view.pending.states is not None
    assert store.length == past + 1, "it counts"
    assert view.pending.states is not None, "counting it does not write it"
    if store.device_counts is not None:
        assert store.device_counts.length == past
    return view


def attend(view: View) -> torch.Tensor:
    attention = dispatch.attend if isinstance(view.counts, Counts) else graph_ops.attend_token
    return attention(torch.ones(1, 4, 1, 16), view, None, AttentionOptions(0.3))


@rooms
@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.settle(),
        lambda store: store.settle(wait=False),
        lambda store: store.view(),
        lambda store: store.export(),
        lambda store: store.by_kind(),
        lambda store: store.map(torch.clone),
        lambda store: store.reorder(FIRST),
        lambda store: deepcopy(store),
        lambda store: pickle.loads(pickle.dumps(store)),
    ],
    ids=["settle", "settle without counts", "view", "export", "by_kind", "map", "reorder", "deepcopy", "pickle"],
)
def test_whoever_asks_first_finds_it(ask: Callable[[LayerStore], Any], room: int | None) -> None:
    store = store_of(30, room)
    view = step(store)
    answer = ask(store)
    assert view.pending is not None and view.pending.states is None and store.length == 31
    held = concatenated(PAIR, states(1, tokens=1))
    for each in (store, answer) if isinstance(answer, LayerStore) else (store,):
        assert_same(dispatch.dense(each.view()), held)
    attend(view)
    assert store.settle().tokens == 31, "attention that comes later does not append it again"


@rooms
def test_tokens_that_nobody_reads_are_written_one_after_the_other(room: int | None) -> None:
    store = store_of(20, room)
    for i in range(20, 30):
        store.append(*rows(PAIR, i, i + 1))
    assert_same(dispatch.dense(store.view()), PAIR)


@rooms
@pytest.mark.parametrize("read", [attend, shown])
def test_a_view_writes_it_once_whoever_reads_the_view_again(read: Callable[[View], Any], room: int | None) -> None:
    store = store_of(30, room)
    view = step(store)
    first = read(view)
    assert view.pending is not None and view.pending.states is None and store.length == 31
    assert all(torch.equal(a, b) for a, b in zip(first, read(view), strict=True))
    assert_same(shown(view), concatenated(PAIR, states(1, tokens=1)))
    assert store.settle().tokens == 31


def test_a_reset_forgets_it() -> None:
    store = store_of(30, 300)
    step(store)
    store.reset()
    assert store.length == 0 and store.settle() == (0, 0, 0, 0)
    store.append(*PAIR)
    assert_same(dispatch.dense(store.view()), PAIR)


@rooms
def test_one_that_was_cropped_does_not_come_back(room: int | None) -> None:
    store = store_of(30, room)
    step(store)
    store.crop(1)
    assert_same(dispatch.dense(store.view()), PAIR)
    step(store, 2)
    assert_same(dispatch.dense(store.view()), concatenated(PAIR, states(2, tokens=1)))
    step(store, 3)
    store.crop(2)
    assert_same(dispatch.dense(store.view()), PAIR)


@pytest.mark.parametrize("failing", ["append_token", "on_host"], ids=["before the append", "after it"])
def test_attention_that_fails_neither_loses_nor_repeats_it(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(30, 300)
    view = step(store)

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(dispatch, failing, fail)
        with pytest.raises(RuntimeError, match="no memory"):
            attend(view)
    assert store.length == 31
    assert_same(dispatch.dense(store.view()), concatenated(PAIR, states(1, tokens=1)))
