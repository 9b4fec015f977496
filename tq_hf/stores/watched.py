"""Keys and values that notice when a model computes with them.

A model may do more with what `update` returns than hand it to attention: Doge makes a mask of its values, DiffLlama
rearranges them. Nothing such a model can read may be a stand-in. A `Watched` tensor looks like the states it stands for
and becomes them at the first operation on it, whichever that is: the result is right, and the receipt tells the layer.

Making one costs two to three microseconds more than an alias, and a compiler cannot trace it. So a layer watches the
first call of each kind, and hands out cheaper stand-ins in calls of a kind whose states were left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..compat import as_plain_tensors
from ..tensors.blocks import KeyValue

_ASKED_OF_SHAPE: set[Any] = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.is_floating_point,
}
"""What reads nothing: shape, dtype and device of the stand-in are those of the states."""


class Watch:
    """The states behind a pair of `Watched` tensors.

    Args:
        states: Makes them; called at most once.
        on_read: Called when the model computes with one of them.
    """

    def __init__(self, states: Callable[[], KeyValue], on_read: Callable[[], None]) -> None:
        self._make = states
        self._made: KeyValue | None = None
        self.on_read = on_read

    def states(self) -> KeyValue:
        """The keys and values themselves."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def over(self, stand_ins: KeyValue) -> KeyValue:
        """Watched aliases of `stand_ins`, which have the shape, dtype and device of the states."""
        watched = []
        for index, tensor in enumerate(stand_ins):
            alias = tensor.as_subclass(Watched)
            alias._watch, alias._index = self, index
            watched.append(alias)
        return watched[0], watched[1]


class Watched(torch.Tensor):
    """A stand-in for keys or values; see the module."""

    _watch: Watch
    _index: int

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with as_plain_tensors():
            if func not in _ASKED_OF_SHAPE:
                args, kwargs = _real(args), _real(kwargs or {})
            return func(*args, **(kwargs or {}))


def _real(value: Any) -> Any:
    """Arguments of an operation with the states in place of `Watched` tensors."""
    if isinstance(value, Watched):
        value._watch.on_read()
        return value._watch.states()[value._index]
    if type(value) in (tuple, list):
        return type(value)(_real(item) for item in value)
    if type(value) is dict:
        return {name: _real(item) for name, item in value.items()}
    return value


def unwatched(states: KeyValue) -> KeyValue:
    """The states themselves, for a reader who knows what they are; tells nobody."""
    keys, values = states
    if type(keys) is Watched:
        keys = keys._watch.states()[keys._index]
    if type(values) is Watched:
        values = values._watch.states()[values._index]
    return keys, values
