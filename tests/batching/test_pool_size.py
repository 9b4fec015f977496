"""As many pages as the handler's arithmetic says, and as many bytes as they need."""

from __future__ import annotations

import pytest
import torch
from transformers import ContinuousBatchingConfig, LlamaConfig

from tests.support.batching_cases import Session, Steps, greedy, mixed, model_of, options, prompts
from tq_hf import TurboQuantBatching, TurboQuantConfig
from tq_hf.batching import cache as paged_cache
from tq_hf.batching.cache import TurboQuantMemory
from tq_hf.ops.sliding_pages import WINDOW_BYTES


def tensors_held(session: Session) -> int:
    """Bytes of the pool and of the engine's inputs and outputs."""
    io = session.manager.batch_processor.inputs_and_outputs
    tensors = [session.cache.cache_tensor, io._bulk_input_tensor, io.output_ids, io.block_table]
    return sum(t.nbytes for t in [*tensors, io.write_index_storage, io.read_index_storage])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_pool_takes_what_the_arithmetic_leaves_it(name: str) -> None:
    model = model_of() if name == "llama" else mixed(name)
    budget = (64 << 20) + (0 if name == "llama" else WINDOW_BYTES)
    with Session(model, num_blocks=20, max_batch_tokens=256) as session:
        session.run(prompts([5]), greedy(1))
        memory = session.cache.memory
        memory.available_memory, memory.cb_config.num_blocks = budget, None
        tokens, sectors = memory.infer_max_batch_tokens_and_num_sectors()
        predicted = memory.compute_memory_footprint(tokens, sectors)
        # Another sector would not fit.
        assert predicted <= budget < predicted + 2 * memory.bytes_per_cache_sector


def test_pages_are_as_many_as_asked_for_and_tensors_within_the_prediction() -> None:
    with Session(model_of(), num_blocks=300, max_batch_tokens=512) as session:
        session.run(prompts([5]), greedy(1))
        cache, memory = session.cache, session.cache.memory
        assert cache.num_blocks == 300
        page = cache.allocator.tq_config.layout(32).block_bytes
        assert cache.allocator.bytes_per_block == 2 * 2 * page  # layers, heads
        assert cache.cache_tensor.nbytes == 300 * 2 * 2 * page + 2 * cache.bytes_per_sector
        predicted = memory.compute_memory_footprint(cache.max_batch_tokens, cache.num_sectors)
        assert tensors_held(session) <= predicted
        # What is predicted beyond tensors held is room for a batch's activations.
        assert predicted - tensors_held(session) <= memory.fixed_overhead_bytes + 512 * memory.bytes_per_batch_token


def test_pages_of_a_model_with_windows_hold_as_many_tokens_as_asked_for() -> None:
    """Of short requests, whose windows grow with them: those of longer ones leave more room for packed pages."""
    with Session(mixed("gemma3"), num_blocks=300, max_batch_tokens=512) as session:
        session.run(prompts([5]), greedy(1))
        cache, memory, windows = session.cache, session.cache.memory, session.cache.second
        packed = 2 * cache.allocator.tq_config.layout(32).block_bytes
        dense = windows.bytes_per_block * 128 / windows.tokens_per_page
        assert cache.num_blocks == 300
        assert 0 <= cache.num_sectors * cache.bytes_per_sector - 300 * (packed + dense) <= 2 * cache.bytes_per_sector
        predicted = memory.compute_memory_footprint(cache.max_batch_tokens, cache.num_sectors)
        assert tensors_held(session) + WINDOW_BYTES <= predicted


def test_scratch_of_the_steps_that_are_captured_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(paged_cache, "decode_scratch_bytes", lambda *args: asked.append(args) or 1 << 24)
    predicted = {}
    for requests in (8, 16):
        with Session(model_of(), num_blocks=20, max_batch_tokens=64, max_requests_per_batch=requests) as session:
            session.run(prompts([5]), greedy(1))
            cache = session.cache
            predicted[requests] = cache.memory.compute_memory_footprint(64, cache.num_sectors)
            cache.memory.scratch_bytes -= 1 << 24
            assert predicted[requests] - cache.memory.compute_memory_footprint(64, cache.num_sectors) == 1 << 24
    assert [args[:2] for args in asked] == [(8, (4, 2)), (16, (4, 2))]


@pytest.mark.parametrize(("preset", "times"), [("k8v4", 2.6), ("4bit_nc", 3.8), ("3bit_nc", 4.9), ("2bit_nc", 7.1)])
def test_an_8b_shape_holds_several_times_the_tokens_of_16_bit_pages(preset: str, times: float) -> None:
    """By the handlers' own arithmetic on a card of 80 GB; stock pages are read by flash attention."""
    config = LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256
    )

    def tokens(handler: type, page: int, **attention: int) -> int:
        sizes = dict(bytes_per_sector=32 * page, tokens_per_sector=128, bytes_per_block=32 * page)
        options = ContinuousBatchingConfig(max_memory_percent=0.9, max_blocks_per_request=0, use_async_batching=True)
        made = handler(
            config, options, torch.bfloat16, attn_types=["full_attention"], model_supports_logits_to_keep=True, **sizes
        )
        made.available_memory = int(0.9 * (80e9 - 16e9))
        vars(made).update(attention)
        return made.infer_max_batch_tokens_and_num_sectors()[1] * 128

    ours = tokens(TurboQuantMemory, 8 * TurboQuantConfig.from_preset(preset).layout(128).block_bytes)
    stock = tokens(TurboQuantMemory.__base__, 8 * 128 * 2 * 128 * 2, num_attention_masks=0, kv_heads_at_peak=16)
    assert ours > times * stock


def test_a_pool_that_does_not_fit_is_refused_before_it_is_made() -> None:
    batching = TurboQuantBatching(model_of(), balance=False)
    with pytest.raises(ValueError, match=r"1,000,000,000 pages .`num_blocks`. .* GiB may be taken"):
        batching.generate_batch(prompts([5]), greedy(1), options(num_blocks=10**9))
    assert batching.model.config._attn_implementation == "sdpa"


def test_the_pool_of_a_batch_is_no_larger_than_its_requests_can_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    model, steps = model_of(), Steps(monkeypatch)
    wanted = prompts([200, 200, 700])
    with Session(model, num_blocks=None, max_memory_percent=0.02) as session:
        found = session.run(wanted, greedy(20))
        cache = session.cache
        pages = 3 * cache.allocator.pages_of(720)
        assert pages <= cache.num_blocks <= pages / 0.85 + 4
        assert cache.cache_tensor.nbytes < 1 << 22
        # None waits for another: one step reads all prompts.
        assert sorted(steps.seen[0][2]) == [200, 200, 700]
    with Session(model) as session:
        assert session.run(wanted, greedy(20)) == found
        assert session.cache.num_blocks == 200, "as many as asked for"


def test_a_kept_pool_that_is_too_small_for_the_next_batch_is_made_anew() -> None:
    model = model_of()
    with Session(model, num_blocks=None, max_memory_percent=0.02) as session:
        session.run(prompts([200, 200]), greedy(20))
        kept = session.manager
        session.run(prompts([150]), greedy(8))
        assert session.manager is kept
        (long,) = prompts([900])
        assert session.run([long], greedy(8)) == [session.oracle.generate(long, 8)]
        assert session.manager is not kept
        kept = session.manager
        unknown = session.batching.init_continuous_batching(greedy(8), session.options)
        assert unknown is not kept and unknown.requests is None
