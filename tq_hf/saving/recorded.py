"""Saving and loading of transformers' own layers, which have no methods for it.

One run of the model is recorded: all calls that each layer gets. The calls are replayed on the meta device with the
batch and the length of a file, which shows the tensors and numbers that the file must have. A file can thus be checked
against layers of unknown classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers.cache_utils import Cache

from ..compat import mark_static_addresses
from ..layers.base import Probe, State, like_held
from ..memory import leaves_of

TOKEN_AXES = {"update": -2, "update_indexer": 1}
"""Axis of tokens in the tensors that a method of the cache takes. The batch is axis 0 in all methods."""
METHODS = (*TOKEN_AXES, "update_conv_state", "update_recurrent_state")
"""All recorded methods of the cache."""
TOKEN_AXES_OF_LAYERS = {"update_index": -2}
"""Axis of tokens in the tensors of methods that a model calls on a layer (MiniMax M3, transformers 5.23)."""
BATCH, TOKENS, ROOM = 1, 2, 11
"""Batch, length and `max_cache_len` of the run."""


@dataclass(frozen=True)
class Call:
    """A call of a method of the cache for one layer, with shapes in place of tensors.

    Args:
        method: Name of the method, of the cache or of the layer.
        likes: Shape, dtype and device of each tensor.
        options: All other arguments except the layer index.
    """

    method: str
    likes: tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...]
    options: tuple[tuple[str, Any], ...]

    def tensors(self, batch: int, tokens: int, device: str | None = None) -> list[torch.Tensor]:
        """Zeros in the shapes of the call for `batch` sequences of `tokens` tokens, on `device` or that of the call."""
        zeros = []
        for shape, dtype, own in self.likes:
            sizes = [batch, *shape[1:]]
            if (axis := (TOKEN_AXES | TOKEN_AXES_OF_LAYERS).get(self.method)) is not None:
                sizes[axis] = tokens
            zeros.append(torch.zeros(sizes, dtype=dtype, device=device or own))
        return zeros

    def replay(self, layer: Any, batch: int, tokens: int, device: str | None = None) -> None:
        """Repeat the call on `layer`, a layer of a transformers class."""
        tensors = self.tensors(batch, tokens, device)
        if self.method == "update":
            tensors = list(like_held(layer, *tensors))
        getattr(layer, self.method)(*tensors, **dict(self.options))


@contextmanager
def record(cache: Cache) -> Iterator[list[list[Call]]]:
    """Context that records the calls each layer of `cache` gets. Yields one list of calls per layer."""
    calls: list[list[Call]] = [[] for _ in cache.layers]

    def recording(method: str, real: Callable[..., Any], layer: int | None = None) -> Callable[..., Any]:
        signature = inspect.signature(real)

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            arguments.pop("args", None)
            more, index = arguments.pop("kwargs", {}), arguments.pop("layer_idx", layer)
            tensors = [arguments.pop(name) for name in list(arguments) if isinstance(arguments[name], torch.Tensor)]
            # Drop other arguments of `update`: they are for attention, not for the layer.
            options = {} if method == "update" else arguments | more
            likes = tuple((tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors)
            calls[index].append(Call(method, likes, tuple(sorted(options.items()))))
            return real(*args, **kwargs)

        return call

    holders: list[tuple[Any, str, int | None]] = [(cache, method, None) for method in METHODS]
    holders += [(layer, method, i) for i, layer in enumerate(cache.layers) for method in TOKEN_AXES_OF_LAYERS]
    recorded = [(holder, method, index) for holder, method, index in holders if hasattr(holder, method)]
    for holder, method, index in recorded:
        setattr(holder, method, recording(method, getattr(holder, method), index))
    try:
        yield calls
    finally:
        for holder, method, _ in recorded:
            delattr(holder, method)


def replay(calls: Iterable[Call], layer: Any, batch: int, tokens: int) -> None:
    """Repeat calls on an empty layer on the meta device, for `batch` sequences of `tokens` tokens."""
    for call in calls:
        call.replay(layer, batch, tokens, "meta")


def shapes(layer: Any) -> dict[str, torch.Size]:
    """Shapes of the tensors of a layer by path. A layer with the replayed calls of another one has the same paths,
    unless the model also fills layers by other methods."""
    return {path: value.shape for path, (_, _, value) in _leaves(layer).items() if isinstance(value, torch.Tensor)}


class RecordedLayer:
    """Adapter that gives a transformers layer the methods for saving and loading. `second` is the same layer of an
    empty cache with the room of the file, which has `batch` sequences; `calls` are those of the run."""

    state_fields: ClassVar[dict[str, Any]] = {"values": dict, "rows": (int, type(None))}

    def __init__(self, layer: Any, second: Any = None, calls: Iterable[Call] = (), batch: int = 0) -> None:
        self.layer, self.second, self.calls, self.batch = layer, second, calls, batch

    def state(self) -> State:
        """Describe the layer (see `tq_hf.layers.base`): numbers under `values`, and tensors, both by path."""
        values: dict[str, bool | int | None] = {}
        tensors: dict[str, torch.Tensor] = {}
        for path, (_, _, value) in _leaves(self.layer).items():
            if isinstance(value, torch.Tensor):
                tensors[path] = value
            elif value is None or isinstance(value, (bool, int)):
                values[path] = value
            else:
                raise ValueError(
                    f"is a {type(self.layer).__name__} with a {type(value).__name__} in `{path}`, which cannot be "
                    "saved. Only layers of numbers and tensors can."
                )
        return {"values": values, "rows": _rows(values, tensors)}, tensors

    def check_state(self, description: dict[str, Any], probe: Probe) -> dict[str, torch.Tensor]:
        values, rows, window = description["values"], description["rows"], getattr(probe.layer, "sliding_window", None)
        replay(self.calls, self.second, self.batch, probe.tokens)
        if shapes(probe.layer).keys() != shapes(self.second).keys():
            raise ValueError(
                f"is a {type(self.layer).__name__} of transformers, which the model fills in an unknown way, so the "
                "file cannot be checked. Run the prompt again."
            )
        leaves = {path: value for path, (_, _, value) in _leaves(self.second).items()}
        tensors = {path: value.to("meta") for path, value in leaves.items() if isinstance(value, torch.Tensor)}
        if values.get("record_past") is True and window is not None and window <= (rows or 0) <= probe.tokens:
            for name in ("keys", "values"):
                shape = tensors[name].shape
                tensors[name] = tensors[name].new_empty(*shape[:-2], rows, shape[-1])
        numbers = leaves.keys() - tensors.keys()
        if numbers != values.keys():
            raise ValueError(f"does not have exactly the values {', '.join(sorted(numbers))}: damaged.")
        for path in numbers:
            number, wanted = values[path], leaves[path]
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
        for path, (container, key, value) in _leaves(probe.layer).items():
            if not isinstance(value, torch.Tensor):
                container[key] = description["values"][path]
                continue
            tensor = tensors[path].to(value.device)
            if not tensor.is_floating_point():
                # Check constants of the layer, and lengths that are stored as tensors: at most the number of tokens.
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


def _leaves(layer: Any) -> dict[str, tuple[Any, Any, Any]]:
    """`leaves_of` a layer of transformers, without dtype and device, which the model determines."""
    return {
        path: leaf for path, leaf in leaves_of(layer).items() if not isinstance(leaf[2], (torch.dtype, torch.device))
    }
