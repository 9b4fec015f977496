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
        window: Dense keys and values `[B, Hkv, w, D]`, `w` possibly 0; ends with the new tokens unless `new` holds
            them.
        new: Keys and values `[B, Hkv, S, D]` of this call when they were not copied into the window, as the model
            made them.
        past_length: Tokens cached before this call.
    """

    config: TurboQuantConfig
    sinks: KeyValue
    blocks: PackedBlocks
    num_blocks: int
    window: KeyValue
    new: KeyValue | None
    past_length: int

    @property
    def dense_parts(self) -> list[tuple[int, KeyValue]]:
        """The dense parts that hold tokens, each with the position of its first token."""
        sinks, packed = self.sinks[0].shape[2], self.num_blocks * self.blocks.layout.tokens
        window = self.window[0].shape[2]
        parts = [(0, self.sinks), (sinks + packed, self.window)]
        if self.new is not None:
            parts.append((sinks + packed + window, self.new))
        return [(start, part) for start, part in parts if part[0].shape[2] > 0]

    @property
    def length(self) -> int:
        """All tokens attended to: past and new."""
        dense = sum(keys.shape[2] for _, (keys, _) in self.dense_parts)
        return dense + self.num_blocks * self.blocks.layout.tokens
