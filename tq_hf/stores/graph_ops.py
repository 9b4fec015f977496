"""A decode step of a preallocated store: functions, each also an operator opaque to `torch.compile`.

`attend_token` appends the newest token and attends. Where attention reads states instead, `append_pending_token`
appends it and `dense_tokens` dequantizes.

Outside of compilation the functions are called as they are. A compiled graph holds the operators, which take tensors,
numbers and the configuration as text, read lengths on the device (on a GPU) and write in place: a captured graph
replays them for every length. `torch.library.triton_op` would not do: in torch 2.13 `wrap_triton` takes neither
`launch_pdl` nor `maxnreg`, with which the kernels are launched.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import torch
from tq_kernels.types import AttentionOptions, KeyValue, PendingToken

from ..compat import is_capturing
from ..config import TurboQuantConfig
from ..ops import dispatch, reference
from ..ops.backend import say_torch_computes
from ..ops.triton import blocks as triton_blocks
from ..tensors.layer import DeviceCounts, LayerTensors, StepView, StoreView
from .base import Counts, check_room
from .growing import GrowingStore


@lru_cache
def config_text(config: TurboQuantConfig) -> str:
    """A configuration as text: what a graph can hold, in any process. Equal configurations have equal texts."""
    return json.dumps(asdict(config), sort_keys=True)


@lru_cache
def config_from(text: str) -> TurboQuantConfig:
    """The configuration of a text."""
    return TurboQuantConfig(**json.loads(text))


def check_host_reads(tensors: LayerTensors) -> None:
    """Raise a `RuntimeError` where the host would have to read counts and cannot."""
    if is_capturing():
        key_dim, value_dim = (ring.shape[3] for ring in tensors.ring)
        raise RuntimeError(
            f"No kernel attends to these heads (keys of {key_dim} channels, values of {value_dim}) on this device, or "
            "TQ_HF_BACKEND is torch. What does so in torch reads counts on the host, which a CUDA graph cannot do. "
            "Generate with `disable_compile=True`, or make the cache without `max_cache_len`."
        )


def append_row(
    tensors: LayerTensors, counts: DeviceCounts, keys: torch.Tensor, values: torch.Tensor, max_cache_len: int
) -> None:
    """Append one token a sequence, and encode the block that becomes due.

    Args:
        tensors: What is written to.
        counts: Likewise.
        keys: `[B, Hkv, 1, Dk]`.
        values: `[B, Hkv, 1, Dv]`.
        max_cache_len: Tokens there is room for. Without a GPU one token more is a `ValueError`; on a GPU a device-side
            assertion fails.

    Raises:
        RuntimeError: No kernel serves the heads, and a CUDA graph is captured.
    """
    if triton_blocks.supports_blocks(tensors.ring[0], tensors.layout):
        triton_blocks.append_token(tensors, counts, keys, values, max_cache_len)
        return
    say_torch_computes("Appending to a preallocated cache", keys, keys.shape[-1], values.shape[-1])
    check_host_reads(tensors)
    store = GrowingStore(tensors, Counts(*counts.state.tolist()), max_cache_len)
    view = store.append(keys, values)
    slot = view.residual.first % view.residual.capacity
    attended = (view.tensors.sinks[0].shape[2], view.num_blocks, view.num_residual, slot, store.num_pending, 0)
    counts.step_counts[:, 0] = torch.tensor(attended, dtype=torch.int32)
    reference.write_counts(counts, store.counts)


@torch.library.custom_op("tq_hf::tokens_held", mutates_args=())
def _tokens_held(length: torch.Tensor) -> torch.Tensor:
    return length.clone()


@_tokens_held.register_fake
def _tokens_held_shape(length: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(length)


def tokens_held(counts: DeviceCounts) -> torch.Tensor:
    """Tokens held, `[]` int64 on the device; of a compiled step a copy.

    Inductor computes what a graph takes from a tensor (positions, say) where it is used. That may be after an operator
    has written to the tensor, unless another operator read it before.
    """
    return _tokens_held(counts.length) if torch.compiler.is_compiling() else counts.length


@torch.library.custom_op("tq_hf::append_token", mutates_args=("tensors", "counts"))
def _append_token(
    keys: torch.Tensor,
    values: torch.Tensor,
    tensors: list[torch.Tensor],
    counts: list[torch.Tensor],
    config: str,
    max_cache_len: int,
) -> None:
    device_counts = DeviceCounts(*counts)
    if keys.is_cpu:
        check_room(1, int(device_counts.length), max_cache_len)
    append_row(LayerTensors.from_arguments(config_from(config), tensors), device_counts, keys, values, max_cache_len)


def append_pending_token(view: StepView) -> None:
    """Append the newest token of the store, unless it is appended."""
    tensors, counts, config, max_cache_len, _, pending = view
    if pending.states is None:
        return
    if torch.compiler.is_compiling():
        _append_token(*pending.states, tensors.arguments(), list(counts), config, max_cache_len)
    else:
        keys, values = pending.states
        append_row(tensors, counts, keys, values, max_cache_len)
    pending.states = None


def _attend(view: StepView, query: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions) -> torch.Tensor:
    """Append the newest token, unless it is appended, and attend."""
    tensors, counts, _, max_cache_len, _, pending = view
    if triton_blocks.supports_step(query, tensors):
        return triton_blocks.attend_token(query, view, mask, options)
    if pending.states is not None:
        keys, values = pending.states
        append_row(tensors, counts, keys, values, max_cache_len)
    return dispatch.attend(query, _on_host(tensors, counts.step_counts), mask, options)


def _on_host(tensors: LayerTensors, step_counts: torch.Tensor) -> StoreView:
    """What a step attends to, its counts read from the device."""
    check_host_reads(tensors)
    sinks, blocks, rows, *_ = step_counts[:, 0].tolist()
    past = sinks + blocks * tensors.layout.tokens + rows - 1
    return StoreView(tensors.with_sinks(sinks), blocks, rows, past)


@torch.library.custom_op("tq_hf::attend_token", mutates_args=("tensors", "counts"))
def _attend_token(
    query: torch.Tensor,
    row: list[torch.Tensor],
    tensors: list[torch.Tensor],
    counts: list[torch.Tensor],
    mask: torch.Tensor | None,
    s_aux: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    config: str,
    max_cache_len: int,
) -> torch.Tensor:
    device_counts, layer = DeviceCounts(*counts), LayerTensors.from_arguments(config_from(config), tensors)
    if query.is_cpu and row:
        check_room(1, int(device_counts.length), max_cache_len)
    pending = PendingToken((row[0], row[1]) if row else None)
    view = StepView(layer, device_counts, config, max_cache_len, None, pending)
    return _attend(view, query, mask, AttentionOptions(scaling, softcap=softcap, s_aux=s_aux))


@_attend_token.register_fake
def _attend_token_shape(
    query: torch.Tensor, row: list[torch.Tensor], tensors: list[torch.Tensor], *rest: Any
) -> torch.Tensor:
    *_, config, _ = rest
    layer = LayerTensors.from_arguments(config_from(config), tensors)
    batch, heads, rows, _ = query.shape
    return query.new_empty(batch, rows, heads, layer.layout.value_dim)


def attend_token(
    view: StepView, query: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    """Attention of one query a sequence, `[B, Hq, 1, Dk]`, over all tokens of the store; `[B, 1, Hq, Dv]`. The newest
    token is appended first, unless it is.

    `mask` is bool `[B, 1, 1, >= T]` or `None`. `options` are without biases.

    Raises:
        ValueError: The mask has fewer columns than the tokens held or, in a compiled step, than `max_cache_len`.
    """
    tensors, counts, config, max_cache_len, num_held, pending = view
    if mask is not None:
        dispatch.check_mask(mask, max_cache_len if num_held is None else num_held)
    if torch.compiler.is_compiling():
        row = [] if pending.states is None else list(pending.states)
        scaling, _, softcap, s_aux, _ = options
        out = _attend_token(
            query, row, tensors.arguments(), list(counts), mask, s_aux, scaling, softcap, config, max_cache_len
        )
        pending.states = None
        return out
    try:
        out = _attend(view, query, mask, options)
    except BaseException:
        # The kernel that failed may have come after the append.
        if pending.states is not None and not is_capturing() and int(counts.length) == num_held:
            pending.states = None
        raise
    pending.states = None
    return out


def _dense(tensors: LayerTensors, step_counts: torch.Tensor, length: int) -> KeyValue:
    """All tokens in room for `length`, out of counts that stay on the device: a captured graph replays it."""
    tokens, num_sinks = tensors.layout.tokens, tensors.sinks[0].shape[2]
    capacity, room = tensors.ring[0].shape[2], max(0, length - num_sinks)
    keys, values = (
        ring.new_empty(shape) for ring, shape in zip(tensors.ring, tensors.dense_shapes(length), strict=True)
    )
    if tensors.blocks.capacity:
        packed = slice(num_sinks, num_sinks + tensors.blocks.capacity * tokens)
        dispatch.dequantize(tensors.config, tensors.blocks, keys[:, :, packed], values[:, :, packed])
    sinks, blocks, rows = step_counts[:3, 0].unbind()
    first, device = blocks * tokens, tensors.row.device
    # As many neighbouring rows of the result as the ring has: those of the residual, and some before it at the end.
    row = first.clamp(max=max(0, room - capacity)) + torch.arange(min(capacity, room), device=device)
    in_residual, slot, target = (row >= first)[:, None], row % capacity, num_sinks + row.long()
    empty = (torch.arange(length, device=device) >= sinks + first + rows)[:, None]
    for out, ring, sink in zip((keys, values), tensors.ring, tensors.sinks, strict=True):
        out[:, :, :num_sinks] = sink[:, :, :length]
        near = torch.where(in_residual, ring.index_select(2, slot), out.index_select(2, target))
        out.index_copy_(2, target, near).masked_fill_(empty, 0)
    return keys, values


@torch.library.custom_op("tq_hf::dense_tokens", mutates_args=())
def _dense_tokens(
    tensors: list[torch.Tensor], step_counts: torch.Tensor, config: str, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _dense(LayerTensors.from_arguments(config_from(config), tensors), step_counts, length)


@_dense_tokens.register_fake
def _dense_tokens_shape(
    tensors: list[torch.Tensor], step_counts: torch.Tensor, config: str, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    layer = LayerTensors.from_arguments(config_from(config), tensors)
    keys, values = (ring.new_empty(shape) for ring, shape in zip(layer.ring, layer.dense_shapes(length), strict=True))
    return keys, values


def dense_tokens(view: StepView) -> KeyValue:
    """All tokens of the store densely, `[B, Hkv, view.length, D]`, zeros after the last. The newest is appended first.

    Nothing is read on the host. The time follows `view.length`, the room, as for transformers' static cache."""
    append_pending_token(view)
    tensors, counts, config, length, *_ = view
    if torch.compiler.is_compiling():
        return _dense_tokens(tensors.arguments(), counts.step_counts, config, length)
    return _dense(tensors, counts.step_counts, length)
