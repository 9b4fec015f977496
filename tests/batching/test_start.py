"""Steps that are compiled in the background, while requests are answered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import CompileConfig, PreTrainedModel

from tests.support.batching_cases import Oracle, agreement, greedy, model_of, options, prompts
from tq_hf import TurboQuantBatching
from tq_hf.batching.manager import TurboQuantBatchingManager
from tq_hf.batching.runner import copied

NEW = 12


class Compiler:
    """A backend of `torch.compile` that waits for a sign, and counts graphs and their calls by other threads."""

    def __init__(self) -> None:
        self.begin, self.begun, self.graphs, self.calls = threading.Event(), threading.Event(), 0, 0

    def __deepcopy__(self, memo: Any) -> Compiler:
        return self  # options of an engine are copied

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.begun.set()
        assert self.begin.wait(60)
        self.graphs += 1

        def call(*arguments: Any) -> Any:
            self.calls += threading.current_thread().name != "tq_hf compiles"
            return graph.forward(*arguments)

        return call


@contextmanager
def started(
    compiler: Callable[..., Any] | str, model: PreTrainedModel | None = None, **changes: Any
) -> Iterator[TurboQuantBatchingManager]:
    torch._dynamo.reset()
    batching = TurboQuantBatching(model or model_of(), balance=False)
    config = CompileConfig(backend=compiler, mode=None, fullgraph=True, dynamic=True)
    chosen = options(decode_compile_config=config, max_requests_per_batch=4, allow_block_sharing=False, **changes)
    manager = batching.init_continuous_batching(greedy(NEW), chosen)
    try:
        manager.warmup(compile_behind=True)
        manager.start()
        yield manager
    finally:
        manager.stop(block=True, hard_stop=True)


def ask(manager: Any, inputs: list[list[int]]) -> list[list[int]]:
    names = [manager.add_request(prompt) for prompt in inputs]
    found = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=60)
        assert result.error is None
        found[result.request_id] = result.generated_tokens
    return [found[name] for name in names]


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_answers_while_steps_are_compiled_are_those_after(family: str) -> None:
    inputs, compiler = prompts([40, 90, 200]), Compiler()
    with started(compiler, model_of(family)) as manager:
        oracle = Oracle(manager.model)
        assert compiler.begun.wait(60)
        before = ask(manager, inputs)
        assert manager.compiling and compiler.graphs == compiler.calls == 0
        name = manager.add_request(inputs[0], streaming=True)
        outputs = manager.request_id_iter(name)
        next(outputs)
        compiler.begin.set()  # pages are in use
        *_, last = outputs
        if (thread := manager.batch_processor.model_runner.behind) is not None:
            thread.join(60)
        graphs = compiler.graphs
        after = ask(manager, inputs)
        assert not manager.compiling and compiler.calls > 0
        assert compiler.graphs == graphs, "a step compiled again what the thread had compiled"
        manager.stop(block=True)  # the model has its own attention again
        assert before == after == [oracle.generate(prompt, NEW) for prompt in inputs]
        assert last.generated_tokens == before[0]


def test_a_step_that_cannot_be_compiled_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def fails(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        raise RuntimeError("no compiler here")

    inputs = prompts([40, 90])
    with started(fails) as manager:
        manager.batch_processor.model_runner.behind.join(60)
        found = ask(manager, inputs)
        assert not manager.compiling
        manager.stop(block=True)
        assert found == [Oracle(manager.model).generate(prompt, NEW) for prompt in inputs]
    assert "The step cannot be compiled, and stays as it is, which is slower: " in caplog.text
    assert "no compiler here" in caplog.text


def test_copies_of_inputs_are_views_of_one_another_where_the_inputs_are() -> None:
    whole = torch.randn(2, 12)
    arguments = {"rows": [whole[0], whole[:, 3:9:2]], "all": whole, "other": (torch.ones(3), 5), "again": whole[0]}
    arguments["same"] = arguments["rows"][0]
    copies = copied(arguments, {})
    assert copies["same"] is copies["rows"][0] is not copies["again"]
    assert copies["rows"][1]._base is copies["all"] is copies["rows"][0]._base
    assert copies["rows"][1].stride() == arguments["rows"][1].stride()
    copies["all"].zero_()
    assert copies["rows"][1].sum() == 0 != arguments["rows"][1].sum()
    assert copies["other"][1] == 5


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_steps_take_over_captured_ones_and_compile_nothing_again() -> None:
    inputs = prompts([5, 120, 129, 300])
    model = model_of(head_dim=128, num_attention_heads=8).cuda().to(torch.bfloat16)
    with started("inductor", model) as manager:
        while_compiling = ask(manager, inputs)
        runner = manager.batch_processor.model_runner
        if (thread := runner.behind) is not None:
            thread.join()
            assert thread.error is None
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        after = ask(manager, inputs)
        assert not manager.compiling and runner._compiled_decode is not None
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before > 0
        pairs = manager.batch_processor.inputs_and_outputs.io_pairs
        assert all(len(pair.device_io.graphs_by_features) == 2 for pair in pairs)
    assert agreement(while_compiling, after) > 0.5
