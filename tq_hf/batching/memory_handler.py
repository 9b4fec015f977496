"""How many pages fit: transformers' arithmetic, without what packed pages do not need."""

from __future__ import annotations

from typing import Any

from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler


class TurboQuantMemory(PagedAttentionMemoryHandler):
    """Counts no masks, and no keys and values read back: attention reads pages where they are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_attention_masks = 0
        # For each token of a batch, its queries twice more: rotated, and as partial outputs.
        self.kv_heads_at_peak = 2 * self.config.num_attention_heads
        self.scratch_bytes = 0
        """What a step takes besides, whatever is in it."""

    @property
    def fixed_overhead_bytes(self) -> int:
        """Bytes that depend on neither pages nor tokens."""
        return super().fixed_overhead_bytes + self.scratch_bytes

    @property
    def bytes_per_cache_token(self) -> int:
        """Bytes that a cached token costs beside its page: those of the engine's `read_index`."""
        return self.io_multiplier * self.num_groups * 8
