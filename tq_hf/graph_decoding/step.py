"""A decode step that is captured once: its tensors, which stay where they are, and what the host reads of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

Masks = torch.Tensor | dict[str, torch.Tensor | None] | None


@dataclass
class StepTensors:
    """The tensors of a step, and the graph that works on them.

    Args:
        key: What the graph depends on (model, batch, how tokens are chosen); another key needs another graph.
        token: `[B, 1]` int64, the newest token of each sequence, not cached yet.
        positions: Position ids `[..., B, 1]` of `token`, or `None` where the model counts itself.
        masks: What the model is given, `[B, 1, 1, max_cache_len]` each, of sliding layers as wide as their window;
            bool, or float and added to logits.
        column: `[1]` int64, the place of `token` among the tokens cached: its column in the masks of full attention.
        constants: Further inputs that are the same at every step.
        history: `[B, length]` int64, prompt and answer.
        at: `[1]` int64, where the next token goes in `history`.
        unfinished: `[B]` bool.
        logits: `[B, vocabulary]` float32 of the last step.
        scores: The same after the processors.
    """

    key: tuple[Any, ...]
    token: torch.Tensor
    positions: torch.Tensor | None
    masks: Masks
    column: torch.Tensor
    constants: dict[str, Any]
    history: torch.Tensor
    at: torch.Tensor
    unfinished: torch.Tensor
    logits: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    graph: torch.cuda.CUDAGraph | None = None
    warm: int = 0


def mask_tensors(masks: Masks) -> list[torch.Tensor]:
    """The masks as a list."""
    every = masks.values() if isinstance(masks, dict) else [masks]
    return [mask for mask in every if mask is not None]


def map_masks(function: Callable[[torch.Tensor], torch.Tensor], masks: Masks) -> Masks:
    """The results of `function` on every mask."""
    if isinstance(masks, dict):
        return {name: None if mask is None else function(mask) for name, mask in masks.items()}
    return None if masks is None else function(masks)


def show_newest(mask: torch.Tensor, column: torch.Tensor, windows: set[int]) -> None:
    """Let a step's mask show one token more.

    Args:
        mask: `[B, 1, 1, columns]` bool, or float and added to logits; written in place.
        column: `[1]` int64, the new token's place among the tokens cached.
        windows: Widths of sliding layers' masks. As in the cache, the oldest token leaves a window that is full. (Of
            full attention there is no room for another token then: the cache refuses it.)
    """
    last = mask.shape[3] - 1
    if mask.shape[3] in windows:
        columns = torch.arange(mask.shape[3], device=mask.device)
        mask.copy_(mask.index_select(3, (columns + (column > last)).clamp_(max=last)))
    mask.index_fill_(3, column.clamp(max=last), True if mask.dtype == torch.bool else 0)


class LateFlags:
    """Tokens and the flag "all have ended" of each step, read on the host: on a GPU a step late, so that nothing waits.

    Args:
        device: Where tokens are chosen.
        batch: Sequences.
        streamer: Gets the tokens, or `None`.
    """

    def __init__(self, device: torch.device, batch: int, streamer: BaseStreamer | None) -> None:
        self.lag = 1 if device.type == "cuda" else 0
        self.streamer = streamer
        pinned = device.type == "cuda"
        self._slots = [
            (
                torch.zeros((), dtype=torch.bool, pin_memory=pinned),
                torch.zeros(batch, dtype=torch.long, pin_memory=pinned),
            )
            for _ in range(2)
        ]
        self._copied = [torch.cuda.Event(blocking=True) if pinned else None for _ in range(2)]
        self._steps = 0

    def record(self, unfinished: torch.Tensor, token: torch.Tensor) -> bool:
        """Copy a step's `[B]` flags and tokens to the host. Whether all had ended `lag` steps ago."""
        flag, tokens = self._slots[self._steps % 2]
        flag.copy_(~unfinished.any(), non_blocking=True)
        if self.streamer is not None:
            tokens.copy_(token, non_blocking=True)
        if (event := self._copied[self._steps % 2]) is not None:
            event.record()
        self._steps += 1
        return self._steps > self.lag and self._read(self._steps - 1 - self.lag)

    def _read(self, step: int) -> bool:
        if (event := self._copied[step % 2]) is not None:
            event.synchronize()
        flag, tokens = self._slots[step % 2]
        if self.streamer is not None:
            self.streamer.put(tokens.clone())
        return bool(flag)

    def finish(self, ended: bool) -> None:
        """Stream the last token, unless its step ran after the end."""
        if self.lag and not ended:
            self._read(self._steps - 1)
        if self.streamer is not None:
            self.streamer.end()
