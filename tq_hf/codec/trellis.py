"""Trellis codes within a word: at 2 and 3 bits a channel's level also depends on the code before it.

The 16 crumbs of an int32 word (see `tq_hf.codec.packing`) are a chain that closes in itself (*tail-biting*: the first
follows the last), so that any word decodes alone and no byte is added. Three bits are the index of a level, or of its
magnitude, in `LEVEL_TABLES`:

    2 bits  crumb k follows crumb k - 1; of the code 2 t + b, with 2 t' + b' before it and 2 t" + b" before that one,
            the level is 4 t + 2 b + (t' ^ b")
    3 bits  crumb k follows crumb k + 1; of the crumb c, with c' before it, the magnitude is c + 4 (c' % 2), and the
            sign is the code's own

so that words give eight indices at once, by shifts and masks (trellis coded quantization, Marcellin and Fischer 1990;
bit-shift trellises with tail-biting, QTIP, arXiv 2406.11235). Mean squared error on N(0, 1): 0.0941 and 0.0281, of the
best scalar codes 0.1175 and 0.0345.

Channels are rounded to some 1/32 of a standard deviation. All errors then are whole numbers, which kernels add exactly
in float32, and every backend finds the same path: that of least error, at equal error the one of the lower state before
it, step by step. At 3 bits it is the best of all that close. At 2 bits the state at the seam is that of the best open
path from half a word before it to half a word behind it, which costs 2.6% in squared error and half the time.
"""

from __future__ import annotations

from typing import Any

import torch
from tq_kernels.format import BLOCK_TOKENS, LEVEL_TABLES, TRELLIS_UNITS

from ..compat import cached_table

CHAIN = 16
"""Codes of a word of crumbs."""
FAR = 1 << 20
"""More than any two branches differ in error."""


def chains(x: torch.Tensor, *, is_value: bool) -> torch.Tensor:
    """Channels `[..., 128, D]` in the order of words and their crumbs, `[..., 16, 8 D]`, a view if it can be one."""
    lead, dim = x.shape[:-2], x.shape[-1]
    # Tokens are planes (2 u + v) of rows, channels are quarters (2 t + h); e is the neighbour along K.
    if is_value:
        x = x.reshape(*lead, 2, 2, BLOCK_TOKENS // 8, 2, 2, 2, dim // 4)  # u, v, row / 2, e, t, h, channel
        u, v, e, h, words = 0, 1, 3, 5, (4, 6, 2)
    else:
        x = x.reshape(*lead, 2, 2, BLOCK_TOKENS // 4, 2, 2, dim // 8, 2)  # u, v, row, t, h, channel / 2, e
        u, v, e, h, words = 0, 1, 6, 4, (3, 2, 5)
    x = x.permute(*range(len(lead)), *(len(lead) + axis for axis in (u, v, e, h, *words)))
    return x.reshape(*lead, CHAIN, 8 * dim)


def from_chains(x: torch.Tensor, *, is_value: bool) -> torch.Tensor:
    """Inverse of `chains`."""
    lead, dim = x.shape[:-2], x.shape[-1] // 8
    first = len(lead)
    if is_value:
        x = x.reshape(*lead, 2, 2, 2, 2, 2, dim // 4, BLOCK_TOKENS // 8)
        # u, v, e, h, t, channel, row / 2 to u, v, row / 2, e, t, h, channel
        order = (0, 1, 6, 2, 4, 3, 5)
    else:
        x = x.reshape(*lead, 2, 2, 2, 2, 2, BLOCK_TOKENS // 4, dim // 8)
        # u, v, e, h, t, row, channel / 2 to u, v, row, t, h, channel / 2, e
        order = (0, 1, 5, 4, 3, 6, 2)
    return x.permute(*range(first), *(first + axis for axis in order)).reshape(*lead, BLOCK_TOKENS, dim)


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Channels in standard deviations as int32 counts of 1 / TRELLIS_UNITS, at most 127; 0 for what is not a number."""
    return (x * TRELLIS_UNITS[bits]).nan_to_num_(0.0, torch.inf, -torch.inf).round_().clamp_(-127, 127).int()


@cached_table
def _errors(bits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What a level adds to the squared error, `a + b x` for a channel x: a and b int32, `[8]` of each magnitude, or at
    2 bits `[4, 4]` of the state before and the state. (In 1 / 64**2, times four: the lowest two bits are a label's.)"""
    levels: Any = LEVEL_TABLES[bits]
    if bits == 2:
        levels = [[levels[4 * (new ^ old // 2) % 8 + 2 * (new // 2) + old % 2] for new in range(4)] for old in range(4)]
    level = torch.tensor(levels, dtype=torch.int32)
    return (4 * level.square()).to(device), (-16 * level).to(device)


def _two(x: torch.Tensor) -> torch.Tensor:
    """Codes of 2 bits, uint8, of chains `[16, N]` int32.

    A state 2 b + p is what the next codes need: b of the code, and the lowest bit p of the next code's index.
    """
    a, b = (table[..., None] for table in _errors(2, x.device))
    state = torch.arange(4, dtype=torch.int32, device=x.device)[:, None]
    paths = x.new_empty(4, 4, x.shape[1])  # once: to make it costs more than to compute it

    def step(error: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Least errors of paths to each state, `[4, N]`, with the label of where they come from."""
        return torch.mul(b, row, out=paths).add_(a).add_(error[:, None]).amin(0)

    # Which state the chain is closed with: once round from its middle, with the state at the seam as label.
    error = x.new_zeros(4, x.shape[1])
    for k in range(CHAIN // 2, CHAIN):
        error = step(error, x[k])
    error = error + state
    for k in range(CHAIN // 2):
        error = step(error, x[k])
    last = error.amin(0).bitwise_and_(3)

    error = torch.where(state == last, state, FAR + state)
    came = []
    for row in x:
        found = step(error, row)
        came.append((found & 3).byte())
        error = found.bitwise_and_(-4).add_(state)
    at, states = last.byte()[None], []
    for before in reversed(came):
        states.append(at)
        at = before.gather(0, at.long())
    path = torch.cat(states[::-1])
    b = path >> 1
    return b.roll(1, 0).bitwise_xor_(path).bitwise_and_(1).mul_(2).add_(b)


def _three(x: torch.Tensor) -> torch.Tensor:
    """Codes of 3 bits, uint8, of chains `[16, N]` int32: crumbs with the sign above."""
    a, b = (table.view(2, 2, 2, 1).transpose(0, 1) for table in _errors(3, x.device))  # [high, before, low, 1]
    zero, one = (a[0], b[0]), (a[1] + 2, b[1])  # labels: the high bit, and the bit before
    label = torch.arange(2, dtype=torch.int32, device=x.device)[:, None]
    errors = torch.stack([label + FAR * label, label + FAR * (1 - label)])  # [first, before, 1]
    first, second = x.new_empty(2, 2, 2, x.shape[1])  # once: to make them costs more than to compute them
    came = []
    for row in reversed(x):
        size = row.abs()
        torch.mul(zero[1], size, out=first).add_(zero[0])
        best = torch.minimum(first, torch.mul(one[1], size, out=second).add_(one[0]), out=first)  # [before, low, N]
        found = torch.minimum(errors[:, :1] + best[0], errors[:, 1:] + best[1])  # [first, low, N]
        came.append((found & 3).byte())
        errors = found.bitwise_and_(-4).add_(label)
    low = (errors[1, 1] - 1 < errors[0, 0]).byte()[None]
    closing, crumbs = 2 * low, []
    for labels in reversed(came):  # from crumb 0 on
        taken = labels.flatten(0, 1).gather(0, (closing + low).long())
        crumbs.append(low + (taken & 2))
        low = taken & 1
    return torch.cat(crumbs).add_(x < 0, alpha=4)


def encode(x: torch.Tensor, bits: int, *, is_value: bool) -> torch.Tensor:
    """Codes of a block's rotated rows.

    Args:
        x: `[..., 128, D]` int32 from `rounded`.
        bits: 2 or 3.
        is_value: Whether they are values, whose words run along tokens.

    Returns:
        `[..., 128, D]` uint8, as `tq_hf.codec.packing.pack` takes them.
    """
    words = chains(x, is_value=is_value)
    flat = words.movedim(-2, 0).reshape(CHAIN, -1).contiguous()
    codes = (_two if bits == 2 else _three)(flat)
    return from_chains(codes.view(CHAIN, *words.shape[:-2], -1).movedim(0, -2), is_value=is_value)


def windows(codes: torch.Tensor, bits: int, *, is_value: bool) -> torch.Tensor:
    """Where `tq_hf.codec.codebook.levels` has the level of each code: codes `[..., 128, D]` to integers below 16."""
    code = chains(codes, is_value=is_value)
    if bits == 2:
        window = 2 * code + ((code.roll(1, -2) >> 1) ^ (code.roll(2, -2) & 1))
    else:
        window = (code & 3) + 4 * (code.roll(-1, -2) & 1) + 8 * (code >> 2)
    return from_chains(window, is_value=is_value)
