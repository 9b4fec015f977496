"""Attention of many queries over compressed history and the new tokens, in one kernel.

A program holds BLOCK_R query rows of one KV head (row r = s G + g: all G heads of a few queries) and walks over its
share of the tokens, FlashAttention-style: first the packed blocks, with the rows rotated by R, unpacking each tile
once for all rows; then its accumulator is rotated back, and it goes on over the dense tokens (sinks, residual, new
tokens; bottom-right causal) with the plain rows. No history is ever dense in memory. Scratch is the rows themselves
in fp16, and partial results where several programs share the tokens of a tile of rows.

Packed keys are in fp16 less a `reference_key` c of the program, close to their means: fp16 then rounds them to their
own size and not to that of the means. The product of a row with c is added to the row's maximum after the last block.
Loud channels (`tq_kernels.codec.loud`) are 0 in R q / f, and make products of their own, less their first means.

    x[r, t]   = q[r] . k[t]    packed: (R q[r] / f) . (key_scale[t] key_level[t] + mean - c) + (R q[r] / f) . c
    out[r, :] = R^T sum_packed p value_scale value_level / f' + sum_dense p v,  p = softmax(scaling x)

Bounds on sm_90, D = 128, a block of 128 tokens and 128 rows, in clocks of a multiprocessor: products 2048;
exponentials 1024; 839 instructions a warp at 4 bits, 8 warps on 4 schedulers, 1680 (a third of them unpack 256 elements
a token); tiles through shared memory 1800. With one program a multiprocessor, products and the rest come one after the
other, about half of the product rate; several programs overlap them but have fewer registers or unpack more often.
Bytes do not matter: a block's 17 KB are read once for 128 rows.
"""

from collections import namedtuple

import triton
import triton.language as tl

from ..codec.loud import LOUD_TILE, coded_divisors, loud_channels_of
from ..common.device import constants_of
from ..common.launcher import States
from ..common.schedule import (
    DenseTokens,
    Mask,
    NewTokens,
    StreamBlocks,
    dense_rows,
    first_block_column,
    lengths,
    packed_of,
    parts_of,
)
from ..common.softmax import LOG2E, SoftmaxState, bounded, empty_state, finite, log2_sum, rescaled, update, weights
from ..common.unpack import unpack_scales
from ..format import TOKENS
from .tiles import (
    PrefixMask,
    Scale,
    channel_of,
    key_tiles,
    logits,
    loud_tiles,
    masked,
    normalised_rows,
    opaque,
    reference_key,
    row_tile,
    spill,
    value_tiles,
)

TILE = tl.constexpr(64)


Packed = namedtuple("Packed", "blocks key_rotation value_rotation key_channel_scales value_channel_scales")
"""Packed blocks, with the rotations and channel scales of queries and outputs.

Args:
    blocks: [B, Hkv, N, BLOCK_WORDS] int32; with a block table [pages, Hkv, BLOCK_WORDS].
    key_rotation, value_rotation: [DKP, DKP] and [DVP, DVP] fp16, sqrt(DKP) R and sqrt(DVP) R.
    key_channel_scales, value_channel_scales: f [B, Hkv, DK] and f' [B, Hkv, DV] fp16.
"""


PrefixTables = namedtuple("PrefixTables", "cu_seqlens_q cu_seqlens_k block_table packed_blocks")
"""Sequences over pages: [B + 1], [B + 1], [B, W] and [B] int32."""


PrefixNumbers = namedtuple(
    "PrefixNumbers",
    "blocks_b blocks_h rows groups kv_heads blocks sink_count residual_count ring sinks new_count queries scaling_log2 "
    "cap_log2 tile_count count width lse_h",
)
"""Numbers of `prefix_attention`.

Args:
    blocks_b, blocks_h: Strides in blocks.
    rows, groups, queries: G * S, G, S.
    scaling_log2, cap_log2: Scaling and softcap, times log2(e).
    tile_count: Tiles of rows.
    count, width: With a block table B and W.
    lse_h: Stride of `new_lse` over heads.
"""


PrefixShape = namedtuple(
    "PrefixShape",
    "DK DV DKP DVP BLOCK_DK BLOCK_DV KEY_BITS VALUE_BITS CAUSAL MASK BOUNDS HAS_AUX SPLIT BLOCK_R STEP ASM "
    "BLOCK_WORDS LOUD ALIGNED SINKS RING ROWS BLOCK_B MERGE",
    defaults=(0, 0, 0, 0, False),
)
"""Constants of `prefix_attention`: STEP, 64 or 128, is the number of tokens between two updates of the maximum.
ALIGNED: dense rows and new tokens are multiples of 16 bytes. SINKS to BLOCK_B are `Pages.place` and the padded number
of sequences, 0 without a block table. MERGE: `out` and `new_lse` have the attention to the new tokens."""


@triton.jit
def _key_matrix(packed: Packed, channel, exists, C: tl.constexpr):
    """Load the rotation of query rows, divided by the channel scales of the keys: [BDK in, BDK column] fp16; rows of
    loud channels are 0."""
    dk = tl.arange(0, C.BLOCK_DK)
    matrix = tl.load(
        packed.key_rotation + channel[None, :] * C.DKP + dk[:, None],
        mask=exists[None, :] & (dk < C.DKP)[:, None],
        other=0.0,
    )
    factor = tl.load(packed.key_channel_scales + tl.program_id(1) * C.DK + dk, mask=dk < C.DK, other=1.0)
    inverse = 1.0 / coded_divisors(factor, C.LOUD)
    return (matrix.to(tl.float32) * inverse[:, None]).to(tl.float16)


@triton.jit
def _loud_rows(rows, row_mask, largest, packed: Packed, C: tl.constexpr):
    """Load the loud channels of query rows at pointers `rows` [BR], divided by `largest` [BR] and by the sizes of their
    channel scales: [BR, LOUD_TILE] float32."""
    index, size = loud_channels_of(packed.key_channel_scales + tl.program_id(1) * C.DK, C.DK, C.BLOCK_DK, LOUD_TILE)
    q = tl.load(rows[:, None] + index[None, :], mask=row_mask[:, None] & (size > 0)[None, :], other=0.0)
    return q.to(tl.float32) / (largest[:, None] * tl.where(size > 0, size, 1.0)[None, :])


@triton.jit
def _rotated_back(acc, packed: Packed, channel, exists, C: tl.constexpr):
    """Compute R^T acc / f' [BR, BDV]. Rows are normalised: fp16 then holds any output to 11 bits."""
    dv = tl.arange(0, C.BLOCK_DV)
    peak = tl.max(tl.abs(tl.where(exists[None, :], acc, 0.0)), 1)
    peak = tl.where(peak > 0, peak, 1.0)
    matrix = tl.load(
        packed.value_rotation + channel[:, None] * C.DVP + dv[None, :],
        mask=exists[:, None] & (dv < C.DVP)[None, :],
        other=0.0,
    )  # [BDV column, BDV out]
    operand = tl.where(exists[None, :], acc / peak[:, None], 0.0).to(tl.float16)
    factor = tl.load(packed.value_channel_scales + tl.program_id(1) * C.DV + dv, mask=dv < C.DV, other=1.0).to(
        tl.float32
    )
    return tl.dot(operand, matrix) * (peak * (C.DVP**-0.5))[:, None] / factor[None, :]


@triton.jit
def _row_of(n: PrefixNumbers, r):
    """Offsets of rows `r` [BR] of the program's sequence and KV head in its part of `lse`."""
    return (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * n.rows + r


@triton.jit
def _add_blocks(
    state, plain, query_at, row_mask, largest, first_row, rows, scale: Scale, mask: PrefixMask, packed: Packed,
    blocks: StreamBlocks, first, last, sinks, lse, operand_rows, n: PrefixNumbers, C: tl.constexpr,
):  # fmt: skip
    """Attend to packed blocks `first` to `last`, and rotate the accumulator back."""
    KEY: tl.constexpr = C.DKP * C.KEY_BITS
    VALUE: tl.constexpr = C.DVP * C.VALUE_BITS
    loud_rows = None
    if C.LOUD > 0:
        loud_rows = _loud_rows(query_at, row_mask, largest, packed, C)
    r = first_row + tl.arange(0, C.BLOCK_R)
    dk = tl.arange(0, C.BLOCK_DK)
    key_channel, key_exists = channel_of(dk, C.DKP, C.BLOCK_DK, C.KEY_BITS)
    value_channel, value_exists = channel_of(tl.arange(0, C.BLOCK_DV), C.DVP, C.BLOCK_DV, C.VALUE_BITS)
    matrix = _key_matrix(packed, key_channel, key_exists, C)
    if blocks.block_table is None:
        first_parts = parts_of(blocks.head + first * C.BLOCK_WORDS, KEY, VALUE, C.LOUD)
    else:
        page = tl.load(blocks.block_table + first).to(tl.int64)
        first_parts = parts_of(blocks.head + page * blocks.page_blocks * C.BLOCK_WORDS, KEY, VALUE, C.LOUD)
    rotated = tl.dot(plain, matrix) * (C.DKP**-0.5)
    scale0, _ = unpack_scales(tl.load(first_parts.scales))
    reference = reference_key(first_parts.means + key_channel, scale0, dk, key_exists)  # [BDK]
    common = tl.sum(rotated * reference[None, :], 1)
    loud_reference = None
    if C.LOUD > 0:
        j = tl.arange(0, LOUD_TILE)[None, :]
        loud_reference = tl.load(first_parts.means + C.DKP + 2 * j, mask=j < C.LOUD, other=0.0)
        common += tl.sum(loud_rows * loud_reference, 1)
        loud_rows = spill(loud_rows.to(tl.float16), operand_rows, n.tile_count, C.BLOCK_R, C.BLOCK_DK)
    if not C.BOUNDS:
        # Kept in memory: for sm_80 there are no registers left.
        tl.store(lse + _row_of(n, r), common, mask=r < rows)
    reference = spill(reference[None, :], operand_rows, n.tile_count, C.BLOCK_R, C.BLOCK_DK)
    reference = tl.reshape(reference, [C.BLOCK_DK])
    rotated = spill(rotated.to(tl.float16), operand_rows, n.tile_count, C.BLOCK_R, C.BLOCK_DK)
    # A second block ahead would take registers that the products need: 13 % slower (H200, 4 bits).
    for block in tl.range(first, last, num_stages=1):
        if blocks.block_table is None:
            parts = parts_of(blocks.head + block * C.BLOCK_WORDS, KEY, VALUE, C.LOUD)
        else:
            parts = parts_of(blocks.head + page * blocks.page_blocks * C.BLOCK_WORDS, KEY, VALUE, C.LOUD)
            page = tl.load(blocks.block_table + block + 1, mask=block + 1 < last, other=0).to(tl.int64)
        scales_at = parts.scales + tl.arange(0, 32)
        key_scales, value_scales = (), ()
        for plane in tl.static_range(4):
            key_scale, value_scale = unpack_scales(tl.load(scales_at + 32 * plane))
            key_scales += (key_scale,)
            value_scales += (value_scale,)
        mean = tl.load(parts.means + key_channel, mask=key_exists, other=0.0)  # [BDK]
        mean = mean - reference
        keys = key_tiles(parts.key_words, key_scales, mean, C.DKP, C.BLOCK_DK, C.KEY_BITS, C.ASM)
        loud = (None, None)
        if C.LOUD > 0:
            loud = loud_tiles(parts.loud, parts.means + C.DKP, loud_reference, C.LOUD, C.ASM)
        values = value_tiles(parts.value_words, value_scales, C.DVP, C.BLOCK_DV, C.VALUE_BITS, C.ASM)
        t = sinks + block * TOKENS + tl.arange(0, TILE)
        x0 = logits(rotated, keys[0], loud_rows, loud[0], common, scale, mask, t, C.MASK, C.BOUNDS)
        if C.STEP == 64:
            state = update(state, x0, tl.trans(values[0]), scale.gain, C.MASK > 0)
        x1 = logits(rotated, keys[1], loud_rows, loud[1], common, scale, mask, t + TILE, C.MASK, C.BOUNDS)
        if C.STEP == 64:
            state = update(state, x1, tl.trans(values[1]), scale.gain, C.MASK > 0)
        else:
            largest = tl.maximum(tl.max(x0, 1), tl.max(x1, 1))
            maximum, shift, decay = rescaled(state.maximum, largest, scale.gain, C.MASK > 0)
            p0 = weights(x0, shift, scale.gain)
            p1 = weights(x1, shift, scale.gain)
            total = state.total * decay + tl.sum(p0 + p1, 1)
            output = state.output * decay[:, None]
            output = tl.dot(p0.to(tl.float16), tl.trans(values[0]), output)
            output = tl.dot(p1.to(tl.float16), tl.trans(values[1]), output)
            state = SoftmaxState(maximum, total, output)
    maximum = state.maximum
    if not C.BOUNDS:
        r = opaque(first_row, C.ASM) + tl.arange(0, C.BLOCK_R)
        row = _row_of(n, r)
        tl.debug_barrier()
        maximum += tl.load(lse + row, mask=r < rows, other=0.0)
        tl.debug_barrier()
    return SoftmaxState(maximum, state.total, _rotated_back(state.output, packed, value_channel, value_exists, C))


@triton.jit
def _add_dense(
    state, plain, newest, scale: Scale, mask: PrefixMask, dense: DenseTokens, low, blocks, C: tl.constexpr,
):  # fmt: skip
    """Attend to dense tokens from `low` on; rows see those up to `newest` [BR]. `blocks` blocks are packed."""
    dk = tl.arange(0, C.BLOCK_DK)
    dv = tl.arange(0, C.BLOCK_DV)
    for start in tl.range(low, dense.count, TILE, num_stages=1):
        t = start + tl.arange(0, TILE)
        inside = t < dense.count
        k_row, v_row = dense_rows(dense, t, C, C.ALIGNED)
        k = tl.load(k_row[:, None] + dk[None, :], mask=inside[:, None] & (dk < C.DK)[None, :], other=0.0)
        v = tl.load(v_row[:, None] + dv[None, :], mask=inside[:, None] & (dv < C.DV)[None, :], other=0.0)
        x = tl.dot(plain, tl.trans(k.to(tl.float16)))  # [BR, 64]
        if C.BOUNDS:
            x = bounded(x * scale.factor[:, None], scale.cap_log2, C.BOUNDS)
        if C.CAUSAL:
            x = tl.where(inside[None, :] & (t[None, :] <= newest[:, None]), x, -float("inf"))
        else:
            x = tl.where(inside[None, :], x, -float("inf"))
        if C.MASK > 0:
            position = tl.where(t < dense.sinks, t, t + blocks * TOKENS)
            x = masked(x, mask, position, inside, C.MASK)
        state = update(state, x, v.to(tl.float16), scale.gain, True)
    return state


@triton.jit
def _load_rows(query: States, head_q, rows, groups, first_row, C: tl.constexpr):
    """Load BLOCK_R of a sequence's `rows` rows from head `head_q` on: pointers [BR], their tokens [BR], which of them
    exist [BR], and `normalised_rows`."""
    dk = tl.arange(0, C.BLOCK_DK)
    r = first_row + tl.arange(0, C.BLOCK_R)
    s = r // groups
    at = query.start + (head_q + r % groups) * query.strides.head + s.to(tl.int64) * query.strides.token
    exists = r < rows
    plain, largest = normalised_rows(at[:, None] + dk[None, :], exists[:, None] & (dk < C.DK)[None, :])
    return at, s, exists, plain, largest


@triton.jit
def _share(first_row, rows, groups, queries, blocks, dense_count, new_count, C: tl.constexpr):
    """Share of a program in units of 128 tokens, packed blocks, then dense tokens that its rows see: its first unit and
    the one after its last, the number of all, and that of dense tokens."""
    if not C.MERGE:
        dense_count += new_count
    if C.CAUSAL and not C.MERGE:
        dense_count = tl.minimum(
            dense_count, dense_count - queries + 1 + (tl.minimum(first_row + C.BLOCK_R, rows) - 1) // groups
        )
    units = blocks + (dense_count + TOKENS - 1) // TOKENS
    first = 0
    last = units
    if C.SPLIT:
        split = tl.program_id(2)
        splits = tl.num_programs(2)
        first = (units // splits) * split + (units % splits) * split // splits
        last = (units // splits) * (split + 1) + (units % splits) * (split + 1) // splits
    return first, last, units, dense_count


@triton.jit
def _store(
    state, scale: Scale, first_row, first_head, rows, lse, partial, out: States, s_aux, new_lse, merges,
    n: PrefixNumbers, C: tl.constexpr,
):  # fmt: skip
    """Store what rows have of a share of the tokens, or the output. With MERGE the attention to new tokens, in `out`
    and `new_lse`, is added if it `merges`; both point to the sequence's first query."""
    dv = tl.arange(0, C.BLOCK_DV)
    r = opaque(first_row, C.ASM) + tl.arange(0, C.BLOCK_R)
    row_mask = r < rows
    s = r // n.groups
    head_q = first_head + r % n.groups
    maximum, total, acc = finite(state.maximum) * scale.gain, state.total, state.output
    inside = row_mask[:, None] & (dv < C.DV)[None, :]
    at = out.start + s.to(tl.int64) * out.strides.token + head_q * out.strides.head  # [BR]
    if C.MERGE:
        if merges:
            new_at = new_lse + head_q.to(tl.int64) * n.lse_h + s
            new_top = tl.load(new_at, mask=row_mask, other=0.0) * LOG2E
            top = tl.maximum(tl.where(total > 0, maximum, new_top), new_top)
            weight, decay = tl.exp2(new_top - top), tl.where(total > 0, tl.exp2(maximum - top), 0.0)
            new = tl.load(at[:, None] + dv[None, :], mask=inside, other=0.0).to(tl.float32)
            acc = acc * decay[:, None] + new * weight[:, None]
            maximum, total = top, total * decay + weight
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    if C.SPLIT:
        row = _row_of(n, r)
        tl.store(lse + row, log2_sum(maximum, total), mask=row_mask)
        tl.store(partial + row[:, None] * C.DV + dv[None, :], acc * inverse[:, None], mask=inside)
    else:
        if C.HAS_AUX:
            aux = tl.load(s_aux + head_q, mask=row_mask, other=0.0).to(tl.float32) * LOG2E
            inverse = 1.0 / (tl.where(total > 0, total, 1.0) + tl.exp2(aux - maximum))
        tl.store(at[:, None] + dv[None, :], (acc * inverse[:, None]).to(out.start.dtype.element_ty), mask=inside)


@triton.jit
def prefix_attention(
    query: States,  # [B, Hq, S, DK], last dimension contiguous
    packed: Packed,
    kv_rows,  # [B, Hkv, ring + sinks, DK + DV] in the model's dtype; with a block table [pages, Hkv, ROWS, DK + DV]
    new_keys: States, new_values: States,  # [B, Hkv, new_count, DK] and [B, Hkv, new_count, DV]
    mask: Mask,
    s_aux,  # [Hq], any float dtype
    out: States,  # [B, Hq, S, DV], last dimension contiguous; with splits unused
    partial,  # [splits, B * Hkv * rows, DV] float32, normalised; unused without splits
    lse,  # [splits, B * Hkv * rows] float32, base 2; holds rows . reference key until the last block
    operand_rows,  # [splits * B * Hkv * tiles of rows, BLOCK_R, BLOCK_DK] fp16, scratch
    tables: PrefixTables,  # or `None`
    new_lse,  # [Hq, T] float32, base e, with MERGE
    n: PrefixNumbers,
    SHAPE: tl.constexpr,  # a `PrefixShape`
):  # fmt: skip
    """Attend to everything with many queries. Grid: (row tiles, B * Hkv, splits).

    With a block table: sequences with several new tokens, over the pages of `tq_kernels.common.schedule`. Tensors then
    have one batch row with the new tokens of all sequences, and `rows` counts rows of all sequences. Programs without a
    tile end at once. With MERGE, only cached tokens are attended to, and rows without any stay as they are.
    """
    C: tl.constexpr = constants_of(SHAPE)
    batch, kv_head = (tl.program_id(1) // n.kv_heads).to(tl.int64), (tl.program_id(1) % n.kv_heads).to(tl.int64)
    groups, rows, queries, new_count = n.groups, n.rows, n.queries, n.new_count
    blocks, sink_count, residual_count = n.blocks, n.sink_count, n.residual_count
    queries_at, keys_at, values_at, out_at = query.start, new_keys.start, new_values.start, out.start
    head_blocks = packed.blocks + kv_head * n.blocks_h * C.BLOCK_WORDS
    # Start the last rows first: they see the most tokens.
    if tables is None:
        first_row = (n.tile_count - 1 - tl.program_id(0)) * C.BLOCK_R
        history = StreamBlocks(head_blocks + batch * n.blocks_b * C.BLOCK_WORDS, None, None)
    else:
        exists, sequence, first_row = row_tile(
            tables.cu_seqlens_q, tables.cu_seqlens_k, n.count, groups, tl.program_id(0), C.BLOCK_R, C.BLOCK_B
        )
        if not exists:
            return
        token, queries, past = lengths(tables.cu_seqlens_q, tables.cu_seqlens_k, sequence, n.count)
        if C.MERGE and not C.SPLIT:
            if past == 0:
                return
        new_count, rows = queries, queries * groups
        blocks, sink_count = packed_of(tables.packed_blocks, sequence, n.count), tl.minimum(past, C.SINKS)
        residual_count = past - sink_count - blocks * TOKENS
        pages = tables.block_table + sequence.to(tl.int64) * n.width
        history = StreamBlocks(head_blocks, pages + first_block_column(C.SINKS, C.RING, C.ROWS), n.blocks_b)
        queries_at += token.to(tl.int64) * query.strides.token
        out_at += token.to(tl.int64) * out.strides.token
        keys_at += token.to(tl.int64) * new_keys.strides.token
        values_at += token.to(tl.int64) * new_values.strides.token
        partial += token.to(tl.int64) * (groups * C.DV)
        lse += token * groups
        if C.MERGE:
            new_lse += token
    # The program's share.
    first, last, units, dense_count = _share(
        first_row, rows, groups, queries, blocks, sink_count + residual_count, new_count, C
    )
    own, head_q = States(queries_at + batch * query.strides.batch, query.strides), kv_head * groups
    query_at, s, row_mask, plain, largest = _load_rows(own, head_q, rows, groups, first_row, C)
    factor = largest * n.scaling_log2
    scale = Scale(factor, tl.full([C.BLOCK_R], 1.0, tl.float32) if C.BOUNDS else factor, n.cap_log2)
    state = empty_state(C.BLOCK_R, C.BLOCK_DV)
    mask_at = mask.start + batch * mask.b if C.MASK > 0 else None

    # Packed blocks, with rotated rows.
    if first < tl.minimum(last, blocks):
        allowed = PrefixMask(mask_at, tl.minimum(s, queries - 1) * mask.s if C.MASK > 0 else None, mask.t)
        state = _add_blocks(
            state, plain, query_at, row_mask, largest, first_row, rows, scale, allowed, packed, history, first,
            tl.minimum(last, blocks), sink_count, lse, operand_rows, n, C,
        )  # fmt: skip

    # Dense tokens, with the rows as they are.
    if last > blocks:
        first_row = opaque(first_row, C.ASM)
        _, s, _, plain, _ = _load_rows(own, head_q, rows, groups, first_row, C)
        plain = spill(plain, operand_rows, n.tile_count, C.BLOCK_R, C.BLOCK_DK)
        allowed = PrefixMask(mask_at, tl.minimum(s, queries - 1) * mask.s if C.MASK > 0 else None, mask.t)
        low = tl.maximum(first - blocks, 0) * TOKENS
        high = tl.minimum((last - blocks) * TOKENS, dense_count)
        keys_at += batch * new_keys.strides.batch + kv_head * new_keys.strides.head
        values_at += batch * new_values.strides.batch + kv_head * new_values.strides.head
        new = NewTokens(keys_at, values_at, new_keys.strides.token, new_values.strides.token)
        cached = sink_count + residual_count
        if tables is None:
            own_rows = kv_rows + (batch * n.kv_heads + kv_head) * (n.ring + n.sinks) * (C.DK + C.DV)
            start = (blocks * TOKENS) % n.ring
            dense = DenseTokens(own_rows, None, None, None, n.sinks, n.ring, start, cached, new, high)
        else:
            start = (blocks * TOKENS) % C.RING
            dense = DenseTokens(kv_rows, pages, n.blocks_b, kv_head, C.SINKS, C.RING, start, cached, new, high)
        newest = cached + new_count - queries + s  # [BR], the last dense token a row sees
        state = _add_dense(state, plain, newest, scale, allowed, dense, low, blocks, C)
    to = States(out_at + batch * out.strides.batch, out.strides)
    _store(state, scale, first_row, head_q, rows, lse, partial, to, s_aux, new_lse, last == units, n, C)
