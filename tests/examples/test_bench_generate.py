"""What `bench_generate` measures is what its rows say."""

from types import SimpleNamespace

import pytest
import torch

from examples.measure.speed import bench_generate
from examples.measure.speed.bench_generate import (
    NEW_TOKENS,
    ONE_GRAPH,
    SHAPES,
    fill,
    go_on,
    step_seconds,
    timed_flags,
    variants,
)
from tests.support.tiny_models import build
from tq_hf import TurboQuantCache, graph_decoding
from tq_hf.graph_decoding.step import LateFlags


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4"])
@pytest.mark.parametrize("room", [None, 100])
def test_a_filled_cache_is_read_as_after_a_prefill(name, room):
    model = build(name, attention="turboquant")
    cache = TurboQuantCache(model.config, max_cache_len=room)
    fill(cache, model, batch=2, context=60)
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {60}
    assert all(layer.reads_packed for layer in cache.layers if not layer.is_sliding)
    ids = torch.randint(3, 100, (2, 61))
    go_on(model, ids, cache, 3, **({} if room is None else {"custom_generate": graph_decoding}))
    assert int(cache.get_seq_length()) == 63


def test_rows_name_what_is_measured():
    model = build("llama")
    found = variants(model, *SHAPES[0], host_work=2)
    slowed = [name for name, variant in found.items() if variant.host_work == 2]
    assert slowed == [f"{ONE_GRAPH}, host work × 2"] and found[slowed[0]].one_graph
    assert found[ONE_GRAPH].one_graph and found[ONE_GRAPH].host_work == 1
    assert found["DynamicCache, one pad token"].padding == 1
    assert not any("host work" in name for name in variants(model, *SHAPES[0]))


@pytest.mark.parametrize("name", ["static, compiled, tuned", f"{ONE_GRAPH}, tuned"])
def test_what_is_tuned_is_compiled_so(name, monkeypatch):
    model = build("llama")
    variant = variants(model, 1, 20)[name]
    model.set_attn_implementation(variant.attention)
    given, generate = [], model.generate
    monkeypatch.setattr(model, "generate", lambda *args, **options: given.append(options) or generate(*args, **options))
    cache = variant.make()
    fill(cache, model, 1, 20)
    step_seconds(model, variant, torch.randint(3, 100, (1, 21)), cache)
    assert [options["compile_config"] for options in given] == [variant.compile_config]
    assert variant.compile_config.options["coordinate_descent_tuning"] and variant.compile_config.mode is None
    assert not any(name.endswith("tuned") for name in variants(model, 8, 20)), "products of one row only"


@pytest.mark.parametrize("padding", [0, 1])
def test_a_pad_token_makes_a_mask(padding, monkeypatch):
    model = build("llama")
    masks = []
    forward = model.model.layers[0].self_attn.forward

    def noting(*args, attention_mask=None, **options):
        masks.append(attention_mask)
        return forward(*args, attention_mask=attention_mask, **options)

    monkeypatch.setattr(model.model.layers[0].self_attn, "forward", noting)
    cache = variants(model, 2, 60)["DynamicCache"].make()
    fill(cache, model, 2, 60)
    go_on(model, torch.randint(3, 100, (2, 61)), cache, 2, padding)
    assert all((mask is not None) == bool(padding) for mask in masks) and len(masks) == 2


def test_a_slowed_host_takes_so_many_times_as_long_over_its_own_work(monkeypatch):
    now = [0.0]

    def clock() -> float:
        now[0] += 1e-6  # who only looks at it takes time, too
        return now[0]

    monkeypatch.setattr(bench_generate, "time", SimpleNamespace(perf_counter=clock))

    def steps() -> float:
        flags = LateFlags(torch.device("cpu"), 1, None)
        start = clock()
        for _ in range(10):
            now[0] += 0.001
            flags.record(torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.long))
        return clock() - start

    plain = steps()
    with timed_flags(3) as times:
        slowed = steps()
    assert slowed == pytest.approx((1 + 9 * 3) * 0.001, rel=0.02) and len(times) == 10  # before the first is nothing
    assert plain == pytest.approx(10 * 0.001, rel=0.02) and steps() == pytest.approx(plain)


@pytest.mark.parametrize("name", ["DynamicCache", ONE_GRAPH])
def test_only_the_last_steps_are_timed(name, monkeypatch):
    """The first steps take longer by themselves: they compile and capture."""
    model = build("llama")
    variant = variants(model, 1, 20)[name]
    model.set_attn_implementation(variant.attention)
    forward, now, calls = model.forward, [0.0], []

    def slow(*args, **options):
        calls.append(None)
        now[0] += 100 if len(calls) <= 5 else 1
        return forward(*args, **options)

    monkeypatch.setattr(model, "forward", slow)
    monkeypatch.setattr(bench_generate, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    cache = variant.make()
    fill(cache, model, 1, 20)
    assert step_seconds(model, variant, torch.randint(3, 100, (1, 21)), cache) == 1
    assert len(calls) == NEW_TOKENS
