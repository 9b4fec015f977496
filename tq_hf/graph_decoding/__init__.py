"""Decoding loops with one CUDA graph per step."""

from .entry import graph_decoding

__all__ = ["graph_decoding"]
