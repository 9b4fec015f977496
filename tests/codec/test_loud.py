"""Loud channels of keys: which channels they are, how their FP8 codes read back, and what they are worth."""

import pytest
import torch
from tq_kernels.format import loud_channels
from tq_kernels.types import ChannelScales

from tests.support.helpers import (
    BLOCK,
    all_packed,
    assert_same,
    dequantized,
    encoded,
    marked,
    relative_error,
    rows,
    states,
)
from tq_hf.codec import balance, reference

BATCH, HEADS, GROUP = 2, 2, 3
NAN, INF = float("nan"), float("inf")


def some_scales(dim: int, value_dim: int, size: float = 1.0) -> tuple[ChannelScales, torch.Tensor]:
    """Channel scales of a size with marks at random channels, and whether a channel `[B, Hkv, D]` is marked."""
    keys = marked(torch.full((BATCH, HEADS, dim), size).half(), torch.Generator().manual_seed(dim))
    return ChannelScales(keys, torch.ones(BATCH, HEADS, value_dim).half()), keys < 0


@pytest.mark.parametrize("size", [-20, -8, 0, 8, 20])
@pytest.mark.parametrize("bits, dim, value_dim", [(2, 64, 32), (4, 80, 80), (4, 128, 64), (3, 256, 128)])
def test_loud_channels_have_the_error_of_fp8_whatever_their_size(bits, dim, value_dim, size):
    """In units of its own block and channel."""
    config = all_packed(key_bits=bits)
    keys, values = states(0, BATCH, HEADS, 2 * BLOCK, dim, value_dim)
    exponents = torch.randint(-3, 4, (BATCH, HEADS, 2, 1, dim), generator=torch.Generator().manual_seed(1))
    x = (keys + states(1, tokens=1, dim=dim)[0][:, :1]).unflatten(2, (2, BLOCK)) * 2.0 ** (size + exponents)
    scales, loud = some_scales(dim, value_dim, 2.0 ** (-size // 2))
    found = dequantized(config, encoded(config, x.flatten(2, 3), values, scales))[0].unflatten(2, (2, BLOCK))
    error, spread = (found - x).abs(), (x - x.mean(3, keepdim=True)).abs()
    # 2**-10 of the unit is the step of the smallest codes; a mean is rounded to fp16.
    allowed = 2**-4 * spread + 2**-16 * spread.amax(3, keepdim=True) + 2**-14 * x.mean(3, keepdim=True).abs()
    chosen = loud[:, :, None, None].expand_as(x)
    assert (error <= allowed)[chosen].all()
    assert relative_error(found[chosen], x[chosen]) < 0.03 < relative_error(found[~chosen], x[~chosen])


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_other_channels_do_not_see_the_size_of_loud_ones(bits):
    keys, values = states(2, BATCH, HEADS, 2 * BLOCK, 64)
    scales, loud = some_scales(64, 64)
    loud = loud[:, :, None].expand_as(keys)
    found = []
    for config in (all_packed(key_bits=bits), all_packed(key_bits=bits, loud=False)):
        pairs = ((x, values) for x in (keys, torch.where(loud, 1000 * keys, keys)))
        one, other = (dequantized(config, encoded(config, *pair, scales))[0] for pair in pairs)
        found.append(relative_error(other[~loud], one[~loud]))
    assert found[0] == 0 and found[1] > 1


@pytest.mark.parametrize("value", [0.0, 1.0, -3.3e4, 1e-3])
def test_a_constant_channel_comes_back(value):
    config, (keys, values) = all_packed(), states(3, dim=64)
    keys[..., 2] = value
    found = dequantized(config, encoded(config, keys, values))[0][..., 2]
    assert (found - value).abs().max() <= 2**-15 * abs(value)


@pytest.mark.parametrize("what", [NAN, INF, -INF])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_loud_channel_that_is_not_finite_loses_its_token_alone(bits, what):
    config, (keys, values) = all_packed(key_bits=bits), states(4, tokens=2 * BLOCK, dim=64)
    broken = keys.clone()
    broken[0, 0, 77, 2] = what
    found, want = (dequantized(config, encoded(config, x, values)) for x in (broken, keys))
    assert not found[0][0, 0, 77, 4:].isfinite().any()
    others = torch.arange(BLOCK) != 77
    got, x = (each[0, 0, :BLOCK, :4] for each in (found[0], keys))
    spread = torch.maximum(x.abs(), (x - x.mean(0)).abs())  # a channel that has no mean is coded with it
    assert ((got - x).abs() <= 2**-4 * spread + 2**-13)[others].all()
    coded = [x[0, 0, :BLOCK, 4:][others] for x in (found[0], want[0], keys)]
    assert relative_error(coded[0], coded[2]) < 1.1 * relative_error(coded[1], coded[2])
    assert_same(rows(found, BLOCK), rows(want, BLOCK))
    assert_same((found[0][:, 1:], found[1]), (want[0][:, 1:], want[1]))


@pytest.mark.parametrize("has_queries", [True, False])
@pytest.mark.parametrize("dim", [64, 80, 256])
def test_marked_channels_have_the_largest_rms_of_queries_times_rms_of_keys(dim, has_queries):
    generator = torch.Generator().manual_seed(dim)
    keys, values = states(5, BATCH, HEADS, 4 * BLOCK, dim)
    queries, _ = states(6, BATCH, HEADS * GROUP, 4 * BLOCK, dim)
    keys = 2 ** torch.randn(BATCH, HEADS, 1, dim, generator=generator) * keys + 9 * torch.randn(
        dim, generator=generator
    )
    queries = 2 ** torch.randn(BATCH, HEADS * GROUP, 1, dim, generator=generator) * queries
    scales = balance.channel_scales(queries if has_queries else None, keys, values, first=0)
    weight = (keys - keys.mean(2, keepdim=True)).square().mean(2).sqrt()
    if has_queries:
        weight = weight * queries.unflatten(1, (HEADS, GROUP)).square().mean((2, 3)).sqrt()
    n = loud_channels(dim)
    assert torch.equal(reference.loud_index(scales.keys, n), weight.topk(n).indices.sort().values)
    assert ((scales.keys < 0).sum(-1) == n).all() and (scales.values > 0).all()


@pytest.mark.parametrize("bits, factor", [(2, 1.8), (3, 1.5), (4, 1.2)])
def test_errors_of_logits_fall_where_four_channels_are_loud(bits, factor):
    """Queries and keys of four channels are four times as loud: no balance takes that away."""
    keys, values = states(7, BATCH, HEADS, 4 * BLOCK, 64)
    queries, _ = states(8, BATCH, HEADS, 4 * BLOCK, 64)
    size = torch.where(torch.rand(64, generator=torch.Generator().manual_seed(1)).argsort() < 4, 4.0, 1.0)
    keys, queries, found = size * keys, size * queries, []
    scales = balance.channel_scales(queries, keys, values, first=0)
    for config in (all_packed(key_bits=bits), all_packed(key_bits=bits, loud=False)):
        read = dequantized(config, encoded(config, keys, values, scales))[0]
        found.append(relative_error(queries @ read.mT, queries @ keys.mT))
    assert found[1] > factor * found[0]
