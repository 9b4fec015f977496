"""Checks of the keys and values that a store is given."""

from __future__ import annotations

import torch
from tq_kernels.types import KeyValue

from ..compat import autocast_dtype
from ..tensors.layer import RowKind

Kind = tuple[torch.Size, torch.dtype, torch.device]


def kind_of(states: torch.Tensor) -> Kind:
    """Shape, dtype and device."""
    return states.shape, states.dtype, states.device


def check_states(keys: Kind, values: Kind) -> None:
    """Raise a `ValueError` unless these are kinds of keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]` of the same
    tokens."""
    (shape, dtype, device), (values_shape, values_dtype, values_device) = keys, values
    shapes = f"Keys {tuple(shape)} and values {tuple(values_shape)}"
    if not len(shape) == len(values_shape) == 4:
        raise ValueError(f"{shapes} must both have the shape [batch, KV heads, tokens, head_dim].")
    if shape[:3] != values_shape[:3]:
        raise ValueError(f"{shapes} must agree in batch, heads and tokens.")
    if device != values_device:
        raise ValueError(f"Keys are on {device} and values on {values_device}; move both to one device.")
    if dtype != values_dtype or not dtype.is_floating_point:
        raise ValueError(f"Keys are {dtype} and values {values_dtype}; both must have one floating-point dtype.")
    if not shape[1] * shape[3] * values_shape[3]:
        raise ValueError(f"{shapes} have no heads or a head_dim of 0; there is nothing to cache.")


def widened(keys: torch.Tensor, values: torch.Tensor, held: torch.dtype) -> KeyValue:
    """Keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]` as they are, and under `torch.autocast` both in the widest
    dtype of theirs and of what is `held`, as where `DynamicCache` concatenates."""
    if keys.dtype == values.dtype == held or autocast_dtype(keys) is None:
        return keys, values
    dtype = torch.promote_types(torch.promote_types(keys.dtype, values.dtype), held)
    return keys.to(dtype), values.to(dtype)


def check_fits(keys: torch.Tensor, values: torch.Tensor, held: RowKind) -> None:
    """Raise a `ValueError` unless these states go with those a store holds in all but the number of tokens."""
    shape, values_shape = keys.shape, values.shape
    if (
        shape[2:3] == values_shape[2:3]
        and (*shape[:2], 1, *shape[3:]) == held.keys
        and (*values_shape[:2], 1, *values_shape[3:]) == held.values
        and keys.dtype == values.dtype == held.dtype
        and keys.device == values.device == held.device
    ):
        return
    check_states(kind_of(keys), kind_of(values))
    expected = {
        "batch size": (held.keys[0], keys.shape[0]),
        "number of KV heads": (held.keys[1], keys.shape[1]),
        "key head_dim": (held.keys[3], keys.shape[3]),
        "value head_dim": (held.values[3], values.shape[3]),
        "dtype": (held.dtype, keys.dtype),
        "device": (held.device, keys.device),
    }
    what, (has, came) = next((what, pair) for what, pair in expected.items() if pair[0] != pair[1])
    repeat = "" if what != "batch size" else " Repeat the sequences held with `cache.batch_repeat_interleave`."
    raise ValueError(
        f"This cache holds states with {what} {has}, but was given keys with {what} {came}.{repeat} Use a new "
        "TurboQuantCache for another batch or model, or call `cache.reset()` first (after which a preallocated "
        "cache still has its batch size, dtype and device)."
    )
