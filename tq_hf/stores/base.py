"""Base class of a layer's store, which counts tokens on the host or on the device; and checks of its input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from tq_kernels.types import ChannelScales, KeyValue, PackedBlocks

from ..compat import autocast_dtype
from ..ops import dispatch
from ..tensors.layer import Counts, LayerTensors, RowKind, View
from ..tensors.sinks import Padding


class LayerStore(ABC):
    """The tensors of a compressed layer, and how many tokens they hold.

    Args:
        tensors: The tensors.
        scales_are_fixed: Whether the channel scales were set, so that no prompt changes them.
    """

    def __init__(self, tensors: LayerTensors, scales_are_fixed: bool = False) -> None:
        self.tensors = tensors
        self.scales_are_fixed = scales_are_fixed
        self.config = tensors.config
        self.layout = tensors.layout

    @property
    def blocks(self) -> PackedBlocks:
        """Tensors of packed blocks, with room for more."""
        return self.tensors.blocks

    @property
    @abstractmethod
    def length(self) -> int | torch.Tensor:
        """Number of tokens held; a tensor on the device for a preallocated store."""

    @abstractmethod
    def append(
        self, keys: torch.Tensor, values: torch.Tensor, defer: bool = False, padding: Padding | None = None
    ) -> View:
        """Store new tokens and return what their queries attend to.

        A single token may be copied by that attention only, so its tensors must not change before.

        Args:
            keys: `[B, Hkv, S, Dk]` in the dtype and on the device of this store.
            values: `[B, Hkv, S, Dv]`.
            defer: Leave a prompt whose queries decide the channel scales to `encode_deferred`.
            padding: Padding of the tokens of a call of several, if known.

        Raises:
            ValueError: The tensors do not fit the store, or the store is full. Nothing is changed then.
        """

    @abstractmethod
    def append_checked(
        self, keys: torch.Tensor, values: torch.Tensor, defer: bool = False, padding: Padding | None = None
    ) -> View:
        """`append` of several tokens whose states are known to fit the store."""

    @property
    @abstractmethod
    def lacks_sinks(self) -> bool:
        """Whether the padding of the next tokens matters: a row may have fewer exact sinks than `sink_tokens`."""

    @property
    @abstractmethod
    def is_deferred(self) -> bool:
        """Whether the tokens of the last call are not encoded yet, for the sake of its queries."""

    @abstractmethod
    def encode_deferred(self, queries: torch.Tensor | None = None, attended: torch.Tensor | None = None) -> None:
        """Encode what the last call appended, if it was deferred.

        Args:
            queries: `[B, Hq, S, Dk]` of that call, if anybody saw them.
            attended: Which of its tokens are not padding, `[B or 1, S]` bool; `None` for all.
        """

    def set_scales(self, channel_scales: ChannelScales) -> None:
        """Use these channel scales, `[B or 1, Hkv, D]`. The store must be empty.

        Raises:
            ValueError: They are of heads of another number or size.
        """
        self.blocks.channel_scales.check(channel_scales)
        for own, scales in zip(self.blocks.channel_scales, channel_scales, strict=True):
            own.copy_(scales)
        self.scales_are_fixed = True

    @abstractmethod
    def view(self) -> View:
        """All tokens held, as a query that adds none would read them. Changes nothing; good until the next change."""

    @abstractmethod
    def crop(self, tokens: int) -> None:
        """Remove the last `tokens` tokens, at most all. Exact within the residual; a packed block that is cut moves its
        surviving tokens to the residual, dequantized."""

    @abstractmethod
    def assign(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold these tokens and no others, encoded as a first prompt with the channel scales there are.

        Packed blocks keep their codes, bit for bit, where keys or values of a head are those held in their place. If
        all are, and rows are only missing at the end, this is a `crop`.

        Raises:
            ValueError: They do not fit the store, or exceed it. Nothing is changed then.
        """

    @abstractmethod
    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> LayerStore:
        """A store of the results of `function` on every tensor of the tokens (batch selection, device moves)."""

    def reorder(self, beam_idx: torch.Tensor) -> None:
        """Put sequence `beam_idx[i]` in place i, for as many as are held. The tensors stay where they are, so whatever
        knows their addresses stays good: captured graphs, and what a backend has worked out."""
        assert beam_idx.shape == (self.tensors.batch_size,)
        dispatch.reorder(self.tensors, beam_idx)
        if (order := self.tensors.order) is not None:
            self.tensors = self.tensors.with_order(order.map(lambda x: x.index_select(0, beam_idx.to(x.device))))

    @abstractmethod
    def reset(self) -> LayerStore | None:
        """Hold nothing. Returns the store to go on with: itself, if it must not move, or none."""

    @abstractmethod
    def by_kind(self) -> dict[str, list[torch.Tensor]]:
        """Every tensor held, by the kind `memory_footprint` reports."""

    @abstractmethod
    def export(self) -> tuple[Counts, dict[str, torch.Tensor]]:
        """The counts, and what they count of each tensor, by name: the block tensors' names, `sink_keys`,
        `sink_values`, `residual_keys` and `residual_values`, residual rows in the order of the tokens, and if balanced
        `key_channel_scales` and `value_channel_scales`, if rows are padded `sink_index`."""

    @abstractmethod
    def restore(self, counts: Counts, held: dict[str, torch.Tensor]) -> None:
        """Hold what `export` returned, from any device. The store must be empty."""


Kind = tuple[torch.Size, torch.dtype, torch.device]


def kind_of(states: torch.Tensor) -> Kind:
    """Shape, dtype and device."""
    return states.shape, states.dtype, states.device


def check_states(keys: Kind, values: Kind) -> None:
    """Raise a `ValueError` unless these are kinds of keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]` of the same
    tokens."""
    (shape, dtype, device), (values_shape, values_dtype, values_device) = keys, values
    shapes = f"Keys {tuple(shape)} and values {tuple(values_shape)}"
    if not len(shape) == len(values_shape) == 4:
        raise ValueError(f"{shapes} must both have the shape [batch, KV heads, tokens, head_dim].")
    if shape[:3] != values_shape[:3]:
        raise ValueError(f"{shapes} must agree in batch, heads and tokens.")
    if device != values_device:
        raise ValueError(f"Keys are on {device} and values on {values_device}; move both to one device.")
    if dtype != values_dtype or not dtype.is_floating_point:
        raise ValueError(f"Keys are {dtype} and values {values_dtype}; both must have one floating-point dtype.")
    if not shape[1] * shape[3] * values_shape[3]:
        raise ValueError(f"{shapes} have no heads or a head_dim of 0; there is nothing to cache.")


def widened(keys: torch.Tensor, values: torch.Tensor, held: torch.dtype) -> KeyValue:
    """Keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]` as they are, and under `torch.autocast` both in the widest
    dtype of theirs and of what is `held`, as where `DynamicCache` concatenates."""
    if keys.dtype == values.dtype == held or autocast_dtype(keys) is None:
        return keys, values
    dtype = torch.promote_types(torch.promote_types(keys.dtype, values.dtype), held)
    return keys.to(dtype), values.to(dtype)


def check_same(what: str, held: object, came: object) -> None:
    """Raise a `ValueError` unless new keys have the property `what` of those a cache holds."""
    if held != came:
        raise ValueError(
            f"This cache holds states with {what} {held}, but was given keys with {what} {came}. Use a new "
            "TurboQuantCache for another batch or model, or call `cache.reset()` first (after which a preallocated "
            "cache still has its batch size, dtype and device)."
        )


def check_fits(keys: torch.Tensor, values: torch.Tensor, held: RowKind) -> None:
    """Raise a `ValueError` unless these states go with those a store holds in all but the number of tokens."""
    shape, values_shape = keys.shape, values.shape
    if (
        shape[2:3] == values_shape[2:3]
        and (*shape[:2], 1, *shape[3:]) == held.keys
        and (*values_shape[:2], 1, *values_shape[3:]) == held.values
        and keys.dtype == values.dtype == held.dtype
        and keys.device == values.device == held.device
    ):
        return
    check_states(kind_of(keys), kind_of(values))
    expected = {
        "batch size": (held.keys[0], keys.shape[0]),
        "number of KV heads": (held.keys[1], keys.shape[1]),
        "key head_dim": (held.keys[3], keys.shape[3]),
        "value head_dim": (held.values[3], values.shape[3]),
        "dtype": (held.dtype, keys.dtype),
        "device": (held.device, keys.device),
    }
    for what, (has, came) in expected.items():
        check_same(what, has, came)
