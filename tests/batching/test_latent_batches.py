"""Models with latent attention (MLA) in batches: pages hold packed latents, and tokens are those of `generate()`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tq_kernels.types import ChannelScales
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedModel

from examples.measure.quality.family_configs import tiny_model
from tests.support.batching_cases import Session, check_one_graph, greedy, model_of, options, prompts
from tq_hf import Balance, TurboQuantBatching
from tq_hf.ops import dispatch, latent_pages

PRESET = "4bit_nc"
FAMILIES = ["deepseek_v2", "glm4_moe_lite", "minicpm3", "youtu", "mistral4", "longcat_flash", "sarvam_mla"]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return model_of("deepseek_v3")


def session_of(model: PreTrainedModel, overrides: dict[str, Any] | None = None, **changes: Any) -> Session:
    return Session(model, PRESET, overrides=dict(balance=False) | (overrides or {}), **changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_answer_as_generate(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("transformers does not have it yet")
    inputs = prompts([20, 300])
    with session_of(tiny_model(family)) as session:
        assert session.run(inputs, greedy(12)) == [session.oracle.generate(prompt, 12) for prompt in inputs]


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


@pytest.mark.parametrize("sharing", [True, False])
def test_forks_go_on_where_their_parent_was(model: PreTrainedModel, sharing: bool) -> None:
    (prompt,) = prompts([300])
    generation = GenerationConfig(max_new_tokens=8, do_sample=True, top_k=1, num_return_sequences=3, eos_token_id=-1)
    with session_of(model, allow_block_sharing=sharing) as session:
        assert session.run([prompt], generation) == [session.oracle.chunked(prompt, 8, [299])] * 3
        assert session.pages_in_use() == 0


SMALL = dict(num_blocks=104, max_batch_tokens=700, safety_margin=0.0)


def test_requests_that_are_preempted_finish_and_others_are_undisturbed(model: PreTrainedModel) -> None:
    inputs = prompts([100] * 6, seed=3)
    with session_of(model, allow_block_sharing=False, **SMALL) as session:
        session.run(inputs[:1], greedy(1))
        resets = session.recorded_waiting()
        found = session.run(inputs, greedy(60))
        counts = {name: resets.count(name) - 1 for name in resets}
        assert sum(counts.values()) > 0
        for name, out, prompt in zip(sorted(counts), found, inputs, strict=True):
            assert len(out) == 60 and (counts[name] > 0 or out == session.oracle.generate(prompt, 60))


def test_requests_come_back_from_the_cpu_with_their_latents(model: PreTrainedModel, offloaded: list[set[str]]) -> None:
    inputs = prompts([100] * 6, seed=3)
    with session_of(model, cpu_offload_space=0.05, **SMALL) as session:
        found = session.run(inputs, greedy(60))
        assert any(offloaded), "some were offloaded"
        assert found == [session.oracle.generate(prompt, 60) for prompt in inputs]


def test_padded_batches_and_asynchronous_ones_answer_as_generate(
    model: PreTrainedModel, padded: None, asynchronous: dict[str, Any]
) -> None:
    inputs = prompts([3, 130, 300])
    with session_of(model, **asynchronous) as session:
        assert session.run(inputs, greedy(20)) == [session.oracle.generate(prompt, 20) for prompt in inputs]


def test_a_manager_sleeps_and_answers_as_before(model: PreTrainedModel) -> None:
    (prompt,) = prompts([300])
    with session_of(model) as session:
        found, size = session.run([prompt], greedy(8)), session.cache.cache_tensor.nbytes
        assert session.batching.sleep() == size
        assert session.run([prompt], greedy(8)) == found


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


def test_a_cancelled_request_gives_its_pages_back(model: PreTrainedModel) -> None:
    with session_of(model) as session:
        session.run(prompts([5]), greedy(1))
        manager = session.manager
        manager.start()
        name = manager.add_request(prompts([300])[0], max_new_tokens=600, streaming=True)
        next(manager.request_id_iter(name))
        manager.cancel_request(name)
        other = manager.add_request(prompts([40])[0], max_new_tokens=6)
        # `None` while the next result is one of the cancelled request.
        while (result := manager.get_result(other, timeout=60)) is None:
            assert manager.is_running()
        manager.stop(block=True, keep_for_next_session=True)
        assert result.generated_tokens == session.oracle.generate(prompts([40])[0], 6)
        assert session.pages_in_use() == 0


def test_graphs_of_steps_with_prompts_are_refused(model: PreTrainedModel) -> None:
    batching = TurboQuantBatching(model, PRESET, balance=False)
    with pytest.raises(ValueError, match=r"steps with prompts .* cannot be captured.*\(False, True\)"):
        batching.init_continuous_batching(greedy(2), options(use_cuda_graph=True))


def test_a_compiled_step_is_one_graph_and_answers_alike(model: PreTrainedModel) -> None:
    check_one_graph(partial(session_of, model), prompts([5, 120, 300]), sessions=1)


@pytest.mark.slow
def test_a_step_that_inductor_compiled_answers_alike(model: PreTrainedModel) -> None:
    inputs, found = prompts([5, 120, 300]), []
    for level in (0, 1):
        with session_of(model, default_compile_level=level) as session:
            found.append(session.run(inputs, greedy(20)))
    assert found[0] == found[1]


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
