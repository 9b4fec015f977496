"""What attention reads in one call: a layer's tensors and a snapshot of its counts."""

from __future__ import annotations

from dataclasses import dataclass
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


class DeviceCounts(NamedTuple):
    """The counts of a preallocated store; see `tq_hf.stores.preallocated`."""

    state: torch.Tensor
    step_counts: torch.Tensor
    length: torch.Tensor


@dataclass
class NewestToken:
    """Keys `[B, Hkv, 1, Dk]` and values `[B, Hkv, 1, Dv]` that a preallocated store has not appended yet, or `None`.

    A store has one such object. The decode step that reads the token appends it in passing; whoever else wants to know
    what the store holds appends it first (`tq_hf.stores.graph_ops.append_newest`).
    """

    states: KeyValue | None = None


class StepView(NamedTuple):
    """The same for a decode step of a preallocated store: the snapshot is on the device.

    Args:
        tensors: The tensors read, which the store never replaces.
        counts: The store's, which hold what the step attends to once the newest token is appended.
        entries: Views of the numbers of sinks, blocks and window rows in `counts.step_counts`.
        config_text: The configuration as an operator of a graph takes it.
        length: Tokens there is room for: the length of the dense states that stand for this view.
        num_held: Tokens it covers, if the host knows.
        newest: The store's newest token, unless it is appended.
    """

    tensors: LayerTensors
    counts: DeviceCounts
    entries: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    config_text: str
    length: int
    num_held: int | None
    newest: NewestToken


def is_first(view: StoreView | StepView) -> bool:
    """Whether nothing was cached before this call: its own states are all there is to read. Never of a `StepView`: even
    a prompt of one token is read from the store."""
    # Not a property: of a named tuple, Dynamo of torch 2.9 traces none.
    return isinstance(view, StoreView) and view.past_length == 0
