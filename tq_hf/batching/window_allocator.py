"""Who owns which pages of sliding-window layers: transformers' allocator, for pages of the pool that packed ones share.

transformers gives both kinds of layers blocks of as many tokens, and sectors of the least common multiple of their
bytes: of dense and of packed blocks that would be gigabytes. Here a page of all sliding layers is a sector, a small
multiple of a packed block, with as many rows as fit (`tq_hf.tensors.pages.window_page`). One pool then serves both,
in whatever proportion requests have, and forks, preemption and offloading are transformers' own.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.cache_allocators import CachePool, SlidingAttentionCacheAllocator

from ..tensors.pages import LayerWindows, window_page


class WindowAllocator(SlidingAttentionCacheAllocator):
    """The pages of all sliding layers of a model.

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
        # To transformers a block is a page of one layer, of which not every byte is a token's.
        self.bytes_per_page, self.pages_per_block = self.bytes_per_block, 1
        self.tokens_per_block = self.tokens_per_page
        self.windows: dict[int, LayerWindows] = {}
        """What each layer sees of the pool."""

    @property
    def pages(self) -> int:
        """Pages of a request whose window is full."""
        return self._compute_blocks_needed(0, self.sliding_window, 0)

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: CachePool
    ) -> None:
        """Lay rows over the cache's bytes."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        self.write_trash_index = self.blocks_per_sector  # the first page of the second sector
        shape = (len(self.layer_indices), 2, self.tokens_per_page, self.num_key_value_heads, self.head_dim)
        size = torch.Size(shape).numel() * self.cache_dtype.itemsize
        rows = self._copy_view[:, :size].view(self.cache_dtype).unflatten(-1, shape)
        for i, layer in enumerate(self.layer_indices):
            self.windows[layer] = LayerWindows(rows[:, i], self.sliding_window, self.write_trash_index)

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """The pages of a request, as `tq_hf.batching.geometry` lists them."""
        return self.block_table[request_id][: self._compute_blocks_needed(0, past_length, query_length)]

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """The page of every new token."""
        table = self.block_table[request_id]
        tokens = range(past_length, past_length + query_length)
        return [table[token % self.sliding_window // self.tokens_per_page] for token in tokens]

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: torch.Tensor) -> None:
        """Write a request's table to its row `[max_blocks_per_request]` of the step's."""
        table = self.block_table[request_id]
        block_table[: len(table)].copy_(torch.tensor(table, dtype=block_table.dtype), non_blocking=True)

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Not here: windows are read and written by `tq_hf.ops.sliding_pages.windowed_step`."""
        raise RuntimeError("These pages are read by the attention `turboquant_paged` only; another one is set.")

    def get_cache_for_block_table(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Not here, as `update`."""
        return self.update()
