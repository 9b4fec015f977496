"""A decoding loop whose step is one CUDA graph."""

from .loop import graph_decoding

__all__ = ["graph_decoding"]
