"""Triton kernels over packed KV-cache blocks."""

from .launch import decode_attention, decode_scratch_size, device_int

__all__ = ["decode_attention", "decode_scratch_size", "device_int"]
