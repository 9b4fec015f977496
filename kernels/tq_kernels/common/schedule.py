"""Schedule of a decode step: every program of `tq_kernels.decode.split` takes an equal share of all packed blocks, then
dense tokens that are left (`decode/README.md` draws it).

A *stream* is one KV head of one batch row and one tile of its query rows. The packed blocks of all streams form one
sequence, stream after stream, and each of the W resident programs (*workers*) takes one contiguous share of it, so all
have the same work whatever the shape. With few blocks, the first workers take one or two each. A share may span
streams: worker w writes its partial result for stream s to slot w + s. Both grow along the sequence, and one of them
with each new piece: slots are unique, and the pieces of stream s lie in consecutive slots. Each stream counts as if it
began with `START` more blocks, because a program that goes on to another stream has to begin anew.

The dense tokens (sinks and residual) are cut into jobs of 32 tokens of one stream. Workers without a share begin
with one each; workers that are done claim the others. Where shares are short, the last workers have none. Programs are
not equally fast: a multiprocessor serves its first ones first, and they are done when a fifth of the time is left.
Their jobs wait for memory while the others compute. Longer shares for the first half of the workers cost more than they
win (1 x 128k 60.0 us, not 56.5, with an eighth more).

Over the pages of many sequences the same holds, but streams differ in length: those of a sequence have its blocks and
its jobs, and those of a sequence without exactly one new token have none. Every program adds up the sequences' lengths
to find the stream of its first block, or of a job.
"""

from collections import namedtuple

import triton
import triton.language as tl

from ..format import MOST_LOUD, TOKENS, due_blocks_in_kernel


@triton.jit
def fetch(pointers):
    """Start to move the lines at `pointers` to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def lengths(cu_seqlens_q, cu_seqlens_k, sequence, count):
    """First new token, number of new and cached tokens of sequences, int32; no tokens from `count` on."""
    exists = sequence < count
    first = tl.load(cu_seqlens_q + sequence, mask=exists, other=0)
    new = tl.load(cu_seqlens_q + sequence + 1, mask=exists, other=0) - first
    before = tl.load(cu_seqlens_k + sequence, mask=exists, other=0)
    return first, new, tl.load(cu_seqlens_k + sequence + 1, mask=exists, other=0) - before - new


@triton.jit
def located(amounts, index):
    """Find the segment of item `index`, among segments of `amounts` [n] items, and the start of that segment."""
    ends = tl.cumsum(amounts, 0)
    return tl.sum((ends <= index).to(tl.int32), 0), tl.max(tl.where(ends <= index, ends, 0), 0)


Mask = namedtuple("Mask", "start b s t", defaults=(None,) * 4)
"""Pointer to a mask [B, 1, S or 1, T] uint8, 0 or 1, and strides over sequences, queries and tokens; or `None`."""


StreamBlocks = namedtuple("StreamBlocks", "head block_table page_blocks")
"""Packed blocks of a stream.

Args:
    head: Pointer to the KV head's first block, int32; with a block table to its block in page 0.
    block_table: Pointer to the sequence's pages, int32, or `None`: blocks follow one another.
    page_blocks: Number of blocks from a page to the next.
"""


BlockParts = namedtuple("BlockParts", "key_words loud value_words scales means")
"""Pointers to the parts of a block (`tq_kernels.layout`)."""


@triton.jit
def parts_of(block, KEY: tl.constexpr, VALUE: tl.constexpr, LOUD: tl.constexpr):
    """Parts of the block at pointer `block`: codes of KEY and VALUE bits a token, and LOUD channels of keys."""
    loud = block + 4 * KEY
    value_words = loud + 32 * LOUD
    scales = value_words + 4 * VALUE
    return BlockParts(block, loud, value_words, scales, (scales + TOKENS).to(tl.pointer_type(tl.float16), bitcast=True))


@triton.jit
def ring_rows(
    rows, pages, row, valid, kv_head, page_blocks, DIM: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Pointers to rows `row` [n] of a ring: keys, and their values behind them.

    Args:
        rows: Pointer to the layer's first page, of the model's dtype.
        pages: Pointer to the sequence's pages.
        valid: [n] whether the row exists; pages of others are not read.
        DIM: Elements of a row: channels of a key and of a value.
    """
    SIZE: tl.constexpr = BLOCK_WORDS * 32 // rows.dtype.element_ty.primitive_bitwidth
    page = tl.load(pages + row // ROWS, mask=valid, other=0).to(tl.int64)
    return rows + (page * page_blocks + kv_head) * SIZE + row % ROWS * DIM


@triton.jit
def row_of(token, SINKS: tl.constexpr, RING: tl.constexpr):
    """Row of a sequence's token: rows of its ring come first, then those of its sink page."""
    return tl.where(token < SINKS, RING + token, (token - SINKS) % RING)


@triton.jit
def first_block_column(SINKS: tl.constexpr, RING: tl.constexpr, ROWS: tl.constexpr):
    """Column of block 0 in a block table (see `Sequences`)."""
    return RING // ROWS + (1 if SINKS else 0) + 1


NewTokens = namedtuple("NewTokens", "key value key_t value_t")
"""Pointers to key and value of the first new token of a KV head, and strides over tokens in elements."""


DenseTokens = namedtuple("DenseTokens", "rows pages page_blocks kv_head sinks ring start history new count")
"""Dense tokens of a KV head: sinks, then those after its packed blocks, then new ones.

Args:
    rows: Pointer to the head's rows `[ring + sinks, DK + DV]`; with pages to the layer's first page.
    pages: Pointer to the sequence's pages, or `None`, as the next two.
    page_blocks: Blocks from a page to the next.
    kv_head: Number of the head.
    sinks, ring: Rows of sinks and of the ring.
    start: Row of the first token after the sinks.
    history: Number of tokens in rows.
    new: `NewTokens` after these, or `None`.
    count: Number of tokens.
"""


@triton.jit
def row_choice(condition, first, second, ALIGNED: tl.constexpr):
    """Pointers to rows: `first` where a `condition` is true, else `second`. ALIGNED: whether all are multiples of 16
    bytes. After a choice, Triton 3.8 and 3.9 do not know, and load number by number."""
    row = tl.where(condition, first, second)
    if ALIGNED:
        row = tl.multiple_of(row, 16)
    return row


@triton.jit
def dense_rows(dense: DenseTokens, t, C: tl.constexpr, ALIGNED: tl.constexpr = True):
    """Pointers [n] to keys and values of dense tokens `t` [n]; for absent tokens, to the last one. C has DK, DV, and
    over pages ROWS and BLOCK_WORDS; ALIGNED is that of `row_choice`, between rows and new tokens."""
    near = tl.minimum(t, dense.count - 1)
    row = dense.start + near - dense.sinks
    row = tl.where(row >= dense.ring, row - dense.ring, row)
    row = tl.where(near < dense.sinks, dense.ring + near, row)
    if dense.pages is None:
        k_row = dense.rows + row * (C.DK + C.DV)
    else:
        old = t < dense.history
        k_row = ring_rows(
            dense.rows, dense.pages, row, old, dense.kv_head, dense.page_blocks, C.DK + C.DV, C.ROWS, C.BLOCK_WORDS
        )
    v_row = k_row + C.DK
    if dense.new is not None:
        fresh = (near - dense.history).to(tl.int64)
        old = near < dense.history
        k_row = row_choice(old, k_row, dense.new.key + fresh * dense.new.key_t, ALIGNED)
        v_row = row_choice(old, v_row, dense.new.value + fresh * dense.new.value_t, ALIGNED)
    return k_row, v_row


@triton.jit
def copy_rows(
    key, value, i, at, valid, key_stride, value_stride, DK: tl.constexpr, DV: tl.constexpr, TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
):  # fmt: skip
    """Copy keys `i` [n] int64 from pointer `key` on, and values likewise, to the rows at pointers `at` [n]."""
    dk, dv = tl.arange(0, TILE_K)[None, :], tl.arange(0, TILE_V)[None, :]
    has_k, has_v = valid[:, None] & (dk < DK), valid[:, None] & (dv < DV)
    k = tl.load(key + (i * key_stride)[:, None] + dk, mask=has_k)
    v = tl.load(value + (i * value_stride)[:, None] + dv, mask=has_v)
    tl.store(at[:, None] + dk, k, mask=has_k)
    tl.store(at[:, None] + (DK + dv), v, mask=has_v)


@triton.jit
def completed(new, past, SINKS: tl.constexpr):
    """Number of blocks that new tokens complete."""
    return due_blocks_in_kernel(past + new, SINKS, 0) - due_blocks_in_kernel(past, SINKS, 0)


@triton.jit
def write_counts(counts, length, sinks, blocks, rows, pending):
    """Write what a preallocated store holds to `counts` [5, 4] and `length` (`DeviceCounts` in `tq_hf/tensors/`)."""
    tl.store(counts, sinks)
    tl.store(counts + 1 * 4, blocks)
    tl.store(counts + 2 * 4, rows)
    tl.store(counts + 3 * 4, pending)
    tl.store(counts + 4 * 4, 0)
    tl.store(length, (sinks + blocks * TOKENS + rows).to(tl.int64))


LINE = tl.constexpr(32)
"""Unit of offsets into the scratch tensor, 32 float32: the compiler then knows them to be aligned."""
ROTATED = tl.constexpr(2 * 32)
"""Start of the rotated queries in scratch, in fp16: behind a line for the number of claimed jobs."""
DENSE_TOKENS = tl.constexpr(32)
"""Tokens of a dense job. With 64, 1 x 8k takes 18.4 us instead of 19.0, but 1 x 32k 27.0, not 26.3 (4 bits, H200)."""
START = tl.constexpr(1)
"""Number of blocks that a stream counts beyond its own."""


@triton.constexpr_function
def row_size(dkp, loud):
    """Numbers of a rotated query in scratch: its `dkp` channels, then its loud ones."""
    return dkp + MOST_LOUD if loud else dkp


@triton.jit
def dense_jobs(dense_tokens):
    """Number of dense jobs of one stream."""
    return (dense_tokens + DENSE_TOKENS - 1) // DENSE_TOKENS


@triton.jit
def counted(blocks):
    """Number of blocks that a stream of `blocks` blocks counts as."""
    return tl.where(blocks > 0, blocks + START, 0)


@triton.jit
def sharing(workers, total, jobs):
    """Number of workers that share `total` blocks: the first ones. The others begin with one of `jobs` dense jobs each:
    a job takes longer than a second block, and must not come after one. 1 x 8k takes 17.5 us, not 18.8 (4 bits, H200);
    with two blocks and more a share it makes no difference."""
    return tl.where(total < 2 * workers, tl.maximum(workers - jobs, workers // 2), workers)


@triton.jit
def share_start(worker, workers, total):
    """Start of a worker's share of `total` blocks, the end of the one before. The first shares have a block more."""
    return worker * (total // workers) + tl.minimum(worker, total % workers)


@triton.jit
def packed_share(worker, sharers, total):
    """A worker's first block of `total` and the one after its last; no blocks from worker `sharers` on."""
    start = share_start(tl.minimum(worker, sharers), sharers, total)
    return start, share_start(tl.minimum(worker + 1, sharers), sharers, total)


@triton.jit
def holder(block, workers, total):
    """Worker with `block` in its share."""
    each = total // workers
    larger = total % workers
    below = larger * (each + 1)
    return tl.where(block < below, block // (each + 1), larger + (block - below) // tl.maximum(each, 1))


@triton.jit
def first_jobs(worker, workers, total, sharers):
    """Job a worker begins with, less than 0 if it is one of the `sharers` of `total` blocks and has a share; and the
    number of workers that begin with a job."""
    # With fewer blocks than sharers, the first have one each.
    without_share = workers - tl.minimum(sharers, total)
    return worker - (workers - without_share), without_share


@triton.jit
def claim(claims, without_share, jobs):
    """Claim the next of `jobs` jobs, behind those that workers begin with; if these are all, do not ask (0.5 us)."""
    job = jobs
    if without_share < jobs:
        job = without_share + tl.atomic_add(claims, 1, sem="relaxed")
    return job


@triton.jit
def packed_of(packed_blocks, sequence, count):
    """Number of blocks of sequences that are read packed; 0 from `count` on."""
    return tl.load(packed_blocks + sequence, mask=sequence < count, other=0)


@triton.jit
def work_of(cu_seqlens_q, cu_seqlens_k, packed_blocks, sequence, count):
    """Work of each stream of sequences over pages: number of packed blocks and of dense jobs; 0 without exactly one new
    token. Then the sequences' first new token and number of cached ones."""
    first, new, past = lengths(cu_seqlens_q, cu_seqlens_k, sequence, count)
    blocks = tl.where(new == 1, packed_of(packed_blocks, sequence, count), 0)
    jobs = tl.where(new == 1, dense_jobs(past - blocks * TOKENS + 1), 0)
    return blocks, jobs, first, past


@triton.jit
def stream_of(amounts, heads, index):
    """Find the stream of item `index`, where the streams of sequence b, `heads` many, have `amounts[b]` [n] items each:
    its sequence, its number, and its first item."""
    sequence, before = located(amounts * heads, index)
    each = tl.maximum(tl.sum(tl.where(tl.arange(0, amounts.shape[0]) == sequence, amounts, 0), 0), 1)
    within = (index - before) // each
    return sequence, sequence * heads + within, before + within * each


DecodeTensors = namedtuple(
    "DecodeTensors",
    "scratch packed num_blocks kv_rows num_residual num_sinks mask mask_b mask_s mask_t key value block_table "
    "cu_seqlens_q cu_seqlens_k",
)
"""Tensors of `decode_split`.

Args:
    packed: [B, Hkv, N, BLOCK_WORDS] int32; over pages [pages, Hkv, BLOCK_WORDS].
    num_blocks: [] int32; over pages [B].
    kv_rows: [B, Hkv, ring + sinks, DK + DV] in the model's dtype; over pages [pages, Hkv, ROWS, DK + DV]. Residual row
        j is in row (128 * `num_blocks` + j) % ring.
    num_residual, num_sinks: [] int32; over pages `None`.
    mask, mask_b, mask_s, mask_t: As in `Mask`.
    key, value, block_table, cu_seqlens_q, cu_seqlens_k: Over pages [T, Hkv, DK], [T, Hkv, DV], [B, W] int32, [B + 1]
        and [B + 1] int32; else `None`.
"""


DecodeNumbers = namedtuple(
    "DecodeNumbers",
    "rows queries count kv_heads heads blocks_b blocks_h ring sinks key_t key_h value_t value_h width scaling_log2 "
    "cap_log2 row_tiles streams tile_rows workers dense_splits plain_at scale_at lse_at partial_at",
)
"""Numbers of the kernels of a step.

Args:
    rows: G * S; over pages G.
    queries, count: S, and `None`; over pages number of new tokens, and of sequences.
    heads: Tiles of rows of all KV heads, `kv_heads * row_tiles`.
    blocks_b, blocks_h: Strides in blocks; over pages from page to page, and `None`, as `ring` and `sinks`.
    key_t, key_h, value_t, value_h, width: Strides of new tokens in units of 8 elements, and of a block table; `None`
        without pages.
    scaling_log2, cap_log2: Scaling and softcap, times log2(e).
    streams, tile_rows: B * Hkv * `row_tiles`, min(`rows`, BLOCK_R).
    dense_splits: Slots of a stream for dense jobs: enough for full sinks and residual.
    plain_at, scale_at, lse_at, partial_at: Places in scratch, as in `tq_kernels.decode.plan.ScratchLayout`.
"""


@triton.jit
def step_work(a: DecodeTensors, n: DecodeNumbers, BLOCK_B: tl.constexpr):
    """Work of a step: numbers of packed blocks (over pages of each sequence [BB]), of sinks and of dense tokens (over
    pages 0), of all streams' blocks as `counted`, and of dense jobs of a stream (over pages of the longest)."""
    if a.block_table is None:
        blocks, sinks = tl.load(a.num_blocks), tl.load(a.num_sinks)
        tokens = sinks + tl.load(a.num_residual)
        jobs = dense_jobs(tokens)
        return blocks, sinks, tokens, counted(blocks) * n.streams, jobs
    else:
        every = tl.arange(0, BLOCK_B)
        blocks, jobs, _, _ = work_of(a.cu_seqlens_q, a.cu_seqlens_k, a.num_blocks, every, n.count)
        return blocks, 0, 0, tl.sum(counted(blocks), 0) * n.heads, tl.max(jobs, 0)


@triton.jit
def stream_at(a: DecodeTensors, n: DecodeNumbers, blocks, start):
    """Find the stream of counted block `start`, with `blocks` of `step_work`; results as of `stream_of`."""
    if a.block_table is None:
        per_stream = tl.maximum(counted(blocks), 1)
        stream = start // per_stream
        return stream // n.heads, stream, stream * per_stream
    else:
        return stream_of(counted(blocks), n.heads, start)


@triton.jit
def next_sequence(a: DecodeTensors, n: DecodeNumbers, batch, stream, at, end, BLOCK_B: tl.constexpr):
    """Over pages find the first stream of the next sequence with blocks, where `stream` begins a sequence."""
    if (stream % n.heads == 0) & (at < end):
        # Numbers of blocks are read again: they would take registers through the loop over blocks.
        every = tl.arange(0, BLOCK_B)
        blocks, _, _, _ = work_of(a.cu_seqlens_q, a.cu_seqlens_k, a.num_blocks, every, n.count)
        batch, stream, at = stream_of(counted(blocks), n.heads, at)
    return batch, stream, at


@triton.jit
def dense_of_pages(a: DecodeTensors, n: DecodeNumbers, batch, kv_head, C: tl.constexpr):
    """Dense tokens of a sequence with one new token, over pages, its number of packed blocks, and of dense jobs (0 with
    another number of new tokens)."""
    blocks, jobs, token, past = work_of(a.cu_seqlens_q, a.cu_seqlens_k, a.num_blocks, batch, n.count)
    key = a.key + (token.to(tl.int64) * (n.key_t * 8) + kv_head * (n.key_h * 8))
    value = a.value + (token.to(tl.int64) * (n.value_t * 8) + kv_head * (n.value_h * 8))
    history = past - blocks * TOKENS
    dense = DenseTokens(
        a.kv_rows, a.block_table + batch.to(tl.int64) * n.width, n.blocks_b, kv_head, C.SINKS, C.RING,
        (blocks * TOKENS) % C.RING, history, NewTokens(key, value, n.key_t * 8, n.value_t * 8), history + 1,
    )  # fmt: skip
    return dense, blocks, jobs
