"""Rows that replace all rows of a store: pruned, edited or moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from tq_kernels.format import BLOCK_TOKENS
from tq_kernels.types import PackedBlocks

from ..compat import outside_inference_mode
from ..ops import dispatch
from ..tensors.layer import Counts, check_room
from ..tensors.residual import write_tokens
from .sizes import GROWTH, check_fits, residual_capacity
from .store import LayerStore


@outside_inference_mode
def assign(store: LayerStore, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Hold these tokens and no others in a store, encoded as a first prompt with its channel scales.

    Packed blocks keep their codes, bit for bit, where keys or values of a head are those held in their place, or in
    another to which whole blocks lead. If all are, and rows are only missing at the end, this is a `crop`.

    Returns:
        Whether blocks that stay packed were encoded again.

    Raises:
        ValueError: They do not fit the store, or exceed it. Nothing is changed then.
    """
    check_fits(keys, values, store.tensors.row)
    if store.max_cache_len is not None:
        check_room(keys.shape[2], 0, store.max_cache_len)
    states, held, tokens = (keys, values), dispatch.dense(store.view()), keys.shape[2]
    order, counts = store.tensors.order, store.counts
    shown = held if order is None else order.swapped_states(held)
    if all(torch.equal(own, old[:, :, :tokens]) for own, old in zip(states, shown, strict=True)):
        store.crop(counts.tokens - tokens)
        _release_room(store)
        return False
    order = order if tokens == counts.tokens else None  # pruned rows are those of a new prompt
    states = states if order is None else order.swapped_states(states)
    keys, values = states
    sinks = min(tokens, store.config.sink_tokens)
    compared = min(counts.blocks + counts.pending, (tokens - sinks) // BLOCK_TOKENS)
    packed = slice(counts.sinks, counts.tokens - counts.without_encoded_rows().residual)
    ours = (x[:, :, sinks : sinks + compared * BLOCK_TOKENS] for x in states)
    places, same = _same_blocks(list(ours), [x[:, :, packed] for x in held])
    stays, blocks = same.flatten(0, 2).all(0).tolist(), store.config.num_blocks(tokens)
    while blocks < compared and stays[blocks]:
        blocks += 1  # packed, though a prompt of this length would leave it dense: a crop cut the rows after it off
    new = LayerStore.allocate(store.config, keys, values)
    new.set_scales(store.blocks.channel_scales)
    new._make_room(0, blocks)
    for is_same, group in groupby(range(blocks), lambda block: block < compared and stays[block]):
        run = list(group)
        start, stop = run[0], run[-1] + 1
        if not is_same:
            new._encode(states, start, (sinks + start * BLOCK_TOKENS, sinks + stop * BLOCK_TOKENS))
        if (end := min(stop, compared)) > start:
            _keep_codes(new.blocks.slice(start, end), store.blocks, places[start:end], same[..., start:end])
    dense = sinks + blocks * BLOCK_TOKENS
    write_tokens(new.tensors.rows, new.tensors.ring_rows, states, (0, sinks), blocks * BLOCK_TOKENS, dense)
    new.tensors, new.counts = new.tensors.with_order(order), Counts(sinks, blocks, tokens - dense)
    store._cuts.clear()
    if store.device_counts is None:
        store.tensors, store.counts = new.tensors, new.counts
    else:
        store.restore(*new.export())
    return not all(stays[: min(blocks, compared)])


def _release_room(store: LayerStore) -> None:
    """Free room beyond what growing leaves, after tokens were removed. A preallocated layer keeps its room."""
    if store.max_cache_len is None:
        _, blocks, rows, encoded = store.counts
        packed, first = blocks + encoded, blocks * BLOCK_TOKENS
        if store.blocks.capacity > int(packed * GROWTH) + 1:
            store.tensors = replace(store.tensors, blocks=store.blocks.resized(packed, packed))
        capacity = residual_capacity(store.config.residual_length, rows, None)
        if store.tensors.ring_rows > capacity:
            store.tensors = store.tensors.with_ring(capacity, first, rows)


def _same_blocks(states: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> tuple[list[int], torch.Tensor]:
    """Find the whole blocks of rows `[B, Hkv, n * 128, D]` among others, of as many blocks or more.

    Returns:
        Place of each block among the others: where a block begins with the same row of a head, or its own place.
        Whether the two blocks are equal, `[2, B, Hkv, n]` bool: in keys, and in values.
    """
    starts, other_starts = (each[0][0, 0, ::BLOCK_TOKENS] for each in (states, others))
    rows = torch.stack([(start == other_starts).all(1) for start in starts]).tolist() if len(starts) else []
    places = [i if row[i] or True not in row else row.index(True) for i, row in enumerate(rows)]
    blocks = ([x.unflatten(2, (-1, BLOCK_TOKENS)) for x in each] for each in (states, others))
    equal = [(a == b[:, :, places]).flatten(3).all(3) for a, b in zip(*blocks, strict=True)]
    return places, torch.stack(equal)


def _keep_codes(blocks: PackedBlocks, held: PackedBlocks, places: list[int], same: torch.Tensor) -> None:
    """Take n blocks of `held` at `places`: keys where `same[0]`, `[B, Hkv, n]` bool, values where `same[1]`."""
    keys, values = same[..., None]
    for name, tensor in blocks.tensors().items():
        old = held.tensors()[name][:, :, places]
        if name == "scales":
            half = keys.int() * 0xFFFF - values.int() * 0x10000  # bits: keys are in the low half
            tensor.copy_((old & half) | (tensor & ~half))
        else:
            tensor.copy_(torch.where(values if name == "value_words" else keys, old, tensor))
