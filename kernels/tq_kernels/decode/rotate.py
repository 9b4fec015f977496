"""Prepare the queries of a decode step: normalise each row by a power of two, divide its channels by the channel scales
of the keys, and rotate it.

Normalised rows keep fp16 from overflowing; the factor returns in the logits. `tq_kernels.decode.split` lists the
results.

R = H diag(s) as in `tq_hf.codec.rotation`: of D = odd * power channels, `power` a power of two, H is the Kronecker
product of two matrices: Hartley's of `odd` points, Hadamard's of `power` points. It takes D log2 D sums and
differences in registers, where a product with R takes D * D. Kernels are given sqrt(D) R as a matrix in fp16: its first
row is s, and every `power`-th entry of every `power`-th row is one of the Hartley matrix.

A program of one warp rotates a row, and exchanges nothing with other warps: 312 instructions where a product by two
warps took 928. This and the same way back save 2.5 us of a call of 15.9 (1 x 2k, 4 bits, H200).
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from ..common.schedule import LINE, ROTATED, row_size
from ..common.softmax import power_of_two


@triton.jit
def signs(rotation, d, DIM: tl.constexpr):
    """Load the signs s at channels `d`, float32. `rotation` points to sqrt(DIM) R."""
    return tl.load(rotation + d, mask=d < DIM, other=0.0).to(tl.float32)


@triton.jit
def hadamard(x, rotation, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """sqrt(DIM) H x of each row of x [ROWS, BLOCK] float32, which is 0 from channel DIM on. H is its own inverse."""
    POWER: tl.constexpr = DIM & -DIM
    ODD: tl.constexpr = DIM // POWER
    for bit in tl.static_range(10):
        if 2**bit < POWER:
            pairs = tl.reshape(x, [ROWS, BLOCK // 2 // 2**bit, 2, 2**bit])
            low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2)), [ROWS, BLOCK])
    if ODD > 1:
        POINTS: tl.constexpr = BLOCK // POWER
        i = tl.arange(0, POINTS)
        inside = (i < ODD)[:, None] & (i < ODD)[None, :]
        hartley = tl.load(rotation + (i[:, None] * DIM + i[None, :]) * POWER, mask=inside, other=0.0).to(tl.float32)
        hartley *= signs(rotation, i * POWER, DIM)[None, :]
        parts = tl.reshape(x, [ROWS, 1, POINTS, POWER])
        x = tl.reshape(tl.sum(hartley[None, :, :, None] * parts, 2), [ROWS, BLOCK])
    return x


Queries = namedtuple(
    "Queries", "query rotation channel_scales tokens rows queries kv_heads stride_b stride_h stride_s count"
)
"""Queries of a step and their rotation: arguments of `append_and_rotate`.

Args:
    count: Over pages number of new tokens.
    tokens: Over pages [B + 1] int32, starts of the new tokens of B sequences: the query of a sequence is that of
        its one new token, else 0. Otherwise `None`.
"""


@triton.jit
def rotate_rows(
    new, scratch, head, r, exists, resets, plain_at, scale_at, DK: tl.constexpr, DKP: tl.constexpr,
    BLOCK_D: tl.constexpr, LOUD: tl.constexpr,
):  # fmt: skip
    """Rotate rows of `Queries`: row r [BR] of head [BR] of all B * Hkv, where it `exists` [BR]. Loud channels are 0
    there and go behind. The program that `resets` sets the number of claimed jobs to 0."""
    d = tl.arange(0, BLOCK_D)
    # Issue all loads at once: behind the stores below, these would first wait for the queries.
    sign = signs(new.rotation, d, DKP)
    batch, kv_head = (head // new.kv_heads).to(tl.int64), head % new.kv_heads  # [BR]
    head_q = kv_head * (new.rows // new.queries) + r // new.queries
    of_scales = head if new.tokens is None else kv_head
    real = exists[:, None] & (d < DK)[None, :]  # [BR, BD]
    factor = tl.load(new.channel_scales + of_scales[:, None] * DK + d[None, :], mask=real, other=1.0).to(tl.float32)
    if new.tokens is None:
        offset = batch * new.stride_b + head_q.to(tl.int64) * new.stride_h + (r % new.queries) * new.stride_s  # [BR]
        inside = real
        q = tl.load(new.query + offset[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)  # [BR, BD]
    else:
        # In a step of single tokens sequence b has token b, in general: load it while the table is loaded.
        at_head = new.query + head_q.to(tl.int64)[:, None] * new.stride_h + d[None, :]
        likely = tl.load(at_head + batch[:, None] * new.stride_s, mask=real & (batch < new.count)[:, None], other=0.0)
        token = tl.load(new.tokens + batch, mask=exists, other=0).to(tl.int64)
        inside = real & (tl.load(new.tokens + batch + 1, mask=exists, other=0) == token + 1)[:, None]
        moved = inside & (token != batch)[:, None]
        q = tl.load(at_head + token[:, None] * new.stride_s, mask=moved, other=0.0)
        q = tl.where(moved, q, tl.where(inside, likely, 0.0)).to(tl.float32)  # [BR, BD]
    scale, inverse = power_of_two(tl.max(tl.abs(q), 1))  # [BR]
    q *= inverse[:, None]
    row = head * new.rows + r
    scratch_fp16 = scratch.to(tl.pointer_type(tl.float16), bitcast=True)
    plain = scratch_fp16 + (2 * LINE) * plain_at + row[:, None] * DK + d[None, :]
    tl.store(plain, q.to(tl.float16), mask=inside)
    tl.store(scratch + LINE * scale_at + row, scale, mask=exists)
    if resets:
        tl.store(scratch.to(tl.pointer_type(tl.int32), bitcast=True), 0)
    q /= tl.abs(factor)
    out = scratch_fp16 + ROTATED + row[:, None] * row_size(DKP, LOUD)
    if LOUD > 0:
        loud = factor < 0
        place = tl.cumsum(loud.to(tl.int32), 1) - 1
        tl.store(out + DKP + place, q.to(tl.float16), mask=loud & exists[:, None])
        q = tl.where(loud, 0.0, q)
    rotated = hadamard(q * sign[None, :], new.rotation, exists.shape[0], DKP, BLOCK_D) * (DKP**-0.5)
    tl.store(out + d[None, :], rotated.to(tl.float16), mask=exists[:, None] & (d < DKP)[None, :])
