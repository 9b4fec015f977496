"""Prepare the queries of a decode step: normalise each row by a power of two, divide its channels by the channel scales
of the keys, and rotate it.

Normalised rows keep fp16 from overflowing; the factor returns in the logits. `tq_kernels.decode.split` lists the
results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..common.schedule import LINE, ROTATED

ROTATE_COLUMNS = tl.constexpr(32)
"""Channels of a program of `rotate_query`, of two warps."""


class Queries(NamedTuple):
    """The queries of a step and what rotates them: arguments of `rotate_query`.

    Args:
        tokens: [S + 1] int32, where the new tokens of S sequences start: query s is that of sequence s if it has one
            token, else 0. Or `None`.
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
    new, scratch, row_tile, tile, plain_at, scale_at, DK: tl.constexpr, DKP: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Channels `tile` * COLUMNS and on of rows `row_tile` * BLOCK_R and on of this program's head of `Queries`."""
    head = tl.program_id(0)
    r = row_tile * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    # All loads at once: behind the stores below, these would wait for the new.queries first.
    matrix = tl.load(
        new.rotation + column[:, None] * DKP + d[None, :], mask=(column < DKP)[:, None] & (d < DKP)[None, :], other=0.0
    )
    factor = tl.load(new.channel_scales + head * DK + d, mask=d < DK, other=1.0).to(tl.float32)
    batch = (head // new.kv_heads).to(tl.int64)
    head_q = (head % new.kv_heads) * (new.rows // new.queries) + r // new.queries
    if new.tokens is None:
        offset = batch * new.stride_b + head_q.to(tl.int64) * new.stride_h + (r % new.queries) * new.stride_s  # [BR]
        inside = (r < new.rows)[None, :] & (d < DK)[:, None]
    else:
        token = tl.load(new.tokens + r % new.queries)
        single = tl.load(new.tokens + r % new.queries + 1) == token + 1
        offset = head_q.to(tl.int64) * new.stride_h + token.to(tl.int64) * new.stride_s  # [BR]
        inside = ((r < new.rows) & single)[None, :] & (d < DK)[:, None]
    q = tl.load(new.query + offset[None, :] + d[:, None], mask=inside, other=0.0).to(tl.float32)  # [BD, BR]
    # Power of two at least as large as the row's largest element: exponent of the float, plus one.
    exponent = (tl.max(tl.abs(q), 0).to(tl.int32, bitcast=True) >> 23) + 1  # [BR]
    exponent = tl.minimum(tl.maximum(exponent, 64), 190)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    q = (q * inverse[None, :]).to(tl.float16)
    if tile == 0:
        plain = (
            scratch.to(tl.pointer_type(tl.float16), bitcast=True)
            + (2 * LINE) * plain_at
            + (head * new.rows + r)[None, :] * DK
            + d[:, None]
        )
        tl.store(plain, q, mask=inside)
        tl.store(scratch + LINE * scale_at + head * new.rows + r, scale, mask=r < new.rows)
    if (head == 0) & (row_tile == 0) & (tile == 0):
        tl.store(scratch.to(tl.pointer_type(tl.int32), bitcast=True), 0)
    matrix = (matrix.to(tl.float32) * (1.0 / factor)[None, :]).to(tl.float16)
    if BLOCK_R == 1:  # no product for matrix units
        rotated = tl.sum(matrix.to(tl.float32) * tl.trans(q).to(tl.float32), 1, keep_dims=True) * (DKP**-0.5)  # [BC, 1]
    else:
        rotated = tl.dot(matrix, q) * (DKP**-0.5)  # [BC, BR]
    out = scratch.to(tl.pointer_type(tl.float16), bitcast=True) + ROTATED
    out += (head * new.rows + r)[None, :] * DKP + column[:, None]
    tl.store(out, rotated.to(tl.float16), mask=(column < DKP)[:, None] & (r < new.rows)[None, :])


@triton.jit(do_not_specialize=["rows", "queries", "kv_heads", "query_b", "query_h", "query_s", "plain_at", "scale_at"])
def rotate_query(
    query,  # [B, Hq, S, DK], last dimension contiguous
    rotation,  # [DKP, DKP] fp16, sqrt(DKP) R
    channel_scales,  # [P, DK] fp16
    scratch,
    rows,  # G * S
    queries,  # S
    kv_heads, query_b, query_h, query_s, plain_at, scale_at, DK: tl.constexpr, DKP: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write `query_rotated`, `query_plain` and `query_scale`. Grid: (P, rows / BLOCK_R, DKP / 32)."""
    if PDL:
        cuda.gdc_launch_dependents()
    new = Queries(query, rotation, channel_scales, None, rows, queries, kv_heads, query_b, query_h, query_s)
    row_tile, tile = tl.program_id(1), tl.program_id(2)
    rotate_rows(new, scratch, row_tile, tile, plain_at, scale_at, DK, DKP, BLOCK_D, BLOCK_R, ROTATE_COLUMNS)
