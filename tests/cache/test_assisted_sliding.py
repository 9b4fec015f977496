"""Drafts in `graph_decoding` beside sliding layers, which are rings meanwhile: nothing is left of a rejected draft.

Without a GPU the operations of a step are recorded and done again, see `recorded_graph`.
"""

from functools import lru_cache
from itertools import product

import pytest
import torch
from transformers import DynamicCache, MistralConfig

from tests.cache.test_assisted import drafts
from tests.support.helpers import compile_config, every_pair, quick_of, slow
from tests.support.recorded_graph import RecordedGraph
from tests.support.tiny_models import _SIZES, build, dense_attention, noisy, random_weights, token_ids
from tq_hf import TurboQuantCache, graph_decoding
from tq_hf.compat import as_input
from tq_hf.graph_decoding.loop import latest_steps

pytestmark = [
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled:UserWarning"),  # inductor, of gpt-oss's router
    pytest.mark.filterwarnings("ignore:.*No layer of this MistralConfig is compressed"),
]

ROOM, NEW, DRAFTS = 320, 20, 4
WAYS = pytest.mark.parametrize("way", ["lookup", "assistant"])


@lru_cache
def models(name: str, window: int, device: str = "cpu", **changes: int):
    """A model with sliding layers and an assistant, some of whose drafts are right."""
    if name == "mistral":
        model = random_weights(MistralConfig(**_SIZES, sliding_window=window))
    else:
        model = build(name, sliding_window=window, **changes)
    model = model.to(device)
    assistant = noisy(model, 0.03)
    for each in (model, assistant):
        each.set_attn_implementation("turboquant")
    assistant.generation_config.num_assistant_tokens = DRAFTS
    return model, assistant


def prompt(model, tokens: int) -> torch.Tensor:
    """`[1, tokens]`, whose second half begins like the first."""
    ids = token_ids(1, tokens, seed=tokens)
    ids[:, tokens // 2 :] = ids[:, : (tokens + 1) // 2].clone()
    return ids.to(model.device)


def conversation(model, ids: torch.Tensor, cache=None, turns: int = 2, pads: int = 0, **options):
    """Greedy tokens of some turns on one cache, and the cache."""
    cache = cache or TurboQuantCache(model.config, residual_length=10**4, max_cache_len=ROOM)
    mask, more = torch.ones_like(ids), ids[:, :7]
    mask[:, :pads] = 0
    options = dict(do_sample=False, max_new_tokens=NEW, eos_token_id=None, custom_generate=graph_decoding) | options
    for _ in range(turns):
        ids = model.generate(ids, attention_mask=mask, **as_input(cache), **options)
        ids = torch.cat([ids, more], dim=1)
        mask = torch.cat([mask, mask.new_ones(1, ids.shape[1] - mask.shape[1])], dim=1)
    return ids, cache


@lru_cache
def plain(model, tokens: int, turns: int = 2, pads: int = 0):
    """A conversation without drafts, which tests compare with and leave as it is."""
    return conversation(model, prompt(model, tokens), turns=turns, pads=pads)


def assert_same_windows(cache, other) -> None:
    """The windows hold the same tokens. The first row of a full window is never read again."""
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        if mine.keys is None:  # it reads the keys of another layer (Gemma 3n)
            continue
        assert int(mine.get_seq_length()) == int(theirs.get_seq_length())
        if mine.is_sliding:
            held, expected = (
                {name: x[:, :, 1 - layer.sliding_window :] for name, x in layer.state()[1].items()}
                for layer in (mine, theirs)
            )
            close = 1e-2 if mine.keys.is_cuda else 1e-4
            torch.testing.assert_close(held, expected, atol=close, rtol=close)


def check(model, tokens: int, pads: int = 0, **options) -> TurboQuantCache:
    """Tokens and windows are those of plain decoding. Returns the cache of drafts."""
    expected, other = plain(model, tokens, pads=pads)
    found, cache = conversation(model, prompt(model, tokens), pads=pads, **options)
    assert torch.equal(found, expected)
    assert_same_windows(cache, other)
    return cache


FAMILIES = ("mistral", "gemma2", "gemma3", "gemma3n", "gemma4", "gpt_oss")


@pytest.mark.parametrize(
    ("name", "tokens", "way", "pads"),
    quick_of(
        ((*case, pads) for case in every_pair(FAMILIES, (90, 140), ("lookup", "assistant")) for pads in (0, 3)),
        *zip(FAMILIES, (90, 90) * 3, ("lookup", "assistant") * 3, [0] * 6, strict=True),
        ("gemma3", 140, "assistant", 0),
        ("gpt_oss", 140, "lookup", 0),
    ),
)
def test_tokens_and_windows_are_those_of_plain_decoding(device, name, tokens, way, pads) -> None:
    model, assistant = models(name, 96, device)
    cache = check(model, tokens, pads, **drafts((model, assistant), way))
    graph = latest_steps[cache].graph
    assert graph is not None and (not isinstance(graph, RecordedGraph) or graph.replays > 1)


@pytest.mark.parametrize(
    ("size", "number", "way"),
    quick_of(
        every_pair(((3, 2), (3, 30), (24, 21), (24, 60)), (1, 15), ("lookup", "assistant")),
        *[((3, 2), 1, "lookup"), ((3, 30), 15, "lookup"), ((24, 21), 15, "assistant"), ((24, 60), 1, "assistant")],
    ),
)
def test_windows_may_be_smaller_than_a_step(device, size, number, way) -> None:
    """Then a step overwrites more rows than the window has, and its first queries do not see its first rows."""
    window, tokens = size
    model, assistant = models("gemma3", window, device)
    options = dict(prompt_lookup_num_tokens=number) if way == "lookup" else dict(assistant_model=assistant)
    assistant.generation_config.num_assistant_tokens = number
    check(model, tokens, tokens // 20, **options)
    assistant.generation_config.num_assistant_tokens = DRAFTS


@pytest.mark.parametrize(
    ("size", "attention", "way"), every_pair(((24, ROOM), (83, 88)), ("turboquant", "eager"), ("lookup", "assistant"))
)
def test_tokens_are_those_of_a_dynamic_cache(size, attention, way) -> None:
    """Also with masks that are added to logits, and with rings of as many rows as full attention has."""
    window, room = size
    model, assistant = models("gemma2", window)
    ids = prompt(model, 64)
    options = dict(do_sample=False, max_new_tokens=NEW, eos_token_id=None)
    model.set_attn_implementation(dense_attention("gemma2"))
    expected = model.generate(ids, **as_input(DynamicCache(config=model.config)), **options)
    model.set_attn_implementation(attention)
    cache = TurboQuantCache(model.config, residual_length=10**4, max_cache_len=room)
    found, _ = conversation(model, ids, cache, turns=1, **drafts((model, assistant), way))
    model.set_attn_implementation("turboquant")
    assert torch.equal(found[:, : 64 + NEW], expected)


@WAYS
def test_a_model_without_sliding_layers_takes_an_assistant_with_them_and_the_other_way_round(device, way) -> None:
    sliding, full = models("gemma3", 24, device)[0], build("llama").to(device)
    full.set_attn_implementation("turboquant")
    for model, assistant in ((sliding, full), (full, sliding)):
        check(model, 60, **drafts((model, assistant), way))


SECOND = ({}, {"custom_generate": None}, {"prompt_lookup_num_tokens": 9})


@pytest.mark.parametrize(
    ("second", "way"),
    quick_of(product(SECOND, ("lookup", "assistant")), *zip(SECOND, ("assistant", "lookup", "assistant"), strict=True)),
)
def test_a_cache_goes_on_in_every_way_after_drafts(device, second, way, tmp_path) -> None:
    """The windows are in order after each call: for other loops, in a file, and with one token taken back."""
    model, assistant = models("gemma3", 24, device)
    ids, options = prompt(model, 60), drafts((model, assistant), way)
    expected, _ = plain(model, 60, turns=3)
    found, cache = conversation(model, ids, turns=1, **options)
    cache.save(tmp_path / "cache.safetensors", model)
    loaded = TurboQuantCache.load(tmp_path / "cache.safetensors", model)
    cache.crop(-1)  # a file lacks the first row of a full window, which this needs
    for held in (cache, loaded):
        answer, _ = conversation(model, found, held, turns=1, **second)
        answer, _ = conversation(model, answer, held, turns=1, **options)
        assert torch.equal(answer, expected)


@pytest.mark.parametrize("way", ["lookup", slow("assistant")])
def test_steps_over_rings_are_compiled_without_a_break(way) -> None:
    model, assistant = models("gemma3", 24)
    expected, _ = plain(model, 60, turns=1)
    torch._dynamo.reset()
    options = dict(compile_config=compile_config(), **drafts((model, assistant), way))
    found, _ = conversation(model, prompt(model, 60), turns=1, **options)
    assert torch.equal(found, expected)


def test_only_drafts_make_windows_larger() -> None:
    model, _ = models("gemma3", 24)
    _, other = plain(model, 60)
    _, cache = conversation(model, prompt(model, 60), prompt_lookup_num_tokens=DRAFTS)
    rows = [layer.keys.shape[2] for layer in other.layers if layer.is_sliding]
    assert rows == [24] * len(rows)
    layers = [layer for layer in cache.layers if layer.is_sliding]
    assert [layer.keys.shape[2] for layer in layers] == [24 + DRAFTS + 1] * len(rows)
    row = 2 * layers[0].keys[:, :, :1].numel() * layers[0].keys.element_size()
    more = cache.memory_footprint().total - other.memory_footprint().total
    assert more == (DRAFTS + 1) * row * len(rows)


@pytest.mark.parametrize(("tokens", "layer", "way"), every_pair((21, 60), (1, 2), ("lookup", "assistant")))
def test_a_step_that_an_exception_ended_is_taken_back(tokens, layer, way) -> None:
    """The first layers have its tokens, the others do not; and rows beyond the window are kept for that crop."""
    model, assistant = models("gemma3", 24, num_hidden_layers=3)
    ids, options = prompt(model, tokens), drafts((model, assistant), way)
    expected, other = plain(model, tokens, turns=1)
    cache = TurboQuantCache(model.config, residual_length=10**4, max_cache_len=ROOM)
    calls = []

    def interrupt(*_: object) -> None:
        calls.append(None)
        if len(calls) == 4:
            raise KeyboardInterrupt

    hook = model.model.layers[layer].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        conversation(model, ids, cache, turns=1, **options)
    hook.remove()
    cache.crop(0)
    lengths = {int(each.get_seq_length()) for each in cache.layers}
    assert len(lengths) == 1
    held = lengths.pop()
    rest = dict(do_sample=False, max_new_tokens=tokens + NEW - held - 1, eos_token_id=None)
    answer = model.generate(expected[:, : held + 1], **as_input(cache), **rest, custom_generate=graph_decoding)
    assert tokens < held < tokens + NEW and torch.equal(answer, expected[:, : tokens + NEW])
    assert_same_windows(cache, other)


@pytest.mark.parametrize(
    ("name", "way"),
    [("gpt_oss", "lookup"), ("gemma3", "assistant"), slow("gpt_oss", "assistant"), slow("gemma3", "lookup")],
)
def test_a_stream_that_ends_early_leaves_what_was_streamed(name, way, device, tmp_path) -> None:
    """Nothing of a step that the streamer has not had, nor rows beyond a window once another call has come."""
    model, assistant = models(name, 24, device)
    ids, options, streamer = prompt(model, 60), drafts((model, assistant), way), Interrupted()
    cache = TurboQuantCache(model.config, residual_length=10**4, max_cache_len=ROOM)
    with pytest.raises(StopIteration):
        conversation(model, ids, cache, turns=1, streamer=streamer, **options)
    streamed = torch.cat(streamer.had)[None].to(device)
    assert int(cache.get_seq_length()) == streamed.shape[1] - 1
    cache.save(tmp_path / "cache.safetensors", model)
    answers = []
    for held in (cache, TurboQuantCache.load(tmp_path / "cache.safetensors", model), None):
        ids, held = conversation(model, torch.cat([streamed, streamed[:, :30]], dim=1), held, turns=1)
        held.crop(-1)
        held.save(tmp_path / "cache.safetensors", model)
        TurboQuantCache.load(tmp_path / "cache.safetensors", model)
        answers.append(conversation(model, ids, held, turns=1, **options)[0])
    assert torch.equal(answers[0], answers[2]) and torch.equal(answers[1], answers[2])


class Interrupted:
    """A streamer that ends `generate()` when it has had some tokens."""

    def __init__(self) -> None:
        self.had: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        self.had.append(value.reshape(-1).cpu())
        if len(self.had) > 4:
            raise StopIteration

    def end(self) -> None: ...
