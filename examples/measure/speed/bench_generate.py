"""Decode time and memory of generate(), with transformers' caches and ours, on an 8B-shaped random Llama or any model.

A cache is filled with random keys and values for `context` tokens (the time of a prefill would dwarf the rest), then
`generate` continues from it. The time of a step is the mean of the last ones, between notes of the clock that the host
takes in each step: what comes before (compilation, the capture of graphs) differs by more than a step from one
generation to the next. Every generation starts from a fresh fill of the same length.

With `--host-work 2` the step that is one graph is also measured on a host that takes twice as long over each step.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
    StoppingCriteria,
)
from transformers.cache_utils import Cache
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from examples.provenance import LLAMA_8B, provenance
from tq_hf import TurboQuantCache, graph_decoding
from tq_hf.compat import as_input, layer_config
from tq_hf.graph_decoding.step import LateFlags
from tq_hf.layers.handle import resolve

SHAPES = ((1, 512), (1, 2048), (1, 8192), (1, 32768), (8, 32768), (1, 131072))
NEW_TOKENS, TIMED = 40, 32
"""New tokens of a generation, and how many of its steps are timed, the last ones."""
ROOM = 256
ONE_GRAPH = "4bit_nc, graph_decoding"


def random_llama(device: torch.device, layers: int) -> PreTrainedModel:
    """A random Llama of 8B shape in bf16 with `layers` layers."""
    config = LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": layers})
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


class Variant(NamedTuple):
    """Case to measure.

    Args:
        attention: The attention implementation.
        make: Makes an empty cache.
        one_graph: Whether a step is one graph.
        padding: Tokens of padding on the left of the first sequence: of one, transformers makes a mask.
        host_work: How many times its own work the host does a step.
        compile_config: How the step is compiled, if not as `generate()` does by itself.
    """

    attention: str
    make: Callable[[], Cache]
    one_graph: bool = False
    padding: int = 0
    host_work: float = 1.0
    compile_config: CompileConfig | None = None


def variants(model: PreTrainedModel, batch: int, context: int, host_work: float | None = None) -> dict[str, Variant]:
    """All variants by name; the one of a slowed host only if `host_work` says how slow."""
    config, room = model.config, context + ROOM

    def ours(preset: str = "4bit_nc", room: int | None = room) -> Callable[[], Cache]:
        return lambda: TurboQuantCache(config, preset, max_cache_len=room)

    def dynamic() -> Cache:
        return DynamicCache(config=config)

    chosen = {
        "DynamicCache": Variant("sdpa", dynamic),
        "DynamicCache, one pad token": Variant("sdpa", dynamic, padding=1),
    }
    for version, available in ((2, is_flash_attn_2_available()), (3, is_flash_attn_3_available())):
        if available:
            chosen[f"DynamicCache, FlashAttention-{version}"] = Variant(f"flash_attention_{version}", dynamic)
    chosen |= {
        "static, compiled": Variant("sdpa", lambda: StaticCache(config, max_cache_len=room)),
        "quantized fp8": Variant("sdpa", lambda: QuantizedCache(backend="fp8", config=config)),
        "4bit_nc": Variant("turboquant", ours(room=None)),
        "4bit_nc, compiled": Variant("turboquant", ours()),
        ONE_GRAPH: Variant("turboquant", ours(), one_graph=True),
    }
    if host_work is not None:
        name = f"{ONE_GRAPH}, host work × {host_work:g}"
        chosen[name] = Variant("turboquant", ours(), one_graph=True, host_work=host_work)
    if batch == 1:  # products of one row are the compiler's own then, not a library's
        tuned = CompileConfig(mode=None, options={"coordinate_descent_tuning": True, "triton.cudagraphs": True})  # type: ignore[arg-type]
        for name in ("static, compiled", ONE_GRAPH):
            chosen[f"{name}, tuned"] = chosen[name]._replace(compile_config=tuned)
    if batch > 1:  # where the bytes of the cache count
        for preset in ("k8v4", "3bit_nc"):
            chosen[f"{preset}, compiled"] = Variant("turboquant", ours(preset))
    if (batch, context) == (1, 2048):  # the time of a step follows the tokens held, not the room
        chosen["4bit_nc, compiled, room for 128k"] = Variant("turboquant", ours(room=2**17))
    return chosen


class Clock(StoppingCriteria):
    """Notes the time of each token, after which `generate()` asks the device whether to go on."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **options: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@contextmanager
def timed_flags(host_work: float = 1.0) -> Iterator[list[float]]:
    """Note when `graph_decoding` has read the flags of each step, on a host that works `host_work` times as long.

    What it does of itself lies between two reads, in which it waits for the GPU: it then spins for as long as that
    took, `host_work - 1` times.
    """
    read = LateFlags._read
    times: list[float] = []

    def noting(flags: LateFlags, step: int) -> bool:
        now = time.perf_counter()
        until = now + (host_work - 1) * (now - times[-1]) if step and times else now
        while time.perf_counter() < until:
            pass
        all_ended = read(flags, step)
        times.append(time.perf_counter())
        return all_ended

    LateFlags._read = noting  # type: ignore[method-assign]
    try:
        yield times
    finally:
        LateFlags._read = read  # type: ignore[method-assign]


@torch.no_grad()
def fill(cache: Cache, model: PreTrainedModel, batch: int, context: int, ranks: int = 1) -> None:
    """Random keys and values for `context` tokens in every layer, like a prompt's: on the layer's device, of as many
    heads as one of `ranks` processes has."""
    config = model.config.get_text_config(decoder=True)
    for index, layer in enumerate(model.get_decoder().layers):
        own = layer_config(config, index)
        dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        shape = (batch, own.num_key_value_heads // ranks, context, dim)
        device = next(layer.parameters()).device
        keys, values = (torch.randn(shape, dtype=model.dtype, device=device) for _ in range(2))
        # As a prefill's attention would: a compressed layer learns that its packed states are what is read.
        resolve(*cache.update(keys, values, index), model)


def go_on(
    model: PreTrainedModel, ids: torch.Tensor, cache: Cache, new_tokens: int, padding: int = 0, **options: Any
) -> torch.Tensor:
    """`ids` `[B, T]` and exactly `new_tokens` greedy tokens after them; `cache` holds all of `ids` but the last, and
    the first `padding` of the first sequence are padding."""
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return model.generate(
        ids,
        attention_mask=mask,
        **as_input(cache),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        **options,
    )


def step_seconds(model: PreTrainedModel, variant: Variant, ids: torch.Tensor, cache: Cache) -> float:
    """Mean time of the last steps of `go_on`."""
    go = partial(go_on, model, ids, cache, NEW_TOKENS, variant.padding, compile_config=variant.compile_config)
    if variant.one_graph:
        with timed_flags(variant.host_work) as times:
            go(custom_generate=graph_decoding)
    else:
        clock = Clock()
        go(stopping_criteria=[clock])
        times = clock.times
    return (times[-1] - times[-1 - TIMED]) / TIMED


def measure(model: PreTrainedModel, variant: Variant, batch: int, context: int) -> dict[str, Any]:
    """Milliseconds a step, and peak bytes beyond weights while decoding."""
    model.set_attn_implementation(variant.attention)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(3, vocabulary, (batch, context + 1), device=model.device)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    seconds, peak = [], 0
    for _ in range(3):  # the first compiles
        cache = variant.make()
        fill(cache, model, batch, context)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        seconds.append(step_seconds(model, variant, ids, cache))
        peak = torch.cuda.max_memory_allocated() - weights
        del cache
    return {"ms_per_step": 1e3 * min(seconds[1:]), "peak_bytes_beyond_weights": peak}


def run(
    model_name: str | None,
    layers: int,
    only: str | None,
    save: Callable[[dict[str, Any]], None],
    host_work: float | None = None,
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
        for name, variant in variants(model, batch, context, host_work).items():
            if only is not None and not re.search(only, f"{batch}x{context} {name}"):
                continue
            if variant.host_work == 1:  # a slower host replays what was compiled for this one
                torch._dynamo.reset()
            try:
                result = measure(model, variant, batch, context)
            except torch.OutOfMemoryError:
                result = {"error": "out of memory"}
            rows.append({"batch": batch, "context": context, "cache": name, **result})
            print(rows[-1], flush=True)
            save(record)
            gc.collect()
            torch.cuda.empty_cache()
    return record
