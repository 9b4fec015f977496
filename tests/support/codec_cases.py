"""Shapes and dtypes of keys and values that are encoded and dequantized."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tq_hf.config import PRESETS, TurboQuantConfig

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    config: TurboQuantConfig
    dk: int = 128
    dv: int = 64
    dtype: torch.dtype = BF16
    batch: int = 1
    heads: int = 2
    balanced: bool = False

    def __str__(self) -> str:
        c = self.config
        name = f"k{c.key_bits}-v{c.value_bits}"
        name += f"-Dk{self.dk}-Dv{self.dv}-B{self.batch}-H{self.heads}-{self.dtype}".replace("torch.", "")
        return name + "-balanced" * self.balanced


SHAPES = [
    *[
        Case(PRESETS["4bit_nc"], dk, dv, dtype, heads=1)
        for dk, dv, dtype in ((64, 256, FP16), (80, 96, BF16), (192, 128, FP16), (128, 72, FP32))
    ],
    *[
        Case(PRESETS["3bit_nc"], dk, dv, dtype, heads=1)
        for dk, dv, dtype in ((96, 80, FP16), (8, 24, BF16), (256, 12, FP16))
    ],
    *[
        Case(PRESETS[name], dk, dv, dtype)
        for name, dk, dv, dtype in (("k8v4", 24, 16, FP32), ("2bit_nc", 32, 8, FP16), ("2.5bit_nc", 16, 40, BF16))
    ],
]
"""Head sizes that are padded, and those of keys that are not those of values, by bits and dtype."""
