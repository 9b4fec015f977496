"""Models with latent attention (MLA) in batches, whose pages hold packed latents, and layers that `skip_layers` keeps
dense: tokens are those of `generate()` with the same config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tq_kernels.types import ChannelScales
from transformers import PreTrainedModel

from tests.support.batching_cases import Session, agreement, greedy, model_of, options, prompts
from tq_hf import Balance, TurboQuantBatching
from tq_hf.ops import dispatch, latent_pages
from tq_hf.tensors.pages import LayerPages

PRESET = "4bit_nc"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return model_of("deepseek_v3")


def session_of(model: PreTrainedModel, overrides: dict[str, Any] | None = None, **changes: Any) -> Session:
    return Session(model, PRESET, overrides=dict(balance=False) | (overrides or {}), **changes)


def test_channels_are_scaled_as_by_generate(model: PreTrainedModel) -> None:
    inputs, ramp = prompts([40, 400]), [torch.linspace(0.25, 4, n).bfloat16().half()[None, None] for n in (32, 16)]
    balance = Balance({layer: ChannelScales(*ramp) for layer in range(2)})
    with Session(model, PRESET, overrides=dict(balance=balance)) as session:
        found = session.run(inputs, greedy(24))
        scales = session.cache.allocator.pages[0].channel_scales
        assert torch.equal(scales.keys, ramp[0]) and torch.equal(scales.values, ramp[1])
        assert found == [session.oracle.generate(prompt, 24) for prompt in inputs]


def test_heads_are_expanded_a_few_at_a_time(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,) = prompts([500])
    heads: list[int] = []
    real = dispatch.attend_dense
    monkeypatch.setattr(dispatch, "attend_dense", lambda *args: heads.append(args[0].shape[1]) or real(*args))
    monkeypatch.setattr(latent_pages, "EXPANDED_BYTES", 1)
    with session_of(model, max_batch_tokens=200, allow_block_sharing=False) as session:
        found = session.run([prompt], greedy(12))
        assert set(heads) == {1}
        assert found == [session.oracle.chunked(prompt, 12, (200, 200))]


def test_steps_absorb_the_up_projection(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, calls = prompts([300, 200]), []
    real = dispatch.attend_absorbed
    monkeypatch.setattr(dispatch, "attend_absorbed", lambda *args: calls.append(args[0].shape[2]) or real(*args))
    with session_of(model) as session:
        session.run(inputs, greedy(5))
    assert calls == [1] * (4 * 2 * 2), "steps, layers and requests"


def test_pages_have_the_bytes_of_latents_and_rotary_keys(model: PreTrainedModel) -> None:
    with session_of(model, dict(skip_layers=(-1,))) as session:
        session.run(prompts([5]), greedy(1))
        allocator = session.cache.allocator
        layout = session.oracle.config.of_latents().layout(32, 16)
        assert layout.value_bits == 8
        rows = 128 * (32 + 16) * 4
        dense = -(-rows // layout.block_bytes) * layout.block_bytes
        assert session.cache.bytes_per_block == allocator.bytes_per_block == layout.block_bytes + dense
        packed, plain = allocator.pages[0], allocator.pages[1]
        assert packed.tensors.rows.shape[1:] == (1, allocator.shape.page_rows, 48)
        assert plain.blocks is not None and plain.blocks.shape[1:] == (1, 128, 48)
        assert plain.blocks.dtype == torch.float32


def test_an_expansion_that_is_not_one_product_is_refused() -> None:
    model = model_of("deepseek_v3")
    attention: Any = model.model.layers[1].self_attn
    words = r"DeepseekV3ForCausalLM expands latents .MLA. of layer 1 not by .*TurboQuantCache"
    with session_of(model) as session:
        session.run(prompts([40]), greedy(2))
        session.batching.sleep()
        attention.kv_b_proj.register_forward_hook(lambda module, args, out: out * 2)
        with pytest.raises(ValueError, match=words):
            session.run(prompts([40]), greedy(2))
        assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match=words):
        TurboQuantBatching(model)


@pytest.fixture(scope="module")
def dense_model() -> PreTrainedModel:
    return model_of(num_hidden_layers=3)


def test_a_dense_layer_takes_a_page_of_rows_and_the_others_packed_ones(dense_model: PreTrainedModel) -> None:
    with session_of(dense_model, dict(skip_layers=(-1,))) as session:
        session.run(prompts([5]), greedy(1))
        allocator = session.cache.allocator
        packed = allocator.tq_config.layout(allocator.head_dim).block_bytes
        heads, rows = allocator.num_key_value_heads, 2 * 128 * allocator.head_dim * 4
        dense = -(-heads * rows // packed) * packed
        assert allocator.bytes_per_block == heads * 2 * packed + dense
        pages: LayerPages = allocator.pages[2]
        assert pages.blocks is not None and pages.blocks.shape[1:] == (2, 128, 2 * allocator.head_dim)
        assert pages.blocks.dtype == torch.float32


def test_steps_that_read_dense_blocks_are_not_captured(dense_model: PreTrainedModel) -> None:
    batching = TurboQuantBatching(dense_model, PRESET, skip_layers=(1,), balance=False)
    for graphs in (True, (False, True)):
        with pytest.raises(ValueError, match=r"dense layers \(\[1\] by `skip_layers`\)"):
            batching.init_continuous_batching(greedy(2), options(use_cuda_graph=graphs))


@pytest.mark.cuda
def test_on_a_gpu_torch_computes_them_beside_kernels() -> None:
    """In float32, in which kernels still compute products of fp16: rarely another token is the largest."""
    dense_model, inputs = (
        model_of(num_hidden_layers=3, head_dim=128, num_attention_heads=8).cuda(),
        prompts([3, 127, 132, 300]),
    )
    with session_of(dense_model, dict(skip_layers=(1,))) as session:
        found = session.run(inputs, greedy(150))
        expected = [session.oracle.generate(prompt, 150) for prompt in inputs]
        assert not session.manager.batch_processor.model_runner.use_cuda_graph_decode
    assert agreement(found, expected) > 0.7
