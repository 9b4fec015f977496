"""What attention reads in one call: a snapshot of a layer's store, in the order of the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .blocks import PackedBlocks
from .config import TurboQuantConfig
from .window import DenseWindow, KeyValue


@dataclass(frozen=True)
class StoreView:
    """The tokens a query attends to, oldest first: sinks, packed blocks, window, and the new tokens of a long call.

    Args:
        config: The configuration the blocks were encoded with.
        sinks: Dense keys and values `[B, Hkv, s, D]`, `s` possibly 0.
        blocks: Packed blocks of which the first `num_blocks` are read.
        num_blocks: Number of packed blocks read.
        window: The dense rows after them; they end with the new tokens unless `new` holds those.
        num_window: Number of rows of `window` that are read.
        new: Keys and values `[B, Hkv, S, D]` of this call when they were not copied into the window, as the model made
            them.
        past_length: Tokens cached before this call.
    """

    config: TurboQuantConfig
    sinks: KeyValue
    blocks: PackedBlocks
    num_blocks: int
    window: DenseWindow
    num_window: int
    new: KeyValue | None
    past_length: int

    @property
    def dense_parts(self) -> list[tuple[int, KeyValue]]:
        """The dense parts that hold tokens, each with the position of its first token."""
        parts = [(0, self.sinks)] if self.sinks[0].shape[2] else []
        after = self.sinks[0].shape[2] + self.num_blocks * self.blocks.layout.tokens
        parts += [(after + skipped, part) for skipped, part in self.window.parts(0, self.num_window)]
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
