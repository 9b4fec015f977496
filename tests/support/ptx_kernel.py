"""A compiled kernel executed on the CPU, an instruction at a time: one program, all of whose threads take the same
branches. Of PTX it knows what the kernels tested so consist of.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tests.support.ptx import (
    LANE,
    LANES,
    WORD,
    Registers,
    bits,
    floats,
    halves,
    load,
    multiply_add,
    store,
    value_of,
    words,
)

SHARED_BYTES = 1 << 16
NUMBER = re.compile(r"-?(0[xXfF])?[0-9a-fA-F]+U?")
ACCESS = re.compile(r"(ld|st)\.(global|shared)(?:::cta)?(?:\.v\d)?\.[bu](\d+)")
HALVES = {"mov.b32": 16, "mov.b64": 32}
"""Bits of the registers that these put together, or take apart."""
MATRICES = re.compile(r"ldmatrix\.sync\.aligned\.m8n8\.x\d\.shared\.b16")
Values = list[np.ndarray]
Instruction = Callable[[Values], np.ndarray]


def signed(x: np.ndarray, size: int = 32) -> np.ndarray:
    """Registers' low bits as the integers that they stand for."""
    return (x & (1 << size) - 1 ^ 1 << size - 1) - (1 << size - 1)


def half(x: np.ndarray) -> np.ndarray:
    """float16 in the low halves of registers."""
    return halves(x)[..., 0]


def _flag(x: np.ndarray) -> np.ndarray:
    return x.astype(np.int64)


def _compare(
    test: Callable[[np.ndarray, np.ndarray], np.ndarray], read: Callable[[np.ndarray], np.ndarray]
) -> Instruction:
    return lambda x: _flag(test(read(x[0]), read(x[1])))


def _unsigned_shift(x: Values) -> np.ndarray:
    return (x[0].view(np.uint64) >> x[1].view(np.uint64)).view(np.int64)


def _of_floats(function: Callable[..., np.ndarray]) -> Instruction:
    return lambda x: bits(function(*map(floats, x)).astype(np.float32))


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) * b + c  # rounded twice at worst, in fp64 and in fp32


def _ordered(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return ~(np.isnan(a) | np.isnan(b))


INSTRUCTIONS: dict[str, Instruction] = {
    "mad.lo.s32": lambda x: x[0] * x[1] + x[2],
    "mul.lo.s32": lambda x: x[0] * x[1],
    "sub.s32": lambda x: x[0] - x[1],
    "neg.s32": lambda x: -x[0],
    "div.s32": lambda x: signed(x[0]) // signed(x[1]),  # of numbers that are not negative
    "min.u32": lambda x: np.minimum(x[0], x[1]),
    "or.b32": lambda x: x[0] | x[1],
    "shr.s32": lambda x: signed(x[0]) >> x[1],
    "bfe.u32": lambda x: x[0] >> x[1] & (1 << x[2]) - 1,
    "bfe.s32": lambda x: signed(x[0] >> x[1], int(x[2].flat[0])),
    "selp.b32": lambda x: np.where(x[2] != 0, x[0], x[1]),
    "selp.f32": lambda x: np.where(x[2] != 0, x[0], x[1]),
    "selp.b16": lambda x: np.where(x[2] != 0, x[0], x[1]) & 0xFFFF,
    "mov.pred": lambda x: _flag(x[0] != 0),
    "not.pred": lambda x: 1 - x[0],
    "and.pred": lambda x: x[0] & x[1],
    "setp.eq.b32": _compare(np.equal, np.asarray),
    "setp.ne.b32": _compare(np.not_equal, np.asarray),
    "setp.ne.b16": lambda x: _flag(x[0] != x[1] & 0xFFFF),
    "setp.lt.u32": _compare(np.less, np.asarray),
    "setp.lt.u64": _compare(np.less, np.asarray),
    "setp.lt.s32": _compare(np.less, signed),
    "setp.gt.u32": _compare(np.greater, np.asarray),
    "setp.gt.s32": _compare(np.greater, signed),
    "setp.ge.s32": _compare(np.greater_equal, signed),
    "setp.eq.f32": _compare(np.equal, floats),
    "setp.ne.f32": _compare(lambda a, b: (a != b) & _ordered(a, b), floats),
    "setp.lt.f32": _compare(np.less, floats),
    "setp.gt.f32": _compare(np.greater, floats),
    "setp.num.f32": _compare(_ordered, floats),
    "setp.nan.f32": _compare(lambda a, b: ~_ordered(a, b), floats),
    "setp.lt.f16": _compare(np.less, half),
    "setp.ne.f16": _compare(lambda a, b: (a != b) & _ordered(a, b), half),
    "mul.wide.u16": lambda x: (x[0] & 0xFFFF) * (x[1] & 0xFFFF),
    "cvt.u16.u32": lambda x: x[0] & 0xFFFF,
    "cvt.u32.u16": lambda x: x[0],
    "cvt.s32.s8": lambda x: signed(x[0], 8),
    "cvt.rn.f32.s32": lambda x: bits(signed(x[0]).astype(np.float32)),
    "cvt.f32.f16": lambda x: bits(half(x[0]).astype(np.float32)),
    "cvt.rn.f16.f32": lambda x: bits(floats(x[0]).astype(np.float16)),
    "mul.f16": lambda x: bits(half(x[0]) * half(x[1])),
    "mul.f16x2": lambda x: words(halves(x[0]) * halves(x[1])),
    "abs.f16": lambda x: x[0] & 0x7FFF,
    "abs.f16x2": lambda x: x[0] & 0x7FFF7FFF,
    "neg.f32": lambda x: x[0] ^ 0x80000000,
    "abs.f32": lambda x: x[0] & 0x7FFFFFFF,
    "add.f32": _of_floats(np.add),
    "sub.f32": _of_floats(np.subtract),
    "mul.f32": _of_floats(np.multiply),
    "fma.rn.f32": _of_floats(_fused),
    "max.f32": _of_floats(np.fmax),
    "min.f32": _of_floats(np.fmin),
    "div.full.f32": _of_floats(np.divide),
    "sqrt.approx.ftz.f32": _of_floats(np.sqrt),
    "rsqrt.approx.ftz.f32": _of_floats(lambda x: 1 / np.sqrt(x.astype(np.float64))),
    "and.b16": lambda x: x[0] & x[1],
    "or.b16": lambda x: x[0] | x[1],
    "shl.b16": lambda x: x[0] << x[1] & 0xFFFF,
    "shr.u16": lambda x: x[0] >> x[1],
    "mov.b16": lambda x: x[0],
    "redux.sync.add.s32": lambda x: np.zeros_like(x[0]) + signed(x[0]).sum(1, keepdims=True),
    "shfl.sync.bfly.b32": lambda x: x[0][:, LANE ^ int(x[1][0, 0])],
    "shfl.sync.up.b32": lambda x: x[0][:, np.where(LANE < (by := int(x[1][0, 0])), LANE, LANE - by)],
    "shfl.sync.idx.b32": lambda x: np.take_along_axis(x[0], x[1], 1),
    "cvt.u32.u64": lambda x: x[0],
}
WIDE: dict[str, Instruction] = {
    "cvt.u64.u32": lambda x: x[0],
    "cvt.s64.s32": lambda x: signed(x[0]),
    "mov.b64": lambda x: x[0],
    "selp.b64": lambda x: np.where(x[2] != 0, x[0], x[1]),
    "bfe.u64": lambda x: _unsigned_shift(x) & (1 << x[2]) - 1,
    "shr.u64": _unsigned_shift,
    "or.b64": lambda x: x[0] | x[1],
    "mad.wide.u32": lambda x: x[0] * x[1] + x[2],
    "mad.wide.s32": lambda x: signed(x[0]) * signed(x[1]) + x[2],
    "mul.wide.u32": lambda x: x[0] * x[1],
    "mul.wide.s32": lambda x: signed(x[0]) * signed(x[1]),
    "mad.lo.s64": lambda x: x[0] * x[1] + x[2],
    "mul.lo.s64": lambda x: x[0] * x[1],
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
    """Run a kernel's only program.

    Args:
        text: Its PTX.
        arguments: Its first arguments: integers, and pointers to the CPU's memory.
        threads: Of the program, a multiple of 32.
    """
    like = np.zeros((threads // LANES, LANES), np.int64)  # of a register: warps, lanes
    registers: Registers = {"%tid.x": like + np.arange(threads).reshape(-1, LANES), "global_smem": like}
    registers |= {f"%ctaid.{axis}": like for axis in "xyz"} | {f"%nctaid.{axis}": like + 1 for axis in "xyz"}
    registers["%lanemask_lt"] = like + (1 << LANE) - 1
    shared = np.zeros(SHARED_BYTES, np.uint8)
    starts = {"global": 0, "shared": shared.ctypes.data}

    def read(name: str) -> np.ndarray:
        if name in registers:
            return registers[name]
        if name.startswith("%"):  # which nothing was written to, and nothing should depend on
            return like + 0x7FFF
        if name.startswith(("0f", "0F")):
            return like + int(name[2:], 16)
        return like + int(name.removesuffix("U"), 0)

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
        if operation in ("ret", "bra", "bra.uni"):
            assert active.all() or not active.any(), f"threads part at {line}"
            if operation == "ret" and active.all():
                return
            at = labels[operands[0]] if active.all() else at
        elif operation == "bar.sync":
            pass
        elif operation.startswith("ld.param"):
            registers[operands[0]] = like + arguments[int(operands[1].rpartition("_")[2].rstrip("]"))]
        elif found := ACCESS.fullmatch(operation):
            is_load, space, size = found[1] == "ld", found[2], int(found[3]) // 8
            start = address(operands[1 if is_load else 0])
            for i, name in enumerate(vectors[0 if is_load else 1]):
                where = start + size * i
                assert space == "global" or (where[active] <= SHARED_BYTES - size).all()
                where = (starts[space] + where).ravel()
                if is_load:
                    old = registers.get(name, like)
                    registers[name] = load(where, size, active.ravel(), old.ravel()).reshape(like.shape)
                else:
                    store(where, (read(name) & (1 << 8 * size) - 1).ravel(), size, active.ravel())
        elif MATRICES.fullmatch(operation):  # lanes 8 i to 8 i + 7 say where the rows of the ith are
            rows, held = address(operands[1]) // 4, shared.view(np.uint32).astype(np.int64)
            for i, name in enumerate(vectors[0]):
                registers[name] = held[rows[:, 8 * i + LANE // 4] + LANE % 4]
        elif operation.startswith("mma"):
            a, (b,), c = ([read(name) for name in vector] for vector in vectors[1:])
            warps = [multiply_add([x[w] for x in a], b[w], [x[w] for x in c]) for w in range(len(like))]
            registers |= dict(zip(vectors[0], np.stack(warps, 1), strict=True))
        elif operation in HALVES and len(vectors[0]) == 2:
            whole, size = read(operands[1]), HALVES[operation]
            registers |= {vectors[0][0]: whole & (1 << size) - 1, vectors[0][1]: whole >> size & (1 << size) - 1}
        elif operation in HALVES and len(vectors[1]) == 2:
            size = HALVES[operation]
            low, high = (read(name) & (1 << size) - 1 for name in vectors[1])
            registers[operands[0]] = low | high << size
        else:
            names = [name for name in operands[1:] if name in registers or NUMBER.fullmatch(name)]
            x = [read(name) for name in names]
            if operation in WIDE:
                new = WIDE[operation](x)
            else:
                x = [value if name.startswith("%rd") else value & WORD for name, value in zip(names, x, strict=True)]
                known = operation in INSTRUCTIONS
                new = (INSTRUCTIONS[operation](x) if known else value_of(operation, names, x)) & WORD
            registers[operands[0]] = np.where(active, new, registers.get(operands[0], like))
