"""Layers that `skip_layers` keeps dense, in pages: tokens are those of `generate()` with the same config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.batching_cases import Session, agreement, greedy, model_of, options, prompts
from tq_hf import TurboQuantBatching
from tq_hf.tensors.pages import LayerPages

PRESET = "4bit_nc"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return model_of(num_hidden_layers=3)


def session_of(model: PreTrainedModel, overrides: dict[str, Any], **changes: Any) -> Session:
    return Session(model, PRESET, overrides=dict(balance=False) | overrides, **changes)


def test_a_dense_layer_takes_a_page_of_rows_and_the_others_packed_ones(model: PreTrainedModel) -> None:
    with session_of(model, dict(skip_layers=(-1,))) as session:
        session.run(prompts([5]), greedy(1))
        allocator = session.cache.allocator
        packed = allocator.tq_config.layout(allocator.head_dim).block_bytes
        heads, rows = allocator.num_key_value_heads, 2 * 128 * allocator.head_dim * 4
        dense = -(-heads * rows // packed) * packed
        assert allocator.bytes_per_block == heads * 2 * packed + dense
        pages: LayerPages = allocator.pages[2]
        assert pages.blocks is not None and pages.blocks.shape[1:] == (2, 128, 2 * allocator.head_dim)
        assert pages.blocks.dtype == torch.float32


def test_steps_that_read_dense_blocks_are_not_captured(model: PreTrainedModel) -> None:
    batching = TurboQuantBatching(model, PRESET, skip_layers=(1,), balance=False)
    for graphs in (True, (False, True)):
        with pytest.raises(ValueError, match=r"dense layers \(\[1\] by `skip_layers`\)"):
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
