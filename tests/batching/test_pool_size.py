"""As many pages as the handler's arithmetic says, as many bytes as they need; a step costs what it reads and writes,
whatever the size of the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from tq_kernels.format import due_blocks
from tq_kernels.types import AttentionOptions, Sequences, Tokens
from transformers import ContinuousBatchingConfig, LlamaConfig

from tests.support.batching_cases import Session, Steps, greedy, mixed, model_of, prompts
from tests.support.helpers import all_packed, every_pair, states
from tq_hf import TurboQuantConfig
from tq_hf.batching import cache as paged_cache
from tq_hf.batching.cache import TurboQuantMemory
from tq_hf.ops.dispatch import paged_step, windowed_step
from tq_hf.ops.sliding_pages import WINDOW_BYTES, plan_step
from tq_hf.tensors.pages import LayerPages, LayerWindows


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
    monkeypatch.setattr(paged_cache.dispatch, "decode_scratch_bytes", lambda *args: asked.append(args) or 1 << 24)
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


HEADS, QUERY_HEADS, DIM, LAYERS, WINDOW = 2, 6, 64, 2, 96
SINKS, HELD = 4, 4 + 8 * 128 + 100
"""Sinks; tokens of a request: sinks, eight blocks and a part of another."""


def allocated_bytes(call: Callable[[], Any]) -> int:
    """Bytes that operations of a call allocate, with what they copy inside of them, which no dispatch mode sees."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    return sum(max(0, event.self_cpu_memory_usage) for event in found.events())


def layer(kind: str, pages: int) -> LayerPages | LayerWindows:
    """The last layer of a pool of that many pages, in bfloat16."""
    config = all_packed(sink_tokens=SINKS, residual_length=128)
    if kind == "windows":
        return LayerWindows(torch.zeros(pages, LAYERS, 2, 36, HEADS, DIM).bfloat16()[:, -1], WINDOW, trash=1)
    if kind == "dense":
        page = torch.zeros(pages, LAYERS, HEADS, 128 * 2 * DIM * 2, dtype=torch.uint8)[:, -1]
        return LayerPages.of(page, config, config.layout(DIM), torch.bfloat16, False)
    pool = torch.zeros(pages, LAYERS, HEADS, config.layout(DIM).block_bytes, dtype=torch.uint8)
    return LayerPages.of(pool[:, LAYERS - 1], config, config.layout(DIM), torch.bfloat16)


def step_of(held: LayerPages | LayerWindows, new: int, **softcap: float) -> Callable[[], torch.Tensor]:
    """A step of one request with `HELD` tokens and `new` ones, which reads and writes the first pages of the pool."""
    heads = (QUERY_HEADS, HEADS, HEADS)
    tokens = Tokens(*(states(i, 1, n, new, DIM)[0][0].transpose(0, 1).bfloat16() for i, n in enumerate(heads)))
    options = AttentionOptions(0.2, **softcap)
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (new, HELD + new))
    if isinstance(held, LayerWindows):
        sequences = Sequences(
            cu_q, cu_k, 2 + torch.arange(-(-held.window // held.rows_per_page), dtype=torch.int32)[None], None, new
        )
        step = plan_step(sequences, new)
        return lambda: windowed_step(tokens, held, step, options)
    columns = held.tensors.first_block_column + due_blocks(HELD + new, SINKS, 0)
    table = torch.arange(columns, dtype=torch.int32)[None]
    sequences = Sequences(cu_q, cu_k, table, torch.tensor([held.config.num_blocks(HELD)]), new)
    return lambda: paged_step(tokens, held, sequences, options)


@pytest.mark.parametrize(
    ("kind", "new", "softcap"), every_pair(("packed", "dense", "windows"), (1, 40, 300), ({}, {"softcap": 2.0}))
)
def test_a_step_allocates_the_same_in_a_small_pool_and_in_a_large_one(kind: str, new: int, softcap: dict) -> None:
    costs = []
    for pages in (40, 10_000 if kind == "packed" else 1000):
        step = step_of(layer(kind, pages), new, **softcap)
        step()  # tables that are made once
        costs.append(allocated_bytes(step))
    assert costs[0] == costs[1] > 0
