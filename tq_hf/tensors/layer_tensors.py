"""All tensors of one compressed layer, and what can be said of them without knowing how many tokens they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..config import TurboQuantConfig
from ..layout import BlockLayout
from .blocks import PackedBlocks
from .factors import Factors
from .window import KeyValue


class RowKind(NamedTuple):
    """What one token's keys and values are like: shapes `[B, Hkv, 1, Dk]` and `[B, Hkv, 1, Dv]`, dtype and device."""

    keys: tuple[int, ...]
    values: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def dense_shapes(row: RowKind, tokens: int) -> tuple[torch.Size, torch.Size]:
    """The shapes `[B, Hkv, tokens, Dk]` and `[B, Hkv, tokens, Dv]`."""
    (batch, heads, _, key_dim), value_dim = row.keys, row.values[3]
    return torch.Size((batch, heads, tokens, key_dim)), torch.Size((batch, heads, tokens, value_dim))


@dataclass(frozen=True, eq=False)
class LayerTensors:
    """The tensors of a layer. A store whose tensors are replaced (they grow, move, are copied) makes another object.

    Args:
        config: The configuration the blocks were encoded with.
        blocks: Packed blocks.
        sinks: Dense keys and values `[B, Hkv, s, D]`, `s` possibly 0.
        ring: The buffers of the window, `[B, Hkv, capacity, D]` (see `tq_hf.tensors.window`), possibly without its
            newest row.
    """

    config: TurboQuantConfig
    blocks: PackedBlocks
    sinks: KeyValue
    ring: KeyValue
    row: RowKind = field(init=False, repr=False)
    """What one token's keys and values are like."""
    decoder: Any = field(init=False, repr=False, default=None)
    """What a backend has worked out for these tensors. It knows their addresses, so it dies with this object."""
    appender: Any = field(init=False, repr=False, default=None)
    """Likewise, for a preallocated store's appends."""
    reorderer: Any = field(init=False, repr=False, default=None)
    """Likewise, for sequences that change places."""

    def __post_init__(self) -> None:
        keys, values = self.ring
        (batch, heads, _, key_dim), value_dim = keys.shape, values.shape[3]
        row = RowKind((batch, heads, 1, key_dim), (batch, heads, 1, value_dim), keys.dtype, keys.device)
        object.__setattr__(self, "row", row)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without what a backend has worked out: it knows the addresses of these tensors, not of their copies.
        return LayerTensors, (self.config, self.blocks, self.sinks, self.ring)

    def keep(self, **slots: Any) -> None:
        """Fill slots that a backend may write: `decoder`, `appender`, `reorderer`."""
        for name, made in slots.items():
            object.__setattr__(self, name, made)

    @property
    def layout(self) -> BlockLayout:
        """Sizes of a block."""
        return self.blocks.layout

    @property
    def batch_size(self) -> int:
        """Sequences held."""
        return self.row.keys[0]

    def with_sinks(self, count: int) -> LayerTensors:
        """These tensors with views of the first `count` sink rows."""
        keys, values = self.sinks
        if count == keys.shape[2]:
            return self
        return LayerTensors(self.config, self.blocks, (keys[:, :, :count], values[:, :, :count]), self.ring)

    def with_blocks(self, blocks: PackedBlocks) -> LayerTensors:
        """These tensors with other blocks."""
        return LayerTensors(self.config, blocks, self.sinks, self.ring)

    def with_ring(self, ring: KeyValue) -> LayerTensors:
        """These tensors with another window."""
        return LayerTensors(self.config, self.blocks, self.sinks, ring)

    def dense_shapes(self, tokens: int) -> tuple[torch.Size, torch.Size]:
        """The shapes of so many keys and values, `[B, Hkv, tokens, D]`."""
        return dense_shapes(self.row, tokens)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> LayerTensors:
        """The results of `function` on every tensor."""
        sinks, ring = ((function(keys), function(values)) for keys, values in (self.sinks, self.ring))
        return LayerTensors(self.config, self.blocks.map(function), sinks, ring)

    def by_kind(self) -> dict[str, list[torch.Tensor]]:
        """Every tensor, by the kind `memory_footprint` reports."""
        blocks = self.blocks
        means = [] if blocks.key_means is None else [blocks.key_means]
        return {
            "packed": [blocks.key_words, blocks.value_words],
            "metadata": [blocks.scalars, *means, *blocks.factors],
            "window": list(self.ring),
            "sinks": list(self.sinks),
        }

    def arguments(self) -> list[torch.Tensor]:
        """Every tensor in one list, as an operator of a graph takes them."""
        return [*self.sinks, *self.ring, *self.blocks.factors, *self.blocks.tensors().values()]

    @classmethod
    def from_arguments(cls, config: TurboQuantConfig, tensors: Sequence[torch.Tensor]) -> LayerTensors:
        """The layer whose `arguments()` these are."""
        sink_keys, sink_values, ring_keys, ring_values, *factors = tensors[:6]
        key_words, value_words, scalars, *means = tensors[6:]
        layout = config.layout(ring_keys.shape[3], ring_values.shape[3])
        means_or_none = means[0] if means else None
        blocks = PackedBlocks(layout, key_words, value_words, scalars, means_or_none, Factors(*factors))
        return cls(config, blocks, (sink_keys, sink_values), (ring_keys, ring_values))
