"""Reorder the sequences of a batch in place: beam search moves beams to each other's places in every step.

One launch does all tensors of a layer, in their memory: their addresses stay valid. A program reads the same piece of
all sequences before it writes the piece of any; sequences that keep their place are not touched.

Copies by torch, two launches a tensor, take 1.6 of a step's 8.8 ms with four beams at 4 x 2k, and 3.1 of 13.3 ms at
4 x 16k (8 layers of 8B shape, H200).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..common.device import target
from ..common.launcher import Kernel, on_its_device

TENSORS = 4
"""Most tensors of a launch."""
MOST_SEQUENCES = 256
"""Most sequences: more would leave pieces of less than 64 bytes."""
UNIT = 16
"""A sequence's bytes in each tensor are a multiple of this."""
PIECE_WORDS = 4096
"""int32 words a program moves at a time, over all sequences."""


@triton.jit
def selected(tensor, units, which, INDEX: tl.constexpr, at, size):
    """Pointer and number of int32 words of this tensor if it is the `which`-th, else `at` and `size`."""
    words = tensor.to(tl.pointer_type(tl.int32), bitcast=True)
    return tl.where(which == INDEX, words, at), tl.where(which == INDEX, units.to(tl.int64) * 4, size)


# Without `debug` the assertion would not be compiled.
@triton.jit(do_not_specialize="units0 units1 units2 units3 count".split(), debug=True)
def reorder_sequences(
    sources,  # [B] int32 or int64: sequence b gets the states of sequence `sources[b]`
    tensor0,  # [B, ..] contiguous, aligned
    tensor1, tensor2, tensor3,
    units0,  # units of 16 bytes of a sequence in tensor 0
    units1, units2, units3,
    count,  # B
    BLOCK_B: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Reorder pieces of all sequences. Grid: (programs, 4)."""
    which = tl.program_id(1)
    at = tensor0.to(tl.pointer_type(tl.int32), bitcast=True)
    size = units0.to(tl.int64) * 4
    at, size = selected(tensor1, units1, which, 1, at, size)
    at, size = selected(tensor2, units2, which, 2, at, size)
    at, size = selected(tensor3, units3, which, 3, at, size)
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


class ReorderLaunch:
    """Launch that reorders the sequences of fixed tensors, any number of times.

    Args:
        tensors: `[B, ..]`, of any dtypes.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        held = [tensor for tensor in tensors if tensor.numel()]
        first, spare = held[0], TENSORS - len(held)
        sizes = [tensor.stride(0) * tensor.element_size() for tensor in held]
        self.device, self.count = first.device, first.shape[0]
        self.takes = (
            spare >= 0
            and self.count <= MOST_SEQUENCES
            and all(x.is_contiguous() and x.data_ptr() % UNIT == 0 for x in held)
            and all(size % UNIT == 0 for size in sizes)
        )
        """Whether the kernel takes this number of tensors and sequences, each of whole units."""
        self.tensors = (*held, *[first] * spare)
        self.numbers = (*[size // UNIT for size in sizes], *[0] * spare, self.count)
        block_b = triton.next_power_of_2(self.count)
        piece = PIECE_WORDS // block_b
        self.grid = (min(-(-max(sizes) // (4 * piece)), 8 * target(self.device).multiprocessors), TENSORS, 1)
        self.constants = (block_b, piece)
        self.dtypes = tuple(tensor.dtype for tensor in self.tensors)

    @on_its_device
    def __call__(self, sources: torch.Tensor) -> None:
        """Put sequence `sources[b]` in place b of every tensor.

        Args:
            sources: `[B]` int32 or int64 on the tensors' device, contiguous. On a GPU the launch fails if one is out of
                range.
        """
        REORDER(
            self.grid,
            (sources, *self.tensors),
            self.numbers,
            self.constants,
            (self.constants, sources.dtype, self.dtypes, self.device.index),
            num_warps=4,
            sanitize_overflow=False,  # `debug` would turn this on
        )
