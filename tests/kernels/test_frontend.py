"""Triton takes every kernel with the constants of every kind of launch: head sizes, presets, dtypes, cards.

What a Triton refuses (functions that return `None`, constants that it does not fold) its frontend refuses, in a tenth
of a second a kernel and without a GPU. `make test-oldest` runs this on the oldest Triton allowed, and `make
test-kernels` on the newest, with the machine code of each kernel for one card of each kind; what that takes, the tests
of `*_compile.py` count on the one that limits are set with (`tests/support/limits.py`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tq_kernels
from triton._C.libtriton import ir
from triton.compiler import make_backend

from examples.measure.compile import sass
from examples.measure.compile.builds import (
    BUILDERS,
    build_completed,
    build_latents,
    build_paged_split,
    build_prompt,
    build_prompts,
    build_reorder,
    build_rotate,
    build_sampling,
    build_small,
    build_small_latents,
    build_windows,
    launched,
)
from tests.kernels.test_decode_compile import BITS
from tests.support.helpers import every_pair
from tests.support.kernel_cases import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

KERNELS = BUILDERS | {"rotate": build_rotate}
PAGED: dict[str, Callable[..., Any]] = {
    "split": build_paged_split,
    "small": lambda arch, preset, dim: build_small(arch, dim),
    "encode": lambda arch, preset, dim: build_completed(arch, preset, dim, "fp16"),
    "windows": lambda arch, preset, dim: build_windows(arch, dim, split=preset == "k3v4_nc"),
}
SHAPES: list[tuple[int | str, dict[str, Any]]] = [
    *[(90, dict(dim=dim)) for dim in (64, 72, 128, 192, 256)],
    *[(90, dict(preset=preset)) for preset in BITS if preset not in ("4bit_nc", "3.5bit_nc")],
    *[(90, dict(dtype="fp32", dim=dim)) for dim in (64, 192)],
    (90, dict(dtype="bf16")),
    *[(80, dict(dim=dim)) for dim in (72, 256)],
    (80, dict(dtype="fp32")),
    *[(75, dict(dim=dim)) for dim in (72, 256)],
    *[("gfx942", dict(dim=dim)) for dim in (72, 128)],
]
"""Cards and what differs from heads of 128 of "4bit_nc" in float16. Of each kind of card one: its own matrix fragments,
asynchronous copies, launches that depend on one another, none of these."""


def frontend(source: Any, target: Any, options: dict[str, Any]) -> None:
    """`triton.compile` up to Triton's own language (Triton 3.5 to 3.9)."""
    backend = make_backend(target)
    parsed = backend.parse_options(options | source.parse_options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)


@pytest.fixture
def frontend_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass.triton, "compile", frontend)


@pytest.mark.usefixtures("frontend_only")
@pytest.mark.parametrize(("arch", "shape"), SHAPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_is_taken(kernel: str, arch: int | str, shape: dict[str, Any]) -> None:
    preset, options = shape.get("preset", "4bit_nc"), {k: v for k, v in shape.items() if k != "preset"}
    if not launched(kernel, arch, options.get("dim", 128)):
        pytest.skip("no such launch")
    KERNELS[kernel](arch, BITS[preset], **options)


@pytest.mark.usefixtures("frontend_only")
@pytest.mark.parametrize("shape", [(75, 128), (80, 72), (90, 64), (90, 128), (90, 256)], ids=str)
@pytest.mark.parametrize("preset", ["4bit_nc", pytest.param("k3v4_nc", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernel", PAGED)
def test_a_kernel_over_pages_is_taken(kernel: str, preset: str, shape: tuple[int, int]) -> None:
    arch, dim = shape
    if arch == 75 and kernel == "windows":
        pytest.skip("no such launch")
    PAGED[kernel](arch, preset, dim)


def build_kernels_of_latents(arch: int, bits: tuple[int, int]) -> None:
    for rows in (16, 128):
        build_latents(arch, bits, rows=rows)
        build_latents(arch, bits, rows=rows, paged=True)
    build_small_latents(arch, bits)
    build_small_latents(arch, bits, dim=64, rotary=16, dtype="fp32")


ALL_CARDS = (75, 80, 90, "gfx942")
PROMPTS = [dict(dim=dim, value_dim=value_dim, dtype=dtype) for dim, value_dim, dtype in
           ((128, 128, "bf16"), (72, 12, "fp32"), (192, 256, "fp16"))]  # fmt: skip
OTHERS: dict[str, Callable[[], Any]] = {
    **{f"prompts over pages {arch}": partial(build_prompts, arch, "4bit_nc") for arch in (80, 90)},
    **{
        f"latents {arch} {bits}": partial(build_kernels_of_latents, arch, bits)
        for arch, bits in ((80, (4, 8)), (90, (3, 8)), (90, (8, 4)))
    },
    **{
        f"reorder {arch} {dtype}": partial(build_reorder, arch, dtype)
        for arch in ALL_CARDS
        for dtype in ("bf16", "fp32")
    },
    **{f"sampling {arch}": partial(build_sampling, arch) for arch in ALL_CARDS},
    **{
        f"prompt {arch} {balanced} {shape}": partial(build_prompt, arch, balanced=balanced, **shape)
        for arch, balanced, shape in every_pair(ALL_CARDS, (True, False), PROMPTS)
    },
}
"""Kernels of prompts and of latents, of a new order of sequences and of the choice of tokens."""


@pytest.mark.usefixtures("frontend_only")
@pytest.mark.parametrize("kernel", OTHERS)
def test_another_kernel_is_taken(kernel: str) -> None:
    OTHERS[kernel]()


def test_the_kernels_that_choose_tokens_become_machine_code_that_keeps_to_registers() -> None:
    search, drop = (sass.resources(each) for each in build_sampling(90))
    # 16 programs of a warp on a multiprocessor: all of 32 rows of 128k logits run side by side.
    assert (search.stack, drop.stack) == (0, 0) and search.registers <= 128


def test_the_kernel_of_prompts_becomes_machine_code_that_keeps_to_registers() -> None:
    for dim in (128, 512):
        for balanced in (True, False):
            assert sass.resources(build_prompt(90, dim=dim, dtype="bf16", balanced=balanced)).stack == 0


def test_the_kernel_that_reorders_becomes_machine_code_that_moves_16_bytes_at_a_time() -> None:
    for sequences in (4, 256):
        ptx = build_reorder(90, "bf16", sequences).asm["ptx"]
        loads, stores = (re.findall(rf"{way}\.global[.\w]*\.v4", ptx) for way in ("ld", "st"))
        # 4096 words of 128 threads; all loads come before a barrier, and all stores after.
        assert len(loads) == len(stores) == 8
        last, first = ptx.rindex(loads[-1]), ptx.index(stores[0])
        assert "bar.sync" in ptx[last:first]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_becomes_machine_code(kernel: str) -> None:
    assert KERNELS[kernel](90, BITS["4bit_nc"]).asm["cubin"]


@pytest.mark.parametrize(
    ("kernel", "most", "by_numbers"),
    [("encode", 7_000, 11_544), ("windows", 2_000, 3_720), ("split", 4_500, 5_552), ("prompts", 7_500, 8_504)],
)
def test_a_kernel_over_pages_reads_rows_16_bytes_at_a_time(kernel: str, most: int, by_numbers: int) -> None:
    """With Triton 3.8 and 3.9, too. Read number by number, rows took as many instructions as `by_numbers`."""
    build = PAGED | {"prompts": lambda arch, preset, dim: build_prompts(arch, preset)}
    built = build[kernel](90, "4bit_nc", 128)
    assert len(sass.code(built[0] if kernel == "split" else built)) <= most < by_numbers


def test_every_launch_says_that_products_fuse() -> None:
    # Triton 3.9 warns where nobody says it, and 3.10 will not fuse.
    launches, silent = 0, []
    for file in Path(tq_kernels.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".warmup"):
                launches += 1
                if not any(k.arg is None and ast.unparse(k.value) == "ALWAYS" for k in node.keywords):
                    silent.append(f"{file.name}:{node.lineno}")
    assert launches > 0 and silent == []
