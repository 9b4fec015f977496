"""Encode whole blocks of keys and values: rotate, remove the key mean, quantise and pack, in one kernel.

A program takes the 128 rows of one block of keys or of values at a time. Rotating them is a matrix product with the
dense rotation matrix; everything after it stays in registers. Keys and values are two launches, the second of which
starts while the first drains: one kernel with both loops would hold two rotation matrices in shared memory, and half
as many programs would run at once. Two choices keep it short:

*Rows.* A matrix product leaves rows r and r + 8 of its result in one thread, for tensor cores of every generation. So
the block is rotated as two tiles of 64 rows whose rows r and r + 8 hold the same row of two neighbouring planes (see
`tq_hf.packing`). The four codes that planes contribute to a word then meet in one thread; the other neighbours of a
word (two channels, or two tokens, and the quarters of the channels) are merged as words, of which there are a quarter
as many as codes.

*Compares.* clamp((x - b) * 2**30, 0, 1) is [x > b], exactly, and one instruction of the FMA pipe (FADD.SAT), where a
compare and a select are two of the half-rate ALU pipe. The levels carry their index in mantissa bits that no fp16
number uses, so one sum of steps gives both.

The signs of the rotation are applied as +-1 in the inputs' dtype, so products are exact, and its factor 1 / sqrt(D)
goes into the scales.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from .launch import target
from .primitives import CENTROIDS

TOKENS = tl.constexpr(128)
HALF_TOKENS = tl.constexpr(64)
STEP = tl.constexpr(2.0**30)
"""Steps of the staircase are taken at arguments scaled by this, so that neighbouring fp32 numbers differ by more than
1."""
INDEX_UNIT = tl.constexpr(2.0**-21)
"""What an index counts in a level: the last mantissa bit of an fp32 in [4, 8). fp16 levels leave the last eight
free."""
HALF_MAX = tl.constexpr(65504.0)
FP8_MAX = tl.constexpr(448.0)
FP8_LEVEL_SCALE = tl.constexpr(2.0**-8)
"""Levels of FP8 codes are 2**-8 times their value (see `tq_hf.codebook`)."""

LEVELS = {bits: struct.unpack(f"<{len(c)}e", struct.pack(f"<{len(c)}e", *c)) for bits, c in CENTROIDS.items()} | {8: ()}
"""Positive halves of the codebooks, rounded to fp16 as they are stored."""

CORRECTIONS = {"none": 0, "norm": 1, "inner": 2, "projection": 3}


@triton.jit
def _half(x):
    """float16, saturated: what is too large for it must not become infinite."""
    return tl.clamp(x, -HALF_MAX, HALF_MAX).to(tl.float16)


@triton.jit
def _inverse_root(x):
    """x ** -0.5, 0 where x is 0."""
    return tl.where(x > 0.0, tl.rsqrt(tl.where(x > 0.0, x, 1.0)), 0.0)


@triton.jit
def _float_to_e4m3(x):
    """fp32 to e4m3 bytes (as int32), to nearest even; |x| <= 448."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal: drop 20 mantissa bits and rebias the exponent by 7 - 127. Below 2**-6: adding 2**14 leaves multiples of
    # 2**-9 in the mantissa.
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - (120 << 23)) >> 20
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude >= 0x3C800000, normal, subnormal) | ((bits >> 24) & 0x80)


@triton.jit
def _quantise_fp8(z, UNIT: tl.constexpr):
    """Codes `[32, TILE]` int32 and scales `[32]` fp16 of rows whose true value is `UNIT * z`."""
    scale = _half(tl.max(tl.abs(z), axis=1) * (UNIT / (FP8_MAX * FP8_LEVEL_SCALE)))  # [32]
    unit = scale.to(tl.float32) * FP8_LEVEL_SCALE
    inverse = tl.where(unit > 0.0, UNIT / tl.where(unit > 0.0, unit, 1.0), 0.0)
    # The scale's rounding to fp16 can push the largest channel past 448.
    x = tl.clamp(z * inverse[:, None], -FP8_MAX, FP8_MAX)
    return _float_to_e4m3(x), scale


@triton.constexpr_function
def _level(levels, index):
    """Level `index` of a symmetric codebook given by its positive half; -1 is the largest negative one."""
    return levels[index] if index >= 0 else -levels[-index - 1]


@triton.constexpr_function
def _boundary(levels, index):
    """Midpoint of levels `index` and `index + 1`."""
    return (_level(levels, index) + _level(levels, index + 1)) / 2


@triton.constexpr_function
def _gap(levels, index):
    """Distance of levels `index` and `index + 1`."""
    return _level(levels, index + 1) - _level(levels, index)


@triton.jit
def _quantise(
    z,
    square,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    CORRECTION: tl.constexpr,
    UNIT: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Indices and signs of the nearest levels of a plane whose true value is `UNIT * z`, and what to scale them with.

    Args:
        z: `[32, TILE]` float32.
        square: `[32]` sums of its squares.

    Returns:
        `[32, TILE]` int32 with the index in its low three bits (of the magnitude; of the level for 2 bits), `[32,
        TILE]` int32 with the sign in
        its top bit, and scales `[32]` fp16.
    """
    # One half of a symmetric codebook is enough where codes are stored as sign and magnitude.
    FOLDED: tl.constexpr = BITS > 2
    COUNT: tl.constexpr = 2 ** (BITS - 1) if FOLDED else 2**BITS
    FIRST: tl.constexpr = 0 if FOLDED else -(2 ** (BITS - 1))
    # The bias puts every biased level in [4, 8), where fp32 has one exponent.
    BIAS: tl.constexpr = 4.0 if FOLDED else 6.0
    inverse = _inverse_root(square * (1 / DIM)) * STEP  # [32]
    # The subtrahend makes zeros negative, as the boundaries do in the reference, and vanishes in any other sum.
    x = tl.fma(z, tl.broadcast_to(inverse[:, None], z.shape), tl.full(z.shape, -1e-30, tl.float32))
    if FOLDED:
        z = tl.abs(z)
        a = tl.abs(x)
    else:
        a = x
    biased = tl.full(z.shape, _level(LEVELS, FIRST) + BIAS, tl.float32)
    for i in tl.static_range(COUNT - 1):
        step = tl.clamp(a - _boundary(LEVELS, FIRST + i) * STEP, 0.0, 1.0)
        biased += step * (_gap(LEVELS, FIRST + i) + INDEX_UNIT)
    if CORRECTION == 0:
        scale = square * inverse * (1 / (DIM * STEP))
    else:
        level = biased - BIAS
        if DIM != TILE:
            level = tl.where((tl.arange(0, TILE) % (TILE // 4) < DIM // 4)[None, :], level, 0.0)
        energy = tl.sum(level * level, axis=1)  # [32]
        inner = tl.sum(z * level, axis=1) if CORRECTION > 1 else energy  # [32]
        if CORRECTION == 1:
            scale = square * _inverse_root(square * energy)
        elif CORRECTION == 2:
            scale = tl.where(inner > 0.0, square / tl.where(inner > 0.0, inner, 1.0), 0.0)
        else:
            norm = tl.rsqrt(energy)
            scale = inner * norm * norm
    return biased.to(tl.uint32, bitcast=True), x.to(tl.uint32, bitcast=True), _half(scale * UNIT)


@triton.jit
def _low_bytes(a, b, ASM: tl.constexpr):
    """Byte 0 of a, byte 0 of b, anything, anything."""
    if ASM:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x0040;", "=r,r,r", [a, b], tl.uint32, True, 1)
    else:
        return (a & 0xFF) | (b & 0xFF) << 8


@triton.jit
def _low_halves(a, b, ASM: tl.constexpr):
    """Bytes 0 and 1 of a, bytes 0 and 1 of b."""
    if ASM:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], tl.uint32, True, 1)
    else:
        return (a & 0xFFFF) | b << 16


@triton.jit
def _high_bytes(a, b, ASM: tl.constexpr):
    """Byte 3 of a, anything, byte 3 of b, anything."""
    if ASM:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x0703;", "=r,r,r", [a, b], tl.uint32, True, 1)
    else:
        return a >> 24 | (b >> 24) << 16


@triton.jit
def _planes(tile):
    """The two planes `[32, *]` of a tile `[64, *]`, whose rows r and r + 8 (of 16) are one row of both."""
    if len(tile.shape) == 1:
        low, high = tl.split(tl.permute(tl.reshape(tile, [4, 2, 8]), [0, 2, 1]))
        return tl.reshape(low, [32]), tl.reshape(high, [32])
    else:
        low, high = tl.split(tl.permute(tl.reshape(tile, [4, 2, 8, tile.shape[1]]), [0, 2, 3, 1]))
        return tl.reshape(low, [32, tile.shape[1]]), tl.reshape(high, [32, tile.shape[1]])


@triton.jit
def _merge_neighbours(words, SHIFT: tl.constexpr, IS_VALUE: tl.constexpr, DIM: tl.constexpr):
    """Words of e = 0 and, shifted, e = 1: `[32, D]` to `[32, D / 2]` for keys, to `[16, D]` for values."""
    if IS_VALUE:
        shift = (tl.arange(0, 2) * SHIFT)[None, :, None]
        return tl.sum(tl.reshape(words, [16, 2, DIM]) << shift, axis=1)
    else:
        even, odd = tl.split(tl.reshape(words, [32, DIM // 2, 2]))
        return even | odd << SHIFT


@triton.jit
def _store_words(pointer, words, row_stride, tile_stride, column_stride, columns):
    """Store words `[R, T, C]`, of which the first `columns` of C exist."""
    row = tl.arange(0, words.shape[0])[:, None, None]
    tile = tl.arange(0, words.shape[1])[None, :, None]
    column = tl.arange(0, words.shape[2])[None, None, :]
    offsets = row * row_stride + tile * tile_stride + column * column_stride
    words = words.to(tl.int32, bitcast=True)
    if columns == words.shape[2]:
        tl.store(pointer + offsets, words)
    else:
        tl.store(pointer + offsets, words, mask=column < columns)


@triton.jit
def _load_rotation(
    rotation,
    first,
    ROWS: tl.constexpr,
    MATRIX: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Rows `first` to `first + ROWS` of sqrt(D) R^T with columns in the order of quarters, `[ROWS, TILE]`.

    Returns:
        High and low parts in MATRIX's dtype, one and the same where SPLIT is not set.
    """
    k = first + tl.arange(0, ROWS)[:, None]
    n = tl.arange(0, TILE)[None, :]
    QUARTER: tl.constexpr = TILE // 4
    channel = n // QUARTER * (DIM // 4) + n % QUARTER
    if DIM == TILE:
        r = tl.load(rotation + channel * DIM + k)  # [ROWS, TILE]
    else:
        r = tl.load(rotation + channel * DIM + k, mask=(n % QUARTER < DIM // 4) & (k < DIM), other=0.0)
    if DIM & (DIM - 1) == 0:
        r = tl.where(r > 0, 1.0, tl.where(r < 0, -1.0, 0.0))
    else:
        r = r * DIM**0.5
    high = r.to(MATRIX)
    low = (r - high.to(tl.float32)).to(MATRIX) if SPLIT else high
    return high, low


@triton.jit
def _add_product(x, high, low, y, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """y + x @ (high + low), fp32."""
    x = x.to(high.dtype)
    y = tl.dot(x, high, y, input_precision=PRECISION)
    if SPLIT:
        y = tl.dot(x, low, y, input_precision=PRECISION)
    return y


@triton.jit
def _load_rows(pointers, channel, HEAD_DIM: tl.constexpr, TILE: tl.constexpr):
    """Rows of states, zero beyond HEAD_DIM."""
    if HEAD_DIM == TILE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=channel[None, :] < HEAD_DIM, other=0.0)


@triton.jit
def _prefetch_rows(states, block, stride_token, TILE: tl.constexpr):
    """Fetch the rows of a block into the L2 cache: the pipeline copies them to shared memory only just before their
    use."""
    LINE: tl.constexpr = 1024 // states.dtype.element_ty.primitive_bitwidth
    line = tl.arange(0, max(TILE // LINE, 1)) * LINE
    rows = states + stride_token.to(tl.int64) * (block * TOKENS)
    pointers = rows + (tl.arange(0, TOKENS)[:, None] * stride_token + line[None, :])  # [128, lines]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _store_codes(
    y0,  # [64, TILE] sqrt(D) times the rotated (and centred) rows of planes 0 and 1
    y1,  # [64, TILE] of planes 2 and 3
    words,  # block's first word
    scales,  # block's first scale of this kind; every other fp16 is one
    IS_VALUE: tl.constexpr,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    CORRECTION: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Quantise and pack a block and store its words and scales."""
    QUARTER: tl.constexpr = TILE // 4
    UNIT: tl.constexpr = DIM**-0.5
    # Words [R, T, C]: of R rows (keys: tokens; values: pairs of tokens), T channel quarters, C channels of one (keys:
    # pairs of them).
    if IS_VALUE:
        ROWS: tl.constexpr = 16
        COLUMNS: tl.constexpr = QUARTER
        columns: tl.constexpr = DIM // 4
        row_stride: tl.constexpr = 1
        column_stride: tl.constexpr = 16
    else:
        ROWS: tl.constexpr = 32
        COLUMNS: tl.constexpr = QUARTER // 2
        columns: tl.constexpr = DIM // 8
        row_stride: tl.constexpr = DIM // 2 if BITS >= 4 else DIM // 8
        column_stride: tl.constexpr = 1
    if BITS == 8:
        for half in tl.static_range(2):
            even, odd = _planes(y0 if half == 0 else y1)
            even, scale = _quantise_fp8(even, UNIT)
            odd, odd_scale = _quantise_fp8(odd, UNIT)
            scale = tl.join(scale, odd_scale)
            if half == 0:
                early_scale = scale
            word = _merge_neighbours((even << 8 | odd).to(tl.uint32, bitcast=True), 16, IS_VALUE, TILE)
            word = tl.reshape(word, [ROWS, 4, COLUMNS])
            _store_words(words + 16 * half * DIM, word, row_stride, columns * column_stride, column_stride, columns)
    else:
        for half in tl.static_range(2):
            y = y0 if half == 0 else y1
            even_square, odd_square = _planes(tl.sum(y * y, axis=1))
            even, odd = _planes(y)
            for plane in tl.static_range(2):
                index, x, scale = _quantise(
                    even if plane == 0 else odd,
                    even_square if plane == 0 else odd_square,
                    BITS,
                    LEVELS,
                    CORRECTION,
                    UNIT,
                    DIM,
                    TILE,
                )
                if plane == 0:
                    even_index = index
                    even_x = x
                    even_scale = scale
            # Whole bytes, because one permute moves those of two codes; their bits are picked below.
            half_word = _low_bytes(even_index, index, ASM)
            half_signs = _high_bytes(even_x, x, ASM)
            scale = tl.join(even_scale, scale)
            if half == 0:
                word = half_word
                signs = half_signs & 0x00800080
                early_scale = scale
            else:
                LATE: tl.constexpr = 3 if BITS == 4 else 6
                word = _low_halves(word, half_word, ASM) & 0x07070707
                signs |= (half_signs >> (7 - LATE)) & (0x00010001 << LATE)
        word = _merge_neighbours(word, 4, IS_VALUE, TILE)
        signs = _merge_neighbours(signs, 8, IS_VALUE, TILE)
        if BITS == 4:
            word = tl.reshape(word | signs, [ROWS, 4, COLUMNS])
            _store_words(words, word, row_stride, columns * column_stride, column_stride, columns)
        else:
            shift = (2 * tl.arange(0, 2))[None, None, :, None]
            word = tl.sum(tl.reshape(word, [ROWS, 2, 2, COLUMNS]) << shift, axis=2)
            _store_words(words, word, row_stride, 4 * DIM, column_stride, columns)
        if BITS == 3:
            shift = (2 * tl.arange(0, 4))[None, :, None]
            signs = tl.sum(tl.reshape(signs, [ROWS, 4, COLUMNS]) >> shift, axis=1)
            _store_words(words + 8 * DIM, tl.expand_dims(signs, 1), row_stride, 0, column_stride, columns)
    plane = 32 * tl.arange(0, 2)
    token = tl.arange(0, 32)[:, None, None] + plane[None, :, None] + 2 * plane[None, None, :]
    tl.store(scales + token * 2, tl.join(early_scale, scale))  # [32, 2, 2]


@triton.jit(do_not_specialize=["heads", "blocks", "start", "blocks_batch", "blocks_head"])
def encode_blocks(
    states,  # [B, H, n * 128, HEAD_DIM] float16, bfloat16 or float32
    words,  # [B, H, N, 128 * DIM * BITS / 32] int32
    scales,  # [B, H, N, 128, 2] float16, a key's and a value's
    means,  # [B, H, N, DIM] float16, or None
    rotation,  # [DIM, DIM] float32
    due,  # [5] int32, or None: `seen` of `tq_kernels.append`
    heads,
    blocks,  # n
    start,
    blocks_batch,  # strides of the packed tensors, in blocks
    blocks_head,
    stride_batch,
    stride_head,
    stride_token,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    CORRECTION: tl.constexpr,
    IS_VALUE: tl.constexpr,
    MATRIX: tl.constexpr,
    K_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Encode blocks `program, program + programs, ...` of the keys or of the values into blocks `start, start + 1,
    ...`."""
    if PDL and not IS_VALUE:
        cuda.gdc_launch_dependents()
    if due is not None:
        # A ring of rows: the block that is due, if one is, starts at the first window row.
        blocks = tl.load(due + 4)
        start = tl.load(due + 1)
        states += tl.load(due + 3) * stride_token
        if blocks == 0:
            return
    UNIT: tl.constexpr = DIM**-0.5
    QUARTER: tl.constexpr = TILE // 4
    # Entries other than +-1 take two 16-bit matrices.
    SPLIT: tl.constexpr = MATRIX != tl.float32 and DIM & (DIM - 1) != 0
    row = tl.arange(0, HALF_TOKENS)
    token = 32 * ((row >> 3) & 1) + 8 * (row >> 4) + (row & 7)  # [64], within a half of the block
    k = tl.arange(0, K_STEP)
    offsets = token[:, None] * stride_token + k[None, :]  # [64, K_STEP]
    if K_STEP == TILE:
        high, low = _load_rotation(rotation, 0, TILE, MATRIX, DIM, TILE, SPLIT)

    head = (tl.program_id(1) % heads).to(tl.int64)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    states += batch * stride_batch + head * stride_head
    first_home = batch * blocks_batch + head * blocks_head + start
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        source = states + stride_token.to(tl.int64) * (block * TOKENS)
        late = source + HALF_TOKENS * stride_token
        home = first_home + block
        if ASM and STAGES > 1:
            _prefetch_rows(states, tl.minimum(block + tl.num_programs(0), blocks - 1), stride_token, TILE)
        y0 = tl.zeros([HALF_TOKENS, TILE], tl.float32)
        y1 = tl.zeros([HALF_TOKENS, TILE], tl.float32)
        if K_STEP == TILE:
            x0 = _load_rows(source + offsets, k, HEAD_DIM, TILE)  # [64, TILE]
            x1 = _load_rows(late + offsets, k, HEAD_DIM, TILE)
            y0 = _add_product(x0, high, low, y0, SPLIT, PRECISION)
            y1 = _add_product(x1, high, low, y1, SPLIT, PRECISION)
        else:
            for first in tl.range(0, TILE, K_STEP):
                x0 = _load_rows(source + first + offsets, first + k, HEAD_DIM, TILE)  # [64, K_STEP]
                x1 = _load_rows(late + first + offsets, first + k, HEAD_DIM, TILE)
                high, low = _load_rotation(rotation, first, K_STEP, MATRIX, DIM, TILE, SPLIT)
                y0 = _add_product(x0, high, low, y0, SPLIT, PRECISION)
                y1 = _add_product(x1, high, low, y1, SPLIT, PRECISION)
        if means is not None:
            mean = _half(tl.sum(y0 + y1, axis=0) * (UNIT / TOKENS))  # [TILE]
            n = tl.arange(0, TILE)
            channel = n // QUARTER * (DIM // 4) + n % QUARTER
            tl.store(means + home * DIM + channel, mean, mask=n % QUARTER < DIM // 4)
            stored = mean.to(tl.float32) * (1 / UNIT)
            y0 -= stored[None, :]
            y1 -= stored[None, :]
        _store_codes(
            y0, y1, words + home * (TOKENS * DIM * BITS // 32), scales + home * (2 * TOKENS) + IS_VALUE,
            IS_VALUE, BITS, LEVELS, CORRECTION, DIM, TILE, ASM,
        )  # fmt: skip
    if PDL and IS_VALUE:
        cuda.gdc_wait()


@dataclass(frozen=True)
class EncodeConfig:
    """Tile sizes and launch parameters of `encode_blocks`.

    Args:
        k_step: Channels of a matrix product; the tile's width keeps the rotation in shared memory for all blocks of a
            program.
        warps: Warps of a program.
        stages: Blocks copied ahead.
        programs_per_multiprocessor: Programs a multiprocessor is given.
        registers: Limit per thread that lets as many programs run side by side, or `None`.
    """

    k_step: int
    warps: int
    stages: int
    programs_per_multiprocessor: int
    registers: int | None = None


def encode_config(
    tile: int, dim: int, bits: tuple[int, int], itemsize: int, capability: tuple[int, int]
) -> EncodeConfig:
    """The heuristic table.

    Args:
        tile: `dim` padded to a power of two.
        dim: Channels of a stored vector.
        bits: Of keys and of values; their launches overlap, so they are best of one size.
        itemsize: Bytes of a channel of the states.
        capability: Compute capability of an NVIDIA GPU, or (0, 0).
    """
    if capability[0] < 8:
        return EncodeConfig(k_step=16, warps=8, stages=1, programs_per_multiprocessor=1)
    # Two matrices of 256 channels, or one of fp32, do not fit in shared memory.
    if capability[0] != 9 or itemsize == 4 or tile > 128 and tile != dim:
        return EncodeConfig(k_step=min(tile, 32), warps=4 if tile < 64 else 8, stages=1, programs_per_multiprocessor=2)
    if tile != dim or tile > 128:
        return EncodeConfig(k_step=tile, warps=4 if tile < 64 else 8, stages=1, programs_per_multiprocessor=1)
    if tile <= 64:
        return EncodeConfig(
            tile, warps=4, stages=2, programs_per_multiprocessor=4, registers=128 if max(bits) < 8 else None
        )
    if bits != (4, 4):
        return EncodeConfig(tile, warps=4, stages=2, programs_per_multiprocessor=2)
    return EncodeConfig(tile, warps=8, stages=2, programs_per_multiprocessor=2, registers=128)


@functools.lru_cache
def device_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU; (0, 0) for other GPUs and for the interpreter."""
    if device.type != "cuda" or torch.version.hip:
        return 0, 0
    return torch.cuda.get_device_capability(device)


MATRIX_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def encode(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_words: torch.Tensor,
    value_words: torch.Tensor,
    scalars: torch.Tensor,
    key_means: torch.Tensor | None,
    start: int,
    *,
    key_bits: int,
    value_bits: int,
    key_correction: str,
    value_correction: str,
    key_rotation: torch.Tensor,
    value_rotation: torch.Tensor,
    due: torch.Tensor | None = None,
) -> None:
    """Encode whole blocks of keys and values into blocks `start`, `start + 1`, ... of the packed tensors, in two
    launches.

    A block is encoded by one program from its 128 rows alone: its bits do not depend on how many blocks are encoded
    with it.

    Args:
        keys: `[B, Hkv, n * 128, Dk]` fp16, bf16 or fp32, last dimension contiguous, other strides as they come.
        values: `[B, Hkv, n * 128, Dv]`, like `keys`.
        key_words, value_words, scalars: `[B, Hkv, N, *]` int32 packed blocks (`tq_hf/layout.py`), N >= start + n. The
            last two dimensions are
            contiguous, and all packed tensors have the same strides in blocks.
        key_means: `[B, Hkv, N, Dk padded]` fp16, or `None` to leave the mean in the keys.
        start: Index of the first block written.
        key_bits, value_bits: 2, 3, 4 or 8.
        key_correction, value_correction: "none", "norm", "inner" or "projection" (`TurboQuantConfig.key_correction`).
        key_rotation, value_rotation: The orthogonal R, `[D padded, D padded]` float32 contiguous, with rotate(x) = x
            @ R.T. Where
            D padded is a power of two only its signs are read: any multiple of R in any float dtype will do.
        due: `seen` of `tq_kernels.append.append_token`: keys and values are a window's ring then, and what is
            encoded, from
            where and to where is read on the device; `start` is ignored.

    Raises:
        ValueError: The tokens are not whole blocks, or the last dimension of the states is not contiguous.
    """
    batch, heads, length, _ = keys.shape
    blocks, rest = divmod(length, TOKENS.value)
    if rest:
        raise ValueError(f"`keys` have {length} tokens; only whole blocks of {TOKENS.value} can be encoded.")
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError(
            f"The last dimension of keys and values must be contiguous; "
            f"strides are {keys.stride()} and {values.stride()}."
        )
    if batch * heads * blocks == 0:
        return
    multiprocessors = target(keys.device).multiprocessors
    capability = device_capability(keys.device)
    # The interpreter cannot multiply bf16.
    matrix = tl.float32 if keys.device.type == "cpu" else MATRIX_TYPES[keys.dtype]
    for is_value, states, words, means, rotation, bits, correction in (
        (False, keys, key_words, key_means, key_rotation, key_bits, key_correction),
        (True, values, value_words, None, value_rotation, value_bits, value_correction),
    ):
        dim = rotation.shape[0]
        tile = max(16, triton.next_power_of_2(dim))
        config = encode_config(tile, dim, (key_bits, value_bits), states.element_size(), capability)
        programs = config.programs_per_multiprocessor * multiprocessors // (batch * heads)
        options: dict[str, Any] = {} if config.registers is None else {"maxnreg": config.registers}
        dependent_launch = capability[0] >= 9
        if dependent_launch and is_value:
            options["launch_pdl"] = True
        encode_blocks[(1 if due is not None else min(blocks, max(1, programs)), batch * heads)](
            states,
            words,
            scalars.view(torch.float16),
            means,
            rotation,
            due,
            heads,
            blocks if due is None else 1,
            start,
            *(stride // TOKENS.value for stride in scalars.stride()[:2]),
            *states.stride()[:3],
            HEAD_DIM=states.shape[-1],
            DIM=dim,
            TILE=tile,
            BITS=bits,
            LEVELS=LEVELS[bits],
            CORRECTION=CORRECTIONS[correction],
            IS_VALUE=is_value,
            MATRIX=matrix,
            K_STEP=config.k_step,
            PRECISION="tf32x3" if capability[0] >= 8 else "ieee",
            ASM=capability[0] >= 8,
            PDL=dependent_launch,
            STAGES=config.stages,
            num_warps=config.warps,
            **options,
        )
