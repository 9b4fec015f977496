"""`generate()` on a TurboQuant cache: `model.generate(..., custom_generate="tq-hf/tq_hf", trust_remote_code=True)`."""

from __future__ import annotations

from typing import Any

import tq_hf
from tq_hf.compat import CACHE_NAME, attention_of_parts, restore_attention


def generate(model: Any, preset: str = "4bit_nc", max_cache_len: int | None = None, **arguments: Any) -> Any:
    """Generate with attention over packed keys and values. The model keeps its own attention afterwards.

    Args:
        model: A decoder of transformers.
        preset: Preset of the cache (`tq_hf.PRESETS`), if no cache is passed.
        max_cache_len: Number of tokens to preallocate, for `tq_hf.graph_decoding`. `None` grows.
        **arguments: Arguments of `generate()`. A `TurboQuantCache` among them is used, for several turns.
    """
    if arguments.get(CACHE_NAME) is None:
        arguments[CACHE_NAME] = tq_hf.TurboQuantCache(model.config, preset, max_cache_len=max_cache_len)
    if max_cache_len is not None:
        arguments["custom_generate"] = tq_hf.graph_decoding
    attention = attention_of_parts(model)
    model.set_attn_implementation("turboquant")
    try:
        return model.generate(**arguments)
    finally:
        restore_attention(attention)
