"""transformers' own layers, which do not answer for themselves: what a model hands each is recorded, and replayed.

One run of the model is recorded. Replayed at another batch and length, it fills a second layer. Sizes and numbers that
differ between the two layers are those that may differ in a file. So a file can be checked against layers of classes
that this package knows nothing of.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers.cache_utils import Cache

from ..compat import mark_static_addresses
from ..layers.base import Probe, State, like_held

TOKEN_AXES = {"update": -2, "update_indexer": 1}
"""Methods of a cache whose tensors have an axis of tokens, and which; the batch is axis 0 of all."""
METHODS = (*TOKEN_AXES, "update_conv_state", "update_recurrent_state")
TOKEN_AXES_OF_LAYERS = {"update_index": -2}
"""The same of methods that a model calls on the layer itself: MiniMax M3 (transformers 5.23)."""
BATCH, TOKENS, ROOM = (1, 2), (2, 3), (11, 13)
"""Batch, length and `max_cache_len` of the two layers, all pairs different."""


@dataclass(frozen=True)
class Call:
    """A call of a cache's method for one layer, with shapes in place of tensors.

    Args:
        method: Its name; some models call it on the layer itself.
        likes: Shape, dtype and device of each tensor.
        options: The other arguments, but for the number of the layer.
    """

    method: str
    likes: tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...]
    options: tuple[tuple[str, Any], ...]

    def tensors(self, batch: int, tokens: int) -> list[torch.Tensor]:
        """Zeros in place of the call's tensors, for `batch` sequences of `tokens` tokens."""
        zeros = []
        for shape, dtype, device in self.likes:
            sizes = [batch, *shape[1:]]
            if (axis := (TOKEN_AXES | TOKEN_AXES_OF_LAYERS).get(self.method)) is not None:
                sizes[axis] = tokens
            zeros.append(torch.zeros(sizes, dtype=dtype, device=device))
        return zeros

    def replay(self, layer: Any, batch: int, tokens: int) -> None:
        """Make the call on `layer`, one of transformers' classes."""
        tensors = self.tensors(batch, tokens)
        if self.method == "update":
            tensors = list(like_held(layer, *tensors))
        getattr(layer, self.method)(*tensors, **dict(self.options))


@contextmanager
def record(cache: Cache) -> Iterator[list[list[Call]]]:
    """Record within the context what each layer of `cache` is given: in lists, one a layer."""
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
            # What models pass on to `update` is for attention, not for the layer.
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


def shapes(layer: Any) -> dict[str, torch.Size]:
    """The shapes of a layer's tensors by their path in it. Another layer that was given recorded calls has the same
    paths, unless the model fills its layers in a way that is not recorded."""
    return {path: value.shape for path, (_, _, value) in _leaves(layer).items() if isinstance(value, torch.Tensor)}


class RecordedLayer:
    """A layer of transformers' own class, for the questions that layers of this package answer themselves.

    Args:
        layer: The layer.
        second: The layer of a second cache, to which what a run handed the probe's layer was replayed at another size.
        sizes: Numbers in the file by the pair of numbers that the two have in their place.
    """

    state_fields: ClassVar[dict[str, Any]] = {"values": dict, "rows": (int, type(None))}

    def __init__(self, layer: Any, second: Any = None, sizes: dict[tuple[int, int], int] | None = None) -> None:
        self.layer, self.second, self.sizes = layer, second, sizes or {}

    def state(self) -> State:
        """See `tq_hf.layers.base`: numbers under `values` and tensors, both by their path in the layer."""
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
        sizes, seconds = dict(self.sizes), _leaves(self.second)
        if window is not None:
            sizes[TOKENS] = min(probe.tokens, max(window - 1, 1))
            if values.get("record_past") is True and rows is not None and sizes[TOKENS] < rows <= probe.tokens:
                sizes[TOKENS] = rows
        tensors: dict[str, torch.Tensor] = {}
        numbers = set()
        for path, (_, _, value) in _leaves(probe.layer).items():
            second = seconds[path][2]
            if isinstance(value, torch.Tensor):
                shape = [sizes.get(pair, pair[0]) for pair in zip(value.shape, second.shape, strict=True)]
                tensors[path] = value.new_empty(shape, device="meta")
                continue
            numbers.add(path)
            if path not in values or (path == "record_past" and type(values[path]) is bool):
                continue
            number = values[path]
            wanted = self.sizes.get((value, second), value) if type(value) is int else value
            if type(number) is not type(wanted) or number != wanted:
                raise ValueError(
                    f"has {str(number)[:32]} for `{path}` in the file, and would have {wanted} in a cache of this "
                    "model: the file is damaged."
                )
        if numbers != values.keys():
            raise ValueError(f"does not have exactly the values {', '.join(sorted(numbers))}: damaged.")
        if rows != _rows(values, tensors):
            raise ValueError(f"has {rows} rows after {probe.tokens} tokens: the file is damaged.")
        return tensors

    def load_state(self, description: dict[str, Any], tensors: dict[str, torch.Tensor], probe: Probe) -> None:
        """See `tq_hf.layers.base`: the layer takes over what the probe's layer has, everything in it replaced."""
        seconds = _leaves(self.second)
        for path, (container, key, value) in _leaves(probe.layer).items():
            if not isinstance(value, torch.Tensor):
                container[key] = description["values"][path]
                continue
            tensor = tensors[path].to(value.device)
            if not tensor.is_floating_point():
                # Lengths kept as tensors: constants of the layer, or up to the number of tokens.
                constant = torch.equal(value, seconds[path][2])
                possible = tensor == value if constant else (0 <= tensor) & (tensor <= probe.tokens)
                if not possible.all():
                    raise ValueError(f"has {str(tensor.tolist())[:32]} for `{path}`: the file is damaged.")
            if self.layer.is_compileable:
                mark_static_addresses([tensor])
            container[key] = tensor
        vars(self.layer).update(vars(probe.layer))


def _rows(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> int | None:
    """Rows of a sliding window, which has more of them while its past is recorded; `None` of other layers."""
    return tensors["keys"].shape[-2] if "sliding_window" in values and "keys" in tensors else None


def _leaves(layer: Any) -> dict[str, tuple[Any, Any, Any]]:
    """Everything in a layer of transformers by its path ("keys", "conv_states.0"): container, key and value. Its dtype
    and device are left out, they are the model's."""

    def walk(container: Any, prefix: str) -> Iterator[tuple[str, tuple[Any, Any, Any]]]:
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(value, (dict, list)):
                yield from walk(value, f"{prefix}{key}.")
            elif not isinstance(value, (torch.dtype, torch.device)):
                yield f"{prefix}{key}", (container, key, value)

    return dict(walk(vars(layer), ""))
