"""Allocates the pages of requests: transformers' allocators, for packed pages and for windows of one pool.

The pages of a request, in the order of its block table (`tq_hf.tensors.pages` has the layouts): those of its ring, the
sink page if there are sinks, a page for each complete block. A request is wholly in its pages, in an order that growth
keeps: forks and offloading copy whole pages.

What is shared: a page that no step writes again, which is the sink page once all sinks are there, and a block's page
after the step that completes the block. Each is known by the hash of its own tokens and of all before, for those are
what its bytes depend on: the sinks', then the sinks' and block 0's, and so on. A request that begins with such pages
has no rows of their tokens in its ring, so it reads those blocks packed even where they are among its newest tokens.
How many they are goes with its table (`prefix_blocks`).

In transformers, blocks of both kinds of layers have as many tokens, and a sector is the least common multiple of their
bytes: with dense and packed blocks, gigabytes. Here one page of all sliding layers is a sector, a small multiple of a
packed block (`tq_hf.tensors.pages.window_page`). One pool then serves both in any proportion, and forks, preemption and
offloading are transformers' own.
"""

from __future__ import annotations

from typing import Any

import torch
from tq_kernels.format import BLOCK_TOKENS, due_blocks
from tq_kernels.types import ChannelScales
from transformers import PreTrainedConfig
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.cache_allocators import (
    CachePool,
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash

from ..config import TurboQuantConfig
from ..tensors.pages import LayerPages, LayerWindows, window_page
from .geometry import TableShape, listed


def page_owners(config: PreTrainedConfig) -> dict[int, int]:
    """By layer, the layer whose pages it reads: itself, but of the last `num_kv_shared_layers` of Gemma 3n and Gemma 4
    the last layer of its kind that has keys and values of its own."""
    kinds = group_layers_by_attn_type(config).values()
    own = sum(map(len, kinds)) - (getattr(config, "num_kv_shared_layers", None) or 0)
    last = {max(layer for layer in layers if layer < own): layers for layers in kinds}
    return dict(sorted((layer, min(layer, owner)) for owner, layers in last.items() for layer in layers))


class _PoolAllocator(FullAttentionCacheAllocator):
    """Pages of a pool that both kinds of layers share, for the attention `turboquant_paged` alone."""

    def pages_of(self, length: int) -> int:
        """Pages of a request of `length` tokens."""
        return self._compute_blocks_needed(0, length, 0)

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: CachePool
    ) -> None:
        """See the cache's bytes as pages."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        self.write_trash_index = self.blocks_per_sector  # the first page of the second sector

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: torch.Tensor) -> None:
        """Write a request's table to its row `[max_blocks_per_request]` of the step's."""
        table = self._table(request_id, past_length + query_length)
        block_table[: len(table)].copy_(torch.tensor(table, dtype=block_table.dtype), non_blocking=True)

    def _table(self, request_id: str, length: int) -> list[int]:
        """The table of a request of `length` tokens."""
        return self.block_table[request_id][: self.pages_of(length)]

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Refuse any other attention."""
        raise RuntimeError("Packed pages are read by the attention `turboquant_paged` only; another one is set.")

    get_cache_for_block_table = update


class TurboQuantAllocator(_PoolAllocator):
    """Packed pages of all full-attention layers.

    Args:
        tq_config: How blocks are encoded.
        channel_scales: Channel scales by layer, `[1, Hkv, D]`, by default one.
        **options: Arguments of transformers' allocator.
    """

    def __init__(self, tq_config: TurboQuantConfig, channel_scales: dict[int, ChannelScales], **options: Any) -> None:
        self.tq_config = tq_config
        self.channel_scales = channel_scales
        super().__init__(**options)
        # As transformers groups them: `num_hidden_layers` may be another number.
        by_layer = tq_config.by_layer(len(page_owners(options["config"])))
        self.dense = {layer for layer in self.layer_indices if by_layer[layer] is None}
        """Layers that are not compressed."""
        self.row_bytes = 2 * BLOCK_TOKENS * self.head_dim * self.cache_dtype.itemsize * self.num_key_value_heads
        """Bytes of a block's rows of a layer that is not compressed."""
        # Kernels count from page to page in packed blocks.
        unit = tq_config.layout(self.head_dim).block_bytes
        rows = -(-self.row_bytes // unit) * unit
        self.layer_bytes = [rows if layer in self.dense else self.bytes_per_page for layer in self.layer_indices]
        # For transformers a block is a page of one layer.
        self.bytes_per_block = self.bytes_per_page = sum(self.layer_bytes)
        self.pages_per_block, self.tokens_per_block = 1, self.tokens_per_page
        self.shape = TableShape.of(tq_config, self.head_dim, self.cache_dtype)
        """What tables consist of."""
        self.prefix_blocks: dict[str, int] = {}
        """Blocks of others that requests began with, if any."""
        self._sinks_of_match: list[int] = []
        self.pages: dict[int, LayerPages] = {}
        """Views of the pool by layer."""

    def get_bytes_per_page(  # type: ignore[override]
        self, num_key_value_heads: int, head_dim: int, cache_dtype: torch.dtype, page_size: int
    ) -> int:
        """Bytes of the packed blocks of all heads of a layer."""
        return num_key_value_heads * self.tq_config.layout(head_dim).block_bytes

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: CachePool
    ) -> None:
        """See the cache's bytes as packed pages of each layer."""
        super().register_cache_tensor(bytes_per_sector, non_trash_bytes, cache_tensor, pool)
        layers = self._copy_view.split(self.layer_bytes, 1)
        for layer, states in zip(self.layer_indices, layers, strict=True):
            if layer in self.dense:
                page = states[:, : self.row_bytes].unflatten(1, (self.num_key_value_heads, -1))
                self.pages[layer] = LayerPages.dense(page, self.tq_config, self.head_dim, self.cache_dtype)
                continue
            page = states.unflatten(1, (self.num_key_value_heads, -1))
            view = LayerPages.of_pool(page[:, None], 0, self.tq_config, self.head_dim, self.cache_dtype)
            scales = self.channel_scales.get(layer)
            self.pages[layer] = view if scales is None else view.with_channel_scales(scales)

    def _sink_hash(self, tokens: list[int]) -> int:
        """The hash of the sink page: of its tokens, which are fewer than a block's."""
        return compute_block_hash(None, tokens[: self.tq_config.sink_tokens])

    def _block_tokens(self, tokens: list[int], block: int) -> list[int]:
        """The tokens of a block, or what there is of them."""
        start = self.shape.sinks + block * BLOCK_TOKENS
        return tokens[start : start + BLOCK_TOKENS]

    def _compute_blocks_needed(self, allocated_blocks: int, past_length: int, query_length: int) -> int:
        # A column of the table is no page.
        return max(0, self.shape.width(past_length + query_length) - 1 - allocated_blocks)

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """Allocate pages for new tokens."""
        if not past_length:  # an id may have been another's
            self.prefix_blocks.pop(request_id, None)
        super().allocate_cache_to_request(request_id, past_length, query_length)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Give up the pages of a request. With `no_cache` it is offloaded and may come back as it was."""
        if request_id in self.block_table and not no_cache:
            self.prefix_blocks.pop(request_id, None)
        super().free_blocks(request_id, no_cache)

    def count_shareable_blocks(self, source_request_id: str, past_length: int) -> int:
        """Pages that a fork shares with this request: complete blocks and the sink page, once it is complete."""
        if not self.use_block_sharing or past_length < self.shape.sinks:
            return 0
        return self.shape.sink_pages + due_blocks(past_length, self.shape.sinks, 0)

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        """Build the table of a fork. Returns the pages to copy and their copies: the ring, and pages not shared."""
        source, ring = self.block_table[source_request_id], self.shape.ring_pages
        shared_end = ring + self.count_shareable_blocks(source_request_id, past_length)
        shared, copied = source[ring:shared_end], source[:ring] + source[shared_end:]
        for block in shared:
            self.ledger.acquire(block)
        copies = self.pool.get_free_blocks(self.index, len(copied))
        self.block_table[dest_request_id] = copies[:ring] + shared + copies[ring:]
        if source_request_id in self.prefix_blocks:
            self.prefix_blocks[dest_request_id] = self.prefix_blocks[source_request_id]
        return copied, copies

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        """Blocks that match the prompt, but for its last token; none if their sink page does not."""
        parent = None
        if self.shape.sinks:
            parent = self._sink_hash(prompt_ids)
            page = self.ledger.hash_to_block.get(parent)
            if page is None:
                return []
            self._sinks_of_match = [page]
        matched: list[int] = []
        for block in range(due_blocks(len(prompt_ids) - 1, self.shape.sinks, 0)):
            parent = compute_block_hash(parent, self._block_tokens(prompt_ids, block))
            page = self.ledger.hash_to_block.get(parent)
            if page is None:
                break
            matched.append(page)
        return matched

    def acquire_prefix_blocks(self, request_id: str, prefix_len: int, block_ids: list[int]) -> None:
        """Begin a table with a new ring, for which the pool must have pages, the sinks matched just before, and blocks
        that match the prompt."""
        super().acquire_prefix_blocks(request_id, prefix_len, block_ids)
        for page in self._sinks_of_match:
            self.ledger.acquire(page)
        ring = self.pool.get_free_blocks(self.index, self.shape.ring_pages)
        self.block_table[request_id][:0] = ring + self._sinks_of_match
        self.prefix_blocks[request_id] = len(block_ids)

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """Register the hashes of blocks that the last step completed, and replace blocks that exist already."""
        table = self.block_table.get(request_id)
        if table is None:  # cancelled while its step was under way
            return
        parent, first = None, self.shape.first_block - 1
        if self.shape.sinks:
            parent = self._sink_hash(token_ids)
            if new_new_blocks and table[first - 1] not in self.ledger.block_to_hash:
                self._register(table, first - 1, parent)
        for i, page in enumerate(table[first:]):
            block_hash = self.ledger.block_to_hash.get(page)
            if block_hash is None:
                tokens = self._block_tokens(token_ids, i)
                if new_new_blocks == 0 or len(tokens) < BLOCK_TOKENS:
                    return
                block_hash = compute_block_hash(parent, tokens)
                new_new_blocks -= 1
                self._register(table, first + i, block_hash)
            parent = block_hash

    def _register(self, table: list[int], place: int, page_hash: int) -> None:
        """Register the hash of a page, or put the page that has this hash already in its place."""
        page = table[place]
        identical = self.ledger.register_new_hash(page, page_hash)
        if identical is not None:
            self.ledger.acquire(identical)
            table[place] = identical
            if self.ledger.release(page):
                self.pool.free_blocks(self.index, [page])

    def _table(self, request_id: str, length: int) -> list[int]:
        """The table of a request of `length` tokens."""
        pages, first = self.block_table[request_id][: self.pages_of(length)], self.shape.first_block - 1
        return [*pages[:first], self.prefix_blocks.get(request_id, 0), *pages[first:]]

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """The numbers of a request's table that `tq_hf.batching.geometry` lists."""
        table = self._table(request_id, past_length + query_length)
        ring, after = listed(past_length + query_length, self.shape)
        return table[:ring] + table[self.shape.ring_pages : self.shape.ring_pages + after]

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """The same numbers in the place of the new tokens, if they are all that a request has, and zeros."""
        numbers = [] if past_length else self.get_read_indices(request_id, 0, query_length)
        return numbers + [0] * (query_length - len(numbers))


class WindowAllocator(_PoolAllocator, SlidingAttentionCacheAllocator):
    """Dense pages of the windows of all sliding layers.

    Args:
        unit: Bytes that every page is a multiple of.
        **options: Arguments of transformers' allocator, without `page_size`.
    """

    supports_block_table = True

    def __init__(self, unit: int, **options: Any) -> None:
        heads, dtype = options["num_key_value_heads"], options["cache_dtype"]
        super().__init__(page_size=1, **options)
        row = self.get_bytes_per_page(heads, self.head_dim, dtype, 1) * len(self.layer_indices)
        self.bytes_per_block, self.tokens_per_page = window_page(unit, row, self.sliding_window)
        # For transformers a block is a page of one layer, some of whose bytes may be no token's.
        self.bytes_per_page, self.pages_per_block = self.bytes_per_block, 1
        self.tokens_per_block = self.tokens_per_page
        self.windows: dict[int, LayerWindows] = {}
        """Views of the pool by layer."""

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: CachePool
    ) -> None:
        """See the cache's bytes as rows of each layer."""
        super().register_cache_tensor(bytes_per_sector, non_trash_bytes, cache_tensor, pool)
        shape = (len(self.layer_indices), 2, self.tokens_per_page, self.num_key_value_heads, self.head_dim)
        size = torch.Size(shape).numel() * self.cache_dtype.itemsize
        rows = self._copy_view[:, :size].view(self.cache_dtype).unflatten(-1, shape)
        for i, layer in enumerate(self.layer_indices):
            self.windows[layer] = LayerWindows(rows[:, i], self.sliding_window, self.write_trash_index)

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """The pages of a request, as `tq_hf.batching.geometry` lists them."""
        return self._table(request_id, past_length + query_length)

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """The page of every new token."""
        table = self.block_table[request_id]
        tokens = range(past_length, past_length + query_length)
        return [table[token % self.sliding_window // self.tokens_per_page] for token in tokens]
