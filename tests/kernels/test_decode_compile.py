"""Every decode kernel compiles for every GPU we name, without spilling; on sm_90 the inner loop stays within its
instruction budget.

Needs no GPU: Triton compiles for any target, and its wheel ships the disassembler.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from kernel_cases import INTERPRETED  # noqa: E402
from tq_kernels.common.device import Target  # noqa: E402
from tq_kernels.decode.append import rotate_and_append  # noqa: E402
from tq_kernels.decode.plan import Plan, plan_decode  # noqa: E402
from tq_kernels.decode.reduce import reduce_splits  # noqa: E402
from tq_kernels.decode.rotate import rotate_query  # noqa: E402
from tq_kernels.decode.split import decode_split  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# KiB of shared memory of a multiprocessor, by compute capability or AMD architecture
SHARED = {75: 64, 80: 164, 86: 100, 89: 100, 90: 228, 100: 228, "gfx942": 64}
BITS = {"k8v4": (8, 4), "4bit_nc": (4, 4), "3.5bit_nc": (4, 3), "k3v4_nc": (3, 4), "3bit_nc": (3, 3), "2bit_nc": (2, 2)}
BUDGET = {"k8v4": 2.25, "4bit_nc": 2.25, "3.5bit_nc": 2.4, "k3v4_nc": 2.4, "3bit_nc": 2.4, "2bit_nc": 1.9}
"""Instructions per KV element and thread on sm_90 at D = 128; memory speed allows 5.3 (k8v4), 3.6 (4 bits) and 2.7 (3
bits)."""


def capability(arch: int | str) -> tuple[int, int]:
    return divmod(arch, 10) if isinstance(arch, int) else (0, 0)


def target_of(arch: int | str) -> Target:
    """A GPU of this architecture, as large as an H200."""
    return Target(132, SHARED[arch] * 1024, capability(arch), isinstance(arch, int))


def plan(
    arch: int | str,
    key_bits: int,
    value_bits: int,
    *,
    dim: int = 128,
    value_dim: int | None = None,
    queries: int = 1,
    mask_rows: int = 0,
) -> Plan:
    return plan_decode(
        1,
        32,
        8,
        queries,
        dim,
        value_dim or dim,
        key_bits,
        value_bits,
        True,
        256,
        260,
        True,
        mask_rows,
        False,
        False,
        target_of(arch),
    )


def build(kernel: Any, types: list[str], constants: tuple[Any, ...], arch: int | str, **options: Any) -> Any:
    """Compile `kernel` with pointers, and specialised numbers (strides), that are multiples of 16, as launches find
    them."""
    names = kernel.arg_names
    runtime = len(names) - len(constants)
    assert len(types) == runtime
    source = ASTSource(
        fn=kernel,
        signature={name: types[i] if i < runtime else "constexpr" for i, name in enumerate(names)},
        constexprs={(i + runtime,): value for i, value in enumerate(constants)},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, kind in enumerate(types)
            if kind.startswith("*") or names[i] not in kernel.do_not_specialize
        },
    )
    target = GPUTarget("cuda", arch, 32) if isinstance(arch, int) else GPUTarget("hip", arch, 64)
    return triton.compile(source, target=target, options=options)


def build_split(arch: int | str, dtype: str = "*fp16", **shape: Any) -> Any:
    p = plan(arch, **shape)
    limit = {"maxnreg": p.config.registers} if p.config.registers else {}
    pdl = {"launch_pdl": True} if isinstance(arch, int) and arch >= 90 else {}
    types = [
        "*fp32",
        "*i32",
        "*i32",
        "*i32",
        "*fp16",
        "*i32",
        *[dtype] * 4,
        "*i32",
        "*i32",
        "*u8",
        *["i32"] * 13,
        "fp32",
        "fp32",
        *["i32"] * 8,
    ]
    return build(
        decode_split,
        types,
        p.split_constants,
        arch,
        num_warps=p.config.warps,
        num_stages=p.config.stages,
        **limit,
        **pdl,
    )


def disassemble(compiled: Any, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(compiled.asm["cubin"])
    try:
        result = subprocess.run([TOOLS / "cuobjdump", option, file.name], capture_output=True, text=True, check=True)
    finally:
        os.unlink(file.name)
    return result.stdout + result.stderr


def inner_loop(compiled: Any) -> Counter[str]:
    """Opcodes of the smallest loop with matrix products and exponentials: that over a share's blocks."""
    code = []
    for line in disassemble(compiled, "-sass").splitlines():
        if match := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", line):
            code.append((int(match[1], 16), match[2]))
    loops = []
    for address, text in code:
        if match := re.search(r"BRA\S*\s.*?0x([0-9a-f]+)", text):
            start = int(match[1], 16)
            if start < address:
                body = [re.sub(r"^@!?\S+\s+", "", t).split()[0].split(".")[0] for a, t in code if start <= a <= address]
                counts = Counter(body)
                if counts["HMMA"] > 20 and counts["MUFU"] > 4 and counts["LDGSTS"]:
                    loops.append(counts)
    return min(loops, key=Counter.total)


@pytest.mark.parametrize("preset", BITS)
def test_instructions_per_element_on_sm_90(preset: str) -> None:
    key_bits, value_bits = BITS[preset]
    compiled = build_split(90, key_bits=key_bits, value_bits=value_bits)
    loop = inner_loop(compiled)
    threads = 32 * plan(90, key_bits, value_bits).config.warps
    assert loop.total() * threads / (128 * 256) <= BUDGET[preset]
    assert loop["STL"] == loop["LDL"] == 0
    # Words reach the matrix units by copy, byte permute and matrix load alone.
    assert loop["I2F"] == loop["F2F"] == 0 and loop["STS"] <= 8 and loop["LDG"] <= 8


@pytest.mark.parametrize(
    ("arch", "preset"),
    [(arch, preset) for arch in SHARED for preset in ("4bit_nc", "3bit_nc")]
    + [(80, "k8v4"), (75, "k8v4"), (90, "k8v4")],
    ids=str,
)
def test_compiles_for(arch: int | str, preset: str) -> None:
    key_bits, value_bits = BITS[preset]
    compiled = build_split(arch, key_bits=key_bits, value_bits=value_bits)
    assert compiled.metadata.shared <= SHARED[arch] * 1024 - (1024 if arch != "gfx942" and arch != 75 else 0)
    if isinstance(arch, int) and arch >= 80 and arch < 100:
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
@pytest.mark.parametrize("arch", [80, 90])
def test_compiles_shape(arch: int, shape: dict[str, Any]) -> None:
    compiled = build_split(arch, key_bits=4, value_bits=4, **shape)
    assert compiled.metadata.shared <= SHARED[arch] * 1024 - (1024 if arch != "gfx942" and arch != 75 else 0)


@pytest.mark.parametrize("arch", SHARED, ids=str)
@pytest.mark.parametrize("dim", [128, 256])
def test_small_kernels_compile_for(arch: int | str, dim: int) -> None:
    p = plan(arch, 4, 4, dim=dim)
    rotate = build(rotate_query, ["*fp16", "*fp16", "*fp32", *["i32"] * 8], p.rotate_constants, arch, num_warps=2)
    append = build(
        rotate_and_append,
        [*["*fp16"] * 6, "*fp32", *["i32"] * 14],
        (dim, dim, *p.rotate_constants),
        arch,
        num_warps=2,
    )
    reduce = build(
        reduce_splits,
        ["*fp32", "*i32", "*i32", "*i32", "*fp16", "*fp32", "*fp16", *["i32"] * 13],
        p.reduce_constants,
        arch,
        num_warps=p.reduce_warps,
    )
    for compiled in (rotate, append, reduce):
        assert compiled.metadata.shared <= SHARED[arch] * 1024 - (1024 if arch != "gfx942" and arch != 75 else 0)
        if isinstance(arch, int) and arch >= 80:
            assert "STACK:0" in disassemble(compiled, "-res-usage")
