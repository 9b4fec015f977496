"""What a file holds of a layer of transformers: writing it down, checking it, and making the layer again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
)

from ..compat import mark_static_address
from ..layers.sliding import PreallocatedSlidingLayer, SlidingLayer
from ..layers.uncompressed import PreallocatedLayer
from .expected import Expected, between
from .safetensors_file import typed

FIELDS = {"class": str, "values": dict}

PROBE_BATCH, PROBE_TOKENS, PROBE_ROOM = (1, 2), (2, 3), (11, 13)
"""Batch, length and `max_cache_len` of two probes: no pair of these is another."""


def describe(layer: Any, index: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A layer of transformers, of whatever class, as JSON and tensors by their path in it."""
    values: dict[str, bool | int | None] = {}
    held: dict[str, torch.Tensor] = {}
    for path, (_, _, value) in _leaves(layer).items():
        if isinstance(value, torch.Tensor):
            held[path] = value
        elif path == "_recorded" and isinstance(layer, PreallocatedSlidingLayer):
            values[path] = None  # the window is saved, and not what slid out of it since the last `crop`
        elif value is None or isinstance(value, (bool, int)):
            values[path] = value
        else:
            raise ValueError(
                f"Layer {index} is a {type(layer).__name__} with a {type(value).__name__} in `{path}`, which cannot be "
                "saved. Only layers of numbers and tensors can."
            )
    return {"class": type(layer).__name__, "values": values}, held


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


def expect(
    values: dict[str, Any], index: int, probes: tuple[Any, Any], sizes: dict[tuple[int, int], int], tokens: int
) -> Expected:
    """What the file must have of layer `index`; its numbers are checked here.

    Args:
        values: The numbers that the file has of it.
        index: Number of the layer.
        probes: Two layers of this model, of different batch, length and room.
        sizes: The sizes in the file of what is of such a pair of sizes in the two.
        tokens: Tokens that the file holds.
    """
    first, second = probes
    recorded = values.get("record_past") is True
    expected: Expected = {}
    numbers = set()
    others = _leaves(second)
    for path, (_, _, value) in _leaves(first).items():
        other = others[path][2]
        if isinstance(value, torch.Tensor):
            pairs = list(zip(value.shape, other.shape, strict=True))
            shape = [sizes.get(pair, pair[0]) for pair in pairs]
            longest = list(shape)
            window = getattr(first, "sliding_window", None)
            for axis, pair in enumerate(pairs):
                if pair == PROBE_TOKENS and window is not None:
                    shape[axis] = min(tokens, max(window - 1, 1))
                    longest[axis] = tokens if recorded else shape[axis]
            expected[path] = (value.dtype, between(shape, longest), shape)
            continue
        numbers.add(path)
        if path not in values:
            continue
        given = values[path]
        if path == "record_past" and isinstance(given, bool):
            continue
        wanted = sizes.get((value, other), value) if typed(value, int) else value
        if type(given) is not type(wanted) or given != wanted:
            raise ValueError(
                f"`{path}` of layer {index} is {str(given)[:32]} in the file, and would be {wanted} in a cache of "
                "this model: the file is damaged."
            )
    if numbers != values.keys():
        raise ValueError(f"Layer {index} does not have exactly the values {', '.join(sorted(numbers))}: damaged.")
    return expected


def fill(
    probes: tuple[Any, Any], index: int, held: dict[str, torch.Tensor], values: dict[str, Any], tokens: int
) -> Any:
    """The first of two probes, initialised for this model as transformers does it, with all it holds replaced."""
    layer, other = probes
    others = _leaves(other)
    for path, (into, key, value) in _leaves(layer).items():
        if not isinstance(value, torch.Tensor):
            into[key] = values[path]
            continue
        tensor = held[path].to(value.device)
        if not tensor.is_floating_point():
            # Lengths kept as tensors: constants of the layer, or up to the number of tokens.
            constant = torch.equal(value, others[path][2])
            possible = tensor == value if constant else (0 <= tensor) & (tensor <= tokens)
            if not possible.all():
                raise ValueError(f"`{path}` of layer {index} is {str(tensor.tolist())[:32]}: the file is damaged.")
        if layer.is_compileable:
            mark_static_address(tensor)
        into[key] = tensor
    if isinstance(layer, PreallocatedLayer):
        layer.num_held = None
    if isinstance(layer, PreallocatedSlidingLayer):
        layer.resume(layer.cumulative_length_int)
    return layer


def converted(layer: Any, target: Any, index: int) -> Any:
    """What `layer` holds, in a layer of the kind of `target`: preallocated where that grows, or the other way.

    Raises:
        ValueError: It is a layer of a kind that is not converted.
    """
    if type(layer) is type(target):
        return layer
    if {type(layer), type(target)} not in ({DynamicLayer, PreallocatedLayer}, {SlidingLayer, PreallocatedSlidingLayer}):
        raise ValueError(
            f"Layer {index} is a {type(layer).__name__}, which cannot become a {type(target).__name__}: load the cache "
            "without `max_cache_len`."
        )
    tokens = int(layer.get_seq_length())
    rows = min(tokens, layer.keys.shape[2])
    keys, values = (states[:, :, :rows] for states in (layer.keys, layer.values))
    if isinstance(target, StaticLayer):
        target.lazy_initialization(keys, values)
        assert target.keys is not None and target.values is not None
        # Of a full window the newest row is the last, and the first is never read again.
        start = max(0, target.max_cache_len - rows) if tokens >= target.max_cache_len else 0
        for buffer, states in ((target.keys, keys), (target.values, values)):
            buffer[:, :, start : start + rows] = states[:, :, -target.max_cache_len :]
        target.cumulative_length.fill_(min(tokens, target.max_cache_len))
        if isinstance(target, PreallocatedSlidingLayer):
            target.resume(tokens)
        return target
    if isinstance(target, DynamicSlidingWindowLayer):
        kept = max(0, rows - target.sliding_window + 1)
        keys, values = keys[:, :, kept:], values[:, :, kept:]
    target.update(keys.clone(), values.clone())
    if isinstance(target, DynamicSlidingWindowLayer):
        target.cumulative_length = tokens
    return target
