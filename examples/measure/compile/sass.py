"""What a compiler makes of the kernels for any card, counted without one: registers, stack, shared memory, and the
instructions of an inner loop by the pipe they run on.

Triton compiles for any target, and its wheel ships NVIDIA's disassembler.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from tq_kernels.common.device import Target
from tq_kernels.common.launcher import ALWAYS, Strides
from tq_kernels.common.schedule import DecodeNumbers, DecodeTensors, Mask
from tq_kernels.decode.plan import Plan, plan_decode
from tq_kernels.decode.split import decode_split
from tq_kernels.turing.split import decode_split_fragments
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tq_hf import TurboQuantConfig

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED: dict[int | str, int] = {75: 64, 80: 164, 86: 100, 89: 100, 90: 228, 100: 228, "gfx942": 64, "gfx1100": 64}
"""KiB of shared memory of a multiprocessor, by compute capability or AMD architecture."""
PIPES = {
    "ALU": "PRMT LOP3 SHF IADD3 IADD ISETP ICMP SEL FSEL FSETP FMNMX IMNMX LEA LOP PLOP3 P2R R2P IABS BFE VOTE "
    "VABSDIFF FCHK VIMNMX VIMNMX3 VIADD VIADDMNMX FMNMX3 SGXT BMSK POPC FLO",
    "FMA": "FFMA FMUL FADD HFMA2 HMUL2 HADD2 HMNMX2 FFMA2 FADD2 FMUL2",
    "heavy": "IMAD IMUL IDP MOV",
    "tensor": "HMMA IMMA HGMMA QGMMA UTCHMMA",
    "memory": "LDG STG LDS STS LDSM LDGSTS LD ST LDL STL SHFL MOVM ATOM ATOMG ATOMS RED STSM LDC",
    "special": "MUFU F2F I2F F2I I2FP F2FP FRND I2I",
}
"""Opcodes by the pipe of a multiprocessor they run on; IMAD on half of the FMA pipe since sm_80. Others are "other"."""
Compiled = Any
"""Result of `triton.compile`."""
PIPE_OF = {opcode: pipe for pipe, names in PIPES.items() for opcode in names.split()}


def capability(arch: int | str) -> tuple[int, int]:
    return divmod(arch, 10) if isinstance(arch, int) else (0, 0)


def target_of(arch: int | str) -> Target:
    """A GPU of this architecture, as large as an H200."""
    nvidia = isinstance(arch, int)
    return Target(132, SHARED[arch] * 1024, capability(arch), small_levels=nvidia, amd=not nvidia)


def plan(
    arch: int | str,
    key_bits: int,
    value_bits: int,
    *,
    dim: int = 128,
    value_dim: int | None = None,
    queries: int = 1,
    mask_rows: int = 0,
    batch: int = 1,
    heads: tuple[int, int] = (32, 8),
) -> Plan:
    layout = TurboQuantConfig(key_bits=key_bits, value_bits=value_bits).layout(dim, value_dim)
    return plan_decode(batch, *heads, queries, layout, 256, 260, True, mask_rows, False, False, target_of(arch))


def leaves(
    types: Any, path: tuple[int, ...] = (), specialised: bool = False
) -> Iterator[tuple[tuple[int, ...], Any, bool]]:
    """Types of arguments and of members of tuples, where they are, and whether they are members of `Strides`."""
    for i, kind in enumerate(types):
        if isinstance(kind, tuple):
            yield from leaves(kind, (*path, i), isinstance(kind, Strides))
        else:
            yield (*path, i), kind, specialised


def present(kind: Any) -> Any:
    """A type as Triton spells it, of what may be absent."""
    if isinstance(kind, tuple):
        parts = map(present, kind)
        return type(kind)(*parts) if hasattr(kind, "_fields") else tuple(parts)
    return kind or "constexpr"


def build(kernel: Any, types: list[Any], constants: tuple[Any, ...], arch: int | str, **options: Any) -> Any:
    """Compile `kernel` with pointers, and specialised numbers (strides), that are multiples of 16, as launches find
    them. A type of `None` is that of an argument that is `None`; arguments in tuples have their types in such."""
    names = kernel.arg_names
    runtime = len(names) - len(constants)
    assert len(types) == runtime
    found = list(leaves(types))
    source = ASTSource(
        fn=kernel,
        signature=dict(zip(names, [*map(present, types), *["constexpr"] * len(constants)], strict=True)),
        constexprs={(i + runtime,): value for i, value in enumerate(constants)}
        | {path: None for path, kind, _ in found if kind is None},
        attrs={
            path: [["tt.divisibility", 16]]
            for path, kind, specialised in found
            if kind is not None
            and (kind.startswith("*") or specialised or not path[1:] and names[path[0]] not in kernel.do_not_specialize)
            and not kernel.params[path[0]].do_not_specialize_on_alignment
        },
    )
    target = (
        GPUTarget("cuda", arch, 32)
        if isinstance(arch, int)
        else GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    )
    return triton.compile(source, target=target, options=ALWAYS | options)


def mask_types(kind: int) -> Mask:
    """Types of a mask of this kind, 0 for none."""
    return Mask("*u8", *["i32"] * 3) if kind else Mask()


def numbers_of_step(pages: bool = False) -> DecodeNumbers:
    """Types of the numbers of a step."""
    absent = "blocks_h ring sinks" if pages else "count key_t key_h value_t value_h width"
    types = dict.fromkeys(DecodeNumbers._fields, "i32") | {"scaling_log2": "fp32", "cap_log2": "fp32"}
    return DecodeNumbers(**types | dict.fromkeys(absent.split()))


def build_split(arch: int | str, dtype: str = "*fp16", **shape: Any) -> Compiled:
    p = plan(arch, **shape)
    limit = {"maxnreg": p.config.registers} if p.config.registers else {}
    masked = mask_types(p.split.MASK)
    tensors = DecodeTensors("*fp32", "*i32", "*i32", dtype, "*i32", "*i32", *masked, *[None] * 5)
    return build(
        decode_split_fragments if target_of(arch).fragments else decode_split,
        [tensors, numbers_of_step()],
        (p.split,),
        arch,
        num_warps=p.config.warps,
        num_stages=p.config.stages,
        **limit,
    )


def disassemble(compiled: Compiled, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(compiled.asm["cubin"])
    try:
        result = subprocess.run([TOOLS / "cuobjdump", option, file.name], capture_output=True, text=True, check=True)
    finally:
        os.unlink(file.name)
    return result.stdout + result.stderr


class Resources(NamedTuple):
    """Resources of a thread or a program. `stack` has spilled registers. AMD: registers are vector registers."""

    registers: int
    stack: int
    shared: int


def resources(compiled: Compiled) -> Resources:
    """Read from the cubin, or from AMD's assembly."""
    if "cubin" not in compiled.asm:
        text = compiled.asm["amdgcn"]
        numbers = [int(re.search(rf"\.{key}: +(\d+)", text)[1]) for key in ("vgpr_count", "private_segment_fixed_size")]  # type: ignore[index]
        return Resources(*numbers, compiled.metadata.shared)
    usage = disassemble(compiled, "-res-usage")
    registers, stack = (max(map(int, re.findall(rf"{key}:(\d+)", usage))) for key in ("REG", "STACK"))
    return Resources(registers, stack, compiled.metadata.shared)


def code(compiled: Compiled) -> list[tuple[int, str, int | None]]:
    """Every instruction: its address, itself without guard, and where it branches to if it does."""
    if "cubin" in compiled.asm:
        pattern = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?\S+\s+)?(.*?);")
        lines = [match for line in disassemble(compiled, "-sass").splitlines() if (match := pattern.match(line))]
        jumps = [re.search(r"^BRA\S*\s.*?0x([0-9a-f]+)", line[2]) for line in lines]
        return [
            (int(line[1], 16), line[2], int(jump[1], 16) if jump else None)
            for line, jump in zip(lines, jumps, strict=True)
        ]
    found: list[tuple[int, str, str | None]] = []
    labels: dict[str, int] = {}
    for line in compiled.asm["amdgcn"].splitlines():
        if match := re.match(r"(\.LBB\w+):", line):
            labels[match[1]] = len(found)
        elif match := re.match(r"\t([a-z]\w+)(.*)", line):
            jump = re.search(r"\.LBB\w+", match[2]) if match[1].startswith(("s_cbranch", "s_branch")) else None
            found.append((len(found), match[1] + match[2], jump[0] if jump else None))
    return [(address, text, labels.get(label) if label else None) for address, text, label in found]


def pipe_of(opcode: str) -> str:
    """The pipe that an instruction runs on; of AMD's, vector instructions count as ALU, matrix products as tensor."""
    if not opcode.islower():
        return PIPE_OF.get(opcode.split(".")[0], "other")
    if opcode.startswith(("v_mfma", "v_wmma")):
        return "tensor"
    prefixes = {"v_": "ALU", "ds_": "memory", "global_": "memory", "buffer_": "memory", "scratch_": "memory"}
    return next((pipe for prefix, pipe in prefixes.items() if opcode.startswith(prefix)), "other")


def loops(compiled: Compiled) -> list[Counter[str]]:
    """Opcodes of every loop, from its target to its branch back."""
    instructions = code(compiled)
    found = []
    for address, _, target in instructions:
        if target is not None and target <= address:
            body = [text for at, text, _ in instructions if target <= at <= address]
            found.append(Counter(text.split()[0].split(".")[0] for text in body))
    return found


def inner_loop(compiled: Compiled) -> Counter[str]:
    """Opcodes of the smallest loop with products and exponentials that loads by itself: that over a share's blocks."""
    amd = "cubin" not in compiled.asm
    exponential, store = ("v_exp_f32_e32", "global_store_dword") if amd else ("MUFU", "STG")

    def products(loop: Counter[str]) -> int:
        return sum(count for opcode, count in loop.items() if pipe_of(opcode) == "tensor")

    packed = [x for x in loops(compiled) if products(x) > 20 and x[exponential] > 4 and x[store] == 0]
    return min(packed, key=Counter.total)


def elements_a_thread(compiled: Compiled, on: Plan, dim: int, fragments: bool) -> float:
    """Key and value elements that a thread takes in a turn of the inner loop."""
    return 2 * dim * (64 if fragments else 128) / (compiled.metadata.target.warp_size * on.config.warps)


def per_element(compiled: Compiled, on: Plan, dim: int, fragments: bool) -> dict[str, float]:
    """Instructions of the inner loop per element and thread: by pipe, and `total`."""
    loop = inner_loop(compiled)
    counts: Counter[str] = Counter()
    for opcode, count in loop.items():
        counts[pipe_of(opcode)] += count
    scale = 1 / elements_a_thread(compiled, on, dim, fragments)
    return {pipe: round(counts[pipe] * scale, 3) for pipe in (*PIPES, "other")} | {
        "total": round(loop.total() * scale, 3)
    }
