"""Triton kernels over packed KV-cache blocks.

Rooms import downwards only: `decode` and `prefix` import `codec`, `turing` and `common`; all import `types`, `layout`
and `format`, which need no Triton, because `tq_hf` reads them where no kernel runs.
"""
