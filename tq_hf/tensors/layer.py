"""All tensors of one compressed layer, and the views of them that attention reads: tensors with counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from tq_kernels.format import BLOCK_TOKENS
from tq_kernels.layout import BlockLayout
from tq_kernels.types import ChannelScales, KeyValue, PackedBlocks, PendingToken

from ..config import TurboQuantConfig
from .residual import Residual


class RowKind(NamedTuple):
    """The shapes `[B, Hkv, 1, Dk]` and `[B, Hkv, 1, Dv]` of a token's keys and values, their dtype and device."""

    keys: tuple[int, ...]
    values: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(eq=False)
class LayerTensors:
    """The tensors of a layer. A store whose tensors are replaced (they grow, move, are copied) makes another object:
    nothing here changes. (Frozen, it would take three times as long to make.)

    Args:
        config: The configuration the blocks were encoded with.
        blocks: Packed blocks.
        sinks: Dense keys and values `[B, Hkv, s, D]`, `s` possibly 0.
        ring: The buffers of the residual, `[B, Hkv, capacity, D]` (see `tq_hf.tensors.residual`), possibly without its
            newest row.
    """

    config: TurboQuantConfig
    blocks: PackedBlocks
    sinks: KeyValue
    ring: KeyValue
    row: RowKind = field(init=False, repr=False)
    """Shapes, dtype and device of one token."""
    layout: BlockLayout = field(init=False, repr=False)
    """Sizes of a block."""
    launches: dict[str, Any] = field(init=False, repr=False, default_factory=dict)
    """A backend's launches for these tensors. They hold addresses, so they die with this object and no copy has them.
    (A weak dictionary in the backend would do, but Dynamo compiles anew whenever its length changes.)"""

    def __post_init__(self) -> None:
        keys, values = self.ring
        (batch, heads, _, key_dim), value_dim = keys.shape, values.shape[3]
        self.row = RowKind((batch, heads, 1, key_dim), (batch, heads, 1, value_dim), keys.dtype, keys.device)
        self.layout = self.blocks.layout

    def __reduce__(self) -> tuple[Any, ...]:
        # Without launches, which hold the addresses of these tensors.
        return LayerTensors, (self.config, self.blocks, self.sinks, self.ring)

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
        """These tensors with another residual."""
        return LayerTensors(self.config, self.blocks, self.sinks, ring)

    def dense_shapes(self, tokens: int) -> tuple[torch.Size, torch.Size]:
        """The shapes of so many keys and values, `[B, Hkv, tokens, Dk]` and `[B, Hkv, tokens, Dv]`."""
        (batch, heads, _, key_dim), value_dim = self.row.keys, self.row.values[3]
        return torch.Size((batch, heads, tokens, key_dim)), torch.Size((batch, heads, tokens, value_dim))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> LayerTensors:
        """The results of `function` on every tensor."""
        sinks, ring = ((function(keys), function(values)) for keys, values in (self.sinks, self.ring))
        return LayerTensors(self.config, self.blocks.map(function), sinks, ring)

    def by_kind(self) -> dict[str, list[torch.Tensor]]:
        """Every tensor, by the kind `memory_footprint` reports."""
        blocks = self.blocks
        return {
            "packed": [blocks.key_words, blocks.value_words],
            "metadata": [blocks.scales, blocks.key_means, *blocks.channel_scales],
            "residual": list(self.ring),
            "sinks": list(self.sinks),
        }

    def arguments(self) -> list[torch.Tensor]:
        """Every tensor in one list, as an operator of a graph takes them."""
        return [*self.sinks, *self.ring, *self.blocks.channel_scales, *self.blocks.tensors().values()]

    @classmethod
    def from_arguments(cls, config: TurboQuantConfig, tensors: Sequence[torch.Tensor]) -> LayerTensors:
        """The layer whose `arguments()` these are."""
        sink_keys, sink_values, ring_keys, ring_values, *channel_scales = tensors[:6]
        key_words, value_words, scales, key_means = tensors[6:]
        layout = config.layout(ring_keys.shape[3], ring_values.shape[3])
        blocks = PackedBlocks(layout, key_words, value_words, scales, key_means, ChannelScales(*channel_scales))
        return cls(config, blocks, (sink_keys, sink_values), (ring_keys, ring_values))


class StoreView(NamedTuple):
    """The tokens a query attends to, oldest first: sinks, packed blocks, residual, and the new tokens of a long call.

    Args:
        tensors: The tensors read.
        num_blocks: Number of packed blocks read, the first ones.
        num_residual: Number of residual rows read, those that follow the blocks; they end with the new tokens unless
            `new` holds those.
        past_length: Tokens cached before this call. Of a first call, 0, its own states are all there is to read, and
            `tensors` hold nothing yet.
        pending: The newest token, if it may not be in the residual's ring yet.
        new: Keys and values `[B, Hkv, S, D]` of this call when they were not copied into the residual, as the model
            made them.
    """

    tensors: LayerTensors
    num_blocks: int
    num_residual: int
    past_length: int
    pending: PendingToken | None = None
    new: KeyValue | None = None

    @property
    def residual(self) -> Residual:
        """The dense rows after the blocks."""
        first = self.num_blocks * self.tensors.layout.tokens
        return Residual(self.tensors.ring, first, self.num_residual, self.pending)

    @property
    def dense_parts(self) -> list[tuple[int, KeyValue]]:
        """The dense parts that hold tokens, each with the position of its first token."""
        if self.past_length == 0 and self.new is not None:
            return [(0, self.new)]
        sinks = self.tensors.sinks
        num_sinks = sinks[0].shape[2]
        parts = [(0, sinks)] if num_sinks else []
        after = num_sinks + self.num_blocks * self.tensors.layout.tokens
        parts += [(after + skipped, part) for skipped, part in self.residual.parts()]
        if self.new is not None:
            parts.append((after + self.num_residual, self.new))
        return parts

    @property
    def length(self) -> int:
        """All tokens attended to: past and new."""
        tensors, num_blocks, num_residual, past_length, _, new = self
        if past_length == 0 and new is not None:
            return new[0].shape[2]
        length = tensors.sinks[0].shape[2] + num_blocks * BLOCK_TOKENS + num_residual
        return length if new is None else length + new[0].shape[2]


class DeviceCounts(NamedTuple):
    """The counts of a preallocated store; `tq_hf.stores.preallocated` describes them."""

    state: torch.Tensor
    step_counts: torch.Tensor
    length: torch.Tensor


def check_room(tokens: int, held: int, max_cache_len: int) -> None:
    """Raise a `ValueError` if a preallocated cache that holds `held` tokens has no room for `tokens` more."""
    if held + tokens > max_cache_len:
        what = (
            f"Appending {tokens} tokens to the {held} in this cache exceeds its `max_cache_len` of {max_cache_len}."
            if held
            else f"The prompt has {tokens} tokens and `max_cache_len` is {max_cache_len}."
        )
        raise ValueError(f"{what} Make the cache with a larger `max_cache_len`.")


class StepView(NamedTuple):
    """The tokens a decode step of a preallocated store attends to: their counts are on the device.

    Args:
        tensors: The tensors read, which the store never replaces.
        counts: The store's, which hold what the step attends to once the newest token is appended.
        config_text: The configuration as an operator of a graph takes it.
        length: Tokens there is room for: the length of the dense states that stand for this view.
        num_held: Tokens it covers, if the host knows.
        pending: The newest token, if it is not appended yet: the step that reads it appends it in passing, and whoever
            else wants to know what the store holds appends it first (`tq_hf.stores.graph_ops.append_pending_token`).
    """

    tensors: LayerTensors
    counts: DeviceCounts
    config_text: str
    length: int
    num_held: int | None
    pending: PendingToken
