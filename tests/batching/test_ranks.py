"""Continuous batching of a model sharded over two processes: each rank has pages of its own heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.measure.quality.family_configs import tiny_model
from tests.support.batching_cases import Session, greedy, mixed, model_of, prompts
from tests.support.batching_worker import LENGTHS, NEW
from tests.support.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v2"])
def test_ranks_answer_as_one_process_and_hold_half_of_the_heads_each(name: str, tmp_path: Path) -> None:
    """Or all of the latents, which have no heads."""
    if name == "deepseek_v2":
        model, heads = tiny_model(name), [1, 1]
    else:
        make, heads = mixed if name == "gemma3" else model_of, [2, 2]
        model = make(name, num_attention_heads=8, num_key_value_heads=4, head_dim=16)
    model.save_pretrained(tmp_path / "model")
    run_ranks("-m", "tests.support.batching_worker", str(tmp_path))
    with Session(model) as session:
        expected = session.run(prompts(LENGTHS), greedy(NEW))
        again = session.run(prompts(LENGTHS), greedy(NEW))
    found = [json.loads((tmp_path / f"found-{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]
    pools = [{name: each.pop(name) for name in ("asked for", "free")} for each in found]
    same = {"tokens": expected, "again": again, "rollouts": expected}
    same["cancelled"] = {"pages_in_use": 0, "running": 0, "early": True}
    assert found == [same | {"heads": heads, "pages_in_use": 0}] * 2
    (unshared,) = Session(model, allow_block_sharing=False).run(prompts([300]), greedy(NEW))
    for name in ("asked for", "free"):
        first, second = (each[name] for each in pools)
        assert first["alone"] != second["alone"]
        assert first["has"] == second["has"] == min(*first["alone"], *second["alone"])
        assert first["tokens"] == second["tokens"] == unshared
