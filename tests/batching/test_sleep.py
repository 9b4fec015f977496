"""Between sessions a kept manager gives its pages back, and takes them again."""

from __future__ import annotations

import weakref

import pytest
import torch

from tests.support.batching_cases import Session, Steps, answers, greedy, model_of, options, prompts
from tq_hf import continuous_batching


def test_what_sleeps_holds_no_pages_and_answers_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,) = prompts([300])
    with Session(model_of()) as session:
        assert session.batching.sleep() == 0, "nothing is held before the first session"
        found = session.run([prompt], greedy(8))
        manager, pool = session.manager, weakref.ref(session.cache.cache_tensor)
        size, pages = session.cache.cache_tensor.nbytes, session.cache.num_blocks
        assert session.batching.sleep() == size and pool() is None
        assert session.batching.sleep() == 0
        steps = Steps(monkeypatch)
        assert session.run([prompt], greedy(8)) == found and session.manager is manager
        assert steps.seen[0][1] == [0], "shared prefixes are gone"
        assert session.cache.num_blocks == pages


def test_a_model_that_was_trained_in_between_goes_on_with_its_manager() -> None:
    model, (prompt,) = model_of(), prompts([300])
    with Session(model, overrides={"balance": False}) as session:
        before, manager = session.run([prompt], greedy(8)), session.manager
        session.batching.sleep()
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(-2)
        after = session.run([prompt], greedy(8))
        assert session.manager is manager
        assert after == [session.oracle.generate(prompt, 8)] != before


def test_a_session_that_runs_keeps_its_pages() -> None:
    with Session(model_of()) as session:
        session.run(prompts([40]), greedy(2))
        session.manager.start()
        with pytest.raises(ValueError, match="session of continuous batching is running.*Stop the session"):
            session.batching.sleep()
        session.manager.stop(keep_for_next_session=True)
        assert session.batching.sleep() > 0


def test_rollouts_of_a_trainer_sleep_between_them() -> None:
    model = model_of()
    asked = dict(generation_config=greedy(4), continuous_batching_config=options(), persistent_manager=True)
    with continuous_batching(model) as batching:
        found = answers(model.generate_batch(prompts([40]), **asked))
        assert batching.sleep() > 0
        assert answers(model.generate_batch(prompts([40]), **asked)) == found


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_its_memory_back() -> None:
    model = model_of().to("cuda", torch.bfloat16)
    with Session(model, num_blocks=20_000) as session:
        found = session.run(prompts([300]), greedy(8))
        pool, before = session.cache.cache_tensor.nbytes, torch.cuda.memory_allocated()
        freed = session.batching.sleep()
        assert freed >= 0.99 * pool and torch.cuda.memory_allocated() == before - freed
        assert session.run(prompts([300]), greedy(8)) == found


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_sleeping_and_waking_leaves_nothing_behind() -> None:
    """cuBLAS allocates a workspace of 32 MiB (on an H200) for each stream, and torch keeps it."""
    held = []
    with Session(model_of().to("cuda", torch.bfloat16), num_blocks=100) as session:
        for _ in range(5):
            session.run(prompts([300]), greedy(8))
            session.batching.sleep()
            held.append(torch.cuda.memory_allocated())
            session.batching.wake()
    assert held[1:] == held[1:2] * 4
