"""Requests that have to give their pages back and are read again: every token is that of an undisturbed request which
was read in the same steps, bit for bit.

transformers' soft reset makes generated tokens part of the prompt. The tokens of a prompt attend to one another before
they are packed, and generated tokens read complete blocks packed, so an answer can go on otherwise from there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.batching_cases import Log, Session, answers, greedy, model_of, prompts
from tests.support.helpers import slow

NEW = 40


def row_by_row(linear: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """A product whose rounding of a row does not depend on how many rows there are, as that of a matmul does."""
    return (x.unsqueeze(-2) * linear.weight).sum(-1)


@pytest.mark.parametrize("sinks", [slow(0), 4])
def test_a_preempted_request_answers_as_an_undisturbed_one_read_in_the_same_steps(
    sinks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight requests of a ring of 8 pages and a block are in the pool, which has room for some of the second blocks."""
    monkeypatch.setattr(torch.nn.Linear, "forward", row_by_row)
    log, model, inputs = Log(monkeypatch), model_of(), prompts(range(225, 233), seed=3)
    fixed: dict[str, Any] = dict(safety_margin=0.0, allow_block_sharing=False, return_logprobs=True)

    def served(blocks: int, requests: list[list[int]]) -> dict[str, Any]:
        overrides = {"balance": False, "sink_tokens": sinks, "residual_length": 0}
        with Session(model, overrides=overrides, num_blocks=blocks, max_batch_tokens=4096, **fixed) as session:
            found = session.batching.generate_batch(requests, greedy(NEW), session.options)
        answers(found)
        return found

    found = served(76 + 8 * min(1, sinks), inputs)
    lives = [log.lives(name) for name in found]
    # What was read at the start of each life, and how many tokens came before it.
    starts = [[life[0][1] for life in each] for each in lives]
    read = [(request, length - len(inputs[request]), length) for request, each in enumerate(starts) for length in each]
    texts = [inputs[i] + result.generated_tokens for i, result in enumerate(found.values())]
    undisturbed = list(served(400, [texts[request][:length] for request, _, length in read]).values())

    preempted = {request for request, before, _ in read if before}
    assert preempted and len(preempted) < len(inputs)
    results, changed = list(found.values()), set()
    for (request, before, length), alone in zip(read, undisturbed, strict=True):
        later = [start for start in starts[request] if start > length]
        end = later[0] - len(inputs[request]) if later else NEW
        for mine, same in (
            (results[request].generated_tokens, alone.generated_tokens),
            (results[request].logprobs, alone.logprobs),
        ):
            assert mine[before:end] == same[: end - before], (request, before)
        if not before and alone.generated_tokens != results[request].generated_tokens:
            changed.add(request)
    assert changed and changed <= preempted, "other steps give other tokens, and only to who was preempted"
