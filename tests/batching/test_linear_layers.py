"""Models with linear layers: the states of a request are one page of the pool that packed pages share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from examples.measure.quality.family_configs import tiny_model
from tests.support.batching_cases import Log, Session, agreement, greedy, hybrid, prompts
from tests.support.kernel_cases import DEVICE, gpu
from tq_hf.compat import as_input


def pages_that_nobody_writes(session: Session) -> torch.Tensor:
    return session.cache.cache_tensor[: session.cache.bytes_per_sector]


def test_states_and_latents_of_a_request_survive_chunks_preemption_and_forks() -> None:
    inputs = prompts([300, 200, 400, 129, 5, 120])
    forks = GenerationConfig(max_new_tokens=8, do_sample=True, top_k=1, num_return_sequences=3, eos_token_id=-1)
    few = dict(num_blocks=60, max_batch_tokens=128, overrides=dict(balance=False))
    with Session(tiny_model("kimi_linear"), **few) as session:
        assert session.run(inputs, greedy(12)) == [session.oracle.generate(prompt, 12) for prompt in inputs]
        assert session.cache.states is not None and session.cache.holds_latents and session.pages_in_use() == 0
        assert session.run(inputs[3:4], forks) == [session.oracle.chunked(inputs[3], 8, [128])] * 3


def test_states_have_the_shapes_of_the_model() -> None:
    with Session(hybrid()) as session:
        session.run(prompts([5]), greedy(1))
        cache = session.cache
        # 64 channels of keys, 64 of values, 4 inputs each; 4 heads of 16 x 16.
        held = {name: tuple(states.shape[1:]) for name, states in cache.states.pages[0].items()}
        assert held == {("conv", 0): (128, 4), ("recurrent", 0): (4, 16, 16)}


def test_each_fork_has_states_of_its_own() -> None:
    """The log-probabilities of its tokens are those of a cache that reads them alone."""
    (prompt,), model = prompts([40]), hybrid()
    generation = GenerationConfig(max_new_tokens=12, do_sample=True, num_return_sequences=4, eos_token_id=-1)
    with Session(model, return_logprobs=True, seed=3) as session:
        found = list(session.batching.generate_batch([prompt], generation, session.options).values())
        assert len(found) == 4 == len({tuple(each.generated_tokens) for each in found})
        model.set_attn_implementation("turboquant")
        for each in found:
            cache, expected, read = session.oracle.cache(), [], [prompt[:-1], prompt[-1:]]
            with torch.no_grad():
                for token in each.generated_tokens:
                    for tokens in read:
                        logits = model(torch.tensor([tokens]), **as_input(cache)).logits[0, -1]
                    expected.append(logits.log_softmax(-1)[token].item())
                    read = [[token]]
            assert each.logprobs == pytest.approx(expected, abs=1e-3)


PREEMPTED = prompts([100] * 6, seed=3)
"""Six requests of 17 pages for rings and sinks and a sector for states, which want a page more at 132 tokens."""


def small_pool(**changes: Any) -> Session:
    """Room for five of `PREEMPTED` with 131 tokens, and for four with more."""
    return Session(hybrid(), num_blocks=86, max_batch_tokens=700, safety_margin=0.0, **changes)


def test_a_request_preempted_while_its_token_is_computed_reads_no_token_twice(
    asynchronous: dict[str, Any], offloaded: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers discards the token and reads the one before again, which a state has read already: such a request
    starts anew."""
    log = Log(monkeypatch)
    with small_pool(cpu_offload_space=0.01, **asynchronous) as session:
        found = session.batching.generate_batch(PREEMPTED, greedy(40), session.options)
        again = 0
        for (name, result), prompt in zip(found.items(), PREEMPTED, strict=True):
            lives = log.lives(name)
            again += len(lives) > 1
            assert all(life[0][0] == 0 for life in lives), "a state was taken up where it was not left"
            assert len(result.generated_tokens) == 40
            assert result.generated_tokens == session.oracle.generate(prompt, 40) or len(lives) > 1
        assert again


def test_blocks_that_are_asked_for_are_those_of_packed_tokens() -> None:
    """States come in addition, for the requests that these blocks have room for: 34 are two rings with their sinks."""
    with Session(hybrid(), num_blocks=34, overrides={"balance": False}) as session:
        session.run(prompts([5]), greedy(1))
        cache = session.cache
        assert cache.bytes_per_sector == 2 * cache.allocator.bytes_per_block and cache.num_sectors == 17 + 2
        assert session.manager.continuous_batching_config.max_requests_per_batch == 19
        longest = cache.max_request_tokens
        assert cache._sectors_of(longest) == 19 < cache._sectors_of(longest + 1)


def test_memory_has_room_for_the_states_of_all_requests() -> None:
    """On a CPU, 16 requests of 8,192 tokens, or of the model's positions."""
    model = hybrid()
    with Session(model, num_blocks=None, overrides={"balance": False}) as session:
        manager = session.batching.init_continuous_batching(greedy(1), session.options)
        manager.warmup()
        cache = manager.batch_processor.cache
        length = min(8192, model.config.max_position_embeddings)
        assert cache.num_sectors >= 16 * cache._sectors_of(length) and cache._sectors_of(length) > 1 + length // 256


@gpu
@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled:UserWarning")  # inductor, of the router
@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_captured_and_compiled_steps_answer_as_others(family: str) -> None:
    """Batches of other sizes round otherwise: those of graphs are padded. Requests of a graph come and go."""
    model = (hybrid() if family == "qwen3_next" else tiny_model(family)).to(DEVICE)
    model.set_experts_implementation("batched_mm")  # grouped products of float32 cannot be captured
    inputs, found = prompts([5, 120, 127, 128, 129, 250, 300, 47, 450]), []
    plain = dict(use_cuda_graph=False, use_async_batching=False)
    for way in (plain, {}, {"default_compile_level": 1}):
        with Session(model, num_blocks=2000, max_requests_per_batch=6, **way) as session:
            found.append(session.run(inputs, greedy(40)))
            runner = session.manager.batch_processor.model_runner
            assert runner.use_cuda_graph_decode == (way is not plain)
            assert (runner.layers is not None) == ("default_compile_level" in way)
            assert session.pages_in_use() == 0
            assert pages_that_nobody_writes(session).count_nonzero() == 0
            expected = [session.oracle.generate(prompt, 40) for prompt in inputs]
        assert agreement(found[-1], expected) > 0.7
    assert agreement(found[1], found[0]) > 0.9 and agreement(found[2], found[0]) > 0.7


def test_the_model_takes_no_other_call_while_it_serves() -> None:
    model = hybrid()
    with Session(model) as session:
        session.run(prompts([5]), greedy(1))
        session.manager.start()
        with pytest.raises(ValueError, match="takes no other calls. Stop the manager first"):
            model(torch.tensor([[1, 2, 3]]))
        session.manager.stop(keep_for_next_session=True)
        assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
