"""`TQ_HF_BACKEND` chooses the backend, and a kernel that fails on a card names it."""

import runpy
from typing import Any

import pytest
import torch
from tq_kernels.types import AttentionOptions, ChannelScales, DenseRows, KeyValue

from tests.support.helpers import llama_config, states
from tq_hf import TurboQuantCache, TurboQuantConfig
from tq_hf.ops import backend, dispatch, reference
from tq_hf.ops.triton import blocks as triton_blocks

LAYOUT = TurboQuantConfig().layout(16)


@pytest.fixture
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if tensors were on a GPU with Triton."""
    monkeypatch.setattr(triton_blocks, "HAS_TRITON", True)
    monkeypatch.setattr(triton_blocks, "interpreted", lambda: True, raising=False)

    def store(prompt: KeyValue, dense: DenseRows, scales: ChannelScales | None, statistics: Any) -> None:
        queries, valid = (None, None) if statistics is None else statistics[:2]
        reference.store_prompt(*prompt, dense, scales, statistics is not None, queries, valid)

    monkeypatch.setattr(triton_blocks, "store_prompt_rows", store, raising=False)


@pytest.mark.parametrize(("chosen", "serves"), [("", True), ("torch", False)])
def test_the_variable_keeps_kernels_off(kernels_run, monkeypatch, chosen, serves):
    monkeypatch.setattr(backend, "chosen", chosen)
    assert triton_blocks.supports_blocks(torch.zeros(1), LAYOUT) is serves


@pytest.mark.parametrize("wrong", ["cuda", "triton"])
def test_a_wrong_value_is_refused_in_a_sentence(monkeypatch, wrong):
    monkeypatch.setattr(backend, "chosen", wrong)
    with pytest.raises(ValueError, match=f"TQ_HF_BACKEND is '{wrong}'; it must be torch or unset"):
        TurboQuantCache(llama_config())


def test_the_variable_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("TQ_HF_BACKEND", " Torch ")
    assert runpy.run_path(backend.__file__)["chosen"] == "torch"


class OutOfResources(Exception):
    """As Triton raises it where a card has too little shared memory."""


OutOfResources.__module__ = "triton.runtime.errors"

FAILURES = [
    OutOfResources("out of resource: shared memory, Required: 98304, Hardware limit: 65536."),
    RuntimeError("Triton Error [CUDA]: no kernel image is available"),
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: str(failure)[:12])
@pytest.mark.parametrize("tokens", [[200], [100, 50], [127, 1]], ids=["prompt", "turn", "step"])
def test_a_kernel_that_fails_names_the_switch_and_leaves_the_cache_as_it_was(kernels_run, monkeypatch, failure, tokens):
    # Unbalanced, a prompt is encoded by `update`; balanced, when attention has shown its queries.
    options = dict(residual_length=0, sink_tokens=0, balance=False)
    cache, undisturbed = (TurboQuantCache(llama_config(1), **options) for _ in range(2))
    calls = [states(seed, tokens=count) for seed, count in enumerate(tokens)]
    for call in calls[:-1]:
        for one in (cache, undisturbed):
            one.update(*call, 0)

    def fail(*args, **kwargs):
        raise failure

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(triton_blocks, "encode_blocks", fail, raising=False)
        with pytest.raises(
            RuntimeError, match="does not compile or launch on cpu.*TQ_HF_BACKEND=torch to compute"
        ) as e:
            cache.update(*calls[-1], 0)
        assert e.value.__cause__ is failure
    assert cache.get_seq_length() == sum(tokens[:-1])
    monkeypatch.setattr(backend, "chosen", "torch")
    with torch.no_grad():
        for call in (calls[-1], states(9, tokens=150)):
            assert all(map(torch.equal, cache.update(*call, 0), undisturbed.update(*call, 0)))
    assert torch.equal(cache.layers[0].keys, undisturbed.layers[0].keys)


@pytest.mark.parametrize("room", [None, 700])
@pytest.mark.parametrize("held", [0, 3, 150])
def test_a_prompt_that_fails_after_its_rows_are_stored_leaves_no_trace(kernels_run, monkeypatch, held, room):
    """Counts on the device are written with the rows, before blocks are encoded."""
    options = dict(residual_length=0, balance=False, max_cache_len=room)
    cache, undisturbed = (TurboQuantCache(llama_config(1), **options) for _ in range(2))
    monkeypatch.setattr(triton_blocks, "encode_blocks", lambda *args, **kwargs: fail(), raising=False)
    for one in (cache, undisturbed):
        if held:
            with monkeypatch.context() as patch, torch.no_grad():
                patch.setattr(backend, "chosen", "torch")
                one.update(*states(0, tokens=held), 0)

    def fail():
        raise FAILURES[0]

    with torch.no_grad(), pytest.raises(RuntimeError, match="does not compile or launch"):
        cache.update(*states(1, tokens=300), 0)
    layer = cache.layers[0]
    assert int(cache.get_seq_length()) == held and layer.is_initialized == (held > 0)
    monkeypatch.setattr(backend, "chosen", "torch")
    with torch.no_grad():
        for call in (states(2, tokens=1), states(3, tokens=300), states(4, tokens=1)):
            assert all(map(torch.equal, cache.update(*call, 0), undisturbed.update(*call, 0)))
    assert torch.equal(layer.keys, undisturbed.layers[0].keys)


def test_channel_scales_that_fail_leave_a_prompt_waiting(kernels_run, monkeypatch):
    prompt = states(0, heads=2, tokens=300)
    queries = torch.randn(1, 4, 300, prompt[0].shape[3], generator=torch.Generator().manual_seed(1))

    def fail(*args, **kwargs):
        raise FAILURES[0]

    cache, undisturbed = (TurboQuantCache(llama_config(1)) for _ in range(2))
    for one in (cache, undisturbed):
        one.update(*prompt, 0)
    store, other = (one.layers[0].store for one in (cache, undisturbed))
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(triton_blocks, "store_prompt_rows", fail, raising=False)
        with pytest.raises(RuntimeError, match="does not compile or launch on cpu"):
            store.encode_deferred(queries)
    assert store.is_deferred and store.length == 300
    monkeypatch.setattr(backend, "chosen", "torch")
    for one in (store, other):
        one.encode_deferred(queries)
    assert not store.is_deferred and store.counts == other.counts
    assert all(map(torch.equal, store.blocks.channel_scales, other.blocks.channel_scales))
    assert torch.equal(store.blocks.key_words, other.blocks.key_words)


def test_errors_of_others_stay_what_they_are(kernels_run, monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(triton_blocks, "encode_blocks", fail, raising=False)
    with pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory$"):
        TurboQuantCache(llama_config(1), residual_length=0, balance=False).update(*states(0, tokens=300), 0)


def test_attention_that_fails_names_the_switch(kernels_run, monkeypatch):
    cache = TurboQuantCache(llama_config(1))
    monkeypatch.setattr(backend, "chosen", "torch")
    cache.update(*states(0, tokens=300), 0)
    view = cache.layers[0].store.view()
    monkeypatch.setattr(backend, "chosen", "")

    def fail(*args, **kwargs):
        raise FAILURES[0]

    monkeypatch.setattr(triton_blocks, "decode_launch", lambda *_: fail)
    monkeypatch.setattr(fail, "sinks", 4, raising=False)
    monkeypatch.setattr(fail, "value_dim", 16, raising=False)
    monkeypatch.setattr(triton_blocks, "held_counts", lambda *counts: counts, raising=False)
    with pytest.raises(RuntimeError, match="TQ_HF_BACKEND=torch"):
        dispatch.attend(torch.zeros(1, 4, 1, 16), view, None, AttentionOptions(1.0))


@pytest.mark.parametrize("said", ["out of memory", "device-side assert triggered"])
def test_what_triton_passes_on_about_other_work_blames_no_kernel(said):
    error = RuntimeError(f"Triton Error [CUDA]: {said}")
    assert backend.explained(error, torch.device("cpu")) is error


def test_of_a_compilation_error_the_end_is_told():
    error = OutOfResources("at 12:8:\n    x = tl.dot(a, b)\n        ^\nno such product")
    assert "(OutOfResources: no such product)" in str(backend.explained(error, torch.device("cpu")))
