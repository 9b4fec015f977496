"""Under `torch.autocast`, which chooses dtypes by device.

A float32 model computes its matrix products in 16 bits there. Keys leave the rotary embedding in float32 all the same,
and values do not. `DynamicCache` holds both in float32, and so does a cache of this package; sdpa then reads them, and
the queries, in 16 bits. What this package computes itself, it computes in the dtypes that it names.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_dtype(states: torch.Tensor) -> torch.dtype | None:
    """What sdpa computes in and returns where these states are, or `None` outside of autocast."""
    device = states.device.type
    # torch answers for devices that compute.
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def outside_autocast(states: torch.Tensor) -> AbstractContextManager[object]:
    """A context in which operations on these states' device have the dtypes of their arguments."""
    return nullcontext() if autocast_dtype(states) is None else torch.autocast(states.device.type, enabled=False)
