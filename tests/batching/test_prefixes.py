"""Pages of prefixes in host memory and in files: found again by other engines, byte for byte, and never trusted."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.support.batching_cases import Session, Tokens, greedy, hybrid, mixed, model_of, options, prompts
from tq_hf import TurboQuantBatching
from tq_hf.batching import prefixes
from tq_hf.batching.prefixes import PrefixFolder

SINKS, BLOCK = 4, 128


def session_of(model: PreTrainedModel, folder: Any, overrides: dict[str, Any] | None = None, **more: Any) -> Session:
    return Session(model, overrides={"balance": False, "prefix_cache": folder} | (overrides or {}), **more)


def outputs(session: Session, inputs: list[Tokens], new: int) -> list[Any]:
    more: Any = dict(continuous_batching_config=session.options, persistent_manager=True)
    return list(session.batching.generate_batch(inputs, generation_config=greedy(new), **more).values())


def told(session: Session, inputs: list[Tokens], new: int = 8) -> list[tuple[Tokens, int]]:
    """Tokens of requests one by one, and how many of each prompt were found in pages."""
    found = [outputs(session, [list(prompt)], new)[0] for prompt in inputs]
    return [(each.generated_tokens, each.cached_tokens) for each in found]


def right(session: Session, output: Any) -> bool:
    """Whether an answer is that of a request that began with as many tokens in pages as this one."""
    expected = session.oracle.generate, session.oracle.after_prefix
    more = (output.cached_tokens,) if output.cached_tokens else ()
    return output.generated_tokens == expected[bool(more)](output.prompt_ids, len(output.generated_tokens), *more)


def pages_of(session: Session) -> dict[int, torch.Tensor]:
    """Bytes of pages with a hash: of whole blocks, and of rows of sinks."""
    allocator, found = session.cache.allocator, {}
    for page, name in allocator.ledger.block_to_hash.items():
        parts = [allocator._copy_view[page]]
        if name & 1:
            parts = [view.tensors.rows[page, :, :, : allocator.shape.sinks] for view in allocator.pages.values()]
        found[name] = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
    return found


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("llama", {"balance": True}),
        ("llama", {"sink_tokens": 0, "key_bits": 2, "value_bits": 3}),
        ("llama", {"skip_layers": (1,), "residual_length": 0}),
        ("deepseek_v3", {}),
    ],
)
def test_another_engine_finds_the_pages_that_one_has_read(name: str, recipe: dict[str, Any], tmp_path: Path) -> None:
    first, tail = prompts([300, 70])
    sinks = recipe.get("sink_tokens", SINKS)
    again = first[: sinks + 2 * BLOCK] + tail
    with session_of(model_of(name), tmp_path, recipe) as session:
        assert outputs(session, [first], 6)[0].cached_tokens == 0
        held = pages_of(session)
        expected = outputs(session, [again], 6)[0]
    assert expected.cached_tokens == sinks + 2 * BLOCK
    assert len(list(tmp_path.iterdir())) == 2 + bool(sinks)
    with session_of(model_of(name), tmp_path, recipe) as session:
        found = outputs(session, [again], 6)[0]
        assert (found.cached_tokens, found.generated_tokens) == (expected.cached_tokens, expected.generated_tokens)
        back = pages_of(session)
        assert back.keys() == held.keys() and all(torch.equal(back[key], held[key]) for key in held)
        assert session.cache.prefixes is not None and session.cache.prefixes.blocks["read"] == len(held)
        assert session.pages_in_use() == 0 and not session.cache.prefixes.loading


def test_files_are_safetensors_of_a_quarter_of_the_bytes(tmp_path: Path) -> None:
    with session_of(model_of(head_dim=128), tmp_path) as session:
        outputs(session, prompts([300]), 2)
        heads = session.cache.allocator.num_key_value_heads
    for path in tmp_path.iterdir():
        (name,) = (tensors := load_file(path))
        assert name == "sinks" or tensors[name].numel() < 0.27 * 2 * (2 * 2 * heads * 128 * BLOCK)


def test_an_answer_is_part_of_the_next_prompt(tmp_path: Path) -> None:
    """Turns of an agent. A template that drops what the model has thought leaves the prefix before the thoughts."""
    prompt, question = prompts([200, 30])
    with session_of(model_of(), tmp_path) as session:
        answer = outputs(session, [prompt], 200)[0].generated_tokens
    with session_of(model_of(), tmp_path) as session:
        kept, dropped = outputs(session, [prompt + answer + question, prompt + answer[50:] + question], 4)
        assert (kept.cached_tokens, dropped.cached_tokens) == (SINKS + 3 * BLOCK, SINKS + BLOCK)
        assert right(session, dropped) and right(session, kept)


def traffic(session: Session, chance: random.Random, number: int, stems: list[Tokens]) -> list[Any]:
    """Outputs of requests whose prompts begin alike, of which some are cancelled."""
    manager = session.batching.init_continuous_batching(greedy(4), session.options)
    session.model._cached_continuous_batching_manager = manager
    manager.start()
    found, names = [], []
    for i in range(number):
        stem = chance.choice(stems)
        prompt = stem[: chance.randrange(1, len(stem))] + [chance.randrange(90) for _ in range(chance.randrange(1, 90))]
        names.append(manager.add_request(prompt, max_new_tokens=chance.randrange(1, 40), request_id=f"{i}"))
        if i % 9 == 5:
            manager.cancel_request(names.pop(chance.randrange(len(names))))
        if i % 4 == 3:
            time.sleep(0.02)
    while len(found) < len(names):
        output = manager.get_result(timeout=60)
        assert output is not None and output.error is None
        found += [output] if output.request_id in names else []
    manager.stop(keep_for_next_session=True)
    return found


SMALL = {"num_blocks": 62, "safety_margin": 0.0, "cpu_offload_space": 0.01}
"""A pool with room for few requests, which are preempted and come back with their pages."""


@pytest.mark.parametrize("pool", [{"num_blocks": 400}, SMALL], ids=["roomy", "small"])
def test_answers_are_those_without_files(pool: dict[str, Any], tmp_path: Path, offloaded: list[set[str]]) -> None:
    """With prefixes in common, requests that are cancelled and preempted, and restarts."""
    chance, stems, number = random.Random(0), prompts([700, 520, 300, 900]), int(os.environ.get("TQ_HF_REQUESTS", 18))
    with session_of(model_of(), tmp_path, max_batch_tokens=8192) as session:
        for stem in stems:
            assert right(session, *outputs(session, [stem], 2))
    first, loaded = {path: path.read_bytes() for path in tmp_path.iterdir()}, 0
    restarts = max(3, number // 12)
    for i in range(restarts):
        folder = PrefixFolder(tmp_path, memory=1) if i % 3 == 1 else tmp_path
        with session_of(model_of(), folder, max_batch_tokens=8192, **pool) as session:
            for output in traffic(session, chance, number // restarts, stems):
                # Without room blocks are read again behind packed ones, and differ as they do without files.
                assert pool is SMALL or right(session, output), (i, output.request_id)
            store: Any = session.cache.prefixes
            loaded += store.blocks["loaded"]
            assert session.pages_in_use() == 0 and not (store.loading or store.reading or store.writing)
    assert loaded and all(path.read_bytes() == data for path, data in first.items())


def test_requests_one_by_one_in_a_small_pool_find_all_that_was_read(tmp_path: Path) -> None:
    """Pages that no request reads give way to those that come back, from host memory too."""
    stems = prompts([700, 520, 900])
    inputs = [(*stem[:at], 1, 2, 3) for at in (400, 290, 500) for stem in stems]
    with session_of(model_of(), None) as session:
        session.run(stems, greedy(2))
        expected = told(session, inputs)
    with session_of(model_of(), tmp_path) as session:
        session.run(stems, greedy(2))
    with session_of(model_of(), tmp_path, num_blocks=30) as session:
        assert told(session, inputs) == expected
        blocks = session.cache.prefixes.blocks  # type: ignore[union-attr]
        assert blocks["loaded"] > blocks["read"] > 0 == blocks["refused"]


class Device:
    """Stands for streams and events of a GPU: a copy is over once it was asked for three times, or is waited for."""

    def __init__(self) -> None:
        self.waits, self.asked = 0, 0

    def wait_stream(self, stream: Device) -> None:
        self.waits += 1

    wait_event = wait_stream

    def record_event(self) -> Device:
        return Device()

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 3

    def synchronize(self) -> None:
        self.asked = 3


@pytest.mark.parametrize("blocks", [200, 30])
def test_copies_of_a_device_are_not_waited_for(blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and slots are held until copies are over. Steps wait for the pages that came back, and for no others."""
    real, stems = prefixes.PrefixStore.__init__, prompts([700, 520])
    inputs = [(*stem[:at], 1, 2, 3) for at in (400, 290, 500) for stem in stems]

    def init(store: Any, *args: Any) -> None:
        real(store, *args)
        store.copies, store.stream = Device(), Device()

    with session_of(model_of(), None) as session:
        session.run(stems, greedy(2))
        expected = told(session, inputs)
    monkeypatch.setattr(prefixes.PrefixStore, "__init__", init)
    monkeypatch.setattr(prefixes, "stream_context", lambda stream: nullcontext())
    monkeypatch.setattr(prefixes, "STEP_BYTES", 1)
    for pool in (200, blocks):
        with session_of(model_of(), PrefixFolder(tmp_path, memory=1), num_blocks=pool) as session:
            session.run(stems, greedy(2))
            assert told(session, inputs) == expected
            store: Any = session.cache.prefixes
            assert bool(store.stream.waits) == bool(store.blocks["loaded"]) and store.copies.waits
            assert session.pages_in_use() == 0 and not (store.flights or store.to_store or store.writing)
    assert store.blocks["read"]


def test_a_prefix_larger_than_host_memory_comes_back_in_parts(tmp_path: Path) -> None:
    (prompt,) = prompts([SINKS + 15 * BLOCK + 1])
    recipe = dict(max_batch_tokens=8192, num_blocks=100)
    with session_of(model_of(), PrefixFolder(tmp_path, memory=1), **recipe) as session:
        outputs(session, [prompt], 2)
    with session_of(model_of(), PrefixFolder(tmp_path, memory=1), **recipe) as session:
        found = outputs(session, [prompt], 2)[0]
        assert len(session.cache.prefixes.slots) == 8  # type: ignore[union-attr]
    assert found.cached_tokens == SINKS + 15 * BLOCK


STEMS = prompts([700, 520])
CHILD = """
import json, sys
from tests.batching.test_prefixes import STEMS, traced
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps(traced(sys.argv[1], STEMS)))
"""


def traced(folder: Any, stems: list[Tokens]) -> list[tuple[Tokens, Tokens, int]]:
    """Prompts that begin alike, their answers, and how many of their tokens were found in pages."""
    with session_of(model_of(), folder) as session:
        found = [outputs(session, [stem[:n] + [1, 2, 3]], 6)[0] for n in (510, 290) for stem in stems]
    return [(each.prompt_ids, each.generated_tokens, each.cached_tokens) for each in found]


def test_processes_share_a_folder(tmp_path: Path) -> None:
    """Two that write at once, and one that comes later."""
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None and child.stdout.readline() == "ready\n"
        child.stdin.write("\n")
        child.stdin.flush()
        one, other = traced(tmp_path, STEMS[::-1]), json.loads(child.stdout.readline())
    with session_of(model_of(), None) as session:
        for prompt, tokens, cached in one + other:
            expected = session.oracle.after_prefix(prompt, 6, cached) if cached else session.oracle.generate(prompt, 6)
            assert tokens == expected
    with session_of(model_of(), tmp_path) as session:
        assert all(outputs(session, [prompt], 6)[0].cached_tokens for prompt, _, _ in one)
    assert not list(tmp_path.glob("*.tmp"))


def headers(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a file, and keep the rest."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    about = json.loads(data[8 : 8 + size])
    change(about)
    header = json.dumps(about).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def changed(factor: float = 1.0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model, with a weight multiplied by a factor."""
    model = model_of()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(factor)
    return model.to(dtype)


def in_place(make: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda path: (path.unlink(), make(path))[1]


def of(**changes: Any) -> Callable[[Path], None]:
    """The file of another model or preset, under this name."""

    def replace(path: Path) -> None:
        other = path.parent.with_name("other")
        if not other.exists():
            with session_of(changed(**changes.get("model", {})), other, changes.get("recipe", {})) as session:
                outputs(session, prompts([300]), 2)
        size = path.stat().st_size
        path.write_bytes(min(other.iterdir(), key=lambda each: abs(each.stat().st_size - size)).read_bytes())

    return replace


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 100),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "empty": lambda path: path.write_bytes(b""),
    "checksum": flipped,
    "other weights": of(model={"factor": -2.0}),
    "other preset": of(recipe={"key_bits": 3, "value_bits": 4}),
    "shape": lambda path: save_file({name: x[:-64] for name, x in load_file(path).items()}, path),
    "dtype": lambda path: headers(path, lambda about: about[next(n for n in about if n[0] != "_")].update(dtype="I8")),
    "format": lambda path: headers(path, lambda about: about["__metadata__"].update(format="tq_hf.prefix 1")),
    "no metadata": lambda path: headers(path, lambda about: about.update(__metadata__=[])),
    "foreign": lambda path: save_file({"weight": torch.zeros(3, 3)}, path),
    "text": lambda path: path.write_text("not safetensors\n" * 999),
    "pickle": lambda path: path.write_bytes(pickle.dumps({"block": [0] * 999})),
    "huge header": lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:]),
    "folder": in_place(lambda path: path.mkdir()),
    "link to nothing": in_place(lambda path: path.symlink_to("nowhere")),
    "link to a device": in_place(lambda path: path.symlink_to("/dev/zero")),
    "pipe": in_place(lambda path: os.mkfifo(path)),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with the pages of a prompt of 300 tokens, and the output of the request that they are of."""
    folder = tmp_path_factory.mktemp("prefixes")
    with session_of(model_of(), folder) as session:
        return folder, outputs(session, prompts([300]), 6)[0]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_passed_over_and_written_again(
    damage: str, written: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (prompt,), expected = prompts([300]), written[1]
    folder = Path(shutil.copytree(written[0], tmp_path / "prefixes"))
    for path in sorted(folder.iterdir()):
        DAMAGE[damage](path)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    with session_of(model_of(), folder) as session:
        caplog.clear()
        found = outputs(session, [prompt], 6)[0]
    assert (found.generated_tokens, found.cached_tokens) == (expected.generated_tokens, 0)
    assert sum("passed over" in each.message for each in caplog.records) in ((0,) if "nothing" in damage else (1, 2, 3))
    with session_of(model_of(), folder) as session:
        found = outputs(session, [prompt], 6)[0]
    assert found.cached_tokens == (0 if damage in ("folder", "pipe", "link to a device") else SINKS + 2 * BLOCK)
    assert right(session, found)


def test_a_folder_that_cannot_be_read_any_more_has_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with session_of(model_of(), tmp_path) as session:
        outputs(session, [[1]], 1)
        monkeypatch.setattr(Path, "stat", Mock(side_effect=PermissionError(13, "Permission denied")))
        (found,) = outputs(session, prompts([300]), 6)
        monkeypatch.undo()
    assert found.error is None and right(session, found)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ({"factor": -2.0}, {}),
        ({}, {"key_bits": 8}),
        ({}, {"residual_length": 64}),
        ({}, {"seed": 1}),
        ({}, {"balance": True}),
        ({"dtype": torch.bfloat16}, {}),
    ],
)
def test_nothing_is_found_by_another_model_or_preset(
    model: dict[str, Any], recipe: dict[str, Any], written: tuple[Path, Any], tmp_path: Path
) -> None:
    folder = shutil.copytree(written[0], tmp_path / "prefixes")
    with session_of(changed(**model), folder, recipe) as session:
        assert outputs(session, prompts([300]), 2)[0].cached_tokens == 0
    assert len(list(folder.iterdir())) == 6


def test_a_model_with_hooks_finds_and_saves_nothing(tmp_path: Path) -> None:
    (prompt,), model = prompts([300]), model_of()
    with session_of(model, tmp_path) as session:
        told(session, [prompt])
    files = sorted(tmp_path.iterdir())
    with model.model.layers[0].mlp.register_forward_hook(lambda mlp, args, out: 2 * out):
        with session_of(model, tmp_path) as session:
            ((answer, cached),) = told(session, [prompt])
            assert cached == 0 and answer == session.oracle.generate(prompt, 8)
    assert sorted(tmp_path.iterdir()) == files


def test_files_used_least_recently_are_deleted_first_and_others_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (abandoned := tmp_path / f".{'0' * 32}-{'0' * 31}.ab.tmp").write_text("")
    os.utime(abandoned, (0, 0))
    folder = PrefixFolder(tmp_path)
    assert not abandoned.exists()
    names = [f"{0:032x}-{i:032x}.safetensors" for i in range(40)]
    for name in names[:20]:
        folder.write(name, "block", torch.zeros(1000, dtype=torch.uint8))
    for i, name in enumerate(names[:20]):
        os.utime(tmp_path / name, (i, i))
    folder.touch(names[2:4])
    folder = PrefixFolder(tmp_path, size=12 * 1300)
    assert (tmp_path / "mine.txt").exists() and folder.known == {path.name for path in tmp_path.glob("*.safetensors")}
    assert folder.known > {*names[2:4], *names[12:20]} and not folder.known & {*names[:2], *names[4:8]}
    for name in names[20:]:
        assert folder.write(name, "block", torch.zeros(1000, dtype=torch.uint8))
        assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) <= folder.size + 1300
    assert folder.number_deleted >= 28


def test_a_folder_that_cannot_be_written_to_stops_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    (prompt,) = prompts([300])
    with session_of(model_of(), tmp_path) as session:
        monkeypatch.setattr(os, "replace", full)
        assert right(session, *outputs(session, [prompt], 4)) and not list(tmp_path.iterdir())
        assert session.cache.prefixes.blocks["written"] == 0  # type: ignore[union-attr]


def test_a_request_that_is_cancelled_while_its_pages_come_back_holds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = prompts([700, 40])
    with session_of(model_of(), tmp_path) as session:
        outputs(session, [first], 2)
    read, slow = PrefixFolder.read, lambda *args: (time.sleep(0.2), read(*args))[1]
    monkeypatch.setattr(PrefixFolder, "read", slow)
    with session_of(model_of(), tmp_path) as session:
        outputs(session, [other], 2)
        manager = session.manager
        manager.start()
        names = [manager.add_request(first, max_new_tokens=4), manager.add_request(other, max_new_tokens=2)]
        assert manager.get_result(timeout=60).request_id == names[1], "others do not wait"
        assert session.cache.prefixes.loading  # type: ignore[union-attr]
        manager.cancel_request(names[0])
        manager.stop(keep_for_next_session=True)
        assert session.pages_in_use() == 0 and not session.cache.prefixes.loading  # type: ignore[union-attr]
        assert right(session, *outputs(session, [first], 4))


def test_a_model_that_changes_finds_and_saves_nothing_more(tmp_path: Path) -> None:
    (prompt,) = prompts([300])
    model = model_of()
    with session_of(model, tmp_path) as session:
        outputs(session, [prompt], 2)
        session.manager.start()
        with session.manager.pause(), torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(-2.0)
        name = session.manager.add_request(prompt, max_new_tokens=4)
        assert session.manager.get_result(name, timeout=60).cached_tokens == 0
        assert session.cache.prefixes is None
        session.manager.stop(keep_for_next_session=True)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("model", [lambda: mixed("gemma2"), hybrid], ids=["windows", "states"])
def test_models_without_prefixes_are_refused(model: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`prefix_cache` needs a whole model of full-attention layers"):
        TurboQuantBatching(model(), balance=False, prefix_cache=tmp_path)


def test_what_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (taken := tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match="taken cannot be a folder for prefixes"):
        PrefixFolder(taken)
    with pytest.raises(ValueError, match="`size` is 0"):
        PrefixFolder(tmp_path, size=0)
    batching = TurboQuantBatching(model_of(), balance=False, prefix_cache=tmp_path)
    with pytest.raises(ValueError, match="Leave out `allow_block_sharing=False`"):
        batching.init_continuous_batching(greedy(2), options(allow_block_sharing=False)).warmup()
