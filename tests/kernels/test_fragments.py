"""The kernels for GPUs whose matrix units Triton does not use, against fp64 attention: in the interpreter, which is
made to run their inline PTX."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tq_kernels.codec import launch as codec_launch
from tq_kernels.decode import launch as decode_launch
from tq_kernels.prefix import dense as dense_launch
from tq_kernels.prefix import launch as prefix_launch
from tq_kernels.types import AttentionOptions

from tests.support.kernel_cases import INTERPRETED, Case, child, make_inputs, oracle, relative_rms, run_decode
from tests.support.paged_cases import Step, make
from tests.support.prefix_cases import make_prefix_inputs, view_of
from tests.support.ptx import run_inline_asm
from tq_hf.ops import dispatch
from tq_hf.ops.cpu import attention as cpu_attention
from tq_hf.ops.triton import blocks as triton_blocks
from tq_hf.ops.triton import pages as triton_pages

BASE = Case(blocks=1, capacity=2)
BF16, FP32 = torch.bfloat16, torch.float32
CASES = [
    BASE.with_(blocks=2),
    BASE.with_(preset="3bit_nc", Hq=7, Dk=128, Dv=96),
    BASE.with_(preset="2bit_nc", Hq=3, Dk=80, B=2, residual=1),
    BASE.with_(preset="k8v4", Hq=2, Hkv=2, dtype=BF16),
    BASE.with_(preset="3.5bit_nc", Hq=12),
    BASE.with_(preset="3bit_nc", Dk=72, Dv=36, Hq=2),
    BASE.with_(Dk=136, Dv=64, Hq=9),
    BASE.with_(dtype=FP32),
    BASE.with_(mask="padding", B=2, preset="3bit_nc"),
    BASE.with_(mask="full", S=5, Hq=3),
    BASE.with_(softcap=15.0, S=2, s_aux=True, Hq=2),
    BASE.with_(S=16, Hq=2, residual=16, preset="2.5bit_nc"),
    BASE.with_(blocks=0, residual=23),
    BASE.with_(residual=0, sinks=0, preset="k3v4_nc"),
]


test_all_cases_in_the_interpreter = child(__file__)


if INTERPRETED:
    run_inline_asm()

    @pytest.fixture(autouse=True)
    def on_turing(monkeypatch: pytest.MonkeyPatch) -> None:
        turing = dataclasses.replace(decode_launch.target(torch.device("cpu")), capability=(7, 5))
        for module in (codec_launch, decode_launch, dense_launch, prefix_launch, triton_blocks):
            monkeypatch.setattr(module, "target", lambda device: turing)

    @pytest.mark.parametrize(
        "step",
        [
            Step(past=(140, 0, 3), new=(1, 0, 1)),
            Step(past=(257,), new=(1,), Hq=12, preset="3bit_nc", softcap=15.0, s_aux=True),
            Step(past=(130,), new=(1,), Hq=2, Hkv=2, preset="k8v4", D=80, dtype=BF16),
        ],
        ids=str,
    )
    def test_decode_over_pages_agrees_with_the_reference(step: Step) -> None:
        inputs = make(step)
        other = inputs.to(torch.device("cpu"))
        assert triton_pages.supports_paged_step(other.tokens[0], other.tokens[1], other.pages)
        out = triton_pages.paged_step(other.tokens, other.pages, other.sequences, other.options)
        assert relative_rms(out, inputs.expected().double()) <= (5e-3 if step.dtype == BF16 else 1.5e-3)

    def test_prompts_over_pages_are_not_for_these_cards() -> None:
        inputs = make(Step(past=(140,), new=(3,)))
        assert not triton_pages.supports_paged_prompts(inputs.tokens[0], inputs.pages.layout)

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_decode_agrees_with_fp64(case: Case) -> None:
        inputs = make_inputs(case, torch.device("cpu"))
        assert relative_rms(run_decode(inputs), oracle(inputs)) <= (4e-3 if case.dtype == BF16 else 1e-3)

    @pytest.mark.parametrize(
        ("case", "way"),
        [
            (BASE.with_(S=5, Hq=3, residual=20), "buffered_attend"),
            (BASE.with_(S=70, Hq=4, Hkv=2, residual=90, preset="3bit_nc", mask="padding", B=2), "buffered_attend"),
            (BASE.with_(S=7, Hq=1, Dk=80, Dv=96, preset="3bit_nc", residual=9, dtype=BF16), "buffered_attend"),
            (BASE.with_(S=5, Hq=2, mask="full", preset="2bit_nc", causal=False, residual=13), "buffered_attend"),
            (BASE.with_(S=9, Hq=2, blocks=0, residual=30), "buffered_attend"),
            (BASE.with_(S=4, Hq=2, preset="k8v4", softcap=15.0, s_aux=True, residual=40), "attend"),
        ],
        ids=str,
    )
    def test_many_queries_read_the_dequantized_history(case: Case, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """By sdpa where it computes the call, by torch's tiles where logits are capped or sinks learned."""
        ways: list[str] = []

        def note(module: Any, name: str) -> None:
            original = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *args: (ways.append(name), original(*args))[1])

        note(dispatch, "buffered_attend")
        note(cpu_attention, "attend")
        note(triton_blocks, "dequantize")
        # As on a GPU, where sdpa is fast.
        monkeypatch.setattr(dispatch, "supports_buffered_attend", lambda _, asked: cpu_attention.supports_sdpa(asked))
        prefix = make_prefix_inputs(case, torch.device("cpu"), beside=True)
        inputs, view = prefix.inputs, view_of(prefix)
        options = AttentionOptions(inputs.scaling, case.causal, case.softcap, inputs.s_aux)
        assert not triton_blocks.supports_attend_many(inputs.query, view, inputs.mask, options)
        out = dispatch.attend(inputs.query, view, inputs.mask, options)
        assert ways == [way, *["dequantize"] * (way == "buffered_attend" and case.blocks > 0)]
        # bf16 rounds the dequantized states too.
        assert relative_rms(out, oracle(inputs)) <= (6e-3 if case.dtype == BF16 else 1e-3)
