"""What a kernel stores of a prompt, rows and channel scales, against torch: in Triton's interpreter, and on a GPU if
there is one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tq_kernels.format import loud_channels
from tq_kernels.types import ChannelScales, DenseRows, KeyValue
from transformers import LlamaConfig

from tests.support.helpers import as_bytes, slow, states
from tests.support.kernel_cases import DEVICE, child, runs_kernels
from tq_hf import TurboQuantCache, TurboQuantConfig
from tq_hf.attention import turboquant_attention
from tq_hf.codec import balance
from tq_hf.ops import backend, dispatch
from tq_hf.stores.store import LayerStore

CPU = torch.device("cpu")
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
HEADS, GROUP = 2, 3
NAN, INF = float("nan"), float("inf")

SHAPES: list[dict[str, Any]] = [
    *[dict(tokens=tokens) for tokens in (1, 31, 32, 127, 132)],
    *[dict(tokens=200, first=first) for first in (4, 190, 10**6)],
    *[dict(dims=dims, dtype=dtype) for dims, dtype in (((64, 128), FP16), ((72, 12), FP32), ((256, 40), BF16))],
    dict(tokens=1300, first=4, shown=False),
    dict(tokens=1300, first=4, padding=150),
    dict(padding=290),
]
STRANGE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "NaN": lambda x: x * NAN,
    "a NaN": lambda x: x.index_fill(2, torch.tensor([77]), NAN),
    "an infinity": lambda x: x.index_fill(2, torch.tensor([77]), -INF),
    "zero": lambda x: x * 0,
    "tiny": lambda x: x * 1e-36,
    "huge": lambda x: (x * 1e38).clamp(-3e38, 3e38),
    "loud": lambda x: x * 1000,
    "one channel": lambda x: x * (torch.arange(x.shape[-1]) == 3),
    "one token": lambda x: x * (torch.arange(x.shape[-2]) == 60)[:, None],
    "great and small": lambda x: x * 10 ** torch.linspace(-15, 15, x.shape[-1]),
}


def prompt(
    tokens: int = 300, dims: tuple[int, int] = (64, 64), dtype: torch.dtype = FP32, batch: int = 2
) -> list[torch.Tensor]:
    """Queries, keys and values whose channels differ by up to 8 times, queries' the other way, as views of
    `[B, T, H, D]`."""
    made = [
        states(0, batch, HEADS * GROUP, tokens, dims[0])[0],
        *states(1, batch, HEADS, tokens, dims[0], value_dim=dims[1]),
    ]
    signs = (-1, 1, 1)
    spread = [x * 8 ** (sign * torch.linspace(0, 1, x.shape[-1])) for x, sign in zip(made, signs, strict=True)]
    return [x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in spread]


def dense_rows(
    pair: KeyValue, sinks: int = 4, first_sink: int = 0, to_sinks: int = 0, capacity: int = 128, **other: Any
) -> DenseRows:
    """Where rows of a prompt go, by default none of them; `other` are fields."""
    keys, values = pair
    rows = keys.new_full((*keys.shape[:2], capacity + sinks, keys.shape[3] + values.shape[3]), NAN)
    fields = {"start": pair[0].shape[2], "slot": 0, "held": (0, 0, 0)} | other
    return DenseRows(rows, capacity, first_sink=first_sink, to_sinks=to_sinks, **fields)


ROWS: list[dict[str, Any]] = [
    dict(tokens=100, to_sinks=4, start=4),
    dict(tokens=300, to_sinks=4, start=132, capacity=256, slot=128, held=(4, 1, 168)),
    dict(tokens=500, to_sinks=4, start=388, capacity=256, slot=200, held=(4, 3, 112), dtype=BF16, dims=(80, 512)),
    dict(tokens=70, to_sinks=2, first_sink=2, start=2, dtype=FP16, dims=(512, 80), batch=3),
    dict(tokens=1, to_sinks=1, start=1, dtype=BF16, dims=(12, 16)),
    dict(tokens=40, sinks=0, start=0, slot=127, dtype=BF16, batch=3),
    dict(tokens=200, start=200, sinks=0),
]
"""Rows that stay dense: numbers of them, places, shapes of heads and dtypes."""


@runs_kernels
@pytest.mark.parametrize("scales", ["left", "ones", "computed"])
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_dense_rows_are_those_of_torch(case: dict[str, Any], scales: str) -> None:
    """Every buffer is what torch makes of it, and rows of nobody are untouched."""
    case = dict(case)
    made = prompt(case.pop("tokens"), **{name: case.pop(name) for name in ("dims", "dtype", "batch") if name in case})
    queries, keys, values = (x.to(DEVICE) for x in made)
    there, found = [], []
    for chosen in ("torch", ""):
        dense = dense_rows((keys, values), **case)
        kinds = ((5, 4), torch.int32), ((), torch.int64)
        counts = tuple(torch.full(shape, 7, dtype=dtype, device=DEVICE) for shape, dtype in kinds)
        dense = dense._replace(counts=counts if scales == "ones" else None)
        out = ChannelScales.allocate(*keys.shape[:2], keys.shape[3], values.shape[3], DEVICE)
        out = out.map(lambda x: x * NAN)
        given = None if scales == "left" else out
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "chosen", chosen)
            dispatch.store_prompt((keys, values), dense, given, scales == "computed", queries)
        (there if chosen else found).extend([dense.rows, *counts, *(out if scales != "computed" else ())])
    for a, b in zip(there, found, strict=True):
        assert torch.equal(as_bytes(a), as_bytes(b))
    if scales == "ones":
        assert found[1][:, 0].tolist() == [*case.get("held", (0, 0, 0)), 0, 0]


def check(made: list[torch.Tensor], first: int = 0, shown: bool = True, padding: int = 0) -> ChannelScales:
    """The kernel's channel scales, which are torch's, but for the last of their 8 bits where sums differ in the last of
    24."""
    from tq_kernels.codec.balance import ScaleInputs, store

    batch, heads, tokens, _ = made[1].shape
    valid = None
    if padding:  # of all sequences but the first
        valid = torch.ones(batch, tokens, dtype=torch.bool)
        valid[1:, :padding] = False
    queries = made[0] if shown else None
    expected = balance.channel_scales(queries, *made[1:], first=first, valid=valid)
    out = ChannelScales(*(torch.full_like(x, NAN).to(DEVICE) for x in expected))
    there = [None if x is None else x.to(DEVICE) for x in (queries, *made[1:], valid)]
    counters = torch.zeros(2 * batch * heads, device=DEVICE)
    statistics = ScaleInputs(
        there[0], there[3], first, partial(torch.empty, device=DEVICE), lambda size: counters[:size]
    )
    store((there[1], there[2]), dense_rows((there[1], there[2])), out, statistics)
    assert not counters.any()
    found = out.map(lambda x: x.cpu())
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, a.bfloat16().half())
        assert ((a / b - 1).abs() <= 2**-7).all()
        assert (a == b).float().mean() > 0.98
    return found


test_all_cases_in_the_interpreter = child(__file__)


@runs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_channel_scales_are_those_of_torch(shape: dict[str, Any]) -> None:
    call = {name: shape[name] for name in ("first", "shown", "padding") if name in shape}
    found = check(prompt(**{name: shape[name] for name in shape.keys() - call.keys()}), **call)
    enough, shown = shape.get("tokens", 300) >= 32, shape.get("shown", True)
    assert (found.values != 1).any() == enough
    assert (found.keys.abs() != 1).any() == (enough and shown)
    assert ((found.keys < 0).sum(-1) == loud_channels(found.keys.shape[-1])).all()


@runs_kernels
@pytest.mark.parametrize("which", [0, 1, 2], ids=["queries", "keys", "values"])
@pytest.mark.parametrize("what", STRANGE)
def test_strange_states(what: str, which: int) -> None:
    made = prompt(tokens=200, batch=1)
    made[which] = STRANGE[what](made[which])
    for factor in check(made, first=4):
        assert ((factor.abs() >= 2.0**-11) & (factor.abs() <= 2.0**12)).all()


@runs_kernels
def test_a_batch_equals_its_rows() -> None:
    """A sequence's channel scales depend on that sequence alone, to the last bit."""
    made = prompt(tokens=400, batch=3)
    made[1] = made[1] * torch.tensor([0.001, 1, 1000])[:, None, None, None]
    together = check(made)
    for row in range(3):
        alone = check([x[row : row + 1] for x in made])
        assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(alone, together, strict=True))


@runs_kernels
def test_a_store_asks_for_them() -> None:
    """A store asks for them, with the sinks left out and the padding that the mask shows."""
    queries, keys, values = (x.to(DEVICE) for x in prompt(tokens=500, dtype=FP16))
    store = LayerStore.allocate(TurboQuantConfig(), keys, values)
    store.append(keys, values, defer=True)
    attended = torch.ones(1, 500, dtype=torch.bool, device=DEVICE)
    attended[:, :200] = False
    store.encode_deferred(queries, attended)
    expected = balance.channel_scales(
        queries.cpu(), keys.cpu(), values.cpu(), first=4, valid=attended.cpu().expand(2, -1)
    )
    for a, b in zip(store.blocks.channel_scales, expected, strict=True):
        assert ((a.cpu() / b - 1).abs() <= 2**-7).all() and (a != 1).any()


@runs_kernels
def test_queries_of_other_tokens_are_refused() -> None:
    """They are refused: the kernel would read behind them. Nothing is written."""
    from tq_kernels.codec.balance import ScaleInputs, store

    queries, *pair = (x.to(DEVICE) for x in prompt(tokens=300))
    out = ChannelScales.allocate(2, HEADS, 64, 64, DEVICE).map(lambda x: x * NAN)
    valid, zeros = torch.ones(2, 300, dtype=torch.bool, device=DEVICE), torch.zeros(2 * 2 * HEADS, device=DEVICE)
    wrong = [(queries[:, :, :n], None) for n in (1, 8, 299)] + [(torch.cat([queries, queries], 2), None)]
    wrong += [(queries[:1], None), (queries[:, :4], valid[:, :299]), (None, valid[:, :26])]
    for shown, attended in wrong:
        statistics = ScaleInputs(shown, attended, 4, partial(torch.empty, device=DEVICE), lambda size: zeros[:size])
        with pytest.raises(ValueError, match=r"are not of the tokens of keys \[2, 2, 300, 64\]. Give those"):
            store((pair[0], pair[1]), dense_rows((pair[0], pair[1])), out, statistics)
        if shown is None or shown.shape[2] != 300:
            with pytest.raises(ValueError, match="Channel scales of 300 keys need"):
                dispatch.store_prompt((pair[0], pair[1]), dense_rows((pair[0], pair[1])), out, True, shown, attended)
    assert out.keys.isnan().all() and out.values.isnan().all()


@runs_kernels
@pytest.mark.parametrize(
    ("queries", "tokens", "padding"),
    [(1, 34, 0), (8, 200, 60), (200, 200, 0), slow(1, 1500, 200)],
    ids=lambda number: str(number),
)
def test_queries_of_other_tokens_decide_nothing(queries: int, tokens: int, padding: int) -> None:
    """Scales of a first call whose queries are of other tokens are those without queries, whatever lies behind them."""
    shown, *pair = (x.to(DEVICE) for x in prompt(tokens=tokens, dtype=FP16))
    mask = torch.ones(2, 1, queries, tokens, dtype=torch.bool, device=DEVICE)
    mask[1, ..., tokens - padding :] = False
    module = torch.nn.Module()
    vars(module).update(is_causal=False, num_key_value_groups=GROUP)
    cache = TurboQuantCache(
        LlamaConfig(hidden_size=384, num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=2)
    )
    turboquant_attention(module, shown[:, :, :queries], *cache.update(pair[0], pair[1], 0), mask)
    expected = balance.channel_scales(None, pair[0].cpu(), pair[1].cpu(), first=4, valid=mask[:, 0, -1].cpu())
    for a, b in zip(cache.layers[0].store.blocks.channel_scales, expected, strict=True):
        assert ((a.cpu() / b - 1).abs() <= 2**-7).all()


def test_wide_heads_are_left_to_torch() -> None:
    """Of more than 256 channels, as is everything of theirs."""
    made = prompt(dims=(264, 8), tokens=64)
    out = ChannelScales.allocate(2, HEADS, 264, 8, CPU)
    pair = made[1], made[2]
    dispatch.store_prompt(pair, dense_rows(pair), out, True, made[0])
    assert all(torch.equal(a, b) for a, b in zip(out, balance.channel_scales(*made, first=0), strict=True))
