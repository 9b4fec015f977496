"""Decode over sliding windows in a kernel against attention by definition, in the interpreter and on a GPU if there is
one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tq_kernels.prefix import windows as window_launch
from tq_kernels.types import AttentionOptions, Sequences, Tokens

from tests.support.helpers import cumulative
from tests.support.kernel_cases import INTERPRETED, child, gpu, relative_rms
from tests.support.window_cases import CHUNKS, TOTALS, Requests
from tq_hf.ops.dispatch import windowed_step
from tq_hf.ops.sliding_pages import plan_step
from tq_hf.ops.triton import pages as triton_pages
from tq_hf.tensors.pages import LayerWindows

FP16, BF16 = torch.float16, torch.bfloat16
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "sinks": {"s_aux": torch.linspace(-1, 1, 6)},
    "both": {"softcap": 2.0, "s_aux": torch.linspace(-1, 1, 6, dtype=BF16)},
}
TOLERANCE = {FP16: 1e-3, BF16: 8e-3}
"""Relative RMS: half a unit in the last place of the dtype, and the same of probabilities."""


def of_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each launch from now on has."""
    seen: list[int] = []
    real = triton_pages.attend_windows

    def spied(new: Tokens, *args: Any) -> torch.Tensor:
        seen.append(len(new.query))
        return real(new, *args)

    monkeypatch.setattr(triton_pages, "attend_windows", spied)
    return seen


def check(requests: Requests, dtype: torch.dtype, steps: list[list[int]], **options: Any) -> None:
    for new in steps:
        for out, expected in requests.step(new, padding=3, **options):
            assert relative_rms(out, expected) <= TOLERANCE[dtype]


test_all_steps_in_the_interpreter = child(__file__)


def test_a_copied_step_is_not_taken_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing runs kernels, torch computes the same."""
    monkeypatch.setattr("tq_hf.ops.backend.chosen", "torch")
    seen = of_kernels(monkeypatch)
    check(Requests(96, 36, TOTALS, FP16), FP16, CHUNKS)
    assert seen == []


if INTERPRETED:

    @pytest.mark.parametrize(
        ("window", "rows", "options"),
        [
            *[(96, 36, name) for name in OPTIONS],
            *[(*size, "plain") for size in ((128, 128), (7, 7), (500, 34), (1, 1))],
        ],
    )
    def test_a_token_attends_to_its_window(
        window: int, rows: int, options: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = of_kernels(monkeypatch)
        check(Requests(window, rows, TOTALS, FP16), FP16, CHUNKS, **OPTIONS[options])
        # Alone of their steps (three tokens pad them), or between prompts.
        assert seen == [1, 1, 1, 4 + 3, 2, 3 + 3]

    @pytest.mark.parametrize(("splits", "options"), [(2, "plain"), (9, "plain"), *[(3, name) for name in OPTIONS]])
    def test_programs_share_a_window(splits: int, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real = window_launch.attend_windows
        monkeypatch.setattr(triton_pages, "attend_window_rows", partial(real, splits=splits))
        check(Requests(300, 41, TOTALS, FP16), FP16, CHUNKS, **OPTIONS[options])

    def test_no_program_waits_for_the_one_that_stores(monkeypatch: pytest.MonkeyPatch) -> None:
        """Programs that share a window run in the other order: the first, which stores the new row, is the last."""
        from triton.runtime.interpreter import interpreter_builder as grid

        real, order = grid.set_grid_idx, []

        def reversed_shares(x: int, y: int, z: int) -> None:
            order.append(grid.grid_dim[2] - 1 - z)
            real(x, y, order[-1])

        monkeypatch.setattr(grid, "set_grid_idx", reversed_shares)
        launch = partial(window_launch.attend_windows, splits=3)
        monkeypatch.setattr(triton_pages, "attend_window_rows", launch)
        check(Requests(300, 41, TOTALS, FP16), FP16, CHUNKS)
        assert order[:3] == [2, 1, 0]

    @pytest.mark.parametrize(
        ("shape", "dtype"), [((34, 2, 16), FP16), ((3, 3, 80), BF16), ((20, 1, 8), FP16), ((2, 1, 256), FP16)], ids=str
    )
    def test_heads_and_dtypes_of_all_kinds(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        check(Requests(96, 36, TOTALS, dtype, shape=shape), dtype, CHUNKS)

    def test_what_is_stored_is_what_torch_stores(monkeypatch: pytest.MonkeyPatch) -> None:
        """Bit for bit, and nothing else is written."""
        mine, other = (Requests(96, 36, TOTALS, FP16) for _ in range(2))
        check(mine, FP16, CHUNKS)
        monkeypatch.setattr("tq_hf.ops.backend.chosen", "torch")
        check(other, FP16, CHUNKS)
        torch.testing.assert_close(mine.pool[2:], other.pool[2:], rtol=0, atol=0, equal_nan=True)

    def test_states_as_models_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
        """Heads before tokens, and behind them with other states between; rows that are not at 16 bytes are copied."""
        for strided in (
            lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
            lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
            lambda x: torch.cat([x, x[..., :3]], 2)[..., : x.shape[2]],
        ):
            requests = Requests(96, 36, TOTALS, FP16)
            real = triton_pages.attend_windows

            def given(new: Tokens, *rest: Any, way: Any = strided, real: Any = real) -> torch.Tensor:
                return real(Tokens(*map(way, new)), *rest)

            with monkeypatch.context() as patch:
                patch.setattr(triton_pages, "attend_windows", given)
                check(requests, FP16, CHUNKS)

    def test_steps_that_no_kernel_computes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
        def takes(dtype: torch.dtype, dim: int) -> bool:
            states = torch.empty(1, 2, dim, dtype=dtype)
            return triton_pages.supports_attend_windows(states, states, LayerWindows(states, 96, trash=1))

        assert takes(FP16, 80) and takes(BF16, 256)
        assert not takes(torch.float32, 80) and not takes(FP16, 20) and not takes(FP16, 512)
        turing = replace(window_launch.target(torch.device("cpu")), capability=(7, 5))
        monkeypatch.setattr(window_launch, "target", lambda device: turing)
        assert not takes(FP16, 80)

    def test_an_empty_step_returns_nothing() -> None:
        windows = LayerWindows(torch.zeros(4, 2, 36, 2, 16, dtype=FP16), 96, trash=1)
        sequences = Sequences(cumulative([0]), cumulative([0]), torch.zeros(1, 3).int(), None, 1)
        query, key = torch.empty(0, 6, 16, dtype=FP16), torch.empty(0, 2, 16, dtype=FP16)
        new, plan = Tokens(query, key, key), plan_step(sequences, 0)
        assert windowed_step(new, windows, plan, AttentionOptions(1.0)).shape[0] == 0


SIZES = [((16, 8, 128), 1024, BF16), ((64, 8, 64), 128, BF16), ((8, 4, 256), 1024, BF16)]
SIZES += [((32, 16, 128), 512, FP16), ((8, 4, 256), 300, FP16), ((6, 2, 80), 129, FP16)]
"""Gemma 3 27B's, gpt-oss's and Gemma 2's among them."""
DECODING = [[1100, 1, 130, 257], *[[1] * 4] * 5]


@gpu
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("shape", "window", "dtype"), SIZES, ids=str)
def test_a_token_attends_to_its_window_on_a_gpu(
    shape: tuple[int, int, int], window: int, dtype: torch.dtype, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, given = of_kernels(monkeypatch), dict(OPTIONS[options])
    if "s_aux" in given:
        given["s_aux"] = torch.linspace(-1, 1, shape[0], dtype=given["s_aux"].dtype)
    totals = [sum(column) for column in zip(*DECODING, strict=True)]
    check(Requests(window, 37, totals, dtype, "cuda", shape), dtype, DECODING, **given)
    assert seen == [1, *[4 + 3] * 5]


@gpu
def test_a_captured_step_is_right_for_windows_that_grew() -> None:
    """One graph of a step of four requests, replayed while windows fill, slide, begin anew and end."""
    shape, window, rows = (16, 8, 128), 96, 36
    requests = Requests(window, rows, [400] * 4, BF16, "cuda", shape)
    block_table = requests.block_table.cuda()
    cu_seqlens_q, cu_seqlens_k = (torch.zeros(5, dtype=torch.int32, device="cuda") for _ in range(2))
    tokens = Tokens(*(torch.zeros(4, heads, shape[2], dtype=BF16, device="cuda") for heads in (16, 8, 8)))
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, block_table, None, 1)

    def step() -> torch.Tensor:
        plan = plan_step(sequences, 4)
        return windowed_step(tokens, requests.windows, plan, AttentionOptions(0.2))

    cu_seqlens_q.copy_(cumulative([1] * 4))
    cu_seqlens_k.copy_(cumulative([1] * 4))
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for done in range(200):
        # The last request ends, and what is then its place pads the batch.
        count = 4 if done < 120 else 3
        for i in range(count):
            tokens[0][i] = requests.queries[i][0, :, done]
            tokens[1][i], tokens[2][i] = (x[0, :, done] for x in requests.tokens[i])
        new = [1] * count + [0] * (4 - count)
        cu_seqlens_q.copy_(cumulative(new))
        cu_seqlens_k.copy_(cumulative([n * (done + 1) for n in new]))
        graph.replay()
        if done % 17 == 0 or done in (95, 96, 97):
            for i in range(count):
                expected = requests.expected(i, slice(done, done + 1))[0]
                assert relative_rms(out[i].cpu(), expected) <= TOLERANCE[BF16]
        assert (out[count:] == 0).all()
