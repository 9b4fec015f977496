"""The rotation before quantizing: random signs, then a Hadamard-type transform.

R = H diag(s): s are random signs, H is symmetric and orthogonal, so R^-1 = diag(s) H. For D = m 2^k with odd m, H is
the Kronecker product of the m-point Hartley matrix cas(2 pi i j / m) / sqrt(m) and the 2^k Sylvester-Hadamard matrix.
For a power of two, H is the Sylvester-Hadamard matrix. The signs matter: without them a mean aligned with a row of H
ends up in one channel.

All arithmetic is element-wise in a fixed order: a token's rotated channels do not depend on the number of tokens
rotated together.
"""

from __future__ import annotations

import math

import torch

from ..compat import cached_table


@cached_table
def signs(dim: int, seed: int | None, device: torch.device) -> torch.Tensor:
    """Random signs, `[dim]` float32 of +1 and -1, the same on every device; all +1 if `seed` is `None`."""
    if seed is None:
        return torch.ones(dim, dtype=torch.float32, device=device)
    generator = torch.Generator("cpu").manual_seed(seed)
    return (torch.randint(0, 2, (dim,), generator=generator, device="cpu") * 2 - 1).to(device, torch.float32)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """H x over the last dimension, `[..., N, D]` float32, in O(D log D) additions. H is its own inverse.

    Not differentiable. The last two dimensions of the result are transposed in memory: additions of channels are then
    additions of whole rows.
    """
    dim = x.shape[-1]
    power = dim & -dim
    odd = dim // power
    out = x.transpose(-1, -2).contiguous().unflatten(-2, (odd, power))
    other = torch.empty_like(out)
    step = 1
    while step < power:
        (low, high), (sums, differences) = (
            side.unflatten(-2, (power // (2 * step), 2, step)).unbind(-3) for side in (out, other)
        )
        torch.add(low, high, out=sums)
        torch.sub(low, high, out=differences)
        # The first output may be the caller's tensor, so it is not written to.
        out, other = other, out if step > 1 else torch.empty_like(out)
        step *= 2
    if odd > 1:
        rows = []
        for i in range(odd):
            angles = [2 * math.pi * (i * j % odd) / odd for j in range(odd)]
            row = (math.cos(angles[0]) + math.sin(angles[0])) * out[..., 0, :, :]
            for j in range(1, odd):
                row = row + (math.cos(angles[j]) + math.sin(angles[j])) * out[..., j, :, :]
            rows.append(row)
        out = torch.stack(rows, dim=-3)
    return (out.flatten(-3, -2) * dim**-0.5).transpose(-1, -2)


def rotate(x: torch.Tensor, seed: int | None) -> torch.Tensor:
    """R x over the last dimension; `[..., N, D]` float32."""
    return hadamard(x * signs(x.shape[-1], seed, x.device))


def rotate_back(x: torch.Tensor, seed: int | None) -> torch.Tensor:
    """R^-1 x over the last dimension; `[..., N, D]` float32."""
    return hadamard(x) * signs(x.shape[-1], seed, x.device)


@cached_table
def rotation_matrix(dim: int, seed: int | None, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """R as a dense matrix `[dim, dim]`, with `rotate(x) = x @ R.T`, for kernels that rotate with tensor cores."""
    return rotate(torch.eye(dim, dtype=torch.float32, device="cpu"), seed).T.contiguous().to(device=device, dtype=dtype)
