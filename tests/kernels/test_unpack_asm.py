"""The inline PTX that unpacks words gives the levels of the codebook: executed here, an instruction at a time.

The interpreter runs the other spelling only. What is not shown here, that Triton hands an instruction sequence the
registers it is meant for, the tests marked `cuda` show.
"""

from __future__ import annotations

import pytest
import torch
from tq_kernels.common import unpack
from tq_kernels.format import CODES, SMALL_UNIT

from tests.support import ptx
from tests.support.kernel_cases import INTERPRETED
from tq_hf.codec.packing import PLANES, ROWS, TOKENS, pack
from tq_hf.codec.reference import levels_of

pytestmark = pytest.mark.skipif(INTERPRETED, reason="no PTX there")

DIM = 32


def unpacked(asm: str, outputs: int, *inputs: torch.Tensor) -> torch.Tensor:
    """The fp16 numbers that `asm` makes of int64 tensors of 32-bit words, `[outputs, rows, channels]`."""
    planes = ptx.execute(asm, outputs, *[(x & ptx.WORD).numpy() for x in inputs])
    return torch.stack([torch.from_numpy(ptx.halves(plane)).flatten(1) for plane in planes])


def words_and_levels(bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The words of a block of random keys, and what they stand for, [planes, rows, channels]."""
    codes = torch.randint(0, 2**bits, (TOKENS, DIM), generator=torch.Generator().manual_seed(bits))
    words = pack(codes, bits, is_value=False).long()
    return words, levels_of(codes, bits, is_value=False).half().unflatten(0, (PLANES, ROWS))


@pytest.mark.parametrize(("bits", "small"), [(2, False), (3, False), (3, True), (4, False), (4, True)], ids=str)
def test_levels_of_a_look_up(bits: int, small: bool) -> None:
    words, levels = words_and_levels(bits)
    code = CODES[bits]
    tiles, width = words.view(code.tiles, ROWS, -1), DIM // code.quarters
    for quarter in range(code.quarters):
        signs = [tiles[-1]] if code.has_sign_words else []
        actual = unpacked(unpack._ASM[bits][small][quarter], 4, tiles[quarter // code.tile_quarters], *signs)
        expected = levels[:, :, quarter * width :][:, :, :width]
        assert torch.equal(actual, expected * SMALL_UNIT if small else expected)


def test_8_bits() -> None:
    words, levels = words_and_levels(8)
    for tile, part in enumerate(words.view(2, ROWS, DIM // 2)):
        actual = unpacked(unpack._ASM8.value, 2, part)
        expected = levels[2 * tile : 2 * tile + 2]
        number = ~expected.isnan()
        assert torch.equal(actual[number], expected[number])
