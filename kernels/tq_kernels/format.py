"""What decides the bits of a cache, on the host and in kernels: each rule stands once in Python and once for Triton."""

from importlib.util import find_spec

BLOCK_TOKENS = 128
"""Tokens of a packed block."""


def due_blocks(length: int, sinks: int, residual: int) -> int:
    """Blocks that a cache of `length` tokens holds packed: those complete and wholly older than `residual` tokens.

    Args:
        length: Tokens held.
        sinks: Tokens at the start that are never packed.
        residual: Tokens at the end that are never packed.
    """
    return max(0, length - sinks - residual) // BLOCK_TOKENS


# The host's rules serve installations without Triton too.
if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def due_blocks_in_kernel(length, sinks, residual):
        """`due_blocks` of int32 scalars."""
        return tl.maximum(length - sinks - residual, 0) // 128
