"""generate() on a compressed cache, in every way transformers can call it, on every family."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import cycle

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from tests.support.helpers import every_pair
from tests.support.saving_cases import model_named
from tests.support.tiny_models import CONFIGS, VOCAB, build, dense_attention, noisy
from tq_hf import TurboQuantCache, TurboQuantLayer
from tq_hf.compat import as_input
from tq_hf.ops import dispatch

NEW_TOKENS = 8
EVERYTHING_DENSE = dict(residual_length=10**6)
EVERYTHING_PACKED = dict(residual_length=0, sink_tokens=0)


def prompts(batch: int, length: int, padding: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """Random prompts, the first rows left-padded by `padding` tokens."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, VOCAB, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(padding):
        ids[row, :pad] = 0
        mask[row, :pad] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: PreTrainedModel, cache: Cache, inputs: dict[str, torch.Tensor], **options) -> torch.Tensor:
    """Token ids of a generation, greedy unless `options` say otherwise."""
    options = dict(do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS) | options
    return model.generate(**inputs, **as_input(cache), **options)


Scenario = Callable[[PreTrainedModel, Callable[[], Cache]], torch.Tensor]


def one_call(shape: tuple[int, int], padding: tuple[int, ...] = (), **options) -> Scenario:
    """A scenario of one call with prompts of this `shape`."""

    def scenario(model, make):
        torch.manual_seed(3)  # of samples
        return generate(model, make(), prompts(*shape, padding), **options)

    return scenario


PADDED = dict(shape=(3, 40), padding=(7, 0, 21))
ONE_CALL: dict[str, Scenario] = {
    "greedy": one_call((2, 40)),
    "sample": one_call((2, 40), do_sample=True, num_return_sequences=3),
    "beam": one_call((1, 40), num_beams=4),
    "beam_left_padded": one_call(**PADDED, num_beams=4),
    "left_padded": one_call(**PADDED),
    "chunked_prefill": one_call((2, 40), prefill_chunk_size=16),
    "chunked_left_padded": one_call(**PADDED, prefill_chunk_size=16),
}


def assisted(model, make):
    return generate(model, make(), prompts(1, 40), assistant_model=noisy(model))


def prompt_lookup(model, make):
    inputs = prompts(1, 20)
    inputs = {key: value.repeat(1, 3) for key, value in inputs.items()}
    return generate(model, make(), inputs, prompt_lookup_num_tokens=3)


def multi_turn(model, make):
    cache = make()
    ids = generate(model, cache, prompts(2, 40))
    ids = torch.cat([ids, prompts(2, 25)["input_ids"]], dim=1)
    return generate(model, cache, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def copied_prefix(model, make):
    prefix = make()
    ids = prompts(1, 40)["input_ids"]
    with torch.no_grad():
        model(ids, **as_input(prefix))
    outputs = []
    for length in (5, 9):
        full = torch.cat([ids, prompts(1, length)["input_ids"]], dim=1)
        inputs = {"input_ids": full, "attention_mask": torch.ones_like(full)}
        outputs.append(generate(model, copy.deepcopy(prefix), inputs)[0])
    return torch.nn.utils.rnn.pad_sequence(outputs, batch_first=True)


SCENARIOS = ONE_CALL | {each.__name__: each for each in (assisted, prompt_lookup, multi_turn, copied_prefix)}


@pytest.mark.parametrize(("name", "scenario", "attention"), every_pair(CONFIGS, SCENARIOS, ("turboquant", "dense")))
def test_with_everything_dense_tokens_are_those_of_dynamic_cache(name, scenario, attention):
    if name == "qwen3_next" and scenario in ("assisted", "prompt_lookup"):
        pytest.skip("transformers refuses assisted generation on models with linear attention")
    model = model_named(name, attention=dense_attention(name))
    expected = SCENARIOS[scenario](model, lambda: DynamicCache(config=model.config))
    assert expected[:, -NEW_TOKENS:].unique().numel() > 3, "a model that repeats itself shows nothing"
    weights = copy.deepcopy(model.state_dict())
    model.set_attn_implementation(attention if attention == "turboquant" else dense_attention(name))
    actual = SCENARIOS[scenario](model, lambda: TurboQuantCache(model.config, **EVERYTHING_DENSE))
    assert torch.equal(actual, expected)
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())


def decode_logits(
    model: PreTrainedModel, cache: Cache, inputs: dict[str, torch.Tensor], steps: int = 4
) -> torch.Tensor:
    """Logits of a prefill's last token and of `steps` fixed continuation tokens, `[1 + steps, B, V]`."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    following = prompts(ids.shape[0], steps)["input_ids"]
    logits = []
    with torch.no_grad():
        for step in range(steps + 1):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            out = model(ids, attention_mask=mask, position_ids=positions, **as_input(cache))
            logits.append(out.logits[:, -1])
            if step < steps:
                ids = following[:, step : step + 1]
                mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return torch.stack(logits)


def packed_layers(cache: TurboQuantCache) -> list[TurboQuantLayer]:
    return [layer for layer in cache.layers if isinstance(layer, TurboQuantLayer)]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.isfinite().all()
    assert (actual - expected).abs().max() <= 1e-4 * max(1, expected.abs().max())


def forward(model: PreTrainedModel, cache: Cache, mask: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Logits `[B, new_tokens, V]` of fixed tokens after those in the cache; `mask` covers both."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -new_tokens:]
    ids = prompts(mask.shape[0], new_tokens)["input_ids"]
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=positions, **as_input(cache)).logits


@pytest.mark.parametrize(("name", "padding"), zip(CONFIGS, cycle([(37, 0, 150), (0, 0, 0)]), strict=False), ids=str)
def test_both_ways_of_reading_a_packed_cache_agree(name, padding):
    """One packed cache, read by the attention function and dequantized, after each kind of change."""
    model = model_named(name, attention="turboquant")
    cache = TurboQuantCache(model.config, **EVERYTHING_PACKED)
    mask = prompts(3, 300, padding)["attention_mask"]
    forward(model, cache, mask, 300)
    assert all(layer.store.counts.blocks == 2 for layer in packed_layers(cache))
    length, rows = 300, torch.arange(3)
    crop, order = 70, torch.tensor([2, 0, 0])  # 70 tokens back: into the second block
    for change, new_tokens in ((None, 1), (None, 9), ("crop", 1), ("reorder", 1), (None, 160), (None, 1)):
        if change == "crop":
            if any(cache.is_sliding) or any(cache.is_linear):
                continue  # transformers cannot roll these layers back without having recorded their past
            cache.crop(-crop)
            length -= crop
        elif change == "reorder":
            cache.reorder_cache(order)
            rows = rows[order]
        length += new_tokens
        mask = torch.ones(3, length, dtype=torch.long)
        mask[:, :300] = prompts(3, 300, padding)["attention_mask"][rows][:, :length]
        copied = copy.deepcopy(cache)
        model.set_attn_implementation(dense_attention(name))
        expected = forward(model, copied, mask, new_tokens)
        model.set_attn_implementation("turboquant")
        assert_close(forward(model, cache, mask, new_tokens), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_cache_is_close_to_an_exact_one_and_not_equal(name):
    model = model_named(name, attention="turboquant")
    exact = decode_logits(model, DynamicCache(config=model.config), prompts(2, 300))[1:]
    errors = []
    for preset in ("k8v4", "2bit_nc"):
        cache = TurboQuantCache(model.config, preset, **EVERYTHING_PACKED)
        errors.append(((decode_logits(model, cache, prompts(2, 300))[1:] - exact).norm() / exact.norm()).item())
    assert 1e-5 < errors[0] < 0.6 * errors[1], errors


def test_a_cache_serves_a_model_that_changes_its_attention_between_turns():
    """With prompts of which no channel is so near a boundary that rounding decides its code."""
    model = model_named("llama")
    logits = []
    for attention in (("turboquant",) * 3, ("sdpa", "turboquant", "sdpa"), ("turboquant", "eager", "turboquant")):
        cache = TurboQuantCache(model.config, **EVERYTHING_PACKED)
        for turn, implementation in enumerate(attention):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                out = model(prompts(1, 151 + turn)["input_ids"], **as_input(cache))
        logits.append(out.logits)
    assert_close(logits[1], logits[0])
    assert_close(logits[2], logits[0])


@pytest.mark.parametrize(
    ("scenario", "skip_layers"),
    zip(("greedy", "left_padded", "chunked_left_padded", "multi_turn", "beam", "assisted"), cycle([(0,), (-1,)])),
)
def test_preallocated_layers_that_are_not_compressed_go_with_those_that_are(scenario, skip_layers):
    model = model_named("llama", attention="sdpa")
    expected = SCENARIOS[scenario](model, lambda: DynamicCache(config=model.config))
    options = dict(max_cache_len=120, skip_layers=skip_layers, **EVERYTHING_DENSE)
    for attention in ("turboquant", "sdpa"):
        model.set_attn_implementation(attention)
        assert torch.equal(SCENARIOS[scenario](model, lambda: TurboQuantCache(model.config, **options)), expected), (
            attention
        )


def test_operations_on_preallocated_layers_that_are_not_compressed_are_those_of_growing_ones():
    model = model_named("llama", attention="turboquant")
    logits = []
    for room in (None, 400):
        cache = TurboQuantCache(model.config, max_cache_len=room, skip_layers=(0,), **EVERYTHING_PACKED)
        with torch.no_grad():
            model(prompts(2, 300)["input_ids"], **as_input(cache))
            with pytest.raises(ValueError, match="negative"):
                cache.crop(30)
            assert cache.get_seq_length() == 300
            cache.crop(-30)
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([3, 0, 1]))
            cache.reorder_cache(torch.tensor([1, 1, 2]))
            assert cache.batch_size == 3
            model(prompts(3, 20)["input_ids"], **as_input(cache))
            logits.append(model(prompts(3, 1)["input_ids"], **as_input(cache)).logits)
    assert_close(*logits)


def test_linear_layers_keep_the_stock_class_and_sliding_ones_its_place():
    for name in ("gemma3", "gpt_oss", "qwen3_next"):
        config = CONFIGS[name]()
        ours, stock = TurboQuantCache(config).layers, DynamicCache(config=config).layers
        kinds = {(type(a).__name__, type(b).__name__) for a, b in zip(ours, stock, strict=True)}
        assert ("TurboQuantLayer", "DynamicLayer") in kinds
        others = {pair for pair in kinds if pair[0] != "TurboQuantLayer"}
        assert all(a == b or (a, b) == ("SlidingLayer", "DynamicSlidingWindowLayer") for a, b in others)


def test_a_reset_cache_serves_another_batch_size():
    model = model_named("llama", attention="turboquant")
    cache = TurboQuantCache(model.config, **EVERYTHING_PACKED)
    generate(model, cache, prompts(2, 140))
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.memory_footprint().total == 0
    again = generate(model, cache, prompts(3, 140))
    assert torch.equal(again, generate(model, TurboQuantCache(model.config, **EVERYTHING_PACKED), prompts(3, 140)))


@pytest.mark.parametrize("preallocated", [None, 400])
def test_a_copy_made_in_inference_mode_goes_on_like_its_original(preallocated):
    model = model_named("llama", attention="turboquant")
    options = dict(max_cache_len=preallocated, skip_layers=(1,))
    cache = TurboQuantCache(model.config, **options, **EVERYTHING_PACKED)
    ids = prompts(2, 300)["input_ids"]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.inference_mode():
        for start in range(0, 260, 130):
            model(ids[:, start : start + 130], **as_input(cache))
        cache.reorder_cache(torch.tensor([0, 1]))
        cache.crop(-30)  # into the second block
        copied = copy.deepcopy(cache)
        inside = generate(model, copy.deepcopy(cache), inputs)
    outside = generate(model, copied, inputs)
    assert torch.equal(inside, outside) and torch.equal(outside, generate(model, cache, inputs))


def test_offloading_between_steps_changes_nothing():
    """On a CPU both moves stay in place; what is tested is that a store and a view taken before survive them."""
    model = model_named("llama", attention="turboquant")
    outputs = []
    for offloaded in (False, True):
        cache = TurboQuantCache(model.config, **EVERYTHING_PACKED)
        ids = prompts(2, 300)["input_ids"]
        for start in range(0, 300, 60):
            with torch.no_grad():
                out = model(ids[:, start : start + 60], **as_input(cache))
            if offloaded:
                for layer in packed_layers(cache):
                    view = layer.store.view()
                    layer.offload()
                    layer.prefetch()
                    assert all(map(torch.equal, dispatch.dense(view), dispatch.dense(layer.store.view())))
                    assert view.length == start + 60
        outputs.append(out.logits)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("preallocated", [None, 800])
def test_nothing_keeps_the_prompt_alive_after_a_forward(preallocated, monkeypatch):
    alive = []
    update = TurboQuantLayer.update

    def watched(self, keys, values, *args, **kwargs):
        alive.extend(weakref.ref(tensor) for tensor in (keys, values))
        return update(self, keys, values, *args, **kwargs)

    monkeypatch.setattr(TurboQuantLayer, "update", watched)
    model = model_named("llama", attention="turboquant")
    cache = TurboQuantCache(model.config, max_cache_len=preallocated, **EVERYTHING_PACKED)
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            for tokens in (400, 200, 1):
                model(prompts(1, tokens)["input_ids"], **as_input(cache))
        assert len(alive) == 3 * 2 * len(cache.layers)
        assert not [reference for reference in alive if reference() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("preallocated", [None, 800])
def test_a_cache_filled_with_gradients_enabled_holds_no_graph(preallocated):
    model = model_named("llama", attention="turboquant")
    cache = TurboQuantCache(model.config, max_cache_len=preallocated, **EVERYTHING_PACKED)
    with torch.enable_grad():
        for tokens in (300, 20, 1):
            model(prompts(1, tokens)["input_ids"], **as_input(cache))
    tensors = [t for layer in cache.layers for kind in layer.store.by_kind().values() for t in kind]
    assert not any(tensor.requires_grad for tensor in tensors)
    copy.deepcopy(cache)


def test_a_preallocated_cache_is_read_with_additive_masks():
    """As a growing one is; the room after its tokens stays unseen, whatever the mask says of it."""
    model = model_named("llama", attention="turboquant")
    steps = []
    for room, keys in ((None, 202), (400, 400)):
        cache = TurboQuantCache(model.config, max_cache_len=room, **EVERYTHING_PACKED)
        mask = torch.zeros(1, 1, 1, keys)
        mask[..., 50:60] = -torch.inf
        with torch.no_grad():
            model(prompts(1, 200)["input_ids"], **as_input(cache))
            model(prompts(1, 1)["input_ids"], **as_input(cache))
            steps.append(model(prompts(1, 1)["input_ids"], attention_mask=mask, **as_input(cache)).logits)
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-4, atol=1e-4)


@pytest.fixture
def filled_with_nan() -> Iterator[Callable[[], None]]:
    """A function from whose call on torch fills memory that is allocated with NaN, or with the largest number."""
    was = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    yield lambda: torch.use_deterministic_algorithms(True, warn_only=True)
    torch.use_deterministic_algorithms(was[0])
    torch.utils.deterministic.fill_uninitialized_memory = was[1]


@pytest.mark.parametrize("room", [None, 300], ids=["growing", "preallocated"])
@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
def test_memory_that_nobody_filled_is_not_read(attention, room, filled_with_nan):
    model = build("llama")
    model.set_attn_implementation(attention)

    def tokens(length: int) -> torch.Tensor:
        cache = TurboQuantCache(model.config, max_cache_len=room, residual_length=0, sink_tokens=2)
        return generate(model, cache, prompts(2, length), max_new_tokens=40, disable_compile=True)

    lengths = (1, 100, 200)
    expected = [tokens(length) for length in lengths]
    filled_with_nan()
    assert torch.empty(1).isnan()
    assert all(torch.equal(tokens(length), once) for length, once in zip(lengths, expected, strict=True))
