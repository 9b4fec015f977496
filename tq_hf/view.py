"""What attention reads in one call: a snapshot of a layer's store, in the order of the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .blocks import PackedBlocks
from .config import TurboQuantConfig

KeyValue = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class StoreView:
    """The tokens a query attends to, oldest first: sinks, packed blocks, dense window, and the new tokens of a long
    call.

    Args:
        config: The configuration the blocks were encoded with.
        sinks: Dense keys and values `[B, Hkv, s, D]`, `s` possibly 0.
        blocks: Packed blocks of which the first `num_blocks` are read.
        num_blocks: Number of packed blocks read.
        window_buffer: Dense keys and values `[B, Hkv, capacity, D]`, of which the first `num_window` rows are read; they
            end with the new tokens unless `new` holds them.
        num_window: Number of window rows read.
        new: Keys and values `[B, Hkv, S, D]` of this call when they were not copied into the window, as the model
            made them.
        past_length: Tokens cached before this call.
    """

    config: TurboQuantConfig
    sinks: KeyValue
    blocks: PackedBlocks
    num_blocks: int
    window_buffer: KeyValue
    num_window: int
    new: KeyValue | None
    past_length: int

    @property
    def window(self) -> KeyValue:
        """The window rows read, `[B, Hkv, num_window, D]`."""
        return self.window_buffer[0][:, :, : self.num_window], self.window_buffer[1][:, :, : self.num_window]

    @property
    def dense_parts(self) -> list[tuple[int, KeyValue]]:
        """The dense parts that hold tokens, each with the position of its first token."""
        sinks, packed = self.sinks[0].shape[2], self.num_blocks * self.blocks.layout.tokens
        parts = [(0, self.sinks), (sinks + packed, self.window)]
        if self.new is not None:
            parts.append((sinks + packed + self.num_window, self.new))
        return [(start, part) for start, part in parts if part[0].shape[2] > 0]

    @property
    def length(self) -> int:
        """All tokens attended to: past and new."""
        new = 0 if self.new is None else self.new[0].shape[2]
        packed = self.num_blocks * self.blocks.layout.tokens
        return self.sinks[0].shape[2] + packed + self.num_window + new
