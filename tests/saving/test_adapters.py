"""A saved cache belongs to the adapters that were active, merged and scaled as they were."""

import re
from typing import Any

import pytest
import torch

from tests.support.adapters import Lora, change
from tests.support.saving_cases import run, tokens
from tests.support.tiny_models import build
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input
from tq_hf.saving import fingerprint

IDS = tokens(1, 20)


def adapted() -> Any:
    model = build("llama", attention="turboquant")
    for layer in model.model.layers:
        layer.self_attn.k_proj = Lora(layer.self_attn.k_proj)
    return model


def saved(model: Any, path: Any) -> None:
    cache = TurboQuantCache(model.config)
    run(model, cache, IDS)
    cache.save(path, model)


CHANGES: dict[str, dict[str, Any]] = {
    "another": {"active_adapters": ["second"]},
    "both": {"active_adapters": ["first", "second"]},
    "none": {"disable_adapters": True},
    "stronger": {"scaling": {"first": 2.0, "second": 1.0}},
    "merged": {"merged_adapters": ["first"]},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_cache_of_other_adapters_is_refused(tmp_path, name):
    model = adapted()
    saved(model, tmp_path / "c.safetensors")
    TurboQuantCache.load(tmp_path / "c.safetensors", model)
    with pytest.raises(ValueError, match=r"made with adapters active \['first'\].*Activate, merge and scale"):
        TurboQuantCache.load(tmp_path / "c.safetensors", change(model, **CHANGES[name]))


def test_the_strength_of_an_adapter_that_is_not_active_does_not_matter(tmp_path):
    model = adapted()
    saved(model, tmp_path / "c.safetensors")
    TurboQuantCache.load(tmp_path / "c.safetensors", change(model, scaling={"first": 1.0, "second": 7.0}))


def test_a_model_without_adapters_has_none():
    model = build("llama")
    assert fingerprint.identify(model)["adapters"] is None


def test_adapters_of_peft(tmp_path):
    peft = pytest.importorskip("peft")

    def lora(alpha: int = 32) -> Any:
        return peft.LoraConfig(
            r=8, lora_alpha=alpha, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False
        )

    base = build("llama", attention="turboquant")
    model = peft.get_peft_model(base, lora())
    model.add_adapter("b", lora())
    model.eval()
    path = tmp_path / "c.safetensors"
    saved(model, path)
    TurboQuantCache.load(path, model)
    model.set_adapter("b")
    with pytest.raises(ValueError, match=r"active \['default'\].*this model has adapters active \['b'\]"):
        TurboQuantCache.load(path, model)
    model.set_adapter("default")
    with model.disable_adapter(), pytest.raises(ValueError, match=r"this model has adapters active \[\]"):
        TurboQuantCache.load(path, model)
    TurboQuantCache.load(path, model)
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.set_scale("default", 0.5)
    with pytest.raises(ValueError, match="Activate, merge and scale"):
        TurboQuantCache.load(path, model)


def test_prefix_tuning_leaves_a_cache_aside_or_is_refused_in_a_sentence():
    """As PEFT does since 0.21 with every cache, and as it asked for before."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("llama"), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    cache, options = TurboQuantCache(model.config), dict(input_ids=IDS, max_new_tokens=2, do_sample=False)
    try:
        found = model.generate(**as_input(cache), **options)
    except AttributeError as error:
        assert re.search("PEFT asks for it in prefix tuning.*without a cache", str(error))
    else:
        assert cache.get_seq_length() == 0 and torch.equal(found, model.generate(**options))
