"""Channel scales of a model, handed on from one cache to another.

They belong to the model more than to a text: another document's serve as well as a prompt's own. So prompts too short
for statistics (under 32 tokens: a chat that begins with a word stays unbalanced else), and caches that share pages, can
use those of an earlier cache or of a probe.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tq_kernels.format import LARGEST_SCALE, LEAST_TOKENS, SMALLEST_SCALE
from tq_kernels.types import ChannelScales
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from .compat import as_input, attention_of_parts, device_of_inputs, give_attention_back
from .config import TurboQuantConfig
from .layers.compressed import TurboQuantLayer

PROBE_TOKENS = 512
POSITIONS = ("max_position_embeddings", "max_target_positions", "n_positions", "max_seq_len")
"""Names under which configs say how many positions a model has, at most one of them in each."""
_CONFIG = TurboQuantConfig()


class Balance:
    """The channel scales of every compressed layer of a model (see `tq_hf.codec.balance`).

    ```python
    balance = Balance.of(model)
    cache = TurboQuantCache(model.config, balance=balance)
    ```

    Args:
        layers: Channel scales `[1, Hkv, D]` by the number of their layer.
    """

    def __init__(self, layers: dict[int, ChannelScales]) -> None:
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
                    raise ValueError(
                        "The cache holds no tokens, so its channels have no channel scales. Run the model first."
                    )
                layer.store.encode_deferred()
                found[index] = layer.store.blocks.channel_scales.map(_mean)
        return cls(found)

    @classmethod
    def of(cls, model: Any) -> Balance:
        """From a short run of `model` on random tokens, the same ones every time.

        Raises:
            ValueError: The model has too few positions for statistics.
        """
        config = model.config.get_text_config(decoder=True)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, (1, _probe_tokens(config)), generator=generator)
        before = attention_of_parts(model)
        cache = DynamicCache(config=model.config)
        cache.layers = [TurboQuantLayer(_CONFIG) if type(layer) is DynamicLayer else layer for layer in cache.layers]
        try:
            model.set_attn_implementation("turboquant")
            with torch.no_grad():
                model(ids.to(device_of_inputs(model)), **as_input(cache))
        finally:
            give_attention_back(before)
        return cls.held_by(cache.layers)

    def give(self, layers: Iterable[Any]) -> None:
        """Let the layers of an empty cache use these channel scales.

        Raises:
            ValueError: They are not those of a cache of this model.
        """
        compressed = {index: layer for index, layer in enumerate(layers) if isinstance(layer, TurboQuantLayer)}
        if missing := sorted(compressed.keys() - self.layers.keys()):
            raise ValueError(
                f"`balance` has no channel scales of layer {missing[0]}, which is compressed: it is of another model, "
                "or of a cache that skipped the layer. Make it anew with `Balance.of(model)`."
            )
        for index, layer in compressed.items():
            layer.channel_scales = self.layers[index]


def _probe_tokens(config: PreTrainedConfig) -> int:
    """Tokens to run a decoder on: no more than it has positions for."""
    limits = (getattr(config, name, None) for name in POSITIONS)
    tokens = min(limit for limit in (PROBE_TOKENS, *limits) if isinstance(limit, int) and limit > 0)
    if tokens < (least := _CONFIG.sink_tokens + LEAST_TOKENS):
        raise ValueError(
            f"This model has positions for {tokens} tokens ({type(config).__name__}), and channel scales "
            f"need statistics of {least} or more. Use it without: `balance=False`."
        )
    return tokens


def _mean(factor: torch.Tensor) -> torch.Tensor:
    """Geometric mean over sequences, `[B, Hkv, D]` to `[1, Hkv, D]`."""
    if len(factor) == 1:
        return factor.clone()
    mean = factor.float().log2().mean(0, keepdim=True).exp2().clamp(SMALLEST_SCALE, LARGEST_SCALE)
    return mean.bfloat16().half()
