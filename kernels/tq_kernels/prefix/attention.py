"""Attention of many queries over compressed history and the new tokens, in one kernel.

A program holds BLOCK_R query rows of one KV head (row r = s G + g: all G heads of a few queries) and walks over its
share of the tokens, FlashAttention-style: first the packed blocks, with the rows rotated by R, unpacking each tile
once for all rows; then its accumulator is rotated back, and it goes on over the dense tokens (sinks, window, new
tokens; bottom-right causal) with the plain rows. No history is ever dense in memory. Scratch is the rows themselves
in fp16, and partial results where several programs share the tokens of a tile of rows.

Packed keys are in fp16 less a `reference_key` c of the program, close to their means, so that fp16 rounds them to their
own size and not to that of the means. What a row has in common with it goes to the row's maximum after the last block.

    x[r, t]   = q[r] . k[t]    packed: (R q[r] / f) . (key_scale[t] key_level[t] + mean - c) + (R q[r] / f) . c
    out[r, :] = R^T sum_packed p value_scale value_level / f' + sum_dense p v,  p = softmax(scaling x)

What bounds it on sm_90, D = 128, a block of 128 tokens and 128 rows, in clocks of a multiprocessor: products 2048;
exponentials 1024; 839 instructions a warp at 4 bits, 8 warps on 4 schedulers, 1680 (a third of them unpack 256 elements
a token); tiles through shared memory 1800. With one program a multiprocessor, products and the rest come one after the
other, about half of the product rate; several programs overlap them but have fewer registers or unpack more often.
Bytes do not matter: a block's 17 KB are read once for 128 rows.
"""

import triton
import triton.language as tl

from ..common.sequences import dense_rows, lengths, sinks_of, without_sinks
from ..common.softmax import LOG2E, finite, log2_sum, soft_capped
from ..common.unpack import unpack_scales
from ..format import TOKENS
from .rows import add_tile, hidden, logits, masked, normalised_rows, parked, row_tile, stored_rows, weights
from .tiles import channel_of, key_tiles, reference_key, value_tiles

TILE = tl.constexpr(64)


@triton.jit(
    do_not_specialize=(
        "blocks_b blocks_h rows groups kv_heads blocks sink_count window_count window_start window_capacity "
        "new_count queries mask_b mask_s mask_t scaling_log2 cap_log2 tile_count count width"
    ).split()
)
def prefix_attention(
    query,  # [B, Hq, S, DK], last dimension contiguous
    key_words,  # [B, Hkv, N, 128 * DKP * KEY_BITS / 32] int32
    value_words,  # [B, Hkv, N, 128 * DVP * VALUE_BITS / 32] int32
    scalars,  # [B, Hkv, N, 128] int32
    key_means,  # [B, Hkv, N, DKP] fp16
    key_rotation,  # [DKP, DKP] fp16, sqrt(DKP) R
    value_rotation,  # [DVP, DVP] fp16, sqrt(DVP) R
    key_factors,  # f, [B, Hkv, DK] fp16
    value_factors,  # f', [B, Hkv, DV] fp16
    sink_keys,  # [B, Hkv, sinks, DK] in the model's dtype
    sink_values,  # [B, Hkv, sinks, DV]
    window_keys,  # [B, Hkv, window_capacity, DK], row j in slot (window_start + j) % window_capacity
    window_values,  # [B, Hkv, window_capacity, DV]
    new_keys,  # [B, Hkv, new_count, DK]
    new_values,  # [B, Hkv, new_count, DV]
    mask,  # [B, 1, S or 1, T] bool
    s_aux,  # [Hq], any float dtype
    out,  # [B, S, Hq, DV], last dimension contiguous; with splits unused
    partial,  # [splits, B * Hkv * rows, DV] float32, normalised; unused without splits
    lse,  # [splits, B * Hkv * rows] float32, base 2; first what rows have in common with the reference key
    operand_rows,  # [splits * B * Hkv * tiles of rows, BLOCK_R, BLOCK_DK] fp16, scratch
    cu_q,  # with a table: [B + 1] int32
    cu_k,  # [B + 1] int32
    table,  # [B, W] int32, or None
    query_b,
    query_h,
    query_s,
    blocks_b,  # strides of the packed tensors in blocks
    blocks_h,
    sink_b,  # of sinks, window and new tokens in elements: keys, then values
    sink_h,
    sink_vb,
    sink_vh,
    window_b,
    window_h,
    window_vb,
    window_vh,
    new_b,
    new_h,
    new_t,
    new_vb,
    new_vh,
    new_vt,
    out_b,
    out_s,
    out_h,
    rows,  # G * S
    groups,  # G
    kv_heads,
    blocks,
    sink_count,
    window_count,
    window_start,
    window_capacity,
    new_count,
    queries,  # S
    mask_b,
    mask_s,
    mask_t,
    scaling_log2,  # scaling * log2(e)
    cap_log2,  # softcap * log2(e)
    tile_count,  # tiles of rows
    count,  # with a table: B
    width,  # W
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_AUX: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    ROWS: tl.constexpr,  # this and the rest: 0 without a table
    BLOCK_WORDS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Grid: (row tiles, B * Hkv, splits). STEP, 64 or 128, is the tokens between two updates of the maximum.

    With a table: many sequences, those with more than one new token, over the pages of `tq_kernels.common.sequences`.
    Tensors have one batch row, in which new tokens follow one another; `window_keys` are the layer's first page,
    `blocks_b` blocks before the next; `rows` are those of all sequences. Tiles that are not needed end at once.
    """
    head = tl.program_id(1)
    batch = (head // kv_heads).to(tl.int64)
    kv_head = (head % kv_heads).to(tl.int64)
    all_rows = rows
    # The last rows see the most tokens: start them first.
    if table is None:
        first_row = (tile_count - 1 - tl.program_id(0)) * BLOCK_R
    else:
        exists, sequence, first_row = row_tile(cu_q, cu_k, count, groups, tl.program_id(0), BLOCK_R, BLOCK_B)
        if not exists:
            return
        token, queries, past = lengths(cu_q, cu_k, sequence, count)
        new_count, rows = queries, queries * groups
        blocks, window_count, sink_count = past // TOKENS, past % TOKENS, sinks_of(past, SINKS)
        pages = table + sequence.to(tl.int64) * width
        table = pages + (TOKENS // ROWS + (1 if SINKS else 0))
        query += token.to(tl.int64) * query_s
        out += token.to(tl.int64) * out_s
        new_keys += token.to(tl.int64) * new_t
        new_values += token.to(tl.int64) * new_vt
        lse, partial = lse + token * groups, partial + token.to(tl.int64) * (groups * DV)
    r = first_row + tl.arange(0, BLOCK_R)
    row_mask = r < rows
    s = r // groups
    head_q = kv_head * groups + r % groups  # [BR]
    dk = tl.arange(0, BLOCK_DK)
    dv = tl.arange(0, BLOCK_DV)
    query_at = query + batch * query_b + head_q * query_h + s.to(tl.int64) * query_s  # [BR]
    query_inside = row_mask[:, None] & (dk < DK)[None, :]

    # This program's share, in units of 128 tokens: packed blocks, then dense tokens as far as these rows see them.
    dense = sink_count + window_count + new_count
    if CAUSAL:
        dense = tl.minimum(dense, dense - queries + 1 + (tl.minimum(first_row + BLOCK_R, rows) - 1) // groups)
    units = blocks + (dense + TOKENS - 1) // TOKENS
    first = 0
    last = units
    if SPLIT:
        split = tl.program_id(2)
        splits = tl.num_programs(2)
        first = (units // splits) * split + (units % splits) * split // splits
        last = (units // splits) * (split + 1) + (units % splits) * (split + 1) // splits
    last_block = tl.minimum(last, blocks)

    plain, scale = normalised_rows(query_at[:, None] + dk[None, :], query_inside)  # [BR, BDK], [BR]
    factor = scale * scaling_log2
    gain = tl.full([BLOCK_R], 1.0, tl.float32) if SOFTCAP else factor
    maximum = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    if MASK > 0:
        mask += batch * mask_b
    mask_offset = s * mask_s  # [BR]
    # Fields of blocks are arrays of their own, or lie in one piece of BLOCK_WORDS words a block.
    KEY_SIZE: tl.constexpr = BLOCK_WORDS if BLOCK_WORDS else 4 * DKP * KEY_BITS
    VALUE_SIZE: tl.constexpr = BLOCK_WORDS if BLOCK_WORDS else 4 * DVP * VALUE_BITS
    SCALARS_SIZE: tl.constexpr = BLOCK_WORDS if BLOCK_WORDS else TOKENS
    MEAN_SIZE: tl.constexpr = 2 * BLOCK_WORDS if BLOCK_WORDS else DKP
    if first < last_block:
        key_channel, key_exists = channel_of(dk, DKP, BLOCK_DK, KEY_BITS)
        value_channel, value_exists = channel_of(dv, DVP, BLOCK_DV, VALUE_BITS)
        matrix = tl.load(
            key_rotation + key_channel[None, :] * DKP + dk[:, None],
            mask=key_exists[None, :] & (dk < DKP)[:, None],
            other=0.0,
        )  # [BDK in, BDK column]
        key_factor = tl.load(key_factors + head * DK + dk, mask=dk < DK, other=1.0).to(tl.float32)
        matrix = (matrix.to(tl.float32) * (1.0 / key_factor)[:, None]).to(tl.float16)
        if table is None:
            block0 = batch * blocks_b + kv_head * blocks_h
            scalar_at = scalars + block0 * TOKENS + tl.arange(0, 32)
            first_at = block0 + first
        else:
            block0 = kv_head * blocks_h
            page = tl.load(table + first).to(tl.int64)
            first_at = block0 + page * blocks_b
        rotated = tl.dot(plain, matrix) * (DKP**-0.5)
        reference = 0.0
        common = tl.zeros([BLOCK_R], tl.float32)
        if HAS_MEAN:
            scale0, _ = unpack_scales(tl.load(scalars + first_at * SCALARS_SIZE))
            reference = reference_key(key_means + first_at * MEAN_SIZE + key_channel, scale0, dk, key_exists)  # [BDK]
            common = tl.sum(rotated * reference[None, :], 1)
            if not SOFTCAP:
                # Kept in memory: for sm_80 there are no registers left.
                row = (tl.program_id(2) * tl.num_programs(1) + head).to(tl.int64) * all_rows + r
                tl.store(lse + row, common, mask=row_mask)
            reference = tl.reshape(
                parked(reference[None, :], operand_rows, tile_count, BLOCK_R, BLOCK_DK), reference.shape
            )
        rotated = parked(rotated.to(tl.float16), operand_rows, tile_count, BLOCK_R, BLOCK_DK)
        for block in tl.range(first, last_block, num_stages=STAGES):
            if table is None:
                at = block0 + block
                scalars_of = scalar_at + block * TOKENS
            else:
                at = block0 + page * blocks_b
                page = tl.load(table + block + 1, mask=block + 1 < last_block, other=0).to(tl.int64)
                scalars_of = scalars + at * BLOCK_WORDS + tl.arange(0, 32)
            k_scale0, v_scale0 = unpack_scales(tl.load(scalars_of))
            k_scale1, v_scale1 = unpack_scales(tl.load(scalars_of + 32))
            k_scale2, v_scale2 = unpack_scales(tl.load(scalars_of + 64))
            k_scale3, v_scale3 = unpack_scales(tl.load(scalars_of + 96))
            mean = 0.0
            if HAS_MEAN:
                mean = tl.load(key_means + at * MEAN_SIZE + key_channel, mask=key_exists, other=0.0)  # [BDK]
                mean = mean - reference
            k0, k1 = key_tiles(
                key_words + at * KEY_SIZE, k_scale0, k_scale1, k_scale2, k_scale3, mean,
                DKP, BLOCK_DK, KEY_BITS, HAS_MEAN, ASM,
            )  # fmt: skip
            v0, v1 = value_tiles(
                value_words + at * VALUE_SIZE, v_scale0, v_scale1, v_scale2, v_scale3, DVP, BLOCK_DV, VALUE_BITS, ASM
            )
            t = sink_count + block * TOKENS + tl.arange(0, TILE)
            x0 = logits(rotated, k0, common, factor, cap_log2, mask, mask_offset, t, mask_t, MASK, SOFTCAP)
            if SINKS:
                x0 = without_sinks(x0, block, tl.arange(0, TILE)[None, :], SINKS)
            if STEP == 64:
                acc, total, maximum = add_tile(acc, total, maximum, x0, tl.trans(v0), gain, MASK > 0)
            x1 = logits(rotated, k1, common, factor, cap_log2, mask, mask_offset, t + TILE, mask_t, MASK, SOFTCAP)
            if STEP == 64:
                acc, total, maximum = add_tile(acc, total, maximum, x1, tl.trans(v1), gain, MASK > 0)
            else:
                new_maximum = tl.maximum(maximum, tl.maximum(tl.max(x0, 1), tl.max(x1, 1)))
                shift = finite(new_maximum) if MASK > 0 else new_maximum
                alpha = tl.exp2((maximum - shift) * gain)
                maximum = new_maximum
                p0 = weights(x0, shift, gain)
                p1 = weights(x1, shift, gain)
                total = total * alpha + tl.sum(p0 + p1, 1)
                acc = acc * alpha[:, None]
                acc = tl.dot(p0.to(tl.float16), tl.trans(v0), acc)
                acc = tl.dot(p1.to(tl.float16), tl.trans(v1), acc)

        if HAS_MEAN and not SOFTCAP:
            r = hidden(first_row, ASM) + tl.arange(0, BLOCK_R)
            row = (tl.program_id(2) * tl.num_programs(1) + head).to(tl.int64) * all_rows + r
            tl.debug_barrier()
            maximum += tl.load(lse + row, mask=r < rows, other=0.0)
            tl.debug_barrier()
        # Normalised rows: fp16 then holds any output to 11 bits.
        peak = tl.max(tl.abs(tl.where(value_exists[None, :], acc, 0.0)), 1)
        peak = tl.where(peak > 0, peak, 1.0)
        matrix = tl.load(
            value_rotation + value_channel[:, None] * DVP + dv[None, :],
            mask=value_exists[:, None] & (dv < DVP)[None, :],
            other=0.0,
        )  # [BDV column, BDV out]
        operand = tl.where(value_exists[None, :], acc / peak[:, None], 0.0).to(tl.float16)
        value_factor = tl.load(value_factors + head * DV + dv, mask=dv < DV, other=1.0).to(tl.float32)
        acc = tl.dot(operand, matrix) * (peak * (DVP**-0.5))[:, None] / value_factor[None, :]

    if last > blocks:
        first_row = hidden(first_row, ASM)
        r = first_row + tl.arange(0, BLOCK_R)
        s = r // groups
        mask_offset = s * mask_s
        query_at = query + batch * query_b + (kv_head * groups + r % groups) * query_h + s.to(tl.int64) * query_s
        query_inside = (r < rows)[:, None] & (dk < DK)[None, :]
        plain, _ = normalised_rows(query_at[:, None] + dk[None, :], query_inside)
        plain = parked(plain, operand_rows, tile_count, BLOCK_R, BLOCK_DK)
        low = tl.maximum(first - blocks, 0) * TOKENS
        high = tl.minimum((last - blocks) * TOKENS, dense)
        sink_keys += batch * sink_b + kv_head * sink_h
        sink_values += batch * sink_vb + kv_head * sink_vh
        window_keys += batch * window_b + kv_head * window_h
        window_values += batch * window_vb + kv_head * window_vh
        new_keys += batch * new_b + kv_head * new_h
        new_values += batch * new_vb + kv_head * new_vh
        history = sink_count + window_count
        newest = history + new_count - queries + s  # [BR], the last dense token a row sees
        for start in tl.range(low, high, TILE, num_stages=1):
            t = start + tl.arange(0, TILE)
            inside = t < high
            if table is None:
                sink = t < sink_count
                k_row, v_row = stored_rows(
                    sink_keys, sink_values, window_keys, window_values, new_keys, new_values, t, sink, sink_count,
                    history, window_start, window_capacity, new_t, new_vt, DK, DV,
                )  # fmt: skip
            else:
                k_row, v_row = dense_rows(
                    window_keys, pages, new_keys, new_values, t, sink_count, window_count, high, 0, kv_head,
                    blocks_b, new_t, 0, new_vt, 0, DK, ROWS, BLOCK_WORDS,
                )  # fmt: skip
            k = tl.load(k_row[:, None] + dk[None, :], mask=inside[:, None] & (dk < DK)[None, :], other=0.0)
            v = tl.load(v_row[:, None] + dv[None, :], mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
            x = tl.dot(plain, tl.trans(k.to(tl.float16)))  # [BR, 64]
            if SOFTCAP:
                x = soft_capped(x * factor[:, None], cap_log2)
            if CAUSAL:
                x = tl.where(inside[None, :] & (t[None, :] <= newest[:, None]), x, -float("inf"))
            else:
                x = tl.where(inside[None, :], x, -float("inf"))
            if MASK > 0:
                position = tl.where(sink, t, t + blocks * TOKENS)
                x = masked(x, mask, mask_offset, position, mask_t, inside, MASK)
            acc, total, maximum = add_tile(acc, total, maximum, x, v.to(tl.float16), gain, True)

    r = hidden(first_row, ASM) + tl.arange(0, BLOCK_R)
    row_mask = r < rows
    s = r // groups
    head_q = kv_head * groups + r % groups
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    inside = row_mask[:, None] & (dv < DV)[None, :]
    if SPLIT:
        row = (split * tl.num_programs(1) + head).to(tl.int64) * all_rows + r
        tl.store(lse + row, log2_sum(finite(maximum) * gain, total), mask=row_mask)
        tl.store(partial + row[:, None] * DV + dv[None, :], acc * inverse[:, None], mask=inside)
    else:
        if HAS_AUX:
            aux = tl.load(s_aux + head_q, mask=row_mask, other=0.0).to(tl.float32) * LOG2E
            inverse = 1.0 / (tl.where(total > 0, total, 1.0) + tl.exp2(aux - finite(maximum) * gain))
        at = out + batch * out_b + s.to(tl.int64) * out_s + head_q * out_h  # [BR]
        tl.store(at[:, None] + dv[None, :], (acc * inverse[:, None]).to(out.dtype.element_ty), mask=inside)
