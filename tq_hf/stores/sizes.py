"""Sizes of the tensors of a store, and checks of the keys and values that it is given."""

from __future__ import annotations

from functools import lru_cache

import torch
from tq_kernels.format import BLOCK_TOKENS
from tq_kernels.types import KeyValue, PackedBlocks

from ..compat import FakeTensor, autocast_dtype, outside_modes
from ..config import TurboQuantConfig
from ..tensors.layer import LayerTensors, RowKind
from ..tensors.residual import ring_capacity

GROWTH = 1.125
"""Buffers grow by an eighth: appends stay amortised O(new tokens), and at most an eighth is held in reserve."""
STEP_TOKENS = 16
"""Most tokens of a decode step: drafts of assisted decoding and the token before them, which one kernel attends to."""
SHORT_CALL = 128
"""Calls of up to this many tokens go through the residual; longer ones are encoded from the model's own tensors."""
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


@lru_cache(maxsize=1024)
def residual_capacity(residual_length: int, rows: int, max_cache_len: int | None, step_tokens: int = 1) -> int:
    """Number of rows to allocate for a residual of `rows` rows, with room for decode steps of up to `step_tokens`."""
    room = int(rows * GROWTH) + BLOCK_TOKENS if max_cache_len is None else max_cache_len
    return ring_capacity(max(rows, min(residual_length + BLOCK_TOKENS + step_tokens - 1, room)))


@lru_cache
@outside_modes
def _no_blocks(config: TurboQuantConfig, sizes: tuple[int, int, int, int], device: torch.device) -> PackedBlocks:
    """Tensors without elements, shared by equal layers until their first block is due."""
    batch, heads, *dims = sizes
    return PackedBlocks.allocate(config.layout(*dims), batch, heads, 0, device)


@lru_cache(maxsize=1024)
def _room(
    config: TurboQuantConfig, keys: Kind, values: Kind, max_cache_len: int | None
) -> tuple[PackedBlocks, int, int]:
    """Tensors without blocks, number of blocks of a new store, and number of rows of its ring. Raises `ValueError` if
    keys and values do not fit each other."""
    check_states(keys, values)
    (batch, heads, tokens, key_dim), _, device = keys
    due = config.num_blocks(tokens)
    rows = max(0, tokens - config.sink_tokens) - due * BLOCK_TOKENS
    none = _no_blocks(config, (batch, heads, key_dim, values[0][3]), device)
    num_blocks = due if max_cache_len is None else config.num_blocks(max_cache_len)
    return none, num_blocks, residual_capacity(config.residual_length, rows, max_cache_len)


def new_tensors(
    config: TurboQuantConfig, keys: torch.Tensor, values: torch.Tensor, max_cache_len: int | None, prompt: bool
) -> LayerTensors:
    """Tensors of a new store; see `LayerStore.allocate`."""
    if isinstance(keys, FakeTensor):
        raise ValueError(
            "Keys are fake tensors, which have no numbers for a TurboQuantCache to read. Leave `FakeTensorMode`; run "
            'the model on the meta device (`model.to("meta")`), or with a `DynamicCache`.'
        )
    none, num_blocks, ring_rows = _room(config, kind_of(keys), kind_of(values), max_cache_len)
    scales, data = none.channel_scales.map(torch.empty_like if prompt else torch.clone), none.data
    # A preallocated layer owns even tensors without blocks: graphs hold their addresses.
    if num_blocks or max_cache_len is not None:
        data = data.new_empty(*keys.shape[:2], num_blocks, none.layout.block_words)
    dim = keys.shape[3] + values.shape[3]
    rows = keys.new_empty(*keys.shape[:2], ring_rows + config.sink_tokens, dim)
    return LayerTensors(config, PackedBlocks(none.layout, data, scales), rows)
