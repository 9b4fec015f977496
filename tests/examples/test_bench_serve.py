"""`benchmark.py serve` as a CPU runs it: every cell, on a tiny model, and what it makes of times.

Requests are timed by the steps of an engine like vLLM's.
"""

import argparse
import gc
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import ContinuousBatchingConfig

from examples.measure.report import tables
from examples.measure.speed import bench_serve, bench_vllm
from examples.measure.speed.bench_serve import Engine, Outcome, Request, latencies, step_of
from tests.support.tiny_models import build
from tq_hf import PRESETS

NEVER = "a GPU's read rate is not measured on a CPU"


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Engines collect garbage whenever they stop; what is there before need not be gone through every time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    build("llama", num_hidden_layers=1).save_pretrained(path)
    return path


def arguments(*given: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_serve.add_arguments(parser)
    small = ["--requests", 5, "--prompts", 20, 200, "--answers", 3, 9, "--shapes", "3x140", "--steps", 6]
    return parser.parse_args([str(one) for one in (*small, "--cache-tokens", 8192, *given)])


def test_every_cell_is_measured_and_shown(folder: Path) -> None:
    saved: list[str] = []
    record = bench_serve.run(
        arguments("--model", folder, "--rate", 50),
        lambda record: saved.append(json.dumps(record)),
        lambda device: pytest.fail(NEVER),
    )
    engines = [engine.name for engine in bench_serve.engines({"4bit_nc": PRESETS["4bit_nc"]})]
    assert [bench_serve.name_of(row) for row in record["rows"]] == [
        f"{cell} {engine}" for cell in ("decode 3x140", "trace all at once", "trace 50 a second") for engine in engines
    ]
    assert len(saved) == len(record["rows"]) and json.loads(saved[-1]) == json.loads(json.dumps(record))
    for row in record["rows"]:
        assert "error" not in row and row["cache_tokens"] == 8192
        if row["kind"] == "decode":
            assert row["ms_per_step"] > 0 and row["prompt_tokens_per_second"] > 0 and row["steps"] >= 6
        else:
            assert 0 < row["in_flight_mean"] <= row["in_flight_most"] <= 5
            assert 0 < row["first_token_s_p50"] <= row["first_token_s_p99"] < row["seconds"]
            assert 0 < row["per_token_s_p50"] <= row["per_token_s_p99"]
            tokens = sum(request.new for request in bench_serve.trace(arguments(), 128, None))
            assert row["tokens_per_second"] * row["seconds"] == pytest.approx(tokens)
    stock, packed = (row["cache_bytes"] for row in record["rows"][:: len(engines) - 1][:2])
    assert 2 < stock / packed < 8
    text = tables.serve(record)
    assert "| a decode step of | 3 × 140 |" in text and "5 requests, prompts of 20 to 200 tokens" in text


def test_cells_that_fail_say_why_and_the_others_follow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench_serve.traced

    def traced(model: Any, engine: Engine, *rest: Any) -> dict[str, Any]:
        if engine.config is None:
            raise RuntimeError("the engine stopped\nand so on")
        return real(model, engine, *rest)

    monkeypatch.setattr(bench_serve, "traced", traced)
    few = arguments("--model", folder, "--shapes", "70x128", "--only", "sdpa|trace.*4bit")
    rows = bench_serve.run(few, lambda record: None, lambda device: pytest.fail(NEVER))["rows"]
    assert [row.get("error") for row in rows] == ["room for 8,192 tokens", "the engine stopped", None]


def test_a_hybrid_is_compared_with_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dict(hidden_size=64, intermediate_size=64, vocab_size=128, num_attention_heads=2, num_key_value_heads=2)
    small |= dict(head_dim=32, linear_num_value_heads=2, linear_num_key_heads=2)
    small |= dict(linear_key_head_dim=32, linear_value_head_dim=32)
    real = bench_serve.random_hybrid
    monkeypatch.setattr(bench_serve, "random_hybrid", lambda layers, device: real(layers, device, **small))
    few = arguments("--hybrid", "--layers", 4, "--shapes", "2x40", "--only", "decode")
    record = bench_serve.run(few, lambda record: None, lambda device: pytest.fail(NEVER))
    stock, packed, *generated = record["rows"]
    assert "linear_attention" in stock["error"] and "error" not in packed
    assert len(generated) == 2 and all(row["ms_per_step"] > 0 for row in generated)
    assert all(f"| generate(), {kind} | **" in tables.serve(record) for kind in ("DynamicCache", "StaticCache"))


def test_a_trace_has_the_lengths_and_the_rate_asked_for() -> None:
    many = arguments("--requests", 3000, "--prompts", 20, 2000, "--answers", 3, 90)
    once, later = (bench_serve.trace(many, 128, rate) for rate in (None, 10.0))
    assert once == bench_serve.trace(many, 128, None)
    assert {request.arrival for request in once} == {0.0}
    lengths = sorted(len(request.prompt) for request in once)
    assert lengths[0] >= 20 and lengths[-1] <= 2000
    assert lengths[1500] == pytest.approx(200, rel=0.1)  # the middle of their logarithms
    assert [request.prompt for request in later] == [request.prompt for request in once]
    assert {request.new for request in once} <= set(range(3, 91))
    assert later[-1].arrival == pytest.approx(300, rel=0.1)
    assert bench_serve.trace(arguments("--seed", 1), 128, None) != bench_serve.trace(arguments(), 128, None)


def result(timestamps: list[float], lifespan: tuple[float, float]) -> SimpleNamespace:
    return SimpleNamespace(timestamps=timestamps, lifespan=lifespan)


def test_times_are_those_of_the_requests() -> None:
    results = [result([3.0, 4.0, 6.0], (2.0, 6.0)), result([5.0], (4.0, 5.0)), result([7.0, 7.5], (6.5, 7.5))]
    found = bench_serve.latencies(Outcome(7.5, 6, list(zip((1.0, 1.0, 6.0), results, strict=True)), 0))
    assert found == {"first_token_s_p50": 2.0, "first_token_s_p99": 4.0, "per_token_s_p50": 0.5, "per_token_s_p99": 1.5}
    assert bench_serve.in_flight(results) == {"in_flight_most": 2, "in_flight_mean": pytest.approx(6 / 5.5)}
    assert bench_serve.latencies(Outcome(1.0, 0, [], 3))["first_token_s_p50"] is None
    assert bench_serve.in_flight([]) == {}


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(v) for v in random.Random(0).sample(range(200), 200)]
    assert bench_serve.percentile(values, 0.5) == 99 and bench_serve.percentile(values, 0.99) == 197
    assert bench_serve.percentile([4.0], 0.99) == 4.0


def test_room_under_flash_attention_is_what_its_pages_take_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = bench_serve.PagedAttentionMemoryHandler
    monkeypatch.setattr(handler, "get_available_memory", lambda self: 2**30)
    model = build("llama", num_hidden_layers=4)
    options = ContinuousBatchingConfig(max_batch_tokens=256, max_memory_percent=0.9, max_requests_per_batch=8)
    token = 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads, channels, bytes
    room = bench_serve.flash_room(model, options)
    # Beside its own bytes a token takes a part of what one layer's attention reads.
    assert 0.75 < room * token / 2**30 < 0.85
    assert model.config._attn_implementation == "sdpa"


def test_what_time_runs_out_for_counts_with_the_tokens_it_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", num_hidden_layers=1)
    requests = [Request([1, 2, 3], 2), Request([4, 5, 6], 3000)]
    with bench_serve.session(model, Engine("4bit_nc", config=PRESETS["4bit_nc"]), requests, 6400) as manager:

        def clock() -> float:
            """Time runs out once the long answer alone is being written."""
            writing = [
                state.generated_tokens for state in list(manager.batch_processor.scheduler.active_requests.values())
            ]
            return 0.5 if len(writing) == 1 and len(writing[0]) > 2 else 0.0

        monkeypatch.setattr(bench_serve, "time", SimpleNamespace(perf_counter=clock))
        outcome = bench_serve.serve(manager, requests, limit=0.5)
    assert outcome.unfinished == 1 and outcome.tokens > 4 and outcome.seconds == 0.5


class StepEngine:
    """Answer each request with a token a step, two in the last; read one prompt a step."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.waiting, self.running = clock, [], {}

    def add_request(self, name: str, prompt: dict[str, list[int]], new: int) -> None:
        self.waiting.append((name, new, len(prompt["prompt_token_ids"])))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[Any]:
        self.clock[0] += 0.01
        if self.waiting:
            name, new, _ = self.waiting.pop(0)
            self.running[name] = [new, []]
        outputs = []
        for name, (new, tokens) in list(self.running.items()):
            tokens += [0] * (2 if new - len(tokens) == 2 else 1)
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=list(tokens))]))
            if len(tokens) == new:
                del self.running[name]
        return outputs


def test_tokens_have_the_moment_at_which_their_step_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [5.0]
    monkeypatch.setattr(bench_vllm.time, "perf_counter", lambda: clock[0])
    outcome = bench_vllm.serve(StepEngine(clock), [Request([1] * 7, 8), Request([1] * 9, 8)], lambda new: new)
    assert outcome.tokens == 16 and outcome.seconds == pytest.approx(0.08)
    first, second = (result.timestamps for _, result in outcome.results)
    assert first == pytest.approx([5.01, 5.02, 5.03, 5.04, 5.05, 5.06, 5.07, 5.07])
    assert second[0] == pytest.approx(5.02) and len(second) == 8
    assert latencies(outcome)["first_token_s_p99"] == pytest.approx(0.02)
    step = step_of([result for _, result in outcome.results], 16)
    assert step["steps"] == 5 and step["ms_per_step"] == pytest.approx(10)
    assert step["prompt_tokens_per_second"] == pytest.approx(16 / 0.02)
