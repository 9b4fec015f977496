"""The comparison of tokens with and without drafts counts what differs."""

import pytest
import torch

from examples.measure.quality.drafts import DRAFTS, WAYS, compare

NEW = 24


@pytest.fixture(scope="module")
def ids(model):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, model.config.vocab_size, (1, tokens), generator=generator) for tokens in (150, 260)]


@pytest.mark.parametrize("way", WAYS)
def test_drafts_that_change_nothing_have_all_tokens_equal(model, ids, way):
    found = compare(model, ids, NEW, {"prompt_lookup_num_tokens": DRAFTS}, way)
    assert found["equal"] == 2 * NEW and found["gaps"] == [] and found["tokens_per_call"] >= 1


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_is_compared_up_to_the_first_token_that_differs(model, ids, way):
    plain = model.generate(ids[0], max_new_tokens=NEW, do_sample=False, eos_token_id=None)[
        0, ids[0].shape[1] :
    ].tolist()
    banned = plain[NEW // 2]
    drafts = {"prompt_lookup_num_tokens": DRAFTS, "suppress_tokens": [banned]}
    found = compare(model, ids[:1], NEW, drafts, way)
    assert found["equal"] == plain.index(banned) and len(found["gaps"]) == 1 and found["gaps"][0] > 0
