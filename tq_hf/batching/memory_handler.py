"""How many pages fit: transformers' arithmetic, without what packed pages do not need."""

from __future__ import annotations

from typing import Any

from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.utils import find_num_key_value_heads


class TurboQuantMemory(PagedAttentionMemoryHandler):
    """Counts no masks, and no keys and values read back: attention reads pages where they are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_attention_masks = 0
        # For each token of a batch, once more its own keys and values: scratch of kernels that read prompts.
        self.kv_heads_at_peak = 2 * find_num_key_value_heads(self.config)

    @property
    def bytes_per_cache_token(self) -> int:
        """Bytes that a cached token costs beside its page: those of the engine's `read_index`."""
        return self.io_multiplier * self.num_groups * 8
