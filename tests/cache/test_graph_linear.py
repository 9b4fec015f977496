"""`graph_decoding` on models with linear layers, whose states no step can take back.

Without a GPU its operations are recorded and done again, see `recorded_graph`.
"""

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from examples.measure.quality.family_configs import tiny_model
from tests.support.helpers import slow
from tests.support.recorded_graph import LOOP, QUIET, conversation
from tq_hf import TurboQuantCache
from tq_hf.compat import as_input
from tq_hf.graph_decoding.loop import latest_steps, tensors_of

pytestmark = QUIET


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


def test_drafts_are_refused(device: str) -> None:
    model = tiny_model("qwen3_next").to(device)
    cache = TurboQuantCache(model.config, max_cache_len=256)
    ids = torch.arange(3, 40, device=device)[None]
    with pytest.raises(ValueError, match=r"stateful|\(without drafts\) linear; .* has LinearAttentionLayer"):
        model.generate(ids, **as_input(cache), max_new_tokens=4, prompt_lookup_num_tokens=3, **LOOP)


def test_states_that_a_module_keeps_are_refused(device: str) -> None:
    """RecurrentGemma's steps replace a tensor of the module, and a graph would read the one of its capture."""
    model = tiny_model("recurrent_gemma").to(device)
    cache = TurboQuantCache(model.config, max_cache_len=256)
    with pytest.raises(ValueError, match="RecurrentGemmaForCausalLM also has recurrent states outside of it"):
        model.generate(torch.arange(3, 40, device=device)[None], **as_input(cache), max_new_tokens=4, **LOOP)
