"""Attention over packed latents against fp64 over the dequantized latents, in the interpreter and on a GPU if there is
one; and the same in torch, which defines it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tq_kernels.types import AttentionOptions

from tests.support.helpers import slow
from tests.support.kernel_cases import (
    DEVICE,
    INTERPRETED,
    Case,
    child,
    gpu,
    kernel_rotations,
    make_inputs,
    oracle,
    relative_rms,
    runs_kernels,
)
from tq_hf import TurboQuantCache, graph_decoding
from tq_hf.compat import as_input
from tq_hf.config import PRESETS, TurboQuantConfig

BASE = Case(Hq=5, Dk=64, Dv=16)
"""Latents as keys and rotary keys as values of one KV head."""
CASES = [
    *(BASE.with_(preset=preset, B=2) for preset in PRESETS),
    BASE.with_(Hq=16, Dk=512, Dv=64, blocks=1, balanced=True),
    BASE.with_(Hq=20, Dk=256, Dv=32, blocks=2, dtype=torch.bfloat16),
    BASE.with_(Hq=40, B=3, dtype=torch.float32, blocks=4),
    BASE.with_(S=3),
    BASE.with_(S=16, B=2, residual=16),
    BASE.with_(S=4, causal=False),
    BASE.with_(mask="padding", B=3, preset="3bit_nc"),
    BASE.with_(mask="full", S=3, B=2),
    BASE.with_(mask="full", S=1, balanced=True),
    BASE.with_(blocks=0, residual=23),
    BASE.with_(blocks=1, residual=1, sinks=0),
    BASE.with_(residual=0, sinks=0),
    BASE.with_(blocks=4, residual=96, sinks=8),
    BASE.with_(blocks=3, capacity=64, B=2, balanced=True),
    BASE.with_(value_scale=30.0),
]


def call(case: Case, of_latents: bool = True) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Inputs, rotary queries `[B, Hq, S, Dr]`, and the expected means of latents `[B, S, Hq, R]`. Rotary keys have the
    bits of latent layers, or those of the preset's values."""
    with pytest.MonkeyPatch.context() as patch:
        made = TurboQuantConfig.of_latents if of_latents else partial(replace, loud=False)
        patch.setattr(TurboQuantConfig, "from_preset", lambda name: made(PRESETS[name]))
        inputs = make_inputs(case, DEVICE)
    generator = torch.Generator().manual_seed(1)
    rotary = torch.randn(case.B, case.S, case.Hq, case.Dv, generator=generator) / case.value_scale
    rotary = rotary.to(DEVICE, case.dtype).transpose(1, 2)

    def joined(parts: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat(parts, -1), parts[0]

    wide = replace(
        inputs,
        query=torch.cat([inputs.query, rotary], -1),
        sinks=joined(inputs.sinks),
        residual=joined(inputs.residual),
    )
    return inputs, rotary, latent_oracle(wide)


def latent_oracle(wide: Any) -> torch.Tensor:
    """`oracle` over keys that are latents beside rotary keys, and values that are latents."""
    from tests.support import kernel_cases

    def dequantize(config: Any, packed: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        layout = packed.layout
        latents, rotary = (
            x.new_empty(*x.shape[:3], dim) for x, dim in ((keys, layout.key_dim), (keys, layout.value_dim))
        )
        plain(config, packed, latents, rotary)
        keys.copy_(torch.cat([latents, rotary], -1))
        values.copy_(latents)

    plain, case = kernel_cases.dequantize, wide.case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_cases, "dequantize", dequantize)
        return oracle(replace(wide, case=case.with_(Dk=case.Dk + case.Dv, Dv=case.Dk)))


def run(case: Case, inputs: Any, rotary: torch.Tensor, splits: int | None = None, config: Any = None) -> torch.Tensor:
    """The kernels, with scratch poisoned: `[B, S, Hq, R]`."""
    from tq_kernels.decode.launch import held_counts
    from tq_kernels.latents.launch import attend_latents

    out = attend_latents(
        inputs.query.transpose(0, 1).flatten(1, 2),
        rotary,
        (inputs.packed, inputs.rows, case.sinks),
        held_counts(case.blocks, case.residual, case.sinks, DEVICE),
        kernel_rotations(inputs),
        inputs.mask,
        AttentionOptions(inputs.scaling, case.causal),
        allocate=lambda size: torch.full((size,), torch.nan, device=DEVICE),
        splits=splits,
        config=config,
    )
    return out.unflatten(1, (case.B, case.S)).permute(1, 2, 0, 3)


TOLERANCE = {torch.float16: 1.5e-3, torch.float32: 1.5e-3, torch.bfloat16: 4e-3}


def check(case: Case, of_latents: bool = True) -> None:
    inputs, rotary, expected = call(case, of_latents)
    assert relative_rms(run(case, inputs, rotary), expected) <= TOLERANCE[case.dtype]


test_all_cases_in_the_interpreter = child(__file__)


@runs_kernels
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_fp64(case: Case) -> None:
    check(case)


@runs_kernels
@pytest.mark.parametrize("preset", ["k8v4", "4bit_nc", "k3v4_nc"])
def test_rotary_keys_of_4_bits_agree_with_fp64(preset: str) -> None:
    check(BASE.with_(preset=preset, mask="padding", B=2), of_latents=False)


@runs_kernels
@pytest.mark.parametrize("splits", [1, 3, 7])
@pytest.mark.parametrize("rows", [16, 64])
def test_any_tiles_and_splits_give_the_same(rows: int, splits: int) -> None:
    from tq_kernels.latents.launch import LatentConfig

    case = BASE.with_(Hq=17, S=2, B=2)
    inputs, rotary, expected = call(case)
    config = LatentConfig(rows, 64 if rows == 16 else 128, 2, 8, 2)
    assert relative_rms(run(case, inputs, rotary, splits, config), expected) <= TOLERANCE[case.dtype]


@runs_kernels
def test_rows_that_attend_to_nothing_are_zero() -> None:
    case = BASE.with_(mask="full", B=2)
    inputs, rotary, _ = call(case)
    inputs.mask[1] = False
    assert (run(case, inputs, rotary)[1] == 0).all()


def small_model() -> Any:
    """A model with latents that the kernels take, in float32."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    config = DeepseekV3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, first_k_dense_replace=1,
        num_attention_heads=6, num_key_value_heads=6, q_lora_rank=None, kv_lora_rank=64, qk_nope_head_dim=16,
        qk_rope_head_dim=32, v_head_dim=24, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(DEVICE)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    return model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each launch of the kernels from now on."""
    from tq_hf.ops.triton import blocks

    found: list[int] = []
    attend = blocks.attend_latents
    monkeypatch.setattr(blocks, "attend_latents", lambda *arguments: (found.append(1), attend(*arguments))[1])
    return found


@runs_kernels
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy's, of blocks that nothing was written to
@pytest.mark.parametrize("room", [slow(None), 512], ids=["growing", "preallocated"])
def test_a_model_reads_packed_latents(room: int | None, calls: list[int]) -> None:
    model = small_model()
    ids = torch.randint(3, 64, (2, 280)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :21] = 0

    def logits(attention: str) -> torch.Tensor:
        model.set_attn_implementation(attention)
        cache, parts = TurboQuantCache(model.config, max_cache_len=room), []
        with torch.no_grad():
            for start, stop in ((0, 270), (270, 271), (271, 274), (274, 280)):
                padding = mask[:, :stop]
                parts.append(model(ids[:, start:stop], attention_mask=padding, **as_input(cache)).logits)
        return torch.cat(parts[1:], 1)

    expected = logits("sdpa")
    assert not calls
    assert relative_rms(logits("turboquant"), expected.cpu().double()) < 2e-3
    assert len(calls) == 3


@gpu
def test_a_captured_step_reads_packed_latents(calls: list[int]) -> None:
    model = small_model()
    ids = torch.randint(3, 64, (2, 390)).to(DEVICE)
    options = dict(max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0)

    def generated(attention: str) -> torch.Tensor:
        model.set_attn_implementation(attention)
        cache = TurboQuantCache(model.config, max_cache_len=512)
        return model.generate(ids, **as_input(cache), custom_generate=graph_decoding, **options)

    expected = generated("sdpa")
    assert not calls
    found = generated("turboquant")
    assert 0 < len(calls) < 23  # replayed steps launch nothing
    assert (found == expected).float().mean() > 0.99


@runs_kernels
@pytest.mark.parametrize(("heads", "context"), [(16, 500), (20, 300), slow(70, 300)])
def test_the_two_attentions_of_bench_latents_agree(heads: int, context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.measure.speed import bench_latents

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
