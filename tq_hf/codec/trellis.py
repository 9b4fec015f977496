"""Trellis codes within a word: at 2 and 3 bits the level of a channel also depends on the code before.

The 16 crumbs of an int32 word (see `tq_hf.codec.packing`) are a closed chain (*tail-biting*: the first crumb follows
the last). So every word decodes alone, and the trellis adds no byte. Three bits are the index of a level, or of the
magnitude of a level, in `tq_kernels.format.CODES`:

    2 bits  crumb k follows crumb k - 1. The code 2 t + b after 2 t' + b', which comes after 2 t" + b", has the level
            4 t + 2 b + (t' ^ b")
    3 bits  crumb k follows crumb k + 1. The crumb c after c' has the magnitude c + 4 (c' % 2); the sign is a bit of
            the code itself

With these definitions shifts and masks give eight indices of a word at once (trellis coded quantization, Marcellin and
Fischer 1990; bit-shift trellises with tail-biting, QTIP, arXiv 2406.11235). Mean squared error on N(0, 1) is 0.0938 at
2 bits and 0.0280 at 3 bits; the best scalar codes have 0.1175 and 0.0345.

Encoding finds the path of least error by Viterbi's algorithm. Every backend finds the same path: channels are rounded,
errors are whole numbers that fit in 15 bits together with the label of a path (`Trellis`), and of equal errors the
smaller label wins. At 3 bits the path is the best closed path. At 2 bits the state at the seam is that of the best
open path from half a word before the seam to half a word behind it. This costs 2% in squared error and saves half of
the time.

Paths run from code 15 to code 0, because labels then give codes in the order of the word. The four lowest bits of an
error are the label: four bits of the two codes chosen last, or a state at the seam.
"""

from __future__ import annotations

import torch
from tq_kernels.format import BLOCK_TOKENS, Trellis, code_of

from ..compat import cached_table

CHAIN = 16
"""Number of codes in a word of crumbs."""
LABELS = 16
"""Number of labels. Errors are multiples of this number, and the label is added."""


def _axes(dim: int, is_value: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of the parts of tokens and channels, and these in the order of chains.

    Planes of tokens are 2 u + v, quarters of channels 2 t + h; e is the neighbour along K.
    """
    if is_value:  # u, v, row / 2, e, t, h, channel
        return (2, 2, BLOCK_TOKENS // 8, 2, 2, 2, dim // 4), (0, 1, 3, 5, 4, 6, 2)
    return (2, 2, BLOCK_TOKENS // 4, 2, 2, dim // 8, 2), (0, 1, 6, 4, 3, 2, 5)  # u, v, row, t, h, channel / 2, e


def chains(x: torch.Tensor, *, is_value: bool) -> torch.Tensor:
    """Reorder channels `[..., 128, D]` to chains `[..., 16, 8 D]`: crumbs of a word, words. A view where possible."""
    lead, dim = x.shape[:-2], x.shape[-1]
    sizes, order = _axes(dim, is_value)
    x = x.reshape(*lead, *sizes).permute(*range(len(lead)), *(len(lead) + axis for axis in order))
    return x.reshape(*lead, CHAIN, 8 * dim)


def from_chains(x: torch.Tensor, *, is_value: bool) -> torch.Tensor:
    """Inverse of `chains`."""
    lead, dim = x.shape[:-2], x.shape[-1] // 8
    sizes, order = _axes(dim, is_value)
    x = x.reshape(*lead, *(sizes[axis] for axis in order))
    x = x.permute(*range(len(lead)), *(len(lead) + order.index(axis) for axis in range(7)))
    return x.reshape(*lead, BLOCK_TOKENS, dim)


def trellis_of(bits: int) -> Trellis:
    """Trellis of a width that has one."""
    trellis = code_of(bits).trellis
    assert trellis is not None
    return trellis


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Round channels in standard deviations to int32 multiples of 1 / `Trellis.unit`, at most 127; NaN becomes 0."""
    return (x * trellis_of(bits).unit).nan_to_num_(0.0, torch.inf, -torch.inf).round_().clamp_(-127, 127).int()


@cached_table
def _errors(bits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coefficients a and b of the error `a + b x` of each level for a channel x, and labels of an even code: int16,
    `[t, b, p, 1]` for the level 4 t + 2 b + p, at 3 bits `[high, before, low, 1]` for the magnitude
    low + 2 high + 4 before."""
    table = torch.tensor(trellis_of(bits).errors, dtype=torch.int16, device=device) * LABELS
    index = torch.arange(8, dtype=torch.int16, device=device)
    # At 2 bits the code 2 t + b; at 3 bits the high bit of the crumb, and the bit before.
    magnitudes = code_of(bits).magnitudes
    label = (index >> 1 & 1) + 2 * (index >> 2) if magnitudes else index >> 1
    shaped = (x.view(2, 2, 2, 1) for x in (*table.T, label))
    a, b, label = (x.transpose(0, 1) for x in shaped) if magnitudes else shaped
    return a, b, label


def _clear(errors: torch.Tensor, k: int) -> torch.Tensor:
    """Remove labels from errors, in place. Every four codes subtract the least error, so that errors stay small."""
    errors.bitwise_and_(-LABELS)
    return errors.sub_(errors.flatten(0, -2).amin(0)) if k % 4 == 3 else errors


def encode_two(x: torch.Tensor) -> torch.Tensor:
    """Encode chains `[16, N]` int16 to codes of 2 bits, uint8.

    The levels of a code and of later codes depend on earlier codes by the state 2 b + p alone: bit b of the code
    before, and the lowest bit p of the code's own index (t' ^ b" of the two codes before).
    """
    (a, b, label), trellis = _errors(2, x.device), trellis_of(2)
    labelled = (a + label, a + 4 * label)
    state = torch.arange(4, dtype=torch.int16, device=x.device)[:, None]
    added = x.new_empty(2, 2, 2, x.shape[1])  # [t, b, p, N], reused: an allocation takes longer than the sum
    paths = x.new_empty(2, 2, 2, 2, x.shape[1])  # [b before, t, b, p, N]

    def step(error: torch.Tensor, row: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """Least error of paths from each state before a code, `[4, N]`, from the errors of the states behind it."""
        torch.mul(b, row.clamp(-trellis.limit, trellis.limit), out=added).add_(a)
        behind = error.view(2, 2, -1).transpose(0, 1)[:, :, None]  # [p, b, 1, N]
        torch.add(added, behind, out=paths[0])
        torch.add(added, behind.flip(0), out=paths[1])
        least = torch.minimum(paths[:, 0], paths[:, 1])
        return torch.minimum(least[:, 0], least[:, 1]).flatten(0, 1)

    # State at the seam: one round from the middle of the chain, with the state at the seam as label.
    error = x.new_zeros(4, x.shape[1])
    for k in (*range(CHAIN // 2 - 1, -1, -1), *range(CHAIN - 1, CHAIN // 2 - 1, -1)):
        if k == CHAIN - 1:
            error = error + state
        if k % 4 == 3:
            error -= error.amin(0) & -LABELS
        error = step(error, x[k], a)
    last = error.amin(0) & 3

    error = (state ^ last) * (trellis.far * LABELS)
    labels = []
    for k in range(CHAIN - 1, -1, -1):
        error = step(_clear(error, k) if k % 2 else error, x[k], labelled[k % 2])
        if k % 2 == 0:
            labels.append((error & LABELS - 1).byte())
    state, codes = last.byte()[None], []
    for label in reversed(labels):  # from code 0 on, bits of two codes: b, t, b, t
        taken = label.gather(0, state.long())
        codes += [taken & 3, taken >> 2]
        state = (taken >> 1 & 2) + ((taken >> 3 ^ taken) & 1)
    return torch.cat(codes)


def encode_three(x: torch.Tensor) -> torch.Tensor:
    """Encode chains `[16, N]` int16 to codes of 3 bits, uint8: crumbs with the sign as upper bit."""
    (a, b, label), trellis = _errors(3, x.device), trellis_of(3)
    labelled = (a + label, a + 4 * label)
    far = torch.tensor([[0, 1], [1, 0]], dtype=torch.int16, device=x.device) * (trellis.far * LABELS)
    errors = far[..., None].expand(2, 2, x.shape[1]).clone()  # [first, before, N]
    added = x.new_empty(2, 2, 2, x.shape[1])  # reused: an allocation takes longer than the sum
    labels = []
    for k in range(CHAIN - 1, -1, -1):
        if k % 2:
            errors = _clear(errors, k)
        torch.mul(b, x[k].abs().clamp_(max=trellis.limit), out=added).add_(labelled[k % 2])
        best = torch.minimum(added[0], added[1])  # [before, low, N]
        errors = torch.minimum(errors[:, :1] + best[0], errors[:, 1:] + best[1])  # [first, low, N]
        if k % 2 == 0:
            labels.append((errors & LABELS - 1).byte().flatten(0, 1))
    low = (errors[1, 1] < errors[0, 0]).byte()[None]
    closing, crumbs = 2 * low, []
    for label in reversed(labels):  # from crumb 0 on: its high bit, the next crumb, and the low bit of the third
        taken = label.gather(0, (closing + low).long())
        crumbs += [low + 2 * (taken & 1), taken >> 1 & 3]
        low = taken >> 3
    return torch.cat(crumbs).add_(x < 0, alpha=4)


def encode(x: torch.Tensor, bits: int, *, is_value: bool) -> torch.Tensor:
    """Encode the rotated rows of a block.

    Args:
        x: `[..., 128, D]` int32 from `rounded`.
        bits: 2 or 3.
        is_value: Whether `x` are values. Words of values run along tokens.

    Returns:
        `[..., 128, D]` uint8, as `tq_hf.codec.packing.pack` takes them.
    """
    words = chains(x, is_value=is_value)
    flat = words.movedim(-2, 0).reshape(CHAIN, -1).short()
    codes = (encode_three if code_of(bits).magnitudes else encode_two)(flat)
    return from_chains(codes.view(CHAIN, *words.shape[:-2], -1).movedim(0, -2), is_value=is_value)


def windows(codes: torch.Tensor, bits: int, *, is_value: bool) -> torch.Tensor:
    """Index of each code's level in `tq_hf.codec.codebook.levels`: codes `[..., 128, D]` to integers below 16."""
    code = chains(codes, is_value=is_value)
    if code_of(bits).magnitudes:
        window = (code & 3) + 4 * (code.roll(-1, -2) & 1) + 8 * (code >> 2)
    else:
        window = 2 * code + ((code.roll(1, -2) >> 1) ^ (code.roll(2, -2) & 1))
    return from_chains(window, is_value=is_value)
