"""`bench_offload.py` as a CPU runs it: a request is preempted, and its pages come back as they were."""

import pytest
from transformers.generation.continuous_batching import offloading_manager

from examples.measure.report import tables
from examples.measure.speed import bench_offload


@pytest.mark.slow
def test_pages_come_back_and_everything_is_measured_and_shown() -> None:
    real = offloading_manager.OffloadingManager._offload_to_cpu
    record = bench_offload.run(tiny=True)
    assert offloading_manager.OffloadingManager._offload_to_cpu is real
    assert record["pages_checked"] == record["pages_equal"] > 0
    assert {way: one["copies"] for way, one in record["copies"].items()} == {"out": 1, "back": 1}
    assert list(record["next_token"]) == ["pages from the CPU", "prompt read again"]
    assert all(row["ms"] > 0 and row["tokens_left"][0] > 2 for row in record["next_token"].values())
    assert f"{record['pages_checked']} of {record['pages_checked']} pages" in tables.RENDERERS["offload"](record)
