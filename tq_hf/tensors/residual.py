"""The residual of a layer, its dense end: a ring of the newest keys and values.

Rows are numbered by their token's position after the sinks; row p lives in slot `p % capacity`. The capacity is a
multiple of the block size, so a block's rows are always contiguous: dropping a block that has been encoded moves
nothing.

The newest token may be *pending*: apart from the ring. The next decode kernel writes it in passing, because a launch
for one row would cost the host as much as the kernel's. All other readers and writers of the ring must write it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from tq_kernels.format import BLOCK_TOKENS
from tq_kernels.types import KeyValue

from ..compat import outside_inference_mode


def ring_capacity(rows: int) -> int:
    """`rows` rounded up to whole blocks, at least one."""
    return max(1, -(-rows // BLOCK_TOKENS)) * BLOCK_TOKENS


def new_rows(like: KeyValue, count: int) -> KeyValue:
    """Room for `count` keys and values like these, `[B, Hkv, count, D]`, not filled."""
    keys, values = like
    batch, heads, _, key_dim = keys.shape
    return keys.new_empty(batch, heads, count, key_dim), values.new_empty(batch, heads, count, values.shape[3])


class PendingToken:
    """New token that is not in the residual yet, or those of a step with drafts. The attention of the step writes them,
    all other readers before they read. The writer sets `states` to `None`.

    Args:
        states: Keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]`; S is 1 where counts are on the host.
        slot: Row in the residual's ring; 0 where counts on the device decide it.
    """

    def __init__(self, states: KeyValue | None = None, slot: int = 0) -> None:
        self.states = states
        self.slot = slot


@outside_inference_mode
def write_token(token: PendingToken, ring: KeyValue) -> None:
    """Write a pending token to its slot of a ring, unless it is there."""
    if token.states is not None:
        for rows, row in zip(ring, token.states, strict=True):
            rows[:, :, token.slot : token.slot + 1] = row
        token.states = None


def _slots(ring: KeyValue, first: int, count: int) -> Iterator[tuple[slice, slice]]:
    """Slots of rows `first` to `first + count`, and which of these rows (from 0) they have: one range, or two at the
    end of the ring."""
    capacity, done = ring[0].shape[2], 0
    while done < count:
        slot = (first + done) % capacity
        size = min(count - done, capacity - slot)
        yield slice(slot, slot + size), slice(done, done + size)
        done += size


def write_rows(ring: KeyValue, first: int, states: KeyValue) -> None:
    """Write keys and values `[B, Hkv, n, D]` to rows `first` to `first + n` of a ring."""
    (key_ring, value_ring), (keys, values) = ring, states
    for slots, rows in _slots(ring, first, keys.shape[2]):
        key_ring[:, :, slots] = keys[:, :, rows]
        value_ring[:, :, slots] = values[:, :, rows]


def ring_parts(ring: KeyValue, first: int, count: int) -> Iterator[tuple[int, KeyValue]]:
    """Views of rows `first` to `first + count` of a ring, oldest first, each with the number of rows before it."""
    keys, values = ring
    for slots, rows in _slots(ring, first, count):
        yield rows.start, (keys[:, :, slots], values[:, :, slots])


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


@outside_inference_mode
def copied_ring(ring: KeyValue, first: int, count: int, capacity: int) -> KeyValue:
    """A new ring of `capacity` rows, with rows `first` to `first + count` of this one."""
    new = new_rows(ring, capacity)
    copy_rows(ring, new, first, count)
    return new


def copy_rows(ring: KeyValue, to: KeyValue, first: int, count: int) -> None:
    """Copy rows `first` to `first + count` of a ring to another, where they have the same numbers."""
    for skipped, part in ring_parts(ring, first, count):
        write_rows(to, first + skipped, part)
