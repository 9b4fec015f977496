"""Numbers and rules that decide the bits of a cache, on the host and in kernels, each stated once.

A packed block holds 128 tokens in four planes of 32. Every word of codes holds the same token of all four planes: a
kernel unpacks a word into four matrix operands (`tq_hf.codec.packing` draws the bits).
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

BLOCK_TOKENS = 128
"""Number of tokens of a packed block."""

PLANES = 4
PLANE_TOKENS = BLOCK_TOKENS // PLANES

MOST_SINKS = 8
"""Most sinks: a page of any preset and dtype has room for these rows."""

CHANNEL_MULTIPLE = 8
"""Codes are packed for a multiple of 8 channels; other head dims are padded with zeros before the rotation."""

LOUD_HEADS, LOUD_EVERY, MOST_LOUD, LARGEST_UNIT = 64, 32, 16, 2.0**15
"""Heads of `LOUD_HEADS` channels or more have loud ones: one in `LOUD_EVERY` or fewer, a power of two from four to
`MOST_LOUD`. Measured by `examples/measure/quality/bound.py`. Units of their codes are `LARGEST_UNIT` at most."""

SMALL_UNIT = 2.0**-18
"""Factor of small levels: n / 64 * 2**-18 is the subnormal fp16 with bits n. One byte is then looked up, and the other
is the sign; NVIDIA's matrix units take subnormal numbers exactly, at full speed."""


@dataclass(frozen=True)
class Trellis:
    """Whole numbers by which the path of a word's codes is chosen (`tq_hf.codec.trellis`).

    Args:
        steps: Channels are rounded to steps; a level of 1 has this number of them.
        unit: Number of steps of a standard deviation.
        limit: Channels are clamped to this number of steps before they are coded.
        errors: Error `a + b x` that a level adds to a path, for a channel x (its size at 3 bits): the level's square
            less twice its product with x, plus a constant equal for all levels. In 1/50 (2 bits) and 1/133 of a
            squared level of 1, slopes rounded: errors of paths then fit in 11 bits. It costs 0.3% in squared error
            at 2 bits, 0.2% at 3.
        far: Initial error of a path that starts in a wrong state, more than later errors of two states can differ;
            times the exclusive or of both states at 2 bits.
    """

    steps: int
    unit: float
    limit: int
    errors: tuple[tuple[int, int], ...]
    far: int


@dataclass(frozen=True)
class Code:
    """Code of a width: what everything that depends on the number of bits asks. `tq_hf.codec.packing` draws its words.

    Args:
        bits: Bits of a channel.
        levels: Levels by a look-up of three bits, in 1/64: a kernel looks up one byte for a code. Empty for FP8 e4m3.
        magnitudes: Whether levels are magnitudes, of either sign. Else they have 0 in the low byte of their fp16.
        quarters: Number of parts of the channels that share words: four, or one.
        trellis: How the path of a word's codes is chosen; `None` for the nearest level of each channel.
        key_shrink: Factor of key scales. A softmax raises e to noisy scores, and noise alone makes packed keys heavier
            than the exact keys of a residual; slightly smaller scores balance this. At 3 bits there is no gain
            (`examples/measure/quality/bound.py`).
    """

    bits: int
    levels: tuple[int, ...] = ()
    magnitudes: bool = False
    quarters: int = 1
    trellis: Trellis | None = None
    key_shrink: float = 1.0

    @property
    def is_fp8(self) -> bool:
        """Whether a code is an e4m3 byte, which takes no look-up."""
        return not self.levels

    @property
    def is_trellis(self) -> bool:
        """Whether a level depends on the code before, too. Codes of two bits, crumbs, are then a word's chain."""
        return self.trellis is not None

    @property
    def has_sign_words(self) -> bool:
        """Whether signs have words of their own, behind the others and shared by all quarters."""
        return self.magnitudes and self.quarters > 1

    @property
    def tiles(self) -> int:
        """Number of equal tiles that a block's words are in: each has four bits for the channels of a quarter."""
        return self.bits * self.quarters // 4

    @property
    def tile_quarters(self) -> int:
        """Number of quarters whose codes a tile has; the last tile has signs where they have words of their own."""
        return self.quarters // (self.tiles - self.has_sign_words)

    @property
    def small_unit(self) -> float:
        """Factor of small levels."""
        return SMALL_UNIT if self.magnitudes else 1.0


ERRORS_2 = ((296, -4), (259, 2), (296, 4), (259, -2), (250, -1), (399, 7), (250, 1), (399, -7))
ERRORS_3 = ((57, 6), (0, 10), (401, -3), (208, 1), (2, 10), (801, -9), (172, 2), (57, 6))
"""`Trellis.errors` of 2 and of 3 bits."""
CODES = {
    2: Code(2, (64, -32, -64, 32, 14, -112, -14, 112), False, 4, Trellis(25, 23.828125, 57, ERRORS_2, 320), 0.98),
    3: Code(3, (42, 14, 112, 79, 14, 155, 72, 43), True, 4, Trellis(32, 32.0, 86, ERRORS_3, 600)),
    4: Code(4, (8, 25, 42, 60, 80, 103, 132, 175), True),
    8: Code(8),
}
"""Codes by width. Levels of 4 bits have the least mean squared error on N(0, 1) (tests/codec/test_codebook.py searches
around them); against unrounded Lloyd-Max centroids the grid costs 0.06%. Levels of 2 and 3 bits are found by
`examples/measure/quality/trellis.py train`; at 2 bits a level of 1 is 1.05 standard deviations, the least error."""


def code_of(bits: Any, name: str = "bits") -> Code:
    """Code of a width; `name` is that of the option. Raises a `ValueError` for a width that there is not."""
    if not isinstance(bits, int) or bits not in CODES:
        raise ValueError(f"`{name}` is {bits!r}; it must be one of {', '.join(map(str, CODES))} (8 is scaled FP8).")
    return CODES[bits]


FP8_MAX = 448.0
FP8_LEVEL_SCALE = 2.0**-8
"""Factor of an e4m3 byte moved into fp16's fields (exponent bias 7 against 15); levels keep it, scales undo it."""


LEAST_TOKENS = 32
"""Fewest tokens that decide channel scales; with fewer they stay one. A later call of more than 128 tokens decides if
it comes before the first block is encoded; shorter calls do not, whose rows are in the residual by then."""
SAMPLED_BLOCKS = 8
"""Number of blocks of a prompt that are sampled, evenly spread."""
NEAR, FAR = 1.6, 2.5
"""A channel is balanced wholly at `FAR` times the median channel's factor or a `FAR`-th of it, not at all within
`NEAR`, and in proportion (of logarithms) between."""
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-11, 2.0**12
"""Bounds of channel scales: normalised queries divided by them, and rotated, fit into fp16
(`tq_kernels.decode.rotate`)."""
OUT_OF_RANGE = 2.0**8
"""States with an RMS beyond this, or below its inverse, are scaled to an RMS of about 1."""
QUIETEST = 2.0**-10
"""Least RMS of a channel, relative to that of the loudest; smaller ones are raised to it."""
LARGEST_STATE = 2.0**56
"""States are clamped to this: their squares can then be summed in float32."""
LARGEST_RATIO = 2.0**60
"""Ratios of RMS are clamped to this and its inverse."""


def loud_channels(head_dim: int) -> int:
    """Number of loud channels of a key head (`tq_hf.codec.balance`)."""
    return 0 if head_dim < LOUD_HEADS else min(max(4, 1 << (head_dim // LOUD_EVERY).bit_length() - 1), MOST_LOUD)


def padded_dim(head_dim: int) -> int:
    """`head_dim` rounded up to the multiple the packing needs (64, 80, 96, 128, 192, 256 stay as they are)."""
    return -(-head_dim // CHANNEL_MULTIPLE) * CHANNEL_MULTIPLE


def due_blocks(length: int, sinks: int, residual: int) -> int:
    """Number of packed blocks in a cache of `length` tokens: those complete and wholly older than `residual` tokens.

    Args:
        length: Number of tokens.
        sinks: Number of tokens at the start that are never packed.
        residual: Number of tokens at the end that are never packed.
    """
    return max(0, length - sinks - residual) // BLOCK_TOKENS


class Sample(NamedTuple):
    """Sample of a prompt: `pieces` of `size` tokens among the `whole` blocks from token `first` on."""

    first: int
    size: int
    whole: int
    pieces: int

    def start(self, piece: int) -> int:
        """First token of a piece."""
        return self.first + BLOCK_TOKENS * ((self.whole - 1) * piece // max(1, self.pieces - 1))


def sample(tokens: int, first: int) -> Sample:
    """Sample up to `SAMPLED_BLOCKS` whole blocks of a prompt of `tokens` behind its `first` sinks, the last block
    included; or the tokens there are."""
    whole = (tokens - first) // BLOCK_TOKENS
    if whole < 1:
        start = min(first, max(0, tokens - LEAST_TOKENS))
        return Sample(start, tokens - start, 1, 1)
    return Sample(first, BLOCK_TOKENS, whole, min(SAMPLED_BLOCKS, whole))


# Installations without Triton use the host's rules too.
if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    TOKENS = tl.constexpr(BLOCK_TOKENS)
    """`BLOCK_TOKENS` in kernels."""
    PLANE = tl.constexpr(PLANE_TOKENS)
    """`PLANE_TOKENS` in kernels."""
    CODE = tl.constexpr(CODES)
    """`CODES` in kernels."""

    @triton.jit
    def due_blocks_in_kernel(length, sinks, residual):
        """`due_blocks` of int32 scalars."""
        return tl.maximum(length - sinks - residual, 0) // TOKENS

    @triton.jit
    def sampled_start(first, whole, pieces, piece):
        """`Sample.start` of int32 scalars."""
        return first + TOKENS * ((whole - 1) * piece // tl.maximum(pieces - 1, 1))
