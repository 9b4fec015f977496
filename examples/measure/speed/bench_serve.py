"""Many requests at once, on transformers' continuous batching: its own pages against packed ones.

`decode BxT` generates for B prompts of T tokens at once. From when the last prompt was read on, all are in flight, and
every step makes a token of each: that is the time of a step. Prompts are read while earlier ones are being answered,
as an engine does; their speed is that of all of them together. `static` is one batch of the same shape in a
preallocated cache of ours, under `graph_decoding`: no request can enter or leave it.

`trace` serves requests whose lengths are drawn log-uniformly from a seed, all there at once or arriving at random
moments (`--rate`). The time per token is a request's mean; a request is in flight from when its prompt begins to be
read. Memory is what torch had allocated at most, beyond the weights; engines take what there is for their pages.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    StaticCache,
)
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.utils import WorkloadHints, find_head_dim, find_num_key_value_heads
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, logging

from examples.measure.speed import bench_generate
from examples.provenance import SHIPPED_MODEL, provenance
from tq_hf import TurboQuantBatching, TurboQuantCache, TurboQuantConfig

STOCK_PAGE = ContinuousBatchingConfig.page_size
STEPS = 64
"""Steps that a decode cell measures."""
SIZES: dict[str, dict[str, Any]] = {
    "cuda": dict(requests=64, prompts=[200, 16384], answers=[32, 1024], shapes=["32x2048", "64x16384"]),
    "cpu": dict(requests=8, prompts=[50, 400], answers=[8, 32], shapes=["4x256"], cache_tokens=8192),
}
"""Default arguments."""


@dataclass(frozen=True)
class Engine:
    """Engine: transformers' pages with an attention implementation, or packed pages with a configuration."""

    name: str
    attention: str = "sdpa"
    config: TurboQuantConfig | None = None
    compile_level: int = 0
    scheduler: str = "fifo"


def engines(
    configs: dict[str, TurboQuantConfig], levels: Sequence[int] = (0,), schedulers: Sequence[str] = ("fifo",)
) -> list[Engine]:
    """Installed engines; packed pages with all combinations of options, named where they are not the default."""
    found = [Engine("stock, sdpa")]
    for version, available in ((2, is_flash_attn_2_available), (3, is_flash_attn_3_available)):
        if available():
            found.append(Engine(f"stock, flash {version}", f"flash_attention_{version}"))
    for (name, config), level, scheduler in itertools.product(configs.items(), levels, schedulers):
        said = [f"compile level {level}"] * bool(level) + [scheduler] * (scheduler != "fifo")
        found.append(Engine(", ".join([name, *said]), "sdpa", config, level, scheduler))
    return found


@dataclass(frozen=True)
class Request:
    """A prompt, how many tokens it is answered with, and when it comes, in seconds."""

    prompt: list[int]
    new: int
    arrival: float = 0.0


def random_prompt(generator: random.Random, length: int, vocabulary: int) -> list[int]:
    return generator.choices(range(3, vocabulary), k=length)


def trace(arguments: argparse.Namespace, vocabulary: int, rate: float | None) -> list[Request]:
    """Requests of log-uniform lengths. With `rate` they arrive in a Poisson process of this number a second."""
    generator, arrivals = random.Random(arguments.seed), random.Random(arguments.seed + 1)

    def length(least: int, most: int) -> int:
        return round(math.exp(generator.uniform(math.log(least), math.log(most))))

    requests, now = [], 0.0
    for _ in range(arguments.requests):
        prompt = random_prompt(generator, length(*arguments.prompts), vocabulary)
        requests.append(Request(prompt, length(*arguments.answers), now))
        now += 0.0 if rate is None else arrivals.expovariate(rate)
    return requests


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def session(model: PreTrainedModel, engine: Engine, requests: list[Request], cache_tokens: int | None) -> Iterator[Any]:
    """A running manager, sized for these requests as `generate_batch` would."""
    model.set_attn_implementation(engine.attention)
    options = ContinuousBatchingConfig(
        auto_switch_to_flash=False, default_compile_level=engine.compile_level, scheduler_type=engine.scheduler
    )
    if cache_tokens is not None:
        options.num_blocks = -(-cache_tokens // STOCK_PAGE)
    longest, most = max(len(r.prompt) for r in requests), max(r.new for r in requests)
    owner = model if engine.config is None else TurboQuantBatching(model, engine.config)
    manager = owner.init_continuous_batching(
        GenerationConfig(max_new_tokens=most, do_sample=False, eos_token_id=-1),
        options,
        WorkloadHints(longest, most, len(requests)),
    )
    try:
        manager.flash_room = flash_room(model, manager.continuous_batching_config) if cache_tokens is None else None
        start = time.perf_counter()
        manager.warmup(**({} if engine.config is None else {"now": True}))
        manager.warm_up_s = time.perf_counter() - start
        manager.start()
        yield manager
    finally:
        manager.stop(block=True, hard_stop=True)
        manager.destroy()


@dataclass
class Outcome:
    """Results of requests.

    Attributes:
        seconds: From the first arrival to the last token.
        tokens: Generated until then, also those of requests that time ran out for.
        results: Those that finished, with the moment each arrived.
        unfinished: How many did not.
    """

    seconds: float
    tokens: int
    results: list[tuple[float, Any]]
    unfinished: int


def serve(manager: Any, requests: list[Request], limit: float = math.inf) -> Outcome:
    """Send requests when they come, and wait for the answers, for `limit` seconds at most.

    Raises:
        RuntimeError: A request failed, or the engine.
    """
    coming, arrived, results = list(reversed(requests)), {}, []
    start = now = time.perf_counter()
    while len(results) < len(requests) and now - start < limit:
        while coming and start + coming[-1].arrival <= now:
            request = coming.pop()
            name = manager.add_request(request.prompt, max_new_tokens=request.new, record_timestamps=True)
            arrived[name] = start + request.arrival
        wait = min(0.2, start + coming[-1].arrival - now) if coming else 0.2
        result = manager.get_result(timeout=max(0.001, wait))
        if result is not None:
            if result.error is not None:
                raise RuntimeError(result.error)
            # In tensor parallelism all processes have the answers, and only the first one's requests count.
            results.append((arrived.get(result.request_id, start), result))
        elif not manager.is_running() or manager.background_thread_status.fatal_error is not None:
            raise RuntimeError(str(manager.background_thread_status.fatal_error))
        now = time.perf_counter()
    tokens = sum(len(result.generated_tokens) for _, result in results)
    if len(results) < len(requests):
        tokens += sum(
            len(state.generated_tokens) for state in manager.batch_processor.scheduler.active_requests.values()
        )
    return Outcome(now - start, tokens, results, len(requests) - len(results))


def percentile(values: list[float], share: float) -> float | None:
    """The smallest value that so large a share of them does not exceed; None of nothing."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def in_flight(results: list[Any]) -> dict[str, float]:
    """How many requests were being worked on, at most and in the mean over time."""
    changes = sorted(change for result in results for change in zip(result.lifespan, (1, -1), strict=True))
    if not changes:
        return {}
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    worked = sum(result.lifespan[1] - result.lifespan[0] for result in results)
    return {"in_flight_most": most, "in_flight_mean": worked / (changes[-1][0] - changes[0][0])}


def latencies(outcome: Outcome) -> dict[str, float | None]:
    """Times to the first token and per token. A request that was preempted counts from when it was read again."""
    first = [result.timestamps[0] - arrived for arrived, result in outcome.results]
    stamps = [result.timestamps for _, result in outcome.results if len(result.timestamps) > 1]
    each = [(times[-1] - times[0]) / (len(times) - 1) for times in stamps]
    return {
        f"{name}_{quantile}": percentile(values, share)
        for name, values in (("first_token_s", first), ("per_token_s", each))
        for quantile, share in (("p50", 0.5), ("p99", 0.99))
    }


def held(manager: Any) -> dict[str, int]:
    """The engine's pages: bytes, and tokens they have room for. Where it takes what there is, also how many that would
    be under flash attention in bf16."""
    cache = manager.batch_processor.cache
    found = {"cache_bytes": cache.cache_tensor.nbytes, "cache_tokens": cache.num_sectors * cache.tokens_per_sector}
    return found | ({} if manager.flash_room is None else {"flash_room_tokens": manager.flash_room})


def flash_room(model: PreTrainedModel, options: ContinuousBatchingConfig) -> int:
    """Tokens that stock pages would have room for under flash attention, by transformers' own arithmetic; that need not
    be installed.

    Args:
        model: All that is in memory now.
        options: A manager's, resolved.
    """
    config = deepcopy(model.config.get_text_config())
    config._attn_implementation = "flash_attention_2"
    block = 2 * config.num_hidden_layers * find_num_key_value_heads(config) * find_head_dim(config) * STOCK_PAGE
    block *= model.dtype.itemsize
    options = replace(options, page_size=STOCK_PAGE, num_blocks=None)
    handler = PagedAttentionMemoryHandler(
        config, options, model.dtype, block, STOCK_PAGE, block, ["full_attention"], model_supports_logits_to_keep=True
    )
    return handler.infer_max_batch_tokens_and_num_sectors()[1] * STOCK_PAGE


def peak(model: PreTrainedModel) -> dict[str, int]:
    """Peak of allocated bytes since the last call, without the weights. Not counted on a CPU."""
    if model.device.type != "cuda":
        return {}
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"peak_bytes_beyond_weights": torch.cuda.max_memory_allocated() - weights}


def warm_up(manager: Any, vocabulary: int) -> None:
    """Warm up with prompts of some lengths and decode steps, not measured."""
    generator = random.Random(0)
    serve(manager, [Request(random_prompt(generator, n, vocabulary), 4) for n in (20, 150, 300)])


def traced(model: PreTrainedModel, engine: Engine, requests: list[Request], arguments: argparse.Namespace) -> Any:
    """The row of an engine that serves a trace."""
    vocabulary = model.config.get_text_config().vocab_size
    with session(model, engine, requests, arguments.cache_tokens) as manager:
        warm_up(manager, vocabulary)
        if model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        outcome = serve(manager, requests, arguments.seconds)
        results = [result for _, result in outcome.results]
        row: dict[str, Any] = {"tokens_per_second": outcome.tokens / outcome.seconds, "seconds": outcome.seconds}
        row |= latencies(outcome) | in_flight(results) | held(manager) | peak(model)
        return row | ({"unfinished": outcome.unfinished} if outcome.unfinished else {})


def step_of(results: list[Any], prompt_tokens: int) -> dict[str, Any]:
    """Time of a step while all requests are in flight, and the speed of reading their prompts."""
    begin, end = max(r.timestamps[0] for r in results), min(r.timestamps[-1] for r in results)
    last = max(results, key=lambda result: result.timestamps[0])
    within = [stamp for stamp in last.timestamps if begin <= stamp <= end]
    if len(within) < 2:
        return {"error": "the first answers ended before the last prompt was read"}
    start = min(result.created_time for result in results)
    return {
        "ms_per_step": 1e3 * (within[-1] - within[0]) / (len(within) - 1),
        "steps": len(within) - 1,
        "prompt_tokens_per_second": prompt_tokens / (begin - start),
    }


def decode_requests(batch: int, context: int, vocabulary: int, arguments: argparse.Namespace) -> list[Request]:
    """Requests of `context` tokens that are all in flight for `arguments.steps` steps."""
    generator = random.Random(arguments.seed)
    # Early prompts are answered while later ones are read, a step for each 8192 tokens, the default.
    new = arguments.steps + math.ceil(batch * context / 8192) + batch // 8 + 8
    return [Request(random_prompt(generator, context, vocabulary), new) for _ in range(batch)]


def decoded(
    model: PreTrainedModel, engine: Engine, batch: int, context: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The row of an engine with `batch` requests of `context` tokens in flight."""
    vocabulary = model.config.get_text_config().vocab_size
    requests = decode_requests(batch, context, vocabulary, arguments)
    with session(model, engine, requests, arguments.cache_tokens) as manager:
        row: dict[str, Any] = held(manager)
        # A token more for each request, for pages that are not full.
        if row["cache_tokens"] < batch * (context + requests[0].new):
            return row | {"error": f"room for {row['cache_tokens']:,} tokens"}
        warm_up(manager, vocabulary)
        row["warm_up_s"] = manager.warm_up_s
        if model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        results = [result for _, result in serve(manager, requests).results]
        row |= peak(model)
    return row | step_of(results, batch * context)


def static(model: PreTrainedModel, config: TurboQuantConfig, batch: int, context: int) -> dict[str, Any]:
    """The row of one batch in a preallocated cache, whose step is one graph."""
    torch._dynamo.reset()
    room = context + bench_generate.ROOM
    make = partial(TurboQuantCache, model.config, config, max_cache_len=room)
    variant = bench_generate.Variant("turboquant", make, one_graph=True)
    return bench_generate.measure(model, variant, batch, context)


def generated(model: PreTrainedModel, make: Callable[[], Cache], batch: int, context: int) -> dict[str, Any]:
    """The row of `generate()` as transformers has it, on one batch: in a `StaticCache` it compiles."""
    model.set_attn_implementation("sdpa")
    ids = torch.randint(3, model.config.get_text_config().vocab_size, (batch, context), device=model.device)
    variant = bench_generate.Variant("sdpa", make)
    return {"ms_per_step": 1e3 * bench_generate.step_seconds(model, variant, ids, variant.make())}


def bf16_floor(model: PreTrainedModel, batch: int, context: int, gigabytes_per_second: float) -> float:
    """Milliseconds in which weights and bf16 keys and values are read once: no engine on bf16 pages is faster."""
    config = model.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = 2 * config.num_hidden_layers * config.num_key_value_heads * dim
    weights = sum(p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name)
    return 2 * (weights + batch * context * rows) / gigabytes_per_second / 1e6


def random_hybrid(layers: int, device: torch.device, **sizes: int) -> PreTrainedModel:
    """A random model of Qwen3-Next's shape in bf16, three of four layers linear, with dense MLPs."""
    shape = dict(hidden_size=2048, intermediate_size=5120, vocab_size=32768) | sizes
    config = Qwen3NextConfig(**shape, num_hidden_layers=layers, mlp_only_layers=list(range(layers)))
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def loaded(name: str | None, layers: int, device: torch.device, hybrid: bool = False) -> tuple[PreTrainedModel, str]:
    """The model and what it is called."""
    if hybrid:
        return random_hybrid(layers, device), f"random Qwen3-Next shape, {layers} layers with dense MLPs"
    if name is None and device.type == "cuda":
        return bench_generate.random_llama(device, layers), f"random Llama, 8B shape, {layers} layers"
    name = name or SHIPPED_MODEL
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval(), name


def cells(
    model: PreTrainedModel, arguments: argparse.Namespace
) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Measurements: the first columns of each row, and the function that computes the others."""
    vocabulary = model.config.get_text_config().vocab_size
    dense = dict(sink_tokens=arguments.sink_tokens, residual_length=arguments.residual_length)
    configs = {preset: TurboQuantConfig.from_preset(preset, **dense) for preset in arguments.presets}
    chosen = engines(configs, arguments.compile_levels, arguments.schedulers)
    for shape in arguments.shapes:
        batch, context = map(int, shape.split("x"))
        named = {"kind": "decode", "batch": batch, "context": context}
        for engine in chosen:
            yield (
                named | {"engine": engine.name},
                lambda e=engine, b=batch, c=context: decoded(model, e, b, c, arguments),
            )
        if arguments.hybrid:
            room = context + bench_generate.ROOM
            for kind, room_of in ((DynamicCache, {}), (StaticCache, {"max_cache_len": room})):
                make = partial(kind, config=model.config, **room_of)
                yield (
                    named | {"engine": f"generate(), {kind.__name__}"},
                    lambda m=make, b=batch, c=context: generated(model, m, b, c),
                )
        elif model.device.type == "cuda":
            for preset, config in configs.items():
                yield (
                    named | {"engine": f"{preset}, static, graph_decoding"},
                    lambda p=config, b=batch, c=context: static(model, p, b, c),
                )
    for rate in (None, arguments.rate) if arguments.rate else (None,):
        requests = trace(arguments, vocabulary, rate)
        named = {"kind": "trace", "arrivals": "all at once" if rate is None else f"{rate:g} a second"}
        for engine in chosen:
            yield named | {"engine": engine.name}, lambda e=engine, r=requests: traced(model, e, r, arguments)


def name_of(row: dict[str, Any]) -> str:
    """Baseline of `--only`."""
    what = f"{row['batch']}x{row['context']}" if row["kind"] == "decode" else row["arrivals"]
    return f"{row['kind']} {what} {row['engine']}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = SIZES["cuda" if torch.cuda.is_available() else "cpu"]
    parser.add_argument("--model", help="a model of the hub or a folder; by default a random Llama of 8B shape")
    parser.add_argument("--layers", type=int, default=32, help="layers of the random model")
    parser.add_argument(
        "--hybrid", action="store_true", help="a random model of Qwen3-Next's shape, with linear layers"
    )
    parser.add_argument("--presets", nargs="+", default=["4bit_nc"], help="what pages are packed to")
    parser.add_argument("--sink-tokens", type=int, default=TurboQuantConfig.sink_tokens)
    parser.add_argument("--residual-length", type=int, default=TurboQuantConfig.residual_length)
    levels = [0, 1] if torch.cuda.is_available() else [0]
    parser.add_argument("--compile-levels", nargs="+", type=int, default=levels, help="of decode steps on packed pages")
    parser.add_argument("--schedulers", nargs="+", default=["fifo"], help="of packed pages: fifo, shortest_first")
    parser.add_argument("--only", help="only cells whose name this finds, e.g. 'trace', '^decode 32x2048 4bit_nc$'")
    parser.add_argument("--shapes", nargs="*", default=sizes["shapes"], help="requests x tokens of decode cells")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps that a decode cell measures")
    parser.add_argument("--requests", type=int, default=sizes["requests"], help="requests of the trace")
    for name in ("prompts", "answers"):
        what = f"least and most tokens of {name}"
        parser.add_argument(f"--{name}", type=int, nargs=2, default=sizes[name], metavar=("LEAST", "MOST"), help=what)
    parser.add_argument("--rate", type=float, help="requests a second, for a trace that arrives little by little, too")
    parser.add_argument("--seconds", type=float, default=120.0, help="the most a trace may take")
    parser.add_argument("--seed", type=int, default=0, help="seed of lengths, prompts and arrivals")
    parser.add_argument(
        "--cache-tokens", type=int, default=sizes.get("cache_tokens"), help="room; by default what fits"
    )


@torch.no_grad()
def run(
    arguments: argparse.Namespace, save: Callable[[dict[str, Any]], None], read: Callable[[torch.device], float]
) -> dict[str, Any]:
    """All cells; prints a line each, saves the record after each, and returns it. `read` measures the rate at which a
    GPU reads, in GB/s."""
    logging.set_verbosity_error()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, name = loaded(arguments.model, arguments.layers, device, arguments.hybrid)
    model.generation_config.eos_token_id = None
    record: dict[str, Any] = provenance(device, name)
    record["trace"] = {name: getattr(arguments, name) for name in ("requests", "prompts", "answers")}
    if device.type == "cuda":
        record["read_gb_s"] = read(device)
    record["rows"] = rows = []
    for begin, measure in cells(model, arguments):
        if arguments.only is not None and not re.search(arguments.only, name_of(begin)):
            continue
        try:
            row = begin | measure()
        except torch.OutOfMemoryError:
            row = begin | {"error": "out of memory"}
        except (RuntimeError, MemoryError, ValueError) as error:
            row = begin | {"error": str(error).splitlines()[0][:120]}
        if "read_gb_s" in record and row["kind"] == "decode" and not arguments.hybrid:
            row["bf16_floor_ms"] = bf16_floor(model, row["batch"], row["context"], record["read_gb_s"])
        rows.append(row)
        print(row, flush=True)
        save(record)
        release()
    return record
