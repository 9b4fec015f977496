"""`graph_decoding` on models with sliding layers, where one captured step serves a window that fills and one that
slides, and with linear layers, whose states no step can take back.

Without a GPU its operations are recorded and done again, see `recorded_graph`."""

import pytest
import torch
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from examples.measure.quality.family_configs import tiny_model
from tests.support.helpers import slow
from tests.support.recorded_graph import LOOP, QUIET, conversation
from tests.support.tiny_models import VOCAB, build, token_ids
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input
from tq_hf.graph_decoding import loop as graph_loop
from tq_hf.graph_decoding.loop import latest_steps, tensors_of
from tq_hf.layers.rollback import held_lengths

pytestmark = QUIET

WINDOW, NEW = 96, 30
TWO_TURNS: list[list[int] | None] = [None, None]


def tokens_of(prompt: int) -> torch.Tensor:
    return torch.randint(2, VOCAB, (2, prompt), generator=torch.Generator().manual_seed(prompt))


def compare(model, prompt: int, padded: int = 0, ends: list[list[int] | None] = TWO_TURNS) -> torch.Tensor:
    (expected, plain), (tokens, cache) = (
        conversation(model, loop, tokens_of(prompt), padded, NEW, ends) for loop in ({}, LOOP)
    )
    assert torch.equal(tokens, expected)
    lengths = [list(held_lengths(each.layers).values()) for each in (plain, cache)]
    assert lengths[0] == lengths[1]
    for mine, theirs in zip(cache.layers, plain.layers, strict=True):
        if getattr(mine, "is_sliding", False):  # of a full window the first row is never read again
            rows = slice(int(lengths[0][0] >= WINDOW), lengths[0][0])
            # Kernels compute products of fp16, and the two ways are compiled apart: roundings differ on a GPU.
            close = 5e-3 if mine.keys.is_cuda else 1e-4
            torch.testing.assert_close(mine.keys[:, :, rows], theirs.keys[:, :, rows], atol=close, rtol=close)
    assert graph_loop.latest_steps[cache].graph is not None
    return tokens


@pytest.mark.parametrize(
    ("name", "prompt", "padded"),
    [
        ("gpt_oss", 80, 0),
        slow("gpt_oss", 80, 9),
        ("gpt_oss", 150, 9),
        ("gemma2", 150, 9),
        ("gemma3", 80, 9),
        ("gemma3n", 80, 9),
        *(slow(*case) for case in [("gemma2", 80, 0), ("gemma2", 80, 9), ("gemma3", 80, 0), ("gemma3", 150, 9)]),
    ],
)
def test_tokens_are_those_of_generate(device, name, prompt, padded):
    model = build(name, attention="turboquant").to(device)
    compare(model, prompt, padded)


def test_masks_that_are_added_are_continued_with_zeros(device):
    model = build("gemma2", attention="eager").to(device)
    compare(model, 80, 9)


@pytest.mark.parametrize("prompt", [50, 85, 150], ids=["not full", "fills", "full"])
def test_the_step_after_the_end_is_taken_back(device, prompt):
    model = build("gpt_oss", attention="turboquant").to(device)
    free, _ = conversation(model, {}, tokens_of(prompt), 0, NEW, TWO_TURNS)
    ends = [free[:, last].tolist() for last in (prompt + 12, prompt + NEW + 7 + 12)]
    tokens = compare(model, prompt, ends=ends)
    assert tokens.shape[1] < free.shape[1] - 15


def test_a_replayed_step_is_not_taken_for_recorded(device) -> None:
    """transformers' assisted decoding records what leaves a window, and replayed steps do not."""
    model = build("gemma3", sliding_window=20, attention="turboquant").to(device)
    cache = TurboQuantCache(model.config, residual_length=10**4, max_cache_len=256)
    ids = token_ids(1, 30).to(device)
    options = dict(do_sample=False, eos_token_id=None)
    ids = model.generate(ids, **as_input(cache), max_new_tokens=8, prompt_lookup_num_tokens=3, **options)
    ids = torch.cat([ids, ids[:, :9]], dim=1)
    ids = model.generate(ids, **as_input(cache), max_new_tokens=20, **options, **LOOP)
    with pytest.raises(ValueError, match="tokens that left its window were not kept"):
        cache.crop(-4)
    cache.crop(-1)
    ids = torch.cat([ids[:, : int(cache.get_seq_length())], ids[:, :3]], dim=1)
    found = model.generate(ids, **as_input(cache), max_new_tokens=8, **options, **LOOP)
    fresh = TurboQuantCache(model.config, residual_length=10**4, max_cache_len=256)
    assert torch.equal(found, model.generate(ids, **as_input(fresh), max_new_tokens=8, **options))


@pytest.mark.parametrize("drafts", [{}, dict(prompt_lookup_num_tokens=3)])
def test_a_model_that_hands_on_no_positions_gets_them(device, drafts):
    """EXAONE 4.5 counts from the length of its cache, a number on the host where the first layer slides."""
    model = tiny_model("exaone4_5", "turboquant").to(device)
    ids = tokens_of(25)[:1].repeat(1, 2)[:, :40].to(device)
    options = dict(do_sample=False, max_new_tokens=16, eos_token_id=None, disable_compile=device == "cpu")
    expected = model.generate(ids, **as_input(DynamicCache(config=model.config)), **options)
    cache = TurboQuantCache(model.config, max_cache_len=128, residual_length=10**4)
    assert torch.equal(model.generate(ids, **as_input(cache), **options, **drafts, **LOOP), expected)
    assert graph_loop.latest_steps[cache].graph is not None


@pytest.mark.parametrize(
    ("family", "padded"),
    [
        ("qwen3_next", 0),
        ("qwen3_next", 9),
        ("lfm2_moe", 0),
        ("kimi_linear", 0),
        *(slow(name, 9) for name in ("qwen3_5_text", "olmo_hybrid", "bamba", "granitemoehybrid", "nemotron_h")),
    ],
)
def test_tokens_and_states_are_those_of_generate(device: str, family: str, padded: int) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("transformers does not have it yet")
    model = tiny_model(family, "turboquant").to(device)
    prompt = torch.randint(3, 100, (2, 150), generator=torch.Generator().manual_seed(0))
    free, _ = conversation(model, {}, prompt, padded, 20, [None])
    ends = [free[:, 160].tolist(), None]  # the first turn ends before its last token
    (expected, plain), (tokens, cache) = (conversation(model, loop, prompt, padded, 20, ends) for loop in ({}, LOOP))
    assert torch.equal(tokens, expected) and tokens.shape[1] < 150 + 2 * 27
    assert latest_steps[cache].graph is not None
    linear = [i for i, layer in enumerate(cache.layers) if hasattr(layer, "conv_states")]
    assert linear
    for i in linear:
        for mine, theirs in zip(tensors_of(cache.layers[i]), tensors_of(plain.layers[i]), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("qwen3_next", {"prompt_lookup_num_tokens": 3}, r"stateful|\(without drafts\) linear; .* LinearAttentionLayer"),
        ("recurrent_gemma", {}, "RecurrentGemmaForCausalLM also has recurrent states outside of it"),
    ],
)
def test_drafts_and_states_that_a_module_keeps_are_refused(device: str, name: str, options: dict, words: str) -> None:
    """RecurrentGemma's steps replace a tensor of the module, and a graph would read the one of its capture."""
    model = tiny_model(name).to(device)
    cache, ids = TurboQuantCache(model.config, max_cache_len=256), torch.arange(3, 40, device=device)[None]
    with pytest.raises(ValueError, match=words):
        model.generate(ids, **as_input(cache), max_new_tokens=4, **options, **LOOP)
