"""Answer many prompts on several GPUs: replicas of a model, each on `--tp` GPUs.

    torchrun --nproc-per-node 8 examples/serve_many.py MODEL --prompts prompts.jsonl --tp 2   # four replicas

Prompts are JSON lines with a `prompt`. The same lines in their order, each with an `answer`, go to `answers.jsonl` or
to the file named by `--answers`; it must not exist yet. A replica is a group of processes in transformers' tensor
parallelism: each GPU has pages of its own KV heads. If a process dies, torchrun ends the others. A row of a table is
printed: tokens a second until the slowest replica is done, seconds to the first token of a prompt (all are there at
once), and tokens that the pages of all replicas have room for.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig
from transformers.distributed import DistributedConfig

from tq_hf import TurboQuantBatching


def load(name: str, store: dist.Store, rank: int, tp: int) -> Any:
    """Load the model on this process's GPU, or one of `tp` shards."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    placement: dict[str, Any] = {"device_map": device}
    if tp > 1:
        # transformers shards over all processes of the group, so each replica's are a group.
        group = dict(rank=rank % tp, world_size=tp, store=dist.PrefixStore(f"replica {rank // tp}", store))
        dist.init_process_group("nccl" if on_gpu else "gloo", **group, **({"device_id": device} if on_gpu else {}))
        placement = {"distributed_config": DistributedConfig(tp_size=tp, tp_plan="auto")}
    return AutoModelForCausalLM.from_pretrained(name, dtype="auto" if on_gpu else torch.float32, **placement)


def answer(batching: TurboQuantBatching, prompts: list[list[int]], new: int, options: Any) -> tuple[list[Any], int]:
    """Answer prompts. Return results in the order of the prompts, and the capacity of the page pool in tokens."""
    eos = batching.generation_config.eos_token_id
    generation = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=eos)
    with batching.continuous_batching_context_manager(generation, continuous_batching_config=options) as manager:
        names, results = manager.add_requests(prompts, max_new_tokens=new, record_timestamps=True), {}
        while len(results) < len(names):
            if (result := manager.get_result(timeout=1)) is not None:
                if result.error is not None:
                    raise RuntimeError(result.error)
                results[result.request_id] = result
            elif not manager.is_running():
                raise RuntimeError(str(manager.background_thread_status.fatal_error))
        return [results[name] for name in names], manager.batch_processor.cache.max_request_tokens


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
    if tp < 1 or world % tp or len(rows) < world // tp:
        parser.error(f"{world} processes are not replicas of --tp {tp}, or more than the {len(rows)} prompts.")
    if arguments.answers.exists() or not arguments.answers.parent.is_dir():
        parser.error(f"{arguments.answers} exists already, or its folder does not. Give another file as `--answers`.")
    # Before the model: it sets NCCL_GRAPH_MIXING_SUPPORT, which NCCL reads once.
    options = ContinuousBatchingConfig(num_blocks=arguments.blocks, cpu_group_timeout=60)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(days=7))
    batching = TurboQuantBatching(load(arguments.model, store, rank, tp), arguments.preset)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    replica, replicas = rank // tp, world // tp
    mine = range(replica, len(rows), replicas)
    prompts = [tokenizer(rows[i]["prompt"]).input_ids for i in mine]
    results, room = answer(batching, prompts, arguments.new_tokens, options)
    if rank % tp == 0:
        for i, result in zip(mine, results, strict=True):
            store.set(f"answer {i}", tokenizer.decode(result.generated_tokens, skip_special_tokens=True))
        start = min(result.created_time for result in results)
        waits = [result.timestamps[0] - result.created_time for result in results]
        seconds = max(result.timestamps[-1] for result in results) - start
        tokens = sum(len(result.generated_tokens) for result in results)
        store.set(f"summary {replica}", json.dumps([waits, seconds, tokens, room]))
    if rank == 0:  # waits for the others
        rows = [row | {"answer": store.get(f"answer {i}").decode()} for i, row in enumerate(rows)]
        arguments.answers.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"The answers are in {arguments.answers}.")
        summaries = [json.loads(store.get(f"summary {i}")) for i in range(replicas)]
        waits, seconds, tokens, room = zip(*summaries, strict=True)
        firsts = sorted(wait for each in waits for wait in each)
        p50, p99 = (f"{firsts[math.ceil(share * len(firsts)) - 1]:.3f} s" for share in (0.5, 0.99))
        print("| replicas | GPUs each | prompts | tokens/s | first token, p50 | p99 | room for tokens |")
        print("| ---: " * 7 + "|")
        print(
            f"| {replicas} | {tp} | {len(rows)} | {sum(tokens) / max(seconds):,.0f} | {p50} | {p99} | {sum(room):,} |"
        )
    if tp > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
