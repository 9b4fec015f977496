"""Ways of running transformers' engine that need a GPU, acted out on a CPU."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching import continuous_api, input_outputs, model_runner, offloading_manager

from tests.support.batching_cases import Stream, model_of
from tq_hf import TurboQuantBatching
from tq_hf.batching import runner


@pytest.fixture(autouse=True)
def left_out_of_later_searches() -> Iterator[None]:
    """Leave what a test made out of every later search for garbage, of which each end of an engine is one."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad batches as for CUDA graphs: queries, histories and requests that are none."""
    real = model_runner.ModelRunner.__init__

    @wraps(real)  # whose code is looked at for the names that it sets
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.pad_inputs = True

    monkeypatch.setattr(model_runner.ModelRunner, "__init__", init)
    # Without requests the engine waits, and does not work ahead.
    monkeypatch.setattr(runner.TurboQuantModelRunner, "list_warm_ups", lambda self: setattr(self, "missing", []))


@pytest.fixture
def asynchronous(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of asynchronous batches, and a CPU that runs them: work is done when it is asked for, in that order."""
    monkeypatch.setattr(input_outputs.ContinuousBatchingAsyncIOs, "_supported_device_types", ("cpu",))
    monkeypatch.setattr(input_outputs, "create_device_stream", lambda device: Stream())
    monkeypatch.setattr(torch, "Event", lambda *args, **kwargs: SimpleNamespace(synchronize=lambda: None))
    for module in (input_outputs, model_runner, offloading_manager, continuous_api, runner):
        monkeypatch.setattr(module, "stream_context", lambda stream: contextlib.nullcontext())
    return dict(use_async_batching=True)


@pytest.fixture(params=["in turn", "asynchronous"])
def ways(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of both kinds of batches, one after the other."""
    return request.getfixturevalue("asynchronous") if request.param == "asynchronous" else {}


@pytest.fixture
def offloaded(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The requests that were offloaded, to memory that is not pinned, which needs a GPU."""

    class WithoutPinning:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            return torch.empty(*args, **kwargs)

    TurboQuantBatching(model_of())  # has read the names that are replaced below
    monkeypatch.setattr(offloading_manager, "torch", WithoutPinning())
    found: list[set[str]] = []
    real = offloading_manager.OffloadingManager._offload_to_cpu
    monkeypatch.setattr(
        offloading_manager.OffloadingManager, "_offload_to_cpu", lambda *args: found.append(real(*args)) or found[-1]
    )
    return found
