"""Kernels of another GPU can be assembled for the one at hand. Needs no GPU; `test_other_cards.py` runs them on one."""

from __future__ import annotations

import pytest
from tq_kernels.common.stand_in import VARIABLE, assemble_for, stand_in
from tq_kernels.decode.rotate import rotate_query

from examples.measure.compile.sass import build, disassemble
from tests.support.kernel_cases import INTERPRETED


def test_an_unknown_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sm_61")
    with pytest.raises(ValueError, match="'sm_61'.*sm_75"):
        stand_in()
    monkeypatch.delenv(VARIABLE)
    assert stand_in() is None


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_ptx_of_turing_is_assembled_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia.compiler import CUDABackend

    for name in ("make_cubin", "hash"):  # put back afterwards
        monkeypatch.setattr(CUDABackend, name, getattr(CUDABackend, name))
    assemble_for(90)
    compiled = build(
        rotate_query, ["*fp16", "*fp16", "*fp16", "*fp32", *["i32"] * 8], (64, 64, 64, 8, False), 75, num_warps=2
    )
    assert ".target sm_75" in compiled.asm["ptx"]
    assert "sm_90" in disassemble(compiled, "-sass")
