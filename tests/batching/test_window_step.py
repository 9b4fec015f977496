"""A step over sliding windows: what requests attend to, what is written where, and what is never read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tq_kernels.types import AttentionOptions, Sequences, Tokens

from tests.support.helpers import cumulative, every_pair
from tests.support.window_cases import CHUNKS, DIM, HEADS, OPTIONS, PAGES, QUERY_HEADS, TOTALS, Requests
from tq_hf.ops import sliding_pages
from tq_hf.ops.dispatch import windowed_step
from tq_hf.ops.sliding_pages import plan_step
from tq_hf.tensors.pages import LayerWindows, window_page

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PLACES = ((96, 36), (128, 128), (7, 7), (500, 34), (1, 1))
"""Tokens of a window, and of a page."""


@pytest.mark.parametrize(
    ("place", "options", "dtype", "in_pieces"), every_pair(PLACES, OPTIONS, DTYPES, (False, True)), ids=str
)
def test_a_query_attends_to_its_window(
    place: tuple[int, int], options: dict, dtype: torch.dtype, in_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_pieces:  # of a prompt and of a batch
        monkeypatch.setattr(sliding_pages, "TILE_QUERIES", 11)
        monkeypatch.setattr(sliding_pages, "WINDOW_BYTES", 1)
    requests, close = Requests(*place, TOTALS, dtype), 3e-5 if dtype == torch.float32 else 2e-2
    for new in CHUNKS:
        for out, expected in requests.step(new, padding=3, **options):
            assert out.dtype == dtype
            torch.testing.assert_close(out.double(), expected, atol=close, rtol=max(close, 1e-4))


def test_a_step_writes_to_no_page_of_others_and_no_other_layer() -> None:
    requests = Requests(96, 36, TOTALS)
    before = requests.pool.clone()
    for new in CHUNKS:
        requests.step(new, padding=2)
    unused = sorted(set(range(PAGES)) - {1, *requests.block_table.flatten().tolist()})
    for part in ((slice(None), [0, 2]), (unused, 1)):
        torch.testing.assert_close(requests.pool[part], before[part], rtol=0, atol=0, equal_nan=True)


def test_layers_that_share_windows_all_read_what_was_there_before_the_step() -> None:
    requests, stored = [Requests(96, 36, TOTALS) for _ in range(2)]
    for new in CHUNKS:
        requests.store = False
        first = requests.step(new)
        requests.store, requests.done = True, list(stored.done)
        for (a, _), (b, _), (c, _) in zip(first, requests.step(new), stored.step(new), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
            torch.testing.assert_close(a, c, rtol=0, atol=0)
        torch.testing.assert_close(requests.pool, stored.pool, rtol=0, atol=0, equal_nan=True)


class NoReading(TorchDispatchMode):
    """Fails if a value is read from the device: a CUDA graph could not hold the step."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "softcap", "sinks"])
def test_a_step_of_single_tokens_reads_nothing_from_the_device_and_looks_up_rows_once(
    options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = LayerWindows(torch.zeros(PAGES, 2, 36, HEADS, DIM), 96, trash=1)
    sequences = Sequences(cumulative([1, 0, 1, 0]), cumulative([97, 0, 5, 0]), torch.full((4, 3), 7).int(), None, 1)
    new = Tokens(*(torch.ones(3, heads, DIM) for heads in (QUERY_HEADS, HEADS, HEADS)))
    with NoReading():
        plan = plan_step(sequences, 3)
        out = windowed_step(new, windows, plan, AttentionOptions(0.2, **options))
    assert (out[:2] != 0).all() and (out[2] == 0).all()
    monkeypatch.setattr(LayerWindows, "places", None)
    assert torch.equal(windowed_step(new, windows, plan, AttentionOptions(0.2, **options)), out), "of another layer"


SHAPES = {
    "gemma-3-27b": (52, 10, 16, 128, 1024),
    "gemma-3-4b": (29, 5, 4, 256, 1024),
    "gpt-oss-20b": (12, 12, 8, 64, 128),
    "one sliding layer": (1, 31, 8, 128, 4096),
}
"""Sliding and full layers, heads, channels, window."""


@pytest.mark.parametrize("name", SHAPES)
def test_pages_of_windows_are_small_multiples_of_packed_blocks(name: str) -> None:
    sliding, full, heads, dim, window = SHAPES[name]
    block = full * heads * 134 * dim  # at four bits
    row = sliding * heads * 2 * dim * 2
    size, rows = window_page(block, row, window)
    assert size % block == 0 and rows >= 32
    assert size - rows * row < max(row, size / 33) or rows == window
    # In a few packed blocks, not in the gigabytes of a least common multiple.
    assert size <= 6 * block
