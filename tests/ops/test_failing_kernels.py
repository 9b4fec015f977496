"""Kernels that Triton cannot compile or launch: really compiled for a card that is not here, and really refused.

Needs no GPU. Triton is given a driver of a card that lacks something, and its cache is empty.
"""

import logging
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tq_kernels.decode import launch
from tq_kernels.types import AttentionOptions
from triton.backends.compiler import GPUTarget
from triton.runtime import build, driver

from tests.support.helpers import assert_unchanged, filled, snapshot, states
from tests.support.kernel_cases import INTERPRETED
from tq_hf import TurboQuantConfig
from tq_hf.ops import backend, dispatch
from tq_hf.ops.triton import blocks as triton_blocks
from tq_hf.ops.workspace import current_workspace
from tq_hf.stores import graph_ops
from tq_hf.stores.store import LayerStore
from tq_hf.tensors.layer import View

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

CONFIG = TurboQuantConfig(residual_length=0, sink_tokens=2, balance=False)
CPU = torch.device("cpu")
SENTENCE = r"^A Triton kernel does not compile or launch on cpu \(.*TQ_HF_BACKEND=torch to compute"


@pytest.fixture
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if tensors were on a GPU, for which nothing is compiled yet: a card may lack what only later kernels need."""
    monkeypatch.setattr(triton_blocks, "interpreted", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    for kernel in (launch.APPEND_AND_ROTATE, launch.SPLIT, launch.REDUCE):
        monkeypatch.setattr(kernel, "variants", {})


class Card:
    """A driver of a Hopper GPU with `shared` bytes, whose kernels are loaded by `load` and launched by `launcher`.

    Triton knows each by a number of its own: what it compiled for another is not taken.
    """

    numbers = count(1000)

    def __init__(
        self,
        shared: int = 227 * 1024,
        load: Callable[..., Any] = lambda *_: (object(), object(), 0, 0, 1024),
        launcher: Callable[..., Any] = lambda *_: lambda *_: None,
    ) -> None:
        self.number = next(self.numbers)
        self.launcher_cls = launcher
        self.utils = SimpleNamespace(load_binary=load, get_device_properties=lambda _: {"max_shared_mem": shared})

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0


def refuse(message: str) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise RuntimeError(message)

    return fail


def build_launcher(*_: Any) -> Any:
    return build._build("launcher", "launcher.c", ".", [], [], [], [])


def assembler(folder: Path, body: str) -> str:
    path = folder / "ptxas"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "release 12.8, V12.8.93" && exit 0\n{body}\n')
    path.chmod(0o755)
    return str(path)


CARDS: dict[str, tuple[Callable[[], Card], str]] = {
    "shared memory": (lambda: Card(shared=16), "OutOfResources: out of resource: shared memory, Required:"),
    "loading": (
        lambda: Card(load=refuse("Triton Error [CUDA]: no kernel image is available for execution on the device")),
        r"RuntimeError: Triton Error \[CUDA\]: no kernel image",
    ),
    "assembler": (Card, "PTXASError: PTXAS error: Internal Triton PTX codegen error"),
    "no compiler": (lambda: Card(launcher=build_launcher), "RuntimeError: Failed to find C compiler"),
    "compiler": (lambda: Card(launcher=build_launcher), "CalledProcessError: Command"),
    "launch": (
        lambda: Card(launcher=lambda *_: refuse("Triton Error [CUDA]: invalid argument")),
        r"Triton Error \[CUDA\]: invalid argument",
    ),
}


@pytest.mark.parametrize("lacking", CARDS)
def test_what_a_card_lacks_is_said(
    kernels_run: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacking: str, caplog: pytest.LogCaptureFixture
) -> None:
    card, reason = CARDS[lacking]
    monkeypatch.setattr(driver, "_active", card())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    if lacking == "assembler":
        monkeypatch.setenv("TRITON_PTXAS_PATH", assembler(tmp_path, 'echo "ptxas fatal : no" >&2; exit 255'))
    elif lacking == "no compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
    elif lacking == "compiler":
        monkeypatch.setenv("CC", "false")
    with monkeypatch.context() as patch:
        patch.setattr(backend, "chosen", "torch")
        store = filled(CONFIG, states(0, tokens=140))
    before, view = snapshot(store), store.view()
    scratch = current_workspace(CPU)
    triton_blocks.allocator(scratch, "decode attention", CPU)(1 << 16)
    held = scratch.nbytes
    with caplog.at_level(logging.DEBUG, "tq_hf.ops.backend"), pytest.raises(RuntimeError, match=SENTENCE) as caught:
        dispatch.attend(torch.zeros(1, 4, 1, 16), view, None, AttentionOptions(1.0))
    assert caught.match(reason)
    assert_unchanged(store, before)
    assert current_workspace(CPU) is scratch and scratch.nbytes == held
    # Frames of launches are for those who ask for them.
    assert "common/launcher.py" not in "".join(traceback.format_exception(caught.value))
    assert "common/launcher.py" in str(caplog.records[-1].exc_text)


def host_view(tokens: int) -> View:
    """View of a growing store, with new tokens."""
    return filled(CONFIG, states(0, tokens=140)).append(*states(1, tokens=tokens))


def device_view() -> View:
    """View of a preallocated store, with a new token that is not stored yet."""
    return LayerStore.allocate(CONFIG, *states(0, tokens=1), 300).append(*states(1, tokens=1))


ONE, MANY = torch.zeros(1, 4, 1, 16), torch.zeros(1, 4, 100, 16)
PLAIN, CAPPED = AttentionOptions(1.0), AttentionOptions(1.0, softcap=20.0)  # only one kernel caps so many queries
LAUNCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "encode": (lambda: filled(CONFIG, states(0, tokens=140)), lambda store: store.append(*states(1, tokens=300))),
    "dequantize": (lambda: filled(CONFIG, states(0, tokens=140)).view(), dispatch.dense),
    "decode": (lambda: host_view(1), lambda view: dispatch.attend(ONE, view, None, PLAIN)),
    "prefix": (lambda: host_view(100), lambda view: dispatch.attend(MANY, view, None, CAPPED)),
    "buffered": (lambda: host_view(100), lambda view: dispatch.buffered_attend(MANY, view, None, PLAIN)),
    "append_on_device": (device_view, graph_ops.dense),
    "attend_on_device": (device_view, lambda view: graph_ops.attend_token(ONE, view, None, PLAIN)),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="here Triton has a driver")
@pytest.mark.parametrize("name", LAUNCHES)
def test_every_launch_is_explained(kernels_run: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make, call = LAUNCHES[name]
    with monkeypatch.context() as patch:
        patch.setattr(backend, "chosen", "torch")
        held = make()
    with pytest.raises(RuntimeError, match=SENTENCE) as caught:
        call(held)
    assert caught.match("0 active drivers")
    # The way out is one.
    monkeypatch.setattr(backend, "chosen", "torch")
    call(held)
