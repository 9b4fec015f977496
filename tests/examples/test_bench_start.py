"""`bench_start`: an engine on a CPU, and its row in the table."""

import torch

from examples.measure.report.tables import start
from examples.measure.speed.bench_start import measure
from examples.measure.speed.soak import small_model
from examples.provenance import provenance


def test_seconds_count_from_the_weights_and_waits_from_each_request() -> None:
    device = torch.device("cpu")
    row = measure(small_model(device), seconds=0)
    assert 0 < row["balance_s"] < row["pool_s"] < row["first_token_s"] < row["first_answer_s"] < row["seconds"]
    assert 0 < row["next_token_s"] < row["seconds"] - row["first_answer_s"]
    assert row["rounds"] == 0 and row["worst_first_token_s"] is None
    text = start(provenance(device, "a small model") | {"rows": [{"caches": "empty", **row}]})
    assert f"| {row['first_token_s']:.1f} s | {row['first_answer_s']:.1f} s |" in text and "| – | – |" in text
