"""A decode step on a `StaticStore` as three operators, opaque to `torch.compile`.

They take tensors and numbers only, read lengths on the device (on a GPU), and write in place: a captured graph
replays them for every length. The configuration travels as its number. `torch.library.triton_op` would not do: in torch
2.13 `wrap_triton` takes neither `launch_pdl` nor `maxnreg`, with which the kernels are launched.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ops import dispatch, triton_backend
from ..tensors.blocks import PackedBlocks
from ..tensors.view import Buffers, StoreView
from ..tensors.window import KeyValue
from .growing import check_fits
from .preallocated import StaticStore, numbered_config


def _arguments(store: StaticStore) -> tuple:
    return (
        store.blocks.key_words,
        store.blocks.value_words,
        store.blocks.scalars,
        store.blocks.key_means,
        *store.sinks,
        *store.window,
    )


def _store(
    number: int,
    max_length: int,
    tensors: tuple,
    state: torch.Tensor,
    seen: torch.Tensor,
    length: torch.Tensor,
) -> StaticStore:
    key_words, value_words, scalars, key_means, sink_keys, sink_values, window_keys, window_values = tensors
    config = numbered_config(number)
    layout = config.layout(window_keys.shape[-1], window_values.shape[-1])
    return StaticStore(
        config=config,
        config_number=number,
        max_length=max_length,
        blocks=PackedBlocks(layout, key_words, value_words, scalars, key_means),
        sinks=(sink_keys, sink_values),
        window=(window_keys, window_values),
        state=state,
        seen=seen,
        length=length,
    )


@torch.library.custom_op(
    "tq_hf::append_token",
    mutates_args=(
        "key_words",
        "value_words",
        "scalars",
        "key_means",
        "sink_keys",
        "sink_values",
        "window_keys",
        "window_values",
        "state",
        "seen",
        "length",
    ),
)
def _append_token(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_words: torch.Tensor,
    value_words: torch.Tensor,
    scalars: torch.Tensor,
    key_means: torch.Tensor | None,
    sink_keys: torch.Tensor,
    sink_values: torch.Tensor,
    window_keys: torch.Tensor,
    window_values: torch.Tensor,
    state: torch.Tensor,
    seen: torch.Tensor,
    length: torch.Tensor,
    config: int,
    max_length: int,
) -> None:
    tensors = (key_words, value_words, scalars, key_means, sink_keys, sink_values, window_keys, window_values)
    static = _store(config, max_length, tensors, state, seen, length)
    if triton_backend.serves(keys, static.blocks.layout):
        counts = (state, seen, length)
        triton_backend.append_token(
            static.config, keys, values, static.blocks, static.sinks, static.window, counts, max_length
        )
        return
    with static.opened() as store:
        view = store.append(keys, values)
        if view.new is not None:  # a prompt of one token: only the store itself holds it where `seen` can name it
            view = store.view()
        slot = view.window.first % view.window.capacity
        visible = (view.sinks[0].shape[2], view.num_blocks, view.num_window, slot, store.num_pending)
        seen.copy_(torch.tensor(visible, dtype=torch.int32))


def append_token(store: StaticStore, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Append one token, keys `[B, Hkv, 1, Dk]` and values `[B, Hkv, 1, Dv]`, and encode the block that becomes due.

    Raises:
        ValueError: The states do not fit the store, or it is full (on a CPU; on a GPU a full store is left as it is,
            and `turboquant_mask` raises before the step).
    """
    check_fits(keys, values, store.sinks)
    _append_token(
        keys,
        values,
        *_arguments(store),
        store.state,
        store.seen,
        store.length,
        store.config_number,
        store.max_length,
    )


def _seen(store: StaticStore) -> StoreView:
    sinks, blocks, rows, _, _ = store.seen.tolist()
    held = (store.sinks[0][:, :, :sinks], store.sinks[1][:, :, :sinks])
    first = blocks * store.blocks.layout.tokens
    return StoreView(
        buffers=Buffers(store.config, store.blocks, held, store.window),
        num_blocks=blocks,
        first=first,
        num_window=rows,
        past_length=sinks + first + rows - 1,
    )


@torch.library.custom_op("tq_hf::attend_token", mutates_args=())
def _attend_token(
    query: torch.Tensor,
    key_words: torch.Tensor,
    value_words: torch.Tensor,
    scalars: torch.Tensor,
    key_means: torch.Tensor | None,
    sink_keys: torch.Tensor,
    sink_values: torch.Tensor,
    window_keys: torch.Tensor,
    window_values: torch.Tensor,
    seen: torch.Tensor,
    mask: torch.Tensor | None,
    s_aux: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    config: int,
    max_length: int,
) -> torch.Tensor:
    tensors = (key_words, value_words, scalars, key_means, sink_keys, sink_values, window_keys, window_values)
    static = _store(config, max_length, tensors, seen, seen, seen)
    if triton_backend.serves(query, static.blocks.layout):
        return triton_backend.attend_token(
            static.config,
            query,
            static.blocks,
            static.sinks,
            static.window,
            seen,
            mask,
            scaling=scaling,
            softcap=softcap,
            s_aux=s_aux,
        )
    view = _seen(static)
    return dispatch.attend(query, view, mask, scaling=scaling, softcap=softcap, s_aux=s_aux).contiguous()


@_attend_token.register_fake
def _attend_token_shape(query: torch.Tensor, *arguments: Any) -> torch.Tensor:
    window_values = arguments[7]
    batch, heads, rows, _ = query.shape
    return query.new_empty(batch, rows, heads, window_values.shape[-1])


def attend_token(
    query: torch.Tensor,
    store: StaticStore,
    mask: torch.Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query a sequence, `[B, Hq, 1, Dk]`, over all tokens of the store; `[B, 1, Hq, Dv]`.

    `mask` is bool `[B, 1, 1, >= T]` or `None`.
    """
    return _attend_token(
        query,
        *_arguments(store),
        store.seen,
        mask,
        s_aux,
        scaling,
        softcap,
        store.config_number,
        store.max_length,
    )


@torch.library.custom_op("tq_hf::dense_tokens", mutates_args=())
def _dense_tokens(
    key_words: torch.Tensor,
    value_words: torch.Tensor,
    scalars: torch.Tensor,
    key_means: torch.Tensor | None,
    sink_keys: torch.Tensor,
    sink_values: torch.Tensor,
    window_keys: torch.Tensor,
    window_values: torch.Tensor,
    seen: torch.Tensor,
    config: int,
    max_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = (key_words, value_words, scalars, key_means, sink_keys, sink_values, window_keys, window_values)
    view = _seen(_store(config, max_length, tensors, seen, seen, seen))
    padded = []
    for states in dispatch.dense(view):
        out = states.new_zeros(*states.shape[:2], max_length, states.shape[3])
        out[:, :, : states.shape[2]] = states
        padded.append(out)
    return padded[0], padded[1]


@_dense_tokens.register_fake
def _dense_tokens_shape(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    window, max_length = arguments[6:8], arguments[-1]
    keys, values = (part.new_empty(*part.shape[:2], max_length, part.shape[3]) for part in window)
    return keys, values


def dense_tokens(store: StaticStore) -> KeyValue:
    """All tokens densely, `[B, Hkv, max_length, D]`, zeros after the last."""
    return _dense_tokens(*_arguments(store), store.seen, store.config_number, store.max_length)
