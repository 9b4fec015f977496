"""How the attention function gets at a compressed layer, although a model only hands it keys and values.

`TurboQuantLayer.update` returns tensors; the model passes them on to `turboquant_attention`. A `Ticket` travels as an
attribute of the key tensor and dies with it; the layer keeps only the `Receipt`. If anything on the way makes a new
tensor of the keys (an up-projection of latents, a repeat of heads), the ticket is lost, the receipt stays unsigned,
and the layer learns that this model needs dequantised states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..tensors.view import StoreView
from ..tensors.window import KeyValue
from .preallocated import StaticStore

_ATTRIBUTE = "_turboquant_ticket"

Kind = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""What placeholders depend on besides the number of tokens: shapes of one token's keys and values, dtype, device."""


@dataclass
class Receipt:
    """Whether the attention function has taken a ticket."""

    signed: bool = False


class Ticket(NamedTuple):
    """A claim on what a layer holds, good for one call of the model."""

    view: StoreView | StaticStore
    receipt: Receipt


def attach(states: KeyValue, ticket: Ticket) -> KeyValue:
    """`states` with `ticket` on the keys."""
    setattr(states[0], _ATTRIBUTE, ticket)
    return states


def placeholders(shapes: tuple[torch.Size, torch.Size], nan: torch.Tensor) -> KeyValue:
    """Stand-ins for keys and values: right shape, dtype and device, no memory, and loud if read.

    Args:
        shapes: Of the keys and values they stand for.
        nan: One NaN of the model's dtype and device, `[1, 1, 1, 1]`.
    """
    return nan.expand(shapes[0]), nan.expand(shapes[1])


_latest: tuple[Kind, int, KeyValue] | None = None


def _shapes(kind: Kind, tokens: int) -> tuple[torch.Size, torch.Size]:
    (batch, heads, _, key_dim), (_, _, _, value_dim) = kind[:2]
    return torch.Size((batch, heads, tokens, key_dim)), torch.Size((batch, heads, tokens, value_dim))


def step_placeholders(kind: Kind, tokens: int, nan: torch.Tensor) -> KeyValue:
    """`placeholders` for `tokens` keys and values of a kind, at less cost.

    All layers of a model ask for the same at every step. The tensor of values, which carries no ticket, is the same for
    all then, and that of keys a new tensor over the same memory.
    """
    if torch.compiler.is_compiling() or type(nan) is not torch.Tensor:  # such tensors are of one trace only
        return placeholders(_shapes(kind, tokens), nan)
    global _latest
    latest = _latest
    if latest is None or latest[1] != tokens or latest[0] != kind:
        latest = _latest = (kind, tokens, placeholders(_shapes(kind, tokens), nan))
    keys, values = latest[2]
    return keys.detach(), values


def redeem(keys: torch.Tensor) -> StoreView | StaticStore | None:
    """The view `keys` carry a ticket for, or `None`; signs the receipt."""
    ticket: Ticket | None = getattr(keys, _ATTRIBUTE, None)
    if ticket is None:
        return None
    ticket.receipt.signed = True
    return ticket.view
