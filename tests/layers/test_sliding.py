"""Sliding-window layers hold their window and no more, and otherwise do what transformers' own do."""

import copy

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicSlidingWindowLayer, StaticSlidingWindowLayer

from tests.support.tiny_models import VOCAB, build
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input
from tq_hf.layers.dense import PreallocatedSlidingLayer, SlidingLayer
from tq_hf.layers.rollback import take_back

WINDOW = 16


def states(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, tokens, 8), torch.randn(2, 3, tokens, 4)


@pytest.mark.parametrize("lengths", [(40, 1, 1), (15, 1, 1), (16, 1), (3, 5, 30, 2), (1, 40), (17, 17)])
def test_it_returns_and_keeps_what_the_stock_layer_does_in_less_memory(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ours, stock = SlidingLayer(WINDOW), DynamicSlidingWindowLayer(WINDOW)
    for tokens in lengths:
        keys, values = states(tokens)
        for mine, theirs in zip(ours.update(keys, values), stock.update(keys, values), strict=True):
            assert torch.equal(mine, theirs)
        for mine, theirs in ((ours.keys, stock.keys), (ours.values, stock.values)):
            assert torch.equal(mine, theirs)
            rows = mine.untyped_storage().nbytes() // (mine[:, :, :1].numel() * mine.element_size())
            assert rows <= WINDOW
        assert ours.get_mask_sizes(1) == stock.get_mask_sizes(1)


def preallocated(room: int = 100) -> PreallocatedSlidingLayer:
    return PreallocatedSlidingLayer.like(StaticSlidingWindowLayer(room, WINDOW))


@pytest.mark.parametrize("lengths", [(40, 1, 1), (15, 1, 1), (16, 1), (3, 5, 30, 2), (1, 40), (17, 17)])
def test_a_preallocated_one_returns_what_the_stock_layer_does(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for recording in (False, True):
        ours, stock = preallocated(), StaticSlidingWindowLayer(100, WINDOW)
        if recording:
            ours.activate_past_recording()
        for tokens in lengths:
            assert ours.get_mask_sizes(tokens) == stock.get_mask_sizes(tokens)
            keys, values = states(tokens)
            for mine, theirs in zip(ours.update(keys, values), stock.update(keys, values), strict=True):
                assert torch.equal(mine, theirs)


@pytest.mark.parametrize("before, removed", [(40, 4), (12, 4), (14, 5), (3, 2), (40, 0), (15, 1)])
def test_a_preallocated_one_that_records_is_cropped_to_what_it_was(before: int, removed: int) -> None:
    """The next steps are those of a layer that never saw what was removed."""
    torch.manual_seed(0)
    ours, other = preallocated(), preallocated()
    prompt, kept, gone, after = states(before), states(3), states(removed), states(2)
    ours.update(*prompt)
    other.update(*prompt)
    ours.activate_past_recording()
    for _ in range(2):
        ours.update(torch.cat([kept[0], gone[0]], 2), torch.cat([kept[1], gone[1]], 2))
        ours.crop(-removed)
        other.update(*kept)
    assert ours.get_seq_length() == other.get_seq_length() == before + 6
    for tokens in (2, 1):
        new = (after[0][:, :, :tokens], after[1][:, :, :tokens])
        for mine, theirs in zip(ours.update(*new), other.update(*new), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("before", [3, WINDOW - 2, 40])
@pytest.mark.parametrize("removed", range(6))
def test_a_ring_holds_nothing_of_tokens_that_are_taken_back(before: int, removed: int) -> None:
    """At every place of the ring, up to a step of which nothing stays."""
    torch.manual_seed(removed)
    ours, other = preallocated(200), preallocated(200)
    prompt = states(before)
    for layer in (ours, other):
        layer.update(*prompt)
    ours.open_ring(5)
    for _ in range(2 * ours.ring_rows):
        kept, gone = states(5 - removed), states(removed)
        rows = ours.update(torch.cat([kept[0], gone[0]], 2), torch.cat([kept[1], gone[1]], 2))
        take_back((ours,), torch.tensor(removed))
        for t in range(5 - removed):
            expected = other.update(kept[0][:, :, t : t + 1], kept[1][:, :, t : t + 1])
        length = int(ours.cumulative_length)
        places = torch.arange(max(0, length - WINDOW), length)
        for mine, theirs in zip(rows, expected if removed < 5 else (other.keys, other.values), strict=True):
            assert torch.equal(mine[:, :, places % ours.ring_rows], theirs[:, :, : len(places)])
        if length > 190:
            break
    ours.close_ring(record=False)
    assert ours.get_seq_length() == other.get_seq_length()
    for one in (ours, other):
        one.crop(-1)
    for tokens in (1, 3, 1):
        new = states(tokens)
        assert ours.get_mask_sizes(tokens) == other.get_mask_sizes(tokens)
        for mine, theirs in zip(ours.update(*new), other.update(*new), strict=True):
            assert mine.shape == theirs.shape
            held = slice(other.get_seq_length())  # rows after these are empty
            assert torch.equal(mine[:, :, held], theirs[:, :, held])


def test_a_ring_that_an_exception_ended_is_cropped_to_what_it_was() -> None:
    """Rows beyond the window are kept for the crop, and no longer."""
    torch.manual_seed(0)
    ours, other = preallocated(), preallocated()
    prompt, gone, after = states(40), states(5), states(2)
    for layer in (ours, other):
        layer.update(*prompt)
    ours.open_ring(5)
    ours.update(*gone)
    ours.close_ring(record=True)
    ours.crop(-5)
    assert ours.get_seq_length() == 40 and ours._recorded is None
    for mine, theirs in zip(ours.update(*after), other.update(*after), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("change", ["repeat", "copy", "reset", "smaller", "larger"])
def test_a_layer_that_was_a_ring_is_one_again(change: str) -> None:
    """Its rows stay, at the same addresses; a longer step needs more."""
    torch.manual_seed(0)
    ours, other = preallocated(), preallocated()
    prompt, new = states(40), states(4)
    ours.update(*prompt)
    ours.open_ring(5)
    ours.close_ring(record=False)
    address, tokens = ours.keys.data_ptr(), {"smaller": 3, "larger": 9}.get(change, 5)
    if change == "repeat":
        ours.batch_repeat_interleave(2)
        ours.batch_select_indices(torch.tensor([0, 2]))
    elif change == "copy":
        ours = copy.deepcopy(ours)
    elif change == "reset":
        ours.reset()
        ours.update(*prompt)
    other.update(*prompt)
    ours.open_ring(tokens)
    assert ours.keys.shape[2] == ours.ring_rows == max(21, 16 + tokens)
    if change in ("reset", "smaller"):
        assert ours.keys.data_ptr() == address
    ours.update(*new)
    ours.close_ring(record=False)
    other.update(*new)
    for mine, theirs in zip(ours.update(*new), other.update(*new), strict=True):
        assert torch.equal(mine, theirs)


def test_a_preallocated_one_says_what_a_crop_needs() -> None:
    layer = preallocated()
    layer.update(*states(40))
    before = layer.keys.clone()
    with pytest.raises(ValueError, match="remove 4 tokens from a sliding window of 16.*activate_past_recording"):
        layer.crop(-4)
    assert torch.equal(layer.keys, before) and layer.get_seq_length() == 40


@pytest.mark.parametrize("before", [WINDOW - 1, WINDOW, WINDOW + 1, 40])
def test_the_last_token_of_a_preallocated_one_can_be_taken_back(before: int) -> None:
    """Of a full window the next token's query does not see the first, so nothing it sees is gone."""
    torch.manual_seed(0)
    ours, other = preallocated(), preallocated()
    prompt, after = states(before), states(3)
    ours.update(*prompt)
    other.update(*prompt)
    for t in range(3):
        ours.update(*states(1))
        ours.crop(-1)
        assert ours.get_seq_length() == other.get_seq_length() == before + t
        assert ours.get_mask_sizes(1) == other.get_mask_sizes(1)
        new = (after[0][:, :, t : t + 1], after[1][:, :, t : t + 1])
        for mine, theirs in zip(ours.update(*new), other.update(*new), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("before, allowed", [(WINDOW + 1, 1), (40, 1), (WINDOW, 2), (WINDOW - 1, 3)])
def test_no_more_is_taken_back_than_was_kept(before: int, allowed: int) -> None:
    layer = preallocated()
    layer.update(*states(before))
    for _ in range(allowed):
        layer.crop(-1)
    if before > WINDOW:
        with pytest.raises(ValueError, match="would need 1 older tokens"):
            layer.crop(-1)
        assert layer.get_seq_length() == before - 1
        layer.update(*states(1))
        layer.crop(-1)


def test_steps_of_a_window_that_fills_and_slides_are_compiled_once() -> None:
    """But for the host's count, a number that torch first takes for a constant."""
    torch._dynamo.reset()
    ours, stock = preallocated(), StaticSlidingWindowLayer(100, WINDOW)
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    step = torch.compile(lambda keys, values: ours.update(keys, values), backend=count, fullgraph=True)
    prompt = states(WINDOW - 5)
    ours.update(*prompt)
    stock.update(*prompt)
    for _ in range(12):
        new = states(1)
        for mine, theirs in zip(step(*new), stock.update(*new), strict=True):
            assert torch.equal(mine, theirs)
    assert ours.get_seq_length() == stock.get_seq_length() and len(graphs) <= 2


def test_a_preallocated_one_is_selected_and_repeated() -> None:
    layer = preallocated()
    layer.update(*states(7))
    keys = layer.keys.clone()
    layer.batch_repeat_interleave(3)
    layer.batch_select_indices(torch.tensor([0, 5]))
    assert torch.equal(layer.keys, keys) and layer.batch_size == 2


def test_assisted_decoding_on_a_preallocated_cache_of_sliding_layers() -> None:
    model = build("gemma3")
    ids = torch.randint(3, VOCAB, (1, 40), generator=torch.Generator().manual_seed(0)).repeat(1, 3)
    options = dict(do_sample=False, max_new_tokens=12, prompt_lookup_num_tokens=3)
    expected = model.generate(ids, **as_input(DynamicCache(config=model.config)), **options)
    for attention in ("sdpa", "turboquant"):
        model.set_attn_implementation(attention)
        cache = TurboQuantCache(model.config, max_cache_len=200, residual_length=10**6)
        assert torch.equal(model.generate(ids, **as_input(cache), **options), expected)


def test_what_transformers_makes_by_itself_stays_its_own() -> None:
    assert SlidingLayer not in DYNAMIC_LAYER_TYPE_MAPPING.values()
    model = build("gemma3")
    assert type(DynamicCache(config=model.config).layers[0]) is DynamicSlidingWindowLayer
