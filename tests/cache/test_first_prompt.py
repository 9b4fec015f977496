"""What a cache says of its first prompt: scales that fp16 cannot hold."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tq_hf.cache
from tests.support.tiny_models import VOCAB, build
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input
from tq_hf.layers import advice


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Warnings about first prompts."""
    lines: list[str] = []
    monkeypatch.setattr(advice.logger, "warning", lines.append)
    yield lines


def scaled(keys: float = 1.0, values: float = 1.0, layer: int = 1) -> Any:
    """A Llama one layer of which has keys and values so many times as large, and computes the same."""
    model = build("llama")
    attention = model.model.layers[layer].self_attn
    attention.k_proj.weight *= keys
    attention.q_proj.weight /= keys
    attention.v_proj.weight *= values
    attention.o_proj.weight /= values
    model.set_attn_implementation("turboquant")
    return model


def run(model: Any, cache: TurboQuantCache, tokens: int = 300, calls: int = 3) -> None:
    ids = torch.randint(1, VOCAB, (2, tokens), generator=torch.Generator().manual_seed(0))
    for part in (ids, *[ids[:, :1]] * (calls - 1)):
        model(part, **as_input(cache))


@pytest.mark.parametrize("length", [None, 500])
@pytest.mark.parametrize(
    "sizes, what",
    [((1e6, 1.0), "Keys"), ((1.0, 1e6), "Values"), ((1e-8, 1.0), "Keys"), ((1.0, 1e-8), "Values")],
    ids=str,
)
def test_scales_beyond_fp16_are_reported_once_unless_balance_holds_them(sizes, what, length, log):
    model = scaled(*sizes)
    run(model, TurboQuantCache(model.config, max_cache_len=length))
    assert log == []
    cache = TurboQuantCache(model.config, max_cache_len=length, balance=False)
    run(model, cache)
    (line,) = log
    assert (
        line.startswith(f"{what} of layer 1 have an RMS of") and "skip_layers=(1,)" in line and "balance=True" in line
    )


def test_what_balance_cannot_hold_is_reported_too(log):
    model = scaled(1e12)
    run(model, TurboQuantCache(model.config))
    (line,) = log
    assert line.startswith("Keys of layer 1") and "balance=True" not in line


def test_every_layer_beyond_is_named_in_one_sentence(log):
    model = scaled(values=1e6, layer=0)
    model.model.layers[1].load_state_dict(scaled(keys=1e-8).model.layers[1].state_dict())
    run(model, TurboQuantCache(model.config, balance=False))
    (line,) = log
    assert line.startswith("Values of layer 0") and "skip_layers=(0, 1)" in line


def test_short_prompts_are_not_balanced_and_are_reported(log):
    model = scaled(values=1e6)
    run(model, TurboQuantCache(model.config), tokens=20)
    assert len(log) == 1


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_nothing_is_said_of_ordinary_states_zeros_or_nan(name, log):
    model = build(name, attention="turboquant")
    run(model, TurboQuantCache(model.config))
    run(model, TurboQuantCache(model.config, balance=False))
    for value in (0.0, float("nan")):
        cache = TurboQuantCache(model.config, balance=False)
        states = torch.full((1, 2, 300, 32 if name == "llama" else 16), value)
        for index in range(len(cache.layers)):
            cache.update(states, states, index)
        cache.get_mask_sizes(1, 0)
    assert log == []


def test_the_prompt_is_looked_at_by_the_next_call_and_never_again(monkeypatch):
    """The first call waits for no device and keeps nothing of the prompt but what the cache is for."""
    calls = []
    monkeypatch.setattr(tq_hf.cache, "warn_beyond_fp16", lambda layers: calls.append(list(layers)))
    model = scaled()
    cache = TurboQuantCache(model.config)
    for expected in (0, 1, 1):
        run(model, cache, tokens=20, calls=1)
        assert len(calls) == expected
    assert calls == [list(range(len(cache.layers)))]


def test_states_without_numbers_are_not_looked_at(log):
    cache = TurboQuantCache(build("llama").config)
    states = torch.empty(1, 2, 300, 32, device="meta")
    for index in range(len(cache.layers)):
        cache.update(states, states, index)
    cache.get_mask_sizes(1, 0)
    assert log == []
