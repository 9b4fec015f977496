"""Channel scales: what they are, what they leave invariant, and that they stay in range whatever comes. Loud channels
of keys: which channels they are, how their FP8 codes read back, and what they are worth."""

import pytest
import torch
from tq_kernels.format import SAMPLED_BLOCKS, loud_channels
from tq_kernels.types import ChannelScales

from tests.support.helpers import (
    BLOCK,
    all_packed,
    assert_same,
    dequantized,
    encoded,
    every_pair,
    marked,
    relative_error,
    rows,
    states,
)
from tq_hf import PRESETS
from tq_hf.codec import balance, reference

D, HEADS, GROUP = 64, 2, 3


def prompt(
    seed: int, tokens: int = 4 * BLOCK, batch: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gaussian queries `[B, 6, T, 64]`, keys and values `[B, 2, T, 64]`."""
    queries, _ = states(seed + 1000, batch, HEADS * GROUP, tokens, D, dtype=dtype)
    return queries, *states(seed, batch, HEADS, tokens, D, dtype=dtype)


def channel_scales(queries, keys, values, **options) -> ChannelScales:
    return balance.channel_scales(queries, keys, values, **(dict(first=0) | options))


def loud(channels: int, times: float, seed: int = 0) -> torch.Tensor:
    """`[HEADS, 1, D]` of ones, but for some channels of each head."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.ones(HEADS, 1, D)
    for head in made:
        head[0, torch.randperm(D, generator=generator)[:channels]] = times
    return made


def read(config, queries, keys, values, channel_scales):
    """Attention outputs `[B, Hkv, G, S, D]` of the last 16 queries over packed blocks, without a mask."""
    blocks = encoded(config, keys, values, channel_scales)
    out = torch.empty_like(keys), torch.empty_like(values)
    reference.dequantize(config, blocks, *out)
    grouped = queries[:, :, -16:].unflatten(1, (HEADS, GROUP))
    logits = grouped @ out[0][:, :, None].transpose(-1, -2) * D**-0.5
    return logits.softmax(-1) @ out[1][:, :, None]


def exact(queries, keys, values):
    grouped = queries[:, :, -16:].unflatten(1, (HEADS, GROUP))
    return (grouped @ keys[:, :, None].transpose(-1, -2) * D**-0.5).softmax(-1) @ values[:, :, None]


@pytest.mark.parametrize("times", [3.0, 10.0, 30.0, 1000.0])
@pytest.mark.parametrize("name", ["k8v4", "4bit_nc", "3bit_nc", "2bit_nc"])
def test_attention_does_not_see_how_channels_are_scaled(name, times):
    """The error that remains is that of a model without loud channels."""
    config = PRESETS[name]
    queries, keys, values = prompt(0)
    up, loud_values = loud(4, times), loud(3, times, seed=1)
    spread = queries / up.repeat_interleave(GROUP, 0), keys * up, values * loud_values
    truth = exact(queries, keys, values)

    def error(made: tuple[torch.Tensor, ...], chosen: ChannelScales | None) -> float:
        times = loud_values[:, None] if made is spread else 1.0
        return relative_error(read(config, *made, chosen) / times, truth)

    chosen = channel_scales(queries, keys, values)
    assert all((factor.abs() == 1).all() for factor in chosen)
    plain = error((queries, keys, values), chosen)
    assert error(spread, channel_scales(*spread)) < 1.1 * plain
    if name != "k8v4" and times >= 10:
        assert error(spread, None) > 2 * plain


@pytest.mark.parametrize("times", [10.0, 100.0])
def test_channel_scales_undo_a_rescaling(times):
    queries, keys, values = prompt(1)
    up, loud_values = loud(4, times), loud(4, times, seed=1)
    s, t = channel_scales(queries / up.repeat_interleave(GROUP, 0), keys * up, values * loud_values)
    for factor, wanted in ((s[0].abs().float(), up[:, 0]), (t[0].float(), loud_values[:, 0])):
        ratio = factor * wanted
        assert (ratio - 1).abs().max() < 0.2  # what 512 Gaussian tokens leave open
        assert (ratio[wanted == 1] == 1).all()


def test_states_that_only_are_out_of_range_have_a_power_of_two_which_changes_no_code():
    config = all_packed(key_bits=3, value_bits=2)
    queries, keys, values = prompt(2)
    keys = 1000 * keys
    chosen = channel_scales(queries, keys, values)
    assert (chosen.values == 1).all()
    exponent = chosen.keys.abs().float().log2()
    assert torch.equal(exponent, exponent.round()) and (exponent == exponent[..., :1]).all()
    assert 0.5 <= 1000 * chosen.keys[0, 0, 0].abs().item() < 2.1
    balanced, plain = (encoded(config, keys, values, each) for each in (chosen, chosen.map(torch.sign)))
    assert torch.equal(balanced.key_words, plain.key_words) and torch.equal(balanced.value_words, plain.value_words)


@pytest.mark.parametrize("size", [2.0**-24, 1e-6, 1.0, 1e5, 2.0**24])
def test_scales_stay_in_the_range_of_fp16_whatever_that_of_the_states(size):
    config = PRESETS["3bit_nc"]
    queries, keys, values = prompt(3)
    chosen = channel_scales(queries, keys * size, values * size)
    blocks = encoded(config, keys * size, values * size, chosen)
    out = torch.empty_like(keys), torch.empty_like(values)
    reference.dequantize(config, blocks, *out)
    for restored, truth in zip(out, (keys, values), strict=True):
        assert relative_error(restored / size, truth) < 0.2


NAN, INF = float("nan"), float("inf")
STRANGE = {
    "NaN": lambda x: x * NAN,
    "infinite": lambda x: x.sign() * INF,
    "zero": lambda x: x * 0,
    "tiny": lambda x: x * 1e-38,
    "huge": lambda x: (x * 1e38).clamp(-3e38, 3e38),
    "one channel": lambda x: x * (torch.arange(x.shape[-1]) == 3),
    "one token": lambda x: x * (torch.arange(x.shape[-2]) == 60)[:, None],
    "great and small": lambda x: x * 10 ** torch.linspace(-15, 15, x.shape[-1]),
}


@pytest.mark.parametrize(
    ("what", "which", "tokens"), every_pair(STRANGE, (0, 1, 2), (1, 2, 31, 32, 33, 127, 128, 200, 640))
)
def test_channel_scales_are_finite_and_in_range_whatever_comes(what, which, tokens):
    states = list(prompt(4, tokens))
    states[which] = STRANGE[what](states[which])
    for first in (0, 4, 10**6):
        s, t = channel_scales(*states, first=first)
        assert ((s < 0).sum(-1) == loud_channels(D)).all()
        for factor in (s.abs(), t):
            assert factor.dtype == torch.float16 and torch.equal(factor.bfloat16().half(), factor)
            assert ((factor.float() >= 2.0**-12) & (factor.float() <= 2.0**12)).all()


@pytest.mark.parametrize("tokens", [1, 4, 31])
def test_too_few_tokens_scale_nothing(tokens):
    queries, keys, values = prompt(5, tokens)
    up = loud(4, 100.0)
    chosen = channel_scales(queries / up.repeat_interleave(GROUP, 0), 1000 * keys * up, values * up, first=0)
    assert all((factor.abs() == 1).all() for factor in chosen)


def test_without_queries_only_values_are_balanced():
    _, keys, values = prompt(6)
    s, t = channel_scales(None, keys * loud(4, 30.0), values * loud(4, 30.0, seed=1))
    assert (s.abs() == 1).all() and (10 * t < t.median()).sum() == 4 * HEADS


@pytest.mark.parametrize("tokens", [40, 128, 300, 4000])
def test_a_batch_equals_its_rows(tokens):
    queries, keys, values = prompt(7, tokens, batch=3)
    keys = keys * 10 ** torch.linspace(-1, 1, D) * torch.tensor([0.1, 1, 100])[:, None, None, None]
    together = channel_scales(queries, keys, values)
    for row in range(3):
        alone = channel_scales(*(x[row : row + 1] for x in (queries, keys, values)))
        assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("padding", [1, 100, 128, 300])
def test_padding_does_not_enter(padding):
    queries, keys, values = (x * 10 ** torch.linspace(-1, 1, D) for x in prompt(8, 512))
    valid = torch.ones(1, 512, dtype=torch.bool)
    valid[:, :padding] = False
    chosen = channel_scales(queries, keys, values, valid=valid)
    keys[:, :, :padding] = 1e4 * torch.randn(D)
    values[:, :, :padding] = NAN
    queries[:, :, :padding] = -7.0
    assert all(
        torch.equal(a, b) for a, b in zip(channel_scales(queries, keys, values, valid=valid), chosen, strict=True)
    )


def test_a_row_of_padding_scales_nothing():
    valid = torch.zeros(1, 256, dtype=torch.bool)
    assert all((factor.abs() == 1).all() for factor in channel_scales(*prompt(9, 256), valid=valid))


@pytest.mark.parametrize("what", [NAN, INF])
def test_one_token_that_is_not_finite_spoils_no_statistics(what):
    queries, keys, values = (x * 10 ** torch.linspace(-1, 1, D) for x in prompt(10, 512))
    valid = torch.ones(1, 512, dtype=torch.bool)
    valid[:, 77] = False
    without = channel_scales(queries, keys, values, valid=valid)
    keys[:, :, 77, 5], values[:, :, 77, 9], queries[:, :, 77, 0] = what, what, what
    assert all(torch.equal(a, b) for a, b in zip(channel_scales(queries, keys, values), without, strict=True))


@pytest.mark.parametrize("tokens, first", [(0, 4), (3, 4), (100, 4), (131, 4), (132, 4), (1000, 0), (100_000, 4)])
def test_a_prompt_is_looked_at_in_whole_blocks_evenly_spread(tokens, first):
    places = balance.sampled_blocks(tokens, first)
    assert len(places) <= SAMPLED_BLOCKS
    assert all(0 <= a.start and a.stop <= tokens for a in places)
    assert all(a.stop <= b.start for a, b in zip(places, places[1:], strict=False))
    if tokens - first >= BLOCK:
        assert all(a.stop - a.start == BLOCK and (a.start - first) % BLOCK == 0 for a in places)
        assert places[-1].stop > tokens - BLOCK


BATCH = 2


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
