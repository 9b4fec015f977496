"""How the attention function gets at a compressed layer, although a model only hands it keys and values.

`TurboQuantLayer.update` returns tensors; the model passes them on to `turboquant_attention`. A `Ticket` travels as an
attribute of the key tensor and dies with it; the layer keeps only the `Receipt`. If anything on the way makes a new
tensor of the keys (an up-projection of latents, a repeat of heads), the ticket is lost, the receipt stays unsigned,
and the layer learns that this model needs dequantised states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .view import StoreView
from .window import KeyValue

_ATTRIBUTE = "_turboquant_ticket"


@dataclass
class Receipt:
    """Whether the attention function has taken a ticket."""

    signed: bool = False


@dataclass(frozen=True)
class Ticket:
    """A claim on a `StoreView`, good for one call of the model."""

    view: StoreView
    receipt: Receipt


def attach(states: KeyValue, ticket: Ticket) -> KeyValue:
    """`states` with `ticket` on the keys."""
    setattr(states[0], _ATTRIBUTE, ticket)
    return states


def placeholders(view: StoreView, nan: torch.Tensor) -> KeyValue:
    """Stand-ins for the keys and values of `view`: right shape, dtype and device, no memory, and loud if read.

    Args:
        view: What they stand for.
        nan: One NaN of the model's dtype and device, `[1, 1, 1, 1]`.
    """
    keys, values = (nan.expand(shape) for shape in view.shaped(view.length))
    return keys, values


def redeem(keys: torch.Tensor) -> StoreView | None:
    """The view `keys` carry a ticket for, or `None`; signs the receipt."""
    ticket: Ticket | None = getattr(keys, _ATTRIBUTE, None)
    if ticket is None:
        return None
    ticket.receipt.signed = True
    return ticket.view
