"""Models with sliding-window layers: their windows are dense pages of the pool that packed ones share."""

from __future__ import annotations

import pytest

from tests.support.batching_cases import Session, Steps, greedy, mixed, prompts


def test_the_kinds_of_layers_are_those_of_the_model() -> None:
    with Session(mixed("qwen2")) as session:
        session.run(prompts([5]), greedy(1))
        cache = session.cache
        assert cache.allocator.layer_indices == [0] and cache.windows.layer_indices == [1]
        assert not cache.use_prefix_sharing


def test_tables_have_room_for_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with long windows they are more pages than those of the longest request that tables serve."""
    (prompt,), steps = prompts([1200]), Steps(monkeypatch)
    model = mixed("gemma3", sliding_window=1100)
    with Session(model, max_blocks_per_request=28) as session:
        assert session.run([prompt], greedy(6)) == [session.oracle.generate(prompt, 6)]
        assert session.cache.windows.pages_of(1100) > 28
    assert steps.kinds() == {"table", "lists"}


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
