"""The operators of a preallocated store keep PyTorch's contract for operators."""

from __future__ import annotations

import pytest
import torch

from tq_hf import TurboQuantConfig
from tq_hf.codec.ablation import Ablation
from tq_hf.stores import graph_ops
from tq_hf.stores.preallocated import StaticStore

HEADS, DIM = 2, 32


def filled(config: TurboQuantConfig, tokens: int) -> tuple[StaticStore, torch.Tensor, torch.Tensor]:
    """A store of `tokens` tokens with room for more, and one token's keys and values."""
    keys, values = (torch.randn(2, HEADS, tokens + 1, DIM) for _ in range(2))
    store = StaticStore.allocate(config, keys, values, tokens + 40)
    with store.opened() as opened:
        opened.append(keys[:, :, :tokens], values[:, :, :tokens])
    return store, keys[:, :, tokens:], values[:, :, tokens:]


def numbers(store: StaticStore) -> tuple[int, int]:
    return store.config_number, store.max_length


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("key_mean", [False, True], ids=["no mean", "mean"])
def test_operators_pass_opcheck(key_mean: bool, masked: bool) -> None:
    config = Ablation(key_mean=key_mean, residual_length=0, sink_tokens=2)
    store, key, value = filled(config, 131)
    torch.library.opcheck(
        graph_ops._append_token,
        (key, value, *graph_ops._arguments(store), store.state, store.seen, store.length, *numbers(store)),
    )
    graph_ops.append_token(store, key, value)
    query = torch.randn(2, 2 * HEADS, 1, DIM)
    mask = torch.ones(2, 1, 1, store.max_length, dtype=torch.bool) if masked else None
    torch.library.opcheck(
        graph_ops._attend_token,
        (query, *graph_ops._arguments(store), store.seen, mask, None, DIM**-0.5, None, *numbers(store)),
    )
    torch.library.opcheck(
        graph_ops._dense_tokens,
        (*graph_ops._arguments(store), store.seen, *numbers(store)),
    )
