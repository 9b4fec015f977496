"""A model over two GPUs against one of them, with one cache: heads by `tp_plan`, layers by `device_map`.

    python -m examples.measure.speed.bench_multi_gpu [--parts graph_decoding pages ...]

starts a process a GPU under torchrun, on an 8B-shaped random Llama, and measures decode steps of three kinds: what is
in `PARTS`. The processes share out what is measured on one GPU, each on its own; then they hold the model together.
Steps are timed as in `bench_generate` and `bench_serve`, on caches that were filled with random keys and values, or on
pages. JSON is written after each measurement, and one that fails leaves its error.

A step of `graph_decoding` is also compared with eager steps on the same tokens, and its kernels are summed by groups.

Before each compiled step of `generate()` torch evaluates guards, which tell whether anything in the model has changed,
and takes apart sharded parameters (`DTensor`s): that occupies the host for milliseconds while the GPUs wait. These
steps are therefore timed in two ways: as `generate()` compiles by itself; and without guards on modules, an option of
`torch.compile`, in tensor parallelism with plain tensors in place of the `DTensor`s besides.

NCCL is told before the processes meet that its collectives in graphs need not be guarded against others
(`NCCL_GRAPH_MIXING_SUPPORT=0`). NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch._dynamo.utils import counters
from torch.autograd import DeviceType
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import CompileConfig, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.distributed import DistributedConfig

from examples.measure.speed import bench_serve
from examples.measure.speed.bench_generate import ROOM, Variant, fill, go_on, step_seconds
from examples.provenance import LLAMA_8B, RESULTS, bytes_held, provenance, slug
from tq_hf import TurboQuantCache, TurboQuantConfig, graph_decoding
from tq_hf.compat import as_input
from tq_hf.graph_decoding.loop import latest_steps

PRESET = "4bit_nc"
SHAPES, PAGES = ((8, 32768), (1, 2048)), (32, 2048)
"""Batch and context of steps of a batch, and of steps of requests on pages."""
TINY_SHAPES, TINY_PAGES = ((2, 300), (1, 200)), (3, 200)
TINY = dict(hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
REPEATS = 2
GIVEN = 48
"""Tokens of a text whose logits are compared."""
CHECKED = 24
"""Steps of `graph_decoding` that are compared with eager ones."""
REPLAYS = 8
COLLECTIVES = 64
"""Number of all-reduces in one timed graph."""
NEAR_TIE = 0.05
"""Standard deviations of a token's logits: two that are closer may change places in bf16."""
ENVIRONMENT = {
    "NCCL_GRAPH_MIXING_SUPPORT": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
ON_GPU = torch.cuda.is_available()
KERNELS = {
    "fused": "^triton_(?!tem)",
    "all-reduce": "nccl|all_reduce|allreduce",
    "decode_split": "decode_split",
    "reduce_splits": "reduce_splits",
    "rotate, append, encode": "rotate|append|encode",
    "matrix products": "gemm|gemv|nvjet|cutlass|splitk|xmma|^triton_tem",
}
"""Groups of a step's kernels by what their names contain; the first that fits."""

Make = Callable[[], Cache]
Shape = tuple[int, int]


def device() -> torch.device:
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if ON_GPU else torch.device("cpu")


def random_weights(config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Weights of a Llama in bf16, the same in every process."""
    with torch.device("meta"):
        shapes = LlamaForCausalLM(config).state_dict()
    generator = torch.Generator(device()).manual_seed(0)
    weights = {}
    for name, like in shapes.items():
        weights[name] = torch.ones(like.shape, dtype=torch.bfloat16, device=device())
        if like.dim() > 1:
            weights[name].normal_(0, config.initializer_range, generator=generator)
    return weights


def load(config: LlamaConfig, **placement: Any) -> PreTrainedModel:
    """The model, placed by `device_map` or `distributed_config`: this is where one would name a checkpoint."""
    weights = random_weights(config)
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.bfloat16, **placement)
    model.generation_config.eos_token_id = None
    return model.eval()


def release() -> None:
    torch._dynamo.reset()
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


def by_hand(config: LlamaConfig) -> dict[str, int]:
    """A device map with half of the layers on each of two GPUs; "auto" leaves a tiny model on the first."""
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    return places | {f"model.layers.{i}": 2 * i // config.num_hidden_layers for i in range(config.num_hidden_layers)}


def without_module_guards() -> CompileConfig:
    """Compile options of `generate()` without guards on modules, for a model that does not change."""
    options = {"triton.cudagraphs": True, "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    return CompileConfig(mode=None, options=options)


@torch.no_grad()
def keep_local_shards(model: PreTrainedModel) -> None:
    """Replaces the sharded weights of linear layers by this process's shard, as transformers itself does at each call
    without gradients; the model cannot be trained or saved any more."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if isinstance(parameter, DTensor):
                    setattr(module, name, torch.nn.Parameter(parameter.to_local(), requires_grad=False))


def ranks_of(model: PreTrainedModel) -> int:
    """Processes that hold the model together."""
    return model.tp_size or 1


def random_ids(shape: Shape, model: PreTrainedModel) -> torch.Tensor:
    """Tokens `[B, T + 1]`: those of a cache of `shape`, and the one that comes next."""
    batch, context = shape
    generator = torch.Generator().manual_seed(context)
    return torch.randint(3, model.config.vocab_size, (batch, context + 1), generator=generator).to(model.device)


def filled(make: Make, model: PreTrainedModel, shape: Shape) -> Any:
    """A cache of `shape`, always with the same random keys and values."""
    cache = make()
    torch.manual_seed(0)
    fill(cache, model, *shape, ranks_of(model))
    return cache


def packed(model: PreTrainedModel, room: int | None) -> Make:
    """The compressed cache; `room` makes `generate()` compile."""
    return partial(TurboQuantCache, model.config, PRESET, max_cache_len=room)


def milliseconds(model: PreTrainedModel, variant: Variant, shape: Shape) -> float:
    """Time of a decoding step of `generate()`."""
    model.set_attn_implementation(variant.attention)
    seconds = []
    for _ in range(1 + REPEATS):  # the first compiles
        cache = filled(variant.make, model, shape)
        seconds.append(step_seconds(model, variant, random_ids(shape, model), cache))
        del cache
        gc.collect()
    return 1e3 * min(seconds[1:])


# graph_decoding


@torch.no_grad()
def against_eager(model: PreTrainedModel, make: Make, tokens: torch.Tensor, shape: Shape) -> dict[str, Any]:
    """How often each token is the likeliest by eager steps on the tokens before it, and how far behind it is where it
    is not, in standard deviations of the logits."""
    cache, equal, gaps = filled(make, model, shape), 0, []
    for t in range(shape[1], tokens.shape[1] - 1):
        logits = model(tokens[:, t : t + 1], **as_input(cache)).logits[:, -1].float()
        chosen = logits.gather(1, tokens[:, t + 1 :][:, :1])[:, 0]
        behind = (logits.amax(1) - chosen) / logits.std(1)
        equal += int((behind == 0).sum())
        gaps += behind[behind > 0].tolist()
    return {
        "tokens": equal + len(gaps),
        "equal": equal,
        "near_ties": sum(gap < NEAR_TIE for gap in gaps),
        "furthest_behind": max(gaps, default=0.0),
    }


def graph_step(model: PreTrainedModel, shape: Shape) -> dict[str, Any]:
    """A step of `graph_decoding`: its time, its tokens against those of eager steps, its kernels, the cache's bytes."""
    make = packed(model, shape[1] + ROOM)
    found: dict[str, Any] = {"ms_per_step": milliseconds(model, Variant("turboquant", make, one_graph=True), shape)}
    cache = filled(make, model, shape)
    tokens = go_on(model, random_ids(shape, model), cache, CHECKED, custom_generate=graph_decoding)
    found["against_eager"] = against_eager(model, make, tokens, shape)
    found |= {"bytes_held": bytes_held(cache), "bytes_with_heads": bytes_with_heads(cache)}
    graph = latest_steps[cache].graph
    if graph is not None:
        found["kernels"] = kernels(graph.replay, ranks_of(model))
    return found


def bytes_with_heads(cache: TurboQuantCache) -> int:
    """Bytes of keys and values in a preallocated cache, without a layer's few bytes of counts."""
    held = [layer.store.tensors for layer in cache.layers]
    return sum(tensor.nbytes for each in held for tensor in (each.blocks.data, each.rows))


def meet(ranks: int) -> None:
    if ranks > 1:
        dist.barrier()
    if ON_GPU:
        torch.cuda.synchronize()


def microseconds(call: Callable[[], Any], ranks: int, times: int = REPLAYS) -> float:
    """Mean time of a call, by the GPU's clock where there is one."""
    call()
    meet(ranks)
    call()  # in which the processes wait for one another
    if not ON_GPU:
        start = time.perf_counter()
        for _ in range(times):
            call()
        return 1e6 * (time.perf_counter() - start) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / times


def kernels(replay: Callable[[], Any], ranks: int) -> dict[str, Any]:
    """Where a replayed step's time goes, in microseconds, by groups of kernels."""
    unobserved = microseconds(replay, ranks)
    for replays in (1, 1 + REPLAYS):  # the first starts the profiler
        meet(ranks)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(replays):
                replay()
            torch.cuda.synchronize()
    spans = [(e.time_range.start, e.time_range.end, e.name) for e in trace.events() if e.device_type == DeviceType.CUDA]
    return {"us_by_events": unobserved} | by_group(sorted(spans), 1 + REPLAYS)


def by_group(spans: list[tuple[float, float, str]], replays: int) -> dict[str, Any]:
    """Means over all replays but the first, in which the processes wait for one another.

    Args:
        spans: Begin and end in microseconds, and name of each kernel, sorted.
        replays: Of equally many kernels.

    Returns:
        `wall_us`; `busy_us`, in which any kernel runs; `gaps_us`, the rest. `groups` sum up kernels, some of which
        begin before the one in front has ended. `layer` has name, begin and end of the kernels of one layer.
    """
    spans = spans[len(spans) // replays :]
    busy, until = 0.0, spans[0][0]
    groups = dict.fromkeys([*KERNELS, "other"], 0.0)
    for begin, end, name in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
        group = next((group for group, pattern in KERNELS.items() if re.search(pattern, name, re.IGNORECASE)), "other")
        groups[group] += (end - begin) / (replays - 1)
    wall = (until - spans[0][0]) / (replays - 1)
    at = [i for i, span in enumerate(spans) if span[2].startswith("decode_split")][-3:-1]
    layer = spans[at[0] : at[1]] if len(at) == 2 else []
    return {
        "wall_us": wall,
        "busy_us": busy / (replays - 1),
        "gaps_us": wall - busy / (replays - 1),
        "launches": len(spans) / (replays - 1),
        "groups": groups,
        "layer": [[name[:60], begin - layer[0][0], end - layer[0][0]] for begin, end, name in layer],
    }


@torch.no_grad()
def given_logits(model: PreTrainedModel, prompt: int) -> torch.Tensor:
    """Logits `[GIVEN, V]` of given tokens, one a step, after a prompt."""
    model.set_attn_implementation("turboquant")
    ids, cache = random_ids((1, prompt + GIVEN), model), packed(model, None)()
    model(ids[:, :prompt], **as_input(cache), logits_to_keep=1)
    steps = (model(ids[:, t : t + 1], **as_input(cache)).logits[0, 0] for t in range(prompt, prompt + GIVEN))
    return torch.stack([step.float().cpu() for step in steps])


def agreement(actual: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """How close logits are: relative RMS of the difference, mean KL divergence in nats, equal likeliest tokens."""
    difference = (actual - expected).double().norm() / expected.double().norm()
    expected_log, actual_log = (x.double().log_softmax(-1) for x in (expected, actual))
    divergence = (expected_log.exp() * (expected_log - actual_log)).sum(-1).mean()
    return {
        "relative_rms": difference.item(),
        "mean_kl": divergence.item(),
        "same_top1": (actual.argmax(-1) == expected.argmax(-1)).double().mean().item(),
    }


# All-reduces


class PeerMemory:
    """A buffer that the processes' GPUs read from one another, for messages of up to `elements` bf16."""

    buffer: torch.Tensor | None = None

    @classmethod
    def of(cls, elements: int) -> torch.Tensor:
        if cls.buffer is None or cls.buffer.numel() < elements:
            cls.buffer = symmetric_memory.empty(elements, dtype=torch.bfloat16, device=device())
            symmetric_memory.rendezvous(cls.buffer, dist.group.WORLD)
        return cls.buffer


def one_shot_all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Sum over all processes: each reads the buffers of the others. Without GPUs, gloo computes the sum."""
    if x.is_cuda:
        buffer = PeerMemory.of(x.numel())
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        part = buffer[: x.numel()].view(x.shape)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(part, x.contiguous(), "sum", name)
    reduced = x.clone()
    dist.all_reduce(reduced)
    return reduced


def may_read_peers() -> bool:
    """Whether NVLink multicast is off, which peer memory would be set up with."""
    return not ON_GPU or os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == "1"


def all_reduces(model: PreTrainedModel, batches: list[int]) -> dict[str, Any]:
    """Microseconds of an all-reduce of a step of so many sequences, in a graph of nothing else: NCCL's, and of each
    process reading its peers."""
    found: dict[str, Any] = {}
    for batch in batches:
        message = torch.full((batch, model.config.hidden_size), 1.0, dtype=torch.bfloat16, device=device())
        ways: dict[str, Callable[[], Any]] = {"nccl": lambda x=message: dist.all_reduce(x)}
        if may_read_peers():
            expected = message.clone()
            dist.all_reduce(expected)
            same = torch.equal(one_shot_all_reduce(message), expected)
            ways["one_shot"] = partial(one_shot_all_reduce, message)
        message.zero_()  # NCCL adds up in place
        times = {name: microseconds(*captured(call)) / COLLECTIVES for name, call in ways.items()}
        found[str(batch)] = {"bytes": message.nbytes, "us": times}
        if may_read_peers():
            found[str(batch)]["one_shot_is_right"] = same
    return found


def captured(call: Callable[[], Any]) -> tuple[Callable[[], Any], int]:
    """`COLLECTIVES` calls, as a graph on a GPU; and the processes that take part."""

    def calls() -> None:
        for _ in range(COLLECTIVES):
            call()

    if not ON_GPU:
        return calls, dist.get_world_size()
    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph.replay, dist.get_world_size()


# Pages, generate(), device_map


def page_step(model: PreTrainedModel, shape: Shape, level: int) -> dict[str, Any]:
    """A step of continuous batching on packed pages, compiled as by `default_compile_level`, all requests in flight."""
    batch, context = shape
    config = TurboQuantConfig.from_preset(PRESET)
    # Also for each request's dense tokens, which take four times their number of packed ones.
    arguments = argparse.Namespace(seed=0, steps=bench_serve.STEPS, cache_tokens=batch * (context + 4096))
    row = bench_serve.decoded(
        model, bench_serve.Engine(PRESET, config=config, compile_level=level), batch, context, arguments
    )
    return {name: row[name] for name in row if name in ("ms_per_step", "steps", "warm_up_s", "error")}


def compiled_step(model: PreTrainedModel, shape: Shape, guards: bool = True) -> dict[str, Any]:
    """A step that `generate()` compiles; as it is, or without guards on modules and with local shards."""
    counters.clear()
    found: dict[str, Any] = {}
    make = packed(model, shape[1] + ROOM)
    if not guards and ranks_of(model) > 1:
        before = given_logits(model, shape[1] // 16)
        keep_local_shards(model)
        found["local_shards_give_equal_logits"] = torch.equal(given_logits(model, shape[1] // 16), before)
    model.generation_config.compile_config = None if guards else without_module_guards()
    found["ms_per_step"] = milliseconds(model, Variant("turboquant", make), shape)
    model.generation_config.compile_config = None
    return found | {
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "cuda_graphs_skipped": counters["inductor"]["cudagraph_skips"],
    }


def eager_step(model: PreTrainedModel, shape: Shape, cache: str) -> dict[str, Any]:
    """A step that nothing compiles, of transformers' own cache with sdpa or of ours."""
    if cache == PRESET:
        variant = Variant("turboquant", packed(model, None))
    else:
        variant = Variant("sdpa", partial(DynamicCache, config=model.config))
    return {"ms_per_step": milliseconds(model, variant, shape)}


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: int) -> list[int]:
    """`GIVEN` tokens after a random prompt."""
    model.set_attn_implementation("turboquant")
    tokens = go_on(model, random_ids((1, prompt), model), packed(model, None)(), GIVEN)
    return tokens[0, prompt + 1 :].tolist()


Job = Callable[[PreTrainedModel], Any]


def label(kind: str, shape: Shape) -> str:
    return f"{kind}, {shape[0]} x {shape[1]}"


def jobs_of(part: str, tiny: bool) -> dict[str, Job]:
    """Measurements of one part, on one GPU and with tensor parallelism, or with `device_map`."""
    shapes, pages = (TINY_SHAPES, TINY_PAGES) if tiny else (SHAPES, PAGES)
    if part == "graph_decoding":
        jobs: dict[str, Job] = {label(part, shape): partial(graph_step, shape=shape) for shape in shapes}
        return jobs | {"logits": partial(given_logits, prompt=shapes[-1][1])}
    if part == "pages":
        return {
            label(name, pages): partial(page_step, shape=pages, level=level)
            for name, level in (("pages", 0), ("pages, compiled", 1))
        }
    if part == "generate":
        return {
            label("generate, compiled", shapes[0]): partial(compiled_step, shape=shapes[0]),
            label("generate, without guards", shapes[0]): partial(compiled_step, shape=shapes[0], guards=False),
        }
    if part == "device_map":
        caches = ("DynamicCache", PRESET)
        jobs = {label(f"eager {c}", s): partial(eager_step, shape=s, cache=c) for s in shapes for c in caches}
        return jobs | {"greedy": partial(greedy, prompt=shapes[-1][1])}
    return {}


PARTS = ("graph_decoding", "pages", "generate", "all_reduce", "device_map")
"""Steps of `graph_decoding`; of many requests on packed pages; that `generate()` compiles; all-reduces alone; eager
steps, with layers on both GPUs. Measured in this order."""


class Process:
    """One of the processes under torchrun. The first one writes the record."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.start = arguments, time.perf_counter()
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if ON_GPU:
            torch.cuda.set_device(device())
        dist.init_process_group("nccl" if ON_GPU else "gloo", **({"device_id": device()} if ON_GPU else {}))
        # Who waits in this one leaves its GPU alone.
        self.objects = dist.new_group(backend="gloo")
        changes = {"num_hidden_layers": arguments.layers} | (TINY | {"vocab_size": 256} if arguments.tiny else {})
        self.config = LlamaConfig(**{**LLAMA_8B, **changes})
        shape = "tiny" if arguments.tiny else "8B shape"
        self.record = provenance(device(), f"random Llama, {shape}, {arguments.layers} layers")
        self.record |= {"device": f"2 × {self.record['device']}", "dtype": "bfloat16", "preset": PRESET}
        if arguments.output.exists():  # of other parts
            self.record = json.loads(arguments.output.read_text(encoding="utf-8"))

    def parts(self, *names: str) -> list[str]:
        return [name for name in PARTS if name in names and name in self.arguments.parts]

    def late(self) -> bool:
        return time.perf_counter() - self.start > self.arguments.seconds

    def save(self, place: str, found: dict[str, Any]) -> None:
        """At once: what is measured stays measured if something later fails."""
        if self.rank == 0:
            self.record.setdefault(place, {}).update(found)
            self.arguments.output.write_text(json.dumps(self.record, indent=2) + "\n", encoding="utf-8")
            short = {
                name: {key: value for key, value in one.items() if key != "kernels"} if isinstance(one, dict) else one
                for name, one in ((name, one[0] if isinstance(one, list) else one) for name, one in found.items())
            }
            print(f"{time.perf_counter() - self.start:.0f} s, {place}: {json.dumps(short)}", flush=True)

    def gather(self, found: Any) -> list[Any]:
        """Results of each process."""
        every: list[Any] = [None] * self.ranks
        dist.all_gather_object(every, found, group=self.objects)
        return every

    def attempt(self, job: Job, model: PreTrainedModel) -> Any:
        """Result of a job after a new compilation, or its error."""
        release()
        try:
            return job(model)
        except Exception as error:  # what comes next may go well
            return {"error": f"{type(error).__name__}: {error}"[:300]}

    def one_gpu(self) -> dict[str, Any]:
        """All jobs of a model on one GPU, shared out."""
        jobs: dict[str, Job] = {}
        for part in self.parts("graph_decoding", "pages", "generate", "device_map"):
            jobs |= jobs_of(part, self.arguments.tiny)
        mine = {}
        if jobs:
            model = load(self.config, device_map=device())
            for name in list(jobs)[self.rank :: self.ranks]:
                if self.late():
                    break
                mine[name] = self.attempt(jobs[name], model)
                shown = "" if isinstance(mine[name], (torch.Tensor, list)) else mine[name].get("ms_per_step")
                print(f"{time.perf_counter() - self.start:.0f} s, GPU {self.rank}: {name} {shown}", flush=True)
            del model
            release()
        found = {name: one for each in self.gather(mine) for name, one in each.items()}
        kept = {name: found.pop(name) for name in ("logits", "greedy") if name in found}
        self.save("one_gpu", found)
        return kept

    def tensor_parallel(self, expected: dict[str, Any]) -> None:
        """All jobs of a model that the processes hold together."""
        parts = self.parts("graph_decoding", "all_reduce", "pages", "generate")
        if not parts:
            return
        model = load(self.config, distributed_config=DistributedConfig(tp_plan="auto"))
        for part in parts:
            jobs = jobs_of(part, self.arguments.tiny)
            if part == "all_reduce":
                jobs["all_reduce"] = partial(all_reduces, batches=[1, 8, 32])
            for name, job in jobs.items():
                if self.gather(self.late())[0]:
                    break
                found = self.attempt(job, model)
                if isinstance(found, torch.Tensor) and isinstance(expected.get(name), torch.Tensor):
                    found = agreement(found, expected[name])
                if isinstance(found, dict):
                    self.save("tensor_parallel", {name: self.gather(found)})
        # A captured CUDA graph holds its communicator: destroying that first would wait forever.
        del model
        release()

    def device_map(self, expected: dict[str, Any]) -> None:
        """The jobs of a model that the first process spreads over both GPUs."""
        if not self.parts("device_map") or self.rank or self.late():
            return
        by_config = self.arguments.tiny and ON_GPU
        model = load(self.config, device_map=by_hand(self.config) if by_config else "auto")
        if ON_GPU and len({parameter.device for parameter in model.parameters()}) < 2:
            raise RuntimeError("`device_map` put every layer on one device.")
        shapes = TINY_SHAPES if self.arguments.tiny else SHAPES
        cache = filled(packed(model, None), model, shapes[0])
        self.save("device_map", {"bytes_by_device": cache.memory_footprint().by_device})
        del cache
        for name, job in jobs_of("device_map", self.arguments.tiny).items():
            if self.late():
                break
            found = self.attempt(job, model)
            if isinstance(found, list) and isinstance(expected.get(name), list):
                found = {"tokens": GIVEN, "equal": sum(a == b for a, b in zip(found, expected[name], strict=True))}
            self.save("device_map", {name: found})

    def run(self) -> None:
        expected = self.one_gpu()
        self.tensor_parallel(expected)
        self.device_map(expected)
        self.gather(None)
        PeerMemory.buffer = None
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short contexts, to try the script")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which no measurement starts")
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULTS / f"multi-gpu-{slug(device())}.json",
        help="a JSON file; it keeps other parts",
    )
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        Process(arguments).run()
        return
    if torch.cuda.device_count() < 2 and (ON_GPU or not arguments.tiny):
        sys.exit(f"This needs two GPUs, and torch finds {torch.cuda.device_count()}.")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "examples.measure.speed.bench_multi_gpu", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=ENVIRONMENT | dict(os.environ)).returncode)


if __name__ == "__main__":
    main()
