"""Decode steps of models with latent attention (MLA) in batches by kernels: in Triton's interpreter, and captured and
compiled on a GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.batching_cases import NEAR_TIE, Session, agreement, greedy, model_of, prompts
from tests.support.kernel_cases import DEVICE, child, gpu, runs_kernels
from tq_hf.ops import dispatch, latent_pages

NEW = 40


def latent_model(dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A random model whose latents the kernels take, without experts, which some versions route on the host."""
    sizes = dict(kv_lora_rank=64, qk_rope_head_dim=16, first_k_dense_replace=2) | changes
    return model_of("deepseek_v3", **sizes).to(DEVICE, dtype)


def session_of(model: PreTrainedModel, **changes: Any) -> Session:
    return Session(model, "4bit_nc", overrides=dict(balance=False), **changes)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of steps of a layer that the host launched: of one token for each request, by kernels, and others."""
    found: Counter[str] = Counter()
    step, by_kernels = latent_pages.latent_step, dispatch.attend_latent_pages

    def counted(*arguments: Any) -> torch.Tensor:
        found["decode" if arguments[5].max_q == 1 else "others"] += 1
        return step(*arguments)

    monkeypatch.setattr(latent_pages, "latent_step", counted)
    monkeypatch.setattr(
        dispatch, "attend_latent_pages", lambda *arguments: (found.update(["kernels"]), by_kernels(*arguments))[1]
    )
    return found


test_steps_in_the_interpreter = child(__file__)


@runs_kernels
def test_kernels_compute_decode_steps(steps: Counter[str]) -> None:
    model, inputs = latent_model(), prompts([3, 132, 255])
    with session_of(model, use_cuda_graph=False) as session:
        found = session.run(inputs, greedy(6))
        assert steps["kernels"] >= steps["decode"] >= 5 * 2, "steps after the prompts, and layers"
        expected = [session.oracle.generate(prompt, 6) for prompt in inputs]
    assert agreement(found, expected) > 0.8


@runs_kernels
def test_torch_attends_from_prompts_only(steps: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of a prompt comes with single tokens of other requests, which kernels attend from."""
    attend = dispatch.attend_absorbed
    monkeypatch.setattr(dispatch, "attend_absorbed", lambda *args: steps.update(["torch"]) or attend(*args))
    model, (long, short) = latent_model(), prompts([300, 20])
    with session_of(model, max_batch_tokens=160, allow_block_sharing=False) as session:
        found = session.run([short, long], greedy(8))
        assert steps["kernels"] > steps["decode"] > 0 and steps["others"] >= 2 * 2
        assert not steps["torch"]
        assert agreement(found[:1], [session.oracle.generate(short, 8)]) > 0.8


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_captured_and_compiled_steps_answer_as_others_and_torch_attends_in_none(
    dtype: torch.dtype, steps: Counter[str]
) -> None:
    """Batches of other sizes round otherwise: those of graphs are padded."""
    model, inputs, found = latent_model(dtype), prompts([5, 120, 127, 128, 129, 250, 300, 47, 700]), []
    plain = dict(use_cuda_graph=False, use_async_batching=False)
    for way in (plain, {}, {"default_compile_level": 1}):
        steps.clear()
        with session_of(model, allow_block_sharing=False, **way) as session:
            found.append(session.run(inputs, greedy(NEW)))
            runner = session.manager.batch_processor.model_runner
            assert runner.use_cuda_graph_decode == (way is not plain)
            assert (runner.layers is not None) == ("default_compile_level" in way)
            assert session.pages_in_use() == 0
        assert steps["kernels"] >= steps["decode"] > 0, "no step of one token each by torch"
        assert (steps["kernels"] >= 30 * 2) == (way is plain), "replayed steps launch nothing"
    assert agreement(found[1], found[0]) > 0.9 and session.oracle.furthest(inputs, found[2], found[0]) < NEAR_TIE


@gpu
def test_most_tokens_are_those_of_generate() -> None:
    """Of published widths, in float32, in which kernels still compute products of fp16."""
    heads = dict(num_attention_heads=20, num_key_value_heads=20)
    model = latent_model(kv_lora_rank=512, qk_rope_head_dim=64, head_dim=64, **heads)
    inputs = prompts([3, 127, 132, 300])
    with session_of(model) as session:
        found = session.run(inputs, greedy(60))
        expected = [session.oracle.generate(prompt, 60) for prompt in inputs]
        assert session.manager.batch_processor.model_runner.use_cuda_graph_decode
    assert agreement(found, expected) > 0.7


@gpu
def test_without_kernels_answers_are_those_of_generate_too(steps: Counter[str]) -> None:
    """No kernel takes so few channels: torch computes all steps, and reads lengths on the host."""
    model, inputs = latent_model(kv_lora_rank=32), prompts([3, 127, 132, 300])
    with session_of(model) as session:
        found = session.run(inputs, greedy(60))
        assert not session.manager.batch_processor.model_runner.use_cuda_graph_decode and not steps["kernels"]
        expected = [session.oracle.generate(prompt, 60) for prompt in inputs]
    assert agreement(found, expected) > 0.7


@gpu
def test_memory_stays_within_the_prediction() -> None:
    model = latent_model(torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64, head_dim=64)
    with session_of(model, num_blocks=2000, max_batch_tokens=1024, max_requests_per_batch=32) as session:
        session.capture()
        cache = session.cache
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated() - cache.cache_tensor.nbytes - cache.scratch.nbytes
        torch.cuda.reset_peak_memory_stats()
        session.run(prompts([1 + (37 * i) % 900 for i in range(50)]), greedy(20))
        predicted = cache.memory.compute_memory_footprint(cache.max_batch_tokens, cache.num_sectors)
        assert torch.cuda.max_memory_allocated() - before < 1.1 * predicted + 2 * 2**25
        assert cache.scratch.nbytes > 0
