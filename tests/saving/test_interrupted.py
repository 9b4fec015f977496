"""What `save` does with a cache that it should not, or where it should not. A saved cache belongs to the adapters that
were active, merged and scaled as they were."""

import builtins
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from examples.measure.quality.family_configs import tiny_model
from tests.support.adapters import adapted, change
from tests.support.saving_cases import filled, reloaded, run
from tests.support.tiny_models import build, token_ids
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input
from tq_hf.saving import fingerprint


def interrupted(model: Any, cache: TurboQuantCache, ids: torch.Tensor, after: int) -> None:
    """Generate until layer 2 is about to run for the `after`-th time."""
    runs = []

    def stop(*args: Any) -> None:
        runs.append(None)
        if len(runs) == after:
            raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, **as_input(cache), max_new_tokens=9, do_sample=False)
    hook.remove()


@pytest.mark.parametrize("room", [None, 400], ids=["growing", "preallocated"])
def test_an_interrupted_cache_is_not_saved_until_it_is_cropped(tmp_path, room):
    model = build("llama", num_hidden_layers=4, attention="turboquant")
    cache, undisturbed = (TurboQuantCache(model.config, model=model, max_cache_len=room) for _ in range(2))
    interrupted(model, cache, token_ids(1, 300), after=4)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [303, 303, 302, 302]
    with pytest.raises(
        ValueError, match=r"302 to 303: an exception \(Ctrl-C.*`cache.crop\(-1\)` makes the lengths equal"
    ):
        cache.save(tmp_path / "c.safetensors")
    assert not list(tmp_path.iterdir())
    cache.crop(-3)
    loaded = reloaded(tmp_path, model, cache)
    run(model, undisturbed, token_ids(1, 300))
    assert torch.equal(*(run(model, one, token_ids(1, 5, seed=1)) for one in (loaded, undisturbed)))


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 400}, {"skip_layers": (0, 1)}], ids=str)
@pytest.mark.parametrize("loaded_room", ["saved", None, 500])
def test_layers_pruned_to_different_lengths_are_saved(tmp_path, options, loaded_room):
    model = build("llama", num_hidden_layers=4, attention="turboquant")
    cache = TurboQuantCache(model.config, model=model, **options)
    run(model, cache, token_ids(1, 350))
    for layer, count in zip(cache.layers, kept := [350, 350, 200, 290], strict=True):
        if count < 350:
            layer.keys, layer.values = layer.keys[:, :, -count:], layer.values[:, :, -count:]
    loaded = reloaded(tmp_path, model, cache, max_cache_len=loaded_room)
    assert [int(layer.get_seq_length()) for layer in loaded.layers] == kept
    for one in (cache, loaded):
        one.crop(-1)
    for ours, theirs in zip(loaded.layers, cache.layers, strict=True):
        length = int(theirs.get_seq_length())
        assert torch.equal(ours.keys[:, :, :length], theirs.keys[:, :, :length])
    for one in (loaded, cache):
        assert run(model, one, token_ids(1, 5, seed=1)).isfinite().all()


@pytest.mark.parametrize("ahead", [1, 20])
def test_pruned_layers_of_an_interrupted_call_are_not_saved_until_they_are_cropped(tmp_path, ahead):
    model = build("llama", num_hidden_layers=4, attention="turboquant")
    cache = TurboQuantCache(model.config, model=model)
    run(model, cache, token_ids(1, 350))
    for layer, count in zip(cache.layers, (350, 300, 200, 290), strict=True):
        layer.keys, layer.values = layer.keys[:, :, -count:], layer.values[:, :, -count:]
    cache.update(*(layer[:, :, :ahead] for layer in (cache.layers[0].keys, cache.layers[0].values)), 0)
    with pytest.raises(ValueError, match=rf"200 to {350 + ahead}: an exception.*`cache.crop\(-{ahead}\)` makes"):
        cache.save(tmp_path / "c.safetensors")
    cache.crop(-ahead)
    cache.save(tmp_path / "c.safetensors")
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [350, 300, 200, 290]


def test_linear_layers_that_read_half_a_call_are_neither_cropped_nor_saved(tmp_path):
    """They do not count tokens: before the first layer that does, all lengths are equal."""
    model = build("qwen3_next", num_hidden_layers=4, attention="turboquant")
    cache = TurboQuantCache(model.config, model=model)
    run(model, cache, token_ids(1, 30))
    cache.crop(0)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(model, cache, token_ids(1, 9))
    hook.remove()
    for refused in (partial(cache.crop, 0), partial(cache.save, tmp_path / "c.safetensors")):
        with pytest.raises(ValueError, match="An exception .* linear attention had read .* Make a new cache"):
            refused()
    cache.reset()
    run(model, cache, token_ids(1, 30))
    cache.crop(0)


def test_linear_layers_that_read_half_a_first_call_are_not_pickled():
    kinds = ["linear_attention"] * 2 + ["full_attention"]
    model = build("qwen3_next", num_hidden_layers=3, layer_types=kinds, attention="turboquant")
    cache = TurboQuantCache(model.config)
    interrupted(model, cache, token_ids(1, 20), after=1)
    with pytest.raises(pickle.PicklingError, match="holds tokens"):
        pickle.dumps(cache)


@pytest.mark.parametrize("name", ["t5", "mllama/images"])
def test_what_was_read_by_cross_attention_is_not_saved(tmp_path, name):
    """Layers of cross-attention hold the tokens of the image, as many whatever the text: no call was interrupted."""
    model = tiny_model(name)
    cache = TurboQuantCache(model.config)
    if name == "t5":
        both = EncoderDecoderCache(cache, DynamicCache(config=model.config))
        model.generate(input_ids=token_ids(1, 9), **as_input(both), max_new_tokens=3, decoder_start_token_id=0)
    else:
        with torch.no_grad():
            model(**inputs_with_image(model, 30), **as_input(cache))
    assert cache.get_seq_length() > 0
    words = f"{type(model).__name__} has read the states of an encoder or an image by cross-attention"
    with pytest.raises(ValueError, match=words):
        cache.save(tmp_path / "c.safetensors", model)
    assert not list(tmp_path.iterdir())


def inputs_with_image(model, length: int) -> dict[str, torch.Tensor]:
    vision = model.config.vision_config
    shape = (1, 1, vision.max_num_tiles, vision.num_channels, vision.image_size, vision.image_size)
    ones = partial(torch.ones, dtype=torch.long)
    return {
        "input_ids": token_ids(1, length),
        "pixel_values": torch.randn(shape, generator=torch.Generator().manual_seed(0)),
        "aspect_ratio_ids": ones(1, 1),
        "aspect_ratio_mask": ones(1, 1, vision.max_num_tiles),
        "cross_attention_mask": ones(1, length, 1, vision.max_num_tiles),
    }


def test_a_folder_that_may_not_be_written_is_named(tmp_path, monkeypatch):
    model, cache = filled("llama", length=9)
    real = builtins.open

    def locked(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        # For root, who may write anywhere: as the system answers others.
        if isinstance(path, Path) and path.parent == tmp_path and "x" in mode:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, mode, *args, **options)

    monkeypatch.setattr(builtins, "open", locked)
    target = tmp_path / "c.safetensors"
    with pytest.raises(PermissionError, match=f"{target} cannot be saved: the folder {tmp_path} is not writable"):
        cache.save(target, model)


IDS = token_ids(1, 20)


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
    model = adapted(build("llama", attention="turboquant"))
    saved(model, tmp_path / "c.safetensors")
    TurboQuantCache.load(tmp_path / "c.safetensors", model)
    with pytest.raises(ValueError, match=r"made with adapters active \['first'\].*Activate, merge and scale"):
        TurboQuantCache.load(tmp_path / "c.safetensors", change(model, **CHANGES[name]))


def test_the_strength_of_an_adapter_that_is_not_active_does_not_matter(tmp_path):
    model = adapted(build("llama", attention="turboquant"))
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
