"""The dense end of a layer: a ring of the newest keys and values.

Rows are numbered by their token's position after the sinks; row p lives in slot `p % capacity`. The capacity is a
multiple of the block size, so a block's rows are always contiguous: dropping a block that has been encoded moves
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .layout import BlockLayout

KeyValue = tuple[torch.Tensor, torch.Tensor]

BLOCK = BlockLayout.tokens


def ring_capacity(rows: int) -> int:
    """`rows` rounded up to whole blocks, at least one."""
    return max(1, -(-rows // BLOCK)) * BLOCK


class DenseWindow:
    """Keys `[B, Hkv, capacity, Dk]` and values `[B, Hkv, capacity, Dv]`, of which rows `first` to `first + count` are
    held.

    Args:
        keys: A tensor whose batch, heads, head_dim, dtype and device the ring takes.
        values: Likewise.
        capacity: Rows there is room for, a multiple of the block size.
        first: Position of the first row that will be held.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, capacity: int, first: int = 0) -> None:
        self.keys = keys.new_zeros(*keys.shape[:2], capacity, keys.shape[3])
        self.values = values.new_zeros(*values.shape[:2], capacity, values.shape[3])
        self.first = first
        self.count = 0

    @classmethod
    def resumed(cls, keys: torch.Tensor, values: torch.Tensor, first: int, count: int) -> DenseWindow:
        """A window over existing ring buffers."""
        window = cls.__new__(cls)
        window.keys, window.values, window.first, window.count = keys, values, first, count
        return window

    @property
    def capacity(self) -> int:
        """Rows there is room for."""
        return self.keys.shape[2]

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
        for slots, rows in self._slots(self.first + self.count, keys.shape[2]):
            self.keys[:, :, slots] = keys[:, :, rows]
            self.values[:, :, slots] = values[:, :, rows]
        self.count += keys.shape[2]

    def snapshot(self) -> DenseWindow:
        """The rows held now, in the same buffers."""
        return DenseWindow.resumed(self.keys, self.values, self.first, self.count)

    def drop(self, count: int) -> None:
        """Forget the oldest `count` rows."""
        self.first += count
        self.count -= count

    def parts(self, skip: int = 0, count: int | None = None) -> Iterator[tuple[int, KeyValue]]:
        """Views of the rows held from the `skip`-th on, oldest first, each with the number of rows before it."""
        count = self.count - skip if count is None else count
        for slots, rows in self._slots(self.first + skip, count):
            yield skip + rows.start, (self.keys[:, :, slots], self.values[:, :, slots])

    def copied(self, capacity: int, skip: int = 0) -> DenseWindow:
        """A window of another capacity that holds these rows without the oldest `skip`."""
        window = DenseWindow(self.keys, self.values, capacity, self.first + skip)
        for _, part in self.parts(skip):
            window.append(*part)
        return window
