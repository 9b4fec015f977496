"""Packing of codes into words and back, in torch: the definition of the packed format.

The format is made for a decode kernel that unpacks words directly into fp16 matrix operands. A block's 128 tokens are
four *planes* of 32 (token t is row t % 32 of plane t // 32). A word has codes of all four planes, so unpacking a tile
of words gives four tiles of 32 tokens each:

    keys    tile [M = 32 rows, K = channels]       neighbours along K are channels of one token
    values  tile [M = channels, K = 32 rows]       neighbours along K are tokens of one channel

An int32 word packs the two neighbours e = 0, 1 along K of every plane p. The index of these eight codes is
i = 2 p + e.

    bits  words (int32)                    bits of a code
    4     [M, K/2]                         magnitude at bit 4i; sign at bit 8i + 7 (i < 4) or 8 (i - 4) + 3
    3     crumbs [2, M', K'/2], then       lower two bits of quarter 2t + h in tile t at bit 4i + 2h
          signs [M', K'/2]                 upper bit of quarter c at bit 8i + 7 - 2c (i < 4) or 8 (i - 4) + 6 - 2c
    2     crumbs [2, M', K'/2]             code of quarter 2t + h in tile t: lower bit at 4i + 2h + 1, upper bit at
                                           4i + 2h + 2 (the last one's at 0)
    8     [2, M, K/2]                      plane 2u + v in tile u: sign at bit 16e + 15 - v, the rest at 16e + 7 - 7v

For 2 and 3 bits the *channels* are cut into four quarters: K' = K/4 for keys, M' = M/4 for values. The meaning of
these codes is defined in `tq_hf.codec.trellis`. At 4 bits a code is stored as its sign (1 for the negative half of the
codebook) and the index of its magnitude. The order of nibbles and signs lets one or two byte permutes look up four
magnitudes, and one mask select their signs. At 8 bits plane 2u is fp16 once the bits of plane 2u + 1 are masked out.
"""

from __future__ import annotations

import torch
from tq_kernels.format import PLANES, code_of
from tq_kernels.layout import BlockLayout

TOKENS = BlockLayout.tokens
ROWS = TOKENS // PLANES
QUARTERS = 4


def _sign_bit(i: int, quarter: int = 0, second: int = 6) -> int:
    return 8 * i + 7 - 2 * quarter if i < 4 else 8 * (i - 4) + second - 2 * quarter


def _from_tiles(tiles: torch.Tensor, is_value: bool) -> torch.Tensor:
    """Convert codes in word order, `[..., quarters, PLANES, M, K/2, 2]`, to `[..., 128, D]`."""
    planes = tiles.flatten(-2)
    if is_value:
        planes = planes.movedim(-4, -3).flatten(-3, -2).transpose(-1, -2)
    else:
        planes = planes.movedim(-4, -2).flatten(-2)
    return planes.flatten(-3, -2)


def rotated_words(words: torch.Tensor, left: int) -> torch.Tensor:
    """Rotate the bits of int32 words to the left, by 1 to 31."""
    return (words << left).bitwise_or_((words >> 32 - left).bitwise_and_((1 << left) - 1))


def _words(planes: torch.Tensor, is_value: bool) -> torch.Tensor:
    """Join the four bytes of each word, keys `[..., K/2, 4, M]` or values `[..., M, 4, K/2]` uint8, to words
    `[..., M, K/2]` int32."""
    last = planes.movedim(-2, -1) if is_value else planes.movedim(-1, -3)
    return last.clone(memory_format=torch.contiguous_format).view(torch.int32).squeeze(-1)


def _nibble_words(codes: torch.Tensor, is_value: bool) -> torch.Tensor:
    """Pack nibbles `[..., C, 128]` uint8 into words with code i at bit 4i."""
    if is_value:
        pairs = codes.view(torch.int16)
        pairs = (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)  # wraps: keeps the low byte
    else:
        pairs = codes[..., 0::2, :] | codes[..., 1::2, :] << 4
    return _words(pairs.unflatten(-1, (PLANES, pairs.shape[-1] // PLANES)), is_value)


def _sign_words(signs: torch.Tensor, first: int, second: int, is_value: bool) -> torch.Tensor:
    """Pack signs `[..., C, 128]` uint8 of 0 and 1 into words: the sign of code i at bit 8i + first (i < 4) or
    8 (i - 4) + second. Byte b = 2 (plane % 2) + e of a word has the signs of codes b and b + 4."""
    early, late = signs.unflatten(-1, (2, 2, ROWS)).unbind(-3)  # planes 0, 1 and 2, 3: codes 0 to 3 and 4 to 7
    bits = (early << first).bitwise_or_(late << second)  # [..., C, plane % 2, row]
    if is_value:
        return _words(bits.unflatten(-1, (ROWS // 2, 2)).transpose(-1, -2).flatten(-3, -2), is_value)
    return _words(bits.unflatten(-3, (bits.shape[-3] // 2, 2)).transpose(-3, -2).flatten(-3, -2), is_value)


def _fp8_words(codes: torch.Tensor, is_value: bool) -> torch.Tensor:
    """Pack FP8 codes `[..., D, 128]` uint8 into words `[..., 2, M, K/2]`."""
    even, odd = codes.unflatten(-1, (2, 2, ROWS)).unbind(-2)  # planes 2u and 2u + 1, [..., D, u, row]
    low = (even << 7).bitwise_or_(odd & 0x7F)
    high = (even >> 1 & 0x3F).bitwise_or_(odd >> 1 & 0x40).bitwise_or_(even & 0x80)
    halves = torch.stack([low, high], -1).view(torch.int16).squeeze(-1).transpose(-3, -2)  # [..., u, D, row]
    halves = halves if is_value else halves.transpose(-1, -2)
    return halves.clone(memory_format=torch.contiguous_format).view(torch.int32)


def pack(codes: torch.Tensor, bits: int, *, is_value: bool) -> torch.Tensor:
    """Pack the codes of whole blocks.

    Args:
        codes: `[..., 128, D]` integers in `[0, 2**bits)`, D a multiple of 8. Fastest if tokens are contiguous in
            memory.
        bits: 2, 3, 4 or 8.
        is_value: Whether the codes are values (words run along tokens) or keys (words run along channels).

    Returns:
        `[..., 128 * D * bits / 32]` int32.
    """
    by_channel = codes.new_empty((*codes.shape[:-2], codes.shape[-1], TOKENS), dtype=torch.uint8)
    by_channel.copy_(codes.transpose(-1, -2))
    code = code_of(bits)
    if code.is_fp8:
        return _fp8_words(by_channel, is_value).flatten(-3)
    if not code.is_trellis:
        signs = (by_channel >> 3).bitwise_xor_(1)
        # Magnitude: 7 - code below 8 (flips the lower bits), code - 8 otherwise (clears the upper bit).
        words = _nibble_words((by_channel ^ 8).bitwise_xor_(signs * 15), is_value)
        return words.bitwise_or_(_sign_words(signs, 7, 3, is_value)).flatten(-2)
    quarters = (by_channel & 3).unflatten(-2, (2, 2, by_channel.shape[-2] // QUARTERS))
    lower, upper = quarters.unbind(-3)  # 2t and 2t + 1
    words = _nibble_words(lower | upper << 2, is_value).flatten(-3)
    if not code.has_sign_words:
        return rotated_words(words, 1)
    signs = (by_channel >> 2).unflatten(-2, (QUARTERS, by_channel.shape[-2] // QUARTERS))
    sign_words = [
        _sign_words(part, 7 - 2 * quarter, 6 - 2 * quarter, is_value) for quarter, part in enumerate(signs.unbind(-3))
    ]
    return torch.cat([words, (sign_words[0] | sign_words[1] | sign_words[2] | sign_words[3]).flatten(-2)], -1)


def pack_loud(codes: torch.Tensor) -> torch.Tensor:
    """Pack FP8 codes of loud channels `[..., 128, n]` uint8, n a multiple of four, into `[..., 32 n]` int32: the bytes
    of a row's four tokens, one of each plane, follow one another."""
    return codes.unflatten(-2, (PLANES, ROWS)).transpose(-3, -2).flatten(-3).contiguous().view(torch.int32)


def unpack_loud(words: torch.Tensor, loud: int) -> torch.Tensor:
    """Unpack `[..., W]` int32 words to codes `[..., 128, loud]` uint8: the inverse of `pack_loud`."""
    return words.contiguous().view(torch.uint8).unflatten(-1, (ROWS, PLANES, loud)).transpose(-3, -2).flatten(-3, -2)


def unpack(words: torch.Tensor, bits: int, dim: int, *, is_value: bool) -> torch.Tensor:
    """Unpack `[..., W]` int32 words to `[..., 128, dim]` int32 codes: the inverse of `pack`."""
    lead = words.shape[:-1]
    rows, columns = (dim, ROWS) if is_value else (ROWS, dim)  # M, K of a tile
    code = code_of(bits)
    if code.is_fp8:
        words = words.reshape(*lead, 2, rows, columns // 2)
        planes = [
            torch.stack(
                [(words >> (16 * e + 15 - v) & 1) << 7 | words >> (16 * e + 7 - 7 * v) & 0x7F for e in range(2)], -1
            )
            for v in range(2)
        ]
        return _from_tiles(torch.stack(planes, dim=-4).flatten(-5, -4).unsqueeze(-5), is_value)
    if not code.is_trellis:
        words = words.reshape(*lead, rows, columns // 2)
        nibbles = []
        for i in range(2 * PLANES):
            negative, magnitude = (words >> _sign_bit(i, second=3) & 1).bool(), words >> 4 * i & 7
            nibbles.append(torch.where(negative, 7 - magnitude, 8 + magnitude))
        return _from_tiles(
            torch.stack(nibbles, dim=-1).unflatten(-1, (PLANES, 2)).movedim(-2, -4).unsqueeze(-5), is_value
        )
    if is_value:
        rows //= QUARTERS
    else:
        columns //= QUARTERS
    crumb_words, sign_words = words.split([rows * columns, words.shape[-1] - rows * columns], dim=-1)
    if not code.has_sign_words:
        crumb_words = rotated_words(crumb_words, 31)
    crumb_words = crumb_words.reshape(*lead, 2, rows, columns // 2)
    crumbs = torch.stack(
        [torch.stack([crumb_words >> (4 * i + 2 * h) & 3 for i in range(8)], -1) for h in range(2)], dim=-4
    )
    codes = crumbs.flatten(-5, -4)  # [..., quarter, M', K'/2, i]
    if code.has_sign_words:
        sign_words = sign_words.reshape(*lead, rows, columns // 2)
        sign = torch.stack(
            [torch.stack([sign_words >> _sign_bit(i, c) & 1 for i in range(8)], -1) for c in range(QUARTERS)], dim=-4
        )
        codes = codes | sign << 2
    return _from_tiles(codes.unflatten(-1, (PLANES, 2)).movedim(-2, -4), is_value)
