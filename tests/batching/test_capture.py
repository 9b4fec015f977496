"""Decode steps that no CUDA graph holds: batches go on without graphs, and torch is as it was before the capture."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import model_runner

from tests.support.batching_cases import Session, agreement, greedy, model_of, options, prompts
from tests.support.recorded_graph import record_graphs
from tq_hf import TurboQuantBatching, TurboQuantCache, compat, graph_decoding
from tq_hf.batching import manager, runner
from tq_hf.compat import as_input
from tq_hf.graph_decoding import loop as graph_loop

SENTENCE = "A decode step of LlamaForCausalLM cannot be captured as a CUDA graph"
REASON = "operation not permitted when stream is capturing"
LENGTHS = [5, 127, 128, 300, 47]
LIST_WARM_UPS = runner.TurboQuantModelRunner.list_warm_ups


class Capture:
    """Whether a graph is being captured; how many were begun, and the errors that ended one."""

    def __init__(self) -> None:
        self.active, self.begun, self.failed = False, 0, []

    @contextmanager
    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        self.active, self.begun = True, self.begun + 1
        try:
            yield
        finally:
            self.active = False

    @contextmanager
    def ended(self, device: torch.device, pool: Any) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.failed.append(str(error))
            raise


def reading(model: PreTrainedModel, capture: Capture | None = None) -> PreTrainedModel:
    """The last layer's MLP reads a number on the host, which raises in a capture."""

    def read(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if capture is not None and capture.active:
            raise RuntimeError(f"{REASON}\nA second line")
        inputs[0].sum().item()

    model.model.layers[-1].mlp.register_forward_pre_hook(read)
    return model


@pytest.fixture
def capture(padded: None, monkeypatch: pytest.MonkeyPatch) -> Capture:
    """transformers' runner captures decode steps on a CPU, when they are first needed."""
    capture, real = Capture(), model_runner.ModelRunner.__init__

    @wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.use_cuda_graph_decode = True
        self.mem_pool, self.graph_pool_id = None, (0, 1)

    monkeypatch.setattr(model_runner.ModelRunner, "__init__", init)
    monkeypatch.setattr(model_runner, "memory_pool_context", lambda pool: nullcontext())
    monkeypatch.setattr(model_runner, "create_accelerator_graph", lambda: None)
    monkeypatch.setattr(model_runner, "accelerator_graph_capture_context", capture)
    monkeypatch.setattr(runner, "ending_failed_capture", capture.ended)
    return capture


@pytest.fixture
def replayed(padded: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Keys of the steps with prompts that are replayed, as from graphs: with what the host had at their capture."""
    keys, real = list[tuple[int, ...]](), model_runner.ModelRunner.__init__

    @wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.use_cuda_graph_varlen = True

    def capture(self: Any, forward: Any, stream: Any, *args: Any) -> None:
        assert self.cache.lengths is None
        forward(*args)
        graph = SimpleNamespace(replay=lambda: replay(self, forward, args), reset=lambda: None)
        self.inputs_and_outputs.set_graph(graph)

    def replay(self: Any, forward: Any, args: tuple[Any, ...]) -> None:
        keys.append(self.buffers()[1]._get_graph_key())
        self.cache.arguments = args[1]
        forward(*args)

    monkeypatch.setattr(model_runner.ModelRunner, "__init__", init)
    monkeypatch.setattr(runner.TurboQuantModelRunner, "_capture_graph", capture)
    return keys


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(runner.logger, "warning_once", said.append)
    return said


def test_batches_go_on_without_graphs(capture: Capture, said: list[str], ways: dict[str, Any]) -> None:
    inputs = prompts(LENGTHS)
    with Session(reading(model_of(), capture), max_requests_per_batch=8, **ways) as session:
        assert session.run(inputs, greedy(10)) == [session.oracle.generate(prompt, 10) for prompt in inputs]
        assert session.pages_in_use() == 0
    assert capture.begun == len(capture.failed) == 1
    assert said == [f"{SENTENCE} ({REASON}). Kernels of each step are launched one by one, which is slower."]


def test_graphs_that_were_asked_for_fail_in_a_sentence(
    capture: Capture, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = manager.TurboQuantBatchProcessor.__init__

    def asked(self: Any, owner: Any, **kwargs: Any) -> None:
        owner.graphs_are_requested = True  # on a CPU transformers refuses the option
        real(self, owner, **kwargs)

    monkeypatch.setattr(manager.TurboQuantBatchProcessor, "__init__", asked)
    with Session(reading(model_of(), capture)) as session:
        results = session.batching.generate_batch(prompts([5]), greedy(4), session.options)
    (result,) = results.values()
    assert SENTENCE in result.error and result.error.endswith("Leave out `use_cuda_graph`.") and not said


def test_a_step_that_fails_before_its_capture_is_no_capture_that_failed(capture: Capture, said: list[str]) -> None:
    def fail(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if inputs[0].shape[1] < 5:
            raise RuntimeError("a bit fell over")

    model = model_of()
    model.model.layers[-1].mlp.register_forward_pre_hook(fail)
    with Session(model, max_requests_per_batch=2) as session:
        results = session.batching.generate_batch(prompts([5]), greedy(4), session.options)
    assert [result.error for result in results.values()] == ["a bit fell over"] and not said and not capture.begun


def test_steps_with_prompts_and_few_tokens_are_replayed(replayed: list[tuple[int, ...]], ways: dict[str, Any]) -> None:
    """From the fourth of a size on, whatever their requests: others with history, some that are answered, none."""
    new = 5
    with Session(model_of(), max_batch_tokens=600, **ways) as session:
        for lengths in ([40], [9, 30], [20, 21, 22], [130], [300], [280], [400], [1, 2, 400], [450], [470], [560], [5]):
            inputs = prompts(lengths, seed=sum(lengths))
            assert session.run(inputs, greedy(new)) == [session.oracle.generate(prompt, new) for prompt in inputs]
        (longer,) = prompts([700])  # read in two steps, the second with history
        assert session.run([longer], greedy(new)) == [session.oracle.chunked(longer, new, [600])]
        assert session.pages_in_use() == 0
    assert {key[0] for key in replayed} >= {64, 512} and len(replayed) >= 4


def test_few_kinds_of_steps_with_prompts_are_graphs(
    replayed: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MOST_GRAPHS", 1)
    with Session(model_of(), max_batch_tokens=600) as session:
        for length in (*range(300, 306), *range(40, 46)):
            session.run(prompts([length], seed=length), greedy(1))
    assert {key[0] for key in replayed} == {512} and len(replayed) == 2


def test_a_pause_drops_graphs_of_weights_that_have_moved(replayed: list[tuple[int, ...]]) -> None:
    with Session(model := model_of(), max_batch_tokens=600) as session:
        inputs = [prompts([300], seed=i) for i in range(6)]
        for each in inputs[:5]:
            session.run(each, greedy(1))
        assert replayed
        manager = session.batching.init_continuous_batching(greedy(1), session.options)
        manager.start()
        with manager.pause(), torch.no_grad():
            model.lm_head.weight.neg_()  # in place: a graph has the new numbers
        io = manager.batch_processor.inputs_and_outputs
        assert io.graphs._storage
        with manager.pause():
            model.lm_head.weight = torch.nn.Parameter(-2 * model.lm_head.weight)
        assert not io.graphs._storage
        name = manager.add_request(inputs[5][0], max_new_tokens=1)
        found = manager.get_result(name, timeout=60).generated_tokens
        manager.stop(keep_for_next_session=True)
        assert found == session.oracle.generate(inputs[5][0], 1) and io.graphs._storage


def test_a_warm_up_of_more_tokens_than_a_model_has_positions(
    padded: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its one request has as many tokens as a batch: GPT-2's embedding would be read outside of its positions."""
    seen: list[int] = []
    monkeypatch.setattr(runner.TurboQuantModelRunner, "list_warm_ups", LIST_WARM_UPS)
    model = model_of("gpt2", n_positions=300)
    manager = TurboQuantBatching(model, balance=False).init_continuous_batching(greedy(2), options())
    hook = model.transformer.wpe.register_forward_pre_hook(lambda _, ids: seen.append(int(ids[0].max())))
    manager.warmup(now=True)
    hook.remove()
    manager.restore_attention()
    assert len(seen) == 8 and max(seen) == 299 and "Failed to warm up" not in caplog.text


def test_graph_decoding_says_so_and_ends_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    record_graphs(monkeypatch)
    capture, recorded = Capture(), torch.cuda.graph

    @contextmanager
    def capturing(graph: Any, pool: Any) -> Iterator[None]:
        with recorded(graph, pool), capture():
            yield

    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(graph_loop, "ending_failed_capture", capture.ended)
    model = reading(model_of(), capture)
    model.set_attn_implementation("turboquant")
    cache = TurboQuantCache(model.config, max_cache_len=256)
    sentence = rf"{SENTENCE} \({REASON}\)\. Leave out `custom_generate=graph_decoding`\."
    with pytest.raises(RuntimeError, match=sentence):
        model.generate(torch.tensor(prompts([9])), **as_input(cache), custom_generate=graph_decoding, **NEW)
    assert len(capture.failed) == 1


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_grouped_experts_are_named_with_what_helps(experts: str) -> None:
    model = model_of("gpt_oss")
    model.set_experts_implementation(experts)
    sentence = compat.capture_failure(model, RuntimeError("Cannot copy.\nA second line"))
    assert sentence.startswith("A decode step of GptOssForCausalLM cannot be captured as a CUDA graph (Cannot copy")
    assert ('`model.set_experts_implementation("batched_mm")`' in sentence) == (experts == "grouped_mm")


NEW = dict(max_new_tokens=10, do_sample=False)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_capture_that_torch_leaves_open_is_ended(monkeypatch: pytest.MonkeyPatch, is_open: bool) -> None:
    """One of another operation follows only then. The stream is the caller's again in any case."""
    events: list[Any] = []

    @contextmanager
    def noted(*args: Any, **kwargs: Any) -> Iterator[None]:
        events.append(args)
        yield
        events.append("captured")

    @contextmanager
    def stream(stream: Any) -> Iterator[None]:
        try:
            yield
        finally:
            events.append(stream)

    def end(index: int, pool: Any) -> None:
        if not is_open:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        events.append(("end", index, pool))

    for name, value in dict(
        current_stream=lambda device: "the caller's", stream=stream, CUDAGraph=lambda: "graph", Stream=str, graph=noted
    ).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *args: events.append(("release", *args)), raising=False)
    with pytest.raises(RuntimeError, match="host"), compat.ending_failed_capture(torch.device("cpu", 0), (0, 7)):
        events.append(("collects", gc.isenabled()))
        raise RuntimeError("The host reads")
    # Garbage may be a memory pool, which must not be freed while another is captured into.
    assert events.pop(0) == ("collects", False) and gc.isenabled()
    ended = [("end", 0, (0, 7)), ("release", 0, (0, 7)), ("graph",), "captured"]
    assert events == [*(ended if is_open else []), "the caller's"]


def cuda_model() -> PreTrainedModel:
    """In float32: in bf16 a random model has near ties, which steps of other widths decide otherwise."""
    return reading(model_of(head_dim=128, num_attention_heads=8).cuda())


def torch_is_as_it_was() -> None:
    """Random numbers, the stream, and an allocator that returns what is cached."""
    assert torch.rand(3, device="cuda").isfinite().all()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    del_me = torch.empty(1 << 26, device="cuda", dtype=torch.uint8)
    reserved = torch.cuda.memory_reserved()
    del del_me
    torch.cuda.empty_cache()
    assert reserved - torch.cuda.memory_reserved() >= 1 << 26


@pytest.mark.cuda
def test_torch_is_as_it_was_after_graph_decoding() -> None:
    model = cuda_model()
    model.set_attn_implementation("turboquant")
    ids = torch.tensor(prompts([150]), device="cuda")
    for _ in range(2):
        cache = TurboQuantCache(model.config, max_cache_len=256)
        with pytest.raises(RuntimeError, match=SENTENCE):
            model.generate(ids, **as_input(cache), custom_generate=graph_decoding, **NEW)
        torch_is_as_it_was()
    cache = TurboQuantCache(model.config)
    assert model.generate(ids, **as_input(cache), max_new_tokens=10, do_sample=True).shape[1] > 150


@pytest.mark.cuda
def test_batches_go_on_without_graphs_on_a_gpu(said: list[str]) -> None:
    inputs, model = prompts(LENGTHS), cuda_model()
    others = [prompt[::-1] for prompt in inputs]  # the same prompts would read blocks of those before packed
    with Session(model) as session:
        found = session.run(inputs, greedy(20))
        assert not session.manager.batch_processor.model_runner.use_cuda_graph_decode
        torch_is_as_it_was()
        again = session.run(others, greedy(20))
    with Session(model, use_cuda_graph=False) as session:
        plain = [session.run(prompts, greedy(20)) for prompts in (inputs, others)]
        expected = [session.oracle.generate(prompt, 20) for prompt in inputs]
    assert len(said) == 1 and said[0].startswith(SENTENCE)
    assert agreement(found, plain[0]) > 0.9 and agreement(again, plain[1]) > 0.9
    assert agreement(found, expected) > 0.9


@pytest.mark.cuda
def test_graphs_that_were_asked_for_fail_in_a_sentence_on_a_gpu(said: list[str]) -> None:
    with Session(cuda_model(), use_cuda_graph=(False, True)) as session:
        results = session.batching.generate_batch(prompts([5, 40]), greedy(4), session.options)
    assert all(SENTENCE in result.error and "`use_cuda_graph`" in result.error for result in results.values())
    assert len(results) == 2 and not said
    torch_is_as_it_was()
