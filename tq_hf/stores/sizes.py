"""Sizes of the tensors of a store."""

from __future__ import annotations

from functools import lru_cache

import torch
from tq_kernels.format import BLOCK_TOKENS
from tq_kernels.types import PackedBlocks

from ..compat import FakeTensor, outside_modes
from ..config import TurboQuantConfig
from ..tensors.layer import LayerTensors
from ..tensors.residual import ring_capacity
from .checks import Kind, check_states, kind_of

GROWTH = 1.125
"""Buffers grow by an eighth: appends stay amortised O(new tokens), and at most an eighth is held in reserve."""
STEP_TOKENS = 16
"""Most tokens of a decode step: drafts of assisted decoding and the token before them, which one kernel attends to."""
SHORT_CALL = 128
"""Calls of up to this many tokens go through the residual; longer ones are encoded from the model's own tensors."""


@lru_cache(maxsize=1024)
def residual_capacity(residual_length: int, rows: int, max_cache_len: int | None, step_tokens: int = 1) -> int:
    """Number of rows to allocate for a residual of `rows` rows, with room for decode steps of up to `step_tokens`."""
    room = int(rows * GROWTH) + BLOCK_TOKENS if max_cache_len is None else max_cache_len
    return ring_capacity(max(rows, min(residual_length + BLOCK_TOKENS + step_tokens - 1, room)))


@lru_cache
@outside_modes
def _no_blocks(config: TurboQuantConfig, sizes: tuple[int, int, int, int], device: torch.device) -> PackedBlocks:
    """Tensors without elements, shared by equal layers until their first block is due."""
    batch, heads, *dims = sizes
    return PackedBlocks.allocate(config.layout(*dims), batch, heads, 0, device)


@lru_cache(maxsize=1024)
def _room(
    config: TurboQuantConfig, keys: Kind, values: Kind, max_cache_len: int | None
) -> tuple[PackedBlocks, int, int]:
    """Tensors without blocks, number of blocks of a new store, and number of rows of its ring. Raises `ValueError` if
    keys and values do not fit each other."""
    check_states(keys, values)
    (batch, heads, tokens, key_dim), _, device = keys
    due = config.num_blocks(tokens)
    rows = max(0, tokens - config.sink_tokens) - due * BLOCK_TOKENS
    none = _no_blocks(config, (batch, heads, key_dim, values[0][3]), device)
    num_blocks = due if max_cache_len is None else config.num_blocks(max_cache_len)
    return none, num_blocks, residual_capacity(config.residual_length, rows, max_cache_len)


def new_tensors(
    config: TurboQuantConfig, keys: torch.Tensor, values: torch.Tensor, max_cache_len: int | None, prompt: bool
) -> LayerTensors:
    """Tensors of a new store; see `LayerStore.allocate`."""
    if isinstance(keys, FakeTensor):
        raise ValueError(
            "Keys are fake tensors, which have no numbers for a TurboQuantCache to read. Leave `FakeTensorMode`; run "
            'the model on the meta device (`model.to("meta")`), or with a `DynamicCache`.'
        )
    none, num_blocks, ring_rows = _room(config, kind_of(keys), kind_of(values), max_cache_len)
    scales, data = none.channel_scales.map(torch.empty_like if prompt else torch.clone), none.data
    # A preallocated layer owns even tensors without blocks: graphs hold their addresses.
    if num_blocks or max_cache_len is not None:
        data = data.new_empty(*keys.shape[:2], num_blocks, none.layout.block_words)
    dim = keys.shape[3] + values.shape[3]
    rows = keys.new_empty(*keys.shape[:2], ring_rows + config.sink_tokens, dim)
    return LayerTensors(config, PackedBlocks(none.layout, data, scales), rows)
