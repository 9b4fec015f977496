"""Store the dense rows and the channel scales of a prompt in one launch (`tq_hf.codec.balance` takes a thousand).

Programs of one kind sum squares of keys, values or queries, over one piece of the prompt and one head of one sequence.
The program of a head that ends last adds up the pieces and computes the scales: one for keys with queries, one for
values. Sums are in fp32, in an order that depends on shapes and strides alone. Programs of the other kind copy rows of
keys or values.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common.device import constants_of
from ..common.launcher import Kernel, Launch, Strides, launch_all
from ..common.schedule import write_counts
from ..format import (
    FAR,
    LARGEST_RATIO,
    LARGEST_SCALE,
    LARGEST_STATE,
    LEAST_TOKENS,
    NEAR,
    OUT_OF_RANGE,
    QUIETEST,
    SMALLEST_SCALE,
    TOKENS,
    Sample,
    loud_channels,
    sample,
    sampled_start,
)
from ..types import ChannelScales, DenseRows, KeyValue

_LARGEST_STATE, _LARGEST_RATIO, _QUIETEST = map(tl.constexpr, (LARGEST_STATE, LARGEST_RATIO, QUIETEST))
_OUT_OF_RANGE, _LEAST_TOKENS = tl.constexpr(OUT_OF_RANGE), tl.constexpr(LEAST_TOKENS)
_SMALLEST, _LARGEST = tl.constexpr(SMALLEST_SCALE), tl.constexpr(LARGEST_SCALE)
SUMS = tl.constexpr(8)
"""Number of pieces added up at a time."""
_LOG2_NEAR, _SLOPE = tl.constexpr(math.log2(NEAR)), tl.constexpr(1 / math.log2(FAR / NEAR))


@triton.jit
def _clamped(x, limit):
    """Clamp x to `1 / limit` ... `limit`."""
    return tl.minimum(tl.maximum(x, 1.0 / limit), limit)


@triton.jit
def _tile(states, stride, token, exists, channel, dim):
    """Load rows `token` [T] in fp32, and a flag for each: rows that are absent or not finite are 0 and do not count."""
    x = tl.load(
        states + token.to(tl.int64)[:, None] * stride + channel[None, :],
        mask=exists[:, None] & (channel < dim)[None, :],
        other=0.0,
    ).to(tl.float32)
    counts = exists & (tl.min((tl.abs(x) < float("inf")).to(tl.int32), 1) == 1)
    x = tl.where(counts[:, None], x, 0.0)
    return tl.minimum(tl.maximum(x, -_LARGEST_STATE), _LARGEST_STATE), counts


@triton.jit
def _existing(start, first, size, valid, valid_t, ROWS: tl.constexpr):
    """ROWS tokens of a piece from `start` on, and a flag for each that exists and is not padding."""
    i = start + tl.arange(0, ROWS)
    exists = i < size
    if valid is not None:
        exists = exists & (tl.load(valid + (first + i) * valid_t, mask=exists, other=0) != 0)
    return first + i, exists


@triton.jit
def _store_squares(
    sums, states, stride, first, size, valid, valid_t, centred, channel, dim, WIDTH: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Store the sums of squares [D] over the tokens of a piece (about their mean if `centred`), then the number of
    tokens that count."""
    # Sum tiles first and their rows at the end: a sum over rows takes a barrier, which loads would wait for.
    total = tl.zeros([ROWS, channel.shape[0]], tl.float32)
    number = tl.zeros([ROWS], tl.int32)
    for start in tl.range(0, tl.where(centred, TOKENS, 0), ROWS):
        token, exists = _existing(start, first, size, valid, valid_t, ROWS)
        x, counts = _tile(states, stride, token, exists, channel, dim)
        total += x
        number += counts.to(tl.int32)
    mean = tl.sum(total, 0, keep_dims=True) / tl.maximum(tl.sum(number, 0), 1).to(tl.float32)
    total = tl.zeros([ROWS, channel.shape[0]], tl.float32)
    number = tl.zeros([ROWS], tl.int32)
    for start in tl.range(0, TOKENS, ROWS):
        token, exists = _existing(start, first, size, valid, valid_t, ROWS)
        x, counts = _tile(states, stride, token, exists, channel, dim)
        x = tl.where(counts[:, None], x - mean, 0.0)
        total += x * x
        number += counts.to(tl.int32)
    tl.store(sums + channel, tl.sum(total, 0), mask=channel < dim)
    tl.store(sums + WIDTH, tl.sum(number, 0).to(tl.float32))


@triton.jit
def _rms(sums, pieces, kinds, first, last, channel, dim, WIDTH: tl.constexpr):
    """RMS of channels [D] from all pieces' sums of squares of kinds `first` to `last`, at least `QUIETEST` of the
    loudest; and whether enough tokens were counted."""
    total, number = tl.zeros([SUMS, channel.shape[0]], tl.float32), tl.zeros([SUMS], tl.float32)
    for start in tl.range(0, pieces * (last - first), SUMS):
        i = start + tl.arange(0, SUMS)
        exists = i < pieces * (last - first)
        at = sums + (i % pieces * kinds + first + i // pieces) * (WIDTH + 1)
        # Read from the L2 cache: other programs have written these.
        mask = exists[:, None] & (channel < dim)[None, :]
        total += tl.load(at[:, None] + channel[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        number += tl.load(at + WIDTH, mask=exists, other=0.0, cache_modifier=".cg")
    squares, number = tl.sum(total, 0), tl.sum(number, 0)
    sigma = tl.sqrt(squares / tl.maximum(number, 1.0))
    known = (number >= _LEAST_TOKENS) & (tl.max(squares, 0) > 0)
    return tl.maximum(sigma, tl.max(sigma, 0) * _QUIETEST), known


@triton.jit
def _order(x, scratch, channel, dim):
    """Count the elements smaller than each of the first `dim` of x [D], and equal ones before it. `scratch` has room
    for all."""
    CHUNK: tl.constexpr = 16
    tl.debug_barrier()  # others have read its old contents
    tl.store(scratch + channel, x, mask=channel < dim)
    tl.debug_barrier()
    before = tl.zeros([channel.shape[0]], tl.int32)
    for start in tl.range(0, dim, CHUNK):
        other = start + tl.arange(0, CHUNK)
        y = tl.load(scratch + other, mask=other < dim, other=float("inf"), cache_modifier=".cg")[None, :]
        first = (y < x[:, None]) | ((y == x[:, None]) & (other[None, :] < channel[:, None]))
        before += tl.sum(first.to(tl.int32), 1)
    return tl.where(channel < dim, before, -1)


@triton.jit
def _store_channel_scales(
    sums, out, pieces, kinds, is_value, channel, dim, WIDTH: tl.constexpr, SHOWN: tl.constexpr, LOUD: tl.constexpr
):  # fmt: skip
    """Compute and store the channel scales [D] of keys (from keys, and queries if SHOWN) or of values.

    A channel with a size far from the median channel's gets one over that size; states that would be out of range get
    a power of two besides. The LOUD channels of keys with the largest products of sizes get a minus."""
    kind = is_value.to(tl.int32)
    sigma, known = _rms(sums, pieces, kinds, kind, kind + 1, channel, dim, WIDTH)
    wanted = _clamped(tl.where(known & is_value, sigma, 1.0), _LARGEST_RATIO)
    weight = sigma
    if SHOWN:
        # Values have no queries: the range of kinds is empty.
        asking, shown = _rms(sums, pieces, kinds, tl.where(is_value, kinds, 2), kinds, channel, dim, WIDTH)
        weight *= tl.where(is_value, 1.0, asking)
        asked = known & shown
        ratio = tl.where(asked, sigma / tl.where(asked, asking, 1.0), 1.0)
        wanted *= tl.sqrt(_clamped(ratio, _LARGEST_RATIO))
    away = tl.log2(wanted)
    scratch = sums + kind * (WIDTH + 1)
    away -= tl.sum(tl.where(_order(away, scratch, channel, dim) == (dim - 1) // 2, away, 0.0), 0)
    share = tl.minimum(tl.maximum((tl.abs(away) - _LOG2_NEAR) * _SLOPE, 0.0), 1.0)
    factor = tl.exp2(tl.where(known, share * away, 0.0))
    stored = tl.where(channel < dim, sigma / factor, 0.0)
    size = tl.sqrt(tl.sum(stored * stored, 0) / dim)
    outside = known & ((size > _OUT_OF_RANGE) | (size < 1.0 / _OUT_OF_RANGE))
    power = _clamped(size, _LARGEST_RATIO).to(tl.int32, bitcast=True) & 0x7F800000
    factor *= tl.where(outside, power.to(tl.float32, bitcast=True), 1.0)
    inverse = tl.minimum(tl.maximum(1.0 / factor, _SMALLEST), _LARGEST)
    # Round to bf16, to nearest even: fp16 holds the result.
    word = inverse.to(tl.int32, bitcast=True)
    word = (word + 0x7FFF + ((word >> 16) & 1)) & -0x10000
    scales = word.to(tl.float32, bitcast=True)
    if LOUD > 0:
        if not is_value:
            scales = tl.where(_order(weight, scratch, channel, dim) >= dim - LOUD, -scales, scales)
    tl.store(out + channel, scales.to(tl.float16), mask=channel < dim)


@triton.jit
def _copy_part(states, at, valid, channel, DIM: tl.constexpr):
    """Copy keys or values from pointers `states` [n, 1] to their part of the rows at pointers `at` [n]."""
    exists = valid[:, None] & (channel < DIM)[None, :]
    tl.store(at[:, None] + channel[None, :], tl.load(states + channel[None, :], mask=exists), mask=exists)


PromptNumbers = namedtuple(
    "PromptNumbers",
    "kv_heads kinds max_sinks first_sink to_sinks ring slot start kept sinks blocks rows valid_b valid_t",
)
"""Numbers of `store_prompt`.

Args:
    kinds: 2 + group.
    max_sinks, first_sink, to_sinks, ring, slot, start: As in `DenseRows`.
    kept: Tokens from `start` on.
    sinks, blocks, rows: Counts of the store after this.
    valid_b, valid_t: Strides of `valid`.
"""
PromptShape = namedtuple("PromptShape", "DK DV BLOCK_K BLOCK_V WIDTH ROWS LOUD")
"""Constants of `store_prompt`."""


# Without this, copies would decide the layout of the sums and so their order.
@triton.jit(do_not_specialize_on_alignment=["kv_rows"])
def store_prompt(
    keys, values,  # [B, Hkv, T, DK] and [B, Hkv, T, DV]
    queries,  # [B, Hkv * group, T, DK], or None
    valid,  # [B, T] uint8, or None
    sums,  # [B * Hkv, pieces, kinds, WIDTH + 1] float32, each followed by its number of tokens; or None
    counters,  # [B * Hkv, 2] of 32 bits, 0 between launches; or None
    key_channel_scales, value_channel_scales,  # [B, Hkv, DK] and [B, Hkv, DV] fp16, ones without sums; or None
    kv_rows,  # [B, Hkv, ring + max_sinks, DK + DV], contiguous; or None
    counts, length,  # [5, 4] int32 and [] int64, or None
    sample: Sample,
    n: PromptNumbers,
    strides,  # `Strides` of keys, values and queries
    SHAPE: tl.constexpr,  # a `PromptShape`
):  # fmt: skip
    """Grid: (pieces * kinds + 2 * tiles of ROWS rows that stay dense, B * Hkv)."""
    C: tl.constexpr = constants_of(SHAPE)
    of_keys, of_values, of_queries = strides
    job, program = tl.program_id(0), tl.program_id(1)
    batch, head = (program // n.kv_heads).to(tl.int64), (program % n.kv_heads).to(tl.int64)
    keys += batch * of_keys.batch + head * of_keys.head
    values += batch * of_values.batch + head * of_values.head
    dk, dv = tl.arange(0, C.BLOCK_K), tl.arange(0, C.BLOCK_V)
    if counts is not None:
        if (job == 0) & (program == 0):
            write_counts(counts, length, n.sinks, n.blocks, n.rows, 0)
    copying = job - sample.pieces * n.kinds
    if copying >= 0:
        # Keys or values: both would take registers that the sums need.
        i = copying // 2 * C.ROWS + tl.arange(0, C.ROWS)
        later = i - n.to_sinks
        token = tl.where(i < n.to_sinks, i, n.start + later).to(tl.int64)
        row = tl.where(i < n.to_sinks, n.ring + n.first_sink + i, (n.slot + later) % n.ring)
        at = kv_rows + (program.to(tl.int64) * (n.ring + n.max_sinks) + row) * (C.DK + C.DV)
        if copying % 2 == 0:
            _copy_part(keys + (token * of_keys.token)[:, None], at, later < n.kept, dk, C.DK)
        else:
            _copy_part(values + (token * of_values.token)[:, None], at + C.DK, later < n.kept, dv, C.DV)
        if sums is None:
            if key_channel_scales is not None:
                if copying == 0:
                    tl.store(key_channel_scales + program * C.DK + dk, tl.where(dk < C.LOUD, -1.0, 1.0), mask=dk < C.DK)
                if copying == 1:
                    tl.store(value_channel_scales + program * C.DV + dv, 1.0, mask=dv < C.DV)
    elif sums is not None:
        piece, kind = job // n.kinds, job % n.kinds
        begin = sampled_start(sample.first, sample.whole, sample.pieces, piece)
        padding = None if valid is None else valid + batch * n.valid_b
        of_head = sums + program * sample.pieces * n.kinds * (C.WIDTH + 1)
        here = of_head + job * (C.WIDTH + 1)
        is_value = kind == 1
        states, stride, out = keys, of_keys.token, key_channel_scales + program * C.DK
        if is_value:
            states, stride, out = values, of_values.token, value_channel_scales + program * C.DV
        if queries is not None:
            if kind > 1:
                states = queries + batch * of_queries.batch + (head * (n.kinds - 2) + kind - 2) * of_queries.head
                stride = of_queries.token
        if C.DK == C.DV:
            dim = C.DK
        else:
            dim = tl.where(is_value, C.DV, C.DK)
        BLOCK: tl.constexpr = C.BLOCK_K if C.BLOCK_K > C.BLOCK_V else C.BLOCK_V
        d = tl.arange(0, BLOCK)
        _store_squares(here, states, stride, begin, sample.size, padding, n.valid_t, kind == 0, d, dim, C.WIDTH, C.ROWS)
        tl.debug_barrier()
        counter = counters.to(tl.pointer_type(tl.int32), bitcast=True) + 2 * program + is_value.to(tl.int32)
        if tl.atomic_add(counter, 1) == sample.pieces * tl.where(is_value, 1, n.kinds - 1) - 1:
            tl.store(counter, 0)
            _store_channel_scales(
                of_head, out, sample.pieces, n.kinds, is_value, d, dim, C.WIDTH, queries is not None, C.LOUD
            )


STORE = Kernel(store_prompt)
WARPS = 4


@lru_cache
def prompt_constants(key_dim: int, value_dim: int) -> PromptShape:
    """Constants of `store_prompt`."""
    tiles = tuple(max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    # 32 registers of a thread for 128 channels.
    rows = max(8, 4096 // max(128, *tiles))
    return PromptShape(key_dim, value_dim, *tiles, max(key_dim, value_dim), rows, loud_channels(key_dim))


class ScaleInputs(NamedTuple):
    """Inputs of channel scales beside keys and values.

    Args:
        queries: `[B, Hq, T, Dk]` of the same tokens, like keys, or `None` if unknown.
        valid: `[B, T]` bool, False for padding; `None` for no padding.
        first: Number of tokens at the start to leave out.
        allocate: Function that returns float32 scratch of a number of elements or more.
        counters: Function that returns scratch for `2 * B * Hkv` zeros; the launch leaves them zero.
    """

    queries: torch.Tensor | None
    valid: torch.Tensor | None
    first: int
    allocate: Callable[[int], torch.Tensor]
    counters: Callable[[int], torch.Tensor]


def store(prompt: KeyValue, dense: DenseRows, scales: ChannelScales | None, statistics: ScaleInputs | None) -> None:
    """Store the dense rows of a prompt, and write its channel scales.

    Args:
        prompt: Keys `[B, Hkv, T, Dk]` and values `[B, Hkv, T, Dv]`, fp16, bf16 or fp32, last dimension contiguous,
            other strides as they come.
        dense: Rows that stay dense, and their places.
        scales: `[B, Hkv, D]` fp16, contiguous, to write to; `None` to leave them.
        statistics: Inputs to compute them from; `None` writes ones.

    Raises:
        ValueError: Queries or padding are not of the prompt's tokens: the kernel reads the same places in all.
    """
    keys, values = prompt
    queries = valid = sums = counters = of_queries = of_valid = first = None
    if scales is not None and statistics is not None:
        queries, valid, first, allocate, zeros = statistics
        of_queries = None if queries is None else (queries.shape, queries.stride(), queries.dtype, queries.device)
        of_valid = None if valid is None else (valid.stride(), valid.shape, valid.device)
    rows, counts = dense.rows, dense.counts
    of_states = (keys.shape, values.shape[3], keys.stride(), values.stride(), keys.dtype, keys.device, values.device)
    places = (rows.shape[2] - dense.ring, *dense[1:7], scales is None, counts is None)
    launch, sizes = _prompt_launch(STORE, of_states, of_queries, of_valid, first, places)
    if first is not None:
        sums, counters = allocate(sizes[0]), zeros(sizes[1])
    tensors = (keys, values, queries, valid, sums, counters, *(scales or NONE), rows, *(counts or NONE))
    launch_all(
        (launch,),
        (tuple([None if tensor is None else tensor.data_ptr() for tensor in tensors]),),
        lambda: ((*tensors[:3], None if valid is None else valid.view(torch.uint8), *tensors[4:]),),
    )


NONE = (None, None)


@lru_cache(maxsize=1024)
def _prompt_launch(
    kernel: Kernel,
    of_states: tuple[Any, ...],
    of_queries: tuple[Any, ...] | None,
    of_valid: tuple[Any, ...] | None,
    first: int | None,
    places: tuple[Any, ...],
) -> tuple[Launch, tuple[int, int]]:
    """Launch of `store` for tensors like these, and its numbers of sums and counters."""
    (batch, heads, tokens, key_dim), value_dim, key_strides, value_strides, dtype, device, _ = of_states
    max_sinks, ring, first_sink, to_sinks, start, slot, held, *_ = places
    shape = prompt_constants(key_dim, value_dim)
    kept = tokens - start
    copies = 2 * max(1, -(-(to_sinks + kept) // shape.ROWS))
    sampled, kinds = Sample(0, 0, 0, 0), 0
    if first is not None:
        sampled = sample(tokens, first)
        group = 0 if of_queries is None else of_queries[0][1] // heads
        if (of_queries is not None and of_queries[0] != (batch, group * heads, tokens, key_dim)) or (
            of_valid is not None and of_valid[1] != (batch, tokens)
        ):
            came = [None if x is None else list(x) for x in (of_queries and of_queries[0], of_valid and of_valid[1])]
            raise ValueError(
                f"Queries {came[0]} and padding {came[1]} are not of the tokens of keys {list(of_states[0])}. Give "
                "those of the same tokens, or `None`."
            )
        kinds = 2 + group
    jobs = sampled.pieces * kinds
    of_states = (key_strides, value_strides, (0, 0, 0) if of_queries is None else of_queries[1])
    place = (max_sinks, first_sink, to_sinks, ring, slot, start, kept)
    n = PromptNumbers(heads, kinds, *place, *held, *((0, 0) if of_valid is None else of_valid[0]))
    launch = Launch(
        kernel,
        device.index,
        (jobs + copies, batch * heads, 1),
        (sampled, n, tuple([Strides(*each[:3]) for each in of_states])),
        (shape,),
        (shape, dtype, None if of_queries is None else of_queries[2], device.index),
        {"num_warps": WARPS},
    )
    return launch, (batch * heads * jobs * (shape.WIDTH + 1), 2 * batch * heads)
