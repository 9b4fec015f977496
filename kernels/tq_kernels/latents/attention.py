"""Attention of a few queries over packed latents: each latent is unpacked once, for scores and for values.

A token of multi-head latent attention has one latent c of R channels and one rotary key k for all heads; a store holds
latents as the keys and rotary keys as the values of one KV head. A head's keys are [W_k c, k] and its values W_v c. So
with the queries u = W_k^T q, computed before, and outputs multiplied by W_v, after:

    x[t, r]   = scaling (u[r] . c[t] + q_rotary[r] . k[t])
    out[r, :] = sum_t softmax(x)[t, r] c[t]

Packed latents are rotated by R and packed rotary keys by another rotation: `rotate_latent_queries` rotates queries,
`merge_latents` rotates outputs back. Sinks and residual are dense and meet plain queries.

Query rows are M of both products: rows [rows, R] times a tile of latents [R, tokens], then weights [rows, tokens] times
the same tile [tokens, R].

Rows are r = head * S + query. Partial results are in slots of all rows: slot i < splits of the packed part's program i,
slot splits + j of the j-th tile of dense tokens.

Over pages each sequence has up to S new tokens, which are read where the model made them: they are not stored yet.
Sequences without new tokens or with more than S are left out: nothing is written for them.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from ..common.device import AMPERE, constants_of
from ..common.schedule import DenseTokens, Mask, NewTokens, dense_rows, first_block_column, lengths, parts_of
from ..common.softmax import SoftmaxState, finite, log2_sum, power_of_two, rescaled, weights
from ..common.unpack import chunk_start, load_levels, unpack_scales
from ..decode.reduce import Partials, merge_row
from ..decode.rotate import hadamard, signs
from ..format import TOKENS
from ..prefix.tiles import PrefixMask, hcat, masked, opaque, scaled, stack

DENSE = tl.constexpr(3)
"""Steps over packed blocks that take as long as a tile of dense tokens, which is not copied ahead."""


LatentShape = namedtuple(
    "LatentShape", "DK DV KEY_BITS VALUE_BITS CAUSAL MASK BLOCK_R TILE CHUNKS STAGES ASM BLOCK_WORDS SINKS RING ROWS"
)
"""Constants of `latents_split`: TILE, 16 to 128, is the number of tokens between two updates of the maximum;
CHUNKS, a multiple of 4 at 2 and 3 bits, that of parts of a latent, whose products follow one another; those from
SINKS on are `Pages.place`, 0 without pages."""


LatentRows = namedtuple("LatentRows", "latent rotary")
"""Query rows of a program: chunks [BR, DK / CHUNKS] fp16 for latents, and [BR, DV] fp16 for rotary keys."""


@triton.jit
def _load_chunks(at, inside, CHUNKS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr):
    """Load rows of DIM elements at pointers `at` [M] as chunks [M, DIM / CHUNKS] fp16; 0 where not `inside` [M]."""
    chunks = ()
    column = tl.arange(0, DIM // CHUNKS)[None, :]
    for chunk in tl.static_range(CHUNKS):
        start = chunk_start(chunk, CHUNKS, DIM, BITS)
        chunks += (tl.load(at[:, None] + (start + column), mask=inside[:, None], other=0.0).to(tl.float16),)
    return chunks


@triton.jit
def _load_rows(rows, at, inside, C: tl.constexpr):
    """Load fp16 rows `at` [BR] of `rows`."""
    start = rows + at.to(tl.int64) * (C.DK + C.DV)
    latent = _load_chunks(start, inside, C.CHUNKS, C.DK, C.KEY_BITS)
    rotary = _load_chunks(start + C.DK, inside, 1, C.DV, 8)
    return LatentRows(latent, rotary[0])


@triton.jit
def _packed_tile(block, token, C: tl.constexpr):
    """Unpack tokens `token` [TILE / 4] of the four planes of the block at pointer `block`.

    Returns:
        Chunks of latents [TILE, DK / CHUNKS], and rotary keys [DV, TILE], fp16, plane after plane. They are opaque: of
        joined tiles that become an operand, the compiler takes elements to be of 8 bits, and loads them without
        `ldmatrix`.
    """
    parts = parts_of(block, C.DK * C.KEY_BITS, C.DV * C.VALUE_BITS, 0)
    key_scales, value_scales = (), ()
    for plane in tl.static_range(4):
        key_scale, value_scale = unpack_scales(tl.load(parts.scales + 32 * plane + token))
        key_scales += (key_scale[:, None],)
        value_scales += (value_scale[None, :],)
    latents = ()
    d = tl.arange(0, C.DK // C.CHUNKS)[None, :]
    for chunk in tl.static_range(C.CHUNKS):
        mean = tl.load(parts.means + chunk_start(chunk, C.CHUNKS, C.DK, C.KEY_BITS) + d)
        planes = load_levels(
            parts.key_words, token[:, None], d, None, chunk, C.CHUNKS, C.DK, C.KEY_BITS, False, False, C.ASM
        )
        k = ()
        for plane in tl.static_range(4):
            k += (scaled(planes[plane], key_scales[plane], mean, C.ASM),)
        latents += (opaque(stack(stack(k[0], k[1]), stack(k[2], k[3])), C.ASM),)
    d = tl.arange(0, C.DV)[:, None]
    planes = load_levels(parts.value_words, d, token[None, :], None, 0, 1, C.DV, C.VALUE_BITS, True, False, C.ASM)
    v = ()
    for plane in tl.static_range(4):
        v += (scaled(planes[plane], value_scales[plane], None, C.ASM),)
    return latents, opaque(hcat(hcat(v[0], v[1]), hcat(v[2], v[3])), C.ASM)


@triton.jit
def sum_apart(x, y, ASM: tl.constexpr):
    """x + y, float32. The compiler would make of `x + tl.dot(a, b)` a product that starts from x."""
    if ASM >= AMPERE:
        return tl.inline_asm_elementwise("add.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, is_pure=True, pack=1)
    else:
        return x + y


@triton.jit
def _products(rows: LatentRows, latents, rotary, C: tl.constexpr):
    """Products [BR, TILE] of rows and tokens."""
    x = tl.dot(rows.rotary, rotary)
    for chunk in tl.static_range(C.CHUNKS):
        # Sums of their own: products of few rows would wait for one another, and see `latents_split` for many.
        x = sum_apart(x, tl.dot(rows.latent[chunk], tl.trans(latents[chunk])), C.ASM)
    return x


@triton.jit
def _empty(C: tl.constexpr):
    """State of a softmax over nothing: its total [BR, TILE] is summed over columns at the end, its output in chunks."""
    output = ()
    for _ in tl.static_range(C.CHUNKS):
        output += (tl.zeros([C.BLOCK_R, C.DK // C.CHUNKS], tl.float32),)
    return SoftmaxState(
        tl.full([C.BLOCK_R], -float("inf"), tl.float32), tl.zeros([C.BLOCK_R, C.TILE], tl.float32), output
    )


@triton.jit
def _weights(state: SoftmaxState, x, gain, MASKED: tl.constexpr):
    """Return the maximum and the sums of weights with products x [BR, TILE], the factor of earlier outputs, and the
    weights, fp16."""
    maximum, shift, decay = rescaled(state.maximum, tl.max(x, 1), gain, MASKED)
    p = weights(x, shift, gain)
    return maximum, state.total * decay[:, None] + p, decay, p.to(tl.float16)


@triton.jit
def _outputs(state: SoftmaxState, decay, p, latents, C: tl.constexpr):
    """Update outputs with weights p [BR, TILE] and the chunks of these tokens' latents."""
    output = ()
    for chunk in tl.static_range(C.CHUNKS):
        output += (tl.dot(p, latents[chunk], state.output[chunk] * decay[:, None]),)
    return output


@triton.jit
def _store(state: SoftmaxState, gain, lse, partial, row, inside, C: tl.constexpr):
    """Store a normalised partial result; `lse` and `partial` point to a slot, `row` [BR] are rows of it."""
    total = tl.sum(state.total, 1)
    tl.store(lse + row, log2_sum(finite(state.maximum) * gain, total), mask=inside)
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    d = tl.arange(0, C.DK // C.CHUNKS)[None, :]
    for chunk in tl.static_range(C.CHUNKS):
        at = partial + row.to(tl.int64)[:, None] * C.DK + (chunk_start(chunk, C.CHUNKS, C.DK, C.KEY_BITS) + d)
        tl.store(at, state.output[chunk] * inverse[:, None], mask=inside[:, None])


@triton.jit
def _sequence(packed, cu_seqlens_q, cu_seqlens_k, queries):
    """First new token of this program's sequence, and its numbers: new tokens, cached tokens, blocks to read packed,
    dense tokens. A sequence that is left out has 0 blocks and 0 dense tokens."""
    b = tl.program_id(1)
    first, new, past = lengths(cu_seqlens_q, cu_seqlens_k, b, tl.num_programs(1))
    taken = (new > 0) & (new <= queries)
    blocks = tl.where(taken, tl.load(packed + b), 0)
    return first, new, past, blocks, tl.where(taken, past + new - blocks * TOKENS, 0)


@triton.jit
def _share(blocks, tokens, split, splits, TILE: tl.constexpr, STEPS: tl.constexpr):
    """Divide tiles of dense `tokens` and steps over `blocks` among the programs: a tile counts as DENSE steps.

    Returns:
        A program's first tile and the one after its last, then its first step and the one after its last.
    """
    tiles = (tokens + TILE - 1) // TILE
    units = tiles * DENSE + blocks * STEPS
    start = units // splits * split + units % splits * split // splits
    end = units // splits * (split + 1) + units % splits * (split + 1) // splits
    first_tile, last_tile = (start + DENSE - 1) // DENSE, tl.minimum((end + DENSE - 1) // DENSE, tiles)
    return first_tile, last_tile, tl.maximum(start - tiles * DENSE, 0), tl.maximum(end - tiles * DENSE, 0)


LatentNumbers = namedtuple("LatentNumbers", "rows count queries blocks_b ring sinks key_t value_t width scaling_log2")
"""Numbers of `latents_split`.

Args:
    rows, count, queries: Hq * S, B * rows, S.
    blocks_b: Stride over sequences in blocks; over pages from page to page.
    ring, sinks: Without pages.
    key_t, value_t, width: Over pages strides of new tokens in units of 8 elements, and W.
    scaling_log2: Scaling times log2(e).
"""


@triton.jit
def latents_split(
    rotated, plain,  # [B * rows, DK + DV] fp16
    scale,  # [B * rows] float32
    packed_blocks,  # [B, 1, N, BLOCK_WORDS] int32; over pages [pages, 1, BLOCK_WORDS]
    num_blocks,  # [] int32; over pages [B]
    kv_rows,  # [B, 1, ring + sinks, DK + DV] in the model's dtype; over pages [pages, 1, ROWS, DK + DV]
    num_residual,  # [] int32; over pages None, like the next
    num_sinks,  # [] int32
    mask: Mask,
    new_keys,  # [T, 1, DK]; this and the next four over pages, or None
    new_values,  # [T, 1, DV]
    block_table,  # [B, W] int32
    cu_seqlens_q, cu_seqlens_k,  # [B + 1] int32
    lse,  # [slots, B * rows] float32, base 2
    partial,  # [slots, B * rows, DK] float32, normalised
    n: LatentNumbers,
    SHAPE: tl.constexpr,  # a `LatentShape`
):  # fmt: skip
    """Attend to every program's share: writes `partial` and `lse`. Grid: (row tiles, B, splits).

    Without pages residual row j is in row (128 * num_blocks + j) % ring.
    """
    C: tl.constexpr = constants_of(SHAPE)
    PART: tl.constexpr = C.TILE // 4  # tokens of a plane
    STEPS: tl.constexpr = TOKENS // C.TILE
    batch, split, splits = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    if block_table is None:
        blocks, residual_count, sink_count = tl.load(num_blocks), tl.load(num_residual), tl.load(num_sinks)
        tokens = sink_count + residual_count
    else:
        _, _, _, blocks, tokens = _sequence(num_blocks, cu_seqlens_q, cu_seqlens_k, n.queries)
    first_tile, last_tile, first, last = _share(blocks, tokens, split, splits, C.TILE, STEPS)
    r = tl.program_id(0) * C.BLOCK_R + tl.arange(0, C.BLOCK_R)
    inside = r < n.rows
    row = tl.program_id(1) * n.rows + r
    gain = tl.load(scale + row, mask=inside, other=1.0) * n.scaling_log2  # [BR]
    seen = PrefixMask(None, None, None)
    if C.MASK:
        seen = PrefixMask(mask.start + batch * mask.b, (r % n.queries).to(tl.int64) * mask.s, mask.t)

    packed = _load_rows(rotated, row, inside, C)
    state = _empty(C)
    if block_table is not None:  # a page is read a step ahead
        pages = block_table + batch * n.width + first_block_column(C.SINKS, C.RING, C.ROWS)
        page = tl.load(pages + first // STEPS, mask=first < last, other=0)
    for step in tl.range(first, last, num_stages=C.STAGES):
        block = tl.cast(step, tl.int32) // STEPS
        part = (tl.cast(step, tl.int32) - block * STEPS) * PART
        at = batch * n.blocks_b + block if block_table is None else page.to(tl.int64) * n.blocks_b
        latents, rotary = _packed_tile(packed_blocks + at * C.BLOCK_WORDS, part + tl.arange(0, PART), C)
        maximum, total, decay = state.maximum, state.total, tl.zeros([C.BLOCK_R], tl.float32)
        p = tl.zeros([C.BLOCK_R, C.TILE], tl.float16)
        # The branch is always taken. Without it the compiler sees that these products lead to others, and gives each
        # warp whole rows: two warpgroups would compute the same 64 rows.
        if step >= first if C.BLOCK_R >= 64 else True:
            x = _products(packed, latents, rotary, C)
            if C.MASK:
                i = tl.arange(0, C.TILE)
                t = sink_count + block * TOKENS + i // PART * 32 + part + i % PART
                x = masked(x, seen, t, t >= 0, C.MASK)
            maximum, total, decay, p = _weights(state, x, gain, C.MASK > 0)
        state = SoftmaxState(maximum, total, _outputs(state, decay, p, latents, C))
        if block_table is not None:
            page = tl.load(pages + (step + 1) // STEPS, mask=step + 1 < last, other=0)
    # Rows again: their addresses would take registers through the loop.
    r = opaque(tl.program_id(0) * C.BLOCK_R, C.ASM) + tl.arange(0, C.BLOCK_R)
    inside = r < n.rows
    row = tl.program_id(1) * n.rows + r
    _store(
        state, gain, lse + split.to(tl.int64) * n.count, partial + split.to(tl.int64) * n.count * C.DK, row, inside, C
    )

    query = r % n.queries
    if C.MASK:
        seen = PrefixMask(mask.start + batch * mask.b, query.to(tl.int64) * mask.s, mask.t)
    if block_table is None:
        new, own_rows = n.queries, kv_rows + batch * (n.ring + n.sinks) * (C.DK + C.DV)
        dense = DenseTokens(
            own_rows, None, None, None, n.sinks, n.ring, (blocks * TOKENS) % n.ring, tokens, None, tokens
        )
    else:  # read again: it would take registers through the loop
        first_new, new, past, blocks, tokens = _sequence(num_blocks, cu_seqlens_q, cu_seqlens_k, n.queries)
        first_tile, last_tile, _, _ = _share(blocks, tokens, split, splits, C.TILE, STEPS)
        new_keys += first_new.to(tl.int64) * (n.key_t * 8)
        new_values += first_new.to(tl.int64) * (n.value_t * 8)
        dense = DenseTokens(
            kv_rows, block_table + batch * n.width, n.blocks_b, 0, C.SINKS, C.RING, (blocks * TOKENS) % C.RING,
            tokens - new, NewTokens(new_keys, new_values, n.key_t * 8, n.value_t * 8), tokens,
        )  # fmt: skip
    for tile in tl.range(first_tile, last_tile, num_stages=1):
        t = tile * C.TILE + tl.arange(0, C.TILE)
        exists = t < tokens
        newest = _load_rows(plain, row, inside, C)
        key_at, value_at = dense_rows(dense, t, C)
        latents = _load_chunks(key_at, exists, C.CHUNKS, C.DK, C.KEY_BITS)
        x = _products(newest, latents, tl.trans(_load_chunks(value_at, exists, 1, C.DV, 8)[0]), C)
        allowed = exists[None, :]
        if C.CAUSAL:
            allowed = allowed & (t[None, :] <= (tokens - new + query)[:, None])
        x = tl.where(allowed, x, -float("inf"))
        if C.MASK:
            x = masked(x, seen, tl.where(t < n.sinks, t, t + blocks * TOKENS), exists, C.MASK)
        state = _empty(C)
        maximum, total, decay, p = _weights(state, x, gain, True)
        state = SoftmaxState(maximum, total, _outputs(state, decay, p, latents, C))
        at = (splits + tile).to(tl.int64) * n.count
        _store(state, gain, lse + at, partial + at * C.DK, row, inside, C)


@triton.jit
def _rotated(x, rotation, factor, ROWS: tl.constexpr, DIM: tl.constexpr):
    """R (x / factor) of rows x [ROWS, DIM] float32."""
    sign = signs(rotation, tl.arange(0, DIM), DIM)
    return hadamard(x * (sign / factor)[None, :], rotation, ROWS, DIM, DIM) * (DIM**-0.5)


@triton.jit(do_not_specialize=["rows", "queries"])
def rotate_latent_queries(
    latent,  # [Hq, B * S, DK], any float dtype, last dimension contiguous; over pages [Hq, T, DK]
    query,  # [B, Hq, S, DV], likewise; over pages [1, Hq, T, DV]
    key_rotation, value_rotation,  # [DK, DK] and [DV, DV] fp16, sqrt(D) R
    key_channel_scales,  # [B, DK] fp16; over pages [1, DK]
    value_channel_scales,  # [B, DV] fp16
    cu_seqlens_q,  # [B + 1] int32 over pages, or None
    rotated, plain,  # [B * rows, DK + DV] fp16
    scale,  # [B * rows] float32
    rows, queries,  # Hq * S, S
    latent_strides, query_strides, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Normalise each row by a power of two, and rotate both its parts. Grid: (rows, B)."""
    row, batch = tl.program_id(0), tl.program_id(1)
    latent_h, latent_s = latent_strides
    query_b, query_h, query_s = query_strides
    at = batch * rows + row
    head, s = (row // queries).to(tl.int64), row % queries
    token, inside = batch * queries + s, True
    if cu_seqlens_q is not None:
        token = tl.load(cu_seqlens_q + batch) + s
        inside = token < tl.load(cu_seqlens_q + batch + 1)  # rows of no token are 0
        batch, s = 0, token
    dk, dv = tl.arange(0, DK), tl.arange(0, DV)
    key_factor = tl.abs(tl.load(key_channel_scales + batch * DK + dk).to(tl.float32))
    value_factor = tl.load(value_channel_scales + batch * DV + dv).to(tl.float32)
    u = tl.load(latent + head * latent_h + token.to(tl.int64) * latent_s + dk, mask=inside, other=0.0).to(tl.float32)
    q = tl.load(
        query + tl.cast(batch, tl.int64) * query_b + head * query_h + s * query_s + dv, mask=inside, other=0.0
    ).to(tl.float32)
    power, inverse = power_of_two(tl.maximum(tl.max(tl.abs(u), 0), tl.max(tl.abs(q), 0)))
    u, q = (u * inverse)[None, :], (q * inverse)[None, :]
    tl.store(scale + at, power)
    start = at.to(tl.int64) * (DK + DV)
    keys_at, values_at = (start + dk)[None, :], (start + DK + dv)[None, :]
    tl.store(plain + keys_at, u.to(tl.float16))
    tl.store(plain + values_at, q.to(tl.float16))
    tl.store(rotated + keys_at, _rotated(u, key_rotation, key_factor, 1, DK).to(tl.float16))
    tl.store(rotated + values_at, _rotated(q, value_rotation, value_factor, 1, DV).to(tl.float16))


@triton.jit(do_not_specialize=["rows", "queries", "count", "splits"])
def merge_latents(
    lse,  # [slots, count] float32
    partial,  # [slots, count, DK] float32
    num_residual,  # [] int32; over pages None, like the next
    num_sinks,  # [] int32
    packed,  # as `num_blocks` over pages, or None, like the next two
    cu_seqlens_q, cu_seqlens_k,  # [B + 1] int32
    rotation,  # [DK, DK] fp16, sqrt(DK) R
    channel_scales,  # [B, DK] fp16; over pages [1, DK]
    out,  # [Hq, B * S, DK], last dimension contiguous; over pages [Hq, T, DK]
    rows, queries,  # Hq * S, S
    count,  # B * rows
    splits,
    strides,  # of `out`
    SHAPE: tl.constexpr,  # a `ReduceShape`, TILE_R the split's TILE
):  # fmt: skip
    """Merge the slots of `latents_split`. Grid: (rows, B)."""
    C: tl.constexpr = constants_of(SHAPE)
    row, batch = tl.program_id(0), tl.program_id(1)
    merged = batch * rows + row
    token = batch * queries + row % queries
    if cu_seqlens_q is None:
        tokens = tl.load(num_sinks) + tl.load(num_residual)
    else:
        first, new, _, _, tokens = _sequence(packed, cu_seqlens_q, cu_seqlens_k, queries)
        if (tokens == 0) | (row % queries >= new):
            return
        batch, token = 0, first + row % queries
    d = tl.arange(0, C.DV)
    factor = tl.abs(tl.load(channel_scales + batch * C.DV + d).to(tl.float32))
    dense = splits + (tokens + C.TILE_R - 1) // C.TILE_R
    result = merge_row(
        Partials(lse, partial, count), merged, (0, splits), (splits, dense), rotation,
        signs(rotation, d, C.DV), factor, None, C,
    )  # fmt: skip
    at = (row // queries).to(tl.int64) * strides[0] + token.to(tl.int64) * strides[1]
    tl.store(out + at + d, result.to(out.dtype.element_ty))
