"""Paged KV cache: a pool of packed pages, the number of pages that fit into memory, and attention over the pages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from math import ceil, lcm
from typing import Any, cast

import torch
from tq_kernels.format import BLOCK_TOKENS, due_blocks
from tq_kernels.types import AttentionOptions, ChannelScales, KeyValue, Tokens
from transformers.generation.continuous_batching.cache import PagedAttentionCache, PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION, SLIDING_ATTENTION, CachePool
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.utils import find_head_dim

from ..compat import layer_config, memory_per_gpu
from ..config import holds_latents, number_of_positions
from ..ops import dispatch, latent_pages
from ..ops.workspace import Workspace
from .allocators import (
    HostLengths,
    LayerSpec,
    PoolAllocator,
    StateAllocator,
    StateStep,
    TurboQuantAllocator,
    WindowAllocator,
    page_owners,
    paged_layers,
)
from .options import INSTEAD, new_tokens
from .prefixes import PrefixStore


class TurboQuantMemory(PagedAttentionMemoryHandler):
    """transformers' calculation of the number of pages that fit into memory. Heads are divided among `tp_size` GPUs.
    Masks and gathered keys are not counted: attention reads pages in place."""

    def __init__(self, *args: Any, tp_size: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | memory_per_gpu(PagedAttentionMemoryHandler, tp_size)))
        self.num_attention_masks = 0
        self.kv_heads_at_peak = self.config.num_attention_heads // tp_size  # heads of the attention output
        self.scratch_bytes = 0
        """Bytes of scratch, whatever number of tokens a step has."""
        self.token_bytes = self.request_bytes = 0
        """Bytes that linear layers and expanded latents add, per new token and per request of a step."""
        self.state_sectors = 0
        """Number of sectors for states, in addition to the `num_blocks` of the user."""

    @property
    def fixed_overhead_bytes(self) -> int:
        return super().fixed_overhead_bytes + self.scratch_bytes

    def num_sectors_from_config(self) -> int | None:
        sectors = super().num_sectors_from_config()
        return None if sectors is None else sectors + self.state_sectors

    def _check_footprint(self, max_batch_tokens: int, num_sectors: int) -> tuple[int, int]:
        """Raise `ValueError` if the pool and the tensors of a step do not fit into memory."""
        step = self.compute_memory_footprint(max_batch_tokens, 0)
        needed = self.compute_memory_footprint(max_batch_tokens, max(1, num_sectors))
        if needed > self.available_memory or num_sectors < 1:
            gib, blocks = 1 << 30, self.cb_config.num_blocks
            pool = "a page" if blocks is None else f"a pool of {blocks:,} pages (`num_blocks`)"
            raise ValueError(
                f"{pool.capitalize()} and steps of {max_batch_tokens:,} tokens (`max_batch_tokens`) take "
                f"{needed / gib:.2f} GiB, {step / gib:.2f} of them for the steps. {self.available_memory / gib:.2f} "
                f"GiB may be taken (`max_memory_percent` is {self.cb_config.max_memory_percent}). Change one of these "
                "arguments of the ContinuousBatchingConfig."
            )
        return max_batch_tokens, num_sectors

    @property
    def bytes_per_batch_token(self) -> int:
        """Bytes of a new token outside of its page. Linear layers are added: theirs may be the largest activations."""
        return super().bytes_per_batch_token + self.token_bytes

    @property
    def bytes_per_cache_sector(self) -> int:
        """Bytes of a sector, and of the step of a request that has its states there."""
        return super().bytes_per_cache_sector + self.request_bytes

    @property
    def bytes_per_cache_token(self) -> int:
        """Bytes of a cached token outside of its page: its entries in the engine's `read_index`."""
        return self.io_multiplier * self.num_groups * 8


class TurboQuantPagedCache(PagedAttentionCache):
    """Pool of pages with one allocator for full-attention layers, and a second for sliding or linear layers, if any.

    Full-attention and sliding layers may differ in the width and the number of their heads.

    Args:
        manager: A `TurboQuantBatchingManager`, with the model and what a probe of a step has shown of it, the encoding
            of blocks, channel scales `[1, Hkv, D]` by layer, options of the engine (`page_size` is 128), and lengths
            and number of all requests, if known. They limit the number of pages.
    """

    # Copied from transformers, because the original names its classes. Differs in allocator, block size and memory
    # handler, and has no other kinds of layers (tests/batching/test_upstream.py fails when the original changes).
    def __init__(self, manager: Any) -> None:
        model, options = manager.model, manager.continuous_batching_config
        self.config, self.dtype, self.device = model.config.get_text_config(), model.dtype, model.device
        self.holds_latents = holds_latents(self.config)
        self.max_blocks_per_request = options.max_blocks_per_request or 0
        self.allow_block_sharing = options.allow_block_sharing
        self.number_shared = 0
        """Tokens of prompts that were found in pages of other requests."""
        self.owners = page_owners(self.config)
        self.last_readers = {owner: layer for layer, owner in self.owners.items()}
        """Last layer that reads the pages of a layer, by the owner of the pages. It stores the tokens of a step."""
        self._make_allocators(manager)
        reserved = self._make_memory(manager)
        self.max_batch_tokens, self.num_sectors = self._sizes(manager)
        if self.num_sectors < (least := self._sectors_of(1)):
            raise ValueError(
                f"The pool has {self.num_sectors} pages, and a request of this model takes at least {least}. Make it "
                "larger (`num_blocks`, `max_memory_percent` of the ContinuousBatchingConfig)."
            )
        self.scratch = Workspace(model.device)
        """Scratch of steps that are not captured. The engine runs all of them on one stream."""
        self.scratch.take(dispatch.SCRATCH, (reserved,), torch.uint8)
        self.scratch.lock()
        data_bytes = self.num_sectors * self.bytes_per_sector
        # The first two sectors are never allocated: padding tokens of a batch point there.
        self.cache_tensor = torch.zeros(data_bytes + 2 * self.bytes_per_sector, dtype=torch.uint8, device=self.device)
        self.pool = CachePool(self.num_sectors, len(self.cache_allocators))
        for each in self.cache_allocators.values():
            each.register_cache_tensor(self.bytes_per_sector, data_bytes, self.cache_tensor, self.pool)
        # A shared prefix would need the windows or the states at its end, which are not shared (as in transformers).
        self.use_prefix_sharing = self.allocator.use_block_sharing and len(self.cache_allocators) == 1
        self.num_blocks = data_bytes // self.bytes_per_block
        self.read_cache_limit = None
        self.max_tokens_read = BLOCK_TOKENS * self.allocator.num_blocks
        self.prefixes: PrefixStore | None = None
        """Pages of prefixes in host memory and files."""
        self.arguments: dict[str, Any] = {}
        """Arguments of the running step that the engine passes to attention."""
        self.lengths: HostLengths | None = None
        """Lengths of the running step, on the host."""
        self._plans: dict[int, Any] = {}
        """Plans of the running step (see `_planned`), by index of the allocator."""
        self._latents: KeyValue | None = None
        """Latents and rotary keys of the new tokens of a layer, between `update` and attention."""
        self.before_layer: Callable[[], None] = lambda: None
        """Function called before each layer of a step. An exception of it fails the step."""

    def _make_allocators(self, manager: Any) -> None:
        specs: dict[int, LayerSpec] = manager.probe.specs
        kinds: dict[str, dict[str, Any]] = {}
        for kind, layers in paged_layers(self.config).items():
            of_layer = layer_config(self.config, layers[0])
            own = [layer for layer in layers if self.owners[layer] == layer]
            shared = dict(cache_dtype=self.dtype, allow_block_sharing=self.allow_block_sharing, config=of_layer)
            kinds[kind] = dict(num_key_value_heads=specs[layers[0]].heads, layer_indices=own, **shared)
        self.kind_configs = {kind: each["config"] for kind, each in kinds.items()}
        """Config of a layer, by kind."""
        full = kinds[FULL_ATTENTION]
        scales: dict[int, ChannelScales] = {} if manager.balance is None else manager.balance.layers
        heads, cached = full["num_key_value_heads"], getattr(full["config"], "num_key_value_heads", None)
        if cached is not None and heads > cached:  # JetMoe's attention repeats the heads that a cache holds
            measured = {layer: each for layer, each in scales.items() if each.keys.shape[1] == cached}
            repeated = {layer: each.map(lambda x: x.repeat(1, heads // cached, 1)) for layer, each in measured.items()}
            scales = scales | repeated
        allocator = TurboQuantAllocator(manager.config, scales, manager.layout, index=0, page_size=BLOCK_TOKENS, **full)
        self.allocator = allocator
        self.cache_allocators = {FULL_ATTENTION: allocator}
        self.bytes_per_sector = lcm(allocator.bytes_per_block, 128)
        self.bytes_per_block = allocator.bytes_per_block
        """Bytes of `BLOCK_TOKENS` tokens in all layers."""
        self.max_decode_fast_path_length = allocator.shape.longest(self.max_blocks_per_request)
        self.states: StateAllocator | None = None
        self.second: PoolAllocator | None = None
        """Allocator beside that of full attention: of windows or of states."""
        if shapes := manager.probe.linear.shapes:
            self.second = self.states = StateAllocator(self.bytes_per_sector, shapes, index=1, **full)
        elif SLIDING_ATTENTION in kinds:
            self.second = WindowAllocator(self.bytes_per_sector, index=1, **kinds[SLIDING_ATTENTION])
        if self.second is not None:
            self.cache_allocators[SLIDING_ATTENTION] = self.second  # the engine's inputs know two keys
            self.bytes_per_sector = self.second.bytes_per_block
            self.bytes_per_block += self.second.bytes_of(BLOCK_TOKENS)
            if self.max_blocks_per_request:
                self.max_blocks_per_request = max(self.max_blocks_per_request, self.second.shape.ring_pages)
        by_owner = {layer: each for each in self.cache_allocators.values() for layer in each.layer_indices}
        self.layer_to_allocator = {layer: by_owner[owner] for layer, owner in self.owners.items()}

    def _make_memory(self, manager: Any) -> int:
        """Make the calculation of what fits into memory. Returns the bytes of scratch of the largest step."""
        allocator, options, probe = self.allocator, manager.continuous_batching_config, manager.probe
        requests, keeps = manager.pool_hints, getattr(manager.model, "_supports_logits_to_keep", None)
        of_full, query_heads = self.kind_configs[FULL_ATTENTION], probe.specs[allocator.layer_indices[0]].query_heads
        self.tokens_per_sector = self.bytes_per_sector // allocator.bytes_per_block * BLOCK_TOKENS
        self.memory = TurboQuantMemory(
            # Take the config of the widest heads: their activations are the largest.
            config=max(self.kind_configs.values(), key=find_head_dim),
            cb_config=options,
            dtype=self.dtype,
            bytes_per_sector=self.bytes_per_sector,
            tokens_per_sector=self.tokens_per_sector,
            bytes_per_block=self.bytes_per_block,
            attn_types=list(self.cache_allocators),
            model_supports_logits_to_keep=callable(keeps) and keeps(),
            tp_size=max(1, of_full.num_attention_heads // query_heads),
        )
        # transformers captures steps of 1, 2, 4, ... requests, up to this number.
        most = options.max_requests_per_batch or 1024
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        recipe: Any = (allocator.tq_config, allocator.layout, like)
        pages: Any = ((query_heads, allocator.num_key_value_heads), *recipe)
        self.plans_prompts = dispatch.plans_prompts(like, allocator.layout)
        tokens = options.max_batch_tokens or self.memory._default_max_batch_tokens
        blocks = options.num_blocks
        lengths = [number_of_positions(self.config), blocks and blocks * BLOCK_TOKENS]
        lengths += [] if requests is None else [requests.max_prompt_length + requests.max_generated_length]
        longest = min(filter(None, lengths), default=0)
        self.memory.token_bytes, self.memory.request_bytes = probe.linear.peaks
        if self.holds_latents:
            reserved = dispatch.latent_scratch(min(most, tokens), query_heads, 1, *recipe)
            states = like.new_empty(0, allocator.layout.key_dim), like.new_empty(0, allocator.layout.value_dim)
            # A graph's scratch is its own.
            self.memory.scratch_bytes = latent_pages.scratch_bytes(longest, states) + 2 * reserved
            # Queries, keys (and their parts) and values of all heads.
            widths = 3 * (of_full.qk_nope_head_dim + of_full.qk_rope_head_dim) + 2 * of_full.v_head_dim
            self.memory.token_bytes += self.dtype.itemsize * query_heads * widths
        else:
            reserved = dispatch.step_scratch_bytes(tokens, min(most, tokens), *pages)
            fixed = dispatch.decode_scratch_bytes(most, *pages) + dispatch.prompt_buffer_bytes(longest, *pages)
            self.memory.scratch_bytes = fixed + reserved
        if self.states is not None and blocks is not None:
            self.memory.state_sectors = max(1, min(most, blocks // allocator.pages_of(1)))
        if self.second is not None:
            self.memory.scratch_bytes += self.second.scratch_bytes
            self.memory.max_blocks_per_request = self.max_blocks_per_request
        return reserved

    def _sizes(self, manager: Any) -> tuple[int, int]:
        """Most tokens of a step and number of sectors: those that fit on every GPU, limited to all known requests."""
        options, requests = manager.continuous_batching_config, manager.pool_hints
        sizes = self.memory.infer_max_batch_tokens_and_num_sectors()
        if manager.distributed_helper.tp_size > 1:
            least = torch.tensor(sizes, device=self.device, dtype=torch.int64)
            manager.distributed_helper.tp_all_reduce_min(least)
            sizes = tuple(least.tolist())
        max_batch_tokens, num_sectors = sizes
        if requests is not None:
            needed = self._sectors_of(requests.max_prompt_length + requests.max_generated_length)
            # Add the share that the scheduler keeps free (0.15 by default), so that no request waits for it.
            free = 0.15 if options.safety_margin is None else min(options.safety_margin, 0.99)
            num_sectors = min(num_sectors, ceil(requests.num_requests * needed / (1 - free)))
        return max_batch_tokens, num_sectors

    def _sectors_of(self, length: int) -> int:
        """Number of sectors that a single request of `length` tokens takes."""
        packed = ceil(self.allocator.pages_of(length) * self.allocator.bytes_per_block / self.bytes_per_sector)
        return packed + (0 if self.second is None else self.second.pages_of(length))

    @property
    def max_request_tokens(self) -> int:
        """Maximum number of tokens of a request that uses the whole pool."""
        return bisect_right(range(self.max_tokens_read + BLOCK_TOKENS), self.num_sectors, key=self._sectors_of) - 1

    def check_room(self, state: RequestState) -> int | None:
        """Maximum number of new tokens of a request, if limited. Raise `ValueError` if the request has no tokens, or is
        longer than the model's positions or the pool."""
        if not state.initial_tokens:
            raise ValueError("A request of no tokens has no answer. Pass at least one token (`bos_token_id`).")
        limit = new_tokens(len(state.initial_tokens), state.max_new_tokens, self.config)
        new = state.max_new_tokens or 0
        # The last token is returned but not stored.
        if len(state.initial_tokens) + max(0, new - 1) > self.max_request_tokens:
            raise ValueError(
                f"A request of {len(state.initial_tokens):,} tokens and up to {new:,} new ones is longer than the "
                f"cache, which has room for {self.max_request_tokens:,}. Ask for fewer, or make the cache larger "
                "(`num_blocks`, `max_memory_percent` of the ContinuousBatchingConfig)."
            )
        return limit

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        # Every table begins with a ring: without free pages for a ring, nothing is shared.
        while self.pool.count_free_blocks(0) < self.allocator.shape.ring_pages:
            if not self.pool.num_free_sectors:
                return 0
            self.pool.allocate_sector(0)
        tokens = super().search_prefix_match(request_id, prompt_ids)
        if self.prefixes is not None:
            self.prefixes.release(request_id)
        tokens += self.allocator.shape.sinks if tokens else 0
        self.number_shared += tokens
        return tokens

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        if self.prefixes is not None:
            ends = not no_cache and request_id not in self.allocator.stale
            self.prefixes.end(request_id, self.allocator.block_table.get(request_id, []) if ends else [])
        super().free_blocks(request_id, no_cache)

    def evict_cached_blocks(self) -> bool:
        any_evicted = super().evict_cached_blocks()
        if not any_evicted and self.prefixes is not None:
            self.prefixes.yield_pages()
            any_evicted = super().evict_cached_blocks()
        return any_evicted

    def count_pages(self) -> dict[str, int]:
        """Number of packed pages of the pool that are used, cached (free, with a prefix), and free."""
        size = self.allocator.bytes_per_block
        free, cached = self.pool.num_free_sectors * self.bytes_per_sector, 0
        for allocator in self.cache_allocators.values():
            free += self.pool.count_free_blocks(allocator.index) * allocator.bytes_per_block
            cached += len(allocator.ledger.cached_blocks) * allocator.bytes_per_block
        total = self.num_sectors * self.bytes_per_sector
        return {"used": (total - free - cached) // size, "cached": cached // size, "free": free // size}

    def count_new_complete_blocks(self, state: RequestState, request_len: int) -> dict[str, int]:
        if not self.use_prefix_sharing:
            return {}
        past, sinks = state.current_len(), self.allocator.shape.sinks
        # Pages of an offloaded request have no hashes. transformers adds the number of their tokens over 128.
        before = past // BLOCK_TOKENS if state.is_cpu_offloaded else due_blocks(past, sinks, 0)
        new = due_blocks(past + request_len, sinks, 0) - before
        return {FULL_ATTENTION: new} if new else {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KeyValue:
        """Return the new keys and values of a layer unchanged: `layer_step` stores them. Latents and rotary keys, which
        the model expands next, are kept for `take_latents`. Models call this method from transformers 5.24 on, models
        with latents in all versions."""
        if self.holds_latents:
            self._latents = key_states, value_states
        return key_states, value_states

    def take_latents(self) -> KeyValue:
        """Take the latents and rotary keys of the last `update`. Raises `ValueError` if there was none."""
        latents, self._latents = self._latents, None
        if latents is None:
            raise ValueError(f"A layer attends without an update of the cache. {INSTEAD}")
        return latents

    def state_step(self, layer_idx: int) -> tuple[StateAllocator, StateStep]:
        """Return the allocator of states, and their pages in a step. Each linear layer asks before it reads."""
        self.before_layer()
        assert self.states is not None
        return self.states, self._planned(layer_idx, self.states)

    def _planned(self, layer_idx: int, own: PoolAllocator, total: int = 0) -> Any:
        """The plan of a step, which the first layer of each allocator makes for all layers of the allocator `own`."""
        if own.index not in self._plans or layer_idx == own.layer_indices[0]:
            self._plans[own.index] = own.plan(self.arguments, total, self.lengths)
        return self._plans[own.index]

    def layer_step(
        self,
        layer_idx: int,
        states: Tokens,
        options: AttentionOptions,
        weight: torch.Tensor | None = None,
        expanded: KeyValue | None = None,
    ) -> torch.Tensor:
        """Store the new tokens of a layer and compute their attention, `[1, T, Hq, Dv]`.

        Args:
            layer_idx: Index of the layer.
            states: Queries `[1, Hq, T, Dk]`, keys `[1, Hkv, T, Dk]` and values `[1, Hkv, T, Dv]`, or with `weight`
                latents `[1, 1, T, R]` and rotary keys `[1, 1, T, Dr]`.
            options: Causal and without biases.
            weight: Up-projection `[Hq * (Dk - Dr + Dv), R]` of latents.
            expanded: Keys `[1, Hq, T, Dk]` and values `[1, Hq, T, Dv]` that the model made of latents, or `None`.
        """
        self.before_layer()
        owner, own, (query, *new) = self.owners[layer_idx], cast(Any, self.layer_to_allocator[layer_idx]), states
        plan = self._planned(layer_idx, own, query.shape[2])
        if weight is not None:
            pages = own.pages[owner]
            return latent_pages.latent_step(query, expanded, (*new,), weight, pages, plan, options, self.scratch)
        rows = Tokens(*(x[0].transpose(0, 1) for x in states))
        return own.step(owner, rows, plan, options, self.scratch, store=layer_idx == self.last_readers[owner])[None]
