"""Number of bytes that a cache holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from .compat import storage_id


@dataclass
class MemoryFootprint:
    """Number of bytes that a cache holds. The whole storage of every tensor is counted once, room for growth included.

    Args:
        packed: Packed blocks: codes, scales and means.
        metadata: Channel scales, and a few bytes of bookkeeping per layer.
        residual: Dense tokens of compressed layers: the newest, and sinks.
        uncompressed: Layers that are not compressed (sliding, linear, skipped).
        bf16_equivalent: Bytes of a cache of the same tokens with 16-bit keys and values in all layers.
        by_device: Total bytes by device.
    """

    packed: int = 0
    metadata: int = 0
    residual: int = 0
    uncompressed: int = 0
    bf16_equivalent: int = 0
    by_device: dict[str, int] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """All numbers of bytes by name, without those by device."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "by_device"}

    @property
    def total(self) -> int:
        return self.packed + self.metadata + self.residual + self.uncompressed

    @property
    def ratio(self) -> float:
        """Quotient of `total` and `bf16_equivalent`; 0 for an empty cache."""
        return self.total / self.bf16_equivalent if self.bf16_equivalent else 0.0

    def __str__(self) -> str:
        *kinds, _ = self.sizes.items()
        parts = ", ".join(f"{name} {size / 2**20:.2f}" for name, size in kinds)
        held = f", held {self.ratio:.1%}" if self.ratio <= 1 else ""
        return f"{self.total / 2**20:.2f} MiB ({parts}); bf16 would be {self.bf16_equivalent / 2**20:.2f} MiB{held}"


def leaves_of(layer: Any, into: tuple[type, ...] = (dict, list)) -> dict[str, tuple[Any, Any, Any]]:
    """Map paths ("keys", "conv_states.0") to container, key and value, for all attributes of a layer, and what
    containers of the types `into` hold."""

    def walk(container: Any, prefix: str) -> Iterator[tuple[str, tuple[Any, Any, Any]]]:
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(value, into):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", (container, key, value)

    return dict(walk(vars(layer), ""))


def measure(layers: Iterable[Any], tokens: int | None = None) -> MemoryFootprint:
    """Measure the footprint of the layers of a cache. `tokens` replaces the length of compressed layers."""
    footprint = MemoryFootprint()
    seen: set[int] = set()
    for layer in layers:
        if hasattr(layer, "by_kind"):  # a compressed layer
            kinds, in_16_bits = layer.by_kind(), layer.bytes_in_16_bits(tokens)
        else:
            leaves = leaves_of(layer, (dict, list, tuple)).values()
            held = [value for _, _, value in leaves if isinstance(value, torch.Tensor)]
            kinds = {"uncompressed": held}
            in_16_bits = sum(2 * tensor.numel() for tensor in held if tensor.is_floating_point())
        footprint.bf16_equivalent += in_16_bits
        for kind, tensors in kinds.items():
            for tensor in tensors:
                device, size = str(tensor.device), tensor.untyped_storage().nbytes()
                if size and storage_id(tensor) not in seen:
                    seen.add(storage_id(tensor))
                    setattr(footprint, kind, getattr(footprint, kind) + size)
                    footprint.by_device[device] = footprint.by_device.get(device, 0) + size
    return footprint
