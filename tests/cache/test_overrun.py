"""A preallocated cache refuses the token after its last, whoever reads it, and stays as it was.

On a machine without a GPU the file runs again in a child process under Triton's interpreter.
"""

from functools import lru_cache
from itertools import product

import pytest
import torch

from tests.support.helpers import assert_unchanged, compile_config, every_pair, quick_of, snapshot
from tests.support.kernel_cases import INTERPRETED, child
from tests.support.tiny_models import build, dense_attention, token_ids
from tq_hf import TurboQuantCache, TurboQuantLayer
from tq_hf.compat import as_input

ROOM = 12
PROMPT = token_ids(1, ROOM - 2)
once = pytest.mark.skipif(INTERPRETED, reason="the operator checks before it chooses who computes")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]

model_on = lru_cache(lambda device: build("llama", num_hidden_layers=2).to(device))


test_under_the_interpreter = child(__file__)


def nearly_full(attention: str, masked: bool = True, device: str = "cpu", skip_layers: tuple[int, ...] = ()):
    """A model, its cache with room for two tokens more, and a step by a call after which it has a number of tokens."""
    model = model_on(device)
    model.set_attn_implementation(attention)
    cache = TurboQuantCache(model.config, max_cache_len=ROOM, skip_layers=skip_layers, residual_length=0)
    model(PROMPT.to(device), **as_input(cache))

    def step(call, length: int) -> None:
        mask = torch.ones(1, length, dtype=torch.long, device=device) if masked else None
        call(PROMPT[:, :1].to(device), attention_mask=mask, **as_input(cache))

    return model, cache, step


def held(cache: TurboQuantCache) -> list[dict[str, object]]:
    """Everything in the layers, cloned."""
    return [
        snapshot(layer.store)
        if isinstance(layer, TurboQuantLayer)
        else {name: value.clone() for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}
        for layer in cache.layers
    ]


def assert_held(cache: TurboQuantCache, before: list[dict[str, object]]) -> None:
    for layer, then in zip(cache.layers, before, strict=True):
        if isinstance(layer, TurboQuantLayer):
            assert_unchanged(layer.store, then)
        else:
            assert all(torch.equal(getattr(layer, name), value) for name, value in then.items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("attention", "masked", "skip_layers"), every_pair(("turboquant", "sdpa", "eager"), (True, False), ((), (0,)))
)
def test_an_eager_step_too_many_is_refused(attention, masked, skip_layers, device):
    model, cache, step = nearly_full(attention, masked, device, skip_layers)
    step(model, ROOM - 1)
    step(model, ROOM)
    before = held(cache)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"1 tokens to the {ROOM} in this cache exceeds its `max_cache_len`"):
            step(model, ROOM + 1)
        assert int(cache.get_seq_length()) == ROOM
        assert_held(cache, before)
    cache.crop(-1)
    step(model, ROOM)  # room again


@once
@pytest.mark.parametrize(
    ("attention", "masked"), quick_of(product(("turboquant", "sdpa", "eager"), (True, False)), ("turboquant", True))
)
def test_a_compiled_step_too_many_is_refused(attention, masked):
    """On a GPU the assertion in the kernel fails, and the process's GPU is lost: not tested here."""
    torch._dynamo.reset()
    model, cache, step = nearly_full(attention, masked)
    compiled = torch.compile(model, backend="eager")
    step(compiled, ROOM - 1)
    assert all(layer.num_tokens is None for layer in cache.layers), "a compiled step does not count"
    step(model, ROOM)
    for call in (model, compiled):
        before = held(cache)
        with pytest.raises(ValueError, match=f"1 tokens to the {ROOM} in this cache exceeds its `max_cache_len`"):
            step(call, ROOM + 1)
        assert_held(cache, before)


@once
@pytest.mark.parametrize(
    ("attention", "compiled"), [("turboquant", False), ("turboquant", True), ("sdpa", True), ("eager", False)]
)
def test_generate_does_not_run_past_what_was_preallocated(attention, compiled):
    torch._dynamo.reset()
    model = model_on("cpu")
    model.set_attn_implementation(attention)
    cache = TurboQuantCache(model.config, max_cache_len=ROOM)
    options = dict(compile_config=compile_config(fullgraph=False)) if compiled else dict(disable_compile=True)
    options |= dict(attention_mask=torch.ones_like(PROMPT), max_length=ROOM + 6)
    with pytest.raises(ValueError, match="exceeds its `max_cache_len`"):
        model.generate(PROMPT, **as_input(cache), **options)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [ROOM] * 2


@once
@torch.no_grad()
@pytest.mark.parametrize("held_tokens", [0, 40])
@pytest.mark.parametrize(
    ("name", "changes"),
    [("gemma3", dict(sliding_window=20)), ("gpt_oss", dict(sliding_window=20)), ("qwen3_next", {}), ("llama", {})],
)
def test_a_call_too_long_is_refused_before_the_first_layer_reads_it(name, changes, held_tokens):
    """Sliding windows and linear layers, which have no limit of their own, come before full attention here."""
    model = build(name, **changes)
    ids = token_ids(1, 90)
    skip = (0,) if name == "llama" else ()
    for attention in ("turboquant", dense_attention(name)):
        model.set_attn_implementation(attention)
        cache = TurboQuantCache(model.config, max_cache_len=64, residual_length=10**4, skip_layers=skip)
        if held_tokens:
            model(ids[:, :held_tokens], **as_input(cache))
        for _ in range(2):
            with pytest.raises(ValueError, match="`max_cache_len`"):
                model(ids[:, held_tokens : held_tokens + 65], **as_input(cache))
        found = model(ids[:, held_tokens:50], **as_input(cache)).logits
        expected = model(ids[:, :50], use_cache=False).logits[:, held_tokens:]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        model(ids[:, 50:64], **as_input(cache))
        before = [state.clone() for layer in cache.layers for state in states_of_linear(layer)]
        with pytest.raises(ValueError, match="1 tokens to the 64"):
            model(ids[:, 64:65], **as_input(cache))
        assert all(map(torch.equal, before, [state for layer in cache.layers for state in states_of_linear(layer)]))


def states_of_linear(layer: object) -> list[torch.Tensor]:
    states = (getattr(layer, name, {}) for name in ("conv_states", "recurrent_states"))
    return [state for each in states for state in each.values()]
