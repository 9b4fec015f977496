"""All tensors of one compressed layer, and the views of them that attention reads: tensors with counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from tq_kernels.format import BLOCK_TOKENS, due_blocks
from tq_kernels.layout import BlockLayout
from tq_kernels.types import ChannelScales, KeyValue, PackedBlocks

from ..compat import outside_inference_mode
from ..config import TurboQuantConfig
from .residual import PendingToken, ring_slices, write_rows
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
        rows: Dense rows `[B, Hkv, ring + sink_tokens, Dk + Dv]` (see `tq_hf.tensors.residual`), possibly without the
            newest token.
        order: Order of the tokens of padded rows; `None` if no row is padded.
    """

    config: TurboQuantConfig
    blocks: PackedBlocks
    rows: torch.Tensor
    order: SinkOrder | None = None
    row: RowKind = field(init=False, repr=False)
    ring_rows: int = field(init=False, repr=False)
    layout: BlockLayout = field(init=False, repr=False)
    config_text: str = field(init=False, repr=False)
    launches: dict[str, Any] = field(init=False, repr=False, default_factory=dict)
    """A backend's launches for these tensors. They hold addresses, so they die with this object and no copy has them.
    (A weak dictionary in the backend would do, but Dynamo compiles anew whenever its length changes.)"""

    def __post_init__(self) -> None:
        (batch, heads, count, _), self.layout = self.rows.shape, self.blocks.layout
        self.ring_rows = count - self.config.sink_tokens
        sizes = (batch, heads, 1)
        shapes = (*sizes, self.layout.key_dim), (*sizes, self.layout.value_dim)
        self.row = RowKind(*shapes, self.rows.dtype, self.rows.device)
        self.config_text = config_text(self.config)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without launches, which hold the addresses of these tensors.
        return LayerTensors, (self.config, self.blocks, self.rows, self.order)

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return self.row.keys[0]

    def states(self, rows: slice) -> KeyValue:
        """Views of the keys and values in some rows."""
        keys, values = self.rows[:, :, rows].split([self.layout.key_dim, self.layout.value_dim], 3)
        return keys, values

    def sinks(self, count: int) -> KeyValue:
        """Views of the first `count` sinks."""
        return self.states(slice(self.ring_rows, self.ring_rows + count))

    def ring_parts(self, first: int, count: int) -> Iterator[tuple[int, KeyValue]]:
        """Views of numbers `first` to `first + count` of the ring, oldest first, each with the number of rows before
        it."""
        for at, part in ring_slices(self.ring_rows, first, count):
            yield part.start, self.states(at)

    @outside_inference_mode
    def write_token(self, token: PendingToken, counts: Counts) -> None:
        """Write a pending token, the last of `counts`, to its row, unless it is there."""
        if token.states is not None:
            row = (counts.blocks * BLOCK_TOKENS + counts.residual - 1) % self.ring_rows
            write_rows(self.rows, slice(row, row + 1), token.states, slice(None))
            token.states = None

    def copy_rows(self, source: LayerTensors, first: int, count: int) -> None:
        """Copy the sinks of other tensors, and numbers `first` to `first + count` of their ring, of any size."""
        self.rows[:, :, self.ring_rows :] = source.rows[:, :, source.ring_rows :]
        for at, part in ring_slices(source.ring_rows, first, count):
            for to, some in ring_slices(self.ring_rows, first + part.start, part.stop - part.start):
                self.rows[:, :, to] = source.rows[:, :, at][:, :, some]

    @outside_inference_mode
    def with_ring(self, ring: int, first: int, count: int) -> LayerTensors:
        """These tensors with a ring of `ring` rows: copies of the sinks, and of numbers `first` to `first + count`."""
        batch, heads, _, dim = self.rows.shape
        rows = self.rows.new_empty(batch, heads, ring + self.config.sink_tokens, dim)
        tensors = LayerTensors(self.config, self.blocks, rows, self.order)
        tensors.copy_rows(self, first, count)
        return tensors

    def with_order(self, order: SinkOrder | None) -> LayerTensors:
        """These tensors with tokens in another order. Launches stay: they hold the same addresses."""
        if order is self.order:
            return self
        tensors = LayerTensors(self.config, self.blocks, self.rows, order)
        tensors.launches = self.launches
        return tensors

    def dense_shapes(self, tokens: int) -> tuple[torch.Size, torch.Size]:
        """Shapes of keys `[B, Hkv, tokens, Dk]` and values `[B, Hkv, tokens, Dv]`."""
        (batch, heads, _, key_dim), value_dim = self.row.keys, self.row.values[3]
        return torch.Size((batch, heads, tokens, key_dim)), torch.Size((batch, heads, tokens, value_dim))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> LayerTensors:
        """The results of `function` on every tensor."""
        order = None if self.order is None else self.order.map(function)
        return LayerTensors(self.config, self.blocks.map(function), function(self.rows), order)

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
            states = order.exchanged(self.sinks(counts.sinks), states, past)
        return states, order, order.swapped(real, 1)[:, past:]

    def by_kind(self) -> dict[str, list[torch.Tensor]]:
        """Every tensor, by the kind `memory_footprint` reports."""
        blocks, order = self.blocks, [] if self.order is None else [self.order.index]
        return {"packed": [blocks.data], "metadata": [*blocks.channel_scales, *order], "residual": [self.rows]}

    def arguments(self) -> list[torch.Tensor]:
        """Every tensor in one list, as an operator of a graph takes them."""
        return [self.rows, *self.blocks.channel_scales, self.blocks.data]

    @classmethod
    def from_arguments(cls, text: str, tensors: Sequence[torch.Tensor]) -> LayerTensors:
        """The layer that has this `config_text` and these `arguments()`."""
        config = config_from(text)
        rows, keys, values, data = tensors
        layout = config.layout(keys.shape[2], values.shape[2])
        return cls(config, PackedBlocks(layout, data, ChannelScales(keys, values)), rows)


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


@lru_cache(maxsize=1024)
def counts_after(held: Counts, tokens: int, sink_tokens: int, residual_length: int) -> Counts:
    """Counts once `tokens` more are appended: the first fill the sinks; blocks that become due are pending."""
    sinks, blocks, rows, _ = held
    to_sinks = min(tokens, sink_tokens - sinks)
    due = due_blocks(held.tokens + tokens, sink_tokens, residual_length) - blocks
    return Counts(sinks + to_sinks, blocks, rows + tokens - to_sinks, max(0, due))


class DeviceCounts(NamedTuple):
    """Counts of a preallocated store, on the device. They change from step to step, so that a captured graph serves
    every length.

    Args:
        held: `[5, 4]` int32: `Counts`, and the number of programs of the append that are done, which the last of them
            sets back to 0. Only column 0 is used: entries lie 16 bytes apart, which is Triton's alignment.
        length: `[]` int64: tokens held, as `get_seq_length` returns it.
    """

    held: torch.Tensor
    length: torch.Tensor

    @classmethod
    def allocate(cls, device: torch.device, filled: bool = True) -> DeviceCounts:
        """Counts of nothing, or memory that is not filled."""
        make = torch.zeros if filled else torch.empty
        return cls(make(5, 4, dtype=torch.int32, device=device), make((), dtype=torch.int64, device=device))

    def read(self) -> Counts:
        """The counts on the host, which waits for the device."""
        return Counts(*self.held[:4, 0].tolist())

    def write(self, counts: Counts) -> None:
        """Write counts from the host, between steps."""
        self.held[:, 0] = torch.tensor((*counts, 0), dtype=torch.int32, device="cpu")
        self.length.fill_(counts.tokens)


class View(NamedTuple):
    """The tokens a query attends to, oldest first: sinks, packed blocks, residual, and the new tokens of a long call.

    Args:
        tensors: The tensors read.
        counts: Counts on the host; the residual rows end with the new tokens, unless `new` holds those. `None` for a
            first call, which reads its own states, `new`. In a decode step of a preallocated store the counts are on
            the device, and hold what the step attends to once the newest tokens are appended.
        length: Number of rows of this view's dense states. With counts on the host: past and new tokens. With counts on
            the device: the capacity.
        pending: The newest token (in a decode step of a preallocated store, up to 16), if it may not be in the
            residual's ring yet. The attention of this view writes it; all other readers write it first.
        new: Keys and values `[B, Hkv, S, D]` of this call when they were not copied into the residual, as the model
            made them.
        past_length: In a decode step with counts on the device, the number of tokens before it; `None` if the device
            alone knows.
    """

    tensors: LayerTensors
    counts: Counts | DeviceCounts | None
    length: int
    pending: PendingToken | None = None
    new: KeyValue | None = None
    past_length: int | None = None

    @property
    def host_counts(self) -> Counts:
        """Counts on the host, those of nothing for a first call. The view must not be of a decode step with counts on
        the device."""
        assert not isinstance(self.counts, DeviceCounts)
        return self.counts or NOTHING

    def written_rows(self) -> torch.Tensor:
        """Write the pending token, unless that is done. Returns the dense rows, which then are complete."""
        if self.pending is not None:
            self.tensors.write_token(self.pending, self.host_counts)
        return self.tensors.rows

    def dense_parts(self) -> list[tuple[int, KeyValue]]:
        """The dense parts that hold tokens, each with the position of its first token. Writes the pending token."""
        self.written_rows()
        sinks, blocks, rows, _ = self.host_counts
        parts = [(0, self.tensors.sinks(sinks))] if sinks else []
        first = blocks * BLOCK_TOKENS
        after = sinks + first
        parts += [(after + skipped, part) for skipped, part in self.tensors.ring_parts(first, rows)]
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
