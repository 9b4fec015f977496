"""Sliding-window layers hold their window and no more, and otherwise do what transformers' own do. Tokens are taken
back from layers that hold different numbers of them, on purpose or because a call was interrupted."""

import copy

import pytest
import torch
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicSlidingWindowLayer, StaticSlidingWindowLayer

from tests.support.helpers import assert_same, every_pair, llama_config, states
from tests.support.tiny_models import build, token_ids
from tq_hf import TurboQuantCache
from tq_hf.compat import CACHE_NAME, as_input
from tq_hf.layers.dense import SlidingLayer
from tq_hf.layers.rollback import take_back

WINDOW = 16
STOCK = {
    "growing": lambda: DynamicSlidingWindowLayer(WINDOW),
    "preallocated": lambda: StaticSlidingWindowLayer(100, WINDOW),
}
either = pytest.mark.parametrize("kind", STOCK)


def rows_of(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, tokens, 8), torch.randn(2, 3, tokens, 4)


def layer_of(kind: str) -> SlidingLayer:
    return SlidingLayer.like(STOCK[kind]())


def preallocated(room: int = 100) -> SlidingLayer:
    return SlidingLayer.like(StaticSlidingWindowLayer(room, WINDOW))


def both(first, second) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([first[0], second[0]], 2), torch.cat([first[1], second[1]], 2)


def assert_alike(ours, other, *lengths: int) -> None:
    """They have as many tokens, and return the same for calls of these lengths. Rows without tokens may differ."""
    assert ours.get_seq_length() == other.get_seq_length()
    for tokens in lengths:
        assert ours.get_mask_sizes(tokens) == other.get_mask_sizes(tokens)
        new = rows_of(tokens)
        states = ours.update(*new)
        held = slice(getattr(states[0], "num_held", None))
        for mine, theirs in zip(states, other.update(*new), strict=True):
            assert mine.shape == theirs.shape and torch.equal(mine[:, :, held], theirs[:, :, held])


@either
@pytest.mark.parametrize("recording", [False, True], ids=["forgets", "records"])
@pytest.mark.parametrize("lengths", [(40, 1, 1), (15, 1, 1), (16, 1), (3, 5, 30, 2), (1, 40), (17, 17)])
def test_it_returns_what_the_stock_layer_does(kind: str, recording: bool, lengths: tuple[int, ...]) -> None:
    """And keeps the same rows, in less memory."""
    torch.manual_seed(0)
    ours, stock = layer_of(kind), STOCK[kind]()
    if recording:
        ours.activate_past_recording()
    for tokens in lengths:
        assert_alike(ours, stock, tokens)
        for mine, theirs in ((ours.keys, stock.keys), (ours.values, stock.values)) if not recording else ():
            assert kind == "preallocated" or torch.equal(mine, theirs)
            rows = mine.untyped_storage().nbytes() // (mine[:, :, :1].numel() * mine.element_size())
            assert rows <= WINDOW


SIZES = ((40, 4), (12, 4), (14, 5), (3, 2), (40, 0), (15, 1), (16, 1), (17, 1))


@pytest.mark.parametrize(
    ("sizes", "kind", "recording", "step"), every_pair(SIZES, tuple(STOCK), (False, True), (1, 8)), ids=str
)
def test_one_that_is_cropped_is_what_it_was(sizes: tuple[int, int], kind: str, recording: bool, step: int) -> None:
    """The next calls are those of a layer that never saw what was removed. A preallocated layer needs no record for its
    last token: the next token's query does not attend to the first of a full window."""
    before, removed = sizes
    torch.manual_seed(0)
    ours, other = layer_of(kind), layer_of(kind)
    prompt, kept, gone = rows_of(before), rows_of(3), rows_of(removed)
    if recording:
        ours.activate_past_recording()
        ours.crop(0)  # of no tokens yet
    elif removed > (kind == "preallocated"):
        return
    for layer in (ours, other):
        layer.update(*prompt)
    for _ in range(2):
        for new in zip(*(x.split(step, 2) for x in both(kept, gone)), strict=True):
            ours.update(*new)
        ours.crop(-removed)
        other.update(*kept)
    assert_alike(ours, other, 2, 1)


@pytest.mark.parametrize("before", [3, WINDOW - 2, 40])
@pytest.mark.parametrize("removed", range(6))
def test_a_ring_holds_nothing_of_tokens_that_are_taken_back(before: int, removed: int) -> None:
    """At every place of the ring, up to a step of which nothing stays."""
    torch.manual_seed(removed)
    ours, other = preallocated(200), preallocated(200)
    prompt = rows_of(before)
    for layer in (ours, other):
        layer.update(*prompt)
    ours.open_ring(5)
    for _ in range(2 * ours.max_cache_len):
        kept, gone = rows_of(5 - removed), rows_of(removed)
        rows = ours.update(*both(kept, gone))
        take_back((ours,), torch.tensor(removed))
        for t in range(5 - removed):
            expected = other.update(kept[0][:, :, t : t + 1], kept[1][:, :, t : t + 1])
        length = int(ours.cumulative_length)
        places = torch.arange(max(0, length - WINDOW), length)
        for mine, theirs in zip(rows, expected if removed < 5 else other._past(), strict=True):
            assert torch.equal(mine[:, :, places % ours.max_cache_len], theirs[:, :, : len(places)])
        if length > 190:
            break
    ours.close_ring()
    for one in (ours, other):
        one.crop(-1)
    assert_alike(ours, other, 1, 3, 1)


@pytest.mark.parametrize("rejected", [0, 4])
def test_a_ring_that_an_exception_closed_is_cropped_to_what_it_was(rejected: int) -> None:
    """Rows beyond the window are kept for the crop, and no longer. Nothing is kept of a ring whose last step was
    verified: its rejected drafts took rows of older tokens."""
    torch.manual_seed(0)
    ours, other = preallocated(), preallocated()
    prompt, step = rows_of(40), rows_of(5)
    for layer in (ours, other):
        layer.update(*prompt)
    ours.open_ring(5)
    ours.update(*step)
    take_back((ours,), torch.tensor(rejected))
    ours.close_ring(40 if not rejected else 41)
    if rejected:
        with pytest.raises(ValueError, match="cannot remove 6 tokens .* would need 5 older tokens"):
            ours.crop(-6)
        other.update(*(x[:, :, :1] for x in step))
    else:
        ours.crop(-5)
    assert ours._recorded is None
    assert_alike(ours, other, 2)


@pytest.mark.parametrize("change", ["repeat", "copy", "reset", "smaller", "larger"])
def test_a_layer_that_was_a_ring_is_one_again(change: str) -> None:
    """Its rows stay, at the same addresses; a longer step needs more."""
    torch.manual_seed(0)
    ours, other = preallocated(), preallocated()
    prompt, new = rows_of(40), rows_of(4)
    ours.update(*prompt)
    ours.open_ring(5)
    ours.close_ring()
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
    assert ours.keys.shape[2] == ours.max_cache_len == max(21, 16 + tokens)
    if change in ("reset", "smaller"):
        assert ours.keys.data_ptr() == address
    ours.update(*new)
    ours.close_ring()
    other.update(*new)
    assert_alike(ours, other, 4)


@either
@pytest.mark.parametrize("before, allowed", [(WINDOW + 1, 1), (40, 1), (WINDOW, 2), (WINDOW - 1, 3)])
def test_no_more_is_taken_back_than_was_kept(kind: str, before: int, allowed: int) -> None:
    layer, is_full = layer_of(kind), before > WINDOW - (kind == "growing")
    layer.update(*rows_of(before))
    if kind == "growing" and is_full:
        allowed = 0
    for _ in range(allowed):
        layer.crop(-1)
    if is_full:
        held = layer.state()[1]["keys"]
        with pytest.raises(ValueError, match="a sliding window of 16: it would need 1 older.*activate_past_recording"):
            layer.crop(-1)
        assert torch.equal(layer.state()[1]["keys"], held) and layer.get_seq_length() == before - allowed
        layer.update(*rows_of(1))
        for _ in range(allowed):
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
    prompt = rows_of(WINDOW - 5)
    ours.update(*prompt)
    stock.update(*prompt)
    for _ in range(12):
        new = rows_of(1)
        for mine, theirs in zip(step(*new), stock.update(*new), strict=True):
            assert torch.equal(mine, theirs)
    assert ours.get_seq_length() == stock.get_seq_length() and len(graphs) <= 2


@either
def test_it_is_selected_and_repeated(kind: str) -> None:
    layer = layer_of(kind)
    layer.update(*rows_of(7))
    keys = layer.keys.clone()
    layer.batch_repeat_interleave(3)
    layer.batch_select_indices(torch.tensor([0, 5]))
    assert torch.equal(layer.keys, keys) and layer.batch_size == 2


def test_assisted_decoding_on_a_preallocated_cache_of_sliding_layers() -> None:
    model = build("gemma3")
    ids = token_ids(1, 40).repeat(1, 3)
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


UNEVEN = (600, 400, 200)
BOTH = "LinearAttentionAndStaticFullAttentionLayer"
kinds = pytest.mark.parametrize(
    "options", [{}, {"max_cache_len": 900}, {"skip_layers": (0, 1)}], ids=["growing", "preallocated", "dense"]
)


def lengths(cache) -> list[int]:
    return [int(layer.get_seq_length()) for layer in cache.layers]


def uneven(kind, tokens=UNEVEN, **options):
    cache = kind(config=llama_config(3)) if kind is DynamicCache else kind(llama_config(3), **options)
    for layer, count in enumerate(tokens):
        cache.update(*states(layer, 2, tokens=count), layer)
    return cache


def pruned(**options):
    """600 tokens of all layers, pruned by assignment after the call."""
    cache = uneven(TurboQuantCache, (600,) * 3, **options)
    for layer, count in zip(cache.layers, UNEVEN, strict=True):
        layer.keys, layer.values = layer.keys[:, :, -count:], layer.values[:, :, -count:]
    return cache


@kinds
@pytest.mark.parametrize(
    "make", [lambda **options: uneven(TurboQuantCache, **options), pruned], ids=["built", "pruned"]
)
@pytest.mark.parametrize("more", [(), (1,), (20, 1)], ids=str)
def test_a_crop_takes_as_many_tokens_from_each_layer(make, options, more):
    cache, expected = make(**options), uneven(DynamicCache)
    for each in (cache, expected):
        for tokens in more:
            for layer in range(3):
                each.update(*states(9, 2, tokens=tokens), layer)
    for tokens in (0, -1, -30, -1000):
        cache.crop(tokens)
        expected.crop(tokens)
        assert lengths(cache) == lengths(expected)


@kinds
@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("crop", [0, -1, torch.tensor(-20), -50])
def test_a_call_that_an_exception_ended_is_taken_back_from_uneven_layers(options, tokens, crop):
    """And no more than it, if no more is asked for; a second crop takes from each layer again. transformers 5.17
    passes a tensor in assisted decoding."""
    cache, undisturbed = (uneven(TurboQuantCache, **options) for _ in range(2))
    for layer in range(2):
        cache.update(*states(9, 2, tokens=tokens), layer)
    cache.crop(crop)
    undisturbed.crop(min(0, crop + tokens))
    for _ in range(2):
        for ours, theirs in zip(cache.layers, undisturbed.layers, strict=True):
            assert int(ours.get_seq_length()) == int(theirs.get_seq_length())
            assert_same(*((layer.keys, layer.values) for layer in (ours, theirs)))
        cache.crop(-3)
        undisturbed.crop(-3)


@pytest.mark.parametrize("count", [(200, 400, 600), (400, 200, 600)])
@pytest.mark.parametrize("after", [1, 2])
def test_layers_that_grow_are_taken_back_by_the_call_that_was_interrupted(count, after):
    cache = uneven(TurboQuantCache, count)
    for layer in range(after):
        cache.update(*states(9, 2, tokens=20), layer)
    cache.crop(-20)
    assert lengths(cache) == list(count)


@kinds
def test_a_complete_call_that_updates_another_layer_last_is_not_taken_for_interrupted(options):
    """Loop models (Dory) update the first layers again, after the last one."""
    cache = uneven(TurboQuantCache, (300,) * 3, **options)
    for layer in (0, 2, 1):
        cache.update(*states(9, 2, tokens=20), layer)
    cache.crop(-2)
    assert lengths(cache) == [318] * 3


@pytest.mark.parametrize("copy", [False, True])
def test_layers_that_were_evened_out_are_not_taken_for_interrupted_again(copy):
    cache = uneven(TurboQuantCache, (300, 300, 300))
    cache.update(*states(9, 2, tokens=20), 0)
    if copy:
        cache = cache.__deepcopy__({})
    cache.crop(0)
    cache.crop(-1)
    assert lengths(cache) == [299] * 3


def test_a_compiled_step_that_an_exception_ended_is_taken_back():
    """Nothing notes its updates: it leaves the first layers one token ahead, with counts on the device."""
    cache = uneven(TurboQuantCache, (300, 300, 300), max_cache_len=400)
    cache.layers[0].update(*states(9, 2, tokens=1))
    assert lengths(cache) == [301, 300, 300]
    cache.crop(0)
    assert lengths(cache) == [300, 300, 300]


@pytest.mark.parametrize("limit", [None, 600])
def test_prompt_lookup_on_pruned_layers_answers_as_steps_do(limit):
    """Layers are pruned in the call of the prompt, by the same tokens whatever candidates come with it (PyramidKV)."""
    model = build("llama", attention="turboquant")
    ids = token_ids(1, 40).repeat(1, 10)
    kept, steps, answers = (350, 200), [], []

    def prune(module, args, kwargs, output):
        layer = kwargs[CACHE_NAME].layers[module.layer_idx]
        if output[0].shape[1] >= 400:
            layer.keys, layer.values = (
                torch.cat([x[:, :, : kept[module.layer_idx]], x[:, :, 350:]], 2) for x in (layer.keys, layer.values)
            )
        elif module.layer_idx == 0:
            steps.append(output[0].shape[1])

    hooks = [block.self_attn.register_forward_hook(prune, with_kwargs=True) for block in model.model.layers]
    for options in ({}, {"prompt_lookup_num_tokens": 3}):
        cache = TurboQuantCache(model.config, "k8v4", max_cache_len=limit)
        generate = dict(max_new_tokens=12, do_sample=False, **as_input(cache), disable_compile=True)
        answers.append(model.generate(ids, **generate, **options))
        assert lengths(cache) == [count + 61 for count in kept]
    for hook in hooks:
        hook.remove()
    assert torch.equal(*answers) and max(steps) > 1


@torch.no_grad()
@pytest.mark.parametrize("skip_layers", [(0,), (-1,)])
@pytest.mark.parametrize("empty", ["reset", "crop"])
def test_the_first_call_after_an_emptied_cache_is_none_of_drafts(empty, skip_layers):
    """Layers agree on the rows of a call of 2 to 16 tokens: those of a prompt, not of a step with drafts."""
    model = build("llama", attention="turboquant")
    ids = token_ids(1, 40)
    cache = TurboQuantCache(model.config, max_cache_len=200, skip_layers=skip_layers)
    cache.activate_past_recording()
    model(ids, **as_input(cache))
    cache.reset() if empty == "reset" else cache.crop(-40)
    found = model(ids[:, :5], **as_input(cache)).logits
    torch.testing.assert_close(found, model(ids[:, :5], use_cache=False).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not hasattr(cache_utils, BOTH), reason="transformers lacks it")
def test_layers_whose_keys_transformers_keeps_are_refused():
    """Convolutions beside keys, preallocated (Inkling): transformers' `crop` shortens the convolution states only."""
    cache = TurboQuantCache(llama_config(2), max_cache_len=64)
    cache.layers[1] = getattr(cache_utils, BOTH)(64)
    cache.activate_past_recording()
    for index in range(2):
        cache.update(*states(1, 2, tokens=9), index)
    with pytest.raises(ValueError, match=f"layer 1, a {BOTH}: .* none of its keys"):
        cache.crop(-2)
    assert lengths(cache) == [9, 9]


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 400}, {"skip_layers": (0, 1)}], ids=str)
def test_layers_that_the_model_does_not_have_are_not_taken_for_interrupted(options):
    """A model that was cut off, or whose last layers have no attention: `crop` does what `DynamicCache` does."""
    model = build("llama", num_hidden_layers=4, attention="turboquant")
    model.model.layers = model.model.layers[:2]
    ids = token_ids(1, 40).repeat(1, 5)
    cache, answers = TurboQuantCache(model.config, "k8v4", **options), []
    model(ids, **as_input(cache))
    for tokens in (-20, 0, -3):
        cache.crop(tokens)
        model(ids[:, :1], **as_input(cache))
    assert lengths(cache) == [180, 180, 0, 0]
    for candidates in (None, 4):
        cache = TurboQuantCache(model.config, "k8v4", **options)
        generate = dict(max_new_tokens=12, do_sample=False, **as_input(cache), disable_compile=True)
        answers.append(model.generate(ids, **generate, prompt_lookup_num_tokens=candidates))
    assert torch.equal(*answers)


@kinds
def test_a_first_call_that_an_exception_ended_is_taken_back_or_named(options):
    cache = TurboQuantCache(llama_config(3), **options)

    def call(tokens: int, layers: int = 3) -> None:
        for layer in range(layers):
            cache.update(*states(layer, 2, tokens=tokens), layer)

    for crop, held in ((0, [0, 0, 0]), (-20, [280, 280, 0])):
        call(300, layers=2)
        cache.crop(crop)
        assert lengths(cache) == held
    with pytest.raises(ValueError, match="Layer 2 held no tokens .* Make a new cache, and pass the whole"):
        call(20)
    for empty in (lambda: cache.crop(-1000), cache.reset)[: 1 if "skip_layers" in options else 2]:
        empty()  # `reset` of transformers 5.17 keeps the rows of its layers
        call(20)
        call(1)
        assert lengths(cache) == [21, 21, 21]
