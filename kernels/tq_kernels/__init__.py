"""Triton kernels over packed KV-cache blocks."""

from .launch import decode_attention, device_int

__all__ = ["decode_attention", "device_int"]
