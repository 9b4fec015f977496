"""A model over several GPUs with one compressed cache: layers spread by `device_map`, or heads by tensor parallelism.

    python examples/multi_gpu.py --model Qwen/Qwen3-32B                                 # layers, in one process
    torchrun --nproc-per-node 2 examples/multi_gpu.py --model Qwen/Qwen3-32B            # heads, a process a GPU

Nothing is set for the cache: it follows the model. Prints the answer, and what the cache holds where. What each way
costs in time is measured by `measure/speed/bench_multi_gpu.py`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

from tq_hf import PRESETS, TurboQuantCache
from tq_hf.compat import as_input

SHIPPED_MODEL = str(Path(__file__).resolve().parent / "needle")


def load(name: str, parallel: bool) -> Any:
    """Load the model, with heads split over the processes of torchrun, or layers over the devices of one process."""
    placement: dict[str, Any] = {"device_map": "auto"}
    if parallel:
        placement = {"distributed_config": DistributedConfig(tp_plan="auto")}
    return AutoModelForCausalLM.from_pretrained(
        name, dtype="auto", attn_implementation="turboquant", **placement
    ).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SHIPPED_MODEL, help="a folder or a model of the hub")
    parser.add_argument("--preset", choices=PRESETS, default="4bit_nc")
    parser.add_argument("--prompt", default="\n<<pass key = 314159>>\n" + "# Of the sea.\n" * 60 + "\n<<pass key = ")
    parser.add_argument("--new-tokens", type=int, default=8)
    arguments = parser.parse_args()
    rank, parallel = int(os.environ.get("RANK", 0)), "RANK" in os.environ
    if parallel and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model, tokenizer = load(arguments.model, parallel), AutoTokenizer.from_pretrained(arguments.model)
    inputs = tokenizer(arguments.prompt, return_tensors="pt").to(model.device)
    cache = TurboQuantCache(model.config, arguments.preset)
    output = model.generate(**inputs, **as_input(cache), max_new_tokens=arguments.new_tokens, do_sample=False)
    held = ", ".join(f"{size / 2**20:.2f} MiB on {place}" for place, size in cache.memory_footprint().by_device.items())
    if rank == 0:
        print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))
    print(f"process {rank}: {held}", flush=True)
    if parallel:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
