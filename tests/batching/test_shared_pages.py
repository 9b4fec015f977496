"""Sinks, blocks and the newest tokens through transformers' engine: what is shared, and what is each request's own."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
from transformers import PreTrainedModel

from tests.support.batching_cases import Session, Steps, greedy, model_of, prompts

SINKS = 4
PREFIX = SINKS + 256


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return model_of()


@pytest.mark.parametrize(("sinks", "residual"), [(0, 0), (4, 0), (0, 128), (8, 40), (1, 200)])
def test_answers_are_those_of_generate_with_these_options(model: PreTrainedModel, sinks: int, residual: int) -> None:
    inputs, recipe = prompts([3, 120, 127, 129, 300]), dict(sink_tokens=sinks, residual_length=residual)
    for way in ({}, {"max_blocks_per_request": 0}):
        with Session(model, overrides=recipe, num_blocks=400, **way) as session:
            assert session.run(inputs, greedy(12)) == [session.oracle.generate(prompt, 12) for prompt in inputs]
            assert session.pages_in_use() == 0


def test_a_long_answer_packs_its_own_blocks_as_generate_does(model: PreTrainedModel) -> None:
    """Blocks become due, and the ring goes round, while tokens come one by one."""
    (prompt,) = prompts([20])
    with Session(model, num_blocks=400) as session:
        assert session.run([prompt], greedy(400)) == [session.oracle.generate(prompt, 400)]


def test_a_request_that_outgrows_its_block_table_goes_on_with_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,), steps = prompts([120]), Steps(monkeypatch)
    # A ring of float32 rows at head_dim 32 is 16 pages. With that of the sinks and the count, but without a column for
    # block 0, tables serve 131 tokens.
    with Session(model_of(), max_blocks_per_request=18) as session:
        assert session.run([prompt], greedy(15)) == [session.oracle.generate(prompt, 15)]
    assert [kind for kind, _, _ in steps.seen] == ["lists"] + ["table"] * 11 + ["lists"] * 3


def test_a_shared_prefix_is_read_from_the_pages_of_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that shares blocks reads them packed, the newest, too."""
    first, *tails = prompts([300, 1, 60, 110])
    shared = [first[:260] + tail for tail in tails]
    with Session(model_of()) as session:
        assert session.run([first], greedy(6)) == [session.oracle.generate(first, 6)]
        assert len(session.cache.allocator.ledger.cached_blocks) == 2 + 1, "blocks and sinks"
        steps = Steps(monkeypatch)
        assert session.run(shared, greedy(6)) == [session.oracle.after_prefix(prompt, 6, 260) for prompt in shared]
        assert all(past >= 260 for _, held, _ in steps.seen for past in held)
        assert session.pages_in_use() == 0 and not session.cache.allocator.prefix_blocks
    with Session(model_of(), allow_block_sharing=False) as session:
        session.run([first], greedy(2))
        assert session.run(shared, greedy(6)) == [session.oracle.generate(prompt, 6) for prompt in shared]


def test_a_block_is_known_by_all_tokens_before_it(model: PreTrainedModel) -> None:
    """Other sinks, or another token in the block before: nothing of the prompt is shared."""
    (first,) = prompts([400])
    with Session(model) as session:
        session.run([first], greedy(2))
        match = session.cache.allocator.match_prefix_blocks
        assert [len(match(first[:n])) for n in (PREFIX, PREFIX + 1, 131, 133)] == [1, 2, 0, 1]
        for changed, left in ((0, 0), (SINKS - 1, 0), (SINKS, 0), (131, 0), (132, 1), (259, 1), (260, 2)):
            other = [*first[:changed], (first[changed] + 1) % 100, *first[changed + 1 :]]
            assert len(match(other[:300])) == left, changed


@pytest.mark.parametrize("new", [1, 6])
def test_all_parts_of_a_prompt_are_shared(new: int, model: PreTrainedModel, ways: dict[str, Any]) -> None:
    """Also if the last part is scheduled before the one before it is over, and if the answer has a single token."""
    (first,) = prompts([700])
    with Session(model, max_batch_tokens=256, **ways) as session:
        session.run([first], greedy(new))
        assert len(session.cache.allocator.match_prefix_blocks(first)) == 5
        assert session.pages_in_use() == 0


def test_sinks_are_held_as_long_as_what_follows_them(model: PreTrainedModel) -> None:
    (prompt,) = prompts([300])
    with Session(model) as session:
        session.run([prompt], greedy(2))
        cache, allocator = session.cache, session.cache.allocator
        assert cache.search_prefix_match("one", prompt) == PREFIX
        assert not allocator.ledger.cached_blocks
        assert [allocator.count_shareable_blocks("one", n) for n in (3, 4, 131, 132, 260)] == [0, 1, 1, 2, 3]
        cache.free_blocks("one")
        assert len(allocator.ledger.cached_blocks) == 3


def test_prompts_with_the_same_first_tokens_share_one_page(model: PreTrainedModel) -> None:
    start, *tails = prompts([SINKS, 200, 200, 200])
    with Session(model) as session:
        session.run([start + tail for tail in tails], greedy(2))
        cached = session.cache.allocator.ledger.cached_blocks
        assert len(cached) == 3 + 1 and session.pages_in_use() == 0


def test_a_prefix_whose_sinks_are_gone_is_read_again(model: PreTrainedModel) -> None:
    (prompt,) = prompts([200])
    with Session(model) as session:
        expected = session.run([prompt], greedy(6))
        ledger = session.cache.allocator.ledger
        ledger.hash_to_block.pop(session.cache.allocator._sink_hash(prompt))
        assert session.cache.allocator.match_prefix_blocks(prompt) == []
        ledger.reset()
        assert session.run([prompt], greedy(6)) == expected


@pytest.mark.parametrize("sharing", [True, False])
def test_forks_of_a_request_that_began_with_blocks_read_them_packed_too(model: PreTrainedModel, sharing: bool) -> None:
    first, tail = prompts([300, 70])
    prompt, generation = first[:PREFIX] + tail, greedy(8, answers=3)
    with Session(model) as session:
        session.run([first], generation)  # of another number of answers it would be another manager
        allocator = session.cache.allocator
        if not sharing:  # forks copy all pages, and the prefix is shared as before
            allocator.count_shareable_blocks = lambda *args: 0
        assert session.run([prompt], generation) == [session.oracle.after_prefix(prompt, 8, PREFIX)] * 3
        assert session.pages_in_use() == 0 and not allocator.prefix_blocks


def test_requests_that_began_with_blocks_come_back_from_the_cpu_with_them(
    model: PreTrainedModel, offloaded: list[set[str]]
) -> None:
    """Six requests share three pages, want 16 each for rings and from 388 tokens on one more: too many for 102."""
    first, *tails = prompts([300] + [100] * 6, seed=3)
    inputs = [first[:PREFIX] + tail for tail in tails]
    found = []
    for blocks in (400, 102):
        pool = dict(num_blocks=blocks, max_batch_tokens=700, safety_margin=0.0, cpu_offload_space=0.01)
        with Session(model, **pool) as session:
            session.run([first], greedy(40))
            assert not any(offloaded)
            found.append(session.run(inputs, greedy(40)))
            assert session.pages_in_use() == 0 and not session.cache.allocator.prefix_blocks
    assert any(offloaded) and found[0] == found[1]
    assert [out[:20] for out in found[0]] == [session.oracle.after_prefix(prompt, 20, PREFIX) for prompt in inputs]


def test_a_request_that_begins_anew_has_blocks_of_nobody(model: PreTrainedModel) -> None:
    """Its pages were taken away, and those it had begun with are gone."""
    (prompt,) = prompts([300])
    with Session(model) as session:
        session.run([prompt], greedy(2))
        cache, allocator = session.cache, session.cache.allocator
        assert cache.search_prefix_match("one", prompt) == PREFIX and allocator.prefix_blocks == {"one": 2}
        cache.free_blocks("one", no_cache=True)
        assert allocator.prefix_blocks == {"one": 2}, "it may come back from the CPU"
        allocator.ledger.reset()
        assert cache.search_prefix_match("one", prompt) == 0
        allocator.allocate_cache_to_request("one", 0, 20)
        assert not allocator.prefix_blocks
        cache.free_blocks("one")


def test_an_offloaded_request_shares_a_block_once_its_last_token_is_stored(model: PreTrainedModel) -> None:
    """transformers adds the pages of one that comes back as its tokens over 128, and blocks end 4 tokens later."""
    with Session(model) as session:
        session.run(prompts([5]), greedy(1))
        count = session.cache.count_new_complete_blocks
        for past, new in itertools.product(range(1, 400), (1, 7, 300)):
            complete = {offloaded: count(State(past, offloaded), new).get("full_attention", 0) for offloaded in (0, 1)}
            stored, before = (max(0, n - SINKS) // 128 for n in (past + new, past))
            assert complete == {0: stored - before, 1: stored - past // 128}


class State(NamedTuple):
    """What is asked of the state of a request."""

    past: int
    is_cpu_offloaded: int

    def current_len(self) -> int:
        return self.past
