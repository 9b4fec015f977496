"""Kernels have no backward pass: one that goes through their attention over a history ends in a sentence."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from tests.support.helpers import every_pair, states
from tests.support.kernel_cases import INTERPRETED, child
from tq_hf import TurboQuantCache
from tq_hf.attention import turboquant_attention

test_under_the_interpreter = child(__file__)
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="torch attends, and has a backward pass")),
    pytest.param("cuda", marks=pytest.mark.cuda),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("limit", "tokens", "wanted"), every_pair((None, 300), (1, 3, 140), ("query", "values")))
def test_a_backward_pass_through_a_later_call_raises(limit, tokens, wanted, device):
    config = LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config._attn_implementation = "turboquant"
    module = torch.nn.Module()
    module.config, module.is_causal, module.num_key_value_groups = config, True, 2
    cache = TurboQuantCache(config, max_cache_len=limit, residual_length=0)
    outputs = []
    for seed, count in ((0, 150), (1, tokens)):
        keys, values = (x.to(device) for x in states(seed, tokens=count))
        query = states(seed + 5, heads=4, tokens=count)[0].to(device)
        recorded = torch.enable_grad() if seed else torch.no_grad()
        with recorded:
            {"query": query, "values": values}[wanted].requires_grad_(bool(seed))
            outputs.append(turboquant_attention(module, query, *cache.update(keys, values, 0), None)[0])
    assert not outputs[0].requires_grad
    with torch.enable_grad(), pytest.raises(RuntimeError, match="after the first call are lost"):
        outputs[1].sum().backward()
