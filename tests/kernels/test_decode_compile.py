"""Every decode kernel compiles for every GPU we name, without spilling; the inner loop stays within its instruction
budget.

Needs no GPU: `sass.py` compiles for any target and counts.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tq_kernels.decode.plan import plan_decode
from tq_kernels.format import padded_dim

from examples.measure.compile.builds import build_append, build_reduce, build_rotate
from examples.measure.compile.sass import SHARED, build_split, inner_loop, per_element, plan, resources, target_of
from tests.support.kernel_cases import INTERPRETED
from tests.support.limits import cards, within

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

BITS = {"k8v4": (8, 4), "4bit_nc": (4, 4), "3.5bit_nc": (4, 3), "k3v4_nc": (3, 4), "3bit_nc": (3, 3), "2bit_nc": (2, 2)}
BUDGET = {"k8v4": 2.25, "4bit_nc": 2.25, "3.5bit_nc": 2.4, "k3v4_nc": 2.4, "3bit_nc": 2.4, "2bit_nc": 2.05}
"""Instructions per KV element and thread on sm_90 at D = 128; memory speed allows 5.3 (k8v4), 3.6 (4 bits) and 2.7 (3
bits)."""
TURING_BUDGET = 2.6
"""The same on sm_75, for all presets; a T4 reads 4 bits at 13 instructions in the time of an element."""


def slow(*values: Any) -> Any:
    """A case that compiles for long, and much like others."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("preset", [slow(p) if p in ("3.5bit_nc", "k3v4_nc") else p for p in BITS])
def test_instructions_per_element_on_sm_90(preset: str) -> None:
    key_bits, value_bits = BITS[preset]
    compiled = build_split(90, key_bits=key_bits, value_bits=value_bits)
    loop = inner_loop(compiled)
    assert per_element(compiled, plan(90, key_bits, value_bits), 128, False)["total"] <= BUDGET[preset]
    assert loop["STL"] == loop["LDL"] == 0
    # Words reach the matrix units by copy, byte permute and matrix load alone.
    assert loop["I2F"] == loop["F2F"] == 0 and loop["STS"] <= 8 and loop["LDG"] <= 8


@pytest.mark.parametrize(
    ("dim", "preset", "budget"),
    [(80, "4bit_nc", 3.1), (96, "4bit_nc", 2.45), (192, "4bit_nc", 2.1), (384, "3bit_nc", 3.6), (512, "4bit_nc", 2.85)],
)
def test_no_instructions_for_channels_that_there_are_not(dim: int, preset: str, budget: float) -> None:
    key_bits, value_bits = BITS[preset]
    loop = build_split(90, key_bits=key_bits, value_bits=value_bits, dim=dim)
    assert per_element(loop, plan(90, key_bits, value_bits, dim=dim), dim, False)["total"] <= budget


def test_every_width_has_a_plan() -> None:
    for dim in range(8, 513, 8):
        for key_bits, value_bits in BITS.values():
            for arch in (75, 80, 86, 90) if dim <= 256 else (80, 86, 90):
                made = plan(arch, key_bits, value_bits, dim=dim, queries=3)
                assert made.config.programs_per_multiprocessor >= 1
                if arch != 75:
                    chunks, tile = made.tile_constants[0], made.tile_constants[2]
                    assert dim <= chunks * tile and padded_dim(dim) % (2 * chunks) == 0


QUICK_HEADS_OF_512 = [("4bit_nc", 1), ("4bit_nc", 4), ("2bit_nc", 1)]


@pytest.mark.parametrize(
    ("preset", "queries"),
    [case if case in QUICK_HEADS_OF_512 else slow(*case) for case in itertools.product(BITS, (1, 4))],
)
def test_heads_of_512_have_no_stack_in_the_loop(preset: str, queries: int) -> None:
    """Of 4 and of 16 rows."""
    key_bits, value_bits = BITS[preset]
    compiled = build_split(90, key_bits=key_bits, value_bits=value_bits, dim=512, queries=queries)
    on = plan(90, key_bits, value_bits, dim=512, queries=queries).config
    assert inner_loop(compiled)["STL"] == inner_loop(compiled)["LDL"] == 0
    # As many programs as the plan counts on are resident; each scheduler has two warps or more, but of FP8 keys.
    assert on.programs_per_multiprocessor * (compiled.metadata.shared + 1024) <= SHARED[90] * 1024
    assert resources(compiled).registers * 32 * on.warps * on.programs_per_multiprocessor <= 65536
    assert on.warps * on.programs_per_multiprocessor >= (8 if queries == 1 or key_bits < 8 else 4)


@pytest.mark.parametrize(
    ("arch", "batch", "heads", "dim", "slots", "warps"),
    [
        (90, 1, (32, 8), 128, 128, 4),
        (90, 8, (32, 8), 128, 16, 2),
        (90, 8, (64, 4), 128, 32, 2),
        (90, 32, (32, 8), 128, 4, 2),
        (90, 1, (32, 4), 512, 32, 8),
        (90, 8, (32, 4), 512, 16, 8),
        (89, 8, (32, 4), 512, 8, 2),
    ],
)
def test_what_a_program_of_the_merge_takes(arch, batch, heads, dim, slots, warps) -> None:
    """All slots of the longest rows at a time, in registers."""
    made = plan_decode(batch, *heads, 1, dim, dim, 4, 4, 256, 260, True, 0, False, False, target_of(arch))
    assert (made.reduce_constants[4], made.reduce_warps) == (slots, warps)
    used = resources(build_reduce(arch, (4, 4), dim=dim, batch=batch, heads=heads))
    assert used.stack == 0 and used.shared < SHARED[arch] * 1024


@pytest.mark.parametrize("preset", ["k8v4", "4bit_nc", "3bit_nc"])
def test_instructions_per_element_on_turing(preset: str) -> None:
    key_bits, value_bits = BITS[preset]
    compiled = build_split(75, key_bits=key_bits, value_bits=value_bits)
    used, config = resources(compiled), plan(75, key_bits, value_bits).config
    assert per_element(compiled, plan(75, key_bits, value_bits), 128, True)["total"] <= TURING_BUDGET
    assert used.stack == 0 and used.shared <= 4  # through which one lane tells the others of what it claimed
    assert used.registers * 32 * config.warps * config.programs_per_multiprocessor <= 65536
    assert inner_loop(compiled)["HMMA"] >= 128  # and no product by FMA
    assert inner_loop(compiled)["FFMA"] <= 64


@pytest.mark.parametrize(
    ("arch", "preset"), [*cards(SHARED, "4bit_nc"), *cards(SHARED, "3bit_nc"), *cards([80, 90], "k8v4")]
)
def test_compiles_for(arch: int | str, preset: str) -> None:
    key_bits, value_bits = BITS[preset]
    compiled = build_split(arch, key_bits=key_bits, value_bits=value_bits)
    assert compiled.metadata.shared <= SHARED[arch] * 1024 - (1024 if arch != "gfx942" and arch != 75 else 0)
    if isinstance(arch, int) and arch < 100:
        assert inner_loop(compiled)["STL"] == 0


@pytest.mark.parametrize(
    "shape",
    [
        dict(dim=64),
        dict(dim=80, value_dim=96),
        dict(dim=192, value_dim=128),
        dict(dim=256),
        dict(queries=5),
        dict(queries=16),
        dict(mask_rows=1),
        dict(mask_rows=2),
        dict(dtype="*bf16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_compiles_shape(arch: int, shape: dict[str, Any]) -> None:
    compiled = build_split(arch, key_bits=4, value_bits=4, **shape)
    assert compiled.metadata.shared <= SHARED[arch] * 1024 - (1024 if arch != "gfx942" and arch != 75 else 0)


@pytest.mark.parametrize("arch", cards(SHARED))
@pytest.mark.parametrize("dim", [128, 256])
def test_small_kernels_compile_for(arch: int | str, dim: int) -> None:
    for build in (build_rotate, build_append, build_reduce):
        compiled = build(arch, (4, 4), dim=dim)
        assert compiled.metadata.shared <= SHARED[arch] * 1024 - (1024 if arch != "gfx942" and arch != 75 else 0)
        if isinstance(arch, int):
            assert within(resources(compiled).stack, 0)
