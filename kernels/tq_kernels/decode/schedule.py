"""Who works on what: an equal share of all packed blocks for every program of `tq_kernels.decode.split`.

A *stream* is one KV head of one batch row and one tile of its query rows. The packed blocks of all streams form one
sequence, stream after stream, and each of the W resident programs (*workers*) takes one contiguous share of it, so all
have the same work whatever the shape. A share may span streams: worker w leaves its partial result for stream s in slot
w + s. Both grow along the sequence and one of them with each new piece, so slots are unique, and the pieces of stream s
lie in consecutive slots.

The dense tokens (sinks and window) are cut into jobs of 32 tokens of one stream, dealt out round-robin; workers that
get one job more get one block less. Counts of half blocks fit int32: 2**30 blocks are 16 TB.
"""

import triton
import triton.language as tl

DENSE_TOKENS = tl.constexpr(32)


@triton.jit
def dense_jobs(dense_tokens):
    """Jobs of one stream."""
    return (dense_tokens + DENSE_TOKENS - 1) // DENSE_TOKENS


@triton.jit
def balance(blocks, streams, workers, dense_tokens):
    """What the shares depend on: (work, extra, cost) in half blocks.

    `extra` workers have one dense job more than the others, and each counts `cost`. It counts less, or nothing, where
    shares are so small that it would leave them empty. `work` is the sum of blocks and these costs.
    """
    total = blocks * streams
    extra = (dense_jobs(dense_tokens) * streams) % workers
    cost = tl.where(total >= 2 * workers, 2, tl.where(total >= workers, 1, 0))
    return 2 * total + cost * extra, extra, cost


@triton.jit
def share_start(worker, workers, work, extra, cost):
    """First block of a worker's share (of the next worker: its end)."""
    # worker * work // workers, without the product's overflow.
    half_blocks = worker * (work // workers) + worker * (work % workers) // workers
    return (half_blocks - cost * tl.minimum(worker, extra)) // 2


@triton.jit
def owner(block, workers, work, extra, cost):
    """The worker whose share holds `block` of the sequence: the last one that starts at or before it."""
    # Invert `share_start` in floating point, then correct: a worker's index is small, so the estimate is off by one
    # at most.
    bound = 2.0 * block.to(tl.float32) + 2.0
    total = tl.maximum(work, 1).to(tl.float32)
    late = (bound + (cost * extra).to(tl.float32)) * workers / total
    early = tl.minimum(bound * workers / tl.maximum(total - (cost * workers).to(tl.float32), 1.0), extra.to(tl.float32))
    guess = tl.where(late >= extra.to(tl.float32), late, early).to(tl.int32)
    guess = tl.minimum(tl.maximum(guess, 1), workers - 1)
    found = guess - 1
    found += (share_start(guess, workers, work, extra, cost) <= block).to(tl.int32)
    found += ((guess + 1 < workers) & (share_start(guess + 1, workers, work, extra, cost) <= block)).to(tl.int32)
    return tl.minimum(found, workers - 1)
