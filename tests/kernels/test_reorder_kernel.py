"""Sequences that change places, where they lie: in Triton's interpreter, and on a GPU if there is one."""

from __future__ import annotations

import pytest
import torch

from tests.support.helpers import all_packed, filled, states
from tests.support.kernel_cases import DEVICE, INTERPRETED, child, gpu, runs_kernels
from tq_hf.ops import dispatch
from tq_hf.ops.backend import HAS_TRITON
from tq_hf.ops.triton import blocks as triton_blocks
from tq_hf.stores.store import LayerStore
from tq_hf.tensors.layer import LayerTensors

CPU = torch.device("cpu")
ORDERS = [[0], [0, 1], [1, 0], [2, 0, 0], [1, 2, 3, 0], [0, 0, 1, 2], [6, 6, 2, 3, 3, 0, 5], [*range(16, -1, -1)]]
ORDERS += [] if INTERPRETED else [[*range(1, 256), 0]]


def tensors_of(batch: int, device: torch.device, longest: int) -> list[torch.Tensor]:
    """Tensors of several dtypes and sizes: less than a piece of a program, several, and nothing."""
    generator = torch.Generator().manual_seed(batch)
    kinds = [(0, torch.float16), (3, torch.float32), (longest, torch.int32), (700, torch.bfloat16), (40, torch.float16)]
    made = [torch.randint(-99, 99, (batch, 2, size, 8), generator=generator).to(dtype) for size, dtype in kinds]
    return [tensor.to(device) for tensor in made]


def check(order: list[int], device: torch.device, longest: int = 300) -> None:
    from tq_kernels.decode.reorder import ReorderLaunch

    tensors = tensors_of(len(order), device, longest)
    for dtype in (torch.int64, torch.int32):
        sources = torch.tensor(order, device=device, dtype=dtype)
        expected, places = [x[sources.long()] for x in tensors], [x.data_ptr() for x in tensors]
        reorderer = ReorderLaunch(tensors)
        assert reorderer.takes
        reorderer(sources)
        assert [x.data_ptr() for x in tensors] == places
        for tensor, want in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, want)


test_all_cases_in_the_interpreter = child(__file__)


@runs_kernels
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: str(order[:8]))
def test_sequences_are_where_they_were_asked_to_be(order: list[int]) -> None:
    """On a GPU there are more pieces than programs, too."""
    check(order, DEVICE, 300 if INTERPRETED else 2_000_000 // len(order))


if INTERPRETED:

    @pytest.mark.parametrize("order", [[0, 2], [-1, 1]], ids=str)
    def test_a_sequence_that_does_not_exist_is_not_read(order: list[int]) -> None:
        """On a GPU the launch also fails, which the interpreter does not show."""
        from tq_kernels.decode.reorder import ReorderLaunch

        tensors = tensors_of(2, CPU, 10)
        before = [tensor.clone() for tensor in tensors]
        ReorderLaunch(tensors)(torch.tensor(order))
        assert all(map(torch.equal, tensors, before))


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize(
    "tensors",
    [
        [torch.zeros(2, 3, 5, dtype=torch.float16)],  # 30 bytes a sequence
        [torch.zeros(2, 8, 4).transpose(1, 2)],
        [torch.zeros(300, 4)],
        [torch.zeros(2, 4)] * 11,
        [torch.zeros(9)[1:].view(2, 4)],
    ],
    ids=["half a unit", "not contiguous", "many sequences", "many tensors", "not aligned"],
)
def test_tensors_that_torch_reorders(tensors: list[torch.Tensor]) -> None:
    from tq_kernels.decode.reorder import ReorderLaunch

    assert not ReorderLaunch(tensors).takes


def check_store(preallocated: bool, dims: tuple[int, int], device: torch.device) -> LayerTensors:
    config = all_packed(sink_tokens=4)
    made = states(0, batch=3, heads=1, tokens=300, dim=dims[0], value_dim=dims[1], dtype=torch.float16)
    pair = (made[0].to(device), made[1].to(device))
    store: LayerStore = filled(config, pair)
    if preallocated:
        store = LayerStore.allocate(config, *pair, 400)
        store.append(*pair)
    order = torch.tensor([2, 0, 0], device=device)
    places = [tensor.data_ptr() for tensor in store.tensors.arguments()]
    expected = [states[order] for states in dispatch.dense(store.view())]
    store.reorder(order)
    assert [tensor.data_ptr() for tensor in store.tensors.arguments()] == places
    assert all(map(torch.equal, dispatch.dense(store.view()), expected))
    return store.tensors


DIMS = [(64, 64), (8, 12), (5, 3)]
"""Torch moves sequences of all but the first: the interpreter has nothing to do."""


@pytest.mark.parametrize("dims", DIMS[:1] if INTERPRETED else DIMS, ids=str)
@pytest.mark.parametrize("preallocated", [False, True])
def test_a_store_is_reordered_in_place(preallocated: bool, dims: tuple[int, int]) -> None:
    """By the kernel or, of tensors that it does not take, by torch: every tensor stays."""
    tensors = check_store(preallocated, dims, CPU)
    assert triton_blocks.supports_reorder(tensors) == (INTERPRETED and dims == (64, 64))


@gpu
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("preallocated", [False, True])
def test_a_store_is_reordered_in_place_on_a_gpu(preallocated: bool, dims: tuple[int, int]) -> None:
    tensors = check_store(preallocated, dims, torch.device("cuda", 0))
    assert triton_blocks.supports_reorder(tensors) == (dims == (64, 64))
