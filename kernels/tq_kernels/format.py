"""What decides the bits of a cache, on the host and in kernels: each number and each rule stands here once.

A packed block holds 128 tokens in four planes of 32. Every word of codes holds the same token of all four planes, so
that a kernel unpacks a word into four matrix operands (`tq_hf.codec.packing` draws the bits).
"""

from importlib.util import find_spec
from typing import NamedTuple

BLOCK_TOKENS = 128
"""Tokens of a packed block."""

PLANES = 4
PLANE_TOKENS = BLOCK_TOKENS // PLANES

MOST_SINKS = 8
"""Rows that a page has at least, of any preset and dtype."""

CHANNEL_MULTIPLE = 8
"""Codes are packed for a multiple of 8 channels; other head dims are padded with zeros before the rotation."""

LEVEL_TABLES = {
    2: (64, -32, -64, 32, 14, -112, -14, 112),
    3: (42, 14, 112, 79, 14, 155, 72, 43),
    4: (8, 25, 42, 60, 80, 103, 132, 175),
}
"""What a look-up of three bits gives, in 1/64: one byte is all a kernel has to look up for a code. At 3 and 4 bits they
are magnitudes, each of which has either sign; at 2 bits levels, of whose fp16 the low byte is 0. At 4 bits those whose
mean squared error on N(0, 1) is least (tests/codec/test_codebook.py searches around them); against unrounded Lloyd-Max
centroids the grid costs 0.06%. At 2 and 3 bits a trellis chooses among them (`tq_hf.codec.trellis`);
`examples/measure/quality/trellis.py train` finds them."""

TRELLIS_STEPS = {2: 25, 3: 32}
"""A trellis codes channels rounded to one over this of a level of 1."""

TRELLIS_UNITS = {2: 23.828125, 3: 32.0}
"""Such steps of a standard deviation. At 2 bits a level of 1 is 1.05 of it, with which the levels above have the least
error."""

TRELLIS_LIMITS = {2: 57, 3: 86}
"""Farther from 0 channels are coded as if they were there."""

TRELLIS_ERRORS = {
    2: ((296, -4), (259, 2), (296, 4), (259, -2), (250, -1), (399, 7), (250, 1), (399, -7)),
    3: ((57, 6), (0, 10), (401, -3), (208, 1), (2, 10), (801, -9), (172, 2), (57, 6)),
}
"""What a level of `LEVEL_TABLES` adds to the error of a path, `a + b x` for a channel x, at 3 bits for its size: its
square less twice its product with x, and what no choice between levels depends on. In 1/50 and 1/133 of the square of a
level of 1, slopes rounded: errors of paths fit in 11 bits then. It costs 0.3% in squared error at 2 bits, 0.2% at 3."""

TRELLIS_FAR = {2: 320, 3: 600}
"""What a path starts with that starts in a wrong state, more than any two states can differ in what follows; at 2 bits
times the exclusive or of both."""

FP8_MAX = 448.0
FP8_LEVEL_SCALE = 2.0**-8
"""An e4m3 byte moved into fp16's fields reads 2**-8 times its value (exponent bias 7 against 15); levels keep that
factor, scales undo it."""


LEAST_TOKENS = 32
"""Of fewer tokens nothing is concluded about channels: their channel scales stay one. A later call of more than 128
tokens decides if it comes before the first block is encoded. Shorter ones do not: their rows are in the residual when
queries are known."""
SAMPLED_BLOCKS = 8
"""Blocks of a prompt that are looked at, evenly spread."""
NEAR, FAR = 1.6, 2.5
"""A channel is balanced wholly if its factor is `FAR` times the median one's or a `FAR`-th of it, not at all below
`NEAR`, and in proportion (of logarithms) between."""
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-11, 2.0**12
"""Rotated queries, divided by a factor, then fit into fp16, as queries are normalised (`tq_kernels.decode.rotate`)."""
OUT_OF_RANGE = 2.0**8
"""States of an RMS beyond this, or below its inverse, are brought to an RMS of about 1."""
QUIETEST = 2.0**-10
"""Least RMS of a channel that is believed, over that of the loudest."""
LARGEST_STATE = 2.0**56
"""States are clamped to this, so that squares of them can be summed in float32."""
LARGEST_RATIO = 2.0**60
"""Largest ratio of RMS, and its inverse the smallest, that is told from larger ones."""


def padded_dim(head_dim: int) -> int:
    """`head_dim` rounded up to the multiple the packing needs (64, 80, 96, 128, 192, 256 stay as they are)."""
    return -(-head_dim // CHANNEL_MULTIPLE) * CHANNEL_MULTIPLE


def due_blocks(length: int, sinks: int, residual: int) -> int:
    """Blocks that a cache of `length` tokens holds packed: those complete and wholly older than `residual` tokens.

    Args:
        length: Tokens held.
        sinks: Tokens at the start that are never packed.
        residual: Tokens at the end that are never packed.
    """
    return max(0, length - sinks - residual) // BLOCK_TOKENS


class Sample(NamedTuple):
    """Where a prompt is looked at: `pieces` of `size` tokens among the `whole` blocks from token `first` on."""

    first: int
    size: int
    whole: int
    pieces: int

    def start(self, piece: int) -> int:
        """Where a piece begins."""
        return self.first + BLOCK_TOKENS * ((self.whole - 1) * piece // max(1, self.pieces - 1))


def sample(tokens: int, first: int) -> Sample:
    """Up to `SAMPLED_BLOCKS` whole blocks of a prompt of `tokens`, of which the `first` are sinks, the last block among
    them; or what there is."""
    whole = (tokens - first) // BLOCK_TOKENS
    if whole < 1:
        start = min(first, max(0, tokens - LEAST_TOKENS))
        return Sample(start, tokens - start, 1, 1)
    return Sample(first, BLOCK_TOKENS, whole, min(SAMPLED_BLOCKS, whole))


# The host's rules serve installations without Triton too.
if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    TOKENS = tl.constexpr(BLOCK_TOKENS)
    """`BLOCK_TOKENS` in kernels."""
    PLANE = tl.constexpr(PLANE_TOKENS)
    """`PLANE_TOKENS` in kernels."""

    @triton.jit
    def due_blocks_in_kernel(length, sinks, residual):
        """`due_blocks` of int32 scalars."""
        return tl.maximum(length - sinks - residual, 0) // TOKENS

    @triton.jit
    def sampled_start(first, whole, pieces, piece):
        """`Sample.start` of int32 scalars."""
        return first + TOKENS * ((whole - 1) * piece // tl.maximum(pieces - 1, 1))
