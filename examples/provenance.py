"""Common parts of the examples: bytes of a cache, origin of a result, and the shape of an 8B model."""

from __future__ import annotations

import datetime
import platform
import re
import shlex
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.cache_utils import Cache

import tq_hf
from tq_hf import TurboQuantCache

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "examples" / "results"
SHIPPED_MODEL = str(ROOT / "examples" / "needle")
BASELINE = "DynamicCache"
LLAMA_8B: dict[str, Any] = dict(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=262144,
    rope_theta=500000.0,
    eos_token_id=None,
    pad_token_id=0,
)
"""Shape of Llama 3.1 8B, for `LlamaConfig`."""


def bytes_held(cache: Cache) -> int:
    """Bytes of all tensors of a cache, counted by whole storages."""
    if isinstance(cache, TurboQuantCache):
        return cache.memory_footprint().total
    tensors = [t for layer in cache.layers for t in vars(layer).values() if isinstance(t, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def device_name(device: torch.device) -> str:
    """Name of the GPU, or of the processor with the number of torch threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = re.findall(r"^model name\s*: (.+)$", cpuinfo.read_text(), flags=re.MULTILINE)
        name = models[0] if models else name
    return f"{name}, {torch.get_num_threads()} threads"


def slug(device: torch.device) -> str:
    """Device in a file name: "cpu", or e.g. "nvidia-h200"."""
    if device.type != "cuda":
        return device.type
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def provenance(device: torch.device, model: str) -> dict[str, Any]:
    """Command, date, device, versions and model (or other subject) of this run."""
    script = Path(sys.argv[0]).resolve()
    place = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    is_module = "measure" in place.parts or place.stem == "lm_eval_turboquant"  # others are scripts that one copies
    shown = ["-m", ".".join(place.with_suffix("").parts)] if is_module else [str(place)]
    versions = {module.__name__: module.__version__ for module in (tq_hf, torch, transformers)}
    if find_spec("triton") is not None:
        versions["triton"] = import_module("triton").__version__
    return {
        "command": shlex.join(["python", *shown, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": device_name(device),
        "versions": versions | {"python": platform.python_version()},
        "model": "examples/needle" if model == SHIPPED_MODEL else model,
    }
