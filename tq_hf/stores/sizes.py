"""Sizes of a store: its new tensors, and the places of the tokens of a call."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from tq_kernels.format import BLOCK_TOKENS
from tq_kernels.types import PackedBlocks

from ..config import TurboQuantConfig
from ..tensors.layer import Counts, LayerTensors, check_room
from ..tensors.residual import ring_capacity
from .checks import Kind, check_states, kind_of

GROWTH = 1.125
"""Buffers grow by an eighth: appends stay amortised O(new tokens), and at most an eighth is held in reserve."""
SHORT_CALL = 128
"""Calls of up to this many tokens go through the residual; longer ones are encoded from the model's own tensors."""


def residual_capacity(config: TurboQuantConfig, rows: int, max_cache_len: int | None) -> int:
    """Number of rows to allocate for a residual of `rows` rows, with room for decoding."""
    room = int(rows * GROWTH) + BLOCK_TOKENS if max_cache_len is None else max_cache_len
    return ring_capacity(max(rows, min(config.residual_length + BLOCK_TOKENS, room)))


@lru_cache
def _no_blocks(config: TurboQuantConfig, sizes: tuple[int, int, int, int], device: torch.device) -> PackedBlocks:
    """Tensors without elements, shared by equal layers until their first block is due."""
    batch, heads, *dims = sizes
    return PackedBlocks.allocate(config.layout(*dims), batch, heads, 0, device)


class Room(NamedTuple):
    """Shapes of a new store's tensors.

    Args:
        none: Tensors without blocks, shared by equal layers.
        words: Key words, value words, scales and key means of `none`, each with its own shape; `None` to share it.
        sinks, ring: Shapes of keys and of values.
    """

    none: PackedBlocks
    words: list[tuple[torch.Tensor, tuple[int, int, int, int] | None]]
    sinks: list[tuple[int, int, int, int]]
    ring: list[tuple[int, int, int, int]]


@lru_cache(maxsize=1024)
def _room(config: TurboQuantConfig, keys: Kind, values: Kind, max_cache_len: int | None) -> Room:
    """Compute the shapes of a new store's tensors.

    Raises:
        ValueError: They do not fit each other, or exceed `max_cache_len`.
    """
    check_states(keys, values)
    (batch, heads, tokens, key_dim), _, device = keys
    due = config.num_blocks(tokens)
    num_blocks = due if max_cache_len is None else config.num_blocks(max_cache_len)
    if max_cache_len is not None:
        check_room(tokens, 0, max_cache_len)
    rows = max(0, tokens - config.sink_tokens) - due * BLOCK_TOKENS
    none = _no_blocks(config, (batch, heads, key_dim, values[0][3]), device)
    # A preallocated layer owns even tensors without blocks: graphs hold their addresses.
    own = num_blocks > 0 or max_cache_len is not None
    tensors = [none.key_words, none.value_words, none.scales, none.key_means]
    words = [(x, (batch, heads, num_blocks, x.shape[3]) if own else None) for x in tensors]
    capacity, dims = residual_capacity(config, rows, max_cache_len), (key_dim, values[0][3])
    sinks, ring = ([(batch, heads, count, dim) for dim in dims] for count in (config.sink_tokens, capacity))
    return Room(none, words, sinks, ring)


def new_tensors(
    config: TurboQuantConfig, keys: torch.Tensor, values: torch.Tensor, max_cache_len: int | None, prompt: bool
) -> LayerTensors:
    """Tensors of a new store; see `LayerStore.allocate`."""
    room = _room(config, kind_of(keys), kind_of(values), max_cache_len)
    none = room.none
    scales = none.channel_scales.map(torch.empty_like if prompt else torch.clone)
    own = [like if shape is None else like.new_empty(shape) for like, shape in room.words]
    blocks = PackedBlocks(none.layout, own[0], own[1], own[2], own[3], scales)
    sinks = keys.new_empty(room.sinks[0]), values.new_empty(room.sinks[1])
    return LayerTensors(config, blocks, sinks, (keys.new_empty(room.ring[0]), values.new_empty(room.ring[1])))


def count_sinks(config: TurboQuantConfig, tokens: int, sinks: int, past: int) -> int:
    """Number of sinks among `tokens` new tokens, after `past` tokens with `sinks` sinks."""
    return min(tokens, config.sink_tokens - sinks) if past == sinks else 0


class Split(NamedTuple):
    """Destinations of the tokens of a long call; see `LayerStore._append_long`.

    Args:
        to_sinks: Number of tokens that become sinks.
        due: Number of blocks that become due.
        begun: Number of these blocks that have rows in the old residual.
        start, end: First token of the whole blocks, and first token after them.
        completed: Rows of the residual in which a block begun is completed; 0 for none.
        capacity: Rows of the residual after the call.
    """

    to_sinks: int
    due: int
    begun: int
    start: int
    end: int
    completed: int
    capacity: int


@lru_cache(maxsize=1024)
def split_call(config: TurboQuantConfig, tokens: int, counts: Counts, max_cache_len: int | None) -> Split:
    """Split the tokens of a long call that follows the tokens of `counts`."""
    first, blocks, held, _ = counts
    past = counts.tokens
    to_sinks = count_sinks(config, tokens, first, past)
    due = max(0, config.num_blocks(past + tokens) - blocks)
    rows = tokens - to_sinks
    lead = min(rows, -held % BLOCK_TOKENS)
    whole = max(0, due - (held + lead) // BLOCK_TOKENS)
    start = to_sinks + lead
    completed = ring_capacity(held + lead) if held else 0
    capacity = residual_capacity(config, held + rows - due * BLOCK_TOKENS, max_cache_len)
    return Split(to_sinks, due, due - whole, start, start + whole * BLOCK_TOKENS, completed, capacity)
