"""What one program of decode attention does with a contiguous part of a stream's packed blocks."""

import triton
import triton.language as tl

from ..common.sequences import without_sinks
from ..common.softmax import finite, log2_sum, soft_capped
from ..common.unpack import PROBABILITY_BITS
from ..format import TOKENS
from .dense import allowed_tile
from .rotate import LINE, ROTATED
from .tiles import (
    ROWS32,
    add_chunks,
    halves_of,
    key_scores,
    level_unit,
    load_bias,
    load_scalars,
    mean_scores,
    value_levels,
)


@triton.jit
def attend_share(
    scratch,
    key_words,
    value_words,
    scalars,
    key_means,
    table,
    mask,
    first,
    last,
    batch,
    kv_head,
    blocks_b,
    blocks_h,
    head_row,
    r,
    row_mask,
    local,
    store_rows,
    slot,
    queries,
    sink_count,
    mask_s,
    mask_t,
    scaling_log2,
    cap_log2,
    tile_rows,
    scale_at,
    lse_at,
    partial_at,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    DM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KEY_CHUNKS: tl.constexpr,
    VALUE_CHUNKS: tl.constexpr,
    BLOCK_KC: tl.constexpr,
    BLOCK_VC: tl.constexpr,
    BLOCK_MEAN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    SMALL: tl.constexpr,
    ASM: tl.constexpr,
    SINKS: tl.constexpr = 0,
):
    """Attend to blocks `first` to `last` of a stream and leave the partial result in slot `slot`.

    Block i of the packed tensors is `batch * blocks_b + kv_head * blocks_h + i`, or with a table of pages
    `table[i] * blocks_b + kv_head * blocks_h`.

    Args:
        scratch: As for `decode_split`, with which other arguments are shared.
        table: The sequence's pages, int32, or `None`.
        mask: Of the sequence.
        first, last: Through `per_lane`, the latter.
        head_row, r, row_mask: Where the head's queries begin in scratch, and which [BR] of them are the stream's.
        local, store_rows: [BR] rows of the partial result, and which are stored.
        BLOCK_WORDS: With a table, int32 words from a block to the next; 0 without.
        SINKS: First tokens of block 0 that are attended to elsewhere.
    """
    factor = tl.load(scratch + LINE * scale_at + head_row + r, mask=row_mask, other=1.0) * scaling_log2  # [BR]
    factor /= level_unit(KEY_BITS, SMALL)

    n = tl.arange(0, 32)
    kc = tl.arange(0, BLOCK_KC)
    vc = tl.arange(0, BLOCK_VC)
    # Fields are arrays of their own, or lie in one piece of BLOCK_WORDS words a block.
    KEY_SIZE: tl.constexpr = BLOCK_WORDS if BLOCK_WORDS else 4 * DKP * KEY_BITS
    VALUE_SIZE: tl.constexpr = BLOCK_WORDS if BLOCK_WORDS else 4 * DVP * VALUE_BITS
    MEAN_SIZE: tl.constexpr = 2 * BLOCK_WORDS if BLOCK_WORDS else DKP
    KEY_WIDTH: tl.constexpr = DKP // KEY_CHUNKS
    VALUE_HEIGHT: tl.constexpr = DVP // VALUE_CHUNKS
    queries_at = scratch.to(tl.pointer_type(tl.float16), bitcast=True) + ROTATED
    rotated = queries_at + (head_row + r)[None, :] * DKP + kc[:, None]
    q_mask = (kc < KEY_WIDTH)[:, None] & row_mask[None, :]
    q0 = tl.load(rotated, mask=q_mask, other=0.0)  # [BKC, BR]
    q1 = q0
    q2 = q0
    q3 = q0
    if KEY_CHUNKS > 1:
        q1 = tl.load(rotated + KEY_WIDTH, mask=q_mask, other=0.0)
    if KEY_CHUNKS > 2:
        q2 = tl.load(rotated + 2 * KEY_WIDTH, mask=q_mask, other=0.0)
        q3 = tl.load(rotated + 3 * KEY_WIDTH, mask=q_mask, other=0.0)
    km = tl.arange(0, BLOCK_MEAN)
    q_mean = q0
    if HAS_MEAN and (KEY_CHUNKS > 1 or BLOCK_MEAN != BLOCK_KC):
        whole = queries_at + (head_row + r)[None, :] * DKP + km[:, None]
        q_mean = tl.load(whole, mask=(km < DKP)[:, None] & row_mask[None, :], other=0.0)  # [BM, BR]
    a0 = tl.zeros([BLOCK_VC, BLOCK_R], tl.float32)
    if VALUE_CHUNKS > 1:
        a1 = tl.zeros([BLOCK_VC, BLOCK_R], tl.float32)
        a2 = tl.zeros([BLOCK_VC, BLOCK_R], tl.float32)
        a3 = tl.zeros([BLOCK_VC, BLOCK_R], tl.float32)
    sums = tl.zeros([ROWS32, BLOCK_R], tl.float32)
    maximum = tl.full([BLOCK_R], -float("inf"), tl.float32)

    # Scalars are read a block ahead into registers: as asynchronous copies they would cost four branches a block.
    if table is None:
        block0 = batch.to(tl.int64) * blocks_b + kv_head.to(tl.int64) * blocks_h
        scalar_at = scalars + block0 * TOKENS + n
        w0, w1, w2, w3 = load_scalars(scalar_at + first * TOKENS, first < last)
    else:
        # The page of a block is read two blocks ahead: its words are copied, and its scalars read, one block ahead.
        block0 = kv_head.to(tl.int64) * blocks_h
        at = block0 + tl.load(table + first).to(tl.int64) * blocks_b
        page = tl.load(table + first + 1, mask=first + 1 < last, other=0)
        w0, w1, w2, w3 = load_scalars(scalars + at * BLOCK_WORDS + n, first < last)
    if MASK == 1:
        mask_at = mask + (sink_count + n).to(tl.int64) * mask_t
        m0, m1, m2, m3 = load_bias(mask_at, first, mask_t)
    for block in tl.range(first, last):
        if table is None:
            at = block0 + block
        key_at = key_words + at * KEY_SIZE
        value_at = value_words + at * VALUE_SIZE
        x0, x1, x2, x3 = key_scores(
            key_at, q0, q1, q2, q3, n[:, None], kc[None, :], DKP, KEY_BITS, KEY_CHUNKS, BLOCK_R, SMALL, ASM
        )
        ks0, vs0 = halves_of(w0)
        ks1, vs1 = halves_of(w1)
        ks2, vs2 = halves_of(w2)
        ks3, vs3 = halves_of(w3)
        if table is None:
            w0, w1, w2, w3 = load_scalars(scalar_at + (block + 1) * TOKENS, block + 1 < last)
        else:
            next_at = block0 + page.to(tl.int64) * blocks_b
            w0, w1, w2, w3 = load_scalars(scalars + next_at * BLOCK_WORDS + n, block + 1 < last)
        x0 = x0 * ks0[:, None]
        x1 = x1 * ks1[:, None]
        x2 = x2 * ks2[:, None]
        x3 = x3 * ks3[:, None]
        if HAS_MEAN:
            shared = mean_scores(key_means + at * MEAN_SIZE, q_mean, km, DKP) * level_unit(KEY_BITS, SMALL)  # [32, BR]
            x0 += shared
            x1 += shared
            x2 += shared
            x3 += shared
        if SOFTCAP:
            x0 = soft_capped(x0 * factor[None, :], cap_log2)
            x1 = soft_capped(x1 * factor[None, :], cap_log2)
            x2 = soft_capped(x2 * factor[None, :], cap_log2)
            x3 = soft_capped(x3 * factor[None, :], cap_log2)
        if SINKS:
            x0 = without_sinks(x0, block, n[:, None], SINKS)
        if MASK == 1:
            x0 += m0[:, None]
            x1 += m1[:, None]
            x2 += m2[:, None]
            x3 += m3[:, None]
            m0, m1, m2, m3 = load_bias(mask_at, tl.minimum(block + 1, last - 1), mask_t)
        elif MASK == 2:
            t = sink_count + block * TOKENS + n
            valid = row_mask[None, :]
            mask_offset = (r % queries) * mask_s  # [BR]
            x0 = tl.where(allowed_tile(mask, t, mask_offset, mask_t, valid), x0, -float("inf"))
            x1 = tl.where(allowed_tile(mask, t + 32, mask_offset, mask_t, valid), x1, -float("inf"))
            x2 = tl.where(allowed_tile(mask, t + 64, mask_offset, mask_t, valid), x2, -float("inf"))
            x3 = tl.where(allowed_tile(mask, t + 96, mask_offset, mask_t, valid), x3, -float("inf"))
        # The maximum is kept in the units of these products; the factor to base-2 logits enters the
        # exponent's FMA.
        gain = tl.full([BLOCK_R], 1.0, tl.float32) if SOFTCAP else factor
        new_maximum = tl.maximum(maximum, tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), 0))  # [BR]
        shift = finite(new_maximum) if MASK else new_maximum
        alpha = tl.exp2((maximum - shift) * gain)
        offset = shift * gain - PROBABILITY_BITS
        p0 = tl.exp2(x0 * gain[None, :] - offset[None, :])  # [32, BR]
        p1 = tl.exp2(x1 * gain[None, :] - offset[None, :])
        p2 = tl.exp2(x2 * gain[None, :] - offset[None, :])
        p3 = tl.exp2(x3 * gain[None, :] - offset[None, :])
        maximum = new_maximum
        sums = sums * alpha[None, :] + ((p0 + p1) + (p2 + p3))
        a0 = a0 * alpha[None, :]
        if VALUE_CHUNKS > 1:
            a1 = a1 * alpha[None, :]
            a2 = a2 * alpha[None, :]
            a3 = a3 * alpha[None, :]
        if VALUE_CHUNKS == 1:
            # Two planes at a time: the exchange of probabilities between warps takes half the shared memory.
            v0, v1, v2, v3 = value_levels(value_at, vc[:, None], n[None, :], DVP, VALUE_BITS, SMALL, ASM)
            p0 = (p0 * vs0[:, None]).to(tl.float16)
            p1 = (p1 * vs1[:, None]).to(tl.float16)
            a0 = tl.dot(v0, p0, a0)
            a0 = tl.dot(v1, p1, a0)
            p2 = (p2 * vs2[:, None]).to(tl.float16)
            p3 = (p3 * vs3[:, None]).to(tl.float16)
            a0 = tl.dot(v2, p2, a0)
            a0 = tl.dot(v3, p3, a0)
        else:
            p0 = (p0 * vs0[:, None]).to(tl.float16)
            p1 = (p1 * vs1[:, None]).to(tl.float16)
            p2 = (p2 * vs2[:, None]).to(tl.float16)
            p3 = (p3 * vs3[:, None]).to(tl.float16)
            a0, a1, a2, a3 = add_chunks(
                a0, a1, a2, a3, value_at, vc[:, None], n[None, :], p0, p1, p2, p3, DVP, VALUE_BITS, SMALL, ASM
            )
        if table is not None:
            at = next_at
            page = tl.load(table + block + 2, mask=block + 2 < last, other=0)

    total = tl.sum(sums, 0)  # [BR]
    gain = tl.full([BLOCK_R], 1.0, tl.float32) if SOFTCAP else factor
    tl.store(
        scratch + LINE * lse_at + slot * tile_rows + local,
        log2_sum(maximum * gain - PROBABILITY_BITS, total),
        mask=store_rows,
    )
    inverse = 1.0 / (tl.where(total > 0, total, 1.0) * level_unit(VALUE_BITS, SMALL))
    out = scratch + LINE * partial_at + slot.to(tl.int64) * (tile_rows * DM) + local[None, :] * DM + vc[:, None]
    out_mask = store_rows[None, :] & (vc < VALUE_HEIGHT)[:, None]
    tl.store(out, a0 * inverse[None, :], mask=out_mask)
    if VALUE_CHUNKS > 1:
        tl.store(out + VALUE_HEIGHT, a1 * inverse[None, :], mask=out_mask)
        tl.store(out + 2 * VALUE_HEIGHT, a2 * inverse[None, :], mask=out_mask)
        tl.store(out + 3 * VALUE_HEIGHT, a3 * inverse[None, :], mask=out_mask)
