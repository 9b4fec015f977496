"""Prepare the queries of a decode step: normalise each row by a power of two, divide its channels by the factors of the
keys, and rotate it.

Normalised rows keep fp16 from overflowing; the factor returns in the logits. `tq_kernels.decode.split` lists the
results.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..common.schedule import LINE, ROTATED

ROTATE_COLUMNS = tl.constexpr(32)
"""Channels of a program of `rotate_query`, of two warps."""


@triton.jit
def rotate_rows(
    query,
    rotation,
    factors,
    scratch,
    tokens,  # [S + 1] int32, or None
    row_tile,
    tile,
    rows,
    queries,
    kv_heads,
    query_b,
    query_h,
    query_s,
    plain_at,
    scale_at,
    DK: tl.constexpr,
    DKP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Channels `tile` * COLUMNS and on of rows `row_tile` * BLOCK_R and on of this program's head. With `tokens`, where
    the new tokens of S sequences start, query s is that of sequence s if it has one token, else 0."""
    head = tl.program_id(0)
    r = row_tile * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    # All loads at once: behind the stores below, these would wait for the queries first.
    matrix = tl.load(
        rotation + column[:, None] * DKP + d[None, :], mask=(column < DKP)[:, None] & (d < DKP)[None, :], other=0.0
    )
    factor = tl.load(factors + head * DK + d, mask=d < DK, other=1.0).to(tl.float32)
    batch = (head // kv_heads).to(tl.int64)
    head_q = (head % kv_heads) * (rows // queries) + r // queries
    if tokens is None:
        offset = batch * query_b + head_q.to(tl.int64) * query_h + (r % queries) * query_s  # [BR]
        inside = (r < rows)[None, :] & (d < DK)[:, None]
    else:
        token = tl.load(tokens + r % queries)
        single = tl.load(tokens + r % queries + 1) == token + 1
        offset = head_q.to(tl.int64) * query_h + token.to(tl.int64) * query_s  # [BR]
        inside = ((r < rows) & single)[None, :] & (d < DK)[:, None]
    q = tl.load(query + offset[None, :] + d[:, None], mask=inside, other=0.0).to(tl.float32)  # [BD, BR]
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
            + (head * rows + r)[None, :] * DK
            + d[:, None]
        )
        tl.store(plain, q, mask=inside)
        tl.store(scratch + LINE * scale_at + head * rows + r, scale, mask=r < rows)
    if (head == 0) & (row_tile == 0) & (tile == 0):
        tl.store(scratch.to(tl.pointer_type(tl.int32), bitcast=True), 0)
    matrix = (matrix.to(tl.float32) * (1.0 / factor)[None, :]).to(tl.float16)
    if BLOCK_R == 1:  # no product for matrix units
        rotated = tl.sum(matrix.to(tl.float32) * tl.trans(q).to(tl.float32), 1, keep_dims=True) * (DKP**-0.5)  # [BC, 1]
    else:
        rotated = tl.dot(matrix, q) * (DKP**-0.5)  # [BC, BR]
    out = scratch.to(tl.pointer_type(tl.float16), bitcast=True) + ROTATED
    out += (head * rows + r)[None, :] * DKP + column[:, None]
    tl.store(out, rotated.to(tl.float16), mask=(column < DKP)[:, None] & (r < rows)[None, :])


@triton.jit(do_not_specialize=["rows", "queries", "kv_heads", "query_b", "query_h", "query_s", "plain_at", "scale_at"])
def rotate_query(
    query,  # [B, Hq, S, DK], last dimension contiguous
    rotation,  # [DKP, DKP] fp16, sqrt(DKP) R
    factors,  # [P, DK] fp16
    scratch,
    rows,  # G * S
    queries,  # S
    kv_heads,
    query_b,
    query_h,
    query_s,
    plain_at,
    scale_at,
    DK: tl.constexpr,
    DKP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write `query_rotated`, `query_plain` and `query_scale`. Grid: (P, rows / BLOCK_R, DKP / 32)."""
    if PDL:
        cuda.gdc_launch_dependents()
    rotate_rows(
        query,
        rotation,
        factors,
        scratch,
        None,
        tl.program_id(1),
        tl.program_id(2),
        rows,
        queries,
        kv_heads,
        query_b,
        query_h,
        query_s,
        plain_at,
        scale_at,
        DK,
        DKP,
        BLOCK_D,
        BLOCK_R,
        ROTATE_COLUMNS,
    )
