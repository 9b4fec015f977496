"""Whose the tokens of a step are, and where their sliding windows: what is the same in all sliding layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from ..tensors.pages import Sequences
from ..tensors.windows import LayerWindows

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


def plan_step(sequences: Sequences, total: int, windows: LayerWindows) -> WindowStep:
    """Where the windows of a step's requests are.

    Args:
        sequences: The requests; their tables list pages of `windows`.
        total: Tokens of the step, those of nobody included.
        windows: Any of the layers.
    """
    device = sequences.table.device
    if sequences.max_q == 1:
        token = torch.arange(total, dtype=torch.int32, device=device)
        request = torch.searchsorted(sequences.cu_q[1:], token, right=True)
        return WindowStep(_singles(None, request, sequences, windows), [])
    starts, lengths = sequences.cu_q.tolist(), sequences.cu_k.diff().tolist()
    table, singles, prompts = sequences.table.long(), [], []
    for i, length in enumerate(lengths):
        new = starts[i + 1] - starts[i]
        if new == 1:
            singles.append((starts[i], i))
        elif new:
            prompts.append(Prompt(slice(starts[i], starts[i + 1]), length - new, table[i]))
    if not singles:
        return WindowStep(None, prompts)
    tokens, requests = torch.tensor(singles, device=device).T
    return WindowStep(_singles(tokens, requests, sequences, windows), prompts)


def _singles(
    tokens: torch.Tensor | None, request: torch.Tensor, sequences: Sequences, windows: LayerWindows
) -> Singles:
    """The `request` `[N]` of each of the tokens; beyond the last it is none."""
    count = len(sequences.table)
    past = torch.where(request < count, sequences.cu_k.diff()[request.clamp(max=count - 1)] - 1, -1)
    return Singles(tokens, past.int(), sequences.table[request.clamp(max=count - 1)], windows)
