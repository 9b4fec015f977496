"""Attention tile by tile equals the oracle: a float64 softmax over what the store dequantizes to."""

from dataclasses import replace

import pytest
import torch
from tq_kernels.types import AttentionOptions

from tests.support.helpers import CPU, all_packed, assert_same, dequantized, encoded, every_pair, filled, rows, states
from tq_hf import PRESETS, TurboQuantConfig
from tq_hf.codec import codebook
from tq_hf.ops import dispatch, reference, workspace
from tq_hf.ops.cpu import attention as cpu_attention
from tq_hf.ops.cpu import packed
from tq_hf.ops.cpu.attention import attend_dense
from tq_hf.stores.store import LayerStore
from tq_hf.tensors.layer import View

CONFIG = TurboQuantConfig(residual_length=60, sink_tokens=4)
HEADS = {"MHA": (2, 2), "GQA": (6, 2), "MQA": (4, 1)}
PAST = 300


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def viewed(
    queries: int, heads: int = 2, batch: int = 2, dim: int = 16, value_dim: int = 16, config=CONFIG, past: int = PAST
) -> View:
    """A view of `past` cached tokens and `queries` new ones."""
    pair = states(queries, batch, heads, past + queries, dim, value_dim)
    store = LayerStore.allocate(config, *pair)
    store.append(*rows(pair, 0, past))
    return store.append(*rows(pair, past))


def assert_attends(query, view, mask=None, **options) -> torch.Tensor:
    options = dict(scaling=query.shape[-1] ** -0.5) | options
    actual = dispatch.attend(query, view, mask, AttentionOptions(**options))
    expected = reference.attend(query, view, mask, AttentionOptions(**options))
    assert actual.dtype == query.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected, atol=3e-6, rtol=1e-5)
    return actual


@pytest.mark.parametrize("queries", [1, 5, 200])
@pytest.mark.parametrize("kind", HEADS)
def test_attention_is_the_softmax_over_what_is_stored(kind, queries):
    query_heads, heads = HEADS[kind]
    view = viewed(queries, heads)
    assert view.host_counts.blocks > 0
    assert_attends(random(1, 2, query_heads, queries, 16), view)


@pytest.mark.parametrize("queries", [1, 5])
def test_a_mask_of_none_is_bottom_right_causal_or_full(queries):
    view, query = viewed(queries), random(2, 2, 4, queries, 16)
    causal, full = assert_attends(query, view), assert_attends(query, view, causal=False)
    assert torch.equal(causal[:, -1], full[:, -1])
    if queries > 1:
        assert not torch.allclose(causal[:, 0], full[:, 0], atol=1e-3)
        longer = torch.ones(queries, view.length, dtype=torch.bool).tril(view.length - queries)[None, None]
        torch.testing.assert_close(
            causal, dispatch.attend(query, view, longer, AttentionOptions(0.25)), atol=1e-6, rtol=0
        )


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
    assert not torch.allclose(capped, dispatch.attend(query, view, None, AttentionOptions(0.25)), atol=1e-2)


def test_learned_sinks_take_weight_and_give_no_value():
    view, query = viewed(3), random(7, 2, 4, 3, 16)
    with_sinks = assert_attends(query, view, s_aux=torch.tensor([-2.0, 0.0, 4.0, 9.0]))
    without = assert_attends(query, view)
    assert (with_sinks[:, :, 3].norm() < 0.2 * without[:, :, 3].norm()).all()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
@pytest.mark.parametrize(("batch", "heads", "queries"), [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 3)])
def test_learned_sinks_are_left_as_they_are(batch, heads, queries, packed):
    """They are a parameter of the model. Of one sequence or one KV head they need no rearranging."""
    view, query, sinks = viewed(queries, heads, batch), random(7, batch, 4, queries, 16), random(8, 4)
    before = sinks.clone()
    if packed:
        assert_attends(query, view, s_aux=sinks)
    else:
        attend_dense(query, dispatch.dense(view), None, AttentionOptions(0.25, s_aux=sinks))
    assert torch.equal(sinks, before)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 4)])
def test_position_bias_is_added_per_head_beside_everything_else(shape):
    view, query = viewed(3), 4 * random(8, 2, 4, 3, 16)
    bias = random(9, *shape, 3, view.length + 2)
    assert_attends(query, view, position_bias=bias)
    mask = torch.ones(2, 1, 3, view.length, dtype=torch.bool).tril(view.length - 3)
    mask[1, :, :, :20] = False
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
    assert dispatch.attend(query, view, None, AttentionOptions(1.0)).isfinite().all()
    assert_attends(query, view, scaling=0.1)


@pytest.mark.parametrize("name", ["4bit_nc", "k8v4"])
@pytest.mark.parametrize("scores", [1, 4000, 10_000, 16 * 2048 * 7])
def test_tiling_the_queries_changes_nothing(name, scores, monkeypatch):
    view, query = viewed(50, config=all_packed(**bits_of(name))), random(16, 2, 4, 50, 16)
    mask = torch.ones(2, 4, 50, view.length, dtype=torch.bool).tril(view.length - 50)
    mask[:, 1, :, 10:90] = False
    bias = random(17, 2, 4, 50, view.length)
    whole = [dispatch.attend(query, view, m, AttentionOptions(0.25, position_bias=bias)) for m in (None, mask)]
    monkeypatch.setattr(cpu_attention, "TILE_SCORES", scores)
    tiled = [dispatch.attend(query, view, m, AttentionOptions(0.25, position_bias=bias)) for m in (None, mask)]
    torch.testing.assert_close(tiled, whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("scores", [1, 2 * 4 * 300, 1 << 22])
@pytest.mark.parametrize("queries", [1, 5, 200])
def test_tiling_the_keys_changes_nothing(queries, scores, monkeypatch):
    """Of a few queries, the scores of several tiles are held together, as many as there is room for."""
    view, query = viewed(queries, config=all_packed(sink_tokens=3), past=900), random(18, 2, 4, queries, 16)
    mask = torch.ones(2, 1, queries, view.length, dtype=torch.bool).tril(view.length - queries)
    mask[0, :, :, :500] = False
    assert view.host_counts.blocks == 7
    whole = [dispatch.attend(query, view, m, AttentionOptions(0.25)) for m in (None, mask)]
    monkeypatch.setattr(cpu_attention, "TILE_NUMBERS", 2 * 4 * 128 * 16)  # two blocks
    monkeypatch.setattr(cpu_attention, "TILE_TOKENS", 37)
    monkeypatch.setattr(cpu_attention, "TILE_SCORES", scores)
    tiled = [dispatch.attend(query, view, m, AttentionOptions(0.25)) for m in (None, mask)]
    torch.testing.assert_close(tiled, whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("queries", [1, 40, 340])
def test_dense_attention_is_the_same_function(queries):
    pair, query = states(19, 2, 2, 340, 16, 24), random(20, 2, 4, queries, 16)
    options = dict(scaling=0.2, softcap=6.0, s_aux=random(21, 4))
    actual = attend_dense(query, pair, None, AttentionOptions(**options))
    torch.testing.assert_close(
        actual.double(), reference.attend(query, pair, None, AttentionOptions(**options)), atol=3e-6, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models_get_their_dtype_and_float32_logits(dtype):
    pair = states(22, 1, 2, 305, 16, dtype=dtype)
    view = filled(CONFIG, rows(pair, 0, 300)).append(*rows(pair, 300))
    query = random(23, 1, 4, 5, 16).to(dtype)
    output = dispatch.attend(query, view, None, AttentionOptions(0.25))
    assert output.dtype == dtype
    expected = reference.attend(query, view, None, AttentionOptions(0.25))
    # Half a unit in the last place of the output, and the rounding `dispatch.dense` adds to the dequantized states.
    unit = torch.finfo(dtype).eps
    assert (output.double() - expected).norm() / expected.norm() < unit


@pytest.mark.parametrize("queries", [1, 300])
@pytest.mark.parametrize("name", PRESETS)
def test_scratch_is_that_of_a_tile_however_long_the_history(name, queries, monkeypatch):
    """4 MiB of levels for keys and as much for values, as much again by token for many queries, indices, scores."""

    def scratch(past: int) -> int:
        workspace.release_workspaces()
        view = viewed(queries, batch=1, heads=1, config=all_packed(**bits_of(name)), past=past)
        before = workspace.current_workspace(CPU).nbytes
        dispatch.attend(random(24, 1, 2, queries, 16), view, None, AttentionOptions(0.25))
        return workspace.current_workspace(CPU).nbytes - before

    monkeypatch.setattr(cpu_attention, "TILE_NUMBERS", 4 * 128 * 16)
    few, many = scratch(1000), scratch(6000)
    assert 0 < few == many < 6 * 4 * cpu_attention.TILE_NUMBERS


def bits_of(name: str) -> dict[str, int]:
    return {"key_bits": PRESETS[name].key_bits, "value_bits": PRESETS[name].value_bits}


@pytest.mark.parametrize(
    ("name", "dims", "queries"), every_pair(PRESETS, ((128, 128), (80, 40), (36, 100)), (1, 4, 5, 40))
)
def test_every_preset_reads_what_it_stored(name, dims, queries):
    """Few queries are arranged like the levels of keys, many have the keys arranged like themselves."""
    dim, value_dim = dims
    view = viewed(queries, dim=dim, value_dim=value_dim, config=all_packed(**bits_of(name)), past=700)
    assert view.host_counts.blocks == 5
    assert_attends(random(25, 2, 4, queries, dim), view)


@pytest.mark.parametrize(("name", "dims", "queries"), every_pair(PRESETS, ((64, 64), (36, 100)), (1, 4, 40)))
def test_every_preset_is_read_by_a_bfloat16_model(name, dims, queries, monkeypatch):
    """Products are in bfloat16 then where the processor has them, which is said here to be so on any."""
    dim, value_dim = dims
    monkeypatch.setattr(cpu_attention, "_products", lambda states: states.dtype)
    config = replace(CONFIG, **bits_of(name))
    pair = states(33, 2, 2, 700 + queries, dim, value_dim, dtype=torch.bfloat16)
    view = filled(config, rows(pair, 0, 700)).append(*rows(pair, 700))
    mask = torch.ones(2, 1, queries, view.length, dtype=torch.bool).tril(view.length - queries)
    mask[0, :, :, :137] = False
    loud = 4 * random(34, 2, 6, queries, dim).bfloat16()
    for query, columns in ((loud, None), (loud / 4, mask)):
        options = AttentionOptions(dim**-0.5)
        output = dispatch.attend(query, view, columns, options)
        expected = reference.attend(query, view, columns, options)
        assert output.dtype == torch.bfloat16
        assert (output.double() - expected).norm() / expected.norm() < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_bfloat16_has_every_level(bits):
    exact = codebook.levels(bits, torch.device("cpu"))
    assert torch.equal(exact.bfloat16().float(), exact)
    coarse = packed.table(bits, torch.bfloat16, exact.device).view(torch.bfloat16)
    assert torch.equal(coarse.float().unique(), exact.unique())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("room", [None, 1000], ids=["growing", "preallocated"])
def test_steps_over_the_seam_of_the_ring_read_every_row(room, dtype):
    """The residual of a step that follows many others is in two parts of its ring."""
    pair, query = states(35, 2, 2, 720, 16, dtype=dtype), random(36, 2, 6, 1, 16).to(dtype)
    store = LayerStore.allocate(CONFIG, *pair, room)
    store.append(*rows(pair, 0, 440))
    seams, options = 0, AttentionOptions(0.25)
    for token in range(440, 720):
        view = store.append(*rows(pair, token, token + 1))
        if room is not None:
            output = dispatch.attend(query, view, None, options)
            view = dispatch.on_host(view)
        elif token % 7 == 0:
            output = dispatch.attend(query, view, None, options)
        if token % 7:
            continue
        seams += len(view.dense_parts()) > 2
        expected = reference.attend(query, view, None, options)
        assert (output.double() - expected).norm() / expected.norm() < torch.finfo(dtype).eps * 8
    assert seams > 3


def test_a_store_may_have_room_after_what_is_read():
    """Blocks of a head are then not next to those of the next head."""
    view = viewed(1, config=all_packed(), past=500)
    blocks = view.tensors.blocks.resized(9, view.host_counts.blocks)
    roomy = view._replace(tensors=replace(view.tensors, blocks=blocks))
    query = random(28, 2, 4, 1, 16)
    assert torch.equal(assert_attends(query, roomy), dispatch.attend(query, view, None, AttentionOptions(0.25)))


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_gradients_reach_the_query(packed, softcap):
    view = viewed(3, config=all_packed(), past=900)
    query, expected_query = (random(29, 2, 4, 3, 16).requires_grad_() for _ in range(2))
    weights, options = random(30, 2, 3, 4, 16), dict(scaling=0.25, softcap=softcap, s_aux=random(31, 4))
    with torch.enable_grad():
        pair = dispatch.dense(view)
        out = (
            dispatch.attend(query, view, None, AttentionOptions(**options))
            if packed
            else attend_dense(query, pair, None, AttentionOptions(**options))
        )
        (out * weights).sum().backward()
        (reference.attend(expected_query, view, None, AttentionOptions(**options)) * weights).sum().backward()
    torch.testing.assert_close(query.grad, expected_query.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", PRESETS)
def test_dequantizing_by_tables_gives_the_bits_of_the_reference(name, monkeypatch):
    config = PRESETS[name]
    blocks = encoded(config, *states(32, 2, 3, 5 * 128, 40, 24))
    monkeypatch.setattr(cpu_attention, "TILE_NUMBERS", 2 * 6 * 128 * 40)
    expected = dequantized(config, blocks)
    actual = tuple(torch.empty_like(part) for part in expected)
    dispatch.dequantize(config, blocks, *actual)
    assert_same(actual, expected)
