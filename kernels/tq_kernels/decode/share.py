"""Attend to a contiguous part of a stream's packed blocks: one program's work in decode attention."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from ..codec.loud import loud_rows
from ..common.schedule import LINE, ROTATED, DecodeNumbers, DecodeTensors, StreamBlocks, parts_of, row_size
from ..common.softmax import bounded, log2_sum, rescaled
from ..common.unpack import PROBABILITY_BITS, chunk_start
from ..format import TOKENS
from .tiles import (
    ROWS32,
    allowed_tile,
    key_scores,
    level_unit,
    load_bias,
    load_scales,
    mean_scores,
    scales_of,
    store_partial,
    value_levels,
)

DecodeRows = namedtuple("DecodeRows", "head r inside")
"""Query rows of a stream: first row of the KV head's queries in scratch; [BR] rows of the head, and whether they
exist."""


@triton.jit
def _load_queries(a: DecodeTensors, rows, C: tl.constexpr):
    """Load rotated queries: the KEY_CHUNKS parts of their channels [BKC, BR]; parts as long as those of means [BM, BR];
    and loud channels of each plane [4 * LOUD, BR], 0 in the columns of the other planes."""
    WIDTH: tl.constexpr = C.DKP // C.KEY_CHUNKS
    kc, km = tl.arange(0, C.BLOCK_KC), tl.arange(0, C.BLOCK_MEAN)
    queries_at = a.scratch.to(tl.pointer_type(tl.float16), bitcast=True) + ROTATED
    row_at = queries_at + (rows.head + rows.r)[None, :] * row_size(C.DKP, C.LOUD)
    rotated = row_at + kc[:, None]
    inside = (kc < WIDTH)[:, None] & rows.inside[None, :]
    q = ()
    for chunk in tl.static_range(C.KEY_CHUNKS):
        at = rotated + chunk_start(chunk, C.KEY_CHUNKS, C.DKP, C.KEY_BITS)
        q += (tl.load(at, mask=inside, other=0.0),)
    of_mean = q
    if C.BLOCK_MEAN != C.BLOCK_KC:
        inside = (km < C.DKP)[:, None] & rows.inside[None, :]
        of_mean = (tl.load(row_at + km[:, None], mask=inside, other=0.0),)
    loud = ()
    if C.LOUD > 0:
        column = tl.arange(0, 4 * C.LOUD)[:, None]
        for plane in tl.static_range(4):
            own = (column // C.LOUD == plane) & rows.inside[None, :]
            loud += (tl.load(row_at + C.DKP + column % C.LOUD, mask=own, other=0.0),)
    return q, of_mean, loud


@triton.jit
def _products(parts, queries, words, next_scales, exists, C: tl.constexpr):
    """Multiply keys of a block by queries: four planes [32, BR]; the planes' scales of values [32], from `words`; and
    the next block's words of scales, at `next_scales` if it `exists`."""
    q, of_mean, of_loud = queries
    n, kc = tl.arange(0, 32), tl.arange(0, C.BLOCK_KC)
    # Mean: mean . rotated queries, the same for all tokens of the block; and loud channels.
    shared = mean_scores(parts.means, of_mean, tl.arange(0, C.BLOCK_MEAN), C)
    others = (shared, shared, shared, shared)
    if C.LOUD > 0:
        loud = loud_rows(parts.loud, parts.means + C.DKP, C.LOUD, C.ASM)
        others = ()
        for plane in tl.static_range(4):
            others += (tl.dot(loud, of_loud[plane], shared),)
    # Scores: key levels . rotated queries, then the keys' scales.
    scores = key_scores(parts.key_words, q, n[:, None], kc[None, :], C)
    key_scale, value_scale = scales_of(words)
    words = load_scales(next_scales, exists)
    # Each step for all four planes: softcap's exponentials stay in this order.
    x = ()
    for plane in tl.static_range(4):
        x += (scores[plane] * (key_scale[plane] * (1 / level_unit(C.KEY_BITS, C.SMALL)))[:, None],)
    x = (x[0] + others[0], x[1] + others[1], x[2] + others[2], x[3] + others[3])
    return x, value_scale, words


@triton.jit
def _masked(x, a: DecodeTensors, n: DecodeNumbers, mask_at, bias, rows, t, C: tl.constexpr):
    """Set logits to -inf where a token is masked: by `bias`, for all rows alike, or row by row; `t` [32] are columns of
    plane 0."""
    if C.MASK == 1:
        return x[0] + bias[0][:, None], x[1] + bias[1][:, None], x[2] + bias[2][:, None], x[3] + bias[3][:, None]
    else:
        mask_offset = (rows.r % n.queries) * a.mask_s  # [BR]
        seen = ()
        for plane in tl.static_range(4):
            allowed = allowed_tile(mask_at, t + 32 * plane, mask_offset, a.mask_t, rows.inside[None, :])
            seen += (tl.where(allowed, x[plane], -float("inf")),)
        return seen


@triton.jit
def _add_values(acc, alpha, value_words, value_scale, p, C: tl.constexpr):
    """Add value levels @ (probabilities p [32, BR] times the values' scales) to sums times `alpha` [BR], by chunk."""
    n, vc = tl.arange(0, 32), tl.arange(0, C.BLOCK_VC)
    decayed = ()
    for chunk in tl.static_range(C.VALUE_CHUNKS):
        decayed += (acc[chunk] * alpha[None, :],)
    if C.VALUE_CHUNKS == 1:
        # Two planes at a time: the exchange of probabilities between warps takes half the shared memory.
        values = value_levels(value_words, vc[:, None], n[None, :], 0, C)
        a = decayed[0]
        for half in tl.static_range(2):
            early = (p[2 * half] * value_scale[2 * half][:, None]).to(tl.float16)
            late = (p[2 * half + 1] * value_scale[2 * half + 1][:, None]).to(tl.float16)
            a = tl.dot(values[2 * half], early, a)
            a = tl.dot(values[2 * half + 1], late, a)
        return (a,)
    else:
        weights = ()
        for plane in tl.static_range(4):
            weights += ((p[plane] * value_scale[plane][:, None]).to(tl.float16),)
        added = ()
        for chunk in tl.static_range(C.VALUE_CHUNKS):
            levels = value_levels(value_words, vc[:, None], n[None, :], chunk, C)
            a = decayed[chunk]
            for plane in tl.static_range(4):
                a = tl.dot(levels[plane], weights[plane], a)
            added += (a,)
        return added


@triton.jit
def store_share(
    a: DecodeTensors, n: DecodeNumbers, blocks: StreamBlocks, mask_at, first, last, rows: DecodeRows, slot, local,
    stored, sink_count, C: tl.constexpr,
):  # fmt: skip
    """Attend to blocks `first` to `last` of a stream and leave the partial result in slot `slot`.

    Args:
        mask_at: Pointer to the sequence's mask.
        first, last: First block and the one after the last; `last` comes from `per_lane`.
        sink_count: Number of tokens before block 0, in columns of the mask.
        C: A `DecodeShape`.
    """
    KEY: tl.constexpr = C.DKP * C.KEY_BITS
    VALUE: tl.constexpr = C.DVP * C.VALUE_BITS
    token = tl.arange(0, 32)
    # Queries: factors to base-2 logits, and the rotated rows.
    factor = tl.load(a.scratch + LINE * n.scale_at + rows.head + rows.r, mask=rows.inside, other=1.0)  # [BR]
    factor = factor * n.scaling_log2
    queries = _load_queries(a, rows, C)
    acc = ()
    for _ in tl.static_range(C.VALUE_CHUNKS):
        acc += (tl.zeros([C.BLOCK_VC, C.BLOCK_R], tl.float32),)
    sums = tl.zeros([ROWS32, C.BLOCK_R], tl.float32)
    maximum = tl.full([C.BLOCK_R], -float("inf"), tl.float32)

    # Scales, one block ahead, into registers: as asynchronous copies they would cost four branches a block.
    if blocks.block_table is None:
        at = blocks.head + first * C.BLOCK_WORDS
    else:
        # Pages are read two blocks ahead, because words are copied and scales read one block ahead.
        page_words = (blocks.page_blocks * C.BLOCK_WORDS).to(tl.int64)
        at = blocks.head + tl.load(blocks.block_table + first).to(tl.int64) * page_words
        page = tl.load(blocks.block_table + first + 1, mask=first + 1 < last, other=0)
    words = load_scales(parts_of(at, KEY, VALUE, C.LOUD).scales + token, first < last)
    bias = ()
    if C.MASK == 1:
        bias_at = mask_at + (sink_count + token).to(tl.int64) * a.mask_t
        bias = load_bias(bias_at, first, a.mask_t)
    for block in tl.range(first, last):
        if blocks.block_table is None:
            next_at = at + C.BLOCK_WORDS
        else:
            next_at = blocks.head + page.to(tl.int64) * page_words
        parts = parts_of(at, KEY, VALUE, C.LOUD)
        next_scales = parts_of(next_at, KEY, VALUE, C.LOUD).scales + token
        x, value_scale, words = _products(parts, queries, words, next_scales, block + 1 < last, C)
        if C.BOUNDS:
            capped = ()
            for plane in tl.static_range(4):
                capped += (bounded(x[plane] * factor[None, :], n.cap_log2, C.BOUNDS),)
            x = capped
        if C.MASK:
            x = _masked(x, a, n, mask_at, bias, rows, sink_count + block * TOKENS + token, C)
        if C.MASK == 1:
            bias = load_bias(bias_at, tl.minimum(block + 1, last - 1), a.mask_t)
        # Softmax: the maximum stays in the units of these products; the factor to base 2 enters the exponent's FMA.
        gain = tl.full([C.BLOCK_R], 1.0, tl.float32) if C.BOUNDS else factor
        largest = tl.max(tl.maximum(tl.maximum(x[0], x[1]), tl.maximum(x[2], x[3])), 0)  # [BR]
        maximum, shift, alpha = rescaled(maximum, largest, gain, C.MASK)
        offset = shift * gain - PROBABILITY_BITS
        p = ()
        for plane in tl.static_range(4):
            p += (tl.exp2(x[plane] * gain[None, :] - offset[None, :]),)  # [32, BR]
        sums = sums * alpha[None, :] + ((p[0] + p[1]) + (p[2] + p[3]))
        acc = _add_values(acc, alpha, parts.value_words, value_scale, p, C)
        at = next_at
        if blocks.block_table is not None:
            page = tl.load(blocks.block_table + block + 2, mask=block + 2 < last, other=0)

    total = tl.sum(sums, 0)  # [BR]
    gain = tl.full([C.BLOCK_R], 1.0, tl.float32) if C.BOUNDS else factor
    UNIT: tl.constexpr = level_unit(C.VALUE_BITS, C.SMALL)
    store_partial(
        a, n, slot, local, stored, acc, total, log2_sum(maximum * gain - PROBABILITY_BITS, total), UNIT,
        C.VALUE_CHUNKS, C.DVP, C.VALUE_BITS, C,
    )  # fmt: skip
