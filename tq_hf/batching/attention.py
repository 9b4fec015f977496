"""The attention function that transformers knows as "turboquant_paged".

It is registered without a mask: a name that has one, as "turboquant", would be given a mask of all tokens by all tokens
at every step of continuous batching.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from ..tensors.attention import AttentionOptions
from .paged_cache import TurboQuantPagedCache

NAME = "turboquant_paged"


@torch.compiler.disable
def turboquant_paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the new tokens of many requests over their pages and themselves.

    Args:
        module: The attention module.
        query: `[1, Hq, T, D]`: the new tokens of all requests, one after the other.
        key: `[1, Hkv, T, D]`.
        value: `[1, Hkv, T, D]`.
        attention_mask: None: the lengths of requests say what is attended to.
        dropout: Not supported.
        scaling: Factor of the logits, by default `D ** -0.5`.
        cache: The pages.
        **kwargs: `softcap` and `s_aux`, see `AttentionOptions`; the lengths of requests.

    Returns:
        `[1, T, Hq, D]` and `None`.

    Raises:
        ValueError: This is not a step of continuous batching, or the model asks for what is not computed here.
    """
    if not isinstance(cache, TurboQuantPagedCache):
        raise ValueError(
            "This model is held by a continuous batching manager of tq_hf, so it takes no other calls. Stop the "
            "manager first (`manager.stop()`, or leave the `with`), and the model has its own attention again."
        )
    unknown = ("position_bias", "indices", "block_indices", "sinks")
    asked = [name for name in unknown if kwargs.get(name) is not None]
    if asked or dropout or attention_mask is not None:
        what = ", ".join(asked) or ("dropout" if dropout else "an attention mask")
        raise ValueError(
            f"{type(module).__name__} attends with {what}, which continuous batching on packed pages does not compute. "
            "Use `generate()` with a `TurboQuantCache`."
        )
    layer: Any = module.layer_idx
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(scaling, softcap=kwargs.pop("softcap", None), s_aux=kwargs.pop("s_aux", None))
    return cache.attend(layer, query, key, value, kwargs, options), None


AttentionInterface.register(NAME, turboquant_paged_attention)
