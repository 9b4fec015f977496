"""Measure on a GPU: decode attention alone, decoding, many new tokens on a history, long prompts, many requests.

    python -m examples.measure.speed.benchmark kernels     # or generate, models, prefix, prefill, serve

`generate` is described in `bench_generate.py`, `models` in `bench_models.py`, `prefix` and `prefill` in
`bench_prefix.py`, and `serve`, which a CPU can run, too, in `bench_serve.py`. For `kernels`, every figure of a run
comes from one process on one GPU: the read ceiling, the best scaled-dot-product attention in bf16, and decode
attention over packed blocks (rotation, attention, reduction: the whole call). Medians, with the L2 cache overwritten
before every repetition. Writes JSON and draws the pictures of README.md from it, where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from tq_kernels.decode.launch import held_counts
from tq_kernels.layout import BlockLayout
from tq_kernels.types import AttentionOptions, PackedBlocks
from transformers import LlamaConfig
from triton.testing import do_bench

from examples.measure.report import plots
from examples.measure.report.page import shape
from examples.measure.speed import bench_generate, bench_models, bench_pages, bench_prefix
from examples.provenance import RESULTS, provenance, slug
from tq_hf import TurboQuantCache, TurboQuantConfig
from tq_hf.attention import turboquant_attention
from tq_hf.codec.reference import dequantize, encode
from tq_hf.ops import dispatch
from tq_hf.ops.triton import blocks as triton_blocks
from tq_hf.tensors.layer import LayerTensors

SERVES = Version(transformers.__version__) >= Version("5.19")
"""Older ones have another engine for many requests."""
SHAPES = [(1, 512), (1, 2048), (1, 8192), (1, 32768), (1, 131072), (8, 32768), (32, 8192), (64, 16384)]
HEADS = [(32, 8, 128), (64, 8, 128), (28, 4, 128), (16, 16, 64), (16, 8, 256)]
HEADS += [(48, 8, 128), (64, 4, 128), (32, 8, 80), (32, 8, 96), (32, 8, 192), (32, 4, 512)]
PRESETS = ["k8v4", "4bit_nc", "3bit_nc", "2bit_nc"]
SINKS, WINDOW_CAPACITY = 4, 256
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
SLOW = ("efficient", "math")
"""Implementations that support heads of 512 channels."""


def microseconds(function: Callable[[], Any], repeat: int = 20) -> float:
    """Median device time of a call; `repeat` is in milliseconds."""
    return do_bench(function, warmup=5, rep=repeat, return_mode="median") * 1e3


def read_gigabytes_per_second(device: torch.device) -> float:
    """Rate at which row maxima of 2 GiB are taken: the fastest read there is."""
    data = torch.empty(2 << 30, dtype=torch.uint8, device=device).random_(0, 256).view(-1, 16384).view(torch.int32)
    return data.nbytes / microseconds(lambda: data.amax(1), 100) / 1e3


def captured(function: Callable[[], Any]) -> Callable[[], None]:
    """`function` as a CUDA graph."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def sdpa(batch: int, length: int, heads: tuple[int, int, int], device: torch.device) -> dict[str, float]:
    """Time of each backend in bf16 with grouped heads."""
    query_heads, kv_heads, dim = heads
    query = torch.randn(batch, query_heads, 1, dim, device=device, dtype=torch.bfloat16)
    keys, values = (torch.randn(batch, kv_heads, length, dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    times: dict[str, float] = {}
    for name, backend in BACKENDS.items():
        if times and name in SLOW:
            continue
        try:
            with sdpa_kernel(backend):
                call = functools.partial(
                    scaled_dot_product_attention, query, keys, values, enable_gqa=query_heads != kv_heads
                )
                # As ours: a host that other work slows down launches too late.
                times[name] = min(microseconds(call), microseconds(captured(call)))
        except RuntimeError:
            continue  # this backend does not take the shape
    return times


def random_blocks(layout: BlockLayout, batch: int, kv_heads: int, blocks: int, device: torch.device) -> PackedBlocks:
    """Blocks of random codes and plausible scales."""
    return randomized(PackedBlocks.allocate(layout, batch, kv_heads, blocks, device))


def randomized(packed: PackedBlocks) -> PackedBlocks:
    """Fill blocks with random codes and plausible scales."""
    layout = packed.layout
    for words, bits in ((packed.key_words, layout.key_bits), (packed.value_words, layout.value_bits)):
        words.random_(-(2**31), 2**31 - 1)
        if bits == 8:
            words &= 0x3F3F3F3F  # no NaN
    packed.key_words[..., layout.loud_at :] &= 0x3F3F3F3F
    scales = torch.rand(*packed.scales.shape, 2, device=packed.data.device).mul_(0.1).add_(0.05).half()
    packed.scales.copy_(scales.view(torch.int32).squeeze(-1))
    packed.key_means.normal_(std=0.1)
    return packed


def prepared(
    config: TurboQuantConfig, packed: PackedBlocks, window_rows: int, query_heads: int, dtype: torch.dtype
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A decode step over sinks, `packed` and `window_rows` rows of a window, and the tensors it reads."""
    layout, device = packed.layout, packed.data.device
    batch, kv_heads, blocks = packed.data.shape[:3]
    dim = layout.key_dim + layout.value_dim
    rows = torch.randn(batch, kv_heads, WINDOW_CAPACITY + SINKS, dim, device=device, dtype=dtype)
    tensors = LayerTensors(replace(config, sink_tokens=SINKS), packed, rows)
    query = torch.randn(batch, query_heads, 1, layout.key_dim, device=device, dtype=dtype)
    allocate = functools.cache(functools.partial(torch.empty, device=device))
    out = torch.empty(batch, 1, query_heads, layout.value_dim, device=device, dtype=dtype)
    decoder = triton_blocks.decode_launch(tensors)
    held = held_counts(blocks, window_rows, SINKS, device)

    def step() -> torch.Tensor:
        return decoder(query, held, None, AttentionOptions(layout.key_dim**-0.5), allocate=allocate, out=out)

    return step, {"query": query, "sinks": tensors.sinks(SINKS), "window": tensors.states(slice(WINDOW_CAPACITY))}


def relative_error(preset: str, heads: tuple[int, int, int], device: torch.device) -> float:
    """Relative RMS against fp64 attention over the same dequantized keys and values, 2 x 2k tokens of Gaussian
    states, fp16."""
    query_heads, kv_heads, dim = heads
    config = TurboQuantConfig.from_preset(preset)
    packed = PackedBlocks.allocate(config.layout(dim), 2, kv_heads, 16, device)
    states = [torch.randn(2, kv_heads, 2048, dim, device=device) for _ in range(2)]
    encode(config, states[0], states[1], packed, 0)
    window = 200
    step, inputs = prepared(config, packed, window, query_heads, torch.float16)
    middle = [torch.empty(2, kv_heads, 2048, dim, device=device) for _ in range(2)]
    dequantize(config, packed, middle[0], middle[1])
    start = 2048 % WINDOW_CAPACITY
    keys, values = (
        torch.cat(
            [sinks.double(), packed_part.double(), ring.double().roll(-start, 2)[:, :, :window]], 2
        ).repeat_interleave(query_heads // kv_heads, 1)
        for sinks, packed_part, ring in zip(inputs["sinks"], middle, inputs["window"], strict=True)
    )
    weights = torch.softmax(inputs["query"].double() @ keys.transpose(-1, -2) * dim**-0.5, -1)
    expected = (weights @ values).transpose(1, 2)
    return ((step().double() - expected).norm() / expected.norm()).item()


def encode_microseconds(preset: str, device: torch.device) -> float:
    """A prompt's 32k tokens x 16 vectors (8 KV heads of 128 channels, keys and values) in bf16."""
    config = TurboQuantConfig.from_preset(preset)
    packed = PackedBlocks.allocate(config.layout(128), 1, 8, 256, device)
    keys, values = (torch.randn(1, 8, 32768, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    return microseconds(lambda: dispatch.encode(config, (keys, values), packed, 0))


def step_cost(device: torch.device, layers: int = 32, room: int | None = None) -> dict[str, float]:
    """Kernel launches, and microseconds of the CPU, of one layer's append and attention: those of an eager decode step
    of so many layers, (32, 8, 128) heads, divided by their number. `room` is what the cache preallocates."""
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=layers)
    config._attn_implementation = "turboquant"
    module = SimpleNamespace(config=config, is_causal=True, num_key_value_groups=4)
    query = torch.randn(1, 32, 1, 128, device=device, dtype=torch.bfloat16)
    prompt, row = (torch.randn(1, 8, n, 128, device=device, dtype=torch.bfloat16) for n in (1030, 1))
    cache = TurboQuantCache(config, max_cache_len=room)

    def step(query: torch.Tensor, row: torch.Tensor) -> None:
        for layer in range(layers):
            turboquant_attention(module, query, *cache.update(row, row, layer), None)

    times = []
    with torch.no_grad():
        step(query.expand(-1, -1, 1030, -1), prompt)
        for _ in range(100):  # up to the step that encodes the next block
            torch.cuda.synchronize()
            start = time.perf_counter()
            step(query, row)
            times.append(time.perf_counter() - start)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            step(query, row)
            torch.cuda.synchronize()
    launches = sum(event.device_type == DeviceType.CUDA for event in trace.events()) / layers
    result = {"layers": layers, "launches": launches, "cpu_us": 1e6 * statistics.median(times) / layers}
    kind = "growing" if room is None else "preallocated"
    print(f"append and attention of a layer, {kind}: {launches:g} launches, {result['cpu_us']:.0f} us of the CPU")
    return result


def kernels(arguments: argparse.Namespace) -> dict[str, Any]:
    """All cells of B x context, heads and presets."""
    device = torch.device("cuda", 0)
    read = read_gigabytes_per_second(device)
    print(f"{torch.cuda.get_device_name(device)}: reads {read:.0f} GB/s")
    cells, errors = [], []
    steps = {"step": step_cost(device), "preallocated_step": step_cost(device, room=2048)}
    encoding = {preset: encode_microseconds(preset, device) for preset in PRESETS}
    print("encode 32k tokens x 16 vectors:", ", ".join(f"{preset} {us:.1f} us" for preset, us in encoding.items()))
    record: dict[str, Any] = provenance(device, "attention alone")
    record |= {"read_gb_s": read, "errors": errors, "encode_us": encoding, "cells": cells} | steps
    for heads in HEADS if arguments.all_heads else HEADS[:1]:
        query_heads, kv_heads, dim = heads
        for preset in PRESETS:
            errors.append({"heads": heads, "preset": preset, "relative_rms": relative_error(preset, heads, device)})
            print(f"error {heads} {preset}: {errors[-1]['relative_rms']:.1e}")
        for batch, length in SHAPES:
            baseline = sdpa(batch, length, heads, device)
            best = min(baseline.values(), default=float("nan"))
            for preset in PRESETS:
                config = TurboQuantConfig.from_preset(preset)
                layout = config.layout(dim)
                # Blocks of a cache with this number of tokens.
                blocks = config.num_blocks(length)
                dense = length - blocks * layout.tokens
                packed = random_blocks(layout, batch, kv_heads, blocks, device)
                call, _ = prepared(config, packed, dense - SINKS, query_heads, torch.bfloat16)
                call()
                eager, graph = microseconds(call), microseconds(captured(call))
                gigabytes = batch * kv_heads * (blocks * layout.block_bytes + dense * 2 * dim * 2) / 1e9
                cell = {
                    "batch": batch,
                    "length": length,
                    "heads": heads,
                    "preset": preset,
                    "sdpa_us": baseline,
                    "eager_us": eager,
                    "graph_us": graph,
                    "speedup": best / min(eager, graph) if baseline else None,
                    "floor_us": gigabytes / read * 1e6,
                    "of_read": gigabytes / read * 1e6 / min(eager, graph),
                }
                cells.append(cell)
                print(
                    f"{heads} {shape(batch, length)} {preset}: eager {eager:.1f} us, graph {graph:.1f} us, "
                    f"sdpa {best:.1f} us, {cell['of_read']:.0%} of read"
                )
                del packed, call
        arguments.save(record)  # a run that is cut short keeps what it measured
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("kernels", help="decode attention against bf16 attention")
    command.add_argument("--all-heads", action="store_true", help="all head shapes, not only (32, 8, 128)")
    command.set_defaults(run=kernels)
    command = commands.add_parser("generate", help="a decode step of generate(), with transformers' caches and ours")
    command.add_argument("--model", help="a model of the hub or a folder; by default a random Llama of 8B shape")
    command.add_argument("--layers", type=int, default=32, help="layers of the random Llama")
    command.add_argument("--only", help="only cells whose name this regular expression finds, e.g. '8x32768 4bit_nc'")
    command.add_argument("--host-work", type=float, help="measure one graph on a slower host, too: 2 is half as fast")
    command.set_defaults(
        run=lambda arguments: bench_generate.run(
            arguments.model, arguments.layers, arguments.only, arguments.save, arguments.host_work
        )
    )
    command = commands.add_parser("models", help="prefill and decode of other models' shapes, with softcap or sinks")
    command.add_argument("--only", help="only cells whose name this regular expression finds, e.g. 'gpt-oss.* prefill'")
    command.set_defaults(run=lambda arguments: bench_models.run(arguments.only, arguments.save))
    command = commands.add_parser("prefix", help="many queries over packed history against bf16 attention")
    command.set_defaults(run=lambda arguments: bench_prefix.run())
    command = commands.add_parser("prefill", help="time to the first token, and a prefill of a million tokens")
    command.set_defaults(run=lambda arguments: bench_prefix.run_prefill())
    command = commands.add_parser("pages", help="a decode step over pages beside the same over a cache's tensors")
    command.add_argument("--only", help="only cells whose name this regular expression finds, e.g. '128. 4bit.* 8x'")
    command.add_argument("--repeat", type=int, default=60, help="replays of a cell")
    command.set_defaults(run=lambda arguments: bench_pages.run(arguments.only, arguments.save, arguments.repeat))
    if SERVES:
        from examples.measure.speed import bench_serve

        command = commands.add_parser("serve", help="many requests, on transformers' pages and on packed ones")
        bench_serve.add_arguments(command)
        command.set_defaults(
            run=lambda arguments: bench_serve.run(arguments, arguments.save, read_gigabytes_per_second)
        )
    for command in commands.choices.values():
        command.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and arguments.command != "serve":
        sys.exit("This needs a GPU, and torch finds none.")
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"{arguments.command}-{slug(device)}.json"

    def save(record: dict[str, Any]) -> None:
        path.write_text(json.dumps(record, indent=1) + "\n")

    arguments.save = save
    save(arguments.run(arguments))
    print(f"wrote {path}")
    if arguments.output == RESULTS and find_spec("matplotlib") is not None:
        plots.draw()


if __name__ == "__main__":
    main()
