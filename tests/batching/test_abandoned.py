"""Requests that are cancelled while a step of theirs is computed, and prompts that are too long to be read."""

from __future__ import annotations

import time
from typing import Any

import pytest
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig

from tests.support.batching_cases import HeldSteps, Session, greedy, model_of, options, prompts
from tq_hf import TurboQuantBatching
from tq_hf.batching.checks import CPU_REQUESTS, CPU_TOKENS
from tq_hf.config import number_of_positions

LAYERS = 6


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> HeldSteps:
    """Steps of the long prompts below wait at their first layer."""
    return HeldSteps(monkeypatch, tokens=200)


def test_a_step_of_a_cancelled_prompt_ends_at_its_layer_and_others_are_answered(paused: HeldSteps) -> None:
    long, short = prompts([900, 30])
    with Session(model_of(num_hidden_layers=LAYERS)) as session:
        manager = session.batching.init_continuous_batching(greedy(5), session.options)
        manager.start()
        name = manager.add_request(long, "long")
        assert paused.reached.wait(60)
        manager.cancel_request(name)
        manager.add_request(short, "short")
        paused.go_on.set()
        result = manager.get_result("short", timeout=60)
        assert result.generated_tokens == session.oracle.generate(short, 5) and result.error is None
        assert paused.layers == 1
        assert manager.batch_processor.cache.pool.count_free_blocks(0) >= 0
        again = manager.add_request(long, "again")
        while not (result := manager.get_result(again, timeout=60)).is_finished():
            pass
        assert result.generated_tokens == session.oracle.generate(long, 5)
        assert paused.layers == 1 + LAYERS
        manager.stop(block=True)


def test_the_id_of_a_cancelled_request_is_free_again(paused: HeldSteps) -> None:
    """And a cancellation that comes late is not of the next request of that id."""
    long, short = prompts([900, 30])
    with Session(model_of(num_hidden_layers=LAYERS)) as session:
        manager = session.batching.init_continuous_batching(greedy(5), session.options)
        manager.start()
        expected = session.oracle.generate(short, 5)
        assert manager.add_request(long, "x") == "x" and manager.add_request(long, "x") == "x#2"
        assert paused.reached.wait(60)
        manager.cancel_request("x")
        manager.cancel_request("x#2")
        paused.go_on.set()
        assert manager.add_request(short, "y") == "y"
        assert manager.get_result("y", timeout=60).generated_tokens == expected
        for _ in range(3):
            assert manager.add_request(short, "x") == "x"
            assert manager.get_result("x", timeout=60).generated_tokens == expected
            manager.cancel_request("x")
        assert not manager.output_router._open


def test_an_id_is_taken_until_all_its_answers_are_given() -> None:
    """A further answer has the id of the request in its own, and a second request of that id would have the same."""
    first, second = prompts([30, 40])
    generation = GenerationConfig(max_new_tokens=300, do_sample=True, top_k=1, num_return_sequences=2, eos_token_id=-1)
    with Session(model_of(max_position_embeddings=8192)) as session:
        manager = session.batching.init_continuous_batching(generation, session.options)
        manager.start()
        manager.add_request(first, "x")
        while manager.batch_processor is None or len(manager.batch_processor.scheduler.active_requests) < 2:
            time.sleep(0.001)
        manager.cancel_request("x")
        assert manager.add_request(second, "x", max_new_tokens=20) == "x#2"
        found = {
            result.request_id: result.generated_tokens for result in (manager.get_result(timeout=60) for _ in "abc")
        }
        assert found.keys() == {"x__child#0", "x#2", "x#2__child#0"}
        assert len(found["x__child#0"]) == 300 and found["x#2"] == session.oracle.generate(second, 20)
        assert manager.add_request(second, "x", max_new_tokens=1) == "x"
        assert {manager.get_result(timeout=60).request_id for _ in "ab"} == {"x", "x__child#0"}
        manager.stop(block=True)
        assert not manager.output_router._open


def test_a_request_that_was_cancelled_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    generation = GenerationConfig(max_new_tokens=5, do_sample=True, top_k=1, num_return_sequences=2, eos_token_id=-1)
    (prompt,) = prompts([40])
    with Session(model_of()) as session:
        manager = session.batching.init_continuous_batching(generation, session.options)
        processor = manager.batch_processor = manager._create_batch_processor()
        scheduler, cancelled = processor.scheduler, []
        fork = scheduler.schedule_batch

        def cancel_first(*budgets: int) -> Any:
            batch = fork(*budgets)
            if not cancelled and scheduler._requests_to_fork:
                cancelled.append(True)
                scheduler.set_request_cancellation("x")
                scheduler.clear_cancelled_requests()
                assert not scheduler._requests_to_fork
            return batch

        monkeypatch.setattr(scheduler, "schedule_batch", cancel_first)
        manager.start()
        manager.add_request(prompt, "x")
        while not cancelled:
            time.sleep(0.001)
        manager.add_request(prompt, "y")
        assert {manager.get_result(timeout=60).request_id for _ in "ab"} == {"y", "y__child#0"}
        manager.stop(block=True)
        assert not manager.output_router._open


def test_requests_wait_no_longer_once_one_that_held_all_pages_is_cancelled() -> None:
    """After a preemption no request begins until pages are free, which cancelled requests free, too."""
    with Session(model_of(max_position_embeddings=8192), num_blocks=46, allow_block_sharing=False) as session:
        manager = session.batching.init_continuous_batching(greedy(900), session.options)
        manager.start()
        while manager.batch_processor is None:
            time.sleep(0.01)
        manager.batch_processor.cache.before_layer = lambda: None  # steps are not abandoned, as on a GPU
        scheduler = manager.batch_processor.scheduler
        for prompt in prompts([300, 310]):
            manager.add_request(prompt)
        while not scheduler.block_new_requests:
            time.sleep(0.001)
        for name in list(scheduler.active_requests):
            manager.cancel_request(name)
        (prompt,) = prompts([40])
        manager.add_request(prompt, "short", max_new_tokens=4)
        assert manager.get_result("short", timeout=60).generated_tokens == session.oracle.generate(prompt, 4)
        manager.stop(block=True, hard_stop=True)


def test_a_step_with_a_request_that_is_wanted_goes_on(paused: HeldSteps) -> None:
    long, short = prompts([900, 30])
    with Session(model_of(num_hidden_layers=LAYERS)) as session:
        manager = session.batching.init_continuous_batching(greedy(5), session.options)
        manager.add_request(long, "long")
        manager.add_request(short, "short")
        manager.start()
        assert paused.reached.wait(60)
        manager.cancel_request("long")
        paused.go_on.set()
        result = manager.get_result("short", timeout=60)
        assert result.generated_tokens == session.oracle.generate(short, 5)
        assert paused.layers == LAYERS
        manager.stop(block=True)


def test_a_hard_stop_ends_a_step_at_its_layer(paused: HeldSteps) -> None:
    (long,) = prompts([900])
    with Session(model_of(num_hidden_layers=LAYERS)) as session:
        manager = session.batching.init_continuous_batching(greedy(5), session.options)
        manager.start()
        manager.add_request(long, "long")
        assert paused.reached.wait(60)
        manager.stop(block=False, hard_stop=True, keep_for_next_session=True)
        paused.go_on.set()
        manager.join(0.0, timeout=60)
        assert not manager.is_running() and paused.layers == 1
        result = manager.get_result("long", timeout=10)
        assert result is not None and result.error


def test_a_prompt_longer_than_the_models_positions_is_refused_and_others_are_answered() -> None:
    model = model_of(max_position_embeddings=300)
    with Session(model) as session:
        short, long, longest = prompts([30, 301, 300])
        results = list(session.batching.generate_batch([short, long, longest], greedy(5), session.options).values())
    assert results[0].generated_tokens == session.oracle.generate(short, 5)
    assert "A prompt of 301 tokens is longer than the 300 positions of the model" in results[1].error
    assert results[2].error is None and len(results[2].generated_tokens) == 1


@pytest.mark.parametrize("new", [50, None])
def test_an_answer_ends_with_the_models_last_position(new: int | None) -> None:
    """A learned embedding has no row for the next."""
    model = model_of(max_position_embeddings=64)
    with Session(model) as session:
        manager = session.batching.init_continuous_batching(greedy(1000), session.options)
        manager.add_request(prompts([60])[0], "a", max_new_tokens=new)
        manager.start()
        result = manager.get_result("a", timeout=60)
        manager.stop(block=True)
    assert len(result.generated_tokens) == 5  # the last is returned and not read


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default"}, 1000),
        ({"rope_type": "linear", "factor": 4.0}, 4000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}, 4000),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 500}, 1000),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 500}, 1000),
        ({"rope_type": "dynamic", "factor": 4.0}, 1000),  # other requests of a step change what comes after
        ({"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 500}, 500),
    ],
    ids=str,
)
def test_positions_are_those_that_rotary_embeddings_were_extended_to(rope: dict, expected: int) -> None:
    config = LlamaConfig(max_position_embeddings=1000)
    config.rope_parameters = rope | {"rope_theta": 10000.0}
    assert number_of_positions(config) == expected
    config.rope_parameters = {"full_attention": config.rope_parameters, "sliding_attention": {"rope_type": "default"}}
    assert number_of_positions(config) == expected


def pool_of(model: Any, **changes: Any) -> Any:
    batching = TurboQuantBatching(model, balance=False)
    manager = batching.init_continuous_batching(greedy(3), options(**changes))
    manager.warmup()
    cache = manager.batch_processor.cache
    manager.restore_attention()
    return cache


def test_the_pool_of_a_cpu_has_room_for_some_requests_by_default() -> None:
    positions = 1024
    cache = pool_of(model_of(max_position_embeddings=positions), num_blocks=None)
    needed = CPU_REQUESTS * cache.allocator.pages_of(positions)
    assert needed <= cache.num_blocks <= needed / 0.85 + 1
    assert cache.max_request_tokens >= positions
    longer = pool_of(model_of(max_position_embeddings=1 << 20), num_blocks=None)
    assert CPU_TOKENS * CPU_REQUESTS <= longer.num_blocks * 128 < 1.5 * CPU_TOKENS * CPU_REQUESTS


def test_a_pool_whose_share_or_size_is_given_has_it() -> None:
    model = model_of(max_position_embeddings=128)
    small = pool_of(model, num_blocks=None, max_memory_percent=0.02).num_blocks
    assert small > 2 * pool_of(model, num_blocks=None).num_blocks
    assert pool_of(model, num_blocks=123).num_blocks == 123
    assert ContinuousBatchingConfig().max_memory_percent is None
