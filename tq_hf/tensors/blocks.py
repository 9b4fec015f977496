"""The packed blocks of one layer, as a structure of arrays, and its channel scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..layout import BlockLayout

KeyValue = tuple[torch.Tensor, torch.Tensor]

BLOCK = BlockLayout.tokens


class ChannelScales(NamedTuple):
    """What keys and values are multiplied by before they are encoded (see `tq_hf.codec.balance`).

    They have no more bits than a bfloat16, so that the encoder's matrix products with them are exact.

    Args:
        keys: 1 / s, `[B, Hkv, Dk]` fp16; queries are divided by it.
        values: 1 / t, `[B, Hkv, Dv]` fp16; outputs are divided by it.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def ones(cls, batch: int, heads: int, key_dim: int, value_dim: int, device: torch.device) -> ChannelScales:
        """Channel scales that change nothing."""
        keys, values = (
            torch.ones(batch, heads, dim, dtype=torch.float16, device=device) for dim in (key_dim, value_dim)
        )
        return cls(keys, values)

    def check(self, others: ChannelScales) -> None:
        """Raise a `ValueError` unless `others`, `[B or 1, Hkv, D]`, can take the place of these."""
        for own, other in zip(self, others, strict=True):
            if other.shape[1:] != own.shape[1:] or len(other) not in (1, len(own)):
                raise ValueError(
                    f"`balance` is of {list(other.shape[1:])} heads and channels, and this model has "
                    f"{list(own.shape[1:])}. Make it anew with `Balance.of(model)`."
                )

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> ChannelScales:
        """Channel scales of the results of `function` on both tensors."""
        return ChannelScales(function(self.keys), function(self.values))


@dataclass(frozen=True)
class PackedBlocks:
    """Tensors of the packed blocks of a layer, with room for N blocks (see `tq_hf.layout` for a block's parts).

    Args:
        layout: Sizes of a block.
        key_words: `[B, Hkv, N, layout.key_words]` int32.
        value_words: `[B, Hkv, N, layout.value_words]` int32.
        scales: `[B, Hkv, N, 128]` int32, fp16 key scale in the low half and fp16 value scale in the high half.
        key_means: `[B, Hkv, N, layout.key_dim_padded]` fp16 rotated means, or `None` if the layout has none.
        channel_scales: What states were multiplied by before they were encoded; of all blocks.
    """

    layout: BlockLayout
    key_words: torch.Tensor
    value_words: torch.Tensor
    scales: torch.Tensor
    key_means: torch.Tensor | None
    channel_scales: ChannelScales

    @classmethod
    def allocate(cls, layout: BlockLayout, batch: int, heads: int, blocks: int, device: torch.device) -> PackedBlocks:
        """Zero-filled room for `blocks` blocks of `heads` KV heads, with channel scales of one."""

        def zeros(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(batch, heads, blocks, size, dtype=dtype, device=device)

        return cls(
            layout=layout,
            key_words=zeros(layout.key_words),
            value_words=zeros(layout.value_words),
            scales=zeros(layout.tokens),
            key_means=zeros(layout.key_dim_padded, torch.float16) if layout.key_mean else None,
            channel_scales=ChannelScales.ones(batch, heads, layout.key_dim, layout.value_dim, device),
        )

    @property
    def capacity(self) -> int:
        """Blocks there is room for."""
        return self.scales.shape[2]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of N blocks by field name, without an absent mean."""
        names = ("key_words", "value_words", "scales", "key_means")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PackedBlocks:
        """These blocks with `function` applied to every tensor, the channel scales among them."""
        return self._map_blocks(function, self.channel_scales.map(function))

    def _map_blocks(
        self, function: Callable[[torch.Tensor], torch.Tensor], channel_scales: ChannelScales | None = None
    ) -> PackedBlocks:
        means = None if self.key_means is None else function(self.key_means)
        words = (function(self.key_words), function(self.value_words), function(self.scales))
        return PackedBlocks(self.layout, *words, means, channel_scales or self.channel_scales)

    def slice(self, start: int, stop: int) -> PackedBlocks:
        """Views of blocks `start` to `stop`."""
        return self._map_blocks(lambda tensor: tensor[:, :, start:stop])

    def resized(self, blocks: int, used: int) -> PackedBlocks:
        """A copy with room for `blocks` blocks that holds the first `used`."""

        def resize(tensor: torch.Tensor) -> torch.Tensor:
            out = tensor.new_zeros(*tensor.shape[:2], blocks, tensor.shape[3])
            if used:
                out[:, :, :used] = tensor[:, :, :used]
            return out

        return self._map_blocks(resize)
