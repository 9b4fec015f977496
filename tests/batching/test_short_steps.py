"""Prompts on a CPU, which are read in short steps if requests may come at any time; answers that share a prompt."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from tests.support.batching_cases import Log, Oracle, Session, answers, greedy, model_of, options, prompts, serve
from tq_hf import TurboQuantBatching
from tq_hf.batching import requests
from tq_hf.batching.processors import answer_ids

STEP = 64


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    monkeypatch.setattr(requests, "CPU_STEP_TOKENS", STEP)
    return Log(monkeypatch)


@pytest.fixture(scope="module")
def batching() -> TurboQuantBatching:
    return TurboQuantBatching(model_of(max_position_embeddings=8192), balance=False)


def served(batching: TurboQuantBatching, new: int, **changes: Any) -> Any:
    """A session of requests that may come at any time."""
    return serve(batching, new, **(dict(max_batch_tokens=None, allow_block_sharing=False) | changes))


@pytest.mark.parametrize("scheduler", ["fifo", "shortest_first"])
def test_short_prompts_do_not_wait_for_a_long_one(batching: TurboQuantBatching, scheduler: str, log: Log) -> None:
    long, *short = prompts([900, 20, 40, 10, 30])
    with served(batching, 3, scheduler_type=scheduler) as manager:
        with manager.pause():
            for name, prompt in zip("labcd", (long, *short), strict=True):
                manager.add_request(prompt, name)
        order = [manager.get_result(timeout=60) for _ in range(5)]
    assert [each.request_id for each in order][-1] == "l" and all(each.error is None for each in order)
    chunks = {name: [new for _, new, _ in steps] for name, steps in log.steps.items()}
    assert chunks["l"][:3] == [STEP // 2] * 3 and max(chunks["l"]) == STEP, "alone it has the whole step"
    assert chunks["c"] == [10, 1, 1] and chunks["a"] == [20, 1, 1], "those with the fewest tokens left go first"
    found = {each.request_id: each.generated_tokens for each in order}
    oracle = Oracle(batching.model)
    for name, prompt in zip("labcd", (long, *short), strict=True):
        read, done = [], 0
        while done < len(prompt):
            read.append(chunks[name][len(read)])
            done += read[-1]
        assert found[name] == oracle.chunked(prompt, 3, read)


def test_a_long_prompt_is_read_while_shorter_ones_come(batching: TurboQuantBatching, log: Log) -> None:
    """However many come, half of a step is the eldest's."""
    long, *short = prompts([640, *[60] * 30])
    with served(batching, 1) as manager:
        with manager.pause():
            manager.add_request(long, "long")
            names = [manager.add_request(prompt) for prompt in short]
        order = [manager.get_result(timeout=60).request_id for _ in range(31)]
    assert sorted(order) == sorted(["long", *names]) and 9 < order.index("long") < 13


def test_steps_of_requests_that_are_all_known_or_have_a_size_are_not_shortened(
    batching: TurboQuantBatching, log: Log
) -> None:
    (long,) = prompts([500])
    expected = Oracle(batching.model).generate(long, 2)
    assert answers(batching.generate_batch([long], greedy(2), options(max_batch_tokens=None))) == [expected]
    with served(batching, 2, max_batch_tokens=2048) as manager:
        manager.add_request(long)
        assert manager.get_result(timeout=60).generated_tokens == expected
    assert [new for _, new, _ in log.steps["req_0"]] == [500, 1] * 2


SAMPLING = {"do_sample": True, "temperature": 1.5, "seed": 7}


@pytest.mark.parametrize("fields", [{}, SAMPLING], ids=["greedy", "seeds"])
@pytest.mark.parametrize("sharing", [True, False], ids=["shared", "copied"])
def test_several_answers_read_their_prompt_once(
    fields: dict[str, Any], sharing: bool, batching: TurboQuantBatching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer is that of a request of its own with the same seed, as long as no block is packed before the last
    token of the prompt is read."""
    (prompt,), number, new = prompts([120 if fields else 300]), 4, 6
    log = Log(monkeypatch)
    with served(batching, new, allow_block_sharing=sharing, max_batch_tokens=2048) as manager:
        name = manager.add_request(prompt, "x", num_return_sequences=number, **fields)
        found = {each.request_id: each for each in (manager.get_result(timeout=60) for _ in range(number))}
    assert found.keys() == set(answer_ids(name, number))
    tokens = sum(each for steps in log.steps.values() for _, each, _ in steps)
    assert tokens == len(prompt) - 1 + number * new, "the last token of the prompt is read by each"
    oracle = Oracle(batching.model)
    for i, each in enumerate(answer_ids(name, number)):
        with served(batching, new, max_batch_tokens=2048) as manager:
            own = fields | ({"seed": fields["seed"] + i} if fields else {})
            alone = manager.get_result(manager.add_request(prompt, **own), timeout=60).generated_tokens
        assert found[each].generated_tokens == alone
        assert fields or alone == oracle.generate(prompt, new)
    assert not fields or len({tuple(each.generated_tokens) for each in found.values()}) > 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_answers_to_one_prompt_are_cancelled_one_by_one_or_together(batching: TurboQuantBatching, when: str) -> None:
    (prompt,) = prompts([100])
    with Session(batching.model, overrides={"balance": False}) as session:
        session.run([[1]], greedy(1))
        manager, names = session.manager, answer_ids("x", 4)
        manager.start()
        with manager.pause():
            manager.add_request(prompt, "x", max_new_tokens=12, num_return_sequences=4, streaming=True)
            for name in names[1:3] if when == "before" else ():
                manager.cancel_request(name)
        if when == "after":
            while not manager.get_result(timeout=60).request_id == names[3]:
                pass
            with manager.pause():
                for name in names[1:3]:
                    manager.cancel_request(name)
        ended = set()
        while len(ended) < 2:
            result = manager.get_result(timeout=60)
            ended |= {result.request_id} if result.is_finished() else set()
        assert ended == {names[0], names[3]}
        manager.add_request([1, 2], "last")
        while manager.get_result(timeout=60).request_id != "last":
            pass
        assert not manager.output_router._open, "cancelled answers are not waited for"
        with manager.pause():
            manager.add_request(prompt, "x", max_new_tokens=2000, num_return_sequences=4, streaming=when == "after")
            for name in names if when == "before" else ():
                manager.cancel_request(name)
        if when == "after":
            manager.get_result(timeout=60)
            for name in names:
                manager.cancel_request(name)
        manager.stop(keep_for_next_session=True)
        assert not manager.output_router._open and session.pages_in_use() == 0


LONG = {"rope_type": "longrope", "original_max_position_embeddings": 200, "short_factor": [1.0] * 16}
LONG |= {"long_factor": [1.0 + i / 16 for i in range(16)]}


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 4.0}, LONG], ids=lambda rope: rope["rope_type"])
def test_answers_do_not_depend_on_the_longest_request_of_a_step(rope: dict[str, Any]) -> None:
    """Frequencies of these kinds follow the longest text of a call, beyond the positions of the training."""
    positions = 200 if rope["rope_type"] == "dynamic" else 800
    model = model_of(max_position_embeddings=positions, rope_parameters={"rope_theta": 10000.0, **rope}, head_dim=32)
    short, middle, long = prompts([100, 199, 201])
    batching = TurboQuantBatching(model, balance=False)
    found = batching.generate_batch([short, middle, long], greedy(8), options())
    first, second, third = found.values()
    oracle = Oracle(model)
    assert first.generated_tokens == oracle.generate(short, 8)
    assert second.error is None and len(second.generated_tokens) == 2, "an answer ends with the last position"
    assert "201 tokens is longer than the 200 positions of the model, beyond which its rotary" in third.error


def test_requests_that_fit_are_counted() -> None:
    # 17 of 21 pages are a ring and sinks, so 4 blocks have room for 643 tokens (`test_refusals`).
    with Session(model_of(), num_blocks=42, max_batch_tokens=256) as session:
        fresh = session.batching.init_continuous_batching(greedy(1), session.options)
        with pytest.raises(ValueError, match="no pool yet"):
            fresh.fitting_requests(1)
        fresh.warmup()
        assert [fresh.fitting_requests(tokens) for tokens in (1, 643, 644, 10**6)] == [2, 2, 1, 0]
        for wrong in (0, True, None, 2.0):
            with pytest.raises(ValueError, match="`tokens` is .*; it must be a whole number, 1 or more"):
                fresh.fitting_requests(wrong)
        fresh.restore_attention()


def test_arguments_of_another_type_are_refused_in_a_sentence(batching: TurboQuantBatching) -> None:
    with pytest.raises(ValueError, match="`continuous_batching_config` is {}; it must be a `ContinuousBatchingConfig`"):
        batching.generate_batch([[1]], greedy(1), {})
    with pytest.raises(ValueError, match="`workload_hints` is 5; it must be a `WorkloadHints`"):
        batching.init_continuous_batching(greedy(1), options(), 5)
    for share in (0.0, 1e-9):
        with pytest.raises(ValueError, match=r"A page and steps of .* take .* \(`max_memory_percent` is "):
            batching.generate_batch([[1]], greedy(1), options(num_blocks=None, max_memory_percent=share))
    for name, wrong in (("num_blocks", 0), ("num_blocks", "9"), ("max_batch_tokens", -1), ("max_batch_tokens", 2**40)):
        with pytest.raises(ValueError, match=f"`{name}` is .*; it must be a whole number, 1 or more, and below 2"):
            batching.generate_batch([[1]], greedy(1), options(**{name: wrong}))
    for prompt in ("text", [[1, 2]], [1.5], [5, 9999], [5, -7], 5):
        with pytest.raises(ValueError, match="A prompt (is|has)"):
            batching.generate_batch([[4, 5], prompt], greedy(3), options())
    for limit in (0, -3, True, 2.0, "3"):
        with pytest.raises(ValueError, match="`max_new_tokens` is .*; it must be a whole number, 1 or more"):
            batching.generate_batch([[1, 2]], GenerationConfig(), options(), max_new_tokens=limit)
    for name, wrong, words in (
        ("max_blocks_per_request", -3, "a whole number, 0 or more"),
        ("default_compile_level", 4, "a whole number, 0 to 3"),
        ("max_memory_percent", 2.0, "a number between 0 and 1"),
        ("safety_margin", "a", "a number between 0 and 1"),
        ("use_cuda_graph", "no", "true or false, or two of them"),
        ("use_cuda_graph", (True,), "true or false, or two of them"),
        ("use_async_batching", "no", "true or false"),
        ("decode_compile_config", 5, "a `CompileConfig`"),
        ("scheduler_type", "nope", "one of fifo, prefill_first, shortest_first"),
    ):
        with pytest.raises(ValueError, match=f"`{name}` is .*; it must be {words}"):
            batching.generate_batch([[1]], greedy(1), options(**{name: wrong}))
    with pytest.raises(ValueError, match="`num_requests` is -1; it must be a whole number, 0 or more"):
        batching.init_continuous_batching(greedy(1), options(), WorkloadHints(num_requests=-1))
    with pytest.raises(ValueError, match="`inputs` is None; it must be a list of prompts"):
        batching.generate_batch(None, greedy(1), options())
    for argument, wrong in (("tokenizer", "a-name"), ("prefix_cache", ""), ("prefix_cache", 5)):
        with pytest.raises(ValueError, match=f"is {wrong!r}; it must be a (tokenizer|path)"):
            TurboQuantBatching(batching.model, balance=False, **{argument: wrong})
    with served(batching, 1) as manager:
        for wrong in (None, 5, ["a"]):
            with pytest.raises(ValueError, match="`request_id` is .*; it must be a text"):
                manager.cancel_request(wrong)
        with pytest.raises(ValueError, match="`request_id` is 7; it must be a text"):
            manager.add_request([1], 7)
