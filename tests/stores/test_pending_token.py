"""The newest token of a preallocated store waits for the attention that reads it, and is appended once."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch
from tq_kernels.types import AttentionOptions

from tests.support.helpers import all_packed, assert_same, concatenated, rows, states
from tq_hf.ops import dispatch
from tq_hf.stores import graph_ops
from tq_hf.stores.preallocated import PreallocatedStore
from tq_hf.tensors.layer import DeviceCounts, View

PAIR = states(0, tokens=30)
ROOM = 300
FIRST = torch.tensor([0])


def store_of(tokens: int) -> PreallocatedStore:
    """A store that holds the first of PAIR."""
    store = PreallocatedStore.allocate(all_packed(), *PAIR, ROOM)
    store.append(*rows(PAIR, 0, tokens))
    store.encode_deferred()
    return store


def step(store: PreallocatedStore, seed: int = 1) -> View:
    view = store.append(*states(seed, tokens=1))
    assert isinstance(view.counts, DeviceCounts)
    assert view.pending.states is not None and store.counts.length == view.past_length
    return view


def attend(view: View) -> torch.Tensor:
    return graph_ops.attend_token(torch.ones(1, 4, 1, 16), view, None, AttentionOptions(0.3))


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.length,
        lambda store: store.state,
        lambda store: store.view(),
        lambda store: store.export(),
        lambda store: store.by_kind(),
        lambda store: store.map(torch.clone),
        lambda store: store.reorder(FIRST),
        lambda store: deepcopy(store),
        lambda store: pickle.loads(pickle.dumps(store)),
    ],
    ids=["length", "state", "view", "export", "by_kind", "map", "reorder", "deepcopy", "pickle"],
)
def test_whoever_asks_first_finds_it(ask) -> None:
    store = store_of(30)
    view = step(store)
    ask(store)
    assert view.pending.states is None and store.counts.length == 31
    assert_same(dispatch.dense(store.view()), concatenated(PAIR, states(1, tokens=1)))
    attend(view)
    assert store.length == 31, "attention that comes later does not append it again"


def test_tokens_that_nobody_reads_are_appended_one_after_the_other() -> None:
    store = store_of(20)
    for i in range(20, 30):
        store.append(*rows(PAIR, i, i + 1))
    assert_same(dispatch.dense(store.view()), PAIR)


def test_a_long_call_after_a_step_comes_after_its_token() -> None:
    store = store_of(30)
    step(store)
    store.append(*states(2, tokens=5))
    assert_same(dispatch.dense(store.view()), concatenated(PAIR, states(1, tokens=1), states(2, tokens=5)))


def test_attention_appends_it_once_whoever_reads_the_view_again() -> None:
    store = store_of(30)
    view = step(store)
    first = attend(view)
    assert store.counts.length == 31
    assert torch.equal(attend(view), first)
    keys, values = graph_ops.dense(view)
    assert_same(rows((keys, values), 0, 31), concatenated(PAIR, states(1, tokens=1)))
    assert store.length == 31


def test_dequantized_states_have_it() -> None:
    store = store_of(30)
    assert_same(rows(graph_ops.dense(step(store)), 0, 31), concatenated(PAIR, states(1, tokens=1)))
    assert store.counts.length == 31


def test_a_reset_forgets_it() -> None:
    store = store_of(30)
    step(store)
    store.reset()
    assert store.length == 0
    store.append(*PAIR)
    assert_same(dispatch.dense(store.view()), PAIR)


def test_a_crop_removes_it() -> None:
    store = store_of(30)
    step(store)
    store.crop(1)
    assert_same(dispatch.dense(store.view()), PAIR)


@pytest.mark.parametrize("failing", ["append_token", "on_host"], ids=["before the append", "after it"])
def test_attention_that_fails_neither_loses_nor_repeats_it(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(30)
    view = step(store)

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(dispatch, failing, fail)
        with pytest.raises(RuntimeError, match="no memory"):
            attend(view)
    assert store.length == 31
    assert_same(dispatch.dense(store.view()), concatenated(PAIR, states(1, tokens=1)))
