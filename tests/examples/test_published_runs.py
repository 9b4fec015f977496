"""Models at published sizes of heads run, and the sweep sees what is wrong."""

from __future__ import annotations

import os

import pytest
import torch

from examples.measure.quality import published_runs
from tq_hf import TurboQuantCache
from tq_hf.ops import dispatch

CPU = torch.device("cpu")
ALL = ("prompt", "decode", "continuation", "graph decoding", "batches")


def test_heads_stay_as_they_are_published() -> None:
    heads = published_runs.published_heads("gemma4_text")
    assert heads == {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}  # and 512 by its `__init__`
    assert published_runs.published_heads("gpt2") == {"n_head": 12, "n_embd": 768}
    # Where no width of a head is said, it is that of the hidden size over the heads.
    assert published_runs.published_heads("llama")["head_dim"] == 128


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "width", "refused"),
    [("gemma4_text", 512, set()), ("deepseek_v3", 512, {"batches"}), ("gpt_oss", 64, set()), ("phi", 64, set())],
)
def test_families_run_at_published_sizes(model_type: str, width: int, refused: set[str]) -> None:
    found = published_runs.run(model_type, CPU, torch.float32)
    assert found.outcomes == {name: "refused" if name in refused else "right" for name in ALL}
    assert found.in_torch == []  # on a CPU nothing is missed
    model = published_runs.published_model(model_type, CPU, torch.float32)
    cache = TurboQuantCache(model.config)
    with torch.no_grad():
        model(input_ids=published_runs.ids(model, 1, 3), past_key_values=cache)
    assert max(layer.keys.shape[-1] for layer in cache.layers) == width


@pytest.mark.slow
def test_attention_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = dispatch.attend
    monkeypatch.setattr(dispatch, "attend", lambda *args: 2 * right(*args))
    outcomes = published_runs.run("gpt_oss", CPU, torch.float32).outcomes
    assert outcomes["prompt"] == "right"
    assert outcomes["decode"].endswith("away") and outcomes["continuation"].endswith("away")


def test_processes_go_on_after_one_that_ends() -> None:
    own = "(str(__import__('os').getpid()), True)"
    said = ["('first', True)", "__import__('os')._exit(1)", "('broken', False)", own]
    first, ended, broken, last = published_runs.in_processes(eval, said, 1)
    assert (first, ended, broken) == ("first", f"{said[1]}: its process ended", "broken")
    assert last != str(os.getpid())
    assert sorted(published_runs.in_processes(eval, said[:1] * 5, 2)) == ["first"] * 5


def test_a_line_says_what_could_not_run() -> None:
    text, goes_on = published_runs.line("gptj", False, "eager")
    assert text.startswith("gptj: not run, ") and goes_on
