"""A file is written whole or not at all, where a file may be."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.saving_cases import assert_continue_alike, filled, run, tokens
from tq_hf import TurboQuantCache
from tq_hf.saving import safetensors_file
from tq_hf.saving.layers import Loader
from tq_hf.saving.safetensors_file import Header


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


def test_a_file_replaced_while_it_is_read_is_the_one_before(tmp_path, monkeypatch):
    model, one = filled("llama", length=200)
    _, two = filled("llama", length=201)
    path = tmp_path / "c.safetensors"
    one.save(path, model)
    check = Loader.check

    def replaced(loader: Loader, header: Header) -> None:
        check(loader, header)
        two.save(path, model)

    monkeypatch.setattr(Loader, "check", replaced)
    loaded = TurboQuantCache.load(path, model)
    monkeypatch.undo()
    assert loaded.get_seq_length() == 200 and TurboQuantCache.load(path, model).get_seq_length() == 201
    assert_continue_alike(model, one, loaded)
