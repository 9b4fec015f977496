"""Every model type of transformers on a compressed cache: none differs silently from transformers' own cache.

Single families taught more: models that do more than hand attention what was cached, or make a new cache where their
rotary embedding changes (Phi-3, Phi-4 and PhiMoE)."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache

import tq_hf
from examples.measure.quality.family_check import NOT_TESTABLE, difference, examine, forward, worst
from examples.measure.quality.family_configs import WITH_IMAGES, model_types, tiny_model
from tests.support.tiny_models import build, token_ids
from tq_hf import TurboQuantCache, TurboQuantLayer, graph_decoding
from tq_hf.compat import CACHE_NAME, as_input, switches_rope
from tq_hf.layers.handle import LazyStates
from tq_hf.ops import dispatch

SAMPLE = (
    "afmoe",  # calls .view on what attention returns
    "bloom",  # attention of its own, with a mask of the size of all room
    "deepseek_v32",  # chooses the tokens to attend to
    "deepseek_v3",  # latents
    "diffllama",  # gives attention other values than it cached
    "doge",  # computes with its values
    "dory",  # adds layers to the cache
    "gemma3_text",
    "llama",
    "minimax_m3_vl",  # another kind of preallocated layer beside compressed ones
    "mvp",  # attention of its own
    "paligemma",  # modules that attend both ways
    "mllama/images",  # cross-attention in the decoder's own cache
    "t5",  # position bias
)
"""What `make test` runs: a family for each way of going wrong."""

RESULTS = Path(__file__).resolve().parents[2] / "examples" / "results" / "families.json"

ALLOWED = {"right", "refused", "not loaded", "alike"}
"""Verdicts with which no result is silently wrong where transformers' own is right (see `families.Outcome`)."""


def recorded(model_type: str) -> str:
    """The verdict on the page, "right" for a type that is new."""
    found = json.loads(RESULTS.read_text()).get(model_type)
    return "right" if found is None else worst(outcome[0] for outcome in found["outcomes"].values())


def check(model_type: str) -> None:
    finding = examine(model_type)
    problems = {mode: outcome for mode, outcome in finding.outcomes.items() if outcome.kind != "right"}
    assert finding.verdict == recorded(model_type), problems
    assert finding.verdict in ALLOWED


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_family_of_the_sample(model_type):
    check(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted((model_types() | WITH_IMAGES).keys() - NOT_TESTABLE.keys() - set(SAMPLE)))
def test_a_family(model_type):
    check(model_type)


def test_the_page_has_every_family_and_no_wrong_one():
    """A type of a newer transformers is neither on the page nor listed: the slow tests examine it."""
    page = json.loads(RESULTS.read_text())
    assert not page.keys() & NOT_TESTABLE.keys()
    assert {model_type for model_type in page if recorded(model_type) not in ALLOWED} == set()
    named, there = page.keys() | NOT_TESTABLE.keys(), (model_types() | WITH_IMAGES).keys()
    assert transformers.__version__ not in ("5.23.0", "5.24.0") or there <= named
    assert transformers.__version__ != "5.24.0" or named == there


def test_a_difference_is_noticed():
    """A NaN where there should be none counts as much as a wrong number."""
    right = [torch.tensor([1.0, -2.0])]
    assert difference([torch.tensor([1.0, -2.002])], right) == pytest.approx(1e-3, rel=1e-3)
    assert difference([torch.tensor([1.0, torch.nan])], right) == float("inf")


def test_wrong_attention_over_packed_blocks_is_noticed(monkeypatch):
    """What it is compared with does not read packed blocks itself."""
    right = dispatch.attend
    monkeypatch.setattr(dispatch, "attend", lambda *args: 2 * right(*args))
    outcomes = examine("llama").outcomes
    wrong = {f"turboquant, {kind}, {rows}" for kind in ("growing", "preallocated") for rows in ("dense", "packed")}
    assert {mode for mode, outcome in outcomes.items() if outcome.kind == "differs"} == wrong


DENSE = dict(residual_length=10**6)


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 99, (batch, length), generator=torch.Generator().manual_seed(length))


def layer_of(cache: TurboQuantCache) -> TurboQuantLayer:
    return next(layer for layer in cache.layers if isinstance(layer, TurboQuantLayer))


@pytest.fixture
def returned(monkeypatch):
    """What compressed layers have returned, in order."""
    seen = []
    update = TurboQuantLayer.update

    def spied(self, *args, **kwargs):
        seen.append(update(self, *args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(TurboQuantLayer, "update", spied)
    return seen


@pytest.mark.parametrize("name, reads_packed", [("diffllama", False), ("doge", True)])
def test_models_that_compute_with_cached_values_get_them(name, reads_packed, returned):
    """DiffLlama gives attention the keys of `update` and other values, which refuses the handle. Doge makes a mask of
    its values: it is given states it can read at every call, and attention the store."""
    model = tiny_model(name, "turboquant")
    cache = TurboQuantCache(model.config, **DENSE)
    logits = forward(model, cache)
    assert difference(logits, forward(model, DynamicCache(config=model.config))) < 2e-3
    assert layer_of(cache).reads_packed == reads_packed
    assert not reads_packed or {type(part) for pair in returned for part in pair} == {LazyStates}


def test_states_of_a_model_that_leaves_them_alone_are_never_made(returned):
    model = tiny_model("llama", "turboquant")
    cache = TurboQuantCache(model.config, **DENSE)
    with torch.no_grad():
        for length in (9, 1, 3, 1, 3):
            model(ids(1, length), **as_input(cache))
    layers = len(cache.layers)
    assert [type(keys) is LazyStates for keys, _ in returned[::layers]] == [True] * 5
    assert not any(tensor._handle.touched for pair in returned for tensor in pair)
    assert all(layer.is_untouched for layer in cache.layers)


def test_a_prompt_is_not_lazy_for_other_attention(returned):
    model = tiny_model("llama")
    with torch.no_grad():
        model(ids(1, 9), **as_input(TurboQuantCache(model.config)))
    assert type(returned[0][0]) is torch.Tensor


@pytest.mark.parametrize(
    "operation", [lambda x: x + 0, lambda x: torch.cat([x, x]), lambda x: x.cpu(), lambda x: x[..., 0]]
)
def test_a_lazy_tensor_becomes_the_states_at_any_operation(operation):
    model = tiny_model("llama", "turboquant")
    cache = TurboQuantCache(model.config, **DENSE)
    with torch.no_grad():
        model(ids(1, 9), **as_input(cache))
    layer = layer_of(cache)
    new = torch.randn(1, 4, 1, 16)
    keys, _ = layer.update(new, new)
    assert type(keys) is LazyStates and keys.shape == (1, 4, 10, 16) and layer.is_untouched
    assert torch.equal(operation(keys), operation(layer.keys))
    assert not layer.is_untouched


@pytest.mark.parametrize("room", [None, 40])
def test_masks_for_models_with_attention_of_their_own(room):
    """XGLM takes the name "turboquant" and goes on with its own attention, which adds the mask to its logits."""
    right, model = tiny_model("xglm"), tiny_model("xglm", "turboquant")
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        expected = right(ids(2, 20), attention_mask=mask).logits[1]
        cache = TurboQuantCache(model.config, max_cache_len=room, **DENSE)
        assert difference([model(ids(2, 20), attention_mask=mask).logits[1]], [expected]) < 2e-3
        actual = model(ids(2, 20), attention_mask=mask, **as_input(cache)).logits[1]
    assert difference([actual], [expected]) < 2e-3


def test_what_attention_cannot_compute_is_refused():
    model = tiny_model("inkling2_text", "turboquant")
    with pytest.raises(ValueError, match='sink logits by query.*Load the model with `attn_implementation="eager"'):
        model(ids(1, 9))


@pytest.mark.parametrize("cross", ["transformers", "compressed"])
@pytest.mark.parametrize("room", [None, 64])
def test_assisted_decoding_of_an_encoder_decoder(cross, room):
    model = tiny_model("bart/seq2seq", "turboquant")

    def generate(cache):
        options = dict(do_sample=False, max_new_tokens=8, prompt_lookup_num_tokens=2, eos_token_id=None)
        return model.generate(ids(1, 30), **as_input(cache), decoder_start_token_id=2, **options)

    own = DynamicCache(config=model.config)
    beside = TurboQuantCache(model.config, **DENSE) if cross == "compressed" else DynamicCache(config=model.config)
    ours = EncoderDecoderCache(TurboQuantCache(model.config, max_cache_len=room, **DENSE), beside)
    expected = generate(EncoderDecoderCache(own, DynamicCache(config=model.config)))
    assert torch.equal(generate(ours), expected)
    ours.batch_repeat_interleave(2)
    ours.batch_select_indices(torch.tensor([1]))
    assert layer_of(ours.self_attention_cache).batch_size == 1
    assert ours.cross_attention_cache.layers[0].keys.shape[0] == 1


LIMIT = 200
PROMPT = token_ids(1, 50).repeat(1, 6)


def phi3():
    model = build("phi3")
    model.config.original_max_position_embeddings = LIMIT
    model.set_attn_implementation("turboquant")
    return model


def answer(model, cache, prompt=PROMPT, **options):
    options = dict(max_new_tokens=12, do_sample=False, disable_compile=True, return_dict_in_generate=True) | options
    outputs = model.generate(prompt, **as_input(cache), **options)
    return outputs.sequences, outputs[CACHE_NAME]


@pytest.mark.parametrize("more", [{}, {"prompt_lookup_num_tokens": 3}], ids=str)
@pytest.mark.parametrize("room, loop", [(None, None), (400, None), (400, graph_decoding)])
def test_an_empty_cache_is_kept_by_a_long_prompt(room, loop, more):
    model = phi3()
    expected, _ = answer(model, DynamicCache(config=model.config), **more)
    cache = TurboQuantCache(model.config, "k8v4", residual_length=400, max_cache_len=room)
    tokens, returned = answer(model, cache, **more, **({"custom_generate": loop} if loop else {}))
    assert torch.equal(tokens, expected)
    assert returned is cache and int(cache.get_seq_length()) == 311


@pytest.mark.parametrize("room", [None, 400])
def test_a_cache_that_is_dropped_in_an_answer_is_named(room, monkeypatch):
    warnings = []
    monkeypatch.setattr(tq_hf.cache.logger, "warning_once", warnings.append)
    model, start = phi3(), PROMPT[:, : LIMIT - 5]
    expected, _ = answer(model, DynamicCache(config=model.config), start)
    tokens, returned = answer(model, TurboQuantCache(model.config, max_cache_len=room), start)
    assert torch.equal(tokens, expected) and type(returned) is DynamicCache
    assert len(warnings) == 1 and "Phi3ForCausalLM drops this TurboQuantCache at 200 tokens" in warnings[0]
    model.config.original_max_position_embeddings = 10**9
    cache = TurboQuantCache(model.config, max_cache_len=room)
    assert answer(model, cache, start)[1] is cache and len(warnings) == 1


def test_graph_decoding_refuses_what_it_would_not_compute_again():
    model = phi3()
    cache = TurboQuantCache(model.config, max_cache_len=400)
    with pytest.raises(ValueError, match=r"changes at 200 tokens.* may have 207 tokens.*_embeddings = 10\*\*9"):
        answer(model, cache, PROMPT[:, : LIMIT - 5], custom_generate=graph_decoding)
    assert int(cache.get_seq_length()) == 0
    answer(model, cache, PROMPT[:, : LIMIT - 20], custom_generate=graph_decoding)
    with pytest.raises(ValueError, match="filled a DynamicCache of its own, not the cache"):
        answer(model, cache, custom_generate=graph_decoding)


@pytest.mark.parametrize("name", ["phi3.Phi3", "phimoe.Phimoe", "phi4_multimodal.Phi4Multimodal"])
def test_models_that_drop_a_cache_are_known_by_what_they_ask_for(name):
    folder, kind = name.split(".")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    model = object.__new__(getattr(module, f"{kind}ForCausalLM"))
    vars(model)["config"] = SimpleNamespace(original_max_position_embeddings=LIMIT)
    assert switches_rope(model) == LIMIT
    assert switches_rope(build("llama")) is None
