"""Saving and loading of transformers' own layers, which have no methods for it.

One run of the model is recorded: all calls that each layer gets. The calls are replayed on the meta device with the
batch and the length of a file, which shows the tensors and numbers that the file must have. A file can thus be checked
against layers of unknown classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers.cache_utils import Cache

from ..compat import mark_static_addresses
from ..layers.base import Probe, State
from ..memory import leaves_of

TOKEN_AXES = {"update": -2, "update_indexer": 1, "update_index": -2}
"""Axis of tokens in the tensors that a method of a layer takes. The batch is axis 0 in all methods. A model calls
`update_index` itself (MiniMax M3, transformers 5.23), and the others through the cache."""
METHODS = (*TOKEN_AXES, "update_conv_state", "update_recurrent_state")
"""All recorded methods."""
BATCH, TOKENS, ROOM = 1, 2, 11
"""Batch, length and `max_cache_len` of the run."""


@dataclass(frozen=True)
class Call:
    """A call of a method of a layer, with shape, dtype and device (`likes`) in place of each tensor. `options` are all
    other arguments."""

    method: str
    likes: tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...]
    options: tuple[tuple[str, Any], ...]

    def tensors(self, batch: int, tokens: int, device: str | None = None) -> list[torch.Tensor]:
        """Zeros in the shapes of the call for `batch` sequences of `tokens` tokens, on `device` or that of the call."""
        zeros = []
        for shape, dtype, own in self.likes:
            sizes = [batch, *shape[1:]]
            if (axis := TOKEN_AXES.get(self.method)) is not None:
                sizes[axis] = tokens
            zeros.append(torch.zeros(sizes, dtype=dtype, device=device or own))
        return zeros


@contextmanager
def record(cache: Cache) -> Iterator[list[list[Call]]]:
    """Context that records the calls each layer of `cache` gets. Yields one list of calls per layer."""
    calls: list[list[Call]] = [[] for _ in cache.layers]

    def recording(method: str, real: Callable[..., Any], own: list[Call]) -> Callable[..., Any]:
        signature = inspect.signature(real)

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            arguments.pop("args", None)
            more = arguments.pop("kwargs", {})
            tensors = [arguments.pop(name) for name in list(arguments) if isinstance(arguments[name], torch.Tensor)]
            # Drop other arguments of `update`: they are for attention, not for the layer.
            options = {} if method == "update" else arguments | more
            likes = tuple((tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors)
            own.append(Call(method, likes, tuple(sorted(options.items()))))
            return real(*args, **kwargs)

        return call

    layers = zip(cache.layers, calls, strict=True)
    recorded = [(layer, method, own) for layer, own in layers for method in METHODS if hasattr(layer, method)]
    for layer, method, own in recorded:
        setattr(layer, method, recording(method, getattr(layer, method), own))
    try:
        yield calls
    finally:
        for layer, method, _ in recorded:
            delattr(layer, method)


def replay(calls: Iterable[Call], layer: Any, batch: int, tokens: int) -> None:
    """Repeat calls on an empty layer on the meta device, for `batch` sequences of `tokens` tokens."""
    for call in calls:
        method = getattr(layer, "allocate_for" if hasattr(layer, "allocate_for") else call.method)
        method(*call.tensors(batch, tokens, "meta"), **dict(call.options))


def shapes(layer: Any) -> dict[str, torch.Size]:
    """Shapes of the tensors of a layer by path. A layer with the replayed calls of another one has the same paths,
    unless the model also fills layers by other methods."""
    return {path: tensor.shape for path, tensor in _contents(layer)[1].items()}


def _contents(layer: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Values and tensors of a layer by path, without dtype and device, which the model determines."""
    leaves = {path: value for path, (_, _, value) in leaves_of(layer).items()}
    tensors = {path: value for path, value in leaves.items() if isinstance(value, torch.Tensor)}
    kinds = torch.Tensor, torch.dtype, torch.device
    return {path: value for path, value in leaves.items() if not isinstance(value, kinds)}, tensors


class RecordedLayer:
    """Adapter that gives a transformers layer the methods for saving and loading. `calls` are those of the run, and the
    file has `batch` sequences."""

    state_fields: ClassVar[dict[str, Any]] = {"values": dict, "rows": (int, type(None))}

    def __init__(self, layer: Any, calls: Iterable[Call] = (), batch: int = 0) -> None:
        self.layer, self.calls, self.batch = layer, calls, batch

    def state(self) -> State:
        """Describe the layer (see `tq_hf.layers.base`): numbers under `values`, and tensors, both by path."""
        values, tensors = _contents(self.layer)
        for index, size in getattr(self.layer, "conv_kernel_size", {}).items():
            if (states := tensors.get(path := f"conv_states.{index}")) is not None:  # without a recorded past
                tensors[path] = torch.nn.functional.pad(states, (size - states.shape[-1], 0))
        for path, value in values.items():
            if value is not None and not isinstance(value, (bool, int)):
                raise ValueError(
                    f"is a {type(self.layer).__name__} with a {type(value).__name__} in `{path}`, which cannot be "
                    "saved. Only layers of numbers and tensors can."
                )
        return {"values": values, "rows": _rows(values, tensors)}, tensors

    def check_state(self, description: dict[str, Any], probe: Probe) -> dict[str, torch.Tensor]:
        values, rows, window = description["values"], description["rows"], getattr(probe.layer, "sliding_window", None)
        replay(self.calls, filled := deepcopy(self.layer), self.batch, probe.tokens)
        if shapes(probe.layer).keys() != shapes(filled).keys():
            raise ValueError(
                f"is a {type(self.layer).__name__} of transformers, which the model fills in an unknown way, so the "
                "file cannot be checked. Run the prompt again."
            )
        numbers, held = _contents(filled)
        tensors = {path: tensor.to("meta") for path, tensor in held.items()}
        if values.get("record_past") is True and window is not None and window <= (rows or 0) <= probe.tokens:
            for name in ("keys", "values"):
                shape = tensors[name].shape
                tensors[name] = tensors[name].new_empty(*shape[:-2], rows, shape[-1])
        if numbers.keys() != values.keys():
            raise ValueError(f"does not have exactly the values {', '.join(sorted(numbers))}: damaged.")
        for path, wanted in numbers.items():
            number = values[path]
            if type(number) is not type(wanted) or (number != wanted and path != "record_past"):
                raise ValueError(
                    f"has {str(number)[:32]} for `{path}` in the file, and must have {wanted} in a cache of this "
                    "model: the file is damaged."
                )
        if rows != _rows(values, tensors):
            raise ValueError(f"has {rows} rows after {probe.tokens} tokens: the file is damaged.")
        return tensors

    def load_state(self, description: dict[str, Any], tensors: dict[str, torch.Tensor], probe: Probe) -> None:
        """Load the layer (see `tq_hf.layers.base`). All values of the probe's layer are replaced, then taken over."""
        for path, (container, key, value) in leaves_of(probe.layer).items():
            if path in description["values"]:
                container[key] = description["values"][path]
            elif isinstance(value, torch.Tensor):
                tensor = tensors[path].to(value.device)
                if not tensor.is_floating_point():
                    # Check constants of the layer, and lengths stored as tensors: at most the number of tokens.
                    possible = (tensor == value) | ((0 <= tensor) & (tensor <= probe.tokens))
                    if not possible.all():
                        raise ValueError(f"has {str(tensor.tolist())[:32]} for `{path}`: the file is damaged.")
                if self.layer.is_compileable:
                    mark_static_addresses([tensor])
                container[key] = tensor
        vars(self.layer).update(vars(probe.layer))


def _rows(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> int | None:
    """Number of rows of a sliding window; `None` for other layers. A window that records its past has more rows."""
    return tensors["keys"].shape[-2] if "sliding_window" in values and "keys" in tensors else None
