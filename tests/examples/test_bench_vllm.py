"""Requests are timed by the steps of an engine like vLLM's."""

from types import SimpleNamespace
from typing import Any

import pytest

from examples.measure.speed import bench_vllm
from examples.measure.speed.bench_serve import Request, latencies, step_of


class Engine:
    """Answer each request with a token a step, two in the last; read one prompt a step."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.waiting, self.running = clock, [], {}

    def add_request(self, name: str, prompt: dict[str, list[int]], new: int) -> None:
        self.waiting.append((name, new, len(prompt["prompt_token_ids"])))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[Any]:
        self.clock[0] += 0.01
        if self.waiting:
            name, new, _ = self.waiting.pop(0)
            self.running[name] = [new, []]
        outputs = []
        for name, (new, tokens) in list(self.running.items()):
            tokens += [0] * (2 if new - len(tokens) == 2 else 1)
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=list(tokens))]))
            if len(tokens) == new:
                del self.running[name]
        return outputs


def test_tokens_have_the_moment_at_which_their_step_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [5.0]
    monkeypatch.setattr(bench_vllm.time, "perf_counter", lambda: clock[0])
    outcome = bench_vllm.serve(Engine(clock), [Request([1] * 7, 8), Request([1] * 9, 8)], lambda new: new)
    assert outcome.tokens == 16 and outcome.seconds == pytest.approx(0.08)
    first, second = (result.timestamps for _, result in outcome.results)
    assert first == pytest.approx([5.01, 5.02, 5.03, 5.04, 5.05, 5.06, 5.07, 5.07])
    assert second[0] == pytest.approx(5.02) and len(second) == 8
    assert latencies(outcome)["first_token_s_p99"] == pytest.approx(0.02)
    step = step_of([result for _, result in outcome.results], 16)
    assert step["steps"] == 5 and step["ms_per_step"] == pytest.approx(10)
    assert step["prompt_tokens_per_second"] == pytest.approx(16 / 0.02)
