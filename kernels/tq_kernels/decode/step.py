"""What a decode step launches: numbers worked out once for queries of one shape, and the arguments of each kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..common.launcher import Launcher
from .appender import Appender
from .plan import Plan


class NewRow(NamedTuple):
    """One token's keys `[B, Hkv, 1, Dk]` and values `[B, Hkv, 1, Dv]` in the window's dtype, last dimension contiguous,
    that belong in row `slot` of the window and are not there yet."""

    keys: torch.Tensor
    values: torch.Tensor
    slot: int


class NewToken(NamedTuple):
    """One token's keys and values, as of a `NewRow`, that `appender` has still to append to tensors whose counts are on
    the device; see `Appender.__call__`."""

    keys: torch.Tensor
    values: torch.Tensor
    counts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    max_cache_len: int
    appender: Appender


class Held(NamedTuple):
    """The tensors of a `Decoder` that stay from step to step: themselves, or their addresses."""

    packed: tuple[Any, Any, Any, Any]
    dense: tuple[Any, Any, Any, Any]
    key_rotation: Any
    value_rotation: Any
    key_factors: Any
    value_factors: Any


class First(NamedTuple):
    """The kernel that rotates queries, and may write a row before: its grid and constants, and the split's after it."""

    grid: tuple[int, int, int]
    constants: tuple[Any, ...]
    split_constants: tuple[Any, ...]


class Launches(NamedTuple):
    """The kernels of a step, ready to be called."""

    first: Launcher
    split: Launcher
    reduce: Launcher


Pointers = tuple[tuple[Any, ...], tuple[float, ...]]
Arguments = tuple[Pointers, Pointers, Pointers]
"""Pointers and numbers of the first kernel, and of those that split and reduce, in order."""


class Step:
    """What is the same for all steps with queries of one shape.

    Args:
        plan: What to launch.
        rotate, reduce: The numbers that these kernels are given.
        split: Those of the split, before and after the mask's strides.
        row_constants: Constants that `rotate_and_append` has before those of `rotate_query`.
        capacity: Rows of the window.
    """

    def __init__(
        self,
        plan: Plan,
        rotate: tuple[float, ...],
        split: tuple[tuple[float, ...], tuple[float, ...]],
        reduce: tuple[float, ...],
        row_constants: tuple[int, int],
        capacity: int,
    ) -> None:
        self.plan = plan
        self.rotate_numbers, self.reduce_numbers = rotate, reduce
        self.split_before_mask, self.split_after_mask = split
        self.split_grid = (plan.workers, 1, 1)
        self.row_constants = row_constants
        self.capacity = capacity
        # By what is written first: nothing, a row, or a token by an appender of these constants. `Decoder` fills it
        # when a call with aligned tensors has compiled all kernels.
        self.launches: dict[type | tuple[Any, ...], tuple[First, Launches]] = {}

    def first(self, row: NewRow | NewToken | None) -> First:
        """The first kernel of a step that writes `row`."""
        plan = self.plan
        if not isinstance(row, NewToken):
            constants = (*(() if row is None else self.row_constants), *plan.rotate_constants)
            return First(plan.rotate_grid, constants, plan.split_constants)
        heads, row_tiles, _ = plan.rotate_grid
        _, stored_dim, _, rows, overlaps = plan.rotate_constants
        columns = row.appender.columns
        programs = 2 + row_tiles * -(-stored_dim // columns)
        # The split may not read the counts before they are written.
        split = (*plan.split_constants[:-1], 2) if overlaps else plan.split_constants
        return First((heads, programs, 1), (*row.appender.constants, columns, rows, overlaps), split)

    def arguments(
        self,
        held: Held,
        mask_strides: tuple[int, int, int],
        row: Pointers,
        query: Any,
        scratch: Any,
        out: Any,
        num_blocks: Any,
        num_window: Any,
        num_sinks: Any,
        mask: Any,
        s_aux: Any,
    ) -> Arguments:
        """The arguments of every kernel, but for its constants, from the tensors of a call or their addresses.

        `row` are those that the first kernel takes before what rotates. What a call does not have stands for another
        tensor.
        """
        rotate = (
            (*row[0], query, held.key_rotation, held.key_factors, scratch),
            (*row[1], *self.rotate_numbers),
        )
        split = (
            (
                scratch,
                *held.packed,
                num_blocks,
                *held.dense,
                num_window,
                num_sinks,
                mask,
            ),
            (*self.split_before_mask, *mask_strides, *self.split_after_mask),
        )
        reduce = (
            (
                scratch,
                num_blocks,
                num_window,
                num_sinks,
                held.value_rotation,
                held.value_factors,
                s_aux,
                out,
            ),
            self.reduce_numbers,
        )
        return rotate, split, reduce
