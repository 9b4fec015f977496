"""What falls to torch on a GPU is said once, in a sentence, when it runs."""

import logging
from typing import Any

import pytest
import torch
from tq_kernels.types import AttentionOptions, PackedBlocks

from tests.support.helpers import rows, states
from tests.support.kernel_cases import INTERPRETED
from tq_hf import TurboQuantConfig
from tq_hf.ops import backend, dispatch
from tq_hf.stores import graph_ops
from tq_hf.stores.store import LayerStore

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels compute it there")

CONFIG = TurboQuantConfig(residual_length=0, sink_tokens=0)
OPTIONS = AttentionOptions(0.25)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """What is logged where every tensor is taken for one of a GPU that no kernel runs on."""
    backend._warn_once.cache_clear()
    monkeypatch.setattr(backend, "_is_on_gpu", lambda states: True)
    monkeypatch.setattr(backend, "chosen", "")
    caplog.set_level(logging.WARNING, backend.__name__)
    yield lambda: [record.getMessage() for record in caplog.records]
    backend._warn_once.cache_clear()


def encode() -> None:
    pair = states(0, 1, 2, 128, 16)
    blocks = PackedBlocks.allocate(CONFIG.layout(16), 1, 2, 1, torch.device("cpu"))
    dispatch.encode(CONFIG, pair, blocks, 0)


def dequantize() -> None:
    blocks = PackedBlocks.allocate(CONFIG.layout(16), 1, 2, 1, torch.device("cpu"))
    dispatch.dequantize(CONFIG, blocks, *states(0, 1, 2, 128, 16))


def balance() -> None:
    pair = states(0, 1, 2, 128, 16)
    LayerStore.allocate(CONFIG, *pair).append(*pair)


def attend(queries: int) -> None:
    pair = states(0, 1, 2, 300, 16)
    view = LayerStore.allocate(TurboQuantConfig(), *pair).append(*pair)
    dispatch.attend(states(1, 1, 4, queries, 16)[0], view, None, OPTIONS)


def append() -> None:
    pair = states(0, 1, 2, 20, 16)
    store = LayerStore.allocate(CONFIG, *pair, 64)
    store.append(*rows(pair, 0, 19))
    graph_ops.append_pending_token(store.append(*rows(pair, 19)))


def attend_dense() -> None:
    query, (keys, values) = states(1, 1, 4, 5, 16)[0], states(0, 1, 2, 5, 16)
    dispatch.attend_dense(query, (keys, values), None, AttentionOptions(0.25, softcap=3.0))


OPERATIONS = {
    "Encoding is": encode,
    "Dequantizing is": dequantize,
    "Balancing channels is": balance,
    "Attention of decode steps is": lambda: attend(1),
    "Attention of many queries over compressed tokens is": lambda: attend(40),
    "Appending to a preallocated cache is": append,
    "Attention with capped logits or learned sinks is": attend_dense,
}


@pytest.mark.parametrize("subject", OPERATIONS)
def test_an_operation_in_torch_on_a_gpu_is_said_once(subject: str, said: Any) -> None:
    for _ in range(3):
        OPERATIONS[subject]()
    (line,) = [line for line in said() if line.startswith(subject)]
    assert line.startswith(f"{subject} computed by torch, which is right but slower: ")
    assert "heads of 16 channels in float32" in line


def test_other_heads_are_said_by_themselves(said: Any) -> None:
    for dims in ((576, 512), (576, 512), (640, 640)):
        backend.say_torch_computes("Encoding", torch.zeros(1), *dims)
    assert ["576 and 512 channels" in line for line in said()] == [True, False]
    assert "of 640 channels" in said()[1]


def test_what_the_user_chose_is_not_said(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "chosen", "torch")
    encode()
    assert said() == []


def test_on_a_cpu_nothing_is_said(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_is_on_gpu", lambda states: states.is_cuda)
    for operation in OPERATIONS.values():
        operation()
    assert said() == []


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dim", "lines"), [(512, 0), (576, 1)])
def test_on_a_gpu_heads_that_kernels_take_are_not_spoken_of(
    dim: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    backend._warn_once.cache_clear()
    keys, values = (x.cuda().half() for x in states(0, 1, 1, 128, dim))
    blocks = PackedBlocks.allocate(CONFIG.layout(dim), 1, 1, 1, keys.device)
    dispatch.encode(CONFIG, (keys, values), blocks, 0)
    assert len([record for record in caplog.records if record.getMessage().startswith("Encoding is")]) == lines
