"""Attention function that transformers registers as "turboquant_paged".

No mask function is registered under this name. Otherwise transformers would build a mask of all tokens by all tokens at
every step.

A compiled layer calls the operator `tq_hf::attend_pages`. The operator takes pages and arguments of the engine from the
step that its thread runs (`running`), and writes to pages that are not inputs of the graph.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from tq_kernels.types import AttentionOptions, Tokens
from transformers import AttentionInterface

from ..layers.expansion import up_projection
from ..prepared import LAYER
from .cache import TurboQuantPagedCache

NAME = "turboquant_paged"

PAGES = "turboquant_pages"
"""Keyword argument with the step's `TurboQuantPagedCache`.

The engine's own argument `cache` reaches attention up to transformers 5.23. From 5.24 on, models take `cache` and call
its `update`.
"""


class NoPages(ValueError):
    """A call has no pages."""


def pages_of_step(kwargs: dict[str, Any]) -> TurboQuantPagedCache:
    """Return the cache of the step that `kwargs` are arguments of. Raise `ValueError` for any other call."""
    cache = kwargs.get(PAGES)
    if not isinstance(cache, TurboQuantPagedCache):
        raise NoPages(
            "This model serves a continuous batching manager of tq_hf, so it takes no other calls. Stop the manager "
            "first (`manager.stop()`, or leave the `with`): the model then has its own attention again."
        )
    return cache


def turboquant_paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention `[1, T, Hq, D]` of the new tokens of many requests over their pages and over themselves.

    Args:
        module: Attention module.
        query: `[1, Hq, T, D]`, the new tokens of all requests in sequence.
        key, value: `[1, Hkv, T, D]`; with latents keys `[1, Hq, T, Dk]` and values `[1, Hq, T, Dv]` of the new tokens.
        attention_mask, dropout: Not supported. The lengths of requests are the mask.
        scaling: Factor of the logits, by default `D ** -0.5`.
        **kwargs: Arguments of the engine, with the `TurboQuantPagedCache` under `PAGES`, and the model's fields of
            `AttentionOptions` (without `position_bias`).

    Raises:
        ValueError: The call is not a step of continuous batching, or needs an option that pages do not support.
    """
    cache = pages_of_step(kwargs)
    unknown = ("position_bias", "indices", "block_indices", "sinks")
    names = [name for name in unknown if kwargs.get(name) is not None]
    if names or dropout or attention_mask is not None:
        what = ", ".join(names) or ("dropout" if dropout else "an attention mask")
        raise ValueError(
            f"{type(module).__name__} attends with {what}, which continuous batching on packed pages does not compute. "
            "Use `generate()` with a `TurboQuantCache`."
        )
    options = AttentionOptions.of_call(query.shape[-1] ** -0.5 if scaling is None else scaling, True, kwargs)
    expanded, weight = (key, value), None
    if cache.holds_latents:
        (key, value), weight = cache.take_latents(), up_projection(module)
    if torch.compiler.is_dynamo_compiling():
        tensors = [query, key, value, module.__dict__[LAYER]]
        return attend_pages(tensors, weight, options.s_aux, options.scaling, options.softcap), None
    layer: Any = module.layer_idx
    return cache.layer_step(layer, Tokens(query, key, value), kwargs, options, weight, expanded), None


class Running(threading.local):
    """The step that this thread runs. Without pages, as in a thread that compiles, operators read and write none."""

    pages: TurboQuantPagedCache | None = None
    arguments: dict[str, Any] = {}


running = Running()


@torch.library.custom_op("tq_hf::attend_pages", mutates_args=())
def attend_pages(
    tensors: list[torch.Tensor],
    weight: torch.Tensor | None,
    s_aux: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Call `TurboQuantPagedCache.layer_step` of the running step. `tensors` are queries, keys (or latents), values (or
    rotary keys) and the module's `LAYER`."""
    if (pages := running.pages) is None:
        return _empty_output(tensors, weight).zero_()
    *states, layer = tensors
    options = AttentionOptions(scaling, True, softcap, s_aux)
    return pages.layer_step(int(layer[0]), Tokens(*states), running.arguments, options, weight).contiguous()


@attend_pages.register_fake
def _empty_output(tensors: list[torch.Tensor], weight: torch.Tensor | None, *arguments: Any) -> torch.Tensor:
    batch, heads, tokens, dim = tensors[0].shape
    if weight is not None:
        dim = weight.shape[0] // heads - (dim - tensors[2].shape[3])
    return tensors[0].new_empty(batch, tokens, heads, dim)


AttentionInterface.register(NAME, turboquant_paged_attention)
