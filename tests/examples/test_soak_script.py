"""The soak of an engine, shortened: bursts, aborts, refusals, preemptions, sleeps."""

import pytest
import torch

from examples.measure.speed import soak


@pytest.mark.slow
def test_pages_come_back_and_answers_are_those_to_their_prompts() -> None:
    found = soak.Soak(soak.small_model(torch.device("cpu")), requests=8, longest=150, answer=10).run(0, bursts=10)
    assert found["bursts"] == 10 and found["sleeps"] == 1 and found["refused"] == 20
    assert found["pages_after_bursts"] == 0
    assert found.get("of another", 0) == 0
    assert found["compared"] + found["long and compared"] == 40
    assert found["equal"] >= 0.98 * found["compared"] > 0


def test_an_answer_of_another_prompt_is_counted() -> None:
    work = soak.Soak(soak.small_model(torch.device("cpu")), requests=8, longest=60, answer=10)
    work.expected = work.expected[1:] + work.expected[:1]
    found = work.run(0, bursts=1)
    assert found["of another"] == found["compared"] == 4 and found.get("equal", 0) == 0
