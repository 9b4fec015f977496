"""A layer's step over the pages of many requests."""

from __future__ import annotations

import torch

from ..tensors.attention import AttentionOptions
from ..tensors.pages import LayerPages, Sequences
from . import paged_reference, paged_triton


def paged_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: LayerPages,
    sequences: Sequences,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention of every request's new tokens over its pages and themselves; then those tokens are stored.

    A request's queries attend, causally, to the packed blocks that were complete before this step (to sinks as rows of
    their own page, if there is one), to the rows of its ring (the tokens of its open block), and to the new tokens
    exactly. Then new rows go to the ring, and blocks that became complete are encoded, from ring rows and from `key`
    and `value`.

    Args:
        query: `[T, Hq, D]`, T tokens of all requests.
        key: `[T, Hkv, D]`.
        value: `[T, Hkv, D]`.
        pages: The layer's view of the pool, written in place.
        sequences: Whose tokens they are, and where their pages.
        options: Causal and without biases.

    Returns:
        `[T, Hq, D]` in the query's dtype; tokens of nobody get 0.
    """
    backend = paged_triton if paged_triton.supports_paged_step(query, key, pages, sequences) else paged_reference
    return backend.paged_step(query, key, value, pages, sequences, options)
