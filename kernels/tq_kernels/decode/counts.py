"""Counts where kernels read them: int32 scalars on the device."""

from functools import lru_cache

import torch


@lru_cache
@torch.inference_mode(False)
def _integers(size: int, device: torch.device) -> torch.Tensor:
    """0 to `size` on the device, 16 bytes apart, as wide as Triton's alignment."""
    # Copied from the host, which waits for it: filled on the device, another stream might read it too early.
    return torch.arange(size, dtype=torch.int32).repeat_interleave(4).to(device)


@lru_cache(maxsize=65536)
@torch.inference_mode(False)
def device_int(value: int, device: torch.device) -> torch.Tensor:
    """`value` as an int32 scalar on the device, out of a table: the host waits for a table, not for every length."""
    return _integers(max(4096, 1 << value.bit_length()), device)[4 * value]
