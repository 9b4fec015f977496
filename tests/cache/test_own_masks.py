"""Attention masks of the user's own on preallocated caches, with columns for the tokens held or for the whole room.

Everything stays dense in these caches, so that logits are those over a `DynamicCache`.
"""

from functools import lru_cache
from itertools import product

import pytest
import torch
from transformers import DynamicCache

from tests.support.tiny_models import VOCAB, build
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input

HELD, ROOM = 300, 512
DENSE = dict(residual_length=10**4)
model_of = lru_cache(lambda name, attention: _built(name, attention))
generator = torch.Generator().manual_seed(0)
PROMPT = torch.randint(3, VOCAB, (2, HELD), generator=generator)
MORE = torch.randint(3, VOCAB, (2, 4), generator=generator)


def _built(name, attention):
    model = build(name, num_hidden_layers=2, attention=attention)
    return model


def mask_of(kind: str, heads: int, queries: int, columns: int, held: int = HELD) -> torch.Tensor:
    """A causal mask with holes in it, of some heads more than of others."""
    mask = torch.ones(2, heads, queries, columns, dtype=torch.bool).tril(held)
    mask[..., held // 3 : held // 2] = False
    mask[:, ::2, :, 5 : 5 + 8 * (heads > 1)] = False
    if kind == "bool":
        return mask
    lowest = torch.finfo(torch.float32).min if kind == "min" else -torch.inf
    return torch.zeros(mask.shape).masked_fill(~mask, lowest)


def step(model, cache, mask, queries, held=HELD):
    model(PROMPT[:, :held], **as_input(cache))
    positions = torch.arange(held, held + queries)[None]
    inputs = dict(attention_mask=mask, position_ids=positions)
    return model(MORE[:, :queries], **as_input(cache), **inputs).logits


@pytest.mark.parametrize("skipped", [(), (0,), (1,)], ids=["", "first layer dense", "last layer dense"])
@pytest.mark.parametrize("whole", [False, True], ids=["tokens held", "room"])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("heads, kind", product([1, 4], ["bool", "min", "inf"]))
def test_a_mask_has_columns_for_the_tokens_held_or_for_the_room(heads, kind, queries, whole, skipped):
    model, plain = model_of("llama", "turboquant"), model_of("llama", "sdpa")
    exact = mask_of(kind, heads, queries, HELD + queries)
    expected = step(plain, DynamicCache(config=plain.config), exact, queries)
    unmasked = step(plain, DynamicCache(config=plain.config), None, queries)
    assert (expected - unmasked).abs().max() > 0.1, "the mask changes nothing"
    cache = TurboQuantCache(model.config, max_cache_len=ROOM, skip_layers=skipped, **DENSE)
    mask = mask_of(kind, heads, queries, ROOM if whole else HELD + queries)
    torch.testing.assert_close(step(model, cache, mask, queries), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("skipped", [(), (0,)], ids=["", "first layer dense"])
@pytest.mark.parametrize("heads, kind", [(1, "bool"), (4, "bool"), (1, "inf")])
def test_a_mask_that_ends_before_the_tokens_is_refused(heads, kind, skipped):
    model = model_of("llama", "turboquant")
    cache = TurboQuantCache(model.config, max_cache_len=ROOM, skip_layers=skipped, **DENSE)
    with pytest.raises(ValueError, match=f"{HELD} columns for {HELD + 1} tokens.*a column for every token"):
        step(model, cache, mask_of(kind, heads, 1, HELD), 1)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("options", [{}, {"max_cache_len": ROOM}, {"skip_layers": (0, 1)}], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_a_mask_of_integers_is_refused_as_sdpa_refuses_it(name, options, dtype):
    model = model_of(name, "turboquant")
    cache = TurboQuantCache(model.config, **options)
    with pytest.raises(ValueError, match=r"is torch.u?int\d+; it must be bool, or floats.*`mask.bool\(\)`"):
        model(PROMPT, **as_input(cache), attention_mask=mask_of("bool", 1, HELD, HELD, 0).to(dtype))
    cache.crop(0)
    assert cache.get_seq_length() == 0
    for queries in (1, 3):
        with pytest.raises(ValueError, match=r"cache.crop\(0\)"):
            step(model, cache, mask_of("bool", 1, queries, HELD + queries).to(dtype), queries)
        cache.crop(0)
        assert cache.get_seq_length() == HELD
        cache.reset()


@pytest.mark.parametrize(
    "heads, kind", [(4, "bool"), *(pytest.param(1, kind, marks=pytest.mark.slow) for kind in ("bool", "inf"))]
)
def test_a_compiled_step_asks_for_columns_for_the_room(heads, kind):
    torch._dynamo.reset()
    model = model_of("llama", "turboquant")
    compiled = torch.compile(model, backend="eager")
    cache = TurboQuantCache(model.config, max_cache_len=ROOM, **DENSE)
    expected = step(model, TurboQuantCache(model.config, max_cache_len=ROOM, **DENSE), mask_of(kind, heads, 1, ROOM), 1)
    model(PROMPT, **as_input(cache))
    model(MORE[:, :1], **as_input(cache))
    cache.crop(-1)
    inputs = dict(**as_input(cache), position_ids=torch.tensor([[HELD]]))
    with pytest.raises(ValueError, match=f"{HELD + 1} columns for {ROOM} tokens.*in a compiled step for all"):
        compiled(MORE[:, :1], attention_mask=mask_of(kind, heads, 1, HELD + 1), **inputs)
    cache.crop(int(HELD - cache.get_seq_length()))
    actual = compiled(MORE[:, :1], attention_mask=mask_of(kind, heads, 1, ROOM), **inputs).logits
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("held", [40, 94, 95, HELD])
@pytest.mark.parametrize("limit", [None, ROOM])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("kind", ["bool", "inf"])
def test_sliding_layers_take_masks_of_their_own(kind, queries, limit, held):
    """Of 96 tokens, as many as there are beside the queries' own."""
    model, plain = model_of("gemma3", "turboquant"), model_of("gemma3", "sdpa")
    past = min(held, 95)
    sliding = mask_of(kind, 1, queries, past + queries, past)
    masks = {"full_attention": mask_of(kind, 1, queries, held + queries, held), "sliding_attention": sliding}
    expected = step(plain, DynamicCache(config=plain.config), masks, queries, held)
    cache = TurboQuantCache(model.config, max_cache_len=limit, **DENSE)
    torch.testing.assert_close(step(model, cache, masks, queries, held), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("limit", [None, ROOM])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_mask_of_all_tokens_is_refused_by_sliding_layers(queries, limit):
    """Its first columns would be taken for those of the window."""
    model = model_of("gemma3", "turboquant")
    cache = TurboQuantCache(model.config, max_cache_len=limit, **DENSE)
    with pytest.raises(ValueError, match=rf"{HELD + queries} columns.*sliding layer has {95 + queries} tokens.*dict"):
        step(model, cache, mask_of("bool", 1, queries, HELD + queries), queries)
