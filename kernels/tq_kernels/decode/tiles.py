"""What one block contributes to decode attention: scores from its key words, operands from its value words, scales."""

import triton
import triton.language as tl

from ..common.unpack import load_levels, load_signs, small_unit, unpack_scales

ROWS32 = tl.constexpr(32)
"""Tokens of a plane."""


@triton.jit
def level_unit(BITS: tl.constexpr, SMALL: tl.constexpr):
    """What `key_scores`, `value_levels` and `add_chunks` multiply levels by."""
    return small_unit(BITS) if SMALL else 1.0


@triton.jit
def fetch(pointers):
    """Start to move what `pointers` point to, with the lines around it, to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch(pointer, LINES: tl.constexpr, valid):
    """Start to move LINES lines of 128 bytes to the L2 cache."""
    line = tl.arange(0, triton.next_power_of_2(LINES))
    if valid:
        fetch(pointer + tl.minimum(line, LINES - 1) * 32)


@triton.jit
def per_lane(x, ASM: tl.constexpr):
    """`x`, an int32 scalar that bounds a loop over blocks.

    The compiler must take it for different per lane: with a uniform bound it recomputes the predicate of every
    prefetching copy from a uniform register, 200 cycles a block.
    """
    if ASM:  # adds zero
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
def key_scores(
    words,
    q0,
    q1,
    q2,
    q3,
    row,
    column,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SMALL: tl.constexpr,
    ASM: tl.constexpr,
):
    """level_unit * level . q of a block's tokens, four [32, BR] float32 planes; `q*` are the CHUNKS channel chunks of
    the queries, [BC, BR]."""
    WIDTH: tl.constexpr = DIM // CHUNKS
    mask = None if column.shape[1] == WIDTH else column < WIDTH
    s0 = tl.zeros([ROWS32, BLOCK_R], tl.float32)
    s1 = tl.zeros([ROWS32, BLOCK_R], tl.float32)
    s2 = tl.zeros([ROWS32, BLOCK_R], tl.float32)
    s3 = tl.zeros([ROWS32, BLOCK_R], tl.float32)
    signs = None
    if BITS == 3:
        signs = load_signs(words, row, column, mask, DIM, False, ASM)
    for chunk in tl.static_range(CHUNKS):
        q = q0 if chunk == 0 else (q1 if chunk == 1 else (q2 if chunk == 2 else q3))  # [BC, BR]
        k0, k1, k2, k3 = load_levels(words, row, column, mask, chunk, CHUNKS, DIM, BITS, False, SMALL, ASM, signs)
        s0 = tl.dot(k0, q, s0)
        s1 = tl.dot(k1, q, s1)
        s2 = tl.dot(k2, q, s2)
        s3 = tl.dot(k3, q, s3)
    return s0, s1, s2, s3


@triton.jit
def mean_scores(means, q, channel, DIM: tl.constexpr):
    """mean . q of a block, [32, BR] float32 with equal rows; `means` points to channel 0, `channel` is [BM], `q`
    [BM, BR]."""
    WHOLE: tl.constexpr = channel.shape[0] == DIM
    mean = tl.load(means + channel, mask=None if WHOLE else channel < DIM, other=None if WHOLE else 0.0)  # [BM]
    return tl.dot(tl.broadcast_to(mean[None, :], [ROWS32, channel.shape[0]]), q)


@triton.jit
def _add_dots(a, v0, v1, v2, v3, p0, p1, p2, p3):
    """a + sum of v_plane @ p_plane."""
    a = tl.dot(v0, p0, a)
    a = tl.dot(v1, p1, a)
    a = tl.dot(v2, p2, a)
    return tl.dot(v3, p3, a)


@triton.jit
def value_levels(words, row, column, DIM: tl.constexpr, BITS: tl.constexpr, SMALL: tl.constexpr, ASM: tl.constexpr):
    """Four planes [BV, 32] of a block's values at 4 or 8 bits, times `level_unit`."""
    mask = None if row.shape[0] == DIM else row < DIM
    return load_levels(words, row, column, mask, 0, 1, DIM, BITS, True, SMALL, ASM)


@triton.jit
def _chunk_levels(
    words,
    row,
    column,
    CHUNK: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    SMALL: tl.constexpr,
    ASM: tl.constexpr,
):
    """Four planes [BV, 32] of quarter CHUNK of the channels of a block's values, times `level_unit`."""
    HEIGHT: tl.constexpr = DIM // 4
    mask = None if row.shape[0] == HEIGHT else row < HEIGHT
    return load_levels(words, row, column, mask, CHUNK, 4, DIM, BITS, True, SMALL, ASM)


@triton.jit
def add_chunks(
    a0,
    a1,
    a2,
    a3,
    words,
    row,
    column,
    p0,
    p1,
    p2,
    p3,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    SMALL: tl.constexpr,
    ASM: tl.constexpr,
):
    """a_chunk [BV, BR] + a block's values of that quarter of the channels @ p_plane [32, BR] fp16, for four chunks."""
    v0, v1, v2, v3 = _chunk_levels(words, row, column, 0, DIM, BITS, SMALL, ASM)
    a0 = _add_dots(a0, v0, v1, v2, v3, p0, p1, p2, p3)
    v0, v1, v2, v3 = _chunk_levels(words, row, column, 1, DIM, BITS, SMALL, ASM)
    a1 = _add_dots(a1, v0, v1, v2, v3, p0, p1, p2, p3)
    v0, v1, v2, v3 = _chunk_levels(words, row, column, 2, DIM, BITS, SMALL, ASM)
    a2 = _add_dots(a2, v0, v1, v2, v3, p0, p1, p2, p3)
    v0, v1, v2, v3 = _chunk_levels(words, row, column, 3, DIM, BITS, SMALL, ASM)
    return a0, a1, a2, _add_dots(a3, v0, v1, v2, v3, p0, p1, p2, p3)


@triton.jit
def load_scalars(pointer, valid):
    """Scalars of a block's four planes, [32] int32 each; `pointer` is to plane 0's."""
    return (
        tl.load(pointer, mask=valid, other=0),
        tl.load(pointer + 32, mask=valid, other=0),
        tl.load(pointer + 64, mask=valid, other=0),
        tl.load(pointer + 96, mask=valid, other=0),
    )


@triton.jit
def _bias(pointer):
    """0 where the mask is 1, -inf where it is 0."""
    # 0xff800000 is -inf, and 0x00800000 more is 0.
    return (tl.load(pointer).to(tl.uint32) * 0x00800000 + 0xFF800000).to(tl.float32, bitcast=True)


@triton.jit
def load_bias(pointer, block, stride):
    """A mask's summands of the logits of a block's four planes, [32] float32 each; `pointer` is to block 0's plane
    0."""
    plane = 32 * stride
    pointer += 4 * block * plane
    return _bias(pointer), _bias(pointer + plane), _bias(pointer + 2 * plane), _bias(pointer + 3 * plane)


@triton.jit
def halves_of(scalars):
    """int32 scalars -> float32 key scale and value scale."""
    key, value = unpack_scales(scalars)
    return key.to(tl.float32), value.to(tl.float32)
