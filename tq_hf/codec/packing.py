"""Codes to words and back, in torch: the definition of the packed format.

The format serves a decode kernel that unpacks words straight into fp16 matrix operands. A block's 128 tokens are four
*planes* of 32 (token t is row t % 32 of plane t // 32), and a word always holds all four planes, so unpacking a tile
of words gives four tiles of 32 tokens each:

    keys    tile [M = 32 rows, K = channels]       neighbours along K are channels of one token
    values  tile [M = channels, K = 32 rows]       neighbours along K are tokens of one channel

An int32 word packs the two neighbours e = 0, 1 along K of every plane p; i = 2 p + e numbers those eight codes.

    bits  words (int32)                    where code i goes
    4     [M, K/2]                         magnitude at bit 4i; sign at bit 8i + 7 (i < 4) or 8 (i - 4) + 3
    3     crumbs [2, M', K'/2], then       magnitude of quarter 2t + h in tile t at bit 4i + 2h
          signs [M', K'/2]                 sign of quarter c at bit 8i + 7 - 2c (i < 4) or 8 (i - 4) + 6 - 2c
    2     crumbs [2, M', K'/2]             code of quarter 2t + h in tile t at bit 4i + 2h
    8     [2, M, K/2]                      plane 2u + v in tile u: sign at bit 16e + 15 - v, the rest at 16e + 7 - 7v

For 2 and 3 bits the *channels* are cut into four quarters: K' = K/4 for keys, M' = M/4 for values. At 3 and 4 bits a
code is stored as its sign (1 for the negative half of the codebook) and the index of its magnitude. The order of
nibbles and signs is the one in which one or two byte permutes look up four magnitudes, and one mask finds their signs;
that at 8 bits the one in which plane 2u is fp16 but for the bits of the other.
"""

from __future__ import annotations

import torch

from ..layout import BlockLayout

TOKENS = BlockLayout.tokens
PLANES = 4
ROWS = TOKENS // PLANES
QUARTERS = 4


def _sign_bit(i: int, quarter: int, bits: int) -> int:
    if bits == 4:
        return 8 * i + 7 if i < 4 else 8 * (i - 4) + 3
    return 8 * i + 7 - 2 * quarter if i < 4 else 8 * (i - 4) + 6 - 2 * quarter


def _split(codes: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes to (sign, magnitude index), both of the input's shape."""
    half = 2 ** (bits - 1)
    negative = codes < half
    return negative.to(codes.dtype), torch.where(negative, half - 1 - codes, codes - half)


def _join(sign: torch.Tensor, magnitude: torch.Tensor, bits: int) -> torch.Tensor:
    half = 2 ** (bits - 1)
    return torch.where(sign.bool(), half - 1 - magnitude, half + magnitude)


def _to_tiles(codes: torch.Tensor, is_value: bool, quarters: int) -> torch.Tensor:
    """`[..., 128, D]` codes to `[..., quarters, PLANES, M, K/2, 2]` in the order of the words."""
    planes = codes.unflatten(-2, (PLANES, ROWS))
    if is_value:
        tiles = planes.transpose(-1, -2).unflatten(-2, (quarters, -1)).movedim(-3, -4)
    else:
        tiles = planes.unflatten(-1, (quarters, -1)).movedim(-2, -4)
    return tiles.unflatten(-1, (-1, 2))


def _from_tiles(tiles: torch.Tensor, is_value: bool) -> torch.Tensor:
    """Inverse of `_to_tiles`."""
    planes = tiles.flatten(-2)
    if is_value:
        planes = planes.movedim(-4, -3).flatten(-3, -2).transpose(-1, -2)
    else:
        planes = planes.movedim(-4, -2).flatten(-2)
    return planes.flatten(-3, -2)


def pack(codes: torch.Tensor, bits: int, *, is_value: bool) -> torch.Tensor:
    """Pack the codes of whole blocks.

    Args:
        codes: `[..., 128, D]` integers in `[0, 2**bits)`, D a multiple of 8.
        bits: 2, 3, 4 or 8.
        is_value: The values' order (words run along tokens) rather than the keys' (along channels).

    Returns:
        `[..., 128 * D * bits / 32]` int32.
    """
    codes = codes.to(torch.int32)
    if bits == 8:
        tiles = _to_tiles(codes, is_value, 1).squeeze(-5).unflatten(-4, (2, 2))  # [..., u, plane % 2, M, K/2, e]
        words = torch.zeros_like(tiles[..., 0, :, :, 0])
        for v in range(2):
            for e in range(2):
                code = tiles[..., v, :, :, e]
                words |= (code >> 7) << (16 * e + 15 - v) | (code & 0x7F) << (16 * e + 7 - 7 * v)
        return words.flatten(-3)
    if bits == 4:
        sign, magnitude = (x.squeeze(-5) for x in (_to_tiles(y, is_value, 1) for y in _split(codes, bits)))
        words = torch.zeros_like(sign[..., 0, :, :, 0])
        for i in range(2 * PLANES):
            p, e = divmod(i, 2)
            words |= magnitude[..., p, :, :, e] << 4 * i
            words |= sign[..., p, :, :, e] << _sign_bit(i, 0, bits)
        return words.flatten(-2)
    signs, crumbs = _split(codes, bits) if bits == 3 else (None, codes)
    crumb = _to_tiles(crumbs, is_value, QUARTERS).unflatten(-5, (2, 2))  # [..., t, h, p, M', K'/2, e]
    words = torch.zeros_like(crumb[..., 0, 0, :, :, 0])
    for h in range(2):
        for i in range(2 * PLANES):
            words |= crumb[..., h, i // 2, :, :, i % 2] << (4 * i + 2 * h)
    words = words.flatten(-3)
    if signs is None:
        return words
    sign = _to_tiles(signs, is_value, QUARTERS)
    sign_words = torch.zeros_like(sign[..., 0, 0, :, :, 0])
    for quarter in range(QUARTERS):
        for i in range(2 * PLANES):
            sign_words |= sign[..., quarter, i // 2, :, :, i % 2] << _sign_bit(i, quarter, bits)
    return torch.cat([words, sign_words.flatten(-2)], dim=-1)


def unpack(words: torch.Tensor, bits: int, dim: int, *, is_value: bool) -> torch.Tensor:
    """Inverse of `pack`: `[..., W]` int32 words to `[..., 128, dim]` int32 codes."""
    lead = words.shape[:-1]
    rows, columns = (dim, ROWS) if is_value else (ROWS, dim)  # M, K of a tile
    if bits == 8:
        words = words.reshape(*lead, 2, rows, columns // 2)
        planes = [
            torch.stack(
                [(words >> (16 * e + 15 - v) & 1) << 7 | words >> (16 * e + 7 - 7 * v) & 0x7F for e in range(2)],
                -1,
            )
            for v in range(2)
        ]
        return _from_tiles(torch.stack(planes, dim=-4).flatten(-5, -4).unsqueeze(-5), is_value)
    if bits == 4:
        words = words.reshape(*lead, rows, columns // 2)
        nibbles = [_join(words >> _sign_bit(i, 0, bits) & 1, words >> 4 * i & 7, bits) for i in range(2 * PLANES)]
        return _from_tiles(
            torch.stack(nibbles, dim=-1).unflatten(-1, (PLANES, 2)).movedim(-2, -4).unsqueeze(-5), is_value
        )
    if is_value:
        rows //= QUARTERS
    else:
        columns //= QUARTERS
    crumb_words, sign_words = words.split([rows * columns, words.shape[-1] - rows * columns], dim=-1)
    crumb_words = crumb_words.reshape(*lead, 2, rows, columns // 2)
    crumbs = torch.stack(
        [torch.stack([crumb_words >> (4 * i + 2 * h) & 3 for i in range(8)], -1) for h in range(2)], dim=-4
    )
    codes = crumbs.flatten(-5, -4)  # [..., quarter, M', K'/2, i]
    if bits == 3:
        sign_words = sign_words.reshape(*lead, rows, columns // 2)
        sign = torch.stack(
            [torch.stack([sign_words >> _sign_bit(i, c, bits) & 1 for i in range(8)], -1) for c in range(QUARTERS)],
            dim=-4,
        )
        codes = _join(sign, codes, bits)
    return _from_tiles(codes.unflatten(-1, (PLANES, 2)).movedim(-2, -4), is_value)
