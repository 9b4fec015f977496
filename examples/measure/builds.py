"""Every kernel compiled for any card, with the constants and options its launch would choose for a preset and head_dim.

No GPU needed: `sass.py` reads what the compiler made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from sass import Compiled, build, build_split, plan, target_of
from tq_kernels.codec.dequantise import dequantise_blocks
from tq_kernels.codec.encode import encode_blocks
from tq_kernels.codec.launch import dequantise_config, encode_config
from tq_kernels.codec.quantise import CORRECTIONS, LEVELS
from tq_kernels.decode.append import rotate_and_append
from tq_kernels.decode.preallocated import append_and_encode
from tq_kernels.decode.reduce import reduce_splits
from tq_kernels.decode.rotate import rotate_query
from tq_kernels.prefix.attention import prefix_attention
from tq_kernels.prefix.attention_fragments import prefix_attention_fragments
from tq_kernels.prefix.dense import dense_attention
from tq_kernels.prefix.dense_launch import dense_config
from tq_kernels.prefix.launch import prefix_config, prefix_constants

Arch = int | str
Bits = tuple[int, int]
MATRIX = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}


def padded(dim: int, least: int = 16) -> int:
    """A power of two."""
    return max(least, triton.next_power_of_2(dim))


def build_encode(arch: Arch, bits: Bits, *, is_value: bool = False, dim: int = 128, dtype: str = "fp16") -> Compiled:
    """`encode_blocks` of keys or of values."""
    on, own = target_of(arch), bits[is_value]
    config = encode_config(padded(dim), dim, bits, 4 if dtype == "fp32" else 2, on.capability)
    correction = "projection" if is_value else "norm"
    constants = (
        *(dim, dim, padded(dim), own, LEVELS[own], CORRECTIONS[correction], is_value, MATRIX[dtype], config.k_step),
        *("tf32x3" if on.asm else "ieee", on.asm, on.dependent_launch, config.stages),
    )
    types = [f"*{dtype}", "*i32", "*fp16", None if is_value else "*fp16", "*fp32", "*fp16"]
    options = {"maxnreg": config.registers} if config.registers else {}
    return build(encode_blocks, [*types, *["i32"] * 8], constants, arch, num_warps=config.warps, **options)


def build_dequantise(
    arch: Arch, bits: Bits, *, is_value: bool = False, dim: int = 128, dtype: str = "fp16"
) -> Compiled:
    """`dequantise_blocks` of keys or of values."""
    on, own = target_of(arch), bits[is_value]
    config = dequantise_config(dim, own, on.capability)
    tile = padded(dim, 16 * config.chunks)
    constants = (
        *(dim, dim, tile, own, is_value, config.chunks, min(config.columns, tile)),
        *(config.resident, on.asm),
    )
    types = ["*i32", "*fp16", None if is_value else "*fp16", "*fp32", "*fp16", f"*{dtype}", *["i32"] * 8]
    return build(dequantise_blocks, types, constants, arch, num_warps=config.warps)


def build_prefix(arch: Arch, bits: Bits, *, dim: int = 128, value_dim: int | None = None, **options: Any) -> Compiled:
    """The kernel of many queries over packed blocks; `options` as `prefix_constants` takes them."""
    on, dims = target_of(arch), (dim, value_dim or dim)
    config = prefix_config(*dims, *bits, on)
    flags = dict(causal=True, mask=0, has_softcap=False, has_aux=False, split=False) | options
    constants = prefix_constants(*dims, *bits, has_mean=True, config=config, on=on, **flags)
    kernel = prefix_attention_fragments if on.fragments else prefix_attention
    numbers = len(kernel.arg_names) - len(constants) - 21
    types = ["*fp16", "*i32", "*i32", "*i32", *["*fp16"] * 11, "*i1", "*fp32", "*fp16", "*fp32", "*fp32", "*fp16"]
    types += ["i32"] * (numbers - 3) + ["fp32", "fp32", "i32"]
    limit = {"maxnreg": config.registers} if config.registers else {}
    return build(kernel, types, constants, arch, num_warps=config.warps, **limit)


def build_dense(
    arch: Arch, *, dim: int = 128, rows: int = 8192, mask: int = 0, softcap: bool = False, split: bool = False
) -> Compiled:
    """`dense_attention` of bf16 states, strides as models have them, with learned sinks."""
    tile = padded(dim)
    config = dense_config(tile, rows, mask == 2, target_of(arch))
    flags = (mask == 0, mask, softcap, True, split)
    constants = (dim, dim, tile, tile, *flags, tl.bfloat16, config.block_rows, config.block_tokens, config.stages)
    types = [*["*bf16"] * 3, "*u8", "*i32", "*bf16", "*bf16", "*fp32", "*fp32"]
    types += [*["i32"] * 20, "fp32", "fp32", "i32"]
    return build(dense_attention, types, constants, arch, num_warps=config.warps)


def build_rotate(arch: Arch, bits: Bits, *, dim: int = 128) -> Compiled:
    """`rotate_query`."""
    types = ["*fp16", "*fp16", "*fp16", "*fp32", *["i32"] * 8]
    return build(rotate_query, types, plan(arch, *bits, dim=dim).rotate_constants, arch, num_warps=2)


def build_append(arch: Arch, bits: Bits, *, dim: int = 128) -> Compiled:
    """`rotate_and_append`."""
    constants = (dim, padded(dim, 1), *plan(arch, *bits, dim=dim).rotate_constants)
    return build(rotate_and_append, [*["*fp16"] * 7, "*fp32", *["i32"] * 14], constants, arch, num_warps=2)


def build_preallocated_append(arch: Arch, bits: Bits, *, dim: int = 128, dtype: str = "bf16") -> Compiled:
    """`append_and_encode`."""
    on, tile = target_of(arch), padded(dim)
    config = encode_config(tile, dim, bits, 4 if dtype == "fp32" else 2, on.capability)
    halves = [
        (dim, dim, tile, own, LEVELS[own], CORRECTIONS[correction], config.k_step)
        for own, correction in zip(bits, ("norm", "projection"), strict=True)
    ]
    constants = (*halves[0], *halves[1], True, MATRIX[dtype], "tf32x3" if on.asm else "ieee", on.asm)
    states = [f"*{dtype}"]
    types = [*2 * states, "*i32", "*i32", "*i64", *4 * states, "*i32", "*i32", "*fp16", "*fp16", "*fp32", "*fp32"]
    types += ["*fp16", "*fp16", *["i32"] * 11]
    options = {"debug": True, "sanitize_overflow": False}
    return build(append_and_encode, types, constants, arch, num_warps=config.warps, **options)


def build_reduce(arch: Arch, bits: Bits, *, dim: int = 128) -> Compiled:
    """`reduce_splits`."""
    p = plan(arch, *bits, dim=dim)
    types = ["*fp32", "*i32", "*i32", "*i32", "*fp16", "*fp16", "*fp32", "*fp16", *["i32"] * 13]
    return build(reduce_splits, types, p.reduce_constants, arch, num_warps=p.reduce_warps)


BUILDERS: dict[str, Callable[[Arch, Bits, int], Compiled]] = {
    "decode": lambda arch, bits, dim: build_split(arch, key_bits=bits[0], value_bits=bits[1], dim=dim),
    "append": lambda arch, bits, dim: build_append(arch, bits, dim=dim),
    "reduce": lambda arch, bits, dim: build_reduce(arch, bits, dim=dim),
    "encode keys": lambda arch, bits, dim: build_encode(arch, bits, dim=dim),
    "encode values": lambda arch, bits, dim: build_encode(arch, bits, dim=dim, is_value=True),
    "dequantise keys": lambda arch, bits, dim: build_dequantise(arch, bits, dim=dim),
    "dequantise values": lambda arch, bits, dim: build_dequantise(arch, bits, dim=dim, is_value=True),
    "prefix": lambda arch, bits, dim: build_prefix(arch, bits, dim=dim),
}
"""Kernels by name; on targets and dimensions that have no kernel of a name, it is not launched (`launched`)."""


def launched(kernel: str, arch: Arch, dim: int) -> bool:
    """Whether a card of this kind launches the kernel: it has no prefix kernel for wide heads without the registers or
    the shared memory for them."""
    on = target_of(arch)
    wide = on.fragments or (on.asm and on.shared_bytes > 160 * 1024)
    return kernel != "prefix" or dim <= 128 or wide
