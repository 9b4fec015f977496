"""What tests of continuous batching need: models, prompts, and answers to compare with."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tq_kernels.types import Sequences
from transformers import (
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

from tests.support.tiny_models import VOCAB, build, gemma4_config, random_weights
from tq_hf import Balance, TurboQuantBatching, TurboQuantCache, TurboQuantConfig
from tq_hf.batching import TurboQuantBatchingManager, allocators
from tq_hf.batching import cache as paged_cache
from tq_hf.batching.allocators import TableShape
from tq_hf.batching.cache import TurboQuantPagedCache
from tq_hf.compat import as_input

Tokens = list[int]


def model_of(name: str = "llama", **changes: Any) -> PreTrainedModel:
    """A random model of two layers."""
    return build(name, **(dict(num_hidden_layers=2) | changes))


def mixed(name: str, **changes: Any) -> PreTrainedModel:
    """A random model of a sliding and a full layer; Qwen2's are in the other order."""
    kinds = ["sliding_attention", "full_attention"]
    layers = dict(layer_types=kinds[::-1] if name == "qwen2" else kinds, sliding_window=96)
    return model_of(name, **(layers | changes))


def hybrid(**changes: Any) -> PreTrainedModel:
    """A random Qwen3-Next of a linear, a full and a linear layer."""
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    return model_of("qwen3_next", **(dict(num_hidden_layers=3, layer_types=kinds) | changes))


def gemma4(**changes: Any) -> PreTrainedModel:
    """A random model with the heads of Gemma 4 26B-A4B: 16 of queries, 8 of 256 channels of keys and values in sliding
    windows, 2 of 512 in full attention, whose values are made of what its keys are."""
    kinds = changes.get("layer_types", ["sliding_attention", "sliding_attention", "full_attention"])
    shape = dict(num_attention_heads=16, num_key_value_heads=8, num_global_key_value_heads=2, head_dim=256)
    shape |= dict(global_head_dim=512, layer_types=kinds, num_hidden_layers=len(kinds), hidden_size_per_layer_input=0)
    return random_weights(gemma4_config(**(shape | changes)))


def gemma4_sharing(**changes: Any) -> PreTrainedModel:
    """Likewise with those of Gemma 4 E4B: 8 of queries, 2 of keys and values everywhere. The last three layers read
    the keys and values of the two before."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    shape = dict(layer_types=kinds, num_kv_shared_layers=3, hidden_size_per_layer_input=16)
    heads = dict(num_attention_heads=8, num_key_value_heads=2, num_global_key_value_heads=None, attention_k_eq_v=False)
    return gemma4(**(shape | heads | changes))


def prompts(lengths: Sequence[int], seed: int = 1) -> list[Tokens]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


def greedy(new: int, answers: int = 1, **options: Any) -> GenerationConfig:
    """A number of answers of `new` tokens; `generate()` would refuse several greedy ones."""
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, **options)
    if answers > 1:
        config.num_return_sequences = answers
    return config


def options(**changes: Any) -> ContinuousBatchingConfig:
    """A pool of 200 pages of 128 tokens."""
    usual = dict(page_size=128, num_blocks=200, max_batch_tokens=2048, max_requests_per_batch=64)
    return ContinuousBatchingConfig(**(usual | changes))


def answers(results: dict[str, Any]) -> list[Tokens]:
    """The generated tokens of what `generate_batch` returns."""
    for result in results.values():
        assert result.error is None, result.error
    return [result.generated_tokens for result in results.values()]


def serve(batching: TurboQuantBatching, new: int, **changes: Any) -> AbstractContextManager[Any]:
    """A session of answers of `new` tokens. The context gives its manager."""
    return batching.continuous_batching_context_manager(greedy(new), continuous_batching_config=options(**changes))


def ask(
    batching: TurboQuantBatching, asked: list[tuple[Tokens, dict[str, Any]]], new: int, **changes: Any
) -> list[Tokens]:
    """Answers of one batch of requests, each with its own options."""
    with serve(batching, new, **changes) as manager:
        names = [manager.add_request(prompt, **fields) for prompt, fields in asked]
        found = outputs_of(manager, len(names))
    return [found[name].generated_tokens for name in names]


def outputs_of(manager: TurboQuantBatchingManager, number: int) -> dict[str, Any]:
    """Last outputs of a number of answers, by their ids."""
    found: dict[str, Any] = {}
    while len(found) < number:
        output = manager.get_result(timeout=60)
        assert output is not None
        found |= {output.request_id: output} if output.is_finished() else {}
    return found


def take_scratch(monkeypatch: pytest.MonkeyPatch, reserved: int) -> None:
    """Steps in torch take no scratch: let them take a kilobyte a token, and sessions reserve so many bytes."""
    real = allocators.paged_step

    def with_scratch(new: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        args[-1].floats(paged_cache.dispatch.SCRATCH, 256 * len(new.query))
        return real(new, *args, **kwargs)

    monkeypatch.setattr(paged_cache.dispatch, "step_scratch_bytes", lambda *args: reserved)
    monkeypatch.setattr(allocators, "paged_step", with_scratch)


class HeldSteps:
    """Lets layers of steps of at least `tokens` tokens wait for a sign, and then raise `error`. Counts these layers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokens: int = 0) -> None:
        self.reached, self.go_on, self.layers = threading.Event(), threading.Event(), 0
        self.error: BaseException | None = None
        real = allocators.paged_step

        def step(new: Any, *args: Any, **more: Any) -> torch.Tensor:
            if len(new.query) >= tokens:
                self.layers += 1
                self.reached.set()
                assert self.go_on.wait(60)
                if self.error is not None:
                    raise self.error
            return real(new, *args, **more)

        monkeypatch.setattr(allocators, "paged_step", step)


NEAR_TIE = 0.5
"""Standard deviations of the logits by which rounding in bf16, and the codes that it changes, move them at most."""


class Oracle:
    """What `generate()` answers on a cache of the same recipe."""

    def __init__(
        self, model: PreTrainedModel, preset: str = "4bit_nc", balance: Balance | None = None, **overrides: Any
    ) -> None:
        self.model, self.balance = model, balance
        self.config = TurboQuantConfig.from_preset(preset, **({"balance": balance is not None} | overrides))

    def cache(self, **changes: Any) -> TurboQuantCache:
        return TurboQuantCache(self.model.config, replace(self.config, **changes), balance=self.balance)

    @contextmanager
    def attention(self) -> Iterator[None]:
        """The model reads packed caches."""
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation("turboquant")
        yield
        self.model.set_attn_implementation(before)

    def generate(
        self, prompt: Tokens, new: int, config: GenerationConfig | None = None, *processors: LogitsProcessor
    ) -> Tokens:
        """Tokens of `generate()`, greedy ones without a config, chosen from what processors leave."""
        ids = torch.tensor([prompt], device=self.model.device)
        options = dict(max_new_tokens=new, do_sample=False) if config is None else dict(generation_config=config)
        options |= dict(logits_processor=LogitsProcessorList(processors), attention_mask=torch.ones_like(ids))
        with self.attention():
            out = self.model.generate(ids, **as_input(self.cache()), **options)
        return out[0, len(prompt) :].tolist()

    @torch.no_grad()
    def furthest(self, inputs: list[Tokens], found: list[Tokens], expected: list[Tokens]) -> float:
        """Largest distance between the two tokens at which answers part, in standard deviations of the logits. Rounding
        parts answers at near ties only."""
        before, distances = self.model.config._attn_implementation, [0.0]
        self.model.set_attn_implementation("turboquant")
        for prompt, one, other in zip(inputs, found, expected, strict=True):
            at = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
            if at is not None:
                cache = self.cache()
                for ids in (prompt, *([token] for token in one[:at])):  # as the answers came
                    tokens = torch.tensor([ids], device=self.model.device)
                    logits = self.model(tokens, **as_input(cache)).logits[0, -1].float()
                distances.append(float((logits[one[at]] - logits[other[at]]).abs() / logits.std()))
        self.model.set_attn_implementation(before)
        return max(distances)

    def begun(self, prompt: Tokens, blocks: int) -> TurboQuantCache:
        """A cache of a request that began with so many packed blocks of others: they were read without a residual."""
        if not blocks:
            return self.cache()
        cache = self.cache(residual_length=0)
        self.model(torch.tensor([prompt[: self.config.sink_tokens + 128 * blocks]]), **as_input(cache))
        for store in (layer.store for layer in cache.layers if getattr(layer, "store", None) is not None):
            residual = self.config.residual_length
            store.config, store._rows_of_due = replace(store.config, residual_length=residual), 128 + residual
        return cache

    def after_prefix(self, prompt: Tokens, new: int, prefix: int) -> Tokens:
        """Greedy tokens of a request that began with packed blocks of so many tokens."""
        blocks, rest = divmod(prefix - self.config.sink_tokens, 128)
        assert not rest
        return self.chunked(prompt, new, blocks=blocks)

    def chunked(self, prompt: Tokens, new: int, chunks: Sequence[int] = (), blocks: int = 0) -> Tokens:
        """Greedy tokens, the prompt read in pieces of these sizes and the rest, after so many blocks of others."""
        out, logits = [], torch.empty(0)
        with torch.no_grad(), self.attention():
            cache, at = self.begun(prompt, blocks), self.config.sink_tokens + 128 * blocks if blocks else 0
            for size in filter(None, (*chunks, len(prompt) - at - sum(chunks))):
                logits = self.model(torch.tensor([prompt[at : at + size]]), **as_input(cache)).logits[0, -1]
                at += size
            for _ in range(new):
                out.append(int(logits.argmax()))
                logits = self.model(torch.tensor([out[-1:]]), **as_input(cache)).logits[0, -1]
        return out


class Session:
    """Batches of requests through one kept manager."""

    def __init__(
        self, model: PreTrainedModel, preset: str = "4bit_nc", overrides: dict[str, Any] | None = None, **changes: Any
    ) -> None:
        self.model = model
        self.batching = TurboQuantBatching(model, preset, **(overrides or {}))
        self.options = options(**changes)
        recipe = {name: x for name, x in (overrides or {}).items() if name not in ("balance", "prefix_cache")}
        self.oracle = Oracle(model, preset, self.batching.balance, **recipe)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *args: Any) -> None:
        self.batching.destroy_cached_continuous_batching_manager()

    def run(self, inputs: list[Tokens], generation: GenerationConfig, **more: Any) -> list[Tokens]:
        more |= dict(continuous_batching_config=self.options, persistent_manager=True)
        return answers(self.batching.generate_batch(inputs, generation_config=generation, **more))

    def capture(self) -> None:
        """Compile and capture steps of all sizes now."""
        self.prepare(now=True)

    def prepare(self, **ways: bool) -> None:
        """Make the pool, as `warmup` does in these ways."""
        manager = self.batching.init_continuous_batching(greedy(2), self.options)
        manager.warmup(**ways)
        manager.restore_attention()
        self.model._cached_continuous_batching_manager = manager

    @property
    def manager(self) -> TurboQuantBatchingManager:
        return self.model._cached_continuous_batching_manager

    @property
    def cache(self) -> TurboQuantPagedCache:
        return self.manager.batch_processor.cache

    def recorded_waiting(self) -> list[str]:
        """A list that gets the id of a request each time that it begins to wait: once, and again when preempted."""
        ids: list[str] = []
        scheduler = self.manager.batch_processor.scheduler
        add = scheduler.add_waiting_request
        scheduler.add_waiting_request = lambda state: ids.append(state.request_id) or add(state)
        return ids

    def pages_in_use(self) -> int:
        """Pages that are neither free nor kept for requests to come."""
        cache = self.cache
        held = (cache.num_sectors - cache.pool.num_free_sectors) * cache.bytes_per_sector
        for allocator in cache.cache_allocators.values():
            free = cache.pool.count_free_blocks(allocator.index) + len(allocator.ledger.cached_blocks)
            held -= free * allocator.bytes_per_block
        return held // cache.allocator.bytes_per_block


def check_one_graph(
    session: Callable[..., Session], inputs: list[Tokens], sessions: int = 2, captures: bool = True
) -> None:
    """Answers of compiled steps are those of steps that are not, and a step is one graph. A second session takes the
    number of the first one's cache, so nothing is compiled again. All sizes are captured before the run, or each when
    it first occurs."""
    config = CompileConfig(backend="eager", mode=None, fullgraph=True, dynamic=True)
    with session() as plain:
        expected = plain.run(inputs, greedy(10))
    torch._dynamo.reset()
    for first in [True, False][:sessions]:
        torch._dynamo.utils.counters.clear()
        with session(decode_compile_config=config) as compiled:
            if captures:
                compiled.capture()
            assert compiled.run(inputs, greedy(10)) == expected
            assert compiled.manager.batch_processor.model_runner.layers is not None
        counters = torch._dynamo.utils.counters
        assert not counters["graph_break"] and bool(counters["stats"]) == first
        del compiled
        gc.collect()


class Steps:
    """What the steps of a layer were like: spied on where their geometry is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, list[int], list[int]]] = []
        real = allocators.sequences_of

        def spied(kwargs: dict[str, Any], shape: TableShape, *args: Any, **options: Any) -> Sequences:
            sequences = real(kwargs, shape, *args, **options)
            if not shape.has_blocks:
                return sequences
            kind = "table" if kwargs["block_table"] is not None else "lists"
            new, lengths = sequences.cu_seqlens_q.diff().tolist(), sequences.cu_seqlens_k.diff().tolist()
            self.seen.append((kind, [a - b for a, b in zip(lengths, new, strict=True)], new))
            return sequences

        monkeypatch.setattr(allocators, "sequences_of", spied)

    def kinds(self) -> set[str]:
        return {kind for kind, _, _ in self.seen}


class Log:
    """The steps of every request, `(past, new, blocks)`: of others, which it began with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for name in ("extend_read_and_write_indices", "fill_block_table"):
            real = getattr(TurboQuantPagedCache, name)

            def noted(cache: Any, request: str, past: int, new: int, *args: Any, real: Any = real) -> None:
                self.steps[request].append((past, new, cache.allocator.prefix_blocks.get(request, 0)))
                real(cache, request, past, new, *args)

            monkeypatch.setattr(TurboQuantPagedCache, name, noted)

    def lives(self, request: str) -> list[list[tuple[int, int, int]]]:
        """The steps from each start of a request: one more than it was preempted."""
        lives: list[list[tuple[int, int, int]]] = []
        end = -1
        for step in self.steps[request]:
            past, new, _ = step
            if past != end:
                lives.append([])
            lives[-1].append(step)
            end = past + new
        return lives


class Stream:
    """A stream of a device that is never behind."""

    def record_event(self, event: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


def agreement(found: list[list[int]], expected: list[list[int]]) -> float:
    """Share of the tokens before the first that differs."""
    same = 0
    for a, b in zip(found, expected, strict=True):
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return same / sum(map(len, expected))
