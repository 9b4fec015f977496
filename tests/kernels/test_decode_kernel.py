"""Decode kernels against fp64 attention over the dequantized cache, in the interpreter and on a GPU if there is one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from tq_kernels.types import AttentionOptions, HeldCounts

from tests.support.helpers import slow
from tests.support.kernel_cases import (
    DEVICE,
    INTERPRETED,
    Case,
    child,
    gpu,
    make_inputs,
    oracle,
    relative_rms,
    run_decode,
    runs_kernels,
)
from tq_hf.config import PRESETS, TurboQuantConfig
from tq_hf.ops import dispatch, reference
from tq_hf.stores.store import LayerStore

BASE = Case()
FP32, BF16 = torch.float32, torch.bfloat16

# Every preset; groups of 1 to 12; head dims that are powers of two and others; keys and values of different size.
SHAPES = [
    BASE.with_(preset=preset, Hkv=hkv, Hq=hkv * groups, Dk=dk, Dv=dv, B=batch, blocks=blocks, residual=residual)
    for preset, (hkv, groups, dk, dv, batch, blocks, residual) in product(
        PRESETS,
        [(2, 1, 64, 64, 2, 3, 37), (1, 7, 128, 96, 1, 2, 96), (1, 3, 80, 64, 1, 4, 1), (1, 12, 96, 128, 1, 1, 13)],
    )
] + [
    BASE.with_(Hkv=2, Hq=8, Dk=256, Dv=256, blocks=2),
    BASE.with_(Hkv=1, Hq=5, Dk=192, Dv=128, blocks=2, residual=53),
    BASE.with_(Hkv=1, Hq=8, Dk=72, Dv=100, blocks=2, preset="3bit_nc"),
    BASE.with_(Hkv=1, Hq=8, Dk=512, Dv=512, blocks=2, balanced=True),
    BASE.with_(Hkv=1, Hq=16, Dk=512, Dv=512, blocks=2, preset="k8v4", dtype=BF16),
    BASE.with_(Hkv=1, Hq=6, Dk=512, Dv=320, blocks=1, preset="3bit_nc"),
    BASE.with_(Hkv=1, Hq=7, Dk=384, Dv=512, blocks=1, preset="2bit_nc"),
    BASE.with_(Hkv=1, Hq=7, Dk=328, Dv=296, blocks=1, preset="3bit_nc"),  # no equal parts of whole words
    BASE.with_(Hkv=1, Hq=4, Dk=192, Dv=192, blocks=1, preset="2.5bit_nc"),
]
OPTIONS = [
    BASE.with_(dtype=BF16, Hq=8, Hkv=2),
    BASE.with_(dtype=FP32, preset="k8v4"),
    # 16 float32 rows a head and logits up to 30: the error against fp64 is that of fp16 queries, as for other shapes.
    BASE.with_(Hq=48, Hkv=3, Dk=128, Dv=128, preset="k3v4_nc", dtype=FP32).with_(
        blocks=7, capacity=8, sinks=0, residual=126, residual_capacity=256
    ),
    BASE.with_(mask="padding", B=3, preset="3bit_nc"),
    BASE.with_(mask="full", S=5),
    BASE.with_(mask="full", S=1, B=2, softcap=15.0),
    BASE.with_(softcap=30.0, preset="k8v4"),
    BASE.with_(s_aux=True, Hq=8, Hkv=2, B=2),
    BASE.with_(S=2),
    BASE.with_(S=3, preset="2bit_nc", Hq=6, Hkv=2, B=2),
    BASE.with_(S=16, Hq=3, s_aux=True),
    BASE.with_(S=16, Hq=12, residual=16),
    BASE.with_(S=4, causal=False),
    BASE.with_(S=37, Hq=2, residual=40),
    BASE.with_(S=24, Hq=3, B=2, residual=30, mask="padding"),
    BASE.with_(blocks=0, residual=23),
    BASE.with_(blocks=1, residual=1, sinks=0),
    BASE.with_(residual=0, sinks=0),
    BASE.with_(blocks=4, residual=96, residual_capacity=96, sinks=11),
    BASE.with_(blocks=3, capacity=64, B=2),
    BASE.with_(balanced=True, Hq=6, Hkv=2, B=2),
    BASE.with_(balanced=True, dtype=BF16, preset="3bit_nc", Dk=96, Dv=80, S=16, Hq=3),
    BASE.with_(balanced=True, preset="k8v4", Dk=100, Dv=128, Hq=8, Hkv=2, s_aux=True),
    BASE.with_(value_scale=1e-3),
    BASE.with_(value_scale=300.0),
]
CASES = SHAPES + OPTIONS
LONG = [case for i, case in enumerate(SHAPES[: 4 * len(PRESETS)]) if (i // 4 + i) % 2]
"""Half of the shapes of each preset, the others of the next."""
TOLERANCE = {torch.float16: 1e-3, torch.float32: 1e-3, BF16: 4e-3}
"""Relative RMS. bf16 output alone has 1.7e-3 (3.2e-3 in the interpreter, which truncates)."""


def check(case: Case) -> None:
    inputs = make_inputs(case, DEVICE)
    assert relative_rms(run_decode(inputs), oracle(inputs)) <= TOLERANCE[case.dtype]


test_all_cases_in_the_interpreter = child(__file__)


@runs_kernels
@pytest.mark.parametrize("case", [slow(case) if case in LONG else case for case in CASES], ids=str)
def test_agrees_with_fp64(case: Case) -> None:
    check(case)


if INTERPRETED:
    from tq_kernels.decode import launch

    @pytest.mark.parametrize("preset", ["k8v4", "4bit_nc", "3bit_nc"])
    def test_agrees_with_fp64_as_on_amd(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
        amd = replace(launch.target(DEVICE), small_levels=False)
        monkeypatch.setattr(launch, "target", lambda device: amd)
        check(BASE.with_(preset=preset, Hq=8, Hkv=2))

    def test_heads_of_512_merge_wide_where_shared_memory_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
        large = replace(launch.target(DEVICE), shared_bytes=228 * 1024)
        monkeypatch.setattr(launch, "target", lambda device: large)
        check(BASE.with_(Hkv=2, Hq=16, Dk=512, Dv=512, blocks=2, B=2, softcap=20.0))

    def test_rows_that_attend_to_nothing_are_zero() -> None:
        inputs = make_inputs(BASE.with_(mask="full", B=2), DEVICE)
        assert inputs.mask is not None
        inputs.mask[1] = False
        out = run_decode(inputs)
        assert relative_rms(out, oracle(inputs)) <= 1e-3
        assert (out[1] == 0).all()

    def test_what_is_out_of_use_is_never_read() -> None:
        case = BASE.with_(capacity=9, residual_capacity=128)
        clean, other = (make_inputs(case, DEVICE) for _ in range(2))
        for tensor in other.packed.tensors().values():
            tensor[:, :, case.blocks :] = -1
        assert torch.equal(run_decode(clean), run_decode(other, scratch_fill=1e30))

    def test_expanded_mask_needs_no_copy() -> None:
        inputs = make_inputs(BASE.with_(mask="padding", B=2, S=3), DEVICE)
        assert inputs.mask is not None
        expected = run_decode(inputs)
        inputs.mask = inputs.mask.expand(-1, -1, 3, -1)
        assert torch.equal(run_decode(inputs), expected)


@runs_kernels
@torch.no_grad()
def test_pending_tokens() -> None:
    """Steps that write the newest row in passing agree with a store that wrote it before."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn(2, 40, 2, dim, generator=generator).half().to(DEVICE).transpose(1, 2) for dim in (80, 96)
    )
    config = TurboQuantConfig(sink_tokens=4, residual_length=0)
    late, early = (LayerStore.allocate(config, keys, values) for _ in range(2))
    for store in (late, early):
        store.append(keys[:, :, :30], values[:, :, :30])
    for token in range(30, 34):
        row = keys[:, :, token : token + 1], values[:, :, token : token + 1]
        query = torch.randn(2, 6, 1, 80, generator=generator).half().to(DEVICE)
        views = [store.append(*row) for store in (late, early)]
        expected = reference.attend(query, views[1], None, AttentionOptions(0.1))
        out = dispatch.attend(query, views[0], None, AttentionOptions(0.1))
        assert relative_rms(out, expected.cpu().double()) <= 1e-3
        assert views[0].pending is not None and views[0].pending.states is None  # the kernel has written it
        assert torch.equal(dispatch.attend(query, views[0], None, AttentionOptions(0.1)), out)
    assert torch.equal(late.tensors.rows[:, :, :30], early.tensors.rows[:, :, :30])


@gpu
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("batch", [1, 5, 40])
def test_long_contexts_on_a_gpu(preset: str, batch: int) -> None:
    check(BASE.with_(preset=preset, B=batch, Hq=8, Hkv=2, Dk=128, Dv=128, blocks=61, capacity=64))


@gpu
def test_nothing_is_compiled_or_allocated_while_a_cache_grows() -> None:
    from tq_kernels.decode import launch

    # A capacity has its own scratch layout; lengths within it, and other capacities, share the compiled kernels.
    for blocks in (1, 2, 3, 17, 31):
        for residual in (1, 2, 31, 96):
            check(BASE.with_(blocks=blocks, residual=residual, capacity=32 if blocks < 20 else 64))
        if blocks == 1:
            compiled = [len(kernel.variants) for kernel in (launch.APPEND_AND_ROTATE, launch.SPLIT, launch.REDUCE)]
    assert compiled == [len(kernel.variants) for kernel in (launch.APPEND_AND_ROTATE, launch.SPLIT, launch.REDUCE)]


@gpu
def test_replays_in_a_graph_follow_the_length_on_the_device() -> None:
    device, case = DEVICE, BASE.with_(blocks=7, capacity=8, residual_capacity=128)
    inputs = make_inputs(case, device)
    blocks, residual = (torch.zeros((), dtype=torch.int32, device=device) for _ in range(2))
    held = HeldCounts(blocks, residual, torch.tensor(case.sinks, dtype=torch.int32, device=device))
    run_decode(inputs, held=held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_decode(inputs, held=held)
    for used in (7, 2, 5):
        shorter = make_inputs(case.with_(blocks=used), device)
        for name, tensor in inputs.packed.tensors().items():
            tensor.copy_(getattr(shorter.packed, name))
        both = [(*each.residual, *each.sinks, each.query) for each in (inputs, shorter)]
        for mine, theirs in zip(*both, strict=True):
            mine.copy_(theirs)
        blocks.fill_(used)
        residual.fill_(case.residual)
        graph.replay()
        assert relative_rms(out, oracle(shorter)) <= 1e-3
