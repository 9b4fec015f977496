"""What is worth knowing about a model, its dtype and its GPU: said once, in the log.

What is predicted is decode attention against reading the same keys and values in 16 bits
(`examples/measure/compile/cards.py`).
"""

from __future__ import annotations

import torch
from transformers.utils import logging

from ..layout import BlockLayout
from ..ops.triton import blocks as triton_blocks

logger = logging.get_logger(__name__)

OVERFLOWS = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""Model types known not to run in float16: those that vLLM refuses ("numerical instability", `vllm/config/model.py`);
of Gemma 3 transformers' issue 36822 tells the same. Activations exceed 65,504."""


def warn_about_states(states: torch.Tensor, layout: BlockLayout, model_type: str | None) -> None:
    """Say what is to be said of a layer's first states `[B, Hkv, S, D]`."""
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


def dense_bytes(layout: BlockLayout) -> int:
    """Bytes of a block's keys and values in 16 bits."""
    return 2 * layout.tokens * (layout.key_dim + layout.value_dim)


def of_dequantized_steps(layout: BlockLayout, asked: bool) -> None:
    """Say that decode steps dequantize: packed states are read, dense ones written and read. `asked`: the model's
    attention is "turboquant" all the same."""
    times = 2 + layout.block_bytes / dense_bytes(layout)
    way = (
        "The keys of this model do not reach attention as the cache holds them, so there is no other way"
        if asked
        else 'Load the model with `attn_implementation="turboquant"`, which reads the cache as it is'
    )
    logger.warning_once(
        f"Every step dequantizes the whole cache for attention, and moves {times:.1f} times the bytes that a step "
        f"without compression reads: predicted to be slower at any length; it saves memory. {way}."
    )
