"""Tiles of packed blocks as attention over many queries reads them: whole fp16 operands, scaled while they unpack.

Decode applies scales to logits and probabilities, of which it has few. With 64 and more rows the operands are the
smaller side: one packed multiply-add for two elements turns levels into rotated keys (scale, and mean less a reference)
or values. A tile has 64 tokens, two planes of a block.
"""

import triton
import triton.language as tl

from ..common.unpack import load_words, unpack2, unpack3, unpack4, unpack8


@triton.jit
def reference_key(means, scale, column, exists):
    """A rotated key [BD] fp16 close to those of a program's blocks, for them to be taken relative to it.

    It is the mean of the first block at `means` [BD] pointers: fp16 would round the keys of a model with large means
    to the size of these. A part of `scale` that is different for every channel keeps rounding errors independent: with
    few levels and no mean they are the same number in every channel of one level, and add up along a key.
    """
    dither = ((column * 40503) & 0xFFFF).to(tl.float32) * (1 / 65536) - 0.5  # [BD]
    mean = tl.load(means, mask=exists, other=0.0).to(tl.float32)
    return tl.where(exists, mean + dither * scale, 0.0).to(tl.float16)


@triton.jit
def _scaled(levels, scale, mean, HAS_MEAN: tl.constexpr, ASM: tl.constexpr):
    """levels * scale + mean, fp16; `scale` and `mean` broadcast to the levels' [M, K]."""
    scale = tl.broadcast_to(scale, levels.shape)
    if HAS_MEAN:
        mean = tl.broadcast_to(mean, levels.shape)
        if ASM:
            return tl.inline_asm_elementwise(
                "fma.rn.f16x2 $0, $1, $2, $3;",
                "=r,r,r,r",
                [levels, scale, mean],
                dtype=tl.float16,
                is_pure=True,
                pack=2,
            )
        else:
            return (levels.to(tl.float32) * scale.to(tl.float32) + mean.to(tl.float32)).to(tl.float16)
    else:
        if ASM:
            return tl.inline_asm_elementwise(
                "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [levels, scale], dtype=tl.float16, is_pure=True, pack=2
            )
        else:
            return (levels.to(tl.float32) * scale.to(tl.float32)).to(tl.float16)


@triton.jit
def _below(top, bottom):
    """Two [M, K] tiles below one another, [2 M, K]."""
    pair = tl.permute(tl.join(top, bottom), [2, 0, 1])
    return tl.reshape(pair, [2 * top.shape[0], top.shape[1]])


@triton.jit
def _stacked(top, bottom):
    """The same, with neighbours along K joined last. Nothing moves either way, but Triton takes the dimension of the
    last join for the one that is contiguous in shared memory."""
    left0, right0 = tl.split(tl.reshape(top, [top.shape[0], top.shape[1] // 2, 2]))
    left1, right1 = tl.split(tl.reshape(bottom, [top.shape[0], top.shape[1] // 2, 2]))
    pair = tl.join(_below(left0, left1), _below(right0, right1))
    return tl.reshape(pair, [2 * top.shape[0], top.shape[1]])


@triton.jit
def _beside(left, right):
    """Two [M, K] tiles beside one another, [M, 2 K]."""
    pair = tl.permute(tl.join(left, right), [0, 2, 1])
    return tl.reshape(pair, [left.shape[0], 2 * left.shape[1]])


@triton.jit
def key_tiles(
    words,
    s0,
    s1,
    s2,
    s3,
    mean,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BITS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    ASM: tl.constexpr,
):
    """Rotated keys of a block, two [64, BLOCK_D] fp16 tiles.

    Args:
        words: Pointer to the block's key words.
        s0, s1, s2, s3: [32] fp16 scales of the planes.
        mean: [BLOCK_D] fp16 in the order of `channel_of`, or anything without HAS_MEAN.
    """
    row = tl.arange(0, 32)[:, None]
    m = mean[None, :] if HAS_MEAN else mean
    if BITS >= 4:
        column = tl.arange(0, BLOCK_D)[None, :]
        inside = None if BLOCK_D == DIM else column < DIM
        k0, k1, k2, k3 = _whole(words, row, column, inside, DIM // 2, 16 * DIM, BITS, ASM)
    else:
        WIDTH: tl.constexpr = DIM // 4
        column = tl.arange(0, BLOCK_D // 4)[None, :]
        inside = None if BLOCK_D // 4 == WIDTH else column < WIDTH
        a0, a1, a2, a3 = _quarter(words, row, column, inside, 0, WIDTH // 2, 4 * DIM, BITS, ASM)
        b0, b1, b2, b3 = _quarter(words, row, column, inside, 1, WIDTH // 2, 4 * DIM, BITS, ASM)
        c0, c1, c2, c3 = _quarter(words, row, column, inside, 2, WIDTH // 2, 4 * DIM, BITS, ASM)
        d0, d1, d2, d3 = _quarter(words, row, column, inside, 3, WIDTH // 2, 4 * DIM, BITS, ASM)
        k0 = _beside(_beside(a0, b0), _beside(c0, d0))
        k1 = _beside(_beside(a1, b1), _beside(c1, d1))
        k2 = _beside(_beside(a2, b2), _beside(c2, d2))
        k3 = _beside(_beside(a3, b3), _beside(c3, d3))
    k0 = _scaled(k0, s0[:, None], m, HAS_MEAN, ASM)
    k1 = _scaled(k1, s1[:, None], m, HAS_MEAN, ASM)
    k2 = _scaled(k2, s2[:, None], m, HAS_MEAN, ASM)
    k3 = _scaled(k3, s3[:, None], m, HAS_MEAN, ASM)
    return _stacked(k0, k1), _stacked(k2, k3)


@triton.jit
def value_tiles(words, s0, s1, s2, s3, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Rotated values of a block, two [BLOCK_D, 64] fp16 tiles; arguments as for `key_tiles`."""
    column = tl.arange(0, 32)[None, :]
    if BITS >= 4:
        row = tl.arange(0, BLOCK_D)[:, None]
        inside = None if BLOCK_D == DIM else row < DIM
        v0, v1, v2, v3 = _whole(words, row, column, inside, 16, 16 * DIM, BITS, ASM)
    else:
        HEIGHT: tl.constexpr = DIM // 4
        row = tl.arange(0, BLOCK_D // 4)[:, None]
        inside = None if BLOCK_D // 4 == HEIGHT else row < HEIGHT
        a0, a1, a2, a3 = _quarter(words, row, column, inside, 0, 16, 4 * DIM, BITS, ASM)
        b0, b1, b2, b3 = _quarter(words, row, column, inside, 1, 16, 4 * DIM, BITS, ASM)
        c0, c1, c2, c3 = _quarter(words, row, column, inside, 2, 16, 4 * DIM, BITS, ASM)
        d0, d1, d2, d3 = _quarter(words, row, column, inside, 3, 16, 4 * DIM, BITS, ASM)
        v0 = _stacked(_stacked(a0, b0), _stacked(c0, d0))
        v1 = _stacked(_stacked(a1, b1), _stacked(c1, d1))
        v2 = _stacked(_stacked(a2, b2), _stacked(c2, d2))
        v3 = _stacked(_stacked(a3, b3), _stacked(c3, d3))
    v0 = _scaled(v0, s0[None, :], v0, False, ASM)
    v1 = _scaled(v1, s1[None, :], v1, False, ASM)
    v2 = _scaled(v2, s2[None, :], v2, False, ASM)
    v3 = _scaled(v3, s3[None, :], v3, False, ASM)
    return _beside(v0, v1), _beside(v2, v3)


@triton.jit
def _whole(
    words,
    row,
    column,
    inside,
    ROW_WORDS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    BITS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Levels of all channels at 4 or 8 bits, four planes; FP8 has two word tiles of TILE_WORDS."""
    odd = column % 2
    if BITS == 4:
        p0, p1, p2, p3 = unpack4(load_words(words, row, column, inside, ROW_WORDS, ASM), odd, False, ASM)
    else:
        p0, p1 = unpack8(load_words(words, row, column, inside, ROW_WORDS, ASM), odd, ASM)
        p2, p3 = unpack8(load_words(words + TILE_WORDS, row, column, inside, ROW_WORDS, ASM), odd, ASM)
    return p0, p1, p2, p3


@triton.jit
def _quarter(
    words,
    row,
    column,
    inside,
    QUARTER: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    BITS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Levels of a quarter of the channels at 2 or 3 bits, four planes."""
    odd = column % 2
    crumbs = load_words(words + (QUARTER // 2) * TILE_WORDS, row, column, inside, ROW_WORDS, ASM)
    if BITS == 3:
        signs = load_words(words + 2 * TILE_WORDS, row, column, inside, ROW_WORDS, ASM)
        p0, p1, p2, p3 = unpack3(crumbs, signs, odd, QUARTER, False, ASM)
    else:
        p0, p1, p2, p3 = unpack2(crumbs, odd, QUARTER, ASM)
    return p0, p1, p2, p3


@triton.jit
def channel_of(column, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BITS: tl.constexpr):
    """The channel in column `column` of a tile, and whether there is one: quarters are padded one by one."""
    if BITS >= 4:
        return column, column < DIM
    else:
        within = column % (BLOCK_D // 4)
        return column // (BLOCK_D // 4) * (DIM // 4) + within, within < DIM // 4
