"""Counting the bytes a cache really holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from .compat import storage_id


@dataclass
class MemoryFootprint:
    """Bytes held by a cache. Every tensor's whole storage is counted, once, room for growth included.

    Args:
        packed: Codes of packed blocks.
        metadata: Scales and block means, and each layer's few bytes of bookkeeping.
        residual: Newest tokens of compressed layers, dense.
        sinks: Dense sink tokens of compressed layers.
        uncompressed: Layers that are not compressed (sliding, linear, skipped).
        bf16_equivalent: What a cache of the same tokens with 16-bit keys and values everywhere would hold.
        by_device: Total bytes per device.
    """

    packed: int = 0
    metadata: int = 0
    residual: int = 0
    sinks: int = 0
    uncompressed: int = 0
    bf16_equivalent: int = 0
    by_device: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All bytes held."""
        return self.packed + self.metadata + self.residual + self.sinks + self.uncompressed

    @property
    def ratio(self) -> float:
        """Bytes held over `bf16_equivalent`; 0 for an empty cache."""
        return self.total / self.bf16_equivalent if self.bf16_equivalent else 0.0

    def __str__(self) -> str:
        parts = ", ".join(
            f"{f.name} {getattr(self, f.name) / 2**20:.2f}"
            for f in fields(self)
            if f.name not in ("bf16_equivalent", "by_device")
        )
        return (
            f"{self.total / 2**20:.2f} MiB ({parts}); bf16 would be {self.bf16_equivalent / 2**20:.2f} MiB, "
            f"held {self.ratio:.1%}"
        )


def tensors_by_kind(layer: Any) -> dict[str, list[torch.Tensor]]:
    """Every tensor of a layer, by the kind `memory_footprint` reports. Compressed layers have kinds of their own
    (`by_kind`), all others one, "uncompressed"."""
    if hasattr(layer, "by_kind"):
        return layer.by_kind()
    return {"uncompressed": list(_tensors(list(vars(layer).values())))}


def bytes_in_16_bits(layer: Any, tokens: int | None = None) -> int:
    """Bytes that a layer would take with 16-bit keys and values; a compressed one, of `tokens` if given."""
    if hasattr(layer, "bytes_in_16_bits"):
        return layer.bytes_in_16_bits(tokens)
    tensors = tensors_by_kind(layer)["uncompressed"]
    return sum(2 * tensor.numel() for tensor in tensors if tensor.is_floating_point())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in an attribute's value, in lists, tuples and dicts too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def measure(layers: Iterable[Any]) -> MemoryFootprint:
    """The footprint of cache layers, compressed or not."""
    footprint = MemoryFootprint()
    seen: set[tuple[str, int]] = set()

    def count(kind: str, tensor: torch.Tensor) -> None:
        device, size = str(tensor.device), tensor.untyped_storage().nbytes()
        storage = (device, storage_id(tensor))
        if size == 0 or storage in seen:
            return
        seen.add(storage)
        setattr(footprint, kind, getattr(footprint, kind) + size)
        footprint.by_device[device] = footprint.by_device.get(device, 0) + size

    for layer in layers:
        for kind, tensors in tensors_by_kind(layer).items():
            for tensor in tensors:
                count(kind, tensor)
        footprint.bf16_equivalent += bytes_in_16_bits(layer)
    return footprint
