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


@pytest.mark.parametrize(
    ("counted", "tokens", "needed"),
    [(True, 1, 251), (True, 4, 254), (False, 1, 300)],
    ids=["eager", "several", "compiled"],
)
def test_a_preallocated_step_refuses_a_short_mask(counted: bool, tokens: int, needed: int) -> None:
    """Against the tokens held where the host counts them, else against all there is room for. Also once the step's
    tokens are appended, as for the second layer of those that share keys and values."""
    pair = states(0, heads=1, tokens=250, dim=32)
    store = LayerStore.allocate(all_packed(), *pair, 300)
    store.take_steps_of(tokens)
    store.append(*pair)
    view = store.append(*states(1, heads=1, tokens=tokens, dim=32), is_step=True)
    assert view.past_length == 250
    if not counted:
        view = view._replace(past_length=None)
    query = states(2, heads=4, tokens=tokens, dim=32)[0]
    for _ in range(2):
        with pytest.raises(ValueError, match=REFUSED.format(needed)):
            graph_ops.attend_token(query, view, mask(tokens, 200), AttentionOptions(0.1))
        assert graph_ops.attend_token(query, view, mask(tokens, 300), AttentionOptions(0.1)).isfinite().all()
