"""`graph_decoding` on models with linear layers, whose states no step can take back.

Without a GPU its operations are recorded and done again, see `recorded_graph`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from examples.measure.quality.family_configs import tiny_model
from tests.support.helpers import slow
from tests.support.recorded_graph import record_graphs
from tq_hf import TurboQuantCache, graph_decoding
from tq_hf.compat import as_input
from tq_hf.graph_decoding.loop import latest_steps, tensors_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled"),
]

LOOP = {"custom_generate": graph_decoding}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        record_graphs(monkeypatch)
    return request.param


def conversation(
    model: PreTrainedModel, loop: dict[str, Any], padded: int, ends: list[list[int] | None]
) -> tuple[torch.Tensor, TurboQuantCache]:
    """A turn on one cache for each entry of `ends`, the tokens that end it. All tokens, and the cache."""
    ids = torch.randint(3, 100, (2, 150), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[0, :padded], mask[0, :padded] = 0, 0
    ids, mask = ids.to(model.device), mask.to(model.device)
    cache = TurboQuantCache(model.config, residual_length=32, max_cache_len=256)
    for end in ends:
        options = dict(do_sample=False, max_new_tokens=20, eos_token_id=end, pad_token_id=0)
        ids = model.generate(ids, attention_mask=mask, **as_input(cache), **options, **loop)
        ids = torch.cat([ids, ids[:, 20:27]], dim=1)
        mask = torch.cat([mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])], dim=1)
    return ids, cache


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
    model = tiny_model(family).to(device)
    model.set_attn_implementation("turboquant")
    free, _ = conversation(model, {}, padded, [None])
    ends = [free[:, 160].tolist(), None]  # the first turn ends before its last token
    (expected, plain), (tokens, cache) = (conversation(model, loop, padded, ends) for loop in ({}, LOOP))
    assert torch.equal(tokens, expected) and tokens.shape[1] < 150 + 2 * 27
    assert latest_steps[cache].graph is not None
    linear = [i for i, layer in enumerate(cache.layers) if hasattr(layer, "conv_states")]
    assert linear
    for i in linear:
        for mine, theirs in zip(tensors_of(cache.layers[i]), tensors_of(plain.layers[i]), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_drafts_are_refused(device: str) -> None:
    model = tiny_model("qwen3_next").to(device)
    cache = TurboQuantCache(model.config, max_cache_len=256)
    ids = torch.arange(3, 40, device=device)[None]
    with pytest.raises(ValueError, match=r"stateful|\(without drafts\) linear; .* has LinearAttentionLayer"):
        model.generate(ids, **as_input(cache), max_new_tokens=4, prompt_lookup_num_tokens=3, **LOOP)
