"""A second turn over compressed history: the buffered way, the switch, the mask that is left out; and what assisted
decoding must not change."""

import pytest
import torch
from test_tiled_attention import random, viewed
from tq_kernels.types import AttentionOptions
from transformers import DynamicCache

from tests.support.helpers import relative_error
from tests.support.tiny_models import build, token_ids
from tq_hf import PRESETS, TurboQuantCache, TurboQuantConfig
from tq_hf.attention import turboquant_mask
from tq_hf.compat import as_input
from tq_hf.ops import dispatch, reference
from tq_hf.ops.cpu import attention as cpu_attention
from tq_hf.ops.triton import blocks as triton_blocks
from tq_hf.ops.workspace import current_workspace, release_workspaces

CPU = torch.device("cpu")


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("queries", "past"), [(2, 300), (17, 263), (101, 420), (160, 300)])
def test_buffered_attention_is_attention_over_the_dequantized_history(preset, queries, past):
    config = TurboQuantConfig.from_preset(preset, residual_length=0)
    view = viewed(queries, config=config, past=past)
    assert view.host_counts.blocks >= 2
    query = random(1, 2, 6, queries, 16)
    actual = dispatch.buffered_attend(query, view, None, AttentionOptions(0.25))
    assert relative_error(actual, reference.attend(query, view, None, AttentionOptions(0.25))) < 1e-5


@pytest.mark.parametrize("kind", ["bool", "float", "expanded"])
def test_buffered_attention_takes_masks(kind):
    view = viewed(23)
    query = random(1, 2, 6, 23, 16)
    mask = torch.ones(2, 1, 23, view.length, dtype=torch.bool).tril(view.length - 23)
    mask[0, :, :, :37] = False
    if kind == "float":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    elif kind == "expanded":
        mask = mask[:, :, -1:, :].expand(-1, -1, 23, -1)
    actual = dispatch.buffered_attend(query, view, mask, AttentionOptions(0.25))
    assert relative_error(actual, reference.attend(query, view, mask, AttentionOptions(0.25))) < 1e-5


@pytest.mark.parametrize("kind", ["causal", "one mask", "a mask a head"])
def test_heads_that_no_fused_kernel_reads_in_groups_are_read_one_by_one(kind: str) -> None:
    query, keys, values = random(1, 2, 4, 9, 320), random(2, 2, 2, 30, 320), random(3, 2, 2, 30, 320)
    options = AttentionOptions(0.1)
    heads = {"causal": 0, "one mask": 1, "a mask a head": 4}[kind]
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(2, heads, 9, 30, generator=generator) > 0.3 if heads else None
    found = cpu_attention.dense_sdpa(query, (keys, values), mask, options)
    assert relative_error(found, reference.attend(query, (keys, values), mask, options)) < 1e-5


def test_one_buffer_serves_all_layers():
    release_workspaces()
    sizes = []
    for layer in range(3):
        view = viewed(40, past=600)
        dispatch.buffered_attend(random(layer, 2, 4, 40, 16), view, None, AttentionOptions(0.25))
        sizes.append(current_workspace(CPU).nbytes)
    dense = sum(shape.numel() for shape in view.tensors.dense_shapes(view.length)) * 4
    assert sizes[0] == sizes[-1]
    assert dense <= sizes[0] <= 2 * dense + (1 << 20)


def test_the_buffered_way_is_for_what_the_fused_kernel_does_not_take(monkeypatch):
    def way(fused: bool, buffered: bool) -> str:
        monkeypatch.setattr(triton_blocks, "supports_attend_many", lambda *_: fused)
        monkeypatch.setattr(dispatch, "supports_buffered_attend", lambda *_: buffered)
        dispatch.attend(random(1, 2, 4, 40, 16), view, None, AttentionOptions(0.25))
        return called.pop()

    view, called = viewed(40), []
    out = torch.zeros(2, 40, 4, 16)
    monkeypatch.setattr(triton_blocks, "attend_many", lambda *_: called.append("fused") or out)
    monkeypatch.setattr(dispatch, "buffered_attend", lambda *_: called.append("buffered") or out)
    monkeypatch.setattr(cpu_attention, "attend", lambda *_: called.append("reference") or out)
    assert way(fused=True, buffered=True) == "fused"
    assert way(fused=False, buffered=True) == "buffered"
    assert way(fused=False, buffered=False) == "reference"


@pytest.mark.parametrize("padding", [None, "none padded", "padded", "too short"])
def test_a_mask_is_left_out_where_it_would_only_say_causal(padding):
    attention_mask = None if padding is None else torch.ones(2, 50, dtype=torch.bool)
    if padding == "padded":
        attention_mask[0, :3] = False
    if padding == "too short":  # for transformers the tokens it leaves out are padding
        attention_mask = attention_mask[:, :40]
    options = dict(batch_size=2, q_length=20, kv_length=50, q_offset=30, attention_mask=attention_mask)
    mask = turboquant_mask(**options)
    if padding in ("padded", "too short"):
        padded = torch.nn.functional.pad(attention_mask, (0, 50 - attention_mask.shape[1]))
        expected = torch.ones(20, 50, dtype=torch.bool).tril(30) & padded[:, None, None]
        assert torch.equal(mask, expected)
    else:
        assert mask is None
        # What is not plain causal attention to the end of the keys keeps its mask.
        for change in ({"local_size": 16}, {"allow_is_causal_skip": False}, {"q_offset": 10}):
            assert turboquant_mask(**options | change) is not None


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_chunked_and_unchunked_logits_agree_with_an_unbounded_residual(name):
    model = build(name, attention="turboquant")
    ids = token_ids(1, 450)
    logits = []
    for sizes in ([450], [200, 137, 113], [131] * 3 + [57], [100, 17, 300, 33]):
        cache = TurboQuantCache(model.config, residual_length=10**6)
        with torch.no_grad():
            parts = [model(part, **as_input(cache)).logits for part in ids.split(sizes, dim=1)]
        logits.append(torch.cat(parts, 1))
    for other in logits[1:]:
        assert (other - logits[0]).abs().max() <= 1e-4 * logits[0].abs().max()


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 21), marks=pytest.mark.slow)], ids=["1", "20"])
@pytest.mark.parametrize("preset", PRESETS)
def test_assisted_greedy_is_greedy(preset, seeds):
    """Where a block is encoded between proposing and checking, the two read different states of the same token: the
    only difference there may be. The residual here is long enough that what is read is packed either way, but for
    drafts that come with the prompt: of this model none is right."""
    model = build("llama", num_hidden_layers=4, attention="turboquant")
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 128, (1, 40), generator=generator).repeat(1, 4)
        options = dict(attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=24, max_new_tokens=24)
        outputs = []
        for lookup in (None, 4):
            cache = TurboQuantCache(model.config, preset, residual_length=24, sink_tokens=4)
            outputs.append(model.generate(ids, **as_input(cache), prompt_lookup_num_tokens=lookup, **options))
            assert any(layer.store.counts.blocks for layer in cache.layers)
        assert torch.equal(*outputs), seed


def test_the_cache_matters_to_what_is_generated():
    """Guards the test above: with another cache tokens do differ."""
    model = build("llama", attention="turboquant")
    ids = token_ids(1, 40).repeat(1, 4)
    options = dict(attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=24, max_new_tokens=24)
    caches = (DynamicCache(config=model.config), TurboQuantCache(model.config, "2bit_nc", residual_length=24))
    first, second = (model.generate(ids, **as_input(cache), **options) for cache in caches)
    assert not torch.equal(first, second)
