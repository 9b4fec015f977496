"""The operations on packed blocks; every backend is chosen here."""

from __future__ import annotations

from typing import Any

import torch

from ..codec import reference
from ..codec.balance import factors
from ..config import TurboQuantConfig
from ..tensors.blocks import PackedBlocks
from ..tensors.factors import Factors
from ..tensors.layer_tensors import LayerTensors
from ..tensors.view import StoreView
from ..tensors.window import KeyValue
from . import buffered_attention, tiled_attention, triton_backend
from .workspace import Scratch, current_workspace


def balance(
    queries: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: Factors,
    *,
    first: int,
    valid: torch.Tensor | None,
) -> None:
    """Write factors of channels; arguments as of `tq_hf.codec.balance.factors`."""
    if triton_backend.can_balance(keys, values):
        triton_backend.balance(queries, keys, values, out, first=first, valid=valid)
        return
    for held, chosen in zip(out, factors(queries, keys, values, first=first, valid=valid), strict=True):
        held.copy_(chosen)


def encode(config: TurboQuantConfig, keys: torch.Tensor, values: torch.Tensor, out: PackedBlocks, start: int) -> None:
    """Encode whole blocks of keys `[B, Hkv, n * 128, Dk]` and values `[B, Hkv, n * 128, Dv]` into blocks `start`...
    of `out`."""
    backend = triton_backend if triton_backend.encodes(keys, config, out.layout) else reference
    backend.encode(config, keys, values, out, start)


def dequantise(config: TurboQuantConfig, blocks: PackedBlocks, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write the N blocks of `blocks` densely to `keys` `[B, Hkv, N * 128, Dk]` and `values` `[B, Hkv, N * 128, Dv]`."""
    backend = triton_backend if triton_backend.serves(keys, blocks.layout) else tiled_attention
    backend.dequantise(config, blocks, keys, values)


def dense(view: StoreView) -> KeyValue:
    """Everything in `view` as dense keys and values, `[B, Hkv, view.length, D]` in the model's dtype."""
    keys, values = (
        part.new_empty(shape) for part, shape in zip(view.sinks, view.tensors.dense_shapes(view.length), strict=True)
    )
    _write_dense(view, keys, values)
    return keys, values


def _write_dense(view: StoreView, keys: torch.Tensor, values: torch.Tensor) -> None:
    tokens = view.num_blocks * view.blocks.layout.tokens
    for start, part in view.dense_parts:
        for out, states in zip((keys, values), part, strict=True):
            out[:, :, start : start + states.shape[2]] = states
    if tokens:
        packed = slice(view.sinks[0].shape[2], view.sinks[0].shape[2] + tokens)
        dequantise(view.config, view.blocks.slice(0, view.num_blocks), keys[:, :, packed], values[:, :, packed])


def buffered_attend(
    query: torch.Tensor, view: StoreView, mask: torch.Tensor | None, *, scaling: float, causal: bool = True
) -> torch.Tensor:
    """`attend` by sdpa over everything in `view`, dense in the workspace that all layers share."""
    shapes = zip(("continuation keys", "continuation values"), view.tensors.dense_shapes(view.length), strict=True)
    requests = {name: Scratch(shape, view.sinks[0].dtype) for name, shape in shapes}
    workspace = current_workspace(query.device)
    keys, values = workspace.acquire(requests).values()
    _write_dense(view, keys, values)
    return buffered_attention.attend_buffer(query, keys, values, mask, scaling=scaling, causal=causal)


def reorder(tensors: LayerTensors, sources: torch.Tensor) -> None:
    """Put sequence `sources[b]` in place b of every tensor, which stays where it is. `sources` are `[B]`."""
    sources = sources.to(tensors.row.device)
    if triton_backend.can_reorder(tensors):
        triton_backend.reorder(tensors, sources)
        return
    for tensor in tensors.arguments():
        tensor.copy_(tensor.index_select(0, sources))


def check_mask(mask: torch.Tensor, length: int) -> None:
    """Refuse a mask that ends before the tokens do: kernels would read beyond it.

    Args:
        mask: `[B or 1, 1 or Hq, S or 1, columns]`.
        length: Tokens attended to.

    Raises:
        ValueError: The mask has fewer columns than there are tokens.
    """
    if mask.shape[-1] < length:
        raise ValueError(
            f"The attention mask {list(mask.shape)} has {mask.shape[-1]} columns for {length} tokens. Give it a column "
            f"for every token in the cache, the newest included."
        )


def attend(
    query: torch.Tensor,
    view: StoreView,
    mask: torch.Tensor | None,
    *,
    scaling: float,
    causal: bool = True,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of queries `[B, Hq, S, Dk]` over `view`, `[B, S, Hq, Dv]` contiguous.

    Arguments are those of `tq_hf.ops.tiled_attention.attend`.

    Raises:
        ValueError: The mask has fewer columns than `view` has tokens.
    """
    if mask is not None:
        check_mask(mask, view.length)
    if triton_backend.can_attend(query, view, mask, position_bias):
        return triton_backend.attend(query, view, mask, scaling=scaling, causal=causal, softcap=softcap, s_aux=s_aux)
    way = buffered_attention.choose(
        fused=triton_backend.can_attend_many(query, view, mask, position_bias),
        buffered=buffered_attention.sdpa_takes(query, softcap, s_aux, position_bias),
    )
    if way == "fused":
        return triton_backend.attend_many(
            query, view, mask, scaling=scaling, causal=causal, softcap=softcap, s_aux=s_aux
        )
    if way == "buffered":
        return buffered_attend(query, view, mask, scaling=scaling, causal=causal).contiguous()
    out = tiled_attention.attend(
        query,
        view,
        mask,
        scaling=scaling,
        causal=causal,
        softcap=softcap,
        s_aux=s_aux,
        position_bias=position_bias,
    )
    return out.contiguous()


def attend_dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    position_bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """`tq_hf.ops.tiled_attention.attend_dense`, contiguous, by a kernel where one takes the call."""
    if triton_backend.can_attend_dense(query, keys, values, mask, position_bias):
        return triton_backend.attend_dense(query, keys, values, mask, **options)
    return tiled_attention.attend_dense(query, keys, values, mask, position_bias=position_bias, **options).contiguous()
