"""The look-ups of the dequantize kernel get whole words, in whatever layout Triton gives their tiles.

Needs no GPU: read from the compiler's own description of the layouts.
"""

from __future__ import annotations

import re

import pytest

from examples.measure.compile.builds import build_dequantize
from tests.support.kernel_cases import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


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
@pytest.mark.parametrize(
    ("arch", "dim"),
    [(90, 64), (90, 128), (80, 128)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in [(90, 256), (80, 64), (80, 256), (89, 128)]],
)
def test_a_look_up_gets_whole_words(arch: int, dim: int, bits: int, is_value: bool) -> None:
    compiled = build_dequantize(arch, (bits, bits), is_value=is_value, dim=dim)
    layouts = look_up_layouts(compiled.asm["ttgir"])
    assert layouts
    assert [layout for layout in layouts if not keeps_words_whole(layout)] == []
