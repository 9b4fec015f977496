"""What a store refuses: states that are no keys and values, that do not go with those held, or that exceed its room."""

from __future__ import annotations

import torch

from ..compat import autocast_dtype
from ..tensors.blocks import KeyValue
from ..tensors.layer import RowKind


def check_states(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise a `ValueError` unless these are keys and values of the same tokens.

    Args:
        keys: `[B, Hkv, S, Dk]`.
        values: `[B, Hkv, S, Dv]`.
    """
    shapes = f"Keys {tuple(keys.shape)} and values {tuple(values.shape)}"
    if keys.dim() != 4 or values.dim() != 4:
        raise ValueError(f"{shapes} must both have the shape [batch, KV heads, tokens, head_dim].")
    if keys.shape[:3] != values.shape[:3]:
        raise ValueError(f"{shapes} must agree in batch, heads and tokens.")
    if keys.device != values.device:
        raise ValueError(f"Keys are on {keys.device} and values on {values.device}; move both to one device.")
    if keys.dtype != values.dtype or not keys.dtype.is_floating_point:
        raise ValueError(f"Keys are {keys.dtype} and values {values.dtype}; both must have one floating-point dtype.")
    if 0 in (keys.shape[1], keys.shape[3], values.shape[3]):
        raise ValueError(f"{shapes} have no heads or a head_dim of 0; there is nothing to cache.")


def widened(keys: torch.Tensor, values: torch.Tensor, held: torch.dtype) -> KeyValue:
    """Keys `[B, Hkv, S, Dk]` and values `[B, Hkv, S, Dv]` as they are, and under `torch.autocast` both in the widest
    dtype of theirs and of what is `held`, as where `DynamicCache` concatenates."""
    if keys.dtype == values.dtype == held or autocast_dtype(keys) is None:
        return keys, values
    dtype = torch.promote_types(torch.promote_types(keys.dtype, values.dtype), held)
    return keys.to(dtype), values.to(dtype)


def check_same(what: str, held: object, came: object) -> None:
    """Raise a `ValueError` unless keys that came are in this like those a cache holds."""
    if held != came:
        raise ValueError(
            f"This cache holds states with {what} {held}, but was given keys with {what} {came}. Use a new "
            "TurboQuantCache for another batch or model, or call `cache.reset()` first (after which a preallocated "
            "cache still has its batch size, dtype and device)."
        )


def check_fits(keys: torch.Tensor, values: torch.Tensor, held: RowKind) -> None:
    """Raise a `ValueError` unless these states go with those a store holds in all but the number of tokens."""
    check_states(keys, values)
    expected = {
        "batch size": (held.keys[0], keys.shape[0]),
        "number of KV heads": (held.keys[1], keys.shape[1]),
        "key head_dim": (held.keys[3], keys.shape[3]),
        "value head_dim": (held.values[3], values.shape[3]),
        "dtype": (held.dtype, keys.dtype),
        "device": (held.device, keys.device),
    }
    for what, (has, came) in expected.items():
        check_same(what, has, came)


def check_room(tokens: int, held: int, max_cache_len: int) -> None:
    """Raise a `ValueError` unless so many more tokens fit a preallocated cache."""
    if held + tokens > max_cache_len:
        what = (
            f"Appending {tokens} tokens to the {held} in this cache exceeds its `max_cache_len` of {max_cache_len}."
            if held
            else f"The prompt has {tokens} tokens and `max_cache_len` is {max_cache_len}."
        )
        raise ValueError(f"{what} Make the cache with a larger `max_cache_len`.")
