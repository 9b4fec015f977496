"""The codebooks are optimal for the channels they quantize, and exact where kernels need them exact."""

import itertools
import math

import pytest
import torch
from tq_kernels.format import CODES, FP8_LEVEL_SCALE

from tests.support.helpers import CPU
from tq_hf.codec.codebook import boundaries, levels
from tq_hf.codec.reference import quantize

POSITIVE = [n / 64 for n in CODES[4].levels]
TABLE_MSE = 0.00950624
OPTIMAL_MSE = 0.00950101
"""Of the Lloyd-Max quantizer of N(0, 1) of 4 bits (Max, 1960)."""


def normal_cdf(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def normal_pdf(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi) if math.isfinite(x) else 0.0


def cells(centroids: list[float]) -> list[tuple[float, float]]:
    """The interval of N(0, 1) that is nearest to each centroid."""
    middle = [(a + b) / 2 for a, b in zip(centroids[:-1], centroids[1:], strict=True)]
    return list(zip([-math.inf, *middle], [*middle, math.inf], strict=True))


def lloyd_step(centroids: list[float]) -> list[float]:
    """Each centroid moved to the mean of its cell."""
    return [(normal_pdf(a) - normal_pdf(b)) / (normal_cdf(b) - normal_cdf(a)) for a, b in cells(centroids)]


def gaussian_mse(centroids: list[float]) -> float:
    """E (x - c(x))^2 for x ~ N(0, 1), in closed form."""
    total = 0.0
    for c, (a, b) in zip(centroids, cells(centroids), strict=True):
        mass = normal_cdf(b) - normal_cdf(a)
        first = normal_pdf(a) - normal_pdf(b)
        second = mass + (a * normal_pdf(a) if math.isfinite(a) else 0) - (b * normal_pdf(b) if math.isfinite(b) else 0)
        total += second - 2 * c * first + c * c * mass
    return total


def sphere_mse(centroids: torch.Tensor, dim: int) -> float:
    """The same for a channel of a uniform unit vector times sqrt(dim), whose density is (1 - x^2/d)^((d-3)/2)."""
    x = torch.linspace(-math.sqrt(dim), math.sqrt(dim), 400_001, dtype=torch.float64)
    density = (1 - x * x / dim).clamp(min=0) ** ((dim - 3) / 2)
    error = (x[:, None] - centroids.double()).abs().amin(-1) ** 2
    return ((error * density).sum() / density.sum()).item()


def test_centroids_are_the_lloyd_max_quantizer_rounded_to_a_grid():
    centroids = [-c for c in reversed(POSITIVE)] + POSITIVE
    optimal = centroids
    for _ in range(2000):
        optimal = lloyd_step(optimal)
    assert gaussian_mse(optimal) == pytest.approx(OPTIMAL_MSE, rel=1e-5)
    assert gaussian_mse(centroids) == pytest.approx(TABLE_MSE, rel=1e-6) and TABLE_MSE < 1.001 * OPTIMAL_MSE
    assert centroids == pytest.approx(optimal, abs=1 / 64)
    assert levels(4, CPU).tolist() == centroids


def test_no_neighbouring_multiples_of_the_grid_are_better():
    for steps in itertools.product((-1, 0, 1), repeat=len(POSITIVE)):
        positive = [c + step / 64 for c, step in zip(POSITIVE, steps, strict=True)]
        assert gaussian_mse([-c for c in reversed(positive)] + positive) > TABLE_MSE * (1 - 1e-5)


@pytest.mark.parametrize("bits", [3, 4])
def test_levels_are_one_byte_and_a_sign(bits):
    """As subnormal numbers of fp16 in units of 2**-24."""
    counts = torch.tensor(CODES[bits].levels)
    assert counts.shape == (8,) and 0 < counts.min() and counts.max() < 256
    assert torch.equal((counts / 64 * 2.0**-18).half().view(torch.int16), counts.short())
    assert sorted((64 * levels(bits, CPU)).tolist()) == sorted([*counts.tolist(), *(-counts).tolist()])


def test_levels_of_2_bits_are_the_high_byte_of_fp16():
    level = levels(2, CPU)
    assert (64 * level).tolist() == list(CODES[2].levels)
    assert (level.half().view(torch.int16) & 255 == 0).all()
    assert sorted(level.tolist()) == sorted((-level).tolist())


def test_quantizing_gaussian_samples_gives_the_tabulated_mse():
    z = torch.randn(1, 1 << 20, generator=torch.Generator().manual_seed(4))
    z /= z.square().mean().sqrt()
    codes, _ = quantize(z, 4, is_value=False)
    mse = (z - levels(4, CPU)[codes]).square().mean().item()
    assert mse == pytest.approx(TABLE_MSE, rel=0.01)


def test_quantizing_the_sphere_gives_its_exact_mse():
    """Two per cent below the Gaussian at d = 128: a sphere's channels have lighter tails."""
    dim = 128
    z = torch.randn(10_000, dim, generator=torch.Generator().manual_seed(4))
    z *= math.sqrt(dim) / z.norm(dim=-1, keepdim=True)
    codes, _ = quantize(z, 4, is_value=False)
    mse = (z - levels(4, CPU)[codes]).square().mean().item()
    exact = sphere_mse(levels(4, CPU), dim)
    assert mse == pytest.approx(exact, rel=0.01)
    assert exact == pytest.approx(0.98 * TABLE_MSE, rel=0.01)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_levels_are_exact_in_fp16(bits):
    level = levels(bits, CPU)
    assert level.dtype == torch.float32 and level.shape == ({2: 8, 8: 256}.get(bits, 16),)
    assert torch.equal(level.nan_to_num(), level.half().float().nan_to_num())


def test_boundaries_are_the_midpoints():
    level, boundary = levels(4, CPU), boundaries(4, CPU)
    assert (level.diff() > 0).all() and boundary.shape == (15,) and boundary[7] == 0
    assert torch.equal(boundary, (level[1:] + level[:-1]) / 2)


def test_the_upper_half_of_levels_of_3_bits_are_the_negatives_of_the_lower():
    level = levels(3, CPU)
    assert torch.equal(level[8:], -level[:8])
    assert (64 * level[:8]).tolist() == list(CODES[3].levels)


def test_codes_of_4_bits_are_the_nearest_level():
    z = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    codes, _ = quantize(z, 4, is_value=False)
    unit = z / z.square().mean(-1, keepdim=True).sqrt()
    distance = (unit[..., None] - levels(4, CPU)).abs()
    assert torch.allclose(distance.gather(-1, codes.long()[..., None])[..., 0], distance.amin(-1), atol=1e-6)


def test_fp8_levels_are_e4m3_times_a_power_of_two_bit_for_bit():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float() * 2.0**-8
    assert FP8_LEVEL_SCALE == 2.0**-8
    assert torch.equal(levels(8, CPU).view(torch.int32), expected.view(torch.int32))


def test_fp8_level_is_the_byte_moved_into_the_fields_of_fp16():
    """What a kernel does: sign to bit 15, the other seven bits to 7..13."""
    codes = torch.arange(256, dtype=torch.int32)
    finite = (codes & 0x7F) != 0x7F
    moved = ((codes & 0x80) << 8 | (codes & 0x7F) << 7).to(torch.uint16).view(torch.float16).float()
    assert torch.equal(moved[finite], levels(8, CPU)[finite])
