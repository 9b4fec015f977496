"""Channel scales from a first prompt, in two launches: what `tq_hf.codec.balance` takes a thousand for.

The first sums squares: a program takes one piece of the prompt and one head of one sequence, of keys, of values or of
queries. The second adds pieces up and makes the scales. Sums are in fp32, in an order that depends on shapes
alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from ..common.launcher import Kernel, specialised
from ..format import (
    FAR,
    LARGEST_RATIO,
    LARGEST_SCALE,
    LARGEST_STATE,
    LEAST_TOKENS,
    NEAR,
    OUT_OF_RANGE,
    QUIETEST,
    SAMPLED_BLOCKS,
    SMALLEST_SCALE,
    TOKENS,
    sample,
    sampled_start,
)

_LARGEST_STATE, _LARGEST_RATIO, _QUIETEST = map(tl.constexpr, (LARGEST_STATE, LARGEST_RATIO, QUIETEST))
_OUT_OF_RANGE, _LEAST_TOKENS = tl.constexpr(OUT_OF_RANGE), tl.constexpr(LEAST_TOKENS)
_SMALLEST, _LARGEST = tl.constexpr(SMALLEST_SCALE), tl.constexpr(LARGEST_SCALE)
_LOG2_NEAR, _SLOPE = tl.constexpr(math.log2(NEAR)), tl.constexpr(1 / math.log2(FAR / NEAR))


@triton.jit
def _clamped(x, limit):
    """x, at most `limit` and at least its inverse."""
    return tl.minimum(tl.maximum(x, 1.0 / limit), limit)


@triton.jit
def _tile(states, stride, token, exists, channel, DIM: tl.constexpr):
    """Rows `token` [T] in fp32, zeros for those that do not count; and which count."""
    x = tl.load(
        states + token.to(tl.int64)[:, None] * stride + channel[None, :],
        mask=exists[:, None] & (channel < DIM)[None, :],
        other=0.0,
    ).to(tl.float32)
    counts = exists & (tl.min((tl.abs(x) < float("inf")).to(tl.int32), 1) == 1)
    x = tl.where(counts[:, None], x, 0.0)
    return tl.minimum(tl.maximum(x, -_LARGEST_STATE), _LARGEST_STATE), counts


@triton.jit
def _existing(start, first, size, valid, valid_t, ROWS: tl.constexpr):
    """Tokens `start` and on of a piece, and which of them there are."""
    i = start + tl.arange(0, ROWS)
    exists = i < size
    if valid is not None:
        exists = exists & (tl.load(valid + (first + i) * valid_t, mask=exists, other=0) != 0)
    return first + i, exists


@triton.jit
def _store_squares(
    sums, states, stride, first, size, valid, valid_t, channel,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Store sums of squares [D] over the tokens of a piece, if CENTRED about their mean, and behind them how many
    tokens count."""
    mean = tl.zeros([channel.shape[0]], tl.float32)
    if CENTRED:
        number = tl.zeros([1], tl.int32)
        for start in tl.range(0, TOKENS, ROWS):
            token, exists = _existing(start, first, size, valid, valid_t, ROWS)
            x, counts = _tile(states, stride, token, exists, channel, DIM)
            mean += tl.sum(x, 0)
            number += tl.sum(counts.to(tl.int32), 0)
        mean = mean / tl.maximum(number, 1).to(tl.float32)
    squares = tl.zeros([channel.shape[0]], tl.float32)
    number = tl.zeros([1], tl.int32)
    for start in tl.range(0, TOKENS, ROWS):
        token, exists = _existing(start, first, size, valid, valid_t, ROWS)
        x, counts = _tile(states, stride, token, exists, channel, DIM)
        x = tl.where(counts[:, None], x - mean[None, :], 0.0)
        squares += tl.sum(x * x, 0)
        number += tl.sum(counts.to(tl.int32), 0)
    tl.store(sums + channel, squares, mask=channel < DIM)
    tl.store(sums + WIDTH + tl.arange(0, 1), number.to(tl.float32))


@triton.jit(
    do_not_specialize=(
        "kv_heads first size whole query_b query_h query_s key_b key_h key_s value_b value_h value_s valid_b valid_t"
    ).split()
)
def sum_squares(
    keys,  # [B, Hkv, T, DK]
    values,  # [B, Hkv, T, DV]
    queries,  # [B, Hkv * group, T, DK], or None
    valid,  # [B, T] uint8, or None
    sums,  # [B * Hkv, pieces, 2 + group, WIDTH + 1] float32, each with its number of tokens behind
    kv_heads,
    first,  # of a `Sample`, like the next two
    size, whole, key_b, key_h, key_s, value_b, value_h, value_s, query_b, query_h, query_s, valid_b, valid_t,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: (B * Hkv, pieces, 2 + group): keys, values, and each head of queries."""
    program, piece, kind = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = (program // kv_heads).to(tl.int64), (program % kv_heads).to(tl.int64)
    first = sampled_start(first, whole, tl.num_programs(1), piece)
    if valid is not None:
        valid += batch * valid_b
    dk, dv = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    sums += ((program * tl.num_programs(1) + piece) * tl.num_programs(2) + kind) * (WIDTH + 1)
    if kind == 0:
        keys += batch * key_b + head * key_h
        _store_squares(sums, keys, key_s, first, size, valid, valid_t, dk, DK, WIDTH, ROWS, True)
    elif kind == 1:
        values += batch * value_b + head * value_h
        _store_squares(sums, values, value_s, first, size, valid, valid_t, dv, DV, WIDTH, ROWS, False)
    elif queries is not None:
        queries += batch * query_b + (head * (tl.num_programs(2) - 2) + kind - 2) * query_h
        _store_squares(sums, queries, query_s, first, size, valid, valid_t, dk, DK, WIDTH, ROWS, False)


@triton.jit
def _rms(sums, pieces, kinds, first, last, channel, DIM: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr):
    """RMS of channels [D] from sums of squares of kinds `first` to `last` of all pieces, at least `QUIETEST` of the
    loudest, and whether it is known."""
    piece = tl.arange(0, PIECES)
    squares, number = tl.zeros([channel.shape[0]], tl.float32), tl.zeros([1], tl.float32)
    for kind in tl.range(first, last):
        at = sums + (piece * kinds + kind) * (WIDTH + 1)
        exists = (piece < pieces)[:, None] & (channel < DIM)[None, :]
        squares += tl.sum(tl.load(at[:, None] + channel[None, :], mask=exists, other=0.0), 0)
        number += tl.sum(tl.load(at + WIDTH, mask=piece < pieces, other=0.0), 0)
    sigma = tl.sqrt(squares / tl.maximum(number, 1.0))
    known = (tl.max(number, 0) >= _LEAST_TOKENS) & (tl.max(squares, 0) > 0)
    return tl.maximum(sigma, tl.max(sigma, 0) * _QUIETEST), known


@triton.jit
def _median(x, channel, DIM: tl.constexpr):
    """The lower one of the first DIM elements of x [D]."""
    x = tl.sort(tl.where(channel < DIM, x, float("inf")))
    return tl.sum(tl.where(channel == (DIM - 1) // 2, x, 0.0), 0)


@triton.jit
def _store_inverse(out, wanted, sigma, known, channel, DIM: tl.constexpr):
    """Store one over `wanted` [D] where that is far from the median channel's, times a power of two where what would be
    stored is out of range."""
    away = tl.log2(wanted)
    away -= _median(away, channel, DIM)
    share = tl.minimum(tl.maximum((tl.abs(away) - _LOG2_NEAR) * _SLOPE, 0.0), 1.0)
    factor = tl.exp2(tl.where(known, share * away, 0.0))
    stored = tl.where(channel < DIM, sigma / factor, 0.0)
    size = tl.sqrt(tl.sum(stored * stored, 0) / DIM)
    outside = known & ((size > _OUT_OF_RANGE) | (size < 1.0 / _OUT_OF_RANGE))
    power = _clamped(size, _LARGEST_RATIO).to(tl.int32, bitcast=True) & 0x7F800000
    factor *= tl.where(outside, power.to(tl.float32, bitcast=True), 1.0)
    inverse = tl.minimum(tl.maximum(1.0 / factor, _SMALLEST), _LARGEST)
    # Rounded to bf16, to nearest even, which fp16 holds.
    word = inverse.to(tl.int32, bitcast=True)
    word = (word + 0x7FFF + ((word >> 16) & 1)) & -0x10000
    tl.store(out + channel, word.to(tl.float32, bitcast=True).to(tl.float16), mask=channel < DIM)


@triton.jit
def _key_channel_scales(
    sums, out, pieces, kinds,
    DIM: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, SHOWN: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    sigma, known = _rms(sums, pieces, kinds, 0, 1, d, DIM, WIDTH, PIECES)
    wanted = tl.full([BLOCK], 1.0, tl.float32)
    if SHOWN:
        asking, shown = _rms(sums, pieces, kinds, 2, kinds, d, DIM, WIDTH, PIECES)
        asked = known & shown
        wanted = tl.sqrt(_clamped(tl.where(asked, sigma / tl.where(asked, asking, 1.0), 1.0), _LARGEST_RATIO))
    _store_inverse(out, wanted, sigma, known, d, DIM)


@triton.jit
def _value_channel_scales(
    sums, out, pieces, kinds, DIM: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr
):
    d = tl.arange(0, BLOCK)
    sigma, known = _rms(sums, pieces, kinds, 1, 2, d, DIM, WIDTH, PIECES)
    wanted = _clamped(tl.where(known, sigma, 1.0), _LARGEST_RATIO)
    _store_inverse(out, wanted, sigma, known, d, DIM)


@triton.jit(do_not_specialize=["pieces", "kinds"])
def write_channel_scales(
    sums,  # as `sum_squares` leaves them
    key_channel_scales,  # [B, Hkv, DK] fp16
    value_channel_scales,  # [B, Hkv, DV] fp16
    pieces,
    kinds,  # 2 + group
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, WIDTH: tl.constexpr,
    PIECES: tl.constexpr, SHOWN: tl.constexpr,
):  # fmt: skip
    """Grid: (B * Hkv, 2), of keys and of values."""
    head = tl.program_id(0)
    sums += head * pieces * kinds * (WIDTH + 1)
    if tl.program_id(1) == 0:
        _key_channel_scales(sums, key_channel_scales + head * DK, pieces, kinds, DK, BLOCK_K, WIDTH, PIECES, SHOWN)
    else:
        _value_channel_scales(sums, value_channel_scales + head * DV, pieces, kinds, DV, BLOCK_V, WIDTH, PIECES)


SUMS, SCALES = Kernel(sum_squares), Kernel(write_channel_scales)
WARPS = 8


def balance_constants(key_dim: int, value_dim: int, shown: bool) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """The constants of both kernels."""
    tiles = tuple(max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    sizes = (key_dim, value_dim, *tiles, max(key_dim, value_dim))
    # Of 128 channels 32 registers of a thread.
    return (*sizes, 64 if max(tiles) <= 128 else 32), (*sizes, SAMPLED_BLOCKS, shown)


def balance(
    queries: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_channel_scales: torch.Tensor,
    value_channel_scales: torch.Tensor,
    *,
    first: int,
    allocate: Callable[[int], torch.Tensor],
    valid: torch.Tensor | None = None,
) -> None:
    """Write the channel scales of a first prompt's channels, in two launches.

    Args:
        queries: `[B, Hq, T, Dk]` of the same tokens, like `keys`, or `None` where nobody has shown them.
        keys: `[B, Hkv, T, Dk]` fp16, bf16 or fp32, last dimension contiguous, other strides as they come.
        values: `[B, Hkv, T, Dv]`, like `keys`.
        key_channel_scales, value_channel_scales: `[B, Hkv, D]` fp16, contiguous: written.
        first: Tokens at the start that stay dense.
        allocate: Gives scratch: float32, of at least so many elements.
        valid: Which tokens are not padding, `[B, T]` bool; `None` for all.
    """
    batch, heads, tokens, key_dim = keys.shape
    at = sample(tokens, first)
    shown = queries is not None
    constants, last_constants = balance_constants(key_dim, values.shape[-1], shown)
    kinds = 2 if queries is None else 2 + queries.shape[1] // heads
    sums = allocate(batch * heads * at.pieces * kinds * (max(key_dim, values.shape[-1]) + 1))
    strides = (
        *keys.stride()[:3],
        *values.stride()[:3],
        *((0, 0, 0) if queries is None else queries.stride()[:3]),
        *((0, 0) if valid is None else valid.stride()),
    )
    kind = (keys.dtype, None if queries is None else queries.dtype, valid is None, keys.device.index)
    SUMS(
        (batch * heads, at.pieces, kinds),
        (keys, values, queries, None if valid is None else valid.view(torch.uint8), sums),
        (heads, at.first, at.size, at.whole, *strides),
        constants,
        (constants, kind, specialised(strides)),
        num_warps=WARPS,
    )
    SCALES(
        (batch * heads, 2, 1),
        (sums, key_channel_scales, value_channel_scales),
        (at.pieces, kinds),
        last_constants,
        (last_constants, keys.device.index),
        num_warps=WARPS,
    )
