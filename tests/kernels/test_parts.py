"""Parts of decode kernels. Shares of attention: everything once, no program more than one block behind, and every
holder found again. The rotation in registers: as the codec rotates, at every kind of width."""

import pytest
import torch
import triton
import triton.language as tl
from tq_kernels.common.schedule import START, counted, first_jobs, holder, packed_share, sharing
from tq_kernels.decode.rotate import hadamard, signs

from tests.support.kernel_cases import INTERPRETED, child
from tq_hf.codec.rotation import rotate, rotate_back, rotation_matrix

NUMBERS = [(blocks, 8, 528, 40) for blocks in (0, 1, 14, 63, 65, 131)]
NUMBERS += [(1, 1, 4, 2), (66, 8, 528, 0), (8, 64, 528, 320), (254, 64, 528, 320), (7, 512, 528, 2560)]
"""Blocks of a stream, streams, workers, dense jobs."""


test_passes_in_the_interpreter = child(__file__)


@triton.jit
def deal(
    starts, ends, holders, firsts, sharers_at, blocks, streams, workers, jobs, WORKERS: tl.constexpr,
    TOTAL: tl.constexpr,
):  # fmt: skip
    total = counted(blocks) * streams
    sharers = sharing(workers, total, jobs)
    w, at = tl.arange(0, WORKERS), tl.arange(0, TOTAL)
    start, end = packed_share(w, sharers, total)
    tl.store(starts + w, start, mask=w < workers)
    tl.store(ends + w, end, mask=w < workers)
    tl.store(holders + at, holder(at, sharers, total), mask=at < total)
    tl.store(firsts + w, first_jobs(w, workers, total, sharers)[0], mask=w < workers)
    tl.store(sharers_at, sharers)


if INTERPRETED:

    @pytest.mark.parametrize(("blocks", "streams", "workers", "jobs"), NUMBERS)
    def test_shares(blocks: int, streams: int, workers: int, jobs: int) -> None:
        total = (blocks + START.value) * streams if blocks else 0
        starts, ends, firsts = (torch.empty(workers, dtype=torch.int32) for _ in range(3))
        holders, sharers = torch.empty(total, dtype=torch.int32), torch.empty((), dtype=torch.int32)
        sizes = (triton.next_power_of_2(n + 1) for n in (workers, total))
        deal[(1,)](starts, ends, holders, firsts, sharers, blocks, streams, workers, jobs, *sizes)
        shares = ends - starts
        of_sharers = shares[: int(sharers)]
        assert starts[0] == 0 and ends[-1] == total and torch.equal(starts[1:], ends[:-1])
        assert of_sharers.max() - of_sharers.min() <= 1
        assert torch.equal(holders.long(), torch.arange(workers).repeat_interleave(shares))
        # Who has no share begins with a job: the first of them with the first job.
        assert torch.equal(firsts < 0, shares > 0)
        assert torch.equal(firsts[firsts >= 0], torch.arange(int((firsts >= 0).sum())).int())
        if total < 2 * workers:
            assert int((firsts >= 0).sum()) >= min(jobs, workers // 2)
        else:
            assert int(sharers) == workers


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
