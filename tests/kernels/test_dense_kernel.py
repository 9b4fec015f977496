"""Attention over dense states against the same in torch, tile by tile: in the interpreter and on a GPU if there is
one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from tq_kernels.types import AttentionOptions

from tests.support.helpers import slow
from tests.support.kernel_cases import DEVICE, INTERPRETED, child, relative_rms, runs_kernels
from tests.support.tiny_models import build, token_ids
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input
from tq_hf.ops import backend, dispatch
from tq_hf.ops.cpu import attention as cpu_attention
from tq_hf.ops.triton import blocks as triton_blocks


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call; `sliding` is the width of a mask's window."""

    B: int = 2
    S: int = 37
    T: int = 37
    Hq: int = 4
    Hkv: int = 2
    Dk: int = 32
    Dv: int = 32
    softcap: float | None = None
    s_aux: bool = False
    sliding: int | None = None
    padding: int = 0
    causal: bool = True
    splits: int | None = None


interpreted = pytest.mark.skipif(not INTERPRETED, reason="the interpreter runs in a child process")
BASE = Case()
CASES = [
    BASE,
    replace(BASE, s_aux=True),
    replace(BASE, softcap=3.0),
    replace(BASE, softcap=3.0, s_aux=True, T=150, splits=3),
    replace(BASE, T=203, S=70, splits=2, s_aux=True),
    replace(BASE, causal=False, T=90),
    replace(BASE, S=150, T=150, sliding=16, s_aux=True),
    replace(BASE, S=90, T=200, sliding=40, padding=30, softcap=5.0),
    replace(BASE, S=1, T=300, Hq=16, s_aux=True, splits=4),
    replace(BASE, S=1, T=128, Hq=16, padding=5, s_aux=True),
    replace(BASE, S=3, T=260, sliding=100, splits=3),
    replace(BASE, Dk=80, Dv=48, Hq=3, Hkv=1, S=60, T=60),
    replace(BASE, Dk=256, Dv=256, B=1, Hq=2, Hkv=1, softcap=50.0, sliding=20),
    replace(BASE, Dk=512, Dv=512, B=1, Hq=2, Hkv=1, S=40, T=70, softcap=50.0, sliding=20),
    replace(BASE, Dk=512, Dv=384, B=1, Hq=8, Hkv=1, S=1, T=150, s_aux=True, splits=2),
]


def inputs(case: Case, device: str | torch.device, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)

    def states(heads: int, tokens: int, dim: int) -> torch.Tensor:
        # Heads behind tokens, as projections make them.
        return torch.randn(case.B, tokens, heads, dim, generator=generator).to(device, dtype).transpose(1, 2)

    query, keys = states(case.Hq, case.S, case.Dk), states(case.Hkv, case.T, case.Dk)
    options = {
        "scaling": case.Dk**-0.5,
        "causal": case.causal,
        "softcap": case.softcap,
        "s_aux": torch.randn(case.Hq, generator=generator).to(device, dtype) if case.s_aux else None,
    }
    mask = None
    if case.sliding is not None or case.padding:
        newest = torch.arange(case.T - case.S, case.T)[:, None]
        t = torch.arange(case.T)[None, :]
        seen = (t <= newest) & (t > newest - (case.sliding or case.T))
        # Sequence 0 is padded on the left, some of its queries too.
        padding = torch.tensor([case.padding] + [0] * (case.B - 1))
        mask = (seen[None] & (t >= padding[:, None, None]))[:, None].to(device)
    return query, keys, states(case.Hkv, case.T, case.Dv), mask, options


def check(case: Case, device: str | torch.device, dtype: torch.dtype) -> None:
    from tq_kernels.prefix.dense import attend_dense

    query, keys, values, mask, options = inputs(case, device, dtype)
    actual = attend_dense(
        query, keys, values, mask, AttentionOptions(**options), splits=case.splits,
        allocate=lambda size: torch.full((size,), torch.nan, device=device),
    )  # fmt: skip
    expected = cpu_attention.attend_dense(
        query.float(), (keys.float(), values.float()), mask, AttentionOptions(**options)
    )
    assert actual.shape == (case.B, case.S, case.Hq, case.Dv) and actual.is_contiguous()
    assert relative_rms(actual, expected.cpu()) < (1e-3 if dtype == torch.float16 else 5e-3)


LARGE = [
    replace(BASE, B=1, S=1000, T=1000, Hq=64, Hkv=8, Dk=64, Dv=64, sliding=128, s_aux=True),
    replace(BASE, B=1, S=1000, T=1000, Hq=64, Hkv=8, Dk=64, Dv=64, s_aux=True),
    replace(BASE, B=1, S=1000, T=1000, Hq=8, Hkv=4, Dk=256, Dv=256, softcap=50.0),
    replace(BASE, B=8, S=1, T=4096, Hq=8, Hkv=4, Dk=256, Dv=256, softcap=50.0, splits=None),
    replace(BASE, B=1, S=700, T=700, Hq=16, Hkv=2, Dk=128, Dv=128, softcap=30.0, padding=100),
]
FP16, BF16 = torch.float16, torch.bfloat16
IN_INTERPRETER = [*((case, FP16) for case in CASES), (replace(BASE, s_aux=True), BF16)]
ON_GPU = [(case, dtype) for case in CASES + LARGE for dtype in (FP16, BF16)]


@runs_kernels
@pytest.mark.parametrize(("case", "dtype"), IN_INTERPRETER if INTERPRETED else ON_GPU, ids=str)
def test_agrees_with_torch(case: Case, dtype: torch.dtype) -> None:
    check(case, DEVICE, dtype)


@interpreted
def test_values_in_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from tq_kernels.prefix import dense

    asked: list[int] = []
    config = dense.DenseConfig(32, 32, 4, 1, value_channels=32)
    monkeypatch.setattr(dense, "dense_config", lambda dim, *_: (asked.append(dim), config)[1])
    for splits in (1, 2):
        check(replace(BASE, Dk=64, Dv=80, splits=splits, s_aux=True, softcap=3.0, sliding=16), "cpu", torch.float16)
    assert len(asked) == 2 * (1 + 3)


@interpreted
def test_a_query_that_sees_nothing_gives_zero() -> None:
    query, keys, values, mask, options = inputs(replace(BASE, sliding=4, padding=10), "cpu", torch.float16)
    out = triton_blocks.attend_dense(query, (keys, values), mask, AttentionOptions(**options))
    assert (out[0, :10] == 0).all() and (out[0, 10:] != 0).any(-1).all()


@interpreted
def test_a_window_reads_no_more_tokens_than_its_own() -> None:
    query, keys, values, mask, options = inputs(replace(BASE, B=1, S=150, T=600, sliding=16), "cpu", torch.float16)
    for states in (keys, values):
        states[:, :, :384] = torch.nan  # six tiles that no query sees
    assert triton_blocks.attend_dense(query, (keys, values), mask, AttentionOptions(**options)).isfinite().all()


@interpreted
def test_caps_and_sinks_go_to_the_kernel_and_what_it_cannot_do_to_torch(monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(triton_blocks, "attend_dense", lambda *a, **o: calls.append("kernel"))
    monkeypatch.setattr(cpu_attention, "attend_dense", lambda *a, **o: calls.append("torch") or torch.zeros(()))
    query, keys, values, _, options = inputs(BASE, "cpu", torch.float16)
    dispatch.attend_dense(query, (keys, values), None, AttentionOptions(**options))
    dispatch.attend_dense(
        query, (keys, values), None, AttentionOptions(position_bias=torch.zeros(1, 1, 37, 37), **options)
    )
    dispatch.attend_dense(query, (keys, values), torch.zeros(1, 1, 37, 37), AttentionOptions(**options))
    dispatch.attend_dense(query.float(), (keys.float(), values.float()), None, AttentionOptions(**options))
    with torch.enable_grad():
        dispatch.attend_dense(query.clone().requires_grad_(), (keys, values), None, AttentionOptions(**options))
    assert calls == ["kernel", "torch", "torch", "torch", "torch"]


@runs_kernels
@pytest.mark.parametrize("name", ["gpt_oss", slow("gemma2")])
def test_a_model_runs_no_tiles_in_python(name: str, monkeypatch) -> None:
    model = build(name, num_hidden_layers=2, sliding_window=32).to(DEVICE, torch.float16)
    model.set_attn_implementation("turboquant")
    ids = token_ids(2, 44).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0

    def run() -> torch.Tensor:
        cache = TurboQuantCache(model.config)
        logits = []
        for start, stop in ((0, 36), (36, 43), (43, 44)):
            part, padding = ids[:, start:stop], mask[:, :stop]
            logits.append(model(part, attention_mask=padding, **as_input(cache)).logits[:, -1])
        return torch.stack(logits)

    monkeypatch.setattr(backend, "chosen", "torch")
    expected = run()
    monkeypatch.setattr(backend, "chosen", "")

    def fail(*arguments, **options):
        raise AssertionError("tiles in Python")

    for function in ("attend", "attend_dense"):
        monkeypatch.setattr(cpu_attention, function, fail)
    assert relative_rms(run(), expected.cpu()) < 2e-2  # encoded by kernels, too


test_passes_in_the_interpreter = child(__file__)
