"""Contributions of one block to decode attention: scores from key words, operands from value words, scales."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from ..common.device import AMPERE
from ..common.schedule import LINE, DecodeNumbers, DecodeTensors, dense_rows, fetch
from ..common.softmax import bounded, finite
from ..common.unpack import chunk_start, load_levels, load_tile, unpack_scales
from ..format import CODE

ROWS32 = tl.constexpr(32)
"""Number of tokens of a plane."""


DecodeShape = namedtuple(
    "DecodeShape",
    "DK DV DKP DVP DM KEY_BITS VALUE_BITS CAUSAL MASK BOUNDS KEY_CHUNKS VALUE_CHUNKS BLOCK_KC BLOCK_VC BLOCK_DK "
    "BLOCK_DM BLOCK_MEAN BLOCK_R SMALL ASM PDL BLOCK_WORDS LOUD SINKS RING ROWS BLOCK_B",
)
"""Constants of a split kernel.

Args:
    DK, DV: Channels of keys and of values as models see them.
    DKP, DVP: The same, padded, as they are packed.
    DM: max(DV, DVP), the stride of partial results.
    KEY_BITS, VALUE_BITS: Bits of a code.
    CAUSAL: Whether query s does not see the last S - 1 - s tokens.
    MASK: 0: no mask, 1: one row for all queries, 2: a row for each.
    BOUNDS: Bound of logits (see `bounded`).
    KEY_CHUNKS, VALUE_CHUNKS: Number of parts of the channels, computed one after the other.
    BLOCK_KC, BLOCK_VC: Channels of a part, padded to a power of two.
    BLOCK_DK, BLOCK_DM: DKP and DM padded to powers of two.
    BLOCK_MEAN: Elements of a key mean's tile: BLOCK_KC where the mean is taken in the same parts.
    BLOCK_R: Query rows of a tile.
    SMALL: Whether levels are small (`tq_kernels.format.SMALL_UNIT`).
    ASM: `Target.asm`.
    PDL: Whether the merge may start and wait in the multiprocessors.
    BLOCK_WORDS: int32 words of a block.
    LOUD: Number of loud channels.
    SINKS, RING, ROWS: With a block table `Pages.place`; 0 without.
    BLOCK_B: With a block table sequences, padded to a power of two; 0 without.
"""


@triton.constexpr_function
def level_unit(bits, small):
    """Factor of the levels in `key_scores` and `value_levels`."""
    return CODE[bits].small_unit if small else 1.0


@triton.jit
def prefetch(pointer, LINES: tl.constexpr, valid):
    """Start to move LINES lines of 128 bytes to the L2 cache."""
    line = tl.arange(0, triton.next_power_of_2(LINES))
    if valid:
        fetch(pointer + tl.minimum(line, LINES - 1) * 32)


@triton.jit
def per_lane(x, ASM: tl.constexpr):
    """Return `x`, an int32 scalar that bounds a loop over blocks, as if it differed between lanes.

    With a uniform bound the compiler recomputes the predicate of every prefetching copy from a uniform register, 200
    cycles a block.
    """
    if ASM >= AMPERE:  # adds zero
        return tl.inline_asm_elementwise(
            "{ .reg .b32 z; mov.u32 z, %lanemask_lt; shr.u32 z, z, 31; add.s32 $0, $1, z; }",
            "=r,r",
            [x],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return x


@triton.jit
def key_scores(words, q, row, column, C: tl.constexpr):
    """level_unit * level . q of a block's tokens, four [32, BR] float32 planes; `q` are the KEY_CHUNKS parts of the
    queries' channels, [BC, BR]."""
    WIDTH: tl.constexpr = C.DKP // C.KEY_CHUNKS
    mask = None if column.shape[1] == WIDTH else column < WIDTH
    s = ()
    for _ in tl.static_range(4):
        s += (tl.zeros([ROWS32, C.BLOCK_R], tl.float32),)
    signs = None
    for chunk in tl.static_range(C.KEY_CHUNKS):
        if CODE[C.KEY_BITS].has_sign_words and chunk % 4 == 0:
            begin = words + chunk // 4 * (WIDTH // 2)
            signs = load_tile(begin, row, column, mask, CODE[C.KEY_BITS].tiles - 1, C.DKP, False, C.ASM)
        levels = load_levels(
            words, row, column, mask, chunk, C.KEY_CHUNKS, C.DKP, C.KEY_BITS, False, C.SMALL, C.ASM, signs
        )
        added = ()
        for plane in tl.static_range(4):
            added += (tl.dot(levels[plane], q[chunk], s[plane]),)
        s = added
    return s


@triton.jit
def mean_scores(means, q, channel, C: tl.constexpr):
    """mean . q of a block, [32, BR] float32 with equal rows; `means` points to channel 0, `channel` is [BM], `q` are
    [BM, BR], the whole queries or the KEY_CHUNKS parts of their channels."""
    CHUNKS: tl.constexpr = C.KEY_CHUNKS if C.BLOCK_MEAN == C.BLOCK_KC else 1
    WIDTH: tl.constexpr = C.DKP // CHUNKS
    WHOLE: tl.constexpr = C.BLOCK_MEAN == WIDTH
    s = tl.zeros([ROWS32, C.BLOCK_R], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        at = means + chunk_start(chunk, CHUNKS, C.DKP, C.KEY_BITS) + channel
        mean = tl.load(at, mask=None if WHOLE else channel < WIDTH, other=None if WHOLE else 0.0)  # [BM]
        s = tl.dot(tl.broadcast_to(mean[None, :], [ROWS32, C.BLOCK_MEAN]), q[chunk], s)
    return s


@triton.jit
def value_levels(words, row, column, CHUNK: tl.constexpr, C: tl.constexpr):
    """Load part CHUNK (of VALUE_CHUNKS) of a block's values: four planes [BV, 32], times `level_unit`."""
    HEIGHT: tl.constexpr = C.DVP // C.VALUE_CHUNKS
    mask = None if row.shape[0] == HEIGHT else row < HEIGHT
    return load_levels(words, row, column, mask, CHUNK, C.VALUE_CHUNKS, C.DVP, C.VALUE_BITS, True, C.SMALL, C.ASM)


@triton.jit
def load_scales(pointer, valid):
    """Load the scales of a block's four planes, [32] int32 each; `pointer` is to plane 0."""
    scales = ()
    for plane in tl.static_range(4):
        scales += (tl.load(pointer + 32 * plane, mask=valid, other=0),)
    return scales


@triton.jit
def _bias(pointer):
    """0 where the mask is 1, -inf where it is 0."""
    # 0xff800000 is -inf; adding 0x00800000 gives 0.
    return (tl.load(pointer).to(tl.uint32) * 0x00800000 + 0xFF800000).to(tl.float32, bitcast=True)


@triton.jit
def load_bias(pointer, block, stride):
    """Load a mask as summands of the logits, [32] float32 for each of a block's four planes; `pointer` is to plane 0 of
    block 0."""
    plane = 32 * stride
    pointer += 4 * block * plane
    return _bias(pointer), _bias(pointer + plane), _bias(pointer + 2 * plane), _bias(pointer + 3 * plane)


@triton.jit
def scales_of(scales):
    """Unpack int32 scales of four planes into their float32 key scales and value scales."""
    keys, values = (), ()
    for plane in tl.static_range(4):
        key, value = unpack_scales(scales[plane])
        keys += (key.to(tl.float32),)
        values += (value.to(tl.float32),)
    return keys, values


@triton.jit
def allowed_tile(mask, t, r_offset, stride_t, valid):
    """Load the mask tile [32, BR] of tokens `t` [32]."""
    return tl.load(mask + (t.to(tl.int64) * stride_t)[:, None] + r_offset[None, :], mask=valid, other=0) != 0


@triton.jit
def prefetch_rows(row, DIM: tl.constexpr):
    """Start to move rows of DIM elements at pointers `row` [32] to the L2 cache."""
    LINE_ELEMENTS: tl.constexpr = 1024 // row.dtype.element_ty.primitive_bitwidth
    for line in tl.static_range((DIM + LINE_ELEMENTS - 1) // LINE_ELEMENTS):
        fetch(row + line * LINE_ELEMENTS)


@triton.jit
def dense_job(
    a: DecodeTensors, n: DecodeNumbers, dense, t, packed_count, query, scale, mask_at, r, C: tl.constexpr
):  # fmt: skip
    """Attention over 32 dense tokens `t`: (sum [BDM, BR], total [BR], maximum [BR]).

    Args:
        dense: `DenseTokens`.
        packed_count: Number of tokens in packed blocks, between sinks and residual.
        query, scale: [BR] pointers to the rows' queries and to the scales they were divided by.
        mask_at: Pointer to the sequence's mask.
        r: [BR] rows of the head.
        C: A `DecodeShape`.
    """
    k_row, v_row = dense_rows(dense, t, C)
    inside = t < dense.count
    # Load states first: the compiler lets a product wait for its queries before it loads what comes after them.
    d, dv = tl.arange(0, C.BLOCK_DK), tl.arange(0, C.BLOCK_DM)
    k = tl.load(k_row[:, None] + d[None, :], mask=inside[:, None] & (d < C.DK)[None, :], other=0.0)
    k = k.to(tl.float16)  # [32, BDK]
    v = tl.load(v_row[None, :] + dv[:, None], mask=inside[None, :] & (dv < C.DV)[:, None], other=0.0)
    v = v.to(tl.float16)  # [BDM, 32]
    q = tl.load(query[None, :] + d[:, None], mask=(d < C.DK)[:, None] & (r < n.rows)[None, :], other=0.0)  # [BDK, BR]
    factor = tl.load(scale, mask=r < n.rows, other=1.0) * n.scaling_log2  # [BR]
    x = bounded(tl.dot(k, q) * factor[None, :], n.cap_log2, C.BOUNDS)  # [32, BR]
    allowed = inside[:, None] & (r < n.rows)[None, :]
    if C.CAUSAL:
        allowed = allowed & (t[:, None] <= (dense.count - n.queries + r % n.queries)[None, :])
    if C.MASK:
        position = tl.where(t < dense.sinks, t, t + packed_count)
        allowed = allowed & allowed_tile(mask_at, position, (r % n.queries) * a.mask_s, a.mask_t, allowed)
    x = tl.where(allowed, x, -float("inf"))
    maximum = tl.max(x, 0)
    p = tl.exp2(x - finite(maximum)[None, :])
    return tl.dot(v, p.to(tl.float16)), tl.sum(p, 0), maximum


@triton.jit
def store_partial(
    a: DecodeTensors, n: DecodeNumbers, slot, local, stored, sums, total, log, UNIT: tl.constexpr,
    CHUNKS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Store a normalised result in `slot`: rows `local` [BR] where `stored` [BR].

    Args:
        sums: CHUNKS parts of the DIM channels, as values with BITS bits are in, times UNIT.
        total, log: [BR] sums of weights, and their logarithms.
    """
    tl.store(a.scratch + LINE * n.lse_at + slot * n.tile_rows + local, log, mask=stored)
    d, inverse = tl.arange(0, sums[0].shape[0]), 1.0 / (tl.where(total > 0, total, 1.0) * UNIT)
    out = a.scratch + LINE * n.partial_at + slot.to(tl.int64) * (n.tile_rows * C.DM)
    out = out + local[None, :] * C.DM + d[:, None]
    inside = stored[None, :] & (d < DIM // CHUNKS)[:, None]
    for chunk in tl.static_range(CHUNKS):
        tl.store(out + chunk_start(chunk, CHUNKS, DIM, BITS), sums[chunk] * inverse[None, :], mask=inside)
