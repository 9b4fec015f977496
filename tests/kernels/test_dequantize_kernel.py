"""The dequantize kernel against the torch reference: in Triton's interpreter, and on a GPU if there is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tq_kernels.types import PackedBlocks

from tests.support.codec_cases import BF16, FP16, FP32, SHAPES, Case
from tests.support.kernel_cases import (
    DEVICE,
    INTERPRETED,
    child,
    codec_rotations,
    gpu,
    random_channel_scales,
    relative_rms,
    runs_kernels,
)
from tq_hf.codec.reference import dequantize as reference_dequantize
from tq_hf.codec.reference import encode as reference_encode
from tq_hf.codec.rotation import rotation_matrix
from tq_hf.config import PRESETS, TurboQuantConfig

CPU = torch.device("cpu")
TOLERANCE = {FP32: 1e-6, FP16: 3e-4, BF16: 4e-3}
"""Relative RMS: rounding of the output's dtype (the interpreter truncates to bf16)."""


CASES = [
    *[Case(config, dtype=FP32) for config in PRESETS.values()],
    *SHAPES,
    Case(TurboQuantConfig(key_bits=8, value_bits=8), 80, 256, FP16),
    Case(PRESETS["4bit_nc"], 64, 128, batch=2, heads=3, balanced=True),
    Case(PRESETS["3bit_nc"], 100, 80, FP16, balanced=True),
    Case(PRESETS["4bit_nc"], 80, 128, FP16, balanced=True),
    Case(PRESETS["2.5bit_nc"], 256, 96, BF16, balanced=True),
    Case(PRESETS["k8v4"], 512, 320, FP16, heads=1, balanced=True),
    Case(PRESETS["2bit_nc"], 384, 512, BF16, heads=1, balanced=True),
]


def check(case: Case, start: int = 1, stop: int = 3, count: int = 4) -> None:
    """Dequantize blocks `start` to `stop` of `count`."""
    from tq_kernels.codec.launch import dequantize

    generator = torch.Generator().manual_seed(0)
    config = case.config
    layout = config.layout(case.dk, case.dv)
    blocks = PackedBlocks.allocate(layout, case.batch, case.heads, count, CPU)
    if case.balanced:
        blocks = replace(blocks, channel_scales=random_channel_scales(case.batch, case.heads, case.dk, case.dv))
    keys, values = (
        torch.randn(case.batch, case.heads, 128 * count, dim, generator=generator) for dim in (case.dk, case.dv)
    )
    key_channel_scales, value_channel_scales = (factor.float()[:, :, None] for factor in blocks.channel_scales)
    reference_encode(config, (keys + 2) / key_channel_scales, values / value_channel_scales, blocks, 0)
    tokens = 128 * (stop - start)
    expected = [torch.empty(case.batch, case.heads, tokens, dim) for dim in (case.dk, case.dv)]
    reference_dequantize(config, blocks.slice(start, stop), *expected)
    # Views of a workspace: heads behind tokens, room to spare on every side, all of it poisoned.
    rooms = [
        torch.full((case.batch, tokens + 7, case.heads, dim), torch.nan, dtype=case.dtype, device=DEVICE)
        for dim in (case.dk + 8, case.dv + 8)
    ]
    out = [room[:, :tokens, :, :dim].transpose(1, 2) for room, dim in zip(rooms, (case.dk, case.dv), strict=True)]
    on_device = blocks.map(lambda tensor: tensor.to(DEVICE))
    dequantize(on_device, start, stop, *out, codec_rotations(config, layout, DEVICE))
    for room, got, want in zip(rooms, out, expected, strict=True):
        assert relative_rms(got, want.double()) <= TOLERANCE[case.dtype]
        assert room.isnan().sum() == room.numel() - got.numel(), "wrote outside of the given rows"


test_all_cases_in_the_interpreter = child(__file__)


@runs_kernels
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_reference(case: Case) -> None:
    check(case)


@runs_kernels
def test_all_blocks_agree_with_the_reference() -> None:
    check(Case(TurboQuantConfig(), 64, 64, batch=2, heads=3), start=0, stop=4)


if INTERPRETED:

    def test_refuses_a_buffer_of_another_length() -> None:
        from tq_kernels.codec.launch import dequantize

        blocks = PackedBlocks.allocate(PRESETS["4bit_nc"].layout(16), 1, 1, 2, CPU)
        rotation = rotation_matrix(16, 0, CPU, FP32)
        out = torch.empty(1, 1, 128, 16)
        with pytest.raises(ValueError, match="room for 128 tokens"):
            dequantize(blocks, 0, 2, out, out, (rotation, rotation))


@gpu
@pytest.mark.parametrize("preset", PRESETS)
def test_long_contexts_on_a_gpu(preset: str) -> None:
    """More blocks than programs."""
    check(Case(PRESETS[preset], 128, 128, heads=5, batch=2), start=3, stop=150, count=151)
