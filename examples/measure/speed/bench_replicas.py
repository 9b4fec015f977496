"""Prompts answered by replicas, by tensor parallelism and by both, on the GPUs of one host.

    python -m examples.measure.speed.bench_replicas [--gpus 4] [--tp 1 2 4] [--layers 32]

starts a process a GPU for each number of GPUs that a replica has, on an 8B-shaped random Llama, and lets
`serve_many.py`'s replicas answer prompts that they share. Of one GPU, one replica answers a file; then more do,
each with as many prompts to answer (weak scaling), and the same file (strong scaling). Replicas that are not needed
wait. Replicas of several GPUs answer the same file.

Times count from when all prompts are there. Before, each replica answers one prompt (how long that takes from loaded
weights on is `first_answer_s`), then steps of all sizes are captured. Answers are compared with those of one process: a
first token that differs is a near tie if the chosen token is less than `NEAR_TIE` standard deviations of the logits
behind. JSON is written after each row.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig
from transformers.utils import logging

from examples.measure.speed.bench_multi_gpu import ENVIRONMENT, NEAR_TIE, ON_GPU, TINY, device, load, release
from examples.measure.speed.bench_serve import random_prompt
from examples.provenance import LLAMA_8B, RESULTS, provenance, slug
from examples.serve_many import SharedPrompts, answer, follow, percentile, placed
from tq_hf import TurboQuantBatching, TurboQuantCache
from tq_hf.compat import as_input

PRESET = "4bit_nc"
CHECKED = 16
"""Maximum number of answers whose first different token is looked at, per row."""
POOL = 200
"""Number of pages of a replica on a CPU."""

Answers = dict[int, list[int]]
"""Tokens of answers by index of the prompt."""


class Run(NamedTuple):
    """Replicas, each of `tp` GPUs, that answer the first prompts of all.

    Attributes:
        load: "one", "weak" or "strong".
    """

    replicas: int
    tp: int
    load: str
    prompts: int


def runs_of(gpus: int, tp: int, requests: int) -> Iterator[Run]:
    """What is measured of replicas of `tp` GPUs, if one GPU answers `requests` prompts."""
    most = gpus // tp
    replicas = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    if tp == 1:
        yield Run(1, 1, "one", requests)
        yield from (Run(count, 1, "weak", count * requests) for count in replicas[1:])
        replicas = replicas[1:]
    yield from (Run(count, tp, "strong", requests) for count in replicas)


def prompts_of(arguments: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """All prompts, the same in every process."""
    generator = random.Random(0)
    count = arguments.requests * arguments.gpus
    return [random_prompt(generator, generator.randint(*arguments.lengths), vocabulary) for _ in range(count)]


def falling_lengths(requests: int) -> list[int]:
    """Lengths of answers that let a batch of requests shrink to a half, a quarter, ... one, four steps each."""
    steps = (requests - 1).bit_length() + 1
    return [4 * (steps - i.bit_length()) for i in range(requests)]


@torch.no_grad()
def behind(model: Any, balance: Any, prompt: list[int], before: list[int], tokens: list[int]) -> float:
    """How far the less likely one of two tokens is behind, in standard deviations of the logits.

    Args:
        model: The model, with the attention of a compressed cache.
        balance: Channel scales of the cache.
        prompt: Tokens of the prompt.
        before: Tokens of the answer before the two.
        tokens: The two tokens.
    """
    cache = TurboQuantCache(model.config, PRESET, balance=balance)
    ids = torch.tensor([prompt], device=device())
    logits = model(ids, **as_input(cache), logits_to_keep=1).logits
    if before:
        logits = model(torch.tensor([before], device=device()), **as_input(cache), logits_to_keep=1).logits
    last = logits[0, -1].float()
    return float((last[tokens[0]] - last[tokens[1]]).abs() / last.std())


def compared(model: Any, balance: Any, prompts: list[list[int]], found: Answers, expected: Answers) -> dict[str, Any]:
    """How many answers are those of one process, and how far behind the first tokens are that differ."""
    both = sorted(found.keys() & expected.keys())
    different = [i for i in both if found[i] != expected[i]]
    gaps = []
    for i in different[:CHECKED]:
        at = next(t for t, (a, b) in enumerate(zip(found[i], expected[i], strict=True)) if a != b)
        tokens = [found[i][at], expected[i][at]]
        gaps.append(behind(model, balance, prompts[i], expected[i][:at], tokens))
    return {
        "answers": len(both),
        "equal": len(both) - len(different),
        "looked_at": len(gaps),
        "near_ties": sum(gap < NEAR_TIE for gap in gaps),
        "furthest_behind": max(gaps, default=0.0),
    }


class Process:
    """A process of one launch: it has a GPU, and takes part in all runs of one number of GPUs a replica."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        logging.set_verbosity_error()
        self.arguments, (self.tp,) = arguments, arguments.tp
        self.rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.replica, self.leads = self.rank // self.tp, self.rank % self.tp == 0
        self.store = dist.TCPStore(*address, timeout=timedelta(minutes=20))
        pool = {} if ON_GPU else dict(num_blocks=POOL)
        # Before the model: it sets NCCL_GRAPH_MIXING_SUPPORT. No run may find pages of an earlier one.
        self.options = ContinuousBatchingConfig(
            max_requests_per_batch=1 << (arguments.requests - 1).bit_length(),
            allow_block_sharing=False,
            cpu_group_timeout=120,
            **pool,
        )
        changes = {"num_hidden_layers": arguments.layers} | (TINY | {"vocab_size": 256} if arguments.tiny else {})
        self.config = LlamaConfig(**{**LLAMA_8B, **changes})
        self.model = load(self.config, **placed(self.store, self.rank, self.tp))
        release()
        self.loaded = time.perf_counter()
        self.batching = TurboQuantBatching(self.model, PRESET)
        self.prompts = prompts_of(arguments, self.config.vocab_size)
        self.reference = arguments.scratch / "one.json"

    def run(self) -> None:
        """Measure all runs of this launch, then compare answers with those of one process."""
        gpus, most = self.arguments.gpus, self.arguments.requests
        runs, found = list(runs_of(gpus, self.tp, most)), []
        greedy = GenerationConfig(max_new_tokens=self.arguments.new_tokens, do_sample=False, eos_token_id=-1)
        session = self.batching.continuous_batching_context_manager(greedy, continuous_batching_config=self.options)
        with session as manager:
            if not self.leads:
                follow(manager)
            else:
                answer(manager, iter([self.prompts[0], None]).__next__, self.arguments.new_tokens)
                first = time.perf_counter() - self.loaded
                print(f"replica {self.replica} of {self.tp}: first answer {first:.1f} s after the weights", flush=True)
                self.capture(manager, most)
                self.store.set(f"first {self.replica}", str(first))
                found = [self.measured(manager, i, run) for i, run in enumerate(runs) if self.replica < run.replicas]
        # A captured CUDA graph holds its communicator: destroying that first would wait forever.
        del session, manager
        release()
        if self.rank < self.tp:
            self.compare(runs, found)
        if self.tp > 1:
            dist.destroy_process_group()

    def capture(self, manager: Any, most: int) -> None:
        """Let steps of all sizes be captured."""
        prompt, names = self.prompts[0][:16], set()
        for new in falling_lengths(1 << (most - 1).bit_length()):
            names.add(manager.add_request(prompt, max_new_tokens=new))
        while names:
            if (result := manager.get_result(timeout=1)) is not None:
                names.discard(result.request_id)

    def measured(self, manager: Any, number: int, run: Run) -> Answers:
        """Answer prompts as one of the replicas of a run. The first replica collects answers, and writes the row."""
        shared = SharedPrompts(self.store, f"run {number}", run.prompts, run.replicas)

        def take() -> list[int] | None:
            return None if (index := shared.take()) is None else self.prompts[index]

        start = shared.wait_for_all()
        results = answer(manager, take, self.arguments.new_tokens)
        mine = {
            "answers": {i: r.generated_tokens for i, r in zip(shared.taken, results, strict=True)},
            "waits": [result.timestamps[0] - start for result in results],
            "seconds": max((result.timestamps[-1] for result in results), default=start) - start,
            "room": manager.batch_processor.cache.max_request_tokens,
        }
        self.store.set(f"run {number} of {self.replica}", json.dumps(mine))
        if self.replica:
            return {}
        every = [json.loads(self.store.get(f"run {number} of {i}")) for i in range(run.replicas)]
        answers = {int(i): tokens for each in every for i, tokens in each["answers"].items()}
        if sum(len(each["answers"]) for each in every) != run.prompts or len(answers) != run.prompts:
            raise RuntimeError(f"{run} answered {len(answers)} prompts.")
        waits, seconds = [wait for each in every for wait in each["waits"]], max(each["seconds"] for each in every)
        row = run._asdict() | {
            "tokens_per_second": sum(map(len, answers.values())) / seconds,
            "seconds": seconds,
            "first_token_s_p50": percentile(waits, 0.5),
            "first_token_s_p99": percentile(waits, 0.99),
            "prompts_by_replica": [len(each["answers"]) for each in every],
            "room": sum(each["room"] for each in every),
            "first_answer_s": max(float(self.store.get(f"first {i}")) for i in range(run.replicas)),
        }
        save(self.arguments.output, row)
        if run.load == "one":
            self.reference.write_text(json.dumps(answers))
        return answers

    def compare(self, runs: list[Run], found: list[Answers]) -> None:
        """Compare the answers of all runs with those of one process, by all processes of the first replica."""
        if self.leads:
            self.store.set("found", json.dumps(found))
        found = [{int(i): tokens for i, tokens in each.items()} for each in json.loads(self.store.get("found"))]
        if not self.reference.exists():
            return
        expected = {int(i): tokens for i, tokens in json.loads(self.reference.read_text()).items()}
        self.model.set_attn_implementation("turboquant")
        for run, answers in zip(runs, found, strict=True):
            if run.load != "one":
                agreement = compared(self.model, self.batching.balance, self.prompts, answers, expected)
                if self.leads:
                    save(self.arguments.output, run._asdict() | {"agreement": agreement})


def save(path: Path, row: dict[str, Any]) -> None:
    """Print a row, and write it to the record, or what it adds to a row of the same run."""
    print(row, flush=True)
    record = json.loads(path.read_text(encoding="utf-8"))
    for each in record["rows"]:
        if all(each[name] == row[name] for name in Run._fields):
            each |= row
            break
    else:
        record["rows"].append(row)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=4, help="processes; on a CPU, too")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4], help="GPUs of a replica, a launch each")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--requests", type=int, default=192, help="prompts that one GPU answers")
    parser.add_argument("--lengths", type=int, nargs=2, default=[1200, 2900], help="least and most tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--seconds", type=float, default=1e6, help="time after which what runs is ended")
    parser.add_argument("--output", type=Path, default=RESULTS / f"replicas-{slug(device())}.json")
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        return Process(arguments).run()
    if ON_GPU and torch.cuda.device_count() < arguments.gpus:
        sys.exit(f"This needs {arguments.gpus} GPUs, and torch finds {torch.cuda.device_count()}.")
    shape = "tiny" if arguments.tiny else "8B shape"
    record = provenance(device(), f"random Llama, {shape}, {arguments.layers} layers")
    record["device"] = f"{arguments.gpus} × {record['device']}"
    record |= {"gpus": arguments.gpus, "requests": arguments.requests, "lengths": arguments.lengths}
    record |= {"new_tokens": arguments.new_tokens, "preset": PRESET, "rows": []}
    arguments.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    failed, end = [], time.perf_counter() + arguments.seconds
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(arguments.gpus), "-m", "examples.measure.speed.bench_replicas", *sys.argv[1:]]
        for tp in arguments.tp:
            launch = [*command, "--scratch", scratch, "--output", str(arguments.output), "--tp", str(tp)]
            with subprocess.Popen(launch, env=ENVIRONMENT | dict(os.environ)) as torchrun:
                try:
                    code = torchrun.wait(max(0.0, end - time.perf_counter()))
                except subprocess.TimeoutExpired:
                    torchrun.terminate()  # it ends the processes that it has started
                    code = torchrun.wait()
            if code:
                failed.append(tp)
            print(f"replicas of {tp}: done, with {end - time.perf_counter():.0f} s left", flush=True)
    if failed:
        sys.exit(f"Not all was measured with {failed} GPUs a replica: a process has died, or time ran out.")


if __name__ == "__main__":
    main()
