"""What a decoding loop reads of each step: tokens to stream, and whether all sequences have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


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
        """Take in a step's `[B]` flags and tokens. Whether all had ended `lag` steps ago."""
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
        """Hand on what is still held back, but not the token of a step that ran after the end."""
        if self.lag and not ended:
            self._read(self._steps - 1)
        if self.streamer is not None:
            self.streamer.end()
