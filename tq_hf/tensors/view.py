"""What attention reads in one call: a layer's tensors and a snapshot of its counts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..config import TurboQuantConfig
from .blocks import PackedBlocks
from .layer_tensors import LayerTensors
from .window import BLOCK, DenseWindow, KeyValue, LateRow


class StoreView(NamedTuple):
    """The tokens a query attends to, oldest first: sinks, packed blocks, window, and the new tokens of a long call.

    Args:
        tensors: The tensors read.
        num_blocks: Number of packed blocks read, the first ones.
        num_window: Number of window rows read, those that follow the blocks; they end with the new tokens unless `new`
            holds those.
        past_length: Tokens cached before this call.
        late: The newest window row, if it may not be in its ring yet.
        new: Keys and values `[B, Hkv, S, D]` of this call when they were not copied into the window, as the model made
            them.
    """

    tensors: LayerTensors
    num_blocks: int
    num_window: int
    past_length: int
    late: LateRow | None = None
    new: KeyValue | None = None

    @property
    def config(self) -> TurboQuantConfig:
        """The configuration the blocks were encoded with."""
        return self.tensors.config

    @property
    def blocks(self) -> PackedBlocks:
        """Packed blocks of which the first `num_blocks` are read."""
        return self.tensors.blocks

    @property
    def sinks(self) -> KeyValue:
        """Dense keys and values `[B, Hkv, s, D]`, `s` possibly 0."""
        return self.tensors.sinks

    @property
    def window(self) -> DenseWindow:
        """The dense rows after the blocks."""
        first = self.num_blocks * self.tensors.layout.tokens
        return DenseWindow(self.tensors.ring, first, self.num_window, self.late)

    @property
    def dense_parts(self) -> list[tuple[int, KeyValue]]:
        """The dense parts that hold tokens, each with the position of its first token."""
        num_sinks = self.sinks[0].shape[2]
        parts = [(0, self.sinks)] if num_sinks else []
        after = num_sinks + self.num_blocks * self.tensors.layout.tokens
        parts += [(after + skipped, part) for skipped, part in self.window.parts()]
        if self.new is not None:
            parts.append((after + self.num_window, self.new))
        return parts

    @property
    def length(self) -> int:
        """All tokens attended to: past and new."""
        tensors, num_blocks, num_window, _, _, new = self
        length = tensors.sinks[0].shape[2] + num_blocks * BLOCK + num_window
        return length if new is None else length + new[0].shape[2]


class StepView(NamedTuple):
    """The same for a decode step of a preallocated store: the snapshot is on the device.

    Args:
        tensors: The tensors read, which the store never replaces.
        step_counts: `[6, 4]` int32 on the device, what the step attends to (see `tq_hf.stores.preallocated`).
        entries: Views of the numbers of sinks, blocks and window rows in `step_counts`.
        config_text: The configuration as an operator of a graph takes it.
        length: Tokens there is room for: the length of the dense states that stand for this view.
        num_held: Tokens it covers, if the host knows.
    """

    tensors: LayerTensors
    step_counts: torch.Tensor
    entries: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    config_text: str
    length: int
    num_held: int | None


def is_first(view: StoreView | StepView) -> bool:
    """Whether nothing was cached before this call: its own states are all there is to read. Never of a `StepView`: even
    a prompt of one token is read from the store."""
    # Not a property: of a named tuple, Dynamo of torch 2.9 traces none.
    return isinstance(view, StoreView) and view.past_length == 0
