"""Many queries over compressed history (a second turn, a chunk of a long prompt): which way, and the buffered one.

Few queries go to the decode kernel (`triton_backend.supports_attend`). More go to the *fused* kernel, which unpacks
tiles of history as it needs them, or to the *buffered* way: the history is dequantised into the shared workspace, new
tokens are written beside it, and sdpa runs over the buffer. One buffer serves all layers in turn (vLLM, pull request
40941), and nothing is concatenated. The buffered way also takes what the fused kernel does not: additive masks, masks
per head, devices without matrix units.
"""

from __future__ import annotations

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from ..tensors.attention import AttentionOptions


def attend_buffer(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention of the newest S tokens over dense states by sdpa.

    Args:
        query: `[B, Hq, S, Dk]`.
        keys: `[B, Hkv, T, Dk]`.
        values: `[B, Hkv, T, Dv]`.
        mask: `[B or 1, 1 or Hq, S or 1, >= T]`, bool or additive, or `None` (see `options.causal`).
        options: What sdpa has: no softcap, sinks or biases.

    Returns:
        `[B, S, Hq, Dv]`. Rows that may attend to nothing are 0.
    """
    queries, length = query.shape[2], keys.shape[2]
    if mask is not None:
        mask = mask[..., :length]
        mask = mask if mask.dtype == torch.bool else mask.to(query.dtype)
    elif options.causal and queries > 1 and not query.is_cuda:
        mask = torch.ones(queries, length, dtype=torch.bool, device=query.device).tril(length - queries)
    elif options.causal and queries > 1:
        mask = causal_lower_right(queries, length)  # flash needs no tensor for it
    grouped = query.shape[1] != keys.shape[1]
    out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=options.scaling, enable_gqa=grouped)
    return out.transpose(1, 2)
