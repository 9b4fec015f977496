"""A file is written whole or not at all. Damaged and hostile files are refused with a sentence, before anything is
allocated."""

import copy
import json
import os
import pickle
import signal
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.saving_cases import assert_continue_alike, filled, model_named, run, split
from tests.support.tiny_models import token_ids
from tq_hf import TurboQuantCache
from tq_hf.saving import safetensors_file
from tq_hf.saving.cache_file import VERSION
from tq_hf.saving.layers import Loader


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, bytes, torch.Tensor]:
    """A model, the bytes of a file, and the logits after it."""
    model, cache = filled("gemma3", length=260, layers=4)
    path = tmp_path_factory.mktemp("saved") / "c.safetensors"
    cache.save(path)
    return model, path.read_bytes(), run(model, cache, token_ids(2, 1))


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


@settings(max_examples=60)
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


@settings(max_examples=40)
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


def is_loaded(path: Path, model: Any, content: bytes, field: tuple, new: Any) -> bool:
    """Whether the file is loaded with this field of its description forged. If not, it is refused in a sentence."""
    path.write_bytes(forged(content, lambda state: state.update(changed_at(state, field, new))))
    try:
        TurboQuantCache.load(path, model)
    except ValueError as error:
        assert 40 < len(str(error)) < 600, error
        return False
    return True


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
            if is_loaded(path, model, content, field, new):
                loaded.add(field)
    # These say how stored codes are to be understood, or what comes next; only their author knows better.
    free = {("config", name) for name in ("seed", "preset", "residual_length", "sink_tokens")}
    flags = {field for field in loaded if field[-1] in ("record_past", "scales_are_fixed")}
    assert tried > 500
    # Fields of the model's config that a file leaves out are not compared; its weights are.
    unchecked = {("max_cache_len",), ("model", "config")}
    assert {field for field in loaded - free - flags if field[0] not in HARMLESS} <= unchecked


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=4), inner))


@settings(max_examples=60)
@given(number=st.integers(0, 2**16), new=VALUES)
def test_a_random_description_never_crashes(tmp_path, saved, number, new):
    model, content, _ = saved
    state = json.loads(split(content)[0]["__metadata__"]["state"])
    fields = leaves(state)
    is_loaded(tmp_path / "random.safetensors", model, content, fields[number % len(fields)], new)


def edited(content: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    header, data = split(content)
    change(header)
    return joined(header, data)


TENSOR = "layers.1.key_words"


def _overlap(header: dict[str, Any]) -> None:
    first, second = "layers.1.residual_keys", "layers.1.residual_values"
    header[second]["data_offsets"] = header[first]["data_offsets"]


def _swapped(header: dict[str, Any]) -> None:
    first, second = header["layers.1.residual_keys"], header["layers.1.residual_values"]
    first["data_offsets"], second["data_offsets"] = second["data_offsets"], first["data_offsets"]


EDITS = {
    "huge shape": (lambda h: h[TENSOR].update(shape=[2**40, 2**40, 2**40, 2**40]), "overflow|truncated, damaged"),
    "negative shape": (lambda h: h[TENSOR].update(shape=[-1, -1]), "truncated, damaged"),
    "many dimensions": (lambda h: h[TENSOR].update(shape=[1] * 1000), "truncated, damaged"),
    "other shape": (lambda h: h[TENSOR]["shape"].reverse(), r"must be torch.int32 \[2, 2, 1, "),
    "wrong dtype": (lambda h: h[TENSOR].update(dtype="F32"), "torch.float32"),
    "unknown dtype": (lambda h: h[TENSOR].update(dtype="pickle"), "`pickle`"),
    "overlap": (_overlap, "offset"),
    "swapped": (_swapped, "checksum"),
    "renamed": (lambda h: h.update({"../../x": h.pop(TENSOR)}), "missing"),
    "one more": (lambda h: h.update(more={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}), "unknown"),
    "future": (lambda h: h["__metadata__"].update(version=str(VERSION + 1)), "newer tq_hf"),
    "past": (lambda h: h["__metadata__"].update(version="3"), "reads 8. It was written by no released tq_hf"),
    "endless version": (lambda h: h["__metadata__"].update(version="9" * 5000), "not a number"),
    "other format": (lambda h: h["__metadata__"].update(format="pt"), "but not of a cache"),
    "no metadata": (lambda h: h.pop("__metadata__"), "but not of a cache"),
}
"""Changes of the header, and words of the answer."""
FORGERIES = {
    "huge sinks": (lambda s: s["config"].update(sink_tokens=10**15), "impossible"),
    "huge room": (lambda s: s.update(max_cache_len=10**12), "GiB on cpu"),
    "huge skip": (lambda s: s["config"].update(skip_layers=[9]), "names layer 9"),
    "layer twice": (lambda s: s["config"].update(skip_layers=[1], layers=[[1, "k8v4"]]), "Layer 1 is dense and k8v4"),
    "unknown preset of a layer": (lambda s: s["config"].update(layers=[[0, "x" * 9]]), "Unknown preset"),
    "preset of no layer": (lambda s: s["config"].update(layers=[["0", []]]), "presets by layer indices"),
}
"""Changes of the description, whose checksum is right again."""
CONTENTS = {
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
"""Other bytes in place of those of a file."""
HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    **{name: (partial(edited, change=change), says) for name, (change, says) in EDITS.items()},
    **{name: (partial(forged, change=change), says) for name, (change, says) in FORGERIES.items()},
    **CONTENTS,
}


def test_channel_scales_handed_on_in_a_cache_that_is_not_balanced_are_refused(tmp_path):
    model, cache = filled("llama", length=140, balance=False)
    cache.save(tmp_path / "c.safetensors")
    content = (tmp_path / "c.safetensors").read_bytes()
    hostile = forged(content, lambda state: state["layers"][1].update(scales_are_fixed=True))
    refused(tmp_path, model, hostile, "Layer 1 has fixed channel scales, and is not balanced")


@pytest.mark.parametrize("room", [None, 400], ids=["growing", "preallocated"])
@pytest.mark.parametrize("rows", [0, 94, 97, 260, -1, 10**15])
def test_a_window_with_other_rows_than_it_can_have_is_refused(tmp_path, saved, nothing_read, rows, room):
    model, content, _ = saved
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(forged(content, lambda state: state["layers"][0].update(rows=rows)))
    with pytest.raises(ValueError, match=f"Layer 0 has {rows} rows of a window of 96 after 260 tokens"):
        TurboQuantCache.load(path, model, max_cache_len=room)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused(tmp_path, saved, kind):
    model, content, _ = saved
    make, says = HOSTILE[kind]
    assert make(content) != content
    refused(tmp_path, model, make(content), says)


@pytest.mark.parametrize("skip_layers", [(), range(2)], ids=["compressed", "dense"])
def test_room_that_no_memory_has_is_refused(tmp_path, skip_layers):
    model, cache = filled("llama", length=140, max_cache_len=256, skip_layers=skip_layers)
    cache.save(tmp_path / "c.safetensors")
    content = (tmp_path / "c.safetensors").read_bytes()
    for room in (10**10, 2**47):
        hostile = forged(content, lambda state: state.update(max_cache_len=room))  # noqa: B023
        refused(tmp_path, model, hostile, "GiB on cpu|too large")


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
    with pytest.raises(FileNotFoundError, match="does not exist. Create it"):
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


def saved_before_ten_tokens(tmp_path: Path) -> tuple[Any, TurboQuantCache, Path, bytes]:
    """A model, a cache of 30 tokens, and a file of its first 20."""
    model, cache = filled("llama", length=20)
    path = tmp_path / "c.safetensors"
    cache.save(path)
    run(model, cache, token_ids(2, 10))
    return model, cache, path, path.read_bytes()


@pytest.mark.parametrize("where", ["save_file", "fsync", "replace"])
def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, where):
    _, cache, path, old = saved_before_ten_tokens(tmp_path)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors_file if where == "save_file" else os, where, fail)
    with pytest.raises(KeyboardInterrupt):
        cache.save(path)
    assert path.read_bytes() == old and os.listdir(tmp_path) == ["c.safetensors"]


@pytest.mark.parametrize("where", ["save_file", "fsync", "replace"])
def test_a_kill_during_a_save_leaves_the_old_file(tmp_path, monkeypatch, where):
    model, cache, path, old = saved_before_ten_tokens(tmp_path)

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


def test_a_file_replaced_while_it_is_read_is_the_one_before(tmp_path, monkeypatch):
    model, one = filled("llama", length=200)
    _, two = filled("llama", length=201)
    path = tmp_path / "c.safetensors"
    one.save(path, model)
    check = Loader.check

    def replaced(loader: Loader, entries: dict[str, torch.Tensor]) -> None:
        check(loader, entries)
        two.save(path, model)

    monkeypatch.setattr(Loader, "check", replaced)
    loaded = TurboQuantCache.load(path, model)
    monkeypatch.undo()
    assert loaded.get_seq_length() == 200 and TurboQuantCache.load(path, model).get_seq_length() == 201
    assert_continue_alike(model, one, loaded)
