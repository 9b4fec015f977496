"""Prefill and decode of other models' shapes, a few layers with random weights: ours against the attention and the
cache that transformers would use.

A prefill is one forward of 8k tokens into an empty cache; decoding is as in `bench_generate.py`, at 8 x 32k.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.cache_utils import Cache

from examples.measure.speed.bench_generate import ONE_GRAPH, Variant, measure
from examples.provenance import provenance
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input

PREFILL, DECODE, ROOM = 8192, (8, 32768), 256
VOCABULARY = dict(vocab_size=32768, max_position_embeddings=131072)
"""Vocabulary of all models: embeddings and logits are not compared."""

MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt-oss-20b": lambda: GptOssConfig(
        **VOCABULARY, num_hidden_layers=4, hidden_size=2880, intermediate_size=2880, num_local_experts=4
    ),
    "Gemma-2-9B": lambda: Gemma2Config(
        **VOCABULARY,
        **dict(num_hidden_layers=4, hidden_size=3584, intermediate_size=14336, head_dim=256),
        **dict(num_attention_heads=16, num_key_value_heads=8),
    ),
    "Gemma-3-12B": lambda: Gemma3TextConfig(
        **VOCABULARY,
        **dict(num_hidden_layers=6, hidden_size=3840, intermediate_size=15360, head_dim=256, sliding_window=1024),
        **dict(num_attention_heads=16, num_key_value_heads=8),
    ),
    "Gemma-4-31B": lambda: Gemma4TextConfig(
        **VOCABULARY,
        **dict(num_hidden_layers=6, hidden_size=5376, intermediate_size=21504, sliding_window=1024),
        **dict(num_attention_heads=32, num_key_value_heads=16, head_dim=256, num_global_key_value_heads=4),
        **dict(global_head_dim=512, attention_k_eq_v=True, hidden_size_per_layer_input=0),
    ),
    "Qwen3-8B": lambda: Qwen3Config(
        **VOCABULARY,
        **dict(num_hidden_layers=4, hidden_size=4096, intermediate_size=12288, head_dim=128),
        **dict(num_attention_heads=32, num_key_value_heads=8),
    ),
}
"""Shapes of one period of layers, or of four layers (gpt-oss with four experts, all used by each token)."""


def make(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """A model of random weights in bf16."""
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def prefill_ms(model: PreTrainedModel, attention: str, make_cache: Callable[[], Cache]) -> float:
    """The least of five times of a forward of `PREFILL` tokens into an empty cache."""
    model.set_attn_implementation(attention)
    ids = torch.randint(3, model.config.vocab_size, (1, PREFILL), device=model.device)
    times = []
    for _ in range(6):
        cache = make_cache()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        model(ids, **as_input(cache), logits_to_keep=1)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
        del cache
    return min(times[1:])


def run(only: str | None, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All models and variants; prints a line each, saves the record after each, and returns it."""
    device = torch.device("cuda")
    record: dict[str, Any] = provenance(device, "shapes of other models, a few layers of random weights")
    record["rows"] = rows = []
    batch, context = DECODE
    for name, make_config in MODELS.items():
        config = make_config()
        if only is not None and not any(re.search(only, f"{name} {kind}") for kind in ("prefill", "decode", "graph")):
            continue
        model = make(config, device)
        stock = model.config._attn_implementation
        variants = {
            f"DynamicCache, {stock}": Variant(stock, lambda config=config: DynamicCache(config=config)),
            "4bit_nc": Variant("turboquant", lambda config=config: TurboQuantCache(config)),
            ONE_GRAPH: Variant(
                "turboquant",
                lambda config=config: TurboQuantCache(config, max_cache_len=context + ROOM),
                one_graph=True,
            ),
        }
        for cache, variant in variants.items():
            row: dict[str, Any] = {"model": name, "layers": config.num_hidden_layers, "cache": cache}
            torch._dynamo.reset()
            try:
                if not variant.one_graph and (only is None or re.search(only, f"{name} prefill")):
                    row["prefill_ms"] = prefill_ms(model, variant.attention, variant.make)
                if only is None or re.search(only, f"{name} {'graph' if variant.one_graph else 'decode'}"):
                    row |= measure(model, variant, batch, context)
            except torch.OutOfMemoryError:
                row["error"] = "out of memory"
            rows.append(row)
            print(row, flush=True)
            save(record)
            gc.collect()
            torch.cuda.empty_cache()
        del model
    return record
