"""Who works on what: an equal share of all packed blocks for every program of `tq_kernels.decode.split`, then what is
left of the dense tokens.

A *stream* is one KV head of one batch row and one tile of its query rows. The packed blocks of all streams form one
sequence, stream after stream, and each of the W resident programs (*workers*) takes one contiguous share of it, so all
have the same work whatever the shape; of fewer blocks than workers, the first workers take one each. A share may span
streams: worker w leaves its partial result for stream s in slot w + s. Both grow along the sequence and one of them
with each new piece, so slots are unique, and the pieces of stream s lie in consecutive slots. Each stream counts as if
`START` blocks more came first, because a program that goes on to another one has to begin anew.

The dense tokens (sinks and window) are cut into jobs of 32 tokens of one stream. Workers that have no share begin with
one each; the others are claimed by whoever is done. Programs are not equally fast: of those on one multiprocessor, the
first are served first, and are done when a fifth of the time is left. Their jobs wait for memory while the others
compute.
"""

import triton
import triton.language as tl

DENSE_TOKENS = tl.constexpr(32)
START = tl.constexpr(1)


@triton.jit
def dense_jobs(dense_tokens):
    """Jobs of one stream."""
    return (dense_tokens + DENSE_TOKENS - 1) // DENSE_TOKENS


@triton.jit
def counted(blocks):
    """What a stream of so many blocks counts."""
    return tl.where(blocks > 0, blocks + START, 0)


@triton.jit
def share_start(worker, workers, total):
    """Where a worker's share of `total` blocks starts (the next one's: ends). The first shares have a block more."""
    return worker * (total // workers) + tl.minimum(worker, total % workers)


@triton.jit
def holder(block, workers, total):
    """The worker whose share holds `block`."""
    each = total // workers
    larger = total % workers
    below = larger * (each + 1)
    return tl.where(block < below, block // (each + 1), larger + (block - below) // tl.maximum(each, 1))


@triton.jit
def first_jobs(worker, workers, total):
    """The job that a worker begins with, less than 0 if it has a share of `total` blocks; and how many workers begin
    with one."""
    # Of fewer blocks than workers, the first workers have one each.
    without_share = tl.maximum(workers - total, 0)
    return worker - (workers - without_share), without_share


@triton.jit
def claim(claims, without_share):
    """The next job, behind those that workers begin with."""
    return without_share + tl.atomic_add(claims, 1, sem="relaxed")
