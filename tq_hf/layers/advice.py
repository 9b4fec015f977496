"""What the log says, once, of a model, its dtype, its GPU and the states of its first prompt.

Predictions compare decode attention with reading the same keys and values in 16 bits
(`examples/measure/compile/cards.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tq_kernels.layout import BlockLayout
from transformers.utils import logging

from ..ops import dispatch

logger = logging.get_logger(__name__)

OVERFLOWS = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""Model types known not to run in float16: those that vLLM refuses ("numerical instability", `vllm/config/model.py`);
of Gemma 3 transformers' issue 36822 tells the same. Activations exceed 65,504."""

SAMPLED_TOKENS = 128
"""Number of newest dense tokens of a first prompt that are looked at."""
SMALLEST_RMS, LARGEST_RMS = 1e-6, 65504.0
"""A head whose vectors are outside has scales beyond fp16, or of so few bits that they count."""

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
    if dispatch.plain_kernels(states, layout):
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


def warn_beyond_fp16(layers: Mapping[int, Any]) -> None:
    """Warn of keys and values whose scales fp16 cannot hold: their packed blocks are wrong, without any NaN to tell.

    Only dense tokens can be looked at, so of a prompt that leaves none nothing is said. Waits for the device, once.

    Args:
        layers: Compressed layers by their index in the model, after their first prompt.
    """
    named, sizes = [], []
    for index, layer in layers.items():
        parts = layer.store.view().dense_parts if layer.store is not None else []
        if not parts or parts[-1][1][0].is_meta or parts[-1][1][0].shape[2] == 0:
            continue
        channel_scales = layer.store.blocks.channel_scales
        for what, states, scales in zip(("Keys", "Values"), parts[-1][1], channel_scales, strict=True):
            rows = states[:, :, -SAMPLED_TOKENS:].float()
            rows = rows - rows.mean(2, keepdim=True) if what == "Keys" else rows
            rows = rows * scales[:, :, None].to(rows)
            rms = torch.linalg.vector_norm(rows, dim=(2, 3)) / (rows.shape[2] * rows.shape[3]) ** 0.5  # [B, Hkv]
            beyond = (rms > LARGEST_RMS) | ((rms > 0) & (rms < SMALLEST_RMS))  # 0 is held exactly, NaN is not judged
            named.append((what, index))
            sizes.append(torch.where(beyond, rms, 0).amax())
    # All at once: each wait for the device would take as long as a layer's launches.
    held = torch.stack([size.to(sizes[0].device) for size in sizes]).tolist() if sizes else []
    found = [(what, index, rms) for (what, index), rms in zip(named, held, strict=True) if rms]
    if found:
        (what, index, rms), skipped = found[0], tuple(sorted({index for _, index, _ in found}))
        balanced = all(layers[index].config.balance for index in skipped)
        way = "" if balanced else ", or balance them (`balance=True`)"
        logger.warning(
            f"{what} of layer {index} have an RMS of {rms:.1e} in some head, beyond what 16-bit scales hold "
            f"({SMALLEST_RMS:.0e} to {LARGEST_RMS:,.0f}): they are stored wrong. Leave the layers out "
            f"(`skip_layers={skipped}`){way}."
        )
