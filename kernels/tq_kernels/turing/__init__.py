"""Decode attention for Turing (compute capability 7.5): Triton does not use matrix units without `mma.m16n8k16`."""
