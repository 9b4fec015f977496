"""Trellis codes that the kernels find are the reference's, every one: in Triton's interpreter, and on a GPU if there is
one."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from tq_kernels.codec import trellis
from tq_kernels.common.device import target

from tests.support.kernel_cases import INTERPRETED, child, gpu
from tq_hf.codec import trellis as reference

ROWS, COLUMNS = 32, 64
CPU = torch.device("cpu")


@triton.jit
def choose(channels, words, R: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """`words` [R, 2, C] of `channels` [4, R, 2, C], bytes of words."""
    row = tl.arange(0, R)[:, None, None]
    at = (row * 2 + tl.arange(0, 2)[None, :, None]) * C + tl.arange(0, C)[None, None, :]
    a = tl.load(channels + at).to(tl.uint32, bitcast=True)
    b = tl.load(channels + 2 * R * C + at).to(tl.uint32, bitcast=True)
    c = tl.load(channels + 4 * R * C + at).to(tl.uint32, bitcast=True)
    d = tl.load(channels + 6 * R * C + at).to(tl.uint32, bitcast=True)
    found = trellis.codes2(a, b, c, d, ASM) if BITS == 2 else trellis.codes3(a, b, c, d, ASM)
    tl.store(words + at, found.to(tl.int32, bitcast=True))


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


def check(bits: int, device: torch.device) -> None:
    x = samples()
    channels = ((x + 128).long().view(4, 4, -1) << torch.tensor([0, 8, 16, 24])[:, None, None]).sum(0)
    channels = channels.int().view(4, ROWS, 2, COLUMNS).to(device)  # plane, then neighbour and quarter
    words = torch.empty(ROWS, 2, COLUMNS, dtype=torch.int32, device=device)
    choose[(1,)](channels, words, ROWS, COLUMNS, bits, target(device).asm)
    code = (reference.two if bits == 2 else reference.three)(x.short()).long() & 3
    # The code k of 2 bits is at bits 2 k + 1 and 2 k + 2, a crumb at 2 k and 2 k + 1.
    expected = (code << 2 * torch.arange(16)[:, None]).sum(0)
    if bits == 2:
        expected = (expected << 1 | expected >> 31) & 0xFFFFFFFF
    assert torch.equal(words.cpu().view(-1).long() & 0xFFFFFFFF, expected)


test_all_cases_in_the_interpreter = child(__file__)
BITS = pytest.mark.parametrize("bits", [2, 3])


if INTERPRETED:

    @BITS
    def test_finds_the_codes_of_the_reference(bits: int) -> None:
        check(bits, CPU)


@gpu
@BITS
def test_finds_the_codes_of_the_reference_on_a_gpu(bits: int) -> None:
    check(bits, torch.device("cuda", 0))
