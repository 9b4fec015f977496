"""Prototypes of unpacking trellis words to small levels, and the machine instructions they become.

    python -m examples.measure.compile.trellis_unpack

Each is PTX for a crumb word of 2 bits (16 codes), or for two crumb words and their signs (3 bits, 32 codes), as
`tq_kernels.common.unpack` spells it: magnitudes by byte permute, signs into the high bytes, four registers of two
codes for each view. Nibble n is plane 2 (n // 4) + n % 2 and neighbour n // 2 % 2. Counted are the instructions
between the loads and the stores.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from examples.measure.compile.sass import TOOLS

HEAD = """.version 8.0
.target sm_90
.address_size 64
.visible .entry unpack(.param .u64 words, .param .u64 out) {
.reg .b32 %r<400>; .reg .b64 %a, %b; .reg .b32 w0, w1, g, z, tl;
ld.param.u64 %a, [words]; ld.param.u64 %b, [out];
ld.global.b32 w0, [%a]; ld.global.b32 w1, [%a+4]; ld.global.b32 g, [%a+8]; ld.global.b32 tl, [%a+12];
"""

UPPER = 0x9B874523
"""Magnitudes 4 to 7 as bytes, any of them; tl has the others."""


class Program:
    """PTX with a register for each result; w0, w1 and g are crumb words and signs, tl half of the table."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.used = 0
        self.stored = 0

    def op(self, name: str, *operands: str | int) -> str:
        self.used += 1
        register = f"%r{self.used}"
        self.lines.append(f"{name} {register}, {', '.join(f'{o:#x}' if isinstance(o, int) else o for o in operands)};")
        return register

    def both(self, a: str, b: str, mask: int, table: int) -> str:
        """A bitwise function of two registers and a mask."""
        return self.op("lop3.b32", a, b, mask, table)

    def turn(self, word: str, left: int) -> str:
        return word if left == 0 else self.op("shf.l.wrap.b32", word, word, left % 32)

    def levels(self, index: str, signs: str, left: int) -> None:
        """Eight codes: magnitudes of three bits of a nibble, the sign `left` bits below its top in `signs`."""
        low = self.op("prmt.b32", "tl", UPPER, index)
        high = self.op("prmt.b32", "tl", UPPER, self.op("shr.u32", index, 16))
        odd = self.op("and.b32", self.op("shl.b32", signs, left) if left else signs, 0x80808080)
        even = self.op("and.b32", self.op("shl.b32", signs, left + 4), 0x80808080)
        for half, sign, select in ((low, even, 0x5240), (low, odd, 0x5341), (high, even, 0x7260), (high, odd, 0x7361)):
            out = self.op("prmt.b32", half, sign, select)
            self.lines.append(f"st.global.b32 [%b+{4 * self.stored}], {out};")
            self.stored += 1

    def high_bytes(self, index: str, upper: int = UPPER) -> None:
        """Eight codes: levels of three bits of a nibble, whose low byte is 0."""
        for half in (index, self.op("shr.u32", index, 16)):
            part = self.op("prmt.b32", "tl", upper, half)
            for select in (0x1404, 0x3424):
                self.lines.append(f"st.global.b32 [%b+{4 * self.stored}], {self.op('prmt.b32', part, 0, select)};")
                self.stored += 1


XOR3, XOR_AND, SELECT = 0x96, (0xF0 ^ 0xCC) & 0xAA, (0xF0 & 0xAA) | (0xCC & ~0xAA & 0xFF)


def two(*taps: int) -> Program:
    """2 bits: the sign is the parity of the code's top bit and of the bits at these distances below it."""
    p = Program()
    signs = "w0"
    turned = [p.turn("w0", tap) for tap in taps]
    while turned:
        signs = (
            p.op("lop3.b32", signs, turned.pop(), turned.pop(), XOR3)
            if len(turned) > 1
            else p.op("xor.b32", signs, turned.pop())
        )
    p.levels(p.op("and.b32", "w0", 0x77777777), signs, 0)
    p.levels(p.op("and.b32", p.turn("w0", 2), 0x77777777), signs, 2)
    return p


def signed_two() -> Program:
    """2 bits: eight levels of one high byte, by a code and the parity of two bits before it (as presets have them)."""
    p = Program()
    for word, other in (("w0", 3), (p.turn("w0", -2), 1)):
        index = p.op("and.b32", p.both(word, p.turn("w0", other), 0x11111111, 0x78), 0x77777777)
        p.high_bytes(index)
    return p


def three(taps: tuple[int, ...], signed: bool) -> Program:
    """3 bits: the index's third bit is the parity of bits so many above the next crumb's lowest, and of its sign.

    The sign of tile t's code k is bit 2 k + t of g.
    """
    p = Program()
    for tile, word in enumerate(("w0", "w1")):
        low = p.turn(word, -2)
        if taps == (0,) and not signed:
            chosen = [p.op("and.b32", part, 0x77777777) for part in (word, low)]
        else:
            parts = [word if tap == 0 else low if tap == 2 else p.turn(word, -tap) for tap in taps]
            parity = p.op("lop3.b32", *parts, XOR3) if len(parts) == 3 else p.op("xor.b32", *parts)
            if signed:
                third = p.both(parity, p.turn("g", -1) if tile else "g", 0x55555555, XOR_AND)
            else:
                third = p.op("and.b32", parity, 0x55555555)
            chosen = [p.both(part, bit, 0x33333333, SELECT) for part, bit in ((word, third), (low, p.turn(third, -2)))]
        for half, index in enumerate(chosen):
            p.levels(index, "g", 3 - 2 * half - tile)
    return p


def scalar_two() -> Program:
    """Today's 2 bits: levels of one high byte."""
    p = Program()
    for word in ("w0", p.op("shr.u32", "w0", 2)):
        p.high_bytes(p.op("and.b32", word, 0x33333333), 0)
    return p


def scalar_three() -> Program:
    """Today's 3 bits, with the nibbles in this order."""
    p = Program()
    for tile, word in enumerate(("w0", "w1")):
        for half in range(2):
            part = p.op("shr.u32", word, 2) if half else word
            p.levels(p.op("and.b32", part, 0x33333333), "g", 3 - 2 * half - tile)
    return p


PROGRAMS = {
    "2: scalar": scalar_two(),
    "2: 4 states": two(3),
    "2: 8 states": two(3, 5),
    "2: 8 states, 4 taps": two(2, 3, 4, 5),
    "2: signed levels": signed_two(),
    "3: scalar": scalar_three(),
    "3: neighbour's bit": three((0,), signed=False),
    "3: crumbs' parity": three((0, 1, 3), signed=False),
    "3: parity": three((0, 1, 2), signed=True),
}


def counted(program: Program, arch: int = 90) -> Counter[str]:
    """Opcodes of the machine code, without loads, stores and what begins and ends a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "unpack.ptx", Path(folder) / "unpack.cubin"
        source.write_text(HEAD + "\n".join(program.lines) + "\nret; }\n", encoding="utf-8")
        subprocess.run([TOOLS / "ptxas", f"-arch=sm_{arch}", source, "-o", binary], check=True)
        text = subprocess.run([TOOLS / "cuobjdump", "-sass", binary], capture_output=True, text=True, check=True).stdout
    opcodes = Counter(re.findall(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", text.partition("EXIT")[0]))
    return Counter({name: n for name, n in opcodes.items() if name not in ("LDG", "STG", "LDC", "ULDC", "NOP", "S2R")})


if __name__ == "__main__":
    for name, program in PROGRAMS.items():
        opcodes = counted(program)
        codes = 16 if name.startswith("2") else 32
        print(f"{name}: {opcodes.total()} for {codes} codes, {opcodes.total() / codes:.2f} a code, {dict(opcodes)}")
