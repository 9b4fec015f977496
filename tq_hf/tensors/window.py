"""The dense end of a layer: a ring of the newest keys and values.

Rows are numbered by their token's position after the sinks; row p lives in slot `p % capacity`. The capacity is a
multiple of the block size, so a block's rows are always contiguous: dropping a block that has been encoded moves
nothing.

The newest row may be late: held apart until somebody needs it. A decode kernel writes it in passing (a launch of its
own would cost the host as much as the kernel's); whoever else reads or writes the ring writes it first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..inference_mode import outside_inference_mode
from ..layout import BlockLayout

KeyValue = tuple[torch.Tensor, torch.Tensor]

BLOCK = BlockLayout.tokens


def ring_capacity(rows: int) -> int:
    """`rows` rounded up to whole blocks, at least one."""
    return max(1, -(-rows // BLOCK)) * BLOCK


class LateRow:
    """Keys `[B, Hkv, 1, Dk]` and values `[B, Hkv, 1, Dv]` that belong in slot `slot` of a ring, or `None` once they are
    there."""

    __slots__ = ("slot", "states")

    def __init__(self, states: KeyValue, slot: int) -> None:
        self.states: KeyValue | None = states
        self.slot = slot

    @outside_inference_mode
    def write(self, ring: KeyValue) -> None:
        """Write the row, unless it is there."""
        if self.states is not None:
            for rows, row in zip(ring, self.states, strict=True):
                rows[:, :, self.slot : self.slot + 1] = row
            self.states = None


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
        ring = (new.new_zeros(*new.shape[:2], capacity, new.shape[3]) for new in (keys, values))
        self._hold((next(ring), next(ring)), first, 0, None)

    @classmethod
    def resumed(cls, ring: KeyValue, first: int, count: int, late: LateRow | None = None) -> DenseWindow:
        """A window over existing ring buffers."""
        window = cls.__new__(cls)
        window._hold(ring, first, count, late)
        return window

    def _hold(self, ring: KeyValue, first: int, count: int, late: LateRow | None) -> None:
        self.ring = ring
        """The buffers as they are, possibly without the late row."""
        self.capacity = ring[0].shape[2]
        """Rows there is room for."""
        self.first = first
        self.count = count
        self.late = late

    def __reduce__(self) -> tuple[Any, ...]:
        return DenseWindow.resumed, ((self.keys, self.values), self.first, self.count)

    @property
    def keys(self) -> torch.Tensor:
        """The ring of keys, to read and to write."""
        self._complete()
        return self.ring[0]

    @property
    def values(self) -> torch.Tensor:
        """The ring of values, to read and to write."""
        self._complete()
        return self.ring[1]

    def _complete(self) -> None:
        if self.late is not None and self.late.states is not None:
            self.late.write(self.ring)
        self.late = None

    def append_late(self, states: KeyValue) -> None:
        """Hold one more row, keys `[B, Hkv, 1, Dk]` and values `[B, Hkv, 1, Dv]`, and write it later. There must be
        room, and nobody may change the tensors before it is written."""
        self._complete()
        self.late = LateRow(states, (self.first + self.count) % self.capacity)
        self.count += 1

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
        return DenseWindow.resumed(self.ring, self.first, self.count, self.late)

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
