"""A layer of transformers in a file. It says nothing of itself, so what it holds is read off its attributes, and what
a file must have of it off two layers that the same model has filled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from ..compat import mark_static_address
from ..layers.base import FileSizes, TensorSize
from ..layers.dense import PreallocatedLayer, PreallocatedSlidingLayer, SlidingLayer

PROBE_BATCH, PROBE_TOKENS, PROBE_ROOM = (1, 2), (2, 3), (11, 13)
"""Batch, length and `max_cache_len` of two probes: no pair of these is another."""


class RecordedLayer:
    """Answers for a layer of transformers what `TurboQuantLayer` answers for itself."""

    state_fields = {"class": str, "values": dict}

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def state(self, index: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """See `TurboQuantLayer.state`; tensors are named by their path in the layer.

        Raises:
            ValueError: It holds what is neither a number nor a tensor.
        """
        values: dict[str, bool | int | None] = {}
        tensors: dict[str, torch.Tensor] = {}
        name = type(self.layer).__name__
        for path, (_, _, value) in _leaves(self.layer).items():
            if isinstance(value, torch.Tensor):
                tensors[path] = value
            elif path == "_recorded" and type(self.layer) is PreallocatedSlidingLayer:
                values[path] = None  # the window is saved, and not what slid out of it since the last `crop`
            elif value is None or isinstance(value, (bool, int)):
                values[path] = value
            else:
                raise ValueError(
                    f"Layer {index} is a {name} with a {type(value).__name__} in `{path}`, which cannot be saved. Only "
                    "layers of numbers and tensors can."
                )
        return {"class": name, "values": values}, tensors

    def expected_state(
        self, described: dict[str, Any], index: int, sizes: FileSizes, other: Any
    ) -> tuple[dict[str, TensorSize], dict[torch.device, int]]:
        """See `TurboQuantLayer.expected_state`. Numbers are checked here.

        Args:
            described: What the file says of it, its fields typed.
            index: Number of the layer.
            sizes: Of the whole file; `saved_room` is this layer's.
            other: A second layer of this model, of another batch, length and room.
        """
        values, window = described["values"], getattr(self.layer, "sliding_window", None)
        # The sizes in the file of what is of such a pair of sizes in the two layers.
        size_of: dict[tuple[int, int], int] = {PROBE_BATCH: sizes.batch, PROBE_TOKENS: sizes.tokens}
        if sizes.saved_room is not None:
            size_of[PROBE_ROOM] = sizes.saved_room
        recorded = values.get("record_past") is True
        expected: dict[str, TensorSize] = {}
        numbers = set()
        others = _leaves(other)
        for path, (_, _, value) in _leaves(self.layer).items():
            second = others[path][2]
            if isinstance(value, torch.Tensor):
                pairs = list(zip(value.shape, second.shape, strict=True))
                least = [size_of.get(pair, pair[0]) for pair in pairs]
                most = list(least)
                for axis, pair in enumerate(pairs):
                    if pair == PROBE_TOKENS and window is not None:
                        least[axis] = min(sizes.tokens, max(window - 1, 1))
                        most[axis] = sizes.tokens if recorded else least[axis]
                expected[path] = TensorSize(value.dtype, least, most)
                continue
            numbers.add(path)
            if path not in values:
                continue
            came = values[path]
            if path == "record_past" and isinstance(came, bool):
                continue
            wanted = size_of.get((value, second), value) if type(value) is int else value
            if type(came) is not type(wanted) or came != wanted:
                raise ValueError(
                    f"`{path}` of layer {index} is {str(came)[:32]} in the file, and would be {wanted} in a cache of "
                    "this model: the file is damaged."
                )
        if numbers != values.keys():
            raise ValueError(f"Layer {index} does not have exactly the values {', '.join(sorted(numbers))}: damaged.")
        return expected, {}

    def load_state(
        self, described: dict[str, Any], tensors: dict[str, torch.Tensor], sizes: FileSizes, probes: tuple[Any, Any]
    ) -> Any:
        """See `TurboQuantLayer.load_state`.

        Returns:
            A layer of this one's kind: the first probe, initialised for this model as transformers does it, with all it
            holds replaced.

        Raises:
            ValueError: A length is impossible, or the saved layer cannot become one of this kind.
        """
        layer, other = probes
        others = _leaves(other)
        for path, (into, key, value) in _leaves(layer).items():
            if not isinstance(value, torch.Tensor):
                into[key] = described["values"][path]
                continue
            tensor = tensors[path].to(value.device)
            if not tensor.is_floating_point():
                # Lengths kept as tensors: constants of the layer, or up to the number of tokens.
                constant = torch.equal(value, others[path][2])
                possible = tensor == value if constant else (0 <= tensor) & (tensor <= sizes.tokens)
                if not possible.all():
                    raise ValueError(f"`{path}` of a layer is {str(tensor.tolist())[:32]}: the file is damaged.")
            if layer.is_compileable:
                mark_static_address(tensor)
            into[key] = tensor
        if type(layer) is PreallocatedLayer:
            layer.num_held = None
        if type(layer) is PreallocatedSlidingLayer:
            layer.resume(layer.cumulative_length_int)
        return _converted(layer, self.layer)


def _leaves(layer: Any) -> dict[str, tuple[Any, Any, Any]]:
    """Everything a layer of transformers holds, by its path ("keys", "conv_states.0"): container, key and value.
    Its dtype and device are left out, they are the model's."""

    def walk(container: Any, prefix: str) -> Iterator[tuple[str, tuple[Any, Any, Any]]]:
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(value, (dict, list)):
                yield from walk(value, f"{prefix}{key}.")
            elif not isinstance(value, (torch.dtype, torch.device)):
                yield f"{prefix}{key}", (container, key, value)

    return dict(walk(vars(layer), ""))


def _converted(layer: Any, target: Any) -> Any:
    """What `layer` holds, in a layer of the kind of `target`: preallocated where that grows, or the other way.

    Raises:
        ValueError: It is a layer of a kind that is not converted.
    """
    if type(layer) is type(target):
        return layer
    if {type(layer), type(target)} not in ({DynamicLayer, PreallocatedLayer}, {SlidingLayer, PreallocatedSlidingLayer}):
        raise ValueError(
            f"It has a {type(layer).__name__}, which cannot become a {type(target).__name__}: load the cache "
            "without `max_cache_len`."
        )
    tokens = int(layer.get_seq_length())
    rows = min(tokens, layer.keys.shape[2])
    keys, values = (states[:, :, :rows] for states in (layer.keys, layer.values))
    if target.is_compileable:  # preallocated
        target.lazy_initialization(keys, values)
        assert target.keys is not None and target.values is not None
        # Of a full window the newest row is the last, and the first is never read again.
        start = max(0, target.max_cache_len - rows) if tokens >= target.max_cache_len else 0
        for buffer, states in ((target.keys, keys), (target.values, values)):
            buffer[:, :, start : start + rows] = states[:, :, -target.max_cache_len :]
        target.cumulative_length.fill_(min(tokens, target.max_cache_len))
        if target.is_sliding:
            target.resume(tokens)
        return target
    if target.is_sliding:
        kept = max(0, rows - target.sliding_window + 1)
        keys, values = keys[:, :, kept:], values[:, :, kept:]
    target.update(keys.clone(), values.clone())
    if target.is_sliding:
        target.cumulative_length = tokens
    return target
