"""The sink page through transformers' engine: the first tokens exact, shared with the blocks after them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedModel

from tests.support.batching_cases import Oracle, Session, Tokens, greedy, mixed, model_of, prompts

SINKS = 4


class SinkSession(Session):
    """A session with sinks."""

    def __init__(self, model: PreTrainedModel, **changes: Any) -> None:
        super().__init__(model, **changes, overrides={"sink_tokens": SINKS})


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return model_of()


def alone(model: PreTrainedModel, inputs: list[Tokens], new: int, **changes: Any) -> list[Tokens]:
    """Answers of requests that are never in company, and share nothing."""
    found = []
    for prompt in inputs:
        with SinkSession(model, allow_block_sharing=False, **changes) as session:
            found += session.run([prompt], greedy(new))
    return found


def test_answers_do_not_depend_on_company_or_block_tables(model: PreTrainedModel) -> None:
    inputs = prompts([3, 120, 128, 129, 300])
    expected = alone(model, inputs, 12)
    for way in ({}, {"max_blocks_per_request": 0}):
        with SinkSession(model, **way) as session:
            assert session.run(inputs, greedy(12)) == expected
            assert session.pages_in_use() == 0
            assert session.cache.allocator.sink_pages == 1
    # A prompt is read exactly, so what is packed of it counts from the second token on.
    packed = [Oracle(model, balance=session.batching.balance).generate(prompt, 12) for prompt in inputs]
    assert packed[:2] == expected[:2] and packed[2:] != expected[2:]


def test_a_shared_prefix_comes_with_its_sinks(model: PreTrainedModel) -> None:
    first, *tails = prompts([300, 1, 60, 200])
    shared = [first[:256] + tail for tail in tails]
    with SinkSession(model) as session:
        session.run([first], greedy(6))
        allocator = session.cache.allocator
        assert len(allocator.ledger.cached_blocks) == 2 + 1
        found = session.run(shared, greedy(6))
        assert session.pages_in_use() == 0
    assert found == [alone(model, [prompt], 6, max_batch_tokens=256)[0] for prompt in shared]


def test_sinks_are_held_as_long_as_what_follows_them(model: PreTrainedModel) -> None:
    (prompt,) = prompts([300])
    with SinkSession(model) as session:
        session.run([prompt], greedy(2))
        cache, allocator = session.cache, session.cache.allocator
        assert cache.search_prefix_match("one", prompt) == 256
        assert not allocator.ledger.cached_blocks
        assert [allocator.count_shareable_blocks("one", n) for n in (127, 128, 256)] == [0, 2, 3]
        cache.free_blocks("one")
        assert len(allocator.ledger.cached_blocks) == 3


def test_prompts_with_the_same_first_tokens_share_one_page(model: PreTrainedModel) -> None:
    start, *tails = prompts([SINKS, 200, 200, 200])
    with SinkSession(model) as session:
        session.run([start + tail for tail in tails], greedy(2))
        cached = session.cache.allocator.ledger.cached_blocks
        assert len(cached) == 3 + 1 and session.pages_in_use() == 0


def test_a_prefix_whose_sinks_are_gone_is_read_again(model: PreTrainedModel) -> None:
    (prompt,) = prompts([200])
    with SinkSession(model) as session:
        expected = session.run([prompt], greedy(6))
        ledger = session.cache.allocator.ledger
        ledger.hash_to_block.pop(session.cache.allocator._sink_hash(prompt))
        assert session.cache.allocator.match_prefix_blocks(prompt) == []
        ledger.reset()
        assert session.run([prompt], greedy(6)) == expected


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("length", [300, 129, 40])
def test_forks_have_the_sinks_of_their_parent(model: PreTrainedModel, length: int, sharing: bool) -> None:
    (prompt,) = prompts([length])
    generation = GenerationConfig(max_new_tokens=8, do_sample=True, top_k=1, num_return_sequences=3, eos_token_id=-1)
    expected = alone(model, [prompt], 8, max_batch_tokens=length - 1)
    with SinkSession(model, allow_block_sharing=sharing) as session:
        assert session.run([prompt], generation) == expected * 3
        assert session.pages_in_use() == 0


def test_offloaded_requests_come_back_with_their_sinks(model: PreTrainedModel, offloaded: list[set[str]]) -> None:
    inputs = prompts([100] * 6, seed=3)
    pool = dict(num_blocks=50, max_batch_tokens=700, safety_margin=0.0, cpu_offload_space=0.01)
    expected = alone(model, inputs, 60)
    with SinkSession(model, **pool) as session:
        assert session.run(inputs, greedy(60)) == expected
        assert any(offloaded) and session.pages_in_use() == 0


def test_sinks_beside_sliding_windows() -> None:
    model, inputs = mixed("gemma3"), prompts([40, 129, 300])
    expected = alone(model, inputs, 8)
    with SinkSession(model) as session:
        assert session.run(inputs, greedy(8)) == expected
        assert session.pages_in_use() == 0
