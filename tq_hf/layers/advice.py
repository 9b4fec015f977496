"""Warnings in the log, each once: about a model, its dtype, its GPU and the states of its first prompt.

Predictions compare decode attention with reading the same keys and values in 16 bits
(`examples/measure/compile/cards.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tq_kernels.layout import BlockLayout
from transformers.utils import logging

from ..compat import outside_autocast
from ..ops import dispatch

logger = logging.get_logger(__name__)

OVERFLOWS = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""Model types whose activations exceed float16's range (65,504). vLLM refuses them in float16 ("numerical instability",
`vllm/config/model.py`), and transformers' issue 36822 reports Gemma 3."""

OFTEN = 4
"""Number of times that a layer encodes assigned rows again before a warning."""
SAMPLED_TOKENS = 128
"""Number of newest prompt tokens to check (fewer if fewer are dense)."""
SAMPLED_NUMBERS = 1 << 23
"""Most numbers to check at once: all layers of a sequence, one by one those of a large batch."""
SMALLEST_RMS, LARGEST_RMS = 1e-6, 65504.0
"""Range of a head's RMS. Outside, scales exceed fp16 or are subnormal, with too few bits."""

checked_states: set[tuple[Any, ...]] = set()
"""Combinations that `warn_about_states` has checked: a check takes as long as a few launches."""


def warn_about_states(states: torch.Tensor, layout: BlockLayout, model_type: str | None) -> None:
    """Warn about a dtype or a GPU that does not suit the model. `states` are a layer's first, `[B, Hkv, S, D]`."""
    if (kind := (states.dtype, states.device, layout.key_dim, layout.value_dim, model_type)) in checked_states:
        return
    checked_states.add(kind)
    fails = f"{model_type} is known to exceed float16's range"
    if states.dtype == torch.float16 and model_type in OVERFLOWS:
        logger.warning_once(f"{fails}: load it with `dtype=torch.bfloat16`, or float32 on a GPU without bfloat16.")
    if not states.is_cuda:
        return
    card = torch.cuda.get_device_properties(states.device)
    if torch.version.hip is None and card.major < 8 and states.dtype == torch.bfloat16:
        way = "float32, because " + fails if model_type in OVERFLOWS else "`dtype=torch.float16`"
        logger.warning_once(
            f"{card.name} has no bfloat16 units: the cache's kernels convert, but the model's own matrix products are "
            f"slow. Load it with {way}."
        )
    if dispatch.plain_kernels(states, layout):
        logger.warning_once(
            f"On {card.name} kernels are compiled without inline PTX; their speed was never measured. From their code "
            "decode attention is predicted to take about as long as without compression, or longer. It saves memory."
        )


def warn_about_dequantized_steps(layout: BlockLayout, can_read_packed: bool) -> None:
    """Warn that decode steps dequantize: each reads packed states, and writes and reads dense ones. `can_read_packed`:
    whether "turboquant" can take the place of the model's attention."""
    times = 2 + 1 / layout.compression_ratio
    advice = (
        'Load the model with `attn_implementation="turboquant"`, which reads packed keys and values'
        if can_read_packed
        else "The attention of this model takes dense keys and values only, or changes them after the cache"
    )
    logger.warning_once(
        f"Every step dequantizes the whole cache for attention, and moves {times:.1f} times the bytes of a step "
        f"without compression: it saves memory and is slower. {advice}."
    )


def warn_about_encoding_again() -> None:
    """Warn that assigned rows of packed blocks are quantized again each time, and that their errors add up."""
    logger.warning_once(
        f"Keys and values were assigned to a layer {OFTEN} times with rows of packed blocks that had changed or moved. "
        "Each time these rows are quantized again, and errors add up. Remove multiples of 128 rows at once: whole "
        "blocks keep their codes. Or keep these rows exact: `TurboQuantCache(..., residual_length=n)` for a window of "
        "n tokens."
    )


def warn_beyond_fp16(layers: Mapping[int, Any]) -> None:
    """Warn about keys and values with scales beyond fp16: their packed blocks are wrong, and have no NaN to show it.

    Checks dense tokens of compressed `layers`, by their index in the model, after their first prompt. Waits for the
    device, once.
    """
    groups: dict[Any, list[Any]] = {}
    for index, layer in layers.items():
        parts = layer.store.view().dense_parts() if layer.store is not None else []
        if not parts or parts[-1][1][0].is_meta or parts[-1][1][0].shape[2] == 0:
            continue
        channel_scales = layer.store.blocks.channel_scales
        for name, states, scales in zip(("Keys", "Values"), parts[-1][1], channel_scales, strict=True):
            rows = states[:, :, -SAMPLED_TOKENS:]
            groups.setdefault((name, rows.shape, rows.dtype, rows.device), []).append((index, rows, scales[:, :, None]))
    checked, sizes = [], []
    for (name, shape, *_), members in groups.items():
        at_once = max(1, SAMPLED_NUMBERS // shape.numel())
        for some in (members[start : start + at_once] for start in range(0, len(members), at_once)):
            indices, states, factors = zip(*some, strict=True)
            with outside_autocast(states[0]):
                rows = torch.stack(states).float() * torch.stack(factors).float()
            centered = rows - rows.mean(3, keepdim=True) if name == "Keys" else rows
            norms = (torch.linalg.vector_norm(x, dim=(3, 4)) for x in (rows, centered))
            size, rms = (norm / (shape[2] * shape[3]) ** 0.5 for norm in norms)  # [layers, B, Hkv]
            # Equal rows (padding) leave rounding; 0 is exact, NaN is no error here.
            beyond = (rms > LARGEST_RMS) | ((rms > 1e-6 * size) & (rms < SMALLEST_RMS))
            checked += [(name, index) for index in indices]
            sizes.append(torch.where(beyond, rms, 0).amax((1, 2)))
    # One wait for all layers: each wait for the device takes as long as a layer's launches.
    found = torch.cat([size.to(sizes[0].device) for size in sizes]).tolist() if sizes else []
    wrong = [(name, index, rms) for (name, index), rms in zip(checked, found, strict=True) if rms]
    wrong.sort(key=lambda each: each[1])
    if wrong:
        (name, index, rms), skipped = wrong[0], tuple(sorted({index for _, index, _ in wrong}))
        balanced = all(layers[index].config.balance for index in skipped)
        alternative = "" if balanced else ", or balance them (`balance=True`)"
        logger.warning(
            f"{name} of layer {index} have an RMS of {rms:.1e} in some head, beyond the range of 16-bit scales "
            f"({SMALLEST_RMS:.0e} to {LARGEST_RMS:,.0f}): they are stored wrong. Leave the layers out "
            f"(`skip_layers={skipped}`){alternative}."
        )
