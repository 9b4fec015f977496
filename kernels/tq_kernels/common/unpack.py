"""Unpack words to fp16 levels, in two spellings that give the same bits.

A word tile has the shape `[M, K]` of the matrix operands it unpacks to; every word tile yields the four token planes
of a block at once (the format is defined in `tq_hf/codec/packing.py`). With ASM a tile element is an int16, half of an
int32 word, so that the 32-bit register of two neighbours along K is exactly one stored word: byte permutes look up the
levels and no data moves between threads. A kernel that permutes what it unpacked must keep Triton from moving the
permuted layout above the look-up (`tq_kernels.codec.dequantize._two_planes`). Below Ampere (interpreter, sm_75, AMD) a
tile element is the whole int32 word, loaded once per neighbour, and shifts pick the neighbour's codes.

    load_words     packed words of a tile, in the form the chosen spelling needs
    unpack         a tile of codes, at 3 bits and that of signs  -> 4 planes; at 2 and 3 bits of one quarter
    unpack8        FP8 e4m3: word tile u of 2                    -> planes 2 u and 2 u + 1, as 2**-8 times the value
    load_levels    packed words of a tile, of any bits           -> 4 planes of these channels
    unpack_scales  a token's word of scales                      -> its key scale and value scale
"""

import struct

import triton
import triton.language as tl

from ..format import CODE, CODES, Code
from .device import AMPERE

PROBABILITY_BITS = tl.constexpr(4.0)
"""Decode keeps probabilities times 2**4, which centres fp16's range on their usual products with value scales."""


def _half_bits(level: float) -> int:
    return struct.unpack("<H", struct.pack("<e", level))[0]


def _bytes_word(patterns: list[int], high: bool) -> int:
    """Low or high bytes of four 16-bit patterns as one permute table."""
    return sum((x >> 8 * high & 255) << 8 * i for i, x in enumerate(patterns))


def _table64(patterns: list[int]) -> int:
    """Four 16-bit patterns as one 64-bit constant."""
    return sum(x << 16 * i for i, x in enumerate(patterns))


def _patterns(code: Code, small: bool) -> list[int]:
    """Bits of the fp16 levels of a look-up."""
    return list(code.levels) if small and code.magnitudes else [_half_bits(n / 64) for n in code.levels]


# A permute takes one table as an immediate; the other must sit in a register. If that is a constant, ptxas copies it
# from a uniform register before every permute. Adding a zero that ptxas cannot see through (bit 31 of `%lanemask_lt`,
# different per lane as far as it knows) makes it keep the sum. Not both tables: register operands cost bandwidth.
# The zero cannot come as an operand: Triton moves layout conversions above inline asm only if all operands are loads
# or constants.
_OPAQUE_ZERO = "mov.u32 z, %lanemask_lt; shr.u32 z, z, 31;"
_INTERLEAVE = """prmt.b32 $0, l0, h0, 0x5140; prmt.b32 $1, l0, h0, 0x7362;
prmt.b32 $2, l1, h1, 0x5140; prmt.b32 $3, l1, h1, 0x7362;"""


def _looked_up(code: Code, small: bool) -> str:
    """PTX that looks up bytes l and h of the entries at the nibbles of s: l for small levels, h for those without a low
    byte."""
    patterns = _patterns(code, small)
    assert code.magnitudes or all(pattern & 255 == 0 for pattern in patterns)
    text = "shr.u32 t, s, 16;"
    for byte in ("h",) if not code.magnitudes else ("l",) if small else ("l", "h"):
        low, high = (_bytes_word(part, byte == "h") for part in (patterns[:4], patterns[4:]))
        text += f"""
add.u32 t{byte}, z, {low:#x}; prmt.b32 {byte}0, t{byte}, {high:#x}, s; prmt.b32 {byte}1, t{byte}, {high:#x}, t;"""
    return text


_REGISTERS = "{ .reg .b32 z, s, t, g0, g1, l0, h0, l1, h1, tl, th;"


def _asm(code: Code, quarter: int, small: bool) -> str:
    """PTX that looks up a word's eight codes, those of one quarter at 2 and 3 bits: full fp16 levels by low and high
    bytes, or small ones by one byte and the sign.

    At 2 bits the lowest bit of a nibble is the upper bit of the code before, plus the lower bit of the code before
    that. Both quarters of a word begin with the same rotation, which is then done once.
    """
    turn = "shf.r.wrap.b32 s, {0}, {0}, 2;" if quarter % 2 else ""
    if not code.magnitudes:
        place = 0x44444444 if turn else 0x11111111
        return f"""{_REGISTERS}
{_OPAQUE_ZERO} shf.l.wrap.b32 s, $4, $4, 3;
lop3.b32 s, $4, s, {place:#x}, 0x78; {turn.format("s")} and.b32 s, s, 0x77777777;
{_looked_up(code, small)}
mov.u32 l0, 0; mov.u32 l1, 0;
{_INTERLEAVE} }}"""
    first, signs = "$4", "shl.b32 g1, $4, 4;"
    if code.has_sign_words:
        first, signs = "g0", f"shl.b32 g0, $5, {2 * quarter}; shl.b32 g1, $5, {2 * quarter + 1};"
    if small:
        high = f"and.b32 h0, {first}, 0x80808080; and.b32 h1, g1, 0x80808080;"
    else:
        high = f"lop3.b32 h0, h0, {first}, 0x80808080, 0x78; lop3.b32 h1, h1, g1, 0x80808080, 0x78;"
    return f"""{_REGISTERS}
{_OPAQUE_ZERO} {turn.format("$4")} and.b32 s, {"s" if turn else "$4"}, 0x77777777;
{_looked_up(code, small)}
{signs}
{high}
{_INTERLEAVE} }}"""


_ASM = tl.constexpr(
    {
        code.bits: [[_asm(code, quarter, small) for quarter in range(code.quarters)] for small in (False, True)]
        for code in CODES.values()
        if not code.is_fp8
    }
)
"""PTX by width, small or not, and quarter."""
_ASM8 = tl.constexpr("""{ .reg .b32 a, b; and.b32 $0, $2, 0xbf80bf80;
shl.b32 a, $2, 7; shl.b32 b, $2, 1; and.b32 b, b, 0x80008000; lop3.b32 $1, a, 0x3f803f80, b, 0xea; }""")

_TABLES = tl.constexpr(
    {
        bits: [(_table64(x[:4]), _table64(x[4:])) for x in (_patterns(code, False), _patterns(code, True))]
        for bits, code in CODES.items()
    }
)
"""Patterns of the eight entries by width, small or not."""


@triton.constexpr_function
def _entries(bits, small, half):
    return _TABLES[bits][small][half]


@triton.constexpr_function
def _four(kind):
    return (kind,) * 4


@triton.constexpr_function
def _look_up(bits, small, quarter):
    return _ASM[bits][small][quarter]


@triton.jit
def load_words(words, row, column, mask, ROW_WORDS: tl.constexpr, ASM: tl.constexpr):
    """Packed words of the tile elements at `row` [M, 1] and `column` [1, K] of a tile of ROW_WORDS int32 words a row.

    Args:
        words: Pointer to the tile's first int32 word.
        mask: Broadcastable to [M, K], or None; masked elements read 0.

    Returns:
        [M, K] int16 (from Ampere on) or int32, for `unpack*`.
    """
    if ASM >= AMPERE:
        pointer = words.to(tl.pointer_type(tl.int16), bitcast=True) + (row * (2 * ROW_WORDS) + column)  # [M, K]
    else:
        pointer = words + (row * ROW_WORDS + column // 2)  # [M, K]
    if mask is None:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=mask, other=0)


@triton.jit
def _half(bits):
    """Take the low 16 bits of uint32 or uint64 as fp16."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _entry(index, BITS: tl.constexpr, SMALL: tl.constexpr):
    """Look up the pattern at the lower three bits of `index`, in the lower half of a uint32."""
    low = tl.full(index.shape, _entries(BITS, SMALL, 0), tl.uint64)
    high = tl.full(index.shape, _entries(BITS, SMALL, 1), tl.uint64)
    return (tl.where(index & 4 == 0, low, high) >> ((index & 3) * 16).to(tl.uint64)).to(tl.uint32)


@triton.jit
def turned(words, LEFT: tl.constexpr):
    """Rotate the bits of uint32 words to the left by 0 to 31."""
    return words if LEFT == 0 else (words << LEFT) | (words >> (32 - LEFT))


@triton.jit
def looked_up(
    words, signs, QUARTER: tl.constexpr, BITS: tl.constexpr, SMALL: tl.constexpr, TYPE: tl.constexpr, PACK: tl.constexpr
):  # fmt: skip
    """Look up the codes of words by PTX: four planes of TYPE, PACK elements in a register. For arguments see
    `unpack`."""
    asm: tl.constexpr = _look_up(BITS, SMALL, QUARTER)
    types: tl.constexpr = _four(TYPE)
    if CODE[BITS].has_sign_words:
        return tl.inline_asm_elementwise(asm, "=r,=r,=r,=r,r,r", [words, signs], types, True, PACK)
    else:
        return tl.inline_asm_elementwise(asm, "=r,=r,=r,=r,r", [words], types, True, PACK)


@triton.jit
def unpack(
    words, signs, odd, QUARTER: tl.constexpr, BITS: tl.constexpr, SMALL: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Unpack words of a look-up to levels.

    Args:
        words: [M, K] from `load_words`: at 2 and 3 bits crumb tile QUARTER // 2.
        signs: The tile of signs where they have words of their own, at 3 bits.
        odd: [1, K] int32, column % 2 (used below Ampere).
        QUARTER: Quarter of the channels; 0 at 4 bits.
        SMALL: Whether to give levels times `Code.small_unit`.

    Returns:
        Four [M, K] fp16 tiles, planes 0 to 3.
    """
    if ASM >= AMPERE:
        return looked_up(words, signs, QUARTER, BITS, SMALL, tl.float16, 2)
    else:
        APART: tl.constexpr = CODE[BITS].has_sign_words
        SECOND: tl.constexpr = 6 if APART else 3
        e = odd.to(tl.uint32)
        w = words.to(tl.uint32, bitcast=True)
        m = turned(w, 30 if QUARTER % 2 else 0)
        if CODE[BITS].magnitudes:
            s = (signs if APART else words).to(tl.uint32, bitcast=True) >> (8 * e)
        else:
            m ^= turned(w, 1 if QUARTER % 2 else 3) & 0x11111111
        m = m >> (4 * e)
        planes = ()
        for plane in tl.static_range(4):
            level = _entry(m >> (8 * plane), BITS, SMALL)
            if CODE[BITS].magnitudes:
                shift = 16 * (plane % 2) + (7 if plane < 2 else SECOND) - 2 * QUARTER
                level ^= ((s >> shift) & 1) << 15
            planes += (_half(level),)
        return planes


@triton.jit
def unpack8(words, odd, ASM: tl.constexpr):
    """Unpack FP8 words of tile u to levels (2**-8 times the e4m3 value).

    Args:
        words: [M, K] from `load_words`, tile u.
        odd: [1, K] int32, column % 2 (used below Ampere).

    Returns:
        Two [M, K] fp16 tiles, planes 2 u and 2 u + 1.
    """
    if ASM >= AMPERE:
        return tl.inline_asm_elementwise(
            _ASM8, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        pair = words.to(tl.uint32, bitcast=True) >> (16 * odd.to(tl.uint32))
        first = pair & 0xBF80
        second = ((pair << 7) & 0x3F80) | ((pair << 1) & 0x8000)
        return _half(first), _half(second)


@triton.jit
def unpack_scales(scales):
    """Unpack int32 scales to fp16: key scale (low half) and value scale (high half)."""
    w = scales.to(tl.uint32, bitcast=True)
    return _half(w & 0xFFFF), _half(w >> 16)


@triton.jit
def scaled(levels, scale, mean, ASM: tl.constexpr):
    """levels * scale + mean, fp16; `scale` and `mean` (or None) broadcast to the levels' [M, K]."""
    scale = tl.broadcast_to(scale, levels.shape)
    if mean is None:
        if ASM >= AMPERE:
            return tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [levels, scale], tl.float16, True, 2)
        else:
            return (levels.to(tl.float32) * scale.to(tl.float32)).to(tl.float16)
    else:
        mean = tl.broadcast_to(mean, levels.shape)
        if ASM >= AMPERE:
            return tl.inline_asm_elementwise(
                "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [levels, scale, mean], tl.float16, is_pure=True, pack=2
            )
        else:
            return (levels.to(tl.float32) * scale.to(tl.float32) + mean.to(tl.float32)).to(tl.float16)


@triton.jit
def load_tile(
    words, row, column, mask, TILE: tl.constexpr, DIM: tl.constexpr, IS_VALUE: tl.constexpr, ASM: tl.constexpr
):
    """Load words of tile TILE of a block's keys or values in quarters (`Code.tile_quarters`); as in `load_levels`, but
    `words` begin with the part's channels."""
    return load_words(words + TILE * (4 * DIM), row, column, mask, 16 if IS_VALUE else DIM // 8, ASM)


@triton.constexpr_function
def chunk_start(chunk, chunks, dim, bits):
    """First channel of a part. At 2 and 3 bits parts 0 to 3 begin the four quarters, parts 4 to 7 follow, and so on."""
    quarters = min(CODE[bits].quarters, chunks)
    return chunk % quarters * (dim // quarters) + chunk // quarters * (dim // chunks)


@triton.jit
def load_levels(
    words, row, column, mask, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr,
    IS_VALUE: tl.constexpr, SMALL: tl.constexpr, ASM: tl.constexpr,
    signs=None,
    crumbs=None,
    odd=None,
):  # fmt: skip
    """Load the levels of part CHUNK of a block's channels, of CHUNKS parts (a multiple of four at 2 and 3 bits).

    Args:
        words: Pointer to the block's words of keys or values.
        row, column: [M, 1] and [1, K]: token of a plane and channel of the part, or with IS_VALUE the reverse.
        mask: Broadcastable to [M, K], or None.
        SMALL: Whether to give small levels (`Code.small_unit`).
        signs: At 3 bits the words from `load_tile`, or None: they are loaded after the others.
        crumbs: At 2 and 3 bits those from `load_tile`, or None.
        odd: `column % 2`, or None; computed outside of a loop by the caller.

    Returns:
        Four [M, K] fp16 tiles, planes 0 to 3.
    """
    PART: tl.constexpr = 16 * DIM // CHUNKS if IS_VALUE else DIM // CHUNKS // 2
    ROW: tl.constexpr = 16 if IS_VALUE else DIM // 2
    if odd is None:
        odd = column % 2  # [1, K]
    if CODE[BITS].is_fp8:
        x0, x1 = unpack8(load_words(words + CHUNK * PART, row, column, mask, ROW, ASM), odd, ASM)
        x2, x3 = unpack8(load_words(words + (16 * DIM + CHUNK * PART), row, column, mask, ROW, ASM), odd, ASM)
        return x0, x1, x2, x3
    elif CODE[BITS].quarters == 1:
        return unpack(load_words(words + CHUNK * PART, row, column, mask, ROW, ASM), None, odd, 0, BITS, SMALL, ASM)
    else:
        QUARTER: tl.constexpr = CHUNK % 4
        words += CHUNK // 4 * PART
        if crumbs is None:
            crumbs = load_tile(words, row, column, mask, QUARTER // CODE[BITS].tile_quarters, DIM, IS_VALUE, ASM)
        if CODE[BITS].has_sign_words and signs is None:
            signs = load_tile(words, row, column, mask, CODE[BITS].tiles - 1, DIM, IS_VALUE, ASM)
        return unpack(crumbs, signs, odd, QUARTER, BITS, SMALL, ASM)
