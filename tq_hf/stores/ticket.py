"""How the attention function gets at a compressed layer, although a model only hands it keys and values.

`TurboQuantLayer.update` returns tensors; the model passes them on to `turboquant_attention`. A `Ticket` travels as an
attribute of the key tensor and dies with it; the layer keeps only the `Receipt`. If anything on the way makes a new
tensor of the keys (an up-projection of latents, a repeat of heads, a move to another device), the ticket is lost, the
receipt stays unsigned, and the layer learns that this model needs dequantised states. So it does if attention is given
other values than those that came with the keys (DiffLlama): a ticket is good for both or for nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..tensors.blocks import KeyValue
from ..tensors.layer import RowKind, StepView, StoreView, dense_shapes, is_first
from .base import LayerStore
from .watched import unwatched

_ATTRIBUTE = "_turboquant_ticket"


@dataclass
class Receipt:
    """Who has taken a ticket.

    Args:
        reader: The config of the attention module that took it, held weakly: what it says of the attention function is
            what the model uses now. `None` if nobody did.
        watched: Whether the states of the call would have noticed a model that computes with them itself (see
            `tq_hf.stores.watched`).
        read: Whether it did.
    """

    reader: weakref.ref[Any] | None = None
    watched: bool = False
    read: bool = False

    def note_read(self) -> None:
        """The model computed with the states."""
        self.read = True

    @property
    def signed(self) -> bool:
        """Whether somebody took the ticket."""
        return self.reader is not None

    @property
    def left_alone(self) -> bool:
        """Whether the model is known to have done nothing with the states but hand them to attention."""
        return self.watched and not self.read


class Ticket(NamedTuple):
    """A claim on what a layer holds, good for one call of the model.

    Args:
        view: What is claimed.
        receipt: To be signed.
        values: The tensor of values that goes with the keys the ticket is on.
        states: Makes the keys and values that the view stands for.
        waiting: The store, if it waits for the queries of this call.
    """

    view: StoreView | StepView
    receipt: Receipt
    values: torch.Tensor
    states: Callable[[], KeyValue]
    waiting: LayerStore | None = None


def attach(states: KeyValue, ticket: Ticket) -> KeyValue:
    """`states` with `ticket` on the keys."""
    setattr(states[0], _ATTRIBUTE, ticket)
    return states


def _placeholders(row: RowKind, tokens: int, nan: torch.Tensor) -> KeyValue:
    keys, values = dense_shapes(row, tokens)
    return nan.expand(keys), nan.expand(values)


_latest: tuple[RowKind, int, KeyValue] | None = None


def step_placeholders(row: RowKind, tokens: int, nan: torch.Tensor) -> KeyValue:
    """Stand-ins for `tokens` keys and values: right shape, dtype and device, no memory, and loud if read.

    All layers of a model ask for the same at every step. The tensor of values, which carries no ticket, is the same for
    all then, and that of keys a new tensor over the same memory.

    Args:
        row: What one token's keys and values are like.
        tokens: Tokens they stand for.
        nan: One NaN of the model's dtype and device, `[1, 1, 1, 1]`.
    """
    if torch.compiler.is_compiling() or type(nan) is not torch.Tensor:  # such tensors are of one trace only
        return _placeholders(row, tokens, nan)
    global _latest
    latest = _latest
    if latest is None or latest[1] != tokens or latest[0] != row:
        latest = _latest = (row, tokens, _placeholders(row, tokens, nan))
    keys, values = latest[2]
    return keys.detach(), values


def show_queries(keys: torch.Tensor, query: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Show the queries `[B, Hq, S, Dk]` of a call to the store whose ticket `keys` have, if it waits for them. By their
    mask it knows padding."""
    ticket: Ticket | None = getattr(keys, _ATTRIBUTE, None)
    if ticket is not None and ticket.waiting is not None:
        ticket.waiting.encode_prompt(query, _attended(mask, ticket.view.length, query.shape[2]))


def _attended(mask: torch.Tensor | None, length: int, tokens: int) -> torch.Tensor | None:
    """Which of the newest `tokens` of `length` the last query attends to, `[B or 1, tokens]` bool; `None` for all."""
    if mask is None:
        return None
    row = mask[:, 0, -1, length - tokens : length]
    return row if row.dtype == torch.bool else row > torch.finfo(row.dtype).min / 2


def redeem(
    keys: torch.Tensor, values: torch.Tensor, module: torch.nn.Module
) -> tuple[StoreView | StepView | None, torch.Tensor, torch.Tensor]:
    """The view that `keys` and `values` stand for, if they came with one ticket; signs the receipt for the attention
    module `module`. And the keys and values to read where there is no view, or one of a first call."""
    ticket: Ticket | None = getattr(keys, _ATTRIBUTE, None)
    if ticket is None:
        return None, *unwatched((keys, values))
    if ticket.values is not values:
        return None, ticket.states()[0], unwatched((keys, values))[1]
    config = getattr(module, "config", None)
    # A compiled step finds the receipt signed by the prefill before it, or cannot sign it.
    if ticket.receipt.reader is None and config is not None and not torch.compiler.is_compiling():
        ticket.receipt.reader = weakref.ref(config)
    return (ticket.view, *unwatched((keys, values))) if is_first(ticket.view) else (ticket.view, keys, values)
