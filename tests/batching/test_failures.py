"""What fails alone: a request, a result handler, an engine. Nothing waits forever, and every failure has a text."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from tests.support.batching_cases import HeldSteps, Oracle, greedy, model_of, options, outputs_of, prompts, serve
from tq_hf import TurboQuantBatching
from tq_hf.batching import manager as managers
from tq_hf.batching import requests
from tq_hf.batching.processors import History, answer_ids
from tq_hf.batching.requests import AnswerRouter


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

    def loop(name: str) -> Any:
        given = Mock(is_closed=lambda: False)
        given.call_soon_threadsafe = lambda run: (calls.append(f"in {name}"), run())
        return given

    for name in "ab":
        router.result_handlers[name] = (lambda output: calls.append(output.request_id), loop(name))
    router.deliver_batch([GenerationOutput(name) for name in "abc"])
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
    with pytest.raises(ValueError, match="Another manager serves this model"):
        other.start()
    steps.go_on.set()
    assert manager.get_result(name, timeout=60).error is None
    del thread.is_alive
    manager.stop()
    other.start()
    other.stop()
    assert not running(batching.model)


def test_answers_go_on_after_a_stop_that_does_not_wait_and_keeps_nothing(
    batching: TurboQuantBatching, steps: HeldSteps
) -> None:
    """Each later step failed, with a line in the log."""
    manager = batching.init_continuous_batching(greedy(6), options())
    manager.start()
    name = manager.add_request([1, 2, 3])
    assert steps.reached.wait(60)
    manager.stop(block=False)
    steps.go_on.set()
    result = manager.get_result(name, timeout=60)
    assert result.error is None and len(result.generated_tokens) == 6
    assert manager._ended.wait(60)
