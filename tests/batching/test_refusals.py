"""What continuous batching on packed pages refuses, in sentences, and steps that fail."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo import eval_frame
from transformers import CONFIG_MAPPING, ContinuousBatchingConfig, T5Config, T5ForConditionalGeneration

import tq_hf
from examples.measure.quality.family_configs import tiny_model
from tests.support.batching_cases import Session, greedy, model_of, options, outputs_of, prompts, serve
from tests.support.tiny_models import build, gemma4_config, random_weights
from tq_hf import Balance, TurboQuantBatching, TurboQuantConfig
from tq_hf.batching import allocators, batch_processor, checks, entry
from tq_hf.batching import cache as paged_cache

INDEXED = ("dots3_note_text", "deepseek_v32", "glm_moe_dsa")


@pytest.fixture
def batching() -> TurboQuantBatching:
    return TurboQuantBatching(model_of(), balance=False)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("bart", "takes no positions"),
        ("blt", "has no `num_hidden_layers` in its config"),
        ("hrm_text", "asks pages for `is_initialized`"),
        ("paligemma", "asks pages for `is_initialized`"),  # around its decoder, to let a prompt attend both ways
        ("opt", "asks pages for `get_seq_length`"),
        ("minimax", "does not run over pages .MiniMaxLightningAttention"),
        ("falcon_h1", "layers of the kind hybrid"),
        ("lara_mini", "sliding windows and linear layers"),
        ("diffllama", "attends twice in layer 0"),
        *((family, "layers of the kind indexed_attention") for family in INDEXED),
    ],
)
def test_models_that_batches_would_answer_wrongly_are_refused_at_the_start(family: str, words: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("transformers does not have it yet")
    with pytest.raises(ValueError, match=f"{words}.*TurboQuantCache"):
        TurboQuantBatching(tiny_model(family))


def test_layers_that_find_the_states_of_others_in_the_cache_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before transformers handed them on in an argument."""
    model = build("gemma3n")
    TurboQuantBatching(model, balance=False)
    attention = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(attention, "forward", lambda self, *args, **kwargs: kwargs["cache"].shared_layers[0])
    with pytest.raises(ValueError, match="asks pages for `shared_layers`.*TurboQuantCache"):
        TurboQuantBatching(model, balance=False)


def test_layers_of_a_kind_whose_heads_differ_are_refused_at_the_start() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    model = random_weights(gemma4_config(num_hidden_layers=4, layer_types=kinds))
    attention = model.model.layers[3].self_attn
    attention.k_proj = torch.nn.Linear(attention.k_proj.in_features, 2 * attention.k_proj.out_features)
    with pytest.raises(ValueError, match="KV heads that differ in different layers of full attention.*TurboQuantCache"):
        TurboQuantBatching(model)


def test_heads_wider_than_the_kernels_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", head_dim=320)
    TurboQuantBatching(model, balance=False)
    monkeypatch.setattr(checks, "widest_paged_head", lambda device: 256)
    with pytest.raises(ValueError, match="heads of 320 channels, and this device's kernels read pages of up to 256"):
        TurboQuantBatching(model, balance=False)


def encoder_decoder() -> torch.nn.Module:
    return T5ForConditionalGeneration(T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, vocab_size=64))


def on_two_devices() -> torch.nn.Module:
    model = model_of()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: build("mistral", sliding_window=64), "no full attention, .*`model.generate_batch`"),
        (encoder_decoder, "encoder-decoder"),
        (on_two_devices, "spread over 0, 1"),
        (lambda: torch.nn.Linear(1, 1), "model of transformers or a wrapper of one, not Linear"),
    ],
    ids=["sliding windows only", "encoder-decoder", "several devices", "no model"],
)
def test_what_pages_cannot_serve_is_refused(make: Callable[[], torch.nn.Module], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TurboQuantBatching(make())


def test_a_model_that_is_served_is_not_probed_again(batching: TurboQuantBatching) -> None:
    """A probe switches the attention of the model, which the engine's thread runs."""
    with serve(batching, 2):
        before = checks.probes[batching.model]
        TurboQuantBatching(batching.model, balance=False)
        assert checks.probes[batching.model] is before


def test_two_probes_at_once_leave_torch_compile_on() -> None:
    """The second one begins within the first, if it may, and ends after it."""
    models, begun, ended = (model_of(), model_of()), threading.Event(), threading.Event()
    second = threading.Thread(target=TurboQuantBatching, args=(models[1],), kwargs=dict(balance=False))

    def in_first(*_: Any) -> None:
        second.start()
        begun.wait(0.5)

    def in_second(*_: Any) -> None:
        begun.set()
        ended.wait(60)

    models[0].model.layers[0].register_forward_pre_hook(in_first)
    models[1].model.layers[0].register_forward_pre_hook(in_second)
    checks.probes.clear()
    TurboQuantBatching(models[0], balance=False)
    ended.set()
    second.join(60)
    assert {*checks.probes} == {*models} and eval_frame._stance.stance == "default"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(preset="5bit"), "Unknown preset"),
        (dict(skip_layers=(0, -1)), "has no layer to pack but those in `skip_layers`"),
        (dict(skip_layers=(2,)), "names layer 2, but the model has 2"),
        (dict(layers={0: "k8v4"}), "`layers` is \\(\\(0, 'k8v4'\\),\\): pages of all packed layers have one preset"),
        (dict(preset=TurboQuantConfig(layers={0: "k8v4"})), "`layers` is \\(\\(0, 'k8v4'\\),\\)"),
        (dict(sink_tokens=9), "`sink_tokens` is 9"),
        (dict(sink_tokens=-1), "`sink_tokens` is -1"),
        (dict(residual_length=-1), "`residual_length` is -1"),
        (dict(preset=TurboQuantConfig(), seed=3), "TurboQuantConfig and also seed"),
        (dict(balance="yes"), "`balance` is 'yes'"),
        (dict(preset=TurboQuantConfig(balance=False), balance=Balance({})), "leave out either"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_pages_do_not_have_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TurboQuantBatching(model_of(), **arguments)


def test_pages_have_the_configuration_of_a_cache() -> None:
    given = TurboQuantConfig(key_bits=3, value_bits=2, seed=7, balance=False, sink_tokens=1, residual_length=30)
    assert TurboQuantBatching(model_of(), given).config == given
    assert TurboQuantBatching(model_of(), "k8v4").config == TurboQuantConfig.from_preset("k8v4")


def test_another_page_size_is_refused_and_the_stock_one_rescaled(batching: TurboQuantBatching) -> None:
    with pytest.raises(ValueError, match="`page_size` is 64"):
        batching.init_continuous_batching(greedy(3), ContinuousBatchingConfig(page_size=64))
    for name, size, blocks in (("page_size", 256, 20), ("block_size", 256, 20), ("page_size", 128, 40)):
        given = ContinuousBatchingConfig(**{name: size}, num_blocks=blocks)
        manager = batching.init_continuous_batching(greedy(3), given)
        manager.warmup()
        cache = manager.batch_processor.cache
        assert (cache.num_blocks, manager.continuous_batching_config.page_size) == (40, 128)
        assert (given.page_size, given.num_blocks) == (size, blocks)
        manager.stop()
        batching.model.set_attn_implementation("sdpa")


def test_balance_of_another_model_is_refused() -> None:
    other = Balance.of(model_of(head_dim=64))
    with pytest.raises(ValueError, match="`balance` is of \\[2, 64\\]"):
        TurboQuantBatching(model_of(), balance=other).init_continuous_batching(greedy(2), options()).warmup()


def test_an_ordinary_call_of_a_held_model_is_refused(batching: TurboQuantBatching) -> None:
    model, ids = batching.model, torch.tensor(prompts([5]))
    before = model(ids).logits
    with serve(batching, 2):
        with pytest.raises(ValueError, match="serves a continuous batching manager.*Stop the manager"):
            model(ids)
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("children", [1, 3])
def test_a_request_longer_than_the_pool_is_refused_at_once(children: int) -> None:
    longest, short = prompts([624, 20])
    # 17 of 21 pages are a ring and sinks: with 4 blocks there is room for 643 tokens. The last answered is not stored.
    with Session(model_of(), num_blocks=21, max_batch_tokens=256) as session:
        assert [len(out) for out in session.run([longest], greedy(20))] == [20]
        assert session.cache.max_request_tokens == 643
        generation = greedy(21, answers=children)
        results = session.batching.generate_batch(
            [longest, short], generation_config=generation, continuous_batching_config=session.options
        )
        refused, served = list(results.values())[:children], list(results.values())[children:]
        assert len(served) == children
        for result in refused:
            assert "624 tokens and up to 21 new ones is longer than the cache, which has room for 643" in result.error
        assert [len(result.generated_tokens) for result in served] == [21] * children


def test_a_request_without_a_limit_that_outgrows_the_pool_fails_and_others_go_on() -> None:
    growing, short = prompts([600, 20])
    with Session(model_of(), num_blocks=21, max_batch_tokens=256) as session:
        expected = session.run([short], greedy(5))
        session.manager.generation_config.max_new_tokens = None
        session.manager.start()
        first, second = session.manager.add_request(growing), session.manager.add_request(short, max_new_tokens=5)
        found = outputs_of(session.manager, 2)
        assert "No requests can be scheduled" in found[first].error
        assert len(found[first].generated_tokens) == 44
        assert [found[second].generated_tokens] == expected
        assert session.pages_in_use() == 0
        session.manager.stop(keep_for_next_session=True)


@pytest.fixture
def fail_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets a layer's step fail once, after so many layers have done theirs."""
    real = allocators.paged_step

    def fail_after(layers: int) -> None:
        left = iter([False] * layers + [True])

        def step(*args: Any, **kwargs: Any) -> torch.Tensor:
            if next(left, False):
                raise RuntimeError("a bit fell over")
            return real(*args, **kwargs)

        monkeypatch.setattr(allocators, "paged_step", step)

    return fail_after


def test_a_step_that_fails_fails_its_requests_and_leaves_the_manager_usable(fail_after: Callable[[int], None]) -> None:
    inputs = prompts([130, 40])
    with Session(model_of()) as session:
        fail_after(2 * 7 + 1)  # in the second layer of the eighth step
        results = session.batching.generate_batch(inputs, greedy(20), session.options, persistent_manager=True)
        assert "a bit fell over" in [result.error for result in results.values()]
        assert session.pages_in_use() == 0
        # A block that was complete before is shared.
        expected = [session.oracle.chunked(prompt, 20, [len(prompt) // 128 * 128]) for prompt in inputs]
        assert session.run(inputs, greedy(20)) == expected


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Errors in the log of batches, with their tracebacks."""
    found: list[str] = []

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(self.format(record))

    notes = Notes(logging.ERROR)
    for module in (entry, batch_processor):
        module.logger.addHandler(notes)
    yield found
    for module in (entry, batch_processor):
        module.logger.removeHandler(notes)


def test_a_failed_request_is_one_line_and_the_batch_says_at_its_end_which_failed(
    fail_after: Callable[[int], None], said: list[str], batching: TurboQuantBatching
) -> None:
    fail_after(2 * 2)  # the third step
    results = batching.generate_batch(prompts([20, 20, 900]), greedy(7), options(max_batch_tokens=64, num_blocks=200))
    first, last = said
    assert first.startswith("A step of continuous batching failed, and with the step request") and first.endswith(
        "fell over"
    )
    failed = [name for name, result in results.items() if result.error]
    assert f"{len(failed)} of 3 requests failed" in last and "a bit fell over" in last
    assert all(name in first and name in last for name in failed) and 0 < len(failed) < 4
    assert not [line for line in said if "\n" in line]


def test_refused_requests_are_named_with_their_reason(said: list[str], batching: TurboQuantBatching) -> None:
    results = batching.generate_batch([*prompts([20]), [], *prompts([40_000] * 12)], greedy(3), options(num_blocks=40))
    assert [result.error is None for result in results.values()] == [True] + [False] * 13
    *lines, last = said
    assert len(lines) == 13 and all(line.startswith("Request req_") and "\n" not in line for line in lines)
    assert last.startswith("13 of 14 requests failed") and "request req_1: A request of no tokens" in last
    assert "requests req_2, req_3, req_4, req_5, req_6, req_7, req_8, req_9 and 4 more: A prompt of 40,000" in last


def test_a_batch_of_answers_says_nothing(said: list[str], batching: TurboQuantBatching) -> None:
    batching.generate_batch(prompts([20]), greedy(2), options())
    assert said == []


@pytest.mark.parametrize("sharing", [True, False])
def test_requests_that_were_not_in_the_step_go_on(fail_after: Callable[[int], None], sharing: bool) -> None:
    """The second of two prompts waits for room in the batch."""
    first, second = prompts([64, 64])
    with Session(model_of(), max_requests_per_batch=1, allow_block_sharing=sharing) as session:
        expected = session.run([second], greedy(3))
        fail_after(2 * 2)  # the third step
        results = session.batching.generate_batch([first, second], greedy(3), session.options, persistent_manager=True)
        failed, served = sorted(results.values(), key=lambda result: result.error is None)
        assert failed.error == "a bit fell over" and served.error is None
        assert served.prompt_ids == first or [served.generated_tokens] == expected
        assert session.pages_in_use() == 0


def test_a_request_that_cannot_be_scheduled_fails_and_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, bad = prompts([200, 300])
    real = paged_cache.TurboQuantPagedCache.search_prefix_match

    def search(cache: Any, request_id: str, prompt_ids: list[int]) -> int:
        if len(prompt_ids) == len(bad):
            raise RuntimeError("no hash")
        return real(cache, request_id, prompt_ids)

    monkeypatch.setattr(paged_cache.TurboQuantPagedCache, "search_prefix_match", search)
    with Session(model_of()) as session:
        (result,) = session.batching.generate_batch([bad], greedy(3), session.options, persistent_manager=True).values()
        assert result.error == "no hash"
        assert session.run([prompt], greedy(3)) == [session.oracle.generate(prompt, 3)]


def test_forks_fail_with_their_parent(fail_after: Callable[[int], None]) -> None:
    fail_after(0)
    generation = greedy(3, answers=3)
    with Session(model_of()) as session:
        results = session.batching.generate_batch(prompts([200]), generation, session.options)
        assert [result.error for result in results.values()] == ["a bit fell over"] * 3


@pytest.mark.parametrize(
    ("device", "size", "set_to", "lines"),
    [("cuda", 2, None, 1), ("cuda", 2, "1", 1), ("cuda", 2, "0", 0), ("cuda", None, None, 0), ("cpu", 2, None, 0)],
)
def test_nccl_within_graphs_is_asked_for_before_processes_meet(
    device: str, size: int | None, set_to: str | None, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers sets the variable with the options of a batch, and then says nothing, though it may be too late."""
    said: list[str] = []
    monkeypatch.setattr(checks.logger, "warning", said.append)
    monkeypatch.delenv("NCCL_GRAPH_MIXING_SUPPORT", raising=False)
    if set_to is not None:
        monkeypatch.setenv("NCCL_GRAPH_MIXING_SUPPORT", set_to)
    checks.warn_about_graph_mixing(SimpleNamespace(device=torch.device(device), tp_size=size))
    assert len(said) == lines and all("NCCL_GRAPH_MIXING_SUPPORT=0 torchrun" in line for line in said)


def test_older_versions_of_transformers_are_refused_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "5.18.1")
    monkeypatch.delitem(sys.modules, "tq_hf.batching")
    monkeypatch.delattr(tq_hf, "batching")
    for name in ("TurboQuantBatching", "continuous_batching"):
        with pytest.raises(ImportError, match="needs transformers 5.19 or newer, and 5.18.1 is installed"):
            getattr(tq_hf, name)
    with pytest.raises(AttributeError, match="no attribute 'batch'"):
        tq_hf.batch  # noqa: B018
