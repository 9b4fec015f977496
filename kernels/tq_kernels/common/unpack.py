"""Unpack words to fp16 levels, in two spellings that give the same bits.

A word tile has the shape `[M, K]` of the matrix operands it unpacks to; every word tile yields the four token planes
of a block at once (the format is defined in `tq_hf/codec/packing.py`). With ASM a tile element is an int16, half of an
int32 word, so that the 32-bit register of two neighbours along K is exactly one stored word: byte permutes look up the
levels and no data moves between threads. A kernel that permutes what it unpacked must keep Triton from moving the
permuted layout above the look-up (`tq_kernels.codec.dequantize._two_planes`). Below Ampere (interpreter, sm_75, AMD) a
tile element is the whole int32 word, loaded once per neighbour, and shifts pick the neighbour's codes.

    load_words     packed words of a tile, in the form the chosen spelling needs
    unpack4        4 bits: one word tile                      -> 4 planes
    unpack3        3 bits: a crumb tile and the sign tile     -> 4 planes of one quarter of the channels
    unpack2        2 bits: a crumb tile                       -> 4 planes of one quarter of the channels
    unpack8        FP8 e4m3: word tile u of 2                 -> planes 2 u and 2 u + 1, as 2**-8 times the value
    load_levels    packed words of a tile, of any bits        -> 4 planes of these channels
    unpack_scales  a token's word of scales                   -> its key scale and value scale
"""

import struct

import triton
import triton.language as tl

from ..format import LEVEL_TABLES
from .device import AMPERE

SMALL_UNIT = tl.constexpr(2.0**-18)
"""Factor of small levels of 3 and 4 bits: n / 64 * 2**-18 is the subnormal fp16 with bits n. One byte is then looked
up, and the other is the sign; NVIDIA's matrix units take subnormal numbers exactly, at full speed."""

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


_HALVES = {bits: [_half_bits(n / 64) for n in table] for bits, table in LEVEL_TABLES.items()}
assert all(pattern & 255 == 0 for pattern in _HALVES[2])

# A permute takes one table as an immediate; the other must sit in a register. If that is a constant, ptxas copies it
# from a uniform register before every permute. Adding a zero that ptxas cannot see through (bit 31 of `%lanemask_lt`,
# different per lane as far as it knows) makes it keep the sum. Not both tables: register operands cost bandwidth.
# The zero cannot come as an operand: Triton moves layout conversions above inline asm only if all operands are loads
# or constants.
_OPAQUE_ZERO = "mov.u32 z, %lanemask_lt; shr.u32 z, z, 31;"
_INTERLEAVE = """prmt.b32 $0, l0, h0, 0x5140; prmt.b32 $1, l0, h0, 0x7362;
prmt.b32 $2, l1, h1, 0x5140; prmt.b32 $3, l1, h1, 0x7362;"""


def _looked_up(bits: int, small: bool) -> str:
    """PTX that looks up bytes l and h of the entries at the nibbles of s: l for small levels, h at 2 bits."""
    patterns = LEVEL_TABLES[bits] if small else _HALVES[bits]
    text = "shr.u32 t, s, 16;"
    for byte in ("l",) if small else ("h",) if bits == 2 else ("l", "h"):
        low, high = (_bytes_word(list(part), byte == "h") for part in (patterns[:4], patterns[4:]))
        text += f"""
add.u32 t{byte}, z, {low:#x}; prmt.b32 {byte}0, t{byte}, {high:#x}, s; prmt.b32 {byte}1, t{byte}, {high:#x}, t;"""
    return text


_REGISTERS = "{ .reg .b32 z, s, t, g0, g1, l0, h0, l1, h1, tl, th;"


def _asm(bits: int, quarter: int, small: bool) -> str:
    """PTX that looks up a word's eight codes of 4 bits, or of 3 bits in one quarter: full fp16 levels by low and high
    bytes, or small ones by one byte and the sign."""
    if bits == 4:
        turn, first, signs = "", "$4", "shl.b32 g1, $4, 4;"
    else:
        turn, first = "shf.r.wrap.b32 s, $4, $4, 2;" if quarter % 2 else "", "g0"
        signs = f"shl.b32 g0, $5, {2 * quarter}; shl.b32 g1, $5, {2 * quarter + 1};"
    if small:
        high = f"and.b32 h0, {first}, 0x80808080; and.b32 h1, g1, 0x80808080;"
    else:
        high = f"lop3.b32 h0, h0, {first}, 0x80808080, 0x78; lop3.b32 h1, h1, g1, 0x80808080, 0x78;"
    return f"""{_REGISTERS}
{_OPAQUE_ZERO} {turn} and.b32 s, {"s" if turn else "$4"}, 0x77777777;
{_looked_up(bits, small)}
{signs}
{high}
{_INTERLEAVE} }}"""


def _asm2(quarter: int) -> str:
    """The same at 2 bits, in one quarter: these levels have only high bytes. The lowest bit of a nibble is the upper
    bit of the code before, plus the lower bit of the code before that. Both quarters of a word begin with the same
    rotation, which is then done once."""
    place, turn = (0x44444444, "shf.r.wrap.b32 s, s, s, 2;") if quarter % 2 else (0x11111111, "")
    return f"""{_REGISTERS}
{_OPAQUE_ZERO} shf.l.wrap.b32 s, $4, $4, 3;
lop3.b32 s, $4, s, {place:#x}, 0x78; {turn} and.b32 s, s, 0x77777777;
{_looked_up(2, False)}
mov.u32 l0, 0; mov.u32 l1, 0;
{_INTERLEAVE} }}"""


_ASM4, _ASM4_SMALL = tl.constexpr(_asm(4, 0, False)), tl.constexpr(_asm(4, 0, True))
_ASM3 = tl.constexpr(tuple(_asm(3, quarter, False) for quarter in range(4)))
_ASM3_SMALL = tl.constexpr(tuple(_asm(3, quarter, True) for quarter in range(4)))
_ASM2 = tl.constexpr(tuple(_asm2(quarter) for quarter in range(2)))
_ASM8 = tl.constexpr("""{ .reg .b32 a, b; and.b32 $0, $2, 0xbf80bf80;
shl.b32 a, $2, 7; shl.b32 b, $2, 1; and.b32 b, b, 0x80008000; lop3.b32 $1, a, 0x3f803f80, b, 0xea; }""")

_TABLES = tl.constexpr(
    tuple((_table64(list(t[:4])), _table64(list(t[4:]))) for t in (*_HALVES.values(), LEVEL_TABLES[3], LEVEL_TABLES[4]))
)
"""Patterns of the eight entries at 2, 3 and 4 bits, and of small levels at 3 and 4."""


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
def _entry(index, TABLE: tl.constexpr):
    """Look up the pattern at the lower three bits of `index`, in the lower half of a uint32."""
    low = tl.full(index.shape, _TABLES[TABLE][0], tl.uint64)
    high = tl.full(index.shape, _TABLES[TABLE][1], tl.uint64)
    return (tl.where(index & 4 == 0, low, high) >> ((index & 3) * 16).to(tl.uint64)).to(tl.uint32)


@triton.jit
def _level(index, sign, BITS: tl.constexpr, SMALL: tl.constexpr):
    """fp16 level of a magnitude (the low three bits of `index`) and a sign (the low bit)."""
    return _half(_entry(index, BITS if SMALL else BITS - 2) ^ ((sign & 1) << 15))


@triton.jit
def turned(words, LEFT: tl.constexpr):
    """Rotate the bits of uint32 words to the left by 0 to 31."""
    return words if LEFT == 0 else (words << LEFT) | (words >> (32 - LEFT))


@triton.jit
def _level4(words, signs, PLANE: tl.constexpr, SMALL: tl.constexpr):
    """fp16 levels of a plane from words shifted by the neighbour's 4 (magnitudes) and 8 (signs) bits."""
    return _level(words >> (8 * PLANE), signs >> (16 * (PLANE % 2) + (7 if PLANE < 2 else 3)), 4, SMALL)


@triton.jit
def unpack4(words, odd, SMALL: tl.constexpr, ASM: tl.constexpr):
    """Unpack 4-bit words to levels.

    Args:
        words: [M, K] from `load_words`.
        odd: [1, K] int32, column % 2 (used below Ampere).
        SMALL: Whether to give levels times SMALL_UNIT.

    Returns:
        Four [M, K] fp16 tiles, planes 0 to 3.
    """
    if ASM >= AMPERE:
        return tl.inline_asm_elementwise(
            _ASM4_SMALL if SMALL else _ASM4,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        w = words.to(tl.uint32, bitcast=True)
        e = odd.to(tl.uint32)
        m = w >> (4 * e)
        s = w >> (8 * e)
        return _level4(m, s, 0, SMALL), _level4(m, s, 1, SMALL), _level4(m, s, 2, SMALL), _level4(m, s, 3, SMALL)


@triton.jit
def _level3(words, signs, PLANE: tl.constexpr, QUARTER: tl.constexpr, SMALL: tl.constexpr):
    """fp16 levels of a plane and quarter from words turned and shifted to their nibbles and signs shifted by 8 bits of
    the neighbour."""
    return _level(words >> (8 * PLANE), signs >> (16 * (PLANE % 2) + (7 if PLANE < 2 else 6) - 2 * QUARTER), 3, SMALL)


@triton.jit
def unpack3(words, signs, odd, QUARTER: tl.constexpr, SMALL: tl.constexpr, ASM: tl.constexpr):
    """Unpack 3-bit words to the levels of one quarter of the channels.

    Args:
        words: [M, K] from `load_words`, crumb tile QUARTER // 2.
        signs: [M, K] from `load_words`, the sign tile.
        odd: [1, K] int32, column % 2 (used below Ampere).
        SMALL: Whether to give levels times SMALL_UNIT.

    Returns:
        Four [M, K] fp16 tiles, planes 0 to 3.
    """
    if ASM >= AMPERE:
        return tl.inline_asm_elementwise(
            _ASM3_SMALL[QUARTER] if SMALL else _ASM3[QUARTER],
            "=r,=r,=r,=r,r,r",
            [words, signs],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        e = odd.to(tl.uint32)
        m = turned(words.to(tl.uint32, bitcast=True), 30 if QUARTER % 2 else 0) >> (4 * e)
        s = signs.to(tl.uint32, bitcast=True) >> (8 * e)
        return (
            _level3(m, s, 0, QUARTER, SMALL),
            _level3(m, s, 1, QUARTER, SMALL),
            _level3(m, s, 2, QUARTER, SMALL),
            _level3(m, s, 3, QUARTER, SMALL),
        )


@triton.jit
def unpack2(words, odd, QUARTER: tl.constexpr, ASM: tl.constexpr):
    """Unpack 2-bit words to the levels of one quarter of the channels.

    Args:
        words: [M, K] from `load_words`, crumb tile QUARTER // 2.
        odd: [1, K] int32, column % 2 (used below Ampere).

    Returns:
        Four [M, K] fp16 tiles, planes 0 to 3.
    """
    if ASM >= AMPERE:
        return tl.inline_asm_elementwise(
            _ASM2[QUARTER % 2],
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        w = words.to(tl.uint32, bitcast=True)
        index = turned(w, 30 if QUARTER % 2 else 0) ^ (turned(w, 1 if QUARTER % 2 else 3) & 0x11111111)
        m = index >> (4 * odd.to(tl.uint32))
        return (_half(_entry(m, 0)), _half(_entry(m >> 8, 0)), _half(_entry(m >> 16, 0)), _half(_entry(m >> 24, 0)))


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
def small_unit(BITS: tl.constexpr):
    """Factor of small levels of BITS bits."""
    return SMALL_UNIT if BITS == 3 or BITS == 4 else 1.0


@triton.jit
def unpack_scales(scales):
    """Unpack int32 scales to fp16: key scale (low half) and value scale (high half)."""
    w = scales.to(tl.uint32, bitcast=True)
    return _half(w & 0xFFFF), _half(w >> 16)


@triton.jit
def load_signs(words, row, column, mask, DIM: tl.constexpr, IS_VALUE: tl.constexpr, ASM: tl.constexpr):
    """Load the words of signs of a block's keys or values at 3 bits, the same for all quarters; as in `load_levels`,
    but `words` begin with the part's channels."""
    return load_words(words + 8 * DIM, row, column, mask, 16 if IS_VALUE else DIM // 8, ASM)


@triton.jit
def load_crumbs(
    words, row, column, mask, CHUNK: tl.constexpr, DIM: tl.constexpr, IS_VALUE: tl.constexpr, ASM: tl.constexpr
):
    """Load the words of quarter CHUNK, and of its neighbour, of keys or values at 2 or 3 bits; as in `load_signs`."""
    return load_words(words + (CHUNK // 2) * (4 * DIM), row, column, mask, 16 if IS_VALUE else DIM // 8, ASM)


@triton.constexpr_function
def chunk_start(chunk, chunks, dim, bits):
    """First channel of a part. At 2 and 3 bits parts 0 to 3 begin the four quarters, parts 4 to 7 follow, and so on."""
    return chunk * (dim // chunks) if bits >= 4 else chunk % 4 * (dim // 4) + chunk // 4 * (dim // chunks)


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
        SMALL: Whether to give levels of 3 and 4 bits times SMALL_UNIT.
        signs: At 3 bits the words from `load_signs`, or None: they are loaded after the others.
        crumbs: At 2 and 3 bits those from `load_crumbs`, or None.
        odd: `column % 2`, or None; computed outside of a loop by the caller.

    Returns:
        Four [M, K] fp16 tiles, planes 0 to 3.
    """
    PART: tl.constexpr = 16 * DIM // CHUNKS if IS_VALUE else DIM // CHUNKS // 2
    ROW: tl.constexpr = 16 if IS_VALUE else (DIM // 2 if BITS >= 4 else DIM // 8)
    if odd is None:
        odd = column % 2  # [1, K]
    if BITS == 4:
        return unpack4(load_words(words + CHUNK * PART, row, column, mask, ROW, ASM), odd, SMALL, ASM)
    elif BITS == 8:
        x0, x1 = unpack8(load_words(words + CHUNK * PART, row, column, mask, ROW, ASM), odd, ASM)
        x2, x3 = unpack8(load_words(words + (16 * DIM + CHUNK * PART), row, column, mask, ROW, ASM), odd, ASM)
        return x0, x1, x2, x3
    else:
        QUARTER: tl.constexpr = CHUNK % 4
        words += CHUNK // 4 * PART
        if crumbs is None:
            crumbs = load_crumbs(words, row, column, mask, QUARTER, DIM, IS_VALUE, ASM)
        if BITS == 3:
            if signs is None:
                signs = load_signs(words, row, column, mask, DIM, IS_VALUE, ASM)
            return unpack3(crumbs, signs, odd, QUARTER, SMALL, ASM)
        else:
            return unpack2(crumbs, odd, QUARTER, ASM)
