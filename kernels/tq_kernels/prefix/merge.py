"""Merge the partial results of programs of `tq_kernels.prefix.attention` that shared the tokens of a tile of rows."""

import triton
import triton.language as tl

from ..common.softmax import LOG2E, finite


@triton.jit(do_not_specialize=["rows", "groups", "kv_heads", "count", "splits", "out_b", "out_s", "out_h"])
def merge_splits(
    partial,  # [splits, count, DV] float32, normalised
    lse,  # [splits, count] float32, base 2
    s_aux,  # [Hq], any float dtype
    out,  # [B, S, Hq, DV], last dimension contiguous
    tokens,  # [] int32 on the device: no more queries than so many are written; or None
    rows,  # G * S
    groups,  # G
    kv_heads,
    count,  # B * Hkv * rows
    splits,
    out_b,
    out_s,
    out_h,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_AUX: tl.constexpr,
):
    """Weigh the splits of each row by their share of the softmax. Grid: (count / BLOCK_R,)."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    valid = row < count
    dv = tl.arange(0, BLOCK_DV)
    head, r = row // rows, row % rows
    if tokens is not None:
        valid = valid & (r // groups < tl.load(tokens))
    head_q = head % kv_heads * groups + r % groups
    inside = valid[:, None] & (dv < DV)[None, :]
    maximum = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    if HAS_AUX:
        maximum = tl.load(s_aux + head_q, mask=valid, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    at = row.to(tl.int64)
    for _ in tl.range(0, splits):
        log = tl.load(lse + at, mask=valid, other=-float("inf"))
        if tokens is None:
            part = tl.load(partial + at[:, None] * DV + dv[None, :], mask=inside, other=0.0)
        else:
            written = inside & (log > -float("inf"))[:, None]
            part = tl.load(partial + at[:, None] * DV + dv[None, :], mask=written, other=0.0)
        new_maximum = tl.maximum(maximum, log)
        shift = finite(new_maximum)
        decay = tl.exp2(maximum - shift)
        weight = tl.exp2(log - shift)
        acc = acc * decay[:, None] + part * weight[:, None]
        total = total * decay + weight
        maximum = new_maximum
        at += count
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = out + (head // kv_heads).to(tl.int64) * out_b + (r // groups).to(tl.int64) * out_s + head_q * out_h
    tl.store(at[:, None] + dv[None, :], acc.to(out.dtype.element_ty), mask=inside)
