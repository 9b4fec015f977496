"""All tensors of one compressed layer, and the views of them that attention reads: tensors with counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from tq_kernels.format import BLOCK_TOKENS
from tq_kernels.layout import BlockLayout
from tq_kernels.types import ChannelScales, KeyValue, PackedBlocks

from ..compat import outside_inference_mode
from ..config import TurboQuantConfig
from .residual import PendingToken, ring_parts, write_token
from .sinks import Padding, SinkOrder


@lru_cache
def config_text(config: TurboQuantConfig) -> str:
    """A configuration as text: what a graph can hold, in any process. Equal configurations have equal texts."""
    return json.dumps(asdict(config), sort_keys=True)


@lru_cache
def config_from(text: str) -> TurboQuantConfig:
    """The configuration of a text."""
    return TurboQuantConfig(**json.loads(text))


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
        order: Order of the tokens of padded rows; `None` if no row is padded.
    """

    config: TurboQuantConfig
    blocks: PackedBlocks
    sinks: KeyValue
    ring: KeyValue
    order: SinkOrder | None = None
    row: RowKind = field(init=False, repr=False)
    """Shapes, dtype and device of one token."""
    ring_rows: int = field(init=False, repr=False)
    """Number of rows of the ring."""
    layout: BlockLayout = field(init=False, repr=False)
    """Sizes of a block."""
    config_text: str = field(init=False, repr=False)
    """The configuration as an operator of a graph takes it."""
    launches: dict[str, Any] = field(init=False, repr=False, default_factory=dict)
    """A backend's launches for these tensors. They hold addresses, so they die with this object and no copy has them.
    (A weak dictionary in the backend would do, but Dynamo compiles anew whenever its length changes.)"""

    def __post_init__(self) -> None:
        keys, values = self.ring
        (batch, heads, self.ring_rows, key_dim), value_dim = keys.shape, values.shape[3]
        self.row = RowKind((batch, heads, 1, key_dim), (batch, heads, 1, value_dim), keys.dtype, keys.device)
        self.layout = self.blocks.layout
        self.config_text = config_text(self.config)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without launches, which hold the addresses of these tensors.
        return LayerTensors, (self.config, self.blocks, self.sinks, self.ring, self.order)

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return self.row.keys[0]

    def with_sinks(self, count: int) -> LayerTensors:
        """These tensors with views of the first `count` sink rows."""
        keys, values = self.sinks
        if count == keys.shape[2]:
            return self
        return LayerTensors(self.config, self.blocks, (keys[:, :, :count], values[:, :, :count]), self.ring, self.order)

    def with_blocks(self, blocks: PackedBlocks) -> LayerTensors:
        """These tensors with other blocks."""
        return LayerTensors(self.config, blocks, self.sinks, self.ring, self.order)

    def with_ring(self, ring: KeyValue) -> LayerTensors:
        """These tensors with another residual."""
        if ring is self.ring:
            return self
        return LayerTensors(self.config, self.blocks, self.sinks, ring, self.order)

    def with_order(self, order: SinkOrder | None) -> LayerTensors:
        """These tensors with tokens in another order. Launches stay: they hold the same addresses."""
        if order is self.order:
            return self
        tensors = LayerTensors(self.config, self.blocks, self.sinks, self.ring, order)
        tensors.launches = self.launches
        return tensors

    def dense_shapes(self, tokens: int) -> tuple[torch.Size, torch.Size]:
        """Shapes of keys `[B, Hkv, tokens, Dk]` and values `[B, Hkv, tokens, Dv]`."""
        (batch, heads, _, key_dim), value_dim = self.row.keys, self.row.values[3]
        return torch.Size((batch, heads, tokens, key_dim)), torch.Size((batch, heads, tokens, value_dim))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> LayerTensors:
        """The results of `function` on every tensor."""
        sinks, ring = ((function(keys), function(values)) for keys, values in (self.sinks, self.ring))
        order = None if self.order is None else self.order.map(function)
        return LayerTensors(self.config, self.blocks.map(function), sinks, ring, order)

    @outside_inference_mode
    def exchanged(
        self, states: KeyValue, counts: Counts, padding: Padding
    ) -> tuple[KeyValue, SinkOrder | None, torch.Tensor | None]:
        """Let real tokens take the places of padding among the sinks, which are written in place, and among new
        `states`, keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]` after the tokens of `counts`.

        Returns:
            The states in the order of the store; that order; which of them are not padding, `[B, S]` bool, `None` if
            unknown.
        """
        held, past, sinks, device = self.order, counts.tokens, self.config.sink_tokens, states[0].device
        length = past + states[0].shape[2]
        if padding.mask.shape[0] != self.batch_size or padding.mask.shape[1] < length:
            return states, held, None
        order, real = held, padding.mask[:, :length].to(device)
        if 0 < sinks < length:
            order = padding.order(held, past, length, sinks, device)
        if order is None:
            return states, None, real[:, past:]
        if order is not held:
            states = order.exchanged(self.with_sinks(counts.sinks).sinks, states, past)
        return states, order, order.swapped(real, 1)[:, past:]

    def by_kind(self) -> dict[str, list[torch.Tensor]]:
        """Every tensor, by the kind `memory_footprint` reports."""
        blocks, order = self.blocks, self._index()
        return {
            "packed": [blocks.data],
            "metadata": [*blocks.channel_scales, *order],
            "residual": list(self.ring),
            "sinks": list(self.sinks),
        }

    def _index(self) -> list[torch.Tensor]:
        return [] if self.order is None else [self.order.index]

    def all(self) -> list[torch.Tensor]:
        """Every tensor in one list."""
        return self.arguments() + self._index()

    def arguments(self) -> list[torch.Tensor]:
        """Every tensor in one list, as an operator of a graph takes them."""
        return [*self.sinks, *self.ring, *self.blocks.channel_scales, self.blocks.data]

    @classmethod
    def from_arguments(cls, text: str, tensors: Sequence[torch.Tensor]) -> LayerTensors:
        """The layer that has this `config_text` and these `arguments()`."""
        config = config_from(text)
        sink_keys, sink_values, ring_keys, ring_values, *channel_scales, data = tensors
        layout = config.layout(ring_keys.shape[3], ring_values.shape[3])
        blocks = PackedBlocks(layout, data, ChannelScales(*channel_scales))
        return cls(config, blocks, (sink_keys, sink_values), (ring_keys, ring_values))


class Counts(NamedTuple):
    """Numbers of sink tokens, packed blocks, residual rows, and packed blocks that still have rows in the residual."""

    sinks: int
    blocks: int
    residual: int
    pending: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.sinks + self.blocks * BLOCK_TOKENS + self.residual

    def without_encoded_rows(self) -> Counts:
        """Counts once the dense rows of pending blocks are dropped: their tokens are only packed from then on."""
        sinks, blocks, rows, encoded = self
        return Counts(sinks, blocks + encoded, rows - encoded * BLOCK_TOKENS) if encoded else self


NOTHING = Counts(0, 0, 0)


class DeviceCounts(NamedTuple):
    """Counts of a preallocated store, on the device. They change from step to step, so that a captured graph serves
    every length.

    Args:
        state: `[4]` int32: `Counts` between calls.
        step_counts: `[6, 4]` int32, numbers for the last decode step: sinks, blocks, residual rows, slot of the first
            residual row; the blocks that became due in it; and the number of programs of the append that are done,
            which the last of them sets back to 0. Only column 0 is used: entries lie 16 bytes apart, which is Triton's
            alignment.
        length: `[]` int64: tokens held, as `get_seq_length` returns it.
    """

    state: torch.Tensor
    step_counts: torch.Tensor
    length: torch.Tensor

    @classmethod
    def allocate(cls, device: torch.device, filled: bool = True) -> DeviceCounts:
        """Counts of nothing, or memory that is not filled."""
        make = torch.zeros if filled else torch.empty
        state, step_counts = (make(*size, dtype=torch.int32, device=device) for size in ((4,), (6, 4)))
        return cls(state, step_counts, make((), dtype=torch.int64, device=device))


class View(NamedTuple):
    """The tokens a query attends to, oldest first: sinks, packed blocks, residual, and the new tokens of a long call.

    Args:
        tensors: The tensors read.
        counts: Counts on the host; the residual rows end with the new tokens, unless `new` holds those. `None` for a
            first call, which reads its own states, `new`. In a decode step of a preallocated store the counts are on
            the device, and hold what the step attends to once the newest tokens are appended.
        length: Number of rows of this view's dense states. With counts on the host: past and new tokens. With counts on
            the device: the capacity.
        past_length: Number of tokens cached before this call; `None` if the device alone knows.
        pending: The newest token (in a decode step of a preallocated store, up to 16), if it may not be in the
            residual's ring yet. The attention of this view writes it; all other readers write it first.
        new: Keys and values `[B, Hkv, S, D]` of this call when they were not copied into the residual, as the model
            made them.
    """

    tensors: LayerTensors
    counts: Counts | DeviceCounts | None
    length: int
    past_length: int | None
    pending: PendingToken | None = None
    new: KeyValue | None = None

    @property
    def host_counts(self) -> Counts:
        """Counts on the host, those of nothing for a first call. The view must not be of a decode step with counts on
        the device."""
        assert not isinstance(self.counts, DeviceCounts)
        return self.counts or NOTHING

    @property
    def num_blocks(self) -> int:
        """Number of packed blocks read, the first ones. Counts are on the host."""
        return self.host_counts.blocks

    def written_ring(self) -> KeyValue:
        """Write the pending token, unless that is done. Returns the ring, which then has every row."""
        if self.pending is not None:
            write_token(self.pending, self.tensors.ring)
        return self.tensors.ring

    def dense_parts(self) -> list[tuple[int, KeyValue]]:
        """The dense parts that hold tokens, each with the position of its first token. Writes the pending token."""
        if self.counts is None:
            assert self.new is not None
            return [(0, self.new)]
        _, blocks, rows, _ = self.host_counts
        sinks = self.tensors.sinks
        num_sinks = sinks[0].shape[2]
        parts = [(0, sinks)] if num_sinks else []
        first = blocks * BLOCK_TOKENS
        after = num_sinks + first
        parts += [(after + skipped, part) for skipped, part in ring_parts(self.written_ring(), first, rows)]
        if self.new is not None:
            parts.append((after + rows, self.new))
        return parts


def check_room(tokens: int, held: int, max_cache_len: int) -> None:
    """Raise a `ValueError` if a preallocated cache that holds `held` tokens has no room for `tokens` more."""
    if held + tokens > max_cache_len:
        what = (
            f"Appending {tokens} tokens to the {held} in this cache exceeds its `max_cache_len` of {max_cache_len}."
            if held
            else f"The prompt has {tokens} tokens and `max_cache_len` is {max_cache_len}."
        )
        raise ValueError(f"{what} Make the cache with a larger `max_cache_len`.")
