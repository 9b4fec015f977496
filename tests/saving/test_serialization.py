"""Saving and loading: the same bits come back, and any other file is refused with a sentence."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import signal
import struct
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from helpers import assert_unchanged, snapshot
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, VOCAB, build, dense_attention
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from tq_hf import TurboQuantCache, TurboQuantConfig, TurboQuantLayer
from tq_hf.saving import fingerprint, safetensors_file
from tq_hf.saving.cache_file import VERSION, load_cache, save_cache

model_named = lru_cache(build)
NEEDLE = Path(__file__).resolve().parents[2] / "examples" / "needle"


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def run(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def filled(name: str, length: int = 300, batch: int = 2, attention: str = "turboquant", **options: Any) -> Any:
    """A model and a cache that holds a prompt and one more token."""
    model = model_named(name)
    model.set_attn_implementation(attention)
    cache = TurboQuantCache(model.config, model=model, **options)
    run(model, cache, tokens(batch, length - 1))
    run(model, cache, tokens(batch, 1, seed=1))
    return model, cache


def assert_continue_alike(model: Any, one: Any, other: Any, calls: tuple[int, ...] = (1, 1, 9, 1)) -> None:
    """Both caches give the same logits, bit for bit, in calls of these many tokens."""
    for step, count in enumerate(calls):
        ids = tokens(2, count, seed=step)
        assert torch.equal(run(model, one, ids), run(model, other, ids)), f"call {step}"


@pytest.mark.parametrize("max_cache_len", [None, 512], ids=["growing", "preallocated"])
@pytest.mark.parametrize("attention", ["turboquant", "dense"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_loaded_cache_continues_with_identical_logits(tmp_path, name, attention, max_cache_len):
    attention = dense_attention(name) if attention == "dense" else attention
    model, cache = filled(name, attention=attention, max_cache_len=max_cache_len)
    cache.save(tmp_path / "c.safetensors")
    loaded = TurboQuantCache.load(tmp_path / "c.safetensors", model)
    assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in cache.layers]
    assert int(loaded.get_seq_length()) == 300 and loaded.config == cache.config
    for ours, theirs in zip(loaded.layers, cache.layers, strict=True):
        if isinstance(ours, TurboQuantLayer):
            assert ours._receipt.signed == theirs._receipt.signed
    # Less where transformers keeps a part of a larger tensor.
    assert loaded.memory_footprint().total <= cache.memory_footprint().total
    assert loaded.memory_footprint().packed == cache.memory_footprint().packed > 0
    assert_continue_alike(model, cache, loaded, (1, 1, 9, 1) if max_cache_len is None else (1, 1, 1))


@pytest.mark.parametrize("skip_layers", [(0, -1), range(4)], ids=["some", "all"])
def test_preallocated_layers_that_are_not_compressed_come_back(tmp_path, skip_layers):
    model, cache = filled("llama", max_cache_len=512, skip_layers=skip_layers)
    cache.save(tmp_path / "c.safetensors", model)
    loaded = TurboQuantCache.load(tmp_path / "c.safetensors", model)
    assert loaded.get_max_length() == 512
    assert_continue_alike(model, cache, loaded)


@pytest.mark.parametrize("name", CONFIGS)
def test_generate_goes_on_from_a_loaded_cache(tmp_path, name):
    model, cache = filled(name)
    cache.save(tmp_path / "c.safetensors")
    ids = torch.cat([tokens(2, 299), tokens(2, 1, seed=1), tokens(2, 5, seed=2)], dim=1)
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    expected = model.generate(ids, past_key_values=cache, **options)
    loaded = TurboQuantCache.load(tmp_path / "c.safetensors", model)
    assert torch.equal(model.generate(ids, past_key_values=loaded, **options), expected)
    assert expected[:, -8:].unique().numel() > 3


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "2.5bit_nc"},
        {"preset": "k8v4", "residual_length": 0, "sink_tokens": 0},
        {"key_mean": False, "residual_length": 10**6},
        {"skip_layers": (0, -1)},
        {"seed": 2**40, "key_correction": "inner", "value_correction": "none"},
    ],
    ids=lambda options: ",".join(options),
)
@pytest.mark.parametrize("length", [2, 140, 389])
def test_every_configuration_and_length_comes_back(tmp_path, options, length):
    model, cache = filled("llama", length=length, **options)
    cache.save(tmp_path / "c.safetensors")
    loaded = TurboQuantCache.load(tmp_path / "c.safetensors", model)
    assert loaded.config == cache.config
    assert_continue_alike(model, cache, loaded)


@pytest.mark.parametrize("crop", [0, 15])
def test_blocks_whose_rows_are_still_dense_come_back_as_they_were(tmp_path, crop):
    model = model_named("llama")
    model.set_attn_implementation("turboquant")
    cache = TurboQuantCache(model.config, model=model, residual_length=0)
    run(model, cache, tokens(2, 120))
    run(model, cache, tokens(2, 20))
    assert cache.layers[0].store.num_pending == 1
    assert cache.layers[0].store.blocks.scalars.count_nonzero()
    cache.save(tmp_path / "c.safetensors")
    loaded = TurboQuantCache.load(tmp_path / "c.safetensors", model)
    assert loaded.layers[0].store.counts == cache.layers[0].store.counts
    for one in (cache, loaded):
        one.crop(-crop)  # 15 is into the block: its exact rows must be there
    assert_continue_alike(model, cache, loaded)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_sequence_of_operations_after_loading_gives_what_it_gives_without(tmp_path, name):
    model, cache = filled(name)
    cache.save(tmp_path / "c.safetensors")
    loaded = TurboQuantCache.load(tmp_path / "c.safetensors", model)
    for one in (cache, loaded):
        one.batch_repeat_interleave(2)
        one.reorder_cache(torch.tensor([3, 0, 0, 1]))
        one.batch_select_indices(torch.tensor([0, 3]))
    assert_continue_alike(model, cache, loaded, (1, 160, 1))


def test_a_cropped_and_a_reset_cache_come_back(tmp_path):
    model, cache = filled("llama", length=500)
    cache.crop(-210)
    cache.save(tmp_path / "c.safetensors")
    assert_continue_alike(model, cache, TurboQuantCache.load(tmp_path / "c.safetensors", model))
    cache.reset()
    with pytest.raises(ValueError, match="no tokens"):
        cache.save(tmp_path / "c.safetensors")
    run(model, cache, tokens(2, 200))
    cache.save(tmp_path / "c.safetensors")
    assert_continue_alike(model, cache, TurboQuantCache.load(tmp_path / "c.safetensors", model))


def test_sliding_layers_that_record_their_past_come_back(tmp_path):
    model, cache = filled("gemma3", length=80)
    cache.activate_past_recording()
    run(model, cache, tokens(2, 40))
    cache.save(tmp_path / "c.safetensors")
    loaded = TurboQuantCache.load(tmp_path / "c.safetensors", model)
    for one in (cache, loaded):
        one.crop(-7)
    assert_continue_alike(model, cache, loaded, (1,))


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_a_cache_loaded_in_inference_mode_serves_outside_of_it(tmp_path, name):
    model, cache = filled(name)
    with torch.inference_mode():
        cache.save(tmp_path / "c.safetensors")
        loaded = TurboQuantCache.load(tmp_path / "c.safetensors", model)
    assert_continue_alike(model, cache, loaded)


def test_saving_changes_nothing(tmp_path):
    model, cache = filled("llama")
    before = [snapshot(layer.store) for layer in cache.layers]
    cache.save(tmp_path / "c.safetensors")
    for layer, held in zip(cache.layers, before, strict=True):
        assert_unchanged(layer.store, held)


def test_a_file_holds_what_is_used_and_no_reserve(tmp_path):
    model, cache = filled("llama", length=300, max_cache_len=4096)
    cache.save(tmp_path / "c.safetensors")
    layout = cache.config.layout(32)
    per_layer = 2 * 2 * (1 * layout.block_bytes + (300 - 128) * 2 * 32 * 4)
    size = (tmp_path / "c.safetensors").stat().st_size
    assert 4 * per_layer <= size <= 4 * per_layer + 16384
    assert all(tensor.numel() for tensor in load_file(tmp_path / "c.safetensors").values())


def test_notes_come_back(tmp_path):
    model, cache = filled("llama")
    save_cache(cache, tmp_path / "c.safetensors", model, notes={"prompt": "größer\0"})
    assert load_cache(TurboQuantCache, tmp_path / "c.safetensors", model)[1] == {"prompt": "größer\0"}


# Whose cache it is.


def test_the_model_is_the_one_given_or_the_one_the_cache_was_made_with(tmp_path):
    model = build("llama")
    cache = TurboQuantCache(model.config, model=model)
    run(model, cache, tokens(1, 5))
    cache.save(tmp_path / "known.safetensors")
    cache.save(tmp_path / "given.safetensors", model)
    metadata = [split((tmp_path / f"{name}.safetensors").read_bytes())[0] for name in ("known", "given")]
    assert metadata[0] == metadata[1]
    unknown = TurboQuantCache(model.config)
    run(model, unknown, tokens(1, 5))
    with pytest.raises(ValueError, match=r"model is needed.*none was given. Pass it: `cache.save\(path, model\)`"):
        unknown.save(tmp_path / "c.safetensors")
    unknown.save(tmp_path / "c.safetensors", model)
    del model  # held weakly
    gc.collect()
    with pytest.raises(ValueError, match="none was given"):
        cache.save(tmp_path / "c.safetensors")


@pytest.mark.parametrize("wrong", [None, "x", model_named("llama").config, torch.nn.Linear(1, 1)])
def test_anything_but_a_model_is_refused(tmp_path, wrong):
    model, cache = filled("llama", length=20)
    cache.save(tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=r"The model is needed.*`TurboQuantCache.load\(path, model\)`"):
        TurboQuantCache.load(tmp_path / "c.safetensors", wrong)
    if wrong is not None:
        with pytest.raises(ValueError, match=r"The model is needed.*`cache.save\(path, model\)`"):
            cache.save(tmp_path / "c.safetensors", wrong)


def test_a_fingerprint_depends_on_weights_and_not_on_attention():
    model = build("llama")
    prints = []
    for attention in ("turboquant", "sdpa", "eager"):
        model.set_attn_implementation(attention)
        prints.append(fingerprint.identify(model))
    assert prints[0] == prints[1] == prints[2] == fingerprint.identify(build("llama"))
    for parameter in ("layers.2.self_attn.k_proj", "layers.0.mlp.up_proj", "embed_tokens"):
        changed = build("llama")
        changed.model.get_submodule(parameter).weight.data.mul_(1.001)
        assert fingerprint.identify(changed)["weights"] != prints[0]["weights"], parameter
    changed = build("llama")
    changed.lm_head.weight.data.zero_()  # makes no keys and values
    assert fingerprint.identify(changed) == prints[0]


def test_a_model_whose_weights_are_kept_elsewhere_is_the_same_model(tmp_path):
    model, cache = filled("llama")
    cache.save(tmp_path / "c.safetensors")
    offloaded = cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert fingerprint.identify(offloaded) == fingerprint.identify(model)
    loaded = TurboQuantCache.load(tmp_path / "c.safetensors", offloaded)
    assert torch.equal(run(offloaded, loaded, tokens(2, 1)), run(model, cache, tokens(2, 1)))


def _retyped(model: Any) -> Any:
    return copy.deepcopy(model).to(torch.bfloat16)


def _shallower(model: Any) -> Any:
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 3
    return AutoModelForCausalLM.from_config(config)


def _with_other_rope(model: Any) -> Any:
    changed = copy.deepcopy(model)
    changed.config.rope_parameters["rope_theta"] *= 2
    return changed


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda model: build("llama", seed=2), "another model: of the same shape"),
        (lambda model: build("qwen3"), "another model: its `model_type`"),
        (_shallower, "another model: its `num_hidden_layers` is 4, and this model's is 3"),
        (_with_other_rope, "another model: its `rope_parameters`"),
        (_retyped, r"made by this kind of model in torch.float32.*dtype=torch.float32"),
    ],
    ids=["weights", "family", "layers", "rope", "dtype"],
)
def test_a_cache_of_another_model_is_refused(tmp_path, make, says):
    model, cache = filled("llama")
    cache.save(tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=says):
        TurboQuantCache.load(tmp_path / "c.safetensors", make(model))


def test_another_preset_is_refused(tmp_path):
    model, cache = filled("llama", preset="3bit_nc")
    cache.save(tmp_path / "c.safetensors")
    TurboQuantCache.load(tmp_path / "c.safetensors", model, preset="3bit_nc")
    TurboQuantCache.load(tmp_path / "c.safetensors", model, preset=TurboQuantConfig.from_preset("3bit_nc"))
    with pytest.raises(ValueError, match="saved with preset='3bit_nc', key_bits=3, value_bits=3"):
        TurboQuantCache.load(tmp_path / "c.safetensors", model, preset="4bit_nc")


def test_a_partly_filled_cache_is_not_saved(tmp_path):
    model = model_named("llama")
    cache = TurboQuantCache(model.config)
    cache.update(torch.randn(1, 2, 5, 32), torch.randn(1, 2, 5, 32), 0)
    with pytest.raises(ValueError, match="Layer 1 holds no tokens"):
        cache.save(tmp_path / "c.safetensors", model)


# Damaged and hostile files. Gemma 3 has layers of both kinds.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, bytes, torch.Tensor]:
    """A model, the bytes of a file, and the logits after it."""
    model, cache = filled("gemma3", length=260)
    path = tmp_path_factory.mktemp("saved") / "c.safetensors"
    cache.save(path)
    return model, path.read_bytes(), run(model, cache, tokens(2, 1))


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: dict[str, Any] | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def forged(content: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with its description changed, and checksums that are right again."""
    header, data = split(content)
    state = json.loads(header["__metadata__"]["state"])
    change(state)
    text = json.dumps(state)
    header["__metadata__"] |= {"state": text, "checksum": safetensors_file.text_digest(text)}
    return joined(header, data)


def refused(tmp_path: Path, model: Any, content: bytes, says: str = "") -> str:
    """The message with which this file is refused."""
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=says or None) as caught:
        TurboQuantCache.load(path, model)
    message = str(caught.value)
    assert message.startswith(f"Cannot load the cache in {str(path)!r}. ") and 40 < len(message) < 600
    return message


@pytest.fixture
def nothing_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors must not be read: the header alone has to be refused."""

    def fail(*args: Any) -> None:
        raise AssertionError("tensors were read")

    monkeypatch.setattr(safetensors_file, "read_tensors", fail)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_any_changed_byte_is_noticed(tmp_path, saved, draw):
    model, content, _ = saved
    data_start = 8 + struct.unpack("<Q", content[:8])[0]
    # Headers are small beside the data: look at both.
    place = draw.draw(st.one_of(st.integers(0, data_start - 1), st.integers(0, len(content) - 1)))
    if content[place] == ord(" "):
        place = 8  # a space may become another space
    change = draw.draw(st.integers(1, 255))
    refused(tmp_path, model, content[:place] + bytes([content[place] ^ change]) + content[place + 1 :])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_any_truncation_is_noticed(tmp_path, saved, nothing_read, draw):
    model, content, _ = saved
    header = 8 + struct.unpack("<Q", content[:8])[0]
    refused(tmp_path, model, content[: draw.draw(st.one_of(st.integers(0, header), st.integers(0, len(content) - 1)))])


def test_bytes_added_are_noticed(tmp_path, saved, nothing_read):
    model, content, _ = saved
    refused(tmp_path, model, content + b"\0", "not fully covered")


def leaves(value: Any, path: tuple = ()) -> list[tuple]:
    """Paths of all values in JSON that have none in them, and of all containers."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [found for key, child in children for found in leaves(child, (*path, key))]


def changed_at(value: Any, path: tuple, new: Any) -> Any:
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return value


def at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


STRANGE = [None, True, -1, 0, 1, 3, 2**31, 2**63, 10**30, 0.5, 1e308, "", "x", "7", [], [1, 2], {}, {"x": 1}]


def test_every_field_of_the_header_changed_is_refused_before_tensors_are_read(tmp_path, saved, nothing_read):
    model, content, _ = saved
    header, data = split(content)
    for path in leaves(header):
        if path[0].startswith(("layers.2.", "layers.3.")):
            continue  # as layers 0 and 1
        for new in STRANGE:
            if new != at(header, path) or type(new) is not type(at(header, path)):
                refused(tmp_path, model, joined(changed_at(header, path, new), data))
        mutated = copy.deepcopy(header)
        parent = at(mutated, path[:-1])
        del parent[path[-1]]
        refused(tmp_path, model, joined(mutated, data))


HARMLESS = {"notes", "transformers"}
"""What a forger may write without it being a wrong cache."""


def test_every_field_of_the_description_forged_is_refused(tmp_path, saved):
    model, content, expected = saved
    state = json.loads(split(content)[0]["__metadata__"]["state"])
    path = tmp_path / "forged.safetensors"
    loaded, tried = set(), 0
    for field in leaves(state):
        if field[:2] == ("model", "config") and len(field) > 2 or field[0] == "layers" and field[1:2] > (1,):
            continue  # any difference to the model's config is refused, see above; layers 2 and 3 are as 0 and 1
        for new in STRANGE:
            old = at(state, field)
            if new == old and type(new) is type(old):
                continue
            tried += 1
            path.write_bytes(forged(content, lambda state: state.update(changed_at(state, field, new))))  # noqa: B023
            try:
                TurboQuantCache.load(path, model)
            except ValueError as error:
                assert 40 < len(str(error)) < 600, error
            else:
                loaded.add(field)
    # These say how stored codes are to be understood, or what comes next; only their author knows better.
    free = {
        ("config", name)
        for name in ("seed", "preset", "key_correction", "value_correction", "residual_length", "sink_tokens")
    }
    flags = {field for field in loaded if field[-1] in ("reads_store", "record_past")}
    assert tried > 500
    # Fields of the model's config that a file leaves out are not compared; its weights are.
    unchecked = {("max_cache_len",), ("model", "config")}
    assert {field for field in loaded - free - flags if field[0] not in HARMLESS} <= unchecked


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_a_random_description_never_crashes(tmp_path, saved, draw):
    model, content, _ = saved
    state = json.loads(split(content)[0]["__metadata__"]["state"])
    field = draw.draw(st.sampled_from(leaves(state)))
    leaf = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
    new = draw.draw(st.recursive(leaf, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=4), inner)))
    path = tmp_path / "random.safetensors"
    path.write_bytes(forged(content, lambda state: state.update(changed_at(state, field, new))))
    try:
        TurboQuantCache.load(path, model)
    except ValueError as error:
        assert 40 < len(str(error)) < 600, error


def edited(content: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    header, data = split(content)
    change(header)
    return joined(header, data)


TENSOR = "layers.1.key_words"


def _overlap(header: dict[str, Any]) -> None:
    first, second = "layers.1.window_keys", "layers.1.window_values"
    header[second]["data_offsets"] = header[first]["data_offsets"]


def _swapped(header: dict[str, Any]) -> None:
    first, second = header["layers.1.window_keys"], header["layers.1.window_values"]
    first["data_offsets"], second["data_offsets"] = second["data_offsets"], first["data_offsets"]


HOSTILE = {
    "huge shape": (
        lambda content: edited(content, lambda h: h[TENSOR].update(shape=[2**40, 2**40, 2**40, 2**40])),
        "overflow|truncated, damaged",
    ),
    "negative shape": (
        lambda content: edited(content, lambda h: h[TENSOR].update(shape=[-1, -1])),
        "truncated, damaged",
    ),
    "many dimensions": (
        lambda content: edited(content, lambda h: h[TENSOR].update(shape=[1] * 1000)),
        "truncated, damaged",
    ),
    "other shape": (
        lambda content: edited(content, lambda h: h[TENSOR]["shape"].reverse()),
        r"would be torch.int32 \[2, 2, 1, ",
    ),
    "wrong dtype": (lambda content: edited(content, lambda h: h[TENSOR].update(dtype="F32")), "torch.float32"),
    "unknown dtype": (lambda content: edited(content, lambda h: h[TENSOR].update(dtype="pickle")), "`pickle`"),
    "overlap": (lambda content: edited(content, _overlap), "offset"),
    "swapped": (lambda content: edited(content, _swapped), "checksum"),
    "renamed": (lambda content: edited(content, lambda h: h.update({"../../x": h.pop(TENSOR)})), "missing"),
    "one more": (
        lambda content: edited(content, lambda h: h.update(more={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]})),
        "unknown",
    ),
    "future": (
        lambda content: edited(content, lambda h: h["__metadata__"].update(version=str(VERSION + 1))),
        "newer tq_hf",
    ),
    "endless version": (
        lambda content: edited(content, lambda h: h["__metadata__"].update(version="9" * 5000)),
        "not a number",
    ),
    "other format": (lambda content: edited(content, lambda h: h["__metadata__"].update(format="pt")), "not one of a"),
    "no metadata": (lambda content: edited(content, lambda h: h.pop("__metadata__")), "not one of a cache"),
    "huge sinks": (
        lambda content: forged(content, lambda s: s["config"].update(sink_tokens=10**15)),
        "impossible",
    ),
    "huge room": (lambda content: forged(content, lambda s: s.update(max_cache_len=10**12)), "layers are not those"),
    "huge skip": (lambda content: forged(content, lambda s: s["config"].update(skip_layers=[9])), "names layer 9"),
    "empty": (lambda content: b"", "too small"),
    "eight bytes": (lambda content: b"\x80" * 8, "too large|too small"),
    "huge header": (lambda content: struct.pack("<Q", 2**63) + content[8:], "too large"),
    "long header": (lambda content: struct.pack("<Q", 2**23) + content[8:], "truncated"),
    "no object": (lambda content: joined(b"[1, 2, 3]", b""), "expected struct"),
    "twice": (lambda content: joined(b'{"a": 1, "a": 2}', b""), "truncated, damaged"),
    "not a number": (lambda content: joined(b'{"a": NaN}', b""), "invalid JSON"),
    "deep": (lambda content: joined(b"[" * 100_000, b""), "invalid"),
    "long number": (lambda content: joined(b'{"a": ' + b"1" * 10_000 + b"}", b""), "damaged"),
    "no text": (lambda content: joined(b"\xff\xfe\xfd" * 9, b""), "UTF-8"),
    "pickle": (lambda content: pickle.dumps({"a": 1}) * 20, "safetensors"),
    "zip": (lambda content: b"PK\x03\x04" + bytes(100), "safetensors"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused(tmp_path, saved, kind):
    model, content, _ = saved
    make, says = HOSTILE[kind]
    assert make(content) != content
    refused(tmp_path, model, make(content), says)


def test_room_that_no_memory_has_is_refused(tmp_path):
    model, cache = filled("llama", length=140, max_cache_len=256)
    cache.save(tmp_path / "c.safetensors")
    content = (tmp_path / "c.safetensors").read_bytes()
    for room in (10**10, 2**47):
        hostile = forged(content, lambda state: state.update(max_cache_len=room))  # noqa: B023
        refused(tmp_path, model, hostile, "GiB on cpu|too large")


def test_weights_of_a_model_are_no_cache(tmp_path):
    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="not one of a cache"):
        TurboQuantCache.load(tmp_path / "model.safetensors", model_named("llama"))


def test_what_is_no_file_is_refused_at_once(tmp_path):
    model = model_named("llama")
    with pytest.raises(FileNotFoundError, match="save a cache there first"):
        TurboQuantCache.load(tmp_path / "nothing", model)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path in (tmp_path, "/dev/zero", tmp_path / "pipe", tmp_path / "link", tmp_path / "loop", "a\0b"):
        with pytest.raises(ValueError, match="folder|device|cannot be opened"):
            TurboQuantCache.load(path, model)


def test_a_link_to_a_file_is_followed_in_loading_and_replaced_in_saving(tmp_path):
    model, cache = filled("llama", length=20)
    cache.save(tmp_path / "c.safetensors")
    (tmp_path / "link").symlink_to("c.safetensors")
    assert TurboQuantCache.load(tmp_path / "link", model).get_seq_length() == 20
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "trap").symlink_to("precious")
    cache.save(tmp_path / "trap")
    assert (tmp_path / "precious").read_text() == "precious" and not (tmp_path / "trap").is_symlink()


def test_saving_where_no_file_can_be_is_refused(tmp_path):
    model, cache = filled("llama", length=20)
    with pytest.raises(FileNotFoundError, match="does not exist; make it"):
        cache.save(tmp_path / "no" / "c.safetensors")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, "/dev/null", tmp_path / "pipe"):
        with pytest.raises(ValueError, match="folder or a device"):
            cache.save(path)
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_new_file_has_the_permissions_of_any_other(tmp_path):
    model, cache = filled("llama", length=20)
    cache.save(tmp_path / "c.safetensors")
    (tmp_path / "plain").touch()
    assert (tmp_path / "c.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("where", ["save_file", "fsync", "replace"])
def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, where):
    model, cache = filled("llama", length=20)
    path = tmp_path / "c.safetensors"
    cache.save(path)
    old = path.read_bytes()
    run(model, cache, tokens(2, 10))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors_file if where == "save_file" else os, where, fail)
    with pytest.raises(KeyboardInterrupt):
        cache.save(path)
    assert path.read_bytes() == old and os.listdir(tmp_path) == ["c.safetensors"]


@pytest.mark.parametrize("where", ["save_file", "fsync", "replace"])
def test_a_kill_during_a_save_leaves_the_old_file(tmp_path, monkeypatch, where):
    model, cache = filled("llama", length=20)
    path = tmp_path / "c.safetensors"
    cache.save(path)
    old = path.read_bytes()
    run(model, cache, tokens(2, 10))

    def die(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def half(tensors: Any, target: Path, **options: Any) -> None:
        target.write_bytes(old[: len(old) // 2])
        die()

    child = os.fork()
    if child == 0:
        if where == "save_file":
            monkeypatch.setattr(safetensors_file, where, half)
        else:
            monkeypatch.setattr(os, where, die)
        cache.save(path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert path.read_bytes() == old
    assert TurboQuantCache.load(path, model).get_seq_length() == 20
    cache.save(path)
    assert TurboQuantCache.load(path, model).get_seq_length() == 30


def test_the_file_opens_with_safetensors_itself(tmp_path):
    model, cache = filled("gpt_oss")
    cache.save(tmp_path / "c.safetensors")
    tensors = load_file(tmp_path / "c.safetensors")
    store = cache.layers[1].store
    assert torch.equal(tensors["layers.1.key_words"], store.blocks.key_words[:, :, : store.num_blocks])
    assert torch.equal(tensors["layers.0.keys"], cache.layers[0].keys)
    assert all(isinstance(cache.layers[i], TurboQuantLayer) == (f"layers.{i}.scalars" in tensors) for i in range(4))


def test_a_baseline_cache_is_not_a_turboquant_cache():
    assert not hasattr(DynamicCache(config=model_named("llama").config), "save")


@pytest.mark.skipif(not (NEEDLE / "model.safetensors").exists(), reason="the shipped model is not there")
def test_a_long_prompt_saved_and_loaded_answers_its_pass_key(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(NEEDLE)
    model = AutoModelForCausalLM.from_pretrained(NEEDLE, attn_implementation="turboquant", dtype=torch.float32)
    filler = (NEEDLE / "filler.txt").read_text(encoding="ascii")
    fact, question = "\n<<pass key = 493817>>\n", "\n<<pass key = "
    prompt = tokenizer(filler[:1200] + fact + filler[1200:3000], return_tensors="pt")["input_ids"]
    cache = TurboQuantCache(model.config)
    run(model, cache, prompt)
    cache.save(tmp_path / "prompt.safetensors", model)
    ids = torch.cat([prompt, tokenizer(question, add_special_tokens=False, return_tensors="pt")["input_ids"]], dim=1)
    loaded = TurboQuantCache.load(tmp_path / "prompt.safetensors", model)
    assert loaded.get_seq_length() == prompt.shape[1] >= 3000
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    options |= dict(output_logits=True, return_dict_in_generate=True)
    outputs = [model.generate(ids, past_key_values=one, **options) for one in (cache, loaded)]
    assert tokenizer.decode(outputs[1].sequences[0, ids.shape[1] :]).startswith("493817")
    for ours, theirs in zip(*(output.logits for output in outputs), strict=True):
        assert torch.equal(ours, theirs)
