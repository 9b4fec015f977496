"""Channel scales of a model, measured once and used by many caches.

Channel scales depend on the model more than on the text: scales from another document serve as well as the prompt's
own. Prompts under 32 tokens are too short to estimate scales, and caches that share pages need common scales. Both can
use the scales of an earlier cache or of a probe.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tq_kernels.format import LARGEST_SCALE, LEAST_TOKENS, SMALLEST_SCALE, loud_channels
from tq_kernels.types import ChannelScales
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from .compat import as_input, attention_of_parts, device_of_inputs, restore_attention
from .config import TurboQuantConfig, number_of_positions
from .layers.compressed import TurboQuantLayer, compressed
from .ops.dispatch import compile_kernels

PROBE_TOKENS = 512
"""Number of random tokens of a probe."""
_CONFIG = TurboQuantConfig(residual_length=PROBE_TOKENS)


class Balance:
    """Channel scales of all compressed layers of a model (see `tq_hf.codec.balance`).

    ```python
    balance = Balance.of(model)
    cache = TurboQuantCache(model.config, balance=balance)
    ```

    Args:
        layers: Channel scales `[1, Hkv, D]` of keys and values, by layer index. Raises `ValueError` if key scales do
            not mark the loud channels of each head.
    """

    def __init__(self, layers: dict[int, ChannelScales]) -> None:
        for index, scales in layers.items():
            if not scales.has_marks():
                raise ValueError(
                    f"Key channel scales of layer {index} must be negative for {loud_channels(scales.keys.shape[-1])} "
                    "channels of each head, the loud ones. Measure them with `Balance.of(model)`."
                )
        self.layers = layers

    @classmethod
    def from_cache(cls, layers: Iterable[Any]) -> Balance:
        """Copy the channel scales of the layers of a cache. Scales of several sequences are averaged (geometric mean).

        Raises:
            ValueError: A compressed layer holds no tokens yet.
        """
        scales = {}
        for index, layer in compressed(layers).items():
            if layer.store is None:
                raise ValueError("The cache holds no tokens, so it has no channel scales. Run the model first.")
            layer.store.encode_deferred()
            scales[index] = layer.store.blocks.channel_scales.map(_mean)
        return cls(scales)

    @classmethod
    def of(cls, model: Any) -> Balance:
        """Measure channel scales in a short run of `model` on random tokens. The tokens are the same in every call.

        Raises:
            ValueError: The model has too few positions to estimate scales.
        """
        config = model.config.get_text_config(decoder=True)
        tokens = min(PROBE_TOKENS, number_of_positions(config) or PROBE_TOKENS)
        if tokens < (least := _CONFIG.sink_tokens + LEAST_TOKENS):
            raise ValueError(
                f"This model has positions for {tokens} tokens ({type(config).__name__}), and channel scales "
                f"need statistics of {least} or more. Use `balance=False`."
            )
        ids = torch.randint(config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
        ids, before = ids.to(device_of_inputs(model)), attention_of_parts(model)

        def run() -> list[Any]:
            cache = DynamicCache(config=model.config)
            cache.layers = [TurboQuantLayer(_CONFIG) if type(each) is DynamicLayer else each for each in cache.layers]
            model(ids, **as_input(cache))
            return cache.layers

        try:
            model.set_attn_implementation("turboquant")
            with torch.no_grad():
                if not any(weight.is_meta for weight in model.parameters()):  # offloaded ones are copied in each run
                    compile_kernels(torch.empty(0, dtype=model.dtype, device=ids.device), run)()
                layers = run()
        finally:
            restore_attention(before)
        return cls.from_cache(layers)

    def set_scales(self, layers: Iterable[Any]) -> None:
        """Set the channel scales of the layers of an empty cache. Raise `ValueError` if a compressed layer has none."""
        own = compressed(layers)
        if missing := sorted(own.keys() - self.layers.keys()):
            raise ValueError(
                f"`balance` has no channel scales of layer {missing[0]}, which is compressed. The scales belong to "
                "another model, or to a cache that skipped this layer. Measure them again with `Balance.of(model)`."
            )
        for index, layer in own.items():
            layer.channel_scales = self.layers[index]


def _mean(scales: torch.Tensor) -> torch.Tensor:
    """Geometric mean over sequences, `[B, Hkv, D]` to `[1, Hkv, D]`. Channels marked most often are marked."""
    mean = scales.abs().float().log2().mean(0, keepdim=True).exp2().clamp(SMALLEST_SCALE, LARGEST_SCALE)
    marked = scales < 0
    most = marked.sum(0, keepdim=True).argsort(dim=-1, descending=True, stable=True)[..., : int(marked[0, 0].sum())]
    return mean.scatter(-1, most, -mean.gather(-1, most)).bfloat16().half()
