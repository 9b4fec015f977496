"""Softmax as all attention kernels take it: online, with logits in base 2."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
"""log2(e): logits times this are exponents of 2."""


@triton.jit
def finite(x):
    """x with -inf replaced by 0: a row that has attended to nothing shifts its logits by 0."""
    return tl.where(x == -float("inf"), 0.0, x)


@triton.jit
def log2_sum(shift, total):
    """log2 of total * 2**shift; -inf for an empty sum."""
    return tl.where(total > 0, shift + tl.log2(tl.where(total > 0, total, 1.0)), -float("inf"))


@triton.jit
def soft_capped(logit, cap_log2):
    """cap tanh(logit / cap), all in base-2 units."""
    # tanh(x) = 1 - 2 / (1 + e^2x); e^2x overflowing to inf gives 1.
    doubled = tl.exp2(logit * (2.0 * LOG2E) / cap_log2)
    return cap_log2 * (1.0 - 2.0 / (1.0 + doubled))
