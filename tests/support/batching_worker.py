"""One of the processes of tests/batching/test_ranks.py: runs under torchrun, writes what it found.

python -m torch.distributed.run --standalone --nproc-per-node 2 tests/batching_worker.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from tests.support.batching_cases import Session, greedy, prompts

LENGTHS = [5, 130, 300]
NEW = 10


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    config = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, distributed_config=config
    ).eval()
    inputs = prompts(LENGTHS)
    with Session(model) as session:
        tokens = session.run(inputs, greedy(NEW))
        # Chunks of the same prompts, some of whose blocks are held.
        again = session.run(inputs, greedy(NEW))
        cache = session.cache
        heads = [pages.kv_heads for pages in cache.allocator.pages.values()]
        if cache.windows is not None:
            heads += [windows.rows.shape[-2] for windows in cache.windows.windows.values()]
        found = {"tokens": tokens, "again": again, "heads": heads, "pages_in_use": session.pages_in_use()}
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
