"""The exact sinks of padded rows: their first real tokens, in the place of padding.

Attention does not depend on the order of tokens, because positions are in the keys. So a store keeps a padded row in
another order: each of its first `sink_tokens` tokens that is padding changes places with a real token. Columns of masks
change places alike. States for other attention functions are put back into the order of the tokens.

A padding mask only says which tokens are worth being sinks. Whatever it says, no token is lost.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tq_kernels.types import KeyValue

from ..compat import changes_of


class SinkOrder:
    """The order of the tokens of padded rows in a store.

    Args:
        index: `[B, S0]` int64. Sink i holds token `index[b, i]`, and that token's place holds token i. An entry is i
            itself, or S0 or more; no two are equal.
        end: Number that no entry exceeds or equals, at least S0.
    """

    def __init__(self, index: torch.Tensor, end: int) -> None:
        self.index = index
        self.end = end

    def swapped(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Copy of `x` `[B or 1, ...]` in the order of the store, or from there in the order of the tokens. Tokens lie
        along `dim`, `end` of them or more."""
        batch, count = self.index.shape
        x = x.expand(batch, *x.shape[1:])
        shape = [1] * x.dim()
        shape[0], shape[dim] = batch, count
        first = x.narrow(dim, 0, count)
        index = self.index.view(shape).expand(first.shape)
        out = x.scatter(dim, index, first)
        out.narrow(dim, 0, count).copy_(x.gather(dim, index))
        return out

    def swapped_states(self, states: KeyValue) -> KeyValue:
        """`swapped` of keys and values `[B, Hkv, T, D]`."""
        keys, values = states
        return self.swapped(keys, 2), self.swapped(values, 2)

    def exchanged(self, sinks: KeyValue, states: KeyValue, past: int) -> KeyValue:
        """New `states` `[B, Hkv, S, D]` after `past` tokens in this order, which is new: only they change places, with
        padding that is new or among the held `sinks`, `[B, Hkv, n, D]`, which are written in place."""
        first = sinks[0].shape[2]
        own = torch.arange(self.index.shape[1], device=self.index.device)
        # Held sinks stand before the new tokens here.
        swap = SinkOrder(torch.where(self.index >= past, self.index - past + first, own), self.end - past + first)
        rows = []
        for held, part in zip(sinks, states, strict=True):
            both = swap.swapped(torch.cat([held, part], 2) if first else part, 2)
            held.copy_(both[:, :, :first])
            rows.append(both[:, :, first:])
        return rows[0], rows[1]

    def swapped_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """`swapped` of the columns of a mask `[B or 1, ..., columns]`; the mask itself if it has too few. All layers
        that share this order share the result, which is kept with the mask."""
        if mask.shape[-1] < self.end:
            return mask
        if torch.compiler.is_dynamo_compiling() or mask.is_inference():
            return self.swapped(mask, mask.dim() - 1)
        made_from = self, changes_of(mask)
        kept = getattr(mask, "_swapped", None)
        if kept is None or kept[0] != made_from:
            kept = mask._swapped = made_from, self.swapped(mask, mask.dim() - 1)  # type: ignore[attr-defined]
        return kept[1]

    def equals(self, other: SinkOrder) -> bool:
        """Whether both orders are the same, on one device."""
        same = self.end == other.end and self.index.device == other.index.device
        return same and torch.equal(self.index, other.index)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> SinkOrder:
        """The order of other rows, or on another device: of the result of `function` on the index."""
        return SinkOrder(function(self.index), self.end)

    def cropped(self, length: int) -> SinkOrder | None:
        """The order of the first `length` tokens. The place of padding that a removed token had taken stays without
        its own states."""
        if length >= self.end:
            return self
        batch, count = self.index.shape
        if length < count:
            return None
        own = torch.arange(count, device=self.index.device)
        return SinkOrder(torch.where(self.index < length, self.index, own), length)


def check_index(index: torch.Tensor, length: int) -> None:
    """Raise a `ValueError` unless `index` `[B, S0]` int64 is that of a `SinkOrder` of `length` tokens."""
    own = torch.arange(index.shape[1], device=index.device)
    in_range = (index == own) | ((index >= index.shape[1]) & (index < length))
    distinct = index.sort(1).values.diff(dim=1) != 0
    if not (in_range.all() and distinct.all()):
        raise ValueError("has `sink_index` that is no order of its tokens: damaged.")


class Padding:
    """Padding of a call of the model, and the orders that follow from it: layers that hold the same share one.

    Args:
        mask: `[B, T]` bool, False for padding: past tokens and those of the call, perhaps more.
    """

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask
        self._orders: dict[tuple[SinkOrder | None, int, int, torch.device], SinkOrder | None] = {}

    def order(
        self, held: SinkOrder | None, past: int, length: int, sinks: int, device: torch.device
    ) -> SinkOrder | None:
        """The order once tokens `past` to `length` are stored: their first real ones become sinks of rows that lack
        some.

        Args:
            held: The order of the tokens before them; `None` if that is their own.
            past: Number of tokens before them.
            length: Number of tokens with them.
            sinks: Number of sinks of a row.
            device: Where the order is needed.

        Returns:
            `held`, if nothing changes; `None` if all first tokens are real.
        """
        key = held, past, sinks, device
        if key not in self._orders:
            self._orders[key] = self._order(held, past, length, sinks, self.mask.to(device))
        return self._orders[key]

    def _order(
        self, held: SinkOrder | None, past: int, length: int, sinks: int, mask: torch.Tensor
    ) -> SinkOrder | None:
        own = torch.arange(sinks, device=mask.device).expand(mask.shape[0], -1)
        index = own if held is None else held.index
        first = max(past, sinks)
        missing = ~mask.gather(1, index) & (index == own)
        # The n-th missing sink of a row is the n-th real token after `first`.
        number = mask[:, first:length].cumsum(1)
        token = first + torch.searchsorted(number, missing.cumsum(1))
        found = missing & (token < length)
        any_missing, end = torch.stack([missing.any(), torch.where(found, token + 1, 0).amax()]).tolist()
        if not any_missing or (held is not None and not end):
            return held
        return SinkOrder(torch.where(found, token, index), max(end, sinks if held is None else held.end))
