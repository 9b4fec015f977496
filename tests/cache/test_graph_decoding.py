"""`custom_generate=graph_decoding` gives the tokens of `generate()`'s own loop, and leaves the cache as that does."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria

from tests.support.tiny_models import VOCAB, build
from tq_hf import TurboQuantCache, graph_decoding

module = sys.modules[graph_decoding.__module__]

# Of a tiny model compiled by transformers alone.
pytestmark = pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")

ROOM = 256
GREEDY = dict(max_new_tokens=20, do_sample=False)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def model(request):
    model = build("llama").to(request.param)
    model.set_attn_implementation("turboquant")
    return model


def prompt(model, batch: int = 2, tokens: int = 150, padded: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(tokens))
    mask = torch.ones_like(ids)
    ids[0, :padded], mask[0, :padded] = 0, 0
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


def both(model, inputs, **options):
    """What the loop and `generate()` alone return, and their caches."""
    results = []
    for loop in ({}, {"custom_generate": graph_decoding}):
        cache = TurboQuantCache(model.config, "4bit_nc", residual_length=32, max_cache_len=ROOM)
        torch.manual_seed(7)
        results.append((model.generate(**inputs, past_key_values=cache, **options, **loop), cache))
    return results


def same_caches(one: TurboQuantCache, other: TurboQuantCache) -> bool:
    lengths = [int(cache.get_seq_length()) for cache in (one, other)]
    layers = [cache.layers[-1] for cache in (one, other)]
    return lengths[0] == lengths[1] and torch.allclose(layers[0].keys, layers[1].keys, atol=1e-5)


@pytest.mark.parametrize("padded", [0, 9])
def test_greedy_tokens_are_those_of_generate(model, padded) -> None:
    (expected, plain), (tokens, cache) = both(model, prompt(model, padded=padded), **GREEDY)
    assert torch.equal(tokens, expected)
    assert same_caches(cache, plain)


@pytest.mark.parametrize(
    "options", [dict(temperature=0.8, top_k=20, top_p=0.9), dict(repetition_penalty=1.3, min_new_tokens=5)]
)
def test_sampled_tokens_are_those_of_generate(model, options) -> None:
    """The first processors run in the graph, the second ones look at the tokens so far."""
    (expected, _), (tokens, _) = both(model, prompt(model), max_new_tokens=20, do_sample=True, **options)
    assert torch.equal(tokens, expected)


def test_it_stops_where_generate_stops(model) -> None:
    inputs = prompt(model)
    free = model.generate(**inputs, **GREEDY, past_key_values=DynamicCache(config=model.config))[:, 150:]
    ends = [int(free[0, 4]), int(free[1, 9])]
    (expected, plain), (tokens, cache) = both(model, inputs, **GREEDY, eos_token_id=ends, pad_token_id=0)
    assert expected.shape[1] < 150 + 20
    assert torch.equal(tokens, expected)
    assert same_caches(cache, plain)


class StopsAt(StoppingCriteria):
    """Ends a sequence once it is so long."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length, device=input_ids.device)


def test_criteria_of_ones_own_stop_it(model) -> None:
    (expected, plain), (tokens, cache) = both(model, prompt(model), **GREEDY, stopping_criteria=[StopsAt(157)])
    assert torch.equal(tokens, expected) and tokens.shape[1] == 157
    assert same_caches(cache, plain)


def test_several_turns_use_one_cache(model) -> None:
    turns = []
    for loop in ({}, {"custom_generate": graph_decoding}):
        cache = TurboQuantCache(model.config, "4bit_nc", max_cache_len=ROOM)
        ids = prompt(model)["input_ids"]
        for turn in range(3):
            ids = model.generate(ids, past_key_values=cache, **GREEDY, **loop)
            ids = torch.cat([ids, prompt(model, tokens=7 + turn)["input_ids"]], dim=1)
        turns.append(ids)
    assert torch.equal(turns[0], turns[1])


def test_a_dictionary_holds_what_generate_returns(model) -> None:
    options = dict(return_dict_in_generate=True, output_logits=True, output_scores=True)
    (expected, _), (got, cache) = both(model, prompt(model), **GREEDY, **options, repetition_penalty=1.2)
    assert torch.equal(got.sequences, expected.sequences) and got.past_key_values is cache
    for name in ("logits", "scores"):
        assert len(getattr(got, name)) == len(getattr(expected, name))
        for one, other in zip(getattr(got, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


class Streamed(list):
    """A streamer that keeps what it is given."""

    def put(self, value) -> None:
        self.append(value.flatten().tolist())

    def end(self) -> None:
        self.append("end")


def test_a_streamer_gets_every_token_once(model) -> None:
    plain, streamed = Streamed(), Streamed()
    inputs = prompt(model, batch=1)
    options = dict(**GREEDY, pad_token_id=0)
    ids = model.generate(**inputs, **options, past_key_values=DynamicCache(config=model.config))
    end = int(ids[0, 150 + 6])
    for streamer, loop in ((plain, {"streamer": plain}), (streamed, {"custom_generate": graph_decoding})):
        cache = TurboQuantCache(model.config, max_cache_len=ROOM)
        extra = {} if streamer is plain else {"token_streamer": streamer}
        model.generate(**inputs, past_key_values=cache, eos_token_id=end, **options, **loop, **extra)
    assert streamed == plain


@pytest.mark.parametrize(
    "change, sentence",
    [
        (dict(past_key_values="growing"), "max_cache_len"),
        (dict(past_key_values="dynamic"), "DynamicCache"),
        (dict(num_beams=2), "beams"),
        (dict(prompt_lookup_num_tokens=2), "draft"),
        (dict(streamer=Streamed()), "token_streamer"),
        (dict(return_dict_in_generate=True, output_attentions=True), "output_attentions"),
    ],
)
def test_what_it_cannot_do_is_a_sentence(model, change, sentence) -> None:
    caches = {
        "growing": lambda: TurboQuantCache(model.config),
        "dynamic": lambda: DynamicCache(config=model.config),
        None: lambda: TurboQuantCache(model.config, max_cache_len=ROOM),
    }
    cache = caches[change.pop("past_key_values", None)]()
    with pytest.raises(ValueError, match=sentence):
        model.generate(**prompt(model), **GREEDY, past_key_values=cache, custom_generate=graph_decoding, **change)
    assert int(cache.get_seq_length()) == 0


def test_another_adapter_makes_another_step(model, monkeypatch) -> None:
    """Adapters are switched without a change of any parameter, and a captured step would not notice."""
    cache = TurboQuantCache(model.config, max_cache_len=ROOM)
    steps = []
    for active in ("one", "one", "other"):
        monkeypatch.setattr(module, "adapters", lambda model, active=active: {"active": [active]})
        model.generate(**prompt(model, tokens=20), past_key_values=cache, **GREEDY, custom_generate=graph_decoding)
        steps.append(module._kept[cache])
        cache.reset()
    assert steps[0] is steps[1] is not steps[2]
