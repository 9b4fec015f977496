"""Kernels of another GPU can be assembled for the one at hand. Needs no GPU; `test_other_cards.py` runs them on one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tq_kernels.common import device
from tq_kernels.decode.rotate import rotate_query

from examples.measure.compile.sass import build, disassemble
from tests.support import target_override
from tests.support.kernel_cases import INTERPRETED
from tests.support.target_override import VARIABLE, assemble_for, wanted_card


def test_an_unknown_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sm_61")
    with pytest.raises(ValueError, match="'sm_61'.*sm_75"):
        wanted_card()
    monkeypatch.delenv(VARIABLE)
    assert wanted_card() is None


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_ptx_of_turing_is_assembled_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia.compiler import CUDABackend

    for name in ("make_cubin", "hash"):  # put back afterwards
        monkeypatch.setattr(CUDABackend, name, getattr(CUDABackend, name))
    assemble_for(90)
    compiled = build(
        rotate_query, ["*fp16", "*fp16", "*fp16", "*fp32", *["i32"] * 8], (64, 64, 64, 4, 8), 75, num_warps=2
    )
    assert ".target sm_75" in compiled.asm["ptx"]
    assert "sm_90" in disassemble(compiled, "-sass")


def test_tables_are_told_the_named_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """`target` asks the override, which gives the card's capability and memory and keeps this GPU's multiprocessors."""
    monkeypatch.setattr(device, "override", None)
    monkeypatch.setattr(target_override, "pretend", lambda: target_override.OTHER_CARDS["sm_75"])
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_multiprocessor=233472, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(device, "interpreted", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    at_hand = torch.device("cuda", 0)
    assert device.target.__wrapped__(at_hand).capability == (9, 0)
    target_override.install()
    assert device.target.__wrapped__(at_hand) == device.Target(132, 64 * 1024, (7, 5), True)
