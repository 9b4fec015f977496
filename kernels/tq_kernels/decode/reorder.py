"""Put the sequences of a batch in another order where they are: beam search takes beams to each other's places in every
step.

One launch for all tensors of a layer, which stay where they are, and with them everything that knows their addresses. A
program reads the same piece of all sequences before it writes it to any; those that keep their place are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..common.compat import current_device
from ..common.device import target
from ..common.launcher import Kernel

TENSORS = 10
"""Tensors that one launch takes at most."""
MOST_SEQUENCES = 256
"""More leave pieces of less than 64 bytes."""
UNIT = 16
"""Bytes that a sequence must have a multiple of in each tensor."""
PIECE_WORDS = 4096
"""int32 words of a program at a time, of all sequences."""


@triton.jit
def selected(tensor, units, which, INDEX: tl.constexpr, at, size):
    """Pointer and int32 words of this tensor if it is `which`, else `at` and `size`."""
    words = tensor.to(tl.pointer_type(tl.int32), bitcast=True)
    return tl.where(which == INDEX, words, at), tl.where(which == INDEX, units.to(tl.int64) * 4, size)


@triton.jit(  # without `debug` the assertion would not be compiled
    debug=True,
    do_not_specialize="units0 units1 units2 units3 units4 units5 units6 units7 units8 units9 count".split(),
)
def reorder_sequences(
    sources,  # [B] int32 or int64, whose states sequence b gets
    tensor0,  # [B, ..] contiguous, aligned
    tensor1,
    tensor2,
    tensor3,
    tensor4,
    tensor5,
    tensor6,
    tensor7,
    tensor8,
    tensor9,
    units0,  # 16 bytes each that a sequence has in a tensor
    units1,
    units2,
    units3,
    units4,
    units5,
    units6,
    units7,
    units8,
    units9,
    count,  # B
    BLOCK_B: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Grid: (programs, 10)."""
    which = tl.program_id(1)
    at = tensor0.to(tl.pointer_type(tl.int32), bitcast=True)
    size = units0.to(tl.int64) * 4
    at, size = selected(tensor1, units1, which, 1, at, size)
    at, size = selected(tensor2, units2, which, 2, at, size)
    at, size = selected(tensor3, units3, which, 3, at, size)
    at, size = selected(tensor4, units4, which, 4, at, size)
    at, size = selected(tensor5, units5, which, 5, at, size)
    at, size = selected(tensor6, units6, which, 6, at, size)
    at, size = selected(tensor7, units7, which, 7, at, size)
    at, size = selected(tensor8, units8, which, 8, at, size)
    at, size = selected(tensor9, units9, which, 9, at, size)
    place = tl.arange(0, BLOCK_B)
    source = tl.load(sources + place, mask=place < count, other=0).to(tl.int64)
    exists = (source >= 0) & (source < count)
    tl.device_assert(exists, "`beam_idx` names a sequence that the cache does not have")
    moves = (place < count) & exists & (source != place)
    read = at + source[:, None] * size
    written = at + place.to(tl.int64)[:, None] * size
    for piece in range(tl.program_id(0), (size + PIECE - 1) // PIECE, tl.num_programs(0)):
        word = piece * PIECE + tl.arange(0, PIECE)[None, :]  # int64, as `size`
        inside = moves[:, None] & (word < size)
        words = tl.load(read + word, mask=inside, other=0)
        # Another thread may have read what this one writes to.
        tl.debug_barrier()
        tl.store(written + word, words, mask=inside)


REORDER = Kernel(reorder_sequences)


def takes_reorder(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether `reorder` takes these tensors: so many, of so many sequences, each of whole units."""
    return (
        len(tensors) <= TENSORS
        and tensors[0].shape[0] <= MOST_SEQUENCES
        and all(
            x.is_contiguous() and x.data_ptr() % UNIT == 0 and x.stride(0) * x.element_size() % UNIT == 0
            for x in tensors
        )
    )


def reorder(tensors: Sequence[torch.Tensor], sources: torch.Tensor) -> None:
    """Put sequence `sources[b]` in place b of every tensor.

    Args:
        tensors: `[B, ..]`, those that `takes_reorder`.
        sources: `[B]` int32 or int64 on the same device, contiguous. On a GPU the launch fails if one is not a
            sequence's.
    """
    device, count = sources.device, sources.shape[0]
    if device.type == "cuda" and device.index != current_device():
        with torch.cuda.device(device):
            return reorder(tensors, sources)
    units = [x.stride(0) * x.element_size() // UNIT for x in tensors]
    spare = TENSORS - len(tensors)
    block_b = triton.next_power_of_2(count)
    piece = PIECE_WORDS // block_b
    programs = min(-(-4 * max(units) // piece), 8 * target(device).multiprocessors)
    constants = (block_b, piece)
    REORDER(
        (max(1, programs), TENSORS, 1),
        (sources, *tensors, *[tensors[0]] * spare),
        (*units, *[0] * spare, count),
        constants,
        (constants, sources.dtype, *[x.dtype for x in tensors], device.index),
        num_warps=4,
        sanitize_overflow=False,  # what `debug` turns on
    )
