"""The rotation is orthogonal for any head_dim, repeatable, and spreads what must not stay in one channel."""

import math

import pytest
import torch

from tests.support.helpers import CPU
from tq_hf.codec.rotation import hadamard, rotate, rotate_back, rotation_matrix, signs

DIMS = [8, 40, 64, 72, 80, 96, 112, 120, 128, 192, 256]
POWERS = [dim for dim in DIMS if dim & (dim - 1) == 0]


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-1]))


def sylvester(dim: int) -> torch.Tensor:
    """H_2n = [[H_n, H_n], [H_n, -H_n]], entries +1 and -1."""
    matrix = torch.ones(1, 1)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_is_orthogonal_and_its_matrix_says_both_ways(dim):
    turned = rotate(torch.eye(dim), seed=1).double()
    assert torch.allclose(turned @ turned.T, torch.eye(dim, dtype=torch.float64), atol=2e-6)
    x = gaussian(2, 3, 7, dim)
    matrix = rotation_matrix(dim, 1, CPU, torch.float32)
    assert matrix.shape == (dim, dim) and matrix.is_contiguous()
    assert torch.allclose(x @ matrix.T, rotate(x, 1), atol=1e-5)
    assert torch.allclose(x @ matrix, rotate_back(x, 1), atol=1e-5)
    assert rotation_matrix(dim, 1, CPU, torch.float16).dtype == torch.float16


@pytest.mark.parametrize("dim", DIMS)
def test_hadamard_is_symmetric_and_its_own_inverse(dim):
    matrix = hadamard(torch.eye(dim))
    assert torch.allclose(matrix, matrix.T, atol=1e-6)
    x = gaussian(5, dim)
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-5)


@pytest.mark.parametrize("dim", POWERS)
def test_power_of_two_is_the_sylvester_hadamard_matrix(dim):
    assert torch.allclose(hadamard(torch.eye(dim)), sylvester(dim) / math.sqrt(dim), atol=1e-6)


@pytest.mark.parametrize("dim, odd", [(40, 5), (96, 3), (112, 7), (120, 15)])
def test_other_dims_are_a_hartley_matrix_times_a_hadamard_matrix(dim, odd):
    angles = 2 * math.pi / odd * torch.outer(torch.arange(odd), torch.arange(odd)).double()
    expected = torch.kron(angles.cos() + angles.sin(), sylvester(dim // odd).double()) / math.sqrt(dim)
    assert torch.allclose(hadamard(torch.eye(dim)).double(), expected, atol=1e-6)


@pytest.mark.parametrize("dim", [8, 96, 128])
def test_signs_neither_depend_on_the_global_random_state_nor_move_it(dim):
    before = torch.get_rng_state()
    first = signs.__wrapped__(dim, 0, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        assert torch.equal(signs.__wrapped__(dim, 0, CPU), first)
    assert set(first.tolist()) == {-1.0, 1.0}


def test_signs_of_a_seed_are_pinned():
    """Saved caches and caches of several processes rely on them."""
    bits = "".join("+" if s > 0 else "-" for s in signs(32, 0, CPU).tolist())
    assert bits == "-++-+++++++--+-----+-++--++++-+-"


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_seeds_give_different_rotations(dim):
    assert not torch.equal(signs(dim, 0, CPU), signs(dim, 1, CPU))
    x = gaussian(4, dim)
    assert not torch.allclose(rotate(x, 0), rotate(x, 1), atol=0.1)


@pytest.mark.parametrize("dim", [36 + 4, 80, 120, 128])
def test_a_row_does_not_depend_on_its_batch(dim):
    x = gaussian(37, dim)
    together, back = rotate(x, 0), rotate_back(x, 0)
    for i in (0, 1, 17, 36):
        assert torch.equal(rotate(x[i : i + 1], 0)[0], together[i])
        assert torch.equal(rotate_back(x[i : i + 1], 0)[0], back[i])
    assert torch.equal(rotate(x.T.contiguous().T, 0), together)  # nor on strides


@pytest.mark.parametrize("dim", POWERS[1:])
def test_mean_aligned_with_a_hadamard_row_is_spread_by_the_signs(dim):
    aligned = hadamard(torch.eye(dim))  # row i: a unit vector that H alone moves into channel i
    assert torch.allclose(hadamard(aligned).amax(-1), torch.ones(dim), atol=1e-5)
    assert rotate(aligned, 0).abs().amax() < 5 / math.sqrt(dim)
