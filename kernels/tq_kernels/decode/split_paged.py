"""Decode attention over the pages of many sequences: `tq_kernels.decode.split`, block by block from a table.

Shares are of `tq_kernels.common.schedule`. Scratch is that of `decode_split` for one batch row: row g B + b of a KV
head is query g of sequence b; every stream has slots for the dense jobs of its sinks and a whole ring.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..common.schedule import DENSE_TOKENS, LINE, dense_slots, share, stream_items
from ..common.sequences import dense_rows, lengths, sinks_of
from ..common.softmax import log2_sum
from ..format import TOKENS
from .dense import Mask, dense_logits, dense_states, dense_sums
from .share import Blocks, Rows, Scratch, attend_share
from .tiles import Shape, per_lane, prefetch


@triton.jit(
    do_not_specialize=(
        "count kv_heads groups key_t key_h value_t value_h width page_blocks scaling_log2 cap_log2 row_tiles tile_rows "
        "plain_at scale_at lse_at partial_at"
    ).split()
)
def decode_split_paged(
    scratch,
    key_words,  # [pages, Hkv, 128 * DIMP * KEY_BITS / 32] int32
    value_words,  # [pages, Hkv, 128 * DIMP * VALUE_BITS / 32] int32
    scales,  # [pages, Hkv, 128] int32
    key_means,  # [pages, Hkv, DIMP] fp16
    rows,  # [pages, Hkv, 2, ROWS, DIM] in the model's dtype
    key,  # [T, Hkv, DIM], strides in units of 8 elements
    value,  # [T, Hkv, DIM]
    block_table,  # [B, W] int32
    cu_seqlens_q,  # [B + 1] int32
    cu_seqlens_k,  # [B + 1] int32
    count,  # B
    kv_heads,
    groups,  # G
    key_t,
    key_h,
    value_t,
    value_h,
    width,  # W
    page_blocks,
    scaling_log2,  # scaling * log2(e)
    cap_log2,  # softcap * log2(e)
    row_tiles,
    tile_rows,  # min(G, BLOCK_R)
    plain_at,
    scale_at,
    lse_at,
    partial_at,
    DIM: tl.constexpr,
    DIMP: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    KEY_CHUNKS: tl.constexpr,
    VALUE_CHUNKS: tl.constexpr,
    BLOCK_KC: tl.constexpr,
    BLOCK_VC: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DM: tl.constexpr,
    BLOCK_MEAN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SMALL: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every worker's share: `partial` and `lse`. Grid: (workers,)."""
    worker = tl.program_id(0)
    workers = tl.num_programs(0)
    DM: tl.constexpr = DIM if DIM > DIMP else DIMP
    FIRST_BLOCK: tl.constexpr = TOKENS // ROWS + (1 if SINKS else 0)
    C: tl.constexpr = Shape(
        DIM, DIM, DIMP, DIMP, DM, KEY_BITS, VALUE_BITS, HAS_MEAN, False, 0, SOFTCAP, KEY_CHUNKS, VALUE_CHUNKS,
        BLOCK_KC, BLOCK_VC, BLOCK_DK, BLOCK_DM, BLOCK_MEAN, BLOCK_R, SMALL, ASM, BLOCK_WORDS, SINKS,
    )  # fmt: skip
    if PDL:
        cuda.gdc_launch_dependents()
    # Before the wait: nothing that the kernel in front writes, which is queries and rows of tokens that are read here
    # from `key` and `value`.
    scratch_fp16 = scratch.to(tl.pointer_type(tl.float16), bitcast=True)
    local = tl.arange(0, BLOCK_R)
    store_rows = local < tile_rows
    heads = kv_heads * row_tiles

    start, end, stream, at = share(worker, workers, cu_seqlens_q, cu_seqlens_k, count, heads, SINKS, BLOCK_B)
    if ASM:
        # The share's first block is on its way while queries are read.
        sequence = stream // heads
        _, _, past = lengths(cu_seqlens_q, cu_seqlens_k, sequence, count)
        starts_packed = (start < end) & (start - at < past // TOKENS)
        page = tl.load(
            block_table + sequence.to(tl.int64) * width + FIRST_BLOCK + (start - at), mask=starts_packed, other=0
        )
        first_block = page.to(tl.int64) * page_blocks + stream % heads // row_tiles
        prefetch(key_words + first_block * BLOCK_WORDS, DIMP * KEY_BITS // 8, starts_packed)
        prefetch(value_words + first_block * BLOCK_WORDS, DIMP * VALUE_BITS // 8, starts_packed)
    if PDL:
        cuda.gdc_wait()

    while at < end:
        sequence = stream // heads
        kv_head = stream % heads // row_tiles
        g = stream % row_tiles * BLOCK_R + local
        row_mask = g < groups
        head_row = kv_head * (groups * count)
        r = g * count + sequence  # [BR], of the head's rows
        token, new, past = lengths(cu_seqlens_q, cu_seqlens_k, sequence, count)
        pages = block_table + sequence.to(tl.int64) * width
        blocks = tl.where(new == 1, past // TOKENS, 0)
        first = tl.maximum(start - at, 0)
        last = tl.minimum(end - at, stream_items(new, past, SINKS))

        # Unpipelined: its buffers would cost the packed part occupancy.
        for job in tl.range(tl.maximum(first - blocks, 0), last - blocks, num_stages=1):
            t = job * DENSE_TOKENS + tl.arange(0, DENSE_TOKENS)
            sinks, held = sinks_of(past, SINKS), past % TOKENS
            length = sinks + held + 1
            k_row, v_row = dense_rows(
                rows, pages, key, value, t, sinks, held, length, token, kv_head, page_blocks,
                key_t * 8, key_h * 8, value_t * 8, value_h * 8, DIM, ROWS, BLOCK_WORDS,
            )  # fmt: skip
            inside = t < length
            k, v = dense_states(k_row, v_row, inside, C)
            dk = tl.arange(0, BLOCK_DK)
            plain = scratch_fp16 + (2 * LINE) * plain_at + (head_row + r)[None, :] * DIM + dk[:, None]
            q = tl.load(plain, mask=(dk < DIM)[:, None] & row_mask[None, :], other=0.0)  # [BDK, BR]
            factor = tl.load(scratch + LINE * scale_at + head_row + r, mask=row_mask, other=1.0) * scaling_log2  # [BR]
            x = dense_logits(k, q, factor, cap_log2, SOFTCAP)
            x = tl.where(inside[:, None] & row_mask[None, :], x, -float("inf"))
            out, total, maximum = dense_sums(x, v)
            slot = workers + heads * count + stream * dense_slots(SINKS) + job
            tl.store(scratch + LINE * lse_at + slot * tile_rows + local, log2_sum(maximum, total), mask=store_rows)
            d, inverse = tl.arange(0, BLOCK_DM), 1.0 / tl.where(total > 0, total, 1.0)
            to = slot.to(tl.int64) * (tile_rows * DM) + local[None, :] * DM + d[:, None]
            out_mask = store_rows[None, :] & (d < DIM)[:, None]
            tl.store(scratch + LINE * partial_at + to, out * inverse[None, :], mask=out_mask)

        if first < blocks:
            blocks_of = Blocks(
                key_words, value_words, scales, key_means, pages + FIRST_BLOCK, 0, kv_head, page_blocks, 1
            )
            attend_share(
                Scratch(scratch, scale_at, lse_at, partial_at, tile_rows), blocks_of, Mask(scratch, 0, 0),
                first, per_lane(tl.minimum(last, blocks), ASM), Rows(head_row, r, row_mask, local, store_rows, 1),
                worker + stream, 0, scaling_log2, cap_log2, C,
            )  # fmt: skip
        at += stream_items(new, past, SINKS)
        stream += 1
