"""Append the tokens of a decode step, and rotate its queries in that launch.

Over pages `append_to_pages` writes a row of each sequence (`append_tails` the newest of sequences with several). In a
store `append_and_rotate` does it: one program a head for keys, another for values. Counts of a growing store are on the
host, which gives the row of a token. A preallocated store has its counts in int32 tensors on the device (`DeviceCounts`
in `tq_hf/tensors/`); kernels read every length there, append one token or a few, and encode the due block, if any. All
programs compute the new counts from those before; the last to have read them writes. Other programs rotate queries and
wait for none of these.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from ..codec.encode import (
    HALF_TOKENS,
    BlockStates,
    NewStates,
    PagePlaces,
    block_rows,
    encode_block,
    encode_completed,
    resident_rotation,
)
from ..common.device import AMPERE, constants_of
from ..common.launcher import Kernel
from ..common.schedule import DecodeNumbers, copy_rows, fetch, lengths, ring_rows, row_of, write_counts
from ..format import TOKENS, due_blocks_in_kernel
from ..types import Pages, Sequences, Tokens
from .rotate import Queries, rotate_rows

PageWork = namedtuple("PageWork", "query_t query_h copies rotations workers")
"""Strides of queries in units of 8 elements, and programs of `append_to_pages`.

Args:
    copies: Programs that write rows, each of BLOCK_H heads of a sequence.
    rotations: Programs that rotate BLOCK_R of the B * Hkv * G query rows each.
    workers: Programs that encode, for each head and for keys and values.
"""


@triton.jit
def append_to_pages(
    rows,  # [pages, Hkv, ROWS, 2 * DIM]
    keys, values,  # [T, Hkv, DIM], strides in units of 8 elements, like those of queries
    block_table,  # [B, W] int32
    cu_seqlens_q, cu_seqlens_k,  # [B + 1] int32
    packed,  # blocks and rotations, as for `encode_blocks`
    key_rotation, value_rotation, value_channel_scales,
    query,  # [T, Hq, DIM]; this and the next three as in `append_and_rotate`
    query_rotation, key_channel_scales, scratch, work: PageWork, n: DecodeNumbers,
    OF_KEYS: tl.constexpr,  # an `EncodeShape`
    OF_VALUES: tl.constexpr,
    PLACE: tl.constexpr,  # a `PageShape`
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
    ENCODE: tl.constexpr,  # whether to encode; all sequences have one new token at most
):  # fmt: skip
    """Write the row of each sequence with one new token to its ring or sink page; rotate queries; encode the blocks
    that new tokens complete.

    Grid: (copies + rotations + 2 * Hkv * workers,); without ENCODE there are no workers.
    """
    KEYS: tl.constexpr = constants_of(OF_KEYS)
    VALUES: tl.constexpr = constants_of(OF_VALUES)
    P: tl.constexpr = constants_of(PLACE)
    index = tl.program_id(0)
    if index < work.copies:
        parts = work.copies // n.count
        sequence = index // parts
        first, new, past = lengths(cu_seqlens_q, cu_seqlens_k, sequence, n.count)
        head = index % parts * BLOCK_H + tl.arange(0, BLOCK_H)
        exists = (head < n.kv_heads) & (new == 1)
        pages = block_table + n.width.to(tl.int64) * sequence
        if ENCODE and KEYS.ASM >= AMPERE:
            # Fetch the table for the kernel that attends: a line of 32 pages a thread.
            fetch(pages + tl.minimum(tl.arange(0, 256) * 32, n.width - 1))
        row = row_of(past, P.SINKS, P.RING) + tl.zeros([BLOCK_H], tl.int32)
        DIMS: tl.constexpr = KEYS.HEAD_DIM + VALUES.HEAD_DIM
        at = ring_rows(rows, pages, row, exists, head, n.blocks_b, DIMS, P.ROWS, KEYS.BLOCK_WORDS)
        token = first.to(tl.int64)
        copy_rows(
            keys + token * (n.key_t * 8), values + token * (n.value_t * 8), head.to(tl.int64), at, exists,
            n.key_h * 8, n.value_h * 8, KEYS.HEAD_DIM, VALUES.HEAD_DIM, KEYS.TILE, VALUES.TILE,
        )  # fmt: skip
    elif index < work.copies + work.rotations:
        i = (index - work.copies) * BLOCK_R + tl.arange(0, BLOCK_R)
        new_queries = Queries(
            query, query_rotation, key_channel_scales, cu_seqlens_q, n.rows, 1, n.kv_heads, 0, work.query_h * 8,
            work.query_t * 8, n.queries,
        )  # fmt: skip
        rotate_rows(
            new_queries, scratch, i // n.rows, i % n.rows, i < n.count * n.kv_heads * n.rows, index == work.copies,
            n.plain_at, n.scale_at, KEYS.HEAD_DIM, KEYS.DIM, KEYS.TILE, KEYS.LOUD,
        )  # fmt: skip
    elif ENCODE:
        task = index - work.copies - work.rotations
        encode_completed(
            NewStates(keys, n.key_h * 8, n.key_t * 8, key_rotation, key_channel_scales),
            NewStates(values, n.value_h * 8, n.value_t * 8, value_rotation, value_channel_scales),
            PagePlaces(rows, block_table, cu_seqlens_q, cu_seqlens_k, n.blocks_b, n.count, n.width), packed,
            task // 2 % n.kv_heads, task % 2, task // 2 // n.kv_heads, work.workers, P, KEYS, VALUES,
        )  # fmt: skip


@triton.jit
def _append(
    states, stride, rows, row, tokens, due, due_row, packed, home, rotation, channel_scales, DIM: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Write this program's new keys or values, and encode those of the due block (it may end with them).

    Args:
        states, stride: Pointer to the first new token's, and elements to the next.
        rows: Pointer to those of the head's first dense row, of DIM elements.
        row: [MOST, 1] row of each token; the first `tokens` are written.
        due, due_row: Number of blocks that become due, 0 or 1, and row of the first token.
        packed, home: Pointer to block 0, or `None` to encode nothing, and index of the due block.
        rotation, channel_scales: Pointers, to the head's channel scales.
        C: An `EncodeShape`.
    """
    i, d = tl.arange(0, row.shape[0])[:, None], tl.arange(0, C.TILE)[None, :]
    written = (i < tokens) & (d < C.HEAD_DIM)  # [MOST, TILE]
    tl.store(rows + row * DIM + d, tl.load(states + i * stride + d, mask=written), mask=written)
    if packed is not None:
        if due > 0:
            tl.debug_barrier()
            resident = resident_rotation(rotation, channel_scales, C)
            early = rows + due_row * DIM
            late = early + HALF_TOKENS * DIM
            encode_block(BlockStates(early, late, block_rows()[:, None] * DIM), packed, home, resident, C)


AppendNumbers = namedtuple(
    "AppendNumbers", "key_b key_h key_s value_b value_h value_s new query_b query_h query_s residual max_cache_len"
)
"""Strides of keys, of values and of queries; S; of a preallocated store `residual_length` and capacity in tokens."""


@triton.jit(do_not_specialize=["slot"], debug=True)  # without `debug` the assertion would not be compiled
def append_and_rotate(
    kv_rows,  # [B, H, ring + sinks, DK + DV], contiguous
    keys, values,  # [B, H, S, DK] and [B, H, S, DV], or `None` to rotate alone
    counts,  # [5, 4] int32; the last entry counts programs, 0 between launches. Or `None`: the token goes to row `slot`
    length,  # [] int64; `None` without counts, as up to the channel scales
    packed,  # blocks, as for `encode_blocks`
    key_rotation, value_rotation, value_channel_scales,
    query,  # [B, H * G, S, DK], last dimension contiguous; or `None` to append alone
    query_rotation,  # [DKP, DKP] fp16, sqrt(DKP) R
    key_channel_scales,  # [B * H, DK] fp16
    scratch, slot, new: AppendNumbers, n: DecodeNumbers,
    OF_KEYS: tl.constexpr,  # an `EncodeShape`
    OF_VALUES: tl.constexpr, MOST: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Append S tokens, at most MOST, and encode the due block, by the first two programs of each head; by the others
    write `query_rotated`, `query_plain` and `query_scale`. Grid: (B * H, 2 + rows / BLOCK_R), without keys two fewer.

    A store without room for all of them is not written; the assertion fails. The kernel that attends reads the rows
    after this one has ended.
    """
    KEYS: tl.constexpr = constants_of(OF_KEYS)
    VALUES: tl.constexpr = constants_of(OF_VALUES)
    if query is None or (keys is not None and tl.program_id(1) < 2):
        program, i = tl.program_id(0), tl.arange(0, MOST)[:, None]
        batch, head = (program // n.kv_heads).to(tl.int64), (program % n.kv_heads).to(tl.int64)
        if counts is None:
            tokens, due, due_row, home, row = new.new, 0, 0, 0, slot + i
        else:
            sinks, blocks = tl.load(counts), tl.load(counts + 1 * 4)
            held_rows, pending = tl.load(counts + 2 * 4), tl.load(counts + 3 * 4)
            blocks += pending
            held_rows -= pending * TOKENS
            held = sinks + blocks * TOKENS + held_rows
            fits = held + new.new <= new.max_cache_len
            tl.device_assert(fits, "a preallocated TurboQuantCache is full: make it with a larger `max_cache_len`")
            tokens = tl.where(fits, new.new, 0)
            to_sinks = tl.where(held == sinks, tl.minimum(tokens, n.sinks - sinks), 0)
            due_row = (blocks * TOKENS) % n.ring
            due = tl.minimum(tl.maximum(due_blocks_in_kernel(held + tokens, n.sinks, new.residual) - blocks, 0), 1)
            tl.debug_barrier()
            if tl.atomic_add(counts + 4 * 4, 1) == 2 * tl.num_programs(0) - 1:
                write_counts(counts, length, sinks + to_sinks, blocks, held_rows + tokens - to_sinks, due)
            home = batch * n.blocks_b + head * n.blocks_h + blocks
            # After the sinks tokens are numbered; number p is in row p % ring.
            row = (blocks * TOKENS + held_rows + i - to_sinks) % n.ring
            row = tl.where(i < to_sinks, n.ring + sinks + i, row)
        DIM: tl.constexpr = KEYS.HEAD_DIM + VALUES.HEAD_DIM
        own_rows = kv_rows + program.to(tl.int64) * (n.ring + n.sinks) * DIM
        if tl.program_id(1) == 0:
            _append(
                keys + (batch * new.key_b + head * new.key_h), new.key_s, own_rows, row, tokens, due, due_row, packed,
                home, key_rotation, key_channel_scales + program * KEYS.HEAD_DIM, DIM, KEYS,
            )  # fmt: skip
        else:
            of_values = None if packed is None else value_channel_scales + program * VALUES.HEAD_DIM
            _append(
                values + (batch * new.value_b + head * new.value_h), new.value_s, own_rows + KEYS.HEAD_DIM, row, tokens,
                due, due_row, packed, home, value_rotation, of_values, DIM, VALUES,
            )  # fmt: skip
    else:
        of_step = Queries(
            query, query_rotation, key_channel_scales, None, n.rows, n.queries, n.kv_heads, new.query_b, new.query_h,
            new.query_s, None,
        )  # fmt: skip
        tile = tl.program_id(1) - (0 if keys is None else 2)
        r, resets = tile * BLOCK_R + tl.arange(0, BLOCK_R), (tl.program_id(0) == 0) & (tile == 0)
        rotate_rows(
            of_step, scratch, tl.program_id(0) + tl.zeros([BLOCK_R], tl.int32), r, r < n.rows, resets, n.plain_at,
            n.scale_at, KEYS.HEAD_DIM, KEYS.DIM, KEYS.TILE, KEYS.LOUD,
        )  # fmt: skip


TAIL_ROWS = tl.constexpr(32)
"""Number of rows a program of `append_tails` writes."""


@triton.jit(do_not_specialize="count key_t key_h value_t value_h width page_blocks".split())
def append_tails(
    key, value,  # [T, Hkv, DK] and [T, Hkv, DV], strides in units of 8 elements
    rows,  # as in `ring_rows`
    block_table, cu_seqlens_q, cu_seqlens_k, count, key_t, key_h, value_t, value_h, width,
    page_blocks, LEAST: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TILE_K: tl.constexpr, TILE_V: tl.constexpr,
    BLOCK_WORDS: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the last RING new tokens of sequences with LEAST or more to their rings, and sinks to their sink pages.

    Grid: (B, Hkv, (RING + SINKS) / TAIL_ROWS).
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    first, new, past = lengths(cu_seqlens_q, cu_seqlens_k, sequence, count)
    if new < LEAST:
        return
    row = tl.program_id(2) * TAIL_ROWS + tl.arange(0, TAIL_ROWS)
    # Invert row_of(): the newest token of each row [32], and its index among the new ones.
    newest = past + new - 1 - SINKS
    token = tl.where(row < RING, newest - (newest + RING - row) % RING + SINKS, row - RING)
    fresh = token - past
    valid = (fresh >= 0) & (fresh < new) & (row < RING + SINKS) & ((token < SINKS) == (row >= RING))
    at = ring_rows(
        rows, block_table + sequence.to(tl.int64) * width, row, valid, kv_head, page_blocks, DK + DV, ROWS, BLOCK_WORDS,
    )  # fmt: skip
    copy_rows(
        key + kv_head * (key_h * 8), value + kv_head * (value_h * 8), (first + fresh).to(tl.int64), at, valid,
        key_t * 8, value_t * 8, DK, DV, TILE_K, TILE_V,
    )  # fmt: skip


APPEND_TAILS = Kernel(append_tails)


def append_new_rows(tokens: Tokens, pages: Pages, sequences: Sequences, least: int = 2) -> None:
    """Write the newest rows of sequences with `least` new tokens or more to their rings, and sinks to their pages."""
    (_, key, value), layout, count = tokens, pages.layout, sequences.cu_seqlens_q.shape[0] - 1
    dims = (layout.key_dim, layout.value_dim)
    constants = (least, *dims, *map(triton.next_power_of_2, dims), layout.block_words, *pages.place)
    APPEND_TAILS(
        (count, key.shape[1], -(-(pages.ring_rows + pages.sinks) // TAIL_ROWS.value)),
        (key, value, pages.rows, sequences.block_table, sequences.cu_seqlens_q, sequences.cu_seqlens_k),
        (count, *tokens.row_strides, sequences.block_table.shape[1], pages.page_blocks),
        constants,
        (constants, key.dtype, key.device.index),
        num_warps=4,
    )
