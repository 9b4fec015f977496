"""Append one token a sequence: `rotate_and_append` to a window whose counts are on the host, the rest to a preallocated
store with every length on the device.

The preallocated store's counts are int32 tensors (see `tq_hf/stores/preallocated.py`): `state` is what is held between
calls; `step_counts` is what this step attends to, the slot of the first window row, and the blocks that become due, in
entries 16 bytes apart. `append_token` writes the new rows and `step_counts`; `finish_step` runs after the due block was
encoded and writes `state` and `length`. Neither reads what it writes, so no program waits for another.
"""

import torch
import triton
import triton.language as tl

from ..common.launcher import Kernel
from ..format import TOKENS, due_blocks_in_kernel
from .rotate import rotate_query


@triton.jit
def _load_row(states, stride_b, stride_h, head, heads, d, DIM: tl.constexpr):
    """The new row of `head`, counting B * H heads, of `states` [B, H, 1, DIM]."""
    batch = (head // heads).to(tl.int64)
    return tl.load(states + batch * stride_b + head % heads * stride_h + d, mask=d < DIM)


@triton.jit(
    do_not_specialize=[
        "slot",
        "capacity",
        "keys_b",
        "keys_h",
        "values_b",
        "values_h",
        "rows",
        "queries",
        "kv_heads",
        "query_b",
        "query_h",
        "query_s",
        "plain_at",
        "scale_at",
    ]
)
def rotate_and_append(
    keys,  # [B, Hkv, 1, DK]
    values,  # [B, Hkv, 1, DV]
    window_keys,  # [B, Hkv, capacity, DK], contiguous
    window_values,  # [B, Hkv, capacity, DV]
    query,  # from here on as for rotate_query
    rotation,
    factors,
    scratch,
    slot,
    capacity,
    keys_b,
    keys_h,
    values_b,
    values_h,
    rows,
    queries,
    kv_heads,
    query_b,
    query_h,
    query_s,
    plain_at,
    scale_at,
    DV: tl.constexpr,
    TILE: tl.constexpr,
    DK: tl.constexpr,
    DKP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """`rotate_query`; the first program of each head also writes its new row to slot `slot` of the window's ring.

    The kernel that attends waits for this one to end before it reads the window.
    """
    if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        head = tl.program_id(0)
        d = tl.arange(0, TILE)
        k = _load_row(keys, keys_b, keys_h, head, kv_heads, d, DK)
        v = _load_row(values, values_b, values_h, head, kv_heads, d, DV)
        row = head.to(tl.int64) * capacity + slot
        tl.store(window_keys + row * DK + d, k, mask=d < DK)
        tl.store(window_values + row * DV + d, v, mask=d < DV)
    rotate_query(
        query,
        rotation,
        factors,
        scratch,
        rows,
        queries,
        kv_heads,
        query_b,
        query_h,
        query_s,
        plain_at,
        scale_at,
        DK,
        DKP,
        BLOCK_D,
        BLOCK_R,
        PDL,
    )


@triton.jit(  # without `debug` the assertion would not be compiled
    debug=True,
    do_not_specialize=[
        "heads",
        "keys_b",
        "keys_h",
        "values_b",
        "values_h",
        "max_sinks",
        "capacity",
        "residual",
        "max_cache_len",
    ],
)
def append_row(
    keys,  # [B, H, 1, DK]
    values,  # [B, H, 1, DV]
    sink_keys,  # [B, H, max_sinks, DK], contiguous
    sink_values,  # [B, H, max_sinks, DV]
    window_keys,  # [B, H, capacity, DK], contiguous
    window_values,  # [B, H, capacity, DV]
    state,  # [4] int32
    step_counts,  # [5, 4] int32
    heads,
    keys_b,
    keys_h,
    values_b,
    values_h,
    max_sinks,
    capacity,
    residual,
    max_cache_len,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the rows of head `program`, and `step_counts`. A full store is left as it is, and the assertion fails."""
    head = tl.program_id(0)
    sinks, blocks, rows, pending = tl.load(state), tl.load(state + 1), tl.load(state + 2), tl.load(state + 3)
    blocks += pending
    rows -= pending * TOKENS
    length = sinks + blocks * TOKENS + rows
    fits = length < max_cache_len
    tl.device_assert(fits, "a preallocated TurboQuantCache is full: make it with a larger `max_cache_len`")
    to_sinks = (sinks < max_sinks) & (length == sinks)
    # Window rows are numbered from the end of the sinks; row p is in slot p % capacity.
    slot = (blocks * TOKENS + rows) % capacity
    d = tl.arange(0, TILE)
    k = _load_row(keys, keys_b, keys_h, head, heads, d, DK)
    v = _load_row(values, values_b, values_h, head, heads, d, DV)
    wide = head.to(tl.int64)
    if to_sinks:
        tl.store(sink_keys + (wide * max_sinks + sinks) * DK + d, k, mask=(d < DK) & fits)
        tl.store(sink_values + (wide * max_sinks + sinks) * DV + d, v, mask=(d < DV) & fits)
    else:
        tl.store(window_keys + (wide * capacity + slot) * DK + d, k, mask=(d < DK) & fits)
        tl.store(window_values + (wide * capacity + slot) * DV + d, v, mask=(d < DV) & fits)
    if head == 0:
        tl.store(step_counts, sinks + (to_sinks & fits).to(tl.int32))
        tl.store(step_counts + 1 * 4, blocks)
        tl.store(step_counts + 2 * 4, rows + (fits & (to_sinks == 0)).to(tl.int32))
        tl.store(step_counts + 3 * 4, (blocks * TOKENS) % capacity)
        due = due_blocks_in_kernel(length + fits.to(tl.int32), max_sinks, residual) - blocks
        tl.store(step_counts + 4 * 4, tl.minimum(tl.maximum(due, 0), 1))


@triton.jit
def write_counts(
    state,  # [4] int32
    step_counts,  # [5, 4] int32
    length,  # [] int64
):
    """What the step attended to is what the store holds, with the block that became due pending."""
    sinks, blocks, rows = tl.load(step_counts), tl.load(step_counts + 1 * 4), tl.load(step_counts + 2 * 4)
    tl.store(state, sinks)
    tl.store(state + 1, blocks)
    tl.store(state + 2, rows)
    tl.store(state + 3, tl.load(step_counts + 4 * 4))
    tl.store(length, (sinks + blocks * TOKENS + rows).to(tl.int64))


APPEND, FINISH = Kernel(append_row), Kernel(write_counts)


def append_token(
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: tuple[torch.Tensor, torch.Tensor],
    window: tuple[torch.Tensor, torch.Tensor],
    state: torch.Tensor,
    step_counts: torch.Tensor,
    *,
    residual_length: int,
    max_cache_len: int,
) -> None:
    """Write one token's rows to the sinks or the ring, and `step_counts`.

    Args:
        keys: `[B, Hkv, 1, Dk]` any float dtype, last dimension contiguous.
        values: `[B, Hkv, 1, Dv]`.
        sinks: Keys `[B, Hkv, S0, Dk]` and values, contiguous.
        window: Ring buffers `[B, Hkv, capacity, Dk]` and values, contiguous.
        state: `[4]` int32, read.
        step_counts: `[5, 4]` int32, written.
        residual_length: Tokens that stay dense.
        max_cache_len: Tokens there is room for. A full store is not written to, and on a GPU the launch fails.
    """
    batch, heads, _, key_dim = keys.shape
    value_dim, device = values.shape[3], keys.device.index
    sizes = (sinks[0].shape[2], window[0].shape[2], residual_length, max_cache_len)
    constants = (key_dim, value_dim, triton.next_power_of_2(max(key_dim, value_dim)))
    APPEND(
        (batch * heads, 1, 1),
        (keys, values, *sinks, *window, state, step_counts),
        (heads, *keys.stride()[:2], *values.stride()[:2], *sizes),
        constants,
        (constants, keys.dtype, window[0].dtype, device),
        num_warps=1,
        sanitize_overflow=False,  # which `debug` turns on
    )


def finish_step(state: torch.Tensor, step_counts: torch.Tensor, length: torch.Tensor) -> None:
    """Write `state` `[4]` int32 and `length` `[]` int64 from `step_counts`, after the due block was encoded."""
    FINISH((1, 1, 1), (state, step_counts, length), (), (), (state.device.index,), num_warps=1)
