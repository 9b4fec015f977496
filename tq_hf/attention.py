"""Attention function and mask function that transformers calls "turboquant"."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.nn import Module
from tq_kernels.types import AttentionOptions, KeyValue, Mask
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.utils import logging

from .compat import (
    CACHE_NAME,
    autocast_dtype,
    cache_of_caller,
    is_tracing,
    layer_config,
    outside_autocast,
    takes_attention_functions,
    takes_other_states,
)
from .layers.expansion import ExpandedStates, real, take, up_projection
from .layers.handle import Handle, LazyStates, resolve, without_backward
from .ops import dispatch
from .ops.latent_pages import expand
from .prepared import LAYER
from .stores import graph_ops
from .tensors.layer import DeviceCounts, View, check_room

logger = logging.get_logger(__name__)

NAME = "turboquant"
PROMPT = "turboquant_prompt"
"""Keyword argument of layers that run compiled, in a first prompt without padding (see `prompt`)."""
UNSUPPORTED = ("position_bias", "indices", "block_indices", "sinks")
"""Arguments of attention that neither a prompt like that nor pages take."""
TAKE_BACK = "A cache has the tokens of this call in its first layers by now: call `cache.crop(0)`, or take a new one."


def turboquant_attention(
    module: Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a transformers module: over packed blocks of a compressed cache, like sdpa over other states.

    Args:
        module: The attention module. Its `is_causal` is the default of the argument `is_causal`. Without either,
            attention is causal unless the module's signature has states of other tokens (cross-attention).
        query: `[B, Hq, S, Dk]`.
        key: `[B, Hkv, T, Dk]`: keys that a cache's `update` returned, or plain states.
        value: `[B, Hkv, T, Dv]`.
        attention_mask: Bool or additive mask `[B, 1 or Hq, S, >= T]`; `None` is bottom-right causal, and so is a mask
            of no columns, of any module, which models pass on where they would make a mask of `None`.
        dropout: Only supported on plain states.
        scaling: Factor of the logits, by default `Dk ** -0.5`.
        is_causal: Replaces the module's `is_causal`.
        **kwargs: Options that some models pass: the fields of `AttentionOptions`, and two kinds of sparse attention.
            `indices` `[B, S, K]` are the tokens that each query may attend to where the mask allows; negative entries
            are empty (DeepSeek V3.2). `block_indices` are the same in blocks (MiniMax M3). `sinks`, sink logits by
            query (Inkling 2), are not supported.

    Returns:
        `[B, S, Hq, Dv]`, contiguous, in the query's dtype or, as sdpa, in that of `torch.autocast`; and `None`
        (attention weights are not available).

    Raises:
        ValueError: An argument is not supported, alone or together with the cache.
    """
    if PROMPT in kwargs:
        return _attend_prompt(module, (query, key, value), attention_mask, dropout, scaling, is_causal, **kwargs)
    if isinstance(key, LazyStates) and torch.compiler.is_dynamo_compiling():
        return outside_of_graphs(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
    if "sinks" in kwargs or (attention_mask is not None and attention_mask.dtype != torch.bool):
        _check_call(module, attention_mask, kwargs.pop("sinks", None))
    view, latents = None, take() if torch.compiler.is_dynamo_compiling() else None
    if latents is None:
        view, key, value = resolve(key, value, module, query, attention_mask)
        latents = key._expansion.handle if isinstance(key, ExpandedStates) else None
    is_empty = attention_mask is not None and not attention_mask.shape[-1]
    causal = is_empty or (getattr(module, "is_causal", None) if is_causal is None else is_causal)
    if causal is None:  # Mllama's cross-attention has no `is_causal`
        causal = not takes_other_states(module)
    if "indices" in kwargs or "block_indices" in kwargs:
        attention_mask = _without_unselected(module, query, key.shape[2], attention_mask, causal, kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions.of_call(scaling, causal, kwargs)
    # Read `__dict__`: `getattr` of a missing attribute takes a module as long as a kernel launch.
    refused = dropout > 0 or module.__dict__.get("masked_key_indices") is not None
    call = module, query, (key, value), attention_mask, options
    if latents is not None:
        return _attend_latents(latents, refused, *call, dropout=dropout, **kwargs)
    if view is not None and view.counts is not None:
        if refused:
            _refuse_compressed(dropout)
        if is_empty or view.tensors.order is not None:
            attention_mask, options = _in_order(query, view, attention_mask, options)
        attend: Any = graph_ops.attend_token if isinstance(view.counts, DeviceCounts) else dispatch.attend
        if torch.is_grad_enabled() or autocast_dtype(query) is not None:
            return _read_packed(attend, key, query, view, attention_mask, options), None
        return attend(query, view, attention_mask, options), None
    if view is not None:  # a compressed layer, with states of all tokens
        kwargs.pop("sliding_window", None)
    return _attend_dense(*call, dropout=dropout, **kwargs)


outside_of_graphs = torch.compiler.disable(turboquant_attention)
"""Eager attention over lazy states of an eager update, which a compiler cannot trace."""


class Prompt(threading.local):
    """The first prompt that this thread reads, by layers that run compiled or captured."""

    fill: Any = None
    """Takes the module, and queries, keys and values of a layer. Returns keys and values to attend to."""
    modules: Sequence[Module] = ()
    """Attention modules by their place in `LAYER`."""

    @contextmanager
    def reading(self, fill: Callable[..., KeyValue], modules: Sequence[Module]) -> Iterator[None]:
        """Context of a prompt."""
        self.fill, self.modules = fill, modules
        try:
            yield
        finally:
            self.fill, self.modules = None, ()


prompt = Prompt()


class NotCompiled(ValueError):
    """A layer attends in a way that is not compiled."""


def _attend_prompt(
    module: Module, states: tuple[torch.Tensor, ...], *refused: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attention of a first prompt whose layers run compiled, causal and over the new tokens alone."""
    mask, dropout, scaling, is_causal = refused
    unknown = [kwargs.get(name) for name in UNSUPPORTED]
    if dropout or any(each is not None for each in (mask, is_causal, *unknown)):
        _refuse_prompt(module)
    options = AttentionOptions.of_call(states[0].shape[-1] ** -0.5 if scaling is None else scaling, True, kwargs)
    own = options.s_aux, options.scaling, options.softcap
    if torch.compiler.is_compiling():
        return attend_prompt([*states, module.__dict__[LAYER]], *own), None
    return _fill_and_attend(module, states, *own), None


@torch.compiler.disable
def _refuse_prompt(module: Module) -> None:
    raise NotCompiled(f"{type(module).__name__} attends with a mask or other options.")


@torch.library.custom_op("tq_hf::attend_prompt", mutates_args=())
def attend_prompt(
    tensors: list[torch.Tensor], s_aux: torch.Tensor | None, scaling: float, softcap: float | None
) -> torch.Tensor:
    """`_fill_and_attend` of queries, keys and values, and the module that `LAYER` names, the last of `tensors`."""
    *states, layer = tensors
    return _fill_and_attend(prompt.modules[int(layer[1])], states, s_aux, scaling, softcap).contiguous()


def _fill_and_attend(
    module: Module, states: Sequence[torch.Tensor], s_aux: torch.Tensor | None, scaling: float, softcap: float | None
) -> torch.Tensor:
    """Give the states of a layer to the running `prompt`, and attend."""
    config: Any = getattr(module, "config", None)
    own: Any = None if config is None else layer_config(config, cast(int, module.layer_idx))
    heads = getattr(own, "num_key_value_heads", None)
    if heads is not None and states[1].shape[1] > heads:  # JetMoe repeats the heads that it caches
        raise NotCompiled(f"{type(module).__name__} attends to {states[1].shape[1]} heads and caches {heads}.")
    options: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
    key, value = prompt.fill(module, *states)
    return turboquant_attention(module, states[0], key, value, None, **options)[0]


@attend_prompt.register_fake
def _empty_output(tensors: list[torch.Tensor], *arguments: Any) -> torch.Tensor:
    batch, heads, tokens, _ = tensors[0].shape
    return tensors[0].new_empty(batch, tokens, heads, tensors[2].shape[3])


def _check_call(module: Module, mask: Mask, sinks: Any) -> None:
    """Raise a `ValueError` for sink logits by query, and for masks of integers."""
    if sinks is not None:
        raise ValueError(
            f'{type(module).__name__} has sink logits by query, which "turboquant" cannot compute. Load the model '
            'with `attn_implementation="eager"`; the cache works with it.'
        )
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"The attention mask {list(mask.shape)} is {mask.dtype}; it must be bool, or floats to add to the logits. "
            f"Call `mask.bool()` if it has 1 for each token to attend to. {TAKE_BACK}"
        )


def _attend_latents(
    latents: Handle,
    refused: bool,
    module: Module,
    query: torch.Tensor,
    states: KeyValue,
    mask: Mask,
    options: AttentionOptions,
    /,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over packed latents with absorbed queries, or over the keys and values that the module expands from them
    where kernels do not compute this call. `refused`: an option that only works on expanded ones."""
    recorded: Any = getattr(states[0], "_expansion", None)
    view, weight = latents.view, up_projection(module) if recorded is None else recorded.weight
    assert weight is not None
    if not refused and autocast_dtype(query) is None:
        out = graph_ops.attend_absorbed(query, weight, view, *_in_order(query, view, mask, options))
        if out is not None:
            return out, None
    if mask is not None and not mask.shape[-1]:
        mask = graph_ops.causal_mask(view, query.shape[2])
    states = real(states) if recorded else expand(weight, query.shape, graph_ops.dense(view))
    return _attend_dense(module, query, states, mask, options, **kwargs)


def _attend_dense(
    module: Module, query: torch.Tensor, states: KeyValue, mask: Mask, options: AttentionOptions, /, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attend over dense states `[B, Hkv, T, D]`: by sdpa, or with softcap or sinks by kernels. With a `sliding_window`,
    a mask may not be wider than the states."""
    key, value = states
    if mask is not None:
        key, value = _without_room(key, value, mask)
        if kwargs.get("sliding_window") is not None and mask.shape[-1] > key.shape[2]:
            raise ValueError(
                f"The attention mask {list(mask.shape)} has {mask.shape[-1]} columns, and this "
                f"sliding layer has {key.shape[2]} tokens. Pass a dict with a mask for each kind of layer."
            )
        mask = mask[..., : key.shape[2]]
    if options.only_scales():
        if mask is None and options.causal and 1 < query.shape[2] < key.shape[2]:  # which sdpa aligns top-left
            mask = _causal(query.shape[2], key.shape[2], query.device)[None, None]
        own: dict[str, Any] = dict(
            scaling=options.scaling, is_causal=options.causal, position_bias=options.position_bias
        )
        return sdpa_attention_forward(module, query, key, value, mask, **own, **kwargs)
    if dropout := kwargs["dropout"]:
        raise ValueError(
            f"Attention dropout ({dropout}) with softcap or sinks is not supported; use eager attention to train. "
            f"{TAKE_BACK}"
        )
    if (lower := autocast_dtype(query)) is not None:
        query, key, value = query.to(lower), key.to(lower), value.to(lower)
    with outside_autocast(query):
        return dispatch.attend_dense(query, (key, value), mask, options), None


def _in_order(
    query: torch.Tensor, view: View, mask: Mask, options: AttentionOptions
) -> tuple[torch.Tensor | None, AttentionOptions]:
    """Mask (`None` for one of no columns) and options with columns in the order of the rows in the store."""
    mask, order = None if mask is not None and not mask.shape[-1] else mask, view.tensors.order
    if order is None:
        return mask, options
    if mask is None and options.causal and query.shape[2] > 1:
        mask = graph_ops.causal_mask(view, query.shape[2])
    if options.position_bias is not None:
        options = options._replace(position_bias=order.swapped(options.position_bias, 3))
    return None if mask is None else order.swapped_mask(mask), options


def _read_packed(
    attend: Any, key: torch.Tensor, query: torch.Tensor, view: View, mask: Mask, options: AttentionOptions
) -> torch.Tensor:
    """Run `attend`, under `torch.autocast` in the dtype of the cache. The backward pass raises where gradients are
    lost: those of earlier states, or all in kernels."""
    if (lower := autocast_dtype(query)) is not None:
        with outside_autocast(query):
            return _read_packed(attend, key, query.to(view.tensors.row.dtype), view, mask, options).to(lower)
    if not torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
        return attend(query, view, mask, options)
    lost = key._handle.sources  # type: ignore[attr-defined]
    with torch.set_grad_enabled(not lost):
        out: torch.Tensor = attend(query, view, mask, options)
    own = (query,) if view.new is None else (query, *view.new)
    sources = (*lost, *(part for part in own if part.requires_grad))
    return without_backward(out.clone(), sources) if sources and not out.requires_grad else out


def _refuse_compressed(dropout: float) -> None:
    """Raise the `ValueError` for attention dropout, or for keys masked by head: neither works on a compressed cache."""
    if dropout:
        raise ValueError(
            f"Attention dropout ({dropout}) on a compressed cache: call `model.eval()`, or train without a cache. "
            f"{TAKE_BACK}"
        )
    raise ValueError(
        "`masked_key_indices` of the attention module (kvpress's AdaKV) mask keys of single heads, and these keys "
        'came to attention without their mask: kvpress patches "turboquant" if tq_hf is imported before it. '
        'Swap the imports, or load the model with `attn_implementation="sdpa"`.'
    )


def _causal(queries: int, length: int, device: torch.device) -> torch.Tensor:
    """Bottom-right causal mask `[queries, length]` bool."""
    return torch.ones(queries, length, dtype=torch.bool, device=device).tril(length - queries)


def _without_unselected(
    module: Module, query: torch.Tensor, length: int, mask: Mask, causal: bool, kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Mask out those of `length` keys that the model's indexer did not select. Pops `block_indices` and `indices`."""
    if (block_indices := kwargs.pop("block_indices", None)) is not None:
        # The model makes this mask for "eager" and "sdpa" only; every other attention function makes its own.
        indexer: Any = module.indexer
        mask = indexer.build_block_mask(
            block_indices, mask, length, query.dtype, query.device, kwargs.get("position_ids")
        )
    if (indices := kwargs.pop("indices", None)) is not None:
        mask = _select(indices, mask, length, causal)
    return mask


def _select(indices: torch.Tensor, mask: Mask, length: int, causal: bool) -> torch.Tensor:
    """Mask out tokens that are not in `indices` `[B, S, K]`. A `mask` of `None` is bottom-right causal, or full."""
    batch, queries, _ = indices.shape
    counts = torch.zeros(batch, queries, length + 1, dtype=torch.int32, device=indices.device)
    # Negative indices go to a column after the last token.
    columns = torch.where(indices < 0, length, indices.long())
    selected = (counts.scatter(-1, columns, 1)[..., :length] > 0)[:, None]
    if mask is None:
        return selected & _causal(queries, length, indices.device) if causal else selected
    if mask.dtype == torch.bool:
        return mask[..., :length] & selected
    return mask[..., :length].masked_fill(~selected, torch.finfo(mask.dtype).min)


def _without_room(key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> KeyValue:
    """Cut empty rows without a column in `mask` off keys `[B, Hkv, T, Dk]` and values `[B, Hkv, T, Dv]` of a
    preallocated layer that is not compressed."""
    tokens = getattr(key, "num_held", None)
    if tokens is None or mask.shape[-1] >= key.shape[2] or torch.compiler.is_dynamo_compiling():
        return key, value
    dispatch.check_mask(mask, tokens)
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
    """Mask of transformers' `sdpa_mask`, or `None` where that means the same to `turboquant_attention`.

    sdpa reads `None` as a top-left causal mask for some shapes and as bottom-right for others. `turboquant_attention`
    always reads bottom-right: queries over keys that end with these queries need no mask. (A mask of 2,048 queries over
    a million tokens takes 2 GiB.) Models that do not call attention functions get the additive masks of "eager".

    Raises:
        ValueError: The padding mask is longer than the keys: a preallocated cache would overrun.
    """
    if "config" in kwargs and not takes_attention_functions(type(kwargs["config"])):
        start: Any = q_offset
        return eager_mask(batch_size, q_length, kv_length, start, attention_mask=attention_mask, **kwargs)
    if q_length == 1 < kv_length and not torch.compiler.is_dynamo_compiling():
        cache = cache_of_caller()
        if cache is not None and not hasattr(cache, "memory_footprint"):
            logger.warning_once(
                f'"turboquant" attention reads packed keys and values, and this {type(cache).__name__} has none. Pass '
                f"`{CACHE_NAME}=tq_hf.TurboQuantCache(model.config)` to `generate()`."
            )
    # An offset on the device is that of a preallocated cache: empty rows may follow the query's own.
    preallocated = isinstance(q_offset, torch.Tensor)
    local = kwargs.get("local_size")
    # The layer counts tokens and refuses an eager step. A compiled step can only assert on the device, which makes the
    # GPU unusable for this process. Before it, only the length of the padding mask shows the host an overrun.
    if preallocated and q_length == 1 and local is None and attention_mask is not None:
        check_room(1, attention_mask.shape[-1] - 1, kv_length)
    # Modules with bidirectional attention read `None` as "all tokens".
    bidirectional = getattr(kwargs.get("config"), "use_bidirectional_attention", False)
    if (
        allow_is_causal_skip
        and not bidirectional
        and 1 < q_length < kv_length
        and local is None
        and not is_tracing(q_offset)
    ):
        end = kv_length + kwargs.get("kv_offset", 0)
        # Reading the offset of a preallocated cache waits for the device, once for all layers of a call.
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


def _pads_nothing(mask: Mask, end: int) -> bool:
    """Whether all tokens up to `end` are unpadded in a padding mask `[B, T]`. Tokens after T are padding."""
    if mask is None:
        return True
    # `bool` reads the mask, so it is not traced.
    return mask.shape[-1] >= end and not is_tracing(mask) and bool(mask.all())


def register() -> None:
    """Register attention and mask as "turboquant". Existing names stay unchanged.

    Raises:
        ImportError: Another package has registered an attention function under this name.
    """
    existing = AttentionInterface().get(NAME)
    if existing is not None and existing is not turboquant_attention:
        raise ImportError(
            f"An attention function named {NAME!r} is already registered by {existing.__module__}. "
            "Import only one package of that name."
        )
    AttentionInterface.register(NAME, turboquant_attention)
    AttentionMaskInterface.register(NAME, turboquant_mask)
