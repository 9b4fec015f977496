"""The codebooks are optimal for the channels they quantize, and exact where kernels need them exact."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.support.helpers import CPU
from tq_hf.codec.codebook import FP8_LEVEL_SCALE, POSITIVE_CENTROIDS, boundaries, levels
from tq_hf.codec.reference import quantize

TABLE_MSE = {2: 0.117588, 3: 0.0345627, 4: 0.00950624}
OPTIMAL_MSE = {2: 0.117482, 3: 0.0345478, 4: 0.00950101}
"""Of Lloyd-Max quantizers of N(0, 1) (Max, 1960)."""
LLOYD_BITS = sorted(TABLE_MSE)


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


@pytest.mark.parametrize("bits", LLOYD_BITS)
def test_centroids_are_the_lloyd_max_quantizer_rounded_to_a_grid(bits):
    positive = list(POSITIVE_CENTROIDS[bits])
    centroids = [-c for c in reversed(positive)] + positive
    optimal = centroids
    for _ in range(2000):
        optimal = lloyd_step(optimal)
    assert gaussian_mse(optimal) == pytest.approx(OPTIMAL_MSE[bits], rel=1e-5)
    assert gaussian_mse(centroids) < 1.001 * OPTIMAL_MSE[bits]
    assert centroids == pytest.approx(optimal, abs=1 / 64)


@pytest.mark.parametrize("bits", [3, 4])
def test_no_neighbouring_multiples_of_the_grid_are_better(bits):
    counts = [64 * c for c in POSITIVE_CENTROIDS[bits]]
    best = TABLE_MSE[bits]
    for steps in itertools.product((-1, 0, 1), repeat=len(counts)):
        positive = [(n + step) / 64 for n, step in zip(counts, steps, strict=True)]
        assert gaussian_mse([-c for c in reversed(positive)] + positive) > best * (1 - 1e-5)


@pytest.mark.parametrize("bits", LLOYD_BITS)
def test_levels_are_one_byte_and_a_sign(bits):
    """As subnormal numbers of fp16 in units of 2**-24 at 3 and 4 bits, as high bytes of fp16 at 2."""
    positive = torch.tensor(POSITIVE_CENTROIDS[bits])
    patterns = (positive * 2.0**-18 if bits > 2 else positive).half().view(torch.int16)
    assert (patterns == (64 * positive).short()).all() if bits > 2 else (patterns & 255 == 0).all()
    assert (64 * positive).max() < 256


@pytest.mark.parametrize("bits", LLOYD_BITS)
def test_tabulated_mse_is_that_of_the_centroids(bits):
    assert gaussian_mse(levels(bits, CPU).tolist()) == pytest.approx(TABLE_MSE[bits], rel=1e-4)


@pytest.mark.parametrize("bits", LLOYD_BITS)
def test_quantizing_gaussian_samples_gives_the_tabulated_mse(bits):
    z = torch.randn(1, 1 << 20, generator=torch.Generator().manual_seed(bits))
    codes, scale = quantize(z, bits, "none")
    mse = (z - scale.float()[..., None] * levels(bits, CPU)[codes]).square().mean().item()
    assert mse == pytest.approx(TABLE_MSE[bits], rel=0.01)


@pytest.mark.parametrize("bits", LLOYD_BITS)
def test_quantizing_the_sphere_gives_its_exact_mse(bits):
    """Two per cent below the Gaussian at d = 128: a sphere's channels have lighter tails."""
    dim = 128
    z = torch.randn(10_000, dim, generator=torch.Generator().manual_seed(bits))
    z *= math.sqrt(dim) / z.norm(dim=-1, keepdim=True)
    codes, scale = quantize(z, bits, "none")
    mse = (z - scale.float()[..., None] * levels(bits, CPU)[codes]).square().mean().item()
    exact = sphere_mse(levels(bits, CPU), dim)
    assert mse == pytest.approx(exact, rel=0.01)
    assert exact == pytest.approx(0.98 * TABLE_MSE[bits], rel=0.01)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_levels_are_exact_in_fp16(bits):
    level = levels(bits, CPU)
    assert level.dtype == torch.float32 and level.shape == (2**bits,)
    assert torch.equal(level.nan_to_num(), level.half().float().nan_to_num())


@pytest.mark.parametrize("bits", LLOYD_BITS)
def test_levels_are_ascending_and_antisymmetric(bits):
    level = levels(bits, CPU)
    assert (level.diff() > 0).all()
    assert torch.equal(level, -level.flip(0))
    assert level[2 ** (bits - 1) :].tolist() == pytest.approx(POSITIVE_CENTROIDS[bits], rel=2**-11)


@pytest.mark.parametrize("bits", LLOYD_BITS)
def test_boundaries_are_the_midpoints(bits):
    level, boundary = levels(bits, CPU), boundaries(bits, CPU)
    assert boundary.shape == (2**bits - 1,)
    assert torch.equal(boundary, (level[1:] + level[:-1]) / 2)
    assert boundary[2 ** (bits - 1) - 1] == 0


@pytest.mark.parametrize("bits", LLOYD_BITS)
def test_codes_are_the_nearest_level(bits):
    z = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    codes, _ = quantize(z, bits, "none")
    unit = z / z.square().mean(-1, keepdim=True).sqrt()
    distance = (unit[..., None] - levels(bits, CPU)).abs()
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
