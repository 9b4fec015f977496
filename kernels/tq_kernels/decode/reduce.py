"""Merge the partial results of `tq_kernels.decode.split` and rotate the packed part's output back.

weight[i, r] = exp2(lse[i, r] - max)
out[r, :] = (sum_dense weight partial + R^T sum_packed weight partial / f) / (sum weight + exp2(s_aux log2(e) - max))

f are the channel scales of values.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..common.device import constants_of
from ..common.schedule import LINE, DecodeNumbers, counted, dense_jobs, holder, sharing, work_of
from ..common.softmax import LOG2E, rescaled
from .rotate import hadamard, signs

Partials = namedtuple("Partials", "lse partial tile_rows")
"""Partial results of a row of streams.

Args:
    lse, partial: Pointers to logarithms and to normalised results of slot 0.
    tile_rows: Rows of a slot.
"""


OutStrides = namedtuple("OutStrides", "batch token head")
"""Strides of outputs that decide nothing about what is compiled."""


ReduceShape = namedtuple(
    "ReduceShape",
    "DV DVP BLOCK_D BLOCK_S BLOCK_DENSE HAS_AUX TILE_R PDL BLOCK_B FILL",
    defaults=(False, 1, False, 0, False),
)
"""Constants of a reduce kernel.

Args:
    BLOCK_S, BLOCK_DENSE: Slots of packed and of dense results that are loaded at a time.
    TILE_R: BLOCK_R of the split.
    PDL: Whether the kernel may start before the one in front ends.
    BLOCK_B: Over pages the padded number of sequences.
    FILL: Over pages: no sequence has several new tokens, and padding tokens are written as 0.
"""


@triton.jit
def _slots_of_row(slots, first, start, last, row, d, DIM: tl.constexpr, DM: tl.constexpr, BLOCK_S: tl.constexpr):
    """Load logarithms [BS] and partial results [BS, BD] of one row, from slots `first + start` on, before `last`."""
    i = start + tl.arange(0, BLOCK_S)
    inside = i < last - first
    logs = tl.load(slots.lse + (first + i) * slots.tile_rows + row, mask=inside, other=-float("inf"))
    at = slots.partial + (first * slots.tile_rows + row).to(tl.int64) * DM
    part = tl.load(
        at + i[:, None] * (slots.tile_rows * DM) + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0
    )
    return logs, part


@triton.jit
def merge_row(slots, row, packed, dense, rotation, sign, factor, s_aux, C: tl.constexpr):
    """Merge a row of the output, [BD].

    Args:
        slots: `Partials`.
        row: Row of a slot.
        packed, dense: First slot and end of slots, of the packed part and of the dense part.
        rotation: Pointer to sqrt(DVP) R.
        sign, factor: [BD] the rotation's signs and the channel scales of values.
        s_aux: Pointer to the logit of the head's sink, if C.HAS_AUX.
        C: A `ReduceShape`.
    """
    DM: tl.constexpr = C.DV if C.DV > C.DVP else C.DVP
    d = tl.arange(0, C.BLOCK_D)
    largest, weights = tl.full([], -float("inf"), tl.float32), tl.zeros([], tl.float32)
    if C.HAS_AUX:
        largest = tl.load(s_aux).to(tl.float32) * LOG2E
        weights += 1.0
    rotated, plain = tl.zeros([C.BLOCK_D], tl.float32), tl.zeros([C.BLOCK_D], tl.float32)
    # One turn except for the longest rows. The longest chain decides the time of this kernel: all loads are issued at
    # once, and one maximum serves them all.
    times = tl.maximum(tl.cdiv(packed[1] - packed[0], C.BLOCK_S), tl.cdiv(dense[1] - dense[0], C.BLOCK_DENSE))
    for i in tl.range(0, times):
        logs, part = _slots_of_row(slots, packed[0], i * C.BLOCK_S, packed[1], row, d, C.DVP, DM, C.BLOCK_S)
        dense_logs, dense_part = _slots_of_row(
            slots, dense[0], i * C.BLOCK_DENSE, dense[1], row, d, C.DV, DM, C.BLOCK_DENSE
        )
        largest, shift, decay = rescaled(largest, tl.maximum(tl.max(logs, 0), tl.max(dense_logs, 0)), None, True)
        weight, dense_weight = tl.exp2(logs - shift), tl.exp2(dense_logs - shift)
        weights = weights * decay + (tl.sum(weight, 0) + tl.sum(dense_weight, 0))
        rotated = rotated * decay + tl.sum(part * weight[:, None], 0)
        plain = plain * decay + tl.sum(dense_part * dense_weight[:, None], 0)
    back = tl.reshape(hadamard(rotated[None, :], rotation, 1, C.DVP, C.BLOCK_D), [C.BLOCK_D])
    return (plain + back * (sign * (C.DVP**-0.5) / factor)) / tl.where(weights > 0, weights, 1.0)


@triton.jit
def reduce_splits(
    scratch,
    num_blocks,  # [] int32; over pages [sequences]
    num_residual,  # [] int32; over pages None, like the next
    num_sinks,  # [] int32
    rotation,  # [DVP, DVP] fp16, sqrt(DVP) R
    channel_scales,  # [B * Hkv, DV] fp16; over pages [Hkv, DV]
    s_aux,  # [Hq], any float dtype
    out,  # [B, S, Hq, DV], last dimension contiguous; over pages B is 1 and S all new tokens
    cu_seqlens_q, cu_seqlens_k,  # [sequences + 1] int32 over pages, or None
    n: DecodeNumbers,
    strides: OutStrides,
    SHAPE: tl.constexpr,  # a `ReduceShape`
):  # fmt: skip
    """Merge the slots of `decode_split`. Grid: (streams, tile_rows)."""
    C: tl.constexpr = constants_of(SHAPE)
    stream, local = tl.program_id(0), tl.program_id(1)
    head = stream // n.row_tiles
    r = (stream % n.row_tiles) * C.TILE_R + local
    d = tl.arange(0, C.BLOCK_D)
    # Before the wait: signs, channel scales and counts do not depend on the kernel in front.
    sign = signs(rotation, d, C.DVP)
    if cu_seqlens_q is None:
        factor = tl.load(channel_scales + head * C.DV + d, mask=d < C.DV, other=1.0).to(tl.float32)
        blocks = tl.load(num_blocks)
        dense_tokens = tl.load(num_sinks) + tl.load(num_residual)
        per_stream, jobs = counted(blocks), dense_jobs(dense_tokens)
        sharers = sharing(n.workers, per_stream * n.streams, jobs * n.streams)
        first = holder(stream * per_stream, sharers, per_stream * n.streams) + stream
        last = holder((stream + 1) * per_stream - 1, sharers, per_stream * n.streams) + stream + 1
        head_q = (head % n.kv_heads) * (n.rows // n.queries) + r // n.queries
        at = (
            (head // n.kv_heads).to(tl.int64) * strides.batch
            + (r % n.queries).to(tl.int64) * strides.token
            + head_q * strides.head
        )
    else:
        sequence, heads = head // n.kv_heads, n.heads
        factor = tl.load(channel_scales + head % n.kv_heads * C.DV + d, mask=d < C.DV, other=1.0).to(tl.float32)
        b = tl.arange(0, C.BLOCK_B)
        blocks_of, jobs_of, _, _ = work_of(cu_seqlens_q, cu_seqlens_k, num_blocks, b, n.count)
        blocks, jobs, token, _ = work_of(cu_seqlens_q, cu_seqlens_k, num_blocks, sequence, n.count)
        items = counted(blocks_of)
        total = tl.sum(items, 0) * heads
        sharers = sharing(n.workers, total, tl.max(jobs_of, 0) * n.streams)
        item = tl.sum(tl.where(b < sequence, items, 0), 0) * heads + stream % heads * counted(blocks)
        first = holder(item, sharers, total) + stream
        last = holder(item + counted(blocks) - 1, sharers, total) + stream + 1
        exists = jobs > 0  # one new token
        if C.FILL:
            # A sequence without a token takes the padding token of its rank among the sequences without one.
            token = tl.where(exists, token, tl.load(cu_seqlens_q + n.count) + sequence - token)
            exists = token < n.queries
        head_q = head % n.kv_heads * n.rows + r
        at = token.to(tl.int64) * strides.token + head_q * strides.head
    last = tl.where(blocks > 0, last, first)
    dense_first = n.workers + n.streams + stream * n.dense_splits
    dense_last = dense_first + jobs
    if C.PDL:
        cuda.gdc_wait()

    inside = r < n.rows
    if cu_seqlens_q is not None:
        inside = inside & exists
    if inside:
        slots = Partials(scratch + LINE * n.lse_at, scratch + LINE * n.partial_at, n.tile_rows)
        result = merge_row(
            slots, local, (first, last), (dense_first, dense_last), rotation, sign, factor, s_aux + head_q, C
        )
        tl.store(out + at + d, result.to(out.dtype.element_ty), mask=d < C.DV)
