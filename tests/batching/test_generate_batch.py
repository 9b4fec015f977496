"""Answers of continuous batching, token for token those of `generate()` on a cache that encodes as pages do."""

from __future__ import annotations

import pytest
from batching_cases import Oracle, answers, greedy, model_of, options, prompts

from tq_hf import TurboQuantBatching

LENGTHS = [5, 120, 127, 128, 129, 250, 300, 47]


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("4bit_nc", {}),
        ("k8v4", {"head_dim": 64}),
        ("3.5bit_nc", {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}),
        ("2bit_nc", {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 1}),
    ],
    ids=str,
)
def test_answers_are_those_of_generate(preset: str, changes: dict[str, int]) -> None:
    model = model_of(**changes)
    batching = TurboQuantBatching(model, preset)
    inputs = prompts(LENGTHS)
    found = answers(
        batching.generate_batch(
            inputs, generation_config=greedy(20), continuous_batching_config=options(num_blocks=400)
        )
    )
    oracle = Oracle(model, preset, batching.balance)
    assert found == [oracle.generate(prompt, 20) for prompt in inputs]
    assert model.config._attn_implementation != "turboquant_paged"
