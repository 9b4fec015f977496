"""Every kernel over pages compiles for every GPU we name, without spilling; the table costs the inner loop of decode
next to nothing. Needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
from tq_kernels.codec.encode import encode_blocks
from tq_kernels.decode.append import append_tails, rotate_and_append
from tq_kernels.decode.reduce import reduce_splits
from tq_kernels.decode.split import decode_split
from tq_kernels.prefix.windows import window_attention

from examples.measure.compile.builds import (
    build_completed,
    build_paged_split,
    build_prompts,
    build_small,
    build_windows,
)
from examples.measure.compile.sass import SHARED, build_split, inner_loop, loops, per_element, resources
from tests.kernels.test_decode_compile import BITS
from tests.support.kernel_cases import INTERPRETED
from tests.support.limits import cards, within

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

CARDS = [75, 80, 86, 89, 90, 100]
PRESETS = [p if p in ("k8v4", "4bit_nc", "3bit_nc") else pytest.param(p, marks=pytest.mark.slow) for p in BITS]
STACK = {75: 88, 100: 80}
"""Bytes of stack the encoder is allowed where it is not 0, with the one correction that kernels store."""


@pytest.mark.parametrize("preset", PRESETS)
def test_the_table_costs_the_inner_loop_little_on_sm_90(preset: str) -> None:
    key_bits, value_bits = BITS[preset]
    compiled, p = build_paged_split(90, preset)
    loop, found = inner_loop(compiled), per_element(compiled, p, 128, False)["total"]
    plain = per_element(build_split(90, key_bits=key_bits, value_bits=value_bits), p, 128, False)["total"]
    assert found <= 1.1 * plain
    # 2 bits: two numbers that do not change are read back from the stack.
    assert loop["STL"] == 0 and within(loop["LDL"], 2 if preset == "2bit_nc" else 0)
    assert loop["I2F"] == loop["F2F"] == 0 and loop["STS"] <= 8 and loop["LDG"] <= 9


@pytest.mark.parametrize("arch", cards(CARDS))
@pytest.mark.parametrize("preset", ["4bit_nc", "3bit_nc"])
def test_decode_compiles_for(arch: int, preset: str) -> None:
    compiled, _ = build_paged_split(arch, preset)
    assert compiled.metadata.shared <= SHARED[arch] * 1024 - 1024
    if arch < 100:
        assert inner_loop(compiled)["STL"] == 0
    if arch == 75:
        assert resources(compiled).stack <= 8 and resources(compiled).shared == 0


@pytest.mark.parametrize("shape", [dict(dim=64), dict(dim=80), dict(dim=256), dict(softcap=True)], ids=str)
@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_decode_compiles_shape(arch: int, shape: dict[str, Any]) -> None:
    compiled, _ = build_paged_split(arch, **shape)
    assert compiled.metadata.shared <= SHARED[arch] * 1024 - 1024


WIDE = [(90, 512, "4bit_nc"), (80, 512, "4bit_nc"), (100, 512, "4bit_nc"), (90, 512, "k8v4"), (90, 320, "4bit_nc")]


@pytest.mark.parametrize(
    ("arch", "dim", "preset"), [WIDE[0], *(pytest.param(*x, marks=pytest.mark.slow) for x in WIDE[1:])]
)
def test_decode_of_wide_heads_compiles_for(arch: int, dim: int, preset: str) -> None:
    compiled, p = build_paged_split(arch, preset, dim)
    assert p.config.programs_per_multiprocessor * (compiled.metadata.shared + 1024) <= SHARED[arch] * 1024
    if arch < 100:
        # Of 3,800 instructions for a block one writes to the stack, and up to three read numbers from it.
        loop = inner_loop(compiled)
        assert within(loop["STL"], 1) and within(loop["LDL"], 3)
    # Of 320 channels the kernel in front keeps two numbers there.
    for small in build_small(arch, dim):
        assert within(resources(small).stack, 8 if dim == 320 else 0)


@pytest.mark.parametrize("arch", cards(CARDS))
@pytest.mark.parametrize("dim", [128, 256])
def test_small_kernels_compile_for(arch: int, dim: int) -> None:
    for compiled in build_small(arch, dim):
        assert compiled.metadata.shared <= SHARED[arch] * 1024 - (1024 if arch != 75 else 0)
        assert resources(compiled).stack == 0


@pytest.mark.parametrize("arch", cards(CARDS))
def test_encode_compiles_for(arch: int) -> None:
    compiled = build_completed(arch, dtype="bf16" if arch > 75 else "fp16")
    assert compiled.metadata.shared <= SHARED[arch] * 1024 - 1024
    assert within(resources(compiled).stack, STACK.get(arch, 0))


@pytest.mark.parametrize("arch", cards(CARDS[1:]))
def test_prompts_compile_for(arch: int) -> None:
    compiled = build_prompts(arch, "4bit_nc")
    assert compiled.metadata.shared <= SHARED[arch] * 1024 - 1024
    if 80 <= arch < 100:
        assert within(resources(compiled).stack, 0)


WINDOWED = [dict(), dict(dim=64, split=True), dict(dim=80, dtype="fp16"), dict(dim=256, softcap=True)]


@pytest.mark.parametrize("shape", WINDOWED, ids=str)
@pytest.mark.parametrize("arch", cards(CARDS[1:]))
def test_decode_over_windows_compiles_for(arch: int, shape: dict[str, Any]) -> None:
    compiled = build_windows(arch, **shape)
    # Two programs a multiprocessor at least.
    assert 2 * (compiled.metadata.shared + 1024) <= SHARED[arch] * 1024
    assert resources(compiled).stack == 0
    if arch < 100:
        # Rows are copied while the tile before is computed.
        assert any(loop["LDGSTS"] and loop["HMMA"] for loop in loops(compiled))


def test_no_length_decides_what_is_compiled() -> None:
    kernels = (rotate_and_append, decode_split, reduce_splits, encode_blocks, append_tails)
    for kernel in (*kernels, window_attention):
        numbers = [p for p in kernel.params if not p.is_constexpr and p.name in kernel.do_not_specialize]
        assert {"count", "queries", "heads"} & {p.name for p in numbers}  # of sequences
        assert not any(p.name in ("tokens", "width", "workers") and not p.do_not_specialize for p in kernel.params)
