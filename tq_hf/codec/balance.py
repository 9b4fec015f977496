"""Channel scales: they make the error of codes independent of how a model scales its channels.

Attention does not change if a key channel is multiplied by c and the query channel divided by c, or if a value channel
is multiplied by c and its column of the output projection divided by c. The error of a rotated code does change: it is
the same in all channels and proportional to the norm of the vector, so a few large channels drown the small ones.
Therefore keys are stored divided by s and the query is multiplied by s; values are stored divided by t and the output
is multiplied by t. The stored scales are 1 / s and 1 / t.

Let sigma_k be the RMS of a channel's keys about their block mean, and sigma_q the RMS of its queries. The error of
q . k is proportional to E = (sum sigma_q^2 s^2) (sum sigma_k^2 / s^2). Its minimum (sum sigma_q sigma_k)^2 is at
s^2 = sigma_k / sigma_q (Cauchy-Schwarz), a gain of sum sigma_q^2 * sum sigma_k^2 / (sum sigma_q sigma_k)^2. For values
t = sigma_v, because the weights of the output projection are unknown here.

These scales give a large channel the error that it has in a balanced model. But the formula weighs average queries, and
these are not the ones that matter: in a model without loud channels it makes errors larger. Therefore only channels
with s or t far from the median channel's are scaled (`NEAR`, `FAR`). One exception: where the scales of vectors would
leave fp16's range, all channels of a head are multiplied by a power of two, which changes no code.

Scales cannot bring the sum of sigma_q sigma_k down, and few channels make most of it. These *loud channels* are stored
apart in FP8 (`tq_hf.codec.reference`): half of the loss at 2 and 3 bits is theirs. Their scales are negative.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from tq_kernels.format import (
    FAR,
    LARGEST_RATIO,
    LARGEST_SCALE,
    LARGEST_STATE,
    LEAST_TOKENS,
    NEAR,
    OUT_OF_RANGE,
    QUIETEST,
    SMALLEST_SCALE,
    loud_channels,
    sample,
)
from tq_kernels.types import ChannelScales

from .reference import sum_by_halving


def sampled_blocks(tokens: int, first: int) -> list[slice]:
    """Tokens to sample in a prompt of `tokens` tokens that begins with `first` sinks: up to `SAMPLED_BLOCKS` whole
    blocks, the last one included, or all tokens of a shorter prompt."""
    sampled = sample(tokens, first)
    return [slice(start, start + sampled.size) for start in map(sampled.start, range(sampled.pieces))]


def _masked(x: torch.Tensor, valid: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask out padding and tokens that are not finite.

    Args:
        x: `[B, H, T, D]`.
        valid: Tokens that are not padding, `[B, T]` bool; `None` for all.

    Returns:
        `x` in float32 with zeros for these tokens, and the mask `[B, H, T, 1]` float32, 1 for every other token.
    """
    mask = x.isfinite().all(-1, keepdim=True)
    if valid is not None:
        mask = mask & valid[:, None, :, None]
    return torch.where(mask, x.float(), 0).clamp(-LARGEST_STATE, LARGEST_STATE), mask.float()


class Statistics:
    """Sums over sampled tokens of a first prompt: squares `[B, Hkv, D]`, and their number `[B, Hkv, 1]`, float32."""

    squares: Any = 0.0
    count: Any = 0.0

    def add(self, x: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the squares of `x` `[B, Hkv, T, D]`, and its number of tokens with a `mask` `[B, Hkv, T, 1]` of 1."""
        self.squares, self.count = self.squares + sum_by_halving((x * x).mT), self.count + sum_by_halving(mask.mT)

    @property
    def rms(self) -> torch.Tensor:
        """RMS of each channel, `[B, Hkv, D]`, at least `QUIETEST` times the loudest channel's (0 if all are 0)."""
        sigma = (self.squares / self.count.clamp_min(1)).sqrt()
        return sigma.maximum(QUIETEST * sigma.amax(-1, keepdim=True))

    @property
    def known(self) -> torch.Tensor:
        """Whether there are at least `LEAST_TOKENS` tokens, and not all are zero: `[B, Hkv, 1]` bool."""
        return (self.count >= LEAST_TOKENS) & (self.squares.amax(-1, keepdim=True) > 0)


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Largest power of two that is at most x > 0."""
    return torch.exp2(torch.frexp(x).exponent.float() - 1)


def _channel_scales(wanted: torch.Tensor, sigma: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Channel scales from the divisors of the formula.

    Args:
        wanted: Divisors s or t by the formula, `[B, Hkv, D]`. Used where they are far from the median channel's.
        sigma: RMS of each channel, `[B, Hkv, D]`. Where the RMS of scaled vectors is beyond `OUT_OF_RANGE`, a power of
            two brings it to about 1.
        known: Whether the statistics suffice, `[B, Hkv, 1]` bool.

    Returns:
        1 / s or 1 / t, `[B, Hkv, D]` fp16.
    """
    distance = wanted.log()
    distance = distance - distance.median(-1, keepdim=True).values
    share = ((distance.abs() - math.log(NEAR)) / math.log(FAR / NEAR)).clamp(0, 1)
    divisor = torch.where(known, share * distance, 0).exp()
    rms = ((sigma / divisor).square().mean(-1, keepdim=True)).sqrt()
    outside = known & ((rms > OUT_OF_RANGE) | (rms < 1 / OUT_OF_RANGE))
    divisor = divisor * torch.where(outside, _power_of_two(rms.clamp(1 / LARGEST_RATIO, LARGEST_RATIO)), 1)
    return (1 / divisor).clamp(SMALLEST_SCALE, LARGEST_SCALE).bfloat16().half()


def channel_scales(
    queries: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    first: int,
    valid: torch.Tensor | None = None,
) -> ChannelScales:
    """Channel scales from a first prompt. Each sequence has its own.

    Args:
        queries: `[B, Hq, T, Dk]` of the same tokens, or `None` if attention did not pass them.
        keys: `[B, Hkv, T, Dk]` as passed to the cache.
        values: `[B, Hkv, T, Dv]`.
        first: Number of tokens at the start that stay dense.
        valid: Tokens that are not padding, `[B, T]` bool; `None` for all.

    Returns:
        1 / s `[B, Hkv, Dk]` and 1 / t `[B, Hkv, Dv]`, fp16 of a size in `[SMALLEST_SCALE, LARGEST_SCALE]`; 1 / s is
        negative for loud channels.
    """
    k, q, v = Statistics(), Statistics(), Statistics()
    for block in sampled_blocks(keys.shape[2], first):
        valid_here = None if valid is None else valid[:, block]
        x, mask = _masked(keys[:, :, block], valid_here)
        mean = sum_by_halving(x.mT) / sum_by_halving(mask.mT).clamp_min(1)
        k.add((x - mean[:, :, None]) * mask, mask)
        v.add(*_masked(values[:, :, block], valid_here))
        if queries is not None:
            own = _masked(queries[:, :, block], valid_here)
            q.add(*(x.unflatten(1, (keys.shape[1], -1)).flatten(2, 3) for x in own))
    of_keys, of_values, limits = k.rms, v.rms, (1 / LARGEST_RATIO, LARGEST_RATIO)
    wanted, weight = torch.ones_like(of_keys), of_keys
    if queries is not None:
        weight = of_keys * q.rms
        usable = k.known & q.known
        wanted = torch.where(usable, of_keys / torch.where(usable, q.rms, 1), 1).clamp(*limits).sqrt()
    of_value = torch.where(v.known, of_values, 1).clamp(*limits)
    key_scales, value_scales = _channel_scales(wanted, of_keys, k.known), _channel_scales(of_value, of_values, v.known)
    marked = weight.argsort(dim=-1, stable=True)[..., weight.shape[-1] - loud_channels(weight.shape[-1]) :]
    return ChannelScales(key_scales.scatter(-1, marked, -key_scales.gather(-1, marked)), value_scales)
