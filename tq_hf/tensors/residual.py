"""Dense rows of a layer: a ring of its newest tokens, then its sinks.

They are one tensor `[B, Hkv, ring + sinks, Dk + Dv]`: a token's key, then its value. Tokens of the ring are numbered by
their position after the sinks; number p lives in row `p % ring`. A ring has whole blocks of rows, so those of a block
are always contiguous: dropping a block that has been encoded moves nothing.

The newest token may be *pending*: apart from the ring. The next decode kernel writes it in passing, because a launch
for one row would cost the host as much as the kernel's. All other readers and writers of the ring must write it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from tq_kernels.format import BLOCK_TOKENS
from tq_kernels.types import KeyValue


def ring_capacity(rows: int) -> int:
    """`rows` rounded up to whole blocks, at least one."""
    return max(1, -(-rows // BLOCK_TOKENS)) * BLOCK_TOKENS


class PendingToken:
    """New token that is not in the residual yet, or those of a step with drafts. The attention of the step writes them,
    all other readers before they read. The writer sets `states` to `None`.

    Args:
        states: Keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]`; S is 1 where counts are on the host.
    """

    def __init__(self, states: KeyValue | None = None) -> None:
        self.states = states


def ring_slices(ring: int, first: int, count: int) -> Iterator[tuple[slice, slice]]:
    """Rows of numbers `first` to `first + count` in a ring of `ring` rows, and which of these numbers (from 0) they
    have: one range, or two at the end of the ring."""
    done = 0
    while done < count:
        row = (first + done) % ring
        size = min(count - done, ring - row)
        yield slice(row, row + size), slice(done, done + size)
        done += size


def write_rows(rows: torch.Tensor, at: slice, states: KeyValue, tokens: slice) -> None:
    """Write tokens `tokens` of keys and values `[B, Hkv, n, D]` to rows `at`."""
    keys, values = states
    rows[:, :, at, : keys.shape[3]] = keys[:, :, tokens]
    rows[:, :, at, keys.shape[3] :] = values[:, :, tokens]


def write_tokens(
    rows: torch.Tensor, ring: int, states: KeyValue, sinks: tuple[int, int], first: int, start: int | None = None
) -> None:
    """Write keys and values `[B, Hkv, n, D]` to rows whose first `ring` are a ring.

    Args:
        sinks: First sink to write, and number of tokens at the start that become sinks.
        first: Number in the ring of token `start`, which all tokens after it follow.
        start: The first token after the sinks by default.
    """
    (sink, count), tokens = sinks, states[0].shape[2]
    start = count if start is None else start
    write_rows(rows, slice(ring + sink, ring + sink + count), states, slice(count))
    for at, part in ring_slices(ring, first, tokens - start):
        write_rows(rows, at, states, slice(start + part.start, start + part.stop))


CUTS = 2
"""Number of blocks whose rows `CutBlocks` keeps."""


class CutBlocks(dict[int, KeyValue]):
    """First rows of the packed blocks that a `crop` cut last, by block, dequantized: `[B, Hkv, n, D]`.

    These rows are encoded again, with later tokens. Another crop that cuts the block takes them from here, so that its
    errors do not add up when a cache is rewound many times.
    """

    def crop(self, rows: int) -> None:
        """Keep none of the rows after the first `rows` of all blocks."""
        for block, held in list(self.items()):
            if (left := rows - block * BLOCK_TOKENS) > 0:
                self[block] = held[0][:, :, :left], held[1][:, :, :left]
            else:
                del self[block]

    def cut(self, block: int, rows: int, states: KeyValue) -> None:
        """Replace the rows of a block in `states` that were cut before, and keep the first `rows`."""
        for out, held in zip(states, self.pop(block, ()), strict=False):
            out[:, :, : held.shape[2]] = held
        self[block] = states[0][:, :, :rows].clone(), states[1][:, :, :rows].clone()
        if len(self) > CUTS:
            del self[next(iter(self))]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> CutBlocks:
        """The results of `function` on every tensor."""
        return CutBlocks({block: (function(keys), function(values)) for block, (keys, values) in self.items()})
