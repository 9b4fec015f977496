"""Attention of up to 16 query rows in the registers of one warp, by `mma.m16n8k8` alone: for Turing, whose matrix units
Triton does not use (`tl.dot` becomes FMA there, over heads padded to 8, 37 instructions per element instead of two).

A program is a warp and every tensor `[32]` holds one register of each lane; inline PTX does what crosses lanes. Lane
4 g + t holds of a product [16, 8] += [16, 8] x [8, 8] (tokens or channels are its rows, query rows its columns):

    a      rows g and g + 8, columns 2t and 2t + 1      a packed word as it is, unpacked: no data moves
    b      rows 2t and 2t + 1, column g                 queries; or probabilities, transposed by `movmatrix`
    c      rows g and g + 8, columns 2t and 2t + 1      a quad: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)

The order of what is summed over is free as long as both operands share it, so a lane reads two words at a time: words
2t and 2t + 1 of eight. Half a block is worked on at a time, 16 rows of each plane; row index i of the 16 is plane row
4 (i % 8 // 2) + i % 2, and 2 more for i >= 8, which is where a lane's words of values have their tokens.
"""

import triton
import triton.language as tl

from . import primitives

LANES = tl.constexpr(32)
_MMA = tl.constexpr(
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};"
)
_TRANSPOSE = tl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")
_PACK = tl.constexpr("mov.b32 $0, {$1, $2};")
_EXCHANGE = tl.constexpr("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;")

_LOAD = tl.constexpr("{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.u32 $0, 0; @p ld.global.b32 $0, [$1]; }")
_LOAD16 = tl.constexpr("{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.u16 $0, 0; @p ld.global.b16 $0, [$1]; }")
_LOAD_PAIR = tl.constexpr(
    "{ .reg .pred p; setp.ne.u32 p, $3, 0; mov.u32 $0, 0; mov.u32 $1, 0; @p ld.global.v2.b32 {$0, $1}, [$2]; }"
)
_STORE = tl.constexpr("{ .reg .pred p; setp.ne.u32 p, $3, 0; mov.u32 $0, 0; @p st.global.f32 [$1], $2; }")


@triton.jit
def multiply_add(c, low, high, b):
    """The quad c + [low; high] b; `low`, `high` and `b` are pairs of fp16 in int32."""
    return tl.inline_asm_elementwise(
        _MMA,
        "=f,=f,=f,=f,r,r,r,f,f,f,f",
        [low, high, b, c[0], c[1], c[2], c[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def zero_quads(COUNT: tl.constexpr):
    """COUNT quads of zeros."""
    zero = tl.zeros([LANES], tl.float32)
    quads = ()
    for _ in tl.static_range(COUNT):
        quads += ((zero, zero, zero, zero),)
    return quads


@triton.jit
def pair_of(low, high):
    """Two numbers as a pair of fp16 in an int32, `low` first."""
    return tl.inline_asm_elementwise(
        _PACK, "=r,h,h", [low.to(tl.float16), high.to(tl.float16)], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def transposed(pair):
    """Lane (g, t)'s elements (g, 2t), (g, 2t + 1) of an 8 x 8 matrix of fp16 -> its elements (2t, g), (2t + 1, g)."""
    return tl.inline_asm_elementwise(_TRANSPOSE, "=r,r", [pair], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def exchanged(x, DISTANCE: tl.constexpr):
    """The float32 of the lane whose number differs in bit DISTANCE."""
    return tl.inline_asm_elementwise(
        _EXCHANGE, "=f,f,r", [x, tl.full([LANES], DISTANCE, tl.int32)], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def column_max(x):
    """Largest of the lanes with the same t."""
    x = tl.maximum(x, exchanged(x, 4))
    x = tl.maximum(x, exchanged(x, 8))
    return tl.maximum(x, exchanged(x, 16))


@triton.jit
def column_sum(x):
    """Sum over the lanes with the same t."""
    x += exchanged(x, 4)
    x += exchanged(x, 8)
    return x + exchanged(x, 16)


@triton.jit
def load32(pointer, valid):
    """32 bits, 0 where not `valid`.

    By inline PTX, like all loads and stores here: for each that Triton knows, its pass that vectorises accesses walks
    over the whole kernel (40 s of compilation).
    """
    return tl.inline_asm_elementwise(
        _LOAD, "=r,l,r", [pointer.to(tl.int64), valid.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load16(pointer, valid):
    """The 16 bits of one element, as it is typed, 0 where not `valid`."""
    bits = tl.inline_asm_elementwise(
        _LOAD16, "=h,l,r", [pointer.to(tl.int64), valid.to(tl.int32)], dtype=tl.int16, is_pure=False, pack=1
    )
    return bits.to(pointer.dtype.element_ty, bitcast=True)


@triton.jit
def store32(pointer, x, valid):
    """Write float32 where `valid`."""
    tl.inline_asm_elementwise(
        _STORE, "=r,l,f,r", [pointer.to(tl.int64), x, valid.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_pair(words, valid, WIDE: tl.constexpr):
    """Two int32 words at `words` and behind it, 0 where not `valid`; WIDE: they are aligned to 8 bytes."""
    if WIDE:
        return tl.inline_asm_elementwise(
            _LOAD_PAIR,
            "=r,=r,l,r",
            [words.to(tl.int64), valid.to(tl.int32)],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        return load32(words, valid), load32(words + 1, valid)


@triton.jit
def levels4(word):
    """A 4-bit word -> four planes, pairs of small levels."""
    return tl.inline_asm_elementwise(
        primitives._ASM4_SMALL,
        "=r,=r,=r,=r,r",
        [word],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def levels3(word, signs, QUARTER: tl.constexpr):
    """A crumb word and a word of signs -> four planes of a quarter, pairs of small levels."""
    return tl.inline_asm_elementwise(
        primitives._ASM3_SMALL[QUARTER],
        "=r,=r,=r,=r,r,r",
        [word, signs],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def levels2(word, QUARTER: tl.constexpr):
    """A crumb word -> four planes of a quarter, pairs of levels."""
    return tl.inline_asm_elementwise(
        primitives._ASM2[QUARTER % 2],
        "=r,=r,=r,=r,r",
        [word],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def levels8(word):
    """An FP8 word of tile u -> planes 2u and 2u + 1, pairs of levels."""
    return tl.inline_asm_elementwise(
        primitives._ASM8, "=r,=r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )


@triton.jit
def load_tile(words, mask, BITS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr):
    """A lane's words of a row: pairs from each of the block's tiles of TILE words (1 at 4 bits, 2, 3 or 2 otherwise)."""
    tile = (load_pair(words, mask, WIDE),)
    if BITS != 4:
        tile += (load_pair(words + TILE, mask, WIDE),)
    if BITS == 3:
        tile += (load_pair(words + 2 * TILE, mask, WIDE),)
    return tile


@triton.jit
def levels(tile, STEP: tl.constexpr, QUARTER: tl.constexpr, BITS: tl.constexpr):
    """Word STEP of each pair of `load_tile` -> four planes of one quarter (of all channels at 4 and 8 bits)."""
    if BITS == 4:
        return levels4(tile[0][STEP])
    elif BITS == 8:
        return levels8(tile[0][STEP]) + levels8(tile[1][STEP])
    elif BITS == 3:
        return levels3(tile[QUARTER // 2][STEP], tile[2][STEP], QUARTER)
    else:
        return levels2(tile[QUARTER // 2][STEP], QUARTER)


@triton.jit
def quarters_of(BITS: tl.constexpr):
    """Parts of the channels that are packed one over the other."""
    return 4 if BITS < 4 else 1


@triton.jit
def load_rows(rows, t, valid, WIDTH: tl.constexpr, QUARTERS: tl.constexpr):
    """Operands b of one tile of 8 query rows (or a key mean as operand a): for every quarter, chunk of 16 channels and
    step the pair of channels 16 chunk + 4 t + 2 step.

    Args:
        rows: Pointers [32] to fp16 rows, for lane (g, t) row g.
        valid: [32], rows that exist; others read 0.
        WIDTH: Channels of a quarter.
    """
    pairs = ()
    for quarter in tl.static_range(QUARTERS):
        for chunk in tl.static_range((WIDTH + 15) // 16):
            for step in tl.static_range(2):
                channel = 16 * chunk + 4 * t + 2 * step
                at = (rows + (quarter * WIDTH + channel)).to(tl.pointer_type(tl.int32), bitcast=True)
                pairs += (load32(at, valid & (channel < WIDTH)),)
    return pairs


@triton.jit
def packed_scores(
    words, q, g, t, DIM: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr
):
    """level . q of half a block's tokens: 4 * TILES quads, of plane p and row tile i quad p * TILES + i.

    Args:
        words: Pointer to the block's key words; at 4 and 8 bits those of the half's first row.
        q: TILES tuples of `load_rows`.
    """
    QUARTERS: tl.constexpr = quarters_of(BITS)
    WIDTH: tl.constexpr = DIM // QUARTERS
    TILE: tl.constexpr = 32 * DIM // (2 if BITS == 8 else 8)
    ROW: tl.constexpr = WIDTH // 2
    CHUNKS: tl.constexpr = (WIDTH + 15) // 16
    at = words + (4 * (g // 2) + g % 2) * ROW + 2 * t
    s = zero_quads(4 * TILES)
    for chunk in tl.static_range(CHUNKS):
        mask = 16 * chunk + 4 * t < WIDTH
        low = load_tile(at + 8 * chunk, mask, BITS, TILE, ROW % 2 == 0)
        high = load_tile(at + (8 * chunk + 2 * ROW), mask, BITS, TILE, ROW % 2 == 0)
        for quarter in tl.static_range(QUARTERS):
            for step in tl.static_range(2):
                a0 = levels(low, step, quarter, BITS)
                a1 = levels(high, step, quarter, BITS)
                new = ()
                for plane in tl.static_range(4):
                    for tile in tl.static_range(TILES):
                        b = q[tile][2 * (quarter * CHUNKS + chunk) + step]
                        new += (multiply_add(s[plane * TILES + tile], a0[plane], a1[plane], b),)
                s = new
    return s


@triton.jit
def add_packed_values(
    acc, words, p, g, t, DIM: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr
):
    """acc + level^T p of half a block: quads of 16 channels each, of channel tile m and row tile i quad m * TILES + i.

    Args:
        words: Pointer to the block's value words of the half's first row.
        p: Operands b, of plane, step and row tile i pair (2 * plane + step) * TILES + i.
    """
    QUARTERS: tl.constexpr = quarters_of(BITS)
    HEIGHT: tl.constexpr = DIM // QUARTERS
    TILE: tl.constexpr = HEIGHT * 16
    CHUNKS: tl.constexpr = (HEIGHT + 15) // 16
    at = words + g * 16 + 2 * t
    # Chunks within quarters, as words hold them; quads are put in the order of channels at the end.
    found = ()
    for chunk in tl.static_range(CHUNKS):
        low = load_tile(at + 256 * chunk, 16 * chunk + g < HEIGHT, BITS, TILE, True)
        high = load_tile(
            at + (256 * chunk + 128), 16 * chunk + 8 + g < HEIGHT, BITS, TILE, True
        )
        for quarter in tl.static_range(QUARTERS):
            quads = ()
            for tile in tl.static_range(TILES):
                quads += (acc[(quarter * CHUNKS + chunk) * TILES + tile],)
            for step in tl.static_range(2):
                a0 = levels(low, step, quarter, BITS)
                a1 = levels(high, step, quarter, BITS)
                for plane in tl.static_range(4):
                    new = ()
                    for tile in tl.static_range(TILES):
                        new += (multiply_add(quads[tile], a0[plane], a1[plane], p[(2 * plane + step) * TILES + tile]),)
                    quads = new
            found += quads
    if QUARTERS == 1:
        return found
    else:
        ordered = ()
        for quarter in tl.static_range(QUARTERS):
            for chunk in tl.static_range(CHUNKS):
                for tile in tl.static_range(TILES):
                    ordered += (found[(chunk * QUARTERS + quarter) * TILES + tile],)
        return ordered


@triton.jit
def mean_scores(mean, q, COUNT: tl.constexpr, TILES: tl.constexpr):
    """mean . q, the same for all tokens: TILES quads. `mean` is COUNT pairs of `load_rows`."""
    s = zero_quads(TILES)
    for i in tl.static_range(COUNT):
        new = ()
        for tile in tl.static_range(TILES):
            new += (multiply_add(s[tile], mean[i], mean[i], q[tile][i]),)
        s = new
    return s


@triton.jit
def _element(pointer, valid):
    if pointer.dtype.element_ty == tl.float32:
        return load32(pointer, valid).to(tl.float32, bitcast=True)
    else:
        return load16(pointer, valid)


@triton.jit
def load_dense(row, valid, t, CHUNK: tl.constexpr, DIM: tl.constexpr):
    """Channels 16 CHUNK + 4 t to + 3 of dense rows as two pairs; `row` [32] pointers, of which those not `valid` read
    0."""
    channel = 16 * CHUNK + 4 * t
    x0 = _element(row + channel, valid & (channel < DIM))
    x1 = _element(row + channel + 1, valid & (channel + 1 < DIM))
    x2 = _element(row + channel + 2, valid & (channel + 2 < DIM))
    x3 = _element(row + channel + 3, valid & (channel + 3 < DIM))
    return pair_of(x0, x1), pair_of(x2, x3)


@triton.jit
def dense_scores(low, high, low_valid, high_valid, q, t, DIM: tl.constexpr, TILES: tl.constexpr):
    """k . q of 16 dense tokens, g of rows `low` and g + 8 of rows `high` (pointers [32]): TILES quads."""
    s = zero_quads(TILES)
    for chunk in tl.static_range((DIM + 15) // 16):
        a0 = load_dense(low, low_valid, t, chunk, DIM)
        a1 = load_dense(high, high_valid, t, chunk, DIM)
        for step in tl.static_range(2):
            new = ()
            for tile in tl.static_range(TILES):
                new += (multiply_add(s[tile], a0[step], a1[step], q[tile][2 * chunk + step]),)
            s = new
    return s


@triton.jit
def add_dense_values(acc, row, valid, p, t, DIM: tl.constexpr, TILES: tl.constexpr):
    """acc + v^T p of 8 dense tokens, g of rows `row` (pointers [32]). Row i of channel tile m is channel 16 m + 4 (i % 8
    // 2) + i % 2, and 2 more for i >= 8.

    Args:
        p: Operands b, one of each row tile.
    """
    new = ()
    for chunk in tl.static_range((DIM + 15) // 16):
        v = load_dense(row, valid, t, chunk, DIM)
        a0 = transposed(v[0])
        a1 = transposed(v[1])
        for tile in tl.static_range(TILES):
            new += (multiply_add(acc[chunk * TILES + tile], a0, a1, p[tile]),)
    return new


@triton.jit
def weights(x, maximum, gain, bias, GROUPS: tl.constexpr, TILES: tl.constexpr, MASKED: tl.constexpr):
    """Softmax of one step: weights times 2**bias, the columns' maximum so far, and the decay of what was summed before.

    Args:
        x: GROUPS * TILES quads of logits of 16 tokens each, less the factor `gain` to base 2.
        maximum, gain: 2 * TILES numbers, for columns 2t and 2t + 1 of each row tile.
        MASKED: Whether a logit may be -inf.
    """
    largest, decay, offsets = (), (), ()
    for tile in tl.static_range(TILES):
        for e in tl.static_range(2):
            m = tl.maximum(x[tile][e], x[tile][2 + e])
            for group in tl.static_range(1, GROUPS):
                m = tl.maximum(m, tl.maximum(x[group * TILES + tile][e], x[group * TILES + tile][2 + e]))
            old = maximum[2 * tile + e]
            m = tl.maximum(old, column_max(m))
            shift = tl.where(m == -float("inf"), 0.0, m) if MASKED else m
            factor = gain[2 * tile + e]
            largest += (m,)
            decay += (tl.exp2((old - shift) * factor),)
            offsets += (shift * factor - bias,)
    p = ()
    for group in tl.static_range(GROUPS):
        for tile in tl.static_range(TILES):
            quad = ()
            for i in tl.static_range(4):
                quad += (tl.exp2(x[group * TILES + tile][i] * gain[2 * tile + i % 2] - offsets[2 * tile + i % 2]),)
            p += (quad,)
    return p, largest, decay


@triton.jit
def decayed(acc, sums, decay, p, COUNT: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr):
    """`acc` (COUNT * TILES quads) times `decay`, and `sums` (2 * TILES) times it plus the lane's weights `p`."""
    new_acc, new_sums = (), ()
    for i in tl.static_range(COUNT * TILES):
        even = decay[2 * (i % TILES)]
        odd = decay[2 * (i % TILES) + 1]
        new_acc += ((acc[i][0] * even, acc[i][1] * odd, acc[i][2] * even, acc[i][3] * odd),)
    for tile in tl.static_range(TILES):
        for e in tl.static_range(2):
            total = p[tile][e] + p[tile][2 + e]
            for group in tl.static_range(1, GROUPS):
                total += p[group * TILES + tile][e] + p[group * TILES + tile][2 + e]
            new_sums += (sums[2 * tile + e] * decay[2 * tile + e] + total,)
    return new_acc, new_sums
