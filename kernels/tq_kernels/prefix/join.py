"""Join the attention to some tokens with that to others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.launcher import Kernel, kernel, on_its_device, specialised


@kernel("count:found_lse_h")
def join_attention(
    mean, lse,  # [S, Hq, DIM] and [Hq, S] float32, base e; `lse` becomes that of all tokens
    found, found_lse,  # likewise, of other tokens
    out,  # [S, Hq, DIM]: one of the two, or another tensor
    mean_s, mean_h, found_s, found_h, out_s, out_h,
    count,  # S
    lse_h, found_lse_h,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid: (S / BLOCK_S, Hq). Last dimensions are contiguous."""
    s, head = (tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64), tl.program_id(1).to(tl.int64)
    d, exists = tl.arange(0, BLOCK_D)[None, :], s < count
    inside = exists[:, None] & (d < DIM)
    old = tl.load(lse + head * lse_h + s, mask=exists, other=0.0)
    new = tl.load(found_lse + head * found_lse_h + s, mask=exists, other=0.0)
    top = tl.maximum(old, new)
    total = top + tl.log(tl.exp(old - top) + tl.exp(new - top))
    first = tl.load(mean + (s * mean_s + head * mean_h)[:, None] + d, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(found + (s * found_s + head * found_h)[:, None] + d, mask=inside, other=0.0).to(tl.float32)
    joined = first + tl.exp(new - total)[:, None] * (second - first)
    tl.store(lse + head * lse_h + s, total, mask=exists)
    tl.store(out + (s * out_s + head * out_h)[:, None] + d, joined.to(out.dtype.element_ty), mask=inside)


JOIN = Kernel(join_attention)


@on_its_device
def join(
    mean: torch.Tensor, lse: torch.Tensor, found: torch.Tensor, found_lse: torch.Tensor, out: torch.Tensor
) -> None:
    """Launch `join_attention`; arguments are the kernel's."""
    count, heads, dim = mean.shape
    strides = (*mean.stride()[:2], *found.stride()[:2], *out.stride()[:2])
    block = triton.next_power_of_2(dim)
    constants = (dim, block, max(1, 4096 // block))
    dtypes = (mean.dtype, found.dtype, out.dtype)
    JOIN(
        (-(-count // constants[2]), heads, 1),
        (mean, lse, found, found_lse, out),
        (*strides, count, lse.stride(0), found_lse.stride(0)),
        constants,
        (constants, specialised(strides), dtypes, mean.device.index),
        num_warps=4,
    )
