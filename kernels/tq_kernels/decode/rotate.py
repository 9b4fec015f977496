"""Prepare the queries of a decode step: normalise each row by a power of two, divide its channels by the channel scales
of the keys, and rotate it.

Normalised rows keep fp16 from overflowing; the factor returns in the logits. `tq_kernels.decode.split` lists the
results.

R = H diag(s) as in `tq_hf.codec.rotation`: of D = odd * power channels, `power` a power of two, H is the Kronecker
product of the Hartley matrix of `odd` points and the Hadamard matrix of `power` points. It takes D log2 D sums and
differences in registers, where a product with R takes D * D. Kernels are given sqrt(D) R as a matrix in fp16: its first
row is s, and every `power`-th entry of every `power`-th row is one of the Hartley matrix.

A program of one warp rotates a row, and exchanges nothing with other warps: 312 instructions where a product by two
warps took 928. This and the same way back save 2.5 us of a call of 15.9 (1 x 2k, 4 bits, H200).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.schedule import LINE, ROTATED
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


class Queries(NamedTuple):
    """Queries of a step and their rotation: arguments of `rotate_query`.

    Args:
        tokens: [S + 1] int32, starts of the new tokens of S sequences: query s is that of sequence s if it has one
            new token, else 0. Or `None`.
    """

    query: Any
    rotation: Any
    channel_scales: Any
    tokens: Any
    rows: Any
    queries: Any
    kv_heads: Any
    stride_b: Any
    stride_h: Any
    stride_s: Any


@triton.jit
def rotate_rows(
    new, scratch, tile, plain_at, scale_at, DK: tl.constexpr, DKP: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Rotate BLOCK_R rows of `Queries` from row `tile` * BLOCK_R on, of this program's head."""
    head = tl.program_id(0)
    r = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    # Issue all loads at once: behind the stores below, these would first wait for the queries.
    sign = signs(new.rotation, d, DKP)
    factor = tl.load(new.channel_scales + head * DK + d, mask=d < DK, other=1.0).to(tl.float32)
    batch = (head // new.kv_heads).to(tl.int64)
    head_q = (head % new.kv_heads) * (new.rows // new.queries) + r // new.queries
    if new.tokens is None:
        offset = batch * new.stride_b + head_q.to(tl.int64) * new.stride_h + (r % new.queries) * new.stride_s  # [BR]
        inside = (r < new.rows)[:, None] & (d < DK)[None, :]
    else:
        token = tl.load(new.tokens + r % new.queries)
        single = tl.load(new.tokens + r % new.queries + 1) == token + 1
        offset = head_q.to(tl.int64) * new.stride_h + token.to(tl.int64) * new.stride_s  # [BR]
        inside = ((r < new.rows) & single)[:, None] & (d < DK)[None, :]
    q = tl.load(new.query + offset[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)  # [BR, BD]
    scale, inverse = power_of_two(tl.max(tl.abs(q), 1))  # [BR]
    q *= inverse[:, None]
    scratch_fp16 = scratch.to(tl.pointer_type(tl.float16), bitcast=True)
    plain = scratch_fp16 + (2 * LINE) * plain_at + (head * new.rows + r)[:, None] * DK + d[None, :]
    tl.store(plain, q.to(tl.float16), mask=inside)
    tl.store(scratch + LINE * scale_at + head * new.rows + r, scale, mask=r < new.rows)
    if (head == 0) & (tile == 0):
        tl.store(scratch.to(tl.pointer_type(tl.int32), bitcast=True), 0)
    rotated = hadamard(q * (sign / factor)[None, :], new.rotation, BLOCK_R, DKP, BLOCK_D) * (DKP**-0.5)
    out = scratch_fp16 + ROTATED + (head * new.rows + r)[:, None] * DKP + d[None, :]
    tl.store(out, rotated.to(tl.float16), mask=(r < new.rows)[:, None] & (d < DKP)[None, :])


@triton.jit(do_not_specialize=["rows", "queries", "kv_heads", "query_b", "query_h", "query_s", "plain_at", "scale_at"])
def rotate_query(
    query,  # [B, Hq, S, DK], last dimension contiguous
    rotation,  # [DKP, DKP] fp16, sqrt(DKP) R
    channel_scales,  # [P, DK] fp16
    scratch,
    rows,  # G * S
    queries,  # S
    kv_heads, query_b, query_h, query_s, plain_at, scale_at, DK: tl.constexpr, DKP: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write `query_rotated`, `query_plain` and `query_scale`. Grid: (P, rows / BLOCK_R)."""
    new = Queries(query, rotation, channel_scales, None, rows, queries, kv_heads, query_b, query_h, query_s)
    rotate_rows(new, scratch, tl.program_id(1), plain_at, scale_at, DK, DKP, BLOCK_D, BLOCK_R)
