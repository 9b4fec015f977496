"""Decoding loop with one CUDA graph per step."""

from .loop import graph_decoding

__all__ = ["graph_decoding"]
