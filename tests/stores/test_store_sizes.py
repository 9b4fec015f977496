"""What a store costs: bytes, growth, work of a step; and a preallocated layer beside a growing one."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.helpers import (
    BLOCK,
    CountedBytes,
    all_packed,
    assert_same,
    filled,
    llama_config,
    module_with,
    prefill_bytes,
    rows,
    states,
)
from tests.support.store_cases import configs
from tq_hf import PRESETS, TurboQuantConfig, TurboQuantLayer
from tq_hf.layers.handle import LazyStates, resolve
from tq_hf.ops import dispatch
from tq_hf.stores.sizes import GROWTH
from tq_hf.stores.store import LayerStore

# Sizes and work


@pytest.mark.parametrize("tokens", [1, 100, 133, 388, 389, 1000])
@pytest.mark.parametrize("name", PRESETS)
def test_bytes_after_a_prefill_follow_config_arithmetic(name, tokens):
    store = filled(PRESETS[name], states(26, batch=2, tokens=tokens, dim=16, dtype=torch.bfloat16))
    held = {kind: sum(t.untyped_storage().nbytes() for t in group) for kind, group in store.by_kind().items()}
    expected = prefill_bytes(PRESETS[name], batch=2, dim=16, tokens=tokens)
    assert held == expected


@configs
def test_reserves_stay_within_the_growth_factor(config):
    store = LayerStore.allocate(config, *states(27, dim=8))
    for start in range(0, 6000, 75):
        store.append(*states(start, tokens=75, dim=8))
        blocks = store.counts.blocks + store.counts.pending
        assert blocks <= store.blocks.capacity <= max(1, blocks * GROWTH + 1)
        assert store.counts.residual <= store.tensors.ring_rows <= config.residual_length + 3 * BLOCK


def test_a_residual_that_holds_everything_grows_geometrically():
    config = TurboQuantConfig(residual_length=10**6)
    store = LayerStore.allocate(config, *states(28, tokens=60, dim=8))
    capacities = set()
    for start in range(0, 6000, 60):
        store.append(*states(start, tokens=60, dim=8))
        capacities.add(store.tensors.ring_rows)
        assert store.tensors.ring_rows <= GROWTH * store.counts.residual + 2 * BLOCK
    assert len(capacities) <= math.log(6000 / BLOCK) / math.log(GROWTH) + 2


def test_blocks_are_encoded_once_and_never_again(monkeypatch):
    encoded_blocks = []
    encode = dispatch.encode

    def spy(config, held, out, start, tokens=None):
        keys, values = held
        first, stop = tokens or (0, keys.shape[2])
        assert stop <= keys.shape[2] == values.shape[2] and (stop - first) % BLOCK == 0
        encoded_blocks.extend(range(start, start + (stop - first) // BLOCK))
        encode(config, held, out, start, tokens)

    monkeypatch.setattr(dispatch, "encode", spy)
    store = LayerStore.allocate(PRESETS["4bit_nc"], *states(29, dim=8))
    for seed, tokens in enumerate([700, 1, 1, 127, 128, 129, 5, 300, 60, 60, 60]):
        store.append(*states(seed, tokens=tokens, dim=8))
    assert encoded_blocks == list(range(store.counts.blocks + store.counts.pending))


def test_layers_alike_share_only_what_has_no_elements():
    """Two layers with a short prompt, then each its own long call: neither sees the other's blocks."""
    pairs = [states(seed, tokens=700) for seed in (0, 1)]
    stores = [filled(TurboQuantConfig(), rows(pair, 0, 100)) for pair in pairs]
    assert all(tensor.numel() == 0 for tensor in stores[0].blocks.tensors().values())
    for store, pair in zip(stores, pairs, strict=True):
        store.append(*rows(pair, 100, 700))
    first, second = (store.blocks.tensors() for store in stores)
    assert all(first[name].numel() and first[name].data_ptr() != second[name].data_ptr() for name in first)
    for store, pair in zip(stores, pairs, strict=True):
        alone = filled(TurboQuantConfig(), pair, [100, 600])
        assert store.counts == alone.counts and store.counts.blocks > 0
        assert_same(dispatch.dense(store.view()), dispatch.dense(alone.view()))


def test_packed_blocks_stay_in_place_between_growths():
    store = LayerStore.allocate(all_packed(), *states(30, dim=8))
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
    """A chunk that completes a block, with room for it: written are its rows, one block, and the residual."""

    def bytes_written(history: int) -> int:
        store = filled(config, states(34, tokens=history, dim=8))
        while store.blocks.capacity < store.counts.blocks + store.counts.pending + 2:
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
    assert layer.store.tensors.ring_rows <= min(max_cache_len, config.residual_length + BLOCK) + BLOCK - 1


@pytest.mark.parametrize("name", ["turboquant", "sdpa", "eager"])
def test_a_layer_knows_the_attention_its_model_has_now(name):
    """By the config of the module that resolved its handle, whatever config the cache was made from."""
    module = module_with(config=llama_config(1))
    layer = TurboQuantLayer(all_packed())
    for attention in ("turboquant", name, "turboquant"):
        module.config._attn_implementation = attention
        keys, values = layer.update(*states(0, tokens=2))
        assert resolve(keys, values, module)[0] is not None
        keys, _ = layer.update(*states(1, tokens=2))
        assert (type(keys) is LazyStates) == (attention == "turboquant")


def test_lazy_states_have_the_shape_of_what_they_stand_for_and_a_handle_each():
    for heads, length, dim, dtype in [
        (2, 5, 16, torch.bfloat16),
        (2, 6, 16, torch.bfloat16),
        (4, 6, 16, torch.float32),
    ]:
        layer = TurboQuantLayer(all_packed())
        module = module_with(config=llama_config(1))
        module.config._attn_implementation = "turboquant"
        resolve(*layer.update(*states(0, heads=heads, tokens=length, dim=dim, dtype=dtype)), module)
        pairs = [layer.update(*states(1, heads=heads, tokens=1, dim=dim, dtype=dtype)) for _ in range(2)]
        for added, (keys, values) in enumerate(pairs, 1):
            assert (keys.shape, values.shape) == ((1, heads, length + added, dim), (1, heads, length + added, dim))
            assert keys.size(2) == keys.size(dim=-2) == length + added and keys.dim() == values.ndim == 4
            assert not keys._handle.touched
            assert keys.dtype == values.dtype == dtype and keys.as_subclass(torch.Tensor).isnan().all()
            assert keys._handle is values._handle and type(keys) is type(values) is LazyStates
        assert pairs[0][0]._handle is not pairs[1][0]._handle
