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

from collections import namedtuple

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..common.device import AMPERE, TURING, constants_of
from ..common.launcher import Strides
from ..common.schedule import completed, fetch, first_block_column, lengths, located, ring_rows, row_choice, row_of
from ..format import CODE, PLANE, TOKENS, due_blocks_in_kernel
from .loud import coded_scales, finite_size, loud_channels_of, loud_unit, store_loud
from .quantize import part_channels, part_width, row_sizes, store_codes, store_scales

HALF_TOKENS = tl.constexpr(TOKENS.value // 2)


EncodeShape = namedtuple(
    "EncodeShape", "HEAD_DIM DIM TILE BITS IS_VALUE MATRIX K_STEP ASM BLOCK_WORDS WORDS_AT SCALES_AT LOUD"
)
"""Constants of `encode_block`. BLOCK_WORDS: int32 words of a block; WORDS_AT, SCALES_AT: those before the codes
and before the scales (`tq_kernels.layout`); LOUD: number of loud channels."""


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


Rotation = namedtuple("Rotation", "matrix channel_scales high low loud")
"""Rotation and channel scales of a head: pointers, and what `resident_rotation` loads."""


@triton.jit
def resident_rotation(matrix, channel_scales, C: tl.constexpr):
    """Load the whole rotation if one step takes all channels, and the loud channels; else zeros, because a function
    cannot return `None` before Triton 3.7."""
    high, low, loud = 0.0, 0.0, (0, 0.0)
    if C.K_STEP == C.TILE:
        high, low = load_rotation(matrix, channel_scales, 0, C.TILE, C)
    if C.LOUD > 0:
        loud = loud_channels_of(channel_scales, C.HEAD_DIM, C.TILE, C.LOUD)
    return Rotation(matrix, channel_scales, high, low, loud)


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


BlockStates = namedtuple("BlockStates", "early late offsets")
"""Rows of a block: a pointer or pointers [64, 1], and offsets [64, 1] or [1, 1], to the first 64 in the order of
`block_rows`; pointers to the other 64."""


@triton.jit
def _encode_loud(states, loud, words, scales, C: tl.constexpr):
    """Encode the loud channels of a block's rows: codes to `words`, means and units behind the means at `scales`."""
    index, factor = loud
    at = states.offsets + index[None, :]
    x0 = tl.load(states.early + at).to(tl.float32) * factor[None, :]  # [64, LOUD]
    x1 = tl.load(states.late + at).to(tl.float32) * factor[None, :]
    mean = (tl.sum(x0 + x1, axis=0) * (1 / TOKENS)).to(tl.float16)
    mean = _finite_or_zero(mean, C.ASM)
    x0 -= mean.to(tl.float32)[None, :]
    x1 -= mean.to(tl.float32)[None, :]
    unit = loud_unit(tl.max(tl.maximum(finite_size(x0), finite_size(x1)), 0))  # [LOUD]
    store_loud(x0, x1, unit, words, C.LOUD)
    others = scales + 2 * TOKENS + C.DIM + 2 * tl.arange(0, C.LOUD)
    tl.store(others, mean)
    tl.store(others + 1, unit)


@triton.jit
def _rotated(states, rotation, scales, part, C: tl.constexpr):
    """Rotate a block's rows and store the mean of keys behind `scales`: part `part` of the channels less the mean, two
    tiles [64, part_width(TILE)]."""
    UNIT: tl.constexpr = C.DIM**-0.5
    SPLIT: tl.constexpr = _takes_two(C.MATRIX, C.DIM)
    early, late, offsets = states
    k = tl.arange(0, C.K_STEP)
    y0 = tl.zeros([HALF_TOKENS, part_width(C.TILE)], tl.float32)
    y1 = tl.zeros([HALF_TOKENS, part_width(C.TILE)], tl.float32)
    if C.K_STEP == C.TILE:
        x0 = _load_rows(early + (offsets + k[None, :]), k, C.HEAD_DIM, C.TILE)  # [64, TILE]
        x1 = _load_rows(late + (offsets + k[None, :]), k, C.HEAD_DIM, C.TILE)
        y0 = _add_product(x0, rotation.high, rotation.low, y0, SPLIT, C.ASM)
        y1 = _add_product(x1, rotation.high, rotation.low, y1, SPLIT, C.ASM)
    else:
        for first in tl.range(0, C.TILE, C.K_STEP):
            x0 = _load_rows(early + first + (offsets + k[None, :]), first + k, C.HEAD_DIM, C.TILE)  # [64, K_STEP]
            x1 = _load_rows(late + first + (offsets + k[None, :]), first + k, C.HEAD_DIM, C.TILE)
            high, low = load_rotation(rotation.matrix, rotation.channel_scales, first, C.K_STEP, C, part)
            y0 = _add_product(x0, high, low, y0, SPLIT, C.ASM)
            y1 = _add_product(x1, high, low, y1, SPLIT, C.ASM)
    if not C.IS_VALUE:
        mean = _finite_or_zero((tl.sum(y0 + y1, axis=0) * (UNIT / TOKENS)).to(tl.float16), C.ASM)
        channel, inside = part_channels(part, C.DIM, C.TILE)
        tl.store(scales + 2 * TOKENS + channel, mean, mask=inside)
        stored = mean.to(tl.float32) * (1 / UNIT)
        y0 -= stored[None, :]
        y1 -= stored[None, :]
    return y0, y1


@triton.jit
def encode_block(states, packed, home, rotation, C: tl.constexpr):
    """Encode one block's keys or values, `BlockStates`, as block `home` of those from pointer `packed` on. `rotation`
    comes from `resident_rotation`; C is an `EncodeShape`."""
    WIDTH: tl.constexpr = part_width(C.TILE)
    words = packed + home * C.BLOCK_WORDS + C.WORDS_AT
    scales = (packed + home * C.BLOCK_WORDS + C.SCALES_AT).to(tl.pointer_type(tl.float16), bitcast=True)
    if C.LOUD > 0:
        _encode_loud(states, rotation.loud, words + 4 * C.DIM * C.BITS, scales, C)
    if WIDTH == C.TILE:
        y0, y1 = _rotated(states, rotation, scales, 0, C)
        sizes = None
        inner = store_codes(y0, y1, sizes, words, 0, C.IS_VALUE, C.BITS, C.DIM, C.TILE, C.ASM)
    else:
        # Rotate each part twice, for the sizes of rows and to quantize them: registers hold no more.
        size0 = tl.zeros([PLANE], tl.float32)
        size1, size2, size3 = size0, size0, size0
        for part in tl.range(0, C.TILE // WIDTH, num_stages=1):
            y0, y1 = _rotated(states, rotation, scales, part, C)
            added = row_sizes(y0, C.BITS) + row_sizes(y1, C.BITS)
            if CODE[C.BITS].is_fp8:
                size0, size1 = tl.maximum(size0, added[0]), tl.maximum(size1, added[1])
                size2, size3 = tl.maximum(size2, added[2]), tl.maximum(size3, added[3])
            else:
                size0, size1, size2, size3 = size0 + added[0], size1 + added[1], size2 + added[2], size3 + added[3]
        sizes = (size0, size1, size2, size3)
        inner = tl.zeros([PLANE, 2, 2], tl.float32)
        for part in tl.range(0, C.TILE // WIDTH, num_stages=1):
            y0, y1 = _rotated(states, rotation, scales, part, C)
            inner += store_codes(y0, y1, sizes, words, part, C.IS_VALUE, C.BITS, C.DIM, C.TILE, C.ASM)
    store_scales(inner, sizes, scales + C.IS_VALUE, C.IS_VALUE, C.BITS, C.DIM)


@triton.jit
def _prefetch_rows(states, block, stride_token, TILE: tl.constexpr):
    """Fetch the rows of a block into the L2 cache: the pipeline copies them to shared memory just before use."""
    LINE: tl.constexpr = 1024 // states.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = TILE // LINE if TILE > LINE else 1  # `max` is no constant in Triton 3.5
    line = tl.arange(0, LINES) * LINE
    rows = states + stride_token.to(tl.int64) * (block * TOKENS)
    fetch(rows + (tl.arange(0, TOKENS)[:, None] * stride_token + line[None, :]))  # [128, lines]


@triton.jit(do_not_specialize="heads blocks start blocks_b blocks_h".split())
def encode_blocks(
    states,  # [B, H, n * 128, HEAD_DIM] float16, bfloat16 or float32
    packed,  # [B, H, N, BLOCK_WORDS] int32
    rotation,  # [DIM, DIM] float32
    channel_scales,  # [B, H, HEAD_DIM] float16
    heads, blocks, start,  # blocks: n
    blocks_b, blocks_h,  # strides in blocks
    strides: Strides,
    SHAPE: tl.constexpr,  # an `EncodeShape`
    PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Encode blocks `program`, `program + programs`, ... of the keys or values; block 0 goes to block `start`. Grid:
    (programs, B * H)."""
    C: tl.constexpr = constants_of(SHAPE)
    worker, head, workers = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    if PDL and not C.IS_VALUE:
        cuda.gdc_launch_dependents()
    offsets = block_rows()[:, None] * strides.token  # [64, 1]
    kv_head = (head % heads).to(tl.int64)
    batch = (head // heads).to(tl.int64)
    states += batch * strides.batch + kv_head * strides.head
    first_home = batch * blocks_b + kv_head * blocks_h + start
    resident = resident_rotation(rotation, channel_scales + head * C.HEAD_DIM, C)
    for block in tl.range(worker, blocks, workers, num_stages=STAGES):
        early = states + strides.token.to(tl.int64) * (block * TOKENS)
        late = early + HALF_TOKENS * strides.token
        if C.ASM >= AMPERE and STAGES > 1:
            _prefetch_rows(states, tl.minimum(block + workers, blocks - 1), strides.token, C.TILE)
        encode_block(BlockStates(early, late, offsets), packed, first_home + block, resident, C)
    if PDL and C.IS_VALUE:
        cuda.gdc_wait()


NewStates = namedtuple("NewStates", "states stride_h stride_t rotation channel_scales")
"""New keys or values of all sequences, [T, Hkv, HEAD_DIM], their strides, R [DIM, DIM] float32 and channel scales
[Hkv, HEAD_DIM] float16."""
PagePlaces = namedtuple("PagePlaces", "rows block_table cu_seqlens_q cu_seqlens_k page_blocks count width")
"""Where sequences have their rows and blocks: rows [pages, Hkv, ROWS, HEAD_DIM of keys and of values] in their dtype, a
block table [B, W], `cu_seqlens_q` and `cu_seqlens_k` [B + 1] int32; blocks from a page to the next, B, W."""
PageShape = namedtuple("PageShape", "SINKS RING ROWS BLOCK_B")
"""`Pages.place`, and the padded number of sequences."""


@triton.jit
def _rows_of(
    new: NewStates, places: PagePlaces, pages, t, first, past, head, ROW: tl.constexpr, START: tl.constexpr,
    P: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Pointers [n, 1] to the rows of tokens `t` [n]: ring rows before `past`, then new ones. A ring's row has ROW
    elements, and its key or value begins START elements further."""
    row = row_of(t, P.SINKS, P.RING)
    in_ring = ring_rows(places.rows, pages, row, t < past, head, places.page_blocks, ROW, P.ROWS, BLOCK_WORDS)
    fresh = (first + tl.maximum(t - past, 0)).to(tl.int64)
    at = row_choice(t < past, in_ring + START, new.states + fresh * new.stride_t + head * new.stride_h, True)
    return at[:, None]


@triton.jit
def _encode_new_blocks(
    new: NewStates, places: PagePlaces, packed, amounts, total, head, worker, workers, ROW: tl.constexpr,
    START: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Encode blocks `worker`, `worker + workers`, ... of `total`; `amounts` [BB] are those that each sequence
    completes."""
    offsets, token = tl.zeros([1, 1], tl.int32), block_rows()  # [64]
    resident = resident_rotation(new.rotation, new.channel_scales + head * C.HEAD_DIM, C)
    for task in tl.range(worker, total, workers, num_stages=1):
        sequence, before = located(amounts, task)
        first, _, past = lengths(places.cu_seqlens_q, places.cu_seqlens_k, sequence, places.count)
        block = due_blocks_in_kernel(past, P.SINKS, 0) + task - before
        pages = places.block_table + sequence.to(tl.int64) * places.width
        page = tl.load(pages + first_block_column(P.SINKS, P.RING, P.ROWS) + block).to(tl.int64)
        t = P.SINKS + block * TOKENS + token
        early = _rows_of(new, places, pages, t, first, past, head, ROW, START, P, C.BLOCK_WORDS)
        late = _rows_of(new, places, pages, t + HALF_TOKENS, first, past, head, ROW, START, P, C.BLOCK_WORDS)
        encode_block(BlockStates(early, late, offsets), packed, page * places.page_blocks + head, resident, C)


@triton.jit
def encode_completed(
    keys: NewStates, values: NewStates, places: PagePlaces, packed, head, part, worker, workers, P: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Encode every `workers`-th block that new tokens complete over pages, from rings and new tokens.

    `part` is 0 for its keys, 1 for its values.
    """
    _, new, past = lengths(places.cu_seqlens_q, places.cu_seqlens_k, tl.arange(0, P.BLOCK_B), places.count)
    amounts = completed(new, past, P.SINKS)  # [BB]
    total = tl.sum(amounts, 0)
    ROW: tl.constexpr = KEYS.HEAD_DIM + VALUES.HEAD_DIM
    if worker < total:
        if part == 0:
            _encode_new_blocks(keys, places, packed, amounts, total, head, worker, workers, ROW, 0, P, KEYS)
        else:
            START: tl.constexpr = KEYS.HEAD_DIM
            _encode_new_blocks(values, places, packed, amounts, total, head, worker, workers, ROW, START, P, VALUES)


@triton.jit
def encode_blocks_of_pages(
    keys: NewStates, values: NewStates,  # strides in units of 8 elements
    places: PagePlaces,
    packed,  # [pages, Hkv, BLOCK_WORDS] int32
    OF_KEYS: tl.constexpr, OF_VALUES: tl.constexpr,  # an `EncodeShape` each
    PAGES: tl.constexpr,  # a `PageShape`
):  # fmt: skip
    """Encode the blocks that new tokens complete, from rings and new tokens. Grid: (programs, Hkv, 2): keys, values."""
    encode_completed(
        NewStates(keys.states, keys.stride_h * 8, keys.stride_t * 8, keys.rotation, keys.channel_scales),
        NewStates(values.states, values.stride_h * 8, values.stride_t * 8, values.rotation, values.channel_scales),
        places, packed, tl.program_id(1), tl.program_id(2), tl.program_id(0), tl.num_programs(0), constants_of(PAGES),
        constants_of(OF_KEYS), constants_of(OF_VALUES),
    )  # fmt: skip
