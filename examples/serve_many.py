"""Answer many prompts on several GPUs: replicas of a model, each on `--tp` GPUs.

    torchrun --nproc-per-node 8 examples/serve_many.py MODEL --prompts prompts.jsonl --tp 2   # four replicas

Prompts are JSON lines with a `prompt`. The same lines in their order, each with an `answer`, go to `answers.jsonl` or
to the file named by `--answers`; it must not exist yet. A replica is a group of processes in transformers' tensor
parallelism: each GPU has pages of its own KV heads. Replicas share the prompts: each takes the next one when it has
room, so a slow replica takes fewer. If a process dies, torchrun ends the others. A row of a table is printed: tokens a
second until the last answer, seconds to the first token of a prompt (all are there at once), and tokens that the pages
of all replicas have room for.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig
from transformers.distributed import DistributedConfig

from tq_hf import TurboQuantBatching

STORE_SECONDS = 60.0
"""Seconds in which a store must add numbers. A busy one takes milliseconds."""


def placed(store: dist.Store, rank: int, tp: int) -> dict[str, Any]:
    """Arguments of `from_pretrained` that load a model on this process's GPU, or one of `tp` shards."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if tp == 1:
        return {"device_map": device}
    # transformers shards over all processes of the group, so each replica's are a group.
    group = dict(rank=rank % tp, world_size=tp, store=dist.PrefixStore(f"replica {rank // tp}", store))
    dist.init_process_group("nccl" if on_gpu else "gloo", **group, **({"device_id": device} if on_gpu else {}))
    return {"distributed_config": DistributedConfig(tp_size=tp, tp_plan="auto")}


def next_result(manager: Any) -> Any:
    """The next result, or `None` if there is none yet.

    Raises:
        RuntimeError: A request failed, or the engine has stopped.
    """
    if (result := manager.get_result(timeout=0.01)) is not None:
        if result.error is not None:
            raise RuntimeError(result.error)
    elif not manager.is_running():
        raise RuntimeError(str(manager.background_thread_status.fatal_error or "The engine has stopped."))
    return result


def answer(manager: Any, take: Callable[[], list[int] | None], new: int) -> list[Any]:
    """Answer prompts by up to `new` tokens each.

    Args:
        manager: A running manager. In tensor parallelism, that of the first process; the others `follow`.
        take: Returns the next prompt, or `None` if there is no more. Called when fewer tokens of prompts wait than a
            step reads: what a replica has not begun to read, another one may read earlier.

    Returns:
        Results in the order of the prompts.
    """
    processor, names, waiting, results, more = manager.batch_processor, [], {}, {}, True
    while more or len(results) < len(names):
        active = processor.scheduler.active_requests
        waiting = {name: length for name, length in waiting.items() if name not in active and name not in results}
        while more and sum(waiting.values()) < processor.max_batch_tokens:
            if (prompt := take()) is None:
                more = False
            else:
                names.append(manager.add_request(prompt, max_new_tokens=new, record_timestamps=True))
                waiting[names[-1]] = len(prompt)
        if len(results) < len(names) and (result := next_result(manager)) is not None:
            results[result.request_id] = result
    return [results[name] for name in names]


def follow(manager: Any) -> None:
    """Compute with the first process of a replica until that stops its manager."""
    while manager.is_running():
        manager.get_result(timeout=0.5)
    if (error := manager.background_thread_status.fatal_error) is not None:
        raise RuntimeError(str(error))


class SharedPrompts:
    """Indices of prompts, each of which one replica takes. Methods raise `RuntimeError` if the store is broken.

    Args:
        store: Where replicas meet.
        name: Name of the prompts in the store.
        count: Number of prompts.
        replicas: Number of replicas.

    Attributes:
        taken: Indices that this replica has taken.
    """

    def __init__(self, store: dist.Store, name: str, count: int, replicas: int) -> None:
        self.store, self.name, self.count, self.replicas, self.taken = store, name, count, replicas, list[int]()

    def wait_for_all(self) -> float:
        """Wait until all replicas have come here. Returns the time."""
        if self._add("ready") == self.replicas:
            self.store.set(f"{self.name} go", "")
        self.store.wait([f"{self.name} go"])
        return time.perf_counter()

    def take(self) -> int | None:
        """Take the next index; `None` if there is no more."""
        index = self._add("taken") - 1
        if index >= self.count:
            return None
        self.taken.append(index)
        return index

    def _add(self, what: str) -> int:
        """Add 1 to a number of the store. torch waits for a store that has stopped without limit, so a thread does."""
        found = SimpleQueue[Any]()

        def add() -> None:
            try:
                found.put(self.store.add(f"{self.name} {what}", 1))
            except Exception as error:
                found.put(error)

        threading.Thread(target=add, daemon=True).start()
        try:
            number = found.get(timeout=STORE_SECONDS)
        except Empty:
            number = TimeoutError(f"it has not answered for {STORE_SECONDS:g} s")
        if isinstance(number, Exception):
            raise RuntimeError(
                f"The store where replicas meet is broken ({number}). See the output of the process that holds the "
                "store, and start all processes again."
            ) from number
        return number


def percentile(values: list[float], share: float) -> float:
    """The smallest value that `share` of all values do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a model of the hub")
    parser.add_argument("--prompts", type=Path, required=True, help='JSON lines, each with a "prompt"')
    parser.add_argument(
        "--answers",
        type=Path,
        default=Path("answers.jsonl"),
        help='a new file for the same lines, each with an "answer"',
    )
    parser.add_argument("--tp", type=int, default=1, help="GPUs of a replica")
    parser.add_argument("--preset", default="4bit_nc", help="what pages are packed to")
    parser.add_argument("--new-tokens", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--blocks", type=int, help="pages of 256 tokens of a replica; by default what fits")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "a process a GPU is started by torchrun: `torchrun --nproc-per-node 2 examples/serve_many.py ...`."
        )
    rank, world, tp = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), arguments.tp
    rows = [json.loads(line) for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    if tp < 1 or world % tp or not rows:
        parser.error(f"{world} processes are not replicas of --tp {tp}, or there is no prompt.")
    if arguments.answers.exists() or not arguments.answers.parent.is_dir():
        parser.error(f"{arguments.answers} exists already, or its folder does not. Give another file as `--answers`.")
    # Before the model: it sets NCCL_GRAPH_MIXING_SUPPORT, which NCCL reads once.
    options = ContinuousBatchingConfig(num_blocks=arguments.blocks, cpu_group_timeout=60)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(days=7))
    dtype = "auto" if torch.cuda.is_available() else torch.float32
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, **placed(store, rank, tp))
    batching, tokenizer = TurboQuantBatching(model, arguments.preset), AutoTokenizer.from_pretrained(arguments.model)
    replica, replicas = rank // tp, world // tp
    shared = SharedPrompts(store, "prompts", len(rows), replicas)

    def take() -> list[int] | None:
        index = shared.take()
        return None if index is None else tokenizer(rows[index]["prompt"]).input_ids

    eos = batching.generation_config.eos_token_id
    greedy = GenerationConfig(max_new_tokens=arguments.new_tokens, do_sample=False, eos_token_id=eos)
    with batching.continuous_batching_context_manager(greedy, continuous_batching_config=options) as manager:
        if rank % tp:
            follow(manager)
        else:
            start = shared.wait_for_all()
            results = answer(manager, take, arguments.new_tokens)
            room = manager.batch_processor.cache.max_request_tokens
    if rank % tp == 0:
        for i, result in zip(shared.taken, results, strict=True):
            store.set(f"answer {i}", tokenizer.decode(result.generated_tokens, skip_special_tokens=True))
        waits = [result.timestamps[0] - start for result in results]
        seconds = max((result.timestamps[-1] for result in results), default=start) - start
        tokens = sum(len(result.generated_tokens) for result in results)
        store.set(f"summary {replica}", json.dumps([waits, seconds, tokens, room]))
    if rank == 0:  # waits for the others
        rows = [row | {"answer": store.get(f"answer {i}").decode()} for i, row in enumerate(rows)]
        arguments.answers.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"The answers are in {arguments.answers}.")
        summaries = [json.loads(store.get(f"summary {i}")) for i in range(replicas)]
        waits, seconds, tokens, room = zip(*summaries, strict=True)
        firsts = [wait for each in waits for wait in each]
        p50, p99 = (f"{percentile(firsts, share):.3f} s" for share in (0.5, 0.99))
        by_replica = " + ".join(str(len(each)) for each in waits)
        print("| replicas | GPUs each | prompts | tokens/s | first token, p50 | p99 | room for tokens |")
        print("| ---: " * 7 + "|")
        print(
            f"| {replicas} | {tp} | {by_replica} | {sum(tokens) / max(seconds):,.0f} | {p50} | {p99} | {sum(room):,} |"
        )
    if tp > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
