"""The keys and values that a compressed layer answers with: copies that hand what is written into them to the layer.

A layer that is not compressed answers with the tensors that it holds, and code that edits or steers a cache writes
into them (`layer.values[:, :, -1] += v`). Compressed blocks have no rows to write to, so an operation that changes a
copy, or a view of one, is followed by an assignment of the whole copy, which encodes the blocks that changed.

Writes by what torch does not show are lost: NumPy, kernels on an address, compiled functions.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from ..compat import as_plain_tensors, changes_of, storage_id


class Editable(Protocol):
    """What a copy asks of its layer; see `TurboQuantLayer`."""

    def stamp(self, name: str) -> Any:
        """Equal to an earlier one as long as the layer holds the keys (or values, by `name`) that it held."""

    def write(self, name: str, states: torch.Tensor) -> None:
        """Hold these keys (or values), and the values (or keys) that are held."""


class _Source:
    """Where a copy and its views come from."""

    def __init__(self, layer: Editable, name: str, states: torch.Tensor) -> None:
        self.layer, self.name, self.states = weakref.ref(layer), name, states
        self.stamp = layer.stamp(name)

    def write(self) -> None:
        """Hand the copy to its layer.

        Raises:
            ValueError: The layer has changed since the copy was made. It stays as it is.
        """
        layer = self.layer()
        if layer is None:
            return
        if layer.stamp(self.name) != self.stamp:
            raise ValueError(
                f"`{self.name}` of a compressed layer were written to in place, in a copy made before the layer "
                f"changed: it keeps what it holds. Read `layer.{self.name}` again and write to that, or assign "
                "`layer.keys` and `layer.values`; `clone()` makes a tensor of your own."
            )
        layer.write(self.name, self.states)
        self.stamp = layer.stamp(self.name)


class Copy(torch.Tensor):
    """A copy, or a view of one."""

    _plain: torch.Tensor
    _source: _Source

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            with as_plain_tensors():
                return func(*args, **(kwargs or {}))
        copies: list[Copy] = []
        args, kwargs = _plain(args, copies), _plain(kwargs or {}, copies)
        before = [changes_of(copy._plain) for copy in copies]
        result = func(*args, **kwargs)
        changed = [c._source for c, changes in zip(copies, before, strict=True) if changes_of(c._plain) != changes]
        for source in dict.fromkeys(changed):
            source.write()
        return _views(result, copies)


def copy_of(layer: Editable, name: str, states: torch.Tensor) -> torch.Tensor:
    """`states`, which the layer does not hold, as a copy of its keys or values, by `name`."""
    return _copy(states, _Source(layer, name, states))


def plain(value: Any) -> Any:
    """The tensor beneath a copy, which knows no layer; anything else as it is."""
    return value._plain if isinstance(value, Copy) else value


def _copy(states: torch.Tensor, source: _Source) -> Copy:
    copy = states.as_subclass(Copy)
    copy._plain, copy._source = states, source
    return copy


def _plain(value: Any, found: list[Copy]) -> Any:
    """`value`, an argument of an operation, with plain tensors in place of copies, which are added to `found`."""
    if isinstance(value, Copy):
        found.append(value)
        return value._plain
    if type(value) in (tuple, list):
        return type(value)(_plain(item, found) for item in value)
    if type(value) is dict:
        return {name: _plain(item, found) for name, item in value.items()}
    return value


def _views(result: Any, copies: list[Copy]) -> Any:
    """The result of an operation, with views of copies as such."""
    if type(result) in (tuple, list):
        return type(result)(_views(item, copies) for item in result)
    if type(result) is torch.Tensor:
        for copy in copies:
            if result is copy._plain:
                return copy
            if storage_id(result) == storage_id(copy._plain):
                return _copy(result, copy._source)
    return result
