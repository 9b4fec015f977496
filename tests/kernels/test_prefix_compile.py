"""The kernels of attention over many queries, over dense states and over windows compile for every GPU we name and fit
its shared memory, without spilling where they are used. Needs no GPU."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
from tq_kernels.prefix.launch import PrefixConfig, prefix_config, prefix_splits
from tq_kernels.prefix.tiles import join_attention, merge_splits

from examples.measure.compile.builds import build_dense, build_prefix, build_prompts, build_windows
from examples.measure.compile.sass import SHARED, build, disassemble, loops, resources, target_of
from tests.kernels.test_decode_compile import BITS
from tests.support.helpers import quick_of, slow
from tests.support.kernel_cases import INTERPRETED
from tests.support.limits import HOLD, cards

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

Compiled = tuple[Any, PrefixConfig]


def compiled_for(
    arch: int | str, preset: str = "4bit_nc", dim: int = 128, value_dim: int | None = None, **options: Any
) -> Compiled:
    compiled = build_prefix(arch, BITS[preset], dim=dim, value_dim=value_dim, **options)
    # Where Blackwell's tensor memory is too small, Triton compiles a trap.
    assert (getattr(compiled.metadata, "tmem_size", None) or 0) <= 512
    return compiled, prefix_config(dim, value_dim or dim, target_of(arch))


def spills(compiled: Any) -> bool:
    return "STACK:0" not in disassemble(compiled, "-res-usage")


def test_on_sm_90_tiles_reach_the_tensor_cores_by_wide_stores() -> None:
    compiled, config = compiled_for(90)
    assert compiled.metadata.shared <= SHARED[90] * 1024 // config.programs_per_multiprocessor - 1024
    assert not (HOLD and spills(compiled))
    code = disassemble(compiled, "-sass")
    assert "HGMMA" in code and not (HOLD and "STS.U16" in code)


@pytest.mark.parametrize(
    ("arch", "preset"),
    quick_of(product((80, 86, 89, 90, 100, "gfx942"), BITS), (80, "4bit_nc"), (90, "3bit_nc"), ("gfx942", "4bit_nc")),
    ids=str,
)
def test_compiles_for(arch: int | str, preset: str) -> None:
    compiled, _ = compiled_for(arch, preset)
    assert compiled.metadata.shared <= SHARED[arch] * 1024 - (1024 if arch != "gfx942" else 0)
    if isinstance(arch, int) and arch < 100:  # for sm_100 the disassembler reports another stack
        assert not (HOLD and spills(compiled))


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("arch", [90, *map(slow, (80, 86, 89, 100))])
def test_compiles_over_pages_for(arch: int, merge: bool) -> None:
    compiled = build_prompts(arch, "4bit_nc", merge)
    assert compiled.metadata.shared <= SHARED[arch] * 1024 - 1024
    if arch < 100:
        assert not (HOLD and spills(compiled))


HEADS = [dict(dim=64), dict(dim=80, value_dim=96), dict(dim=192, value_dim=128), dict(dim=256)]
OPTIONS = [dict(split=True), dict(mask=1), dict(mask=2, causal=False), dict(bounds=True, has_aux=True)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", HEADS + OPTIONS, ids=str)
@pytest.mark.parametrize("arch", [80, 90])
def test_compiles_shape(arch: int, shape: dict[str, Any]) -> None:
    compiled, _ = compiled_for(arch, **shape)
    assert compiled.metadata.shared <= SHARED[arch] * 1024 - 1024


@pytest.mark.parametrize("arch", cards(SHARED))
def test_merges_compile_for(arch: int | str) -> None:
    types = ["*fp32", "*fp32", "*fp32", "*fp16", None, *["i32"] * 5, ("i32",) * 3]
    compiled = build(merge_splits, types, (128, 128, 16, True), arch, num_warps=4)
    types = ["*bf16", "*fp32", "*fp16", "*fp32", *["i32"] * 7]
    for each in (compiled, build(join_attention, types, (128, 128, 32), arch, num_warps=4)):
        if isinstance(arch, int) and arch < 100:
            assert not spills(each)


@pytest.mark.parametrize(
    ("tiles", "units", "resident", "splits"),
    [(512, 256, 132, 1), (32, 1026, 132, 4), (32, 1026, 264, 8), (1, 300, 132, 132), (1, 2, 132, 1), (5, 0, 132, 1)],
)
def test_splits_fill_whole_waves(tiles: int, units: int, resident: int, splits: int) -> None:
    found = prefix_splits(tiles, units, resident)
    assert found == splits or (found > splits // 2 and -(-tiles * found // resident) * splits <= found + splits)


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


@pytest.mark.parametrize(
    ("arch", "shape"),
    quick_of(
        product((80, 86, 89, 90, 100, "gfx942"), SHAPES),
        *[(90, shape) for shape in SHAPES],
        *[(89, shape) for shape in SHAPES[1::3]],
    ),
    ids=str,
)
def test_dense_states_compile_for(arch: int | str, shape) -> None:
    """On sm_90 nothing is spilt, and prompts reach the wide products."""
    compiled = build_dense(arch, **shape)
    if arch == "gfx942":
        assert re.search(r"\.vgpr_spill_count: +0\b", compiled.asm["amdgcn"])
        assert compiled.metadata.shared <= SHARED[arch] * 1024
    elif arch in (80, 89, 90):
        assert compiled.metadata.shared <= SHARED[arch] * 1024 - 1024
        assert resources(compiled).stack <= (0 if arch == 90 else 64)
    if arch == 90:
        assert ("HGMMA" in disassemble(compiled, "-sass")) == ("rows" not in shape)


@pytest.mark.parametrize(
    ("arch", "shape"), quick_of(product((80, 90), WIDE), *[(90, shape) for shape in WIDE[1::2]]), ids=str
)
def test_dense_heads_of_512_have_no_stack_in_a_loop(arch: int, shape) -> None:
    compiled = build_dense(arch, **shape)
    assert compiled.metadata.shared <= SHARED[90 if arch == 90 else 86] * 1024 - 1024
    assert not any(loop["STL"] + loop["LDL"] for loop in loops(compiled))
    assert ("HGMMA" in disassemble(compiled, "-sass")) == (arch == 90 and "rows" not in shape)


WINDOWS = [dict(), dict(dim=64, split=True), dict(dim=80, dtype="fp16"), dict(dim=256, softcap=True)]


@pytest.mark.parametrize(
    ("arch", "shape"),
    quick_of(
        product((80, 86, 89, 90, 100), WINDOWS),
        *[(90, shape) for shape in WINDOWS],
        *[(80, shape) for shape in WINDOWS[::2]],
        *[(100, shape) for shape in WINDOWS[1::2]],
    ),
    ids=str,
)
def test_decode_over_windows_compiles_for(arch: int, shape) -> None:
    compiled = build_windows(arch, **shape)
    # Two programs a multiprocessor at least.
    assert 2 * (compiled.metadata.shared + 1024) <= SHARED[arch] * 1024
    assert resources(compiled).stack == 0
    if arch < 100:
        # Rows are copied while the tile before is computed.
        assert any(loop["LDGSTS"] and loop["HMMA"] for loop in loops(compiled))
