"""What a decode step launches: numbers worked out once for queries of one shape, and the arguments of each kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..common.launcher import Launcher
from .plan import Plan


class NewRow(NamedTuple):
    """One token's keys `[B, Hkv, 1, Dk]` and values `[B, Hkv, 1, Dv]` in the window's dtype, last dimension contiguous,
    that belong in row `slot` of the window and are not there yet."""

    keys: torch.Tensor
    values: torch.Tensor
    slot: int


class Held(NamedTuple):
    """The tensors of a `Decoder` that stay from step to step: themselves, or their addresses."""

    packed: tuple[Any, Any, Any, Any]
    dense: tuple[Any, Any, Any, Any]
    key_rotation: Any
    value_rotation: Any
    key_factors: Any
    value_factors: Any


class Launches(NamedTuple):
    """The kernels of a step, ready to be called."""

    rotate: Launcher
    split: Launcher
    reduce: Launcher


Pointers = tuple[tuple[Any, ...], tuple[float, ...]]
Arguments = tuple[Pointers, Pointers, Pointers]
"""Pointers and numbers of the kernels that rotate, split and reduce, in order."""


class Step:
    """What is the same for all steps with queries of one shape.

    Args:
        plan: What to launch.
        rotate, reduce: The numbers that these kernels are
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
        self.rotate_constants = plan.rotate_constants
        self.append_constants = (*row_constants, *plan.rotate_constants)
        self.capacity = capacity
        # By whether a row is written; `Decoder` fills it when a call with aligned tensors has compiled all kernels.
        self.launches: dict[bool, Launches] = {}

    def arguments(
        self,
        held: Held,
        mask_strides: tuple[int, int, int],
        row_numbers: tuple[int, int, int, int, int] | None,
        query: Any,
        scratch: Any,
        out: Any,
        num_blocks: Any,
        num_window: Any,
        num_sinks: Any,
        mask: Any,
        s_aux: Any,
        row_keys: Any,
        row_values: Any,
    ) -> Arguments:
        """The arguments of every kernel, but for its constants, from the tensors of a call or their addresses.

        `row_numbers` are the slot of the row to write, and the strides of its keys and of its values in batch and
        heads. What a call does not have stands for another tensor; of rows nothing is read then.
        """
        rotate: Pointers
        if row_numbers is None:
            rotate = (query, held.key_rotation, held.key_factors, scratch), self.rotate_numbers
        else:
            rotate = (
                (
                    row_keys,
                    row_values,
                    *held.dense[2:],
                    query,
                    held.key_rotation,
                    held.key_factors,
                    scratch,
                ),
                (
                    row_numbers[0],
                    self.capacity,
                    *row_numbers[1:],
                    *self.rotate_numbers,
                ),
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
