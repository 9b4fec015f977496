"""The encode and dequantize kernels compile for every GPU we name and fit its shared memory, without spilling where it
matters. The look-ups of the dequantize kernel get whole words, in whatever layout Triton gives their tiles.

Needs no GPU: Triton compiles for any target, and its wheel ships the disassembler.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from typing import Any

import pytest
from tq_kernels.codec.launch import encode_config

from examples.measure.compile import builds
from examples.measure.compile.sass import SHARED, disassemble, resources
from tests.support.helpers import every_pair, quick_of, slow
from tests.support.kernel_cases import INTERPRETED
from tests.support.limits import cards, within

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

BUDGET = {4: 36.5, 8: 24.0}
"""Instructions per key element on sm_90 at D = 128, corrected for inner products as the product's blocks are (36.4 at 4
bits with Triton 3.7.1; 34.1 without loud channels)."""
TRELLIS_CODE = {2: 3020, 3: 2710}
"""Instructions of the loop over blocks at 2 and 3 bits on sm_90: with 3,400 (54 KB) it no longer fits the instruction
cache."""
STACK = {75: 96, 90: 32, 100: 72}
"""Bytes of stack the encoder is allowed where it is not 0."""
PAGED_STACK = {75: 96, 100: 80}
"""The same over pages, with the one correction that kernels store."""


def fits(compiled: Any, arch: int | str) -> Any:
    """`compiled`, whose shared memory the card has."""
    assert compiled.metadata.shared <= SHARED[arch] * 1024 - 1024
    return compiled


def build_encode(arch: int | str, bits: int, **options: Any) -> Any:
    return fits(builds.build_encode(arch, (bits, bits), **options), arch)


def build_dequantize(arch: int | str, bits: int, **options: Any) -> Any:
    return fits(builds.build_dequantize(arch, (bits, bits), **options), arch)


def stack_of(compiled: Any) -> int:
    return resources(compiled).stack


def body(compiled: Any) -> Counter[str]:
    """Opcodes after the first asynchronous copies: the loop over blocks, and little else."""
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", disassemble(compiled, "-sass"))
    return Counter(lines[lines.index("LDGDEPBAR") :])


@pytest.mark.parametrize("bits", BUDGET)
def test_instructions_per_element_on_sm_90(bits: int) -> None:
    compiled = build_encode(90, bits, dtype="bf16")
    counts = body(compiled)
    elements = 128 * 128 / (32 * encode_config(128, 128, (bits, bits), 2, (9, 0)).warps)
    assert within(counts.total() / elements, BUDGET[bits])
    # Addresses of loud channels, which do not change over the loop.
    assert within(stack_of(compiled) + counts["STL"] + counts["LDL"], 46 if bits == 4 else 0)
    # Codes are found without conversions, compares and selects, whose pipe is half as wide.
    assert counts["F2I"] == 0 and counts["FSETP"] + counts["FSEL"] + counts["ISETP"] <= counts["FADD"]


@pytest.mark.parametrize(("bits", "is_value"), [(2, False), (3, True), slow(2, True), slow(3, False)])
def test_trellis_codes_are_found_in_little_code_on_sm_90(bits: int, is_value: bool) -> None:
    compiled = build_encode(90, bits, dtype="bf16", is_value=is_value)
    counts = body(compiled)  # which there is only if rows are copied ahead
    assert within(counts.total(), TRELLIS_CODE[bits])
    # Two words in a register, and sums of which the less is taken, in one instruction.
    assert counts["VIADDMNMX"] >= (576 if bits == 2 else 128)
    assert within(stack_of(compiled), 0 if bits == 2 else 48 if is_value else 72)


@pytest.mark.parametrize(
    ("arch", "is_value"), [*cards(SHARED, False), (90, True), *(slow(arch, True) for arch in SHARED if arch != 90)]
)
def test_encode_compiles_for(arch: int | str, is_value: bool) -> None:
    compiled = build_encode(arch, 4, is_value=is_value)
    if isinstance(arch, int):
        assert within(stack_of(compiled), STACK.get(arch, 0))
    elif arch == "gfx942":  # on gfx1100 it spills; it has never run there
        assert re.search(r"\.vgpr_spill_count: +0\b", compiled.asm["amdgcn"])


@pytest.mark.parametrize("arch", [75, 90, *map(slow, (80, 86, 89, 100))])
def test_encode_over_pages_compiles_for(arch: int) -> None:
    compiled = fits(builds.build_completed(arch, dtype="bf16" if arch > 75 else "fp16"), arch)
    assert within(stack_of(compiled), PAGED_STACK.get(arch, 0))


@pytest.mark.parametrize(
    ("arch", "is_value"),
    quick_of(
        product((75, 80, 90, 100, "gfx942"), (False, True)),
        *[(75, False), (80, True), (90, False), (100, True), ("gfx942", False)],
    ),
)
def test_dequantize_compiles_for(arch: int | str, is_value: bool) -> None:
    compiled = build_dequantize(arch, 4, is_value=is_value)
    if isinstance(arch, int):
        # Addresses that do not change over the loop. On Turing products take their operands from registers.
        assert within(stack_of(compiled), 232 if arch == 75 and not is_value else 32)
    else:
        assert re.search(r"\.vgpr_spill_count: +0\b", compiled.asm["amdgcn"])


@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        (90, dict(bits=3)),
        (90, dict(bits=8, dim=64)),
        (90, dict(bits=4, dim=256)),
        slow(90, dict(bits=3, dim=96)),
        slow(90, dict(bits=2, dim=192)),
        slow(90, dict(bits=4, dtype="fp32")),
        slow(86, dict(bits=4, dim=256)),
    ],
    ids=str,
)
def test_other_shapes_fit(arch: int, shape: dict[str, Any]) -> None:
    is_value = shape["bits"] == 3
    # Wide tiles and rotations in two parts do spill, around the matrix products.
    assert within(stack_of(build_encode(arch, is_value=is_value, **shape)), 512)
    build_dequantize(arch, is_value=is_value, **shape)


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


TILES = ((90, 64), (90, 128), (80, 128))
LOOK_UPS = [*product((*TILES, (90, 256), (80, 64), (80, 256), (89, 128)), (2, 3, 4, 8), (False, True))]


@pytest.mark.parametrize(
    ("tile", "bits", "is_value"), quick_of(LOOK_UPS, *every_pair(TILES, (2, 3, 4, 8), (False, True)))
)
def test_a_look_up_gets_whole_words(tile: tuple[int, int], bits: int, is_value: bool) -> None:
    arch, dim = tile
    compiled = build_dequantize(arch, bits, is_value=is_value, dim=dim)
    layouts = look_up_layouts(compiled.asm["ttgir"])
    assert layouts
    assert [layout for layout in layouts if not keeps_words_whole(layout)] == []
