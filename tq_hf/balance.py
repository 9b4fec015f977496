"""Factors of a model's channels, handed on from one cache to another.

They belong to the model more than to a text: another document's serve as well as a prompt's own. So prompts too short
for statistics (under 32 tokens: a chat that begins with a word stays unbalanced else), and caches that share pages, can
use those of an earlier cache or of a probe.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tq_kernels.format import LARGEST_FACTOR, SMALLEST_FACTOR
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from .config import TurboQuantConfig
from .layers.compressed import TurboQuantLayer
from .tensors.blocks import Factors

PROBE_TOKENS = 512
NAME = "turboquant"
_CONFIG = TurboQuantConfig()


class Balance:
    """The factors of every compressed layer of a model (see `tq_hf.codec.balance`).

    ```python
    balance = Balance.of(model)
    cache = TurboQuantCache(model.config, balance=balance)
    ```

    Args:
        layers: Factors `[1, Hkv, D]` by the number of their layer.
    """

    def __init__(self, layers: dict[int, Factors]) -> None:
        self.layers = layers

    @classmethod
    def held_by(cls, layers: Iterable[Any]) -> Balance:
        """Those in use in the layers of a cache; of several sequences the geometric mean.

        Raises:
            ValueError: A layer holds no tokens yet.
        """
        found = {}
        for index, layer in enumerate(layers):
            if isinstance(layer, TurboQuantLayer):
                if layer.store is None:
                    raise ValueError("The cache holds no tokens, so its channels have no factors. Run the model first.")
                layer.store.encode_prompt()
                found[index] = layer.store.blocks.factors.map(_mean)
        return cls(found)

    @classmethod
    def of(cls, model: Any) -> Balance:
        """From a short run of `model` on random tokens, the same ones every time."""
        config = model.config.get_text_config(decoder=True)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, (1, PROBE_TOKENS), generator=generator)
        before = model.config._attn_implementation
        cache = DynamicCache(config=model.config)
        cache.layers = [TurboQuantLayer(_CONFIG) if type(layer) is DynamicLayer else layer for layer in cache.layers]
        model.set_attn_implementation(NAME)
        try:
            with torch.no_grad():
                model(ids.to(model.device), past_key_values=cache)
        finally:
            model.set_attn_implementation(before)
        return cls.held_by(cache.layers)

    def give(self, layers: Iterable[Any]) -> None:
        """Let the layers of an empty cache use these factors.

        Raises:
            ValueError: They are not those of a cache of this model.
        """
        compressed = {index: layer for index, layer in enumerate(layers) if isinstance(layer, TurboQuantLayer)}
        if missing := sorted(compressed.keys() - self.layers.keys()):
            raise ValueError(
                f"`balance` has no factors of layer {missing[0]}, which is compressed: it is of another model, or of a "
                "cache that skipped the layer. Make it anew with `Balance.of(model)`."
            )
        for index, layer in compressed.items():
            layer.factors = self.layers[index]


def _mean(factor: torch.Tensor) -> torch.Tensor:
    """Geometric mean over sequences, `[B, Hkv, D]` to `[1, Hkv, D]`."""
    if len(factor) == 1:
        return factor.clone()
    mean = factor.float().log2().mean(0, keepdim=True).exp2().clamp(SMALLEST_FACTOR, LARGEST_FACTOR)
    return mean.bfloat16().half()
