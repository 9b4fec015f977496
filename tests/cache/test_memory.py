"""The footprint is what is held: every tensor reachable from a cache, to the byte, and nothing else."""

import pytest
import torch
from transformers import DynamicCache

from tests.support.helpers import BLOCK, gemma_config, llama_config, prefill_bytes, states, storages_reachable_from
from tq_hf import TurboQuantCache, TurboQuantConfig, TurboQuantLayer

LAYERS = 2
GEMMA = gemma_config(["sliding_attention", "full_attention"] * 2, window=64)


def pushed(cache, seed: int, tokens: int, layers: int = LAYERS, dtype: torch.dtype = torch.bfloat16, **shape):
    """`cache` with `tokens` more tokens in every layer."""
    for layer in range(layers):
        cache.update(*states(seed + layer, tokens=tokens, dtype=dtype, **shape), layer)
    return cache


@pytest.mark.parametrize("calls", [[1], [700], [700, 1, 1], [300, 128, 129, 60, 60, 500]])
@pytest.mark.parametrize("options", [{}, dict(residual_length=0, sink_tokens=0), dict(max_cache_len=1200)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_footprint_is_every_tensor_the_cache_reaches(calls, options, dtype):
    cache = TurboQuantCache(llama_config(LAYERS), **options)
    for seed, tokens in enumerate(calls):
        pushed(cache, seed, tokens, batch=2, dtype=dtype)
        assert cache.memory_footprint().total == sum(storages_reachable_from(cache).values())


def test_footprint_stays_exact_through_cache_operations():
    cache = pushed(TurboQuantCache(llama_config(LAYERS)), 0, 700, batch=3)
    for operation in (
        lambda: cache.crop(-20),
        lambda: cache.reorder_cache(torch.tensor([2, 0, 0])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([1])),
        lambda: cache.crop(-400),
        lambda: pushed(cache, 5, 300),
        lambda: cache.layers[0].keys,
    ):
        operation()
        assert cache.memory_footprint().total == sum(storages_reachable_from(cache).values())
    cache = TurboQuantCache(llama_config(LAYERS), balance=cache)  # with its channel scales
    assert cache.memory_footprint().total == sum(storages_reachable_from(cache).values()) > 0


def test_dropping_sequences_releases_their_bytes():
    cache = pushed(TurboQuantCache(llama_config(LAYERS)), 0, 700, batch=4)
    before = cache.memory_footprint()
    cache.batch_select_indices(torch.tensor([3]))
    after = cache.memory_footprint()
    assert (after.packed, after.residual) == (before.packed // 4, before.residual // 4)
    assert after.bf16_equivalent == before.bf16_equivalent // 4


def test_sliding_and_skipped_layers_count_as_uncompressed():
    cache = TurboQuantCache(GEMMA, skip_layers=(-1,))
    kinds = [isinstance(layer, TurboQuantLayer) for layer in cache.layers]
    assert kinds == [False, True, False, False]
    pushed(cache, 0, 500, layers=4)
    plain = pushed(DynamicCache(config=GEMMA), 0, 500, layers=4)
    footprint = cache.memory_footprint()
    dense = [layer.keys.nbytes + layer.values.nbytes for layer in plain.layers]
    counts = sum(cache.layers[i].cumulative_length.nbytes for i in (0, 2))
    assert footprint.uncompressed == sum(dense[i] for i in (0, 2, 3)) + counts
    compressed = prefill_bytes(cache.config, batch=1, dim=16, tokens=500)
    assert footprint.total == footprint.uncompressed + sum(compressed.values())
    assert footprint.total == sum(storages_reachable_from(cache).values())


def test_bf16_equivalent_is_what_a_dynamic_cache_of_the_same_model_holds():
    """For float32 states too: the comparison is with a 16-bit cache, sliding layers at their window."""
    plain = pushed(DynamicCache(config=GEMMA), 0, 500, layers=4)
    bf16 = sum(layer.keys.numel() + layer.values.numel() for layer in plain.layers) * 2
    for dtype in (torch.bfloat16, torch.float32):
        cache = pushed(TurboQuantCache(GEMMA, skip_layers=(-1,)), 0, 500, layers=4, dtype=dtype)
        assert cache.memory_footprint().bf16_equivalent == bf16


def test_a_preallocated_cache_counts_what_it_reserves():
    config = TurboQuantConfig(residual_length=0, sink_tokens=0)
    cache = pushed(TurboQuantCache(llama_config(1), config, max_cache_len=20 * BLOCK), 0, 10, layers=1)
    layout = config.layout(16)
    assert cache.memory_footprint().packed == 2 * 20 * layout.block_bytes
    assert cache.memory_footprint().bf16_equivalent == 2 * 10 * layout.dense_bytes


def test_layers_on_several_devices_are_told_apart():
    cache = pushed(TurboQuantCache(llama_config(LAYERS)), 0, 500)
    total = cache.memory_footprint().total
    moved = sum(t.nbytes for group in cache.layers[1].store.by_kind().values() for t in group)
    cache.layers[1].store = cache.layers[1].store.map(lambda tensor: tensor.to("meta"))
    footprint = cache.memory_footprint()
    assert set(footprint.by_device) == {"cpu", "meta"}
    assert footprint.by_device["cpu"] == total - moved
    assert sum(footprint.by_device.values()) == footprint.total


def test_a_storage_held_twice_is_counted_once():
    cache = pushed(TurboQuantCache(llama_config(LAYERS)), 0, 500)
    once = cache.memory_footprint().total
    cache.layers[1].store = cache.layers[0].store
    assert cache.memory_footprint().total == once // 2


def test_an_empty_or_reset_cache_holds_nothing():
    cache = TurboQuantCache(llama_config(LAYERS))
    assert (cache.memory_footprint().total, cache.memory_footprint().ratio) == (0, 0.0)
    pushed(cache, 0, 300)
    cache.reset()
    footprint = cache.memory_footprint()
    assert (footprint.total, footprint.bf16_equivalent, footprint.by_device) == (0, 0, {})
    assert storages_reachable_from(cache) == {}


def test_ratio_and_summary_follow_the_bytes():
    footprint = pushed(TurboQuantCache(llama_config(LAYERS, dim=128)), 0, 1000, dim=128).memory_footprint()
    assert footprint.ratio == footprint.total / footprint.bf16_equivalent
    text = str(footprint)
    assert f"{footprint.total / 2**20:.2f} MiB" in text and f"{footprint.bf16_equivalent / 2**20:.2f} MiB" in text
    assert f"{footprint.ratio:.1%}" in text
