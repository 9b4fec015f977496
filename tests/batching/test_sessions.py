"""Sessions that end while requests run, sessions beside others, pages that a kept manager gives back between sessions,
and models that change: with other adapters, weights or dtype, pages and graphs of before are not used."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.support.adapters import adapted, set_adapters
from tests.support.batching_cases import Oracle, Session, Steps, answers, greedy, model_of, options, prompts, serve
from tq_hf import TurboQuantBatching, continuous_batching


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("way", [{"block": False}, {"timeout": 0.01}], ids=["at once", "timeout"])
def test_a_stop_that_does_not_wait_leaves_the_attention_to_the_last_answer(way: dict[str, Any], keeps: bool) -> None:
    model, (prompt,) = model_of(), prompts([300])
    own, batching = model.config._attn_implementation, TurboQuantBatching(model)
    manager = batching.init_continuous_batching(greedy(60), options(allow_block_sharing=False))
    manager.start()
    manager.add_request(prompt)
    manager.stop(keep_for_next_session=keeps, **way)
    result = manager.get_result(timeout=60)
    assert manager._ended.wait(60)
    assert model.config._attn_implementation == own and result.error is None
    assert result.generated_tokens == Oracle(model, balance=batching.balance).generate(prompt, 60)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
        model.model.embed_tokens.weight.mul_(2)
    with pytest.raises(ValueError, match="hooks, dtype or device have changed") if keeps else nullcontext():
        manager.start()
    manager.destroy()


@pytest.mark.parametrize("kept", [False, True])
def test_a_model_serves_one_manager_at_a_time(kept: bool) -> None:
    """The outputs of a manager that is kept for later sessions are those of one caller at a time, too."""
    model, (prompt,) = model_of(), prompts([300])
    batching = TurboQuantBatching(model)
    with serve(batching, 60) as manager:
        manager.stop(keep_for_next_session=kept)
    with serve(batching, 60) as manager:
        name = manager.add_request(prompt)
        for config in (greedy(60), greedy(60, repetition_penalty=2.0)):
            with pytest.raises(ValueError, match="A manager serves this model already"):
                batching.generate_batch(prompts([5]), config, options())
        found = manager.get_result(name, timeout=60).generated_tokens
    assert found == Oracle(model, balance=batching.balance).generate(prompt, 60)
    assert len(batching.generate_batch(prompts([5]), greedy(1), options())) == 1


def test_a_manager_that_is_refused_leaves_the_one_that_serves() -> None:
    """Also if it was made first, and is stopped. It serves when the other one has ended."""
    model, (prompt,) = model_of(), prompts([300])
    own, batching = model.config._attn_implementation, TurboQuantBatching(model)
    refused, serves = (batching.init_continuous_batching(greedy(60), options()) for _ in range(2))
    serves.start()
    name = serves.add_request(prompt)
    with pytest.raises(ValueError, match="A manager serves this model already"):
        refused.start()
    refused.stop()
    expected = serves.get_result(name, timeout=60).generated_tokens
    serves.stop()
    assert model.config._attn_implementation == own
    assert expected == Oracle(model, balance=batching.balance).generate(prompt, 60)
    refused.start()
    assert refused.get_result(refused.add_request(prompt), timeout=60).generated_tokens == expected
    refused.stop()
    assert model.config._attn_implementation == own


def test_answers_that_begin_in_a_pause_share_no_pages_of_earlier_weights() -> None:
    """The prompt was read in parts before and after the pause, and forked after it. The fork completes a block."""
    model, (prompt,) = model_of(), prompts([250])
    session = serve(TurboQuantBatching(model, balance=False), 20, max_batch_tokens=64)
    reads, paused = threading.Event(), threading.Event()

    def wait(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        if inputs["input_ids"].numel() == 64 and not reads.is_set():
            reads.set()
            paused.wait(60)

    hook = model.register_forward_pre_hook(wait, with_kwargs=True)
    with session as manager:
        manager.add_request(prompt, num_return_sequences=2)
        assert reads.wait(60)
        threading.Timer(0.2, paused.set).start()  # a pause waits for the step
        with manager.pause(), torch.no_grad():
            model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.flip(0))
        hook.remove()
        results = [manager.get_result(timeout=60) for _ in range(2)]
        assert all(result.error is None for result in results)
        shared = manager.batch_processor.cache.number_shared
        manager.get_result(manager.add_request(prompt), timeout=60)
        assert manager.batch_processor.cache.number_shared == shared


def test_prefixes_of_earlier_weights_are_not_shared() -> None:
    model, (prompt,) = model_of(), prompts([600])
    batching = TurboQuantBatching(model)

    def ask(manager: Any, prompt: list[int]) -> list[int]:
        name = manager.add_request(prompt)
        return manager.get_result(name, timeout=60).generated_tokens

    with serve(batching, 10) as manager:
        ask(manager, prompt)
        with manager.pause():
            pass
        shared = manager.batch_processor.cache.number_shared
        ask(manager, prompt)
        assert (shared := manager.batch_processor.cache.number_shared - shared) > 0
        with manager.pause(), torch.no_grad():
            model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.flip(0))
        found = ask(manager, prompt)
        again = manager.batch_processor.cache.number_shared
        ask(manager, prompt)
        assert manager.batch_processor.cache.number_shared - again == shared
    assert found == Oracle(model, balance=batching.balance).generate(prompt, 10)


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 0.5}, {"presence_penalty": 1.0}])
def test_penalties_do_not_count_tokens_of_other_requests(penalty: dict[str, float]) -> None:
    """Steps that read a part of the long prompt have a row of logits that belongs to no request."""
    batching = TurboQuantBatching(model_of(), balance=False)
    given = dict(zip("axcb", prompts([20, 20, 20, 1500]), strict=True))

    def answer_beside(lengths: dict[str, int]) -> list[int]:
        with serve(batching, 60, max_batch_tokens=64, allow_block_sharing=False) as manager:
            for name, new in lengths.items():
                manager.add_request(given[name], name, max_new_tokens=new, **({} if name == "b" else penalty))
            results = [manager.get_result(timeout=60) for _ in lengths]
        return next(result.generated_tokens for result in results if result.request_id == "c")

    assert answer_beside({"c": 60}) == answer_beside({"a": 4, "x": 60, "c": 60, "b": 4})


def test_requests_that_come_with_a_hard_stop_fail_with_the_others() -> None:
    batching = TurboQuantBatching(model_of())
    manager = batching.init_continuous_batching(greedy(200), options())
    manager.start()
    names = {manager.add_request(prompt, top_logprobs=1, num_return_sequences=2) for prompt in prompts([5] * 9)}
    manager.stop(hard_stop=True)
    results = [manager.get_result(timeout=10) for _ in range(18)]
    assert names < {result.request_id for result in results} and len({result.request_id for result in results}) == 18
    assert all(result.error and result.top_logprobs == [] for result in results) and not manager.output_router._open


def test_a_pool_that_no_request_fits_into_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="The pool has 34 pages, and a request of this model takes at least 73"):
        TurboQuantBatching(model_of(), residual_length=1024).generate_batch([[5]], greedy(3), options(num_blocks=34))


def test_what_sleeps_holds_no_pages_and_answers_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,) = prompts([300])
    with Session(model_of()) as session:
        assert session.batching.sleep() == 0, "nothing is held before the first session"
        found = session.run([prompt], greedy(8))
        manager, pool = session.manager, weakref.ref(session.cache.cache_tensor)
        size, pages = session.cache.cache_tensor.nbytes, session.cache.num_blocks
        assert session.cache.arguments and session.cache not in session.cache.arguments.values(), "freed at once"
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


OPTIONS = {"balance": False}


def trained(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.lora_A["first"].data.mul_(3)


@torch.no_grad()
def edited(model: Any) -> None:
    """One weight of many: a fingerprint samples 64 numbers of each tensor."""
    model.model.layers[0].mlp.up_proj.weight[3, 5] += 100.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another adapter": lambda model: set_adapters(model, active_adapters=["second"]),
    "no adapter": lambda model: set_adapters(model, disable_adapters=True),
    "a stronger adapter": lambda model: set_adapters(model, scaling={"first": 3.0, "second": 1.0}),
    "a trained adapter": trained,
    "another dtype": lambda model: model.bfloat16(),
    "an edited weight": edited,
    "an edited embedding": lambda model: model.model.embed_tokens.weight.detach()[7].mul_(-9),
    "a hook": lambda model: model.model.layers[0].mlp.register_forward_hook(lambda mlp, args, out: 2 * out + 1),
    "another module": lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.Tanh()),
    "another device": lambda model: model.to("meta"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_is_given_no_pages_of_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,), model = prompts([300]), adapted(model_of())
    with Session(model, overrides=OPTIONS) as session:
        before, first = session.run([prompt], greedy(8)), session.manager
        session.run([prompt[:60]], greedy(8))
        assert session.manager is first
        CHANGES[name](model)
        with pytest.raises(ValueError, match="adapters, modules, hooks, dtype or device have changed"):
            first.start()
        if name == "another device":
            return
        steps = Steps(monkeypatch)
        found = session.run([prompt], greedy(8))
        assert session.manager is not first
        assert steps.seen[0][1] == [0], "the prompt is read from its first token on"
    with Session(model, overrides=OPTIONS) as fresh:
        assert found == fresh.run([prompt], greedy(8)) != before


def test_an_unchanged_model_goes_on_with_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,), model = prompts([300]), adapted(model_of())
    with Session(model, overrides=OPTIONS) as session:
        session.run([prompt], greedy(2))
        manager, steps = session.manager, Steps(monkeypatch)
        set_adapters(model, active_adapters=["second"])
        set_adapters(model, active_adapters=["first"])
        session.run([prompt], greedy(2))
        assert session.manager is manager and steps.seen[0][1] == [260]


def test_a_manager_is_not_started_again_over_a_changed_model() -> None:
    model = adapted(model_of())
    with Session(model, overrides=OPTIONS) as session:
        session.run(prompts([20]), greedy(2))
        set_adapters(model, active_adapters=["second"])
        for start in (session.manager.start, lambda: model.generate_batch(prompts([20]), greedy(2))):
            with pytest.raises(ValueError, match="hooks, dtype or device have changed.*Create a new manager"):
                start()
            assert model.config._attn_implementation == "sdpa" and not session.manager.is_running()
        set_adapters(model, active_adapters=["first"])
        assert session.run(prompts([20]), greedy(2))


def test_adapters_of_peft_are_switched_between_two_uses() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=8, lora_alpha=32, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(model_of(), lora)
    model.add_adapter("b", lora)
    (prompt,) = prompts([300])

    def fresh() -> list[list[int]]:
        with Session(model, overrides=OPTIONS) as session:
            return session.run([prompt], greedy(8))

    expected = {}
    for name in ("default", "b"):
        model.set_adapter(name)
        expected[name] = fresh()
    with model.disable_adapter():
        expected["none"] = fresh()
    assert len({str(tokens) for tokens in expected.values()}) == 3
    model.set_adapter("default")
    with Session(model, overrides=OPTIONS) as session:
        session.model = session.batching.model
        assert session.run([prompt], greedy(8)) == expected["default"]
        model.set_adapter("b")
        assert session.run([prompt], greedy(8)) == expected["b"]
        with model.disable_adapter():
            assert session.run([prompt], greedy(8)) == expected["none"]
        assert session.run([prompt], greedy(8)) == expected["b"]
