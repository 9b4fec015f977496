"""The look-ups of the dequantise kernel get whole words, in whatever layout Triton gives their tiles.

Needs no GPU: read from the compiler's own description of the layouts.
"""

from __future__ import annotations

import re

import pytest

triton = pytest.importorskip("triton")

from kernel_cases import INTERPRETED  # noqa: E402
from sass import GPUTarget  # noqa: E402
from tq_kernels.codec.dequantise import dequantise_blocks  # noqa: E402
from tq_kernels.codec.launch import dequantise_config  # noqa: E402
from tq_kernels.common.launcher import ALWAYS  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


def compiled_layouts(arch: int, dim: int, bits: int, is_value: bool) -> str:
    """The kernel as Triton lays it out, for fp16 states of aligned strides."""
    config = dequantise_config(dim, bits, divmod(arch, 10))
    tile = max(16 * config.chunks, triton.next_power_of_2(dim))
    names = dequantise_blocks.arg_names
    types = ["*i32", "*fp16", "constexpr" if is_value else "*fp16", "*fp32", "*fp16", "*fp16", *["i32"] * 8]
    columns = min(config.columns, tile)
    constants = (dim, dim, tile, bits, is_value, config.chunks, columns, config.resident, True)
    runtime = len(types)
    source = ASTSource(
        fn=dequantise_blocks,
        signature={name: types[i] if i < runtime else "constexpr" for i, name in enumerate(names)},
        constexprs={(i + runtime,): value for i, value in enumerate(constants)} | ({(2,): None} if is_value else {}),
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, kind in enumerate(types)
            if kind.startswith("*") or (kind == "i32" and names[i] not in dequantise_blocks.do_not_specialize)
        },
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=ALWAYS | {"num_warps": config.warps})
    return compiled.asm["ttgir"]


def look_up_layouts(ttgir: str) -> list[str]:
    """The layout of the word tile of every look-up; a tile is `[M, K]` int16, two neighbours along K a word."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    tiles = re.findall(r"packed_element = 2[^\n]*?: tensor<\d+x\d+xi16, (#\w+|#ttg\.dot_op<\{[^}]*\}>)>", ttgir)
    return [layouts.get(tile, tile) for tile in tiles]


def keeps_words_whole(layout: str) -> bool:
    """Whether the first two elements of each thread are neighbours along the last dimension."""
    if first := re.search(r"register = \[\[(\d+), (\d+)\]", layout):
        return first.groups() == ("0", "1")
    if blocked := re.search(r"sizePerThread = \[\d+, (\d+)\].*order = \[(\d)", layout):
        return int(blocked[1]) % 2 == 0 and blocked[2] == "1"
    return re.search(r"opIdx = 0,.*kWidth = [248]", layout) is not None


@pytest.mark.parametrize("is_value", [False, True], ids=["keys", "values"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("arch", [80, 89, 90])
def test_a_look_up_gets_whole_words(arch: int, dim: int, bits: int, is_value: bool) -> None:
    layouts = look_up_layouts(compiled_layouts(arch, dim, bits, is_value))
    assert layouts
    assert [layout for layout in layouts if not keeps_words_whole(layout)] == []
