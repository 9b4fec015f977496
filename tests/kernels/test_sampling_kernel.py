"""Tokens that `top_k`, `top_p` and `min_p` keep: of transformers' processors, a sort and the kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.support.kernel_cases import INTERPRETED, child, gpu
from tq_hf.ops.dispatch import truncate
from tq_hf.ops.reference import truncate as truncate_by_sort

OPTIONS = [(0, 0.9, 0.0), (5, 1.0, 0.0), (50, 0.7, 0.01), (10**6, 0.999, 0.0), (0, 1.0, 0.0), (0, 0.0, 0.0),
           (1, 0.5, 0.5), (9, 1.0, 1.0), (0, 0.4, 0.2), (3, 0.99, 0.0)]  # fmt: skip
"""`top_k`, `top_p` and `min_p` of the rows of a batch."""
CASES = ["spread", "peaked", "far", "ties", "signed zeros", "banned"]


def logits(case: str, vocabulary: int) -> torch.Tensor:
    """Logits `[len(OPTIONS), vocabulary]`."""
    generator = torch.Generator().manual_seed(len(case))
    x = torch.randn(len(OPTIONS), vocabulary, generator=generator)
    if case in ("peaked", "far"):
        x *= 6 if case == "peaked" else 1e4
    if case == "ties":
        x = (2 * x).round() / 2
    if case == "signed zeros":
        x = torch.where(x > 1, 1.0, torch.where(x < 0, -0.0, 0.0))
    if case == "banned":
        x[:, : vocabulary // 2] = -torch.inf
    return x


def of_transformers(scores: torch.Tensor, count: int, share: float, least: float) -> torch.Tensor:
    """One row `[1, vocabulary]` by transformers' processors."""
    tokens: torch.Tensor = torch.empty(1, 0)
    if count > 0:
        scores = TopKLogitsWarper(count)(tokens, scores)
    if share < 1:
        scores = TopPLogitsWarper(share)(tokens, scores)
    return MinPLogitsWarper(least)(tokens, scores) if least > 0 else scores


def check(truncate: Callable[..., torch.Tensor], case: str, vocabulary: int, device: str = "cpu") -> None:
    scores = logits(case, vocabulary)
    count, share, least = (torch.tensor(each, device=device) for each in zip(*OPTIONS, strict=True))
    found = truncate(scores.to(device), count.int(), share, least).cpu()
    scores, ties = logits(case, vocabulary), 0
    for row, kept, options in zip(scores, found, OPTIONS, strict=True):
        expected = of_transformers(row[None].clone(), *options)[0]
        smallest, least_kept = expected[expected > -torch.inf].min(), kept[kept > -torch.inf].min()
        assert torch.equal(kept, torch.where(row >= least_kept, row, -torch.inf)), options
        # Sums of 100,000 probabilities in fp32 differ in their last bits, by their order.
        between = (row >= min(smallest, least_kept)) & (row < max(smallest, least_kept))
        assert row.double().softmax(-1)[between].sum() <= 1e-6, options
        ties += int(((kept > expected) & ~between).sum())
    if case not in ("ties", "signed zeros") or vocabulary > 100:
        assert (ties > 0) == (case in ("ties", "signed zeros"))


@pytest.mark.parametrize("vocabulary", [1, 7, 5001])
@pytest.mark.parametrize("case", CASES)
def test_a_sort_keeps_the_tokens_of_transformers_and_those_equal_to_the_last(case: str, vocabulary: int) -> None:
    check(truncate_by_sort, case, vocabulary)


test_all_cases_in_the_interpreter = child(__file__)

if INTERPRETED:

    @pytest.mark.parametrize("vocabulary", [1, 300])
    @pytest.mark.parametrize("case", CASES)
    def test_a_search_keeps_the_tokens_of_transformers_and_those_equal_to_the_last(
        case: str, vocabulary: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tq_kernels import sampling

        monkeypatch.setattr(sampling, "CHUNK", 256)
        check(truncate, case, vocabulary)


@gpu
@pytest.mark.parametrize("vocabulary", [1000, 50_257, 128_256])
@pytest.mark.parametrize("case", CASES)
def test_a_search_on_a_gpu_keeps_the_tokens_of_transformers(case: str, vocabulary: int) -> None:
    check(truncate, case, vocabulary, "cuda")


@gpu
def test_a_captured_search_follows_the_options_of_a_replay() -> None:
    scores = logits("spread", 128_256).cuda()
    count, share, least = (torch.tensor(each, device="cuda") for each in zip(*OPTIONS, strict=True))
    count = count.int()
    options = [torch.zeros_like(count), torch.ones_like(share), torch.zeros_like(least)]
    held = scores.clone()
    truncate(held.clone(), *options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = truncate(held.clone(), *options)
    graph.replay()
    assert torch.equal(out, scores)
    for place, value in zip(options, (count, share, least), strict=True):
        place.copy_(value)
    graph.replay()
    assert torch.equal(out, truncate(scores.clone(), count, share, least))
    assert not torch.equal(out, scores)
