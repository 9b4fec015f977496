"""Triton kernels over packed KV-cache blocks.

Rooms import downwards only: `decode`, `prefix` and `codec` know `common`, everything knows `format`. `format` imports
without Triton, because `tq_hf` reads it where no kernel runs.
"""
