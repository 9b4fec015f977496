"""The operators of a preallocated store keep PyTorch's contract for operators."""

from __future__ import annotations

import pytest
import torch
from helpers import rows, states

from tq_hf import TurboQuantConfig
from tq_hf.codec.ablation import Ablation
from tq_hf.stores import graph_ops
from tq_hf.stores.preallocated import PreallocatedStore

HEADS, DIM = 2, 32


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("key_mean", [False, True], ids=["no mean", "mean"])
def test_operators_pass_opcheck(key_mean: bool, masked: bool) -> None:
    config = Ablation(key_mean=key_mean, residual_length=0, sink_tokens=2)
    pair = states(0, 2, HEADS, 132, DIM)
    store = PreallocatedStore.allocate(config, *pair, 171)
    store.append(*rows(pair, 0, 131))
    tensors, text = store.tensors.arguments(), graph_ops.config_text(config)
    torch.library.opcheck(
        graph_ops._append_token, (*rows(pair, 131), tensors, list(store.counts), text, store.max_cache_len)
    )
    view = store.append(*rows(pair, 131))
    query = states(1, 2, 2 * HEADS, 1, DIM)[0]
    mask = torch.ones(2, 1, 1, store.max_cache_len, dtype=torch.bool) if masked else None
    counts, after = list(store.counts), (mask, None, DIM**-0.5, None, text, store.max_cache_len)
    torch.library.opcheck(graph_ops._attend_token, (query, *rows(pair, 131), tensors, counts, *after))
    graph_ops.append_newest(view)
    torch.library.opcheck(graph_ops._attend_token, (query, None, None, tensors, counts, *after))
    torch.library.opcheck(graph_ops._dense_tokens, (tensors, view.counts.step_counts, text, store.max_cache_len))


def test_a_configuration_travels_as_text_that_means_the_same_everywhere() -> None:
    for config in (TurboQuantConfig(), TurboQuantConfig(key_bits=8, skip_layers=(0, -1)), Ablation(seed=3)):
        text = graph_ops.config_text(config)
        assert graph_ops.config_from(text) == config
        assert graph_ops.config_text(graph_ops.config_from(text)) == text


def test_a_layer_is_made_again_from_its_arguments() -> None:
    pair = states(0, 2, HEADS, 300, DIM, value_dim=16)
    for key_mean in (True, False):
        store = PreallocatedStore.allocate(Ablation(key_mean=key_mean), *pair, 300)
        arguments = store.tensors.arguments()
        again = type(store.tensors).from_arguments(store.config, arguments)
        assert again.layout == store.layout and again.row == store.tensors.row
        assert all(a is b for a, b in zip(again.arguments(), arguments, strict=True))
        assert (again.blocks.key_means is None) != key_mean
