"""Types that caches hold and kernels take; they need no Triton."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .format import loud_channels
from .layout import BlockLayout

KeyValue = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""
Mask = torch.Tensor | None
"""Mask of attention, bool (True attends) or added to logits; `None` for none."""


class AttentionOptions(NamedTuple):
    """Options of a model's attention beside states and mask: one value from the attention function to kernels. Numbers
    come first, then tensors.

    Args:
        scaling: Factor of the logits.
        causal: Meaning of a mask of `None`: bottom-right causal, or full.
        softcap: Logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        s_aux: `[Hq]` logits of learned attention sinks (gpt-oss): they take weight and give no value.
        position_bias: `[B or 1, 1 or Hq, S, >= T]`, added to the logits. Kernels do not support it.
    """

    scaling: float
    causal: bool = True
    softcap: float | None = None
    s_aux: torch.Tensor | None = None
    position_bias: torch.Tensor | None = None

    @classmethod
    def of_call(cls, scaling: float, causal: bool, kwargs: dict[str, Any]) -> AttentionOptions:
        """Options of a model's call; those beside `scaling` and `causal` are removed from its keyword arguments."""
        pop = kwargs.pop
        return cls(scaling, causal, pop("softcap", None), pop("s_aux", None), pop("position_bias", None))

    def only_scales(self) -> bool:
        """Whether logits are only scaled, which sdpa can do."""
        return self.softcap is None and self.s_aux is None

    @property
    def log2_factors(self) -> tuple[float, float]:
        """Scaling and softcap of logits in base 2."""
        return self.scaling * math.log2(math.e), (self.softcap or 1.0) * math.log2(math.e)

    @property
    def flags(self) -> tuple[Any, bool]:
        """Constants of kernels: how logits are bounded (False: not at all), and whether sinks have logits."""
        return self.softcap is not None, self.s_aux is not None


class ChannelScales(NamedTuple):
    """Factors of keys and values before they are encoded (see `tq_hf.codec.balance`).

    Each has the bits of a bfloat16 at most: the encoder's matrix products with them are exact.

    Args:
        keys: 1 / s, `[B, Hkv, Dk]` fp16; queries are divided by it. It is negative for the `loud_channels` of a head:
            layouts without loud channels take its size.
        values: 1 / t, `[B, Hkv, Dv]` fp16; outputs are divided by it.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def allocate(cls, batch: int, heads: int, key_dim: int, value_dim: int, device: torch.device) -> ChannelScales:
        """Channel scales of size one, with marks at the first channels."""
        keys = torch.empty(batch, heads, key_dim, dtype=torch.float16, device=device)
        return cls(keys, torch.empty(batch, heads, value_dim, dtype=torch.float16, device=device)).reset()

    def reset(self) -> ChannelScales:
        """Set the sizes to one, and mark the first channels."""
        for scales in self:
            scales.fill_(1)
        self.keys[..., : loud_channels(self.keys.shape[-1])] = -1
        return self

    def check(self, others: ChannelScales) -> None:
        """Raise a `ValueError` unless `others`, `[B or 1, Hkv, D]`, can replace these."""
        for own, other in zip(self, others, strict=True):
            if other.shape[1:] != own.shape[1:] or len(other) not in (1, len(own)):
                raise ValueError(
                    f"`balance` is of {list(other.shape[1:])} heads and channels, and this model has "
                    f"{list(own.shape[1:])}. Make it anew with `Balance.of(model)`."
                )

    def has_marks(self) -> bool:
        """Whether each head marks its number of loud channels. Waits for the device."""
        marked = (self.keys < 0).sum(-1) == loud_channels(self.keys.shape[-1])
        return self.keys.is_meta or bool(marked.all())

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> ChannelScales:
        """Apply `function` to both tensors."""
        return ChannelScales(function(self.keys), function(self.values))


@dataclass(frozen=True)
class PackedBlocks:
    """Packed blocks of a layer, with room for N blocks.

    Args:
        layout: Sizes of a block.
        data: `[B, Hkv, N, layout.block_words]` int32, the parts of a block one behind the other (see
            `tq_kernels.layout`). The last two dimensions are contiguous.
        channel_scales: Factors of the states before they were encoded, for all blocks.
    """

    layout: BlockLayout
    data: torch.Tensor
    channel_scales: ChannelScales

    @classmethod
    def allocate(cls, layout: BlockLayout, batch: int, heads: int, blocks: int, device: torch.device) -> PackedBlocks:
        """Allocate room for `blocks` blocks of `heads` KV heads, not filled, with channel scales of one."""
        data = torch.empty(batch, heads, blocks, layout.block_words, dtype=torch.int32, device=device)
        return cls(layout, data, ChannelScales.allocate(batch, heads, layout.key_dim, layout.value_dim, device))

    @property
    def key_words(self) -> torch.Tensor:
        """`[B, Hkv, N, layout.key_words]` int32, a view."""
        return self.data[..., : self.layout.key_words]

    @property
    def value_words(self) -> torch.Tensor:
        """`[B, Hkv, N, layout.value_words]` int32, a view."""
        return self.data[..., self.layout.key_words : self.layout.scales_at]

    @property
    def scales(self) -> torch.Tensor:
        """`[B, Hkv, N, 128]` int32, a view: fp16 key scale in the low half, fp16 value scale in the high half."""
        return self.data[..., self.layout.scales_at : self.layout.means_at]

    @property
    def key_means(self) -> torch.Tensor:
        """`[B, Hkv, N, layout.mean_size]` fp16: rotated means, then mean and unit of each loud channel; a view."""
        return self.data[..., self.layout.means_at :].view(torch.float16)

    @property
    def block_strides(self) -> tuple[int, int]:
        """Strides over the batch and over heads, in blocks; blocks follow one another."""
        assert self.capacity < 2 or self.data.stride(2) == self.layout.block_words
        return self.data.stride(0) // self.layout.block_words, self.data.stride(1) // self.layout.block_words

    @property
    def capacity(self) -> int:
        """Number of blocks there is room for."""
        return self.data.shape[2]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parts of N blocks by name, views."""
        return {name: getattr(self, name) for name in ("key_words", "value_words", "scales", "key_means")}

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PackedBlocks:
        """Apply `function` to every tensor, channel scales included."""
        return PackedBlocks(self.layout, function(self.data), self.channel_scales.map(function))

    def slice(self, start: int, stop: int) -> PackedBlocks:
        """Views of blocks `start` to `stop`."""
        return PackedBlocks(self.layout, self.data[:, :, start:stop], self.channel_scales)

    def resized(self, blocks: int, used: int) -> PackedBlocks:
        """Copy with room for `blocks` blocks and the first `used` of these."""
        data = self.data.new_empty(*self.data.shape[:2], blocks, self.data.shape[3])
        if used:
            data[:, :, :used] = self.data[:, :, :used]
        return PackedBlocks(self.layout, data, self.channel_scales)


class Pages(NamedTuple):
    """One layer's pages of a pool, with the channel scales of its blocks.

    Blocks and rows are views of one tensor: the pages of two heads are `layout.block_words` int32 words apart.

    Args:
        layout: Sizes of a block.
        blocks: `[pages, Hkv, layout.block_words]` int32, as `PackedBlocks.data`; empty if the layer is not compressed.
        rows: `[pages, Hkv, rows of a page, Dk + Dv]` of the model's dtype: a token's key, then its value.
        key_channel_scales: `[Hkv, Dk]` fp16 contiguous.
        value_channel_scales: `[Hkv, Dv]` fp16 contiguous.
        sinks: Number of first tokens of a sequence that stay rows, in a page of their own; 0 for no sinks and no page.
        ring_pages: Number of pages of a sequence's ring, the rows of its newest tokens: token t is in row
            `(t - sinks) % ring_rows`.
    """

    layout: BlockLayout
    blocks: torch.Tensor
    rows: torch.Tensor
    key_channel_scales: torch.Tensor
    value_channel_scales: torch.Tensor
    sinks: int
    ring_pages: int

    @property
    def page_blocks(self) -> int:
        """Number of blocks from a page to the next."""
        return self.blocks.stride(0) // self.blocks.stride(1)

    @property
    def page_rows(self) -> int:
        """Number of ring rows of a page."""
        return self.rows.shape[2]

    @property
    def ring_rows(self) -> int:
        """Number of rows of a ring."""
        return self.ring_pages * self.page_rows

    @property
    def first_block_column(self) -> int:
        """Column of block 0 in a block table."""
        return self.ring_pages + min(1, self.sinks) + 1

    @property
    def place(self) -> tuple[int, int, int]:
        """Sinks, ring rows and rows of a page: where kernels find a sequence's rows."""
        return self.sinks, self.ring_rows, self.page_rows


class DenseRows(NamedTuple):
    """Tokens of a prompt that stay dense, and their places.

    Args:
        rows: `[B, Hkv, ring + sinks, Dk + Dv]`, contiguous: a ring, then sinks; a token's key, then its value.
        ring: Number of rows of the ring.
        first_sink: Number of the sink for the first token.
        to_sinks: Number of tokens at the start that become sinks.
        start: First token that goes to the ring, with all tokens after it; they must fit.
        slot: Row of the ring for token `start`.
        held: Number of sinks, packed blocks and ring rows of the store afterwards.
        counts: Tensors to write `held` to (`DeviceCounts` of `tq_hf.tensors.layer`), or `None`.
    """

    rows: torch.Tensor
    ring: int
    first_sink: int
    to_sinks: int
    start: int
    slot: int
    held: tuple[int, int, int]
    counts: KeyValue | None = None


class HeldCounts:
    """Counts that the kernels of one step read: int32 scalars on the device, aligned to 16 bytes, and their addresses.

    Args:
        blocks: Number of packed blocks to read.
        rows: Number of residual rows to read, from row 128 * `blocks` modulo its size on.
        sinks: Number of sink rows to read.
    """

    def __init__(self, blocks: torch.Tensor, rows: torch.Tensor, sinks: torch.Tensor) -> None:
        self.tensors = blocks, rows, sinks
        # Addresses stay valid: the tensors are held.
        self.addresses = blocks.data_ptr(), rows.data_ptr(), sinks.data_ptr()


MOST_SEQUENCES = 1024
"""Number of sequences that kernels of steps with prompts are compiled for, at least: transformers' default maximum."""


class Sequences(NamedTuple):
    """One step over pages: B sequences of any lengths, their new tokens one after the other.

    A sequence b has `cu_seqlens_q[b + 1] - cu_seqlens_q[b]` new tokens and `cu_seqlens_k[b + 1] - cu_seqlens_k[b]`
    tokens with them. A sequence without new tokens is left alone, whether it has cached ones or only pads the batch.
    Tokens after `cu_seqlens_q[B]` are padding.

    Args:
        cu_seqlens_q: `[B + 1]` int32.
        cu_seqlens_k: `[B + 1]` int32.
        block_table: `[B, W]` int32: a sequence's ring pages, then the sink page if there is one, then a column that
            kernels do not read, then its blocks including those that this step completes; -1 for no page. Ring pages
            that no token has reached may be left out.
        packed: `[B]` int32, number of blocks to read packed. Tokens after them are in the ring, up to `ring_rows` with
            the new one. `None` for sliding windows, which have no blocks.
        max_q: Upper bound of the new tokens of a sequence; 1 if and only if all have one at most.
        lengths: Number of new tokens of the first sequences, if the host knows them; the others have none.
        past: Number of cached tokens of these sequences, if the host knows them.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    block_table: torch.Tensor
    packed: torch.Tensor | None
    max_q: int
    lengths: tuple[int, ...] | None = None
    past: tuple[int, ...] | None = None

    @property
    def least_padding(self) -> int:
        """Number of sequences that kernels are compiled for at least. A step with prompts has as many sequences as
        padded tokens, and every power of two of them would compile four kernels."""
        return 1 if self.max_q == 1 else MOST_SEQUENCES


class Tokens(NamedTuple):
    """New tokens of all sequences, one after the other; strides are multiples of 8, addresses of 16.

    Args:
        query: `[T, Hq, D]`.
        key: `[T, Hkv, D]` in the dtype of the rows.
        value: `[T, Hkv, D]`, likewise.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @property
    def row_strides(self) -> tuple[int, ...]:
        """Strides of keys and then of values over tokens and heads, in units of 8 elements."""
        return tuple(stride // 8 for states in self[1:] for stride in states.stride()[:2])
