"""Attention over dense keys and values, for what sdpa has not: capped logits and learned sinks, of any mask.

A program holds BLOCK_R query rows of one KV head (row r = s G + g: all G heads of a few queries) and walks over the
tokens they attend to, FlashAttention-style. Of a mask row by row, `mask_spans` finds each query's first and last token,
so that a sliding window costs its own width and not the length of the prompt.
"""

import triton
import triton.language as tl

from ..common.softmax import LOG2E, finite, log2_sum, soft_capped


@triton.jit(do_not_specialize=["tokens", "mask_b", "mask_s", "mask_t"])
def mask_spans(
    mask,  # [B, 1, S, tokens] bool
    spans,  # [B, S, 2] int32
    tokens,
    mask_b,
    mask_s,
    mask_t,
    BLOCK: tl.constexpr,
):
    """The first token of each query, and the one after its last. Grid: (S, B)."""
    mask += tl.program_id(1).to(tl.int64) * mask_b + tl.program_id(0).to(tl.int64) * mask_s
    first = tl.full([BLOCK], 2**30, tl.int32)
    end = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, tokens, BLOCK):
        t = start + tl.arange(0, BLOCK)
        seen = tl.load(mask + t.to(tl.int64) * mask_t, mask=t < tokens, other=0) != 0
        first = tl.minimum(first, tl.where(seen, t, 2**30))
        end = tl.maximum(end, tl.where(seen, t + 1, 0))
    at = spans + (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(at, tl.min(first, 0))
    tl.store(at + 1, tl.max(end, 0))


@triton.jit
def _add_tokens(
    acc,
    total,
    maximum,
    rows,  # [BR, BDK]
    keys,
    values,
    key_t,
    value_t,
    mask,  # of the program's first query
    mask_rows,  # [BR], offsets into it
    mask_t,
    newest,  # [BR], the last token a row sees
    low,
    high,
    scaling_log2,
    cap_log2,
    EDGE: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MATRIX: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Take in tokens `low` to `high`: without EDGE whole tiles that all rows see."""
    dk = tl.arange(0, BLOCK_DK)
    dv = tl.arange(0, BLOCK_DV)
    # Offsets in a tile stay, in 32 bits: pointers would take registers that the products need.
    of_tile = tl.arange(0, BLOCK_T)
    key_offsets = of_tile[:, None] * key_t + dk[None, :]
    value_offsets = of_tile[:, None] * value_t + dv[None, :]
    for start in tl.range(low, high, BLOCK_T, num_stages=STAGES):
        t = start + of_tile
        key_at = keys + tl.cast(start, tl.int64) * key_t + key_offsets
        value_at = values + tl.cast(start, tl.int64) * value_t + value_offsets
        if EDGE:
            k = tl.load(key_at, mask=(t < high)[:, None] & (dk < DK)[None, :], other=0.0)
            v = tl.load(value_at, mask=(t < high)[:, None] & (dv < DV)[None, :], other=0.0)
        else:
            k = tl.load(key_at) if BLOCK_DK == DK else tl.load(key_at, mask=(dk < DK)[None, :], other=0.0)
            v = tl.load(value_at) if BLOCK_DV == DV else tl.load(value_at, mask=(dv < DV)[None, :], other=0.0)
        x = tl.dot(rows, tl.trans(k.to(MATRIX))) * scaling_log2  # [BR, BT]
        if SOFTCAP:
            x = soft_capped(x, cap_log2)
        if EDGE:
            seen = (t < high)[None, :]
            if CAUSAL:
                seen = seen & (t[None, :] <= newest[:, None])
            if MASK > 0:
                at = mask + tl.cast(start, tl.int64) * mask_t + (mask_rows[:, None] + of_tile[None, :] * mask_t)
                seen = seen & (tl.load(at, mask=seen & (newest >= 0)[:, None], other=0) != 0)
            x = tl.where(seen, x, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(x, 1))
        shift = finite(new_maximum)
        p = tl.exp2(x - shift[:, None])
        decay = tl.exp2(maximum - shift)
        total = total * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(MATRIX), v.to(MATRIX), acc * decay[:, None])
        maximum = new_maximum
    return acc, total, maximum


@triton.jit(
    do_not_specialize=(
        "mask_b mask_s mask_t rows groups kv_heads queries tokens scaling_log2 cap_log2 tile_count"
    ).split()
)
def dense_attention(
    query,  # [B, Hq, S, DK], last dimension of these contiguous
    keys,  # [B, Hkv, T, DK]
    values,  # [B, Hkv, T, DV]
    mask,  # [B, 1, S or 1, T] bool
    spans,  # [B, S, 2] int32, of a mask row by row: see `mask_spans`
    s_aux,  # [Hq], any float dtype
    out,  # [B, S, Hq, DV]; with splits unused
    partial,  # [splits, B * Hkv * rows, DV] float32, normalised; unused without splits
    lse,  # [splits, B * Hkv * rows] float32, base 2; likewise
    query_b,
    query_h,
    query_s,
    key_b,
    key_h,
    key_t,
    value_b,
    value_h,
    value_t,
    out_b,
    out_s,
    out_h,
    mask_b,
    mask_s,
    mask_t,
    rows,  # G * S
    groups,  # G
    kv_heads,
    queries,  # S
    tokens,  # T
    scaling_log2,  # scaling * log2(e)
    cap_log2,  # softcap * log2(e)
    tile_count,  # tiles of rows
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_AUX: tl.constexpr,
    SPLIT: tl.constexpr,
    MATRIX: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: (row tiles, B * Hkv, splits). CAUSAL: query s does not see the last S - 1 - s tokens. MASK 1: a mask for
    all queries alike, 2: row by row."""
    head = tl.program_id(1)
    batch = (head // kv_heads).to(tl.int64)
    kv_head = (head % kv_heads).to(tl.int64)
    # The last rows see the most tokens: start them first.
    r = (tile_count - 1 - tl.program_id(0)) * BLOCK_R + tl.arange(0, BLOCK_R)
    valid = r < rows
    s = r // groups
    head_q = kv_head * groups + r % groups  # [BR]
    dk = tl.arange(0, BLOCK_DK)
    dv = tl.arange(0, BLOCK_DV)
    query_at = query + batch * query_b + head_q * query_h + s.to(tl.int64) * query_s  # [BR]
    inside = valid[:, None] & (dk < DK)[None, :]
    plain = tl.load(query_at[:, None] + dk[None, :], mask=inside, other=0.0).to(MATRIX)
    keys += batch * key_b + kv_head * key_h
    values += batch * value_b + kv_head * value_h
    newest = tl.where(valid, tokens - queries + s if CAUSAL else tokens - 1, -1)  # [BR]
    first_query = (tile_count - 1 - tl.program_id(0)) * BLOCK_R // groups
    mask += batch * mask_b + first_query.to(tl.int64) * mask_s
    mask_rows = (s - first_query) * mask_s
    low = 0
    high = tl.max(newest, 0) + 1
    if MASK == 2:
        span = spans + (batch * queries + s) * 2
        low = tl.minimum(tl.min(tl.load(span, mask=valid, other=2**30), 0), high) // BLOCK_T * BLOCK_T
        high = tl.minimum(high, tl.max(tl.load(span + 1, mask=valid, other=0), 0))
    if SPLIT:
        tiles = (tl.maximum(high - low, 0) + BLOCK_T - 1) // BLOCK_T
        share = (tiles + tl.num_programs(2) - 1) // tl.num_programs(2) * BLOCK_T
        low += tl.program_id(2) * share
        high = tl.minimum(high, low + share)
    # Tiles that all rows see whole, then the others.
    edge = low
    if MASK == 0:
        oldest = tl.min(tl.where(valid, newest, tokens), 0)
        edge = low + tl.maximum(tl.minimum(high, oldest + 1) - low, 0) // BLOCK_T * BLOCK_T
    maximum = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    if MASK == 0:
        acc, total, maximum = _add_tokens(
            acc, total, maximum, plain, keys, values, key_t, value_t, mask, mask_rows, mask_t, newest, low, edge,
            scaling_log2, cap_log2, False,
            DK, DV, BLOCK_DK, BLOCK_DV, CAUSAL, MASK, SOFTCAP, MATRIX, BLOCK_T, STAGES,
        )  # fmt: skip
    acc, total, maximum = _add_tokens(
        acc, total, maximum, plain, keys, values, key_t, value_t, mask, mask_rows, mask_t, newest, edge, high,
        scaling_log2, cap_log2, True,
        DK, DV, BLOCK_DK, BLOCK_DV, CAUSAL, MASK, SOFTCAP, MATRIX, BLOCK_T, STAGES,
    )  # fmt: skip
    inside = valid[:, None] & (dv < DV)[None, :]
    if SPLIT:
        row = (tl.program_id(2) * tl.num_programs(1) + head).to(tl.int64) * rows + r
        tl.store(lse + row, log2_sum(finite(maximum), total), mask=valid)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(partial + row[:, None] * DV + dv[None, :], acc, mask=inside)
    else:
        total = tl.where(total > 0, total, 1.0)
        if HAS_AUX:
            aux = tl.load(s_aux + head_q, mask=valid, other=0.0).to(tl.float32) * LOG2E
            total += tl.exp2(aux - finite(maximum))
        at = out + batch * out_b + s.to(tl.int64) * out_s + head_q * out_h  # [BR]
        tl.store(at[:, None] + dv[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
