"""`preset="auto"`: choose a preset for a model, from its config, its weights and the first keys it caches.

Two presets are ever chosen, the two of most bits: of those measured (README, "Quality") they recall as much as the full
cache on every model and with every offset of the keys.

    4bit_nc   the usual choice
    k8v4      where 4-bit keys lose more than on the measured models, or where nothing like the model was measured

What is chosen takes fewer bytes than FP8 (e4m3 with an fp16 scale for each token and head), so it is never worse at
more bytes. Heads so small that packing them would take more stay dense.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from tq_kernels.layout import BlockLayout
from transformers import PreTrainedConfig
from transformers.utils import logging

from .codec.reference import levels_of, quantize
from .codec.rotation import rotate
from .compat import layer_config
from .config import TurboQuantConfig, with_bits

logger = logging.get_logger(__name__)

SMALL_HEAD = 64
"""Channels of the smallest heads that 4-bit keys were measured on."""
GREAT_BIAS = 1.0
"""A key bias turns with the rotary embedding, so a block's mean takes out only a part of it. Beyond this (times the
keys about it) 8-bit keys are chosen."""
GREAT_OFFSET = 10.0
"""The largest common offset of keys that was measured, times their size."""
EXPECTED_KEY_ERROR = 0.0096
"""Squared error of 4-bit keys over their energy about the block mean, as Gaussian channels give it with
`key_correction="inner"`: m / (1 - m) with m = 0.0095 for N(0, 1) (see `tq_hf.codec.codebook`)."""
GREATEST_KEY_ERROR = 1.5 * EXPECTED_KEY_ERROR
"""Above this the rotation has not made a head's channels Gaussian, and 4 bits lose more than what was measured."""
SAMPLED_BLOCKS = 4
SAMPLED_SEQUENCES = 2
LEAST_TOKENS = 32
"""Of a shorter first prefill the keys are not looked at: so few vectors have no mean to speak of."""


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class KeyErrors:
    """Squared errors of keys over their energy about the mean, of the worst KV head.

    Softmax does not see what all keys of a head have in common, so errors are not measured against that.

    Args:
        four_bits: With 4-bit codes, as a configuration stores them.
        eight_bits: With FP8 codes, as a configuration stores them.
        offset: Root of the mean's energy over the energy about it.
    """

    four_bits: float
    eight_bits: float
    offset: float


def fp8_bytes(key_dim: int, value_dim: int) -> int:
    """Bytes per token and KV head in e4m3 with an fp16 scale each for keys and values."""
    return key_dim + value_dim + 4


def packed_bytes(config: TurboQuantConfig, key_dim: int, value_dim: int) -> float:
    """Bytes per token and KV head in packed blocks, their means included."""
    layout = config.layout(key_dim, value_dim)
    return layout.block_bytes / layout.tokens


def key_errors(config: TurboQuantConfig, keys: torch.Tensor) -> KeyErrors:
    """What storing keys `[B, Hkv, T, D]`, T at least `LEAST_TOKENS`, would cost; some blocks are looked at."""
    tokens = BlockLayout.tokens
    first = min(config.sink_tokens, keys.shape[2] - LEAST_TOKENS)
    keys = keys[:SAMPLED_SEQUENCES, :, first:].float()
    if keys.shape[2] >= tokens:
        starts = torch.linspace(0, keys.shape[2] - tokens, SAMPLED_BLOCKS).long().unique().tolist()
        blocks = torch.stack([keys[:, :, start : start + tokens] for start in starts], dim=2)
    else:
        blocks = keys[:, :, None]  # [B, Hkv, blocks, tokens, D]
    padded = config.layout(keys.shape[-1]).key_dim_padded
    rotated = rotate(torch.nn.functional.pad(blocks, (0, padded - blocks.shape[-1])), config.rotation_seed)
    mean = rotated.mean(-2, keepdim=True)
    stored = rotated - mean if config.key_mean else rotated

    def by_head(x: torch.Tensor) -> torch.Tensor:
        return x.square().sum((0, 2, 3, 4))  # [Hkv]

    energy = by_head(rotated - mean).clamp_min(torch.finfo(torch.float32).tiny)

    def error(bits: int) -> torch.Tensor:
        codes, scales = quantize(stored, bits, config.key_correction, is_value=False)
        return by_head(levels_of(codes, bits, is_value=False) * scales.float()[..., None] - stored) / energy

    offset = (by_head(mean.expand_as(rotated)) / energy).sqrt()
    worst = torch.stack([error(4), error(8), offset]).amax(-1)
    return KeyErrors(*worst.tolist())


def key_bias(model: torch.nn.Module) -> float:
    """The largest, over layers, of the key bias's length over that of the keys without it, for inputs of unit RMS; 0
    where there is no bias of keys alone, or none beside weights that can be read (offloaded or quantized ones)."""
    found = [0.0]
    for name, module in model.named_modules():
        bias, weight = getattr(module, "bias", None), getattr(module, "weight", None)
        if name.endswith("k_proj") and _is_plain(bias) and _is_plain(weight):
            found.append((bias.float().norm() / weight.float().norm()).item())
    return max(found)


def _is_plain(parameter: object) -> TypeGuard[torch.Tensor]:
    """Whether the numbers of a parameter are here as they are: not on the meta device, packed, or without a scale."""
    return isinstance(parameter, torch.Tensor) and parameter.dtype in DTYPES and not parameter.is_meta


def from_config(
    config: PreTrainedConfig, model: torch.nn.Module | None, base: TurboQuantConfig
) -> tuple[TurboQuantConfig, str]:
    """What to choose before keys are seen, and why.

    Args:
        config: The decoder's config.
        model: The model, if at hand: its weights tell how large a key bias is.
        base: The options other than bits.
    """
    kinds = getattr(config, "layer_types", None) or ()
    config = layer_config(config, kinds.index("full_attention") if "full_attention" in kinds else 0)
    query_heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or query_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    bias = 0.0 if model is None else key_bias(model)
    normalised = config.model_type.startswith("qwen3")
    name = "k8v4"
    if getattr(config, "kv_lora_rank", None):
        reason = "all heads read the same latent keys"
    elif dim < SMALL_HEAD:
        reason = f"4-bit keys were measured in heads of {SMALL_HEAD} channels or more, and these have {dim}"
    elif kv_heads == 1 < query_heads:
        reason = f"all {query_heads} query heads read the keys of one head"
    elif bias > GREAT_BIAS:
        reason = f"the key bias is {bias:.1f} times as long as the keys about it"
    else:
        name = "4bit_nc"
        keys = (
            f"a key bias {bias:.1f} times the keys" if bias else "normalised keys" if normalised else "no key bias seen"
        )
        reason = f"heads of {dim} channels, {query_heads // kv_heads} query heads on a KV head, {keys}"
    chosen = with_bits(base, name)
    if packed_bytes(chosen, dim, dim) < fp8_bytes(dim, dim):
        return chosen, reason
    everything = tuple(range(config.num_hidden_layers))
    return replace(base, preset=None, skip_layers=everything), f"packed heads of {dim} channels are larger than in FP8"


class AutoChoice:
    """The choice of one cache, open until its first prefill is over.

    Args:
        config: The decoder's config.
        model: The model, if at hand.
        base: The options other than bits.
    """

    def __init__(self, config: PreTrainedConfig, model: torch.nn.Module | None, base: TurboQuantConfig) -> None:
        self.config, self.reason = from_config(config, model, base)
        self.layers_seen: set[int] = set()
        if self.config.preset is None:
            logger.warning(f"preset='auto' compresses nothing: {self.reason}.")

    def see(self, layer: int, keys: torch.Tensor, *, free: bool) -> None:
        """Look at the first keys `[B, Hkv, T, D]` that a layer caches.

        The first layer settles `config`, with a line in the log. For the others it is too late: a warning names one
        that would have decided otherwise.

        Args:
            layer: Its index.
            keys: What it will cache.
            free: Whether nothing is allocated yet for `config` as it is.
        """
        complaint, errors = None, None
        if self.config.preset == "4bit_nc" and keys.shape[2] >= LEAST_TOKENS and not keys.is_meta:
            errors = key_errors(self.config, keys)
            complaint = _complaint(errors)
        if complaint and free:
            self.config, self.reason = with_bits(self.config, "k8v4"), complaint
        elif complaint:
            logger.warning(f"preset='auto' chose 4bit_nc, but in layer {layer} {complaint}. Consider preset='k8v4'.")
        elif errors and not self.layers_seen:
            self.reason += f", 4-bit keys off by {errors.four_bits**0.5:.1%}"
        if not self.layers_seen:
            logger.warning(f"preset='auto' chose {self.config.preset}: {self.reason}.")
        self.layers_seen.add(layer)


def _complaint(errors: KeyErrors) -> str | None:
    """Why 4-bit keys will not do, if they will not."""
    if errors.four_bits > GREATEST_KEY_ERROR:
        return f"4-bit keys are off by {errors.four_bits**0.5:.1%}, FP8 ones by {errors.eight_bits**0.5:.1%}"
    if errors.offset > GREAT_OFFSET:
        return f"keys have a common part {errors.offset:.0f} times the rest, more than was measured"
    return None
