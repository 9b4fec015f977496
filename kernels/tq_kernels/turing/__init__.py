"""Kernels for cards whose matrix units Triton does not use: compute capability 7.5, without `mma.m16n8k16`."""
