"""A decode step of a preallocated store: functions, each also an operator opaque to `torch.compile`.

`attend_token` appends the newest token, or the few of assisted decoding, and attends. Where attention reads states
instead, `append_pending_token` appends and `dense` dequantizes.

Outside of compilation the functions are called as they are. A compiled graph holds the operators, which take tensors,
numbers and the configuration as text, read lengths on the device (on a GPU) and write in place: a captured graph
replays them for every length. `torch.library.triton_op` would not do: in torch 2.13 `wrap_triton` takes neither
`launch_pdl` nor `maxnreg`, with which the kernels are launched.
"""

from __future__ import annotations

from typing import Any

import torch
from tq_kernels.types import AttentionOptions, KeyValue, Mask

from ..compat import is_capturing
from ..ops import dispatch
from ..tensors.layer import DeviceCounts, LayerTensors, View
from ..tensors.residual import PendingToken


@torch.library.custom_op("tq_hf::tokens_held", mutates_args=())
def _tokens_held(length: torch.Tensor) -> torch.Tensor:
    return length.clone()


@_tokens_held.register_fake
def _tokens_held_shape(length: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(length)


def tokens_held(counts: DeviceCounts, pending: PendingToken) -> torch.Tensor:
    """Number of tokens with pending ones, `[]` int64 on the device; of a compiled step a copy.

    Inductor computes what a graph takes from a tensor (positions, say) where it is used. That may be after an operator
    has written to the tensor, unless another operator read it before.
    """
    length = _tokens_held(counts.length) if torch.compiler.is_dynamo_compiling() else counts.length
    return length if pending.states is None else length + pending.states[0].shape[2]


def _arguments(view: View) -> tuple[list[torch.Tensor], list[torch.Tensor], str, int]:
    """The view of a decode step as an operator takes it: states of the new tokens if they are pending, the counts of
    the layer and its tensors, its configuration as text, and `max_cache_len`."""
    assert isinstance(view.counts, DeviceCounts) and view.pending is not None
    row = [] if view.pending.states is None else list(view.pending.states)
    return row, [*view.counts, *view.tensors.arguments()], view.tensors.config_text, view.length


def _view_of(row: list[torch.Tensor], held: list[torch.Tensor], config: str, max_cache_len: int) -> View:
    """The view of `_arguments`."""
    tensors, pending = LayerTensors.from_arguments(config, held[2:]), PendingToken((row[0], row[1]) if row else None)
    return View(tensors, DeviceCounts(*held[:2]), max_cache_len, pending)


@torch.library.custom_op("tq_hf::append_token", mutates_args=("held",))
def _append_token(row: list[torch.Tensor], held: list[torch.Tensor], config: str, max_cache_len: int) -> None:
    dispatch.append_token(_view_of(row, held, config, max_cache_len))


def append_pending_token(view: View) -> None:
    """Append the new tokens of a decode step's view, unless they are appended."""
    if not torch.compiler.is_dynamo_compiling():
        dispatch.append_token(view)
    elif view.pending is not None and view.pending.states is not None:
        _append_token(*_arguments(view))
        view.pending.states = None


@torch.library.custom_op("tq_hf::attend_token", mutates_args=("held",))
def _attend_token(
    query: torch.Tensor,
    row: list[torch.Tensor],
    held: list[torch.Tensor],
    config: str,
    max_cache_len: int,
    mask: Mask,
    s_aux: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    weight: torch.Tensor | None,
) -> torch.Tensor:
    view, options = _view_of(row, held, config, max_cache_len), AttentionOptions(scaling, softcap=softcap, s_aux=s_aux)
    if weight is None:
        return dispatch.attend(query, view, mask, options)
    dispatch.append_token(view)
    return dispatch.attend_absorbed(query, weight, view, mask, options)


@_attend_token.register_fake
def _empty_output(query: torch.Tensor, row: Any, held: Any, config: str, *rest: Any) -> torch.Tensor:
    (batch, heads, queries, dim), weight = query.shape, rest[-1]
    value_dim = LayerTensors.from_arguments(config, held[2:]).layout.value_dim
    if weight is not None:  # values are rotary keys
        value_dim += weight.shape[0] // heads - dim
    return query.new_empty(batch, queries, heads, value_dim)


def causal_mask(view: View, queries: int) -> torch.Tensor:
    """Mask `[1, 1, queries, view.length]` bool for queries of the newest tokens, in the order of the tokens."""
    last: int | torch.Tensor = view.length
    if isinstance(view.counts, DeviceCounts):
        assert view.pending is not None
        last = tokens_held(view.counts, view.pending)
    device = view.tensors.row.device
    newest = torch.arange(queries, device=device)[:, None] + last - queries
    return (torch.arange(view.length, device=device) <= newest)[None, None]


def attend_token(query: torch.Tensor, view: View, mask: Mask, options: AttentionOptions) -> torch.Tensor:
    """Attention of S queries a sequence, `[B, Hq, S, Dk]`, over all tokens of the store; `[B, S, Hq, Dv]`. The newest
    tokens are appended first, unless they are.

    `mask` is `[B, 1 or Hq, S, >= T]`, bool or additive, or `None`: causal if `options` are, where the newest queries
    are those of the newest tokens.

    Raises:
        ValueError: The mask has fewer columns than the tokens held or, in a compiled step, than `max_cache_len`.
    """
    counts, pending, past = view.counts, view.pending, view.past_length
    assert isinstance(counts, DeviceCounts) and pending is not None
    if mask is not None:
        dispatch.check_mask(mask, view.length if past is None else past + query.shape[2])
    elif not options.causal and query.shape[2] > 1:
        mask = torch.ones(1, 1, query.shape[2], view.length, dtype=torch.bool, device=query.device)
    if not dispatch.supports_mask(mask, options):
        return _over_dense_states(query, view, mask, options)
    if torch.compiler.is_dynamo_compiling():
        scaling, _, softcap, s_aux, _ = options
        out = _attend_token(query, *_arguments(view), mask, s_aux, scaling, softcap, None)
        pending.states = None
        return out
    try:
        out = dispatch.attend(query, view, mask, options)
    except BaseException:
        # The kernel that failed may have come after the append.
        if pending.states is not None and not is_capturing() and past is not None and int(counts.length) > past:
            pending.states = None
        raise
    pending.states = None
    return out


def attend_absorbed(
    query: torch.Tensor, weight: torch.Tensor, view: View, mask: Mask, options: AttentionOptions
) -> torch.Tensor | None:
    """`tq_hf.ops.dispatch.attend_absorbed`; `None` if it does not compute this call. In a decode step of a preallocated
    store the newest tokens are appended first."""
    pending, past = view.pending, view.past_length
    compiling = torch.compiler.is_dynamo_compiling()
    if compiling and not (dispatch.supports_mask(mask, options) and options.only_scales()):
        return None
    if not compiling and not dispatch.supports_attend_absorbed(query, view, mask, options):
        return None
    if isinstance(view.counts, DeviceCounts):
        assert pending is not None
        if mask is not None:
            dispatch.check_mask(mask, view.length if past is None else past + query.shape[2])
        if compiling:
            out = _attend_token(query, *_arguments(view), mask, None, options.scaling, None, weight)
            pending.states = None
            return out
        append_pending_token(view)
    return dispatch.attend_absorbed(query, weight, view, mask, options)


@torch.library.custom_op("tq_hf::dense_tokens", mutates_args=())
def _dense_tokens(
    tensors: list[torch.Tensor], counts: torch.Tensor, config: str, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return dispatch.dense_tokens(LayerTensors.from_arguments(config, tensors), counts, length)


@_dense_tokens.register_fake
def _dense_tokens_shape(
    tensors: list[torch.Tensor], counts: torch.Tensor, config: str, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    layer = LayerTensors.from_arguments(config, tensors)
    keys, values = map(layer.rows.new_empty, layer.dense_shapes(length))
    return keys, values


def dense(view: View) -> KeyValue:
    """The keys and values `[B, Hkv, view.length, D]` of a view, dequantized.

    In a decode step of a preallocated store the newest tokens are appended first, zeros follow the last, and the host
    reads nothing. The time follows the room, as for transformers' static cache."""
    tensors, counts, length = view.tensors, view.counts, view.length
    if not isinstance(counts, DeviceCounts):
        return dispatch.dense(view)
    append_pending_token(view)
    if torch.compiler.is_dynamo_compiling():
        return _dense_tokens(tensors.arguments(), counts.held, tensors.config_text, length)
    return dispatch.dense_tokens(tensors, counts.held, length)


def _over_dense_states(query: torch.Tensor, view: View, mask: Mask, options: AttentionOptions) -> torch.Tensor:
    """Attention with biases by head (T5, ALiBi, masks the model learnt), over dequantized states. States after the last
    token are empty room."""
    states = dense(view)
    assert isinstance(view.counts, DeviceCounts)
    sinks, blocks, rows = view.counts.held[:3, 0].unbind()
    is_token = torch.arange(view.length, device=query.device) < sinks + blocks * view.tensors.layout.tokens + rows
    if mask is None:
        mask = causal_mask(view, query.shape[2]) if query.shape[2] > 1 else is_token[None, None, None]
    else:  # which may have columns for the tokens held only
        mask = torch.nn.functional.pad(mask, (0, view.length - mask.shape[-1]))
        mask = mask & is_token if mask.dtype == torch.bool else mask.masked_fill(~is_token, -torch.inf)
    return dispatch.attend_dense(query, states, mask, options)
