"""Attention over packed latents (MLA) against attention over bf16 latents, and a decode step of a model that has them.

    python -m examples.measure.speed.bench_latents [--configs] [--layers 4]

Both attentions take queries that have absorbed the up-projection of keys, and give means of latents; the one over bf16
latents is the flash-decoding kernel in this file, with the best of its launches. A call is a CUDA graph, and caches
are cold. With `--configs` the packed kernel's launches are compared, too, and the best one is reported.

A step is one of a model of DeepSeek-V2-Lite's shape, with dense MLPs and fewer layers, after a prompt. With
"turboquant" attention reads the packed latents; with "sdpa" all are dequantized and expanded in each step.
`DynamicCache` holds bf16 latents, which transformers expands in each step.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from tq_kernels.common.device import target
from tq_kernels.common.softmax import SoftmaxState, finite, log2_sum, normalize, rescaled
from tq_kernels.decode.launch import held_counts
from tq_kernels.latents.attention import sum_apart
from tq_kernels.latents.launch import LatentConfig, attend_latents, latent_config
from tq_kernels.prefix.launch import merge, prefix_splits
from tq_kernels.types import AttentionOptions
from transformers import AutoModelForCausalLM, DeepseekV2Config, DynamicCache, PreTrainedModel

from examples.measure.speed.bench_generate import NEW_TOKENS, ONE_GRAPH, Variant, step_seconds
from examples.measure.speed.benchmark import captured, microseconds, random_blocks, read_gigabytes_per_second
from examples.provenance import RESULTS, provenance, slug
from tq_hf import TurboQuantCache, TurboQuantConfig
from tq_hf.ops.dispatch import dequantize
from tq_hf.ops.triton.blocks import rotations

PRESET, LATENT, ROTARY = "4bit_nc", 512, 64
SCALING = 192**-0.5
HEADS, SHAPES = (16, 32, 128), ((1, 32768), (8, 32768))
SINKS, RESIDUAL, RING = 4, 160, 384
BF16 = torch.bfloat16

CONFIGS = {
    16: [LatentConfig(16, 64, 4, 8, 3), LatentConfig(64, 64, 4, 8, 3)],
    32: [LatentConfig(32, 64, 4, 8, 3), LatentConfig(32, 64, 8, 4, 2), LatentConfig(64, 64, 2, 8, 3)],
    64: [LatentConfig(64, 64, 4, 8, 2), LatentConfig(64, 64, 1, 8, 3), LatentConfig(64, 64, 2, 8, 3)],
}
"""Launches to compare with that of the table, by the number of query rows, 64 for more."""
DENSE_CONFIGS = {
    16: [(16, 64, 4, 2, 2), (16, 32, 4, 3, 2), (16, 64, 8, 2, 2), (64, 32, 8, 3, 1)],
    32: [(32, 64, 8, 2, 1), (32, 32, 4, 3, 2), (64, 32, 8, 3, 1), (64, 32, 8, 3, 1, True)],
    64: [(64, 64, 8, 2, 1), (64, 32, 8, 3, 1), (64, 64, 8, 1, 1, True), (64, 32, 8, 3, 1, True)],
}
"""Launches of the kernel of bf16 latents: rows, tokens of a tile, warps, stages, programs of a multiprocessor, and
whether its first products are in a branch, as those of the packed kernel are."""


@triton.jit
def dense_latents(
    query,  # [B, Hq, D + E] bf16
    states,  # [B, T, D + E] bf16
    lse,  # [splits, B * Hq] float32
    partial,  # [splits, B * Hq, D] float32
    heads, tokens, scaling_log2, D: tl.constexpr, E: tl.constexpr, BLOCK_R: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, BRANCH: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Flash decoding over bf16 latents. Grid: (row tiles, B, splits)."""
    batch = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = r < heads
    d, e = tl.arange(0, D), D + tl.arange(0, E)
    row = query + (batch * heads + r)[:, None] * (D + E)
    latent = tl.load(row + d[None, :], mask=inside[:, None], other=0.0)
    rotary = tl.load(row + e[None, :], mask=inside[:, None], other=0.0)
    tiles = (tokens + TILE - 1) // TILE
    first = tiles * tl.program_id(2) // tl.num_programs(2) * TILE
    last = tl.minimum(tiles * (tl.program_id(2) + 1) // tl.num_programs(2) * TILE, tokens)
    states += batch * tokens * (D + E)
    maximum = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    output = tl.zeros([BLOCK_R, D], tl.float32)
    for start in tl.range(first, last, TILE, num_stages=STAGES):
        t = start + tl.arange(0, TILE)
        at = states + t[:, None] * (D + E)
        keys = tl.load(at + d[None, :], mask=(t < last)[:, None], other=0.0)
        rotary_keys = tl.load(at + e[None, :], mask=(t < last)[:, None], other=0.0)
        decay, p = tl.zeros([BLOCK_R], tl.float32), tl.zeros([BLOCK_R, TILE], keys.dtype)
        if start >= first if BRANCH else True:  # see `latents_split`
            x = tl.dot(latent, tl.trans(keys))
            if BRANCH:
                x = sum_apart(x, tl.dot(rotary, tl.trans(rotary_keys)), ASM)
            else:
                x = tl.dot(rotary, tl.trans(rotary_keys), x)
            x = tl.where((t < last)[None, :], x * scaling_log2, -float("inf"))
            maximum, shift, decay = rescaled(maximum, tl.max(x, 1), None, True)
            weights = tl.exp2(x - shift[:, None])
            total, p = total * decay + tl.sum(weights, 1), weights.to(keys.dtype)
        output = tl.dot(p, keys, output * decay[:, None])
    state = SoftmaxState(maximum, total, output)
    at = (tl.program_id(2) * tl.num_programs(1) + batch) * heads + r
    tl.store(lse + at, log2_sum(finite(state.maximum), state.total), mask=inside)
    tl.store(partial + at[:, None] * D + d[None, :], normalize(state), mask=inside[:, None])


def attend_dense_latents(query: torch.Tensor, states: torch.Tensor, config: tuple[int, ...]) -> torch.Tensor:
    """Means of latents `[B, 1, Hq, D]` for queries `[B, Hq, D + E]` over `states` `[B, T, D + E]`."""
    block_rows, tile, warps, stages, programs, *branch = config
    (batch, heads, _), tokens = query.shape, states.shape[1]
    row_tiles = -(-heads // block_rows)
    splits = prefix_splits(row_tiles * batch, tokens // tile, programs * target(query.device).multiprocessors)
    lse = torch.empty(splits, batch * heads, device=query.device)
    partial = torch.empty(splits, batch * heads, LATENT, device=query.device)
    out = query.new_empty(batch, 1, heads, LATENT)
    options = AttentionOptions(SCALING)
    dense_latents[row_tiles, batch, splits](
        query, states, lse, partial, heads, tokens, options.log2_factors[0], LATENT, ROTARY, block_rows, tile, stages,
        bool(branch), target(query.device).asm, num_warps=warps,
    )  # fmt: skip
    merge(partial, lse, None, out, heads, heads, 1, batch * heads, splits)
    return out


class Inputs:
    """Packed latents of B sequences, and queries of as many heads."""

    def __init__(self, heads: int, batch: int, context: int, device: torch.device) -> None:
        self.config = TurboQuantConfig.from_preset(PRESET).of_latents()
        blocks = (context - SINKS - RESIDUAL) // 128
        self.packed = random_blocks(self.config.layout(LATENT, ROTARY), batch, 1, blocks, device)
        self.tokens = SINKS + 128 * blocks + RESIDUAL
        self.query = torch.randn(batch, heads, LATENT + ROTARY, device=device, dtype=BF16)
        self.rows = torch.randn(batch, 1, RING + SINKS, LATENT + ROTARY, device=device, dtype=BF16)
        self.counts = held_counts(blocks, RESIDUAL, SINKS, device)
        self.rotations = rotations(self.config, self.packed.layout, device, torch.float16)
        self.allocate = functools.cache(functools.partial(torch.empty, device=device))

    def attend(self, config: LatentConfig | None = None, splits: int | None = None) -> torch.Tensor:
        """Means of latents `[Hq, B, R]`."""
        latent, rotary = self.query.split([LATENT, ROTARY], -1)
        return attend_latents(
            latent.transpose(0, 1), rotary[:, :, None], (self.packed, self.rows, SINKS), self.counts,
            self.rotations, None, AttentionOptions(SCALING), allocate=self.allocate, config=config, splits=splits,
        )  # fmt: skip

    def dense(self) -> torch.Tensor:
        """Dequantized latents and rotary keys `[B, T, R + Dr]` bf16."""
        batch, _, blocks = self.packed.data.shape[:3]
        states = [self.query.new_empty(batch, 1, 128 * blocks, dim) for dim in (LATENT, ROTARY)]
        dequantize(self.config, self.packed, *states)
        start = 128 * blocks % RING

        sinks, residual = self.rows[:, :, RING:], self.rows[:, :, :RING].roll(-start, 2)[:, :, :RESIDUAL]
        return torch.cat([sinks, torch.cat(states, -1), residual], 2)[:, 0]


def best(calls: dict[str, Callable[[], Any]], repeat: int) -> tuple[str, float, dict[str, float]]:
    """Name and microseconds of the fastest call, and microseconds of all; calls that do not launch are left out."""
    times = {}
    for name, call in calls.items():
        try:
            times[name] = microseconds(captured(call), repeat)
        except (RuntimeError, triton.runtime.OutOfResources) as error:  # shared memory of another card
            print(f"  {name}: {str(error)[:100]}", flush=True)
    name = min(times, key=times.__getitem__)
    return name, times[name], times


def attention(heads: int, batch: int, context: int, configs: bool, device: torch.device) -> dict[str, Any]:
    """One row: microseconds over packed and over bf16 latents, and how far both are apart."""
    inputs, rows = Inputs(heads, batch, context, device), 16 if heads <= 16 else 32 if heads <= 32 else 64
    chosen = latent_config(heads, target(device))
    calls: dict[str, Callable[[], Any]] = {f"{chosen}": functools.partial(inputs.attend, chosen)}
    if configs:
        calls |= {f"{config}": functools.partial(inputs.attend, config) for config in CONFIGS[rows]}
        tiles = batch * -(-heads // chosen.block_rows)
        for splits in (66 // tiles, 132 // tiles, 264 // tiles):
            calls[f"{chosen}, {splits} splits"] = functools.partial(inputs.attend, chosen, max(1, splits))
    name, packed_us, times = best(calls, 60)
    for text, us in times.items() if configs else ():
        print(f"  {us:7.1f} us  {text}", flush=True)
    states = inputs.dense()
    dense = {
        str(config): functools.partial(attend_dense_latents, inputs.query, states, config)
        for config in DENSE_CONFIGS[rows]
    }
    dense_name, dense_us, _ = best(dense, 60)
    apart = (
        inputs.attend().transpose(0, 1).float()
        - attend_dense_latents(inputs.query, states, DENSE_CONFIGS[rows][1])[:, 0].float()
    )
    layout = inputs.packed.layout
    return {
        "heads": heads,
        "batch": batch,
        "context": context,
        "packed_us": packed_us,
        "bf16_us": dense_us,
        "ratio": dense_us / packed_us,
        "packed_gb": batch * inputs.packed.capacity * layout.block_bytes / 1e9,
        "relative_rms": (apart.norm() / inputs.attend().float().norm()).item(),
        "launch": name,
        "bf16_launch": dense_name,
        "launches_us": times,
    }


def lite(layers: int, device: torch.device, **sizes: int) -> PreTrainedModel:
    """A random model of DeepSeek-V2-Lite's shape in bf16, with dense MLPs."""
    shape = dict(hidden_size=2048, intermediate_size=10944, num_attention_heads=16, vocab_size=32768) | sizes
    config = DeepseekV2Config(
        **shape, num_hidden_layers=layers, first_k_dense_replace=layers, q_lora_rank=None, kv_lora_rank=LATENT,
        num_key_value_heads=shape["num_attention_heads"], qk_nope_head_dim=128, qk_rope_head_dim=ROTARY,
        v_head_dim=128, max_position_embeddings=65536,
    )  # fmt: skip
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=BF16).eval()
    model.generation_config.eos_token_id = None
    return model


def step(model: PreTrainedModel, kind: str, batch: int, context: int) -> dict[str, Any]:
    """One row: milliseconds of a step, the mean of the last ones."""
    ids = torch.randint(3, model.config.vocab_size, (batch, context), device=model.device)
    variant = Variant("sdpa", functools.partial(DynamicCache, config=model.config))
    if kind != "DynamicCache":
        packed = functools.partial(TurboQuantCache, model.config, PRESET, max_cache_len=context + NEW_TOKENS)
        variant = Variant(kind.partition(",")[0], packed, one_graph=True)
    model.set_attn_implementation(variant.attention)
    ms = 1e3 * step_seconds(model, variant, ids, variant.make())
    gc.collect()
    layers = model.config.num_hidden_layers
    return {"cache": kind, "batch": batch, "context": context, "layers": layers, "ms_per_step": ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", action="store_true", help="compare launches of the packed kernel")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model; 0 for no steps")
    parser.add_argument("--output", type=Path, help="JSON file")
    given = parser.parse_args()
    device = torch.device("cuda")
    record = provenance(device, "attention over latents of 512 channels and rotary keys of 64")
    record |= {"rows": [], "steps": [], "read_gb_s": read_gigabytes_per_second(device)}
    path = given.output or RESULTS / f"latents-{slug(device)}.json"

    def add(part: str, row: dict[str, Any]) -> None:
        record[part].append(row)
        print({name: value for name, value in row.items() if name != "launches_us"}, flush=True)
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    for batch, context in SHAPES:
        for heads in HEADS:
            add("rows", attention(heads, batch, context, given.configs, device))
    if not given.layers:
        return
    model = lite(given.layers, device)
    for batch, context in SHAPES:
        for kind in (f"turboquant, {ONE_GRAPH}", f"sdpa, {ONE_GRAPH}", "DynamicCache"):
            add("steps", step(model, kind, batch, context))


if __name__ == "__main__":
    main()
