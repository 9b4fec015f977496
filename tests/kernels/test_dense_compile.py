"""Attention over dense states and over windows compiles for every GPU it is launched on and fits its shared memory."""

from __future__ import annotations

import re

import pytest

from examples.measure.compile.builds import build_dense, build_windows
from examples.measure.compile.sass import SHARED, disassemble, loops, resources
from tests.support.helpers import slow
from tests.support.kernel_cases import INTERPRETED
from tests.support.limits import cards

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

SHAPES = [
    dict(dim=64),  # gpt-oss
    dict(dim=64, mask=2),
    dict(dim=128, softcap=True),
    dict(dim=256, softcap=True),  # Gemma 2
    dict(dim=256, softcap=True, mask=2),
    dict(dim=64, rows=8, split=True),
    dict(dim=256, rows=2, split=True, mask=1),
]
WIDE = [
    dict(dim=512, softcap=True),
    dict(dim=512, mask=1, softcap=True),
    dict(dim=512, mask=2),
    dict(dim=320, split=True),
    dict(dim=512, rows=8, split=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_sm_90_nothing_is_spilt_and_prompts_reach_the_wide_products(shape) -> None:
    compiled = build_dense(90, **shape)
    assert compiled.metadata.shared <= SHARED[90] * 1024 - 1024
    assert resources(compiled).stack == 0
    assert ("HGMMA" in disassemble(compiled, "-sass")) == ("rows" not in shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("arch", [80, 89], ids=str)
def test_compiles_for(arch: int, shape) -> None:
    compiled = build_dense(arch, **shape)
    assert compiled.metadata.shared <= SHARED[arch] * 1024 - 1024
    assert resources(compiled).stack <= 64


@pytest.mark.parametrize("shape", WIDE, ids=str)
@pytest.mark.parametrize("arch", [slow(80), 90], ids=str)
def test_heads_of_512_have_no_stack_in_a_loop(arch: int, shape) -> None:
    compiled = build_dense(arch, **shape)
    assert compiled.metadata.shared <= SHARED[90 if arch == 90 else 86] * 1024 - 1024
    assert not any(loop["STL"] + loop["LDL"] for loop in loops(compiled))
    assert ("HGMMA" in disassemble(compiled, "-sass")) == (arch == 90 and "rows" not in shape)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("arch", [86, 100, "gfx942"], ids=str)
def test_compiles_for_more(arch: int | str, shape) -> None:
    compiled = build_dense(arch, **shape)
    if arch == "gfx942":
        assert re.search(r"\.vgpr_spill_count: +0\b", compiled.asm["amdgcn"])
        assert compiled.metadata.shared <= SHARED[arch] * 1024


@pytest.mark.parametrize(
    "shape", [dict(), dict(dim=64, split=True), dict(dim=80, dtype="fp16"), dict(dim=256, softcap=True)], ids=str
)
@pytest.mark.parametrize("arch", cards([80, 86, 89, 90, 100]))
def test_decode_over_windows_compiles_for(arch: int, shape) -> None:
    compiled = build_windows(arch, **shape)
    # Two programs a multiprocessor at least.
    assert 2 * (compiled.metadata.shared + 1024) <= SHARED[arch] * 1024
    assert resources(compiled).stack == 0
    if arch < 100:
        # Rows are copied while the tile before is computed.
        assert any(loop["LDGSTS"] and loop["HMMA"] for loop in loops(compiled))
