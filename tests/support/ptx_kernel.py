"""A compiled kernel executed on the CPU, an instruction at a time: one program, all of whose threads take the same
branches. Of PTX it knows what the kernels tested so consist of.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tests.support.ptx import LANE, LANES, WORD, Registers, load, store, value_of

SHARED_WORDS = 1 << 16
NUMBER = re.compile(r"-?(0x)?[0-9a-fA-F]+U?")
Values = list[np.ndarray]


def signed(x: np.ndarray) -> np.ndarray:
    """32-bit registers as the integers that they stand for."""
    return (x ^ 0x80000000) - 0x80000000


def _flag(x: np.ndarray) -> np.ndarray:
    return x.astype(np.int64)


INSTRUCTIONS: dict[str, Callable[[Values], np.ndarray]] = {
    "mad.lo.s32": lambda x: x[0] * x[1] + x[2],
    "mul.lo.s32": lambda x: x[0] * x[1],
    "sub.s32": lambda x: x[0] - x[1],
    "neg.s32": lambda x: -x[0],
    "or.b32": lambda x: x[0] | x[1],
    "bfe.u32": lambda x: x[0] >> x[1] & (1 << x[2]) - 1,
    "selp.b32": lambda x: np.where(x[2] != 0, x[0], x[1]),
    "selp.b16": lambda x: np.where(x[2] != 0, x[0], x[1]) & 0xFFFF,
    "mov.pred": lambda x: _flag(x[0] != 0),
    "not.pred": lambda x: 1 - x[0],
    "and.pred": lambda x: x[0] & x[1],
    "setp.eq.b32": lambda x: _flag(x[0] == x[1]),
    "setp.ne.b32": lambda x: _flag(x[0] != x[1]),
    "setp.ne.b16": lambda x: _flag(x[0] != x[1] & 0xFFFF),
    "setp.lt.u32": lambda x: _flag(x[0] < x[1]),
    "cvt.u16.u32": lambda x: x[0] & 0xFFFF,
    "cvt.u32.u16": lambda x: x[0],
    "and.b16": lambda x: x[0] & x[1],
    "or.b16": lambda x: x[0] | x[1],
    "shl.b16": lambda x: x[0] << x[1] & 0xFFFF,
    "shr.u16": lambda x: x[0] >> x[1],
    "redux.sync.add.s32": lambda x: np.zeros_like(x[0]) + signed(x[0]).sum(1, keepdims=True),
    "shfl.sync.bfly.b32": lambda x: x[0][:, LANE ^ int(x[1][0, 0])],
    "cvt.u32.u64": lambda x: x[0],
}
WIDE: dict[str, Callable[[Values], np.ndarray]] = {
    "cvt.u64.u32": lambda x: x[0],
    "mad.wide.u32": lambda x: x[0] * x[1] + x[2],
    "mul.wide.u32": lambda x: x[0] * x[1],
    "add.s64": lambda x: x[0] + x[1],
    "shl.b64": lambda x: x[0] << x[1],
}
"""Instructions that write 64 bits."""


def statements(text: str) -> tuple[list[str], dict[str, int]]:
    """The instructions of a kernel's body, inline assembly among them, and where its labels are."""
    body, found, labels = re.sub(r"//[^\n]*", "", text[text.index("{\n") + 1 :]), [], {}
    for part in re.split(r"[;\n]", body):
        line = " ".join(part.split())
        if label := re.fullmatch(r"(\$\w+):", line):
            labels[label[1]] = len(found)
        line = line.removeprefix("{ ")
        if line and line not in "{}" and not line.startswith((".", "$")):
            found.append(line)
    return found, labels


def run_kernel(text: str, arguments: list[int], threads: int) -> None:
    """Run one program of a kernel.

    Args:
        text: Its PTX.
        arguments: Its first arguments, pointers to the CPU's memory.
        threads: Of the program, a multiple of 32.
    """
    like = np.zeros((threads // LANES, LANES), np.int64)  # of a register: warps, lanes
    registers: Registers = {"%tid.x": like + np.arange(threads).reshape(-1, LANES), "global_smem": like}
    registers["%lanemask_lt"] = like + (1 << LANE) - 1
    shared = np.zeros(SHARED_WORDS, np.int64)

    def read(name: str) -> np.ndarray:
        return registers[name] if name in registers else like + (int(name.removesuffix("U"), 0) & WORD)

    def address(operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[] ").replace(" ", "").partition("+")
        return registers[base] + int(offset or 0)

    program, labels = statements(text)
    at = 0
    while True:
        line, at, active = program[at], at + 1, like == 0
        if line.startswith("@"):
            guard, line = line.split(maxsplit=1)
            active = (registers[guard.lstrip("@!")] != 0) != guard.startswith("@!")
        operation, _, rest = line.partition(" ")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", rest)
        vectors = [re.findall(r"[^\s,{}]+", operand) for operand in operands]
        if operation == "ret":
            return
        if operation == "bra":
            assert active.all() or not active.any(), f"threads part at {line}"
            at = labels[operands[0]] if active.all() else at
        elif operation == "bar.sync":
            pass
        elif operation == "ld.param.b64":
            registers[operands[0]] = like + arguments[int(operands[1].rpartition("_")[2].rstrip("]"))]
        elif operation in ("ld.global.b32", "ld.shared.b32", "ld.shared.v4.b32"):
            for i, name in enumerate(vectors[0]):
                where, old = address(operands[1]) + 4 * i, registers.get(name, like)
                if operation == "ld.global.b32":
                    new = load(where.ravel(), 4, active.ravel(), old.ravel()).reshape(like.shape)
                else:
                    new = np.where(active, shared[np.where(active, where, 0) // 4], old)
                registers[name] = new
        elif operation in ("st.global.b32", "st.shared.b32", "st.shared.v4.b32"):
            for i, name in enumerate(vectors[1]):
                where = address(operands[0]) + 4 * i
                if operation == "st.global.b32":
                    store(where.ravel(), read(name).ravel(), 4, active.ravel())
                else:
                    shared[where[active] // 4] = read(name)[active]
        elif operation == "ldmatrix.sync.aligned.m8n8.x1.shared.b16":
            rows = address(operands[1])[:, LANE // 4]
            registers[vectors[0][0]] = shared[rows // 4 + LANE % 4]
        else:
            names = [name for name in operands[1:] if name in registers or NUMBER.fullmatch(name)]
            x = [read(name) for name in names]
            if operation in WIDE:
                new = WIDE[operation](x)
            elif operation in INSTRUCTIONS:
                new = INSTRUCTIONS[operation](x) & WORD
            else:
                new = value_of(operation, names, x) & WORD
            registers[operands[0]] = np.where(active, new, registers.get(operands[0], like))
