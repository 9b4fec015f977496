"""Models with sliding-window layers: their windows are dense pages of the pool that packed ones share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from tests.support.batching_cases import Session, Steps, greedy, mixed, prompts

LENGTHS = [5, 95, 96, 97, 128, 300, 700]


def of_windows(session: Session) -> torch.Tensor:
    """The page of windows that nobody writes to."""
    return session.cache.cache_tensor[: session.cache.bytes_per_sector]


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "gemma2", "qwen2"])
def test_answers_are_those_of_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, steps = mixed(name), prompts(LENGTHS), Steps(monkeypatch)
    with Session(model, num_blocks=400) as session:
        expected = [session.oracle.generate(prompt, 10) for prompt in inputs]
        assert session.run(inputs, greedy(10)) == expected
        assert session.pages_in_use() == 0
        # What pages are full of is nobody's.
        session.cache.cache_tensor[session.cache.bytes_per_sector :].fill_(255)
        assert session.run(inputs, greedy(10)) == expected
        assert of_windows(session).count_nonzero() == 0
    assert steps.kinds() == {"table", "lists"}


def test_the_kinds_of_layers_are_those_of_the_model() -> None:
    with Session(mixed("qwen2")) as session:
        session.run(prompts([5]), greedy(1))
        cache = session.cache
        assert cache.allocator.layer_indices == [0] and cache.windows.layer_indices == [1]
        assert not cache.use_prefix_sharing


def test_without_block_tables_answers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, steps = prompts([5, 120, 300]), Steps(monkeypatch)
    with Session(mixed("gpt_oss"), max_blocks_per_request=0) as session:
        assert session.run(inputs, greedy(10)) == [session.oracle.generate(prompt, 10) for prompt in inputs]
    assert steps.kinds() == {"lists"}


def test_tables_have_room_for_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with long windows they are more pages than those of the longest request that tables serve."""
    (prompt,), steps = prompts([1200]), Steps(monkeypatch)
    model = mixed("gemma3", sliding_window=1100)
    with Session(model, max_blocks_per_request=28) as session:
        assert session.run([prompt], greedy(6)) == [session.oracle.generate(prompt, 6)]
        assert session.cache.windows.pages_of(1100) > 28
    assert steps.kinds() == {"table", "lists"}


@pytest.mark.parametrize("length", [96, 129, 257, 300])
def test_a_prompt_in_chunks_reads_as_one_that_generate_is_given_in_chunks(length: int) -> None:
    (prompt,) = prompts([length])
    with Session(mixed("gemma3"), max_batch_tokens=95) as session:
        assert session.run([prompt], greedy(6)) == [session.oracle.chunked(prompt, 6, [95] * ((length - 1) // 95))]


def test_chunks_and_answers_in_the_same_steps() -> None:
    """While a prompt is read little by little, others have one new token in a step."""
    inputs = prompts([30, 60, 700])
    with Session(mixed("gpt_oss"), max_batch_tokens=100) as session:
        found = session.run(inputs, greedy(30))
        assert found[0] == session.oracle.generate(inputs[0], 30)
        # The long one has what the others leave it: 10 of the first 100, then 98 a step.
        assert found[2] == session.oracle.chunked(inputs[2], 30, [10, *[98] * 7])


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("length", [300, 129, 40])
def test_forks_go_on_where_their_parent_was(length: int, sharing: bool) -> None:
    (prompt,) = prompts([length])
    generation = GenerationConfig(max_new_tokens=8, do_sample=True, top_k=1, num_return_sequences=3, eos_token_id=-1)
    with Session(mixed("gemma3"), allow_block_sharing=sharing) as session:
        assert session.run([prompt], generation) == [session.oracle.chunked(prompt, 8, [length - 1])] * 3
        assert session.pages_in_use() == 0


def test_a_prompt_that_was_answered_before_is_read_again_whole() -> None:
    """As transformers does: a prefix in packed pages is of use only with the windows at its end."""
    (prompt,) = prompts([300])
    with Session(mixed("gpt_oss")) as session:
        assert session.run([prompt], greedy(6)) == session.run([prompt], greedy(6))
        assert session.run([prompt], greedy(6)) == [session.oracle.generate(prompt, 6)]


PREEMPTED = prompts([60] * 6, seed=3)
"""Six requests of 17 pages for rings and sinks and two for windows, which want a third when they have 73 tokens."""


def small_pool(**changes: Any) -> Session:
    """Room for all of `PREEMPTED` with 72 tokens, and for five with more."""
    return Session(mixed("gemma3"), num_blocks=16, max_batch_tokens=700, safety_margin=0.0, **changes)


def test_requests_that_outgrow_the_pool_together_are_preempted_and_all_finish() -> None:
    with small_pool() as session:
        session.run(PREEMPTED[:1], greedy(1))
        resets = session.recorded_waiting()
        found = session.run(PREEMPTED, greedy(60))
        assert session.pages_in_use() == 0
        counts = {name: resets.count(name) - 1 for name in resets}
        assert sum(counts.values()) > 0
        for name, out, prompt in zip(sorted(counts), found, PREEMPTED, strict=True):
            assert len(out) == 60
            assert out == session.oracle.generate(prompt, 60) or counts[name] > 0


def test_windows_offloaded_to_the_cpu_come_back_as_they_were(offloaded: list[set[str]]) -> None:
    with small_pool(cpu_offload_space=0.01) as session:
        found = session.run(PREEMPTED, greedy(60))
        assert any(offloaded)
        assert found == [session.oracle.generate(prompt, 60) for prompt in PREEMPTED]
        assert session.pages_in_use() == 0


def test_a_request_is_refused_if_its_pages_and_its_window_are_more_than_the_pool() -> None:
    with Session(mixed("gemma3"), num_blocks=4, max_batch_tokens=2048) as session:
        session.run(prompts([5]), greedy(1))
        cache = session.cache
        longest = cache.max_request_tokens
        assert cache._sectors_of(longest) <= cache.num_sectors < cache._sectors_of(longest + 1)
        (prompt,) = prompts([longest - 3])
        assert [len(out) for out in session.run([prompt], greedy(4))] == [4]
        results = session.batching.generate_batch([prompt], greedy(5), session.options, persistent_manager=True)
        assert f"which has room for {longest:,}" in next(iter(results.values())).error


@pytest.mark.usefixtures("padded")
def test_padding_changes_no_answer() -> None:
    inputs = prompts([5, 95, 128, 300, 47])
    with Session(mixed("gpt_oss"), max_requests_per_batch=8, q_padding_interval_size=64) as session:
        assert session.run(inputs, greedy(10)) == [session.oracle.generate(prompt, 10) for prompt in inputs]
        assert session.pages_in_use() == 0
        assert of_windows(session).count_nonzero() == 0


def test_asynchronous_batches_change_no_answer(asynchronous: dict[str, Any]) -> None:
    inputs = prompts([5, 95, 128, 300, 47])
    with Session(mixed("gemma3"), **asynchronous) as session:
        assert session.run(inputs, greedy(10)) == [session.oracle.generate(prompt, 10) for prompt in inputs]
        assert session.pages_in_use() == 0
