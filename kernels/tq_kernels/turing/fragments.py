"""Attention of up to 16 query rows in the registers of one warp, by `mma.m16n8k8` alone, for Turing: Triton does not
use its matrix units (`tl.dot` becomes FMA there, over heads padded to 8, 37 instructions per element instead of two).

A program is a warp and every tensor `[32]` holds one register of each lane; inline PTX moves data between lanes. In a
product [16, 8] += [16, 8] x [8, 8] (rows are tokens or channels, columns query rows) lane 4 g + t holds:

    a      rows g and g + 8, columns 2t and 2t + 1      a packed word as it is, unpacked: no data moves
    b      rows 2t and 2t + 1, column g                 queries; or probabilities, transposed by `movmatrix`
    c      rows g and g + 8, columns 2t and 2t + 1      a quad: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)

The order of summands is free as long as both operands share it, so a lane reads two words at a time: words 2t and
2t + 1 of eight. A step takes half a block, 16 rows of each plane; row i of the 16 is plane row 4 (i % 8 // 2) + i % 2,
and 2 more for i >= 8: the places of the tokens in a lane's words of values.
"""

import triton
import triton.language as tl

from ..format import CODE

LANES = tl.constexpr(32)
_MMA = tl.constexpr(
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};"
)
_TRANSPOSE = tl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")
_PACK = tl.constexpr("mov.b32 $0, {$1, $2};")
_EXCHANGE = tl.constexpr("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;")
_LOAD = tl.constexpr("{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.u32 $0, 0; @p ld.global.b32 $0, [$1]; }")
_LOAD16 = tl.constexpr("{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.u16 $0, 0; @p ld.global.b16 $0, [$1]; }")
_LOAD8 = tl.constexpr("{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.u32 $0, 0; @p ld.global.u8 $0, [$1]; }")
_LOAD_PAIR = tl.constexpr(
    "{ .reg .pred p; setp.ne.u32 p, $3, 0; mov.u32 $0, 0; mov.u32 $1, 0; @p ld.global.v2.b32 {$0, $1}, [$2]; }"
)
_STORE = tl.constexpr("{ .reg .pred p; setp.ne.u32 p, $3, 0; mov.u32 $0, 0; @p st.global.f32 [$1], $2; }")


@triton.jit
def multiply_add(c, low, high, b):
    """Compute the quad c + [low; high] b; `low`, `high` and `b` are pairs of fp16 in int32."""
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
    """Pack two numbers as a pair of fp16 in an int32, `low` first."""
    return tl.inline_asm_elementwise(
        _PACK, "=r,h,h", [low.to(tl.float16), high.to(tl.float16)], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def transposed(pair):
    """Lane (g, t)'s elements (g, 2t), (g, 2t + 1) of an 8 x 8 matrix of fp16 -> its elements (2t, g), (2t + 1, g)."""
    return tl.inline_asm_elementwise(_TRANSPOSE, "=r,r", [pair], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def exchanged(x, DISTANCE: tl.constexpr):
    """float32 of the lane with number `lane ^ DISTANCE`."""
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
    """Load 32 bits, 0 where not `valid`.

    Inline PTX, like all loads and stores here: for each access of its own, Triton's vectorising pass walks over the
    whole kernel (40 s of compilation).
    """
    return tl.inline_asm_elementwise(
        _LOAD, "=r,l,r", [pointer.to(tl.int64), valid.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load16(pointer, valid):
    """Load one element of 16 bits in its type, 0 where not `valid`."""
    bits = tl.inline_asm_elementwise(
        _LOAD16, "=h,l,r", [pointer.to(tl.int64), valid.to(tl.int32)], dtype=tl.int16, is_pure=False, pack=1
    )
    return bits.to(pointer.dtype.element_ty, bitcast=True)


@triton.jit
def load_element(pointer, valid):
    """Load the element as float32, 0 where not `valid`."""
    if pointer.dtype.element_ty == tl.float32:
        return load32(pointer, valid).to(tl.float32, bitcast=True)
    else:
        return load16(pointer, valid).to(tl.float32)


@triton.jit
def load_flag(pointer, valid):
    """Load a byte as a flag; False where not `valid`."""
    byte = tl.inline_asm_elementwise(
        _LOAD8, "=r,l,r", [pointer.to(tl.int64), valid.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )
    return byte != 0


@triton.jit
def store32(pointer, x, valid):
    """Write float32 where `valid`."""
    tl.inline_asm_elementwise(
        _STORE, "=r,l,f,r", [pointer.to(tl.int64), x, valid.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_pair(words, valid, WIDE: tl.constexpr):
    """Load the int32 words at `words` and `words + 1`, 0 where not `valid`; WIDE: aligned to 8 bytes."""
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
def weights(x, maximum, gain, bias, GROUPS: tl.constexpr, TILES: tl.constexpr, MASKED: tl.constexpr):
    """Softmax of one step: weights times 2**bias, the columns' new maximum, and the decay of earlier sums.

    Args:
        x: GROUPS * TILES quads of logits of 16 tokens each, before the factor `gain` to base 2.
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
def scaled(quad, even, odd):
    """Multiply a quad's columns 2t by `even` and 2t + 1 by `odd`."""
    return quad[0] * even, quad[1] * odd, quad[2] * even, quad[3] * odd


@triton.jit
def decayed(acc, sums, decay, p, COUNT: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr):
    """`acc` (COUNT * TILES quads) times `decay`, and `sums` (2 * TILES) times it plus the lane's weights `p`."""
    new_acc, new_sums = (), ()
    for i in tl.static_range(COUNT * TILES):
        new_acc += (scaled(acc[i], decay[2 * (i % TILES)], decay[2 * (i % TILES) + 1]),)
    for tile in tl.static_range(TILES):
        for e in tl.static_range(2):
            total = p[tile][e] + p[tile][2 + e]
            for group in tl.static_range(1, GROUPS):
                total += p[group * TILES + tile][e] + p[group * TILES + tile][2 + e]
            new_sums += (sums[2 * tile + e] * decay[2 * tile + e] + total,)
    return new_acc, new_sums


@triton.jit
def initial(TILES: tl.constexpr):
    """Sums and maxima of no tokens, 2 * TILES each."""
    sums, maximum = (), ()
    for _ in tl.static_range(2 * TILES):
        sums += (tl.zeros([LANES], tl.float32),)
        maximum += (tl.full([LANES], -float("inf"), tl.float32),)
    return sums, maximum


@triton.jit
def ones(TILES: tl.constexpr):
    """2 * TILES ones: the gain of logits already in base 2."""
    found = ()
    for _ in tl.static_range(2 * TILES):
        found += (tl.full([LANES], 1.0, tl.float32),)
    return found


@triton.constexpr_function
def value_tiles(DIM, BITS):
    """Number of quads in the accumulator of packed values, for one row tile."""
    quarters = CODE[BITS].quarters
    return quarters * ((DIM // quarters + 15) // 16)
