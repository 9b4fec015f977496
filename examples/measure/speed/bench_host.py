"""Time of the host for one layer, with launches that do nothing: Python alone, on any machine.

    python -m examples.measure.speed.bench_host [--layers 32] [--profile]

An eager decode step: `update` of every layer and attention on what it returned, as a model's layers call them, for a
cache that grows and for a preallocated one; also with what beam search does before each step (beams change places) and
with what offloading does (layers are moved away and back; on a CPU that is all but the copies).

The tensors are on the CPU: what torch itself takes for one on a GPU (about 1 us more for each it makes) and the
driver's time for each launch come on top.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from tq_kernels.common import launcher
from tq_kernels.common.launcher import Kernel
from tq_kernels.decode import launch as decode_launch
from transformers import LlamaConfig

from examples.provenance import LLAMA_8B
from tq_hf import TurboQuantCache
from tq_hf.attention import turboquant_attention
from tq_hf.layers.handle import resolve
from tq_hf.ops.triton import blocks as triton_blocks

CONTEXT, STEPS = 300, 100


@contextmanager
def empty_launches() -> Iterator[list[int]]:
    """Kernels that do nothing. Yields the number of launches so far, in a list."""
    launches = [0]
    decode_launch.steps_of.cache_clear()  # which would launch what it kept

    def count(*_: Any) -> None:
        launches[0] += 1

    compiled = SimpleNamespace(run=count, function=None, packed_metadata=None, src=SimpleNamespace(signature={}))
    function = SimpleNamespace(warmup=lambda *_, **__: compiled)
    kernels = [kernel for kernel in gc.get_objects() if type(kernel) is Kernel]
    with (
        ExitStack() as patches,
        patch.object(decode_launch, "current_raw_stream", lambda device: 0),
        patch.object(launcher, "current_raw_stream", lambda device: 0),
        patch.object(triton_blocks, "interpreted", lambda: True),
    ):
        for kernel in kernels:
            patches.enter_context(patch.object(kernel, "function", function))
            patches.enter_context(patch.dict(kernel.variants, clear=True))
        yield launches


def as_before(cache: TurboQuantCache) -> None:
    """A step of plain decoding."""


def reordered(cache: TurboQuantCache) -> None:
    """A step of a beam search."""
    cache.reorder_cache(torch.tensor([0]))


def moved(cache: TurboQuantCache) -> None:
    """A step with offloaded layers."""
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()


def decode_steps(
    layers: int, max_cache_len: int | None, prepare: Callable[[TurboQuantCache], None] = as_before
) -> Iterator[float]:
    """Seconds of each step over all layers, the first few among them; of this thread, whatever else runs."""
    config = LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": layers})
    config._attn_implementation = "turboquant"
    cache = TurboQuantCache(config, max_cache_len=max_cache_len)
    module: Any = SimpleNamespace(config=config, is_causal=True, training=False)
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def states(tokens: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(1, h, tokens, dim, dtype=torch.bfloat16) for h in (heads, kv_heads, kv_heads))

    for layer in range(layers):
        _, keys, values = states(CONTEXT)
        resolve(*cache.update(keys, values, layer), module)
    query, keys, values = states(1)
    for _ in range(STEPS):
        start = time.thread_time()
        prepare(cache)
        for layer in range(layers):
            held = cache.update(keys, values, layer)
            turboquant_attention(module, query, *held, None, scaling=dim**-0.5)
        yield time.thread_time() - start


CASES: dict[str, tuple[int | None, Callable[[TurboQuantCache], None]]] = {
    "growing": (None, as_before),
    "preallocated": (1024, as_before),
    "growing, beams change places": (None, reordered),
    "preallocated, beams change places": (1024, reordered),
    "growing, moved away and back": (None, moved),
}
"""Room of the cache, and what happens before each step."""


@torch.no_grad()
def measure(case: str, layers: int = 32, profile: cProfile.Profile | None = None) -> tuple[list[float], float]:
    """Microseconds a layer of each step, sorted, and launches a layer."""
    torch.set_num_threads(1)
    with empty_launches() as launches:
        seconds = []
        for index, second in enumerate(decode_steps(layers, *CASES[case])):
            seconds.append(second)
            if profile and index == 10:
                profile.enable()
            if index == 10:
                before = launches[0]
        if profile:
            profile.disable()
        each = (launches[0] - before) / layers / (STEPS - 11)
    return sorted(1e6 * s / layers for s in seconds[10:]), each


def fast(us: list[float]) -> float:
    """The tenth percentile of sorted times: what a busy machine disturbs least."""
    return us[len(us) // 10]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    arguments = parser.parse_args()
    for case in CASES:
        profile = cProfile.Profile() if arguments.profile else None
        us, each = measure(case, arguments.layers, profile)
        print(f"{case}: {fast(us):.1f} us a layer ({statistics.median(us):.1f} median), {each:.2f} launches")
        if profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main()
