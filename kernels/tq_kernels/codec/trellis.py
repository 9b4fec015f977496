"""Choose the trellis codes of a block's channels: Viterbi's algorithm by word, as `tq_hf.codec.trellis` defines it.

Errors are whole numbers in [2**23, 2**24), where the last mantissa bit of a float32 counts one: they are added on the
pipe of products, compared as numbers, and their two lowest bits are a label that says where a path comes from. The 16
steps of a chain are a loop of four times four: unrolled, the code would not fit the instruction cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import format as block_format
from ..common.unpack import turned

UNITS = tl.constexpr(tuple(block_format.TRELLIS_UNITS[bits] for bits in (2, 3)))
INNER_UNITS = tl.constexpr(tuple(1 / (size * unit) for size, unit in zip((32, 64), UNITS.value, strict=True)))
"""What a product of a rounded channel and a size from `sizes` counts."""
BIAS = tl.constexpr(128.0)
LARGEST = tl.constexpr(127.0)
"""Largest rounded channel; bytes are channels plus 128."""
WHOLE = tl.constexpr(2.0**23)
START = tl.constexpr(3 * 2.0**22)
"""The error of an empty path: 16 codes lower it by less than 2**22."""
FAR = tl.constexpr(2.0**20)
"""More than any two branches differ in error."""


_BYTES = tl.constexpr(tuple(f"prmt.b32 $0, $1, 0x4B000000, 0x765{byte};" for byte in range(4)))


@triton.jit
def low_bytes(a, b, ASM: tl.constexpr):
    """Byte 0 of a, byte 0 of b, anything, anything."""
    if ASM:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x0040;", "=r,r,r", [a, b], tl.uint32, True, 1)
    else:
        return (a & 0xFF) | (b & 0xFF) << 8


@triton.jit
def low_halves(a, b, ASM: tl.constexpr):
    """Bytes 0 and 1 of a, bytes 0 and 1 of b."""
    if ASM:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], tl.uint32, True, 1)
    else:
        return (a & 0xFFFF) | b << 16


@triton.jit
def _byte(words, BYTE: tl.constexpr, ASM: tl.constexpr):
    """A byte of uint32 words, plus 2**23, as float32."""
    if ASM:
        return tl.inline_asm_elementwise(_BYTES[BYTE], "=r,r", [words], tl.float32, True, 1)
    else:
        return ((words >> (8 * BYTE)) & 0xFF | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _channel(words, BYTE: tl.constexpr, ASM: tl.constexpr):
    """A byte of words from `rounded`, as the number it stands for."""
    return _byte(words, BYTE, ASM) - (WHOLE + BIAS)


@triton.jit
def rounded(z, square, BITS: tl.constexpr, DIM: tl.constexpr, ASM: tl.constexpr):
    """Rows `[32, TILE]` in 1 / TRELLIS_UNITS of their standard deviation, at most 127 of them, plus 128: the low bytes
    of uint32. Rows that are not finite are 0."""
    mean = square * (1 / DIM)
    finite = mean < float("inf")  # [32]
    inverse = tl.where(mean > 0.0, tl.rsqrt(tl.where(mean > 0.0, mean, 1.0)), 0.0) * (UNITS[BITS - 2] / (2 * LARGEST))
    # In [0, 1], by the multiplication itself, which saturates; 0 for what is not a number.
    x = z * inverse[:, None] + 0.5
    if not ASM:  # maxima of NumPy, in the interpreter, and of other GPUs may be NaN
        x = tl.where(x == x, x, 0.0)
    x = tl.minimum(tl.maximum(x, 0.0), 1.0)
    least = tl.where(finite, WHOLE + BIAS - LARGEST, WHOLE + BIAS)
    return (x * tl.where(finite, 2 * LARGEST, 0.0)[:, None] + least[:, None]).to(tl.uint32, bitcast=True)


@triton.jit
def _bits(error):
    return error.to(tl.uint32, bitcast=True)


@triton.jit
def _labelled(error, LABEL: tl.constexpr):
    return ((_bits(error) & 0xFFFFFFFC) | LABEL).to(tl.float32, bitcast=True)


@triton.jit
def _least(a, b, c, d):
    return tl.minimum(tl.minimum(a, b), tl.minimum(c, d))


@triton.constexpr_function
def _level2(levels, old, new):
    """The level between two states 2 b + p."""
    return levels[4 * ((new ^ old // 2) % 2) + 2 * (new // 2) + old % 2]


@triton.jit
def _step2(e, x, T: tl.constexpr):
    """Least errors of paths to each state 2 b + p of a chain of 2-bit codes, from those `e` to each state before."""
    paths = ()
    for new in tl.static_range(4):
        for old in tl.static_range(4):
            base = e[old] + 4 * _level2(T, old, new) * _level2(T, old, new)
            paths += (base - x * (16 * _level2(T, old, new)),)
    return (
        _least(paths[0], paths[1], paths[2], paths[3]),
        _least(paths[4], paths[5], paths[6], paths[7]),
        _least(paths[8], paths[9], paths[10], paths[11]),
        _least(paths[12], paths[13], paths[14], paths[15]),
    )


@triton.jit
def _with_labels(labels, e, ASM: tl.constexpr):
    """A byte for each state, with the labels of four errors behind those of steps before."""
    low = low_bytes(_bits(e[0]), _bits(e[1]), ASM)
    high = low_bytes(_bits(e[2]), _bits(e[3]), ASM)
    return labels << 2 | low_halves(low, high, ASM) & 0x03030303


@triton.jit
def _no_labels(like):
    """Labels of four groups of steps, before there are any: one and the same would be taken for constants of the loop
    (seen in Triton 3.6)."""
    zero = tl.zeros(like.shape, tl.uint32)
    return zero, zero + 1, zero + 2, zero + 3


@triton.jit
def _half_chain2(e0, e1, e2, e3, a, b, c, d, T: tl.constexpr, ASM: tl.constexpr):
    """Eight steps, of planes 0 and 1 of words a, b, c, d."""
    for _ in tl.range(2):
        e = _step2((e0, e1, e2, e3), _channel(a, 0, ASM), T)
        e = _step2(e, _channel(b, 0, ASM), T)
        e = _step2(e, _channel(c, 0, ASM), T)
        e0, e1, e2, e3 = _step2(e, _channel(d, 0, ASM), T)
        a, b, c, d = a >> 8, b >> 8, c >> 8, d >> 8
    return e0, e1, e2, e3


@triton.jit
def codes2(a, b, c, d, T: tl.constexpr, ASM: tl.constexpr):
    """Words of 2-bit codes. Their order in a word is that of planes, then of neighbours e, then of quarters h.

    Args:
        a, b, c, d: uint32 words of four planes' bytes from `rounded`, of a word's two neighbours e and two quarters h:
            (0, 0), (0, 1), (1, 0), (1, 1).
        T: The eight levels, whole numbers of 1/64.
    """
    e0 = tl.full(a.shape, START, tl.float32)
    e1, e2, e3 = e0, e0, e0
    e0, e1, e2, e3 = _half_chain2(e0, e1, e2, e3, a >> 16, b >> 16, c >> 16, d >> 16, T, ASM)
    e1, e2, e3 = _labelled(e1, 1), _labelled(e2, 2), _labelled(e3, 3)
    e0, e1, e2, e3 = _half_chain2(_labelled(e0, 0), e1, e2, e3, a, b, c, d, T, ASM)
    last = _bits(_least(e0, e1, e2, e3)) & 3

    e0 = tl.where(last == 0, START, START + FAR)
    e1 = tl.where(last == 1, START, START + FAR) + 1
    e2 = tl.where(last == 2, START, START + FAR) + 2
    e3 = tl.where(last == 3, START, START + FAR) + 3
    p0, p1, p2, p3 = _no_labels(a)
    for _ in tl.range(4):  # planes
        e = (e0, e1, e2, e3)
        labels = tl.zeros(a.shape, tl.uint32)
        for step in tl.static_range(4):
            words = a if step == 0 else (b if step == 1 else (c if step == 2 else d))
            e = _step2(e, _channel(words, 0, ASM), T)
            labels = _with_labels(labels, e, ASM)
            e = (_labelled(e[0], 0), _labelled(e[1], 1), _labelled(e[2], 2), _labelled(e[3], 3))
        e0, e1, e2, e3 = e
        p0, p1, p2, p3 = p1, p2, p3, labels
        a, b, c, d = a >> 8, b >> 8, c >> 8, d >> 8

    path = tl.zeros(a.shape, tl.uint32)  # states, the first in the lowest bits
    state = last
    for _ in tl.range(4):
        for step in tl.static_range(4):
            path = (path << 2) | state
            state = (p3 >> (8 * state + 2 * step)) & 3
        p1, p2, p3 = p0, p1, p2
    # b of a code at bit 2 k + 1, and its upper bit, p and b of the code before, at 2 k + 2.
    return (path & 0xAAAAAAAA) | turned((path ^ turned(path, 1)) & 0x55555555, 2)


@triton.jit
def _step3(e, x, M: tl.constexpr):
    """Least errors of paths to each low bit of a crumb, `[first low bit, low bit]`, from those to the bit before."""
    size = tl.abs(x)
    best = ()  # [low bit before, low bit], with the high bit as label 2
    for before in tl.static_range(2):
        for low in tl.static_range(2):
            zero = 4 * M[low + 4 * before] * M[low + 4 * before] - size * (16 * M[low + 4 * before])
            one = 4 * M[low + 2 + 4 * before] * M[low + 2 + 4 * before] + 2 - size * (16 * M[low + 2 + 4 * before])
            best += (tl.minimum(zero, one),)
    return (
        tl.minimum(e[0] + best[0], e[1] + best[2]),
        tl.minimum(e[0] + best[1], e[1] + best[3]),
        tl.minimum(e[2] + best[0], e[3] + best[2]),
        tl.minimum(e[2] + best[1], e[3] + best[3]),
    )


@triton.jit
def codes3(a, b, c, d, M: tl.constexpr, ASM: tl.constexpr):
    """Words of the crumbs of 3-bit codes; arguments as for `codes2`."""
    e0 = tl.full(a.shape, START, tl.float32)
    e1 = e0 + (FAR + 1)
    e2 = e0 + FAR
    e3 = e0 + 1
    p0, p1, p2, p3 = _no_labels(a)
    for _ in tl.range(4):  # planes 3 to 0
        e = (e0, e1, e2, e3)
        labels = tl.zeros(a.shape, tl.uint32)
        for step in tl.static_range(4):
            words = d if step == 0 else (c if step == 1 else (b if step == 2 else a))
            e = _step3(e, _channel(words, 3, ASM), M)
            labels = _with_labels(labels, e, ASM)
            e = (_labelled(e[0], 0), _labelled(e[1], 1), _labelled(e[2], 0), _labelled(e[3], 1))
        e0, e1, e2, e3 = e
        p0, p1, p2, p3 = p1, p2, p3, labels
        a, b, c, d = a << 8, b << 8, c << 8, d << 8

    first = (e3 - 1 < e0).to(tl.uint32)
    low = first
    word = tl.zeros(a.shape, tl.uint32)
    for _ in tl.range(4):
        for step in tl.static_range(4):
            label = (p3 >> (16 * first + 8 * low + 2 * step)) & 3
            word = (word >> 2) | ((label & 2 | low) << 30)
            low = label & 1
        p1, p2, p3 = p0, p1, p2
    return word


@triton.constexpr_function
def _table(entries, first, bits):
    """Four of the entries as bytes: at 2 bits half of them, plus 128."""
    return sum((entries[first + i] // 2 + 128 if bits == 2 else entries[first + i]) << 8 * i for i in range(4))


@triton.jit
def _looked_up(words, T: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Entries of the low three bits of the eight nibbles of words: bytes of two uint32."""
    low = tl.full(words.shape, _table(T, 0, BITS), tl.uint32)
    high = tl.full(words.shape, _table(T, 4, BITS), tl.uint32)
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 s;
            and.b32 s, $2, 0x77777777;
            prmt.b32 $0, $3, $4, s;
            shr.u32 s, s, 16;
            prmt.b32 $1, $3, $4, s;
            }""",
            "=&r,=r,r,r,r",
            [words, low, high],
            (tl.uint32, tl.uint32),
            True,
            1,
        )
    else:
        found = ()
        for half in tl.static_range(2):
            four = tl.zeros(words.shape, tl.uint32)
            for nibble in tl.static_range(4):
                index = words >> (16 * half + 4 * nibble)
                byte = (tl.where(index & 4 == 0, low, high) >> (8 * (index & 3))) & 0xFF
                four |= byte << (8 * nibble)
            found += (four,)
        return found


@triton.jit
def sizes(words, T: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """What the codes of words stand for, as bytes of four uint32: planes 0 and 1, 2 and 3 of one quarter, then of the
    other. At 2 bits levels in 1/32 plus 128, at 3 magnitudes in 1/64."""
    first, second = words, turned(words, 30)
    if BITS == 2:
        first ^= turned(words, 3) & 0x11111111
        second ^= turned(words, 1) & 0x11111111
    return _looked_up(first, T, BITS, ASM) + _looked_up(second, T, BITS, ASM)


@triton.jit
def products(
    x, sizes, PLANE: tl.constexpr, NEIGHBOUR: tl.constexpr, QUARTER: tl.constexpr, BITS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Level times channel of words, for a code of each: whole numbers, float32.

    Args:
        x: The words from `neighbours` that have these channels.
        sizes: What `sizes` gives.
    """
    size = _byte(sizes[2 * QUARTER + PLANE // 2], 2 * (PLANE % 2) + NEIGHBOUR, ASM)
    x = _channel(x, PLANE, ASM)
    return x * (size - (WHOLE + BIAS)) if BITS == 2 else tl.abs(x) * (size - WHOLE)


@triton.jit
def signs_of(words):
    """Signs of four planes' channels, 1 where negative: those of planes 0 to 3 at bits 7, 23, 6 and 22."""
    s = (words & 0x80808080) ^ 0x80808080
    return (s & 0x80) | ((s & 0x8000) << 8) | ((s >> 17) & 0x40) | ((s >> 9) & 0x400000)


@triton.jit
def neighbours(words, IS_VALUE: tl.constexpr):
    """Words `[32, TILE]` of four planes' bytes by neighbour e and quarter h of the two of a tile, `[rows, 2, columns]`
    each: (e, h) = (0, 0), (0, 1), (1, 0), (1, 1)."""
    QUARTER: tl.constexpr = words.shape[1] // 4
    # Quarters first: they are in one thread, as channels next to each other are, but not tokens.
    first, second = tl.split(tl.permute(tl.reshape(words, [32, 2, 2, QUARTER]), [0, 1, 3, 2]))
    if IS_VALUE:
        a, c = tl.split(tl.permute(tl.reshape(first, [16, 2, 2, QUARTER]), [0, 2, 3, 1]))
        b, d = tl.split(tl.permute(tl.reshape(second, [16, 2, 2, QUARTER]), [0, 2, 3, 1]))
    else:
        a, c = tl.split(tl.reshape(first, [32, 2, QUARTER // 2, 2]))
        b, d = tl.split(tl.reshape(second, [32, 2, QUARTER // 2, 2]))
    return a, b, c, d
