"""Triton kernels over packed KV-cache blocks."""

from .launch import Decoder, device_int

__all__ = ["Decoder", "device_int"]
