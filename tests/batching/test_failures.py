"""What fails alone: a request, a result handler, an engine. Nothing waits forever, and every failure has a text.
Requests that are cancelled while a step of theirs is computed, and prompts that are too long to be read."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from tests.support.batching_cases import (
    HeldSteps,
    Oracle,
    Session,
    greedy,
    model_of,
    options,
    outputs_of,
    prompts,
    serve,
)
from tq_hf import TurboQuantBatching
from tq_hf.batching import manager as managers
from tq_hf.batching import requests
from tq_hf.batching.checks import CPU_REQUESTS, CPU_TOKENS
from tq_hf.batching.processors import History, answer_ids
from tq_hf.batching.requests import AnswerRouter
from tq_hf.config import number_of_positions


@pytest.fixture(scope="module")
def batching() -> TurboQuantBatching:
    return TurboQuantBatching(model_of(max_position_embeddings=8192), balance=False, tokenizer=Fragile())


class Fragile:
    """A tokenizer that cannot decode what it is asked for."""

    def decode(self, tokens: list[int]) -> str:
        raise AssertionError


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> HeldSteps:
    return HeldSteps(monkeypatch)


@pytest.mark.parametrize("fields", [{"stop_strings": "x"}, {"repetition_penalty": 1.3}], ids=["stop", "penalty"])
def test_a_request_whose_own_check_raises_fails_alone(
    fields: dict[str, Any], batching: TurboQuantBatching, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: History, slot: int, tokens: list[int], *others: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(History, "load", load)
    first, second = prompts([30, 40])
    with serve(batching, 8) as manager:
        for streaming in (False, True):
            names = manager.add_request(first, streaming=streaming, **fields), manager.add_request(second)
            found = outputs_of(manager, 2)
            assert (found[names[0]].error, found[names[0]].status) == ("AssertionError", RequestStatus.FAILED)
            assert found[names[1]].generated_tokens == Oracle(batching.model).generate(second, 8)
        cache = manager.batch_processor.cache
        assert cache.count_pages()["used"] == 0 and not manager.output_router._open


@pytest.mark.parametrize("error", [AssertionError(), StopIteration(), ValueError(" ")], ids=repr)
def test_a_failure_without_a_text_has_the_name_of_its_type(
    error: Exception, batching: TurboQuantBatching, steps: HeldSteps
) -> None:
    steps.error = error
    steps.go_on.set()
    (result,) = batching.generate_batch(prompts([9]), greedy(2), options()).values()
    assert result.error == type(error).__name__ or isinstance(error, StopIteration) and "StopIteration" in result.error


@pytest.mark.parametrize("error", [SystemExit("a hook has exited"), KeyboardInterrupt(), GeneratorExit("x")], ids=repr)
def test_requests_of_an_engine_that_died_fail_and_later_ones_too(
    error: BaseException, batching: TurboQuantBatching, steps: HeldSteps
) -> None:
    steps.error, (prompt,) = error, prompts([30])
    manager = batching.init_continuous_batching(greedy(3), options())
    manager.start()
    manager.add_request(prompt, "computed", num_return_sequences=2)
    assert steps.reached.wait(60) and manager.error is None and manager.is_running()
    manager.add_request(prompt, "unread", num_return_sequences=2)
    steps.go_on.set()
    open_ = answer_ids("computed", 2) + answer_ids("unread", 2)
    found = outputs_of(manager, 4)
    assert found.keys() == set(open_) and {each.error for each in found.values()} == {str(error) or "KeyboardInterrupt"}
    assert manager._ended.wait(60) and not manager.is_running() and manager.error in found["unread"].error
    assert manager.add_request(prompt, "late", num_return_sequences=2) == "late"
    late = outputs_of(manager, 2)
    assert late.keys() == set(answer_ids("late", 2)) and not manager.output_router._open
    assert all(each.error.startswith("The engine has ended with an error") for each in late.values())
    manager.stop()
    steps.error = None
    assert batching.generate_batch([prompt], greedy(2), options())["req_0"].error is None


def test_a_request_that_comes_while_the_thread_ends_fails(batching: TurboQuantBatching) -> None:
    """It was put into the queue after the thread had read it for the last time."""
    manager = batching.init_continuous_batching(greedy(3), options())
    manager.start()
    put = manager.input_queue.put
    manager.input_queue.put = lambda *args, **more: (manager.stop(), put(*args, **more))  # type: ignore[method-assign]
    manager.add_request([1, 2, 3], "late", num_return_sequences=2)
    found = outputs_of(manager, 2)
    assert found.keys() == set(answer_ids("late", 2)) and not manager.output_router._open
    assert all(each.error.startswith("The engine stops") for each in found.values())


def test_a_result_handler_that_raises_drops_its_own_output_only(batching: TurboQuantBatching) -> None:
    first, second = prompts([30, 40])

    async def ask() -> list[Any]:
        loop, got, said = asyncio.get_running_loop(), asyncio.Queue[Any](), []
        loop.set_exception_handler(lambda loop, context: said.append(context))

        def fails(output: Any) -> None:
            raise KeyError(output.request_id)

        with serve(batching, 5) as manager:
            with manager.pause():  # so that both are delivered together
                for name, prompt, handler in (("bad", first, fails), ("good", second, got.put_nowait)):
                    manager.register_result_handler(name, handler)
                    manager.add_request(prompt, name)
            output = await asyncio.wait_for(got.get(), 60)
            while not said:
                await asyncio.sleep(0)
            assert not manager.output_router.result_handlers
        return [output.generated_tokens, said[0]["exception"].args, "request bad failed" in said[0]["message"]]

    assert asyncio.run(ask()) == [Oracle(batching.model).generate(second, 5), ("bad",), True]


def test_outputs_are_delivered_in_the_loops_of_their_handlers() -> None:
    router, calls = AnswerRouter(), []

    def run(name: str, batch: Any) -> None:
        if name == "closed":
            raise RuntimeError("Event loop is closed")
        calls.append(f"in {name}")
        batch()

    for name in ("closed", "a", "b"):
        loop = Mock(is_closed=lambda: False, call_soon_threadsafe=partial(run, name))  # the next moment it is
        router.result_handlers[name] = (lambda output: calls.append(output.request_id), loop)
    router.deliver_batch([GenerationOutput(name) for name in ("closed", "a", "b", "c")])
    assert calls == ["in a", "a", "in b", "b"] and router.output_queue.get_nowait().request_id == "c"


def running(model: Any) -> bool:
    return managers.serving.get(model) is not None


@pytest.mark.parametrize("way", ["with", "generate_batch"])
def test_an_interrupt_ends_the_engine_after_its_step_with_a_word(
    way: str, batching: TurboQuantBatching, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    for module in (managers, requests):
        monkeypatch.setattr(module.logger, "warning", said.append)
    monkeypatch.setattr(managers.logger, "error", said.append)
    held: list[Any] = []

    def interrupted(manager: Any, *args: Any, **more: Any) -> Any:
        held.append(manager)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        if way == "with":
            session = serve(batching, 7000)
            with session as manager:
                manager.add_request([1, 2, 3])
                interrupted(manager)
        else:
            monkeypatch.setattr(managers.TurboQuantBatchingManager, "get_result", interrupted)
            batching.generate_batch([[1, 2, 3]], greedy(7000), options())
            monkeypatch.undo()
    assert said == ["Interrupted: the engine stops after its step, and requests without an answer fail."]
    assert held[0]._ended.wait(60) and not running(batching.model)
    output = held[0].output_router.output_queue.get_nowait()
    assert output.status == RequestStatus.FAILED and len(output.generated_tokens) < 7000


def test_an_engine_whose_thread_is_taken_for_ended_still_serves_its_model(
    batching: TurboQuantBatching, steps: HeldSteps
) -> None:
    """Python 3.11 marks a thread as ended when a `join` of it is interrupted."""
    manager = batching.init_continuous_batching(greedy(3), options())
    other = batching.init_continuous_batching(greedy(3), options())
    manager.start()
    name = manager.add_request([1, 2, 3])
    assert steps.reached.wait(60)
    thread = manager._generation_thread
    thread.is_alive = lambda: False
    assert manager.is_running()
    with pytest.raises(ValueError, match="A manager serves this model already"):
        other.start()
    steps.go_on.set()
    assert manager.get_result(name, timeout=60).error is None
    del thread.is_alive
    manager.stop()
    other.start()
    other.stop()
    assert not running(batching.model)


LAYERS = 6


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> HeldSteps:
    """Steps of the long prompts below wait at their first layer."""
    return HeldSteps(monkeypatch, tokens=200)


@pytest.fixture
def engine() -> Iterator[tuple[Oracle, Any]]:
    """What `generate()` answers, and a manager of the same model that has begun."""
    with Session(model_of(num_hidden_layers=LAYERS)) as session:
        manager = session.batching.init_continuous_batching(greedy(5), session.options)
        manager.start()
        yield session.oracle, manager
        manager.stop(block=True)


def test_a_step_of_a_cancelled_prompt_ends_at_its_layer_and_others_are_answered(
    engine: tuple[Oracle, Any], paused: HeldSteps
) -> None:
    (oracle, manager), (long, short) = engine, prompts([900, 30])
    name = manager.add_request(long, "long")
    assert paused.reached.wait(60)
    manager.cancel_request(name)
    manager.add_request(short, "short")
    paused.go_on.set()
    result = manager.get_result("short", timeout=60)
    assert result.generated_tokens == oracle.generate(short, 5) and result.error is None
    assert paused.layers == 1
    assert manager.batch_processor.cache.pool.count_free_blocks(0) >= 0
    again = manager.add_request(long, "again")
    while not (result := manager.get_result(again, timeout=60)).is_finished():
        pass
    assert result.generated_tokens == oracle.generate(long, 5)
    assert paused.layers == 1 + LAYERS


def test_the_id_of_a_cancelled_request_is_free_again(engine: tuple[Oracle, Any], paused: HeldSteps) -> None:
    """And a cancellation that comes late is not of the next request of that id."""
    (oracle, manager), (long, short) = engine, prompts([900, 30])
    expected = oracle.generate(short, 5)
    names = [manager.add_request(long, "x") for _ in range(3)]
    assert names == ["x", "x#2", "x#3"], "transformers keeps requests by id: two of one would share pages"
    assert paused.reached.wait(60)
    for name in names:
        manager.cancel_request(name)
    paused.go_on.set()
    assert manager.add_request(short, "y") == "y"
    assert manager.get_result("y", timeout=60).generated_tokens == expected
    for _ in range(3):
        assert manager.add_request(short, "x") == "x"
        assert manager.get_result("x", timeout=60).generated_tokens == expected
        manager.cancel_request("x")
    assert not manager.output_router._open


def test_requests_come_while_others_are_cancelled(batching: TurboQuantBatching) -> None:
    manager, usual = batching.init_continuous_batching(greedy(1), options()), sys.getswitchinterval()
    names = [manager.add_request([1]) for _ in range(9000)]
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor() as pool:
        cancelled = pool.submit(lambda: [manager.cancel_request(name) for name in names[:9000]])
        while not cancelled.done():
            names.append(manager.add_request([1]))
    sys.setswitchinterval(usual)
    manager.restore_attention()
    assert cancelled.result() and len(set(names)) == len(names)


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
        assert AnswerRouter().claim("x__child#1", 2) == "x__child#1#2"
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
    pool = dict(num_blocks=40, safety_margin=0.0, allow_block_sharing=False)
    with Session(model_of(max_position_embeddings=8192), **pool) as session:
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


def test_a_step_with_a_request_that_is_wanted_goes_on(engine: tuple[Oracle, Any], paused: HeldSteps) -> None:
    (oracle, manager), (long, short) = engine, prompts([900, 30])
    with manager.pause():  # one step reads both
        for name, prompt in (("long", long), ("short", short)):
            manager.add_request(prompt, name)
    assert paused.reached.wait(60)
    manager.cancel_request("long")
    paused.go_on.set()
    assert manager.get_result("short", timeout=60).generated_tokens == oracle.generate(short, 5)
    assert paused.layers == LAYERS


def test_a_hard_stop_ends_a_step_at_its_layer(engine: tuple[Oracle, Any], paused: HeldSteps) -> None:
    (_, manager), (long,) = engine, prompts([900])
    manager.add_request(long, "long")
    assert paused.reached.wait(60)
    manager.stop(block=False, hard_stop=True, keep_for_next_session=True)
    paused.go_on.set()
    manager.join(0.0, timeout=60)
    assert not manager.is_running() and paused.layers == 1
    result = manager.get_result("long", timeout=10)
    assert result is not None and result.error == "The engine was stopped before this answer was complete."


def test_a_prompt_longer_than_the_models_positions_is_refused_and_others_are_answered() -> None:
    model = model_of(max_position_embeddings=300)
    with Session(model) as session:
        short, long, longest = prompts([30, 301, 300])
        results = list(session.batching.generate_batch([short, long, longest], greedy(5), session.options).values())
    assert results[0].generated_tokens == session.oracle.generate(short, 5)
    assert "A prompt of 301 tokens is longer than the 300 positions of the model" in results[1].error
    assert results[2].error is None and len(results[2].generated_tokens) == 1


@pytest.mark.parametrize("ways", [[], ["asynchronous"], ["asynchronous", "padded"]], ids="-".join)
@pytest.mark.parametrize("new", [50, None])
def test_an_answer_ends_with_the_models_last_position(new: int | None, ways: list[str], request: Any) -> None:
    """A learned embedding has no row for the next, which no step may read."""
    model = model_of("gpt2", n_positions=64)
    changes = [request.getfixturevalue(name) for name in ways]
    with Session(model, **(changes[0] if ways else {})) as session:
        manager = session.batching.init_continuous_batching(greedy(1000), session.options)
        manager.add_request(prompts([60])[0], "a", max_new_tokens=new)
        manager.start()
        result = manager.get_result("a", timeout=60)
        manager.stop(block=True)
    assert result.error is None and len(result.generated_tokens) == 5  # the last is returned and not read


def test_an_answer_that_takes_all_pages_ends_without_one_more(asynchronous: dict[str, Any]) -> None:
    with Session(model_of(), num_blocks=19, safety_margin=0.0, allow_block_sharing=False, **asynchronous) as session:
        session.run([[1]], greedy(1))
        (prompt,) = prompts([session.cache.max_request_tokens - 10])
        assert session.run([prompt], greedy(11)) == [session.oracle.generate(prompt, 11)]


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
