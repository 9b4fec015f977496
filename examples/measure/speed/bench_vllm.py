"""vLLM and tq_hf on the same requests of an 8B-shaped model, in one run on one card.

    pip install vllm    # its torch has to be the one that is installed: 0.26.0 fits 2.11
    python -m examples.measure.speed.bench_vllm
    python -m examples.measure.speed.bench_vllm --engines "vllm fp8" "4bit_nc" --shapes 32x2048

Shapes and the trace are those of `bench_serve`: the time of a step with all requests in flight, then requests of
log-uniform lengths. vLLM's engine runs in the process that sends the requests, with random weights; the tokens of a
step get the moment at which the step returned. Each engine has a process of its own, and so the whole card. Rows are
added to those of an earlier run in the same file, and replace rows of the same engine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig

from examples.measure.speed import bench_serve
from examples.measure.speed.bench_serve import Outcome, Request
from examples.provenance import LLAMA_8B, RESULTS, provenance, slug

DTYPES = ("auto", "fp8", "turboquant_4bit_nc", "turboquant_3bit_nc")
ENGINES = (*(f"vllm {dtype}" for dtype in DTYPES), "4bit_nc", "3bit_nc")
SHAPES = ("1x2048", "1x32768", "8x32768", "32x2048", "64x16384")


def serve(engine: Any, requests: list[Request], parameters: Any) -> Outcome:
    """Send all requests at once to an `LLMEngine`, and step until they are answered.

    Args:
        engine: vLLM's engine.
        requests: Requests. Their moments of arrival are not used.
        parameters: Function from a number of new tokens to `SamplingParams`.
    """
    start = time.perf_counter()
    results = [SimpleNamespace(timestamps=[], created_time=start) for _ in requests]
    for index, request in enumerate(requests):
        engine.add_request(str(index), {"prompt_token_ids": request.prompt}, parameters(request.new))
    tokens = 0
    while engine.has_unfinished_requests():
        outputs, now = engine.step(), time.perf_counter()
        for output in outputs:
            stamps, number = results[int(output.request_id)].timestamps, len(output.outputs[0].token_ids)
            tokens += number - len(stamps)
            stamps += [now] * (number - len(stamps))
    return Outcome(now - start, tokens, [(start, result) for result in results], 0)


def vllm_rows(dtype: str, layers: int, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """Rows of vLLM with a dtype of its cache, and the seconds of its start."""
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": layers}, architectures=["LlamaForCausalLM"])
        config.dtype = torch.bfloat16
        config.save_pretrained(folder)
        longest = max(int(shape.split("x")[1]) for shape in arguments.shapes)
        llm = LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            kv_cache_dtype=dtype,
            max_model_len=longest + 1024,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.9,
        )
    engine, seconds = llm.llm_engine, time.perf_counter() - start
    cache = engine.vllm_config.cache_config
    room = cache.num_gpu_blocks * cache.block_size

    def parameters(new: int) -> Any:
        return SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)

    serve(engine, [Request(list(range(3, 300)), 8)] * 2, parameters)
    rows: list[dict[str, Any]] = []
    for shape in arguments.shapes:
        batch, context = map(int, shape.split("x"))
        row = {"kind": "decode", "batch": batch, "context": context, "cache_tokens": room}
        requests = bench_serve.decode_requests(batch, context, config.vocab_size, arguments)
        if room < batch * (context + requests[0].new):
            row["error"] = f"room for {room:,} tokens"
        else:
            results = [result for _, result in serve(engine, requests, parameters).results]
            row |= bench_serve.step_of(results, batch * context)
        rows.append(row)
        print(row, flush=True)
    outcome = serve(engine, bench_serve.trace(arguments, config.vocab_size, None), parameters)
    row = {
        "kind": "trace",
        "arrivals": "all at once",
        "cache_tokens": room,
        "tokens_per_second": outcome.tokens / outcome.seconds,
    }
    rows.append(row | bench_serve.latencies(outcome))
    print(rows[-1], flush=True)
    return rows, seconds


def own_rows(preset: str, layers: int, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """Rows of batches on packed pages, compiled, and the seconds of the longest start."""
    start = time.perf_counter()
    model, _ = bench_serve.loaded(None, layers, torch.device("cuda"))
    model.generation_config.eos_token_id = None
    seconds, rows = time.perf_counter() - start, []
    arguments.presets, arguments.compile_levels = [preset], [1]
    for begin, measure in bench_serve.cells(model, arguments):
        if begin["engine"] == f"{preset}, compile level 1":
            rows.append(begin | measure())
            print(rows[-1], flush=True)
            bench_serve.release()
    return rows, seconds + max(row.get("warm_up_s", 0.0) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES, help="engines to measure")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="requests x tokens of decode cells")
    parser.add_argument("--layers", type=int, default=32, help="layers of the model")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)  # a child's result
    given = parser.parse_args()
    defaults = argparse.ArgumentParser()
    bench_serve.add_arguments(defaults)
    arguments = defaults.parse_args([])
    arguments.shapes = given.shapes
    if given.one is not None:
        kind, _, dtype = given.engines[0].rpartition(" ")
        with torch.no_grad():
            rows, seconds = (vllm_rows if kind else own_rows)(dtype, given.layers, arguments)
        given.one.write_text(json.dumps({"rows": rows, "start_s": seconds}), encoding="utf-8")
        return
    device = torch.device("cuda")
    path = given.output or RESULTS / f"vllm-{slug(device)}.json"
    record = provenance(device, f"random Llama, 8B shape, {given.layers} layers")
    record["versions"]["vllm"] = importlib.metadata.version("vllm")
    record["trace"] = {name: getattr(arguments, name) for name in ("requests", "prompts", "answers")}
    earlier = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    record["rows"] = [row for row in earlier if row["engine"] not in given.engines]
    for engine in given.engines:
        command = [sys.executable, "-m", "examples.measure.speed.bench_vllm", "--engines", engine]
        command += ["--layers", str(given.layers), "--shapes", *given.shapes]
        with tempfile.TemporaryDirectory() as folder:
            one = Path(folder) / "rows.json"
            # The engine in this process: its steps are timed where they return.
            environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            ended = subprocess.run([*command, "--one", str(one)], env=environment, check=False).returncode
            if ended or not one.exists():
                print(f"{engine}: ended with status {ended} before its rows were measured")
                continue
            found = json.loads(one.read_text(encoding="utf-8"))
        record["rows"] += [{**row, "engine": engine, "start_s": found["start_s"]} for row in found["rows"]]
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
