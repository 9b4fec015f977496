"""Sizes and shapes of a packed block: the one place where bytes are counted.

A block holds the keys and values of `BlockLayout.tokens` = 128 consecutive tokens of one KV head:

    key words    [key_words]    int32    rotated key codes, bit layout in `tq_hf.codec.packing`, and behind them loud
                                         channels, a byte each
    value words  [value_words]  int32    rotated value codes
    scales       [128]          int32    per token: fp16 key scale (low half), fp16 value scale (high half)
    key means    [mean_size]    fp16     rotated mean of the block's keys; means of loud channels, and their units

The parts lie one behind the other, in this order. A *slot* is a token's share of a block: codes and scales. Means,
sinks and residual are counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from .format import BLOCK_TOKENS, code_of, padded_dim


@dataclass(frozen=True)
class BlockLayout:
    """Sizes of the packed blocks of one layer, per KV head.

    Args:
        key_dim: Channels of a key head.
        value_dim: Channels of a value head.
        key_bits: Bits per key channel.
        value_bits: Bits per value channel.
        loud: Number of loud channels of a key head, a power of two of four or more, or 0. They are FP8 beside the codes
            (`tq_hf.codec.balance`).
    """

    tokens: ClassVar[int] = BLOCK_TOKENS

    key_dim: int
    value_dim: int
    key_bits: int
    value_bits: int
    loud: int = 0

    def __post_init__(self) -> None:
        if (fewest := min(self.key_dim, self.value_dim)) < 1:
            raise ValueError(f"A head of {fewest} channels cannot be compressed; `head_dim` must be 1 or more.")
        for name in ("key_bits", "value_bits"):
            code_of(getattr(self, name), name)

    @property
    def bits(self) -> tuple[int, int]:
        """Bits of a channel of keys and values."""
        return self.key_bits, self.value_bits

    @cached_property
    def key_dim_padded(self) -> int:
        """Channels of a stored key."""
        return padded_dim(self.key_dim)

    @cached_property
    def value_dim_padded(self) -> int:
        """Channels of a stored value."""
        return padded_dim(self.value_dim)

    @cached_property
    def loud_at(self) -> int:
        """int32 words of a block before its loud channels."""
        return self.tokens * self.key_dim_padded * self.key_bits // 32

    @cached_property
    def key_words(self) -> int:
        """int32 words of keys in a block: codes and loud channels."""
        return self.loud_at + self.tokens * self.loud * 8 // 32

    @cached_property
    def value_words(self) -> int:
        """int32 words of value codes in a block."""
        return self.tokens * self.value_dim_padded * self.value_bits // 32

    @cached_property
    def scales_at(self) -> int:
        """int32 words of a block before its scales."""
        return self.key_words + self.value_words

    @cached_property
    def means_at(self) -> int:
        """int32 words of a block before its key means."""
        return self.scales_at + self.tokens

    @cached_property
    def block_words(self) -> int:
        """int32 words of a block."""
        return self.block_bytes // 4

    @property
    def slot_bytes(self) -> int:
        """Packed bytes per token: codes of its key and value, its loud channels, and two fp16 scales."""
        return 4 * (self.key_words + self.value_words) // self.tokens + 4

    @property
    def mean_size(self) -> int:
        """Numbers of the key means of a block."""
        return self.key_dim_padded + 2 * self.loud

    @property
    def mean_bytes(self) -> int:
        """Bytes of the key means of a block."""
        return 2 * self.mean_size

    @property
    def block_bytes(self) -> int:
        """All bytes of a block: its slots and its key means."""
        return self.tokens * self.slot_bytes + self.mean_bytes

    @property
    def dense_bytes(self) -> int:
        """Bytes of a token's key and value in a 16-bit cache."""
        return 2 * (self.key_dim + self.value_dim)

    @property
    def compression_ratio(self) -> float:
        """Bytes of a 16-bit cache over the bytes of a packed block, its means included."""
        return self.tokens * self.dense_bytes / self.block_bytes
