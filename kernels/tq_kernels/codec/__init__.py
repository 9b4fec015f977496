"""Kernels that encode and dequantize blocks."""
