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

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..common.device import AMPERE, constants_of
from ..common.schedule import (
    DENSE_TOKENS,
    LINE,
    START,
    DecodeNumbers,
    DecodeTensors,
    DenseTokens,
    StreamBlocks,
    claim,
    counted,
    dense_of_pages,
    dense_rows,
    first_block_column,
    first_jobs,
    next_sequence,
    packed_of,
    packed_share,
    sharing,
    step_work,
    stream_at,
)
from ..common.softmax import log2_sum
from ..format import TOKENS
from .share import DecodeRows, store_share
from .tiles import dense_job, per_lane, prefetch, prefetch_rows, store_partial


@triton.jit
def _prefetch(
    a: DecodeTensors, n: DecodeNumbers, batch, kv_head, first, start, end, tokens, ring_start, job, jobs,
    C: tl.constexpr,
):  # fmt: skip
    """Fetch a worker's first block and, without pages, rows of its first dense job: queries are read before them."""
    if a.block_table is None:
        home = batch.to(tl.int64) * n.blocks_b + kv_head.to(tl.int64) * n.blocks_h + first
        if (job >= 0) & (job < jobs * n.streams):
            rows = a.kv_rows + (job // jobs // n.row_tiles).to(tl.int64) * (n.ring + n.sinks) * (C.DK + C.DV)
            dense = DenseTokens(rows, None, None, None, n.sinks, n.ring, ring_start, tokens, None, tokens)
            k_row, v_row = dense_rows(dense, job % jobs * DENSE_TOKENS + tl.arange(0, DENSE_TOKENS), C)
            prefetch_rows(k_row, C.DK)
            prefetch_rows(v_row, C.DV)
    else:
        column = a.block_table + batch.to(tl.int64) * n.width + first_block_column(C.SINKS, C.RING, C.ROWS) + first
        home = tl.load(column, mask=start < end, other=0).to(tl.int64) * n.blocks_b + kv_head
    prefetch(a.packed + home * C.BLOCK_WORDS, C.BLOCK_WORDS // 32, start < end)


@triton.jit
def _packed_part(
    a: DecodeTensors, n: DecodeNumbers, local, stored, blocks, sink_count, batch, kv_head, tile, stream, at, start,
    end, C: tl.constexpr,
):  # fmt: skip
    """Attend to the packed blocks `start` to `end` of a worker's share, from `stream` on, which begins at `at`; without
    pages a stream has `blocks` blocks."""
    while at < end:
        own = blocks if a.block_table is None else packed_of(a.num_blocks, batch, n.count)
        if a.block_table is None:
            own_blocks = batch.to(tl.int64) * n.blocks_b + kv_head.to(tl.int64) * n.blocks_h
            stream_blocks = StreamBlocks(a.packed + own_blocks * C.BLOCK_WORDS, None, None)
        else:
            pages = a.block_table + batch.to(tl.int64) * n.width + first_block_column(C.SINKS, C.RING, C.ROWS)
            stream_blocks = StreamBlocks(a.packed + kv_head * C.BLOCK_WORDS, pages, n.blocks_b)
        first = tl.maximum(start - at - START, 0)
        last = per_lane(tl.minimum(end - at - START, own), C.ASM)
        r = tile * C.BLOCK_R + local
        rows = DecodeRows((batch * n.kv_heads + kv_head) * n.rows, r, r < n.rows)
        mask_at = a.mask + batch.to(tl.int64) * a.mask_b if C.MASK else None
        store_share(
            a, n, stream_blocks, mask_at, first, last, rows, tl.program_id(0) + stream, local, stored, sink_count, C
        )
        at += counted(own)
        stream += 1
        tile, kv_head = tl.where(tile + 1 == n.row_tiles, 0, tile + 1), kv_head + (tile + 1 == n.row_tiles).to(tl.int32)
        batch, kv_head = batch + (kv_head == n.kv_heads).to(tl.int32), tl.where(kv_head == n.kv_heads, 0, kv_head)
        if a.block_table is not None:
            batch, stream, at = next_sequence(a, n, batch, stream, at, end, C.BLOCK_B)


@triton.jit
def _dense_part(
    a: DecodeTensors, n: DecodeNumbers, local, stored, job, jobs, blocks, tokens, ring_start, C: tl.constexpr
):
    """Attend to the dense tokens of job `job`."""
    stream, part = job // jobs, job % jobs
    head = stream // n.row_tiles
    batch, kv_head = head // n.kv_heads, head % n.kv_heads
    r = (stream % n.row_tiles) * C.BLOCK_R + local
    plain = a.scratch.to(tl.pointer_type(tl.float16), bitcast=True) + (2 * LINE) * n.plain_at
    query, scale = plain + (head * n.rows + r) * C.DK, a.scratch + LINE * n.scale_at + head * n.rows + r
    t = part * DENSE_TOKENS + tl.arange(0, DENSE_TOKENS)
    if a.block_table is None:
        rows = a.kv_rows + head.to(tl.int64) * (n.ring + n.sinks) * (C.DK + C.DV)
        dense, own_jobs = DenseTokens(rows, None, None, None, n.sinks, n.ring, ring_start, tokens, None, tokens), jobs
    else:
        dense, blocks, own_jobs = dense_of_pages(a, n, batch, kv_head, C)
    if part < own_jobs:
        mask_at = a.mask + batch.to(tl.int64) * a.mask_b if C.MASK else None
        out, total, maximum = dense_job(a, n, dense, t, blocks * TOKENS, query, scale, mask_at, r, C)
        slot = tl.num_programs(0) + n.streams + stream * n.dense_splits + part
        store_partial(a, n, slot, local, stored, (out,), total, log2_sum(maximum, total), 1.0, 1, C.DV, 8, C)


@triton.jit
def decode_split(tensors, n: DecodeNumbers, SHAPE: tl.constexpr):
    """Attend to every worker's share: writes `partial` and `lse`. Grid: (workers,).

    With a block table, sequences differ in length. `tensors` are `DecodeTensors`, SHAPE is a `DecodeShape`.
    """
    C: tl.constexpr = constants_of(SHAPE)
    a = DecodeTensors(*tensors)
    worker, workers = tl.program_id(0), tl.num_programs(0)
    local = tl.arange(0, C.BLOCK_R)  # passed on: in layouts of each phase it takes registers that sm_80 lacks
    stored = local < n.tile_rows
    if C.PDL:
        cuda.gdc_launch_dependents()
    blocks, sink_count, tokens, total, jobs = step_work(a, n, C.BLOCK_B)
    total_jobs = jobs * n.streams
    sharers = sharing(workers, total, total_jobs)
    start, end = packed_share(worker, sharers, total)
    job, without_share = first_jobs(worker, workers, total, sharers)
    ring_start = None if n.ring is None else (blocks * TOKENS) % n.ring

    # Find the first stream here and count on from it: a division takes longer than an addition.
    batch, stream, at = stream_at(a, n, blocks, start)
    tile, kv_head = stream % n.row_tiles, stream % n.heads // n.row_tiles
    if C.ASM >= AMPERE:
        first = tl.maximum(start - at - START, 0)
        _prefetch(a, n, batch, kv_head, first, start, end, tokens, ring_start, job, jobs, C)
    _packed_part(a, n, local, stored, blocks, sink_count, batch, kv_head, tile, stream, at, start, end, C)

    # Dense tokens: jobs, claimed one after the other; over pages every stream counts as many as the longest has.
    claims = a.scratch.to(tl.pointer_type(tl.int32), bitcast=True)
    if job < 0:
        job = claim(claims, without_share, total_jobs)
    while job < total_jobs:
        _dense_part(a, n, local, stored, job, jobs, blocks, tokens, ring_start, C)
        job = claim(claims, without_share, total_jobs)
