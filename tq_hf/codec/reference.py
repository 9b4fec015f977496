"""Encode and dequantize in torch: the reference that kernels are tested against, and the path of devices without them.

R is the rotation, x a key or value, f the channel scales of its head (see `tq_hf.codec.balance`), b its block. Loud
channels of a key are 0 in x, and z - mean of |f| x in FP8 beside it, in units of its block and channel:

    encode      y = R (f x);  z = y - m_b (keys, m_b = R mean of the block in fp16, 0 where that is not finite)
                sigma = |z| / sqrt(D)
                c = nearest level of z / sigma per channel, at 2 and 3 bits the nearest path of levels
                    (`tq_hf.codec.trellis`);  scale = correction(z, c), fp16
    dequantize  x' = R^-1 (scale c + m_b) / f

(TurboQuant_mse, arXiv 2504.19874, algorithm 1, with a norm correction, as vLLM's `_nc` presets have one, and a key mean
per block.)
"""

from __future__ import annotations

import torch
from tq_kernels.format import FP8_LEVEL_SCALE, FP8_MAX, LARGEST_UNIT, code_of
from tq_kernels.layout import BlockLayout
from tq_kernels.types import PackedBlocks

from ..config import TurboQuantConfig
from . import trellis
from .codebook import CEILINGS, codes_of_ceilings, levels
from .packing import pack, pack_loud, unpack, unpack_loud
from .rotation import rotate, rotate_back

TILE_BLOCKS = 16
"""Number of blocks in a tile, over all sequences and heads. Temporaries stay small beside the cache, and with 128
channels (1 MiB of float32) they fit into a processor's cache."""


def sum_by_halving(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension by halving: the order, and so the bits, depend only on the size of this dimension."""
    while (size := x.shape[-1]) > 1:
        half = size // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        x = folded if size % 2 == 0 else torch.cat([folded, x[..., -1:]], dim=-1)
    return x.squeeze(-1)


def _padded(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Pad `x` `[..., 128, D]` with zeros to `dim` channels, in float32 and in the memory order that `hadamard` uses."""
    out = x.new_empty((*x.shape[:-2], dim, x.shape[-2]), dtype=torch.float32)
    out[..., : x.shape[-1], :] = x.mT
    out[..., x.shape[-1] :, :] = 0
    return out.mT


def _per_block(scales: torch.Tensor) -> torch.Tensor:
    """Reshape `[B, Hkv, D]` to `[B, Hkv, 1, 1, D]` float32, to broadcast over `[B, Hkv, N, 128, D]`."""
    return scales.float()[:, :, None, None]


def _safe_divide(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Quotient, and 0 where the denominator is 0: a zero vector gets the scale 0."""
    return torch.where(denominator == 0, 0, numerator / torch.where(denominator == 0, 1, denominator))


def _half(x: torch.Tensor) -> torch.Tensor:
    """Cast to float16, saturated: large numbers must not become infinite."""
    limit = torch.finfo(torch.float16).max
    return x.clamp(-limit, limit).half()


def _finite_or_zero(x: torch.Tensor) -> torch.Tensor:
    """Replace infinity and NaN by 0. A key that is not finite makes its block's mean 0, and the other keys stay
    right."""
    return torch.where(x.isfinite(), x, 0)


def _looked_up(entries: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Look up `entries[index]` for entries `[N]` and any index, with the strides of `index`."""
    if not index.is_contiguous() and index.mT.is_contiguous():
        return _looked_up(entries, index.mT).mT
    return torch.index_select(entries, 0, index.flatten()).view(index.shape)


def loud_index(scales: torch.Tensor, loud: int) -> torch.Tensor:
    """Loud channels of heads with channel scales `[..., D]`, in ascending order: `[..., loud]` int64."""
    return (scales >= 0).byte().argsort(dim=-1, stable=True)[..., :loud]


def loud_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Code the loud channels of whole blocks.

    A unit is a power of two: the largest of a block's channel, less its mean, gets 128 to 256 of them.

    Args:
        x: `[..., 128, n]` float32, keys times the sizes of their channel scales.

    Returns:
        Codes `[..., 128, n]` uint8; of each channel its mean and its unit of an fp16 level (`levels` of 8 bits), `[...,
        2 n]` float16.
    """
    mean = _finite_or_zero((sum_by_halving(x.mT) / x.shape[-2]).half())
    z = x - mean.float()[..., None, :]
    largest = _finite_or_zero(z).abs().amax(-2)
    unit = torch.where(largest > 0, torch.exp2(largest.frexp().exponent.float()), 0).clamp(max=LARGEST_UNIT).half()
    z = _safe_divide(z, unit.float()[..., None, :] * FP8_LEVEL_SCALE).clamp(-FP8_MAX, FP8_MAX).nan_to_num()
    return z.to(torch.float8_e4m3fn).view(torch.uint8), torch.stack([mean, unit], -1).flatten(-2)


def encode_loud(keys: torch.Tensor, out: PackedBlocks) -> None:
    """Encode the loud channels, if any, of keys `[B, Hkv, n, 128, Dk]` into n blocks."""
    layout, scales = out.layout, _per_block(out.channel_scales.keys)
    if layout.loud:
        index = loud_index(scales, layout.loud).expand(*keys.shape[:-1], -1)
        codes, others = loud_codes((keys.float() * scales.abs()).gather(-1, index))
        out.key_words[..., layout.loud_at :] = pack_loud(codes)
        out.key_means[..., layout.key_dim_padded :] = others


def levels_of(codes: torch.Tensor, bits: int, *, is_value: bool) -> torch.Tensor:
    """Levels of codes `[..., 128, D]` from `quantize`, float32, in units of their vectors' scales."""
    if code_of(bits).is_trellis:
        codes = trellis.windows(codes, bits, is_value=is_value).int()
    return _looked_up(levels(bits, codes.device), codes)


def quantize(z: torch.Tensor, bits: int, *, is_value: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the rotated vectors of whole blocks to codes and scales.

    The scale of a vector z with levels c is |z|^2 / <z, c>: then quantizing does not shrink inner products with z.
    Scales of keys are `Code.key_shrink` of this. At 8 bits the scale maps the largest channel to the largest code.

    Args:
        z: `[..., 128, D]` float32; at 4 and 8 bits any number of vectors.
        bits: 2, 3 (trellis), 4 (Lloyd-Max) or 8 (FP8 e4m3).
        is_value: Whether `z` are values. Words of values run along tokens, and codes of 2 and 3 bits depend on the
            words.

    Returns:
        Codes `[..., 128, D]`, uint8 at 2 and 3 bits and int32 at 4 and 8; and scales `[..., 128]` float16, with
        `z ~ scale * levels_of(codes)`.
    """
    code = code_of(bits)
    if code.is_fp8:
        scale = _half(z.abs().amax(-1) / (FP8_MAX * FP8_LEVEL_SCALE))
        unit = _safe_divide(z, scale.float()[..., None] * FP8_LEVEL_SCALE).clamp(-FP8_MAX, FP8_MAX)
        return unit.to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32), scale
    square = sum_by_halving(z * z)
    sigma = (square / z.shape[-1]).sqrt()
    # A zero vector divided by infinity is zero.
    unit = z / torch.where(sigma == 0, torch.inf, sigma)[..., None]
    if code.trellis is None:
        ceilings = unit.mul_(128).ceil_().to(torch.int32).clamp_(-CEILINGS, CEILINGS).add_(CEILINGS)
        codes = _looked_up(codes_of_ceilings(bits, z.device), ceilings)
    else:
        channels = trellis.rounded(unit, bits)
        codes = trellis.encode(channels, bits, is_value=is_value)
        z = channels * (sigma / code.trellis.unit)[..., None]  # kernels compute the scale from rounded channels, too
    if not is_value:
        square = square * code.key_shrink
    return codes, _half(_safe_divide(square, sum_by_halving(z * levels_of(codes, bits, is_value=is_value))))


def _blocks_at_a_time(blocks: PackedBlocks) -> int:
    batch, heads = blocks.data.shape[:2]
    return max(1, TILE_BLOCKS // max(1, batch * heads))


def encode(config: TurboQuantConfig, keys: torch.Tensor, values: torch.Tensor, out: PackedBlocks, start: int) -> None:
    """Encode whole blocks of keys and values into blocks `start`, `start + 1`, ... of `out`.

    Args:
        config: Preset with the seed of the rotation.
        keys: `[B, Hkv, n * 128, Dk]`, any float dtype.
        values: `[B, Hkv, n * 128, Dv]`, any float dtype.
        out: Blocks to write to.
        start: Index of the first block written.
    """
    channel_scales = out.channel_scales.map(_per_block)
    layout = out.layout
    blocks, step = keys.shape[2] // layout.tokens, _blocks_at_a_time(out)
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        tile = slice(first * layout.tokens, last * layout.tokens)
        k, v = (x[:, :, tile].unflatten(2, (last - first, layout.tokens)) for x in (keys, values))
        target = out.slice(start + first, start + last)
        factor = channel_scales.keys.clamp(min=0) if layout.loud else channel_scales.keys.abs()
        z = rotate(_padded(k * factor, layout.key_dim_padded), config.seed)
        means = target.key_means[..., : layout.key_dim_padded]
        means.copy_(_finite_or_zero((sum_by_halving(z.mT) / layout.tokens).half()))
        codes, key_scales = quantize(z - means.float()[..., None, :], layout.key_bits, is_value=False)
        target.key_words[..., : layout.loud_at] = pack(codes, layout.key_bits, is_value=False)
        encode_loud(k, target)
        z = rotate(_padded(v * channel_scales.values, layout.value_dim_padded), config.seed)
        codes, value_scales = quantize(z, layout.value_bits, is_value=True)
        target.value_words.copy_(pack(codes, layout.value_bits, is_value=True))
        target.scales.copy_(torch.stack([key_scales, value_scales], dim=-1).view(torch.int32).squeeze(-1))


def _dequantize(words: torch.Tensor, scales: torch.Tensor, bits: int, dim: int, *, is_value: bool) -> torch.Tensor:
    level = levels_of(unpack(words, bits, dim, is_value=is_value), bits, is_value=is_value)
    return level * scales.float()[..., None]


def loud_states(blocks: PackedBlocks) -> torch.Tensor:
    """Loud channels of keys `[B, Hkv, N, 128, n]` float32, times the sizes of their channel scales."""
    layout = blocks.layout
    mean, unit = blocks.key_means[..., None, layout.key_dim_padded :].float().unflatten(-1, (-1, 2)).unbind(-1)
    codes = unpack_loud(blocks.key_words[..., layout.loud_at :], layout.loud)
    return _looked_up(levels(8, codes.device), codes.int()) * unit + mean


def with_loud(keys: torch.Tensor, blocks: PackedBlocks) -> torch.Tensor:
    """Keys `[B, Hkv, N, 128, D]`, times the sizes of their channel scales, with the loud channels of N blocks."""
    if not (loud := blocks.layout.loud):
        return keys
    index = loud_index(_per_block(blocks.channel_scales.keys), loud)
    return keys.scatter(-1, index.expand(*keys.shape[:-1], -1), loud_states(blocks))


def dequantize_rotated(blocks: PackedBlocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantize without rotating back: keys `[B, Hkv, N, 128, padded Dk]` without loud channels, values `[B, Hkv, N,
    128, padded Dv]`, float32."""
    layout: BlockLayout = blocks.layout
    scales, words = blocks.scales.view(torch.float16).unflatten(-1, (-1, 2)), blocks.key_words[..., : layout.loud_at]
    keys = _dequantize(words, scales[..., 0], layout.key_bits, layout.key_dim_padded, is_value=False)
    keys = keys + blocks.key_means[..., None, : layout.key_dim_padded].float()
    values = _dequantize(blocks.value_words, scales[..., 1], layout.value_bits, layout.value_dim_padded, is_value=True)
    return keys, values


def dequantize(config: TurboQuantConfig, blocks: PackedBlocks, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Dequantize `blocks` to keys and values for attention.

    Args:
        config: Preset with the seed of the rotation.
        blocks: N blocks to read.
        keys: Output `[B, Hkv, N * 128, Dk]`, any float dtype.
        values: Output `[B, Hkv, N * 128, Dv]`, any float dtype.
    """
    layout = blocks.layout
    channel_scales = blocks.channel_scales.map(_per_block)
    step = _blocks_at_a_time(blocks)
    for first in range(0, blocks.capacity, step):
        last = min(first + step, blocks.capacity)
        rows = slice(first * layout.tokens, last * layout.tokens)
        some = blocks.slice(first, last)
        key, value = (rotate_back(states, config.seed) for states in dequantize_rotated(some))
        key = with_loud(key, some)
        for out, states, scales in ((keys, key, channel_scales.keys), (values, value, channel_scales.values)):
            out[:, :, rows] = (states[..., : out.shape[-1]] / scales.abs()).flatten(2, 3)
