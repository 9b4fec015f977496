"""What a decode step launches is worked out once for all layers alike, and stays when tensors or sequences move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_launch import KERNELS, addresses, packed_residual_and_sinks, query, token
from tq_kernels.common import launcher
from tq_kernels.decode import launch
from tq_kernels.decode import reorder as reorderer
from tq_kernels.types import AttentionOptions

from tests.support.helpers import filled, states
from tests.support.kernel_cases import INTERPRETED
from tests.support.launch_recorder import Recorder, recorded
from tq_hf import TurboQuantConfig
from tq_hf.ops import dispatch
from tq_hf.ops.triton import blocks as triton_blocks
from tq_hf.stores import graph_ops
from tq_hf.stores.store import LayerStore

pytestmark = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    monkeypatch.setattr(triton_blocks, "encode", lambda *arguments: None)
    with recorded(monkeypatch, {launch: KERNELS}) as log:
        yield log


def worked_out(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many decoders, and steps of decoders, are made from now on."""
    made = {"decoders": 0, "steps": 0}
    for name, counted in (("__init__", "decoders"), ("_step", "steps")):
        function = getattr(launch.DecodeLaunch, name)

        def count(self, *arguments, function=function, counted=counted, **options):
            made[counted] += 1
            return function(self, *arguments, **options)

        monkeypatch.setattr(launch.DecodeLaunch, name, count)
    return made


SETTLED = [(name, "launched", True) for name in ("ROTATE_AND_APPEND", "SPLIT", "REDUCE")]


def test_beams_that_change_places_leave_everything_worked_out(log, monkeypatch):
    """A step of a beam search: one launch to reorder, and the three of any step, by address."""
    store = filled(TurboQuantConfig(), states(0, tokens=200, dim=64, value_dim=32, dtype=torch.float16))
    reorder = launcher.Kernel(Recorder("REORDER", log))
    monkeypatch.setattr(reorderer, "REORDER", reorder)
    for seed in (2, 3):
        dispatch.attend(query(), store.append(*token(seed)), None, AttentionOptions(0.3))
        store.reorder(torch.tensor([0]))
    made = worked_out(monkeypatch)
    log.clear()
    for seed in (4, 5, 6):
        dispatch.attend(query(), store.append(*token(seed)), None, AttentionOptions(0.3))
        assert [entry[:3] for entry in log] == SETTLED
        log.clear()
        store.reorder(torch.tensor([0]))
        assert [entry[:2] for entry in log] == [("REORDER", "launched")]
        assert packed_residual_and_sinks(store) <= addresses(log)
        log.clear()
    assert made == {"decoders": 0, "steps": 0}


@pytest.mark.parametrize("room", [None, 1000], ids=["growing", "preallocated"])
def test_a_layer_that_comes_back_from_elsewhere_is_launched_as_before(log, monkeypatch, room):
    """Offloading: tensors have other addresses in every step, and the numbers and compiled kernels are the same."""
    pair = states(0, tokens=270, dim=64, value_dim=32, dtype=torch.float16)
    config = TurboQuantConfig(sink_tokens=4)
    store = filled(config, pair) if room is None else LayerStore.allocate(config, *pair, room)

    def step(store, seed):
        view = store.append(*token(seed))
        if room is None:
            return dispatch.attend(query(), view, None, AttentionOptions(0.3))
        return graph_ops.attend_token(query(), view, None, AttentionOptions(0.3))

    step(store, 2), step(store, 3)
    made = worked_out(monkeypatch)
    kept = [store]
    for seed in (4, 5):
        store = store.map(torch.clone)
        log.clear()
        step(store, seed)
        assert [entry[1:3] for entry in log] == [("launched", True)] * 3
        assert {tensor.data_ptr() for tensor in (store.tensors.rows, store.blocks.key_words)} <= addresses(log)
        kept.append(store)  # alive, and so apart
    assert made == {"decoders": 2, "steps": 0}


def test_layers_of_a_model_share_what_is_worked_out(log, monkeypatch):
    made = worked_out(monkeypatch)
    for layer in range(3):
        store = filled(TurboQuantConfig(), states(layer, tokens=270, dim=64, value_dim=32, dtype=torch.float16))
        for seed in (2, 3):
            dispatch.attend(query(), store.append(*token(seed)), None, AttentionOptions(0.3))
    assert made == {"decoders": 3, "steps": 1}


@pytest.mark.parametrize(
    "other",
    [
        dict(dtype=torch.bfloat16),
        dict(batch=2),
        dict(config=TurboQuantConfig(key_bits=3)),
        dict(config=TurboQuantConfig(sink_tokens=8)),
        dict(config=TurboQuantConfig(residual_length=512)),
        dict(tokens=600),
        dict(value_dim=64),
        dict(heads=4),
    ],
    ids=str,
)
def test_layers_unlike_another_share_nothing(log, monkeypatch, other):
    made = worked_out(monkeypatch)
    for changed in ({}, other):
        shape = dict(batch=1, heads=2, tokens=270, dim=64, value_dim=32, dtype=torch.float16) | changed
        config = shape.pop("config", TurboQuantConfig())
        store = filled(config, states(0, **shape))
        new = states(1, **shape | dict(tokens=1))
        dispatch.attend(query(shape["batch"]).to(shape["dtype"]), store.append(*new), None, AttentionOptions(0.3))
    assert made == {"decoders": 2, "steps": 2}
