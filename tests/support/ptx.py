"""Inline PTX executed on the CPU, an instruction and a warp at a time.

Triton's interpreter does not run inline assembly; `run_inline_asm` makes it, so that kernels made of it are held to the
same fp64 attention as the others. What is not shown so, that Triton hands instructions the registers they are meant
for, the tests marked `cuda` show.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

LANES = 32
LANE = np.arange(LANES)
GROUP, MEMBER = LANE // 4, LANE % 4
"""Lane 4 g + t of matrix fragments."""
WORD = 0xFFFFFFFF
Registers = dict[str, np.ndarray]


def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """`prmt.b32` in its default mode: bit 3 of a nibble spreads the sign of the byte it selects."""
    result = np.zeros_like(a)
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = np.where(nibble & 4 > 0, b, a) >> 8 * (nibble & 3) & 0xFF
        result |= np.where(nibble & 8 > 0, (byte >> 7) * 0xFF, byte) << 8 * i
    return result


def logic(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """`lop3.b32`."""
    result = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            terms = [x if index >> (2 - place) & 1 else ~x for place, x in enumerate((a, b, c))]
            result |= terms[0] & terms[1] & terms[2]
    return result & WORD


def halves(register: np.ndarray) -> np.ndarray:
    """The two fp16 of 32-bit registers, `[..., 2]` float16."""
    return register.astype(np.uint32)[..., None].view(np.float16)


def words(pairs: np.ndarray) -> np.ndarray:
    """`[..., 2]` float16 -> 32-bit registers."""
    return np.ascontiguousarray(pairs).view(np.uint32)[..., 0].astype(np.int64)


def floats(register: np.ndarray) -> np.ndarray:
    return register.astype(np.uint32).view(np.float32)


def bits(x: np.ndarray) -> np.ndarray:
    """Registers of what a lane holds: 16, 32 or 64 bits, without sign."""
    unsigned = x.view(f"u{x.dtype.itemsize}").astype(np.uint64)
    return unsigned.astype(np.int64)


def matrix_of(register: np.ndarray) -> np.ndarray:
    """The fp16 matrix `[8, 8]`: lane 4 g + t holds columns 2 t and 2 t + 1 of row g."""
    return halves(register).reshape(8, 8)


def multiply_add(a: Sequence[np.ndarray], b: np.ndarray, c: Sequence[np.ndarray]) -> list[np.ndarray]:
    """`mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32`."""
    left = np.concatenate([matrix_of(x) for x in a])  # [16, 8]
    right = matrix_of(b).T  # [8, 8]
    product = left.astype(np.float32) @ right.astype(np.float32)
    return [
        bits((product[GROUP + 8 * (i // 2), 2 * MEMBER + i % 2] + floats(c[i])).astype(np.float32)) for i in range(4)
    ]


def transpose(source: np.ndarray) -> np.ndarray:
    """`movmatrix.sync.aligned.m8n8.trans.b16`."""
    matrix = matrix_of(source)
    return words(np.stack([matrix[2 * MEMBER, GROUP], matrix[2 * MEMBER + 1, GROUP]], -1))


def load(addresses: np.ndarray, size: int, active: np.ndarray, old: np.ndarray) -> np.ndarray:
    result = old.copy()
    for lane in np.flatnonzero(active):
        result[lane] = int.from_bytes(ctypes.string_at(int(addresses[lane]), size), "little")
    return result


def store(addresses: np.ndarray, values: np.ndarray, size: int, active: np.ndarray) -> None:
    for lane in np.flatnonzero(active):
        ctypes.memmove(int(addresses[lane]), int(values[lane]).to_bytes(size, "little"), size)


def pairs(register: np.ndarray) -> np.ndarray:
    """The two int16 of 32-bit registers, `[..., 2]`."""
    return register.astype(np.uint32)[..., None].view(np.int16)


def of_halves(operation: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What an instruction for two numbers of 16 bits writes."""
    if operation.startswith("add"):
        result = a + b
    elif operation == "min.s16x2.relu":
        result = np.maximum(np.minimum(a, b), 0)
    else:
        kind = np.float16 if "f16" in operation else np.uint16
        result = np.minimum(a.view(kind), b.view(kind))
    return np.ascontiguousarray(result).view(np.uint32)[..., 0].astype(np.int64)


def value_of(operation: str, names: list[str], x: list[np.ndarray]) -> np.ndarray:
    """What an instruction without memory or vectors writes."""
    match operation:
        case "mov.u32" | "mov.u16" | "mov.b32":
            return x[0]
        case "add.u32" | "add.s32":
            return x[0] + x[1]
        case "mad.lo.u32":
            return x[0] * x[1] + x[2]
        case "and.b32":
            return x[0] & x[1]
        case "shr.u32":
            return x[0] >> x[1]
        case "shl.b32":
            return x[0] << x[1]
        case "xor.b32":
            return x[0] ^ x[1]
        case "shf.l.wrap.b32":  # of the second operand, with the upper bits of the first
            return x[1] << x[2] | x[0] >> 32 - x[2]
        case "shf.r.wrap.b32":
            return x[1] << 32 - x[2] | x[0] >> x[2]
        case "prmt.b32":
            return permute(x[0], x[1], x[2])
        case "lop3.b32":
            return logic(x[0], x[1], x[2], int(names[3], 0))
        case "setp.ne.u32":
            return (x[0] != x[1]).astype(np.int64)
        case "set.lt.u32.f16x2":
            less = halves(x[0]) < halves(x[1])
            return less[..., 0] * 0xFFFF | less[..., 1] * 0xFFFF0000
        case "min.u16x2" | "v_pk_min_u16" | "min.f16x2" | "add.u16x2" | "add.s16x2" | "min.s16x2.relu":
            return of_halves(operation, *(pairs(register) for register in x))
        case "fma.rn.f16x2":
            a, b, c = (halves(register).astype(np.float64) for register in x)
            return words((a * b + c).astype(np.float16))
        case "dp4a.s32.s32" | "dp4a.u32.u32":
            kind = np.int8 if "s32" in operation else np.uint8
            a, b = (register.astype(np.uint32)[..., None].view(kind).astype(np.int64) for register in x[:2])
            return (a * b).sum(-1) + x[2]
        case "dp2a.lo.u32.u32" | "dp2a.hi.u32.u32":
            place = 0 if "lo" in operation else 16
            high = (x[0] >> 16) * (x[1] >> place + 8 & 0xFF)
            return (x[0] & 0xFFFF) * (x[1] >> place & 0xFF) + high + x[2]
        case "shfl.sync.bfly.b32":
            return x[0][LANE ^ x[1]]
        case "movmatrix.sync.aligned.m8n8.trans.b16":
            return transpose(x[0])
    raise AssertionError(f"{operation} is not known here")


def execute(asm: str, outputs: int, *inputs: np.ndarray) -> list[np.ndarray]:
    """Run `asm` on registers: int64 arrays without sign, of which lanes are the last dimension."""
    like = np.zeros_like(inputs[0])
    registers: Registers = {f"${outputs + i}": x for i, x in enumerate(inputs)}
    registers["%lanemask_lt"] = like + 0x7FFF

    def read(name: str) -> np.ndarray:
        return registers[name] if name in registers else like + int(name, 0)

    for statement in asm.split(";"):
        text = statement.strip().removeprefix("{").strip()
        if text in ("", "}") or text.startswith(".reg"):
            continue
        active = like == 0
        if text.startswith("@"):
            guard, text = text.split(maxsplit=1)
            active = registers[guard[1:]] != 0
        operation, rest = text.split(maxsplit=1)
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", rest)
        parts = [re.findall(r"[^\s,{}\[\]]+", operand) for operand in operands]
        if operation.startswith("ld.global"):
            size = {"16": 2, "u8": 1}.get(operation[-2:], 4)
            for i, name in enumerate(parts[0]):
                registers[name] = load(read(parts[1][0]) + size * i, size, active, registers[name])
        elif operation.startswith("st.global"):
            store(read(parts[0][0]), read(parts[1][0]), 2 if operation.endswith("16") else 4, active)
        elif operation.startswith("mma"):
            new = multiply_add([read(n) for n in parts[1]], read(parts[2][0]), [read(n) for n in parts[3]])
            registers.update(zip(parts[0], new, strict=True))
        elif operation == "mov.b32" and len(parts[1]) == 2:
            registers[parts[0][0]] = read(parts[1][0]) & 0xFFFF | (read(parts[1][1]) & 0xFFFF) << 16
        else:
            names = [part[0] for part in parts[1:]]
            registers[parts[0][0]] = value_of(operation, names, [read(name) for name in names]) & WORD
    return [registers[f"${i}"] for i in range(outputs)]


class _Results:
    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles

    def get_result(self, i: int) -> Any:
        return self.handles[i]


def run_inline_asm() -> None:
    """Make Triton's interpreter, switched on in this process, run inline assembly on one warp a program."""
    from triton.runtime import interpreter

    def create_inline_asm(
        self: Any, asm: str, constraints: str, values: list, types: list, pure: bool, pack: int
    ) -> Any:
        assert pack == 1
        found = execute(asm, len(types), *[bits(np.ascontiguousarray(v.data)) for v in values])
        handles = []
        for type_, register in zip(types, found, strict=True):
            numpy_type = np.dtype(interpreter._get_np_dtype(type_))
            unsigned = register.astype(f"u{numpy_type.itemsize}")
            handles.append(interpreter.TensorHandle(unsigned.view(numpy_type), type_.scalar))
        return _Results(handles)

    interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm
