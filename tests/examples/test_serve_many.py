"""Several processes over gloo: `examples/serve_many.py` (replicas, tensor parallelism, both, and a process that dies),
`bench_replicas`, and `examples/multi_gpu.py`."""

import json
import os
import re
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from examples import serve_many
from examples.measure.report.tables import RENDERERS
from examples.measure.speed import bench_replicas
from examples.measure.speed.bench_replicas import Run, behind, compared, falling_lengths, runs_of
from examples.needle_data import passkey_prompt
from examples.provenance import ROOT, SHIPPED_MODEL
from examples.serve_many import SharedPrompts, answer
from tests.support.batching_cases import Oracle, greedy, model_of
from tests.support.batching_cases import options as batching_options
from tests.support.batching_cases import prompts as batching_prompts
from tests.support.ranks import run_ranks, started
from tq_hf import TurboQuantBatching

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="processes meet over gloo")

SCRIPT = str(ROOT / "examples" / "serve_many.py")
NEW = 8
BLOCKS = 40


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of prompts, with the pass key that each hides."""
    pairs = [passkey_prompt(300 + 60 * i, depth=0.5, seed=i) for i in range(5)]
    lines = [json.dumps({"prompt": prompt, "key": key}) + "\n" for prompt, key in pairs]
    (path := tmp_path / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    return path


def arguments(prompts: Path, tp: int, new: int = NEW) -> list[str]:
    named = {"prompts": prompts, "tp": tp, "new-tokens": new, "blocks": BLOCKS}
    return [str(SHIPPED_MODEL), *(f"--{name}={value}" for name, value in named.items())]


def alone(prompts: Path) -> tuple[list[str], int]:
    """The answers of one process, and the tokens that its pool has room for."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    batching = TurboQuantBatching(AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32))
    ids = [tokenizer(json.loads(line)["prompt"]).input_ids for line in prompts.read_text(encoding="utf-8").splitlines()]
    eos = batching.generation_config.eos_token_id
    results = batching.generate_batch(ids, GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=eos))
    texts = [tokenizer.decode(each.generated_tokens, skip_special_tokens=True) for each in results.values()]
    return texts, BLOCKS * 256


def printed_by_one(arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the script prints in this process, as the only one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["serve_many.py", *arguments])
        patch.chdir(folder)
        serve_many.main()
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("processes", "tp"),
    [
        pytest.param(1, 1, id="one replica"),
        pytest.param(2, 2, id="one replica of two", marks=pytest.mark.slow),
        pytest.param(2, 1, id="two replicas", marks=pytest.mark.slow),
        pytest.param(4, 2, id="two replicas of two", marks=pytest.mark.slow),
    ],
)
def test_answers_are_written_and_those_of_generate(
    processes: int, tp: int, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into the working folder."""
    if processes == 1:
        output = printed_by_one(arguments(prompts, tp), prompts.parent, capsys)
    else:
        output, *_ = run_ranks(SCRIPT, *arguments(prompts, tp), ranks=processes, cwd=prompts.parent)
    rows = [json.loads(line) for line in prompts.with_name("answers.jsonl").read_text(encoding="utf-8").splitlines()]
    expected, room = alone(prompts)
    assert [row["answer"] for row in rows] == expected
    assert all(row["answer"].startswith(row["key"]) for row in rows)
    told, title, _, values = output.splitlines()[-4:]
    assert told == "The answers are in answers.jsonl."
    assert title.startswith("| replicas | GPUs each |")
    found = re.findall(r"[\d.,]+", values)
    replicas = processes // tp
    answered, figures = list(map(int, found[2 : 2 + replicas])), found[2 + replicas :]
    assert found[:2] == [str(replicas), str(tp)] and sum(answered) == 5
    assert len(figures) == 4 and all(float(figure.replace(",", "")) > 0 for figure in figures)
    # Less than a page of each replica is in its request's ring.
    assert 0.7 < int(found[-1].replace(",", "")) / (room * replicas) <= 1


def test_a_replica_that_is_slow_takes_what_it_has_room_for_and_others_the_rest() -> None:
    """Nothing is computed by one replica until the other has answered all that is left."""
    store, new, inputs = dist.HashStore(), 4, batching_prompts([50] * 20)
    finished, found, taken, errors = threading.Event(), {}, {}, []

    def replica(slow: bool) -> None:
        shared = SharedPrompts(store, "prompts", len(inputs), replicas=2)
        batching = TurboQuantBatching(model_of(), balance=False)
        few = batching_options(max_batch_tokens=64, allow_block_sharing=False)
        with batching.continuous_batching_context_manager(greedy(new), continuous_batching_config=few) as manager:
            step = manager._generation_step
            manager._generation_step = lambda: (not slow or finished.wait(60)) and step()

            def take() -> list[int] | None:
                waiting = [*manager.input_queue.queue, *manager.batch_processor.scheduler.waiting_requests.values()]
                if sum(len(state.initial_tokens) for state in waiting) >= 64:
                    errors.append("It took a prompt while a step of them waited.")
                return None if (index := shared.take()) is None else inputs[index]

            shared.wait_for_all()
            results = answer(manager, take, new)
            finished.set()
        taken[slow] = shared.taken
        found.update((i, result.generated_tokens) for i, result in zip(shared.taken, results, strict=True))

    replicas = [threading.Thread(target=replica, args=(slow,)) for slow in (True, False)]
    for each in replicas:
        each.start()
    for each in replicas:
        each.join(120)
    oracle = Oracle(model_of())
    assert not errors and sorted(taken[True] + taken[False]) == list(range(20))
    assert 0 < len(taken[True]) <= 4
    assert [found[i] for i in range(20)] == [oracle.generate(prompt, new) for prompt in inputs]


@pytest.mark.parametrize("broken", [threading.Event().wait, Mock(side_effect=dist.DistError("reset"))], ids=[0, 1])
def test_a_store_that_is_broken_is_said(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_many, "STORE_SECONDS", 0.1)
    shared = SharedPrompts(Mock(add=lambda *given: broken()), "prompts", 20, replicas=2)
    for call in (shared.take, shared.wait_for_all):
        with pytest.raises(RuntimeError, match=r"The store .* is broken \((it has not answered for 0.1 s|reset)\)"):
            call()


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_other_with_a_sentence_within_seconds(prompts: Path) -> None:
    """Without torchrun, which would end it before it could say anything."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = f"--answers={prompts.with_name('answers.jsonl')}"
    ranks = started(store, "-m", "tests.support.dying_rank", SCRIPT, *arguments(prompts, 2, new=200), answers, cwd=ROOT)
    try:
        ranks[1].communicate(timeout=300)
        died = time.monotonic()
        _, output = ranks[0].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[1].returncode == -9 and ranks[0].returncode == 1
    assert time.monotonic() - died < 20
    assert "Rank 0 of the 2 that share this model cannot continue" in output
    assert "another rank has died: see the output of that rank, and start all ranks again." in output


def test_what_cannot_be_replicas_is_said(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["serve_many.py", str(SHIPPED_MODEL), "--prompts", str(prompts), *options])
        with pytest.raises(SystemExit):
            serve_many.main()
        return capsys.readouterr().err

    assert "torchrun --nproc-per-node 2" in said()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert "6 processes are not replicas of --tp 4" in said("--tp", "4")
    (empty := prompts.with_name("empty.jsonl")).touch()
    assert "there is no prompt" in said("--prompts", str(empty))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for path in (prompts, prompts.parent / "no" / "answers.jsonl"):
        assert f"{path} exists already, or its folder does not." in said("--answers", str(path))


COMMAND = [sys.executable, "-m", "examples.measure.speed.bench_replicas", "--tiny", "--layers", "1", "--requests", "4"]


def test_what_four_gpus_measure() -> None:
    weak, strong = [Run(2, 1, "weak", 12), Run(4, 1, "weak", 24)], [Run(2, 1, "strong", 6), Run(4, 1, "strong", 6)]
    assert list(runs_of(4, 1, 6)) == [Run(1, 1, "one", 6), *weak, *strong]
    assert list(runs_of(4, 2, 6)) == [Run(1, 2, "strong", 6), Run(2, 2, "strong", 6)]
    assert list(runs_of(4, 4, 6)) == [Run(1, 4, "strong", 6)]


@pytest.mark.parametrize("requests", [1, 4, 256])
def test_a_batch_shrinks_through_all_sizes_that_are_captured(requests: int) -> None:
    lengths = falling_lengths(requests)
    sizes = [sum(length > step for length in lengths) for step in range(max(lengths))]
    assert sizes == [size for size in sorted(set(sizes), reverse=True) for _ in range(4)]
    assert sizes[::4] == [1 << i for i in reversed(range(requests.bit_length()))]


def test_answers_that_differ_are_judged_by_the_first_token_that_does() -> None:
    model, inputs = model_of(), batching_prompts([150, 40])
    model.set_attn_implementation("turboquant")
    ids = torch.tensor([inputs[0]])
    logits = model(ids).logits[0, -1]
    first, second = logits.topk(2).indices.tolist()
    gap = float((logits[first] - logits[second]) / logits.std())
    assert behind(model, None, inputs[0], [], [first, second]) == pytest.approx(gap, rel=1e-3)
    expected = {0: [first, 1, 2], 1: [5, 6, 7], 9: [1, 2, 3]}
    found = compared(model, None, inputs, {0: [second, 9, 9], 1: [5, 6, 7], 3: [0, 0, 0]}, expected)
    assert found["furthest_behind"] == pytest.approx(gap, rel=1e-3)
    assert (found["answers"], found["equal"], found["looked_at"], found["near_ties"]) == (2, 1, 1, int(gap < 0.05))


def test_launches_that_take_too_long_are_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[str] = []

    def launched(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        launches.append(command[-1])
        return real([sys.executable, "-c", "import time; time.sleep(600)"])

    real = subprocess.Popen
    monkeypatch.setattr(
        bench_replicas, "subprocess", SimpleNamespace(Popen=launched, TimeoutExpired=subprocess.TimeoutExpired)
    )
    output = tmp_path / "replicas.json"
    monkeypatch.setattr(sys, "argv", ["bench_replicas", "--tp", "1", "2", "--output", str(output), "--seconds", "0.1"])
    monkeypatch.setattr(bench_replicas, "ON_GPU", False)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(
        SystemExit, match=r"Not all was measured with \[1, 2\] GPUs a replica: a process has died, or time ran out."
    ):
        bench_replicas.main()
    assert launches == ["1", "2"] and json.loads(output.read_text(encoding="utf-8"))["rows"] == []


@pytest.mark.slow
def test_replicas_and_shards_are_measured_and_answer_as_one_process(tmp_path: Path) -> None:
    output = tmp_path / "replicas.json"
    chosen = ["--gpus", "2", "--tp", "1", "2", "--lengths", "150", "300", "--new-tokens", "6", "--output", str(output)]
    path = os.pathsep.join([str(ROOT), *sys.path])
    run = subprocess.run(
        [*COMMAND, *chosen],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr[-8000:]
    record = json.loads(output.read_text(encoding="utf-8"))
    rows = record["rows"]
    assert [Run(*(row[name] for name in Run._fields)) for row in rows] == [*runs_of(2, 1, 4), *runs_of(2, 2, 4)]
    assert [sum(row["prompts_by_replica"]) for row in rows] == [4, 8, 4, 4]
    for row in rows[1:]:
        agreement = row["agreement"]
        assert agreement["answers"] == 4 and agreement["equal"] + agreement["near_ties"] == 4
    assert RENDERERS["replicas"](record).count("\n| ") == 2 + len(rows)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["layers", "heads"])
def test_the_pass_key_is_found_and_each_process_holds_its_share(
    ranks: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `multi_gpu.py` on a CPU, in one process and with heads split over two."""
    script = str(ROOT / "examples" / "multi_gpu.py")
    if ranks == 1:
        monkeypatch.setattr(sys, "argv", [script])
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        runpy.run_path(script, run_name="__main__")
        text = capsys.readouterr().out
    else:
        text = "".join(run_ranks(script, ranks=ranks))
    assert text.count("314159>>") == 1
    held = [float(size) for size in re.findall(r"process \d: ([\d.]+) MiB on cpu", text)]
    assert held == [pytest.approx(1.69 / ranks, abs=0.02)] * ranks
