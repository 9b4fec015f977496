"""Trellis codes of words: the rule of the documentation, the best paths, and words that decode alone."""

import itertools

import pytest
import torch
from tq_kernels.format import CODES

from tq_hf.codec import trellis
from tq_hf.codec.packing import pack, unpack
from tq_hf.codec.reference import levels_of, quantize

BITS = pytest.mark.parametrize("bits", [2, 3])
SIDES = pytest.mark.parametrize("is_value", [False, True], ids=["keys", "values"])
MSE = {2: 0.0938, 3: 0.0280}
CHAIN = trellis.CHAIN


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, 128, 32, generator=torch.Generator().manual_seed(seed))


def slow_levels(words: torch.Tensor, bits: int) -> list[list[float]]:
    """Levels of the 16 crumbs of each word of crumbs, in the order of its bits, restated from the documentation; at 3
    bits their sizes."""
    found = []
    for word in (words.long() & 0xFFFFFFFF).tolist():
        # At 2 bits the code k is at bits 2 k + 1 and 2 k + 2.
        word = word if bits == 3 else (word >> 1) | (word & 1) << 31
        crumbs = [word >> 2 * k & 3 for k in range(16)]
        of_word = []
        for k, crumb in enumerate(crumbs):
            if bits == 2:
                differ = crumbs[k - 1] >> 1 != crumbs[k - 2] & 1
                of_word.append(CODES[2].levels[2 * crumb + differ] / 64)
            else:
                of_word.append(CODES[3].levels[crumb + 4 * (crumbs[(k + 1) % 16] & 1)] / 64)
        found.append(of_word)
    return found


@BITS
@SIDES
def test_a_word_decodes_alone_by_the_rule(bits: int, is_value: bool) -> None:
    codes = torch.randint(0, 2**bits, (128, 16), generator=torch.Generator().manual_seed(bits), dtype=torch.int32)
    words = pack(codes, bits, is_value=is_value)[: 8 * 16]
    level = trellis.chains(levels_of(codes, bits, is_value=is_value), is_value=is_value).mT
    assert torch.equal(level if bits == 2 else level.abs(), torch.tensor(slow_levels(words, bits)))
    assert torch.equal(unpack(pack(codes, bits, is_value=is_value), bits, 16, is_value=is_value), codes)


@BITS
@SIDES
def test_chains_are_words_in_their_order(bits: int, is_value: bool) -> None:
    x = gaussian(2, 3)
    words = trellis.chains(x, is_value=is_value)
    assert words.shape == (2, 3, 16, 8 * 32)
    assert torch.equal(trellis.from_chains(words, is_value=is_value), x)


@BITS
@SIDES
def test_squared_error_on_gaussian_channels(bits: int, is_value: bool) -> None:
    x = torch.randn(16, 128, 128, generator=torch.Generator().manual_seed(1))
    x /= x.square().mean().sqrt()
    codes = trellis.encode(trellis.rounded(x, bits), bits, is_value=is_value)
    level = levels_of(codes, bits, is_value=is_value) * (CODES[bits].trellis.steps / CODES[bits].trellis.unit)
    error = (level - x).square().mean().item()
    assert error == pytest.approx(MSE[bits], rel=0.007)


def chain_error(x: torch.Tensor, codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Errors of words: of channels `[N, 16]`, and codes of the same shape, whose signs do not matter at 3 bits."""
    a, b = torch.tensor(CODES[bits].trellis.errors).T
    if bits == 2:
        index = 2 * codes + ((codes.roll(1, -1) >> 1) ^ (codes.roll(2, -1) & 1))
    else:
        index, x = (codes & 3) + 4 * (codes.roll(-1, -1) & 1), x.abs()
    return (a[index] + b[index] * x.clamp(-CODES[bits].trellis.limit, CODES[bits].trellis.limit)).sum(-1)


def spread(errors: torch.Tensor, differences: torch.Tensor) -> torch.Tensor:
    """Most that the errors of any two states can differ by after a step, from the most before it.

    Args:
        errors: `[x, new, old]`, of the branch between two states for each channel.
        differences: `[i, j]`, error of i less error of j.
    """
    # [x, i, j, old, old]: any path to i is an upper bound of its error, and the best to j comes from some old state.
    paths = differences[None, None, None] + errors[:, :, None, :, None] - errors[:, None, :, None, :]
    return paths.amin(3).amax(3).amax(0)


@BITS
def test_errors_of_paths_fit(bits: int) -> None:
    """Of any channels: below 31 * 2**10, where bits of fp16 numbers end, and less than what wrong first states cost."""
    a, b = torch.tensor(CODES[bits].trellis.errors).T
    limit = CODES[bits].trellis.limit
    x = torch.arange(-limit if bits == 2 else 0, limit + 1)[:, None]
    error = a + b * x  # [x, 8]
    assert error.min() >= 0
    if bits == 2:  # from the state 2 b + p before a code to that behind it
        before, behind = torch.arange(4)[:, None], torch.arange(4)
        branches = error[:, 4 * (before // 2 ^ behind % 2) + 2 * (behind // 2) + before % 2]
        state = torch.arange(4)
        starts = [(state ^ last) * CODES[2].trellis.far for last in range(4)] + [torch.zeros(4, dtype=torch.long)]
    else:  # of both first low bits
        best = torch.minimum(error.view(-1, 2, 2, 2)[:, :, 0], error.view(-1, 2, 2, 2)[:, :, 1])  # [x, behind, low]
        far = torch.full((len(x), 2, 2), 1 << 20)
        branches = torch.cat([torch.cat([best.mT, far], 2), torch.cat([far, best.mT], 2)], 1)
        starts = [torch.tensor([0, 1, 1, 0]) * CODES[3].trellis.far]
    for start in starts:
        differences = start[:, None] - start
        for k in range(CHAIN - 1, -1, -1):
            if k % 4 == 3:
                least = 0
            # The largest sum, before the least of them is taken.
            largest = least + differences.amax() + branches[branches < 1 << 20].amax()
            assert 16 * largest + 15 < 31 << 10
            least += branches.amin(1).amax()
            differences = spread(branches, differences)
    assert differences.amax() < CODES[bits].trellis.far


@BITS
def test_no_change_of_two_neighbouring_codes_is_better(bits: int) -> None:
    """At 2 bits a word is closed with a code that need not be the best: changes there are left out."""
    x = trellis.rounded(gaussian(1, seed=2), bits)
    codes = trellis.encode(x, bits, is_value=True)
    x, codes = (trellis.chains(part.long(), is_value=True)[0].T for part in (x, codes))
    least = chain_error(x, codes, bits)
    places = range(16) if bits == 3 else range(13)
    for place, (first, second) in itertools.product(places, itertools.product(range(2**bits), repeat=2)):
        other = codes.clone()
        other[:, place], other[:, (place + 1) % 16] = first, second
        assert (chain_error(x, other, bits) >= least).all()


@BITS
@SIDES
def test_words_do_not_depend_on_those_beside_them(bits: int, is_value: bool) -> None:
    x = trellis.rounded(gaussian(3, seed=3), bits)
    together = trellis.encode(x, bits, is_value=is_value)
    assert torch.equal(together[1:2], trellis.encode(x[1:2], bits, is_value=is_value))
    words = trellis.chains(x, is_value=is_value)
    words[..., 5:] = 0
    alone = trellis.chains(
        trellis.encode(trellis.from_chains(words, is_value=is_value), bits, is_value=is_value), is_value=is_value
    )
    assert torch.equal(alone[..., :5], trellis.chains(together, is_value=is_value)[..., :5])


@BITS
def test_channels_are_rounded_to_even_and_limited(bits: int) -> None:
    x = torch.tensor([0.5, 1.5, -0.5, -2.5, 126.6, 127.4, 1e9, -1e9, torch.inf, -torch.inf, torch.nan]).double()
    x /= CODES[bits].trellis.unit
    assert trellis.rounded(x, bits).tolist() == [0, 2, 0, -2, 127, 127, 127, -127, 127, -127, 0]


@BITS
def test_what_is_too_large_spoils_no_error(bits: int) -> None:
    """The largest channels of either sign: sums of errors stay in the range that kernels have."""
    x = trellis.rounded(
        torch.tensor([-9.0, 9.0])[torch.randint(2, (4, 128, 16), generator=torch.Generator().manual_seed(4))], bits
    )
    codes = trellis.encode(x, bits, is_value=False)
    level = levels_of(codes, bits, is_value=False)
    assert (level.sign() == x.sign()).double().mean() > 0.9
    assert codes.min() >= 0 and codes.max() < 2**bits


@BITS
def test_the_scale_keeps_what_points_where_the_vector_did(bits: int) -> None:
    z = 50 * gaussian(2, seed=5)
    z[0, 3] = 0
    codes, scale = quantize(z, bits, is_value=False)
    kept = scale.float()[..., None] * levels_of(codes, bits, is_value=False)
    assert scale[0, 3] == 0 and torch.allclose((z * kept).sum(-1), CODES[bits].key_shrink * (z * z).sum(-1), rtol=1e-2)
