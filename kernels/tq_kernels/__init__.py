"""Triton kernels over packed KV-cache blocks."""

from importlib.util import find_spec

if find_spec("triton") is not None:  # `tq_kernels.format` serves installations without it too
    from .decode.decoder import Decoder, device_int

    __all__ = ["Decoder", "device_int"]
