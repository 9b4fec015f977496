"""Tensors of a captured decode step, which keep their addresses, its inputs, and the flags that the host reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from ..compat import CACHE_NAME, device_of_inputs, takes_positions
from ..layers.base import FullAttentionLayer
from ..layers.compressed import TurboQuantLayer
from ..layers.dense import SlidingLayer

Masks = torch.Tensor | dict[str, torch.Tensor | None] | None


@dataclass(kw_only=True)
class CapturedStep:
    """A graph, and the tensors that it reads and writes. The newest token of a sequence is not cached yet.

    Args:
        key: Values that the graph depends on (model, batch, processors, ...). Another key needs another graph.
        history: `[B, width]` int64, prompt and answer; any tokens after these.
        at: `[1]` int64, the number of tokens of prompt and answer: the column of `history` for the next token.
        shift: `[1]` int64, number of tokens of the prompt that are not in the cache.
        unfinished: `[B]` bool, whether a sequence has not ended.
        inputs: Inputs of the model; `None` until the first token is chosen.
        logits: `[rows, vocabulary]` float32 of the last step, a row for each token that the step chooses.
        scores: `[rows, vocabulary]` float32, `logits` after the processors.
        graph: Captured CUDA graph, or `None` before the capture.
        outputs: `logits` and `scores` that the graph writes.
        warm: Number of steps that ran before the capture.
    """

    key: tuple[Any, ...]
    history: torch.Tensor
    at: torch.Tensor
    shift: torch.Tensor
    unfinished: torch.Tensor
    inputs: StepInputs | None = None
    logits: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    graph: torch.cuda.CUDAGraph | None = None
    outputs: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    warm: int = 0


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


def allowed(mask: torch.Tensor) -> torch.Tensor:
    """A mask as bool."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def needs_no_mask(layers: Sequence[Any]) -> bool:
    """Whether layers of full attention are packed ones that attention reads: "turboquant" reads a mask of no columns as
    causal, so no step makes, extends or reads one where nothing is padded."""
    return all(
        isinstance(layer, TurboQuantLayer) and layer.reads_packed and (layer.is_untouched or layer.expands)
        for layer in layers
        if isinstance(layer, FullAttentionLayer)
    )


def layers_with_states(cache: Cache) -> list[Any]:
    """Layers of a cache without the placeholders that transformers 5.23 has where a layer reads the keys of another
    (Gemma 3n)."""
    return [layer for layer in cache.layers if isinstance(layer, (CacheLayerMixin, LinearAttentionCacheLayerMixin))]


def sliding_layers(layers: Iterable[Any]) -> list[SlidingLayer]:
    """Sliding layers, whose rings are open while drafts are taken back."""
    return [layer for layer in layers if isinstance(layer, SlidingLayer)]


class MaskKind(NamedTuple):
    """A mask of a model, for one kind of layers.

    Args:
        dtype: Bool, or float and added to logits.
        columns: Number of rows of the layers: more than `window` in a ring; 0 where they need no mask, as nothing is
            padded.
        window: Number of tokens of a sliding window; `None` for full attention.
    """

    dtype: torch.dtype
    columns: int
    window: int | None


class StepInputs:
    """Inputs of a step with S tokens per sequence, made on the device from the number of tokens in the cache. Make them
    outside of inference mode, for later calls to write to.

    Args:
        model: The model.
        cache: The cache that it fills.
        ids: `[B, T]` int64, the tokens before those of the step.
        cached: Number of tokens in the cache.
        tokens: S.
        inputs: Inputs of the model as `generate()` keeps them, with a padding mask, if any, that covers the step.
        room: Number of tokens that may come, if the cache is preallocated for fewer: sliding windows have no limit.

    Raises:
        ValueError: The model takes inputs or masks that cannot be continued.
    """

    def __init__(
        self, model: Any, cache: Any, ids: torch.Tensor, cached: int, tokens: int, inputs: dict[str, Any], room: int = 0
    ) -> None:
        first, positions, self.masks = first_inputs(model, cache, ids, cached, tokens, inputs)
        if "logits_to_keep" in first:
            first["logits_to_keep"] = tokens
        self.constants = first
        self.offsets = None if positions is None else positions - cached
        sliding = sliding_layers(cache.layers)
        self.place = torch.arange(tokens, device=ids.device)
        self.kinds = _mask_kinds(self.masks, layers_with_states(cache))
        self.open = ids.new_ones(ids.shape[0], max(room, cache.preallocated_for), dtype=torch.bool)
        """`[B, >= room]` bool, by place among the cached tokens: False for padding."""
        if (padding := inputs.get("attention_mask")) is not None:
            self.open[:, : padding.shape[-1]] = padding[:, : self.open.shape[1]]
        column, given = torch.full((1,), cached, device=ids.device), mask_tensors(self.masks)
        unknown = [name for name, x in first.items() if isinstance(x, torch.Tensor) and "token_type" not in name]
        start = sliding[0].get_mask_sizes(tokens)[1] if sliding else 0
        if not all(self._continues(mask, kind, column, start) for mask, kind in zip(given, self.kinds, strict=True)):
            unknown.append("an attention mask that is not causal, or not [batch, 1, queries, columns]")
        if sliding and all(kind.window is None for kind in self.kinds):
            unknown.append("no mask for its sliding layers")
        if unknown:
            raise ValueError(
                f"{type(model).__name__} takes {', '.join(unknown)} at each step, which `graph_decoding` cannot "
                "continue. Leave out `custom_generate`."
            )
        if needs_no_mask(cache.layers) and bool(self.open[:, : cached + tokens].all()):
            self.kinds = [kind if kind.window is not None else kind._replace(columns=0) for kind in self.kinds]

    def _continues(self, given: torch.Tensor, kind: MaskKind, column: torch.Tensor, start: int) -> bool:
        """Whether a mask from transformers is what `_mask` makes, which adds nothing to logits that it lets through. A
        sliding layer's begins at the token `start`."""
        if given.dim() != 4 or (given.is_floating_point() and bool(given[allowed(given)].any())):
            return False
        places = torch.arange(given.shape[3], device=given.device) + (0 if kind.window is None else start)
        return torch.equal(allowed(given), allowed(self._mask(kind, column, places)))

    @property
    def shapes(self) -> list[Any]:
        """Dtypes and shapes of the inputs that change from step to step."""
        return [*self.kinds, *([] if self.offsets is None else [(self.offsets.dtype, self.offsets.shape)])]

    def copy_(self, other: StepInputs) -> None:
        """Take the prompt's padding and positions from inputs of the same shapes."""
        if self.offsets is not None and other.offsets is not None:
            self.offsets.copy_(other.offsets)
        self.open.copy_(other.open)

    def at(self, column: torch.Tensor) -> dict[str, Any]:
        """Inputs of a step after `column` cached tokens, `[1]` int64."""
        inputs = dict(self.constants)
        if self.offsets is not None:
            inputs["position_ids"] = self.offsets + column
        masks = (self._mask_at(kind, column) for kind in self.kinds)
        if isinstance(self.masks, dict):
            given = self.masks.items()
            inputs["attention_mask"] = {name: None if mask is None else next(masks) for name, mask in given}
        elif self.masks is not None:
            inputs["attention_mask"] = next(masks)
        return inputs

    def _mask_at(self, kind: MaskKind, column: torch.Tensor) -> torch.Tensor:
        """Mask of a step after `column` cached tokens."""
        if not kind.columns:
            return self.open.new_empty(len(self.open), 1, len(self.place), 0, dtype=kind.dtype)
        places, newest = torch.arange(kind.columns, device=column.device), column + (len(self.place) - 1)
        if kind.columns == kind.window:
            places = places + (newest + 1 - kind.columns).clamp(min=0)
        elif kind.window is not None:  # each row of a ring has the newest token that fits there
            places = newest - (newest - places) % kind.columns
        return self._mask(kind, column, places)

    def _mask(self, kind: MaskKind, column: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Mask `[B, 1, S, columns]` of keys at `places` `[columns]` among the cached tokens. Negative places are
        empty."""
        query = column + self.place[:, None]
        attends, own = places <= query, self.open[:, : len(places)]
        if kind.window is not None:
            attends = attends & (places > query - kind.window) & (places >= 0)
            own = self.open.index_select(1, places.clamp(min=0))
        attends = attends & own[:, None, None]
        if kind.dtype == torch.bool:
            return attends
        return torch.where(attends, 0.0, torch.finfo(kind.dtype).min).to(kind.dtype)


def _mask_kinds(masks: Masks, layers: Sequence[Any]) -> list[MaskKind]:
    """Kinds of masks that transformers made for the layers of a cache. A single mask is for all that have keys."""
    sliding = sliding_layers(layers)
    all_slide = all(isinstance(layer, SlidingLayer | LinearAttentionLayer) for layer in layers)
    every = masks if isinstance(masks, dict) else {"sliding_attention" if all_slide else "all": masks}
    kinds = []
    for name, mask in every.items():
        if mask is not None and sliding and name == "sliding_attention":
            first = sliding[0]
            rows = first.max_cache_len if first.is_open else first.sliding_window
            kinds.append(MaskKind(mask.dtype, rows, first.sliding_window))
        elif mask is not None:
            kinds.append(MaskKind(mask.dtype, mask.shape[-1], None))
    return kinds


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
