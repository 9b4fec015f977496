"""The paged KV cache: a pool of packed pages, how many of them fit into memory, and attention over them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from inspect import signature
from itertools import count
from math import ceil, lcm
from typing import Any
from weakref import WeakValueDictionary

import torch
from tq_kernels.format import BLOCK_TOKENS, due_blocks
from tq_kernels.types import AttentionOptions, ChannelScales, Sequences
from transformers import ContinuousBatchingConfig, PreTrainedConfig
from transformers.generation.continuous_batching.cache import (
    PagedAttentionCache,
    PagedAttentionMemoryHandler,
    group_layers_by_attn_type,
)
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION, SLIDING_ATTENTION, CachePool
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.utils import WorkloadHints, find_head_dim, find_num_key_value_heads

from ..compat import layer_config
from ..config import TurboQuantConfig
from ..ops.dispatch import SCRATCH, decode_scratch_bytes, paged_step, prompt_buffer_bytes, step_scratch_bytes
from ..ops.sliding_pages import WINDOW_BYTES, WindowStep, plan_step, windowed_step
from ..ops.workspace import Scratch, Workspace
from .allocators import TurboQuantAllocator, WindowAllocator, page_owners
from .checks import check_positions
from .geometry import sequences_of, windows_of

KNOWS_TENSOR_PARALLELISM = "kv_tp_size" in signature(PagedAttentionMemoryHandler.__init__).parameters
"""Whether transformers counts a step's activations by GPU (from 5.24 on). Before, fewer pages fit than could."""

CACHES: WeakValueDictionary[int, TurboQuantPagedCache] = WeakValueDictionary()
"""Caches by their numbers, which compiled steps hold."""


class TurboQuantMemory(PagedAttentionMemoryHandler):
    """transformers' count of the pages that fit, without masks and gathered keys: attention reads pages in place.

    Args:
        tp_size: Number of GPUs among which heads are divided.
        *args, **kwargs: As in transformers' class.
    """

    def __init__(self, *args: Any, tp_size: int, **kwargs: Any) -> None:
        if KNOWS_TENSOR_PARALLELISM:
            kwargs["kv_tp_size"] = tp_size
        super().__init__(*args, **kwargs)
        self.num_attention_masks = 0
        self.kv_heads_at_peak = self.config.num_attention_heads // tp_size  # what attention returns
        self.scratch_bytes = 0
        """Bytes that every step needs beside, whatever its tokens."""

    @property
    def fixed_overhead_bytes(self) -> int:
        """Bytes that depend on neither pages nor tokens, with scratch."""
        return super().fixed_overhead_bytes + self.scratch_bytes

    @property
    def bytes_per_cache_token(self) -> int:
        """Bytes that a cached token costs beside its page: those of the engine's `read_index`."""
        return self.io_multiplier * self.num_groups * 8


class TurboQuantPagedCache(PagedAttentionCache):
    """A pool of pages, an allocator for full-attention layers, and another for sliding ones if there are any. Heads of
    the two may be of other widths and numbers.

    Args:
        tq_config: How blocks are encoded.
        channel_scales: Channel scales by layer.
        config: The text decoder's config.
        continuous_batching_config: The engine's options, with a `page_size` of 128.
        requests: How long and how many all requests are, if that is known: there are no more pages than they can fill.
        device, distributed_helper, dtype, model_supports_logits_to_keep: As in transformers' cache.
    """

    # A copy of transformers' with another allocator, block size and memory handler, whose classes it names, and without
    # layers of other kinds (tests/batching/test_upstream.py fails when the original changes).
    def __init__(
        self,
        tq_config: TurboQuantConfig,
        channel_scales: dict[int, ChannelScales],
        config: PreTrainedConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        device: torch.device,
        distributed_helper: DistributedHelper,
        dtype: torch.dtype,
        model_supports_logits_to_keep: bool = False,
        requests: WorkloadHints | None = None,
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        # The first free one: a step that was compiled for a cache of before serves the next.
        self.number = next(number for number in count() if number not in CACHES)
        CACHES[self.number] = self
        self.max_blocks_per_request = continuous_batching_config.max_blocks_per_request or 0
        self.allow_block_sharing = continuous_batching_config.allow_block_sharing
        self.owners = page_owners(config)
        self.last_readers = {owner: layer for layer, owner in self.owners.items()}
        """By layer with pages, the last layer that reads them: it stores a step's tokens."""
        divided = distributed_helper.tp_size if distributed_helper.are_kv_heads_tp_ed() else 1
        kinds: dict[str, dict[str, Any]] = {}
        for kind, layers in group_layers_by_attn_type(config).items():
            of_layer = layer_config(config, layers[0])
            heads = find_num_key_value_heads(of_layer)
            if heads % divided:
                raise ValueError(f"{heads} KV heads cannot be divided among {divided} GPUs.")
            own = [layer for layer in layers if self.owners[layer] == layer]
            shared = dict(cache_dtype=dtype, allow_block_sharing=self.allow_block_sharing, config=of_layer)
            kinds[kind] = dict(num_key_value_heads=heads // divided, layer_indices=own, **shared)
        full = kinds[FULL_ATTENTION]
        allocator = TurboQuantAllocator(tq_config, channel_scales, index=0, page_size=BLOCK_TOKENS, **full)
        self.allocator = allocator
        self.cache_allocators = {FULL_ATTENTION: allocator}
        self.bytes_per_sector = lcm(allocator.bytes_per_block, 128)
        block_bytes = allocator.bytes_per_block
        self.windows: WindowAllocator | None = None
        self.max_decode_fast_path_length = allocator.shape.longest(self.max_blocks_per_request)
        if SLIDING_ATTENTION in kinds:
            windows = WindowAllocator(self.bytes_per_sector, index=1, **kinds[SLIDING_ATTENTION])
            self.windows = self.cache_allocators[SLIDING_ATTENTION] = windows
            self.bytes_per_sector = windows.bytes_per_block
            block_bytes += ceil(windows.bytes_per_block * BLOCK_TOKENS / windows.tokens_per_page)
            if self.max_blocks_per_request:
                self.max_blocks_per_request = max(self.max_blocks_per_request, windows.pages_of(windows.sliding_window))
        held_by = {layer: each for each in self.cache_allocators.values() for layer in each.layer_indices}
        self.layer_to_allocator = {layer: held_by[owner] for layer, owner in self.owners.items()}
        self.tokens_per_sector = self.bytes_per_sector // allocator.bytes_per_block * BLOCK_TOKENS
        self.memory = TurboQuantMemory(
            # Of the wider heads, whose activations take more.
            config=max((kind["config"] for kind in kinds.values()), key=find_head_dim),
            cb_config=continuous_batching_config,
            dtype=dtype,
            bytes_per_sector=self.bytes_per_sector,
            tokens_per_sector=self.tokens_per_sector,
            bytes_per_block=block_bytes,
            attn_types=list(self.cache_allocators),
            model_supports_logits_to_keep=model_supports_logits_to_keep,
            tp_size=divided,
        )
        # transformers captures steps of 1, 2, 4, ... requests, up to so many.
        most = continuous_batching_config.max_requests_per_batch or 1024
        heads, of_full = allocator.num_key_value_heads, full["config"]
        groups = of_full.num_attention_heads // find_num_key_value_heads(of_full)
        like = torch.empty(0, dtype=dtype, device=device)
        pages: Any = ((heads * groups, heads), tq_config, tq_config.layout(allocator.head_dim), like)
        tokens = continuous_batching_config.max_batch_tokens or self.memory._default_max_batch_tokens
        reserved = step_scratch_bytes(tokens, min(most, tokens), *pages)
        blocks = continuous_batching_config.num_blocks
        lengths = [getattr(config, "max_position_embeddings", None), blocks and blocks * BLOCK_TOKENS]
        lengths += [] if requests is None else [requests.max_prompt_length + requests.max_generated_length]
        longest = min(filter(None, lengths), default=0)
        self.memory.scratch_bytes = decode_scratch_bytes(most, *pages) + reserved + prompt_buffer_bytes(longest, *pages)
        if self.windows is not None:
            self.memory.scratch_bytes += WINDOW_BYTES
            self.memory.max_blocks_per_request = self.max_blocks_per_request
        sizes = self.memory.infer_max_batch_tokens_and_num_sectors()
        if distributed_helper.tp_size > 1:
            least = torch.tensor(sizes, device=device, dtype=torch.int64)
            distributed_helper.tp_all_reduce_min(least)
            sizes = tuple(least.tolist())
        self.max_batch_tokens, self.num_sectors = sizes
        if requests is not None:
            needed = self._sectors_of(requests.max_prompt_length + requests.max_generated_length)
            # No request waits for the share that the scheduler keeps free, 0.15 by default.
            margin = continuous_batching_config.safety_margin
            free = 0.15 if margin is None else min(margin, 0.99)
            self.num_sectors = min(self.num_sectors, ceil(requests.num_requests * needed / (1 - free)))
        self.scratch = Workspace(device)
        """Of steps that are not captured, all of which the engine runs on one stream."""
        self.scratch.reserve({SCRATCH: Scratch((reserved,), torch.uint8)})
        self.scratch.lock()
        data_bytes = self.num_sectors * self.bytes_per_sector
        # Two leading sectors are never allocated: tokens that pad a batch point there.
        self.cache_tensor = torch.zeros(data_bytes + 2 * self.bytes_per_sector, dtype=torch.uint8, device=device)
        self.pool = CachePool(self.num_sectors, len(self.cache_allocators))
        for each in self.cache_allocators.values():
            each.register_cache_tensor(self.bytes_per_sector, data_bytes, self.cache_tensor, self.pool)
        # Windows are not shared, as in transformers, and a shared prefix needs the windows at its end.
        self.use_prefix_sharing = allocator.use_block_sharing and self.windows is None
        self.num_blocks = data_bytes // block_bytes
        self.read_cache_limit = None
        self.max_tokens_read = BLOCK_TOKENS * allocator.num_blocks
        self._sequences: Sequences | None = None
        self._window_step: WindowStep | None = None
        self._latest_layer = 0
        self.before_layer: Callable[[], None] = lambda: None
        """Called before each layer of a step, which fails if this raises."""

    def _sectors_of(self, length: int) -> int:
        """Sectors of `length` tokens of a single request."""
        packed = ceil(self.allocator.pages_of(length) * self.allocator.bytes_per_block / self.bytes_per_sector)
        return packed + (0 if self.windows is None else self.windows.pages_of(length))

    @property
    def max_request_tokens(self) -> int:
        """The most tokens of a request that has the whole pool."""
        return bisect_right(range(self.max_tokens_read + BLOCK_TOKENS), self.num_sectors, key=self._sectors_of) - 1

    def check_room(self, state: RequestState) -> None:
        """Raise a `ValueError` if a request has no tokens, or is longer than the model's positions or the pool."""
        if not state.initial_tokens:
            raise ValueError("A request of no tokens has no answer. Give it one at least (`bos_token_id`).")
        check_positions(len(state.initial_tokens), self.config)
        new = state.max_new_tokens or 0
        # The last token is returned and not stored.
        if len(state.initial_tokens) + max(0, new - 1) > self.max_request_tokens:
            raise ValueError(
                f"A request of {len(state.initial_tokens):,} tokens and up to {new:,} new ones is longer than the "
                f"cache, which has room for {self.max_request_tokens:,}. Ask for fewer, or make the cache larger "
                "(`num_blocks`, `max_memory_percent` of the ContinuousBatchingConfig)."
            )

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Share blocks of other requests that match the prompt; returns their tokens."""
        # Every table begins with a ring: without pages for one, nothing is shared.
        while self.pool.count_free_blocks(0) < self.allocator.shape.ring_pages:
            if not self.pool.num_free_sectors:
                return 0
            self.pool.allocate_sector(0)
        tokens = super().search_prefix_match(request_id, prompt_ids)
        return tokens + self.allocator.shape.sinks if tokens else 0

    def count_new_complete_blocks(self, state: RequestState, request_len: int) -> dict[str, int]:
        """Blocks that a step of `request_len` new tokens will complete."""
        if not self.use_prefix_sharing:
            return {}
        past, sinks = state.current_len(), self.allocator.shape.sinks
        # A request that was offloaded has pages without hashes; transformers adds the number of their tokens over 128.
        before = past // BLOCK_TOKENS if state.is_cpu_offloaded else due_blocks(past, sinks, 0)
        new = due_blocks(past + request_len, sinks, 0) - before
        return {FULL_ATTENTION: new} if new else {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's new keys and values as they came: `attend` stores them. Models call this from transformers
        5.24 on."""
        return key_states, value_states

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kwargs: dict[str, Any],
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Store a layer's new tokens and attend, with the shapes of `turboquant_paged_attention`.

        Raises:
            ValueError: The states do not have the heads, channels or dtype of the pages, or a layer attends twice.
        """
        self.before_layer()
        if layer_idx == self._latest_layer != 0:
            raise ValueError(
                f"Layer {layer_idx} attends twice in a step, and pages hold one kind of values of a layer. Use "
                "`generate()` with a `TurboQuantCache`."
            )
        self._latest_layer = layer_idx
        owner = self.owners[layer_idx]
        own = self.allocator if owner in self.allocator.pages else self.windows
        assert own is not None
        store = layer_idx == self.last_readers[owner]
        expected = (own.num_key_value_heads, own.head_dim)
        for states in (key, value):
            if (states.shape[1], states.shape[3]) != expected or states.dtype != self.dtype:
                raise ValueError(
                    f"Layer {layer_idx} caches {list(states.shape)} {states.dtype}; pages were made for {expected[0]} "
                    f"heads of {expected[1]} channels in {self.dtype}. Keys and values must be alike in all layers of "
                    "a kind and in the model's dtype."
                )
        first = layer_idx == own.layer_indices[0]
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        if isinstance(own, WindowAllocator):
            windows = own.windows[owner]
            if self._window_step is None or first:
                sequences = windows_of(kwargs, own.index, windows)
                self._window_step = plan_step(sequences, len(query), windows)
            return windowed_step(query, key, value, windows, self._window_step, options, store=store)[None]
        if self._sequences is None or first:
            self._sequences = sequences_of(kwargs, self.allocator.shape)
        pages = self.allocator.pages[owner]
        return paged_step(query, key, value, pages, self._sequences, options, self.scratch, store=store)[None]
