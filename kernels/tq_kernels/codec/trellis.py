"""Choose the trellis codes of a block's channels: Viterbi's algorithm by word, as `tq_hf.codec.trellis` defines it.

Errors are below 2**15, so that a register holds those of two words: one addition adds both, and one instruction takes
the lesser of both. ASM is `Target.asm`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.device import AMD, AMPERE, HOPPER, TURING
from ..common.unpack import turned
from ..format import CODE

BIAS = tl.constexpr(128.0)
BYTE_BIAS = tl.constexpr(128)
LARGEST = tl.constexpr(127.0)
"""Largest rounded channel; a byte is a channel plus 128."""
WHOLE = tl.constexpr(2.0**23)
PAIR = tl.constexpr(0x10001)
"""Factor that puts a number into both halves of a register."""
NO_LABELS = tl.constexpr(0xFFF0FFF0)


LOW_BYTES, HIGH_BYTES, EVEN_BYTES, ODD_BYTES, LOW_HALVES, HIGH_HALVES = (
    tl.constexpr(selector) for selector in (0x0040, 0x0703, 0x6420, 0x7351, 0x5410, 0x7632)
)
"""Bytes to pick from two words, first byte in the last digit: 0 to 3 of one word, 4 to 7 of the other. LOW_BYTES moves
bytes 0 to bytes 0 and 1, HIGH_BYTES bytes 3 to bytes 0 and 2, beside any bytes; ODD_BYTES gives bytes 1, then 3."""


@triton.constexpr_function
def _permute(selector):
    return f"prmt.b32 $0, $1, $2, {selector:#06x};"


@triton.jit
def picked(a, b, SELECTOR: tl.constexpr, ASM: tl.constexpr):
    """Four bytes of two words."""
    if ASM >= TURING:
        asm: tl.constexpr = _permute(SELECTOR)
        return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], tl.uint32, True, 1)
    else:
        found = tl.zeros(a.shape, tl.uint32)
        for i in tl.static_range(4):
            source = b if (SELECTOR >> 4 * i) & 4 else a
            found |= ((source >> 8 * ((SELECTOR >> 4 * i) & 3)) & 0xFF) << 8 * i
        return found


@triton.constexpr_function
def product_unit(bits, is_value):
    """Unit of a product of a rounded channel and a size from `sizes`; key scales are shrunk by it."""
    code = CODE[bits]
    unit = 1 / ((64 if code.magnitudes else 32) * code.trellis.unit)
    return unit if is_value else unit / code.key_shrink


@triton.jit
def inverse_root(x):
    """x ** -0.5, 0 where x is 0."""
    return tl.where(x > 0.0, tl.rsqrt(tl.where(x > 0.0, x, 1.0)), 0.0)


@triton.jit
def rounded(z, square, BITS: tl.constexpr, DIM: tl.constexpr, ASM: tl.constexpr):
    """Round rows `[32, TILE]` to 1 / `Trellis.unit` of their standard deviation, clamp to +-127, add 128: low bytes of
    uint32. Rows that are not finite are 0."""
    mean = square * (1 / DIM)
    finite = mean < float("inf")  # [32]
    inverse = inverse_root(mean) * (CODE[BITS].trellis.unit / (2 * LARGEST))
    # Clamp to [0, 1] by a multiplication that saturates and turns NaN into 0.
    x = z * inverse[:, None] + 0.5
    if ASM < TURING:  # maxima may be NaN in the interpreter (NumPy) and on other GPUs
        x = tl.where(x == x, x, 0.0)
    x = tl.minimum(tl.maximum(x, 0.0), 1.0)
    least = tl.where(finite, WHOLE + BIAS - LARGEST, WHOLE + BIAS)
    return (x * tl.where(finite, 2 * LARGEST, 0.0)[:, None] + least[:, None]).to(tl.uint32, bitcast=True)


_LEAST = tl.constexpr(
    (
        "{ .reg .b32 less; set.lt.u32.f16x2 less, $1, $2; lop3.b32 $0, less, $1, $2, 0xca; }",
        "min.f16x2 $0, $1, $2;",
        "min.u16x2 $0, $1, $2;",
    )
)
"""Instructions of sm_75, sm_80 and sm_90. Positive fp16 numbers are ordered as their bits are."""


@triton.jit
def _least(a, b, ASM: tl.constexpr):
    """Lesser numbers of two pairs, below 31 * 2**10. Every GPU has inline assembly here: without it LLVM vectorises the
    sums before, and loses some of their terms (Triton 3.5 to 3.7; codes of 2 bits were wrong)."""
    if ASM == AMD:
        return tl.inline_asm_elementwise("v_pk_min_u16 $0, $1, $2", "=v,v,v", [a, b], tl.uint32, True, 1)
    elif ASM:
        asm: tl.constexpr = _LEAST[(ASM >= AMPERE) + (ASM >= HOPPER)]
        return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], tl.uint32, True, 1)
    else:
        return tl.minimum(a & 0xFFFF, b & 0xFFFF) | tl.minimum(a & 0xFFFF0000, b & 0xFFFF0000)


@triton.jit
def _least_sum(a, b, c, ASM: tl.constexpr):
    """Lesser numbers of the pairs a + b and c."""
    if ASM >= HOPPER:
        asm: tl.constexpr = "{ .reg .b32 s; add.u16x2 s, $1, $2; min.u16x2 $0, s, $3; }"
        return tl.inline_asm_elementwise(asm, "=r,r,r,r", [a, b, c], tl.uint32, True, 1)
    else:
        return _least(a + b, c, ASM)


@triton.jit
def _one(ASM: tl.constexpr):
    """1 as `[1, 1, 1]`, computed from bit 31 of `%lanemask_lt`, which is 0: constants times it stay in registers. Plain
    constants are copied there before each use, and products with powers of two become shifts, on a busier pipe."""
    if ASM >= TURING:
        asm: tl.constexpr = "{ .reg .b32 z; mov.u32 z, %lanemask_lt; shr.u32 z, z, 31; add.u32 $0, z, $1; }"
        return tl.inline_asm_elementwise(asm, "=r,r", [tl.full([1, 1, 1], 1, tl.uint32)], tl.uint32, True, 1)
    else:
        return tl.full([1, 1, 1], 1, tl.uint32)


@triton.jit
def _limited(x, one, LIMIT: tl.constexpr, ASM: tl.constexpr):
    """Clamp pairs of bytes to +-LIMIT and subtract the lower limit; `one` from `_one`."""
    LOWER: tl.constexpr = BYTE_BIAS - LIMIT
    most = tl.full(x.shape, PAIR * 2 * LIMIT, tl.uint32)
    if ASM >= HOPPER:
        asm: tl.constexpr = "{ .reg .b32 s; add.s16x2 s, $1, $2; min.s16x2.relu $0, s, $3; }"
        less = tl.broadcast_to(one * (PAIR * (0x10000 - LOWER)), x.shape)
        return tl.inline_asm_elementwise(asm, "=r,r,r,r", [x, less, most], tl.uint32, True, 1)
    else:
        lower = tl.full(x.shape, PAIR * LOWER, tl.uint32)
        return _least(x - _least(x, lower, ASM), most, ASM)


@triton.jit
def _channel_pairs(words, ASM: tl.constexpr):
    """Bytes 1 and 3 of words, and bytes 0 and 2, as 16-bit numbers."""
    if ASM >= TURING:  # a product: its pipe is less busy than that of masks
        asm: tl.constexpr = "{ .reg .b32 s; prmt.b32 s, $2, 0, 0x4341; mad.lo.u32 $1, s, -256, $2; mov.b32 $0, s; }"
        return tl.inline_asm_elementwise(asm, "=&r,=r,r", [words], (tl.uint32, tl.uint32), True, 1)
    else:
        return (words >> 8) & 0x00FF00FF, words & 0x00FF00FF


@triton.jit
def _channels(planes, one, LIMITED: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Pairs of the words' bytes in the order of steps, odd ones first; clamped if LIMITED.

    planes: Planes of a, b, c, d.
    """
    LIMIT: tl.constexpr = CODE[BITS].trellis.limit
    odd, even = (), ()
    for i in tl.static_range(4):
        first, second = _channel_pairs(planes[3 - i], ASM)
        if LIMITED and not CODE[BITS].magnitudes:
            first, second = _limited(first, one, LIMIT, ASM), _limited(second, one, LIMIT, ASM)
        elif LIMITED:
            most = tl.full(first.shape, PAIR * LIMIT, tl.uint32)
            first, second = _least(first, most, ASM), _least(second, most, ASM)
        odd += (first,)
        even += (second,)
    return odd + even


@triton.constexpr_function
def _slope(bits, level):
    """Factor of a channel in the error of a level; valid for pairs too, because all terms are positive."""
    return 16 * CODE[bits].trellis.errors[level][1] % 2**32


@triton.constexpr_function
def _constant(bits, level, place):
    """Constant part of the error of a level, a pair, with two bits of a label at `place` unless that is `None`."""
    a, b = CODE[bits].trellis.errors[level]
    if not CODE[bits].magnitudes:  # channels count from the lower limit
        a, label = a - b * CODE[bits].trellis.limit, level // 2  # the code 2 t + b
    else:
        label = level // 2 % 2 + level // 4 * 2  # the high bit, and the low bit behind
    return PAIR * (16 * a + (0 if place is None else label << place)) % 2**32


@triton.jit
def _step2(e, x, one, PLACE: tl.constexpr, ASM: tl.constexpr):
    """Least errors of paths from each state 2 b + p before a code of 2 bits, from those `e` of each state behind it.

    PLACE: Bit of a label where the code goes, or `None`.
    """
    added = ()  # index: level 4 t + 2 b + p
    for level in tl.static_range(8):
        added += (x * (one * _slope(2, level)) + _constant(2, level, PLACE),)
    least = ()
    for before in tl.static_range(4):
        found = e[before // 2] + added[before % 2]
        found = _least_sum(e[before // 2 + 2], added[before % 2 + 2], found, ASM)
        found = _least_sum(e[1 - before // 2], added[before % 2 + 4], found, ASM)
        least += (_least_sum(e[3 - before // 2], added[before % 2 + 6], found, ASM),)
    return least


@triton.jit
def _step3(e, x, one, PLACE: tl.constexpr, ASM: tl.constexpr):
    """Least errors of paths to each low bit of a crumb, `[first low bit, low bit]`, from those to the bit behind it.

    PLACE: Bit of a label where the high bit goes, then the bit behind it.
    """
    best = ()  # [low bit behind, low bit]
    for magnitude in tl.static_range(8):
        added = x * (one * _slope(3, magnitude)) + _constant(3, magnitude, PLACE)
        if magnitude % 4 < 2:
            best += (added,)
        else:
            best = best[:-2] + (best[-1], _least(best[-2], added, ASM))
    return (
        _least_sum(e[1], best[2], e[0] + best[0], ASM),
        _least_sum(e[1], best[3], e[0] + best[1], ASM),
        _least_sum(e[3], best[2], e[2] + best[0], ASM),
        _least_sum(e[3], best[3], e[2] + best[1], ASM),
    )


@triton.jit
def _is_true():
    """True, which Triton cannot know. It copies the rows of the next block ahead only if the loop over blocks has no
    other loop directly within (3.5 to 3.7); it does not see one in an `if`."""
    return tl.program_id(0) >= 0


@triton.jit
def _unlabelled(e):
    return e[0] & NO_LABELS, e[1] & NO_LABELS, e[2] & NO_LABELS, e[3] & NO_LABELS


@triton.jit
def _least_of(e, ASM: tl.constexpr):
    return _least(_least(e[0], e[1], ASM), _least(e[2], e[3], ASM), ASM)


@triton.jit
def _eight_steps(e, x, one, BITS: tl.constexpr, LABELLED: tl.constexpr, ASM: tl.constexpr):
    """Errors after the codes of two planes, and the labels of each two codes, of states 0 and 2, then 1 and 3. `x` are
    clamped `_channels`."""
    labels = ()
    for step in tl.static_range(8):
        if LABELLED and step % 2 == 0:
            e = _unlabelled(e)
        if step % 4 == 0:  # keeps errors small
            least = _least_of(e, ASM) if LABELLED else _least_of(e, ASM) & NO_LABELS
            e = (e[0] - least, e[1] - least, e[2] - least, e[3] - least)
        if CODE[BITS].magnitudes:
            e = _step3(e, x[step], one, 2 - step % 2 * 2, ASM)
        else:
            e = _step2(e, x[step], one, (2 - step % 2 * 2) if LABELLED else None, ASM)
        if LABELLED and step % 2 == 1:
            labels += (picked(e[0], e[2], EVEN_BYTES, ASM), picked(e[1], e[3], EVEN_BYTES, ASM))
    return e, labels if LABELLED else e


@triton.jit
def _paths(e, low, high, one, BITS: tl.constexpr, ASM: tl.constexpr):
    """Errors after all codes, and labels of each two codes, codes 0 and 1 first.

    low, high: Planes 0 and 1, and 2 and 3, of a, b, c, d, from `_planes_of_pairs`, clamped at 2 bits.
    """
    e, behind = _eight_steps(e, _channels(high, one, CODE[BITS].magnitudes, BITS, ASM), one, BITS, True, ASM)
    e, labels = _eight_steps(e, _channels(low, one, CODE[BITS].magnitudes, BITS, ASM), one, BITS, True, ASM)
    labels += behind
    ordered = ()
    for pair in tl.static_range(8):
        ordered += (labels[6 - 2 * (pair % 4) + pair // 4 * 8], labels[7 - 2 * (pair % 4) + pair // 4 * 8])
    return e, ordered


@triton.jit
def _in_pairs(words):
    """Split words `[R, 2, C]` into two `[R, 2, C / 2]`."""
    HALF: tl.constexpr = words.shape[2] // 2
    return tl.split(tl.permute(tl.reshape(words, [words.shape[0], 2, 2, HALF]), [0, 1, 3, 2]))


@triton.jit
def _out_of_pairs(first, second):
    """Inverse of `_in_pairs`."""
    words = tl.permute(tl.join(first, second), [0, 1, 3, 2])
    return tl.reshape(words, [first.shape[0], 2, 2 * first.shape[2]])


@triton.jit
def _planes_of_pairs(a, b, c, d, ASM: tl.constexpr):
    """Planes 0 and 1, and planes 2 and 3, of four words, for pairs of words: bytes 0 and 2 of each pair are the even
    plane's."""
    low, high = (), ()
    for i in tl.static_range(4):
        first, second = _in_pairs((a, b, c, d)[i])
        low += (picked(first, second, LOW_HALVES, ASM),)
        high += (picked(first, second, HIGH_HALVES, ASM),)
    return low, high


@triton.jit
def _labels_of(low, high, select, ASM: tl.constexpr):
    """Pick the labels of both words of a pair, in bytes 1 and 3, from the `_label_bytes` of states 0 and 2 (`low`), 1
    and 3 (`high`). Nibbles 1 and 3 of `select` are the words': bit 0 is the word's, bits 1 (high) and 2 the state's."""
    if ASM >= TURING:
        asm: tl.constexpr = "prmt.b32 $0, $1, $2, $3;"
        found = tl.inline_asm_elementwise(asm, "=r,r,r,r", [low, high, select], tl.uint32, True, 1)
    else:
        first, second = select >> 4, select >> 12
        first = tl.where(first & 4 == 0, low, high) >> (8 * (first & 3))
        second = tl.where(second & 4 == 0, low, high) >> (8 * (second & 3))
        found = (first & 0xFF) << 8 | second << 24
    return found & 0x0F000F00


_NEXT = tl.constexpr(
    tuple(
        f"""{{
        .reg .b32 s;
        dp2a.lo.u32.u32 s, {weight << 19}, $1, 0;
        dp2a.hi.u32.u32 s, {weight << 27}, $1, s;
        lop3.b32 $0, s, {taken:#x}, $2, 0xea;
        }}"""
        for weight, taken in ((9, 0x6060), (1, 0x4040))
    )
)
"""Shifts to the right at 2 and at 3 bits, on a pipe less busy than that of shifts."""


@triton.jit
def _next(labels, kept, BITS: tl.constexpr, ASM: tl.constexpr):
    """`select` of `_picked` behind these labels; `kept` are its bits that do not change.

    At 2 bits the state is bit 2 of a label and bit 3 ^ bit 0, bits 2 and 3 of its product with 9; at 3 bits bit 3 is
    the bit of the state that changes.
    """
    if ASM >= TURING:
        return tl.inline_asm_elementwise(_NEXT[CODE[BITS].magnitudes], "=r,r,r", [labels, kept], tl.uint32, True, 1)
    else:
        both = ((labels >> 8) & 15) * 8 + (labels >> 24) * 2048
        return (both & 0x4040 if CODE[BITS].magnitudes else both * 9 & 0x6060) | kept


@triton.jit
def _followed(labels, select, kept, one, BITS: tl.constexpr, ASM: tl.constexpr):
    """Follow the path from code 0 on: words of four bits a label, for both words of a pair."""
    taken = ()
    for pair in tl.static_range(8):
        label = _labels_of(labels[2 * pair], labels[2 * pair + 1], select, ASM)
        taken += (label,)
        select = _next(label, kept, BITS, ASM)
    both = ()
    for i in tl.static_range(4):
        both += (taken[2 * i] + taken[2 * i + 1] * (one * 16),)
    early, late = picked(both[0], both[1], ODD_BYTES, ASM), picked(both[2], both[3], ODD_BYTES, ASM)
    return picked(early, late, LOW_HALVES, ASM), picked(early, late, HIGH_HALVES, ASM)


@triton.jit
def codes2(a, b, c, d, ASM: tl.constexpr):
    """Words of 2-bit codes. Their order in a word is that of planes, then of neighbours e, then of quarters h.

    Args:
        a, b, c, d: uint32 words `[R, 2, C]` of four planes' bytes from `rounded`, of a word's two neighbours e and two
            quarters h: (0, 0), (0, 1), (1, 0), (1, 1).
    """
    one = _one(ASM)
    low, high = _planes_of_pairs(a, b, c, d, ASM)
    a0, b0, c0, d0 = low
    a1, b1, c1, d1 = high
    e0 = tl.zeros(a0.shape, tl.uint32)
    e1, e2, e3 = e0, e0, e0
    if _is_true():
        for _ in tl.range(2):
            e = _unlabelled((e0, e1, e2, e3))
            e = (e[0], e[1] + PAIR, e[2] + 2 * PAIR, e[3] + 3 * PAIR)
            x = _channels((a0, b0, c0, d0), one, True, 2, ASM)
            e, _none = _eight_steps(e, x, one, 2, False, ASM)
            e0, e1, e2, e3 = e
            # Go on with the other planes, and keep these clamped: after two rounds all are, in their first order.
            a0, b0, c0, d0 = a1, b1, c1, d1
            a1, b1 = x[7] + x[3] * (one * 256), x[6] + x[2] * (one * 256)
            c1, d1 = x[5] + x[1] * (one * 256), x[4] + x[0] * (one * 256)
    last = _least_of((e0, e1, e2, e3), ASM) & (3 * PAIR)

    FAR: tl.constexpr = 16 * CODE[2].trellis.far
    e = (last * FAR, (last ^ PAIR) * FAR, (last ^ (2 * PAIR)) * FAR, (last ^ (3 * PAIR)) * FAR)
    e, labels = _paths(e, (a0, b0, c0, d0), (a1, b1, c1, d1), one, 2, ASM)
    states = last | last >> 8
    kept = tl.broadcast_to(one * 0x1000, last.shape)
    select = (states & 0x0101) << 6 | (states & 0x0202) << 4 | kept
    # Labels are t, b, t, b from bit 3 down.
    first, second = _followed(labels, select, kept, one, 2, ASM)
    return _out_of_pairs(turned(first, 1), turned(second, 1))


@triton.jit
def _sizes(words):
    """Bytes from `rounded` as sizes of channels."""
    words ^= 0x80808080
    negative = (words >> 7) & 0x01010101
    return (words ^ (negative * 0xFF)) + negative


@triton.jit
def codes3(a, b, c, d, ASM: tl.constexpr):
    """Words of the crumbs of 3-bit codes; arguments as for `codes2`."""
    low, high = _planes_of_pairs(_sizes(a), _sizes(b), _sizes(c), _sizes(d), ASM)
    near = tl.zeros(low[0].shape, tl.uint32)
    far = near + PAIR * 16 * CODE[3].trellis.far
    one = _one(ASM)
    e, labels = _paths((near, far, far, near), low, high, one, 3, ASM)
    # The first low bit is that of the path with the lesser error.
    bit = ((e[3] & 0xFFFF) < (e[0] & 0xFFFF)).to(tl.uint32) + ((e[3] >> 16) < (e[0] >> 16)).to(tl.uint32) * 256
    kept = 32 * bit + 0x1000
    # From bit 3 of a label down: the low bit behind both crumbs, the second crumb, the first one's high bit.
    first, second = _followed(labels, kept + 64 * bit, kept, one, 3, ASM)
    return _out_of_pairs(turned(first, 1), turned(second, 1))


@triton.constexpr_function
def _table(first, bits):
    """Four of the levels as bytes, at 2 bits half of them."""
    code = CODE[bits]
    return sum((code.levels[first + i] // (1 if code.magnitudes else 2) & 0xFF) << 8 * i for i in range(4))


@triton.jit
def _looked_up(words, BITS: tl.constexpr, ASM: tl.constexpr):
    """Entries for the low three bits of words' eight nibbles: bytes of two uint32."""
    low = tl.full(words.shape, _table(0, BITS), tl.uint32)
    high = tl.full(words.shape, _table(4, BITS), tl.uint32)
    if ASM >= TURING:
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
def sizes(words, BITS: tl.constexpr, ASM: tl.constexpr):
    """Values of the codes of words, as bytes of four uint32: planes 0 and 1, 2 and 3 of one quarter, then of the other.
    Levels in 1/32 at 2 bits, magnitudes in 1/64 at 3."""
    first, second = words, turned(words, 30)
    if not CODE[BITS].magnitudes:
        first ^= turned(words, 3) & 0x11111111
        second ^= turned(words, 1) & 0x11111111
    return _looked_up(first, BITS, ASM) + _looked_up(second, BITS, ASM)


@triton.jit
def _zipped(a, b, ASM: tl.constexpr):
    """Bytes 0 of both, then bytes 1; bytes 2, then bytes 3."""
    if ASM >= TURING:
        asm: tl.constexpr = "{ .reg .b32 s; prmt.b32 s, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362; mov.b32 $0, s; }"
        return tl.inline_asm_elementwise(asm, "=r,=r,r,r", [a, b], (tl.uint32, tl.uint32), True, 1)
    else:
        low = (a & 0xFF) | (b & 0xFF) << 8 | (a & 0xFF00) << 8 | (b & 0xFF00) << 16
        return low, (a >> 16) & 0xFF | (b >> 8) & 0xFF00 | (a >> 8) & 0xFF0000 | b & 0xFF000000


@triton.jit
def _transposed(a, b, c, d, ASM: tl.constexpr):
    """Bytes 0 of the four, bytes 1, bytes 2 and bytes 3."""
    low, high = _zipped(a, b, ASM)
    other_low, other_high = _zipped(c, d, ASM)
    return (
        picked(low, other_low, LOW_HALVES, ASM),
        picked(low, other_low, HIGH_HALVES, ASM),
        picked(high, other_high, LOW_HALVES, ASM),
        picked(high, other_high, HIGH_HALVES, ASM),
    )


_DOT = tl.constexpr(("dp4a.s32.s32 $0, $1, $2, 0;", "dp4a.u32.u32 $0, $1, $2, 0;"))


@triton.jit
def _dot(x, y, BITS: tl.constexpr, ASM: tl.constexpr):
    """Sum of products of bytes, signed at 2 bits: int32."""
    if ASM >= TURING:
        return tl.inline_asm_elementwise(_DOT[CODE[BITS].magnitudes], "=r,r,r", [x, y], tl.int32, True, 1)
    else:
        SIGN: tl.constexpr = 0 if CODE[BITS].magnitudes else 128
        total = tl.zeros(x.shape, tl.int32)
        for byte in tl.static_range(4):
            left = ((x >> 8 * byte) & 0xFF ^ SIGN).to(tl.int32) - SIGN
            total += left * (((y >> 8 * byte) & 0xFF ^ SIGN).to(tl.int32) - SIGN)
        return total


@triton.jit
def _two_of(first, second, BITS: tl.constexpr, ASM: tl.constexpr):
    """Bytes of channels by plane, for the two quarters of two words of a pair."""
    a0, a1 = _in_pairs(first if CODE[BITS].magnitudes else first ^ 0x80808080)
    b0, b1 = _in_pairs(second if CODE[BITS].magnitudes else second ^ 0x80808080)
    return _transposed(a0, b0, a1, b1, ASM)


@triton.jit
def products(
    a, b, c, d, sizes, IS_VALUE: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Sums of level times channel over the codes of a token in a word (values: in a pair of words), int32.

    Args:
        a, b, c, d: Words from `neighbours`.
        sizes: `sizes` of the words of their codes.

    Returns:
        Planes 0 to 3 of neighbours e = 0, and for values those of e = 1: `[R, 2, C]`, or `[R, 2, C / 2]`.
    """
    if CODE[BITS].magnitudes:
        a, b, c, d = _sizes(a), _sizes(b), _sizes(c), _sizes(d)
    if IS_VALUE:
        lower, upper = _in_pairs(sizes[0]), _in_pairs(sizes[2])
        low = _transposed(lower[0], upper[0], lower[1], upper[1], ASM)
        lower, upper = _in_pairs(sizes[1]), _in_pairs(sizes[3])
        low += _transposed(lower[0], upper[0], lower[1], upper[1], ASM)
        channels = (_two_of(a, b, BITS, ASM), _two_of(c, d, BITS, ASM))
        found = ()
        for e in tl.static_range(2):
            for plane in tl.static_range(4):
                found += (_dot(channels[e][plane], low[2 * plane + e], BITS, ASM),)
    else:
        if not CODE[BITS].magnitudes:
            a, b, c, d = a ^ 0x80808080, b ^ 0x80808080, c ^ 0x80808080, d ^ 0x80808080
        channels = _transposed(a, b, c, d, ASM)
        found = ()
        for half in tl.static_range(2):
            low, high = _zipped(sizes[half], sizes[half + 2], ASM)
            found += (_dot(channels[2 * half], low, BITS, ASM), _dot(channels[2 * half + 1], high, BITS, ASM))
    return found


@triton.jit
def signs_of(words):
    """Signs of four planes' channels, 1 where negative: those of planes 0 to 3 at bits 7, 23, 6 and 22."""
    s = (words & 0x80808080) ^ 0x80808080
    return (s & 0x80) | ((s & 0x8000) << 8) | ((s >> 17) & 0x40) | ((s >> 9) & 0x400000)


@triton.jit
def neighbours(words, IS_VALUE: tl.constexpr):
    """Words `[32, TILE]` of four planes' bytes by neighbour e and quarter h, two of each, `[rows, 2, columns]` each:
    (e, h) = (0, 0), (0, 1), (1, 0), (1, 1)."""
    QUARTER: tl.constexpr = words.shape[1] // 4
    # Split quarters first: a thread holds them, and channels next to each other, but not tokens.
    first, second = tl.split(tl.permute(tl.reshape(words, [32, 2, 2, QUARTER]), [0, 1, 3, 2]))
    if IS_VALUE:
        a, c = tl.split(tl.permute(tl.reshape(first, [16, 2, 2, QUARTER]), [0, 2, 3, 1]))
        b, d = tl.split(tl.permute(tl.reshape(second, [16, 2, 2, QUARTER]), [0, 2, 3, 1]))
    else:
        a, c = tl.split(tl.reshape(first, [32, 2, QUARTER // 2, 2]))
        b, d = tl.split(tl.reshape(second, [32, 2, QUARTER // 2, 2]))
    return a, b, c, d
