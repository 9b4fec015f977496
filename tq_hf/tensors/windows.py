"""The keys and values of sliding-window layers of many requests: dense rows in pages of the same pool.

A request has room for its last `window` tokens. The token at position p is in row p % window, and takes the place of
the one that just slid out; row r is row `r % rows_per_page` of page `r // rows_per_page` of the request's table. Such a
page is as large as one or several pages of packed blocks (`window_page`), so that one pool gives out both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

LEAST_ROWS = 32
"""Rows that a page has at least, if the window has as many."""


def window_page(unit: int, row_bytes: int, window: int) -> tuple[int, int]:
    """Bytes and rows of a page of all sliding layers: the fewest multiples of `unit` that have room for `LEAST_ROWS`.

    Less than a row of a page is never used: a thirtieth of it at most.

    Args:
        unit: Bytes that every page is a multiple of.
        row_bytes: Bytes of a token's keys and values in all these layers.
        window: Tokens of a request that are held.
    """
    size = -(-min(window, LEAST_ROWS) * row_bytes // unit) * unit
    return size, min(window, size // row_bytes)


@dataclass(frozen=True, eq=False)
class LayerWindows:
    """One sliding layer's view of the pool.

    Args:
        rows: `[pages, 2, rows_per_page, Hkv, D]` in the model's dtype; keys at 0, values at 1. Page 0 is zero: nobody
            writes to it.
        window: Tokens that a query may attend to, its own included.
        trash: A page that nobody reads.
    """

    rows: torch.Tensor
    window: int
    trash: int

    @property
    def rows_per_page(self) -> int:
        """Tokens of a page."""
        return self.rows.shape[2]

    @property
    def pages(self) -> int:
        """Pages of a request whose window is full."""
        return -(-self.window // self.rows_per_page)

    def read(self, page: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the keys and values `[.., n, Hkv, D]` in rows `row` of pages `page`, `[.., n]` int64 each."""
        held = self.rows[page, :, row]
        return held[..., 0, :, :], held[..., 1, :, :]

    def write(self, page: torch.Tensor, row: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values `[n, Hkv, D]` to rows `row` of pages `page`, `[n]` int64 each."""
        self.rows[page, :, row] = torch.stack([keys, values], 1)


Place = tuple[torch.Tensor, torch.Tensor]
"""Pages and rows in them, int64."""


@dataclass(frozen=True, eq=False)
class Singles:
    """The requests of a step that have one new token, N of them.

    Args:
        tokens: `[N]` int64, which tokens of the step are theirs; `None` if all are.
        past: `[N]` int32, tokens held before; -1 for a token that pads the step and belongs to nobody.
        table: Their pages, `[N, at least as many as tokens are held in]` int32, contiguous.
        windows: Any of the layers.
    """

    tokens: torch.Tensor | None
    past: torch.Tensor
    table: torch.Tensor
    windows: LayerWindows

    @cached_property
    def exists(self) -> torch.Tensor:
        """`[N]`, whether a token is somebody's."""
        return self.past >= 0

    @cached_property
    def held(self) -> torch.Tensor:
        """`[N, window]`, which rows hold a token, the new one included."""
        return torch.arange(self.windows.window, device=self.past.device) <= self.past[:, None]

    @cached_property
    def written(self) -> Place:
        """Page and row `[N]` of the new token; of nobody's, a page that nobody reads."""
        rows = self.windows.rows_per_page
        new = self.past.clamp(min=0).long() % self.windows.window
        page = self.table.long().gather(1, new[:, None] // rows)[:, 0]
        return torch.where(self.exists, page, self.windows.trash), new % rows

    @cached_property
    def read(self) -> Place:
        """Pages and rows `[N, window]` of the tokens held; rows of zeros where there is none."""
        row, rows = torch.arange(self.windows.window, device=self.past.device), self.windows.rows_per_page
        page = torch.where(self.held, self.table.long()[:, row // rows], 0)
        return page, (row % rows).expand_as(page)


class Prompt(NamedTuple):
    """A request with several new tokens.

    Args:
        tokens: Its new tokens among all.
        past: Tokens before them.
        table: Its pages, `[at least as many as tokens are held in]` int64.
    """

    tokens: slice
    past: int
    table: torch.Tensor


class WindowStep(NamedTuple):
    """A step's requests."""

    singles: Singles | None
    prompts: list[Prompt]
