"""What a file holds of each layer of a cache: writing it down, and making the layer again.

A tiny forward pass of the model, on a cache of its own, tells what this model caches: the class of each layer, heads,
dims, dtypes and devices. Sizes that differ between two such passes, of different batch and length, are those that may
differ in a file. Every tensor is held against that before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import psutil
import torch
import transformers

from ..compat import mark_static_address
from ..config import TurboQuantConfig
from ..layers.compressed import TurboQuantLayer
from ..layers.uncompressed import PreallocatedLayer
from ..stores.base import Counts
from ..stores.growing import GrowingStore
from ..stores.growth import GROW, Fixed
from ..stores.ticket import Receipt
from ..tensors.window import KeyValue
from .safetensors_file import Header, check_fields, typed

if TYPE_CHECKING:
    from ..cache import TurboQuantCache

COMPRESSED_FIELDS = {"class": str, "counts": list, "reads_store": bool}
STOCK_FIELDS = {"class": str, "values": dict}

PROBE_BATCH, PROBE_TOKENS, PROBE_ROOM = (1, 2), (2, 3), (11, 13)
"""Batch, length and `max_cache_len` of the two forward passes: no pair of these is another."""

Fits = Callable[[tuple[int, ...]], bool]
Expected = dict[str, tuple[torch.dtype, Fits, list[int]]]
"""By name: the dtype a tensor must have, whether a shape is right, and the shape to name if it is not."""


def describe_compressed(layer: TurboQuantLayer, index: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A compressed layer as JSON and tensors by name: what is used of its store, rows in the order of the tokens."""
    if layer.store is None:
        raise ValueError(f"Layer {index} holds no tokens although others do; save a cache the whole model has filled.")
    counts, held = layer.store.export()
    description = {
        "class": type(layer).__name__,
        "counts": list(counts),
        "reads_store": layer._receipt.signed,
    }
    return description, held


def describe_stock(layer: Any, index: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A layer of transformers, of whatever class, as JSON and tensors by their path in it."""
    values, held = {}, {}
    for path, (_, _, value) in _leaves(layer).items():
        if isinstance(value, torch.Tensor):
            held[path] = value
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


def _same_shape(first: tuple[int, ...], second: tuple[int, ...], symbols: dict[tuple[int, int], int]) -> list[int]:
    """The shape of a tensor in the file, from its shapes in the two forward passes."""
    return [symbols.get(sizes, sizes[0]) for sizes in zip(first, second, strict=True)]


class Loader:
    """Checks a file's description against a model, and makes the cache it describes.

    Args:
        kind: `TurboQuantCache`, of which this module knows nothing else.
        model: The model, which is run twice on a few tokens.
        config: What the file was compressed with.
        state: The file's description, its fields typed.
    """

    def __init__(
        self, kind: type[TurboQuantCache], model: Any, config: TurboQuantConfig, state: dict[str, Any]
    ) -> None:
        self.kind, self.config, self.state = kind, config, state
        self.batch, self.tokens, self.room = state["batch"], state["tokens"], state["max_cache_len"]
        if self.room is not None and self.room < self.tokens:
            raise ValueError(f"It holds {self.tokens} tokens in room for {self.room}: the file is damaged.")
        self.cache = kind(model.config, config, max_cache_len=self.room)
        if [type(layer).__name__ for layer in self.cache.layers] != [
            layer.get("class") if isinstance(layer, dict) else None for layer in state["layers"]
        ]:
            raise ValueError(
                "Its layers are not those of a cache of this model (saved with transformers "
                f"{state['transformers'][:16]}, running {transformers.__version__}). Save it again with this version."
            )
        self.probes = [self._probe(model, number) for number in (0, 1)]

    def _probe(self, model: Any, number: int) -> TurboQuantCache:
        """A cache of this model after a few tokens."""
        config = TurboQuantConfig(skip_layers=self.config.skip_layers)
        room = None if self.room is None else PROBE_ROOM[number]
        cache = self.kind(model.config, config, max_cache_len=room)
        # A model whose weights accelerate keeps elsewhere has no device, and moves its inputs itself.
        device = "cpu" if model.device.type == "meta" else model.device
        ids = torch.zeros(PROBE_BATCH[number], PROBE_TOKENS[number], dtype=torch.long, device=device)
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True)
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, TurboQuantLayer) and layer.store is None:
                raise ValueError(f"This model did not fill layer {index} of its cache; call `model.eval()` first.")
        return cache

    def check(self, header: Header) -> None:
        """Raise a `ValueError` unless the file has just the tensors such a cache has, and there is memory for them."""
        expected: Expected = {}
        need: dict[torch.device, int] = {torch.device("cpu"): header.data_bytes}
        for index, (first, second) in enumerate(zip(*(cache.layers for cache in self.probes), strict=True)):
            described = self.state["layers"][index]
            if isinstance(first, TurboQuantLayer):
                check_fields(described, COMPRESSED_FIELDS, f"Layer {index}")
                found = self._compressed(index, first, need)
            else:
                check_fields(described, STOCK_FIELDS, f"Layer {index}")
                found = self._stock(index, first, second)
            expected |= {f"layers.{index}.{name}": value for name, value in found.items()}
        if missing := sorted(expected.keys() - header.entries.keys()):
            raise ValueError(f"{len(missing)} tensors are missing, e.g. {missing[0]!r}: the file is damaged.")
        if extra := sorted(header.entries.keys() - expected.keys()):
            raise ValueError(f"There are {len(extra)} unknown tensors, e.g. {extra[0][:64]!r}: the file is damaged.")
        for name, (dtype, fits, shape) in expected.items():
            entry = header.entries[name]
            if entry.dtype != dtype or not fits(entry.shape):
                raise ValueError(
                    f"{name!r} is {entry.dtype} {list(entry.shape)} in the file, and would be {dtype} {shape} in a "
                    "cache of this model: the file is damaged."
                )
        for device, size in need.items():
            free = _free_memory(device)
            if free is not None and size > free:
                raise ValueError(
                    f"It needs {size / 2**30:.2f} GiB on {device}, and {free / 2**30:.2f} GiB are free. Make room, or "
                    "do not trust the file."
                )

    def _like(self, layer: TurboQuantLayer) -> KeyValue:
        """Keys and values `[B, Hkv, 0, D]` as this model makes them for the layer."""
        assert layer.store is not None
        keys, values = (part[:1, :, :0].expand(self.batch, -1, -1, -1) for part in layer.store.sinks)
        return keys, values

    def _compressed(self, index: int, layer: TurboQuantLayer, need: dict[torch.device, int]) -> Expected:
        """What the file must have of a compressed layer. Adds the memory that takes to `need`."""
        keys, values = self._like(layer)
        numbers = self.state["layers"][index]["counts"]
        if len(numbers) != len(Counts._fields) or not all(typed(n, int) and n >= 0 for n in numbers):
            raise ValueError(f"Layer {index} holds {str(numbers)[:64]}, not {', '.join(Counts._fields)}: damaged.")
        counts = Counts(*numbers)
        layout = self.config.layout(keys.shape[-1], values.shape[-1])
        held = counts.sinks + counts.blocks * layout.tokens + counts.window
        packed = counts.blocks + counts.pending
        if (
            held != self.tokens
            or counts.pending * layout.tokens > counts.window
            or counts.sinks > self.config.sink_tokens
            or (counts.sinks < self.config.sink_tokens and (packed or counts.window))
            or (self.room is not None and packed > self.config.num_blocks(self.room))
        ):
            raise ValueError(f"Layer {index} holds {counts}, which is impossible for {self.tokens} tokens: damaged.")
        try:
            # Sizes from the store itself, without memory.
            growth = GROW if self.room is None else Fixed(self.room)
            store = GrowingStore.allocate(self.config, keys.to("meta"), values.to("meta"), growth)
        except RuntimeError as error:
            raise ValueError(f"Layer {index} would be too large ({str(error)[:80]}): the file is damaged.") from None
        size = sum(tensor.nbytes for tensors in store.by_kind().values() for tensor in tensors)
        packed_shapes = {
            name: (tensor.dtype, [*tensor.shape[:2], packed, tensor.shape[3]])
            for name, tensor in store.blocks.tensors().items()
        }
        dense_shapes = {
            f"{part}_{name}": (like.dtype, [*like.shape[:2], rows, like.shape[3]])
            for part, rows in (("sink", counts.sinks), ("window", counts.window))
            for name, like in (("keys", keys), ("values", values))
        }
        shapes = packed_shapes | dense_shapes
        size += sum(math.prod(shape) * dtype.itemsize for dtype, shape in shapes.values())
        need[keys.device] = need.get(keys.device, 0) + size
        return {name: (dtype, _exactly(shape), shape) for name, (dtype, shape) in shapes.items()}

    def _stock(self, index: int, first: Any, second: Any) -> Expected:
        """What the file must have of a layer of transformers; its numbers are checked here."""
        values = self.state["layers"][index]["values"]
        symbols = {PROBE_BATCH: self.batch, PROBE_TOKENS: self.tokens}
        if self.room is not None:
            symbols[PROBE_ROOM] = getattr(self.cache.layers[index], "max_cache_len", self.room)
        recorded = values.get("record_past") is True
        expected: Expected = {}
        numbers = set()
        others = _leaves(second)
        for path, (_, _, value) in _leaves(first).items():
            other = others[path][2]
            if isinstance(value, torch.Tensor):
                shape = _same_shape(value.shape, other.shape, symbols)
                longest = list(shape)
                window = getattr(first, "sliding_window", None)
                for axis, sizes in enumerate(zip(value.shape, other.shape, strict=True)):
                    if sizes == PROBE_TOKENS and window is not None:
                        shape[axis] = min(self.tokens, max(window - 1, 1))
                        longest[axis] = self.tokens if recorded else shape[axis]
                expected[path] = (value.dtype, _between(shape, longest), shape)
                continue
            numbers.add(path)
            if path not in values:
                continue
            given = values[path]
            if path == "record_past" and isinstance(given, bool):
                continue
            wanted = symbols.get((value, other), value) if typed(value, int) else value
            if type(given) is not type(wanted) or given != wanted:
                raise ValueError(
                    f"`{path}` of layer {index} is {str(given)[:32]} in the file, and would be {wanted} in a cache of "
                    "this model: the file is damaged."
                )
        if numbers != values.keys():
            raise ValueError(f"Layer {index} does not have exactly the values {', '.join(sorted(numbers))}: damaged.")
        return expected

    def fill(self, tensors: dict[str, torch.Tensor]) -> TurboQuantCache:
        """The cache, with these tensors, which `check` has passed."""
        for index, probe in enumerate(self.probes[0].layers):
            prefix = f"layers.{index}."
            held = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            described = self.state["layers"][index]
            layer = self.cache.layers[index]
            if isinstance(probe, TurboQuantLayer) and isinstance(layer, TurboQuantLayer):
                self._fill_compressed(layer, probe, Counts(*described["counts"]), held)
                # Known already, so that the next step need not dequantise everything to find out.
                layer._receipt = probe._receipt if described["reads_store"] else Receipt()
            else:
                self._fill_stock(index, held, described["values"])
        return self.cache

    def _fill_compressed(
        self, layer: TurboQuantLayer, probe: TurboQuantLayer, counts: Counts, held: dict[str, torch.Tensor]
    ) -> None:
        layer.lazy_initialization(*self._like(probe))
        assert layer.store is not None
        layer.store.restore(counts, held)

    def _fill_stock(self, index: int, held: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        # The probe's layer, initialised for this model as transformers does it, with everything it holds replaced.
        layer, other = (cache.layers[index] for cache in self.probes)
        others = _leaves(other)
        for path, (into, key, value) in _leaves(layer).items():
            if not isinstance(value, torch.Tensor):
                into[key] = values[path]
                continue
            tensor = held[path].to(value.device)
            if not tensor.is_floating_point():
                # Lengths kept as tensors: constants of the layer, or up to the number of tokens.
                constant = torch.equal(value, others[path][2])
                possible = tensor == value if constant else (0 <= tensor) & (tensor <= self.tokens)
                if not possible.all():
                    raise ValueError(f"`{path}` of layer {index} is {str(tensor.tolist())[:32]}: the file is damaged.")
            if layer.is_compileable:
                mark_static_address(tensor)
            into[key] = tensor
        if isinstance(layer, PreallocatedLayer):
            layer.num_held = None
        self.cache.layers[index] = layer


def _exactly(shape: list[int]) -> Fits:
    return lambda came: list(came) == shape


def _between(least: list[int], most: list[int]) -> Fits:
    return lambda came: len(came) == len(least) and all(a <= n <= b for a, n, b in zip(least, came, most, strict=True))


def _free_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device, if that can be told."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return psutil.virtual_memory().available if device.type == "cpu" else None
