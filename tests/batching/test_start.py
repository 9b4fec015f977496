"""An engine answers at once: graphs are captured when needed or while there is no request, and compiled behind."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CompileConfig, PreTrainedModel
from transformers.generation.continuous_batching import model_runner

from tests.support.batching_cases import NEAR_TIE, Oracle, Session, greedy, model_of, options, outputs_of, prompts
from tests.support.helpers import slow
from tq_hf import TurboQuantBatching
from tq_hf.batching import cache, runner
from tq_hf.batching.manager import TurboQuantBatchingManager
from tq_hf.batching.requests import AnswerRouter
from tq_hf.batching.runner import TurboQuantModelRunner, copied

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
    compiler: Callable[..., Any] | str,
    model: PreTrainedModel | None = None,
    before: Sequence[tuple[list[int], int]] = (),
    **changes: Any,
) -> Iterator[TurboQuantBatchingManager]:
    torch._dynamo.reset()
    batching = TurboQuantBatching(model or model_of(), balance=False)
    config = CompileConfig(backend=compiler, mode=None, fullgraph=True, dynamic=True)
    chosen = options(decode_compile_config=config, max_requests_per_batch=4, allow_block_sharing=False, **changes)
    manager = batching.init_continuous_batching(greedy(NEW), chosen)
    try:
        manager.warmup(behind=True)
        for prompt, new in before:
            manager.add_request(prompt, max_new_tokens=new)
        manager.start()
        yield manager
    finally:
        if isinstance(compiler, Compiler):
            compiler.begin.set()  # `stop` waits for the graph
        manager.stop(block=True, hard_stop=True)


def ask(manager: Any, inputs: list[list[int]]) -> list[list[int]]:
    names = [manager.add_request(prompt) for prompt in inputs]
    found = outputs_of(manager, len(names))
    return [found[name].generated_tokens for name in names]


@pytest.mark.parametrize("family", ["llama", slow("qwen3_next")])
def test_answers_while_steps_are_compiled_are_those_after(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, compiler, callers, compile_ = prompts([40, 90, 200]), Compiler(), set[str](), torch.compile

    def noted(*arguments: Any, **options: Any) -> Any:
        callers.add(threading.current_thread().name)
        return compile_(*arguments, **options)

    monkeypatch.setattr(torch, "compile", noted)  # which imports the compiler: no start waits for that
    with started(compiler, model_of(family)) as manager:
        oracle = Oracle(manager.model)
        assert compiler.begun.wait(60)
        before = ask(manager, inputs)
        assert manager.to_be_done and compiler.graphs == compiler.calls == 0
        name = manager.add_request(inputs[0], streaming=True)
        outputs = manager.request_id_iter(name)
        next(outputs)
        compiler.begin.set()  # pages are in use
        *_, last = outputs
        if (thread := manager.batch_processor.model_runner.behind) is not None:
            thread.join(60)
        graphs = compiler.graphs
        after = ask(manager, inputs)
        assert compiler.calls > 0 and callers == {"tq_hf compiles"}
        assert manager.batch_processor.model_runner.behind is manager.batch_processor.model_runner.calls is None
        assert compiler.graphs == graphs, "a step compiled again what the thread had compiled"
        manager.stop(block=True)  # the model has its own attention again
        assert before == after == [oracle.generate(prompt, NEW) for prompt in inputs]
        assert last.generated_tokens == before[0]


@pytest.mark.parametrize("dynamic", [True, False])
def test_prompts_of_all_lengths_run_the_same_compiled_layers(dynamic: bool) -> None:
    """Or none, where each length would be compiled."""
    torch._dynamo.reset()
    compiler, model = Compiler(), model_of()
    compiler.begin.set()
    config = CompileConfig(backend=compiler, mode=None, fullgraph=True, dynamic=dynamic)
    with Session(model, decode_compile_config=config, max_requests_per_batch=2) as session:
        session.run(prompts([150]), greedy(3))  # more tokens than a layer has channels: equal sizes are one to torch
        graphs, calls = compiler.graphs, compiler.calls
        assert graphs == (2 if dynamic else 1)
        session.run(prompts([90, 200, 41]), greedy(1))
        assert compiler.graphs == graphs and (compiler.calls > calls) == dynamic


@pytest.fixture
def pause() -> Iterator[Any]:
    """An operator that waits for a sign where the thread that compiles traces it."""
    at, go, library = threading.Event(), threading.Event(), torch.library.Library("tq_hf_tests", "DEF")
    library.define("pause(Tensor x) -> Tensor")
    library.impl("pause", torch.clone, "CompositeExplicitAutograd")

    @torch.library.register_fake("tq_hf_tests::pause", lib=library)
    def traced(x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name == "tq_hf compiles":
            at.set()
            assert go.wait(60)
        return torch.empty_like(x)

    yield SimpleNamespace(at=at, go=go)
    go.set()
    library._destroy()


@pytest.mark.parametrize("family", ["llama", *map(slow, ("gpt_oss", "qwen3_next"))])
def test_answers_come_while_a_step_is_traced(family: str, pause: Any) -> None:
    """And the step compiles nothing again: the engine leaves what is traced as it was."""
    (prompt,), model, compiler = prompts([40]), model_of(family), Compiler()
    compiler.begin.set()
    mlp = model.get_decoder().layers[0].mlp
    mlp.register_forward_pre_hook(lambda _, args: (torch.ops.tq_hf_tests.pause(args[0]),))
    with started(compiler, model) as manager:
        assert pause.at.wait(60)
        (before,) = ask(manager, [prompt])
        assert not pause.go.is_set() and compiler.graphs == 0
        pause.go.set()
        behind = manager.batch_processor.model_runner.behind
        behind.join(60)
        assert behind.error is None
        graphs = compiler.graphs
        assert ask(manager, [prompt]) == [before]
        assert compiler.graphs == graphs > 0 and compiler.calls > 0


def test_answers_come_while_a_thread_traces_with_fx() -> None:
    """As inductor does with small functions: torch.fx replaces the call of all modules meanwhile."""
    (prompt,), at, go, graphs = prompts([40]), threading.Event(), threading.Event(), list[Any]()

    class Traced(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.nn.ReLU()

        def forward(self, x: Any) -> Any:
            at.set()
            assert go.wait(60)
            return self.part(x)

    with Session(model_of()) as session:
        (before,) = session.run([prompt], greedy(NEW))
        thread = threading.Thread(target=lambda: graphs.append(torch.fx.symbolic_trace(Traced())))
        thread.start()
        try:
            assert at.wait(60) and session.run([prompt], greedy(NEW)) == [before]
        finally:
            go.set()
            thread.join()
    assert [node.op for node in graphs[0].graph.nodes] == ["placeholder", "call_module", "output"]


def test_a_step_does_not_change_the_config_of_the_model() -> None:
    """Another thread may trace the model. transformers would set `is_causal` for the time of the step."""
    model, found = model_of(), []
    model.model.norm.register_forward_pre_hook(lambda *_: found.append(dict(vars(model.config))))
    with Session(model) as session:
        session.run(prompts([40]), greedy(2))
        assert all(each.keys() == vars(model.config).keys() for each in found) and found


def test_a_step_that_cannot_be_compiled_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    begun = threading.Event()

    def fails(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        begun.set()
        raise RuntimeError("no compiler here")

    inputs = prompts([40, 90])
    with started(fails) as manager:
        assert begun.wait(60)
        if (thread := manager.batch_processor.model_runner.behind) is not None:
            thread.join(60)
        found = ask(manager, inputs)
        assert manager.batch_processor.model_runner.behind is None
        manager.stop(block=True)
        assert found == [Oracle(manager.model).generate(prompt, NEW) for prompt in inputs]
    assert "The step cannot be compiled, and stays as it is, which is slower: " in caplog.text
    assert "no compiler here" in caplog.text


def test_steps_are_compiled_although_there_is_always_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "COMPILE_AFTER", NEW // 2)
    compiler, (one, other) = Compiler(), prompts([40, 50])
    with started(compiler, before=[(one, NEW), (other, 2 * NEW)]) as manager:
        assert all(manager.get_result(timeout=60).generated_tokens for _ in range(2))
        assert compiler.begun.is_set() or compiler.begun.wait(60)
        graphs = [pair for _, pair in manager.batch_processor.model_runner.missing if pair is not None]
        assert len(graphs) == 3, "there was no time for warm-ups"
        compiler.begin.set()


@pytest.mark.parametrize("requests", [1, 2])
def test_steps_are_not_compiled_before_one_of_each_kind_has_run(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other kind would be compiled in the step that needs it."""
    monkeypatch.setattr(runner, "COMPILE_AFTER", 1)
    monkeypatch.setattr(TurboQuantModelRunner, "work_ahead", lambda *_: False)
    compiler, both = Compiler(), prompts([40, 50])
    with started(compiler, before=[(prompt, NEW) for prompt in both[:requests]]) as manager:
        for _ in range(requests):
            assert manager.get_result(timeout=60).generated_tokens
        found = manager.batch_processor.model_runner
        assert found.decoded >= NEW - 1 and found.calls.keys() == {requests} and found.behind is None
        compiler.begin.set()
        if requests == 1:
            ask(manager, both)
            assert compiler.begun.wait(60)


def test_long_prompts_are_planned_for_after_all_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cuDNN attends from them, as on no CPU."""
    (prompt,), left, planned, warm_up = prompts([40]), [], threading.Event(), TurboQuantModelRunner.run_warm_up

    def noted(self: Any, model: Any, requests: int, pair: int | None, *rest: Any) -> None:
        warm_up(self, model, requests, pair, *rest)
        if not requests and pair is not None:
            left.append([each for each in self.missing if each != (0, 0)])
            planned.set()

    monkeypatch.setattr(cache.dispatch, "plans_prompts", lambda *_: True)
    monkeypatch.setattr(TurboQuantModelRunner, "run_warm_up", noted)
    compiler = Compiler()
    compiler.begin.set()
    with started(compiler) as manager:
        assert planned.wait(60) and left == [[]]
        found = ask(manager, [prompt])
        manager.stop(block=True)  # the model has its own attention again
        assert found == [Oracle(manager.model).generate(prompt, NEW)]


def test_steps_that_are_never_compiled_are_not_waited_for() -> None:
    """Without block tables there is no step that is compiled."""
    with started(Compiler(), max_blocks_per_request=0) as manager:
        ask(manager, prompts([40]))
        with manager.pause():  # nothing is captured meanwhile
            manager.batch_processor.model_runner.missing.clear()
        assert manager.to_be_done is None


@contextmanager
def waiting_for(compiler: Compiler, call: Callable[[], object]) -> Iterator[None]:
    """Call in a thread that waits for the graph at hand, which is compiled after the body, and is the last."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    yield
    compiler.begin.set()
    thread.join(60)
    assert not thread.is_alive()
    assert compiler.graphs == 1, "it compiled for more numbers of requests"


@pytest.mark.parametrize("sleeps", [True, False])
def test_a_manager_that_sleeps_or_stops_waits_for_what_is_being_compiled(sleeps: bool) -> None:
    """torch's compiler breaks down if it is reset meanwhile."""
    compiler, freed = Compiler(), []
    with started(compiler) as manager:
        assert compiler.begun.wait(60)
        processor = manager.batch_processor
        behind, pool = processor.model_runner.behind, weakref.ref(processor.cache.cache_tensor)
        del processor
        if sleeps:
            manager.stop(keep_for_next_session=True, hard_stop=True)
        with waiting_for(compiler, lambda: freed.append(manager.sleep() if sleeps else manager.stop(hard_stop=True))):
            assert behind.is_alive() and pool() is not None
        assert not behind.is_alive()
        if sleeps:
            assert freed[0] > 0 and pool() is None


def test_a_stop_that_does_not_wait_compiles_no_further_step() -> None:
    compiler = Compiler()
    with started(compiler) as manager:
        assert compiler.begun.wait(60)
        behind = manager.batch_processor.model_runner.behind
        engine = manager._generation_thread
        manager.stop(block=False, hard_stop=True)
        engine.join(60)
        assert behind.is_alive()
        compiler.begin.set()
        behind.join(60)
        assert not behind.is_alive() and compiler.graphs == 1


class Events(list[Any]):
    """Captured graphs, as `(requests, pair)`, and `"answer"`, in their order. A capture can be made to wait.

    Attributes:
        hold: Graph to wait at.
        at, go: Events: the capture has come to the graph, and may go on.
        rest: Event: there is nothing more to do ahead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hold: Any = None
        self.at, self.go, self.rest = threading.Event(), threading.Event(), threading.Event()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, ways: dict[str, Any]) -> Events:
    """Steps are captured on a CPU: a graph calls the step again."""
    events, init, ahead = Events(), model_runner.ModelRunner.__init__, TurboQuantModelRunner.work_ahead
    events.options = ways

    @wraps(init)
    def with_graphs(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.pad_inputs = self.use_cuda_graph_decode = True

    def capture(self: Any, step: Callable[..., Any], stream: Any, *args: Any) -> None:
        graph = args[1]["input_ids"].shape[1], getattr(self.inputs_and_outputs, "current_pair", 0)
        if graph == events.hold:
            events.at.set()
            assert events.go.wait(60)
        step(*args)
        self.inputs_and_outputs.set_graph(SimpleNamespace(replay=partial(step, *args), reset=lambda: None))
        events.append(graph)

    def work_ahead(self: Any, model: Any) -> bool:
        if not (more := ahead(self, model)) and self.kernels is None:
            events.rest.set()
        return more

    def delivered(self: Any, *args: Any) -> None:
        events.append("answer")
        deliver(self, *args)

    deliver = AnswerRouter.deliver_batch
    monkeypatch.setattr(model_runner.ModelRunner, "__init__", with_graphs)
    monkeypatch.setattr(TurboQuantModelRunner, "_capture_graph", capture)
    monkeypatch.setattr(TurboQuantModelRunner, "work_ahead", work_ahead)
    monkeypatch.setattr(AnswerRouter, "deliver_batch", delivered)
    return events


@contextmanager
def running(events: Events, first: list[int] | None = None, **changes: Any) -> Iterator[TurboQuantBatchingManager]:
    """An engine with up to 8 requests in a step, which finds a request when it starts."""
    chosen = options(max_requests_per_batch=8, allow_block_sharing=False, **events.options, **changes)
    manager = TurboQuantBatching(model_of(), balance=False).init_continuous_batching(greedy(NEW), chosen)
    if first is not None:
        manager.add_request(first)
    manager.warmup(behind=True)
    manager.start()
    try:
        yield manager
    finally:
        events.go.set()
        manager.stop(block=True, hard_stop=True)


def pairs_of(events: Events, *sizes: int) -> list[tuple[int, int]]:
    return [(size, pair) for size in sizes for pair in range(2 if events.options else 1)]


def test_an_answer_comes_before_graphs_that_it_does_not_need(events: Events) -> None:
    inputs = prompts([40, 90, 200])
    with running(events, inputs[0]) as manager:
        found = manager.get_result(timeout=60).generated_tokens
        assert events.rest.wait(60) and manager.to_be_done is None
        answered = events.index("answer")
        assert sorted(events[:answered]) == pairs_of(events, 1)
        assert events[answered + 1 :] == pairs_of(events, 2, 4, 8)
        cache = manager.batch_processor.cache
        assert cache.pool.num_free_sectors == cache.num_sectors, "warm-ups kept pages"
        after = ask(manager, inputs)
        captured = [event for event in events if event != "answer"]
        assert sorted(captured) == pairs_of(events, 1, 2, 4, 8), "a graph was captured twice"
        manager.stop(block=True)
        oracle = Oracle(manager.model)
        assert [found] == after[:1] and after == [oracle.generate(prompt, NEW) for prompt in inputs]


def test_kernels_are_compiled_together_before_steps_that_need_them(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single token's and a prompt's before the engine starts, others while it rests. Prompts are not run again."""
    inputs, run = prompts([40, 90, 200]), TurboQuantModelRunner.run_warm_up

    def compiling(states: torch.Tensor, code: Callable[[], object]) -> Callable[[], None]:
        events.append("compiles")
        code()
        return lambda: events.append("compiled")

    def noted_run(self: TurboQuantModelRunner, model: Any, requests: int, pair: int | None, *prompt: int) -> None:
        if self.only_compiles or not requests:
            events.append(requests)
        run(self, model, requests, pair, *prompt)

    monkeypatch.setattr(runner, "compile_kernels", compiling)
    monkeypatch.setattr(TurboQuantModelRunner, "run_warm_up", noted_run)
    with running(events) as manager:
        assert events.rest.wait(60)
        captured = pairs_of(events, 1, 2, 4, 8)
        ahead = [event for requests in (2, 4, 8) for event in ("compiles", requests, "compiled")]
        assert events == ["compiles", 1, 0, 0, "compiled", *ahead, *captured]
        pool = manager.batch_processor.cache.pool
        assert pool.num_free_sectors == manager.batch_processor.cache.num_sectors
        after = ask(manager, inputs)
        manager.stop(block=True)
        oracle = Oracle(manager.model)
        assert after == [oracle.generate(prompt, NEW) for prompt in inputs]


def test_a_request_does_not_wait_for_kernels_of_other_steps(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compiled behind, in short turns."""
    (prompt,), usual = prompts([40]), sys.getswitchinterval()

    def compiling(states: torch.Tensor, code: Callable[[], object]) -> Callable[[], None]:
        code()
        return wait

    def wait() -> None:
        if threading.current_thread() is not threading.main_thread():
            events.at.set()
            assert events.go.wait(60)

    monkeypatch.setattr(runner, "compile_kernels", compiling)
    with running(events) as manager:
        assert events.at.wait(60)
        assert sys.getswitchinterval() == pytest.approx(runner.SHORT_TURN, abs=3e-6) and usual > runner.SHORT_TURN
        manager.add_request(prompt)
        found = manager.get_result(timeout=60).generated_tokens
        assert not events.go.is_set() and sorted(events, key=str) == [*pairs_of(events, 1), "answer"]
        events.go.set()
        assert events.rest.wait(60) and manager.to_be_done is None
        assert sys.getswitchinterval() == usual
        assert sorted(event for event in events if event != "answer") == pairs_of(events, 1, 2, 4, 8)
        manager.stop(block=True)
        assert found == Oracle(manager.model).generate(prompt, NEW)


@pytest.mark.parametrize("factor", [50, 0.5])
def test_turns_are_short_while_a_thread_compiles_and_as_before_then(factor: float) -> None:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(factor * runner.SHORT_TURN)
    try:
        with pytest.raises(RuntimeError), runner.short_turns():
            assert sys.getswitchinterval() == pytest.approx(min(factor, 1) * runner.SHORT_TURN, abs=3e-6)
            raise RuntimeError
        assert sys.getswitchinterval() == pytest.approx(factor * runner.SHORT_TURN, abs=3e-6)
    finally:
        sys.setswitchinterval(usual)


def test_a_request_waits_for_one_capture_at_most(events: Events) -> None:
    (prompt,) = prompts([150])
    events.hold = (4, 0)
    with running(events) as manager:
        assert events.at.wait(60)
        assert manager.to_be_done.startswith("Up to ") and events == pairs_of(events, 1, 2)
        manager.add_request(prompt)
        with pytest.raises(ValueError, match="session of continuous batching is running"):
            manager.sleep()
        events.go.set()
        found = manager.get_result(timeout=60).generated_tokens
        assert events.rest.wait(60)
        assert events == [*pairs_of(events, 1, 2), (4, 0), "answer", *pairs_of(events, 4, 8)[1:]]
        manager.stop(block=True)
        assert found == Oracle(manager.model).generate(prompt, NEW)


@pytest.mark.parametrize("hard", [False, True])
def test_an_engine_stops_after_the_capture_that_it_is_at(events: Events, hard: bool) -> None:
    events.hold = (2, 0)
    with running(events) as manager:
        assert events.at.wait(60)
        stopping = threading.Thread(target=manager.stop, kwargs=dict(block=True, hard_stop=hard))
        stopping.start()
        stopping.join(0.2)
        assert stopping.is_alive()
        events.go.set()
        stopping.join(60)
        assert not stopping.is_alive() and not manager.is_running()
        # On a CPU a hard stop ends a step between layers.
        assert events == [*pairs_of(events, 1), *([] if hard and not events.options else [(2, 0)])]


def test_graphs_are_captured_again_after_sleep(events: Events) -> None:
    (prompt,) = prompts([40])
    with Session(model_of(), max_requests_per_batch=2, **events.options) as session:
        found = session.run([prompt], greedy(NEW))
        before = len(events)
        assert sorted(events[:-1]) == pairs_of(events, 1), "an engine that is no server captured what no step needed"
        assert session.run([prompt[::-1]], greedy(NEW)) and events[before:] == ["answer"]
        session.batching.sleep()
        session.batching.wake()
        del events[:]
        assert session.run([prompt], greedy(NEW)) == found
        assert sorted(events[:-1]) == pairs_of(events, 1)


def test_all_graphs_are_captured_first_if_a_warm_up_is_asked_for(events: Events) -> None:
    with Session(model_of(), max_requests_per_batch=6, **events.options) as session:
        session.capture()
        assert events == pairs_of(events, 1, 2, 4, 6) and session.manager.to_be_done is None
        (prompt,) = prompts([40])
        assert session.run([prompt], greedy(NEW)) == [session.oracle.generate(prompt, NEW)]
        assert events[len(pairs_of(events, 1, 2, 4, 6)) :] == ["answer"]


def test_copies_of_inputs_are_views_of_one_another_where_the_inputs_are() -> None:
    whole = torch.randn(2, 12)
    arguments = {"rows": [whole[0], whole[:, 3:9:2]], "all": whole, "other": (torch.ones(3), 5), "again": whole[0]}
    arguments["same"] = arguments["rows"][0]
    copies = copied(arguments)
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
        while manager.to_be_done:
            time.sleep(0.05)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        after = ask(manager, inputs)
        assert runner.behind is None and runner.layers is not None
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before > 0
        pairs = manager.batch_processor.inputs_and_outputs.io_pairs
        assert all(len(pair.device_io.graphs_by_features) == 2 for pair in pairs)
    assert Oracle(model).furthest(inputs, while_compiling, after) < NEAR_TIE


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cold_engine_compiles_no_kernel_for_its_first_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from triton import knobs

    compiled: list[tuple[threading.Thread, str]] = []

    def listener(*, src: Any, cache_hit: bool, **other: Any) -> None:
        compiled.extend([] if cache_hit else [(threading.current_thread(), src.fn.__name__)])

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", listener)
    model = model_of(head_dim=96, num_attention_heads=8).cuda().to(torch.bfloat16)  # heads that no other test compiles
    with started("eager", model, max_batch_tokens=512) as manager:
        assert "decode_split" in [kernel for _, kernel in compiled]
        ask(manager, prompts([300]))
        # Kernels of larger steps are compiled behind, in other threads.
        assert [kernel for thread, kernel in compiled if thread is manager._generation_thread] == []
