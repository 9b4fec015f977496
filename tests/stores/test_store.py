"""One layer's store: what it holds depends on the tokens alone, what it shows is exact where it promises to be."""

from __future__ import annotations

import math
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import (
    BLOCK,
    CountedBytes,
    all_packed,
    assert_same,
    assert_unchanged,
    concatenated,
    dequantised,
    encoded,
    filled,
    llama_config,
    packed_tensors,
    prefill_bytes,
    rows,
    snapshot,
    states,
    window_tensors,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tq_hf import PRESETS, TurboQuantConfig, TurboQuantLayer
from tq_hf.codec.ablation import Ablation
from tq_hf.config import GROWTH
from tq_hf.ops import dispatch
from tq_hf.stores import growing as store_module
from tq_hf.stores.growing import GrowingStore
from tq_hf.stores.growth import Fixed
from tq_hf.stores.ticket import redeem, step_placeholders
from tq_hf.stores.watched import Watched
from tq_hf.tensors.layer_tensors import RowKind
from tq_hf.tensors.window import DenseWindow

CONFIGS = {
    "all_packed": all_packed(),
    "sinks": all_packed(sink_tokens=5, key_bits=8),
    "residual": TurboQuantConfig(residual_length=60, sink_tokens=4, key_bits=3),
    "default": PRESETS["2.5bit_nc"],
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
gradients = pytest.mark.parametrize("recorded", [False, True], ids=["", "gradients"])


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
        packed = dequantised(self.config, self.packed(blocks), like=self.tokens)
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
    assert_same(rows(store.sinks, 0, sinks), rows(expected.tokens, 0, sinks))
    assert_same(window_tensors(store), rows(expected.tokens, sinks + (settled + pending) * BLOCK))
    for name, tensor in expected.packed(settled + pending).tensors().items():
        assert torch.equal(packed_tensors(store)[name], tensor), name


SIZES = st.one_of(st.integers(1, 5), st.sampled_from([60, 127, 128, 129, 256]), st.integers(1, 420))
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


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    bits=st.sampled_from([(4, 4), (8, 3), (2, 2)]),
    residual=st.sampled_from([0, 1, 100, 128, 200]),
    sinks=st.sampled_from([0, 1, 4, 130]),
    key_mean=st.booleans(),
    prompt=SIZES,
    calls=st.lists(CALLS, min_size=3, max_size=12),
)
def check_any_sequence_of_calls(bits, residual, sinks, key_mean, prompt, calls):
    config = Ablation(
        key_bits=bits[0], value_bits=bits[1], residual_length=residual, sink_tokens=sinks, key_mean=key_mean
    )
    shape = dict(heads=1, dim=8, value_dim=12)
    store = GrowingStore.allocate(config, *states(0, 2, **shape))
    expected = Expected(config, states(0, 2, **shape))
    for seed, (call, argument) in enumerate([("append", prompt), *calls]):
        if call == "append":
            new = states(seed, store.batch_size, tokens=argument, **shape)
            past = expected.length
            view = store.append(*new)
            assert (view.past_length, view.length) == (past, past + argument)
            assert_same(dispatch.dense(view), expected.append(new))
        elif call == "crop":
            store.crop(argument)
            expected.crop(argument)
        elif call == "select":
            indices = torch.tensor(argument) % store.batch_size
            store = store.map(lambda tensor, indices=indices: tensor[indices])
            expected.tokens = (expected.tokens[0][indices], expected.tokens[1][indices])
        else:
            assert_same(dispatch.dense(store.view()), expected.read(expected.settled + expected.pending))
        check(store, expected)


def test_any_sequence_of_calls_holds_and_shows_what_it_should():
    append_late = DenseWindow.append_late
    with mock.patch.object(DenseWindow, "append_late", autospec=True, side_effect=append_late) as late:
        check_any_sequence_of_calls()
    assert late.call_count > 100, "the path of decoding is hardly taken"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(list(CONFIGS)),
    calls=st.lists(st.one_of(st.integers(1, 5), st.integers(1, 128), st.integers(129, 500)), min_size=1, max_size=8),
)
def test_what_is_held_does_not_depend_on_how_it_was_appended(name, calls):
    pair = states(1, tokens=sum(calls), dim=8)
    split, whole = filled(CONFIGS[name], pair, calls), filled(CONFIGS[name], pair)
    assert split.length == whole.length == sum(calls)
    assert_same(window_tensors(split), window_tensors(whole))
    assert_same(rows(split.sinks, 0, split.num_sinks), rows(whole.sinks, 0, whole.num_sinks))
    for tensor_name, tensor in packed_tensors(whole).items():
        assert torch.equal(packed_tensors(split)[tensor_name], tensor), tensor_name


@gradients
@configs
def test_decoding_token_by_token_holds_the_same_as_one_prefill(config, recorded):
    pair = states(2, tokens=420, dim=8)
    with torch.set_grad_enabled(recorded):
        steps, whole = filled(config, pair, [1] * 420), filled(config, pair)
    assert_same(window_tensors(steps), window_tensors(whole))
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
def test_crop_within_the_window_equals_never_having_appended(config, removed):
    pair = states(9, tokens=530, dim=8)
    cropped, straight = filled(config, pair, [500, 10, 20]), filled(config, rows(pair, 0, 530 - removed))
    cropped.crop(removed)
    assert cropped.length == 530 - removed
    more = states(10, tokens=400, dim=8)
    for store in (cropped, straight):
        assert_same(rows(dispatch.dense(store.append(*rows(more, 0, 3))), 530 - removed), rows(more, 0, 3))
        store.append(*rows(more, 3))
    assert_same(window_tensors(cropped), window_tensors(straight))
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
    assert (store.length, store.num_blocks, store.window.count) == (length, 1, 50)
    assert_same(dispatch.dense(store.view()), rows(read, 0, length))
    new = states(14, tokens=9, dim=8)
    assert_same(dispatch.dense(store.append(*new)), concatenated(rows(read, 0, length), new))


@configs
def test_crop_to_the_edge_of_a_block_leaves_the_window_empty(config):
    pair = states(15, tokens=700, dim=8)
    store = filled(config, pair)
    read = dispatch.dense(store.view())
    length = config.sink_tokens + 2 * BLOCK
    store.crop(700 - length)
    assert (store.length, store.num_blocks, store.window.count) == (length, 2, 0)
    assert_same(dispatch.dense(store.view()), rows(read, 0, length))


@pytest.mark.parametrize("length", [0, 1, 4, 5])
def test_crop_to_the_sinks_and_below_keeps_the_first_tokens_exact(length):
    pair = states(16, tokens=700, dim=8)
    config = all_packed(sink_tokens=5)
    store = filled(config, pair)
    store.crop(700 - length)
    assert (store.length, store.num_sinks, store.num_blocks, store.window.count) == (length, length, 0, 0)
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
    assert store.batch_size == straight.batch_size == changed[0].shape[0]
    new = states(19, batch=changed[0].shape[0], tokens=140, dim=8)
    assert_same(dispatch.dense(store.append(*new)), dispatch.dense(straight.append(*new)))
    assert_same(window_tensors(store), window_tensors(straight))
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
    store = GrowingStore.allocate(all_packed(), *states(22), Fixed(300))
    if held:
        store.append(*states(23, tokens=held))
    before = snapshot(store)
    with pytest.raises(ValueError, match=f"{more} tokens.*300.*larger `max_cache_len`"):
        store.append(*states(24, tokens=more))
    assert_unchanged(store, before)
    store.append(*states(25, tokens=300 - held))
    assert store.length == 300


# Sizes and work


@pytest.mark.parametrize("tokens", [1, 100, 133, 388, 389, 1000])
@pytest.mark.parametrize("name", PRESETS)
def test_bytes_after_a_prefill_follow_config_arithmetic(name, tokens):
    store = filled(PRESETS[name], states(26, batch=2, tokens=tokens, dim=16, dtype=torch.bfloat16))
    held = {kind: sum(t.untyped_storage().nbytes() for t in group) for kind, group in store.by_kind().items()}
    expected = prefill_bytes(PRESETS[name], batch=2, heads=2, dim=16, tokens=tokens, itemsize=2)
    expected["metadata"] -= 2  # the placeholder's NaN belongs to the layer
    assert held == expected


@configs
def test_reserves_stay_within_the_growth_factor(config):
    store = GrowingStore.allocate(config, *states(27, dim=8))
    for start in range(0, 6000, 75):
        store.append(*states(start, tokens=75, dim=8))
        blocks = store.num_blocks + store.num_pending
        assert blocks <= store.blocks.capacity <= max(1, blocks * GROWTH + 1)
        assert store.window.count <= store.window.capacity <= config.residual_length + 3 * BLOCK


def test_a_window_that_holds_everything_grows_geometrically():
    config = TurboQuantConfig(residual_length=10**6)
    store = GrowingStore.allocate(config, *states(28, dim=8))
    capacities = set()
    for start in range(0, 6000, 60):
        store.append(*states(start, tokens=60, dim=8))
        capacities.add(store.window.capacity)
        assert store.window.capacity <= GROWTH * store.window.count + 2 * BLOCK
    assert len(capacities) <= math.log(6000 / BLOCK) / math.log(GROWTH) + 2


def test_blocks_are_encoded_once_and_never_again(monkeypatch):
    encoded_blocks = []
    encode = dispatch.encode

    def spy(config, keys, values, out, start):
        assert keys.shape[2] == values.shape[2] and keys.shape[2] % BLOCK == 0
        encoded_blocks.extend(range(start, start + keys.shape[2] // BLOCK))
        encode(config, keys, values, out, start)

    monkeypatch.setattr(dispatch, "encode", spy)
    store = GrowingStore.allocate(PRESETS["4bit_nc"], *states(29, dim=8))
    for seed, tokens in enumerate([700, 1, 1, 127, 128, 129, 5, 300, 60, 60, 60]):
        store.append(*states(seed, tokens=tokens, dim=8))
    assert encoded_blocks == list(range(store.num_blocks + store.num_pending))


def test_packed_blocks_stay_in_place_between_growths():
    store = GrowingStore.allocate(all_packed(), *states(30, dim=8))
    addresses = []
    for step in range(60):
        store.append(*states(step, tokens=BLOCK, dim=8))
        addresses.append((store.blocks.key_words.data_ptr(), store.blocks.capacity))
    capacities = [capacity for _, capacity in addresses]
    assert len(set(capacities)) <= 30  # 8 blocks by ones, then by eighths
    assert all(a == b for a, b in zip(addresses[:-1], addresses[1:], strict=True) if a[1] == b[1])


@configs
def test_work_of_a_step_does_not_depend_on_the_history(config):
    def bytes_written(history: int) -> int:
        store = filled(config, states(31, tokens=history, dim=8))
        store.append(*states(32, tokens=1, dim=8))
        with CountedBytes() as counter:
            store.append(*states(33, tokens=1, dim=8))
        return counter.written

    # The same phase of a block, so that neither step completes one.
    assert 0 < bytes_written(40 * BLOCK + 20) <= bytes_written(4 * BLOCK + 20) < 8 * 2 * 2 * 8 * 4


@configs
def test_work_of_a_chunk_does_not_depend_on_the_history(config):
    """A chunk that completes a block, with room for it: written are its rows, one block, and the window."""

    def bytes_written(history: int) -> int:
        store = filled(config, states(34, tokens=history, dim=8))
        while store.blocks.capacity < store.num_blocks + store.num_pending + 2:
            store.append(*states(35, tokens=BLOCK, dim=8))
        with CountedBytes() as counter:
            store.append(*states(36, tokens=BLOCK, dim=8))
        return counter.written

    assert bytes_written(40 * BLOCK + 20) == bytes_written(12 * BLOCK + 20)


# Preallocated


@pytest.mark.parametrize("config", [all_packed(), PRESETS["4bit_nc"]], ids=["all_packed", "default"])
@pytest.mark.parametrize("step", [1, 7, 100], ids=["decode", "assisted", "chunks"])
def test_a_preallocated_layer_neither_grows_nor_moves(config, step):
    pair = states(37, tokens=800, dim=8)
    layer = TurboQuantLayer(config, max_cache_len=800)
    layer.update(*rows(pair, 0, 500))
    held = [(t.data_ptr(), t.shape) for group in layer.store.by_kind().values() for t in group]
    for start in range(500, 800, step):
        layer.update(*rows(pair, start, start + step))
        assert [(t.data_ptr(), t.shape) for group in layer.store.by_kind().values() for t in group] == held
    assert_same((layer.keys, layer.values), dispatch.dense(filled(config, rows(pair, 0, start + step)).view()))


@pytest.mark.parametrize("max_cache_len", [1, 50, 200, 1000])
def test_a_preallocated_layer_has_room_for_its_length_and_little_more(max_cache_len):
    config = PRESETS["4bit_nc"]
    layer = TurboQuantLayer(config, max_cache_len=max_cache_len)
    layer.update(*states(39, tokens=max(1, max_cache_len // 2), dim=8))
    assert layer.store.blocks.capacity == config.num_blocks(max_cache_len)
    assert layer.store.tensors.ring[0].shape[2] <= min(max_cache_len, config.residual_length + BLOCK) + BLOCK - 1


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    config=st.sampled_from([all_packed(residual_length=100), TurboQuantConfig(residual_length=90, key_bits=8)]),
    prompt=SIZES,
    calls=st.lists(
        st.one_of(
            st.tuples(st.just("update"), st.one_of(st.integers(1, 5), st.integers(129, 300))),
            st.tuples(st.just("decode"), st.sampled_from([10, 40])),
            st.tuples(st.just("crop"), st.one_of(st.integers(0, 12), SIZES)),
            st.tuples(st.just("reorder"), st.lists(st.integers(0, 1), min_size=2, max_size=2)),
        ),
        min_size=2,
        max_size=6,
    ),
)
def test_a_preallocated_layer_holds_and_shows_what_a_growing_one_does(config, prompt, calls):
    growing, fixed = TurboQuantLayer(config), TurboQuantLayer(config, max_cache_len=2000)
    for seed, (call, argument) in enumerate([("update", prompt), *calls]):
        if call in ("update", "decode"):
            sizes = [argument] if call == "update" else [1] * argument
            new = states(seed, 2, 1, sum(sizes), dim=8)
            for start in range(0, sum(sizes), sizes[0]):
                part = rows(new, start, start + sizes[0])
                shown, padded = growing.update(*part), fixed.update(*part)
                assert_same(rows(padded, 0, shown[0].shape[2]), shown)
        elif call == "crop":
            growing.crop(-argument), fixed.crop(-argument)
        else:
            growing.reorder_cache(torch.tensor(argument)), fixed.reorder_cache(torch.tensor(argument))
        assert int(fixed.get_seq_length()) == growing.get_seq_length()
        assert_same((fixed.keys, fixed.values), (growing.keys, growing.values))


@pytest.mark.parametrize("name", ["turboquant", "sdpa", "eager"])
def test_a_layer_knows_the_attention_its_model_has_now(name):
    """By the config of the module that took its ticket, whatever config the cache was made from."""
    module = SimpleNamespace(config=llama_config(1))
    layer = TurboQuantLayer(all_packed())
    for attention in ("turboquant", name, "turboquant"):
        module.config._attn_implementation = attention
        keys, values = layer.update(*states(0, tokens=2))
        assert redeem(keys, values, module)[0] is not None
        keys, _ = layer.update(*states(1, tokens=2))
        assert (type(keys) is Watched) == (attention == "turboquant")


def test_placeholders_of_a_step_are_those_of_any_call():
    nan = torch.full((1, 1, 1, 1), torch.nan, dtype=torch.bfloat16)
    other = nan.float()
    for heads, tokens, dim, one in [
        (2, 5, 16, nan),
        (2, 5, 16, nan),
        (2, 6, 16, nan),
        (4, 6, 16, nan),
        (4, 6, 16, other),
    ]:
        kind = RowKind((1, heads, 1, dim), (1, heads, 1, 8), one.dtype, one.device)
        keys, values = step_placeholders(kind, tokens, one)
        assert (keys.shape, values.shape) == ((1, heads, tokens, dim), (1, heads, tokens, 8))
        assert keys.dtype == values.dtype == one.dtype and keys.isnan().all() and values.isnan().all()
        again, _ = step_placeholders(kind, tokens, one)
        keys.ticket = 1
        assert not hasattr(again, "ticket")
