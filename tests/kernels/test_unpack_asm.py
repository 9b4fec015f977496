"""The inline PTX that unpacks words gives the levels of the codebook: executed here, an instruction at a time.

The interpreter runs the other spelling only. What is not shown here, that Triton hands an instruction sequence the
registers it is meant for, the tests marked `cuda` show.
"""

from __future__ import annotations

import re

import pytest
import torch
from kernel_cases import INTERPRETED

pytest.importorskip("triton")

from tq_kernels.common import unpack  # noqa: E402

from tq_hf.codec.codebook import levels as codebook  # noqa: E402
from tq_hf.codec.packing import PLANES, ROWS, TOKENS, pack  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="no PTX there")

DIM = 32
MASK = 0xFFFFFFFF


def permute(a: torch.Tensor, b: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    """`prmt.b32` in its default mode: bit 3 of a nibble spreads the sign of the byte it selects."""
    result = torch.zeros_like(a)
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = torch.where(nibble & 4 > 0, b, a) >> 8 * (nibble & 3) & 0xFF
        result |= torch.where(nibble & 8 > 0, (byte >> 7) * 0xFF, byte) << 8 * i
    return result


def logic(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: int) -> torch.Tensor:
    """`lop3.b32`."""
    result = torch.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            terms = [x if index >> (2 - place) & 1 else ~x for place, x in enumerate((a, b, c))]
            result |= terms[0] & terms[1] & terms[2]
    return result & MASK


def execute(asm: str, outputs: int, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Run `asm` on int64 tensors that hold 32-bit words."""
    like = torch.zeros_like(inputs[0])
    registers = {f"${outputs + i}": x & MASK for i, x in enumerate(inputs)} | {"%lanemask_lt": like + 0x7FFF}
    for line in re.sub(r"\.reg[^;]*;|[{}]", "", asm).split(";"):
        if not line.strip():
            continue
        operation, rest = line.split(maxsplit=1)
        target, *names = (name.strip() for name in rest.split(","))
        x = [registers[name] if name in registers else like + int(name, 0) for name in names]
        match operation:
            case "mov.u32":
                value = x[0]
            case "add.u32":
                value = x[0] + x[1]
            case "and.b32":
                value = x[0] & x[1]
            case "shr.u32":
                value = x[0] >> x[1]
            case "shl.b32":
                value = x[0] << x[1]
            case "prmt.b32":
                value = permute(*x)
            case "lop3.b32":
                value = logic(*x[:3], int(names[3], 0))
            case _:
                raise AssertionError(f"{operation} is not known here")
        registers[target] = value & MASK
    return [registers[f"${i}"] for i in range(outputs)]


def halves(register: torch.Tensor) -> torch.Tensor:
    """The two fp16 of a 32-bit register, `[..., 2]`."""
    bits = torch.stack([register & 0xFFFF, register >> 16], -1)
    return torch.where(bits > 0x7FFF, bits - 0x10000, bits).to(torch.int16).view(torch.float16)


def words_and_levels(bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The words of a block of random keys, and what they stand for, [planes, rows, channels]."""
    codes = torch.randint(0, 2**bits, (TOKENS, DIM), generator=torch.Generator().manual_seed(bits))
    words = pack(codes, bits, is_value=False).long()
    return words, codebook(bits, codes.device)[codes].half().unflatten(0, (PLANES, ROWS))


SMALL = pytest.mark.parametrize("small", [False, True], ids=["full", "small"])


@SMALL
def test_4_bits(small: bool) -> None:
    words, levels = words_and_levels(4)
    asm = unpack._ASM4_SMALL if small else unpack._ASM4
    planes = execute(asm.value, 4, words.view(ROWS, DIM // 2))
    actual = torch.stack([halves(plane).flatten(1) for plane in planes])
    assert torch.equal(actual, levels * unpack.SMALL_UNIT.value if small else levels)


@pytest.mark.parametrize(("bits", "small"), [(2, False), (3, False), (3, True)])
def test_2_and_3_bits(bits: int, small: bool) -> None:
    words, levels = words_and_levels(bits)
    asm = (unpack._ASM3_SMALL if small else unpack._ASM3) if bits == 3 else None
    tile = ROWS * DIM // 8
    for quarter in range(4):
        crumbs = words[quarter // 2 * tile :][:tile].view(ROWS, DIM // 8)
        if bits == 3:
            signs = words[2 * tile :].view(ROWS, DIM // 8)
            planes = execute(asm.value[quarter], 4, crumbs, signs)
        else:
            planes = execute(unpack._ASM2.value[quarter % 2], 4, crumbs)
        actual = torch.stack([halves(plane).flatten(1) for plane in planes])
        expected = levels[:, :, quarter * (DIM // 4) :][:, :, : DIM // 4]
        assert torch.equal(actual, expected * unpack.SMALL_UNIT.value if small else expected)


def test_8_bits() -> None:
    words, levels = words_and_levels(8)
    for tile, part in enumerate(words.view(2, ROWS, DIM // 2)):
        planes = execute(unpack._ASM8.value, 2, part)
        actual = torch.stack([halves(plane).flatten(1) for plane in planes])
        expected = levels[2 * tile : 2 * tile + 2]
        number = ~expected.isnan()
        assert torch.equal(actual[number], expected[number])
