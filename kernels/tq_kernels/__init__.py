"""Triton kernels over packed KV-cache blocks."""

from .decode.decoder import Decoder, device_int

__all__ = ["Decoder", "device_int"]
