"""The way of a decode step's keys, from the cache to a kernel, is short and goes one way."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tq_kernels.codec import balance as prompts
from tq_kernels.codec import launch as encoding
from tq_kernels.common.launcher import Kernel
from tq_kernels.decode import launch
from transformers import PreTrainedModel

from tests.support.helpers import module_with
from tests.support.kernel_cases import INTERPRETED
from tests.support.launch_recorder import store_no_rows
from tests.support.tiny_models import build, token_ids
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input
from tq_hf.layers.handle import resolve
from tq_hf.ops.triton import blocks as triton_blocks
from tq_hf.ops.workspace import release_workspaces
from tq_hf.tensors.residual import PendingToken

pytestmark = pytest.mark.skipif(INTERPRETED, reason="nothing is launched")

KERNELS = {launch: ("APPEND_AND_ROTATE", "SPLIT", "REDUCE")}
PROMPT_KERNELS = {prompts: ("STORE",), encoding: ("ENCODE",)}
MAKE_NO_LAUNCH = ("empty", "empty_like", "new_empty")
"""Operations that launch nothing on a GPU, beside those that make views."""


class Silent:
    """In place of a Triton kernel: launching it does nothing but count."""

    launches = 0

    def warmup(self, *arguments: Any, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(run=self._launch, function=None, packed_metadata=None, src=SimpleNamespace(signature={}))

    @classmethod
    def _launch(cls, *arguments: Any) -> None:
        cls.launches += 1


@pytest.fixture
def kernels(monkeypatch):
    """Kernels that serve CPU tensors and do nothing."""
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Kernel(Silent()))
    monkeypatch.setattr(triton_blocks, "interpreted", lambda: True)
    monkeypatch.setattr(triton_blocks, "encode_blocks", lambda *arguments, **options: None)
    monkeypatch.setattr(triton_blocks, "store_prompt_rows", store_no_rows)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    release_workspaces()
    yield
    release_workspaces()


@pytest.fixture
def prompt_kernels(kernels, monkeypatch):
    """Those of prompts, too, are launched and do nothing."""
    for module, names in PROMPT_KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Kernel(Silent()))
    monkeypatch.setattr(triton_blocks, "encode_blocks", encoding.encode)
    monkeypatch.setattr(triton_blocks, "store_prompt_rows", prompts.store)


@contextmanager
def profiled(note: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Tell `note` of every call."""
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


LAUNCH = "tq_kernels.common.launcher"


class Way:
    """Functions of this project that are given the keys of one layer's step, or a tuple with them, in order."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.functions: list[tuple[str, str]] = []

    def _has_keys(self, value: Any) -> bool:
        return value is self.keys or (isinstance(value, (tuple, list)) and any(map(self._has_keys, value)))

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if event != "call" or module.split(".")[0] not in ("tq_hf", "tq_kernels"):
            return
        arguments = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        if self.keys is None and code.co_qualname == "TurboQuantCache.update":
            self.keys = frame.f_locals["key_states"]
        # A pending token among the arguments is seen by its states; one within a view goes along unseen.
        arguments += [getattr(x, "states", None) for x in arguments if isinstance(x, PendingToken)]
        if self.keys is not None and any(map(self._has_keys, arguments)):
            self.functions.append((module, code.co_qualname))


def after_steps(layers: int, room: int | None) -> tuple[PreTrainedModel, TurboQuantCache, torch.Tensor]:
    """A model, a cache after a prompt and two steps, the first of which compiles, and the prompt."""
    model = build("llama", num_hidden_layers=layers, attention="turboquant")
    cache = TurboQuantCache(model.config, max_cache_len=room)
    ids = token_ids(1, 20)
    for part in (ids, ids[:, :1], ids[:, :1]):
        model(part, **as_input(cache))
    return model, cache, ids


@pytest.mark.parametrize("preallocated", [None, 300], ids=["growing", "preallocated"])
def test_keys_pass_eight_functions_in_six_modules_and_never_come_back(preallocated, kernels):
    model, cache, ids = after_steps(1, preallocated)
    way = Way()
    with profiled(way):
        model(ids[:, :1], **as_input(cache))
    modules = [module for module, _ in way.functions]
    # Launching is where the way ends.
    modules = modules[: modules.index(LAUNCH)] if LAUNCH in modules else modules
    visits = [module for i, module in enumerate(modules) if i == 0 or module != modules[i - 1]]
    assert way.functions[0][1] == "TurboQuantCache.update" and visits[-1].startswith("tq_kernels.decode."), visits
    assert len(set(visits)) == len(visits) <= 6, visits
    assert len(modules) <= 8, way.functions


@pytest.mark.parametrize(
    ("preallocated", "dispatched", "most"), [(None, 18, 23), (300, 21, 28)], ids=["growing", "preallocated"]
)
def test_a_layer_of_a_step_runs_few_functions(preallocated, dispatched, most, kernels):
    """From `TurboQuantCache.update` to the backend at most `dispatched` of this package, and `most` in all."""
    model, cache, ids = after_steps(2, preallocated)
    functions: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("tq_hf."):
            functions.append(f"{module} {frame.f_code.co_qualname}")

    with profiled(note):
        model(ids[:, :1], **as_input(cache))
    start, end = (i for i, name in enumerate(functions) if name == "tq_hf.cache TurboQuantCache.update")
    layer = functions[start:end]
    assert layer.index("tq_hf.ops.triton.blocks attend") < dispatched and len(layer) <= most, layer


class Launching(TorchDispatchMode):
    """Names of torch's operations on states `[B, H, T, D]` and what is made beside them, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in MAKE_NO_LAUNCH:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("tokens", "launches"), [(2, 1), (128, 1), (259, 1), (260, 3), (1000, 3)])
@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("room", [None, 1200], ids=["growing", "preallocated"])
def test_a_first_prompt_launches_at_most_three_kernels_a_layer(room, balance, tokens, launches, prompt_kernels):
    config = build("llama", num_hidden_layers=1).config
    states = torch.zeros(2, tokens, 2, 16).transpose(1, 2)
    query = torch.zeros(2, tokens, 4, 16).transpose(1, 2)
    for warm in (True, False):  # tables and scratch are made once
        layer = TurboQuantCache(config, balance=balance, max_cache_len=room).layers[0]
        before = Silent.launches
        with torch.no_grad(), Launching() as mode:
            keys, values = layer.update(states, states)
            resolve(keys, values, module_with(config=None, is_causal=True), query)
        assert not layer.store.is_deferred and Silent.launches - before == launches
        assert warm or mode.names == []


@pytest.mark.parametrize(("tokens", "tensors"), [(128, 3), (1000, 4)], ids=["no block due", "blocks due"])
def test_a_first_prompt_makes_few_tensors(tokens, tensors, kernels, monkeypatch):
    """Two of channel scales, one of dense rows, and one of blocks where there are any."""
    monkeypatch.setattr(f"{__name__}.MAKE_NO_LAUNCH", ())
    config = build("llama", num_hidden_layers=2).config
    states, query = (torch.zeros(2, heads, tokens, 16) for heads in (2, 4))
    layers = TurboQuantCache(config).layers
    for layer in layers:
        with torch.no_grad(), Launching() as mode:
            resolve(*layer.update(states, states), module_with(config=None, is_causal=True), query)
    assert {"empty", "empty_like", "new_empty"}.issuperset(mode.names) and len(mode.names) == tensors


@pytest.mark.parametrize(
    ("room", "tokens", "most"), [(None, 128, 73), (None, 512, 99), (1024, 128, 88), (1024, 512, 114)]
)
def test_what_the_first_layer_of_a_prompt_worked_out_others_look_up(room, tokens, most, prompt_kernels):
    """At most so many functions of this project run for each, a few of which compare equal configurations."""
    config = build("llama", num_hidden_layers=2).config
    config._attn_implementation = "turboquant"
    cache = TurboQuantCache(config, max_cache_len=room)
    states, query = (torch.zeros(1, heads, tokens, 16) for heads in (2, 4))
    functions: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith(("tq_hf.", "tq_kernels.")):
            functions.append(frame.f_code.co_qualname)

    with torch.no_grad():
        for layer in range(2):
            functions.clear()
            with profiled(note):
                resolve(*cache.update(states, states, layer), module_with(config=config, is_causal=True), query)
    assert len(functions) <= most, functions


@pytest.mark.parametrize(("room", "launches"), [(None, 3), (300, 3)], ids=["growing", "preallocated"])
def test_a_step_launches_few_kernels_a_layer(room, launches, kernels):
    model, cache, ids = after_steps(2, room)
    for _ in range(3):
        before = Silent.launches
        model(ids[:, :1], **as_input(cache))
        assert Silent.launches - before == 2 * launches
