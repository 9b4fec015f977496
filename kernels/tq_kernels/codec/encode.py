"""Encode whole blocks of keys and values: rotate, remove the key mean, quantise and pack, in one kernel.

A program takes the 128 rows of one block of keys or of values at a time. Rotating them is a matrix product with the
dense rotation matrix; everything after it stays in registers. Keys and values are two launches, the second of which
starts while the first drains: one kernel with both loops would hold two rotation matrices in shared memory, and half
as many programs would run at once.

A matrix product leaves rows r and r + 8 of its result in one thread, for tensor cores of every generation. So
the block is rotated as two tiles of 64 rows whose rows r and r + 8 hold the same row of two neighbouring planes (see
`tq_hf.codec.packing`). The four codes that planes contribute to a word then meet in one thread; the other neighbours of
a word (two channels, or two tokens, and the quarters of the channels) are merged as words, of which there are a quarter
as many as codes.

The signs of the rotation are applied as +-1 in the inputs' dtype, so products are exact, and its factor 1 / sqrt(D)
goes into the scales.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from ..decode.decoder import target
from .quantise import CORRECTIONS, LEVELS, store_codes, to_half

TOKENS = tl.constexpr(128)
HALF_TOKENS = tl.constexpr(64)


@triton.jit
def _load_rotation(
    rotation,
    first,
    ROWS: tl.constexpr,
    MATRIX: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Rows `first` to `first + ROWS` of sqrt(D) R^T with columns in the order of quarters, `[ROWS, TILE]`.

    Returns:
        High and low parts in MATRIX's dtype, one and the same where SPLIT is not set.
    """
    k = first + tl.arange(0, ROWS)[:, None]
    n = tl.arange(0, TILE)[None, :]
    QUARTER: tl.constexpr = TILE // 4
    channel = n // QUARTER * (DIM // 4) + n % QUARTER
    if DIM == TILE:
        r = tl.load(rotation + channel * DIM + k)  # [ROWS, TILE]
    else:
        r = tl.load(rotation + channel * DIM + k, mask=(n % QUARTER < DIM // 4) & (k < DIM), other=0.0)
    if DIM & (DIM - 1) == 0:
        r = tl.where(r > 0, 1.0, tl.where(r < 0, -1.0, 0.0))
    else:
        r = r * DIM**0.5
    high = r.to(MATRIX)
    low = (r - high.to(tl.float32)).to(MATRIX) if SPLIT else high
    return high, low


@triton.jit
def _add_product(x, high, low, y, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """y + x @ (high + low), fp32."""
    x = x.to(high.dtype)
    y = tl.dot(x, high, y, input_precision=PRECISION)
    if SPLIT:
        y = tl.dot(x, low, y, input_precision=PRECISION)
    return y


@triton.jit
def _load_rows(pointers, channel, HEAD_DIM: tl.constexpr, TILE: tl.constexpr):
    """Rows of states, zero beyond HEAD_DIM."""
    if HEAD_DIM == TILE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=channel[None, :] < HEAD_DIM, other=0.0)


@triton.jit
def _prefetch_rows(states, block, stride_token, TILE: tl.constexpr):
    """Fetch the rows of a block into the L2 cache: the pipeline copies them to shared memory only just before their
    use."""
    LINE: tl.constexpr = 1024 // states.dtype.element_ty.primitive_bitwidth
    line = tl.arange(0, max(TILE // LINE, 1)) * LINE
    rows = states + stride_token.to(tl.int64) * (block * TOKENS)
    pointers = rows + (tl.arange(0, TOKENS)[:, None] * stride_token + line[None, :])  # [128, lines]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["heads", "blocks", "start", "blocks_batch", "blocks_head"])
def encode_blocks(
    states,  # [B, H, n * 128, HEAD_DIM] float16, bfloat16 or float32
    words,  # [B, H, N, 128 * DIM * BITS / 32] int32
    scales,  # [B, H, N, 128, 2] float16, a key's and a value's
    means,  # [B, H, N, DIM] float16, or None
    rotation,  # [DIM, DIM] float32
    due,  # [5, 4] int32, or None: `step_counts` of `tq_kernels.decode.append`
    heads,
    blocks,  # n
    start,
    blocks_batch,  # strides of the packed tensors, in blocks
    blocks_head,
    stride_batch,
    stride_head,
    stride_token,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    CORRECTION: tl.constexpr,
    IS_VALUE: tl.constexpr,
    MATRIX: tl.constexpr,
    K_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Encode blocks `program, program + programs, ...` of the keys or of the values into blocks `start, start + 1,
    ...`."""
    if PDL and not IS_VALUE:
        cuda.gdc_launch_dependents()
    if due is not None:
        # A ring of rows: the block that is due, if one is, starts at the first window row.
        blocks = tl.load(due + 4 * 4)
        start = tl.load(due + 1 * 4)
        states += tl.load(due + 3 * 4) * stride_token
        if blocks == 0:
            return
    UNIT: tl.constexpr = DIM**-0.5
    QUARTER: tl.constexpr = TILE // 4
    # Entries other than +-1 take two 16-bit matrices.
    SPLIT: tl.constexpr = MATRIX != tl.float32 and DIM & (DIM - 1) != 0
    row = tl.arange(0, HALF_TOKENS)
    token = 32 * ((row >> 3) & 1) + 8 * (row >> 4) + (row & 7)  # [64], within a half of the block
    k = tl.arange(0, K_STEP)
    offsets = token[:, None] * stride_token + k[None, :]  # [64, K_STEP]
    if K_STEP == TILE:
        high, low = _load_rotation(rotation, 0, TILE, MATRIX, DIM, TILE, SPLIT)

    head = (tl.program_id(1) % heads).to(tl.int64)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    states += batch * stride_batch + head * stride_head
    first_home = batch * blocks_batch + head * blocks_head + start
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        source = states + stride_token.to(tl.int64) * (block * TOKENS)
        late = source + HALF_TOKENS * stride_token
        home = first_home + block
        if ASM and STAGES > 1:
            _prefetch_rows(states, tl.minimum(block + tl.num_programs(0), blocks - 1), stride_token, TILE)
        y0 = tl.zeros([HALF_TOKENS, TILE], tl.float32)
        y1 = tl.zeros([HALF_TOKENS, TILE], tl.float32)
        if K_STEP == TILE:
            x0 = _load_rows(source + offsets, k, HEAD_DIM, TILE)  # [64, TILE]
            x1 = _load_rows(late + offsets, k, HEAD_DIM, TILE)
            y0 = _add_product(x0, high, low, y0, SPLIT, PRECISION)
            y1 = _add_product(x1, high, low, y1, SPLIT, PRECISION)
        else:
            for first in tl.range(0, TILE, K_STEP):
                x0 = _load_rows(source + first + offsets, first + k, HEAD_DIM, TILE)  # [64, K_STEP]
                x1 = _load_rows(late + first + offsets, first + k, HEAD_DIM, TILE)
                high, low = _load_rotation(rotation, first, K_STEP, MATRIX, DIM, TILE, SPLIT)
                y0 = _add_product(x0, high, low, y0, SPLIT, PRECISION)
                y1 = _add_product(x1, high, low, y1, SPLIT, PRECISION)
        if means is not None:
            mean = to_half(tl.sum(y0 + y1, axis=0) * (UNIT / TOKENS))  # [TILE]
            n = tl.arange(0, TILE)
            channel = n // QUARTER * (DIM // 4) + n % QUARTER
            tl.store(means + home * DIM + channel, mean, mask=n % QUARTER < DIM // 4)
            stored = mean.to(tl.float32) * (1 / UNIT)
            y0 -= stored[None, :]
            y1 -= stored[None, :]
        store_codes(
            y0, y1, words + home * (TOKENS * DIM * BITS // 32), scales + home * (2 * TOKENS) + IS_VALUE,
            IS_VALUE, BITS, LEVELS, CORRECTION, DIM, TILE, ASM,
        )  # fmt: skip
    if PDL and IS_VALUE:
        cuda.gdc_wait()


@dataclass(frozen=True)
class EncodeConfig:
    """Tile sizes and launch parameters of `encode_blocks`.

    Args:
        k_step: Channels of a matrix product; the tile's width keeps the rotation in shared memory for all blocks of a
            program.
        warps: Warps of a program.
        stages: Blocks copied ahead.
        programs_per_multiprocessor: Programs a multiprocessor is given.
        registers: Limit per thread that lets as many programs run side by side, or `None`.
    """

    k_step: int
    warps: int
    stages: int
    programs_per_multiprocessor: int
    registers: int | None = None


def encode_config(
    tile: int, dim: int, bits: tuple[int, int], itemsize: int, capability: tuple[int, int]
) -> EncodeConfig:
    """The heuristic table.

    Args:
        tile: `dim` padded to a power of two.
        dim: Channels of a stored vector.
        bits: Of keys and of values; their launches overlap, so they are best of one size.
        itemsize: Bytes of a channel of the states.
        capability: Compute capability of an NVIDIA GPU, or (0, 0).
    """
    if capability[0] < 8:
        return EncodeConfig(k_step=16, warps=8, stages=1, programs_per_multiprocessor=1)
    # Two matrices of 256 channels, or one of fp32, do not fit in shared memory.
    if capability[0] != 9 or itemsize == 4 or tile > 128 and tile != dim:
        return EncodeConfig(k_step=min(tile, 32), warps=4 if tile < 64 else 8, stages=1, programs_per_multiprocessor=2)
    if tile != dim or tile > 128:
        return EncodeConfig(k_step=tile, warps=4 if tile < 64 else 8, stages=1, programs_per_multiprocessor=1)
    if tile <= 64:
        return EncodeConfig(
            tile, warps=4, stages=2, programs_per_multiprocessor=4, registers=128 if max(bits) < 8 else None
        )
    if bits != (4, 4):
        return EncodeConfig(tile, warps=4, stages=2, programs_per_multiprocessor=2)
    return EncodeConfig(tile, warps=8, stages=2, programs_per_multiprocessor=2, registers=128)


@functools.lru_cache
def device_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU; (0, 0) for other GPUs and for the interpreter."""
    if device.type != "cuda" or torch.version.hip:
        return 0, 0
    return torch.cuda.get_device_capability(device)


MATRIX_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def encode(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_words: torch.Tensor,
    value_words: torch.Tensor,
    scalars: torch.Tensor,
    key_means: torch.Tensor | None,
    start: int,
    *,
    key_bits: int,
    value_bits: int,
    key_correction: str,
    value_correction: str,
    key_rotation: torch.Tensor,
    value_rotation: torch.Tensor,
    due: torch.Tensor | None = None,
) -> None:
    """Encode whole blocks of keys and values into blocks `start`, `start + 1`, ... of the packed tensors, in two
    launches.

    A block is encoded by one program from its 128 rows alone: its bits do not depend on how many blocks are encoded
    with it.

    Args:
        keys: `[B, Hkv, n * 128, Dk]` fp16, bf16 or fp32, last dimension contiguous, other strides as they come.
        values: `[B, Hkv, n * 128, Dv]`, like `keys`.
        key_words, value_words, scalars: `[B, Hkv, N, *]` int32 packed blocks (`tq_hf/layout.py`), N >= start + n. The
            last two dimensions are
            contiguous, and all packed tensors have the same strides in blocks.
        key_means: `[B, Hkv, N, Dk padded]` fp16, or `None` to leave the mean in the keys.
        start: Index of the first block written.
        key_bits, value_bits: 2, 3, 4 or 8.
        key_correction, value_correction: "none", "norm", "inner" or "projection" (`TurboQuantConfig.key_correction`).
        key_rotation, value_rotation: The orthogonal R, `[D padded, D padded]` float32 contiguous, with rotate(x) = x
            @ R.T. Where
            D padded is a power of two only its signs are read: any multiple of R in any float dtype will do.
        due: `step_counts` of `tq_kernels.decode.append.append_token`: keys and values are a window's ring then, and
            what is encoded, from where and to where is read on the device; `start` is ignored.

    Raises:
        ValueError: The tokens are not whole blocks, or the last dimension of the states is not contiguous.
    """
    batch, heads, length, _ = keys.shape
    blocks, rest = divmod(length, TOKENS.value)
    if rest:
        raise ValueError(f"`keys` have {length} tokens; only whole blocks of {TOKENS.value} can be encoded.")
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError(
            f"The last dimension of keys and values must be contiguous; "
            f"strides are {keys.stride()} and {values.stride()}."
        )
    if batch * heads * blocks == 0:
        return
    multiprocessors = target(keys.device).multiprocessors
    capability = device_capability(keys.device)
    # The interpreter cannot multiply bf16.
    matrix = tl.float32 if keys.device.type == "cpu" else MATRIX_TYPES[keys.dtype]
    for is_value, states, words, means, rotation, bits, correction in (
        (False, keys, key_words, key_means, key_rotation, key_bits, key_correction),
        (True, values, value_words, None, value_rotation, value_bits, value_correction),
    ):
        dim = rotation.shape[0]
        tile = max(16, triton.next_power_of_2(dim))
        config = encode_config(tile, dim, (key_bits, value_bits), states.element_size(), capability)
        programs = config.programs_per_multiprocessor * multiprocessors // (batch * heads)
        options: dict[str, Any] = {} if config.registers is None else {"maxnreg": config.registers}
        dependent_launch = capability[0] >= 9
        if dependent_launch and is_value:
            options["launch_pdl"] = True
        encode_blocks[(1 if due is not None else min(blocks, max(1, programs)), batch * heads)](
            states,
            words,
            scalars.view(torch.float16),
            means,
            rotation,
            due,
            heads,
            blocks if due is None else 1,
            start,
            *(stride // TOKENS.value for stride in scalars.stride()[:2]),
            *states.stride()[:3],
            HEAD_DIM=states.shape[-1],
            DIM=dim,
            TILE=tile,
            BITS=bits,
            LEVELS=LEVELS[bits],
            CORRECTION=CORRECTIONS[correction],
            IS_VALUE=is_value,
            MATRIX=matrix,
            K_STEP=config.k_step,
            PRECISION="tf32x3" if capability[0] >= 8 else "ieee",
            ASM=capability[0] >= 8,
            PDL=dependent_launch,
            STAGES=config.stages,
            num_warps=config.warps,
            **options,
        )
