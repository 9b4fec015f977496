"""Decode steps of several tokens on a preallocated store: what is taken back was never there."""

from __future__ import annotations

import pytest
import torch

from tests.support.helpers import rows, slow, states
from tests.support.recorded_graph import RecordedGraph
from tq_hf import TurboQuantConfig
from tq_hf.layers import dense as dense_module
from tq_hf.layers.compressed import TurboQuantLayer
from tq_hf.layers.dense import PreallocatedLayer
from tq_hf.layers.rollback import take_back
from tq_hf.stores import store as store_module

DIM, LENGTH, ROOM = 32, 300, 340


def held(layer: TurboQuantLayer) -> tuple[list[int], list[torch.Tensor]]:
    """Counts and tensors of a layer, once blocks that are encoded have no dense rows."""
    counts, tensors = layer.store.export()
    counts, dropped = counts.without_encoded_rows(), counts.pending * 128
    return list(counts), [x[:, :, dropped:] if name.startswith("residual") else x for name, x in tensors.items()]


@pytest.mark.parametrize(
    ("back", "residual"),
    [
        ("take_back", 0),
        ("take_back", 5),
        ("crop", 128),
        *(slow(*case) for case in [("take_back", 128), ("crop", 0), ("crop", 5)]),
    ],
)
@pytest.mark.parametrize("kept", [1, 3, 5, "mixed"])
def test_tokens_that_are_taken_back_were_never_there(residual: int, kept: int | str, back: str) -> None:
    """Bit for bit, with a step of 5 tokens at every position of a block, and 0 to 4 of them taken back."""
    config = TurboQuantConfig(residual_length=residual)
    tokens, drafts = states(0, 1, 2, ROOM, DIM), states(1, 1, 2, ROOM, DIM)
    layers = [TurboQuantLayer(config, ROOM) for _ in range(2)]
    for layer in layers:
        layer.activate_past_recording()
        layer.update(*rows(tokens, 0, 2))  # fewer than there are sinks
    plain, assisted = layers
    length = 2
    while length < LENGTH:
        keep = kept if isinstance(kept, int) else 1 + length % 5
        new = [
            torch.cat([own[:, :, length : length + keep], draft[:, :, keep:5]], 2)
            for own, draft in zip(tokens, drafts, strict=True)
        ]
        assisted.update(*new)
        if back == "crop":
            assisted.crop(keep - 5)
        else:
            take_back([assisted], torch.tensor([5 - keep]))
        for token in range(length, length + keep):
            plain.update(*rows(tokens, token, token + 1))
        length += keep
        assert int(assisted.get_seq_length()) == length
        (counts, tensors), (expected, others) = held(assisted), held(plain)
        assert counts == expected, length
        assert all(torch.equal(x, y) for x, y in zip(tensors, others, strict=True)), length


def test_a_layer_that_is_not_compressed_takes_tokens_back() -> None:
    layer, tokens = PreallocatedLayer(64), states(0, 1, 2, 64, DIM)
    layer.activate_past_recording()
    layer.update(*rows(tokens, 0, 20))
    keys, _ = layer.update(*rows(tokens, 20, 25))
    assert keys.shape[2] == 64 and layer.get_mask_sizes(5) == (64, 0)
    take_back([layer], torch.tensor([3]))
    assert int(layer.get_seq_length()) == 22
    layer.update(*rows(tokens, 22, 30))
    assert torch.equal(layer.keys[:, :, :30], tokens[0][:, :, :30])


@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_a_step_returns_as_many_rows_as_its_mask_has_columns(tokens: int) -> None:
    config = TurboQuantConfig(residual_length=5)
    for layer in (TurboQuantLayer(config, ROOM), PreallocatedLayer(ROOM)):
        pair = states(0, 1, 2, 60, DIM)
        layer.activate_past_recording()
        assert layer.get_mask_sizes(20) == (20, 0)
        layer.update(*rows(pair, 0, 20))
        columns, _ = layer.get_mask_sizes(tokens)
        keys, values = layer.update(*rows(pair, 20, 20 + tokens))
        assert keys.shape[2] == values.shape[2] == columns == ROOM
        columns, _ = layer.get_mask_sizes(17)
        keys, _ = layer.update(*rows(pair, 40, 57))
        assert keys.shape[2] == columns == 37 + tokens


def test_a_step_that_does_not_fit_changes_nothing() -> None:
    layer, pair = TurboQuantLayer(TurboQuantConfig(), 24), states(0, 1, 2, 30, DIM)
    layer.activate_past_recording()
    layer.update(*rows(pair, 0, 20))
    with pytest.raises(ValueError, match="Appending 5 tokens to the 20"):
        layer.update(*rows(pair, 20, 25))
    assert int(layer.get_seq_length()) == 20
    layer.update(*rows(pair, 20, 24))
    assert int(layer.get_seq_length()) == 24


def test_a_captured_step_that_is_not_compiled_reads_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler may give up, after too many shapes: the host does not know the count then, and may not read it."""
    pair = states(0, 1, 2, 60, DIM)
    for layer in (TurboQuantLayer(TurboQuantConfig(), ROOM), PreallocatedLayer(ROOM)):
        layer.activate_past_recording()
        layer.update(*rows(pair, 0, 18))
        layer.update(*rows(pair, 18, 20))
        take_back([layer], torch.tensor(2))  # after which the host does not know the count
        for room in (store_module, dense_module):
            monkeypatch.setattr(room, "is_capturing", lambda: True)
        with RecordedGraph():  # which refuses reads
            if isinstance(layer, TurboQuantLayer):
                layer.store.append(*rows(pair, 18, 23))
            else:
                layer.update(*rows(pair, 18, 23))
        monkeypatch.undo()
        assert int(layer.get_seq_length()) == 23
