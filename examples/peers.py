"""What presets are compared with: other ways to store keys and values, as small transformers caches.

Each is a `Codec` that says what attention would read back of keys and values, and how many bytes that takes. The
caches hold the decoded states densely: they show what a format costs in quality, and their bytes are counted, not
held.

vLLM's recipe is re-stated from its TurboQuant backend (vLLM 0.33, pull request 38479): keys are normalised, rotated by
a Hadamard matrix without random signs and rounded to Lloyd-Max centroids, their norm in fp16, the centroids' norm
corrected; `k8v4` keys are cast to e4m3 without a scale; values are not rotated, each token of a head has fp16 scale and
minimum; no window, no sinks. Its exemption of the first two and last two layers is left out, as it would leave next to
nothing compressed in a model of five layers. A call of several tokens reads its own tokens exactly and the history as
stored, a call of one token reads that too as stored, as vLLM's prefill and decode kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedConfig, QuantizedCache
from transformers.cache_utils import Cache, DynamicLayer

from tq_hf.codebook import FP8_MAX, boundaries, levels
from tq_hf.rotation import hadamard

Code = Callable[[torch.Tensor], torch.Tensor]
"""States `[B, H, T, D]` to what is read back of them, in the same dtype."""


def bf16(x: torch.Tensor) -> torch.Tensor:
    """Rounded to bf16: what a plain cache of a bf16 model holds."""
    return x.bfloat16().to(x.dtype)


def fp8_cast(x: torch.Tensor) -> torch.Tensor:
    """Cast to e4m3 without a scale, saturated."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype)


def fp8_scaled(x: torch.Tensor) -> torch.Tensor:
    """e4m3 with an fp16 scale for each token and head."""
    scale = (x.float().abs().amax(-1, keepdim=True) / FP8_MAX).half().float().clamp_min(2.0**-24)
    return ((x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def min_max(bits: int, group: int | None = None) -> Code:
    """Uniform levels from minimum to maximum of each token's `group` channels (by default all), both fp16."""

    def code(x: torch.Tensor) -> torch.Tensor:
        parts = x.float().unflatten(-1, (-1, group or x.shape[-1]))
        low, high = parts.aminmax(dim=-1, keepdim=True)
        low = low.half().float()
        scale = ((high - low) / (2**bits - 1)).half().float().clamp_min(2.0**-24)
        codes = ((parts - low) / scale).round().clamp(0, 2**bits - 1)
        return (codes * scale + low).flatten(-2).to(x.dtype)

    return code


def vllm_keys(bits: int) -> Code:
    """Hadamard rotation without signs, Lloyd-Max centroids of the unit vector, fp16 norm, centroids renormalised."""

    def code(x: torch.Tensor) -> torch.Tensor:
        norm = x.float().norm(dim=-1, keepdim=True)
        unit = hadamard(x.float() / norm.clamp_min(1e-8)) * x.shape[-1] ** 0.5
        centroids = levels(bits, x.device)[torch.bucketize(unit, boundaries(bits, x.device))]
        direction = centroids / centroids.norm(dim=-1, keepdim=True)
        return hadamard(direction * norm.half().float()).to(x.dtype)

    return code


@dataclass(frozen=True)
class Codec:
    """How a peer stores keys and values.

    Args:
        keys: What is read back of keys.
        values: The same for values.
        bits: Bits per key channel and per value channel.
        scalars: Bytes per token and head besides those; with `group`, per group of channels.
        group: Channels that share scalars, or `None` for the whole head.
    """

    keys: Code
    values: Code
    bits: tuple[int, int]
    scalars: int = 0
    group: int | None = None

    def bytes_per_token(self, head_dim: int) -> float:
        """Bytes per token and KV head."""
        groups = 1 if self.group is None else head_dim // self.group
        return head_dim * sum(self.bits) / 8 + self.scalars * groups


CODECS: dict[str, Codec] = {
    "bf16": Codec(bf16, bf16, (16, 16)),
    "fp8 scaled": Codec(fp8_scaled, fp8_scaled, (8, 8), scalars=4),
    "fp8 cast": Codec(fp8_cast, fp8_cast, (8, 8)),
    "int4 per token": Codec(min_max(4, 64), min_max(4, 64), (4, 4), scalars=8, group=64),
    "vLLM k8v4": Codec(fp8_cast, min_max(4), (8, 4), scalars=4),
    "vLLM 4bit_nc": Codec(vllm_keys(4), min_max(4), (4, 4), scalars=6),
    "vLLM k3v4_nc": Codec(vllm_keys(3), min_max(4), (3, 4), scalars=6),
    "vLLM 3bit_nc": Codec(vllm_keys(3), min_max(3), (3, 3), scalars=6),
}


class CodedLayer(DynamicLayer):
    """A layer that holds what a codec reads back of its keys and values."""

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self.codec = codec

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new states `[B, H, S, D]`; return the history as stored, with the new states exact if S > 1."""
        coded = self.codec.keys(key_states), self.codec.values(value_states)
        if key_states.shape[2] == 1:
            return super().update(*coded)
        history = (self.keys, self.values) if self.is_initialized else None
        super().update(*coded)
        if history is None:
            return key_states, value_states
        return torch.cat([history[0], key_states], dim=2), torch.cat([history[1], value_states], dim=2)


def coded_cache(config: PreTrainedConfig, name: str) -> Cache:
    """An empty cache of the codec called `name`, for a model of full-attention layers."""
    return Cache(layers=[CodedLayer(CODECS[name]) for _ in range(config.num_hidden_layers)])


QUANTIZED = {"transformers fp8": "fp8", "quanto int4": "quanto", "hqq int4": "hqq"}
"""Backends of transformers' `QuantizedCache`; all but fp8 keep the last 128 tokens and quantise anew when they do."""
REQUIRES = {"quanto": "optimum.quanto", "hqq": "hqq"}


def missing(name: str) -> str | None:
    """Why the `QuantizedCache` called `name` cannot run here, or `None` if it can."""
    package = REQUIRES.get(QUANTIZED[name])
    if package is None or (find_spec(package.partition(".")[0]) and find_spec(package)):
        return None
    return f"{package} is not installed"


def quantized_cache(config: PreTrainedConfig, name: str) -> QuantizedCache:
    """An empty `QuantizedCache` of 4 bits per channel, or FP8."""
    backend = QUANTIZED[name]
    options: dict[str, Any] = {} if backend == "fp8" else {"nbits": 4}
    if backend == "hqq":
        options |= {"axis_key": 1, "axis_value": 1}
    return QuantizedCache(backend=backend, config=config, **options)
