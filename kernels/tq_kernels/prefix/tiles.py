"""Tiles of packed blocks as attention over many queries reads them: whole fp16 operands, scaled while they unpack.

Decode applies scales to logits and probabilities, of which it has few. With 64 and more rows the operands are the
smaller side: one packed multiply-add for two elements turns levels into rotated keys (scale, and mean less a reference)
or values. A tile has 64 tokens, two planes of a block.
"""

import triton
import triton.language as tl

from ..common.unpack import load_levels


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
def _scaled(levels, scale, mean, ASM: tl.constexpr):
    """levels * scale + mean, fp16; `scale` and `mean`, which may be None, broadcast to the levels' [M, K]."""
    scale = tl.broadcast_to(scale, levels.shape)
    if mean is None:
        if ASM:
            return tl.inline_asm_elementwise(
                "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [levels, scale], dtype=tl.float16, is_pure=True, pack=2
            )
        else:
            return (levels.to(tl.float32) * scale.to(tl.float32)).to(tl.float16)
    else:
        mean = tl.broadcast_to(mean, levels.shape)
        if ASM:
            return tl.inline_asm_elementwise(
                "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [levels, scale, mean], tl.float16, is_pure=True, pack=2
            )
        else:
            return (levels.to(tl.float32) * scale.to(tl.float32) + mean.to(tl.float32)).to(tl.float16)


@triton.jit
def vcat(top, bottom):
    """Two [M, K] tiles below one another, [2 M, K]."""
    pair = tl.permute(tl.join(top, bottom), [2, 0, 1])
    return tl.reshape(pair, [2 * top.shape[0], top.shape[1]])


@triton.jit
def stack(top, bottom):
    """The same, with neighbours along K joined last. Nothing moves either way, but Triton takes the dimension of the
    last join for the one that is contiguous in shared memory."""
    left0, right0 = tl.split(tl.reshape(top, [top.shape[0], top.shape[1] // 2, 2]))
    left1, right1 = tl.split(tl.reshape(bottom, [top.shape[0], top.shape[1] // 2, 2]))
    pair = tl.join(vcat(left0, left1), vcat(right0, right1))
    return tl.reshape(pair, [2 * top.shape[0], top.shape[1]])


@triton.jit
def hcat(left, right):
    """Two [M, K] tiles beside one another, [M, 2 K]."""
    pair = tl.permute(tl.join(left, right), [0, 2, 1])
    return tl.reshape(pair, [left.shape[0], 2 * left.shape[1]])


@triton.jit
def key_tiles(words, scales, mean, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Rotated keys of a block, two [64, BLOCK_D] fp16 tiles.

    Args:
        words: Pointer to the block's key words.
        scales: Of four planes, [32] fp16 each.
        mean: [BLOCK_D] fp16 in the order of `channel_of`.
    """
    row = tl.arange(0, 32)[:, None]
    mean = mean[None, :]
    if BITS >= 4:
        column = tl.arange(0, BLOCK_D)[None, :]
        inside = None if BLOCK_D == DIM else column < DIM
        planes = load_levels(words, row, column, inside, 0, 1, DIM, BITS, False, False, ASM)
    else:
        WIDTH: tl.constexpr = DIM // 4
        column = tl.arange(0, BLOCK_D // 4)[None, :]
        inside = None if BLOCK_D // 4 == WIDTH else column < WIDTH
        a, b, c, d = _quarters(words, row, column, inside, DIM, BITS, False, ASM)
        planes = ()
        for i in tl.static_range(4):
            planes += (hcat(hcat(a[i], b[i]), hcat(c[i], d[i])),)
    k = ()
    for i in tl.static_range(4):
        k += (_scaled(planes[i], scales[i][:, None], mean, ASM),)
    return stack(k[0], k[1]), stack(k[2], k[3])


@triton.jit
def value_tiles(words, scales, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Rotated values of a block, two [BLOCK_D, 64] fp16 tiles; arguments as for `key_tiles`."""
    column = tl.arange(0, 32)[None, :]
    if BITS >= 4:
        row = tl.arange(0, BLOCK_D)[:, None]
        inside = None if BLOCK_D == DIM else row < DIM
        planes = load_levels(words, row, column, inside, 0, 1, DIM, BITS, True, False, ASM)
    else:
        HEIGHT: tl.constexpr = DIM // 4
        row = tl.arange(0, BLOCK_D // 4)[:, None]
        inside = None if BLOCK_D // 4 == HEIGHT else row < HEIGHT
        a, b, c, d = _quarters(words, row, column, inside, DIM, BITS, True, ASM)
        planes = ()
        for i in tl.static_range(4):
            planes += (stack(stack(a[i], b[i]), stack(c[i], d[i])),)
    v = ()
    for i in tl.static_range(4):
        v += (_scaled(planes[i], scales[i][None, :], None, ASM),)
    return hcat(v[0], v[1]), hcat(v[2], v[3])


@triton.jit
def _quarters(
    words, row, column, inside, DIM: tl.constexpr, BITS: tl.constexpr, IS_VALUE: tl.constexpr, ASM: tl.constexpr
):
    """Levels of the four quarters of the channels at 2 or 3 bits, each of four planes."""
    quarters = ()
    for quarter in tl.static_range(4):
        quarters += (load_levels(words, row, column, inside, quarter, 4, DIM, BITS, IS_VALUE, False, ASM),)
    return quarters


@triton.jit
def channel_of(column, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BITS: tl.constexpr):
    """The channel in column `column` of a tile, and whether there is one: quarters are padded one by one."""
    if BITS >= 4:
        return column, column < DIM
    else:
        within = column % (BLOCK_D // 4)
        return column // (BLOCK_D // 4) * (DIM // 4) + within, within < DIM // 4
