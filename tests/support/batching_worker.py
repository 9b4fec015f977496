"""One of the processes of tests/batching/test_ranks.py: runs under torchrun, writes what it found.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.support.batching_worker FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from tests.support.batching_cases import Session, answers, greedy, options, prompts
from tq_hf import TurboQuantBatching, continuous_batching
from tq_hf.batching.cache import TurboQuantMemory
from tq_hf.ops.sliding_pages import WINDOW_BYTES

LENGTHS = [5, 130, 300]
NEW = 10


def pool(model: PreTrainedModel, free: int, **changes: Any) -> dict[str, Any]:
    """Sectors that a rank with so many bytes free would have had alone, those it has, and an answer from them."""
    alone: list[int] = []
    real = TurboQuantMemory.infer_max_batch_tokens_and_num_sectors

    def noted(memory: TurboQuantMemory) -> tuple[int, int]:
        memory.available_memory = free
        sizes = real(memory)
        alone.append(sizes[1])
        return sizes

    batching, (prompt,) = TurboQuantBatching(model), prompts([300])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TurboQuantMemory, "infer_max_batch_tokens_and_num_sectors", noted)
        # Without hints: the pool of `generate_batch` is no larger than its requests can fill.
        cm = batching.continuous_batching_context_manager(greedy(NEW), continuous_batching_config=options(**changes))
        with cm as manager:
            manager.add_requests([prompt])
            while (result := manager.get_result(timeout=1)) is None:
                pass
            return {"alone": alone, "has": manager.batch_processor.cache.num_sectors, "tokens": result.generated_tokens}


def cancelled(session: Session, prompt: list[int], mark: Path) -> dict[str, Any]:
    """Pages in use and requests running on each rank after rank 0 has cancelled one, long before its end."""
    long = greedy(1500)
    with session.batching.continuous_batching_context_manager(
        long, continuous_batching_config=session.options, persistent_manager=True
    ) as manager:
        scheduler = manager.batch_processor.scheduler
        name = manager.add_request(prompt, max_new_tokens=1500)
        if name is not None:  # of rank 0
            while len(getattr(scheduler.active_requests.get(name), "generated_tokens", ())) < 20:
                time.sleep(0.001)
            manager.cancel_request(name)
            mark.touch()
        while not mark.exists() or scheduler.active_requests:
            time.sleep(0.001)
        steps = manager.current_batch
    return {"pages_in_use": session.pages_in_use(), "running": len(scheduler.active_requests), "early": steps < 1000}


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
        if cache.second is not None:
            heads += [windows.rows.shape[-2] for windows in cache.second.pages.values()]
        found = {"tokens": tokens, "again": again, "heads": heads, "pages_in_use": session.pages_in_use()}
        found["cancelled"] = cancelled(session, inputs[-1], folder / "cancelled")
    with continuous_batching(model):  # as a trainer asks for rollouts
        found["rollouts"] = answers(model.generate_batch(inputs, greedy(NEW), options()))
    rank = dist.get_rank()
    found["asked for"] = pool(model, 1 << 30, num_blocks=200 - 80 * rank)
    found["free"] = pool(model, WINDOW_BYTES + ((64 + 32 * rank) << 20), num_blocks=None, max_memory_percent=0.9)
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
