"""Writable copies of the keys and values of a compressed layer.

`layer.keys` of a layer that is not compressed is the cache itself, and code that edits or steers a cache writes into it
(`layer.values[:, :, -1] += v`). Compressed blocks have no rows to write to. So `layer.keys` is a copy, and an operation
that changes the copy or a view of the copy also assigns the copy to the layer, which encodes the changed blocks.

Writes that torch does not show are lost: by NumPy, by kernels on an address, and in compiled functions.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..compat import as_plain_tensors, changes_of, storage_id
from .base import replaced


class Source:
    """Origin of a copy and its views: the `TurboQuantLayer`, and its version at the time of the copy."""

    def __init__(self, layer: Any, name: str, states: torch.Tensor) -> None:
        self.layer, self.name, self.states = weakref.ref(layer), name, states
        self.stamp = layer.stamp(name)

    def write(self) -> None:
        """Assign the copy to its layer. Raise `ValueError`, and change nothing, if the layer has changed meanwhile."""
        layer = self.layer()
        if layer is None:
            return
        if layer.stamp(self.name) != self.stamp:
            raise ValueError(
                f"`{self.name}` of a compressed layer were written to in place, in a copy made before the layer "
                f"changed: the layer is unchanged. Read `layer.{self.name}` again and write to the new copy, or assign "
                "`layer.keys` and `layer.values`. Call `clone()` first to write to a tensor outside of the cache."
            )
        layer.write(self.name, self.states)
        self.stamp = layer.stamp(self.name)


class Copy(torch.Tensor):
    """A copy of keys or values, or a view of a copy."""

    _plain: torch.Tensor
    _source: Source

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            with as_plain_tensors():
                return func(*args, **(kwargs or {}))
        copies: list[Copy] = []

        def plain_of(copy: Copy) -> torch.Tensor:
            copies.append(copy)
            return copy._plain

        args, kwargs = replaced(args, Copy, plain_of), replaced(kwargs or {}, Copy, plain_of)
        before = [changes_of(copy._plain) for copy in copies]
        result = func(*args, **kwargs)
        changed = [c._source for c, changes in zip(copies, before, strict=True) if changes_of(c._plain) != changes]
        for source in dict.fromkeys(changed):
            source.write()
        return _views(result, copies)


def copy_of(states: torch.Tensor, source: Source) -> Copy:
    """Make `states` a writable copy of the keys or values of a layer, or a view of one."""
    copy = states.as_subclass(Copy)
    copy._plain, copy._source = states, source
    return copy


def plain(value: Any) -> Any:
    """The plain tensor of a copy, without its layer; every other value unchanged."""
    return value._plain if isinstance(value, Copy) else value


def _views(result: Any, copies: list[Copy]) -> Any:
    """Make views of copies in the result of an operation copies, too."""
    if type(result) in (tuple, list):
        return type(result)(_views(item, copies) for item in result)
    if type(result) is torch.Tensor:
        for copy in copies:
            if result is copy._plain:
                return copy
            if storage_id(result) == storage_id(copy._plain):
                return copy_of(result, copy._source)
    return result
