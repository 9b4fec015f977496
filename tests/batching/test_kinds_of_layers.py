"""What holds of every kind of layer in pages: packed and dense ones, sliding windows, linear layers with states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedModel

from tests.support.batching_cases import Session, Steps, greedy, hybrid, mixed, model_of, prompts

KINDS: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, Any]]] = {
    "packed": (model_of, {}),
    "dense": (partial(model_of, num_hidden_layers=3), {"skip_layers": (0,), "balance": False}),
    "windows": (partial(mixed, "gemma3"), {}),
    "linear": (hybrid, {}),
}
"""A model with layers of each kind, and options of its cache."""

every_kind = pytest.mark.parametrize("kind", KINDS)


PACKED_ONLY = dict(sink_tokens=0, residual_length=0)
DENSE: list[dict[str, Any]] = [dict(skip_layers=(0,)), dict(layers={-1: None}), dict(skip_layers=(1,)) | PACKED_ONLY]
LATENTS: list[dict[str, Any]] = [{}, PACKED_ONLY, dict(skip_layers=(0,))]
DENSE_OR_LATENTS = [
    *((KINDS["dense"][0], overrides) for overrides in DENSE),
    *((partial(model_of, "deepseek_v3"), overrides) for overrides in LATENTS),
]
"""Models with dense layers and with latents, and options of their caches."""


def session_of(kind: str, **changes: Any) -> Session:
    make, overrides = KINDS[kind]
    return Session(make(), overrides=overrides, **changes)


def answer_as_generate(session: Session, inputs: list[list[int]], new: int = 10) -> None:
    assert session.run(inputs, greedy(new)) == [session.oracle.generate(prompt, new) for prompt in inputs]
    assert session.pages_in_use() == 0


def nothing_in_the_page_of_nobody(session: Session) -> bool:
    """Windows and states have a page that padding is sent to, which nothing is written to."""
    return session.cache.cache_tensor[: session.cache.bytes_per_sector].count_nonzero() == 0


@pytest.mark.parametrize("kind", ["packed", "windows", "linear"])
def test_without_block_tables_answers_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    with session_of(kind, max_blocks_per_request=0) as session:
        answer_as_generate(session, prompts([5, 120, 300]))
    assert steps.kinds() == {"lists"}


@pytest.mark.parametrize("length", [96, 129, 257, 300])
@pytest.mark.parametrize("kind", ["packed", "windows", "linear"])
def test_a_prompt_in_chunks_reads_as_one_that_generate_is_given_in_chunks(kind: str, length: int) -> None:
    (prompt,) = prompts([length])
    with session_of(kind, max_batch_tokens=95) as session:
        assert session.run([prompt], greedy(6)) == [session.oracle.chunked(prompt, 6, [95] * ((length - 1) // 95))]


@pytest.mark.parametrize(("make", "overrides"), DENSE_OR_LATENTS)
def test_whole_and_chunked_prompts_answer_as_generate(
    make: Callable[[], PreTrainedModel], overrides: dict[str, Any]
) -> None:
    model, inputs = make(), prompts([3, 120, 250, 380, 765])  # all but the first come to the end of a block
    changes: dict[str, Any] = dict(overrides=dict(balance=False) | overrides, allow_block_sharing=False)
    with Session(model, **changes) as session:
        found = session.run(inputs, greedy(24))
        assert found == [session.oracle.generate(prompt, 24) for prompt in inputs]
        assert all(len(set(answer)) > 8 for answer in found)
    with Session(model, **changes, max_batch_tokens=200) as session:
        found = session.run([inputs[4]], greedy(20))
        assert found == [session.oracle.chunked(inputs[4], 20, (200, 200, 200))]


@pytest.mark.parametrize(("make", "overrides"), [DENSE_OR_LATENTS[0], DENSE_OR_LATENTS[3]], ids=["dense", "latents"])
def test_a_shared_prefix_is_read_from_the_pages_of_another(
    make: Callable[[], PreTrainedModel], overrides: dict[str, Any]
) -> None:
    prefix, (first, second) = prompts([300])[0], prompts([20, 31], seed=2)
    with Session(make(), overrides=dict(balance=False) | overrides) as session:
        session.run([prefix + first], greedy(4))
        found = session.run([prefix + second], greedy(30))
        assert session.cache.number_shared == 4 + 2 * 128
        assert found == [session.oracle.after_prefix(prefix + second, 30, 4 + 2 * 128)]


@pytest.mark.parametrize("kind", ["windows", "linear"])
def test_chunks_and_answers_in_the_same_steps(kind: str) -> None:
    """While a prompt is read in chunks, other requests have one new token in a step."""
    inputs = prompts([30, 60, 700])
    with session_of(kind, max_batch_tokens=100) as session:
        found = session.run(inputs, greedy(30))
        assert found[0] == session.oracle.generate(inputs[0], 30)
        # The long prompt has what the others leave: 10 of the first 100 tokens, then 98 a step.
        assert found[2] == session.oracle.chunked(inputs[2], 30, [10, *[98] * 7])


@pytest.mark.parametrize(("length", "sharing"), [(300, True), (300, False), (129, True), (40, False), (1, True)])
@every_kind
def test_forks_go_on_where_their_parent_was(kind: str, length: int, sharing: bool) -> None:
    (prompt,) = prompts([length])
    generation = GenerationConfig(max_new_tokens=8, do_sample=True, top_k=1, num_return_sequences=3, eos_token_id=-1)
    with session_of(kind, allow_block_sharing=sharing) as session:
        session.run(prompts([60] * 4), greedy(2))  # pages hold what is of others
        assert session.run([prompt], generation) == [session.oracle.chunked(prompt, 8, [length - 1])] * 3
        assert session.pages_in_use() == 0


@pytest.mark.parametrize("kind", ["windows", "linear"])
def test_a_prompt_that_was_answered_before_is_read_again_whole(kind: str) -> None:
    """As transformers does: a prefix in packed pages is of use only with the windows or states at its end."""
    (prompt,) = prompts([300])
    with session_of(kind) as session:
        assert session.run([prompt], greedy(6)) == session.run([prompt], greedy(6))
        answer_as_generate(session, [prompt], 6)
        assert session.cache.number_shared == 0


SMALL = dict(max_batch_tokens=700, safety_margin=0.0)
SMALL_POOLS = {"packed": (88, 100, 36), "dense": (88, 100, 36), "windows": (16, 60, 60), "linear": (86, 100, 40)}
"""Pages, tokens of each of six prompts, and of an answer.

Five requests take 85 pages for rings and sinks (in windows two more each, a sector more for states), and a block when
they have 132 tokens, or a third page of a window at 73.
"""


@every_kind
def test_requests_that_outgrow_the_pool_together_are_preempted_and_all_finish(kind: str) -> None:
    """A soft reset reads generated tokens again, as prompt and so exactly; what was not reset is undisturbed."""
    pages, length, new = SMALL_POOLS[kind]
    inputs = prompts([length] * 6, seed=3)
    with session_of(kind, num_blocks=pages, allow_block_sharing=False, **SMALL) as session:
        session.run(inputs[:1], greedy(1))
        resets = session.recorded_waiting()
        found = session.run(inputs, greedy(new))
        assert session.pages_in_use() == 0
        counts = {name: resets.count(name) - 1 for name in resets}
        assert 0 < sum(count > 0 for count in counts.values()) < len(inputs)
        for name, out, prompt in zip(sorted(counts), found, inputs, strict=True):
            assert len(out) == new
            assert out == session.oracle.generate(prompt, new) or counts[name] > 0


@pytest.mark.parametrize(("kind", "ahead"), [*((kind, False) for kind in KINDS), ("packed", True)])
def test_pages_offloaded_to_the_cpu_come_back_as_they_were(
    kind: str, ahead: bool, offloaded: list[set[str]], request: pytest.FixtureRequest
) -> None:
    """All answers are those of undisturbed requests, since nothing is read again. An asynchronous engine, as GPUs have,
    may offload a request whose next token is being computed, and computes it again."""
    pages, length, new = SMALL_POOLS[kind]
    more = request.getfixturevalue("asynchronous") if ahead else {}
    with session_of(kind, num_blocks=pages, cpu_offload_space=0.05, **SMALL, **more) as session:
        answer_as_generate(session, prompts([length] * 6, seed=3), new)
        assert any(offloaded)


@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize("kind", ["packed", "windows", "linear"])
def test_padding_changes_no_answer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    with session_of(kind, max_requests_per_batch=8, q_padding_interval_size=64) as session:
        answer_as_generate(session, prompts([5, 95, 128, 300, 1]))
        assert kind == "packed" or nothing_in_the_page_of_nobody(session)
    assert all(len(new) == 8 for kind, _, new in steps.seen if kind == "lists")
    assert any(0 in new for kind, _, new in steps.seen if kind == "table")


@pytest.mark.parametrize("kind", ["packed", "windows", "linear"])
def test_asynchronous_batches_change_no_answer(kind: str, asynchronous: dict[str, Any]) -> None:
    with session_of(kind, **asynchronous) as session:
        answer_as_generate(session, prompts([5, 95, 128, 300, 1]))
        assert session.manager.batch_processor.use_async_batching
