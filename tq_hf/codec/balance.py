"""Channel scales that make codes indifferent to how a model scales them.

Attention is the same if a key channel is multiplied by c and the query's divided by c, or a value channel multiplied
and its column of the output projection divided. A rotated code is not: its error is the same in all channels and
proportional to the whole vector, so a few loud channels drown the quiet ones. So keys are stored divided by s and the
query is multiplied by s; values are stored divided by t and the output is multiplied by t. Held are 1 / s and 1 / t.

With sigma_k and sigma_q the RMS of a channel's keys about their block mean and of its queries, the error of q . k is
in proportion to E = (sum sigma_q^2 s^2) (sum sigma_k^2 / s^2). Its minimum (sum sigma_q sigma_k)^2 is at
s^2 = sigma_k / sigma_q (Cauchy-Schwarz), a gain of sum sigma_q^2 * sum sigma_k^2 / (sum sigma_q sigma_k)^2. For values
t = sigma_v: how the output projection weighs them is not known here.

That gives a loud channel what it had if the model were balanced, but the queries that matter are not the average ones:
where nothing is wrong, s by that formula is worse than none. So only channels are touched of which s or t is far from
the median channel's (`NEAR`, `FAR`); all others are left as they are. But where scales would leave fp16's range, all
channels of a head are multiplied by a power of two, which changes no code.
"""

from __future__ import annotations

import math

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
    sample,
)
from tq_kernels.types import ChannelScales

from .reference import sum_by_halving


def sampled_blocks(tokens: int, first: int) -> list[slice]:
    """Where to look in a prompt of `tokens`, of which the `first` are sinks: up to `SAMPLED_BLOCKS` whole blocks, the
    last one among them, or what there is."""
    at = sample(tokens, first)
    return [slice(start, start + at.size) for start in map(at.start, range(at.pieces))]


def _known(x: torch.Tensor, valid: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`[B, H, T, D]` in float32 with zeros for tokens that do not count, and which count, `[B, H, T, 1]` float32."""
    counts = x.isfinite().all(-1, keepdim=True)
    if valid is not None:
        counts = counts & valid[:, None, :, None]
    return torch.where(counts, x.float(), 0).clamp(-LARGEST_STATE, LARGEST_STATE), counts.float()


class Statistics:
    """Sums over a first prompt, `[B, Hkv, D]` float32 each."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, name: str, x: torch.Tensor, counts: torch.Tensor) -> None:
        """Add squares of `[B, Hkv, T, D]` and the number of its tokens that count."""
        for what, term in ((name, sum_by_halving((x * x).mT)), (f"{name} count", sum_by_halving(counts.mT))):
            self.sums[what] = self.sums[what] + term if what in self.sums else term

    def rms(self, name: str) -> torch.Tensor:
        """RMS of each channel, `[B, Hkv, D]`, at least `QUIETEST` times the loudest; 0 if all are."""
        sigma = (self.sums[name] / self.sums[f"{name} count"].clamp_min(1)).sqrt()
        return sigma.maximum(QUIETEST * sigma.amax(-1, keepdim=True))

    def known(self, name: str) -> torch.Tensor:
        """Whether there are tokens enough, and any that are not zero, `[B, Hkv, 1]` bool."""
        return (self.sums[f"{name} count"] >= LEAST_TOKENS) & (self.sums[name].amax(-1, keepdim=True) > 0)


def statistics(
    queries: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    first: int,
    valid: torch.Tensor | None = None,
) -> Statistics:
    """What channel scales are computed from.

    Args:
        queries: `[B, Hq, T, Dk]` of the same tokens, or `None` where attention did not show them.
        keys: `[B, Hkv, T, Dk]` as the cache gets them.
        values: `[B, Hkv, T, Dv]`.
        first: Tokens at the start that stay dense.
        valid: Which tokens are not padding, `[B, T]` bool; `None` for all.
    """
    found = Statistics()
    for place in sampled_blocks(keys.shape[2], first):
        real = None if valid is None else valid[:, place]
        k, counts = _known(keys[:, :, place], real)
        mean = sum_by_halving(k.mT) / sum_by_halving(counts.mT).clamp_min(1)
        found.add("keys", (k - mean[:, :, None]) * counts, counts)
        found.add("values", *_known(values[:, :, place], real))
        if queries is not None:
            q, counts = _known(queries[:, :, place], real)
            grouped = (x.unflatten(1, (keys.shape[1], -1)).flatten(2, 3) for x in (q, counts))
            found.add("queries", *grouped)
    return found


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The power of two at or below x > 0."""
    return torch.exp2(torch.frexp(x).exponent.float() - 1)


def _channel_scales(wanted: torch.Tensor, sigma: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """One over `wanted` where that is far from the median channel's; where what would be stored is `OUT_OF_RANGE`,
    times the power of two that brings it to an RMS of about 1. `[B, Hkv, D]` fp16."""
    away = wanted.log()
    away = away - away.median(-1, keepdim=True).values
    share = ((away.abs() - math.log(NEAR)) / math.log(FAR / NEAR)).clamp(0, 1)
    factor = torch.where(known, share * away, 0).exp()
    size = ((sigma / factor).square().mean(-1, keepdim=True)).sqrt()
    outside = known & ((size > OUT_OF_RANGE) | (size < 1 / OUT_OF_RANGE))
    factor = factor * torch.where(outside, _power_of_two(size.clamp(1 / LARGEST_RATIO, LARGEST_RATIO)), 1)
    return (1 / factor).clamp(SMALLEST_SCALE, LARGEST_SCALE).bfloat16().half()


def key_channel_scales(found: Statistics) -> torch.Tensor:
    """1 / s, `[B, Hkv, Dk]` fp16 in `[SMALLEST_SCALE, LARGEST_SCALE]`."""
    k, known = found.rms("keys"), found.known("keys")
    if "queries" not in found.sums:
        return _channel_scales(torch.ones_like(k), k, known)
    q, asked = found.rms("queries"), found.known("keys") & found.known("queries")
    wanted = torch.where(asked, k / torch.where(asked, q, 1), 1).clamp(1 / LARGEST_RATIO, LARGEST_RATIO).sqrt()
    return _channel_scales(wanted, k, known)


def value_channel_scales(found: Statistics) -> torch.Tensor:
    """1 / t, `[B, Hkv, Dv]` fp16 in `[SMALLEST_SCALE, LARGEST_SCALE]`."""
    v, known = found.rms("values"), found.known("values")
    return _channel_scales(torch.where(known, v, 1).clamp(1 / LARGEST_RATIO, LARGEST_RATIO), v, known)


def channel_scales(
    queries: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    first: int,
    valid: torch.Tensor | None = None,
) -> ChannelScales:
    """Channel scales from a first prompt; arguments as of `statistics`. A sequence's depend on that sequence alone."""
    found = statistics(queries, keys, values, first=first, valid=valid)
    return ChannelScales(key_channel_scales(found), value_channel_scales(found))
