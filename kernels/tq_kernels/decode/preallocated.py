"""Append one token a sequence to a preallocated store, every length on the device, in one launch.

The store's counts are int32 tensors (see `tq_hf/stores/preallocated.py`): `state` is what is held between calls;
`step_counts` is what this step attends to, the slot of the first window row, and the blocks that become due, in entries
16 bytes apart. One program a head appends the keys, another the values: it writes the row and, if a block is due,
encodes it. All work out the counts from `state`; the last program to have read it writes them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..codec.encode import HALF_TOKENS, block_rows, encode_block, resident_rotation
from ..codec.launch import MATRIX_TYPES, encode_config
from ..codec.quantise import CORRECTIONS, LEVELS
from ..common.compat import current_device, current_raw_stream
from ..common.device import target
from ..common.launcher import Kernel, Launcher
from ..common.packed import Packed
from ..format import TOKENS, due_blocks_in_kernel
from .append import load_row


@triton.jit
def _append(
    states,
    states_b,
    states_h,
    sinks,
    window,
    words,
    scales,
    means,
    rotation,
    factors,
    heads,
    max_sinks,
    capacity,
    num_sinks,
    slot,
    to_sinks,
    fits,
    due,
    first_slot,
    home,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    CORRECTION: tl.constexpr,
    IS_VALUE: tl.constexpr,
    MATRIX: tl.constexpr,
    K_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):
    """Write the new row of this program's head to slot `slot` of the window, or to the sinks. If `due`, encode the
    window's block from `first_slot` on, which may end with this row, as block `home`."""
    head = tl.program_id(0)
    d = tl.arange(0, TILE)
    row = load_row(states, states_b, states_h, head, heads, d, HEAD_DIM)
    wide = head.to(tl.int64)
    if to_sinks:
        tl.store(sinks + (wide * max_sinks + num_sinks) * HEAD_DIM + d, row, mask=(d < HEAD_DIM) & fits)
    else:
        tl.store(window + (wide * capacity + slot) * HEAD_DIM + d, row, mask=(d < HEAD_DIM) & fits)
    if due > 0:
        tl.debug_barrier()
        factors += head * HEAD_DIM
        high, low = resident_rotation(rotation, factors, K_STEP, MATRIX, HEAD_DIM, DIM, TILE)
        early = window + (wide * capacity + first_slot) * HEAD_DIM
        offsets = block_rows()[:, None] * HEAD_DIM + tl.arange(0, K_STEP)[None, :]  # [64, K_STEP]
        encode_block(
            early, early + HALF_TOKENS * HEAD_DIM, offsets, offsets, words, scales, means, home, rotation, factors,
            high, low, HEAD_DIM, DIM, TILE, BITS, LEVELS, CORRECTION, IS_VALUE, MATRIX, K_STEP, PRECISION, ASM, 0,
        )  # fmt: skip


@triton.jit(  # without `debug` the assertion would not be compiled
    debug=True,
    do_not_specialize=(
        "heads keys_b keys_h values_b values_h max_sinks capacity residual max_cache_len blocks_b blocks_h"
    ).split(),
)
def append_and_encode(
    keys,  # [B, H, 1, DK]
    values,  # [B, H, 1, DV]
    state,  # [4] int32
    step_counts,  # [6, 4] int32; the last entry counts programs, 0 between launches
    length,  # [] int64
    sink_keys,  # [B, H, max_sinks, DK], contiguous
    sink_values,  # [B, H, max_sinks, DV]
    window_keys,  # [B, H, capacity, DK], contiguous
    window_values,  # [B, H, capacity, DV]
    key_words,  # the packed tensors, as for `encode_blocks`
    value_words,
    scales,
    key_means,  # anything without HAS_MEAN
    key_rotation,
    value_rotation,
    key_factors,
    value_factors,
    heads,
    keys_b,
    keys_h,
    values_b,
    values_h,
    max_sinks,
    capacity,
    residual,
    max_cache_len,
    blocks_b,  # strides of the packed tensors, in blocks
    blocks_h,
    DK: tl.constexpr,
    DKP: tl.constexpr,
    KEY_TILE: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_LEVELS: tl.constexpr,
    KEY_CORRECTION: tl.constexpr,
    KEY_STEP: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_LEVELS: tl.constexpr,
    VALUE_CORRECTION: tl.constexpr,
    VALUE_STEP: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    MATRIX: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):
    """Grid: (B * H, 2). A full store is left as it is, and the assertion fails."""
    sinks, blocks, rows, pending = tl.load(state), tl.load(state + 1), tl.load(state + 2), tl.load(state + 3)
    blocks += pending
    rows -= pending * TOKENS
    held = sinks + blocks * TOKENS + rows
    fits = held < max_cache_len
    tl.device_assert(fits, "a preallocated TurboQuantCache is full: make it with a larger `max_cache_len`")
    to_sinks = (sinks < max_sinks) & (held == sinks)
    # Window rows are numbered from the end of the sinks; row p is in slot p % capacity.
    slot = (blocks * TOKENS + rows) % capacity
    first_slot = (blocks * TOKENS) % capacity
    after = held + fits.to(tl.int32)
    due = tl.minimum(tl.maximum(due_blocks_in_kernel(after, max_sinks, residual) - blocks, 0), 1)
    tl.debug_barrier()
    if tl.atomic_add(step_counts + 5 * 4, 1) == 2 * tl.num_programs(0) - 1:
        num_sinks = sinks + (to_sinks & fits).to(tl.int32)
        num_rows = rows + (fits & (to_sinks == 0)).to(tl.int32)
        tl.store(step_counts, num_sinks)
        tl.store(step_counts + 1 * 4, blocks)
        tl.store(step_counts + 2 * 4, num_rows)
        tl.store(step_counts + 3 * 4, first_slot)
        tl.store(step_counts + 4 * 4, due)
        tl.store(step_counts + 5 * 4, 0)
        tl.store(state, num_sinks)
        tl.store(state + 1, blocks)
        tl.store(state + 2, num_rows)
        tl.store(state + 3, due)
        tl.store(length, after.to(tl.int64))
    head = tl.program_id(0)
    home = (head // heads).to(tl.int64) * blocks_b + (head % heads).to(tl.int64) * blocks_h + blocks
    if tl.program_id(1) == 0:
        _append(
            keys, keys_b, keys_h, sink_keys, window_keys, key_words, scales, key_means if HAS_MEAN else None,
            key_rotation, key_factors, heads, max_sinks, capacity, sinks, slot, to_sinks, fits, due, first_slot, home,
            DK, DKP, KEY_TILE, KEY_BITS, KEY_LEVELS, KEY_CORRECTION, False, MATRIX, KEY_STEP, PRECISION, ASM,
        )  # fmt: skip
    else:
        _append(
            values, values_b, values_h, sink_values, window_values, value_words, scales, None,
            value_rotation, value_factors, heads, max_sinks, capacity, sinks, slot, to_sinks, fits, due, first_slot,
            home, DV, DVP, VALUE_TILE, VALUE_BITS, VALUE_LEVELS, VALUE_CORRECTION, True, MATRIX, VALUE_STEP, PRECISION,
            ASM,
        )  # fmt: skip


APPEND = Kernel(append_and_encode)


class Appender:
    """Appends one token a sequence to tensors that stay, for any number of calls.

    Args:
        packed: The blocks. They get the bits that `tq_kernels.codec.launch.encode` would give them.
        sinks: Keys `[B, Hkv, S0, Dk]` and values `[B, Hkv, S0, Dv]`, contiguous.
        window: Ring buffers `[B, Hkv, capacity, Dk]` and values, contiguous.
        key_rotation, value_rotation: As for `encode`.
        bits: Of keys and of values.
        corrections: Of keys and of values, as for `encode`.
        residual_length: Tokens that stay dense.
    """

    def __init__(
        self,
        packed: Packed,
        sinks: tuple[torch.Tensor, torch.Tensor],
        window: tuple[torch.Tensor, torch.Tensor],
        key_rotation: torch.Tensor,
        value_rotation: torch.Tensor,
        *,
        bits: tuple[int, int],
        corrections: tuple[str, str],
        residual_length: int,
    ) -> None:
        ring = window[0]
        self.device, on = ring.device, target(ring.device)
        words, scales = (packed.key_words, packed.value_words), packed.scalars.view(torch.float16)
        means = scales if packed.key_means is None else packed.key_means
        factors = (packed.key_factors, packed.value_factors)
        self.tensors = (*sinks, *window, *words, scales, means, key_rotation, value_rotation, *factors)
        # Addresses cannot go stale: the tensors are held, and nothing gives a tensor other memory.
        self.addresses = tuple(tensor.data_ptr() for tensor in self.tensors)
        self.grid = (ring.shape[0] * ring.shape[1], 2, 1)
        self.heads, self.sizes = ring.shape[1], (sinks[0].shape[2], ring.shape[2], residual_length)
        self.block_strides = packed.block_strides
        constants: list[object] = []
        warps = 0
        for states, rotation, own, correction in zip(
            window, (key_rotation, value_rotation), bits, corrections, strict=True
        ):
            dim = rotation.shape[0]
            tile = max(16, triton.next_power_of_2(dim))
            config = encode_config(tile, dim, bits, states.element_size(), on.capability)
            warps = max(warps, config.warps)
            constants += [states.shape[3], dim, tile, own, LEVELS[own], CORRECTIONS[correction], config.k_step]
        # The interpreter cannot multiply bf16.
        matrix = tl.float32 if self.device.type == "cpu" else MATRIX_TYPES[ring.dtype]
        precision = "tf32x3" if on.asm else "ieee"
        self.constants = (*constants, packed.key_means is not None, matrix, precision, on.asm)
        # `sanitize_overflow` is what `debug` turns on.
        self.options = {"num_warps": warps, "sanitize_overflow": False}
        self.launcher: Launcher | None = None
        """How to launch with tensors that are all aligned, once that is compiled."""

    def __call__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        counts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        max_cache_len: int,
    ) -> None:
        """Write one token's rows to the sinks or the ring, encode the block that becomes due, and write the counts.

        Args:
            keys: `[B, Hkv, 1, Dk]` in the window's dtype, last dimension contiguous.
            values: `[B, Hkv, 1, Dv]`.
            counts: `state` `[4]` int32, `step_counts` `[6, 4]` int32, and `length` `[]` int64.
            max_cache_len: Tokens there is room for. A full store is not written to, and on a GPU the launch fails.
        """
        index = self.device.index
        if self.device.type == "cuda" and index != current_device():
            # Kernels are launched on the current device; layers of a model spread over several GPUs are not on it.
            with torch.cuda.device(self.device):
                return self(keys, values, counts, max_cache_len)
        key_b, key_h, _, _ = keys.stride()
        value_b, value_h, _, _ = values.stride()
        numbers = (self.heads, key_b, key_h, value_b, value_h, *self.sizes, max_cache_len, *self.block_strides)
        state, step_counts, length = counts
        given = (keys.data_ptr(), values.data_ptr(), state.data_ptr(), step_counts.data_ptr(), length.data_ptr())
        aligned = (given[0] | given[1]) & 15 == 0
        if self.launcher is not None and aligned:
            launcher = self.launcher
            stream = current_raw_stream(index)
            launcher.call(*self.grid, stream, *launcher.fixed, *given, *self.addresses, *numbers, *self.constants)
            return None
        launcher = APPEND(
            self.grid,
            (keys, values, *counts, *self.tensors),
            numbers,
            self.constants,
            (self.constants, keys.dtype, index),
            **self.options,
        )
        if aligned:
            self.launcher = launcher
        return None
