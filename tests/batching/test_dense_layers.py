"""Layers that `skip_layers` keeps dense, in pages: tokens are those of `generate()` with the same config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from tests.support.batching_cases import Session, agreement, greedy, mixed, model_of, options, prompts
from tq_hf import TurboQuantBatching
from tq_hf.tensors.pages import LayerPages

PRESET = "4bit_nc"
SKIPPED = [dict(skip_layers=(0,)), dict(layers={-1: None}), dict(skip_layers=(1,), sink_tokens=0, residual_length=0)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return model_of(num_hidden_layers=3)


def session_of(model: PreTrainedModel, overrides: dict[str, Any], **changes: Any) -> Session:
    return Session(model, PRESET, overrides=dict(balance=False) | overrides, **changes)


@pytest.mark.parametrize("overrides", SKIPPED, ids=str)
def test_whole_and_chunked_prompts_answer_as_generate(model: PreTrainedModel, overrides: dict[str, Any]) -> None:
    inputs = prompts([3, 120, 250, 380, 765])  # all but the first come to the end of a block
    with session_of(model, overrides, allow_block_sharing=False) as session:
        assert session.run(inputs, greedy(24)) == [session.oracle.generate(prompt, 24) for prompt in inputs]
    with session_of(model, overrides, allow_block_sharing=False, max_batch_tokens=200) as session:
        found = session.run([inputs[4]], greedy(20))
        assert found == [session.oracle.chunked(inputs[4], 20, (200, 200, 200))]


def test_a_sliding_layer_and_a_dense_one_beside_a_packed_one() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    model = mixed("gemma3", num_hidden_layers=3, layer_types=kinds)
    inputs = prompts([50, 400])
    with session_of(model, dict(skip_layers=(1,))) as session:
        assert session.run(inputs, greedy(40)) == [session.oracle.generate(prompt, 40) for prompt in inputs]


def test_a_shared_prefix_is_read_from_the_pages_of_another(model: PreTrainedModel) -> None:
    prefix, (first, second) = prompts([300])[0], prompts([20, 31], seed=2)
    with session_of(model, dict(skip_layers=(0,))) as session:
        session.run([prefix + first], greedy(4))
        assert session.run([prefix + second], greedy(30)) == [
            session.oracle.after_prefix(prefix + second, 30, 4 + 2 * 128)
        ]


@pytest.mark.parametrize("sharing", [True, False])
def test_forks_go_on_where_their_parent_was(model: PreTrainedModel, sharing: bool) -> None:
    (prompt,) = prompts([300])
    generation = GenerationConfig(max_new_tokens=8, do_sample=True, top_k=1, num_return_sequences=3, eos_token_id=-1)
    with session_of(model, dict(skip_layers=(0,)), allow_block_sharing=sharing) as session:
        assert session.run([prompt], generation) == [session.oracle.chunked(prompt, 8, [299])] * 3
        assert session.pages_in_use() == 0


def test_requests_that_are_preempted_finish_and_others_are_undisturbed(model: PreTrainedModel) -> None:
    inputs, small = prompts([100] * 6, seed=3), dict(num_blocks=88, max_batch_tokens=700, safety_margin=0.0)
    with session_of(model, dict(skip_layers=(0,)), allow_block_sharing=False, **small) as session:
        session.run(inputs[:1], greedy(1))
        resets = session.recorded_waiting()
        found = session.run(inputs, greedy(36))
        counts = {name: resets.count(name) - 1 for name in resets}
        assert sum(counts.values()) > 0
        for name, out, prompt in zip(sorted(counts), found, inputs, strict=True):
            assert len(out) == 36 and (counts[name] > 0 or out == session.oracle.generate(prompt, 36))


def test_requests_come_back_from_the_cpu_with_their_dense_blocks(
    model: PreTrainedModel, offloaded: list[set[str]]
) -> None:
    inputs = prompts([100] * 6, seed=3)
    small = dict(num_blocks=88, max_batch_tokens=700, safety_margin=0.0, cpu_offload_space=0.05)
    with session_of(model, dict(skip_layers=(0,)), **small) as session:
        found = session.run(inputs, greedy(60))
        assert any(offloaded), "some were offloaded"
        assert found == [session.oracle.generate(prompt, 60) for prompt in inputs]


def test_a_dense_layer_takes_a_page_of_rows_and_the_others_packed_ones(model: PreTrainedModel) -> None:
    with session_of(model, dict(skip_layers=(-1,))) as session:
        session.run(prompts([5]), greedy(1))
        allocator = session.cache.allocator
        packed = allocator.tq_config.layout(allocator.head_dim).block_bytes
        heads, rows = allocator.num_key_value_heads, 2 * 128 * allocator.head_dim * 4
        dense = -(-heads * rows // packed) * packed
        assert allocator.bytes_per_block == heads * 2 * packed + dense
        pages: LayerPages = allocator.pages[2]
        assert pages.blocks is not None and pages.blocks.shape[1:] == (2, 2, 128, allocator.head_dim)
        assert pages.blocks.dtype == torch.float32


def test_steps_that_read_dense_blocks_are_not_captured(model: PreTrainedModel) -> None:
    batching = TurboQuantBatching(model, PRESET, skip_layers=(1,), balance=False)
    for graphs in (True, (False, True)):
        with pytest.raises(ValueError, match=r"dense blocks of pages \(layers \[1\] by `skip_layers`\)"):
            batching.init_continuous_batching(greedy(2), options(use_cuda_graph=graphs))


@pytest.mark.cuda
def test_on_a_gpu_torch_computes_them_beside_kernels() -> None:
    """In float32, in which kernels still compute products of fp16: rarely another token is the largest."""
    model, inputs = (
        model_of(num_hidden_layers=3, head_dim=128, num_attention_heads=8).cuda(),
        prompts([3, 127, 132, 300]),
    )
    with session_of(model, dict(skip_layers=(1,))) as session:
        found = session.run(inputs, greedy(150))
        expected = [session.oracle.generate(prompt, 150) for prompt in inputs]
        assert not session.manager.batch_processor.model_runner.use_cuda_graph_decode
    assert agreement(found, expected) > 0.7
