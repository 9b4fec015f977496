"""The newest token of a store waits for the attention that reads it, and is written once. The operators of a
preallocated store keep PyTorch's contract for operators."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from tq_kernels.types import AttentionOptions

from tests.support.helpers import all_packed, assert_same, concatenated, filled, rows, states
from tests.support.store_cases import rooms, shown
from tq_hf import TurboQuantConfig
from tq_hf.ops import dispatch
from tq_hf.stores import graph_ops
from tq_hf.stores.store import LayerStore
from tq_hf.tensors.layer import Counts, View

PAIR = states(0, tokens=30)
FIRST = torch.tensor([0])


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


HEADS, DIM = 2, 32


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_operators_pass_opcheck(masked: bool) -> None:
    config = TurboQuantConfig(residual_length=0, sink_tokens=2)
    pair = states(0, 2, HEADS, 132, DIM)
    store = LayerStore.allocate(config, *pair, 171)
    store.append(*rows(pair, 0, 131))
    view = store.append(*rows(pair, 131))
    step, query = graph_ops._arguments(view), states(1, 2, 2 * HEADS, 1, DIM)[0]
    mask = torch.ones(2, 1, 1, store.max_cache_len, dtype=torch.bool) if masked else None
    torch.library.opcheck(graph_ops._append_token, step)
    torch.library.opcheck(graph_ops._attend_token, (query, *step, mask, None, DIM**-0.5, None, None))
    graph_ops.append_pending_token(view)
    step = graph_ops._arguments(view)
    torch.library.opcheck(graph_ops._attend_token, (query, *step, mask, None, DIM**-0.5, None, None))
    torch.library.opcheck(graph_ops._dense_tokens, (step[1][2:], view.counts.held, *step[2:]))


def test_a_layer_is_made_again_from_its_arguments() -> None:
    pair = states(0, 2, HEADS, 300, DIM, value_dim=16)
    store = LayerStore.allocate(TurboQuantConfig(), *pair, 300)
    arguments = store.tensors.arguments()
    again = type(store.tensors).from_arguments(store.tensors.config_text, arguments)
    assert again.layout == store.layout and again.row == store.tensors.row
    assert all(a is b for a, b in zip(again.arguments(), arguments, strict=True))


def _poisoned(config: TurboQuantConfig, room: int) -> LayerStore:
    """An empty store that holds NaN wherever nothing has been written."""
    store = LayerStore.allocate(config, *states(0, 2, HEADS, 1, DIM, value_dim=16), room)
    for tensor in (store.tensors.rows, store.blocks.key_means):
        tensor.fill_(torch.nan)
    store.blocks.scales.fill_(0x7E007E00)  # two NaN of fp16
    return store


ALL = TurboQuantConfig(sink_tokens=4, residual_length=0)
KEPT = TurboQuantConfig(sink_tokens=4, residual_length=100)


@pytest.mark.parametrize(
    "config, room, before",
    [
        *((ALL, 600, before) for before in (1, 3, 4, 130, 131, 132, 133, 300, 515, 598)),
        *((KEPT, 600, before) for before in (2, 127, 231, 232, 350, 358, 359, 400, 487, 599)),
        *((KEPT, room, room - 1) for room in (2, 4, 5, 132, 171)),
    ],
)
def test_a_step_is_dense_without_a_read_of_the_host(config, room, before, monkeypatch) -> None:
    """At the ends of sinks, blocks and room, with the ring wrapped and not: what a view on the host shows, zeros after
    it, and nothing of rows and blocks that were never written."""
    pair = states(1, 2, HEADS, before + 1, DIM, value_dim=16)
    store = _poisoned(config, room)
    # In two calls: the second one's rows wrap around the end of the ring.
    for start, stop in ((0, before // 2), (before // 2, before)):
        if start < stop:
            store.append(*rows(pair, start, stop))
    view = store.append(*rows(pair, before))
    expected = dispatch.dense(dispatch.on_host(view))  # without a GPU it reads the counts

    def read(*_: object) -> None:
        raise AssertionError("A captured graph cannot read a tensor on the host.")

    for name in ("tolist", "item", "__int__", "__bool__", "__index__", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, read)
    dense = graph_ops.dense(view)
    monkeypatch.undo()
    for states_, on_host in zip(dense, expected, strict=True):
        assert states_.shape[2] == room
        assert torch.equal(states_[:, :, : before + 1], on_host)
        assert not states_[:, :, before + 1 :].any()


def test_states_of_a_long_history_that_was_cropped_do_not_come_back() -> None:
    store = _poisoned(ALL, 600)
    pair = states(1, 2, HEADS, 600, DIM, value_dim=16)
    store.append(*rows(pair, 0, 599))
    store.crop(599 - 10)
    keys, _ = graph_ops.dense(store.append(*rows(pair, 10, 11)))
    torch.testing.assert_close(keys[:, :, :4], pair[0][:, :, :4])
    torch.testing.assert_close(keys[:, :, 10:11], pair[0][:, :, 10:11])
    assert not keys[:, :, 11:].any()


@pytest.mark.parametrize("appends", [True, False])
def test_a_capture_without_a_kernel_is_refused_in_a_sentence(appends, monkeypatch) -> None:
    """On a GPU, reading counts on the host would fail as an operation that is not permitted, and say no more."""
    pair, query = states(0, 2, HEADS, 20, DIM), states(1, 2, HEADS, 1, DIM)[0]
    store = LayerStore.allocate(TurboQuantConfig(), *pair, 64)
    store.append(*rows(pair, 0, 19))
    view = store.append(*rows(pair, 19))
    if not appends:
        graph_ops.append_pending_token(view)
    before = [count.clone() for count in store.device_counts]
    with monkeypatch.context() as captured:
        captured.setattr(torch.cuda, "is_initialized", lambda: True)
        captured.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="keys of 32 channels.*CUDA graph.*`disable_compile=True`"):
            graph_ops.attend_token(query, view, None, AttentionOptions(1.0))
    assert all(torch.equal(*counts) for counts in zip(store.device_counts, before, strict=True))
    assert graph_ops.attend_token(query, view, None, AttentionOptions(1.0)).isfinite().all()
    assert int(store.device_counts.length) == 20


def test_counts_of_a_prompt_that_was_reset_before_it_was_read_are_none() -> None:
    keys, values = states(0, tokens=300)
    store = LayerStore.allocate(TurboQuantConfig(), keys, values, 400, prompt=True)
    for tensor in store.device_counts:  # as memory that nobody filled
        tensor.fill_(7)
    store.append(keys, values, defer=True)
    store.reset()
    assert store.device_counts.length == 0
    assert not store.device_counts.held[:, 0].any(), "or the programs of the append kernel never count to their number"


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_store_that_moves_does_not_read_its_length_on_the_device(tokens, monkeypatch) -> None:
    """As an offloaded layer does around each step."""
    pair = states(0, 2, HEADS, tokens + 1, DIM)
    store = LayerStore.allocate(TurboQuantConfig(), *pair, 64)
    store.append(*rows(pair, 0, tokens))
    moved = store.map(torch.clone)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__int__", None)
        patch.setattr(torch.Tensor, "tolist", None)
        view = moved.append(*rows(pair, tokens))
    assert view.past_length == tokens and moved.length == tokens + 1
