"""Shares of decode attention: everything once, nobody more than one block behind, and everybody found again."""

import pytest
import torch
import triton
import triton.language as tl
from tq_kernels.common.schedule import START, counted, holder, share_start

from tests.support.kernel_cases import INTERPRETED, child

NUMBERS = [(0, 8, 528), (1, 1, 4), (1, 8, 528), (14, 8, 528), (65, 8, 528), (66, 8, 528), (254, 64, 528), (7, 512, 528)]
"""Blocks of a stream, streams, workers."""


test_passes_in_the_interpreter = child(__file__)


@triton.jit
def deal(starts, holders, blocks, streams, workers, WORKERS: tl.constexpr, TOTAL: tl.constexpr):
    total = counted(blocks) * streams
    w, at = tl.arange(0, WORKERS), tl.arange(0, TOTAL)
    tl.store(starts + w, share_start(w, workers, total), mask=w <= workers)
    tl.store(holders + at, holder(at, workers, total), mask=at < total)


if INTERPRETED:

    @pytest.mark.parametrize(("blocks", "streams", "workers"), NUMBERS)
    def test_shares(blocks: int, streams: int, workers: int) -> None:
        total = (blocks + START.value) * streams if blocks else 0
        starts = torch.empty(workers + 1, dtype=torch.int32)
        holders = torch.empty(total, dtype=torch.int32)
        sizes = (triton.next_power_of_2(n + 1) for n in (workers, total))
        deal[(1,)](starts, holders, blocks, streams, workers, *sizes)
        shares = starts.diff()
        assert starts[0] == 0 and starts[-1] == total
        assert shares.max() - shares.min() <= 1
        assert torch.equal(holders.long(), torch.arange(workers).repeat_interleave(shares))
