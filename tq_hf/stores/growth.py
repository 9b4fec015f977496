"""How much room a `GrowingStore` makes: as much as its tokens need and some to spare, or what was preallocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..config import TurboQuantConfig
from ..layout import BlockLayout
from ..tensors.residual import ring_capacity
from .checks import check_room

GROWTH = 1.125
"""Buffers grow by an eighth: appends stay amortised O(new tokens), and at most an eighth is held in reserve."""


class Growth(Protocol):
    """What a store asks before it makes room."""

    in_place: bool
    """Whether every row must be in its tensor when `append` returns."""

    def check(self, tokens: int, held: int) -> None:
        """Raise a `ValueError` unless so many more tokens may be held."""

    def residual_rows(self, config: TurboQuantConfig, rows: int) -> int:
        """Rows to make room for in a residual that holds `rows`."""

    def blocks(self, config: TurboQuantConfig, held: int, needed: int) -> int:
        """Blocks to make room for where `held` are and `needed` will be."""


@dataclass(frozen=True)
class Grow:
    """Grow geometrically, without bound."""

    in_place = False

    def check(self, tokens: int, held: int) -> None:
        """Anything goes."""

    def residual_rows(self, config: TurboQuantConfig, rows: int) -> int:
        """What decoding will need, at once where that is little."""
        most = config.residual_length + BlockLayout.tokens
        return ring_capacity(max(rows, min(most, int(rows * GROWTH) + BlockLayout.tokens)))

    def blocks(self, config: TurboQuantConfig, held: int, needed: int) -> int:
        """An exact fit for a prompt; room to spare once the cache is growing."""
        return needed if held == 0 else max(needed, int(held * GROWTH) + 1)


GROW = Grow()


@dataclass(frozen=True)
class Fixed:
    """Hold `max_cache_len` tokens, never more, in tensors that a preallocated store made.

    Args:
        max_cache_len: Tokens there is room for.
    """

    max_cache_len: int
    in_place = True

    def check(self, tokens: int, held: int) -> None:
        """Raise a `ValueError` for more than there is room for."""
        check_room(tokens, held, self.max_cache_len)

    def residual_rows(self, config: TurboQuantConfig, rows: int) -> int:
        """All that decoding will need. (A chunk may need more for as long as it is appended.)"""
        return ring_capacity(max(rows, min(config.residual_length + BlockLayout.tokens, self.max_cache_len)))

    def blocks(self, config: TurboQuantConfig, held: int, needed: int) -> int:
        """All there will ever be."""
        return max(needed, config.num_blocks(self.max_cache_len))
