"""Logits of tokens that may be sampled."""

from __future__ import annotations

import torch

from .backend import HAS_TRITON, explains_failures
from .triton.blocks import supports_states

if HAS_TRITON:
    from tq_kernels.sampling import truncate as truncate_by_search


@explains_failures
def truncate(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set logits outside of `top_k`, then `top_p`, then `min_p` to -inf, as transformers' processors do.

    The kept tokens are those of transformers, and all with the same logit as the least likely of them. transformers
    keeps an arbitrary part of these under `top_p`.

    Args:
        scores: `[N, vocabulary]` float32, contiguous, overwritten.
        top_k: `[N]` int32; 0 for all tokens.
        top_p, min_p: `[N]` float32; 1 and 0 for all tokens.
    """
    by_kernel = supports_states(scores)
    return (truncate_by_search if by_kernel else truncate_by_sort)(scores, top_k, top_p, min_p)


def truncate_by_sort(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """`truncate` in torch."""
    vocabulary = scores.shape[1]
    ordered, _ = scores.sort(-1, descending=True)
    count = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary).long()
    ordered = ordered.masked_fill(ordered < ordered.gather(1, (count - 1)[:, None]), -torch.inf)
    probabilities = ordered.softmax(-1)
    # Add up from the least likely token on, as transformers does: small numbers first.
    at_most = probabilities.flip(-1).cumsum(-1).flip(-1)
    removed = at_most <= torch.where(top_p < 1, 1 - top_p, -1.0)[:, None]
    removed |= (probabilities < min_p[:, None] * probabilities[:, :1]) | (ordered == -torch.inf)
    removed[:, 0] = False
    least = ordered.masked_fill(removed, torch.inf).amin(-1, keepdim=True)
    return scores.masked_fill_(scores < least, -torch.inf)
