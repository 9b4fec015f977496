"""Allocators for the pages of requests: transformers' own, with packed pages and sliding windows in one pool.

`tq_hf.tensors.pages` draws the block table of a request. All state of a request is in its pages, and their order stays
the same as the request grows. Forks and offloading, which are transformers' own, therefore copy whole pages.

Shared pages are those that no later step writes: the sink page once all sinks are written, and the page of a block once
it is complete. Each is registered under the hash of its tokens and of all before, on which its bytes depend.

In transformers a sector is the least common multiple of what blocks of each kind take, which would be gigabytes.
Here a sector is one page of all sliding layers, a small multiple of a packed block (`tq_hf.tensors.pages.window_page`),
or has all states of a request, of a fixed size, in linear layers (gated delta rule, Mamba, short convolution).

The block table of a step is built on the device from the arguments that the engine passes to attention.
If every request has one new token, the engine passes a block table. Otherwise it passes two lists: `read_index` has one
number per cached token of all requests in sequence, `write_index` one per new token. Our allocators fill the part of a
request in both lists with the entries of its block table that `listed` counts. There are never more of these entries
than tokens, so the lists have room for them. `read_index` is empty in a step where no request has cached tokens.

Sliding-window layers have lists and tables of their own, for rings without blocks; the states of linear layers are a
ring of one page.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import takewhile
from math import ceil
from typing import Any, NamedTuple, TypeVar

import torch
from tq_kernels.format import BLOCK_TOKENS, due_blocks
from tq_kernels.layout import BlockLayout
from tq_kernels.types import AttentionOptions, ChannelScales, KeyValue, Sequences, Tokens
from transformers import PreTrainedConfig
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.cache_allocators import (
    CachePool,
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)

from ..config import TurboQuantConfig
from ..ops.dispatch import paged_step, windowed_step
from ..ops.sliding_pages import WINDOW_BYTES, plan_step
from ..ops.workspace import Workspace
from ..tensors.pages import LayerPages, LayerWindows, WindowStep, ring_pages, rows_per_page, window_page

LINEAR = ("linear_attention", "conv")
"""Kinds of layers that transformers caches as states of a fixed size."""
WITHOUT_CACHE = ("mlp", "moe")
"""Kinds of layers that cache nothing (Nemotron-H)."""

Length = TypeVar("Length", int, torch.Tensor)
HostLengths = tuple[tuple[int, ...], tuple[int, ...]]
"""Numbers of new tokens, and of cached ones, by request."""


class TableShape(NamedTuple):
    """Columns of a block table (see `tq_hf.tensors.pages`): `sinks` and `residual` tokens at the start and at the end
    are read as rows, and a ring has `ring_pages` pages of `page_rows` rows. Windows are rings without blocks."""

    sinks: int
    residual: int
    ring_pages: int
    page_rows: int
    has_blocks: bool = True

    @classmethod
    def of(cls, config: TurboQuantConfig, layout: BlockLayout, dtype: torch.dtype) -> TableShape:
        """Shape for blocks of `layout` and states of `dtype`."""
        rings, rows = ring_pages(config, layout, dtype), rows_per_page(layout, dtype)
        return cls(config.sink_tokens, config.residual_length, rings, rows)

    @property
    def sink_pages(self) -> int:
        """Number of sink pages, 0 or 1. They follow the ring."""
        return min(1, self.sinks)

    @property
    def shared_blocks(self) -> int:
        """Column that has no page but the number of shared blocks that a request began with. Blocks follow."""
        return self.ring_pages + self.sink_pages

    def width(self, length: int) -> int:
        """Number of columns for a request of `length` tokens."""
        return self.ring_pages + self.has_blocks * (self.sink_pages + 1 + due_blocks(length, self.sinks, 0))

    def longest(self, width: int) -> int:
        """Number of tokens of the longest request that fits into `width` columns."""
        blocks = width - self.shared_blocks - 1
        return self.sinks + BLOCK_TOKENS * (blocks + 1) - 1 if blocks >= 0 else 0


def listed(length: Length, shape: TableShape) -> tuple[Length, Length]:
    """Count the table entries of a request of `length` tokens that the engine's lists carry: ring pages with tokens,
    and entries after the ring. A request of fewer than 128 tokens has only the sink page there: it shares no blocks."""
    rows = (length - shape.sinks) * (length > shape.sinks)
    reached = (rows + shape.page_rows - 1) // shape.page_rows
    ring = reached + (shape.ring_pages - reached) * (reached > shape.ring_pages)
    after = shape.sink_pages * (length > 0) + (length >= BLOCK_TOKENS) + rows // BLOCK_TOKENS
    return ring, after * shape.has_blocks


def sequences_of(
    kwargs: dict[str, Any], shape: TableShape, index: int = 0, lengths: HostLengths | None = None
) -> Sequences:
    """Build the sequences of a step for layers of kind `index`, with tables in this shape, by the arguments that the
    engine passes to attention functions, and `lengths` and `past` on the host, if known. No value is read from the
    device, so graphs can replay this."""
    cu_seqlens_q, cu_seqlens_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]["full_attention"]
    if kwargs["block_table"] is not None:
        table, max_q = kwargs["block_table"][index], 1
    else:
        read, write = kwargs["read_index"][index], kwargs["write_index"][index]
        longest, max_q = kwargs["max_length_k"]["full_attention"], kwargs["max_length_q"]
        column = torch.arange(shape.width(longest), device=write.device)
        in_ring, entry = column < shape.ring_pages, column - shape.ring_pages
        if read.numel():
            ring, after = listed(cu_seqlens_k.diff()[:, None], shape)  # [B, 1]; column indices are [width]
            start = (ring + after).cumsum(0) - (ring + after)
        else:
            ring, after = listed(cu_seqlens_q.diff()[:, None], shape)
            read, start = write, cu_seqlens_q[:-1, None]
        place = start + torch.where(in_ring, column, ring + entry)
        has_entry = torch.where(in_ring, column < ring, entry < after)
        table = torch.where(has_entry, read[place.clamp(0, len(read) - 1)], -1).int()
    if not shape.has_blocks:
        return Sequences(cu_seqlens_q, cu_seqlens_k, table[:, : shape.ring_pages], None, max_q)
    past = cu_seqlens_k.diff() - cu_seqlens_q.diff()
    packed = (past - shape.sinks - shape.residual).clamp(min=0) // BLOCK_TOKENS
    # The number of shared blocks is -1 in a table that does not list it.
    packed = torch.maximum(packed, table[:, shape.shared_blocks])
    return Sequences(cu_seqlens_q, cu_seqlens_k, table, packed, max_q, *(lengths or ()))


StateName = tuple[str, int]
"""A state of a linear layer: "conv" or "recurrent", and its index among the layer's states of that kind."""


StateShapes = dict[int, dict[StateName, tuple[torch.Size, torch.dtype]]]
"""Shape and dtype of each state of linear layers, by layer and name."""


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """Kind of each layer of a decoder, as transformers groups them: `num_hidden_layers` may be another number."""
    kinds = list(getattr(config, "layer_types", None) or ())
    return kinds or [kind for kind, layers in group_layers_by_attn_type(config).items() for _ in layers]


def linear_layers(config: PreTrainedConfig) -> list[int]:
    """Indices of a decoder's layers with states of a fixed size."""
    return [i for i, kind in enumerate(layer_kinds(config)[: config.num_hidden_layers]) if kind in LINEAR]


def paged_layers(config: PreTrainedConfig) -> dict[str, list[int]]:
    """Indices of the layers of a decoder that have keys and values, by kind."""
    kinds = layer_kinds(config)
    paged = dict.fromkeys(kind for kind in kinds if kind not in LINEAR + WITHOUT_CACHE)
    return {kind: [i for i, other in enumerate(kinds) if other == kind] for kind in paged}


def page_owners(config: PreTrainedConfig) -> dict[int, int]:
    """Map each layer with keys and values to the layer that owns the pages it reads: itself. But the last
    `num_kv_shared_layers` layers of Gemma 3n and Gemma 4 have no keys and values, and read the pages of the last layer
    of the same kind that has them."""
    kinds = paged_layers(config).values()
    own = len(layer_kinds(config)) - (getattr(config, "num_kv_shared_layers", None) or 0)
    last = {max(layer for layer in layers if layer < own): layers for layers in kinds}
    return dict(sorted((layer, min(layer, owner)) for owner, layers in last.items() for layer in layers))


class LayerSpec(NamedTuple):
    """Heads of a layer in this process, channels of a key and of a value, and their dtype. Latents are the keys of one
    head, and rotary keys its values."""

    query_heads: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


def block_hash(parent: int | None, tokens: list[int]) -> int:
    """Hash of a block's tokens and of all before them: even, 128 bits, as it also names files."""
    before = b"" if parent is None else parent.to_bytes(16, "little")
    digest = blake2b(before + array("i", tokens).tobytes(), digest_size=16).digest()
    return int.from_bytes(digest, "little") & ~1


class PoolAllocator(FullAttentionCacheAllocator):
    """Allocator for one kind of layers, with pages in the pool of all layers. Only the attention `turboquant_paged`
    reads the pool.

    A kind of layers is a subclass, which the cache asks for sizes and for the plan of a step. With keys and values it
    has a method `step`, which stores the new tokens in the pages of a layer (those of prompts only if `store`: later
    layers may read the same pages), and returns their attention `[T, Hq, D]`.
    """

    shape: TableShape
    """Columns of a block table."""
    pages: dict[int, Any]
    """Views of the pool by layer."""
    scratch_bytes = 0
    """Bytes of scratch of a step, whatever number of tokens it has, besides those of full attention."""

    def bytes_of(self, tokens: int) -> int:
        """Bytes of `tokens` more tokens of a request."""
        return 0

    def plan(self, kwargs: dict[str, Any], total: int, lengths: HostLengths | None) -> Any:
        """Plan of a step of `total` tokens for all layers, by the arguments that the engine passes to attention."""
        return sequences_of(kwargs, self.shape, self.index, lengths)

    def _set_block(self, size: int, tokens: int) -> None:
        """Set the bytes and tokens of a page in all layers. transformers takes a block to be a page of one layer."""
        self.bytes_per_block = self.bytes_per_page = size
        self.tokens_per_block, self.pages_per_block = tokens, 1

    def pages_of(self, length: int) -> int:
        """Number of pages that a request of `length` tokens has."""
        return self._compute_blocks_needed(0, length, 0)

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: CachePool
    ) -> None:
        """View the bytes of the cache as pages."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        self.write_trash_index = self.blocks_per_sector  # the first page of the second sector
        self.pages = dict(zip(self.layer_indices, self._views(self._copy_view), strict=True))

    def _views(self, pool: torch.Tensor) -> Iterator[Any]:
        """View the pages `[pages, bytes]` of all layers, layer by layer."""
        raise NotImplementedError

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: torch.Tensor) -> None:
        """Write the table of a request to its row `[max_blocks_per_request]` of the step's block table."""
        table = self._table(request_id, past_length + query_length)
        block_table[: len(table)].copy_(torch.tensor(table, dtype=block_table.dtype), non_blocking=True)

    def _table(self, request_id: str, length: int) -> list[int]:
        """Block table of a request of `length` tokens."""
        return self.block_table[request_id][: self.pages_of(length)]

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Entries of the block table that `listed` selects."""
        table = self._table(request_id, past_length + query_length)
        ring, after = listed(past_length + query_length, self.shape)
        return table[:ring] + table[self.shape.ring_pages : self.shape.ring_pages + after]

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """One number per new token. A request without cached tokens puts the entries of its block table first; all
        other numbers are 0."""
        numbers = [] if past_length else self.get_read_indices(request_id, 0, query_length)
        return numbers + [0] * (query_length - len(numbers))

    def update(self, *args: Any, **kwargs: Any) -> KeyValue:
        raise RuntimeError(
            "Only the attention `turboquant_paged` reads packed pages, and the model has another one. Leave its "
            "attention as it is while it serves requests."
        )

    get_cache_for_block_table = update


class TurboQuantAllocator(PoolAllocator):
    """Allocator of the packed pages of all full-attention layers.

    Args:
        tq_config, layout: Encoding of blocks, and their sizes.
        channel_scales: Channel scales `[1, Hkv, D]` by layer. A layer that is not listed has scales of 1.
        **options: Arguments of transformers' allocator.
    """

    def __init__(
        self, tq_config: TurboQuantConfig, channel_scales: dict[int, ChannelScales], layout: BlockLayout, **options: Any
    ) -> None:
        config: PreTrainedConfig = options["config"]
        self.tq_config, self.channel_scales, self.layout = tq_config.of_layer(config), channel_scales, layout
        super().__init__(**options)
        by_layer = tq_config.by_layer(len(layer_kinds(config)))
        self.dense = {layer for layer in self.layer_indices if by_layer[layer] is None}
        """Layers that are not compressed."""
        dims = layout.key_dim + layout.value_dim
        self.row_bytes = BLOCK_TOKENS * dims * self.cache_dtype.itemsize * self.num_key_value_heads
        """Bytes of the rows of one block in a layer that is not compressed."""
        # Kernels measure the distance between pages in packed blocks.
        unit = self.layout.block_bytes
        rows, packed = -(-self.row_bytes // unit) * unit, self.num_key_value_heads * unit
        self.layer_bytes = [rows if layer in self.dense else packed for layer in self.layer_indices]
        self._set_block(sum(self.layer_bytes), BLOCK_TOKENS)
        self.shape = TableShape.of(tq_config, self.layout, self.cache_dtype)
        self.prefix_blocks: dict[str, int] = {}
        """Number of shared blocks that a request began with, by request id."""
        self.salt: int | None = None
        """Hash before the first block of a prompt; another one for every set of weights, and for every key of files."""
        self.stale: set[str] = set()
        """Ids of requests that began with earlier weights."""
        self._sinks_of_match: list[int] = []

    def _views(self, pool: torch.Tensor) -> Iterator[LayerPages]:
        for layer, states in zip(self.layer_indices, pool.split(self.layer_bytes, 1), strict=True):
            is_packed = layer not in self.dense
            page = (states if is_packed else states[:, : self.row_bytes]).unflatten(1, (self.num_key_value_heads, -1))
            view = LayerPages.of(page, self.tq_config, self.layout, self.cache_dtype, is_packed)
            scales = self.channel_scales.get(layer) if is_packed else None
            yield view if scales is None else view.with_channel_scales(scales)

    def step(
        self, layer: int, new: Tokens, plan: Any, options: AttentionOptions, scratch: Workspace, *, store: bool
    ) -> torch.Tensor:
        return paged_step(new, self.pages[layer], plan, options, scratch, store=store)

    def _sink_hash(self, tokens: list[int]) -> int:
        """Hash of the sink page, made from the sink tokens. It is odd, those of blocks are even."""
        return block_hash(self.salt, tokens[: self.tq_config.sink_tokens]) | 1

    def names(self, prompt_ids: list[int]) -> Iterator[int]:
        """Hashes of the pages that a prompt can share: the sink page, if any, and blocks before the last token."""
        parent = self.salt
        if self.shape.sinks:
            parent = self._sink_hash(prompt_ids)
            yield parent
        for block in range(due_blocks(len(prompt_ids) - 1, self.shape.sinks, 0)):
            parent = block_hash(parent, self._block_tokens(prompt_ids, block))
            yield parent

    def _block_tokens(self, tokens: list[int], block: int) -> list[int]:
        """Tokens of a block. The last block may have fewer than 128."""
        start = self.shape.sinks + block * BLOCK_TOKENS
        return tokens[start : start + BLOCK_TOKENS]

    def _compute_blocks_needed(self, allocated_blocks: int, past_length: int, query_length: int) -> int:
        # The column `shared_blocks` is no page.
        return max(0, self.shape.width(past_length + query_length) - 1 - allocated_blocks)

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        if not past_length:  # an earlier request may have had the same id
            self.prefix_blocks.pop(request_id, None)
        super().allocate_cache_to_request(request_id, past_length, query_length)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Free the pages of a request. With `no_cache` the request is offloaded and may resume with the same blocks."""
        if request_id in self.block_table and not no_cache:
            self.prefix_blocks.pop(request_id, None)
        super().free_blocks(request_id, no_cache)

    def count_shareable_blocks(self, source_request_id: str, past_length: int) -> int:
        """Number of pages that a fork shares with this request: complete blocks, and the sink page once complete."""
        if not self.use_block_sharing or past_length < self.shape.sinks:
            return 0
        return self.shape.sink_pages + due_blocks(past_length, self.shape.sinks, 0)

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        """Build the table of a fork. The ring is copied, and pages that are not shared."""
        source, ring = self.block_table[source_request_id], self.shape.ring_pages
        shared_end = ring + self.count_shareable_blocks(source_request_id, past_length)
        shared, copied = source[ring:shared_end], source[:ring] + source[shared_end:]
        for block in shared:
            self.ledger.acquire(block)
        copies = self.pool.get_free_blocks(self.index, len(copied))
        self.block_table[dest_request_id] = copies[:ring] + shared + copies[ring:]
        if source_request_id in self.stale:
            self.stale.add(dest_request_id)
        if source_request_id in self.prefix_blocks:
            self.prefix_blocks[dest_request_id] = self.prefix_blocks[source_request_id]
        return copied, copies

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        """Find blocks that match the prompt without its last token. Returns none if no sink page matches."""
        found = map(self.ledger.hash_to_block.get, self.names(prompt_ids))
        pages = [page for page in takewhile(lambda page: page is not None, found) if page is not None]
        self._sinks_of_match = pages[: self.shape.sink_pages]
        return pages[self.shape.sink_pages :]

    def acquire_prefix_blocks(self, request_id: str, prefix_len: int, block_ids: list[int]) -> None:
        """Start a table from a new ring, for which the pool has pages, the sink page that `match_prefix_blocks` found
        last, and the matching blocks."""
        super().acquire_prefix_blocks(request_id, prefix_len, block_ids)
        for page in self._sinks_of_match:
            self.ledger.acquire(page)
        ring = self.pool.get_free_blocks(self.index, self.shape.ring_pages)
        self.block_table[request_id][:0] = ring + self._sinks_of_match
        self.prefix_blocks[request_id] = len(block_ids)

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        table = self.block_table.get(request_id)
        if table is None or request_id in self.stale:  # the request was cancelled during its step, or weights changed
            return
        parent, first = self.salt, self.shape.shared_blocks
        if self.shape.sinks:
            parent = self._sink_hash(token_ids)
            if new_new_blocks and table[first - 1] not in self.ledger.block_to_hash:
                self._register(table, first - 1, parent)
        for i, page in enumerate(table[first:]):
            name = self.ledger.block_to_hash.get(page)
            if name is None:
                tokens = self._block_tokens(token_ids, i)
                if new_new_blocks == 0 or len(tokens) < BLOCK_TOKENS:
                    return
                name = block_hash(parent, tokens)
                new_new_blocks -= 1
                self._register(table, first + i, name)
            parent = name

    def forget_prefixes(self, offloaded: Iterable[str]) -> None:
        """Share no page that is written, or of a request that has begun, with later requests. `offloaded`: requests
        whose pages are on the CPU."""
        self.salt, self.stale = (self.salt or 0) + 1, {*self.block_table, *offloaded}

    def _register(self, table: list[int], place: int, page_hash: int) -> None:
        """Register the hash of a page. If another page already has this hash, put that page into the table."""
        page = table[place]
        identical = self.ledger.register_new_hash(page, page_hash)
        if identical is not None:
            self.ledger.acquire(identical)
            table[place] = identical
            self.release(page)

    def release(self, page: int) -> None:
        """Let go of a page, which is free if no other request has it."""
        if self.ledger.release(page):
            self.pool.free_blocks(self.index, [page])

    def _table(self, request_id: str, length: int) -> list[int]:
        pages, first = self.block_table[request_id][: self.pages_of(length)], self.shape.shared_blocks
        return [*pages[:first], self.prefix_blocks.get(request_id, 0), *pages[first:]]


class WindowAllocator(PoolAllocator, SlidingAttentionCacheAllocator):
    """Allocator of dense pages for the windows of all sliding layers. A page has a multiple of `unit` bytes.
    `options` are arguments of transformers' allocator, without `page_size`."""

    supports_block_table = True
    scratch_bytes = WINDOW_BYTES

    def __init__(self, unit: int, **options: Any) -> None:
        heads, dtype = options["num_key_value_heads"], options["cache_dtype"]
        super().__init__(page_size=1, **options)
        row = self.get_bytes_per_page(heads, self.head_dim, dtype, 1) * len(self.layer_indices)
        size, self.tokens_per_page = window_page(unit, row, self.sliding_window)  # some bytes may be unused
        self._set_block(size, self.tokens_per_page)
        self.shape = TableShape(0, 0, self.pages_of(self.sliding_window), self.tokens_per_page, has_blocks=False)

    def _views(self, pool: torch.Tensor) -> Iterator[LayerWindows]:
        shape = (len(self.layer_indices), 2, self.tokens_per_page, self.num_key_value_heads, self.head_dim)
        size = torch.Size(shape).numel() * self.cache_dtype.itemsize
        for rows in pool[:, :size].view(self.cache_dtype).unflatten(-1, shape).unbind(1):
            yield LayerWindows(rows, self.sliding_window, self.write_trash_index)

    def bytes_of(self, tokens: int) -> int:
        return ceil(self.bytes_per_block * tokens / self.tokens_per_page)

    def plan(self, kwargs: dict[str, Any], total: int, lengths: HostLengths | None) -> WindowStep:
        return plan_step(super().plan(kwargs, total, lengths), total)

    def step(
        self, layer: int, new: Tokens, plan: Any, options: AttentionOptions, scratch: Workspace, *, store: bool
    ) -> torch.Tensor:
        return windowed_step(new, self.pages[layer], plan, options, store=store)


def as_words(states: torch.Tensor) -> torch.Tensor:
    """View contiguous rows `[B, ...]` as elements of 16 bytes `[B, n]` where they have whole ones: torch's kernels that
    copy rows by index take an element a thread."""
    flat = states.flatten(1)
    return flat if flat.shape[1] * flat.itemsize % 16 else flat.view(torch.complex128)


class StateStep(NamedTuple):
    """Pages `[B]` int64 that the requests of a step read their states from (page 0, which is zero, for a new request)
    and write them to. `rows` are requests `[b]` with equally many new tokens, and the places of these tokens `[b, n]`
    in the row of the step; `None` if every request has one new token."""

    sources: torch.Tensor
    targets: torch.Tensor
    rows: list[tuple[torch.Tensor, torch.Tensor]] | None


class StateAllocator(PoolAllocator):
    """Allocator of the states of all linear layers: one page per request, from its first token to its last, as large as
    a multiple of `unit` bytes. `options` are arguments of transformers' allocator, without `page_size`. Page 0 is zero
    and never written. New requests read their states from it."""

    supports_block_sharing = False

    def __init__(self, unit: int, shapes: StateShapes, **options: Any) -> None:
        super().__init__(page_size=1, **(options | {"layer_indices": sorted(shapes)}))
        self.shapes, size = shapes, 0
        self._places: dict[tuple[int, StateName], slice] = {}
        for layer, states in shapes.items():
            for name, (shape, dtype) in states.items():
                self._places[layer, name] = slice(size, size + shape.numel() * dtype.itemsize)
                size += -(-shape.numel() * dtype.itemsize // 128) * 128
        self._set_block(-(-size // unit) * unit, 1)
        self.shape = TableShape(0, 0, 1, 1, has_blocks=False)

    def _compute_blocks_needed(self, allocated_blocks: int, past_length: int, query_length: int) -> int:
        return max(0, 1 - allocated_blocks)

    def plan(self, kwargs: dict[str, Any], total: int, lengths: HostLengths | None) -> StateStep:
        # With a block table, no value is read on the host, so graphs can replay this.
        sequences = super().plan(kwargs, total, None)
        pages, cu_seqlens_q = sequences.block_table[:, 0].long(), sequences.cu_seqlens_q
        pages, rows = torch.where(pages < 0, self.write_trash_index, pages), None  # rows that pad the batch
        if kwargs["block_table"] is None:
            counts, rows = cu_seqlens_q.diff().tolist(), []
            for count in dict.fromkeys(filter(None, counts)):
                requests = torch.tensor([i for i, each in enumerate(counts) if each == count], device=pages.device)
                rows.append((requests, cu_seqlens_q[requests, None] + torch.arange(count, device=pages.device)))
        is_new = sequences.cu_seqlens_k.diff() == cu_seqlens_q.diff()
        return StateStep(torch.where(is_new, 0, pages), pages, rows)

    def _views(self, pool: torch.Tensor) -> Iterator[dict[StateName, torch.Tensor]]:
        for layer in self.layer_indices:
            yield {
                name: pool[:, self._places[layer, name]].view(dtype).unflatten(-1, shape)
                for name, (shape, dtype) in self.shapes[layer].items()
            }

    def read(self, layer: int, pages: torch.Tensor) -> dict[StateName, torch.Tensor]:
        """Copy the states `[B, ...]` of a layer from the pages `[B]` of requests."""
        held = self.pages[layer].items()
        return {name: as_words(x).index_select(0, pages).view(x.dtype).unflatten(1, x.shape[1:]) for name, x in held}

    def write(self, layer: int, pages: torch.Tensor, states: dict[StateName, torch.Tensor]) -> None:
        """Copy the states `[B, ...]` of a layer to the pages `[B]` of requests."""
        for name, into in self.pages[layer].items():
            as_words(into).index_copy_(0, pages, as_words(states[name].to(into.dtype).contiguous()))
