"""What transformers' engine does around the cache, with packed pages in it: like its own tests of continuous batching.

Parity with `generate()` is in `test_kinds_of_layers.py`; here are the other features, and the ways of running that need
a GPU (asynchronous batches, padding for graphs, pages offloaded to the CPU), acted out on a CPU. Metrics count
requests, tokens, pages and times, as Prometheus reads them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.generation.continuous_batching import continuous_api, input_outputs, model_runner
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from tests.support.batching_cases import (
    Oracle,
    Session,
    Stream,
    Tokens,
    answers,
    greedy,
    model_of,
    options,
    prompts,
    serve,
    take_scratch,
)
from tq_hf import TurboQuantBatching
from tq_hf.batching import requests
from tq_hf.batching.manager import TurboQuantBatchProcessor, WakeUp
from tq_hf.batching.metrics import SECONDS, Histogram
from tq_hf.batching.requests import scheduler_class
from tq_hf.batching.runner import TurboQuantModelRunner
from tq_hf.compat import as_input


@pytest.fixture(scope="module")
def batching() -> TurboQuantBatching:
    return TurboQuantBatching(model_of(), balance=False)


def expected(batching: TurboQuantBatching, prompt: Tokens, new: int) -> Tokens:
    return Oracle(batching.model).generate(prompt, new)


@pytest.mark.parametrize("streaming", [True, False])
def test_streamed_answers_come_token_by_token(batching: TurboQuantBatching, streaming: bool) -> None:
    (prompt,) = prompts([126])
    with serve(batching, 4) as manager:
        name = manager.add_request(prompt, streaming=streaming)
        chunks = [output.generated_tokens for output in manager.request_id_iter(name)]
    answer = expected(batching, prompt, 4)
    assert chunks == ([answer[: i + 1] for i in range(4)] if streaming else [answer])


def test_a_result_handler_gets_every_token(batching: TurboQuantBatching) -> None:
    (prompt,) = prompts([30])

    async def collect() -> list[int]:
        done, counts = asyncio.get_running_loop().create_future(), []

        def on_result(output: Any) -> None:
            counts.append(len(output.generated_tokens))
            if output.is_finished():
                done.set_result(output.error)

        with manager.pause():
            name = manager.add_request(prompt, streaming=True)
            manager.register_result_handler(name, on_result)
        assert await done is None
        return counts

    with serve(batching, 3) as manager:
        assert asyncio.run(collect()) == [1, 2, 3]
        assert manager.output_router.output_queue.empty()


def test_log_probabilities_are_those_of_the_logits(batching: TurboQuantBatching) -> None:
    (prompt,) = prompts([140])
    results = batching.generate_batch([prompt], greedy(5), options(return_logprobs=True))
    (result,) = results.values()
    text, oracle = prompt + result.generated_tokens, Oracle(batching.model)
    batching.model.set_attn_implementation("turboquant")
    cache, at, found = oracle.cache(), 0, []
    with torch.no_grad():
        for end in range(len(prompt), len(text)):
            logits = batching.model(torch.tensor([text[at:end]]), **as_input(cache)).logits[0, -1]
            found.append(logits.log_softmax(-1)[text[end]].item())
            at = end
    batching.model.set_attn_implementation("sdpa")
    assert result.logprobs == pytest.approx(found, abs=1e-4)


def test_forks_of_prompts_whose_last_token_alone_is_not_held(batching: TurboQuantBatching) -> None:
    """They take part in a step without a token of their own, and more requests than tokens are in it."""
    held, *others = prompts([129, *[50] * 9])
    with Session(batching.model) as session:
        session.run([held], greedy(2))
        manager = session.manager
        manager.generation_config.max_new_tokens = 30
        manager.start()
        with manager.pause():
            for prompt in others[1:]:
                manager.add_request(prompt, max_new_tokens=1)
            name = manager.add_request(others[0], streaming=True)
        found = {}
        while len(found) < 9 + 5 * 3:
            result = manager.get_result()
            assert result.error is None
            if result.request_id == name and len(result.generated_tokens) == 5:
                with manager.pause():
                    for _ in range(5):
                        manager.add_request(held, max_new_tokens=4, num_return_sequences=3)
            if result.is_finished():
                found[result.request_id] = result.generated_tokens
        manager.stop(keep_for_next_session=True)
        assert found.pop(name) == session.oracle.generate(others[0], 30)
        assert list(found.values())[8:] == [session.oracle.chunked(held, 4, [128])] * 15


@pytest.mark.parametrize("length", [1, 129])
def test_forks_of_a_prompt_of_which_one_token_is_left(batching: TurboQuantBatching, length: int) -> None:
    """There is a step without any token then."""
    (prompt,) = prompts([length])
    generation = greedy(4, answers=3)
    with Session(batching.model) as session:
        session.run([prompt], generation)  # whose block is held then
        expected = session.oracle.chunked(prompt, 4, [length // 128 * 128])
        assert session.run([prompt], generation) == [expected] * 3
        assert session.pages_in_use() == 0


def test_a_paused_loop_makes_no_step(batching: TurboQuantBatching) -> None:
    (prompt,) = prompts([100])
    with serve(batching, 40) as manager:
        name = manager.add_request(prompt, streaming=True)
        outputs = manager.request_id_iter(name)
        next(outputs)
        with manager.pause():
            before = manager.current_batch
            # A bounded wait is meant: of a step that is not made there is no event to wait for.
            manager._generation_thread.join(0.2)
            assert manager.current_batch == before
        *_, last = outputs
    assert last.generated_tokens == expected(batching, prompt, 40)


def test_shorter_prompts_go_first_until_a_longer_one_has_waited_its_time() -> None:
    cache = SimpleNamespace(check_room=lambda state: None, config=LlamaConfig(), prefixes=None)
    scheduler = scheduler_class("shortest_first")(cache, None, 8)
    arrivals = {"long": (0.0, 4000), "short": (1.0, 100), "offloaded": (1.5, 50), "same": (1.6, 100)}
    for name, (created, length) in (arrivals | {"late": (3.95, 90)}).items():
        scheduler.add_waiting_request(RequestState(name, [1] * length, created_time=created))
    scheduler.waiting_requests["offloaded"].is_cpu_offloaded = True
    order = [state.request_id for state in scheduler._get_waiting_candidates()]
    # The long one may be passed for four seconds; what is on the CPU has every other turn, as in transformers.
    assert order == ["offloaded", "short", "same", "long", "late"]


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first", "shortest_first"])
def test_a_long_prompt_is_not_starved_by_shorter_ones(
    batching: TurboQuantBatching, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five of the shorter ones fill the pool at any time: 17 pages each of 88. The long one needs 22, which are never
    free while a shorter one begins as soon as another ends."""
    monkeypatch.setattr(requests, "PATIENCE", 1e-9)  # the order of arrival
    shorter, (long,) = prompts([60] * 45, seed=4), prompts([700])
    changes = dict(num_blocks=88, max_batch_tokens=700, safety_margin=0.0, allow_block_sharing=False)
    with serve(batching, 4, scheduler_type=scheduler, **changes) as manager:
        with manager.pause():
            for i, prompt in enumerate(shorter[:5]):
                manager.add_request(prompt, max_new_tokens=5 + 2 * i)
            name = manager.add_request(long)
            for i, prompt in enumerate(shorter[5:]):
                manager.add_request(prompt, max_new_tokens=5 + 3 * (i % 5))
        order = [manager.get_result(timeout=60) for _ in range(46)]
    assert all(each.error is None for each in order)
    (at,) = [i for i, each in enumerate(order) if each.request_id == name]
    assert at < 12
    assert order[at].generated_tokens == expected(batching, long, 4)


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first", "shortest_first"])
def test_answers_that_the_running_step_completes_take_no_token_of_the_next_one(
    batching: TurboQuantBatching, scheduler: str, asynchronous: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, limits, steps = prompts([32] * 7), [1, 1, 1, 1, 3, 1, 2], list[list[int]]()

    def compute_batch(self: Any, *arguments: Any) -> None:
        steps.append([future.query_length for future in self.buffers()[0].requests_in_batch])
        original(self, *arguments)

    original = TurboQuantModelRunner.compute_batch
    monkeypatch.setattr(TurboQuantModelRunner, "compute_batch", compute_batch)
    changes = dict(max_batch_tokens=64, allow_block_sharing=False, scheduler_type=scheduler)
    with serve(batching, 3, **asynchronous, **changes) as manager:
        with manager.pause():
            names = [manager.add_request(p, max_new_tokens=n) for p, n in zip(inputs, limits, strict=True)]
        found = {each.request_id: each.generated_tokens for each in (manager.get_result() for _ in names)}
    assert [found[name] for name in names] == [
        expected(batching, prompt, new) for prompt, new in zip(inputs, limits, strict=True)
    ]
    assert steps[:2] == [[32, 32]] * 2 and sum(map(sum, steps)) == 7 * 32 + 2 + 1


def test_most_have_their_first_token_earlier_if_shorter_prompts_go_first(batching: TurboQuantBatching) -> None:
    inputs = prompts([600, 500, 30, 40, 50])

    def first_tokens(scheduler: str) -> list[int]:
        chosen = options(scheduler_type=scheduler, max_batch_tokens=128, allow_block_sharing=False)
        found = list(batching.generate_batch(inputs, greedy(3), chosen, record_timestamps=True).values())
        return sorted(range(len(inputs)), key=lambda i: found[i].timestamps[0])

    assert first_tokens("fifo")[:2] == [0, 1]
    assert first_tokens("shortest_first")[:3] == [2, 3, 4]


def steps_of(monkeypatch: pytest.MonkeyPatch, at_step: dict[int, Callable[[], Any]]) -> list[tuple[int, int]]:
    """Number of requests that are answered, and number of tokens, in each step. `at_step` is called before a step."""
    steps: list[tuple[int, int]] = []
    real = requests.ShortestFirst.schedule_batch

    def schedule(self: Any, *budgets: int) -> Any:
        at_step.get(len(steps), lambda: None)()
        answered = sum(state.status == RequestStatus.DECODING for state in self.active_requests.values())
        batch = real(self, *budgets)
        if batch[0]:
            steps.append((answered, batch[2]))
        return batch

    monkeypatch.setattr(requests.ShortestFirst, "schedule_batch", schedule)
    return steps


@pytest.mark.parametrize(("patience", "pages", "first"), [(1e3, 400, "short"), (1e-9, 400, "long"), (1e3, 26, "long")])
def test_a_prompt_that_is_partly_read_is_overtaken_if_there_is_room_until_its_time(
    batching: TurboQuantBatching, patience: float, pages: int, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "PATIENCE", patience)
    long, short = prompts([600, 100])
    changes = dict(num_blocks=pages, max_batch_tokens=128, allow_block_sharing=False, safety_margin=0.0)
    with serve(batching, 4, scheduler_type="shortest_first", **changes) as manager:
        steps_of(monkeypatch, {2: lambda: manager.add_request(short, "short")})
        manager.add_request(long, "long")
        order = [manager.get_result(timeout=60) for _ in range(2)]
    assert [each.request_id for each in order][0] == first
    for each, prompt in zip(sorted(order, key=lambda each: each.request_id), (long, short), strict=True):
        assert each.generated_tokens == expected(batching, prompt, 4)


def test_steps_are_short_while_answers_are_generated(
    batching: TurboQuantBatching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "STEP_TOKENS", 32)
    inputs = prompts([20, 300, 90])
    steps = steps_of(monkeypatch, {})
    chosen = options(scheduler_type="shortest_first", max_batch_tokens=128, allow_block_sharing=False)
    found = batching.generate_batch(inputs, greedy(6), chosen)
    assert answers(found) == [expected(batching, prompt, 6) for prompt in inputs]
    assert steps[0] == (0, 128)
    assert max(tokens - answered for answered, tokens in steps[1:] if answered) == 32


def test_scratch_is_what_was_reserved_and_a_step_beyond_it_fails_its_requests_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_scratch(monkeypatch, 200 << 10)
    inputs = prompts([40, 190, 7])
    with Session(model_of(), max_batch_tokens=512, overrides=dict(balance=False), allow_block_sharing=False) as session:
        first = [session.run([prompt], greedy(4)) for prompt in inputs]
        held = session.cache.scratch.nbytes
        session.manager.start()
        long = session.manager.add_request(prompts([300])[0], max_new_tokens=4)
        refused = session.manager.get_result(long, timeout=60)
        session.manager.stop(block=True, keep_for_next_session=True)
        assert refused is not None and "Attention over pages needs 307,200 bytes of scratch" in str(refused.error)
        assert [session.run([prompt], greedy(4)) for prompt in inputs] == first
        assert session.cache.scratch.nbytes == held == 200 << 10
        assert session.cache.memory.scratch_bytes == held


def test_a_session_begins_when_inputs_are_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are reset on another stream than the engine's, which would overtake it."""
    events: list[str] = []
    real = input_outputs.ContinuousBatchingIOs._reset_static_tensors

    def reset(self: Any, full_reset: bool = False) -> None:
        real(self, full_reset)
        if full_reset:
            events.append("reset")

    monkeypatch.setattr(input_outputs.ContinuousBatchingIOs, "_reset_static_tensors", reset)
    monkeypatch.setattr(TurboQuantBatchProcessor, "_wait_for_device", lambda self: events.append("wait"))
    batching = TurboQuantBatching(model_of(), balance=False)
    manager = batching.init_continuous_batching(greedy(2), options())
    manager.batch_processor = manager._create_batch_processor()
    assert events == ["reset", "wait"]
    assert manager._create_batch_processor() is manager.batch_processor
    assert events == ["reset", "wait"] * 2
    manager.batch_processor.fail_step(RuntimeError("a bit fell over"))
    assert events == ["reset", "wait"] * 3
    manager.destroy()


def test_a_warm_up_waits_for_the_one_before(asynchronous: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inputs would be copied over those that the other still reads, whose pages are then anywhere."""
    events: list[str] = []
    monkeypatch.setattr(model_runner.ModelRunner, "compute_batch", lambda *args: events.append("compute"))
    monkeypatch.setattr(Stream, "synchronize", lambda self: events.append("wait"))
    batching = TurboQuantBatching(model_of(), balance=False)
    manager = batching.init_continuous_batching(greedy(2), options(max_blocks_per_request=40, **asynchronous))
    manager.batch_processor = manager._create_batch_processor()
    manager.batch_processor.model_runner.pad_inputs = True
    manager.batch_processor.model_runner.list_warm_ups()
    events.clear()
    manager.warmup(now=True)
    manager.destroy()
    # A step with prompts and 1, 2, 4, .. 64 requests that decode, for two sets of inputs. transformers 5.24 waits, too.
    assert [event for event, _ in groupby(events)] == ["compute", "wait"] * 16


def test_an_asynchronous_step_that_fails(asynchronous: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = prompts([130, 40])
    with Session(model_of(), allow_block_sharing=False, **asynchronous) as session:
        expected = session.run(inputs, greedy(12))
        real, left = continuous_api.ContinuousBatchProcessor._generation_step, iter([False] * 5 + [True])

        def step(*args: Any) -> None:
            if next(left, False):
                raise RuntimeError("a bit fell over")
            real(*args)

        monkeypatch.setattr(continuous_api.ContinuousBatchProcessor, "_generation_step", step)
        results = session.batching.generate_batch(inputs, greedy(12), session.options, persistent_manager=True)
        assert "a bit fell over" in [result.error for result in results.values()]
        assert session.pages_in_use() == 0
        assert session.run(inputs, greedy(12)) == expected


def test_an_idle_loop_waits_without_looking_again(
    batching: TurboQuantBatching, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[tuple[bool, float | None]] = []
    wait, is_idle = threading.Event.wait, threading.Event()

    def noted(event: Any, timeout: float | None = None) -> bool:
        if isinstance(event, WakeUp):
            waits.append((event.idle, timeout))
            if event.idle:
                is_idle.set()
        return wait(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", noted)
    with serve(batching, 4) as manager:
        for _ in range(2):
            manager.add_request([7] * 20)
            assert manager.get_result() is not None
        is_idle.wait()
    assert any(idle for idle, _ in waits) and all(timeout is None for idle, timeout in waits if idle)


def read(text: str) -> dict[str, float]:
    """Values by name and labels; every name has its kind and a sentence."""
    lines = text.splitlines()
    assert text.endswith("\n")
    kinds = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    assert kinds.keys() == {line.split()[2] for line in lines if line.startswith("# HELP")}
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    for name in values:
        plain = name.partition("{")[0]
        assert plain in kinds or plain.rpartition("_")[0] in kinds
    return {name: float(value) for name, value in values.items()}


def test_requests_tokens_and_pages_are_counted() -> None:
    first, other = prompts([300, 40])
    with Session(model_of()) as session:
        session.run([first], greedy(6))
        session.run([first, other], greedy(4))
        manager = session.manager
        manager.start()
        name = manager.add_request(other, max_new_tokens=400, streaming=True)
        for i, _ in enumerate(manager.request_id_iter(name)):
            if i == 3:
                during = read(manager.metrics())
                manager.cancel_request(name)
                break
        manager.add_request([1] * 10**6)
        while (result := manager.get_result(timeout=30)).error is None:
            pass
        manager.stop(keep_for_next_session=True)
        found = read(manager.metrics())
    assert result.error
    assert during['tq_hf_requests{state="running"}'] == 1 and during['tq_hf_pages{state="used"}'] >= 17
    assert found['tq_hf_requests{state="running"}'] == found['tq_hf_requests{state="waiting"}'] == 0
    ended = {kind: found[f'tq_hf_requests_total{{status="{kind}"}}'] for kind in ("finished", "failed", "cancelled")}
    assert ended == {"finished": 3, "failed": 1, "cancelled": 1}
    assert found['tq_hf_tokens_total{kind="generated"}'] == 6 + 2 * 4
    assert found['tq_hf_tokens_total{kind="prompt"}'] == 300 + 300 + 40 + 10**6
    assert found['tq_hf_tokens_total{kind="shared"}'] == 260, "two blocks and the sinks"
    pages = {kind: found[f'tq_hf_pages{{state="{kind}"}}'] for kind in ("used", "cached", "free")}
    assert pages["used"] == 0 < pages["cached"] and sum(pages.values()) == 200
    for name, number in (("time_to_first_token", 3), ("time_per_token", 3)):
        assert found[f"tq_hf_{name}_seconds_count"] == number == found[f'tq_hf_{name}_seconds_bucket{{le="+Inf"}}']
        assert found[f"tq_hf_{name}_seconds_sum"] > 0


def test_a_manager_that_has_not_started_has_metrics() -> None:
    manager = TurboQuantBatching(model_of(), balance=False).init_continuous_batching(greedy(2), options())
    found = read(manager.metrics())
    assert found['tq_hf_requests{state="running"}'] == 0
    manager.restore_attention()


def test_buckets_hold_all_times_up_to_their_limit() -> None:
    histogram = Histogram()
    for seconds in (0.005, 0.0051, 3.0, 1e9):
        histogram.observe(seconds)
    found = dict(line.rsplit(" ", 1) for line in histogram.lines("x"))
    assert [found[f'x_bucket{{le="{limit}"}}'] for limit in (0.005, 0.01, 2.0, 5.0, 60.0, "+Inf")] == list("122334")
    assert float(found["x_sum"]) == pytest.approx(1e9 + 3.0101) and len(found) == len(SECONDS) + 3
