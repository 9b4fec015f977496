"""Seconds until an engine's first answer, and how long requests wait while it compiles and captures behind answers.

    python -m examples.measure.speed.bench_start [--layers 16] [--seconds 60]

starts a process with empty caches of compiled kernels, and another that finds what the first one compiled. Each serves
an 8B-shaped random Llama as `tq-hf serve` does: one request that is there before the engine is, then four at a time,
until nothing is left to compile or to capture, or for a number of seconds.
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
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from examples.measure.speed.bench_serve import Request, loaded, random_prompt, serve
from examples.provenance import RESULTS, provenance, slug
from tq_hf import TurboQuantBatching

PRESET = "4bit_nc"
ANSWER = 32
"""Tokens of an answer."""
PROMPTS = (300, 900, 40, 2000)
"""Tokens of prompts. The first one is that of the first request."""


def measure(model: PreTrainedModel, seconds: float) -> dict[str, Any]:
    """Serve a model. Seconds count from its weights on."""
    chance, vocabulary, gpu = random.Random(0), model.config.get_text_config().vocab_size, model.device.type == "cuda"
    prompts = [random_prompt(chance, number, vocabulary) for number in PROMPTS]
    start = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - start

    batching = TurboQuantBatching(model, PRESET)
    row: dict[str, Any] = {"balance_s": now() if batching.balance is not None else None}
    options = ContinuousBatchingConfig(
        default_compile_level=int(gpu),
        scheduler_type="shortest_first",
        allow_block_sharing=False,
        **({} if gpu else {"num_blocks": 300}),
    )
    manager: Any = batching.init_continuous_batching(
        GenerationConfig(max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1), options
    )
    manager.warmup(behind=True)
    row["pool_s"] = now()
    manager.add_request(prompts[0], max_new_tokens=ANSWER, record_timestamps=True)
    manager.start()
    first = manager.get_result(timeout=300)
    if first is None or first.error is not None:
        raise RuntimeError(f"The first request failed: {first and first.error}")
    row |= {"first_answer_s": now(), "first_token_s": first.timestamps[0] - start}
    requests = [Request(prompt, ANSWER) for prompt in prompts]
    row["next_token_s"] = max(result.timestamps[0] - arrived for arrived, result in serve(manager, requests).results)
    outcomes = []
    while manager.to_be_done and now() < seconds:
        time.sleep(chance.uniform(0.05, 0.6))
        outcomes.append(serve(manager, requests))
    row |= {"seconds": now(), "left": manager.to_be_done, "rounds": len(outcomes)}
    every = [each for outcome in outcomes for each in outcome.results]
    row["worst_first_token_s"] = max((result.timestamps[0] - arrived for arrived, result in every), default=None)
    pauses = (b - a for _, each in every for a, b in zip(each.timestamps, each.timestamps[1:], strict=False))
    row["longest_pause_s"] = max(pauses, default=None)
    manager.stop(block=True, hard_stop=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32, help="layers of the model")
    parser.add_argument("--seconds", type=float, default=60.0, help="the most that requests are sent for")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)  # a child's result
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if given.one is not None:
        model, name = loaded(None, given.layers, device)
        with torch.no_grad():
            given.one.write_text(json.dumps({"model": name, **measure(model, given.seconds)}), encoding="utf-8")
        os._exit(0)  # a compiler's threads may still work
    record = provenance(device, "")
    record["rows"] = []
    path = given.output or RESULTS / f"start-{slug(device)}.json"
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        command = [sys.executable, "-m", "examples.measure.speed.bench_start", "--one", f"{folder}/row.json"]
        command += ["--layers", str(given.layers), "--seconds", str(given.seconds)]
        for kind in ("empty", "filled"):
            subprocess.run(command, env=os.environ | caches, check=True)
            row = json.loads(Path(folder, "row.json").read_text(encoding="utf-8"))
            record["model"] = row.pop("model")
            record["rows"].append({"caches": kind, **row})
            print(record["rows"][-1], flush=True)
            path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
