"""Decode time and memory of generate(), with transformers' caches and ours, on an 8B-shaped random Llama or any model.

A cache is filled with random keys and values for `context` tokens (the time of a prefill would dwarf the rest), then
`generate` continues from it, for two numbers of new tokens; the difference of the two times over the difference of the
numbers is the time of a step. Every generation starts from a fresh fill of the same length.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from typing import Any

import torch
from report import LLAMA_8B, provenance
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel, QuantizedCache, StaticCache
from transformers.cache_utils import Cache

from tq_hf import TurboQuantCache, graph_decoding
from tq_hf.stores.ticket import redeem

SHAPES = ((1, 2048), (1, 32768), (8, 32768), (1, 131072))
NEW_TOKENS = (8, 40)
ROOM = 256
ONE_GRAPH = "4bit_nc, graph_decoding"


def random_llama(device: torch.device, layers: int) -> PreTrainedModel:
    """A random Llama of 8B shape in bf16 with `layers` layers."""
    config = LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": layers})
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def variants(model: PreTrainedModel, batch: int, context: int) -> dict[str, tuple[str, Callable[[], Cache]]]:
    """Name to attention implementation and cache constructor."""
    config = model.config
    chosen = {
        "DynamicCache": ("sdpa", lambda: DynamicCache(config=config)),
        "static, compiled": ("sdpa", lambda: StaticCache(config, max_cache_len=context + ROOM)),
        "quantized fp8": ("sdpa", lambda: QuantizedCache(backend="fp8", config=config)),
        "4bit_nc": ("turboquant", lambda: TurboQuantCache(config)),
        "4bit_nc, compiled": ("turboquant", lambda: TurboQuantCache(config, max_cache_len=context + ROOM)),
        ONE_GRAPH: ("turboquant", lambda: TurboQuantCache(config, max_cache_len=context + ROOM)),
    }
    if batch > 1:  # where the bytes of the cache count
        for preset in ("k8v4", "3bit_nc"):
            chosen[f"{preset}, compiled"] = (
                "turboquant",
                lambda preset=preset: TurboQuantCache(config, preset, max_cache_len=context + ROOM),
            )
    if (batch, context) == SHAPES[0]:  # the time of a step follows the tokens held, not the room
        chosen["4bit_nc, compiled, room for 128k"] = (
            "turboquant",
            lambda: TurboQuantCache(config, max_cache_len=2**17),
        )
    return chosen


@torch.no_grad()
def fill(cache: Cache, model: PreTrainedModel, batch: int, context: int, ranks: int = 1) -> None:
    """Random keys and values for `context` tokens in every layer, like a prompt's: on the layer's device, of as many
    heads as one of `ranks` processes has."""
    config = model.config.get_text_config(decoder=True)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (batch, config.num_key_value_heads // ranks, context, dim)
    for index, layer in enumerate(model.get_decoder().layers):
        device = next(layer.parameters()).device
        keys, values = (torch.randn(shape, dtype=model.dtype, device=device) for _ in range(2))
        # As a prefill's attention would: a compressed layer learns that its packed states are what is read.
        redeem(*cache.update(keys, values, index), model)


def go_on(model: PreTrainedModel, ids: torch.Tensor, cache: Cache, new_tokens: int, **options: Any) -> None:
    """Exactly `new_tokens` greedy tokens after `ids` `[B, T]`, of which `cache` holds all but the last."""
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        **options,
    )


def measure(
    model: PreTrainedModel, attention: str, make: Callable[[], Cache], batch: int, context: int, **options: Any
) -> dict[str, Any]:
    """Milliseconds a step, and peak bytes beyond weights while decoding."""
    model.set_attn_implementation(attention)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(3, vocabulary, (batch, context + 1), device=model.device)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    seconds: dict[int, list[float]] = {}
    peak = 0
    # The first run compiles and warms up.
    for repeat in range(3):
        for new_tokens in NEW_TOKENS if repeat else NEW_TOKENS[:1]:
            cache = make()
            fill(cache, model, batch, context)
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            start = time.perf_counter()
            go_on(model, ids, cache, new_tokens, **options)
            torch.cuda.synchronize()
            if repeat:
                seconds.setdefault(new_tokens, []).append(time.perf_counter() - start)
                peak = torch.cuda.max_memory_allocated() - weights
            del cache
    short, long = (min(seconds[n]) for n in NEW_TOKENS)
    return {"ms_per_step": 1e3 * (long - short) / (NEW_TOKENS[1] - NEW_TOKENS[0]), "peak_bytes_beyond_weights": peak}


def run(
    model_name: str | None, layers: int, only: str | None, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """All shapes and variants; prints a line each, saves the record after each, and returns it."""
    device = torch.device("cuda")
    if model_name is None:
        model = random_llama(device, layers)
    else:
        model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.bfloat16, device_map=device).eval()
    model.generation_config.eos_token_id = None
    record: dict[str, Any] = provenance(device, model_name or f"random Llama, 8B shape, {layers} layers")
    record["rows"] = rows = []
    for batch, context in SHAPES:
        for name, (attention, make) in variants(model, batch, context).items():
            if only is not None and not re.search(only, f"{batch}x{context} {name}"):
                continue
            torch._dynamo.reset()
            try:
                loop = {"custom_generate": graph_decoding} if name == ONE_GRAPH else {}
                result = measure(model, attention, make, batch, context, **loop)
            except torch.OutOfMemoryError:
                result = {"error": "out of memory"}
            rows.append({"batch": batch, "context": context, "cache": name, **result})
            print(rows[-1], flush=True)
            save(record)
            gc.collect()
            torch.cuda.empty_cache()
    return record
