"""Turn packed blocks into dense keys and values: unpack, rotate back, scale, add the key mean, divide by the channel
scales.

With R the rotation, c the levels of a block and f the sizes of its head's channel scales, x[t, :] = (scale[t] (c[t, :]
R) + mean R) / f. A program takes whole blocks, two planes (64 tokens) a matrix product, so that a tile is large enough
for every generation of tensor cores. Levels are exact in fp16, the signs of sqrt(D) R are exact, and scales and means
are applied in fp32: only the output is rounded. The mean is rotated back by the same kind of product, over 64 equal
rows: the result is then in the registers where it is added. Loud channels of keys (`.loud`) are 0 in the rotation, and
a product with powers of two puts them into their columns.
"""

import triton
import triton.language as tl

from ..common.device import AMPERE
from ..common.launcher import Strides
from ..common.unpack import load_levels, load_tile
from ..format import CODE, TOKENS
from .loud import LOUD_TILE, load_loud, loud_channels_of

HALF_TOKENS = tl.constexpr(TOKENS.value // 2)


@triton.jit
def _load_inverse(
    rotation, channel_scales, chunk, column,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    LOUD: tl.constexpr,
):  # fmt: skip
    """Load rows of channel chunk `chunk` and columns `column` [N] of sqrt(D) R, divided by the columns' channel scales.

    Returns:
        High and low parts, `[ROWS, N]` fp16; the same matrix twice without SPLIT.
    """
    k = tl.arange(0, ROWS)[:, None]
    n = column[None, :]
    r = tl.load(rotation + (chunk * WIDTH + k) * DIM + n, mask=(k < WIDTH) & (n < DIM), other=0.0)
    if DIM & (DIM - 1) == 0:
        r = tl.where(r > 0, 1.0, tl.where(r < 0, -1.0, 0.0))
    else:
        r = r * DIM**0.5
    factor = tl.load(channel_scales + n, mask=n < HEAD_DIM, other=1.0).to(tl.float32)
    r = r / tl.abs(factor)
    if LOUD > 0:  # `coded_divisors` would spill more registers on sm_75
        r = tl.where(factor < 0, 0.0, r)
    high = r.to(tl.float16)
    low = (r - high.to(tl.float32)).to(tl.float16) if SPLIT else high
    return high, low


@triton.jit
def _two_planes(even, odd, IS_VALUE: tl.constexpr, ASM: tl.constexpr):
    """Join the level tiles of two planes (`[32, C]`, for values `[C, 32]`) into rows, `[64, C]`."""
    if IS_VALUE and ASM >= AMPERE:
        # Words are pairs of tokens, operands pairs of channels. Triton moves the operand's layout above the look-up
        # where it can; a look-up then takes halves of two words for one. Above an impure operation it moves nothing.
        even, odd = tl.inline_asm_elementwise(
            "mov.b32 $0, $2; mov.b32 $1, $3;",
            "=r,=r,r,r",
            [even, odd],
            dtype=(tl.float16, tl.float16),
            is_pure=False,
            pack=2,
        )
    pair = tl.join(even, odd)
    pair = tl.permute(pair, [2, 1, 0] if IS_VALUE else [2, 0, 1])
    return tl.reshape(pair, [HALF_TOKENS, pair.shape[2]])


@triton.jit
def _add_product(levels, high, low, x, SPLIT: tl.constexpr):
    """x + levels @ (high + low), fp32."""
    x = tl.dot(levels, high, x)
    if SPLIT:
        x = tl.dot(levels, low, x)
    return x


@triton.jit
def _less_states(levels, unit, mean, columns, x, SPLIT: tl.constexpr):
    """x - (levels * unit + mean) @ columns, fp32. Triton makes a sum one product with the one before, and then warps
    compute the same rows."""
    states = levels.to(tl.float32) * unit + mean
    high = states.to(tl.float16)
    x -= tl.dot(high, columns)
    if SPLIT:
        x -= tl.dot((states - high.to(tl.float32)).to(tl.float16), columns)
    return x


@triton.jit
def _store_rows(pointers, x, channel, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    x = x.to(pointers.dtype.element_ty)
    if HEAD_DIM % COLUMNS == 0:
        tl.store(pointers, x)
    else:
        tl.store(pointers, x, mask=channel[None, :] < HEAD_DIM)


@triton.jit(do_not_specialize=["heads", "blocks", "start", "blocks_batch", "blocks_head"])
def dequantize_blocks(
    packed,  # [B, H, N, BLOCK_WORDS] int32
    rotation,  # [DIM, DIM] float32
    channel_scales,  # [B, H, HEAD_DIM] float16
    states,  # [B, H, n * 128, HEAD_DIM] float16, bfloat16 or float32
    heads,
    blocks,  # n
    start,
    blocks_batch,  # strides in blocks
    blocks_head,
    strides: Strides,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, IS_VALUE: tl.constexpr,
    CHUNKS: tl.constexpr, COLUMNS: tl.constexpr, RESIDENT: tl.constexpr, ASM: tl.constexpr,
    BLOCK_WORDS: tl.constexpr, WORDS_AT: tl.constexpr, SCALES_AT: tl.constexpr, LOUD: tl.constexpr,
):  # fmt: skip
    """Write the keys or the values of blocks `start`, `start + 1`, ... to `states`.

    A program takes every `programs`-th block of one head and COLUMNS of its channels.
    """
    UNIT: tl.constexpr = DIM**-0.5
    SPLIT: tl.constexpr = DIM & (DIM - 1) != 0
    EXACT: tl.constexpr = states.dtype.element_ty == tl.float32
    WIDTH: tl.constexpr = DIM // CHUNKS
    CHANNELS: tl.constexpr = TILE // CHUNKS  # channels of a chunk, padded
    # Word tiles are [M, K] as matrix operands see them: keys [32, CHANNELS], values [CHANNELS, 32].
    if IS_VALUE:
        row = tl.arange(0, CHANNELS)[:, None]
        column = tl.arange(0, 32)[None, :]
        exists = None if WIDTH == CHANNELS else row < WIDTH
    else:
        row = tl.arange(0, 32)[:, None]
        column = tl.arange(0, CHANNELS)[None, :]
        exists = None if WIDTH == CHANNELS else column < WIDTH
    odd = column % 2
    token = tl.arange(0, HALF_TOKENS)
    channel = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    chunk_channel = tl.arange(0, CHANNELS)
    offsets = token[:, None] * strides.token + channel[None, :]  # [64, COLUMNS]
    channel_scales += tl.program_id(1) * HEAD_DIM
    inverses = ()
    for chunk in tl.static_range(CHUNKS if RESIDENT else 0):
        inverses += (
            _load_inverse(rotation, channel_scales, chunk, channel, HEAD_DIM, DIM, WIDTH, CHANNELS, SPLIT, LOUD),
        )

    if LOUD > 0:
        # The power of two in a divisor is exact in fp16, and what is left of it keeps states in fp16's range.
        index, size = loud_channels_of(channel_scales, HEAD_DIM, TILE, LOUD_TILE)
        power = (size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        here = (index[:, None] == channel[None, :]) & (size > 0)[:, None]  # [LOUD_TILE, COLUMNS]
        columns = tl.where(here, -4 / tl.where(size > 0, power, 1.0)[:, None], 0.0).to(tl.float16)
        rest = power / tl.where(size > 0, 4 * size, 1.0)  # [LOUD_TILE]

    head = (tl.program_id(1) % heads).to(tl.int64)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    states += batch * strides.batch + head * strides.head
    first_source = batch * blocks_batch + head * blocks_head + start
    # Copy only words ahead: chunks of the rotation would fill the shared memory.
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=2 if RESIDENT else 1):
        source = first_source + block
        target = states + strides.token.to(tl.int64) * (block * TOKENS)
        block_words = packed + source * BLOCK_WORDS + WORDS_AT
        scales = (packed + source * BLOCK_WORDS + SCALES_AT).to(tl.pointer_type(tl.float16), bitcast=True)
        x0 = tl.zeros([HALF_TOKENS, COLUMNS], tl.float32)
        x1 = tl.zeros([HALF_TOKENS, COLUMNS], tl.float32)
        mean = tl.zeros([HALF_TOKENS, COLUMNS], tl.float32)
        signs, crumbs = None, None
        if CODE[BITS].has_sign_words:
            signs = load_tile(block_words, row, column, exists, CODE[BITS].tiles - 1, DIM, IS_VALUE, ASM)
        for chunk in tl.static_range(CHUNKS):
            if RESIDENT:
                high, low = inverses[chunk]
            else:
                high, low = _load_inverse(
                    rotation, channel_scales, chunk, channel, HEAD_DIM, DIM, WIDTH, CHANNELS, SPLIT, LOUD
                )
            if CODE[BITS].is_trellis and chunk % 2 == 0:
                crumbs = load_tile(block_words, row, column, exists, chunk // 2, DIM, IS_VALUE, ASM)
            p0, p1, p2, p3 = load_levels(
                block_words, row, column, exists, chunk, CHUNKS, DIM, BITS, IS_VALUE, False, ASM, signs, crumbs, odd
            )
            x0 = _add_product(_two_planes(p0, p1, IS_VALUE, ASM), high, low, x0, SPLIT)
            x1 = _add_product(_two_planes(p2, p3, IS_VALUE, ASM), high, low, x1, SPLIT)
            if not IS_VALUE:
                mean_at = scales + 2 * TOKENS + chunk * WIDTH + chunk_channel
                m = tl.load(mean_at, mask=chunk_channel < WIDTH, other=0.0)
                m = tl.broadcast_to(m[None, :], [HALF_TOKENS, CHANNELS])
                mean = _add_product(m, high, low, mean, SPLIT)
        block_scales = scales + IS_VALUE + token * 2
        scale0 = tl.load(block_scales).to(tl.float32) * UNIT  # [64]
        scale1 = tl.load(block_scales + 2 * HALF_TOKENS).to(tl.float32) * UNIT
        x0 = x0 * scale0[:, None]
        x1 = x1 * scale1[:, None]
        if not IS_VALUE:
            x0 += mean * UNIT
            x1 += mean * UNIT
        if LOUD > 0:
            loud_at, means_at = block_words + 4 * DIM * BITS, scales + 2 * TOKENS + DIM
            y0, y1, unit, loud_mean = load_loud(loud_at, means_at, LOUD, ASM)
            unit, loud_mean = unit.to(tl.float32) * rest[None, :], loud_mean.to(tl.float32) * rest[None, :]
            x0 = _less_states(y0, unit, loud_mean, columns, x0, EXACT)
            x1 = _less_states(y1, unit, loud_mean, columns, x1, EXACT)
        _store_rows(target + offsets, x0, channel, HEAD_DIM, COLUMNS)
        _store_rows(target + HALF_TOKENS * strides.token + offsets, x1, channel, HEAD_DIM, COLUMNS)
