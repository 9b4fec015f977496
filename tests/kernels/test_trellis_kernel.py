"""Trellis codes that the kernels find are the reference's, every one: in Triton's interpreter, in compiled code that is
executed on the CPU, and on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Callable
from tempfile import TemporaryDirectory

import pytest
import torch
import triton
import triton.language as tl
from tq_kernels.codec import trellis
from tq_kernels.common.device import target
from tq_kernels.format import CODES
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource, compile

from tests.support.kernel_cases import INTERPRETED, child, gpu
from tests.support.ptx import run_inline_asm
from tests.support.ptx_kernel import run_kernel
from tq_hf.codec import trellis as reference

ROWS, COLUMNS = 32, 64
CPU = torch.device("cpu")


@triton.jit
def choose(
    channels, words, sums, R: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, IS_VALUE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """`words` [R, 2, C] of `channels` [4, R, 2, C], bytes of words; `sums` [4, R] of level times channel of their
    planes, for values [2, 4, R]."""
    row = tl.arange(0, R)[:, None, None]
    at = (row * 2 + tl.arange(0, 2)[None, :, None]) * C + tl.arange(0, C)[None, None, :]
    a = tl.load(channels + at).to(tl.uint32, bitcast=True)
    b = tl.load(channels + 2 * R * C + at).to(tl.uint32, bitcast=True)
    c = tl.load(channels + 4 * R * C + at).to(tl.uint32, bitcast=True)
    d = tl.load(channels + 6 * R * C + at).to(tl.uint32, bitcast=True)
    found = trellis.codes2(a, b, c, d, ASM) if BITS == 2 else trellis.codes3(a, b, c, d, ASM)
    tl.store(words + at, found.to(tl.int32, bitcast=True))
    product = trellis.products(a, b, c, d, trellis.sizes(found, BITS, ASM), IS_VALUE, BITS, ASM)
    for i in tl.static_range(8 if IS_VALUE else 4):
        tl.store(sums + i * R + tl.arange(0, R), tl.sum(tl.sum(product[i], axis=2), axis=1))


def samples() -> torch.Tensor:
    """Chains `[16, N]` int32: of Gaussian channels, of any, and of the largest, of either sign, and few others."""
    generator = torch.Generator().manual_seed(0)
    shape = (16, 2 * ROWS * COLUMNS // 4)
    gaussian = (28 * torch.randn(shape, generator=generator)).round().clamp(-127, 127)
    uniform = torch.randint(-127, 128, shape, generator=generator)
    extremes = torch.tensor([-127, 127, 0, 57, -57, 86, -86])[torch.randint(7, shape, generator=generator)]
    few = torch.tensor([-127, 0, 0, 0, 0, 127])[torch.randint(6, shape, generator=generator)]
    few[:, 0], few[:, 1], few[:, 2] = 0, 127, -127
    return torch.cat([gaussian, uniform, extremes, few], 1).int()


Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, object]], None]


def launch(channels: torch.Tensor, words: torch.Tensor, sums: torch.Tensor, constants: dict[str, object]) -> None:
    choose[(1,)](channels, words, sums, **constants)


def compiled(arch: int) -> Run:
    """Runs what the kernel is compiled to for that architecture, on the CPU."""

    def run(channels: torch.Tensor, words: torch.Tensor, sums: torch.Tensor, constants: dict[str, object]) -> None:
        pointers = dict.fromkeys(("channels", "words", "sums"), "*i32")
        source = ASTSource(choose, pointers | dict.fromkeys(constants, "constexpr"), constants)
        with TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:  # without machine code, and not kept
            patch.setattr(knobs.cache, "dir", cache)
            patch.setattr(CUDABackend, "make_cubin", lambda *_: b"")
            text = compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4}).asm["ptx"]
        run_kernel(text, [x.data_ptr() for x in (channels, words, sums)], 128)

    return run


def check(bits: int, is_value: bool, device: torch.device, asm: int, run: Run = launch) -> None:
    x = samples()
    channels = ((x + 128).long().view(4, 4, -1) << torch.tensor([0, 8, 16, 24])[:, None, None]).sum(0)
    channels = channels.int().view(4, ROWS, 2, COLUMNS).to(device)
    words = torch.empty(ROWS, 2, COLUMNS, dtype=torch.int32, device=device)
    sums = torch.empty(2 if is_value else 1, 4, ROWS, dtype=torch.int32, device=device)
    constants = dict(R=ROWS, C=COLUMNS, BITS=bits, IS_VALUE=is_value, ASM=asm)
    run(channels, words, sums, constants)
    code = (reference.encode_two if bits == 2 else reference.encode_three)(x.short()).long()
    # The code k of 2 bits is at bits 2 k + 1 and 2 k + 2, a crumb at 2 k and 2 k + 1.
    expected = ((code & 3) << 2 * torch.arange(16)[:, None]).sum(0)
    if bits == 2:
        expected = (expected << 1 | expected >> 31) & 0xFFFFFFFF
        level = torch.tensor(CODES[2].levels)[2 * code + (code.roll(1, 0) >> 1 ^ code.roll(2, 0) & 1)] // 2
    else:
        level = torch.tensor(CODES[3].levels)[(code & 3) + 4 * (code.roll(-1, 0) & 1)] * x.sign()
    assert torch.equal(words.cpu().view(-1).long() & 0xFFFFFFFF, expected)
    product = (level * x).view(4, 2, 2, ROWS, -1).sum((2, 4))  # [plane, e, row]
    assert torch.equal(sums.cpu().long(), product.transpose(0, 1) if is_value else product.sum(1)[None])


test_all_cases_in_the_interpreter = child(__file__)
BITS = pytest.mark.parametrize("bits", [2, 3])


SIDES = pytest.mark.parametrize("is_value", [False, True], ids=["keys", "values"])


if INTERPRETED:
    run_inline_asm()

    @BITS
    @SIDES
    @pytest.mark.parametrize("asm", [0, 1, 7, 8, 9], ids=["none", "AMD", "sm_75", "sm_80", "sm_90"])
    def test_finds_the_codes_of_the_reference(bits: int, is_value: bool, asm: int) -> None:
        check(bits, is_value, CPU, asm)

else:

    @pytest.mark.parametrize(
        ("bits", "is_value", "arch"),
        [(3, True, 90), (2, False, 75)]
        + [pytest.param(*case, marks=pytest.mark.slow) for case in [(2, False, 90), (2, True, 80), (3, False, 80)]],
    )
    def test_compiled_code_finds_the_codes_of_the_reference(bits: int, is_value: bool, arch: int) -> None:
        """The interpreter runs the source: what Triton takes for a variable of a loop shows in compiled code only."""
        check(bits, is_value, CPU, arch // 10, compiled(arch))


@gpu
@BITS
@SIDES
def test_finds_the_codes_of_the_reference_on_a_gpu(bits: int, is_value: bool) -> None:
    device = torch.device("cuda", 0)
    check(bits, is_value, device, target(device).asm)
