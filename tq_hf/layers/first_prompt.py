"""What the first prompt of a cache shows of its states, and what is to be said about it.

The call after it looks at the prompt's newest tokens that are still dense, for which it waits for the device, once. So
nothing is said of a cache that is called only once, or that holds nothing dense then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tq_kernels.format import NEAR
from transformers.utils import logging

from ..codec.balance import key_gain
from ..compat import is_capturing
from ..tensors.blocks import KeyValue
from .compressed import TurboQuantLayer

logger = logging.get_logger(__name__)

SAMPLED_TOKENS = 128
"""So many of the newest tokens are looked at, if as many are dense."""
SMALLEST_RMS, LARGEST_RMS = 1e-6, 65504.0
"""A head whose vectors are outside has scales beyond fp16, or of so few bits that they count."""
GREAT_SPREAD = 4.0
"""`key_gain` of keys alone that argues for keys of 8 bits; models that were measured have less than half of it."""


class FirstPrompt:
    """The first prompt of a cache.

    Args:
        auto: Whether "auto" chose the preset: then it is said, too, how far keys are from balanced.
    """

    def __init__(self, auto: bool) -> None:
        self.auto = auto
        self.seen: set[int] = set()
        """Layers that hold it."""

    @property
    def ready(self) -> bool:
        """Whether there is one, and the device may be waited for: not while a graph of its work is made."""
        return bool(self.seen) and not (torch.compiler.is_compiling() or is_capturing())

    def see(self, index: int, keys: torch.Tensor) -> None:
        """A layer is given keys `[B, Hkv, S, D]`, which count if they are numbers."""
        if not keys.is_meta:
            self.seen.add(index)

    def report(self, layers: Sequence[Any]) -> None:
        """Say what is to be said of these layers, which hold the prompt. Waits for the device."""
        seen = [(i, layers[i], sizes) for i in sorted(self.seen) if (sizes := _sizes(layers[i])) is not None]
        lost = [found for index, layer, sizes in seen if (found := _lost(index, layer, sizes))]
        if lost:
            more = f" So it is in {len(lost) - 1} more layers." if lost[1:] else ""
            logger.warning(lost[0] + more)
        if self.auto and seen:
            _report_balance(seen)


def _sizes(layer: TurboQuantLayer) -> KeyValue | None:
    """RMS of channels `[B, Hkv, D]` float32 of a layer's keys, about their mean, and of its values."""
    parts = layer.store.view().dense_parts if layer.store is not None else []
    if not parts or parts[-1][1][0].shape[2] == 0:
        return None
    k, v = (x[:, :, -SAMPLED_TOKENS:].float() for x in parts[-1][1])
    return k.std(2, correction=0), v.square().mean(2).sqrt()


def _lost(index: int, layer: TurboQuantLayer, sizes: KeyValue) -> str | None:
    """What is wrong with a layer that scales in fp16 cannot hold."""
    assert layer.store is not None
    for what, size, factor in zip(("Keys", "Values"), sizes, layer.store.blocks.channel_scales, strict=True):
        stored = (size.to(factor.device) * factor).square().mean(-1).sqrt()
        least, most = torch.stack([torch.where(stored > 0, stored, 1).min(), stored.max()]).tolist()
        if least < SMALLEST_RMS or most > LARGEST_RMS:
            advice = f"Leave the layer out (`skip_layers=({index},)`)"
            advice += "." if layer.config.balance else ", or balance it (`balance=True`)."
            return (
                f"{what} of layer {index} have an RMS of {least if least < SMALLEST_RMS else most:.1e} in some head, "
                f"beyond what 16-bit scales hold ({SMALLEST_RMS:.0e} to {LARGEST_RMS:,.0f}): they are stored wrong. "
                f"{advice}"
            )
    return None


def _report_balance(seen: Sequence[tuple[int, TurboQuantLayer, KeyValue]]) -> None:
    """Say how far keys are from balanced, by their channel scales or, where nobody showed queries, by themselves."""
    if not all(layer.needs_queries and layer.config.balance for _, layer, _ in seen):
        gain, index = max((key_gain(keys, torch.ones_like(keys)).max().item(), index) for index, _, (keys, _) in seen)
        if gain > GREAT_SPREAD and seen[0][1].config.key_bits < 8:
            logger.warning(
                f"preset='auto': channels of keys are unlike in layer {index} ({gain:.0f} times the energy of equal "
                "ones), and are not balanced, as nobody showed queries or `balance=False`. Consider preset='k8v4', or "
                "balance and attn_implementation='turboquant', which shows them."
            )
        return
    found, heads, far = [], 0, 0
    for index, layer, _ in seen:
        assert layer.store is not None
        factor = layer.store.blocks.channel_scales.keys.float().cpu()
        away = (factor / factor.median(-1, keepdim=True).values).log().abs().amax(-1).exp()  # [B, Hkv]
        heads, far = heads + away.numel(), far + int((away > NEAR).sum())
        found.append((away.max().item(), index, key_gain(1 / factor, factor).max().item()))
    times, index, gain = max(found)
    if far == 0:
        logger.info(f"preset='auto': keys are balanced, within {NEAR:g} times in all heads.")
        return
    logger.warning(
        f"preset='auto': keys of {far} of {heads} heads are not balanced, in layer {index} by {times:.0f} times (their "
        f"error would be {gain**0.5:.1f} times that of balanced ones). Their channels have channel scales, so "
        f"{seen[0][1].config.preset} serves as on other models; with `balance=False` take preset='k8v4'."
    )
