"""The residual of a layer, its dense end: a ring of the newest keys and values.

Rows are numbered by their token's position after the sinks; row p lives in slot `p % capacity`. The capacity is a
multiple of the block size, so a block's rows are always contiguous: dropping a block that has been encoded moves
nothing.

The newest token may be *pending*: apart from the ring. The next decode kernel writes it in passing, because a launch
for one row would cost the host as much as the kernel's. All other readers and writers of the ring must call
`write_pending_token` first.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tq_kernels.format import BLOCK_TOKENS
from tq_kernels.types import KeyValue, PendingToken

from ..compat import outside_inference_mode


def ring_capacity(rows: int) -> int:
    """`rows` rounded up to whole blocks, at least one."""
    return max(1, -(-rows // BLOCK_TOKENS)) * BLOCK_TOKENS


def new_rows(like: KeyValue, count: int) -> KeyValue:
    """Room for `count` keys and values like these, `[B, Hkv, count, D]`, not filled."""
    keys, values = like
    batch, heads, _, key_dim = keys.shape
    return keys.new_empty(batch, heads, count, key_dim), values.new_empty(batch, heads, count, values.shape[3])


@outside_inference_mode
def write(token: PendingToken, ring: KeyValue) -> None:
    """Write a token to its slot of a ring, unless it is there."""
    if token.states is not None:
        for rows, row in zip(ring, token.states, strict=True):
            rows[:, :, token.slot : token.slot + 1] = row
        token.states = None


class Residual:
    """Rows `first` to `first + count` in a ring of keys `[B, Hkv, capacity, Dk]` and values `[B, Hkv, capacity, Dv]`.

    Args:
        ring: The buffers, possibly without the pending token.
        first: Position of the first row held.
        count: Rows held, the pending one included.
        pending: The newest token, if it may not be in the ring yet.
    """

    def __init__(self, ring: KeyValue, first: int = 0, count: int = 0, pending: PendingToken | None = None) -> None:
        self.ring = ring
        """The buffers as they are, possibly without the pending token."""
        self.capacity = ring[0].shape[2]
        """Rows there is room for."""
        self.first = first
        self.count = count
        self.pending = pending

    @classmethod
    def allocate(cls, like: KeyValue, capacity: int, first: int = 0) -> Residual:
        """Make an empty residual, in buffers that are not filled: rows beyond `count` are never read.

        Args:
            like: Keys and values whose batch, heads, head_dim, dtype and device the ring takes.
            capacity: Rows there is room for, a multiple of the block size.
            first: Position of the first row that will be held.
        """
        return cls(new_rows(like, capacity), first)

    def write_pending_token(self) -> KeyValue:
        """Write the pending token, if there is one. Returns the ring, which then has every row."""
        if self.pending is not None and self.pending.states is not None:
            write(self.pending, self.ring)
        self.pending = None
        return self.ring

    def _slots(self, first: int, count: int) -> Iterator[tuple[slice, slice]]:
        """The slots of rows `first` to `first + count`, with the rows (from 0) that are in them: one range, or two at
        the wrap."""
        done = 0
        while done < count:
            slot = (first + done) % self.capacity
            size = min(count - done, self.capacity - slot)
            yield slice(slot, slot + size), slice(done, done + size)
            done += size

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold these rows, `[B, Hkv, n, D]`, after those held. There must be room."""
        assert self.count + keys.shape[2] <= self.capacity
        key_ring, value_ring = self.write_pending_token()
        for slots, rows in self._slots(self.first + self.count, keys.shape[2]):
            key_ring[:, :, slots] = keys[:, :, rows]
            value_ring[:, :, slots] = values[:, :, rows]
        self.count += keys.shape[2]

    def snapshot(self) -> Residual:
        """The rows held now, in the same buffers."""
        return Residual(self.ring, self.first, self.count, self.pending)

    def drop(self, count: int) -> None:
        """Forget the oldest `count` rows."""
        self.first += count
        self.count -= count

    def parts(self, skip: int = 0, count: int | None = None) -> Iterator[tuple[int, KeyValue]]:
        """Views of the rows held from the `skip`-th on, oldest first, each with the number of rows before it. The
        pending row is written first."""
        keys, values = self.write_pending_token()
        count = self.count - skip if count is None else count
        for slots, rows in self._slots(self.first + skip, count):
            yield skip + rows.start, (keys[:, :, slots], values[:, :, slots])

    def copied(self, capacity: int, skip: int = 0) -> Residual:
        """A residual of another capacity that holds these rows without the oldest `skip`."""
        residual = Residual.allocate(self.ring, capacity, self.first + skip)
        for _, part in self.parts(skip):
            residual.append(*part)
        return residual
