"""Joined projections: one product, original parameters, and modules that are left alone."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.batching_cases import Session, greedy, model_of, prompts
from tq_hf.prepared import Joined, join, separate


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "gpt_oss"])
def test_answers_and_parameters_stay(family: str) -> None:
    """Parameters are views of one tensor. Loaded numbers count, and a second time nothing is copied."""
    model, inputs = model_of(family), prompts([5, 130])
    before = {name: each.clone() for name, each in model.state_dict().items()}
    names = {name: each for name, each in model.named_parameters()}
    with Session(model) as session:
        expected = session.run(inputs, greedy(8))
    join(model)
    modules = [each for each in model.modules() if "tq_hf_joined" in vars(each)]
    assert modules and {name: each for name, each in model.named_parameters()} == names
    projection = modules[1]
    address = projection.weight.data_ptr()
    assert address - modules[0].weight.data_ptr() == modules[0].weight.nbytes
    with Session(model) as session:
        assert session.run(inputs, greedy(8)) == expected
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(each, after[name]) for name, each in before.items())
    model.load_state_dict({name: torch.zeros_like(each) for name, each in before.items()})
    states = torch.randn(1, 3, projection.in_features)
    assert not any(each(states).count_nonzero() for each in modules[:2] if each.bias is None)
    separate(model)
    join(model)
    assert "forward" in vars(projection) and projection.weight.data_ptr() == address
    separate(model)
    assert not any("forward" in vars(each) for each in model.modules())


class Attention(nn.Module):
    """Projections of one width; `change` makes one of them another."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, n, bias=False) for n in (32, 8, 8))
        if change == "bias":
            self.v_proj = nn.Linear(16, 8)
        elif change == "dtype":
            self.v_proj = self.v_proj.double()
        elif change == "class":
            self.v_proj = type("Quantized", (nn.Linear,), {})(16, 8, bias=False)
        elif change == "hooked":
            self.v_proj.forward = self.v_proj.forward
        elif change == "shared":
            self.v_proj.weight = self.k_proj.weight
        elif change == "one module":
            self.v_proj = self.k_proj
        elif change == "meta":
            self.v_proj = self.v_proj.to("meta")
        elif change == "absent":
            del self.v_proj


@pytest.mark.parametrize("change", ["bias", "dtype", "class", "hooked", "shared", "one module", "meta", "absent"])
def test_what_is_not_plain_and_alike_is_left_alone(change: str) -> None:
    model = Attention(change)
    join(model)
    assert not hasattr(model.q_proj, "tq_hf_joined")


def test_other_states_and_calls_out_of_turn_have_their_own_product() -> None:
    model, (x, y) = Attention(), torch.randn(2, 1, 5, 16)
    alone = [[each(states) for each in (model.q_proj, model.k_proj, model.v_proj)] for states in (x, y)]
    join(model)
    calls = [(0, 0), (0, 1), (1, 1), (0, 2), (1, 0), (1, 2), (0, 0), (0, 1), (0, 2), (0, 2)]
    for states, i in calls:
        found = (model.q_proj, model.k_proj, model.v_proj)[i]((x, y)[states])
        torch.testing.assert_close(found, alone[states][i])


class Shared(Joined):
    """One that another thread uses, too: from the third time on that a call looks, its product is the last one."""

    @property
    def last(self) -> Any:
        self.looks += 1
        return self.own if self.looks < 3 or self.own is None else (torch.zeros(1), [torch.zeros(1)] * 3)

    @last.setter
    def last(self, value: Any) -> None:
        self.own, self.looks = value, 0


def test_a_thread_takes_no_product_of_another() -> None:
    """As one that compiles layers while another thread runs steps."""
    model, states = Attention(), torch.randn(1, 5, 16)
    modules = model.q_proj, model.k_proj, model.v_proj
    alone = [each(states) for each in modules]
    Shared([*modules])
    torch.testing.assert_close([each(states) for each in modules], alone)
