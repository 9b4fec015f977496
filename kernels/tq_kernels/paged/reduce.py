"""Merge the partial results of `tq_kernels.paged.split`: `tq_kernels.decode.reduce` for streams of different length."""

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..common.sequences import lengths
from ..decode.reduce import merge_stream
from ..decode.schedule import holder
from ..format import TOKENS
from .schedule import dense_jobs_of, dense_slots, stream_items


@triton.jit(do_not_specialize="tokens count kv_heads groups row_tiles tile_rows workers lse_at partial_at".split())
def reduce_splits_paged(
    scratch,
    rotation,  # [DVP, DVP] fp16, sqrt(DVP) R
    factors,  # [Hkv, DV] fp16
    s_aux,  # [Hq], any float dtype
    cu_q,  # [B + 1] int32
    cu_k,  # [B + 1] int32
    out,  # [T, Hq, DV], contiguous
    tokens,  # T
    count,  # B
    kv_heads,
    groups,  # G
    row_tiles,
    tile_rows,
    workers,
    lse_at,
    partial_at,
    FILL: tl.constexpr,  # no sequence has more than one token: write 0 for tokens of nobody
    SINKS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILE_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DENSE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOT_R: tl.constexpr,
    HAS_AUX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (streams, tile_rows / BLOCK_R, DV / BLOCK_C); BLOCK_R and DOT_R as for `reduce_splits`."""
    stream = tl.program_id(0)
    heads = kv_heads * row_tiles
    sequence = stream // heads
    kv_head = stream % heads // row_tiles
    local = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    g = stream % row_tiles * TILE_R + local  # [BR]
    row_mask = (local < tile_rows) & (g < groups)
    d = tl.arange(0, BLOCK_D)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    # Before the wait: the matrix and the lengths do not depend on the kernel in front.
    matrix = tl.load(
        rotation + d[None, :] * DVP + c[:, None], mask=(d < DVP)[None, :] & (c < DVP)[:, None], other=0.0
    )  # [BC out, BD in]
    factor = tl.load(factors + kv_head * DV + c, mask=c < DV, other=1.0).to(tl.float32)  # [BC]
    b = tl.arange(0, BLOCK_B)
    _, new, past = lengths(cu_q, cu_k, b, count)
    items = stream_items(new, past, SINKS) * heads
    total = tl.sum(items, 0)
    at = tl.sum(tl.where(b < sequence, items, 0), 0)
    token, new, past = lengths(cu_q, cu_k, sequence, count)
    at += stream % heads * stream_items(new, past, SINKS)
    blocks = tl.where(new == 1, past // TOKENS, 0)
    first = holder(at, workers, total) + stream
    last = tl.where(blocks > 0, holder(at + blocks - 1, workers, total) + stream + 1, first)
    dense_first = workers + heads * count + stream * dense_slots(SINKS)
    dense_last = dense_first + tl.where(new == 1, dense_jobs_of(past, SINKS), 0)
    if FILL:
        # Of all sequences before this one, as many as have no token are ahead of it in taking those of nobody.
        token = tl.where(new == 1, token, tl.load(cu_q + count) + sequence - token)
        writes = token < tokens
    else:
        writes = new == 1
    if PDL:
        cuda.gdc_wait()

    head_q = kv_head * groups + g  # [BR]
    result = merge_stream(
        scratch,
        matrix,
        factor,
        s_aux,
        first,
        last,
        dense_first,
        dense_last,
        head_q,
        local,
        row_mask,
        d,
        c,
        tile_rows,
        lse_at,
        partial_at,
        DV,
        DVP,
        BLOCK_D,
        BLOCK_C,
        BLOCK_S,
        BLOCK_DENSE,
        BLOCK_R,
        DOT_R,
        HAS_AUX,
    )
    to = (token.to(tl.int64) * (kv_heads * groups) + head_q) * DV  # [BR]
    tl.store(
        out + to[:, None] + c[None, :],
        result.to(out.dtype.element_ty),
        mask=(row_mask & writes)[:, None] & (c < DV)[None, :],
    )
