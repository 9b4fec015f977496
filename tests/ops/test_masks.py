"""A mask that ends before the tokens do is refused before anything reads it."""

import pytest
import torch
from tq_kernels.types import AttentionOptions

from tests.support.helpers import all_packed, filled, states
from tq_hf.ops import dispatch
from tq_hf.stores import graph_ops
from tq_hf.stores.store import LayerStore

REFUSED = "200 columns for {} tokens.*a column for every token"


def mask(queries: int, columns: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return torch.ones(1, 1, queries, columns, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=["boolean", "additive"])
@pytest.mark.parametrize("queries", [1, 40], ids=["decode", "prefill"])
def test_a_short_mask_is_refused(queries: int, dtype: torch.dtype) -> None:
    store = filled(all_packed(), states(0, heads=1, tokens=301 - queries, dim=32))
    view = store.append(*states(1, heads=1, tokens=queries, dim=32))
    query = states(2, heads=4, tokens=queries, dim=32)[0]
    with pytest.raises(ValueError, match=REFUSED.format(301)):
        dispatch.attend(query, view, mask(queries, 200, dtype), AttentionOptions(0.1))
    out = dispatch.attend(query, view, mask(queries, 301), AttentionOptions(0.1))
    assert torch.equal(out, dispatch.attend(query, view, mask(queries, 400), AttentionOptions(0.1)))


@pytest.mark.parametrize(("counted", "needed"), [(True, 251), (False, 300)], ids=["eager", "compiled"])
def test_a_preallocated_step_refuses_a_short_mask(counted: bool, needed: int) -> None:
    """Against the tokens held where the host counts them, else against all there is room for."""
    pair = states(0, heads=1, tokens=250, dim=32)
    store = LayerStore.allocate(all_packed(), *pair, 300)
    store.append(*pair)
    view = store.append(*states(1, heads=1, tokens=1, dim=32))
    assert view.past_length == 250
    if not counted:
        view = view._replace(past_length=None)
    query = states(2, heads=4, tokens=1, dim=32)[0]
    with pytest.raises(ValueError, match=REFUSED.format(needed)):
        graph_ops.attend_token(query, view, mask(1, 200), AttentionOptions(0.1))
    assert graph_ops.attend_token(query, view, mask(1, 300), AttentionOptions(0.1)).isfinite().all()


def test_a_step_of_several_tokens_refuses_a_short_mask_once_they_are_appended() -> None:
    """As for the second layer of those that share keys and values."""
    pair = states(0, heads=1, tokens=250, dim=32)
    store = LayerStore.allocate(all_packed(), *pair, 300)
    store.take_steps_of(4)
    store.append(*pair)
    view = store.append(*states(1, heads=1, tokens=4, dim=32), is_step=True)
    query = states(2, heads=4, tokens=4, dim=32)[0]
    first = graph_ops.attend_token(query, view, mask(4, 254), AttentionOptions(0.1))
    with pytest.raises(ValueError, match="251 columns for 254 tokens"):
        graph_ops.attend_token(query, view, mask(4, 251), AttentionOptions(0.1))
    assert torch.equal(graph_ops.attend_token(query, view, mask(4, 254), AttentionOptions(0.1)), first)
