"""Every kernel compiled for any card, with the constants and options its launch would choose for a preset and head_dim.

No GPU needed: `sass.py` reads what the compiler made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from tq_kernels.codec.balance import WARPS, PromptNumbers, prompt_constants, store_prompt
from tq_kernels.codec.dequantize import dequantize_blocks
from tq_kernels.codec.encode import NewStates, PagePlaces, PageShape, encode_blocks, encode_blocks_of_pages
from tq_kernels.codec.launch import dequantize_config, encode_shape
from tq_kernels.common.launcher import States, Strides
from tq_kernels.common.schedule import DecodeTensors
from tq_kernels.decode.append import AppendNumbers, PageWork, append_and_rotate, append_tails, append_to_pages
from tq_kernels.decode.launch import NO_PLACE
from tq_kernels.decode.plan import Plan, plan_decode
from tq_kernels.decode.reduce import OutStrides, ReduceShape, reduce_splits
from tq_kernels.decode.reorder import PIECE_WORDS, TENSORS, reorder_sequences
from tq_kernels.decode.split import decode_split
from tq_kernels.format import Sample, padded_dim
from tq_kernels.latents.attention import LatentNumbers, latents_split, merge_latents, rotate_latent_queries
from tq_kernels.latents.launch import fitted, latent_config, latent_constants
from tq_kernels.layout import BlockLayout
from tq_kernels.prefix.attention import Packed, PrefixNumbers, PrefixShape, PrefixTables, prefix_attention
from tq_kernels.prefix.dense import DenseNumbers, DenseShape, dense_attention, dense_config
from tq_kernels.prefix.launch import prefix_config, prefix_constants
from tq_kernels.prefix.windows import STAGES, WindowNumbers, WindowShape, window_attention
from tq_kernels.sampling import CHUNK, TILE, drop_unlikely, search_step
from tq_kernels.turing.split import decode_split_fragments

from examples.measure.compile.sass import Compiled, build, build_split, mask_types, numbers_of_step, plan, target_of
from tq_hf import PRESETS, TurboQuantConfig
from tq_hf.tensors.pages import ring_pages, rows_per_page

Arch = int | str
Bits = tuple[int, int]
SEQUENCES = 64
"""Sequences of a batch that kernels over pages are compiled for."""
MATRIX = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}
STATES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def bits_of(preset: str) -> Bits:
    """Bits of a preset's keys and values."""
    return PRESETS[preset].key_bits, PRESETS[preset].value_bits


def layout_of(bits: Bits, dim: int, value_dim: int | None = None) -> BlockLayout:
    """Layout of a cache's blocks."""
    return TurboQuantConfig(key_bits=bits[0], value_bits=bits[1]).layout(dim, value_dim)


def tile_of(dim: int, least: int = 16) -> int:
    """A power of two."""
    return max(least, triton.next_power_of_2(dim))


def build_encode(
    arch: Arch, bits: Bits, *, is_value: bool = False, dim: int = 128, value_dim: int | None = None, dtype: str = "fp16"
) -> Compiled:
    """`encode_blocks` of keys or of values."""
    on, layout = target_of(arch), layout_of(bits, dim, value_dim)
    config, shape = encode_shape(layout, is_value, STATES[dtype], on, MATRIX[dtype])
    constants = (shape, on.dependent_launch, config.stages)
    types = [f"*{dtype}", "*i32", "*fp32", "*fp16", *["i32"] * 5, Strides(*["i32"] * 3)]
    options = {"maxnreg": config.registers} if config.registers else {}
    return build(encode_blocks, types, constants, arch, num_warps=config.warps, **options)


def build_dequantize(
    arch: Arch, bits: Bits, *, is_value: bool = False, dim: int = 128, dtype: str = "fp16"
) -> Compiled:
    """`dequantize_blocks` of keys or of values."""
    on, own, stored = target_of(arch), bits[is_value], padded_dim(dim)
    layout = layout_of(bits, dim)
    loud = layout.loud * (not is_value)
    config = dequantize_config(stored, own, loud, on.capability)
    tile = tile_of(stored, 16 * config.chunks)
    constants = (
        *(dim, stored, tile, own, is_value, config.chunks, min(config.columns, tile)),
        *(config.resident, on.asm, layout.block_words, is_value * layout.key_words, layout.scales_at, loud),
    )
    types = ["*i32", "*fp32", "*fp16", f"*{dtype}", *["i32"] * 5, Strides(*["i32"] * 3)]
    return build(dequantize_blocks, types, constants, arch, num_warps=config.warps)


def build_prompt(
    arch: Arch, *, dim: int = 128, value_dim: int | None = None, dtype: str = "fp16", balanced: bool = True
) -> Compiled:
    """`store_prompt` of a preallocated cache, and of a padded prompt whose queries were shown if `balanced`."""
    own, statistics = f"*{dtype}", ["*u8", "*fp32", "*fp32"] if balanced else [None] * 3
    types: list[Any] = [own, own, own if balanced else None, *statistics, "*fp16", "*fp16", own]
    types += ["*i32", "*i64", Sample(*["i32"] * 4), PromptNumbers(*["i32"] * 14)]
    types.append((Strides(*["i32"] * 3),) * 3)
    return build(store_prompt, types, (prompt_constants(dim, value_dim or dim),), arch, num_warps=WARPS)


def build_prefix(
    arch: Arch, bits: Bits, *, dim: int = 128, value_dim: int | None = None, dtype: str = "fp16", **options: Any
) -> Compiled:
    """The kernel of many queries over packed blocks; `options` as `prefix_constants` takes them."""
    on, dims = target_of(arch), (dim, value_dim or dim)
    config = prefix_config(*dims, on)
    flags = dict(causal=True, mask=0, bounds=False, has_aux=False, split=False) | options
    constants = prefix_constants(layout_of(bits, *dims), config=config, on=on, **flags)
    types = types_of_prefix(f"*{dtype}", constants[0])
    return build(prefix_attention, types, constants, arch, num_warps=config.warps)


def types_of_prefix(own: str, shape: PrefixShape, tables: PrefixTables | None = None) -> list[Any]:
    """Types of `prefix_attention` of tensors of the type `own`."""
    states, numbers = States(own, Strides(*["i32"] * 3)), PrefixNumbers(*["i32"] * len(PrefixNumbers._fields))
    return [
        *(states, Packed("*i32", *["*fp16"] * 4), own, states, states, mask_types(shape.MASK)),
        *("*fp32" if shape.HAS_AUX else None, states, "*fp32", "*fp32", "*fp16", tables),
        *("*fp32" if shape.MERGE else None, numbers._replace(scaling_log2="fp32", cap_log2="fp32")),
    ]


def build_dense(
    arch: Arch, *, dim: int = 128, rows: int = 8192, mask: int = 0, softcap: bool = False, split: bool = False
) -> Compiled:
    """`dense_attention` of bf16 states, strides as models have them, with learned sinks."""
    tile = tile_of(dim)
    config = dense_config(tile, rows, mask, target_of(arch))
    flags = (mask == 0, mask, softcap, True, split)
    value_dim = min(dim, config.value_channels)
    tiles = (config.block_rows, config.block_tokens, config.stages)
    constants = (DenseShape(dim, value_dim, tile, tile_of(value_dim), *flags, tl.bfloat16, *tiles),)
    states, numbers = States("*bf16", Strides(*["i32"] * 3)), DenseNumbers(*["i32"] * 5, "fp32", "fp32", "i32")
    types = [*[states] * 3, mask_types(mask), "*i32", "*bf16", states, "*fp32", "*fp32", numbers]
    return build(dense_attention, types, constants, arch, num_warps=config.warps)


def build_latents(
    arch: Arch,
    bits: Bits,
    *,
    dim: int = 512,
    rotary: int = 64,
    rows: int = 16,
    mask: int = 0,
    dtype: str = "bf16",
    paged: bool = False,
) -> Compiled:
    """`latents_split` for this number of query rows."""
    on, own = target_of(arch), f"*{dtype}"
    layout = BlockLayout(dim, rotary, *bits)
    config = fitted(latent_config(rows, on), layout)
    types: list[Any] = ["*fp16", "*fp16", "*fp32", "*i32", "*i32"]
    numbers = dict.fromkeys(LatentNumbers._fields, "i32") | {"scaling_log2": "fp32"}
    numbers |= dict.fromkeys(("ring", "sinks") if paged else ("key_t", "value_t", "width"))
    if paged:
        types += [own, None, None, mask_types(mask), own, own, *["*i32"] * 3]
    else:
        types += [own, "*i32", "*i32", mask_types(mask), *[None] * 5]
    types += ["*fp32", "*fp32", LatentNumbers(**numbers)]
    causal, where = mask == 0 and rows > 64, place_of(layout, dtype) if paged else NO_PLACE
    constants = latent_constants(layout, causal, mask, config, on, where)
    return build(latents_split, types, constants, arch, num_warps=config.warps, num_stages=config.stages)


def build_small_latents(
    arch: Arch, bits: Bits, *, dim: int = 512, rotary: int = 64, dtype: str = "bf16"
) -> list[Compiled]:
    """The kernels of steps over pages of latents that rotate queries, merge, append rows and encode blocks."""
    own, layout = f"*{dtype}", BlockLayout(dim, rotary, *bits)
    rotate = build(
        rotate_latent_queries,
        [own, own, *["*fp16"] * 4, "*i32", "*fp16", "*fp16", "*fp32", "i32", "i32", ("i32",) * 2, ("i32",) * 3],
        (dim, rotary),
        arch,
        num_warps=1,
    )
    merge = build(
        merge_latents,
        ["*fp32", "*fp32", None, None, *["*i32"] * 3, "*fp16", "*fp16", own, *["i32"] * 4, ("i32", "i32")],
        (ReduceShape(dim, dim, dim, 32, 8, TILE_R=64),),
        arch,
        num_warps=8,
    )
    types: list[str | None] = [own, own, own, *["*i32"] * 3, *["i32"] * 7]
    sizes = (1, dim, rotary, dim, rotary, layout.block_words, *place_of(layout, dtype))
    append = build(append_tails, types, sizes, arch, num_warps=4)
    return [rotate, merge, append, encoder_of_pages(arch, layout, dtype)]


def build_decode(arch: Arch, bits: Bits, *, dim: int = 128, dtype: str = "fp16") -> Compiled:
    """`decode_split`, or what takes its place on Turing."""
    return build_split(arch, f"*{dtype}", key_bits=bits[0], value_bits=bits[1], dim=dim)


def build_rotate(arch: Arch, bits: Bits, *, dim: int = 128, rows: int = 1, dtype: str = "fp16") -> Compiled:
    """`append_and_rotate` of queries alone, with this number of rows and warps in a program."""
    new = AppendNumbers(*[None] * 6, *["i32"] * 4, None, None)
    types = [f"*{dtype}", *[None] * 8, f"*{dtype}", "*fp16", "*fp16", "*fp32", None, new]
    return build_step(arch, bits, dim, dtype, types, rows)


def build_append(arch: Arch, bits: Bits, *, dim: int = 128, dtype: str = "fp16") -> Compiled:
    """`append_and_rotate` of a growing cache."""
    own = f"*{dtype}"
    new = AppendNumbers(*["i32"] * 10, None, None)
    types = [*[own] * 3, *[None] * 6, own, "*fp16", "*fp16", "*fp32", "i32", new]
    return build_step(arch, bits, dim, dtype, types, 1)


def build_reorder(arch: Arch, dtype: str = "fp16", sequences: int = 4) -> Compiled:
    """`reorder_sequences` of a layer's tensors."""
    types = ["*i64", f"*{dtype}", "*fp16", "*fp16", "*i32", *["i32"] * (TENSORS + 1)]
    options = {"debug": True, "sanitize_overflow": False, "num_warps": 4}
    return build(reorder_sequences, types, (sequences, PIECE_WORDS // sequences), arch, **options)


def build_sampling(arch: Arch) -> tuple[Compiled, Compiled]:
    """`search_step` and `drop_unlikely`."""
    chunks = 64
    rows, scratch = ["*fp32", "*fp32", "*i32", "*fp32"], ["*i32", "*fp32", "*fp32"]
    search = build(search_step, [*rows, *scratch, *["i32"] * 4], (CHUNK, TILE, chunks), arch, num_warps=1)
    return search, build(drop_unlikely, [*rows, "*fp32", *scratch, *["i32"] * 3], (CHUNK, chunks), arch, num_warps=4)


def build_preallocated_append(arch: Arch, bits: Bits, *, dim: int = 128, rotates: bool = True) -> Compiled:
    """`append_and_rotate` of a preallocated cache, with queries if it `rotates`."""
    types: list[Any] = [*["*bf16"] * 3, "*i32", "*i64", "*i32", "*fp32", "*fp32", "*fp16"]
    types += ["*bf16", "*fp16", "*fp16", "*fp32"] if rotates else [None, None, "*fp16", None]
    new = AppendNumbers(*["i32"] * 12)
    types += [None, new if rotates else new._replace(query_b=None, query_h=None, query_s=None)]
    return build_step(arch, bits, dim, "bf16", types)


def build_step(arch: Arch, bits: Bits, dim: int, dtype: str, types: list[Any], warps: int | None = None) -> Compiled:
    """`append_and_rotate` for arguments of these types, by default with as many warps as encoding takes."""
    on, layout = target_of(arch), layout_of(bits, dim)
    (config, of_keys), (_, of_values) = (
        encode_shape(layout, is_value, STATES[dtype], on, MATRIX[dtype]) for is_value in (False, True)
    )
    warps = config.warps if warps is None else warps
    options = {"debug": True, "sanitize_overflow": False, "num_warps": warps}
    types = [*types, numbers_of_step()]
    return build(append_and_rotate, types, (of_keys, of_values, 1, warps), arch, **options)


def build_reduce(
    arch: Arch, bits: Bits, *, dim: int = 128, dtype: str = "fp16", batch: int = 1, heads: tuple[int, int] = (32, 8)
) -> Compiled:
    """`reduce_splits`."""
    p = plan(arch, *bits, dim=dim, batch=batch, heads=heads)
    types = ["*fp32", "*i32", "*i32", "*i32", "*fp16", "*fp16", "*fp32", f"*{dtype}", None, None, numbers_of_step()]
    types.append(OutStrides(*["i32"] * 3))
    return build(reduce_splits, types, (p.reduce,), arch, num_warps=p.reduce_warps)


def place(preset: str, dim: int) -> tuple[int, int, int]:
    """Sinks, rows of a ring and of a page."""
    return place_of(TurboQuantConfig.from_preset(preset).layout(dim), "fp16")


def place_of(layout: BlockLayout, dtype: str) -> tuple[int, int, int]:
    """`place` of blocks of this layout beside rows of `dtype`."""
    config, rows = TurboQuantConfig(), rows_per_page(layout, STATES[dtype])
    return config.sink_tokens, rows * ring_pages(config, layout, STATES[dtype]), rows


def plan_for(arch: int, preset: str, dim: int, softcap: bool = False) -> Plan:
    shape = (SEQUENCES, 32, 8, 1, layout_of(bits_of(preset), dim), 256, 128)
    return plan_decode(*shape, False, 0, softcap, False, target_of(arch), 1, place(preset, dim))


def build_paged_split(arch: int, preset: str = "4bit_nc", dim: int = 128, softcap: bool = False) -> tuple[Any, Plan]:
    p = plan_for(arch, preset, dim, softcap)
    limit = {"maxnreg": p.config.registers} if p.config.registers else {}
    compiled = build(
        decode_split_fragments if arch == 75 else decode_split,
        [DecodeTensors("*fp32", "*i32", "*i32", "*fp16", *[None] * 6, *["*fp16"] * 2, *["*i32"] * 3),
         numbers_of_step(pages=True)],
        (p.split,),
        arch,
        num_warps=p.config.warps,
        num_stages=p.config.stages,
        **limit,
    )  # fmt: skip
    return compiled, p


def build_paged_append(arch: int, preset: str, dim: int, encodes: bool, dtype: str = "bf16") -> Any:
    """`append_to_pages` of a step of single tokens, which `encodes`, or of one with prompts."""
    on, layout, own = target_of(arch), layout_of(bits_of(preset), dim), f"*{dtype}"
    (config, of_keys), (_, of_values) = (
        encode_shape(layout, is_value, STATES[dtype], on, MATRIX[dtype]) for is_value in (False, True)
    )
    warps = config.warps if encodes else 1
    constants = (of_keys, of_values, PageShape(*place(preset, dim), SEQUENCES), 8 if encodes else 1, warps, encodes)
    types: list[Any] = [*[own] * 3, *["*i32"] * 4, "*fp32", "*fp32", "*fp16", own, "*fp16", "*fp16", "*fp32"]
    types += [PageWork(*["i32"] * 5), numbers_of_step(pages=True)]
    return build(append_to_pages, types, constants, arch, num_warps=warps)


def build_small(arch: int, dim: int = 128) -> list[Any]:
    """The kernels that rotate and append a step's rows, reduce splits, and append the newest rows of prompts."""
    p, layout = plan_for(arch, "4bit_nc", dim), layout_of((4, 4), dim)
    rotate = build_paged_append(arch, "4bit_nc", dim, encodes=False)
    reduce = build(
        reduce_splits,
        ["*fp32", "*i32", None, None, "*fp16", "*fp16", "*fp32", "*fp16", *["*i32"] * 2, numbers_of_step(pages=True),
         OutStrides(*["i32"] * 3)],
        (p.reduce._replace(FILL=True),),
        arch,
        num_warps=p.reduce_warps,
    )  # fmt: skip
    types = [*["*fp16"] * 3, *["*i32"] * 3, *["i32"] * 7]
    sizes = (2, dim, dim, *[tile_of(dim, 1)] * 2, layout.block_words, *place("4bit_nc", dim))
    append = build(append_tails, types, sizes, arch, num_warps=4)
    return [rotate, reduce, append]


def build_completed(arch: int, preset: str = "4bit_nc", dim: int = 128, dtype: str = "bf16") -> Any:
    """The encoder of blocks that new tokens complete."""
    return encoder_of_pages(arch, layout_of(bits_of(preset), dim), dtype)


def encoder_of_pages(arch: Arch, layout: BlockLayout, dtype: str) -> Compiled:
    """`encode_blocks_of_pages`."""
    on, own = target_of(arch), f"*{dtype}"
    config, of_keys = encode_shape(layout, False, STATES[dtype], on, MATRIX[dtype])
    _, of_values = encode_shape(layout, True, STATES[dtype], on, MATRIX[dtype])
    of_values = of_values._replace(K_STEP=min(config.k_step, of_values.TILE))
    constants = (of_keys, of_values, PageShape(*place_of(layout, dtype), SEQUENCES))
    states, places = NewStates(own, "i32", "i32", "*fp32", "*fp16"), PagePlaces(own, *["*i32"] * 3, *["i32"] * 3)
    types = [states, states, places, "*i32"]
    return build(encode_blocks_of_pages, types, constants, arch, num_warps=config.warps)


def build_prompts(arch: int, preset: str, merge: bool = False) -> Any:
    """The kernel of many queries over pages; with `merge` it adds cached tokens to what there is of new ones."""
    on, bits = target_of(arch), bits_of(preset)
    config = prefix_config(128, 128, on)
    flags = (True, 0, False, False, False)
    layout, sizes = layout_of(bits, 128), (*place(preset, 128), SEQUENCES, merge)
    constants = prefix_constants(layout, *flags, config, on, sizes)
    types = types_of_prefix("*fp16", constants[0], PrefixTables(*["*i32"] * 4))
    return build(prefix_attention, types, constants, arch, num_warps=config.warps)


def build_windows(
    arch: int | str, dim: int = 128, *, dtype: str = "bf16", softcap: bool = False, split: bool = False
) -> Any:
    """Decode over sliding windows, with learned sinks."""
    tile = tile_of(dim)
    config = dense_config(tile, 1, 0, target_of(arch))
    flags = (softcap, True, split, MATRIX[dtype])
    shape = WindowShape(dim, tile, 37, *flags, config.block_rows, config.block_tokens, STAGES)
    types = [*[f"*{dtype}"] * 4, "*i32", "*i32", *[f"*{dtype}"] * 2, "*fp32", "*fp32"]
    types.append(WindowNumbers(*["i32"] * 13, "fp32", "fp32"))
    return build(window_attention, types, (shape,), arch, num_warps=config.warps)


BUILDERS: dict[str, Callable[..., Compiled]] = {
    "decode": build_decode,
    "append": build_append,
    "reduce": build_reduce,
    "encode keys": build_encode,
    "encode values": partial(build_encode, is_value=True),
    "dequantize keys": build_dequantize,
    "dequantize values": partial(build_dequantize, is_value=True),
    "prefix": build_prefix,
}
"""Kernels by name, each made of an architecture and bits, and of `dim` and `dtype` where they are not 128 and "fp16";
on targets and dimensions that have no kernel of a name, it is not launched (`launched`)."""


def launched(kernel: str, arch: Arch, dim: int) -> bool:
    """Whether a card of this kind launches the kernel: Turing has no prefix kernel, and wide heads have one from Hopper
    on."""
    on = target_of(arch)
    return kernel != "prefix" or not on.fragments and (dim <= 128 or on.dependent_launch)
