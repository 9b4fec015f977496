"""A manager that is kept holds pages and graphs of the model as it was: with other adapters, weights or dtype they are
not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.adapters import Lora, set_adapters
from tests.support.batching_cases import Session, Steps, greedy, model_of, prompts

OPTIONS = {"balance": False}


def adapted() -> Any:
    model = model_of()
    for layer in model.model.layers:
        layer.self_attn.k_proj = Lora(layer.self_attn.k_proj)
    return model


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
    "another device": lambda model: model.to("meta"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_is_given_no_pages_of_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,), model = prompts([300]), adapted()
    with Session(model, overrides=OPTIONS) as session:
        before, first = session.run([prompt], greedy(8)), session.manager
        session.run([prompt[:60]], greedy(8))
        assert session.manager is first
        CHANGES[name](model)
        with pytest.raises(ValueError, match="adapters, dtype or device have changed"):
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
    (prompt,), model = prompts([300]), adapted()
    with Session(model, overrides=OPTIONS) as session:
        session.run([prompt], greedy(2))
        manager, steps = session.manager, Steps(monkeypatch)
        set_adapters(model, active_adapters=["second"])
        set_adapters(model, active_adapters=["first"])
        session.run([prompt], greedy(2))
        assert session.manager is manager and steps.seen[0][1] == [260]


def test_a_manager_is_not_started_again_over_a_changed_model() -> None:
    model = adapted()
    with Session(model, overrides=OPTIONS) as session:
        session.run(prompts([20]), greedy(2))
        set_adapters(model, active_adapters=["second"])
        for start in (session.manager.start, lambda: model.generate_batch(prompts([20]), greedy(2))):
            with pytest.raises(ValueError, match="adapters, dtype or device have changed.*Create a new manager"):
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
