"""`bench_latents`: its two attentions agree on a small case in the interpreter."""

import pytest
import torch

from tests.support.helpers import slow
from tests.support.kernel_cases import INTERPRETED, child, runs_kernels

test_attentions_agree_in_the_interpreter = child(__file__)


@runs_kernels
@pytest.mark.parametrize(("heads", "context"), [(16, 500), (20, 300), slow(70, 300)])
def test_packed_and_dense_latents_give_the_same(heads: int, context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.measure.speed import bench_latents
    from tests.support.kernel_cases import DEVICE, relative_rms

    monkeypatch.setattr(bench_latents, "LATENT", 64)
    monkeypatch.setattr(bench_latents, "ROTARY", 32)
    inputs = bench_latents.Inputs(heads, 2, context, DEVICE)
    rows = 16 if heads <= 16 else 32 if heads <= 32 else 64
    dtype = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter cannot multiply bf16
    inputs.query = inputs.query.to(dtype)
    states = inputs.dense().to(dtype)
    for config in bench_latents.DENSE_CONFIGS[rows]:
        dense = bench_latents.attend_dense_latents(inputs.query, states, config)[:, 0]
        assert relative_rms(inputs.attend().transpose(0, 1), dense.cpu().double()) < 1e-2
    assert len(bench_latents.CONFIGS[rows]) >= 2
