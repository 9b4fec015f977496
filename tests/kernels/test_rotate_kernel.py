"""The rotation in registers against the codec's, at every kind of width."""

import pytest
import torch
import triton
import triton.language as tl
from tq_kernels.decode.rotate import hadamard, signs

from tests.support.kernel_cases import INTERPRETED, child
from tq_hf.codec.rotation import rotate, rotate_back, rotation_matrix

test_passes_in_the_interpreter = child(__file__)


@triton.jit
def both_ways(x, rotation, there, back, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    at = tl.arange(0, ROWS)[:, None] * DIM + d[None, :]
    inside = (d < DIM)[None, :]
    sign = signs(rotation, d, DIM)[None, :]
    rows = tl.load(x + at, mask=inside, other=0.0)
    tl.store(there + at, hadamard(rows * sign, rotation, ROWS, DIM, BLOCK) * DIM**-0.5, mask=inside)
    tl.store(back + at, hadamard(rows, rotation, ROWS, DIM, BLOCK) * (sign * DIM**-0.5), mask=inside)


if INTERPRETED:

    @pytest.mark.parametrize("dim", [8, 64, 72, 80, 96, 104, 112, 128, 192, 256, 320, 512])
    @pytest.mark.parametrize("rows", [1, 4])
    def test_rotates_as_the_codec_does(rows: int, dim: int) -> None:
        """Exactly but for the order of sums at powers of two; else to what fp16 holds of the Hartley matrix."""
        x = torch.randn(rows, dim, generator=torch.Generator().manual_seed(dim))
        there, back = (torch.full((rows, dim), torch.nan) for _ in range(2))
        matrix = (rotation_matrix(dim, 5, torch.device("cpu"), torch.float32) * dim**0.5).half()
        both_ways[(1,)](x, matrix, there, back, rows, dim, triton.next_power_of_2(dim))
        tolerance = 1e-6 if dim & (dim - 1) == 0 else 5e-4
        for actual, expected in ((there, rotate(x, 5)), (back, rotate_back(x, 5))):
            assert (actual - expected).norm() <= tolerance * expected.norm()
