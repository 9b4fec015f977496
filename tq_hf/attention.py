"""The attention function and mask that transformers knows as "turboquant"."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tq_kernels.types import AttentionOptions, KeyValue
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from .compat import autocast_dtype, is_tracing, outside_autocast, takes_attention_functions, takes_other_states
from .layers.handle import LazyStates, resolve, without_backward
from .ops import dispatch
from .stores import graph_ops
from .tensors.layer import DeviceCounts, View, check_room

NAME = "turboquant"


def turboquant_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a transformers module, on the compressed cache where there is one and like sdpa elsewhere.

    Args:
        module: The attention module; its `is_causal` is the default for the argument of that name. Without either,
            attention is causal unless the module can be given states of other tokens.
        query: `[B, Hq, S, Dk]`.
        key: `[B, Hkv, T, Dk]`: what a cache's `update` returned, or plain states.
        value: `[B, Hkv, T, Dv]`.
        attention_mask: bool or additive mask `[B, 1 or Hq, S, >= T]`; `None` is bottom-right causal.
        dropout: Only supported on plain states.
        scaling: Factor of the logits, by default `Dk ** -0.5`.
        is_causal: Overrides the module's.
        **kwargs: What some models pass, the fields of `AttentionOptions` among it.
            `indices` are `[B, S, K]` tokens that each query may attend to, of those the mask allows; negative ones are
            none (DeepSeek V3.2). `block_indices` are the same in blocks, as MiniMax M3's indexer chooses them. `sinks`,
            sink logits by query (Inkling 2), are not supported.

    Returns:
        `[B, S, Hq, Dv]`, contiguous, in the query's dtype, or in that of `torch.autocast`, as of sdpa; and `None`
        (attention weights are not available).

    Raises:
        ValueError: The arguments ask for what there is no way to compute.
    """
    if isinstance(key, LazyStates) and torch.compiler.is_compiling():
        return _attend_outside_of_graphs(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
    if "sinks" in kwargs:
        _refuse_sinks(module, kwargs)
    view, key, value = resolve(key, value, module, query, attention_mask)
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if causal is None:  # Mllama's cross-attention does not say that it is not
        causal = not takes_other_states(module)
    if "indices" in kwargs or "block_indices" in kwargs:
        attention_mask = _chosen_by_indexer(module, query, key.shape[2], attention_mask, causal, kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions.of_call(scaling, causal, kwargs)
    if view is not None and view.counts is not None:
        # In the dictionary: of what it does not have, a module takes as long to say so as a launch.
        if dropout or "masked_key_indices" in module.__dict__:
            _check_compressed(module, dropout)
        attend: Any = graph_ops.attend_token if isinstance(view.counts, DeviceCounts) else dispatch.attend
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            attend = partial(_attend_with_gradients, attend, key)
        if (lower := autocast_dtype(query)) is None:
            return attend(query, view, attention_mask, options), None
        with outside_autocast(query):
            return attend(query.to(view.tensors.row.dtype), view, attention_mask, options).to(lower), None
    if attention_mask is not None:
        key, value = _without_room(key, value, attention_mask)
        if view is None and kwargs.get("sliding_window") is not None and attention_mask.shape[-1] > key.shape[2]:
            raise ValueError(
                f"The attention mask {list(attention_mask.shape)} has {attention_mask.shape[-1]} columns, and this "
                f"sliding layer shows {key.shape[2]} tokens. Pass a dict with a mask for each kind of layer."
            )
        attention_mask = attention_mask[..., : key.shape[2]]
    if options.only_scales():
        attention_mask = _bottom_right(query, key, attention_mask, causal)
        own: dict[str, Any] = dict(dropout=dropout, scaling=scaling, is_causal=causal)
        own["position_bias"] = options.position_bias
        return sdpa_attention_forward(module, query, key, value, attention_mask, **own, **kwargs)
    if dropout:
        raise ValueError(
            f"Attention dropout ({dropout}) with softcap or sinks is not supported; use eager attention to train."
        )
    if (lower := autocast_dtype(query)) is None:
        return dispatch.attend_dense(query, key, value, attention_mask, options), None
    with outside_autocast(query):
        query, key, value = query.to(lower), key.to(lower), value.to(lower)
        return dispatch.attend_dense(query, key, value, attention_mask, options), None


def _attend_with_gradients(
    attend: Any,
    key: torch.Tensor,
    query: torch.Tensor,
    view: View,
    mask: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """`attend`, whose backward pass raises where gradients are lost: of keys and values, or all, in kernels."""
    lost = key._handle.sources  # type: ignore[attr-defined]
    with torch.set_grad_enabled(not lost):
        out: torch.Tensor = attend(query, view, mask, options)
    own = (query,) if view.new is None else (query, *view.new)
    sources = (*lost, *(part for part in own if part.requires_grad))
    return without_backward(out.clone(), sources) if sources and not out.requires_grad else out


@torch.compiler.disable
def _attend_outside_of_graphs(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Attention over what an update outside of graphs returned."""
    return turboquant_attention(*args, **kwargs)


def _refuse_sinks(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise a `ValueError` if sink logits by query are among `kwargs`."""
    if kwargs.pop("sinks", None) is not None:
        raise ValueError(
            f'{type(module).__name__} has sink logits by query, which "turboquant" cannot compute. Load the model '
            'with `attn_implementation="eager"`; the cache works with it.'
        )


def _check_compressed(module: torch.nn.Module, dropout: float) -> None:
    """Raise a `ValueError` for what cannot be computed over a compressed cache."""
    if getattr(module, "masked_key_indices", None) is not None:
        raise ValueError(
            "`masked_key_indices` of the attention module (kvpress's AdaKV) name keys that single heads must not "
            'see, and attention did not get them masked: kvpress patches "turboquant" if tq_hf is imported before '
            'it. Swap the imports, or load the model with `attn_implementation="sdpa"`.'
        )
    if dropout:
        raise ValueError(
            f"Attention dropout ({dropout}) on a compressed cache: call `model.eval()`, or train without a cache."
        )


def _bottom_right(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> torch.Tensor | None:
    """The mask for sdpa, whose own causal one is top-left aligned."""
    queries, length = query.shape[2], key.shape[2]
    if mask is not None or not causal or not 1 < queries < length:
        return mask
    return torch.ones(queries, length, dtype=torch.bool, device=query.device).tril(length - queries)[None, None]


def _chosen_by_indexer(
    module: torch.nn.Module,
    query: torch.Tensor,
    length: int,
    mask: torch.Tensor | None,
    causal: bool,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """`mask` without the tokens that an indexer of the model did not choose, of `length` in all. Takes what the indexer
    chose, `block_indices` or `indices`, out of `kwargs`."""
    if (block_indices := kwargs.pop("block_indices", None)) is not None:
        # Made by the model itself for "eager" and "sdpa", by name; other functions are left to it.
        indexer: Any = module.indexer
        mask = indexer.build_block_mask(
            block_indices, mask, length, query.dtype, query.device, kwargs.get("position_ids")
        )
    if (indices := kwargs.pop("indices", None)) is not None:
        mask = _among(indices, mask, length, causal)
    return mask


def _among(indices: torch.Tensor, mask: torch.Tensor | None, length: int, causal: bool) -> torch.Tensor:
    """`mask` without the tokens that are not among `indices` `[B, S, K]`. `None` is bottom-right causal, or full."""
    batch, queries, _ = indices.shape
    counts = torch.zeros(batch, queries, length + 1, dtype=torch.int32, device=indices.device)
    # Negative ones go to a token after the last.
    where = torch.where(indices < 0, length, indices.long())
    chosen = (counts.scatter(-1, where, 1)[..., :length] > 0)[:, None]
    if mask is None:
        past = torch.ones(queries, length, dtype=torch.bool, device=indices.device).tril(length - queries)
        return chosen & past if causal else chosen
    if mask.dtype == torch.bool:
        return mask[..., :length] & chosen
    return mask[..., :length].masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _without_room(key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> KeyValue:
    """Keys `[B, Hkv, T, Dk]` and values `[B, Hkv, T, Dv]` of a preallocated layer that is not compressed, without the
    empty room at their end for which `mask` has no columns."""
    held = getattr(key, "num_held", None)
    if held is None or mask.shape[-1] >= key.shape[2] or torch.compiler.is_compiling():
        return key, value
    dispatch.check_mask(mask, held)
    return key[:, :, : mask.shape[-1]], value[:, :, : mask.shape[-1]]


def turboquant_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    *,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> torch.Tensor | None:
    """transformers' `sdpa_mask`, left out only where `None` means the same to `turboquant_attention`.

    sdpa reads `None` as a top-left causal mask in some shapes, bottom-right in others. Here it is always bottom-right:
    the skip is allowed for queries over keys that end with them. (A mask of 2,048 queries over a million tokens would
    take 2 GiB.) Models with attention of their own get the masks of "eager", which they add to their logits.

    Raises:
        ValueError: The padding mask is longer than the keys: a preallocated cache would overrun.
    """
    if "config" in kwargs and not takes_attention_functions(type(kwargs["config"])):
        start: Any = q_offset
        return eager_mask(batch_size, q_length, kv_length, start, attention_mask=attention_mask, **kwargs)
    # Lengths on the device belong to a preallocated cache, whose keys may go on after the query.
    preallocated = isinstance(q_offset, torch.Tensor)
    local = kwargs.get("local_size")
    # An eager step is refused by the layer that counts. Before a compiled one, which can only assert on the device and
    # takes the process's GPU with it, a padding mask too long is the last that the host sees of an overrun.
    if preallocated and q_length == 1 and local is None and attention_mask is not None:
        check_room(1, attention_mask.shape[-1] - 1, kv_length)
    # Modules that attend both ways take `None` for "all".
    both_ways = getattr(kwargs.get("config"), "use_bidirectional_attention", False)
    if (
        allow_is_causal_skip
        and not both_ways
        and 1 < q_length < kv_length
        and local is None
        and not is_tracing(q_offset)
    ):
        end = kv_length + kwargs.get("kv_offset", 0)
        # The offset of a preallocated cache is read from the device, once for all layers of a call.
        if int(q_offset) + q_length == end and _pads_nothing(attention_mask, end):
            return None
    ends_with_query = q_length == kv_length or (q_length == 1 and not preallocated)
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,  # type: ignore[arg-type]
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip and ends_with_query,
        **kwargs,
    )


def _pads_nothing(mask: torch.Tensor | None, end: int) -> bool:
    """Whether a padding mask `[B, T]` lets all tokens up to `end` through. Tokens after its own end are padding."""
    if mask is None:
        return True
    # To know takes a look at the mask.
    return mask.shape[-1] >= end and not is_tracing(mask) and bool(mask.all())


def register() -> None:
    """Register both under "turboquant". Adds names; changes nothing that exists.

    Raises:
        ImportError: Another package has registered another attention function under this name.
    """
    existing = AttentionInterface().get(NAME)
    if existing is not None and existing is not turboquant_attention:
        raise ImportError(
            f"An attention function named {NAME!r} is already registered by {existing.__module__}. "
            "Import only one package of that name."
        )
    AttentionInterface.register(NAME, turboquant_attention)
    AttentionMaskInterface.register(NAME, turboquant_mask)
