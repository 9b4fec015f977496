"""Code that prunes a cache by assigning keys and values to its layers: the presses of kvpress, and their ways.

kvpress 0.5.5 asks for a transformers below 5.3, older than any that this package supports, and is installed without its
dependencies. Its hooks read two arguments that models no longer give them; here they are given.
"""

import importlib
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.support.helpers import (
    assert_same,
    assert_unchanged,
    every_pair,
    llama_config,
    relative_error,
    snapshot,
    states,
)
from tests.support.tiny_models import build, token_ids
from tq_hf import PRESETS, TurboQuantCache, graph_decoding
from tq_hf.compat import CACHE_NAME, as_input
from tq_hf.layers.dense import PreallocatedLayer, SlidingLayer
from tq_hf.ops import dispatch

PROMPT, KEPT, QUESTION = 700, 420, 20
RATIO = 1 - KEPT / PROMPT
IDS = token_ids(1, PROMPT + QUESTION + 3)


def by_score(kvpress):
    """A press that keeps in later caches the rows that it kept in the first one."""
    scores = {}

    class KeepsTheSameRows(kvpress.KnormPress):
        def score(self, module, *args):
            return scores.setdefault(module.layer_idx, super().score(module, *args))

    return KeepsTheSameRows(RATIO)


PRESSES = {
    "score": by_score,
    "thinning": lambda kvpress: kvpress.ThinKPress(0.1),
    "per_head": lambda kvpress: kvpress.AdaKVPress(by_score(kvpress)),
}


@pytest.fixture(scope="module")
def package():
    """kvpress. What it patches when it is imported, all attention functions, is restored."""
    functions = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("cachetools", "datasets", "fire"):  # of presses that are not used here
            if importlib.util.find_spec(name) is None:
                unused = dict(LRUCache=dict, cached=lambda *_, **__: lambda function: function, load_dataset=None)
                patch.setitem(sys.modules, name, SimpleNamespace(**unused))
        kvpress = pytest.importorskip("kvpress", reason="`pip install --no-deps kvpress`")
    ALL_ATTENTION_FUNCTIONS._local_mapping = functions
    return kvpress


@pytest.fixture
def kvpress(package, monkeypatch):
    """kvpress, whose hooks find the arguments that they read."""
    read = package.BasePress.forward_hook

    def hook(press, module, args, kwargs, output):
        names = {"past_key_values": kwargs[CACHE_NAME], "cache_position": kwargs["position_ids"][0]}
        return read(press, module, args, kwargs | names, output)

    monkeypatch.setattr(package.BasePress, "forward_hook", hook)
    return package


@pytest.fixture
def masking(kvpress, monkeypatch):
    """kvpress's patch of attention functions, which masks keys of single heads."""
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {})
    kvpress.attention_patch.patch_attention_functions()


@torch.no_grad()
def prefill(model, cache, press=None):
    """A prompt, pruned. Returns the rows that each layer holds."""
    with nullcontext() if press is None else press(model):
        model.model(IDS[:, :PROMPT], **as_input(cache))
    rows = [(layer.keys, layer.values) for layer in cache.layers]
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [keys.shape[2] for keys, _ in rows]
    return rows


@torch.no_grad()
def answer(model, cache):
    """Log-probabilities of a question and of three steps after it, at the positions they have in the whole text."""
    logits, start = [], PROMPT
    for tokens in (QUESTION, 1, 1, 1):
        new, positions = IDS[:, start : start + tokens], torch.arange(start, start + tokens)[None]
        logits.append(model(new, **as_input(cache), position_ids=positions).logits)
        start += tokens
    return torch.cat(logits, 1).double().log_softmax(-1)


@pytest.mark.parametrize("ours", [False, True])
def test_kvpress_by_itself_fails_with_every_cache(ours, package):
    """README says so. Once it runs, README may say that it does, and the names need not be given here."""
    model = build("llama")
    cache = TurboQuantCache(model.config) if ours else DynamicCache(config=model.config)
    with pytest.raises(KeyError, match="past_key_values|cache_position"):
        prefill(model, cache, PRESSES["score"](package))


def divergence(expected: torch.Tensor, actual: torch.Tensor) -> float:
    return (expected.exp() * (expected - actual)).sum(-1).mean().item()


@pytest.mark.parametrize(("kind", "attention", "limit"), every_pair(PRESSES, ("turboquant", "sdpa"), (None, 800)))
def test_a_press_prunes_as_on_a_dynamic_cache(kind, attention, limit, kvpress, masking):
    model, press = build("llama"), PRESSES[kind](kvpress)
    expected, divergences = [], []
    for pruning in (None, press):
        cache = DynamicCache(config=model.config)
        kept = prefill(model, cache, pruning)
        expected.append(answer(model, cache))
    model.set_attn_implementation(attention)
    for pruning, right in zip((None, press), expected, strict=True):
        cache = TurboQuantCache(model.config, "k8v4", max_cache_len=limit)
        rows = prefill(model, cache, pruning)
        held = cache.memory_footprint().total
        divergences.append(divergence(right, answer(model, cache)))
    assert divergences[1] < (2 if attention == "turboquant" else 3) * divergences[0] < 0.3 < divergence(*expected)
    for ours, theirs in zip(rows, kept, strict=True):
        assert [x.shape for x in ours] == [x.shape for x in theirs]
        assert relative_error(ours[0], theirs[0]) < 0.03 and relative_error(ours[1], theirs[1]) < 0.095
    of_these_rows = TurboQuantCache(model.config, "k8v4", max_cache_len=limit)
    for index, pair in enumerate(kept):
        of_these_rows.update(*pair, index)
    assert held == of_these_rows.memory_footprint().total


@pytest.mark.parametrize("limit, options", [(None, {}), (800, {}), (800, {"custom_generate": graph_decoding})])
@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
def test_generation_goes_on_after_a_pruned_prompt_as_on_a_dynamic_cache(attention, limit, options, kvpress):
    """Dense rows are equal, so must the tokens be, and what transformers makes of the length for their positions."""
    model, press, generated = build("llama"), PRESSES["score"](kvpress), []
    for ours in (False, True):
        cache = DynamicCache(config=model.config)
        if ours:
            model.set_attn_implementation(attention)
            cache = TurboQuantCache(model.config, residual_length=10**6, max_cache_len=limit)
        prefill(model, cache, press)
        own = options if ours else {}
        new = model.generate(IDS[:, : KEPT + 1], max_new_tokens=8, do_sample=False, **as_input(cache), **own)
        generated.append(new)
        assert int(cache.get_seq_length()) == KEPT + 8
    assert torch.equal(*generated)


@pytest.mark.parametrize("limit", [None, 800])
def test_a_hook_reads_the_prompt_as_it_came_and_nothing_holds_it_afterwards(limit, kvpress):
    model, read = build("llama"), {}

    class Zeros(kvpress.BasePress):
        def compress(self, module, hidden_states, keys, values, attentions, kwargs):
            read.setdefault(module.layer_idx, []).append((keys.clone(), values.clone()))
            keys.zero_()
            return read[module.layer_idx][-1]

    for attention in ("sdpa", "turboquant"):
        cache = DynamicCache(config=model.config)
        if attention == "turboquant":
            model.set_attn_implementation(attention)
            cache = TurboQuantCache(model.config, max_cache_len=limit)
        prefill(model, cache, Zeros())
    for right, ours in read.values():
        assert_same(ours, right)
    for layer, block in zip(cache.layers, model.model.layers, strict=True):
        assert layer.prompt is None and not block.self_attn._forward_hooks


def filled(limit, tokens=300, **options):
    cache = TurboQuantCache(llama_config(), max_cache_len=limit, **options)
    for layer in range(2):
        cache.update(*states(layer, 2, tokens=tokens), layer)
    return cache


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("limit", [None, 700])
@pytest.mark.parametrize("tokens", [0, 1, 3, 130, 299, 600])
def test_a_layer_holds_assigned_rows_as_those_of_a_prompt_and_goes_on(tokens, limit, balance):
    cache = TurboQuantCache(llama_config(), max_cache_len=limit, balance=balance)
    cache.update(*(x * torch.linspace(1, 40, 16) for x in states(1, 2, tokens=300)), 0)
    layer, (keys, values) = cache.layers[0], states(5, 2, tokens=tokens)
    addresses = [tensor.data_ptr() for tensor in layer.store.tensors.arguments()]
    layer.store.encode_deferred()
    scales = layer.store.blocks.channel_scales.map(torch.clone)
    layer.values = values
    assert layer.values is values and int(layer.get_seq_length()) == 300
    layer.keys = keys
    expected = TurboQuantCache(llama_config(), max_cache_len=limit, balance=balance)
    if balance:
        expected.layers[0].lazy_initialization(keys, values)
        expected.layers[0].store.set_scales(scales)
    expected.update(keys, values, 0)
    for more in (0, 1, 1, 20, 40, 1):
        for each in (cache, expected) if more else ():
            each.update(*states(6 + more, 2, tokens=more), 0)
        tokens += more
        assert int(layer.get_seq_length()) == tokens
        assert_same((layer.keys, layer.values), (expected.layers[0].keys, expected.layers[0].values))
    if limit is not None:
        assert addresses == [tensor.data_ptr() for tensor in layer.store.tensors.arguments()]


@pytest.mark.parametrize("limit", [None, 400])
@pytest.mark.parametrize(
    "keys, values, says",
    [
        (states(1, 2, tokens=9)[0], states(1, 2, tokens=8)[1], "must agree in batch, heads and tokens"),
        (states(1, 1, tokens=9)[0], states(1, 1, tokens=9)[1], "batch size 2, but was given keys with batch size 1"),
        (states(1, 2, 1, 9)[0], states(1, 2, 1, 9)[1], "number of KV heads 2, but was given"),
        (states(1, 2, tokens=9, dim=8)[0], states(1, 2, tokens=9)[1], "key head_dim 16, but was given"),
        (states(1, 2, tokens=9)[0].half(), states(1, 2, tokens=9)[1].half(), "dtype torch.float32, but was given"),
        (torch.zeros(0), torch.zeros(0), "must both have the shape"),
        (None, states(1, 2, tokens=9)[1], "`keys` of a compressed layer that holds 300 tokens was assigned None"),
    ],
)
def test_assigned_states_that_do_not_fit_are_refused_and_change_nothing(keys, values, says, limit):
    cache = filled(limit)
    layer = cache.layers[0]
    before = snapshot(layer.store)
    with pytest.raises(ValueError, match=says):
        layer.keys = keys
        layer.values = values
    assert_unchanged(layer.store, before)
    layer.keys, layer.values = layer.keys, layer.values
    assert int(layer.get_seq_length()) == 300


def test_more_rows_than_there_is_room_for_are_refused_and_change_nothing():
    cache = filled(400)
    before = snapshot(cache.layers[0].store)
    with pytest.raises(ValueError, match="prompt has 401 tokens and `max_cache_len` is 400"):
        cache.layers[0].keys, cache.layers[0].values = states(1, 2, tokens=401)
    assert_unchanged(cache.layers[0].store, before)


@pytest.mark.parametrize("limit", [None, 400])
@pytest.mark.parametrize("name, other", [("keys", "values"), ("values", "keys")])
def test_a_call_after_half_of_an_assignment_is_refused_and_changes_nothing(name, other, limit):
    cache = filled(limit)
    layer = cache.layers[0]
    before = snapshot(layer.store)
    setattr(layer, name, states(1, 2, tokens=9)[0])
    with pytest.raises(ValueError, match=f"`{name}` of a compressed layer were assigned, and `{other}` were not"):
        cache.update(*states(1, 2, tokens=1), 0)
    assert_unchanged(layer.store, before)
    cache.update(*states(1, 2, tokens=1), 0)
    assert int(layer.get_seq_length()) == 301


def exported(layer):
    """All that a layer holds, as in a file."""
    counts, tensors = layer.store.export()
    return counts, {name: tensor.clone() for name, tensor in tensors.items()}


def assert_holds(layer, expected):
    counts, tensors = layer.store.export()
    assert counts == expected[0] and tensors.keys() == expected[1].keys()
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, expected[1][name])] == []


@pytest.fixture
def encoded_blocks(monkeypatch):
    """First and last block, the latter excluded, of each call of the encoder."""
    calls, encode = [], dispatch.encode

    def counted(config, held, blocks, start, tokens=None):
        first, stop = tokens or (0, held[0].shape[2])
        calls.append((start, start + (stop - first) // 128))
        return encode(config, held, blocks, start, tokens)

    monkeypatch.setattr(dispatch, "encode", counted)
    return calls


@pytest.mark.parametrize("limit", [None, 1000])
@pytest.mark.parametrize("preset", ["k8v4", "4bit_nc", "2.5bit_nc"])
def test_an_answer_cut_off_by_assignment_is_one_cut_off_by_crop(preset, limit, encoded_blocks):
    """As kvpress' pipeline does after each question; 650 and 128 tokens: blocks that are cut, and pending ones."""
    cache, cropped = (filled(limit, 650, preset=preset) for _ in range(2))
    for turn, tokens in enumerate((20, 1, 128, 200, 60) * 2):
        for each in (cache, cropped):
            for layer in range(2):
                each.update(*states(turn, 2, tokens=tokens), layer)
        encoded_blocks.clear()
        for layer in cache.layers:
            layer.keys, layer.values = (x[:, :, :650] for x in (layer.keys, layer.values))
        assert encoded_blocks == []
        cropped.crop(-tokens)
        for ours, theirs in zip(cache.layers, cropped.layers, strict=True):
            assert_holds(ours, exported(theirs))


@pytest.mark.parametrize("limit", [None, 1000])
@pytest.mark.parametrize("tokens", [3, 100, 650])
def test_rows_assigned_back_change_nothing(tokens, limit):
    layer = filled(limit, tokens).layers[0]
    layer.update(*states(4, 2, tokens=90))
    before = exported(layer)
    layer.keys = layer.keys
    layer.values = layer.values
    assert_holds(layer, before)


@pytest.mark.parametrize("limit", [None, 1000])
@pytest.mark.parametrize("preset", PRESETS)
def test_only_blocks_of_other_rows_are_encoded_and_others_keep_their_codes(preset, limit, encoded_blocks):
    """Of 5 packed blocks: a key of one head of one sequence, values of another, and new tokens behind them."""
    layer = filled(limit, 800, preset=preset).layers[0]
    keys, values = layer.keys, layer.values
    held = exported(layer)[1]
    keys[0, 1, 4 + 128 + 7] += 1
    values[1, 0, 4 + 3 * 128] = values[1, 0, 4 + 3 * 128].flip(-1)
    more = states(7, 2, tokens=150)
    encoded_blocks.clear()
    layer.keys, layer.values = (torch.cat(pair, 2) for pair in zip((keys, values), more, strict=True))
    assert encoded_blocks == [(1, 2), (3, 4), (5, 6)]
    counts, now = exported(layer)
    assert counts.blocks == 6 and int(layer.get_seq_length()) == 950
    changed = {
        name: (now[name][:, :, :5] != held[name]).any(-1).nonzero().tolist()
        for name in ("key_words", "value_words", "scales")
    }
    assert changed == {"key_words": [[0, 1, 1]], "value_words": [[1, 0, 3]], "scales": [[0, 1, 1], [1, 0, 3]]}
    differing = ((now["scales"][:, :, :5] ^ held["scales"]) & 0xFFFF != 0).any(-1).nonzero().tolist()
    assert differing == [[0, 1, 1]]  # the scale of a key is in the low half
    anew = TurboQuantCache(llama_config(), preset, max_cache_len=limit).layers[0]
    anew.lazy_initialization(keys, values)
    anew.store.set_scales(layer.store.blocks.channel_scales)
    anew.update(*(torch.cat(pair, 2) for pair in zip((keys, values), more, strict=True)))
    for name, place in (("key_words", (0, 1, 1)), ("value_words", (1, 0, 3))):
        assert torch.equal(now[name][place], anew.store.export()[1][name][place])


@pytest.mark.parametrize("limit", [None, 1000])
def test_blocks_before_the_first_pruned_token_keep_their_codes(limit, encoded_blocks):
    layer = filled(limit, 800).layers[0]
    held = exported(layer)[1]
    encoded_blocks.clear()
    layer.keys, layer.values = (torch.cat([x[:, :, :300], x[:, :, 310:700]], 2) for x in (layer.keys, layer.values))
    counts, now = exported(layer)
    assert encoded_blocks == [(2, 4)] and counts == (4, 4, 174, 0)
    assert all(torch.equal(now[name][:, :, :2], held[name][:, :, :2]) for name in ("key_words", "scales"))


def test_pruning_the_end_by_assignment_releases_memory():
    layer, short = (filled(None, tokens).layers[0] for tokens in (5000, 900))
    layer.keys, layer.values = (x[:, :, :700] for x in (layer.keys, layer.values))
    short.crop(-200)
    ours, theirs = (sum(x.nbytes for group in each.by_kind().values() for x in group) for each in (layer, short))
    assert ours <= theirs


def test_states_are_not_assigned_to_an_empty_layer():
    layer = TurboQuantCache(llama_config()).layers[0]
    layer.keys = layer.values = None  # so the base class begins
    with pytest.raises(ValueError, match=r"that holds 0 tokens was assigned a tensor \[1, 2, 128, 16\]"):
        layer.keys = states(1)[0]
    assert layer.keys is None


def test_keys_masked_by_head_that_attention_did_not_get_are_refused(kvpress):
    """kvpress patches the attention functions that are registered when it is imported."""
    model = build("llama", attention="turboquant")
    cache = TurboQuantCache(model.config)
    prefill(model, cache, PRESSES["per_head"](kvpress))
    with pytest.raises(ValueError, match='kvpress patches "turboquant" if tq_hf is imported before it'):
        answer(model, cache)


@pytest.mark.parametrize("sliding", [False, True])
def test_rows_assigned_to_a_preallocated_layer_that_is_not_compressed_are_refused(sliding):
    layer = SlidingLayer(400, True) if sliding else PreallocatedLayer(400)
    layer.update(*states(1, 2, tokens=300))
    layer.keys, layer.values = (x[:, :, ::2] for x in (layer.keys, layer.values))
    for tokens in (1, 5):
        with pytest.raises(ValueError, match="has room for 400 tokens, and was assigned keys of 200"):
            layer.update(*states(1, 2, tokens=tokens))
