"""Encode whole blocks of keys and values: rotate, remove the key mean, quantize and pack, in one kernel.

A program takes the 128 rows of one block of keys or values at a time. Rotating them is a matrix product with the
dense rotation matrix; everything after it stays in registers. Keys and values are two launches; the second starts
while the first drains. One kernel with both loops would hold two rotation matrices in shared memory, and half as many
programs would run at once. Over pages there is little to encode, and both are one launch: half as many to capture.

A matrix product leaves rows r and r + 8 of its result in one thread, for tensor cores of every generation. The block
is therefore rotated as two tiles of 64 rows: their rows r and r + 8 hold the same row of two neighbouring planes (see
`tq_hf.codec.packing`). The four codes that planes contribute to a word then meet in one thread. The other neighbours of
a word (two channels, or two tokens, and the quarters of the channels) are merged as words, a quarter as many as codes.


The signs of the rotation are applied as +-1 in the inputs' dtype, times the channel scales, which fit in its bits.
Products are therefore exact, and the rotation's own factor 1 / sqrt(D) goes into the scales.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..common.device import AMPERE, TURING, constants_of
from ..common.schedule import completed, first_block_column, lengths, located, ring_rows, row_of
from ..format import CODE, PLANE, TOKENS, due_blocks_in_kernel
from .loud import coded_scales, finite_size, loud_channels_of, loud_unit, store_loud
from .quantize import part_channels, part_width, row_sizes, store_codes, store_scales

HALF_TOKENS = tl.constexpr(TOKENS.value // 2)


class EncodeShape(NamedTuple):
    """Constants of `encode_block`. BLOCK_WORDS: int32 words of a block; WORDS_AT, SCALES_AT: those before the codes
    and before the scales (`tq_kernels.layout`); LOUD: number of loud channels."""

    HEAD_DIM: tl.constexpr
    DIM: tl.constexpr
    TILE: tl.constexpr
    BITS: tl.constexpr
    IS_VALUE: tl.constexpr
    MATRIX: tl.constexpr
    K_STEP: tl.constexpr
    ASM: tl.constexpr
    BLOCK_WORDS: tl.constexpr
    WORDS_AT: tl.constexpr
    SCALES_AT: tl.constexpr
    LOUD: tl.constexpr


@triton.constexpr_function
def _takes_two(matrix, dim):
    """Whether the rotation takes two 16-bit matrices: entries other than +-1 do."""
    return matrix != tl.float32 and dim & (dim - 1) != 0


@triton.jit
def load_rotation(rotation, channel_scales, first, ROWS: tl.constexpr, C: tl.constexpr, part=0):
    """Load rows `first` to `first + ROWS` of sqrt(D) R^T, times their channel scales: the columns of part `part` in the
    order of quarters, `[ROWS, part_width(TILE)]`.

    Returns:
        High and low parts in MATRIX's dtype; the same matrix twice where one is enough.
    """
    k = first + tl.arange(0, ROWS)[:, None]
    channel, inside = part_channels(part, C.DIM, C.TILE)
    if C.DIM == C.TILE:
        r = tl.load(rotation + channel[None, :] * C.DIM + k)  # [ROWS, part_width(TILE)]
    else:
        r = tl.load(rotation + channel[None, :] * C.DIM + k, mask=inside[None, :] & (k < C.DIM), other=0.0)
    if C.DIM & (C.DIM - 1) == 0:
        r = tl.where(r > 0, 1.0, tl.where(r < 0, -1.0, 0.0))
    else:
        r = r * C.DIM**0.5
    if C.HEAD_DIM == C.TILE:
        factor = tl.load(channel_scales + k)  # [ROWS, 1]
    else:
        factor = tl.load(channel_scales + k, mask=k < C.HEAD_DIM, other=0.0)
    factor = coded_scales(factor, C.LOUD)
    if _takes_two(C.MATRIX, C.DIM):
        r *= factor.to(tl.float32)
        high = r.to(C.MATRIX)
        low = (r - high.to(tl.float32)).to(C.MATRIX)
    else:
        high = r.to(C.MATRIX) * factor.to(C.MATRIX)
        low = high
    return high, low


@triton.jit
def resident_rotation(rotation, channel_scales, C: tl.constexpr):
    """Load the whole rotation for `encode_block` if one step takes all channels, and the loud channels; else zeros,
    because a function cannot return `None` before Triton 3.7."""
    high, low, loud = 0.0, 0.0, (0, 0.0)
    if C.K_STEP == C.TILE:
        high, low = load_rotation(rotation, channel_scales, 0, C.TILE, C)
    if C.LOUD > 0:
        loud = loud_channels_of(channel_scales, C.HEAD_DIM, C.TILE, C.LOUD)
    return high, low, loud


@triton.jit
def _add_product(x, high, low, y, SPLIT: tl.constexpr, ASM: tl.constexpr):
    """y + x @ (high + low), fp32."""
    PRECISION: tl.constexpr = "tf32x3" if ASM >= AMPERE else "ieee"
    x = x.to(high.dtype)
    y = tl.dot(x, high, y, input_precision=PRECISION)
    if SPLIT:
        y = tl.dot(x, low, y, input_precision=PRECISION)
    return y


@triton.jit
def _finite_or_zero(x, ASM: tl.constexpr):
    """Convert to float16, with 0 for infinities and NaN: a row that is not finite costs its block the mean, and leaves
    the other rows right."""
    if ASM >= TURING:
        # Two elements at a time, which Triton has no operation for: a compare that gives a mask, and an AND.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 size, finite;
            and.b32 size, $1, 0x7FFF7FFF;
            set.lt.u32.f16x2 finite, size, $2;
            and.b32 $0, $1, finite;
            }""",
            "=r,r,r",
            [x, tl.full(x.shape, float("inf"), tl.float16)],
            tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _load_rows(pointers, channel, HEAD_DIM: tl.constexpr, TILE: tl.constexpr):
    """Load rows of states, zero beyond HEAD_DIM."""
    if HEAD_DIM == TILE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=channel[None, :] < HEAD_DIM, other=0.0)


@triton.jit
def block_rows():
    """Tokens [64] of half a block, in the row order of `encode_block`."""
    row = tl.arange(0, HALF_TOKENS)
    return 32 * ((row >> 3) & 1) + 8 * (row >> 4) + (row & 7)


class BlockStates(NamedTuple):
    """Arguments of `encode_block`: rows of a block, and their rotation."""

    early: Any
    late: Any
    offsets: Any
    rotation: Any
    channel_scales: Any
    high: Any
    low: Any
    loud: Any


@triton.jit
def _encode_loud(states, words, scales, C: tl.constexpr):
    """Encode the loud channels of a block's rows: codes to `words`, means and units behind the means at `scales`."""
    index, factor = states.loud
    at = states.offsets + index[None, :]
    x0 = tl.load(states.early + at).to(tl.float32) * factor[None, :]  # [64, LOUD]
    x1 = tl.load(states.late + at).to(tl.float32) * factor[None, :]
    mean = (tl.sum(x0 + x1, axis=0) * (1 / TOKENS)).to(tl.float16)
    mean = tl.where(tl.abs(mean) < float("inf"), mean, 0.0).to(tl.float16)
    x0 -= mean.to(tl.float32)[None, :]
    x1 -= mean.to(tl.float32)[None, :]
    unit = loud_unit(tl.max(tl.maximum(finite_size(x0), finite_size(x1)), 0))  # [LOUD]
    store_loud(x0, x1, unit, words, C.LOUD)
    others = scales + 2 * TOKENS + C.DIM + 2 * tl.arange(0, C.LOUD)
    tl.store(others, mean)
    tl.store(others + 1, unit)


@triton.jit
def _rotated(states, scales, part, C: tl.constexpr):
    """Rotate a block's rows and store the mean of keys behind `scales`: part `part` of the channels less the mean, two
    tiles [64, part_width(TILE)]."""
    UNIT: tl.constexpr = C.DIM**-0.5
    SPLIT: tl.constexpr = _takes_two(C.MATRIX, C.DIM)
    early, late, offsets, rotation, channel_scales, high, low, _ = states
    k = tl.arange(0, C.K_STEP)
    y0 = tl.zeros([HALF_TOKENS, part_width(C.TILE)], tl.float32)
    y1 = tl.zeros([HALF_TOKENS, part_width(C.TILE)], tl.float32)
    if C.K_STEP == C.TILE:
        x0 = _load_rows(early + (offsets + k[None, :]), k, C.HEAD_DIM, C.TILE)  # [64, TILE]
        x1 = _load_rows(late + (offsets + k[None, :]), k, C.HEAD_DIM, C.TILE)
        y0 = _add_product(x0, high, low, y0, SPLIT, C.ASM)
        y1 = _add_product(x1, high, low, y1, SPLIT, C.ASM)
    else:
        for first in tl.range(0, C.TILE, C.K_STEP):
            x0 = _load_rows(early + first + (offsets + k[None, :]), first + k, C.HEAD_DIM, C.TILE)  # [64, K_STEP]
            x1 = _load_rows(late + first + (offsets + k[None, :]), first + k, C.HEAD_DIM, C.TILE)
            step_high, step_low = load_rotation(rotation, channel_scales, first, C.K_STEP, C, part)
            y0 = _add_product(x0, step_high, step_low, y0, SPLIT, C.ASM)
            y1 = _add_product(x1, step_high, step_low, y1, SPLIT, C.ASM)
    if not C.IS_VALUE:
        mean = _finite_or_zero((tl.sum(y0 + y1, axis=0) * (UNIT / TOKENS)).to(tl.float16), C.ASM)
        channel, inside = part_channels(part, C.DIM, C.TILE)
        tl.store(scales + 2 * TOKENS + channel, mean, mask=inside)
        stored = mean.to(tl.float32) * (1 / UNIT)
        y0 -= stored[None, :]
        y1 -= stored[None, :]
    return y0, y1


@triton.jit
def encode_block(early, late, offsets, packed, home, rotation, channel_scales, high, low, loud, C: tl.constexpr):
    """Encode one block's keys or values as block `home` of those from pointer `packed` on.

    Args:
        early, offsets: A pointer or pointers [64, 1], and offsets [64, 1] or [1, 1], to the block's first 64 rows, in
            the order of `block_rows`.
        late: The same for the other 64.
        high, low, loud: From `resident_rotation`.
        C: An `EncodeShape`.
    """
    WIDTH: tl.constexpr = part_width(C.TILE)
    states = BlockStates(early, late, offsets, rotation, channel_scales, high, low, loud)
    words = packed + home * C.BLOCK_WORDS + C.WORDS_AT
    scales = (packed + home * C.BLOCK_WORDS + C.SCALES_AT).to(tl.pointer_type(tl.float16), bitcast=True)
    if C.LOUD > 0:
        _encode_loud(states, words + 4 * C.DIM * C.BITS, scales, C)
    if WIDTH == C.TILE:
        y0, y1 = _rotated(states, scales, 0, C)
        sizes = None
        inner = store_codes(y0, y1, sizes, words, 0, C.IS_VALUE, C.BITS, C.DIM, C.TILE, C.ASM)
    else:
        # Rotate each part twice, for the sizes of rows and to quantize them: registers hold no more.
        size0 = tl.zeros([PLANE], tl.float32)
        size1, size2, size3 = size0, size0, size0
        for part in tl.range(0, C.TILE // WIDTH, num_stages=1):
            y0, y1 = _rotated(states, scales, part, C)
            added = row_sizes(y0, C.BITS) + row_sizes(y1, C.BITS)
            if CODE[C.BITS].is_fp8:
                size0, size1 = tl.maximum(size0, added[0]), tl.maximum(size1, added[1])
                size2, size3 = tl.maximum(size2, added[2]), tl.maximum(size3, added[3])
            else:
                size0, size1, size2, size3 = size0 + added[0], size1 + added[1], size2 + added[2], size3 + added[3]
        sizes = (size0, size1, size2, size3)
        inner = tl.zeros([PLANE, 2, 2], tl.float32)
        for part in tl.range(0, C.TILE // WIDTH, num_stages=1):
            y0, y1 = _rotated(states, scales, part, C)
            inner += store_codes(y0, y1, sizes, words, part, C.IS_VALUE, C.BITS, C.DIM, C.TILE, C.ASM)
    store_scales(inner, sizes, scales + C.IS_VALUE, C.IS_VALUE, C.BITS, C.DIM)


@triton.jit
def _prefetch_rows(states, block, stride_token, TILE: tl.constexpr):
    """Fetch the rows of a block into the L2 cache: the pipeline copies them to shared memory just before use."""
    LINE: tl.constexpr = 1024 // states.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = TILE // LINE if TILE > LINE else 1  # `max` is no constant in Triton 3.5
    line = tl.arange(0, LINES) * LINE
    rows = states + stride_token.to(tl.int64) * (block * TOKENS)
    pointers = rows + (tl.arange(0, TOKENS)[:, None] * stride_token + line[None, :])  # [128, lines]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _rows_of(
    states, rows, pages, t, first, past, kv_head, page_blocks, stride_t, stride_h, ROW: tl.constexpr,
    START: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr, ROWS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Pointers [n, 1] to the rows of tokens `t` [n]: ring rows before `past`, then new ones. A ring's row has ROW
    elements, and its key or value begins START elements further."""
    row = row_of(t, SINKS, RING)
    in_ring = ring_rows(rows, pages, row, t < past, kv_head, page_blocks, ROW, ROWS, BLOCK_WORDS)
    fresh = (first + tl.maximum(t - past, 0)).to(tl.int64)
    at = tl.where(t < past, in_ring + START, states + fresh * stride_t + kv_head * stride_h)
    return at[:, None]


class EncodedStates(NamedTuple):
    """Keys or values to encode, their strides (over tokens and heads alone over pages), and their rotation."""

    states: Any
    stride_b: Any
    stride_h: Any
    stride_t: Any
    rotation: Any
    channel_scales: Any


class BlockPlaces(NamedTuple):
    """Places of blocks and of their rows: arguments of `encode_blocks`."""

    heads: Any
    start: Any
    blocks_b: Any
    blocks_h: Any
    rows: Any
    block_table: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    count: Any
    width: Any


@triton.jit
def encode_blocks_of(
    new, places, packed, amounts, total, head, worker, workers, SINKS: tl.constexpr, RING: tl.constexpr,
    ROWS: tl.constexpr, ROW: tl.constexpr, START: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Encode blocks `worker`, `worker + workers`, ... of `total`, of KV head `head` (of B * H without pages).

    Over pages `amounts` [BB] are the numbers of blocks that each sequence completes.
    """
    if places.block_table is None:
        offsets = block_rows()[:, None] * new.stride_t  # [64, 1]
        kv_head = (head % places.heads).to(tl.int64)
        batch = (head // places.heads).to(tl.int64)
        states = new.states + (batch * new.stride_b + kv_head * new.stride_h)
        first_home = batch * places.blocks_b + kv_head * places.blocks_h + places.start
    else:
        offsets, token = tl.zeros([1, 1], tl.int32), block_rows()  # [64]
    channel_scales = new.channel_scales + head * C.HEAD_DIM
    high, low, loud = resident_rotation(new.rotation, channel_scales, C)
    for task in tl.range(worker, total, workers, num_stages=STAGES):
        if places.block_table is None:
            early = states + new.stride_t.to(tl.int64) * (task * TOKENS)
            late = early + HALF_TOKENS * new.stride_t
            home = first_home + task
            if C.ASM >= AMPERE and STAGES > 1:
                _prefetch_rows(states, tl.minimum(task + workers, total - 1), new.stride_t, C.TILE)
        else:
            sequence, before = located(amounts, task)
            first, _, past = lengths(places.cu_seqlens_q, places.cu_seqlens_k, sequence, places.count)
            block = due_blocks_in_kernel(past, SINKS, 0) + task - before
            pages = places.block_table + sequence.to(tl.int64) * places.width
            page = tl.load(pages + first_block_column(SINKS, RING, ROWS) + block).to(tl.int64)
            position = SINKS + block * TOKENS
            early = _rows_of(
                new.states, places.rows, pages, position + token, first, past, head, places.blocks_b, new.stride_t,
                new.stride_h, ROW, START, SINKS, RING, ROWS, C.BLOCK_WORDS,
            )  # fmt: skip
            late = _rows_of(
                new.states, places.rows, pages, position + token + HALF_TOKENS, first, past, head, places.blocks_b,
                new.stride_t, new.stride_h, ROW, START, SINKS, RING, ROWS, C.BLOCK_WORDS,
            )  # fmt: skip
            home = page * places.blocks_b + head
        encode_block(early, late, offsets, packed, home, new.rotation, channel_scales, high, low, loud, C)


@triton.jit
def encode_completed(
    keys, values, places, packed, head, part, worker, workers, SINKS: tl.constexpr, RING: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_B: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Encode every `workers`-th block that new tokens complete over pages, from rings and new tokens.

    `part` is 0 for its keys, 1 for its values.
    """
    _, new, past = lengths(places.cu_seqlens_q, places.cu_seqlens_k, tl.arange(0, BLOCK_B), places.count)
    amounts = completed(new, past, SINKS)  # [BB]
    total = tl.sum(amounts, 0)
    ROW: tl.constexpr = KEYS.HEAD_DIM + VALUES.HEAD_DIM
    if worker < total:
        if part == 0:
            encode_blocks_of(
                keys, places, packed, amounts, total, head, worker, workers, SINKS, RING, ROWS, ROW, 0, 1, KEYS
            )  # fmt: skip
        else:
            encode_blocks_of(
                values, places, packed, amounts, total, head, worker, workers, SINKS, RING, ROWS, ROW, KEYS.HEAD_DIM, 1,
                VALUES,
            )  # fmt: skip


@triton.jit(do_not_specialize="heads blocks start blocks_batch blocks_head key_t key_h value_t value_h width".split())
def encode_blocks(
    states,  # [B, H, n * 128, HEAD_DIM] float16, bfloat16 or float32; over pages keys [T, Hkv, HEAD_DIM]
    packed,  # [B, H, N, BLOCK_WORDS] int32; over pages [pages, Hkv, BLOCK_WORDS]
    rotation,  # [DIM, DIM] float32
    channel_scales,  # [B, H, HEAD_DIM] float16; over pages [Hkv, HEAD_DIM]
    values,  # [T, Hkv, HEAD_DIM of values], strides as of keys in units of 8 elements; this and the rest over pages
    value_rotation, value_channel_scales,
    rows,  # [pages, Hkv, ROWS, HEAD_DIM of keys and of values] in their dtype
    block_table,  # [B, W] int32
    cu_seqlens_q,  # [B + 1] int32
    cu_seqlens_k,  # [B + 1] int32
    heads,  # over pages B
    blocks,  # n; over pages None, like `start`
    start,
    blocks_batch,  # strides in blocks; over pages from page to page
    blocks_head, stride_batch, stride_head, stride_token,  # over pages None
    key_t, key_h, value_t, value_h,  # over pages
    width,  # W
    SHAPE: tl.constexpr,  # an `EncodeShape`; over pages of keys
    OF_VALUES: tl.constexpr,  # over pages
    PDL: tl.constexpr, STAGES: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Encode blocks `program`, `program + programs`, ... of the keys or values; block 0 goes to block `start`.

    Over pages: those that new tokens complete, from rings and new tokens. Grid: (programs, B * H, 1); over pages
    (programs, Hkv, 2): keys, values.
    """
    C: tl.constexpr = constants_of(SHAPE)
    places = BlockPlaces(
        heads, start, blocks_batch, blocks_head, rows, block_table, cu_seqlens_q, cu_seqlens_k, heads, width
    )
    worker, head, workers = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    if block_table is None:
        if PDL and not C.IS_VALUE:
            cuda.gdc_launch_dependents()
        of_states = EncodedStates(states, stride_batch, stride_head, stride_token, rotation, channel_scales)
        encode_blocks_of(
            of_states, places, packed, None, blocks, head, worker, workers, SINKS, RING, ROWS, 0, 0, STAGES, C
        )  # fmt: skip
        if PDL and C.IS_VALUE:
            cuda.gdc_wait()
    else:
        VALUES: tl.constexpr = constants_of(OF_VALUES)
        encode_completed(
            EncodedStates(states, None, key_h * 8, key_t * 8, rotation, channel_scales),
            EncodedStates(values, None, value_h * 8, value_t * 8, value_rotation, value_channel_scales),
            places, packed, head, tl.program_id(2), worker, workers,
            SINKS, RING, ROWS, BLOCK_B, C, VALUES,
        )  # fmt: skip
