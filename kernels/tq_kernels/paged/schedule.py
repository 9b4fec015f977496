"""Who works on what in a decode step over many sequences: an equal share of everything for every program.

A stream is one KV head of one sequence and one tile of its query rows, as in `tq_kernels.decode.schedule`, but streams
differ in length. An *item* is a packed block or a job of 32 dense tokens, which are about as many bytes. A stream's
items are its blocks, then its dense jobs; those of all streams, one after the other, are shared out in contiguous equal
parts. Sequences that do not have exactly one new token have no items.
"""

import triton
import triton.language as tl

from ..common.sequences import lengths, located, sinks_of
from ..decode.schedule import DENSE_TOKENS, share_start
from ..format import TOKENS


@triton.jit
def dense_slots(SINKS: tl.constexpr):
    """Most dense jobs of a stream."""
    return (SINKS + TOKENS + DENSE_TOKENS - 1) // DENSE_TOKENS


@triton.jit
def dense_jobs_of(past, SINKS: tl.constexpr):
    """Jobs for the dense tokens of a sequence: its sinks, the rows of its ring and its new token."""
    return (sinks_of(past, SINKS) + past % TOKENS + DENSE_TOKENS) // DENSE_TOKENS


@triton.jit
def stream_items(new, past, SINKS: tl.constexpr):
    """Items of each stream of a sequence."""
    return tl.where(new == 1, past // TOKENS + dense_jobs_of(past, SINKS), 0)


@triton.jit
def share(worker, workers, cu_q, cu_k, count, heads, SINKS: tl.constexpr, BLOCK_B: tl.constexpr):
    """A worker's first item and the one after its last, the first one's stream, and that stream's first item; `heads`
    are streams of a sequence."""
    _, new, past = lengths(cu_q, cu_k, tl.arange(0, BLOCK_B), count)
    items = stream_items(new, past, SINKS) * heads
    total = tl.sum(items, 0)
    start = share_start(worker, workers, total)
    sequence, before = located(items, start)
    _, its_new, its_past = lengths(cu_q, cu_k, sequence, count)
    per_stream = tl.maximum(stream_items(its_new, its_past, SINKS), 1)
    stream = sequence * heads + (start - before) // per_stream
    return start, share_start(worker + 1, workers, total), stream, start - (start - before) % per_stream
