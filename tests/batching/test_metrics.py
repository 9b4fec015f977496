"""Metrics of an engine: requests, tokens, pages and times, as Prometheus reads them."""

from __future__ import annotations

import pytest

from tests.support.batching_cases import Session, greedy, model_of, options, prompts
from tq_hf import TurboQuantBatching
from tq_hf.batching.metrics import SECONDS, Histogram


def read(text: str) -> dict[str, float]:
    """Values by name and labels; every name has its kind and a sentence."""
    lines = text.splitlines()
    assert text.endswith("\n")
    kinds = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    assert kinds.keys() == {line.split()[2] for line in lines if line.startswith("# HELP")}
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    for name in values:
        plain = name.partition("{")[0]
        assert plain in kinds or plain.rpartition("_")[0] in kinds
    return {name: float(value) for name, value in values.items()}


def test_requests_tokens_and_pages_are_counted() -> None:
    first, other = prompts([300, 40])
    with Session(model_of()) as session:
        session.run([first], greedy(6))
        session.run([first, other], greedy(4))
        manager = session.manager
        manager.start()
        name = manager.add_request(other, max_new_tokens=400, streaming=True)
        for i, _ in enumerate(manager.request_id_iter(name)):
            if i == 3:
                during = read(manager.metrics())
                manager.cancel_request(name)
                break
        manager.add_request([1] * 10**6)
        while (result := manager.get_result(timeout=30)).error is None:
            pass
        manager.stop(keep_for_next_session=True)
        found = read(manager.metrics())
    assert result.error
    assert during['tq_hf_requests{state="running"}'] == 1 and during['tq_hf_pages{state="used"}'] >= 17
    assert found['tq_hf_requests{state="running"}'] == found['tq_hf_requests{state="waiting"}'] == 0
    ended = {kind: found[f'tq_hf_requests_total{{status="{kind}"}}'] for kind in ("finished", "failed", "cancelled")}
    assert ended == {"finished": 3, "failed": 1, "cancelled": 1}
    assert found['tq_hf_tokens_total{kind="generated"}'] == 6 + 2 * 4
    assert found['tq_hf_tokens_total{kind="prompt"}'] == 300 + 300 + 40 + 10**6
    assert found['tq_hf_tokens_total{kind="shared"}'] == 260, "two blocks and the sinks"
    pages = {kind: found[f'tq_hf_pages{{state="{kind}"}}'] for kind in ("used", "cached", "free")}
    assert pages["used"] == 0 < pages["cached"] and sum(pages.values()) == 200
    for name, number in (("time_to_first_token", 3), ("time_per_token", 3)):
        assert found[f"tq_hf_{name}_seconds_count"] == number == found[f'tq_hf_{name}_seconds_bucket{{le="+Inf"}}']
        assert found[f"tq_hf_{name}_seconds_sum"] > 0


def test_a_manager_that_has_not_started_has_metrics() -> None:
    manager = TurboQuantBatching(model_of(), balance=False).init_continuous_batching(greedy(2), options())
    found = read(manager.metrics())
    assert found['tq_hf_requests{state="running"}'] == 0
    manager.restore_attention()


def test_buckets_hold_all_times_up_to_their_limit() -> None:
    histogram = Histogram()
    for seconds in (0.005, 0.0051, 3.0, 1e9):
        histogram.observe(seconds)
    found = dict(line.rsplit(" ", 1) for line in histogram.lines("x"))
    assert [found[f'x_bucket{{le="{limit}"}}'] for limit in (0.005, 0.01, 2.0, 5.0, 60.0, "+Inf")] == list("122334")
    assert float(found["x_sum"]) == pytest.approx(1e9 + 3.0101) and len(found) == len(SECONDS) + 3
