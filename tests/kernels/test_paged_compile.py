"""Every kernel over pages compiles for every GPU we name, without spilling; the table costs the inner loop of decode
next to nothing. Needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton")

from builds import MATRIX, tile_of  # noqa: E402
from kernel_cases import INTERPRETED  # noqa: E402
from limits import cards, within  # noqa: E402
from sass import SHARED, build, build_split, inner_loop, loops, per_element, resources, target_of  # noqa: E402
from test_decode_compile import BITS  # noqa: E402
from tq_kernels.codec.launch import encode_config  # noqa: E402
from tq_kernels.codec.quantise import CORRECTIONS, LEVELS  # noqa: E402
from tq_kernels.decode.plan import Plan, plan_decode  # noqa: E402
from tq_kernels.format import padded_dim  # noqa: E402
from tq_kernels.paged.append import append_tails, rotate_and_append_single  # noqa: E402
from tq_kernels.paged.encode import encode_completed  # noqa: E402
from tq_kernels.paged.reduce import reduce_splits_paged  # noqa: E402
from tq_kernels.paged.split import decode_split_paged  # noqa: E402
from tq_kernels.paged.split_fragments import decode_split_paged_fragments  # noqa: E402
from tq_kernels.paged.windows import STAGES, window_attention  # noqa: E402
from tq_kernels.prefix.attention import prefix_attention  # noqa: E402
from tq_kernels.prefix.dense_launch import dense_config  # noqa: E402
from tq_kernels.prefix.launch import prefix_config, prefix_constants  # noqa: E402

from tq_hf.config import TurboQuantConfig  # noqa: E402
from tq_hf.tensors.pages import rows_per_page  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

CARDS = [75, 80, 86, 89, 90, 100]
PRESETS = [p if p in ("k8v4", "4bit_nc", "3bit_nc") else pytest.param(p, marks=pytest.mark.slow) for p in BITS]
SEQUENCES = 64
STACK = {75: 80, 100: 80}
"""Bytes of stack the encoder is allowed where it is not 0; alone, keys take 64 and 72."""


def place(preset: str, dim: int) -> tuple[int, int]:
    """Rows of a ring's page, and words of a block."""
    torch = pytest.importorskip("torch")
    layout = TurboQuantConfig.from_preset(preset).layout(dim)
    return rows_per_page(layout, torch.float16), layout.block_bytes // 4


def plan_for(arch: int, preset: str, dim: int, softcap: bool = False) -> Plan:
    bits = BITS[preset]
    return plan_decode(SEQUENCES, 32, 8, 1, dim, dim, *bits, True, 256, 128, False, 0, softcap, False, target_of(arch))


def build_paged_split(
    arch: int, preset: str = "4bit_nc", dim: int = 128, softcap: bool = False, sinks: int = 0
) -> tuple[Any, Plan]:
    p, bits = plan_for(arch, preset, dim, softcap), BITS[preset]
    before = () if arch == 75 else (sinks,)
    constants = (dim, dim, *bits, True, softcap, *before, *place(preset, dim), SEQUENCES, *p.tile_constants)
    limit = {"maxnreg": p.config.registers} if p.config.registers else {}
    compiled = build(
        decode_split_paged_fragments if arch == 75 else decode_split_paged,
        ["*fp32", "*i32", "*i32", "*i32", "*fp16", *["*fp16"] * 3, *["*i32"] * 3, *["i32"] * 9, "fp32", "fp32",
         *["i32"] * 6],
        constants,
        arch,
        num_warps=p.config.warps,
        num_stages=p.config.stages,
        **limit,
        **({"launch_pdl": True} if arch >= 90 else {}),
    )  # fmt: skip
    return compiled, p


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


@pytest.mark.parametrize("preset", [pytest.param(p, marks=() if p == "4bit_nc" else pytest.mark.slow) for p in BITS])
def test_sinks_cost_the_inner_loop_little_on_sm_90(preset: str) -> None:
    compiled, p = build_paged_split(90, preset, sinks=4)
    plain, _ = build_paged_split(90, preset)
    found, without = (per_element(x, p, 128, False)["total"] for x in (compiled, plain))
    loop = inner_loop(compiled)
    assert found <= 1.02 * without and loop["STL"] == 0 and within(loop["LDL"], 2 if preset == "2bit_nc" else 0)


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


def build_small(arch: int, dim: int = 128) -> list[Any]:
    """The kernels that rotate and append a step's rows, reduce splits, and append the rows that no block took."""
    p, tile = plan_for(arch, "4bit_nc", dim), triton.next_power_of_2(dim)
    rotate = build(
        rotate_and_append_single,
        [*["*fp16"] * 4, *["*i32"] * 3, "*fp16", "*fp16", "*fp32", *["i32"] * 13],
        (dim, tile, *place("4bit_nc", dim), *p.rotate_constants[1:]),
        arch,
        num_warps=2,
    )
    reduce = build(
        reduce_splits_paged,
        ["*fp32", "*fp16", "*fp16", "*fp32", "*i32", "*i32", "*fp16", *["i32"] * 9],
        (True, 4, SEQUENCES, *p.reduce_constants),
        arch,
        num_warps=p.reduce_warps,
    )
    append = build(
        append_tails,
        [*["*fp16"] * 3, *["*i32"] * 3, *["i32"] * 7],
        (dim, tile, *place("4bit_nc", dim)),
        arch,
        num_warps=4,
    )
    return [rotate, reduce, append]


@pytest.mark.parametrize("arch", cards(CARDS))
@pytest.mark.parametrize("dim", [128, 256])
def test_small_kernels_compile_for(arch: int, dim: int) -> None:
    for compiled in build_small(arch, dim):
        assert compiled.metadata.shared <= SHARED[arch] * 1024 - (1024 if arch != 75 else 0)
        assert resources(compiled).stack == 0


def build_completed(arch: int, preset: str = "4bit_nc", dim: int = 128, dtype: str = "bf16", sinks: int = 0) -> Any:
    """The encoder of blocks that new tokens complete."""
    on, bits, stored = target_of(arch), BITS[preset], padded_dim(dim)
    config = encode_config(tile_of(stored), stored, bits, 4 if dtype == "fp32" else 2, on.capability)
    constants = (
        *(dim, stored, tile_of(stored), *bits, True, *[LEVELS[own] for own in bits]),
        *(CORRECTIONS["norm"], CORRECTIONS["projection"], MATRIX[dtype], config.k_step),
        *("tf32x3" if on.asm else "ieee", sinks, *place(preset, dim), SEQUENCES, on.asm),
    )
    types = [*[f"*{dtype}"] * 3, *["*i32"] * 5, "*fp16", "*fp16", "*fp32", "*fp32", "*fp16", "*fp16", *["i32"] * 7]
    return build(encode_completed, types, constants, arch, num_warps=config.warps)


@pytest.mark.parametrize("sinks", [0, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arch", cards(CARDS))
def test_encode_compiles_for(arch: int, sinks: int) -> None:
    compiled = build_completed(arch, dtype="bf16" if arch > 75 else "fp16", sinks=sinks)
    assert compiled.metadata.shared <= SHARED[arch] * 1024 - 1024
    assert within(resources(compiled).stack, STACK.get(arch, 0))


def build_prompts(arch: int, preset: str, *, split: bool = False, softcap: bool = False, sinks: int = 0) -> Any:
    on, bits = target_of(arch), BITS[preset]
    config = prefix_config(128, 128, *bits, on)
    flags = (True, True, 0, softcap, False, split)
    constants = prefix_constants(128, 128, *bits, *flags, config, on, (*place(preset, 128), SEQUENCES, sinks))
    types = ["*fp16", "*i32", "*i32", "*i32", *["*fp16"] * 11, "*i1", "*fp32", "*fp16", "*fp32", "*fp32", "*fp16"]
    types += ["*i32"] * 3
    numbers = len(prefix_attention.arg_names) - len(types) - len(constants) - 5
    types += [*["i32"] * numbers, "fp32", "fp32", "i32", "i32", "i32"]
    return build(prefix_attention, types, constants, arch, num_warps=config.warps)


@pytest.mark.parametrize("sinks", [0, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arch", cards(CARDS[1:]))
def test_prompts_compile_for(arch: int, sinks: int) -> None:
    compiled = build_prompts(arch, "4bit_nc", sinks=sinks)
    assert compiled.metadata.shared <= SHARED[arch] * 1024 - 1024
    if 80 <= arch < 100:
        assert within(resources(compiled).stack, 0)


def build_windows(
    arch: int | str, dim: int = 128, *, dtype: str = "bf16", softcap: bool = False, split: bool = False
) -> Any:
    """Decode over sliding windows, with learned sinks."""
    tile = tile_of(dim)
    config = dense_config(tile, 1, False, target_of(arch))
    flags = (softcap, True, split, MATRIX[dtype])
    constants = (dim, tile, 37, *flags, config.block_rows, config.block_tokens, STAGES)
    types = [*[f"*{dtype}"] * 4, "*i32", "*i32", *[f"*{dtype}"] * 2, "*fp32", "*fp32", *["i32"] * 13, "fp32", "fp32"]
    return build(window_attention, types, constants, arch, num_warps=config.warps)


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
    kernels = (rotate_and_append_single, decode_split_paged, reduce_splits_paged, encode_completed, append_tails)
    for kernel in (*kernels, window_attention):
        numbers = [p for p in kernel.params if not p.is_constexpr and p.name in kernel.do_not_specialize]
        assert {"count"} <= {p.name for p in numbers}
        assert not any(p.name in ("tokens", "width", "workers") and not p.do_not_specialize for p in kernel.params)
