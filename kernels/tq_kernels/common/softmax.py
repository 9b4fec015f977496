"""Online softmax of all attention kernels, with logits in base 2.

A softmax has a state: for each row the largest logit, the sum of weights, and the sum of weighted values. Tiles of
logits update the state; partial results of other programs are merged into it; at the end it is normalised.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
"""log2(e): logits times this are exponents of 2."""


SoftmaxState = namedtuple("SoftmaxState", "maximum total output")
"""State of a softmax of R rows.

Args:
    maximum: [R] largest logit, -inf for rows that have attended to nothing.
    total: [R] sum of weights 2**(logit - maximum).
    output: [R, D] sum of values times those weights.
"""


@triton.jit
def power_of_two(largest):
    """Power of two at least as large as `largest`, a row's largest magnitude, and its inverse, float32."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) + 1  # that of the float, plus one
    exponent = tl.minimum(tl.maximum(exponent, 64), 190)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def finite(x):
    """Replace -inf by 0: a row that has attended to nothing shifts its logits by 0."""
    return tl.where(x == -float("inf"), 0.0, x)


@triton.jit
def log2_sum(shift, total):
    """log2(total * 2**shift); -inf for an empty sum."""
    return tl.where(total > 0, shift + tl.log2(tl.where(total > 0, total, 1.0)), -float("inf"))


@triton.jit
def bounded(logit, cap_log2, BOUNDS: tl.constexpr):
    """cap tanh(logit / cap) with BOUNDS (`AttentionOptions.flags`), else the logit; all in base-2 units."""
    if BOUNDS:
        # tanh(x) = 1 - 2 / (1 + e^2x); e^2x overflowing to inf gives 1.
        logit = cap_log2 * (1.0 - 2.0 / (1.0 + tl.exp2(logit * (2.0 * LOG2E) / cap_log2)))
    return logit


@triton.jit
def empty_state(ROWS: tl.constexpr, DIM: tl.constexpr):
    """State of ROWS rows that have attended to nothing, with DIM channels of output."""
    maximum = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    return SoftmaxState(maximum, total, tl.zeros([ROWS, DIM], tl.float32))


@triton.jit
def rescaled(maximum, largest, gain, MASKED: tl.constexpr):
    """Update the maximum for new logits.

    Args:
        maximum: Largest logit so far, any shape.
        largest: Largest new logit.
        gain: Factor from these logits to base 2, or `None`.
        MASKED: Whether all logits of a row may be -inf.

    Returns:
        The new maximum, the shift of the exponents, and the factor of earlier sums.
    """
    new_maximum = tl.maximum(maximum, largest)
    shift = finite(new_maximum) if MASKED else new_maximum
    if gain is None:
        decay = tl.exp2(maximum - shift)
    else:
        decay = tl.exp2((maximum - shift) * gain)
    return new_maximum, shift, decay


@triton.jit
def weights(x, shift, gain):
    """Weights of logits x [R, T]; `gain` [R] is their factor to base 2, `shift` [R] in their units."""
    return tl.exp2(x * gain[:, None] - (shift * gain)[:, None])


@triton.jit
def update(state, x, values, gain, MASKED: tl.constexpr):
    """Update the state with logits x [R, T] and values [T, D]; products are in the dtype of the values.

    Args:
        gain: [R] factor from these logits to base 2, or `None`.
        MASKED: Whether all logits of a row may be -inf.
    """
    maximum = tl.maximum(state.maximum, tl.max(x, 1))
    shift = finite(maximum) if MASKED else maximum
    # Two orders, because machine code depends on them.
    if gain is None:
        p = tl.exp2(x - shift[:, None])
        decay = tl.exp2(state.maximum - shift)
        total = state.total * decay + tl.sum(p, 1)
        output = tl.dot(p.to(values.dtype), values, state.output * decay[:, None])
    else:
        decay = tl.exp2((state.maximum - shift) * gain)
        p = weights(x, shift, gain)
        output = tl.dot(p.to(values.dtype), values, state.output * decay[:, None])
        total = state.total * decay + tl.sum(p, 1)
    return SoftmaxState(maximum, total, output)


@triton.jit
def merge(state, lse, output):
    """Merge a normalised partial result into the state: `output` [R, D] and log2 `lse` [R] of its sum of weights."""
    maximum, shift, decay = rescaled(state.maximum, lse, None, True)
    weight = tl.exp2(lse - shift)
    merged = state.output * decay[:, None] + output * weight[:, None]
    return SoftmaxState(maximum, state.total * decay + weight, merged)


@triton.jit
def normalize(state):
    """Output [R, D] of the softmax; 0 for rows that have attended to nothing."""
    return state.output / tl.where(state.total > 0, state.total, 1.0)[:, None]
