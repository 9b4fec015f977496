"""Attention of many queries over packed history against fp64 attention over the dequantized cache: in the interpreter
and on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tq_kernels.types import AttentionOptions

from tests.support.helpers import quick_of
from tests.support.kernel_cases import DEVICE, INTERPRETED, Case, child, gpu, relative_rms, runs_kernels
from tests.support.prefix_cases import make_prefix_inputs, oracle, run_prefix, view_of
from tq_hf import TurboQuantConfig
from tq_hf.config import PRESETS
from tq_hf.ops import dispatch, reference
from tq_hf.ops.triton import blocks as triton_blocks
from tq_hf.ops.workspace import current_workspace, release_workspaces
from tq_hf.stores.store import LayerStore

FP32, BF16 = torch.float32, torch.bfloat16
BASE = Case(S=17, Hq=4, Hkv=2, blocks=2, capacity=3, residual=37, residual_capacity=96)

# (case, new tokens beside the residual)
CASES = (
    [(BASE.with_(preset=preset), False) for preset in PRESETS]
    + [
        (BASE.with_(preset=preset, Dk=96, Dv=80, S=23, residual=31, balanced=True), True)
        for preset in ("k8v4", "3bit_nc", "2bit_nc")
    ]
    + [
        (BASE.with_(S=64, residual=101, residual_capacity=160), True),
        (BASE.with_(S=100, residual=101, residual_capacity=160, Hq=3, Hkv=1), False),
        (BASE.with_(S=97, residual=97, residual_capacity=160, Hq=2, Hkv=1), True),
        (BASE.with_(Dk=128, Dv=128, Hq=8, Hkv=1, balanced=True), False),
        (BASE.with_(Dk=192, Dv=128, Hq=2, Hkv=1), False),
        (BASE.with_(Dk=256, Dv=256, Hq=2, Hkv=1, blocks=1, balanced=True), True),
        (BASE.with_(Dk=72, Dv=100, preset="3bit_nc", Hq=3, Hkv=1), False),
        (BASE.with_(dtype=BF16), True),
        (BASE.with_(dtype=FP32, preset="k8v4"), False),
        (BASE.with_(mask="padding", B=2, Hkv=1), True),
        (BASE.with_(mask="full", B=2), True),
        (BASE.with_(mask="full", softcap=15.0, balanced=True, Dk=80), False),
        (BASE.with_(softcap=20.0, preset="2.5bit_nc"), True),
        (BASE.with_(s_aux=True, B=2), False),
        (BASE.with_(causal=False), True),
        (BASE.with_(blocks=0), False),
        (BASE.with_(blocks=0, sinks=0, residual=17), True),
        (BASE.with_(S=2, residual=2, sinks=0), False),
        (BASE.with_(balanced=True, B=2), True),
        (BASE.with_(balanced=True, preset="3bit_nc", Dk=100, Dv=80, dtype=BF16), False),
        (BASE.with_(value_scale=1e-3, key_offset=20.0), False),
        (BASE.with_(value_scale=300.0, key_offset=0.0, preset="2bit_nc"), True),
    ]
)
TOLERANCE = {torch.float16: 1e-3, torch.float32: 1e-3, BF16: 4.5e-3}
"""Relative RMS. Rows, keys and weights in fp16 alone have up to 0.8e-3; bf16 output alone has 1.7e-3 (up to 4.1e-3 in
the interpreter, which truncates)."""


WIDE = BASE.with_(Dk=512, Dv=512, B=1, S=20, Hq=8, Hkv=2, blocks=1, capacity=2)
WIDE_CASES = (
    [(WIDE.with_(preset=preset), True) for preset in ("k8v4", "4bit_nc", "3bit_nc", "2bit_nc")]
    + [(WIDE.with_(preset=p, Dk=d, Dv=d, balanced=True, B=2), False) for p, d in (("4bit_nc", 320), ("2bit_nc", 384))]
    + [
        (WIDE.with_(Dk=384, Dv=512, S=36, dtype=BF16, balanced=True), True),
        (WIDE.with_(Dk=512, Dv=320, mask="full", softcap=20.0, preset="3bit_nc", B=2), True),
        (WIDE.with_(Dk=320, Dv=320, mask="padding", s_aux=True, B=2, sinks=0), False),
        (WIDE.with_(Dk=128, Dv=256, softcap=20.0, s_aux=True, Hq=6), True),
    ]
)
"""Heads and options that `prefix_attention` or flash attention does not take: a head at a time is dequantized."""


def check_wide(case: Case, beside: bool) -> None:
    prefix = make_prefix_inputs(case, DEVICE, beside=beside)
    inputs, options = prefix.inputs, (case.causal, case.softcap, prefix.inputs.s_aux)
    out = dispatch.attend(inputs.query, view_of(prefix), inputs.mask, AttentionOptions(inputs.scaling, *options))
    assert out.dtype == case.dtype and out.is_contiguous()
    # States are rounded to the model's dtype, as keys with a mean are.
    assert relative_rms(out, oracle(inputs)) <= (1e-3 if case.dtype == torch.float16 else 1e-2)


def check(case: Case, beside: bool, **options: object) -> None:
    prefix = make_prefix_inputs(case, DEVICE, beside=beside)
    out = run_prefix(prefix, **options)
    assert out.isfinite().all()
    assert relative_rms(out, oracle(prefix.inputs)) <= TOLERANCE[case.dtype]


test_all_cases_in_the_interpreter = child(__file__)


@runs_kernels
@pytest.mark.parametrize(("case", "beside"), CASES, ids=str)
def test_agrees_with_fp64(case: Case, beside: bool) -> None:
    check(case, beside, **({"splits": 1} if INTERPRETED else {}))


if INTERPRETED:

    @pytest.mark.parametrize(
        ("case", "beside"), quick_of(WIDE_CASES, *WIDE_CASES[:2], WIDE_CASES[4], *WIDE_CASES[6:]), ids=str
    )
    def test_wide_heads_are_dequantized_one_at_a_time(
        case: Case, beside: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("attend", "attend_many"):
            monkeypatch.setattr(dispatch.cpu_attention, name, None, raising=False)  # no torch
            monkeypatch.setattr(triton_blocks, f"supports_{name}", lambda *_: False)
        release_workspaces()
        check_wide(case, beside)
        scratch = current_workspace(DEVICE).nbytes
        assert scratch >= 2 * case.B * case.length * (case.Dk + case.Dv)
        assert scratch < 4 * case.B * case.length * (case.Dk + case.Dv) + 16 * case.B * case.S * case.Hq * case.Dv

    @pytest.mark.parametrize("splits", [2, 3, 7])
    def test_splits_merge_to_the_same(splits: int) -> None:
        check(BASE.with_(s_aux=True, Hq=4, Hkv=1, S=21, mask="padding"), True, splits=splits)

    @pytest.mark.parametrize("step", [64, 128])
    def test_any_number_of_rows_and_tokens_at_a_time_gives_the_same(step: int) -> None:
        from tq_kernels.prefix.launch import PrefixConfig

        for rows in (16, 128):
            check(BASE.with_(Hkv=1), True, config=PrefixConfig(rows, step, 4, 1))

    @pytest.mark.parametrize("splits", [1, 3])
    def test_rows_that_attend_to_nothing_are_zero(splits: int) -> None:
        prefix = make_prefix_inputs(BASE.with_(mask="full", B=2, Hkv=1, blocks=1), DEVICE, beside=True)
        assert prefix.inputs.mask is not None
        prefix.inputs.mask[1, :, 3:9] = False
        out = run_prefix(prefix, splits=splits)
        assert relative_rms(out, oracle(prefix.inputs)) <= 1e-3
        assert (out[1, 3:9] == 0).all() and (out[1, :3] != 0).any()

    @pytest.mark.parametrize(
        ("queries", "short", "kernel"),
        [
            (20, 320 * 20, "attend"),
            (20, 320 * 20 - 1, "attend_many"),
            (65, 1 << 18, "attend_many"),
            (130, 0, "attend_many"),
        ],
        ids=["few on a short history", "few on a long history", "many", "many beside the residual"],
    )
    def test_a_cache_is_read_by_the_kernel_for_it_as_by_the_reference(
        queries: int, short: int, kernel: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Up to 128 new tokens come in the residual, more of them beside it. `short` is the most scores (queries times
        tokens) at which more than 16 queries still go to the decode kernel."""
        called = []

        def recorded(name: str) -> Callable[..., torch.Tensor]:
            function = getattr(triton_blocks, name)
            return lambda *arguments, **options: (called.append(name), function(*arguments, **options))[1]

        for name in ("attend", "attend_many"):
            monkeypatch.setattr(triton_blocks, name, recorded(name))
        monkeypatch.setattr(triton_blocks, "MAX_SHORT_SCORES", short)
        generator = torch.Generator().manual_seed(0)
        states = [torch.randn(1, 1, 300 + queries, 32, generator=generator).half() for _ in range(2)]
        store = LayerStore.allocate(TurboQuantConfig(residual_length=10), *states)
        store.append(*(x[:, :, :300] for x in states))
        view = store.append(*(x[:, :, 300:] for x in states))
        assert (view.new is None) == (queries < 130) and view.host_counts.blocks == 2
        query = torch.randn(1, 2, queries, 32, generator=generator).half()
        expected = reference.attend(query, view, None, AttentionOptions(0.2))
        assert relative_rms(dispatch.attend(query, view, None, AttentionOptions(0.2)), expected.double()) <= 1e-3
        assert called == [kernel]

    def test_blocks_out_of_use_are_never_read() -> None:
        clean, other = (make_prefix_inputs(BASE.with_(capacity=6), DEVICE, beside=False) for _ in range(2))
        for tensor in other.inputs.packed.tensors().values():
            tensor[:, :, BASE.blocks :] = -1
        assert torch.equal(run_prefix(clean), run_prefix(other))

    def test_expanded_mask_needs_no_copy() -> None:
        prefix = make_prefix_inputs(BASE.with_(mask="padding", Hkv=1, blocks=1), DEVICE, beside=False)
        assert prefix.inputs.mask is not None
        expected = run_prefix(prefix)
        prefix.inputs.mask = prefix.inputs.mask.expand(-1, -1, BASE.S, -1)
        assert torch.equal(run_prefix(prefix), expected)


@gpu
@pytest.mark.parametrize(("case", "beside"), WIDE_CASES, ids=str)
def test_wide_heads_agree_with_fp64_on_a_gpu(case: Case, beside: bool) -> None:
    check_wide(case, beside)


@gpu
@pytest.mark.parametrize("S", [2, 17, 101, 512, 2048])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("padded", [False, True])
def test_long_contexts_on_a_gpu(preset: str, S: int, padded: bool) -> None:
    """T = 4 + 128 * 31 + S + 41, odd and even."""
    capacity = -(-(S + 41) // 128) * 128
    case = BASE.with_(preset=preset, S=S, Hq=8, Dk=128, Dv=128, B=2, blocks=31, capacity=32)
    case = case.with_(residual=S + 41, residual_capacity=capacity)
    check(case.with_(mask="padding", causal=False) if padded else case, S > 128)


@gpu
def test_nothing_is_compiled_while_a_cache_grows() -> None:
    from tq_kernels.prefix.attention import prefix_attention
    from tq_kernels.prefix.tiles import merge_splits

    def compiled() -> list[int]:
        return [len(kernel.device_caches[0][0]) for kernel in (prefix_attention, merge_splits)]

    def grow(blocks: int, queries: int, residual: int) -> None:
        case = BASE.with_(blocks=blocks, S=queries, residual=residual, capacity=32, residual_capacity=256)
        check(case, True, splits=1)
        check(case, True, splits=2)

    grow(1, 17, 17)
    before = compiled()
    for blocks in (2, 3, 16, 17, 31):
        for queries in (18, 31, 64, 128):
            grow(blocks, queries, queries + 16)
    assert compiled() == before
