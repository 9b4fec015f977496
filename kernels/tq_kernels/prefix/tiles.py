"""Tiles of packed blocks for attention of many queries: whole fp16 operands, scaled while they unpack.

Decode applies scales to its few logits and probabilities. With 64 and more rows the operands are the smaller side: one
packed multiply-add for two elements turns levels into rotated keys (scale, and mean less a reference) or values. A tile
has 64 tokens, two planes of a block.
"""

from collections import namedtuple

import triton
import triton.language as tl

from ..codec.loud import load_loud
from ..common.device import AMPERE
from ..common.schedule import lengths, located
from ..common.softmax import LOG2E, SoftmaxState, bounded, empty_state, finite, log2_sum, merge, normalize, power_of_two
from ..common.unpack import load_levels, scaled
from ..format import CODE


@triton.jit
def reference_key(means, scale, column, exists):
    """Rotated key [BD] fp16 close to the keys of a program's blocks, which are stored relative to it.

    The mean of the first block, at `means` [BD] pointers: fp16 would round the keys of a model with large means to the
    size of the means. A fraction of `scale` that differs by channel is added and keeps rounding errors independent:
    with few levels and no mean, errors are equal in all channels of one level, and add up along a key.
    """
    dither = ((column * 40503) & 0xFFFF).to(tl.float32) * (1 / 65536) - 0.5  # [BD]
    mean = tl.load(means, mask=exists, other=0.0).to(tl.float32)
    return tl.where(exists, mean + dither * scale, 0.0).to(tl.float16)


@triton.jit
def vcat(top, bottom):
    """Join two [M, K] tiles one below the other, [2 M, K]."""
    pair = tl.permute(tl.join(top, bottom), [2, 0, 1])
    return tl.reshape(pair, [2 * top.shape[0], top.shape[1]])


@triton.jit
def stack(top, bottom):
    """Join two [M, K] tiles like `vcat`, neighbours along K last. Nothing moves either way, but Triton makes the
    dimension of the last join contiguous in shared memory."""
    left0, right0 = tl.split(tl.reshape(top, [top.shape[0], top.shape[1] // 2, 2]))
    left1, right1 = tl.split(tl.reshape(bottom, [top.shape[0], top.shape[1] // 2, 2]))
    pair = tl.join(vcat(left0, left1), vcat(right0, right1))
    return tl.reshape(pair, [2 * top.shape[0], top.shape[1]])


@triton.jit
def hcat(left, right):
    """Join two [M, K] tiles side by side, [M, 2 K]."""
    pair = tl.permute(tl.join(left, right), [0, 2, 1])
    return tl.reshape(pair, [left.shape[0], 2 * left.shape[1]])


@triton.jit
def key_tiles(words, scales, mean, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Load the rotated keys of a block as two [64, BLOCK_D] fp16 tiles.

    Args:
        words: Pointer to the block's key words.
        scales: Scales of four planes, [32] fp16 each.
        mean: [BLOCK_D] fp16 in the order of `channel_of`.
    """
    QUARTERS: tl.constexpr = CODE[BITS].quarters
    row = tl.arange(0, 32)[:, None]
    mean = mean[None, :]
    column = tl.arange(0, BLOCK_D // QUARTERS)[None, :]
    inside = None if BLOCK_D == DIM else column < DIM // QUARTERS
    parts = _quarters(words, row, column, inside, DIM, BITS, False, ASM)
    k = ()
    for i in tl.static_range(4):
        x = parts[0][i]
        if QUARTERS > 1:
            x = hcat(hcat(x, parts[1][i]), hcat(parts[2][i], parts[3][i]))
        k += (scaled(x, scales[i][:, None], mean, ASM),)
    return stack(k[0], k[1]), stack(k[2], k[3])


@triton.jit
def loud_tiles(words, means, reference, LOUD: tl.constexpr, ASM: tl.constexpr):
    """Load the loud channels of a block's keys, less `reference` [1, LOUD_TILE], as two [64, LOUD_TILE] fp16 tiles;
    `words` and `means` are pointers to the first ones."""
    first, last, unit, mean = load_loud(words, means, LOUD, ASM)
    mean = mean - reference
    return scaled(first, unit, mean, ASM), scaled(last, unit, mean, ASM)


@triton.jit
def value_tiles(words, scales, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Load the rotated values of a block as two [BLOCK_D, 64] fp16 tiles; arguments as in `key_tiles`."""
    QUARTERS: tl.constexpr = CODE[BITS].quarters
    column = tl.arange(0, 32)[None, :]
    row = tl.arange(0, BLOCK_D // QUARTERS)[:, None]
    inside = None if BLOCK_D == DIM else row < DIM // QUARTERS
    parts = _quarters(words, row, column, inside, DIM, BITS, True, ASM)
    v = ()
    for i in tl.static_range(4):
        x = parts[0][i]
        if QUARTERS > 1:
            x = stack(stack(x, parts[1][i]), stack(parts[2][i], parts[3][i]))
        v += (scaled(x, scales[i][None, :], None, ASM),)
    return hcat(v[0], v[1]), hcat(v[2], v[3])


@triton.jit
def _quarters(
    words, row, column, inside, DIM: tl.constexpr, BITS: tl.constexpr, IS_VALUE: tl.constexpr, ASM: tl.constexpr
):
    """Load the levels of each part of the channels that shares words with the others: four planes."""
    QUARTERS: tl.constexpr = CODE[BITS].quarters
    quarters = ()
    for quarter in tl.static_range(QUARTERS):
        quarters += (load_levels(words, row, column, inside, quarter, QUARTERS, DIM, BITS, IS_VALUE, False, ASM),)
    return quarters


@triton.jit
def channel_of(column, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BITS: tl.constexpr):
    """Channel in column `column` of a tile, and whether it exists: each quarter is padded."""
    QUARTERS: tl.constexpr = CODE[BITS].quarters
    if QUARTERS == 1:
        return column, column < DIM
    else:
        within = column % (BLOCK_D // QUARTERS)
        return column // (BLOCK_D // QUARTERS) * (DIM // QUARTERS) + within, within < DIM // QUARTERS


PrefixMask = namedtuple("PrefixMask", "pointer rows stride_t")
"""Mask of a sequence: its rows are `rows` [BR] elements from `pointer`, its tokens `stride_t` apart."""


Scale = namedtuple("Scale", "factor gain cap_log2")
"""Factors from products to logits in base 2: `factor` [BR] before the cap, `gain` [BR] after it."""


@triton.jit
def normalised_rows(pointers, inside):
    """Load rows [BR, BD] as fp16 with elements below 1, and the power of two [BR] divided by."""
    q = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    scale, inverse = power_of_two(tl.max(tl.abs(q), 1))
    return (q * inverse[:, None]).to(tl.float16), scale


@triton.jit
def opaque(x, ASM: tl.constexpr):
    """Return `x`, an int32 scalar or an fp16 tile, hidden from the compiler: it recomputes values from the result, and
    keeps no registers for them."""
    if ASM >= AMPERE:
        PACK: tl.constexpr = 2 if x.dtype == tl.float16 else 1
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK)
    else:
        return x


@triton.jit
def spill(operand, operand_rows, tile_count, BLOCK_R: tl.constexpr, BLOCK_DK: tl.constexpr):
    """Write `operand` [BR or 1, BDK or fewer] fp16 to memory and load it back.

    Triton keeps loaded operands in shared memory, others in registers. And an address that depends on the channel, used
    before the loop and in it, makes the compiler keep one register pair a channel through the loop.
    """
    tile = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tile_count + tl.program_id(0)
    at = operand_rows + tile.to(tl.int64) * (BLOCK_R * BLOCK_DK)
    at += tl.arange(0, operand.shape[0])[:, None] * BLOCK_DK + tl.arange(0, operand.shape[1])[None, :]
    tl.debug_barrier()
    tl.store(at, operand)
    tl.debug_barrier()
    return tl.load(at)


@triton.jit
def store_rows(
    state, s_aux, head_q, out, lse, partial, row, valid, DV: tl.constexpr, HAS_AUX: tl.constexpr, SPLIT: tl.constexpr
):
    """Store rows where `valid` [BR]: the output at pointers `out` [BR]; with SPLIT what they have of a share of the
    tokens, in row `row` [BR] of `lse` and `partial`. `head_q` [BR] are heads."""
    d = tl.arange(0, state.output.shape[1])
    inside = valid[:, None] & (d < DV)[None, :]
    if SPLIT:
        tl.store(lse + row, log2_sum(finite(state.maximum), state.total), mask=valid)
        tl.store(partial + row[:, None] * DV + d[None, :], normalize(state), mask=inside)
    else:
        total = tl.where(state.total > 0, state.total, 1.0)
        if HAS_AUX:
            aux = tl.load(s_aux + head_q, mask=valid, other=0.0).to(tl.float32) * LOG2E
            total += tl.exp2(aux - finite(state.maximum))
        tl.store(out[:, None] + d[None, :], (state.output / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def masked(x, mask: PrefixMask, t, valid, MASK: tl.constexpr):
    """Set x [BR, TILE] to -inf where tokens `t` [TILE] are masked; MASK 1: for all rows alike, 2: row by row."""
    at = t.to(tl.int64) * mask.stride_t
    if MASK == 1:
        allowed = (tl.load(mask.pointer + at, mask=valid, other=0) != 0)[None, :]
    else:
        allowed = tl.load(mask.pointer + mask.rows[:, None] + at[None, :], mask=valid[None, :], other=0) != 0
    return tl.where(allowed, x, -float("inf"))


@triton.jit
def logits(
    rows, keys, loud_rows, loud_keys, common, scale: Scale, mask: PrefixMask, t, MASK: tl.constexpr,
    BOUNDS: tl.constexpr,
):  # fmt: skip
    """Logits [BR, 64] of rows [BR, BD] and keys [64, BD] at positions `t`, and of their loud channels or `None`: in
    base 2 if capped, else before `common` [BR] and the rows' factor are applied."""
    # The other way round it spills on sm_80 with a cap.
    x = None if loud_rows is None else tl.dot(loud_rows, tl.trans(loud_keys))
    x = tl.dot(rows, tl.trans(keys), x)
    if BOUNDS:
        x = bounded(x * scale.factor[:, None] + (common * scale.factor)[:, None], scale.cap_log2, BOUNDS)
    if MASK > 0:
        x = masked(x, mask, t, t >= 0, MASK)
    return x


@triton.jit
def row_tile(cu_seqlens_q, cu_seqlens_k, count, groups, index, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr):
    """Map program `index` to (exists, sequence, first row), over the row tiles of all sequences with several new tokens
    in reverse order."""
    first, new, past = lengths(cu_seqlens_q, cu_seqlens_k, tl.arange(0, BLOCK_B), count)
    tiles = tl.where(new > 1, (new * groups + BLOCK_R - 1) // BLOCK_R, 0)
    tile = tl.sum(tiles, 0) - 1 - index
    sequence, before = located(tiles, tile)
    return tile >= 0, sequence, (tile - before) * BLOCK_R


@triton.jit(do_not_specialize=["rows", "groups", "kv_heads", "count", "splits"])
def merge_splits(
    partial,  # [splits, count, DV] float32, normalised
    lse,  # [splits, count] float32, base 2
    s_aux,  # [Hq], any float dtype
    out,  # [B, S, Hq, DV], last dimension contiguous
    tokens,  # [] int32 on the device, the number of queries to write at most; or None
    rows, groups,  # G * S, G
    kv_heads,
    count,  # B * Hkv * rows
    splits,
    strides,  # of `out`
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_R: tl.constexpr, HAS_AUX: tl.constexpr,
):  # fmt: skip
    """Merge the splits of each row, weighted by their share of the softmax. Grid: (count / BLOCK_R,)."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    valid = row < count
    dv = tl.arange(0, BLOCK_DV)
    head, r = row // rows, row % rows
    if tokens is not None:
        valid = valid & (r // groups < tl.load(tokens))
    head_q = head % kv_heads * groups + r % groups
    inside = valid[:, None] & (dv < DV)[None, :]
    state = empty_state(BLOCK_R, BLOCK_DV)
    if HAS_AUX:
        aux = tl.load(s_aux + head_q, mask=valid, other=0.0).to(tl.float32) * LOG2E
        state = SoftmaxState(aux, state.total + 1.0, state.output)
    at = row.to(tl.int64)
    for _ in tl.range(0, splits):
        log = tl.load(lse + at, mask=valid, other=-float("inf"))
        if tokens is None:
            part = tl.load(partial + at[:, None] * DV + dv[None, :], mask=inside, other=0.0)
        else:
            written = inside & (log > -float("inf"))[:, None]
            part = tl.load(partial + at[:, None] * DV + dv[None, :], mask=written, other=0.0)
        state = merge(state, log, part)
        at += count
    acc = normalize(state)
    out_b, out_s, out_h = strides
    at = out + (head // kv_heads).to(tl.int64) * out_b + (r // groups).to(tl.int64) * out_s + head_q * out_h
    tl.store(at[:, None] + dv[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "lse_h", "found_lse_h"])
def join_attention(
    mean, lse,  # [S, Hq, DIM] and [Hq, S] float32, base e: both become those of all tokens
    found, found_lse,  # likewise, of other tokens
    mean_s, mean_h, found_s, found_h,
    count,  # S
    lse_h, found_lse_h,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Join attention to some tokens with that to others. Grid: (S / BLOCK_S, Hq). Last dimensions are contiguous."""
    s, head = (tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64), tl.program_id(1).to(tl.int64)
    d, exists = tl.arange(0, BLOCK_D)[None, :], s < count
    inside = exists[:, None] & (d < DIM)
    old = tl.load(lse + head * lse_h + s, mask=exists, other=0.0)
    new = tl.load(found_lse + head * found_lse_h + s, mask=exists, other=0.0)
    top = tl.maximum(old, new)
    total = top + tl.log(tl.exp(old - top) + tl.exp(new - top))
    at = mean + (s * mean_s + head * mean_h)[:, None] + d
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(found + (s * found_s + head * found_h)[:, None] + d, mask=inside, other=0.0).to(tl.float32)
    joined = first + tl.exp(new - total)[:, None] * (second - first)
    tl.store(lse + head * lse_h + s, total, mask=exists)
    tl.store(at, joined.to(mean.dtype.element_ty), mask=inside)
