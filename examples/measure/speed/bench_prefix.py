"""Measure attention of many queries over compressed history, and prefills that use it.

`prefix`: new tokens on packed history of one layer, fused and buffered, against the same causal attention in bf16
(flash through `causal_lower_right`; cuDNN over all tokens, which is a little more work, named so). A sweep over S and T
says where to switch. `prefill`: the time to the first token of a fresh prompt, and a chunked prefill of a million
tokens through one layer, with the memory beyond the packed store at every checkpoint.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from tq_kernels.common.device import target
from tq_kernels.prefix.launch import prefix_config
from tq_kernels.types import AttentionOptions
from transformers import DynamicCache, PreTrainedModel
from triton.testing import do_bench

from examples.measure.speed.bench_generate import random_llama
from examples.provenance import LLAMA_8B, provenance
from tq_hf import TurboQuantCache, TurboQuantConfig
from tq_hf.compat import as_input
from tq_hf.ops import dispatch
from tq_hf.ops.triton import blocks as triton_blocks
from tq_hf.ops.workspace import release_workspaces
from tq_hf.stores.store import LayerStore
from tq_hf.tensors.layer import View

HEADS = (32, 8, 128)
CELLS = ((2048, 30 * 1024), (128, 128 * 1024))
SWEEP = [(s, t) for t in (4096, 32768, 131072) for s in (17, 32, 64, 128, 512, 2048)]
PRESETS = ("4bit_nc", "k8v4", "3bit_nc")


def milliseconds(function: Callable[[], Any]) -> float:
    """Median device time of a call."""
    return do_bench(function, warmup=4, rep=16, return_mode="median")


def filled(preset: str, new: int, history: int, device: torch.device) -> tuple[View, torch.Tensor]:
    """A view of `history` tokens in the cache and `new` more, and their queries; bf16."""
    query_heads, heads, dim = HEADS
    store = LayerStore.allocate(TurboQuantConfig.from_preset(preset), *_states(1, heads, 1, dim, device))
    for start in range(0, history, 32768):
        store.append(*_states(1, heads, min(32768, history - start), dim, device))
    view = store.append(*_states(1, heads, new, dim, device))
    # As projections make them: heads behind tokens.
    query = torch.randn(1, new, query_heads, dim, dtype=torch.bfloat16, device=device).transpose(1, 2)
    return view, query


def _states(batch: int, heads: int, tokens: int, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (torch.randn(batch, heads, tokens, dim, dtype=torch.bfloat16, device=device) for _ in range(2))
    return keys, values


def dense_attention(new: int, length: int, device: torch.device) -> dict[str, Callable[[], torch.Tensor]]:
    """bf16 attention over dense keys and values of `length` tokens, by name."""
    query_heads, heads, dim = HEADS
    keys, values = _states(1, heads, length, dim, device)
    query = torch.randn(1, query_heads, new, dim, dtype=torch.bfloat16, device=device)
    causal = causal_lower_right(new, length)

    def cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return {
        "flash": lambda: scaled_dot_product_attention(query, keys, values, attn_mask=causal, enable_gqa=True),
        "cudnn, not causal": cudnn,
    }


def ways(view: View, query: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """The ways this library has for a call."""
    scaling = HEADS[2] ** -0.5
    found = {
        "fused": lambda: triton_blocks.attend_many(query, view, None, AttentionOptions(scaling)),
        "buffered": lambda: dispatch.buffered_attend(query, view, None, AttentionOptions(scaling)),
    }
    if view.new is None and query.shape[2] <= 64:
        found["decode"] = lambda: triton_blocks.attend(query, view, None, AttentionOptions(scaling))
    return found


def extra_bytes(function: Callable[[], torch.Tensor]) -> int:
    """Peak allocation of a first call beyond what was there and its output."""
    function()  # what is made once per process is not this call's
    release_workspaces()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()


def relative_error(view: View, query: torch.Tensor, out: torch.Tensor) -> float:
    """Relative RMS of the first two heads against fp64 attention over the same dequantized history."""
    keys, values = (states[:, :1].double() for states in dispatch.dense(view))
    new, length = query.shape[2], keys.shape[2]
    logits = query[:, :2].double() @ keys.transpose(-1, -2) * HEADS[2] ** -0.5
    logits.masked_fill_(
        torch.ones(new, length, dtype=torch.bool, device=query.device).triu(length - new + 1), -torch.inf
    )
    expected = (logits.softmax(-1) @ values).transpose(1, 2)
    return ((out[:, :, :2].double() - expected).norm() / expected.norm()).item()


def run() -> dict[str, Any]:
    """The two cells by preset, and the sweep; prints lines and returns the record."""
    device = torch.device("cuda", 0)
    record: dict[str, Any] = provenance(device, f"attention of one layer, heads {HEADS}, bf16")
    start = time.perf_counter()
    table = prefix_config(HEADS[2], HEADS[2], target(device))
    record["config"] = str(table)
    record["cells"], record["sweep"] = [], []
    for new, history in CELLS:
        baselines = {name: milliseconds(f) for name, f in dense_attention(new, history + new, device).items()}
        flops = 4 * HEADS[0] * HEADS[2] * new * (history + new / 2)
        for preset in PRESETS:
            view, query = filled(preset, new, history, device)
            for name, function in ways(view, query).items():
                if name == "decode":
                    continue
                time_ms = milliseconds(function)
                cell = {
                    "new": new, "history": history, "preset": preset, "way": name, "ms": time_ms,
                    "baseline_ms": baselines, "speed_of_flash": baselines["flash"] / time_ms,
                    "tflops": flops / time_ms / 1e9, "extra_mib": extra_bytes(function) / 2**20,
                    "relative_rms": relative_error(view, query, function()),
                }  # fmt: skip
                record["cells"].append(cell)
                print(
                    f"{new} on {history} {preset} {name}: {time_ms:.3f} ms, {cell['tflops']:.0f} TFLOPS, "
                    f"{cell['speed_of_flash']:.2f} x flash ({baselines['flash']:.3f} ms; cudnn not causal "
                    f"{baselines['cudnn, not causal']:.3f}), {cell['extra_mib']:.0f} MiB, "
                    f"error {cell['relative_rms']:.1e}",
                    flush=True,
                )
    for new, history in SWEEP:
        view, query = filled("4bit_nc", new, history, device)
        times = {name: milliseconds(f) for name, f in ways(view, query).items()}
        times["flash"] = milliseconds(dense_attention(new, history + new, device)["flash"])
        record["sweep"].append({"new": new, "history": history, "ms": times})
        print(f"{new} on {history}: " + ", ".join(f"{name} {t:.3f}" for name, t in times.items()), flush=True)
    record["seconds"] = time.perf_counter() - start
    return record


def first_token_seconds(model: PreTrainedModel, tokens: int) -> dict[str, float]:
    """Median time of the forward of a fresh prompt by cache, and its share in DynamicCache's."""
    ids = torch.randint(3, LLAMA_8B["vocab_size"], (1, tokens), device=model.device)
    seconds: dict[str, list[float]] = {"DynamicCache": [], "4bit_nc": []}
    with torch.inference_mode():
        for repeat in range(6):
            # In turns: a GPU's clock drifts.
            for name, times in seconds.items():
                model.set_attn_implementation("turboquant" if name == "4bit_nc" else "sdpa")
                cache = TurboQuantCache(model.config) if name == "4bit_nc" else DynamicCache(config=model.config)
                torch.cuda.synchronize()
                start = time.perf_counter()
                model(ids, **as_input(cache), logits_to_keep=1).logits.argmax(-1).item()
                if repeat:
                    times.append(time.perf_counter() - start)
                del cache
    result = {name: statistics.median(times) for name, times in seconds.items()}
    return {"prompt": tokens, **result, "ratio": result["4bit_nc"] / result["DynamicCache"]}


def million(tokens: int, chunk: int, device: torch.device) -> list[dict[str, Any]]:
    """Prefill `tokens` in chunks through one layer; peak memory beyond weights and cache since the last checkpoint."""
    model = random_llama(device, 1)
    model.set_attn_implementation("turboquant")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    cache = TurboQuantCache(model.config)
    checkpoints = []
    with torch.inference_mode():
        start = time.perf_counter()
        for first in range(0, tokens, chunk):
            ids = torch.randint(3, LLAMA_8B["vocab_size"], (1, chunk), device=device)
            torch.cuda.reset_peak_memory_stats()
            model(ids, **as_input(cache), logits_to_keep=1)
            done = first + chunk
            if done % (tokens // 8) == 0:
                torch.cuda.synchronize()
                held = cache.memory_footprint().total
                peak = torch.cuda.max_memory_allocated() - weights - held
                checkpoints.append(
                    {
                        "tokens": done,
                        "seconds": time.perf_counter() - start,
                        "cache_bytes": held,
                        "peak_bytes_beyond": peak,
                    }  # fmt: skip
                )
                print(checkpoints[-1], flush=True)
    return checkpoints


def run_prefill(
    layers: int = 32, prompts: Sequence[int] = (128, 512, 2048, 8192, 32768), tokens: int = 1 << 20, chunk: int = 8192
) -> dict[str, Any]:
    """Time to the first token, and the long prefill; prints lines and returns the record."""
    device = torch.device("cuda", 0)
    record: dict[str, Any] = provenance(device, f"random Llama, 8B shape, {layers} layers and 1 layer")
    model = random_llama(device, layers)
    record["first_token"] = []
    for prompt in prompts:
        record["first_token"].append(first_token_seconds(model, prompt))
        print(record["first_token"][-1], flush=True)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    record["million"] = million(tokens, chunk, device)
    return record
