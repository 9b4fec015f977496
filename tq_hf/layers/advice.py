"""What the log says, once, of a model, its dtype, its GPU and the states of its first prompt.

Predictions compare decode attention with reading the same keys and values in 16 bits
(`examples/measure/compile/cards.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from tq_kernels.format import NEAR
from tq_kernels.layout import BlockLayout
from tq_kernels.types import KeyValue
from transformers.utils import logging

from ..codec.balance import key_gain
from ..compat import is_capturing
from ..ops.triton import blocks as triton_blocks

logger = logging.get_logger(__name__)

OVERFLOWS = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""Model types known not to run in float16: those that vLLM refuses ("numerical instability", `vllm/config/model.py`);
of Gemma 3 transformers' issue 36822 tells the same. Activations exceed 65,504."""

SAMPLED_TOKENS = 128
"""So many of the newest tokens of a first prompt are looked at, if as many are dense."""
SMALLEST_RMS, LARGEST_RMS = 1e-6, 65504.0
"""A head whose vectors are outside has scales beyond fp16, or of so few bits that they count."""
GREAT_SPREAD = 4.0
"""`key_gain` of keys alone that argues for keys of 8 bits; models that were measured have less than half of it."""


looked_at: set[tuple[Any, ...]] = set()
"""States that `warn_about_states` has seen the like of: looking takes as long as a few launches."""


def warn_about_states(states: torch.Tensor, layout: BlockLayout, model_type: str | None) -> None:
    """Warn of a dtype or a GPU that does not suit the model, by a layer's first states `[B, Hkv, S, D]`."""
    if (kind := (states.dtype, states.device, layout.key_dim, layout.value_dim, model_type)) in looked_at:
        return
    looked_at.add(kind)
    fails = f"{model_type} is known to exceed float16's range"
    if states.dtype == torch.float16 and model_type in OVERFLOWS:
        logger.warning_once(f"{fails}: load it with `dtype=torch.bfloat16`, or float32 on a GPU without bfloat16.")
    if not states.is_cuda:
        return
    card = torch.cuda.get_device_properties(states.device)
    nvidia = torch.version.hip is None
    if nvidia and card.major < 8 and states.dtype == torch.bfloat16:
        way = "float32, because " + fails if model_type in OVERFLOWS else "`dtype=torch.float16`"
        logger.warning_once(
            f"{card.name} has no bfloat16 units: the cache's kernels convert, but the model's own matrix products are "
            f"slow. Load it with {way}."
        )
    if triton_blocks.supports_blocks(states, layout) and not triton_blocks.supports_inline_ptx(states.device):
        logger.warning_once(
            f"On {card.name} kernels are compiled without inline PTX, and none was ever timed so. By their code "
            "decode attention is predicted to take about as long as without compression, or longer: it saves memory."
        )


def of_dequantized_steps(layout: BlockLayout, asked: bool) -> None:
    """Warn that decode steps dequantize: packed states are read, dense ones written and read. `asked`: the model's
    attention is "turboquant" all the same."""
    times = 2 + 1 / layout.compression_ratio
    way = (
        "The keys of this model do not reach attention as the cache holds them, so there is no other way"
        if asked
        else 'Load the model with `attn_implementation="turboquant"`, which reads the cache as it is'
    )
    logger.warning_once(
        f"Every step dequantizes the whole cache for attention, and moves {times:.1f} times the bytes that a step "
        f"without compression reads: predicted to be slower at any length; it saves memory. {way}."
    )


class FirstPrompt:
    """The first prompt of a cache: what it shows of the model's states is logged once.

    The call after it looks at the prompt's newest tokens that are still dense, for which it waits for the device, once.
    So nothing is logged of a cache that is called only once, or that has nothing dense then.

    Args:
        auto: Whether "auto" chose the preset: then it is logged, too, how far keys are from balanced.
    """

    def __init__(self, auto: bool) -> None:
        self.auto = auto
        self.seen: set[int] = set()
        """Numbers of the layers that hold it."""

    @property
    def ready(self) -> bool:
        """Whether there is one, and the device may be waited for: not while a graph of its work is made."""
        return bool(self.seen) and not (torch.compiler.is_compiling() or is_capturing())

    def see(self, index: int, keys: torch.Tensor) -> None:
        """A layer is given keys `[B, Hkv, S, D]`, which count if they are numbers."""
        if not keys.is_meta:
            self.seen.add(index)

    def report(self, layers: Sequence[Any]) -> None:
        """Log what fp16 scales of these layers cannot hold and, for "auto", how balanced their keys are. Waits for the
        device."""
        sampled = [(i, layers[i], sizes) for i in sorted(self.seen) if (sizes := _sizes(layers[i])) is not None]
        if not sampled:
            return
        if warnings := _beyond_fp16(sampled):
            more = f" So it is in {len(warnings) - 1} more layers." if warnings[1:] else ""
            logger.warning(warnings[0] + more)
        if self.auto:
            _report_balance(sampled)


def _rms(states: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.linalg.vector_norm(states.float(), dim=dim) / states.shape[dim] ** 0.5


def _sizes(layer: Any) -> KeyValue | None:
    """RMS of channels `[B, Hkv, D]` float32 of a layer's keys, about their mean, and of its values."""
    parts = layer.store.view().dense_parts if layer.store is not None else []
    if not parts or parts[-1][1][0].shape[2] == 0:
        return None
    k, v = (x[:, :, -SAMPLED_TOKENS:] for x in parts[-1][1])
    return k.float().std(2, correction=0), _rms(v, 2)


def _beyond_fp16(sampled: Sequence[tuple[int, Any, KeyValue]]) -> list[str]:
    """A warning of each layer whose states are beyond what scales in fp16 hold."""
    stored = [
        _rms(size.to(factor.device) * factor, -1).flatten()
        for _, layer, sizes in sampled
        for size, factor in zip(sizes, layer.store.blocks.channel_scales, strict=True)
    ]
    # All at once: each wait for the device would take as long as a layer's launches.
    held = iter(torch.cat([x.to(stored[0].device) for x in stored]).tolist())
    warnings: dict[int, str] = {}
    for number, heads in enumerate(stored):
        index, layer, _ = sampled[number // 2]
        sizes = [size for size in islice(held, heads.numel()) if size > 0] or [1.0]  # 0 is held exactly
        least, most, what = min(sizes), max(sizes), ("Keys", "Values")[number % 2]
        if index not in warnings and (least < SMALLEST_RMS or most > LARGEST_RMS):
            way = f"Leave the layer out (`skip_layers=({index},)`)"
            way += "." if layer.config.balance else ", or balance it (`balance=True`)."
            warnings[index] = (
                f"{what} of layer {index} have an RMS of {least if least < SMALLEST_RMS else most:.1e} in some head, "
                f"beyond what 16-bit scales hold ({SMALLEST_RMS:.0e} to {LARGEST_RMS:,.0f}): they are stored wrong. "
                f"{way}"
            )
    return list(warnings.values())


def _report_balance(sampled: Sequence[tuple[int, Any, KeyValue]]) -> None:
    """Log how far keys are from balanced, by their channel scales or, where nobody showed queries, by themselves."""
    if not all(layer.needs_queries and layer.config.balance for _, layer, _ in sampled):
        gain, index = max(
            (key_gain(keys, torch.ones_like(keys)).max().item(), index) for index, _, (keys, _) in sampled
        )
        if gain > GREAT_SPREAD and sampled[0][1].config.key_bits < 8:
            logger.warning(
                f"preset='auto': channels of keys are unlike in layer {index} ({gain:.0f} times the energy of equal "
                "ones), and are not balanced, as nobody showed queries or `balance=False`. Consider preset='k8v4', or "
                "balance and attn_implementation='turboquant', which shows them."
            )
        return
    layers, heads, far = [], 0, 0
    for index, layer, _ in sampled:
        factor = layer.store.blocks.channel_scales.keys.float().cpu()
        away = (factor / factor.median(-1, keepdim=True).values).log().abs().amax(-1).exp()  # [B, Hkv]
        heads, far = heads + away.numel(), far + int((away > NEAR).sum())
        layers.append((away.max().item(), index, key_gain(1 / factor, factor).max().item()))
    times, index, gain = max(layers)
    if far == 0:
        logger.info(f"preset='auto': keys are balanced, within {NEAR:g} times in all heads.")
        return
    logger.warning(
        f"preset='auto': keys of {far} of {heads} heads are not balanced, in layer {index} by {times:.0f} times (their "
        f"error would be {gain**0.5:.1f} times that of balanced ones). Their channels have channel scales, so "
        f"{sampled[0][1].config.preset} serves as on other models; with `balance=False` take preset='k8v4'."
    )
