"""Sliding windows on a GPU: decode steps in CUDA graphs, prompts between them."""

from __future__ import annotations

import pytest
import torch
from test_batches_cuda import LENGTHS, NEW
from transformers import PreTrainedModel

from tests.support.batching_cases import Session, agreement, greedy, mixed, prompts

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module", params=["gemma3", "gemma2", "gpt_oss"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return mixed(request.param, head_dim=128, num_attention_heads=8).cuda().to(torch.bfloat16)


def test_answers_do_not_depend_on_graphs_asynchrony_or_block_tables(model: PreTrainedModel) -> None:
    inputs, ways = prompts(LENGTHS), []
    for way in ({}, {"use_cuda_graph": False, "use_async_batching": False}, {"max_blocks_per_request": 0}):
        with Session(model, **way) as session:
            ways.append(session.run(inputs, greedy(NEW)))
            assert session.pages_in_use() == 0
            assert session.cache.cache_tensor[: session.cache.bytes_per_sector].count_nonzero() == 0
            if not way:
                pairs = session.manager.batch_processor.inputs_and_outputs.io_pairs
                assert all(pair.device_io.graphs._storage for pair in pairs)
    assert agreement(ways[0], ways[1]) > 0.9 and agreement(ways[0], ways[2]) > 0.7


def test_most_tokens_are_those_of_generate(model: PreTrainedModel) -> None:
    """In float32, in which kernels still compute products of fp16: rarely another token is the largest. Experts in
    float32 cannot be captured in a graph."""
    model = model.float()
    inputs = prompts(LENGTHS)
    with Session(model, use_cuda_graph=False) as session:
        found = session.run(inputs, greedy(NEW))
        expected = [session.oracle.generate(prompt, NEW) for prompt in inputs]
    assert agreement(found, expected) > 0.7


@pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled")
def test_compiled_steps_answer_as_others(model: PreTrainedModel) -> None:
    """In float32: fused kernels round bf16 less often, and experts are chosen by small differences."""
    model, inputs, found = model.float(), prompts(LENGTHS), []
    for level in (0, 1):
        with Session(model, use_cuda_graph=False, default_compile_level=level) as session:
            found.append(session.run(inputs, greedy(NEW)))
    assert agreement(*found) > 0.7
