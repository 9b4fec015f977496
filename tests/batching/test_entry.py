"""Two ways in: an adapter, and a context for code that calls the model's own `generate_batch`."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from transformers import AttentionInterface, GenerationConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from tests.support.batching_cases import Oracle, Session, answers, greedy, model_of, options, prompts
from tests.support.tiny_models import multimodal
from tq_hf import Balance, TurboQuantBatching, continuous_batching
from tq_hf.batching import TurboQuantBatchingManager


def test_the_attention_function_has_no_mask() -> None:
    """With one the model would make a mask of all tokens by all tokens at every step."""
    assert "turboquant_paged" in AttentionInterface().valid_keys()
    assert "turboquant_paged" not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()


class Peft(torch.nn.Module):
    """What PEFT puts around a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def get_base_model(self) -> torch.nn.Module:
        return self.base_model


def test_a_models_own_generate_batch_uses_packed_pages_within_the_context() -> None:
    model, inputs = model_of(), prompts([20, 140])
    model.train()  # as a trainer's is
    held = dict(vars(model))
    compiled = torch.nn.Module()
    compiled._orig_mod = model  # as `torch.compile` holds it
    with continuous_batching(torch.nn.DataParallel(Peft(compiled)), "4bit_nc") as batching:
        for _ in range(2):
            found = answers(
                model.generate_batch(inputs, generation_config=greedy(8), continuous_batching_config=options())
            )
            assert model.config._attn_implementation == "sdpa"
        manager = model.init_continuous_batching(greedy(2))
        assert isinstance(manager, TurboQuantBatchingManager)
        model.set_attn_implementation("sdpa")
    assert vars(model).keys() == held.keys()
    oracle = Oracle(model.eval(), balance=batching.balance)
    assert found == [oracle.generate(prompt, 8) for prompt in inputs]


def test_parts_of_a_model_get_their_own_attention_back() -> None:
    model, attention = multimodal()
    own = attention()
    batching = TurboQuantBatching(model)
    for _ in range(2):
        batching.generate_batch(prompts([40]), greedy(2), options(), persistent_manager=True)
        assert attention() == own
    batching.destroy_cached_continuous_batching_manager()
    with pytest.raises(ValueError, match=r"1,000,000,000 pages \(`num_blocks`\) .* GiB may be taken"):
        batching.generate_batch(prompts([5]), greedy(1), options(num_blocks=10**9))
    assert attention() == own == ["sdpa", "turboquant", "eager"]


def test_the_context_ends_with_an_exception_too_and_is_not_entered_twice() -> None:
    model = model_of()
    with pytest.raises(KeyError), continuous_batching(model, balance=False):
        with pytest.raises(ValueError, match="within a `with continuous_batching"):
            with continuous_batching(model):
                pass
        raise KeyError
    assert "init_continuous_batching" not in vars(model)
    stock = model.init_continuous_batching(greedy(2), options())
    assert not isinstance(stock, TurboQuantBatchingManager)


def test_a_kept_manager_of_the_model_is_not_used_instead() -> None:
    model = model_of()
    model.generate_batch(prompts([5]), greedy(2), options(), persistent_manager=True)
    with pytest.raises(ValueError, match="destroy_cached_continuous_batching_manager"):
        with continuous_batching(model, balance=False):
            pass
    model.destroy_cached_continuous_batching_manager()


def test_a_kept_manager_is_used_again_only_if_it_generates_as_asked_for() -> None:
    """transformers' would ignore the new generation config, and wait forever for forks it does not make."""
    inputs = prompts([20, 30])
    with Session(model_of()) as session:
        session.run(inputs, greedy(4))
        first = session.manager
        assert [len(out) for out in session.run(inputs, greedy(6))] == [6, 6]
        unlimited = GenerationConfig(do_sample=False, eos_token_id=-1)
        again = session.batching.init_continuous_batching(unlimited, session.options)
        assert again is first and again.generation_config.max_new_tokens is None
        again.restore_attention()
        twice = greedy(4, answers=2)
        assert len(session.run(inputs, twice)) == 4
        assert session.manager is not first and not first.is_running()


@pytest.mark.parametrize("frozen", [0, 375, 10**6])
def test_a_call_is_not_held_up_by_a_search_through_all_objects(frozen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers collects garbage at the end of a session. Python 3.12 begins with 375 frozen objects."""
    seen: list[str] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
    for name in ("freeze", "collect", "unfreeze"):
        monkeypatch.setattr(gc, name, partial(seen.append, name))
    TurboQuantBatching(model_of()).generate_batch(prompts([5]), greedy(1), continuous_batching_config=options())
    assert "collect" in seen
    assert (seen[0], seen[-1]) == (("collect", "collect") if frozen > 1000 else ("freeze", "unfreeze"))


def test_the_generation_config_stays_as_it_was() -> None:
    model = model_of()
    assert model.generation_config.eos_token_id is None
    TurboQuantBatching(model, balance=False).generate_batch(
        prompts([5]), continuous_batching_config=options(), max_new_tokens=2
    )
    assert model.generation_config.eos_token_id is None


class TestBalance:
    """Channels are balanced by channel scales of the model, which all pages share."""

    @staticmethod
    def loud() -> torch.nn.Module:
        """A model with a loud key channel, and a loud value channel, in each layer."""
        model = model_of()
        for layer in model.model.layers:
            for rows in (layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight):
                rows.data[::8] *= 20
        return model

    def test_channel_scales_are_found_once_and_given_to_every_layer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, probes = self.loud(), []
        real = Balance.of
        monkeypatch.setattr(Balance, "of", lambda model: probes.append(model) or real(model))
        with Session(model) as session:
            session.run(prompts([50]), greedy(2))
            session.batching.destroy_cached_continuous_batching_manager()
            session.run(prompts([50]), greedy(2))
            assert probes == [model]
            for index, pages in session.cache.allocator.pages.items():
                for held, found in zip(pages.channel_scales, session.oracle.balance.layers[index], strict=True):
                    assert torch.equal(held, found) and (held != 1).any()

    def test_answers_are_those_of_generate_with_the_same_channel_scales(self) -> None:
        model, inputs = self.loud(), prompts([150, 260])
        with Session(model) as session:
            balanced = session.run(inputs, greedy(12))
            assert balanced == [session.oracle.generate(prompt, 12) for prompt in inputs]
        plain = TurboQuantBatching(model, balance=False)
        assert plain.balance is None
        found = answers(plain.generate_batch(inputs, greedy(12), options()))
        assert found == [Oracle(model).generate(prompt, 12) for prompt in inputs]
        assert found != balanced
