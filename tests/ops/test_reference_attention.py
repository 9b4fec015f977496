"""Attention over a compressed store equals a plain float64 softmax over what the store dequantises to."""

from __future__ import annotations

import pytest
import torch
from helpers import all_packed, filled, rows, states

from tq_hf import TurboQuantConfig
from tq_hf.ops import dispatch, reference_attention
from tq_hf.ops.reference_attention import attend_dense
from tq_hf.stores.growing import GrowingStore
from tq_hf.tensors.view import StoreView

CONFIG = TurboQuantConfig(residual_length=60, sink_tokens=4)
HEADS = {"MHA": (2, 2), "GQA": (6, 2), "MQA": (4, 1)}
PAST = 300


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def viewed(
    queries: int, heads: int = 2, batch: int = 2, dim: int = 16, value_dim: int = 16, config=CONFIG, past: int = PAST
) -> StoreView:
    """A view of `past` cached tokens and `queries` new ones."""
    pair = states(queries, batch, heads, past + queries, dim, value_dim)
    store = GrowingStore.allocate(config, *pair)
    store.append(*rows(pair, 0, past))
    return store.append(*rows(pair, past))


def plain(query, view, mask, *, scaling, causal=True, softcap=None, s_aux=None, position_bias=None) -> torch.Tensor:
    """The textbook: `[B, S, Hq, Dv]` in float64. Rows that attend to nothing are 0."""
    keys, values = (part.double() for part in (dispatch.dense(view) if isinstance(view, StoreView) else view))
    batch, query_heads, queries, _ = query.shape
    length, groups = keys.shape[2], query_heads // keys.shape[1]
    keys, values = (part.repeat_interleave(groups, dim=1) for part in (keys, values))
    logits = query.double() @ keys.transpose(-1, -2) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if position_bias is not None:
        logits = logits + position_bias[..., :length].double()
    if mask is None and causal:
        mask = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask[..., :length], -torch.inf)
    elif mask is not None:
        logits = logits + mask[..., :length].double()
    if s_aux is not None:
        sink = s_aux.double().view(1, -1, 1, 1).expand(batch, query_heads, queries, 1)
        logits = torch.cat([logits, sink], -1)
        values = torch.cat([values, torch.zeros_like(values[:, :, :1])], 2)
    return (logits.softmax(-1).nan_to_num(0.0) @ values).transpose(1, 2)


def assert_attends(query, view, mask=None, **options) -> torch.Tensor:
    options = dict(scaling=query.shape[-1] ** -0.5) | options
    actual = dispatch.attend(query, view, mask, **options)
    expected = plain(query, view, mask, **options)
    assert actual.dtype == query.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected, atol=3e-6, rtol=1e-5)
    return actual


@pytest.mark.parametrize("queries", [1, 5, 200])
@pytest.mark.parametrize("kind", HEADS)
def test_attention_is_the_softmax_over_what_is_stored(kind, queries):
    query_heads, heads = HEADS[kind]
    view = viewed(queries, heads)
    assert view.num_blocks > 0
    assert_attends(random(1, 2, query_heads, queries, 16), view)


@pytest.mark.parametrize("queries", [1, 5])
def test_a_mask_of_none_is_bottom_right_causal_or_full(queries):
    view, query = viewed(queries), random(2, 2, 4, queries, 16)
    causal, full = assert_attends(query, view), assert_attends(query, view, causal=False)
    assert torch.equal(causal[:, -1], full[:, -1])
    if queries > 1:
        assert not torch.allclose(causal[:, 0], full[:, 0], atol=1e-3)
        longer = torch.ones(queries, view.length, dtype=torch.bool).tril(view.length - queries)[None, None]
        torch.testing.assert_close(causal, dispatch.attend(query, view, longer, scaling=0.25), atol=1e-6, rtol=0)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("mask_heads", [1, 4])
@pytest.mark.parametrize("spare", [0, 7])
def test_bool_mask_hides_left_padding(queries, mask_heads, spare):
    """The mask may be longer than the keys, as that of a preallocated cache is."""
    view, query = viewed(queries), random(3, 2, 4, queries, 16)
    length = view.length
    mask = torch.ones(2, mask_heads, queries, length + spare, dtype=torch.bool)
    mask[..., :length] = mask[..., :length].tril(length - queries)
    mask[0, ..., :137] = False  # past the sinks and into the second block
    if mask_heads > 1:
        mask[1, 2, :, 150:160] = False
    assert_attends(query, view, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_additive_mask_is_added_to_the_logits(dtype):
    view, query = viewed(5), random(4, 2, 4, 5, 16)
    mask = random(5, 2, 1, 5, view.length).to(dtype)
    mask[0, :, :, :100] = -torch.inf
    mask[1, :, 2, 200:] = torch.finfo(dtype).min
    assert_attends(query, view, mask)


def test_softcap_caps_the_scaled_logits():
    view, query = viewed(3), 8 * random(6, 2, 4, 3, 16)
    capped = assert_attends(query, view, softcap=5.0)
    assert not torch.allclose(capped, dispatch.attend(query, view, None, scaling=0.25), atol=1e-2)


def test_learned_sinks_take_weight_and_give_no_value():
    view, query = viewed(3), random(7, 2, 4, 3, 16)
    with_sinks = assert_attends(query, view, s_aux=torch.tensor([-2.0, 0.0, 4.0, 9.0]))
    without = assert_attends(query, view)
    assert (with_sinks[:, :, 3].norm() < 0.2 * without[:, :, 3].norm()).all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 4)])
def test_position_bias_is_added_per_head(shape):
    view, query = viewed(3), random(8, 2, 4, 3, 16)
    assert_attends(query, view, position_bias=random(9, *shape, 3, view.length + 2))


def test_everything_at_once():
    view, query = viewed(4), 4 * random(10, 2, 4, 4, 16)
    mask = torch.ones(2, 1, 4, view.length, dtype=torch.bool).tril(view.length - 4)
    mask[1, :, :, :20] = False
    bias = random(11, 1, 4, 4, view.length)
    assert_attends(query, view, mask, scaling=0.3, softcap=8.0, s_aux=random(12, 4), position_bias=bias)


@pytest.mark.parametrize("dim, value_dim", [(16, 8), (8, 24), (20, 36), (192, 128)])
def test_key_and_value_head_dims_may_differ(dim, value_dim):
    view = viewed(2, dim=dim, value_dim=value_dim)
    assert_attends(random(13, 2, 4, 2, dim), view)


def test_rows_that_may_attend_to_nothing_are_zero():
    view, query = viewed(4), random(14, 2, 4, 4, 16)
    mask = torch.ones(2, 1, 4, view.length, dtype=torch.bool)
    mask[0] = False
    mask[1, :, 2] = False
    output = assert_attends(query, view, mask)
    assert (output[0] == 0).all() and (output[1, 2] == 0).all()
    assert (output[1, [0, 1, 3]] != 0).all()


def test_very_large_logits_do_not_overflow():
    view, query = viewed(2), 300 * random(15, 2, 4, 2, 16)
    assert dispatch.attend(query, view, None, scaling=1.0).isfinite().all()
    assert_attends(query, view, scaling=0.1)


@pytest.mark.parametrize("scores", [1, 4000, 10_000])
def test_tiling_the_queries_changes_nothing(scores, monkeypatch):
    view, query = viewed(50), random(16, 2, 4, 50, 16)
    mask = torch.ones(2, 4, 50, view.length, dtype=torch.bool).tril(view.length - 50)
    mask[:, 1, :, 10:90] = False
    bias = random(17, 2, 4, 50, view.length)
    whole = [dispatch.attend(query, view, m, scaling=0.25, position_bias=bias) for m in (None, mask)]
    monkeypatch.setattr(reference_attention, "TILE_SCORES", scores)
    tiled = [dispatch.attend(query, view, m, scaling=0.25, position_bias=bias) for m in (None, mask)]
    torch.testing.assert_close(tiled, whole, atol=1e-6, rtol=0)


def test_tiling_the_keys_changes_nothing(monkeypatch):
    view, query = viewed(200, config=all_packed(sink_tokens=3), past=900), random(18, 2, 4, 200, 16)
    mask = torch.ones(2, 1, 200, view.length, dtype=torch.bool).tril(view.length - 200)
    mask[0, :, :, :500] = False
    assert view.num_blocks == 7
    whole = [dispatch.attend(query, view, m, scaling=0.25) for m in (None, mask)]
    monkeypatch.setattr(reference_attention, "TILE_BLOCKS", 2)
    monkeypatch.setattr(reference_attention, "TILE_TOKENS", 37)
    tiled = [dispatch.attend(query, view, m, scaling=0.25) for m in (None, mask)]
    torch.testing.assert_close(tiled, whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("queries", [1, 40, 340])
def test_dense_attention_is_the_same_function(queries):
    pair, query = states(19, 2, 2, 340, 16, 24), random(20, 2, 4, queries, 16)
    options = dict(scaling=0.2, softcap=6.0, s_aux=random(21, 4))
    actual = attend_dense(query, *pair, None, **options)
    torch.testing.assert_close(actual.double(), plain(query, pair, None, **options), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models_get_their_dtype_and_float32_arithmetic(dtype):
    pair = states(22, 1, 2, 305, 16, dtype=dtype)
    view = filled(CONFIG, rows(pair, 0, 300)).append(*rows(pair, 300))
    query = random(23, 1, 4, 5, 16).to(dtype)
    output = dispatch.attend(query, view, None, scaling=0.25)
    assert output.dtype == dtype
    expected = plain(query, view, None, scaling=0.25)
    # Half a unit in the last place of the output, and the rounding `dispatch.dense` adds to the dequantised states.
    unit = torch.finfo(dtype).eps
    assert (output.double() - expected).norm() / expected.norm() < unit


def test_attention_holds_no_dense_copy_of_the_history():
    view = viewed(1, batch=1, config=all_packed(), past=6000)
    tokens = []
    original = reference_attention.dequantise

    def spy(config, blocks, keys, values):
        tokens.append(keys.shape[2])
        original(config, blocks, keys, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_attention, "dequantise", spy)
        dispatch.attend(random(24, 1, 4, 1, 16), view, None, scaling=0.25)
    assert sum(tokens) == view.num_blocks * 128 and max(tokens) <= reference_attention.TILE_TOKENS < 6000
