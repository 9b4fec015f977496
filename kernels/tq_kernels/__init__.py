"""Triton kernels over packed KV-cache blocks.

Rooms import downwards only: `decode` and `prefix` know `codec`, `turing` and `common`, everything knows `types` and
`format`. These two import without Triton, because `tq_hf` reads them where no kernel runs.
"""
