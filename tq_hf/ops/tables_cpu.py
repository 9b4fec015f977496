"""Packed words to levels by table lookup: how a CPU reads blocks (bit layout in `tq_hf.codec.packing`).

A few integer operations on whole int32 words arrange the bits so that each 16-bit half of a word is an index of four
codes, and one `index_select` gives their four levels: per number a quarter of a lookup and less than one integer
operation. An entry is one complex128, because a 1-d `index_select` of single elements is the fastest gather of ATen.

    4 bits  magnitudes of codes 0..3 are in the low half already; a delta swap (bits 3, 11 <-> 23, 31) brings their
            signs, and those of codes 4..7 to the other half
    3 bits  signs likewise, for four quarters at once (bits 0, 2, .. 14 <-> 17, 19, .. 31); each quarter's crumbs are
            then joined by its signs
    2 bits  each quarter's crumbs, masked
    8 bits  no table: shifted and masked, the two planes of a word are fp16 numbers

Levels come in the order of the words, which is not that of the tokens (`key_levels`, `value_levels`); a caller
with few queries arranges those instead. The three tables take 1.45 MiB in all.

On MPS the integer operations exist for int32, and complex128 does not: entries are rows of four floats there. This has
been read in the list of operators, not run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..codec.codebook import levels
from ..codec.packing import PLANES, QUARTERS, ROWS
from ..inference_mode import made_once

Take = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
"""Scratch of a name, shape and dtype, valid until the next of that name."""

_SIGN_BITS = {4: (7, 15, 3, 11), 3: (3, 11, 2, 10)}
"""Where an index has the signs of its four codes; magnitudes, and 2-bit codes, are at bits 0, 4, 8 and 12."""
_LARGEST_INDEX = {4: 0xFFFF, 3: 0x3F3F, 2: 0x3333}


@made_once
def table(bits: int, device: torch.device) -> torch.Tensor:
    """Levels of the four codes of an index: `[65536]`, `[16192]` or `[13108]` complex128 for 4, 3 or 2 bits.

    On MPS `[..., 4]` float32, the same bytes.
    """
    index = torch.arange(_LARGEST_INDEX[bits] + 1)
    of_code, columns = levels(bits, index.device), []
    for i in range(4):
        code = index >> 4 * i & 3
        if bits != 2:
            half = 2 ** (bits - 1)
            magnitude = index >> 4 * i & half - 1
            code = torch.where((index >> _SIGN_BITS[bits][i] & 1).bool(), half - 1 - magnitude, half + magnitude)
        columns.append(of_code[code])
    entries = torch.stack(columns, -1)
    return entries.to(device) if device.type == "mps" else entries.view(torch.complex128).squeeze(-1).to(device)


def _swapped(words: torch.Tensor, mask: int, distance: int, out: torch.Tensor) -> torch.Tensor:
    """`words` with the bits of `mask` exchanged for those `distance` higher."""
    difference = (words >> distance).bitwise_xor_(words).bitwise_and_(mask)
    torch.bitwise_xor(words, difference, out=out)
    return out.bitwise_xor_(difference.bitwise_left_shift_(distance))


def _nibble_indices(words: torch.Tensor, out: torch.Tensor) -> None:
    """Words of 4 bits to words of two indices."""
    _swapped(words, 0x0808, 20, out)


def _crumb_indices(words: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Words of 2 or 3 bits to words of two indices.

    Args:
        words: `[..., bits, M, K]`: two tiles of crumbs, and at 3 bits one of signs.
        bits: 2 or 3.
        out: `[..., 2, 2, M, K]`: quarter 2 t + h of the channels at t, h.
    """
    crumbs = words[..., :2, :, :]
    torch.bitwise_and(crumbs, 0x33333333, out=out[..., 0, :, :])
    torch.bitwise_and(crumbs >> 2, 0x33333333, out=out[..., 1, :, :])
    if bits == 3:
        signs = words[..., 2, :, :]
        signs = _swapped(signs, 0x5555, 17, torch.empty_like(signs))
        for quarter in range(QUARTERS):
            # From bits 6 and 7 of each byte, less 2 a quarter, to bits 2 and 3.
            shifted = signs << 2 * quarter - 4 if quarter > 2 else signs >> 4 - 2 * quarter
            out[..., quarter // 2, quarter % 2, :, :].bitwise_or_(shifted.bitwise_and_(0x0C0C0C0C))


def _look_up(bits: int, words: torch.Tensor, take: Take, name: str) -> torch.Tensor:
    """Contiguous words of two indices to their levels, `[words * 8]` float32."""
    entries = table(bits, words.device)
    index = take(f"{name} index", (2 * words.numel(),), torch.int32).copy_(words.view(torch.uint16).flatten())
    out = take(f"{name} levels", (len(index), *entries.shape[1:]), entries.dtype)
    torch.index_select(entries, 0, index, out=out)
    return out.view(torch.float32).flatten()


def _fp8_planes(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Words `[..., K]` of 8 bits to the fp16 levels of their even and of their odd plane, `[..., 2 K]`."""
    even = words & -0x407F4080  # 0xBF80BF80
    odd = (words << 7).bitwise_and_(0x3F803F80).bitwise_or_((words << 1).bitwise_and_(-0x7FFF8000))  # 0x80008000
    return even.view(torch.float16), odd.view(torch.float16)


def key_levels(words: torch.Tensor, bits: int, dim: int, take: Take) -> torch.Tensor:
    """Levels of the keys of whole blocks in scratch, float32.

    Args:
        words: `[..., W]` int32, a block's words contiguous.
        bits: 2, 3, 4 or 8.
        dim: D, padded.
        take: Makes scratch.

    Returns:
        8 bits: `[..., 128, D]`. Otherwise `[..., 32, D / 2, 4, 2]`: row, pair of channels, plane, channel of the pair.
    """
    lead = words.shape[:-1]
    if bits == 8:
        out = take("key levels", (*lead, 2, 2, ROWS, dim), torch.float32)
        for v, plane in enumerate(_fp8_planes(words.unflatten(-1, (2, ROWS, dim // 2)))):
            out[..., v, :, :] = plane
        return out.view(*lead, PLANES * ROWS, dim)
    if bits == 4:
        index = take("key words", (*lead, ROWS, dim // 2), torch.int32)
        _nibble_indices(words.unflatten(-1, (ROWS, dim // 2)), index)
    else:
        index = take("key words", (*lead, ROWS, 2, 2, dim // 8), torch.int32)
        _crumb_indices(words.unflatten(-1, (bits, ROWS, dim // 8)), bits, index.movedim(-4, -2))
    return _look_up(bits, index, take, "key").view(*lead, ROWS, dim // 2, PLANES, 2)


def value_levels(words: torch.Tensor, bits: int, dim: int, take: Take) -> torch.Tensor:
    """Levels of the values of whole blocks in scratch, `[..., D, 128]` float32, tokens in the order of `value_order`.

    Args:
        words: `[..., W]` int32, a block's words contiguous.
        bits: 2, 3, 4 or 8.
        dim: D, padded.
        take: Makes scratch.
    """
    lead = words.shape[:-1]
    if bits == 8:
        out = take("value levels", (*lead, dim, 2, 2, ROWS), torch.float32)
        for v, plane in enumerate(_fp8_planes(words.unflatten(-1, (2, dim, ROWS // 2)))):
            out[..., v, :] = plane.transpose(-3, -2)
        return out.view(*lead, dim, PLANES * ROWS)
    if bits == 4:
        index = take("value words", (*lead, dim, ROWS // 2), torch.int32)
        _nibble_indices(words.unflatten(-1, (dim, ROWS // 2)), index)
    else:
        index = take("value words", (*lead, 2, 2, dim // 4, ROWS // 2), torch.int32)
        _crumb_indices(words.unflatten(-1, (bits, dim // 4, ROWS // 2)), bits, index)
    return _look_up(bits, index, take, "value").view(*lead, dim, PLANES * ROWS)


def value_order(by_token: torch.Tensor, bits: int) -> torch.Tensor:
    """`[..., 128]` in the order of tokens to the order in which `value_levels` has them: token 32 p + 2 j + e (plane p)
    is at 8 j + 2 p + e, and at 8 bits where it was."""
    if bits == 8:
        return by_token
    return by_token.unflatten(-1, (PLANES, ROWS // 2, 2)).transpose(-3, -2).flatten(-3)
