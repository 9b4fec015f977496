"""Keep the likeliest tokens of each row of logits (`top_k`, `top_p`, `min_p`) without sorting them.

The smallest logit to keep is the largest number t for which the logits from t on weigh at least a target: each weighs 1
for `top_k`, and its probability for `top_p`. Its 32 bits, in the order of floats, are found 4 at a time: a launch sums
the weights of the 16 parts of an interval, and the next launch reads off in which part the target is reached. Logits
are read 8 times for each of the two searches, from the L2 cache (16 MiB for 32 rows of 128k logits), and a search that
a row does not ask for reads none. Sums are in fp32, in an order that depends on the number of tokens alone. Equal
logits stay or go together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common.launcher import Kernel, on_its_device

_BITS, _PARTS, _STEPS, _LEAST = tl.constexpr(4), tl.constexpr(16), tl.constexpr(8), tl.constexpr(-(2**31))
CHUNK, TILE = 2048, 128
"""Logits of a program, which is one warp: no barriers. A tile has 64 sums in the registers of a thread."""


@triton.jit
def _ordered(x):
    """Whole numbers in the order of floats."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _narrowed(step, lows, needs, sums, share, rows, row, chunks, CHUNKS: tl.constexpr):
    """Lower bound of an interval after a step, and the weight that its logits need to reach."""
    low, need = tl.load(lows + step * rows + row), tl.load(needs + step * rows + row)
    chunk, part = tl.arange(0, CHUNKS), tl.arange(0, _PARTS)
    at = sums + ((step * rows + row) * chunks + chunk[:, None]) * _PARTS + part[None, :]
    weights = tl.sum(tl.load(at, mask=(chunk < chunks)[:, None], other=0.0), 0)  # from each part on
    if step == _STEPS:
        low, need = _LEAST, share * tl.max(weights, 0)
    reached = tl.maximum(tl.sum((weights >= need).to(tl.int32), 0) - 1, 0)
    above = tl.sum(tl.where(part == reached + 1, weights, 0.0), 0)
    return (reached << (_BITS * (_STEPS - 1 - step % _STEPS))) + low, need - above


@triton.jit(do_not_specialize=["step", "rows", "chunks", "vocabulary"])
def search_step(
    scores,  # [N, vocabulary] float32, contiguous
    maxima,  # [N] float32
    top_k,  # [N] int32
    top_p,  # [N] float32
    lows,  # [2 * STEPS, N] int32: lower bounds of intervals; at STEPS, of what `top_k` keeps
    needs,  # [2 * STEPS, N] float32: weights that their logits need to reach
    sums,  # [2 * STEPS, N, chunks, PARTS] float32
    step, rows, chunks, vocabulary,  # rows: N
    SIZE: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Sum weights from each of 16 parts on: of `top_k` in the first 8 steps, then of `top_p`. Grid: (chunks, N)."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    count, share = tl.load(top_k + row), tl.load(top_p + row)
    counts, has_count = step < _STEPS, (count > 0) & (count < vocabulary)
    if tl.where(counts, has_count, share < 1):
        low, need, kept = _LEAST, count.to(tl.float32), _LEAST
        if (step > 0) & ((step != _STEPS) | has_count):
            low, need = _narrowed(step - 1, lows, needs, sums, share, rows, row, chunks, CHUNKS)
        if step > _STEPS:
            kept = tl.load(lows + _STEPS * rows + row)
        if chunk == 0:
            tl.store(lows + step * rows + row, low)
            tl.store(needs + step * rows + row, need)
        if step == _STEPS:
            kept, low = low, _LEAST
        shift = _BITS * (_STEPS - 1 - step % _STEPS)
        maximum = tl.load(maxima + row)
        scores += row.to(tl.int64) * vocabulary
        part = tl.arange(0, _PARTS)
        token = chunk * SIZE + tl.arange(0, WIDTH)
        following = tl.load(scores + token, mask=token < vocabulary, other=-float("inf"))
        weights = tl.zeros((_PARTS, WIDTH), tl.float32)
        for start in range(0, SIZE, WIDTH):
            token = chunk * SIZE + start + tl.arange(0, WIDTH)
            x, exists = following, token < vocabulary
            token += WIDTH
            following = tl.load(scores + token, mask=token < vocabulary, other=-float("inf"))
            key = _ordered(x)
            place = (key - low).to(tl.uint32, bitcast=True) >> shift
            inside = exists & (key >= kept) & (place < _PARTS)
            if tl.max(inside.to(tl.int32), 0) > 0:
                weight = tl.where(inside, tl.where(counts, 1.0, tl.exp(x - maximum)), 0.0)
                weights += tl.where(place[None, :] >= part[:, None], weight[None, :], 0.0)
        at = sums + ((step * rows + row) * chunks + chunk) * _PARTS + part
        tl.store(at, tl.sum(weights, 1))


@triton.jit(do_not_specialize=["rows", "chunks", "vocabulary"])
def drop_unlikely(
    scores,  # [N, vocabulary] float32, contiguous, overwritten
    maxima,  # [N] float32
    top_k,  # [N] int32
    top_p,  # [N] float32
    min_p,  # [N] float32
    lows, needs, sums,  # as in `search_step`, like the next three
    rows, chunks, vocabulary, SIZE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Set logits below the smallest ones to keep to -inf. Grid: (chunks, N)."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    count, share, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    maximum, low = tl.load(maxima + row), _LEAST
    if (share < 1) | ((count > 0) & (count < vocabulary)):
        step = tl.where(share < 1, 2 * _STEPS - 1, _STEPS - 1)
        low, _ = _narrowed(step, lows, needs, sums, share, rows, row, chunks, CHUNKS)
    low = tl.minimum(low, _ordered(maximum))
    token = chunk * SIZE + tl.arange(0, SIZE)
    at = scores + row.to(tl.int64) * vocabulary + token
    x = tl.load(at, mask=token < vocabulary, other=-float("inf"))
    drop = (_ordered(x) < low) | (tl.exp(x - maximum) < least)
    tl.store(at, -float("inf"), mask=(token < vocabulary) & drop)


SEARCH, DROP = Kernel(search_step), Kernel(drop_unlikely)


@on_its_device
def truncate(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set logits outside of `top_k`, then `top_p`, then `min_p` to -inf, in place.

    Args:
        scores: `[N, vocabulary]` float32, contiguous.
        top_k: `[N]` int32; 0 for all tokens.
        top_p, min_p: `[N]` float32; 1 and 0 for all tokens.
    """
    rows, vocabulary = scores.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    maxima, steps = scores.amax(-1), 2 * _STEPS.value
    lows = torch.empty(steps, rows, dtype=torch.int32, device=scores.device)
    needs = torch.empty(steps, rows, device=scores.device)
    sums = torch.empty(steps, rows, chunks, _PARTS.value, device=scores.device)
    padded = triton.next_power_of_2(chunks)
    grid, key = (chunks, rows, 1), (padded, scores.device.index)
    for step in range(steps):
        tensors = scores, maxima, top_k, top_p, lows, needs, sums
        SEARCH(grid, tensors, (step, rows, chunks, vocabulary), (CHUNK, TILE, padded), key, num_warps=1)
    tensors = scores, maxima, top_k, top_p, min_p, lows, needs, sums
    DROP(grid, tensors, (rows, chunks, vocabulary), (CHUNK, padded), key, num_warps=4)
    return scores
