"""Trellis codes of `examples/measure/quality/trellis.py`: the best path, closed within a word, and pinned tables."""

import itertools

import numpy as np
import pytest
import torch
from tq_kernels.format import CODES

from examples.measure.compile.trellis_unpack import PROGRAMS, UPPER, Program
from examples.measure.quality.trellis import DESIGNS, UNIT, WORD, Trellis, train
from tests.support import ptx
from tq_hf.codec import trellis
from tq_hf.codec.reference import levels_of

SCALAR_MSE = {2: 0.117588, 3: 0.0345627}
"""Of scalar codes."""
SQUARED_ERROR = {
    "2: 4 states": 0.7496,
    "2: 8 states": 0.7271,
    "2: 8 states, 4 taps": 0.7233,
    "2: signed levels": 0.7641,
    "3: neighbour's bit": 0.8045,
    "3: crumbs' parity": 0.7523,
    "3: parity": 0.7263,
    "3: neighbour's sign": 0.7721,
}
"""Over that of scalar codes, on 1,024 seeded words."""


def words(count: int, length: int = WORD, seed: int = 5) -> torch.Tensor:
    return torch.randn(count, length, generator=torch.Generator().manual_seed(seed))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What `encode` sees: multiples of 1 / UNIT."""
    return (x * UNIT).round() / UNIT


@pytest.fixture(params=DESIGNS)
def design(request: pytest.FixtureRequest) -> Trellis:
    return DESIGNS[request.param]


def test_no_other_codes_of_a_short_word_have_less_error(design: Trellis) -> None:
    length = 5 if design.bits == 2 else 4
    x = rounded(words(32, length))
    every = torch.tensor(list(itertools.product(range(1 << design.bits), repeat=length)))
    least = (x[:, None] - design.decode(every)).square().sum(-1).amin(1)
    codes = design.encode(x)
    assert torch.equal((x - design.decode(codes)).square().sum(-1), least), "float32 sums them exactly"


def test_every_code_of_a_whole_word_is_best_where_the_others_stay(design: Trellis) -> None:
    x = rounded(words(64))
    codes = design.encode(x)
    error = (x - design.decode(codes)).square().sum(-1)
    for place, code in itertools.product(range(WORD), range(1 << design.bits)):
        other = codes.clone()
        other[:, place] = code
        assert ((x - design.decode(other)).square().sum(-1) >= error).all()


def test_levels_are_one_byte_and_a_sign(design: Trellis) -> None:
    level = UNIT * design.decode(design.encode(words(256)))
    allowed = {sign * abs(n) for n in design.magnitudes for sign in (-1, 1)}
    assert set(level.flatten().tolist()) <= allowed
    assert max(map(abs, design.magnitudes)) < 256 and len(design.magnitudes) == 8


def test_ties_go_to_the_lowest_branch_whatever_stands_beside_a_word(design: Trellis) -> None:
    x = torch.cat([torch.zeros(3, WORD), words(61), torch.full((2, WORD), 1e4)])
    codes = design.encode(x)
    assert torch.equal(codes[0], codes[1]) and torch.equal(codes[-1], codes[-2])
    assert torch.equal(codes, torch.cat([design.encode(x[i : i + 1]) for i in range(len(x))]))


@pytest.mark.parametrize("name", DESIGNS)
def test_squared_error_on_gaussian_channels_is_the_tabulated(name: str) -> None:
    design = DESIGNS[name]
    assert design.squared_error(words(1024)) / SCALAR_MSE[design.bits] == pytest.approx(SQUARED_ERROR[name], abs=2e-3)


def test_training_from_a_seed_gives_these_magnitudes() -> None:
    """A short training; the committed tables are what `train` prints."""
    found = train(DESIGNS["3: neighbour's bit"], torch.device("cpu"), seeds=2, words=256, rounds=4)
    assert found.magnitudes == (82, 16, 152, 46, 41, 68, 12, 112)


def test_presets_have_the_magnitudes_of_two_designs() -> None:
    """At 2 bits rounded to two bits of mantissa."""
    in_deviations = [n * CODES[2].trellis.steps / CODES[2].trellis.unit for n in CODES[2].levels]
    assert in_deviations == pytest.approx(DESIGNS["2: signed levels"].magnitudes, rel=0.05)
    assert CODES[3].levels == DESIGNS["3: neighbour's bit"].magnitudes


@pytest.mark.parametrize(("bits", "name"), [(2, "2: signed levels"), (3, "3: neighbour's bit")])
def test_codes_of_presets_are_nearly_the_best(bits: int, name: str) -> None:
    """At 3 bits they are the best paths of channels rounded to 1/32, at 2 those that are closed in a fixed way."""
    design, x = DESIGNS[name], torch.randn(8, 128, 64, generator=torch.Generator().manual_seed(6))
    for is_value in (False, True):
        codes = trellis.encode(trellis.rounded(x, bits), bits, is_value=is_value)
        level = levels_of(codes, bits, is_value=is_value) * (CODES[bits].trellis.steps / CODES[bits].trellis.unit)
        of_words = trellis.chains(x, is_value=is_value).mT.reshape(-1, WORD)
        best = design.squared_error(of_words if bits == 2 else of_words.flip(-1))
        assert best < (x - level).square().mean().item() < (1.035 if bits == 2 else 1.012) * best


def executed(program: Program, registers: dict[str, int]) -> list[int]:
    """What a prototype stores, its PTX interpreted."""
    held, stored = {name: np.array(x) for name, x in registers.items()}, []
    for line in program.lines:
        operation, *operands = line.rstrip(";").replace(",", " ").split()
        if operation == "st.global.b32":
            stored.append(int(held[operands[1]]))
            continue
        out, *names = operands
        x = [held[name] if name in held else np.array(int(name, 0)) for name in names]
        held[out] = ptx.value_of(operation, names, x) & ptx.WORD
    return stored


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name in DESIGNS and name != "2: signed levels"])
def test_instructions_counted_unpack_what_decode_says(name: str) -> None:
    """With the code's bits where the prototype has them: code k of a chain at bit 2k (2 bits) or 30 - 2k (3 bits) of
    its crumb word, and the sign at that bit, plus the tile, of the sign word. (That of presets at 2 bits has no such
    places: `tests/kernels/test_unpack_asm.py` executes it.)"""
    design = DESIGNS[name]
    magnitudes = (93, 17, 31, 72, *UPPER.to_bytes(4, "little"))
    design = Trellis(design.bits, design.memory, design.index, design.sign, magnitudes)
    tiles = 2 if design.bits == 3 else 1
    codes = torch.randint(1 << design.bits, (tiles, WORD), generator=torch.Generator().manual_seed(3))
    registers = {"tl": int.from_bytes(bytes(magnitudes[:4]), "little"), "g": 0, "w1": 0}
    for tile, chain in enumerate(codes.tolist()):
        places = [30 - 2 * k if design.bits == 3 else 2 * k for k in range(WORD)]
        registers[f"w{tile}"] = sum((code & 3) << place for code, place in zip(chain, places, strict=True))
        registers["g"] |= sum((code >> 2) << place + tile for code, place in zip(chain, places, strict=True))
    level = (UNIT * design.decode(codes)).int()
    level = level.flip(-1) if design.bits == 3 else level
    nibbles = [n for pair in ((0, 2), (1, 3), (4, 6), (5, 7)) for n in pair]
    # 2 bits: the high crumbs come first.
    halves = [(0, 1), (0, 0)] if design.bits == 2 else [(0, 0), (0, 1), (1, 0), (1, 1)]
    expected = [int(level[tile, 2 * n + half]) for tile, half in halves for n in nibbles]
    patterns = [x >> shift & 0xFFFF for x in executed(PROGRAMS[name], registers) for shift in (0, 16)]
    assert [(x & 255) * (-1 if x >> 15 else 1) for x in patterns] == expected
    assert all(x & 0x7F00 == 0 for x in patterns)
