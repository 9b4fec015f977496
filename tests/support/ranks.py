"""Processes that meet over gloo, on CPUs, as torchrun would start them."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def started(store: dist.TCPStore, *arguments: str, ranks: int = 2, **options: object) -> list[subprocess.Popen[str]]:
    """Start a Python process a rank. Without GPUs, whatever the machine has."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    shared = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "WORLD_SIZE": str(ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        for rank in range(ranks)
    ]


def run_ranks(*arguments: str, ranks: int = 2, **options: object) -> list[str]:
    """Run a Python process a rank to its end. Returns what each prints."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = started(store, *arguments, ranks=ranks, **options)

    def end(process: subprocess.Popen[str]) -> tuple[str, str]:
        """Wait for one, and end the others if it fails."""
        try:
            return process.communicate(timeout=600)
        finally:
            for each in processes if process.returncode != 0 else ():
                each.kill()

    with ThreadPoolExecutor(ranks) as threads:
        outputs = list(threads.map(end, processes))
    assert [process.returncode for process in processes] == [0] * ranks, "".join(e[-8000:] for _, e in outputs)
    return [output for output, _ in outputs]
