"""The bound on codes reads a text in one pass as a cache is read in chunks."""

import pytest
import torch

from examples.measure.quality.bound import (
    BLOCK,
    CHUNK,
    Codes,
    alike,
    error_of,
    hidden,
    keys_in_parts,
    read_with,
    round_trip,
    twice,
)
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input

TOKENS = 4 * CHUNK + 60


@pytest.fixture(scope="module")
def ids(model):
    return torch.randint(0, model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def error(states: torch.Tensor, exact: torch.Tensor) -> float:
    return ((states - exact).square().sum() / exact.square().sum()).item()


@torch.no_grad()
@pytest.mark.parametrize("preset, bits", [("2bit_nc", (2, 2)), ("2.5bit_nc", (3, 2))])
def test_one_pass_is_what_a_cache_read_in_chunks_gives(model, ids, preset, bits):
    """Of a cache without loud channels: those of a row are a simulation."""
    cache = TurboQuantCache(model.config, preset, loud=False)
    chunks = [
        model.get_decoder()(ids[:, start : start + CHUNK], **as_input(cache)).last_hidden_state[0]
        for start in range(0, TOKENS, CHUNK)
    ]
    read = torch.cat(chunks)[CHUNK + BLOCK :]
    exact = hidden(model, ids, None, CHUNK + BLOCK)
    states = hidden(model, ids, alike(key_bits=bits[0], value_bits=bits[1]), CHUNK + BLOCK)
    assert error(read, exact) > 1e-5
    # A code may be rounded the other way.
    assert error(states, read) < 0.01 * error(read, exact)
    assert error(states, exact) == pytest.approx(error(read, exact), rel=0.02)


def test_exact_codes_are_exact(model, ids):
    exact = hidden(model, ids, None, CHUNK)
    assert error(hidden(model, ids, alike(key_bits=None, value_bits=None), CHUNK), exact) < 1e-10


def test_the_attention_of_the_model_comes_back(model):
    with read_with(model, None):
        assert model.config._attn_implementation == "bound"
    assert model.config._attn_implementation == "turboquant"


@pytest.mark.parametrize("wanted", [4.0**-2, 0.338])
def test_noise_of_an_ideal_coder_has_its_error_after_shrinking(wanted):
    z = torch.randn(4, 128, 64, generator=torch.Generator().manual_seed(1))
    y = round_trip(z, 2, wanted, 1.0, is_value=False)
    assert (y * z).sum() / z.square().sum() == pytest.approx(1, rel=0.02)
    assert (y * (1 - wanted) - z).square().mean() / z.square().mean() == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(
    ("codes", "sizes", "expected"),
    [
        (Codes(loud=2), (2, 62), (6.5e-4, error_of((2,)))),
        (Codes(parts=twice(2, 1 / 8)), (8, 48, 8), (error_of((2, 2)), error_of((2,)), 1)),
        (Codes(key_bits=3, parts=twice(3)), (4, 56, 4), (error_of((3, 3)), error_of((3,)), 1)),
    ],
)
def test_loud_channels_have_the_bits_that_quiet_ones_lack(codes, sizes, expected):
    """Channels are 1, 1/4 and 1/16 loud, and stand in any order. Few channels with a scale of their own have less error
    than Gaussian ones."""
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(64, generator=generator)
    loudness = torch.cat([torch.full((n,), 4.0**-i) for i, n in enumerate(sizes)])[order]
    keys = loudness * torch.randn(1, 1, 8, BLOCK, 64, generator=generator) + 3 * loudness
    queries = torch.randn(1, 2, 8 * BLOCK, 64, generator=generator)
    read = keys_in_parts(codes._replace(pairs=False), queries, keys.flatten(2, 3), keys)
    spread = (keys - keys.mean(3, keepdim=True)).square().mean((0, 1, 2, 3))
    found = (read - keys).square().mean((0, 1, 2, 3)) / spread
    for i, each in enumerate(expected):
        assert each / 4 < found[loudness == 4.0**-i].mean() < 1.15 * each
