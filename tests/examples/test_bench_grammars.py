"""`bench_grammars`: requests with and without a grammar take turns in an engine on a CPU."""

import argparse

import pytest
import torch

from examples.measure.speed.soak import small_model

pytest.importorskip("xgrammar", reason="answers in a form need tq-hf[grammar]")

from examples.measure.speed.bench_grammars import measure, tokenizer_of  # noqa: E402


def test_steps_with_and_without_a_grammar_are_timed() -> None:
    given = argparse.Namespace(requests=2, context=20, steps=4, rounds=1, seed=0, letters=2)
    with torch.no_grad():
        rows = measure(small_model(torch.device("cpu")), given)
    assert [row["sampled"] for row in rows] == [False, True]
    assert all(row["over"] == row["ms_with"] / row["ms_without"] > 0 for row in rows)
    assert len(tokenizer_of(5000).get_vocab()) == 5000
