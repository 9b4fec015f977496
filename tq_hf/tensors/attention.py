"""The options of attention: what a model asks for beside its states and its mask."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionOptions(NamedTuple):
    """One value from the attention function to the kernel's launch.

    Args:
        scaling: Factor of the logits.
        causal: What a mask of `None` means: bottom-right causal, or full.
        softcap: Logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        s_aux: `[Hq]` logits of learned attention sinks (gpt-oss): they take weight and give no value.
        position_bias: `[B or 1, 1 or Hq, S, >= T]`, added to the logits.
    """

    scaling: float
    causal: bool = True
    softcap: float | None = None
    s_aux: torch.Tensor | None = None
    position_bias: torch.Tensor | None = None


def supports_sdpa(options: AttentionOptions) -> bool:
    """Whether torch's sdpa computes attention with these options."""
    # Not a property: of a named tuple, Dynamo of torch 2.9 traces none.
    return options.softcap is None and options.s_aux is None and options.position_bias is None
