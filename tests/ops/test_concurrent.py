"""Two threads, two streams, two models in one process at once: the results of running alone."""

import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tq_kernels.types import AttentionOptions
from transformers import PreTrainedModel

from tests.support.helpers import all_packed, filled, states
from tests.support.tiny_models import build, token_ids
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input
from tq_hf.ops import dispatch, workspace
from tq_hf.ops.cpu.packed import PackedTile
from tq_hf.ops.triton import blocks as triton_blocks

PROMPT, NEW_TOKENS = 300, 16
CPU = torch.device("cpu")


@pytest.fixture
def models() -> list[PreTrainedModel]:
    """Two models of one shape: each would fit into the other's scratch."""
    models = [build("llama", seed=seed, num_hidden_layers=2, head_dim=64) for seed in (1, 2)]
    for model in models:
        model.set_attn_implementation("turboquant")
    return models


def generate(model: PreTrainedModel, seed: int, preset: str = "4bit_nc", **options: Any) -> torch.Tensor:
    """Tokens after prompt `seed`, decoded from packed blocks."""
    cache = TurboQuantCache(model.config, preset, residual_length=0, sink_tokens=0, **options)
    ids = token_ids(2, PROMPT, seed=seed).to(model.device)
    mask = torch.ones_like(ids)
    lengths = dict(min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)
    out = model.generate(ids, attention_mask=mask, **as_input(cache), do_sample=False, disable_compile=True, **lengths)
    return out.cpu()


def at_once(tasks: list[Callable[[], torch.Tensor]], device: torch.device = CPU) -> list[torch.Tensor]:
    """The results of `tasks`, each run in a thread, on a GPU each on a stream of its own."""
    results, _turns.all_here = {}, threading.Barrier(len(tasks))

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
            try:
                _turns.wait()
                results[index] = tasks[index]()
            finally:
                _turns.all_here.abort()  # the others go on without this one

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[index] for index in range(len(tasks))]  # a KeyError if a thread failed


class _Turns:
    """Where threads wait for one another, as long as all of them run."""

    all_here: threading.Barrier | None = None

    def wait(self) -> None:
        if self.all_here is not None and not self.all_here.broken:
            with suppress(threading.BrokenBarrierError):
                self.all_here.wait()


_turns = _Turns()


@pytest.fixture
def scratch_is_held(monkeypatch):
    """Between filling its scratch and reading it, every thread waits until the others have filled theirs."""
    kinds = {"scores": ("_keys", "key_rows"), "weighted": ("_values", "value_rows")}
    for name, filled_by in kinds.items():
        original = getattr(PackedTile, name)

        def reading(tile: PackedTile, argument: Any, original: Any = original, filled_by: Any = filled_by) -> Any:
            getattr(tile, filled_by[tile.many])
            _turns.wait()
            return original(tile, argument)

        monkeypatch.setattr(PackedTile, name, reading)


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 400}], ids=["growing", "preallocated"])
def test_two_models_in_two_threads_give_the_tokens_of_running_alone(models, scratch_is_held, options):
    alone = [generate(model, seed, **options) for seed, model in enumerate(models)]
    together = at_once([lambda m=m, s=s: generate(m, s, **options) for s, m in enumerate(models)])
    for actual, expected in zip(together, alone, strict=True):
        assert len(expected[:, PROMPT:].unique()) > 5
        assert torch.equal(actual, expected)


def test_one_model_in_two_threads_with_caches_of_different_presets(models, scratch_is_held):
    cases = [(0, "2bit_nc"), (1, "k8v4")]
    alone = [generate(models[0], seed, preset) for seed, preset in cases]
    together = at_once([lambda s=s, p=p: generate(models[0], s, p) for s, p in cases])
    assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True))


def test_this_test_notices_a_workspace_shared_by_threads(models, scratch_is_held, monkeypatch):
    """The same run with one workspace for all threads goes wrong: the tests above can fail."""
    monkeypatch.setattr(workspace, "_local", SimpleNamespace(workspaces={}))
    alone = [generate(model, seed) for seed, model in enumerate(models)]
    together = at_once([lambda m=m, s=s: generate(m, s) for s, m in enumerate(models)])
    assert any(not torch.equal(*pair) for pair in zip(together, alone, strict=True))


# On a GPU


@pytest.fixture
def gpu_models(models) -> list[PreTrainedModel]:
    return [model.to("cuda", torch.float16) for model in models]


@pytest.fixture
def views():
    """What two layers hold, and a query for each."""
    cases = []
    for seed in (1, 2):
        pair = states(seed, batch=4, heads=8, tokens=1024, dim=128, dtype=torch.float16)
        store = filled(all_packed(), tuple(part.cuda() for part in pair))  # type: ignore[arg-type]
        query = torch.randn(4, 32, 1, 128, generator=torch.Generator().manual_seed(seed)).half().cuda()
        cases.append((query, store.view()))
    return cases


@pytest.fixture
def partial_results_are_held(monkeypatch):
    """Every stream pauses between writing partial results to scratch and reducing them."""
    from tq_kernels.common.launcher import Kernel, Launcher
    from tq_kernels.decode import launch

    class Pausing(Kernel):
        def launcher(self, compiled: Any) -> Launcher:
            call, fixed = super().launcher(compiled)

            def pause_and_call(*arguments: Any) -> None:
                torch.cuda._sleep(2_000_000)  # about a millisecond
                call(*arguments)

            return Launcher(pause_and_call, fixed)

    monkeypatch.setattr(launch, "REDUCE", Pausing(launch.REDUCE.function))


def interleaved_on_two_streams(cases: list) -> list[torch.Tensor]:
    """Attention of both cases, queued by one thread on two streams."""
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results = []
    for _ in range(3):
        for stream, (query, view) in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                results.append(dispatch.attend(query, view, None, AttentionOptions(0.3)))
    torch.cuda.synchronize()
    return results


@pytest.mark.cuda
def test_two_streams_of_one_thread_give_the_results_of_one(views, partial_results_are_held):
    expected = [dispatch.attend(query, view, None, AttentionOptions(0.3)) for query, view in views] * 3
    for _ in range(2):  # the first time compiles
        actual = interleaved_on_two_streams(views)
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.cuda
def test_this_test_notices_a_workspace_shared_by_streams(views, partial_results_are_held, monkeypatch):
    expected = [dispatch.attend(query, view, None, AttentionOptions(0.3)) for query, view in views] * 3
    interleaved_on_two_streams(views)
    shared = workspace.current_workspace(views[0][0].device)
    monkeypatch.setattr(triton_blocks, "current_workspace", lambda device: shared)
    actual = interleaved_on_two_streams(views)
    assert not all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 400}], ids=["growing", "preallocated"])
def test_two_models_in_two_threads_on_two_streams(gpu_models, partial_results_are_held, options):
    alone = [generate(model, seed, **options) for seed, model in enumerate(gpu_models)]
    torch.cuda.synchronize()
    together = at_once(
        [lambda m=m, s=s: generate(m, s, **options) for s, m in enumerate(gpu_models)], torch.device("cuda", 0)
    )
    assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True))


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")  # what the compiler says on its way
def test_two_models_compiled_in_one_process_do_not_disturb_each_other(gpu_models):
    """Captured graphs of both live side by side, each with its own scratch and its cache's addresses."""
    torch._dynamo.reset()

    def run(model: PreTrainedModel, seed: int) -> torch.Tensor:
        cache = TurboQuantCache(model.config, max_cache_len=400, residual_length=0)
        ids = token_ids(2, PROMPT, seed=seed).cuda()
        lengths = dict(min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, **as_input(cache), do_sample=False, **lengths).cpu()

    alone = [run(model, seed) for seed, model in enumerate(gpu_models)]
    for _ in range(2):
        again = [run(model, seed) for seed, model in enumerate(gpu_models)]
        assert all(torch.equal(*pair) for pair in zip(again, alone, strict=True))
    torch._dynamo.reset()
