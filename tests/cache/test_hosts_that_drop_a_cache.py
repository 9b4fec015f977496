"""Models of which `generate()` makes a new cache where their rotary embedding changes: Phi-3, Phi-4 and PhiMoE."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

import tq_hf
from tests.support.tiny_models import VOCAB, build
from tq_hf import TurboQuantCache, graph_decoding
from tq_hf.compat import CACHE_NAME, as_input, switches_rope

LIMIT = 200
PROMPT = torch.randint(3, VOCAB, (1, 50), generator=torch.Generator().manual_seed(0)).repeat(1, 6)


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
