"""One layer's store: what it holds depends on the tokens alone, what it shows is exact where it promises to be."""

from __future__ import annotations

import weakref
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
from tests.support.store_cases import CONFIGS, SIZES, configs, gradients
from tq_hf import PRESETS, TurboQuantConfig
from tq_hf.ops import dispatch
from tq_hf.stores import growing as store_module
from tq_hf.stores.growing import GrowingStore


class Expected:
    """What a store must hold, from its documentation: all tokens, and how many blocks of them are packed."""

    def __init__(self, config: TurboQuantConfig, like) -> None:
        self.config = config
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
        short = 0 < self.length and new[0].shape[2] <= store_module.SHORT_CALL
        self.tokens = concatenated(self.tokens, new)
        shown = self.read(self.settled)
        due = self.due(self.length)
        if short:
            self.pending = due
        else:
            self.settled += due
        return shown

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


def check(store: GrowingStore, expected: Expected) -> None:
    """The store holds what is expected, bit for bit."""
    sinks, settled, pending = expected.sinks, expected.settled, expected.pending
    assert (store.length, store.num_sinks) == (expected.length, sinks)
    assert store.num_blocks + store.num_pending == settled + pending
    assert_same(rows(store.tensors.sinks, 0, sinks), rows(expected.tokens, 0, sinks))
    assert_same(residual_tensors(store), rows(expected.tokens, sinks + (settled + pending) * BLOCK))
    for name, tensor in expected.packed(settled + pending).tensors().items():
        assert torch.equal(packed_tensors(store)[name], tensor), name


APPEND = st.tuples(st.just("append"), SIZES)
STEP = st.tuples(st.just("append"), st.just(1))
CALLS = st.one_of(
    APPEND,
    APPEND,
    STEP,
    STEP,
    STEP,
    st.tuples(st.just("crop"), st.one_of(st.integers(0, 12), SIZES)),
    st.tuples(st.just("select"), st.lists(st.integers(0, 5), min_size=1, max_size=3)),
    st.tuples(st.just("read"), st.none()),
)


@settings(max_examples=100)
@given(
    bits=st.sampled_from([(4, 4), (8, 3), (2, 2)]),
    residual=st.sampled_from([0, 1, 100, 128, 200]),
    sinks=st.sampled_from([0, 1, 4, 130]),
    prompt=SIZES,
    calls=st.lists(CALLS, min_size=3, max_size=12),
)
def check_any_sequence_of_calls(bits, residual, sinks, prompt, calls):
    config = TurboQuantConfig(key_bits=bits[0], value_bits=bits[1], residual_length=residual, sink_tokens=sinks)
    shape = dict(heads=1, dim=8, value_dim=12)
    store = GrowingStore.allocate(config, *states(0, 2, **shape))
    expected = Expected(config, states(0, 2, **shape))
    for seed, (call, argument) in enumerate([("append", prompt), *calls]):
        if call == "append":
            new = states(seed, store.tensors.batch_size, tokens=argument, **shape)
            past = expected.length
            view = store.append(*new)
            assert (view.past_length, view.length) == (past, past + argument)
            assert_same(dispatch.dense(view), expected.append(new))
        elif call == "crop":
            store.crop(argument)
            expected.crop(argument)
        elif call == "select":
            indices = torch.tensor(argument) % store.tensors.batch_size
            store = store.map(lambda tensor, indices=indices: tensor[indices])
            expected.tokens = (expected.tokens[0][indices], expected.tokens[1][indices])
        else:
            assert_same(dispatch.dense(store.view()), expected.read(expected.settled + expected.pending))
        check(store, expected)


def test_any_sequence_of_calls_holds_and_shows_what_it_should():
    append_token = GrowingStore._append_token
    with mock.patch.object(GrowingStore, "_append_token", autospec=True, side_effect=append_token) as token:
        check_any_sequence_of_calls()
    assert token.call_count > 100, "the path of decoding is hardly taken"


@settings(max_examples=40)
@given(
    name=st.sampled_from(list(CONFIGS)),
    calls=st.lists(st.one_of(st.integers(1, 5), st.integers(1, 128), st.integers(129, 500)), min_size=1, max_size=8),
)
def test_what_is_held_does_not_depend_on_how_it_was_appended(name, calls):
    pair = states(1, tokens=sum(calls), dim=8)
    split, whole = filled(CONFIGS[name], pair, calls), filled(CONFIGS[name], pair)
    assert split.length == whole.length == sum(calls)
    assert_same(residual_tensors(split), residual_tensors(whole))
    assert_same(rows(split.tensors.sinks, 0, split.num_sinks), rows(whole.tensors.sinks, 0, whole.num_sinks))
    for tensor_name, tensor in packed_tensors(whole).items():
        assert torch.equal(packed_tensors(split)[tensor_name], tensor), tensor_name


@gradients
@configs
def test_decoding_token_by_token_holds_the_same_as_one_prefill(config, recorded):
    pair = states(2, tokens=420, dim=8)
    with torch.set_grad_enabled(recorded):
        steps, whole = filled(config, pair, [1] * 420), filled(config, pair)
    assert_same(residual_tensors(steps), residual_tensors(whole))
    for name, tensor in packed_tensors(whole).items():
        assert torch.equal(packed_tensors(steps)[name], tensor), name


@gradients
@configs
@pytest.mark.parametrize("calls", [[300], [1, 299], [290, 10], [100, 128, 72], [200, 129, 300]])
def test_tokens_of_a_call_are_exact_in_that_call_and_follow_the_past(config, calls, recorded):
    pair = states(3, tokens=sum(calls), dim=8)
    store = GrowingStore.allocate(config, *pair)
    past = 0
    for size in calls:
        before = dispatch.dense(store.view())
        with torch.set_grad_enabled(recorded):
            view = store.append(*rows(pair, past, past + size))
        assert (view.past_length, view.length) == (past, past + size)
        shown = dispatch.dense(view)
        assert_same(rows(shown, past), rows(pair, past, past + size))
        assert_same(rows(shown, 0, past), before)
        past += size


@configs
def test_all_but_complete_old_blocks_stays_exact(config):
    length = 700
    pair = states(4, tokens=length, dim=16)
    read = dispatch.dense(filled(config, pair).view())
    packed = (length - config.sink_tokens - config.residual_length) // BLOCK * BLOCK
    assert_same(rows(read, 0, config.sink_tokens), rows(pair, 0, config.sink_tokens))
    assert_same(rows(read, config.sink_tokens + packed), rows(pair, config.sink_tokens + packed))
    assert not torch.isclose(read[0], pair[0])[:, :, config.sink_tokens : config.sink_tokens + packed].all(-1).any()


def test_reading_changes_neither_the_store_nor_a_view_in_use():
    """`.keys` may be read between `update` and attention, and before an assisted decoder crops."""
    pair = states(5, tokens=300, dim=8)
    store = GrowingStore.allocate(all_packed(), *pair)
    store.append(*rows(pair, 0, 250))
    view = store.append(*rows(pair, 250, 260))
    assert store.num_pending == 1
    shown = [part.clone() for part in dispatch.dense(view)]
    before = snapshot(store)
    dispatch.dense(store.view())
    assert_unchanged(store, before)
    assert_same(dispatch.dense(view), tuple(shown))


def test_what_is_read_does_not_alias_what_is_held():
    pair = states(6, tokens=300, dim=8)
    store = filled(TurboQuantConfig(residual_length=60), pair)
    before = snapshot(store)
    for part in dispatch.dense(store.view()):
        part.fill_(7)
    assert_unchanged(store, before)


@pytest.mark.parametrize("calls", [[300], [290, 10], [1, 299]])
def test_the_models_own_tensors_are_neither_kept_nor_aliased(calls):
    pair = states(7, tokens=300, dim=8)
    store = filled(all_packed(sink_tokens=2), pair, calls)
    before = snapshot(store)
    pair[0].fill_(7), pair[1].fill_(7)
    assert_unchanged(store, before)
    long_call = states(8, tokens=200, dim=8)
    storages = [weakref.ref(part) for part in long_call]
    view = store.append(*long_call)
    del long_call, view
    assert all(ref() is None for ref in storages)


# Crop


@configs
@pytest.mark.parametrize("removed", [0, 1, 20])
def test_crop_within_the_residual_equals_never_having_appended(config, removed):
    pair = states(9, tokens=530, dim=8)
    cropped, straight = filled(config, pair, [500, 10, 20]), filled(config, rows(pair, 0, 530 - removed))
    cropped.crop(removed)
    assert cropped.length == 530 - removed
    more = states(10, tokens=400, dim=8)
    for store in (cropped, straight):
        assert_same(rows(dispatch.dense(store.append(*rows(more, 0, 3))), 530 - removed), rows(more, 0, 3))
        store.append(*rows(more, 3))
    assert_same(residual_tensors(cropped), residual_tensors(straight))
    for name, tensor in packed_tensors(straight).items():
        assert torch.equal(packed_tensors(cropped)[name], tensor), name


def test_crop_of_the_call_that_completed_a_block_is_exact():
    """Assisted decoding: candidates complete a block, which is encoded, and are then rejected."""
    pair = states(11, tokens=300, dim=8)
    store = GrowingStore.allocate(all_packed(), *pair)
    store.append(*rows(pair, 0, 250))
    store.append(*rows(pair, 250, 260))
    assert (store.num_blocks, store.num_pending) == (1, 1)
    store.crop(8)
    assert (store.num_blocks, store.num_pending, store.length) == (1, 0, 252)
    assert_same(rows(dispatch.dense(store.view()), BLOCK), rows(pair, BLOCK, 252))
    store.append(*rows(pair, 252, 300))
    straight = filled(all_packed(), pair)
    assert_same(dispatch.dense(store.view()), dispatch.dense(straight.view()))


def test_crop_that_keeps_a_pending_block_complete_keeps_it_packed():
    pair = states(12, tokens=260, dim=8)
    store = GrowingStore.allocate(all_packed(), *pair)
    store.append(*rows(pair, 0, 250))
    store.append(*rows(pair, 250, 260))
    store.crop(3)
    straight = filled(all_packed(), rows(pair, 0, 257))
    assert_same(dispatch.dense(store.view()), dispatch.dense(straight.view()))
    assert store.num_blocks + store.num_pending == 2


@configs
def test_crop_into_a_packed_block_keeps_survivors_as_they_were_read(config):
    pair = states(13, tokens=700, dim=8)
    store = filled(config, pair)
    read = dispatch.dense(store.view())
    length = config.sink_tokens + BLOCK + 50
    store.crop(700 - length)
    assert (store.length, store.num_blocks, store.residual.count) == (length, 1, 50)
    assert_same(dispatch.dense(store.view()), rows(read, 0, length))
    new = states(14, tokens=9, dim=8)
    assert_same(dispatch.dense(store.append(*new)), concatenated(rows(read, 0, length), new))


@configs
def test_crop_to_the_edge_of_a_block_leaves_the_residual_empty(config):
    pair = states(15, tokens=700, dim=8)
    store = filled(config, pair)
    read = dispatch.dense(store.view())
    length = config.sink_tokens + 2 * BLOCK
    store.crop(700 - length)
    assert (store.length, store.num_blocks, store.residual.count) == (length, 2, 0)
    assert_same(dispatch.dense(store.view()), rows(read, 0, length))


@pytest.mark.parametrize("length", [0, 1, 4, 5])
def test_crop_to_the_sinks_and_below_keeps_the_first_tokens_exact(length):
    pair = states(16, tokens=700, dim=8)
    config = all_packed(sink_tokens=5)
    store = filled(config, pair)
    store.crop(700 - length)
    assert (store.length, store.num_sinks, store.num_blocks, store.residual.count) == (length, length, 0, 0)
    store.append(*rows(pair, length))
    straight = filled(config, pair)
    assert_same(dispatch.dense(store.view()), dispatch.dense(straight.view()))
    for name, tensor in packed_tensors(straight).items():
        assert torch.equal(packed_tensors(store)[name], tensor), name


@pytest.mark.parametrize("tokens", [700, 701, 10**6])
def test_cropping_everything_leaves_a_usable_empty_store(tokens):
    pair = states(17, tokens=700, dim=8)
    store = filled(PRESETS["4bit_nc"], pair)
    store.crop(tokens)
    assert store.length == 0 and store.view().length == 0
    view = store.append(*rows(pair, 0, 200))
    assert_same(dispatch.dense(view), rows(pair, 0, 200))


# Batch operations


@configs
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.index_select(0, torch.tensor([2, 0, 0])),
        lambda x: x.repeat_interleave(2, dim=0),
        lambda x: x[torch.tensor([1])],
    ],
    ids=["reorder", "repeat", "select"],
)
@pytest.mark.parametrize("calls", [[400], [380, 20]], ids=["settled", "pending"])
def test_batch_operations_equal_doing_them_on_the_inputs(config, function, calls):
    pair = states(18, batch=3, tokens=400, dim=8)
    changed = tuple(function(part) for part in pair)
    store, straight = filled(config, pair, calls), filled(config, changed, calls)
    store = store.map(function)
    assert store.tensors.batch_size == straight.tensors.batch_size == changed[0].shape[0]
    new = states(19, batch=changed[0].shape[0], tokens=140, dim=8)
    assert_same(dispatch.dense(store.append(*new)), dispatch.dense(straight.append(*new)))
    assert_same(residual_tensors(store), residual_tensors(straight))
    for name, tensor in packed_tensors(straight).items():
        assert torch.equal(packed_tensors(store)[name], tensor), name


# Refusals


WRONG = {
    "batch size": lambda k, v: (k[:1], v[:1]),
    "number of KV heads": lambda k, v: (k[:, :1], v[:, :1]),
    "key head_dim": lambda k, v: (k[..., :8], v),
    "value head_dim": lambda k, v: (k, v[..., :8]),
    "dtype": lambda k, v: (k.half(), v.half()),
    "device": lambda k, v: (k.to("meta"), v.to("meta")),
    "both to one device": lambda k, v: (k, v.to("meta")),
    "one floating-point dtype": lambda k, v: (k, v.half()),
    "floating-point": lambda k, v: (k.int(), v.int()),
    "agree in batch, heads and tokens": lambda k, v: (k, v[:, :, :-1]),
    "must both have the shape": lambda k, v: (k[0], v[0]),
    "head_dim of 0": lambda k, v: (k[..., :0], v[..., :0]),
}


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize("calls", [[300], [250, 50]], ids=["settled", "pending"])
def test_states_that_do_not_fit_are_refused_and_change_nothing(message, calls):
    store = filled(all_packed(), states(20, batch=2, tokens=300), calls)
    before = snapshot(store)
    with pytest.raises(ValueError, match=message):
        store.append(*WRONG[message](*states(21, batch=2, tokens=5)))
    assert_unchanged(store, before)


@pytest.mark.parametrize("held, more", [(0, 301), (300, 1), (290, 11), (100, 300)])
def test_exceeding_what_was_preallocated_is_refused_before_anything_changes(held, more):
    store = GrowingStore.allocate(all_packed(), *states(22), 300)
    if held:
        store.append(*states(23, tokens=held))
    before = snapshot(store)
    with pytest.raises(ValueError, match=f"{more} tokens.*300.*larger `max_cache_len`"):
        store.append(*states(24, tokens=more))
    assert_unchanged(store, before)
    store.append(*states(25, tokens=300 - held))
    assert store.length == 300


def test_a_call_that_fails_after_a_deferred_prompt_leaves_the_prompt(monkeypatch):
    """Which is encoded by then: the residual is another one."""
    config, prompt = all_packed(), states(1, tokens=300)
    expected, store = filled(config, prompt), GrowingStore.allocate(config, *prompt)
    store.append(*prompt, defer=True)
    assert store.is_deferred
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(store, "_append_tokens", mock.Mock(side_effect=RuntimeError("no memory")))
        store.append(*states(2, tokens=5))
    assert store.length == 300 and store.counts == expected.counts
    assert_same(dispatch.dense(store.view()), dispatch.dense(expected.view()))
