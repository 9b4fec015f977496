"""What attention reads in one call: a snapshot of a layer's store, in the order of the tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..config import TurboQuantConfig
from .blocks import PackedBlocks
from .window import DenseWindow, KeyValue, LateRow


class Buffers:
    """The tensors of a layer that its views read, and what a backend has worked out for them.

    They stay from step to step. A store whose tensors are replaced (they grow, are reordered, moved, copied) makes
    another object, so nothing that was worked out for the old ones is ever used for the new.

    Args:
        config: The configuration the blocks were encoded with.
        blocks: Packed blocks.
        sinks: Dense keys and values `[B, Hkv, s, D]`, `s` possibly 0.
        ring: The buffers of the window, possibly without its newest row.
    """

    __slots__ = ("blocks", "config", "prepared", "ring", "row_shapes", "sinks")

    def __init__(self, config: TurboQuantConfig, blocks: PackedBlocks, sinks: KeyValue, ring: KeyValue) -> None:
        self.config = config
        self.blocks = blocks
        self.sinks = sinks
        self.ring = ring
        (batch, heads, _, key_dim), value_dim = ring[0].shape, ring[1].shape[3]
        self.row_shapes = ((batch, heads, 1, key_dim), (batch, heads, 1, value_dim))
        """Shapes of one token's keys and values."""
        self.prepared: Any = None
        """Of the backend, which reads and writes it."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Without what was worked out: it knows the addresses of these tensors, not of their copies.
        return Buffers, (self.config, self.blocks, self.sinks, self.ring)


class StoreView(NamedTuple):
    """The tokens a query attends to, oldest first: sinks, packed blocks, window, and the new tokens of a long call.

    Args:
        buffers: The tensors read.
        num_blocks: Number of packed blocks read, the first ones.
        first: Number of the first window row read (see `tq_hf.tensors.window`).
        num_window: Number of window rows read; they end with the new tokens unless `new` holds those.
        past_length: Tokens cached before this call.
        late: The newest window row, if it may not be in its ring yet.
        new: Keys and values `[B, Hkv, S, D]` of this call when they were not copied into the window, as the model made
            them.
    """

    buffers: Buffers
    num_blocks: int
    first: int
    num_window: int
    past_length: int
    late: LateRow | None = None
    new: KeyValue | None = None

    @property
    def config(self) -> TurboQuantConfig:
        """The configuration the blocks were encoded with."""
        return self.buffers.config

    @property
    def blocks(self) -> PackedBlocks:
        """Packed blocks of which the first `num_blocks` are read."""
        return self.buffers.blocks

    @property
    def sinks(self) -> KeyValue:
        """Dense keys and values `[B, Hkv, s, D]`, `s` possibly 0."""
        return self.buffers.sinks

    @property
    def window(self) -> DenseWindow:
        """The dense rows after the blocks."""
        return DenseWindow.resumed(self.buffers.ring, self.first, self.num_window, self.late)

    @property
    def dense_parts(self) -> list[tuple[int, KeyValue]]:
        """The dense parts that hold tokens, each with the position of its first token."""
        parts = [(0, self.sinks)] if self.sinks[0].shape[2] else []
        after = self.sinks[0].shape[2] + self.num_blocks * self.blocks.layout.tokens
        parts += [(after + skipped, part) for skipped, part in self.window.parts()]
        if self.new is not None:
            parts.append((after + self.num_window, self.new))
        return parts

    @property
    def length(self) -> int:
        """All tokens attended to: past and new."""
        new = 0 if self.new is None else self.new[0].shape[2]
        packed = self.num_blocks * self.blocks.layout.tokens
        return self.sinks[0].shape[2] + packed + self.num_window + new

    def shaped(self, tokens: int) -> tuple[torch.Size, torch.Size]:
        """The shapes `[B, Hkv, tokens, Dk]` and `[B, Hkv, tokens, Dv]`."""
        (batch, heads, _, key_dim), value_dim = self.sinks[0].shape, self.sinks[1].shape[3]
        return torch.Size((batch, heads, tokens, key_dim)), torch.Size((batch, heads, tokens, value_dim))
