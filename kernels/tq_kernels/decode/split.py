"""Decode attention over packed blocks: every program attends to its share of the tokens, with rotated queries.

For queries q of one KV head (rows r = g S + s of its G query heads and S queries), R the rotation, block b, mean m_b:

    logit[t, r]   = scaling (key_scale[t] (key_level[t] . R q[r]) + m_b . R q[r])
    rotated[r, :] = sum_t softmax(logit)[t, r] value_scale[t] value_level[t, :]    (`reduce` rotates back)

The tokens are M and the query rows N of every matrix product: a GQA group of 4 then costs one 8-wide product instead of
one padded to 16. `tq_kernels.common.schedule` decides which program reads what (drawn in `README.md` beside this file).
Dense sinks and residual are read in jobs of 32 tokens, with queries that are not rotated. Logits are in base 2.

Scratch of a call is one float32 tensor (offsets in `tq_kernels.decode.plan.ScratchLayout`). With P = B * Hkv, ROWS =
G * S and TILE rows in a tile of rows:

    claims, a line of int32 · query_rotated [P, ROWS, `row_size`] fp16, loud channels last · query_plain [P, ROWS, DK]
    fp16 · query_scale [P, ROWS]
    lse [SLOTS, TILE] · partial [SLOTS, TILE, DM], DM = max(DV, DVP); SLOTS = workers + streams + streams * dense_splits
"""

import triton.language as tl
from triton.language.extra import cuda

from ..common.device import AMPERE, constants_of
from ..common.launcher import kernel
from ..common.schedule import (
    DENSE_TOKENS,
    LINE,
    START,
    DenseTokens,
    NewTokens,
    claim,
    counted,
    dense_jobs,
    dense_rows,
    first_block_column,
    first_jobs,
    packed_of,
    packed_share,
    sharing,
    stream_of,
    work_of,
)
from ..format import TOKENS
from .share import DecodeBlocks, DecodeRows, DecodeScratch, attend_share
from .tiles import DecodeMask, dense_job, per_lane, prefetch, prefetch_rows, store_dense


@kernel("mask_b:dense_splits")
def decode_split(
    scratch,
    packed,  # [B, Hkv, N, BLOCK_WORDS] int32; over pages [pages, Hkv, BLOCK_WORDS]
    num_blocks,  # [] int32; over pages [B]
    kv_rows,  # [B, Hkv, ring + sinks, DK + DV] in the model's dtype; over pages [pages, Hkv, ROWS, DK + DV]
    num_residual,  # [] int32, residual row j is in row (128 * num_blocks + j) % ring; over pages None, as up to `mask`
    num_sinks,  # [] int32
    mask,  # [B, 1, S or 1, T] uint8, 0 or 1
    key,  # [T, Hkv, DK], strides in units of 8 elements; None without pages, as up to `cu_seqlens_k`
    value,  # [T, Hkv, DV]
    block_table,  # [B, W] int32
    cu_seqlens_q,  # [B + 1] int32
    cu_seqlens_k,  # [B + 1] int32
    mask_b, mask_s, mask_t,
    rows,  # G * S; over pages G
    queries,  # S; over pages B
    kv_heads,
    blocks_b,  # strides in blocks; over pages from page to page
    blocks_h,
    ring, sinks,  # over pages None
    key_t, key_h, value_t, value_h,
    width,  # W
    scaling_log2,  # scaling * log2(e)
    cap_log2,  # softcap * log2(e)
    row_tiles,
    streams,  # P * row_tiles
    tile_rows,  # min(rows, BLOCK_R)
    plain_at, scale_at, lse_at, partial_at,
    dense_splits,  # slots of a stream for dense jobs: enough for full sinks and residual
    SHAPE: tl.constexpr,  # a `DecodeShape`
):  # fmt: skip
    """Attend to every worker's share: writes `partial` and `lse`. Grid: (workers,).

    With a block table, sequences differ in length.
    """
    C: tl.constexpr = constants_of(SHAPE)
    worker = tl.program_id(0)
    workers = tl.num_programs(0)
    to = DecodeScratch(scratch, scale_at, lse_at, partial_at, tile_rows)
    scratch_fp16 = scratch.to(tl.pointer_type(tl.float16), bitcast=True)
    local = tl.arange(0, C.BLOCK_R)
    store_rows = local < tile_rows
    if C.PDL:
        cuda.gdc_launch_dependents()
    claims = scratch.to(tl.pointer_type(tl.int32), bitcast=True)
    heads = kv_heads * row_tiles
    FIRST_BLOCK: tl.constexpr = 0 if block_table is None else first_block_column(C.SINKS, C.RING, C.ROWS)
    if block_table is None:
        blocks = tl.load(num_blocks)
        sink_count = tl.load(num_sinks)
        tokens = sink_count + tl.load(num_residual)
        per_stream, jobs = tl.maximum(counted(blocks), 1), dense_jobs(tokens)
        total = counted(blocks) * streams
    else:
        every = tl.arange(0, C.BLOCK_B)
        work = work_of(cu_seqlens_q, cu_seqlens_k, num_blocks, every, queries)
        total, jobs, sink_count = tl.sum(counted(work[0]), 0) * heads, tl.max(work[1], 0), 0
    total_jobs = jobs * streams
    sharers = sharing(workers, total, total_jobs)
    start, end = packed_share(worker, sharers, total)
    first_job, without_share = first_jobs(worker, workers, total, sharers)

    # Packed blocks: the worker's share, stream by stream.
    if block_table is None:
        ring_start = (blocks * TOKENS) % ring
        stream = start // per_stream
        batch, at = stream // heads, stream * per_stream
    else:
        batch, stream, at = stream_of(counted(work[0]), heads, start)
    # Find the first stream here and count on from it: a division takes longer than an addition.
    tile, kv_head = stream % row_tiles, stream % heads // row_tiles
    if C.ASM >= AMPERE:
        # Fetch the first block and dense rows now: queries are read before them.
        first = tl.maximum(start - at - START, 0)
        if block_table is None:
            home = batch.to(tl.int64) * blocks_b + kv_head.to(tl.int64) * blocks_h + first
            if (first_job >= 0) & (first_job < total_jobs):
                own_rows = kv_rows + (first_job // jobs // row_tiles).to(tl.int64) * (ring + sinks) * (C.DK + C.DV)
                own_dense = DenseTokens(own_rows, None, None, None, sinks, ring, ring_start, tokens, None, tokens)
                k_row, v_row = dense_rows(own_dense, first_job % jobs * DENSE_TOKENS + tl.arange(0, DENSE_TOKENS), C)
                prefetch_rows(k_row, C.DK)
                prefetch_rows(v_row, C.DV)
        else:
            column = block_table + batch.to(tl.int64) * width + FIRST_BLOCK + first
            home = tl.load(column, mask=start < end, other=0).to(tl.int64) * blocks_b + kv_head
        prefetch(packed + home * C.BLOCK_WORDS, C.BLOCK_WORDS // 32, start < end)

    while at < end:
        if block_table is None:
            own_blocks = batch.to(tl.int64) * blocks_b + kv_head.to(tl.int64) * blocks_h
            stream_blocks = DecodeBlocks(packed + own_blocks * C.BLOCK_WORDS, None, None)
        else:
            blocks = packed_of(num_blocks, batch, queries)
            pages = block_table + batch.to(tl.int64) * width + FIRST_BLOCK
            stream_blocks = DecodeBlocks(packed + kv_head * C.BLOCK_WORDS, pages, blocks_b)
        first = tl.maximum(start - at - START, 0)
        last = per_lane(tl.minimum(end - at - START, blocks), C.ASM)
        r = tile * C.BLOCK_R + local
        stream_rows = DecodeRows((batch * kv_heads + kv_head) * rows, r, r < rows, local, store_rows, queries)
        stream_mask = DecodeMask(mask + batch.to(tl.int64) * mask_b if C.MASK else mask, mask_s, mask_t)
        attend_share(
            to, stream_blocks, stream_mask, first, last,
            stream_rows, worker + stream, sink_count, scaling_log2, cap_log2, C,
        )  # fmt: skip
        at += counted(blocks)
        stream += 1
        tile, kv_head = tl.where(tile + 1 == row_tiles, 0, tile + 1), kv_head + (tile + 1 == row_tiles).to(tl.int32)
        batch, kv_head = batch + (kv_head == kv_heads).to(tl.int32), tl.where(kv_head == kv_heads, 0, kv_head)
        if block_table is not None:
            if (stream % heads == 0) & (at < end):
                # Numbers of blocks are read again: they would take registers through the loop over blocks.
                later = work_of(cu_seqlens_q, cu_seqlens_k, num_blocks, every, queries)
                batch, stream, at = stream_of(counted(later[0]), heads, at)

    # Dense tokens: jobs, claimed one after the other; over pages every stream counts as many as the longest has.
    job = first_job
    if job < 0:
        job = claim(claims, without_share, total_jobs)
    while job < total_jobs:
        stream, part = job // jobs, job % jobs
        head = stream // row_tiles
        batch, kv_head = head // kv_heads, head % kv_heads
        r = (stream % row_tiles) * C.BLOCK_R + local
        query = scratch_fp16 + (2 * LINE) * plain_at + (head * rows + r) * C.DK
        scale = scratch + LINE * scale_at + head * rows + r
        t = part * DENSE_TOKENS + tl.arange(0, DENSE_TOKENS)
        own_jobs, job_mask = jobs, DecodeMask(mask + batch.to(tl.int64) * mask_b if C.MASK else mask, mask_s, mask_t)
        if block_table is None:
            own_rows = kv_rows + head.to(tl.int64) * (ring + sinks) * (C.DK + C.DV)
            dense = DenseTokens(own_rows, None, None, None, sinks, ring, ring_start, tokens, None, tokens)
        else:
            blocks, own_jobs, token, past = work_of(cu_seqlens_q, cu_seqlens_k, num_blocks, batch, queries)
            own_key = key + (token.to(tl.int64) * (key_t * 8) + kv_head * (key_h * 8))
            own_value = value + (token.to(tl.int64) * (value_t * 8) + kv_head * (value_h * 8))
            history = past - blocks * TOKENS
            dense = DenseTokens(
                kv_rows, block_table + batch.to(tl.int64) * width, blocks_b, kv_head, C.SINKS, C.RING,
                (blocks * TOKENS) % C.RING, history, NewTokens(own_key, own_value, key_t * 8, value_t * 8), history + 1,
            )  # fmt: skip
        if part < own_jobs:
            out, dense_total, dense_maximum = dense_job(
                dense, t, blocks * TOKENS, query, scale, job_mask, queries, r, rows, scaling_log2, cap_log2, C
            )
            slot = workers + streams + stream * dense_splits + part
            store_dense(to, slot, local, store_rows, out, dense_total, dense_maximum, C)
        job = claim(claims, without_share, total_jobs)
