"""Kernels that encode and dequantise blocks."""
