"""Answers of continuous batching, token for token those of `generate()` on a cache that encodes as pages do."""

from __future__ import annotations

import pytest

from tests.support.batching_cases import Session, Steps, greedy, model_of, prompts


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
