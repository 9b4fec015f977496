"""Every decode kernel compiles for every GPU we name, for blocks of a cache and for pages, without spilling; the inner
loop stays within its instruction budget, which the block table costs next to nothing of. Appending to a preallocated
store asserts that there is room.

Needs no GPU: `sass.py` compiles for any target and counts.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from tq_kernels.codec.encode import encode_blocks
from tq_kernels.decode.append import append_and_rotate, append_tails
from tq_kernels.decode.plan import Plan
from tq_kernels.format import padded_dim

from examples.measure.compile.builds import (
    build_append,
    build_paged_split,
    build_preallocated_append,
    build_reduce,
    build_rotate,
    build_small,
)
from examples.measure.compile.sass import SHARED, build_split, code, inner_loop, per_element, plan, resources
from tests.support.helpers import quick_of, slow
from tests.support.kernel_cases import INTERPRETED
from tests.support.limits import ALIKE, within

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

BITS = {"k8v4": (8, 4), "4bit_nc": (4, 4), "3.5bit_nc": (4, 3), "k3v4_nc": (3, 4), "3bit_nc": (3, 3), "2bit_nc": (2, 2)}
BUDGET = {"k8v4": 2.25, "4bit_nc": 2.3, "3.5bit_nc": 2.4, "k3v4_nc": 2.4, "3bit_nc": 2.4, "2bit_nc": 2.1}
"""Instructions per KV element and thread on sm_90 at D = 128; memory speed allows 5.3 (k8v4), 3.6 (4 bits) and 2.7 (3
bits)."""
TURING_BUDGET = 2.6
"""The same on sm_75, for all presets; a T4 reads 4 bits at 13 instructions in the time of an element."""


def split_of(storage: str, arch: int | str, preset: str, **shape: Any) -> tuple[Any, Plan]:
    """The kernel that reads blocks of a cache or of pages, and its plan."""
    if storage == "pages":
        return build_paged_split(arch, preset, **shape)
    shape |= dict(zip(("key_bits", "value_bits"), BITS[preset], strict=True))
    return build_split(arch, **shape), plan(arch, **{name: shape[name] for name in shape.keys() - {"dtype"}})


def shared_bytes(arch: int | str) -> int:
    """Most shared memory that a program may take."""
    return SHARED[arch] * 1024 - (1024 if arch not in ("gfx942", 75) else 0)


CACHED, PAGED = (
    product(["cache"], ("k8v4", "4bit_nc", "3bit_nc", "2bit_nc")),
    product(["pages"], ("4bit_nc", "2bit_nc")),
)


@pytest.mark.parametrize(("storage", "preset"), quick_of(product(("cache", "pages"), BITS), *CACHED, *PAGED))
def test_instructions_per_element_on_sm_90(storage: str, preset: str) -> None:
    compiled, p = split_of(storage, 90, preset)
    loop, total, paged = inner_loop(compiled), per_element(compiled, p, 128, False)["total"], storage == "pages"
    if paged:
        assert total <= 1.1 * per_element(split_of("cache", 90, preset)[0], p, 128, False)["total"]
    else:
        assert total <= BUDGET[preset]
    # 2 bits over pages: three numbers that do not change are read back from the stack (a step takes as long with two).
    assert loop["STL"] == 0 and (loop["LDL"] == 0 or paged and within(loop["LDL"], 3 * (preset == "2bit_nc")))
    # Words reach the matrix units by copy, byte permute and matrix load alone.
    assert loop["I2F"] == loop["F2F"] == 0 and loop["STS"] <= 8 and loop["LDG"] <= 8 + paged


@pytest.mark.parametrize(
    ("dim", "preset", "budget"),
    [
        (80, "4bit_nc", 3.2),
        slow(96, "4bit_nc", 2.5),
        slow(192, "4bit_nc", 2.1),
        (384, "3bit_nc", 3.65),
        (512, "4bit_nc", 3.0),
    ],
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
                    chunks, tile = made.split.KEY_CHUNKS, made.split.BLOCK_KC
                    assert dim <= chunks * tile and padded_dim(dim) % (2 * chunks) == 0


@pytest.mark.parametrize(("preset", "queries"), quick_of(product(BITS, (1, 4)), ("4bit_nc", 1), ("4bit_nc", 4)))
def test_heads_of_512_have_no_stack_in_the_loop(preset: str, queries: int) -> None:
    """Of 4 and of 16 rows."""
    key_bits, value_bits = BITS[preset]
    compiled = build_split(90, key_bits=key_bits, value_bits=value_bits, dim=512, queries=queries)
    on = plan(90, key_bits, value_bits, dim=512, queries=queries).config
    loop = inner_loop(compiled)
    # Four parts of the keys would leave none at 3.5 bits, and room for two programs rather than three.
    assert loop["STL"] + loop["LDL"] <= (41 if (preset, queries) == ("3.5bit_nc", 1) else 0)
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
    made = plan(arch, 4, 4, dim=dim, batch=batch, heads=heads)
    assert (made.reduce.BLOCK_S, made.reduce_warps) == (slots, warps)
    used = resources(build_reduce(arch, (4, 4), dim=dim, batch=batch, heads=heads))
    assert used.stack == 0 and used.shared < SHARED[arch] * 1024


@pytest.mark.parametrize("preset", [slow("k8v4"), "4bit_nc", "3bit_nc"])
def test_instructions_per_element_on_turing(preset: str) -> None:
    key_bits, value_bits = BITS[preset]
    compiled = build_split(75, key_bits=key_bits, value_bits=value_bits)
    used, config = resources(compiled), plan(75, key_bits, value_bits).config
    assert per_element(compiled, plan(75, key_bits, value_bits), 128, True)["total"] <= TURING_BUDGET
    assert used.stack == 0 and used.shared <= 4  # through which one lane tells the others of what it claimed
    assert used.registers * 32 * config.warps * config.programs_per_multiprocessor <= 65536
    assert inner_loop(compiled)["HMMA"] >= 128  # and no product by FMA
    assert inner_loop(compiled)["FFMA"] <= 64


CARDS = [75, 80, 86, 89, 90, 100]


BUILT = [(80, "k8v4", "cache"), (90, "k8v4", "cache"), *product(SHARED, ("4bit_nc", "3bit_nc"), ["cache"])]
BUILT += product(CARDS, ("4bit_nc", "3bit_nc"), ["pages"])
ONE_OF_EACH = [(80, "k8v4", "cache"), *((arch, "4bit_nc", "cache") for arch in (80, "gfx942"))]
ONE_OF_EACH += [*((arch, "3bit_nc", "cache") for arch in (75, 100)), (80, "3bit_nc", "pages")]
ONE_OF_EACH += [(arch, "4bit_nc", "pages") for arch in (75, 100)]
"""Cards, storages and codes; 90 is counted above."""


@pytest.mark.parametrize(("arch", "preset", "storage"), quick_of(BUILT, *ONE_OF_EACH))
def test_compiles_for(arch: int | str, preset: str, storage: str) -> None:
    compiled, _ = split_of(storage, arch, preset)
    assert compiled.metadata.shared <= shared_bytes(arch)
    if isinstance(arch, int) and arch < 100:
        assert inner_loop(compiled)["STL"] == 0
    if arch == 75 and storage == "pages":
        assert resources(compiled).stack <= 8 and resources(compiled).shared <= 4


@pytest.mark.parametrize(
    ("storage", "shape"),
    [
        ("cache", dict(dim=80, value_dim=96)),
        ("cache", dict(dim=256)),
        ("cache", dict(queries=16)),
        ("cache", dict(mask_rows=2)),
        ("cache", dict(dtype="*bf16")),
        *[("pages", shape) for shape in (dict(dim=80), dict(softcap=True))],
        *[slow("cache", shape) for shape in (dict(dim=64), dict(dim=192, value_dim=128))],
        *[slow("cache", shape) for shape in (dict(queries=5), dict(mask_rows=1))],
        *[slow("pages", shape) for shape in (dict(dim=64), dict(dim=256))],
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_compiles_shape(arch: int, storage: str, shape: dict[str, Any]) -> None:
    assert split_of(storage, arch, "4bit_nc", **shape)[0].metadata.shared <= shared_bytes(arch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "dim", "preset"),
    [(90, 512, "4bit_nc"), (80, 512, "4bit_nc"), (100, 512, "4bit_nc"), (90, 512, "k8v4"), (90, 320, "4bit_nc")],
)
def test_wide_heads_over_pages_compile_for(arch: int, dim: int, preset: str) -> None:
    compiled, p = build_paged_split(arch, preset, dim)
    assert p.config.programs_per_multiprocessor * (compiled.metadata.shared + 1024) <= SHARED[arch] * 1024
    if arch < 100:
        # Of 2,900 instructions for a block, 10 write to the stack and 10 read from it with keys of 8 bits: none before
        # one kernel served caches and pages.
        loop, most = inner_loop(compiled), 10 if preset == "k8v4" else 0
        assert within(loop["STL"], most) and within(loop["LDL"], most)
    # Of 320 channels the kernel in front keeps two numbers there.
    for small in build_small(arch, dim):
        assert within(resources(small).stack, 8 if dim == 320 else 0)


SMALL = [*product(SHARED, ["cache"], (128, 256)), *product(CARDS, ["pages"], (128, 256))]
QUICK_SMALL = [case for i, case in enumerate(SMALL) if i % 4 in (0, 3) and case[0] not in ALIKE]
"""One width a card, another for the next."""


@pytest.mark.parametrize(("arch", "storage", "dim"), quick_of(SMALL, *QUICK_SMALL))
def test_small_kernels_compile_for(arch: int | str, storage: str, dim: int) -> None:
    of_a_cache = (build_rotate, build_append, build_reduce)
    built = build_small(arch, dim) if storage == "pages" else [build(arch, (4, 4), dim=dim) for build in of_a_cache]
    for compiled in built:
        assert compiled.metadata.shared <= shared_bytes(arch)
        if isinstance(arch, int):
            assert resources(compiled).stack == 0 or storage == "cache" and within(resources(compiled).stack, 0)


def test_no_length_decides_what_is_compiled() -> None:
    """Numbers in tuples never do (`Kernel`)."""
    for kernel in (encode_blocks, append_tails):
        numbers = [p for p in kernel.params if not p.is_constexpr and p.name in kernel.do_not_specialize]
        assert {"count", "queries", "heads"} & {p.name for p in numbers}  # of sequences
        assert not any(p.name in ("tokens", "width", "workers") and not p.do_not_specialize for p in kernel.params)


@pytest.mark.parametrize("rotates", [slow(False), True], ids=["append", "append and rotate"])
@pytest.mark.parametrize("arch", [slow(75), slow(80), slow(86), slow(89), 90, slow(100)])
def test_a_full_store_is_asserted_on_the_device(arch: int, rotates: bool) -> None:
    assert append_and_rotate.debug, "without it a launch compiles no assertion"
    built = build_preallocated_append(arch, (4, 4), rotates=rotates)
    assert "larger `max_cache_len`" in built.asm["ttir"] and "__assertfail" in built.asm["ptx"]
    assert built.metadata.shared <= SHARED[arch] * 1024 - 1024
    # A step without a due block must not wait for the stack of the encoder, which all programs would set up.
    assert resources(built).stack <= (72 if arch == 100 else 0)


@pytest.mark.parametrize(
    ("arch", "dim"),
    [(90, 128), *[slow(arch, dim) for arch in (75, 80, 90) for dim in (64, 96, 128, 256) if (arch, dim) != (90, 128)]],
)
def test_rotating_takes_no_registers_or_memory_from_appending(arch: int, dim: int) -> None:
    alone, both = (build_preallocated_append(arch, (4, 4), dim=dim, rotates=rotates) for rotates in (False, True))
    units = [-(-resources(one).registers // 8) for one in (both, alone)]  # in which a thread is given them
    assert units[0] <= units[1]
    bytes_more, times = (8, 1.13) if (arch, dim) == (75, 256) else (0, 1.1)  # 1,008 and 1,000 bytes of stack there
    assert resources(both).stack <= resources(alone).stack + bytes_more
    assert resources(both).shared <= resources(alone).shared
    # The instructions of both kernels and a few to choose.
    added = len(code(both)) - len(code(alone))
    assert added <= times * len(code(build_rotate(arch, (4, 4), dim=dim, rows=both.metadata.num_warps)))
