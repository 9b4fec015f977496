"""What `Balance.of` runs a model on, and that the model is as before afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload

from tests.support.tiny_models import build, multimodal
from tq_hf import Balance, balance

OWN = ["sdpa", "turboquant", "eager"]


def test_parts_of_a_model_keep_their_own_attention():
    model, attention = multimodal()
    assert attention() == OWN
    Balance.of(model)
    assert attention() == OWN


def test_parts_of_a_model_get_their_own_attention_back_from_a_run_that_fails():
    model, attention = multimodal()

    def fail(*args: object) -> None:
        assert attention() == ["turboquant"] * 3
        raise torch.OutOfMemoryError

    model.get_decoder().layers[1].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        Balance.of(model)
    assert attention() == OWN


@pytest.mark.parametrize("positions, tokens", [(256, 256), (36, 36), (2048, 512)])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_probe_has_no_more_tokens_than_the_model_has_positions(name, positions, tokens):
    model = build(name, max_position_embeddings=positions)
    lengths = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
    assert Balance.of(model).layers.keys() == {0, 1}
    assert lengths == [tokens]


def test_a_model_of_too_few_positions_for_statistics_is_refused():
    with pytest.raises(ValueError, match=r"positions for 35 tokens \(GPT2Config\).* 36 or more.*`balance=False`"):
        Balance.of(build("gpt2", max_position_embeddings=35))


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_model_whose_weights_are_offloaded_is_probed(where, tmp_path):
    model = build("llama")
    expected = Balance.of(model)
    if where == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert model.device.type == "meta"
    actual = Balance.of(model)
    assert actual.layers.keys() == expected.layers.keys() == {0, 1}
    for layer, scales in expected.layers.items():
        assert all(map(torch.equal, actual.layers[layer], scales))


def test_kernels_of_a_probe_are_compiled_together_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a run that launches none: what it leaves in the cache is not read."""
    model, events = build("llama"), []
    expected = Balance.of(model)
    model.register_forward_pre_hook(lambda *_: events.append("run"))

    def compiling(states: torch.Tensor, code: Callable[[], list[Any]]) -> Callable[[], None]:
        assert (states.dtype, states.device) == (model.dtype, model.device)
        for layer in code():
            layer.store.blocks.channel_scales.map(lambda scales: scales.fill_(float("nan")))
        return lambda: events.append("compiled")

    monkeypatch.setattr(balance, "compile_kernels", compiling)
    found = Balance.of(model)
    assert events == ["run", "compiled", "run"]
    for index, scales in expected.layers.items():
        torch.testing.assert_close(found.layers[index], scales, rtol=0, atol=0)
