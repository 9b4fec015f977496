"""Tensors of a captured decode step, which keep their addresses, and the flags that the host reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..compat import CACHE_NAME, device_of_inputs, takes_positions
from ..layers.base import FullAttentionLayer
from ..layers.compressed import TurboQuantLayer

Masks = torch.Tensor | dict[str, torch.Tensor | None] | None


@dataclass(kw_only=True)
class CapturedStep:
    """A graph, and what every step has that it reads and writes.

    Args:
        key: Values that the graph depends on (model, batch, processors, ...). Another key needs another graph.
        history: `[B, width]` int64, prompt and answer; any tokens after these.
        at: `[1]` int64, the number of tokens of prompt and answer: the column of `history` for the next token.
        unfinished: `[B]` bool, whether a sequence has not ended.
        logits: `[rows, vocabulary]` float32 of the last step, a row for each token that the step chooses.
        scores: `[rows, vocabulary]` float32, `logits` after the processors.
        graph: Captured CUDA graph, or `None` before the capture.
        outputs: `logits` and `scores` that the graph writes.
        warm: Number of steps that ran before the capture.
    """

    key: tuple[Any, ...]
    history: torch.Tensor
    at: torch.Tensor
    unfinished: torch.Tensor
    logits: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    graph: torch.cuda.CUDAGraph | None = None
    outputs: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    warm: int = 0


@dataclass(kw_only=True)
class StepTensors(CapturedStep):
    """Tensors of a step of one token.

    Args:
        token: `[B, 1]` int64, the newest token of each sequence, not cached yet.
        positions: Position ids `[..., B, 1]` of `token`, or `None` if the model counts positions itself.
        masks: Attention masks of the model, `[B, 1, 1, max_cache_len]`, or `[B, 1, 1, window]` for sliding layers.
            Bool, or float and added to logits.
        column: `[1]` int64, the index of `token` among the cached tokens: its column in masks of full attention.
        constants: Further inputs, equal at every step.
    """

    token: torch.Tensor
    positions: torch.Tensor | None
    masks: Masks
    column: torch.Tensor
    constants: dict[str, Any]


def check_inputs(model: Any, inputs: dict[str, Any], other: list[str]) -> None:
    """Raise a `ValueError` if a step has inputs that change in a way that is not known: tensors among `inputs`, those
    of positions, masks and tokens taken out, and whatever `other` names."""
    unknown = [name for name, x in inputs.items() if isinstance(x, torch.Tensor) and "token_type" not in name]
    if unknown := unknown + other:
        raise ValueError(
            f"{type(model).__name__} takes {', '.join(unknown)} at each step, which `graph_decoding` cannot continue. "
            "Leave out `custom_generate`."
        )


def first_inputs(
    model: Any, cache: Cache, ids: torch.Tensor, cached: int, tokens: int, inputs: dict[str, Any]
) -> tuple[dict[str, Any], torch.Tensor | None, Masks]:
    """Inputs of the first step of `tokens` tokens after `ids` `[B, T]`: constant ones, position ids, masks. The cache
    has `cached` tokens.

    EXAONE 4.5 hands on no positions, and counts from the length of its cache. That is a number on the host where the
    first layer slides, which graphs keep and drafts leave behind. The step gets the positions of that count then.
    """
    longer = torch.cat([ids, ids.new_zeros(ids.shape[0], tokens)], dim=1)  # not chosen yet; only positions matter here
    first = model.prepare_inputs_for_generation(longer, next_sequence_length=tokens, **inputs)
    del first["input_ids"], first[CACHE_NAME]
    positions: torch.Tensor | None = first.pop("position_ids", None)
    if positions is None and takes_positions(model) and isinstance(cache.get_seq_length(), int):
        positions = torch.arange(cached, cached + tokens, device=device_of_inputs(model))[None]
    return first, positions, first.pop("attention_mask", None)


def mask_tensors(masks: Masks) -> list[torch.Tensor]:
    every = masks.values() if isinstance(masks, dict) else [masks]
    return [mask for mask in every if mask is not None]


def map_masks(function: Callable[[torch.Tensor], torch.Tensor], masks: Masks) -> Masks:
    """Apply `function` to every mask."""
    if isinstance(masks, dict):
        return {name: None if mask is None else function(mask) for name, mask in masks.items()}
    return None if masks is None else function(masks)


def allowed(mask: torch.Tensor) -> torch.Tensor:
    """A mask as bool."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def needs_no_mask(layers: Sequence[Any]) -> bool:
    """Whether layers of full attention are packed ones that attention reads: "turboquant" reads a mask of no columns as
    causal, so no step makes, extends or reads one where nothing is padded."""
    packed = [layer for layer in layers if isinstance(layer, FullAttentionLayer)]
    return all(
        isinstance(layer, TurboQuantLayer) and layer.reads_packed and (layer.is_untouched or layer.expands)
        for layer in packed
    )


def without_columns(masks: Masks, layers: Sequence[Any], cached: int, windows: set[int]) -> Masks:
    """Replace masks of full attention by masks of no columns where they are not needed: in a step after `cached` tokens
    of `layers`. Masks of sliding layers, which have one of the widths `windows`, stay."""
    if not needs_no_mask(layers):
        return masks

    def shortened(mask: torch.Tensor) -> torch.Tensor:
        if mask.dim() != 4 or mask.shape[3] in windows or not bool(allowed(mask[:, :, -1, : cached + 1]).all()):
            return mask
        return mask[..., :0]

    return map_masks(shortened, masks)


def unmask_newest(mask: torch.Tensor, column: torch.Tensor, windows: set[int]) -> None:
    """Extend the mask of a step in place by the token at `column`, `[1]` int64. The oldest token leaves a full window,
    in masks of one of the widths `windows`. (The cache refuses a token beyond the width of full attention.)"""
    if not mask.shape[3]:
        return
    last = mask.shape[3] - 1
    if mask.shape[3] in windows:
        columns = torch.arange(mask.shape[3], device=mask.device)
        mask.copy_(mask.index_select(3, (columns + (column > last)).clamp_(max=last)))
    mask.index_fill_(3, column.clamp(max=last), True if mask.dtype == torch.bool else 0)


class LateFlags:
    """Tokens and the flag "all sequences have ended" of each step, read on the host. On a GPU they are read one step
    late, so that neither side waits. `receive`, if any, gets the tokens of each step, `[size]` int64 on the host."""

    def __init__(self, device: torch.device, size: int, receive: Callable[[torch.Tensor], object] | None) -> None:
        pinned = device.type == "cuda"
        self.lag, self.receive = int(pinned), receive
        # Tokens, and the flag after them.
        self._slots = [torch.zeros(size + 1, dtype=torch.long, pin_memory=pinned) for _ in range(2)]
        self._copied = [torch.cuda.Event(blocking=True) if pinned else None for _ in range(2)]
        self._steps = 0

    def record(self, unfinished: torch.Tensor, token: torch.Tensor) -> bool:
        """Copy the flags and tokens `[size]` of a step to the host. Returns whether all sequences had ended `lag` steps
        ago."""
        slot = self._slots[self._steps % 2]
        slot[-1:].copy_((~unfinished.any()).long(), non_blocking=True)
        if self.receive is not None:
            slot[:-1].copy_(token, non_blocking=True)
        if (event := self._copied[self._steps % 2]) is not None:
            event.record()
        self._steps += 1
        return self._steps > self.lag and self._read(self._steps - 1 - self.lag)

    def _read(self, step: int) -> bool:
        if (event := self._copied[step % 2]) is not None:
            event.synchronize()
        slot = self._slots[step % 2]
        if self.receive is not None:
            self.receive(slot[:-1].clone())
        return bool(slot[-1])

    def read_now(self) -> bool:
        """Wait for the last step, and record no further one. Returns whether all sequences have ended."""
        late, self.lag = self.lag, 0
        return bool(late) and self._read(self._steps - 1)

    def finish(self, ended: bool) -> None:
        """Read the last step, unless it ran after the end of all sequences."""
        if self.lag and not ended:
            self._read(self._steps - 1)
