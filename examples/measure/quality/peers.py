"""Baselines of presets: other ways to store keys and values, as small transformers caches.

Each is a `Codec` that says what attention would read back of keys and values, and how many bytes that takes. The
caches hold the decoded states densely: they show what a format costs in quality, and their bytes are counted, not
held.

vLLM's recipe is re-stated from its TurboQuant backend (vLLM 0.33, pull request 38479): keys are normalised, rotated by
a Hadamard matrix without random signs and rounded to Lloyd-Max centroids, their norm in fp16, the centroids' norm
corrected; `k8v4` keys are cast to e4m3 without a scale; values are not rotated, each token of a head has fp16 scale and
minimum; no residual, no sinks. Its exemption of the first two and last two layers is left out, as it would leave next
to nothing compressed in a model of five layers. A call of several tokens reads its own tokens exactly and the history
as stored, a call of one token reads that too as stored, as vLLM's prefill and decode kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from tq_kernels.format import FP8_MAX
from transformers import PreTrainedConfig, QuantizedCache
from transformers.cache_utils import Cache, DynamicLayer

from tq_hf.codec.codebook import levels
from tq_hf.codec.rotation import hadamard, rotate, rotate_back

Code = Callable[[torch.Tensor], torch.Tensor]
"""States `[B, H, T, D]` to what is read back of them, in the same dtype."""


LLOYD_MAX = {1: (0.7979,), 2: (0.4528, 1.5104), 3: (0.2451, 0.756, 1.3439, 2.152)}
"""Positive levels of the least mean squared error on N(0, 1) (Max, 1960); those of 4 bits are this package's."""


def nearest(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Scalar codes of N(0, 1): the nearest of 2**bits Lloyd-Max levels."""
    if bits == 4:
        centroids = levels(4, x.device)
    else:
        positive = torch.tensor(LLOYD_MAX[bits], device=x.device)
        centroids = torch.cat([-positive.flip(0), positive])
    return centroids[torch.bucketize(x, (centroids[1:] + centroids[:-1]) / 2)]


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
        centroids = nearest(unit, bits)
        direction = centroids / centroids.norm(dim=-1, keepdim=True)
        return hadamard(direction * norm.half().float()).to(x.dtype)

    return code


def paper_mse(bits: int) -> Code:
    """TurboQuant_mse (arXiv 2504.19874, algorithm 1): norm in fp16, random rotation, nearest centroid."""

    def code(x: torch.Tensor) -> torch.Tensor:
        norm, centroids, _ = _paper_parts(x, bits)
        return rotate_back(norm * centroids, 0).to(x.dtype)

    return code


def paper_prod(bits: int) -> Code:
    """TurboQuant_prod (algorithm 2): `bits - 1` as in `paper_mse`, and the signs of a random projection of the
    residual (QJL) with the residual's norm in fp16."""

    def code(x: torch.Tensor) -> torch.Tensor:
        dim = x.shape[-1]
        norm, centroids, residual = _paper_parts(x, bits - 1)
        projection = torch.randn(dim, dim, generator=torch.Generator().manual_seed(1)).to(x.device)
        signs = (residual @ projection.T).sign()
        length = residual.norm(dim=-1, keepdim=True).half().float()
        restored = centroids + (math.pi / 2) ** 0.5 / dim * length * (signs @ projection)
        return rotate_back(norm * restored, 0).to(x.dtype)

    return code


def _paper_parts(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp16 norms `[..., 1]`, centroids of the rotated unit vectors and what they miss, `[..., D]` float32."""
    norm = x.float().norm(dim=-1, keepdim=True)
    unit = rotate(x.float() / norm.clamp_min(1e-8), 0)
    scale = x.shape[-1] ** 0.5
    centroids = nearest(unit * scale, bits) / scale
    return norm.half().float(), centroids, unit - centroids


def outlier_channels(bits: int) -> Code:
    """The paper's 2.5 and 3.5 bits: a quarter of the channels with a bit more, as an instance of their own.

    Outliers are, for each head, the channels of most energy in the tokens encoded together."""

    def code(x: torch.Tensor) -> torch.Tensor:
        order = x.float().square().sum(2).argsort(-1, descending=True)[:, :, None].expand_as(x)  # [B, H, T, D]
        split = x.shape[-1] // 4
        sorted_channels = x.gather(-1, order)
        parts = paper_mse(bits + 1)(sorted_channels[..., :split]), paper_mse(bits)(sorted_channels[..., split:])
        return torch.empty_like(x).scatter_(-1, order, torch.cat(parts, dim=-1))

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
    bits: tuple[float, float]
    scalars: float = 0
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
    "paper 4 bits, mse": Codec(paper_mse(4), paper_mse(4), (4, 4), scalars=4),
    "paper 4 bits, prod": Codec(paper_prod(4), paper_mse(4), (4, 4), scalars=6),
    # Two norms, and two masks of a bit a channel for 128 tokens.
    "paper 3.5 bits": Codec(outlier_channels(3), outlier_channels(3), (3.25, 3.25), scalars=8.25),
    "paper 2.5 bits": Codec(outlier_channels(2), outlier_channels(2), (2.25, 2.25), scalars=8.25),
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
"""Backends of transformers' `QuantizedCache`; all but fp8 keep the last 128 tokens and quantize anew when they do."""
REQUIRES = {"quanto": "optimum.quanto", "hqq": "hqq"}
"""Packages of the extra `peers`, as imported."""


def _installed(package: str) -> bool:
    return bool(find_spec(package.partition(".")[0]) and find_spec(package))


def missing(name: str) -> str | None:
    """Why the `QuantizedCache` called `name` cannot run here, or `None` if it can."""
    package = REQUIRES.get(QUANTIZED[name])
    return None if package is None or _installed(package) else f"{package} is not installed"


def versions() -> dict[str, str]:
    """Versions of the packages that `QUANTIZED` needs, of those installed."""
    return {package: version(package.replace(".", "-")) for package in REQUIRES.values() if _installed(package)}


def quantized_cache(config: PreTrainedConfig, name: str) -> QuantizedCache:
    """An empty `QuantizedCache` of 4 bits per channel, or FP8."""
    backend = QUANTIZED[name]
    options: dict[str, Any] = {} if backend == "fp8" else {"nbits": 4}
    if backend == "hqq":
        options |= {"axis_key": 1, "axis_value": 1}
    return QuantizedCache(backend=backend, config=config, **options)
